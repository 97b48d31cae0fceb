//! Keeps the guest's clock at the host's time.
//!
//! If the VMM provides a clock device (KVM does when the host's clock source is the TSC), the agent reads it
//! periodically. Otherwise the daemon measures the guest's clock over the link and sends the host's time; see
//! `SyncClock`. In both cases the kernel's phase-locked loop slews the difference and learns the clock's frequency, as
//! with NTP daemons. A large difference is stepped.

use std::{
    fs::{self, File},
    io,
    os::fd::AsFd as _,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use rustix::time::{ClockId, DynamicClockId, clock_gettime, clock_gettime_dynamic};

use crate::{clock, log};

/// The kernel's name for KVM's clock device.
const KVM_CLOCK: &str = "KVM virtual PTP";
const DEVICE: &str = "/dev/ptp0";
const DEVICE_NAME: &str = "/sys/class/ptp/ptp0/clock_name";

/// How often the device is read.
const INTERVAL: Duration = Duration::from_secs(64);
/// The binary logarithm of [`INTERVAL`] in seconds, minus four: the loop's time constant, as in systemd-timesyncd. Only
/// a fiftieth of a difference remains at the next reading.
const TIME_CONSTANT: libc::c_long = 2;
/// The largest difference that is slewed, ns. The kernel's loop accepts at most 0.5 s.
const MAX_SLEW_NS: i64 = 400_000_000;
/// The number of readings, of which the fastest is used.
const READINGS: usize = 5;

/// Whether the agent keeps the clock without the host.
static KEPT: AtomicBool = AtomicBool::new(false);

/// Returns whether the agent keeps the clock without the host.
pub fn is_kept() -> bool {
    KEPT.load(Ordering::Relaxed)
}

/// How a difference is corrected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Correction {
    /// The clock runs faster or slower for a while, until it has gained this, ns.
    Slew(i64),
    /// The clock jumps by this, ns.
    Step(i64),
}

fn correction(offset_ns: i64) -> Correction {
    match offset_ns.unsigned_abs() <= MAX_SLEW_NS.unsigned_abs() {
        true => Correction::Slew(offset_ns),
        false => Correction::Step(offset_ns),
    }
}

/// Returns by how much the guest's clock is behind, ns, if the host's clock was `realtime_ns` when the guest's
/// [`clock::boottime_ns`] was `at_boottime_ns`.
fn behind(at_boottime_ns: u64, realtime_ns: u64, boottime_now: u64, realtime_now: u64) -> i64 {
    let host_now = i128::from(realtime_ns) + i128::from(boottime_now) - i128::from(at_boottime_ns);
    let behind = host_now - i128::from(realtime_now);
    i64::try_from(behind).unwrap_or(if behind < 0 { i64::MIN } else { i64::MAX })
}

/// Sets the guest's clock to the host's time `realtime_ns`, which was valid at `at_boottime_ns` of the guest's boot
/// clock.
pub fn set_by(at_boottime_ns: u64, realtime_ns: u64) -> io::Result<()> {
    apply(behind(at_boottime_ns, realtime_ns, clock::boottime_ns(), clock::realtime_ns()))
}

/// Sets the guest's clock from the clock device, if there is one, after the guest was suspended.
pub fn set_by_device() -> io::Result<()> {
    let Some(device) = open() else { return Ok(()) };
    let offset = offset(&device)?;
    adjust(libc::ADJ_SETOFFSET, offset)
}

/// Keeps the clock with the clock device, if there is one, until reading it fails.
pub async fn run() {
    let Some(device) = open() else { return };
    KEPT.store(true, Ordering::Relaxed);
    loop {
        tokio::time::sleep(INTERVAL).await;
        if let Err(error) = offset(&device).and_then(apply) {
            // The host notices at its next measurement, and keeps the clock from then on.
            log::print(&format!("cannot keep the clock with {DEVICE}: {error}"));
            KEPT.store(false, Ordering::Relaxed);
            return;
        }
    }
}

fn open() -> Option<File> {
    let name = fs::read_to_string(DEVICE_NAME).ok()?;
    if name.trim() == KVM_CLOCK { File::open(DEVICE).ok() } else { None }
}

/// Returns by how much the guest's clock is behind the device's, ns.
fn offset(device: &File) -> io::Result<i64> {
    let mut best: Option<(u64, i64)> = None;
    for _ in 0..READINGS {
        let before = clock::nanoseconds(clock_gettime(ClockId::Realtime));
        let host = clock::nanoseconds(clock_gettime_dynamic(DynamicClockId::Dynamic(device.as_fd()))?);
        let after = clock::nanoseconds(clock_gettime(ClockId::Realtime));
        let took = after.saturating_sub(before);
        let offset = behind(0, host, 0, before + took / 2);
        if best.is_none_or(|(quickest, _)| took < quickest) {
            best = Some((took, offset));
        }
    }
    best.map(|(_, offset)| offset).ok_or_else(|| io::Error::other("no reading"))
}

fn apply(offset_ns: i64) -> io::Result<()> {
    match correction(offset_ns) {
        Correction::Slew(ns) => adjust(libc::ADJ_OFFSET, ns),
        Correction::Step(ns) => adjust(libc::ADJ_SETOFFSET, ns),
    }
}

/// Makes the kernel correct the clock by `ns`, with `mode` ADJ_OFFSET or ADJ_SETOFFSET. Both turn its loop on
/// and mark the clock as synchronized.
fn adjust(mode: libc::c_uint, ns: i64) -> io::Result<()> {
    // SAFETY: all zeroes is a valid request that changes nothing.
    let mut request: libc::timex = unsafe { std::mem::zeroed() };
    request.modes = mode
        | libc::ADJ_NANO
        | libc::ADJ_STATUS
        | libc::ADJ_TIMECONST
        | libc::ADJ_MAXERROR
        | libc::ADJ_ESTERROR;
    request.status = libc::STA_PLL;
    request.constant = TIME_CONSTANT;
    if mode == libc::ADJ_SETOFFSET {
        request.time.tv_sec = ns.div_euclid(1_000_000_000);
        // With ADJ_NANO the unit is ns, and the value is never negative.
        request.time.tv_usec = ns.rem_euclid(1_000_000_000);
    } else {
        request.offset = ns;
    }
    // SAFETY: the request has the type that this call reads and writes.
    match unsafe { libc::adjtimex(&mut request) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_small_difference_is_slewed_and_a_large_one_stepped_over() {
        assert_eq!(correction(0), Correction::Slew(0));
        assert_eq!(correction(-MAX_SLEW_NS), Correction::Slew(-MAX_SLEW_NS));
        assert_eq!(correction(MAX_SLEW_NS + 1), Correction::Step(MAX_SLEW_NS + 1));
        assert_eq!(correction(i64::MIN), Correction::Step(i64::MIN));
    }

    #[test]
    fn what_the_host_said_a_while_ago_is_of_use_now() {
        // The time was sent at 5 s and applied at 9 s of the guest's clock: 4 s have passed on the host.
        assert_eq!(behind(5 * S, 100 * S, 9 * S, 104 * S), 0);
        assert_eq!(behind(5 * S, 100 * S, 9 * S, 103 * S), 1_000_000_000);
        assert_eq!(behind(5 * S, 100 * S, 9 * S, 106 * S), -2_000_000_000);
        assert_eq!(behind(0, u64::MAX, u64::MAX, 0), i64::MAX);
        assert_eq!(behind(u64::MAX, 0, 0, u64::MAX), i64::MIN);
    }
}
