//! Wall-clock timestamps for the wire and the journal. Not for durations: the clock may be set.

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

/// Returns a guest's timestamp `at_ns`, limited to the time between `since` and now: a manager would wait for a time in
/// the future. A guest's clock is not trusted, and the host's may have been set.
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
        // The clock was set back since then.
        assert!(plausible(now, now + 3_600_000_000_000) <= now_ns());
    }
}
