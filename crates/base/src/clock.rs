//! Wall-clock stamps as they travel on the wire and into the journal. Nothing is timed by them: the clock may be set.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::failpoint;

/// Returns CLOCK_REALTIME.
pub fn now() -> SystemTime {
    failpoint::shifted(SystemTime::now())
}

/// Returns CLOCK_REALTIME, ns since 1970; 0 if the clock is before that.
pub fn now_ns() -> u64 {
    let since = now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns when something was that a guest dates to `at_ns`, as far as that can be: not before `since`, and not in the time to
/// come, in which a manager would wait for it to be over. A guest's clock is the guest's, and this one may have been
/// set since it was.
pub fn plausible(at_ns: u64, since: u64) -> u64 {
    at_ns.max(since).min(now_ns())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_dates_is_over_and_not_older_than_its_beginning() {
        let now = now_ns();
        assert_eq!(plausible(now - 5, now - 9), now - 5);
        assert_eq!(plausible(0, now - 9), now - 9);
        assert!(plausible(u64::MAX, now - 9) <= now_ns());
        // The clock was set back since.
        assert!(plausible(now, now + 3_600_000_000_000) <= now_ns());
    }
}
