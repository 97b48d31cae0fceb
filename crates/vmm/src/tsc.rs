//! The host's time stamp counter, which TCG passes to its guests unchanged.

use std::time::{Duration, Instant};

/// Time between the two readings: an error of 0.2 µs in either makes 4 ppm.
const INTERVAL: Duration = Duration::from_millis(100);
/// Number of readings, the least disturbed of which counts.
const ATTEMPTS: usize = 8;

/// Measures the counter's frequency, kHz. Takes a tenth of a second.
pub async fn frequency_khz() -> u64 {
    let (began, first) = reading();
    tokio::time::sleep(INTERVAL).await;
    let (ended, second) = reading();
    let nanoseconds = ended.duration_since(began).as_nanos().max(1);
    let khz = u128::from(second.wrapping_sub(first)) * 1_000_000 / nanoseconds;
    u64::try_from(khz).unwrap_or(0)
}

/// Reads the counter. Returns the moment of the reading, and the count.
fn reading() -> (Instant, u64) {
    let once = || {
        let before = Instant::now();
        let count = count();
        (before.elapsed(), before, count)
    };
    let mut best = once();
    for _ in 1..ATTEMPTS {
        let next = once();
        if next.0 < best.0 {
            best = next;
        }
    }
    (best.1 + best.0 / 2, best.2)
}

#[cfg(target_arch = "x86_64")]
fn count() -> u64 {
    // SAFETY: this reads a register that every x86-64 CPU has.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "aarch64")]
fn count() -> u64 {
    let count;
    // SAFETY: this reads the virtual counter, which Linux lets every process read.
    unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack)) };
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn two_measurements_agree() {
        let (first, second) = (frequency_khz().await, frequency_khz().await);
        assert!(first.abs_diff(second) * 1000 < first, "{first} kHz, then {second} kHz");
    }
}
