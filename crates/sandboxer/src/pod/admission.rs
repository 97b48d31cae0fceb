//! Bounds the number of concurrent starts. Further starts wait in FIFO order.
//!
//! There are two gates, for two kinds of work that compete for processors: VMs that boot or are restored, and disks
//! that are built from container images. A pod that takes a VM from the pool does not pass the first gate.
//!
//! No permit is held across a call to a guest in which a container has run: such a guest may respond as slowly as it
//! likes, and its work uses its own processors. So a container's permit is released when its disks are built, before
//! they are attached. A VM's permit is held until its agent has responded: until then all code in it is ours, and
//! `vm.boot_timeout` bounds it. Network namespaces need no gate: containerd has created them before the pod starts
//! here, and the few calls that connect taps to them are serialised by the kernel's own lock (by the code; not
//! measured).

use std::time::Duration;

use tokio::{
    sync::{Semaphore, SemaphorePermit, watch},
    time::timeout,
};

/// The kinds of work that have gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Booting or restoring a VM.
    Vm,
    /// Building the disks of a container.
    Container,
}

/// Gates with a number of permits each. A waiter that is dropped leaves the queue.
#[derive(Debug)]
pub struct Admission {
    // tokio's semaphores are fair: permits are granted in FIFO order.
    vms: Semaphore,
    containers: Semaphore,
    under_way: watch::Sender<usize>,
}

/// Marks work that a caller waits for, until it is dropped.
#[derive(Debug)]
pub struct Urgent<'a>(&'a watch::Sender<usize>);

impl Drop for Urgent<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Admission {
    /// Creates gates for this many VMs and containers at once, at least one each.
    pub fn new(vms: usize, containers: usize) -> Self {
        Self {
            vms: Semaphore::new(vms.max(1)),
            containers: Semaphore::new(containers.max(1)),
            under_way: watch::Sender::new(0),
        }
    }

    /// Waits for a permit, which is released when it is dropped.
    pub async fn enter(&self, work: Work) -> Option<SemaphorePermit<'_>> {
        let gate = match work {
            Work::Vm => &self.vms,
            Work::Container => &self.containers,
        };
        // Never closed. If it were, work would pass without a gate.
        gate.acquire().await.ok()
    }

    /// Records that a caller waits, until the returned value is dropped.
    pub fn urgent(&self) -> Urgent<'_> {
        self.under_way.send_modify(|count| *count += 1);
        Urgent(&self.under_way)
    }

    /// Waits until no caller has waited for at least `lull`. A start consists of several calls with short gaps: work
    /// that begins in such a gap competes with the next call.
    pub async fn quiet(&self, lull: Duration) {
        let mut under_way = self.under_way.subscribe();
        loop {
            // An error means that `self` is gone, and all work with it.
            let _ = under_way.wait_for(|&count| count == 0).await;
            if timeout(lull, under_way.wait_for(|&count| count > 0)).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_start_that_gives_up_frees_its_place_in_the_queue() {
        let gates = Admission::new(1, 1);
        let first = gates.enter(Work::Vm).now_or_never().flatten();
        assert!(first.is_some());
        assert!(gates.enter(Work::Container).now_or_never().is_some(), "one gate holds up the other");
        let mut second = Box::pin(gates.enter(Work::Vm));
        let mut third = Box::pin(gates.enter(Work::Vm));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        drop(second);
        drop(first);
        assert!(third.now_or_never().is_some(), "the place went to a start that had left");
    }

    #[tokio::test(start_paused = true)]
    async fn quiet_is_when_nobody_has_waited_for_a_while() {
        const LULL: Duration = Duration::from_millis(50);
        let gates = Admission::new(1, 1);
        let (one, two) = (gates.urgent(), gates.urgent());
        let mut quiet = Box::pin(gates.quiet(LULL));
        let pass = |ms| tokio::time::sleep(Duration::from_millis(ms));
        pass(100).await;
        assert!(quiet.as_mut().now_or_never().is_none());
        drop(one);
        pass(100).await;
        assert!(quiet.as_mut().now_or_never().is_none());
        drop(two);
        assert!(quiet.as_mut().now_or_never().is_none());
        pass(30).await;
        // The next call of the same start.
        let three = gates.urgent();
        assert!(quiet.as_mut().now_or_never().is_none());
        pass(100).await;
        drop(three);
        pass(30).await;
        assert!(quiet.as_mut().now_or_never().is_none(), "it was quiet for 30 ms alone");
        pass(30).await;
        assert!(quiet.as_mut().now_or_never().is_none(), "the lull begins when it is noticed");
        pass(51).await;
        assert!(quiet.now_or_never().is_some());
    }

    proptest! {
        /// Whatever the order in which waiters arrive, give up and leave: there are never more inside than places, no
        /// place is empty while somebody waits, and waiters enter in order of arrival.
        #[test]
        fn places_are_bounded_used_and_given_in_order(
            places in 1_usize..5,
            steps in prop::collection::vec((0_u8..3, any::<prop::sample::Index>()), 1..60),
        ) {
            let gates = Admission::new(places, 1);
            let mut waiting = std::collections::VecDeque::new();
            let mut inside = Vec::new();
            let mut count = 0;
            for (step, which) in steps {
                match step {
                    0 => {
                        waiting.push_back((count, Box::pin(gates.enter(Work::Vm))));
                        count += 1;
                    }
                    1 if !waiting.is_empty() => drop(waiting.remove(which.index(waiting.len()))),
                    2 if !inside.is_empty() => drop(inside.swap_remove(which.index(inside.len()))),
                    _ => {}
                }
                let mut still = std::collections::VecDeque::new();
                let mut skipped = false;
                for (number, mut entry) in waiting {
                    match entry.as_mut().now_or_never() {
                        Some(place) => {
                            prop_assert!(!skipped, "{number} got in before one that came earlier");
                            inside.push(place);
                        }
                        None => {
                            skipped = true;
                            still.push_back((number, entry));
                        }
                    }
                }
                waiting = still;
                prop_assert!(inside.len() <= places);
                prop_assert!(waiting.is_empty() || inside.len() == places, "a place stays empty");
            }
        }
    }
}
