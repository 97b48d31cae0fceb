//! Time that is taken away from a thread that always wants to run.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::result::Line;

/// Between two looks at the clock more than this was taken away; a timer's interrupt takes less.
const GAP: Duration = Duration::from_micros(50);

/// Looks at the clock all the time and counts gaps of more than 50 µs
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How long
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
}

/// Prints how many gaps there were, how much they took and the longest.
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
        .with("gaps_per_s", gaps as f64 / seconds)
        .with("taken_percent", taken.as_secs_f64() / seconds * 100.0)
        .with("longest_us", longest.as_secs_f64() * 1e6)
        .print()
}
