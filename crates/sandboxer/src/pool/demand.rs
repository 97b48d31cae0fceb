//! How many machines of a size should wait: pure, from how many were lately asked for.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// What counts as lately.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Most arrivals that are remembered: no pool is larger.
const MOST: usize = 1000;

/// When machines of one size were asked for.
#[derive(Debug, Default)]
pub struct Demand(VecDeque<Instant>);

impl Demand {
    /// One was asked for.
    pub fn add(&mut self, now: Instant) {
        self.0.push_back(now);
        if self.0.len() > MOST {
            self.0.pop_front();
        }
    }

    /// How many were lately asked for.
    pub fn recent(&mut self, now: Instant) -> usize {
        while self.0.front().is_some_and(|&then| now.duration_since(then) > WINDOW) {
            self.0.pop_front();
        }
        self.0.len()
    }
}

/// How many machines should wait.
pub fn target(least: usize, most: usize, recent: usize) -> usize {
    recent.clamp(least.min(most), most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn the_target_keeps_its_bounds_and_follows_demand(
            least in 0_usize..20, more in 0_usize..20, recent in 0_usize..100,
        ) {
            let most = least + more;
            let wanted = target(least, most, recent);
            prop_assert!((least..=most).contains(&wanted));
            prop_assert!(target(least, most, recent + 1) >= wanted);
            prop_assert!(wanted == recent || wanted == least || wanted == most);
        }
    }
}
