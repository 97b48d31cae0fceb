//! The number of VMs of each size that should wait: a pure function of the number of recent claims.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use tokio::time::Instant;

/// The period in which a claim counts as recent.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Maximum number of claims that are remembered: no pool is larger.
const MAX_ARRIVALS: usize = 1000;

/// The times at which VMs of one size were claimed.
#[derive(Debug, Default)]
pub struct Demand(VecDeque<Instant>);

impl Demand {
    /// Adds a claim.
    pub fn add(&mut self, now: Instant) {
        self.0.push_back(now);
        if self.0.len() > MAX_ARRIVALS {
            self.0.pop_front();
        }
    }

    /// Returns the number of recent claims.
    pub fn recent(&mut self, now: Instant) -> usize {
        while self.0.front().is_some_and(|&then| now.duration_since(then) > WINDOW) {
            self.0.pop_front();
        }
        self.0.len()
    }
}

/// The number of VMs of one size that should wait, if there were no other sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The minimum number of VMs.
    pub least: usize,
    /// The number of recent claims, added to the minimum.
    pub recent: usize,
}

/// Returns the number of VMs of each size that should wait, at most `most` in all. If that is too few for all, the
/// minimum of each size comes first, in the order of sizes. Then the size with the fewest VMs gets one more,
/// repeatedly; among equals, the size in greater demand.
pub fn share_out<Size: Ord + Copy>(most: usize, wanted: &BTreeMap<Size, Wanted>) -> BTreeMap<Size, usize> {
    let mut left = most;
    let least = |(&size, wanted): (&Size, &Wanted)| {
        let given = wanted.least.min(left);
        left -= given;
        (size, given)
    };
    let mut shares: BTreeMap<Size, usize> = wanted.iter().map(least).collect();
    for _ in 0..left {
        let unmet =
            shares.iter_mut().zip(wanted.values()).filter(|((_, share), wanted)| **share < wanted.recent);
        let Some(((_, share), _)) =
            unmet.min_by_key(|((_, share), wanted)| (**share, Reverse(wanted.recent)))
        else {
            break;
        };
        *share += 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_was_asked_for_a_minute_ago_counts_no_more() {
        let mut demand = Demand::default();
        for _ in 0..3 {
            demand.add(Instant::now());
        }
        tokio::time::advance(WINDOW / 2).await;
        demand.add(Instant::now());
        assert_eq!(demand.recent(Instant::now()), 4);
        tokio::time::advance(WINDOW / 2 + Duration::from_millis(1)).await;
        assert_eq!(demand.recent(Instant::now()), 1);
    }

    fn wanted() -> impl Strategy<Value = BTreeMap<u8, Wanted>> {
        let one = (0_usize..4, 0_usize..40).prop_map(|(least, recent)| Wanted { least, recent });
        prop::collection::btree_map(any::<u8>(), one, 0..6)
    }

    proptest! {
        #[test]
        fn all_sizes_together_keep_the_bound_and_each_gets_what_it_may(most in 0_usize..60, wanted in wanted()) {
            let shares = share_out(most, &wanted);
            let full = shares.values().sum::<usize>() == most;
            prop_assert!(shares.keys().eq(wanted.keys()));
            prop_assert!(shares.values().sum::<usize>() <= most);
            let enough = wanted.values().map(|wanted| wanted.least).sum::<usize>() <= most;
            for (size, &share) in &shares {
                let Wanted { least, recent } = wanted[size];
                prop_assert!(share <= least.max(recent), "{size} has more than is wanted");
                prop_assert!(share >= least || !enough, "{size} has less than its least");
                prop_assert!(share >= recent || full, "{size} lacks what nobody else has");
                // Fair: no size that wants more is two or more behind another beyond its minimum.
                for (other, &its) in &shares {
                    let beyond = its > wanted[other].least;
                    prop_assert!(!(share < recent && beyond && its > share + 1), "{other} got {size}'s");
                }
            }
        }

        #[test]
        fn more_demand_never_means_less(most in 0_usize..60, wanted in wanted(), which in any::<prop::sample::Index>()) {
            prop_assume!(!wanted.is_empty());
            let size = *which.get(&wanted.keys().copied().collect::<Vec<_>>());
            let mut more = wanted.clone();
            more.entry(size).and_modify(|wanted| wanted.recent += 1);
            prop_assert!(share_out(most, &more)[&size] >= share_out(most, &wanted)[&size]);
        }
    }
}
