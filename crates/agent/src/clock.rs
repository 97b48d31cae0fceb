//! The guest's clocks as plain numbers.

use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

/// Returns the time of day, ns since 1970.
pub fn realtime_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::Realtime))
}

/// Returns the time since the guest's kernel started, ns.
pub fn boottime_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::Boottime))
}

/// Sets the guest's clock to `ns` since 1970.
pub fn set_realtime(ns: u64) -> std::io::Result<()> {
    let seconds = i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX);
    // The rest is below 10^9, which fits.
    let rest = (ns % 1_000_000_000) as i64;
    Ok(clock_settime(ClockId::Realtime, Timespec { tv_sec: seconds, tv_nsec: rest })?)
}

/// Converts one of the kernel's times to ns; 0 if it is negative.
pub fn nanoseconds(time: Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let rest = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}
