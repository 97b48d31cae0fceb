//! CPU time taken away from a busy thread.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::result::Line;

/// Minimum gap between two clock readings that counts; a timer interrupt takes less.
const GAP: Duration = Duration::from_micros(50);

/// Read the clock in a loop and count gaps of more than 50 µs
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Duration, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
}

/// Prints the number of gaps, their total time and the longest.
pub fn run(args: &Args) -> Result<()> {
    let limit = Duration::try_from_secs_f64(args.seconds).context("--seconds takes seconds from 0 up")?;
    let begun = Instant::now();
    let (mut last, mut gaps, mut taken, mut longest) = (begun, 0u64, Duration::ZERO, Duration::ZERO);
    while last.duration_since(begun) < limit {
        let now = Instant::now();
        let gap = now.duration_since(last);
        if gap > GAP {
            (gaps, taken, longest) = (gaps + 1, taken + gap, longest.max(gap));
        }
        last = now;
    }
    let seconds = last.duration_since(begun).as_secs_f64().max(f64::MIN_POSITIVE);
    Line::new("spin")
        .figure("gaps_per_s", gaps as f64 / seconds)
        .figure("taken_percent", taken.as_secs_f64() / seconds * 100.0)
        .figure("longest_us", longest.as_secs_f64() * 1e6)
        .print()
}
