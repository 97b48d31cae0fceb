//! Open-loop load: transactions over a working set that arrive at a rate, whether or not earlier ones are done.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::thread::{ClockId as SleepClock, clock_nanosleep_relative};
use rustix::time::Timespec;

use crate::result::{Line, Times};

/// Number of places in the working set that a transaction changes.
const UPDATES: usize = 1000;
/// Shortest wait that sleeps. Shorter waits spin, because a sleep ends later.
const SHORTEST_SLEEP: Duration = Duration::from_micros(200);

/// Run memory-bound transactions that arrive at random at a mean rate
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Mean arrivals per second; 0 for back-to-back transactions
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// Duration, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Working set, MiB; must be larger than the last-level cache to measure memory
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    working_set: u32,
}

/// Measures and prints. Latency counts from the arrival, so it includes time in the queue.
pub fn run(args: &Args) -> Result<()> {
    let limit = Duration::try_from_secs_f64(args.seconds).context("--seconds takes seconds from 0 up")?;
    ensure!(args.rate.is_finite() && args.rate >= 0.0, "--rate takes a number from 0 up");
    let mut set = vec![1u64; (args.working_set as usize) << 17];
    let mut random = SmallRng::seed_from_u64(0x5eed);
    let (mut times, mut count) = (Times::new()?, 0u64);
    let begun = Instant::now();
    let mut arrival = Duration::ZERO;
    loop {
        arrival = match args.rate {
            0.0 => begun.elapsed(),
            rate => arrival + Duration::from_secs_f64(until_next(rate, random.random())),
        };
        if arrival >= limit {
            break;
        }
        wait_until(begun, arrival);
        transact(&mut set, &mut random);
        times.add(begun.elapsed().saturating_sub(arrival));
        count += 1;
    }
    let seconds = begun.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
    Line::new("transactions")
        .figure("per_s", count as f64 / seconds)
        .figure("p50_us", times.percentile(50.0) / 1e3)
        .figure("p95_us", times.percentile(95.0) / 1e3)
        .figure("p99_us", times.percentile(99.0) / 1e3)
        .figure("max_us", times.longest() / 1e3)
        .print()
}

/// Returns the seconds between two arrivals of a Poisson process; `uniform` is drawn from [0, 1).
fn until_next(rate: f64, uniform: f64) -> f64 {
    -(1.0 - uniform).ln() / rate
}

fn wait_until(begun: Instant, arrival: Duration) {
    loop {
        let left = arrival.saturating_sub(begun.elapsed());
        if left.is_zero() {
            return;
        }
        if left > SHORTEST_SLEEP {
            let time = left - SHORTEST_SLEEP;
            let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
            let _ = clock_nanosleep_relative(SleepClock::Monotonic, &time);
        }
        std::hint::spin_loop();
    }
}

fn transact(set: &mut [u64], random: &mut SmallRng) {
    for _ in 0..UPDATES {
        let place = random.random_range(0..set.len());
        set[place] = black_box(set[place].wrapping_mul(3).wrapping_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_have_the_rate_that_was_asked_for() {
        let mut random = SmallRng::seed_from_u64(1);
        let sum: f64 = (0..20_000).map(|_| until_next(50.0, random.random())).sum();
        // The mean of 20,000 exponential times is within 3 % in all but one of 10,000 cases.
        assert!((sum / 20_000.0 * 50.0 - 1.0).abs() < 0.03, "{sum}");
    }

    #[test]
    fn a_wait_ends_after_the_arrival() {
        let begun = Instant::now();
        wait_until(begun, Duration::from_millis(3));
        assert!(begun.elapsed() >= Duration::from_millis(3));
    }

    #[test]
    fn rates_that_are_none_are_refused() {
        for rate in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(run(&Args { rate, seconds: 0.1, working_set: 1 }).is_err(), "{rate}");
        }
    }
}
