//! Limits what a pod's interface receives and sends, by token buckets of the kernel's traffic control.
//!
//! What leaves by the device beside the interface, the pod receives; what leaves by the interface, the pod sends. So
//! each direction has a bucket (`tbf`) where its packets leave. The bucket delays packets above the rate, and drops
//! only those that exceed its queue.

use std::io;

use sandboxer_netlink::{
    DefaultNla, NLM_F_CREATE, Netlink,
    packet::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcHandle, TcMessage, TcOption},
    },
};
use sandboxer_vmm::Rate;
use serde::{Deserialize, Serialize};

use super::{egress::Egress, link::unknown};

/// Limits of each of a pod's interfaces, bytes with Ethernet headers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetLimits {
    /// The limit of traffic to the pod.
    pub received: Option<Rate>,
    /// The limit of traffic from the pod.
    pub sent: Option<Rate>,
    /// Where the pod may send packets to; `None`: everywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
}

impl NetLimits {
    /// Returns whether there are no limits.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// The handle of this daemon's buckets. A bucket with another handle is never replaced.
const HANDLE: TcHandle = TcHandle { major: 0xdb0f, minor: 0 };

/// The queue holds the traffic of one second divided by this, so that it adds little delay.
const QUEUE_PARTS: u64 = 10;

/// The least length of the queue, bytes: two packets with segmentation offload.
const LEAST_QUEUE: u64 = 128 << 10;

/// `TC_LINKLAYER_ETHERNET` of linux/pkt_sched.h: the kernel computes times itself, without a table.
const ETHERNET: u8 = 1;

// Attributes of linux/pkt_sched.h.
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;

/// Limits what leaves by device `index`; replaces an earlier limit of this daemon.
pub fn limit(netlink: &mut Netlink, index: u32, rate: Rate) -> io::Result<()> {
    let mut qdisc = TcMessage::with_index(index.cast_signed());
    qdisc.header.parent = TcHandle::ROOT;
    qdisc.header.handle = HANDLE;
    qdisc.attributes.push(TcAttribute::Kind("tbf".to_owned()));
    qdisc.attributes.push(TcAttribute::Options(options(rate)));
    // Without NLM_F_REPLACE the kernel changes only the bucket with this handle.
    match netlink.request(RouteNetlinkMessage::NewQueueDiscipline(qdisc), NLM_F_CREATE) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(io::Error::new(
            error.kind(),
            "it has a root qdisc of another program: remove it, or the pod's limits of the network",
        )),
        limited => limited.map_err(|error| unknown("the token bucket filter (sch_tbf)", error)),
    }
}

/// Returns `struct tc_tbf_qopt`, and the options that have no place in it.
fn options(Rate { per_second, burst }: Rate) -> Vec<TcOption> {
    let queue = (per_second / QUEUE_PARTS).max(LEAST_QUEUE);
    let mut parameters = Vec::with_capacity(36);
    // The rate's `struct tc_ratespec`.
    parameters.extend([0, ETHERNET, 0, 0, 0, 0, 0, 0]);
    parameters.extend(narrow(per_second).to_ne_bytes());
    // An empty `struct tc_ratespec`: there is no peak rate.
    parameters.extend([0; 12]);
    parameters.extend(narrow(queue).to_ne_bytes());
    // Burst and MTU in ticks are unused: the attribute has priority.
    parameters.extend([0; 8]);
    [
        (TCA_TBF_PARMS, parameters),
        (TCA_TBF_RATE64, per_second.to_ne_bytes().to_vec()),
        (TCA_TBF_BURST, narrow(burst).to_ne_bytes().to_vec()),
    ]
    .map(|(kind, value)| TcOption::Other(DefaultNla::new(kind, value)))
    .into()
}

fn narrow(value: u64) -> u32 {
    value.try_into().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use sandboxer_netlink::Nla;

    use super::super::{link, namespace, tap};
    use super::*;

    /// Runs `work` in a new network namespace with one tap, whose index it passes.
    fn with_tap<T: Send>(work: impl FnOnce(&mut Netlink, u32) -> io::Result<T> + Send) -> io::Result<T> {
        namespace::within(namespace::fresh()?, || {
            let _tap: OwnedFd = tap::open(c"one")?;
            let mut netlink = Netlink::open()?;
            let one = link::bring_up(&mut netlink, "one", 1500)?;
            work(&mut netlink, one)
        })
    }

    /// Returns the rate and queue of the device's bucket, as reported by the kernel.
    fn read_buckets(netlink: &mut Netlink, index: u32) -> io::Result<Vec<(u32, u32)>> {
        let all = netlink.dump(RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default()))?;
        let buckets = all.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewQueueDiscipline(qdisc)
                if qdisc.header.index == index.cast_signed() && qdisc.header.handle == HANDLE =>
            {
                qdisc.attributes.into_iter().find_map(|attribute| match attribute {
                    TcAttribute::Options(options) => options.into_iter().next(),
                    _ => None,
                })
            }
            _ => None,
        });
        let word = |bytes: &[u8], at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        Ok(buckets
            .map(|options| {
                let mut bytes = vec![0; options.value_len()];
                options.emit_value(&mut bytes);
                // The values follow the attribute's own header of four bytes.
                (word(&bytes, 4 + 8), word(&bytes, 4 + 24))
            })
            .collect())
    }

    #[test]
    fn a_limit_is_the_kernels_and_can_be_changed() {
        with_tap(|netlink, one| {
            limit(netlink, one, Rate { per_second: 3 << 20, burst: 6 << 20 })?;
            assert_eq!(read_buckets(netlink, one)?, [(3 << 20, (3 << 20) / 10)]);
            limit(netlink, one, Rate::plain(64 << 10))?;
            assert_eq!(read_buckets(netlink, one)?, [(64 << 10, 128 << 10)]);
            // 80 Gbit/s do not fit in a field of 32 bits.
            limit(netlink, one, Rate { per_second: 10 << 30, burst: u64::from(u32::MAX) })?;
            assert_eq!(read_buckets(netlink, one)?, [(u32::MAX, 1 << 30)]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_root_qdisc_of_somebody_elses_is_kept_and_named() {
        with_tap(|netlink, one| {
            let mut theirs = TcMessage::with_index(one.cast_signed());
            theirs.header.parent = TcHandle::ROOT;
            theirs.header.handle = TcHandle { major: 1, minor: 0 };
            theirs.attributes.push(TcAttribute::Kind("pfifo".to_owned()));
            netlink.request(RouteNetlinkMessage::NewQueueDiscipline(theirs), NLM_F_CREATE)?;
            let error = limit(netlink, one, Rate::plain(1 << 20)).unwrap_err();
            assert!(error.to_string().contains("a root qdisc of another program"), "{error}");
            assert_eq!(read_buckets(netlink, one)?, []);
            Ok(())
        })
        .unwrap();
    }
}
