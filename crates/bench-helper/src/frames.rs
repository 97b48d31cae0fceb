//! A frame clock: work of a known length at each tick, and its lateness.

use std::hint::black_box;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::thread::{ClockId as SleepClock, clock_nanosleep_absolute};
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::result::{Line, Times};

/// Lateness above which a frame counts as late.
const LATE: Duration = Duration::from_millis(1);

/// Do work at each tick of a clock, like a player or a control loop
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Ticks per second
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    hz: u32,
    /// Work at each tick, ms of CPU as it was measured before the first tick
    #[arg(long, default_value_t = 5.0)]
    work_ms: f64,
    /// Duration, seconds
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
}

/// Measures and prints. Lateness is the time between the ideal and the real end of a frame's work.
pub fn run(args: &Args) -> Result<()> {
    let period = Duration::from_secs(1) / args.hz;
    let work = Duration::try_from_secs_f64(args.work_ms / 1e3).context("--work-ms takes ms from 0 up")?;
    ensure!(work < period, "{} ms of work do not fit into a frame of {period:?}", args.work_ms);
    let rounds = calibrate(work);
    let frames = (args.seconds * f64::from(args.hz)).ceil().max(1.0) as u32;
    let (mut times, mut late, mut missed) = (Times::new()?, 0u32, 0u32);
    let begun = now();
    for frame in 1..=frames {
        let tick = begun + period * frame;
        sleep_until(tick)?;
        spin(rounds);
        let lateness = now().saturating_sub(tick + work);
        times.add(lateness);
        late += u32::from(lateness > LATE);
        missed += u32::from(lateness > period);
    }
    Line::new("frames")
        .figure("frames", f64::from(frames))
        .figure("late_percent", f64::from(late) / f64::from(frames) * 100.0)
        .figure("missed_percent", f64::from(missed) / f64::from(frames) * 100.0)
        .figure("p50_us", times.percentile(50.0) / 1e3)
        .figure("p99_us", times.percentile(99.0) / 1e3)
        .figure("max_us", times.longest() / 1e3)
        .print()
}

/// Returns the monotonic time.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn sleep_until(time: Duration) -> Result<()> {
    let until = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    while let Err(error) = clock_nanosleep_absolute(SleepClock::Monotonic, &until) {
        ensure!(error == rustix::io::Errno::INTR, "cannot wait for a frame: {error}");
    }
    Ok(())
}

fn spin(rounds: u64) {
    let mut state = 1u64;
    for round in 0..rounds {
        state = black_box(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round));
    }
}

/// Returns the number of rounds that take this long, from the fastest of several tries.
fn calibrate(work: Duration) -> u64 {
    const TRY: u64 = 200_000;
    let times = (0..20).map(|_| {
        let begun = now();
        spin(TRY);
        now().saturating_sub(begun)
    });
    let fastest = times.min().unwrap_or_default().max(Duration::from_nanos(1));
    (work.as_secs_f64() / fastest.as_secs_f64() * TRY as f64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_fills_a_frame_is_refused() {
        let args = Args { hz: 100, work_ms: 10.0, seconds: 1.0 };
        assert!(run(&args).unwrap_err().to_string().contains("do not fit"));
    }

    #[test]
    fn calibrated_work_is_never_much_shorter_than_asked_for() {
        let work = Duration::from_millis(5);
        let rounds = calibrate(work);
        let begun = now();
        spin(rounds);
        assert!(now().saturating_sub(begun) >= work * 4 / 5);
    }
}
