//! The traffic of a pod's interfaces, for people.

use std::time::Duration;

use sandboxer_base::chain;
use sandboxer_host::network::traffic::{self, Counters, Traffic};
use sandboxer_protocol::admin::{Interface, Traffic as Message};
use tokio::time::Instant;

use crate::pod::PodView;

/// Interval over which rates are measured.
const OVER: Duration = Duration::from_millis(200);

/// The traffic of a pod's interfaces, in the order of the pod's status; empty if the pod has no interfaces or was
/// removed meanwhile.
#[derive(Debug, Default)]
pub struct PodTraffic {
    traffic: Vec<(Traffic, Traffic)>,
    over: Duration,
    offloads: Vec<Vec<&'static str>>,
}

/// Reads the counters twice and computes the rates.
pub async fn read(view: &PodView) -> PodTraffic {
    let (Some(netns), [_, ..]) = (&view.spec.netns, view.status.interfaces.as_slice()) else {
        return PodTraffic::default();
    };
    let (pod, interfaces, vmm) = (&view.spec.id, &view.status.interfaces, view.status.vmm_pid);
    let looked = async {
        let first = traffic::read(pod, netns, interfaces).await?;
        let since = Instant::now();
        tokio::time::sleep(OVER).await;
        let second = traffic::read(pod, netns, interfaces).await?;
        Ok::<_, crate::error::PodError>((first.into_iter().zip(second).collect(), since.elapsed()))
    };
    let (traffic, over) = match looked.await {
        Ok(looked) => looked,
        Err(error) => {
            tracing::debug!(%pod, error = chain(&error), "cannot read the counters of the pod's interfaces");
            return PodTraffic::default();
        }
    };
    let offloads = tokio::task::spawn_blocking(move || traffic::offloads(vmm)).await;
    let offloads =
        offloads.unwrap_or_else(|ended| Err(std::io::Error::other(ended))).unwrap_or_else(|error| {
            tracing::debug!(%pod, %error, "cannot read the counters of the pod's network cards");
            Vec::new()
        });
    PodTraffic { traffic, over, offloads }
}

impl PodTraffic {
    /// Adds the traffic to the interfaces' messages.
    pub fn add_to(self, interfaces: &mut [Interface]) {
        for (interface, (before, now)) in interfaces.iter_mut().zip(&self.traffic) {
            interface.received = Some(message(before.received, now.received, self.over));
            interface.sent = Some(message(before.sent, now.sent, self.over));
        }
        for (interface, offloads) in interfaces.iter_mut().zip(self.offloads) {
            interface.offloads = offloads.into_iter().map(str::to_owned).collect();
        }
    }
}

fn message(before: Counters, now: Counters, over: Duration) -> Message {
    let rate =
        |before: u64, now: u64| (now.saturating_sub(before) as f64 / over.as_secs_f64()).round() as u64;
    Message {
        bytes: now.bytes,
        packets: now.packets,
        dropped: now.dropped,
        errors: now.errors,
        bytes_per_second: rate(before.bytes, now.bytes),
        packets_per_second: rate(before.packets, now.packets),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        let counters = |bytes, packets| Counters { bytes, packets, ..Default::default() };
        let first = message(counters(1000, 10), counters(3000, 14), Duration::from_millis(500));
        assert_eq!((first.bytes, first.bytes_per_second), (3000, 4000));
        assert_eq!((first.packets, first.packets_per_second), (14, 8));
        let again = message(counters(1000, 10), counters(0, 0), Duration::from_millis(500));
        assert_eq!(again.bytes_per_second, 0, "an interface that was created again");
    }
}
