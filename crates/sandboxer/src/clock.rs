//! Wall-clock stamps as they travel on the wire and into the journal.

use std::time::{SystemTime, UNIX_EPOCH};

/// CLOCK_REALTIME, ns since 1970; 0 if the clock stands before that.
pub fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
