//! How much is started at once; what comes later waits in the order in which it came.
//!
//! Two gates, for two kinds of work that compete for processors in their own ways: VMs that boot
//! or are restored, and disks that are made of containers' images. A pod that takes a VM from
//! the pool does not pass the first.
//!
//! No place is kept while a guest is asked for something once a container has run in it: a guest answers as slowly as it
//! likes, and what it makes of a container takes its own processors. So a container's place is given back when its disks
//! are made, before they are plugged in. A VM's place is kept until its agent has answered: up to then all that
//! runs in it is ours, and `vm.boot_timeout` bounds it. Network namespaces need no gate: containerd has made them
//! before the pod comes here, and the few calls that join taps to them take turns at the kernel's own lock (by the code;
//! not measured).

use std::time::Duration;

use tokio::{
    sync::{Semaphore, SemaphorePermit, watch},
    time::timeout,
};

/// What there are gates for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A VM boots or is restored.
    Vm,
    /// The disks of a container are made.
    Container,
}

/// Gates with so many places each. Whoever is dropped while waiting leaves the queue.
#[derive(Debug)]
pub struct Admission {
    // tokio's semaphores are fair: permits are given in the order they were asked for.
    vms: Semaphore,
    containers: Semaphore,
    under_way: watch::Sender<usize>,
}

/// Pod work that somebody waits for. Counted until dropped.
#[derive(Debug)]
pub struct Urgent<'a>(&'a watch::Sender<usize>);

impl Drop for Urgent<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Admission {
    /// Gates for so many VMs and containers at once, at least one each.
    pub fn new(vms: usize, containers: usize) -> Self {
        Self {
            vms: Semaphore::new(vms.max(1)),
            containers: Semaphore::new(containers.max(1)),
            under_way: watch::Sender::new(0),
        }
    }

    /// Waits for a place; it is given back when the answer is dropped.
    pub async fn enter(&self, work: Work) -> Option<SemaphorePermit<'_>> {
        let gate = match work {
            Work::Vm => &self.vms,
            Work::Container => &self.containers,
        };
        // Never closed; were it, work would go through ungated.
        gate.acquire().await.ok()
    }

    /// Notes that somebody waits for what is done until the answer is dropped.
    pub fn urgent(&self) -> Urgent<'_> {
        self.under_way.send_modify(|count| *count += 1);
        Urgent(&self.under_way)
    }

    /// Waits until nobody has waited for anything for as long as `lull`. A start is several calls, between which nobody waits for a
    /// moment: what begins then has all of the next call to compete with.
    pub async fn quiet(&self, lull: Duration) {
        let mut under_way = self.under_way.subscribe();
        loop {
            // An error would say that this is gone, and with it all work.
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
        /// Whoever comes, gives up and leaves in whichever order: never more inside than there are
        /// places, none empty while somebody waits, and those that wait get in as they came.
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
