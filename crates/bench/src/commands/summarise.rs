//! `sandboxer-bench summarise`: percentiles of times in text files.

use std::path::PathBuf;

use anyhow::{Context, Result};
use sandboxer_command::{Global, output};
use sandboxer_probe::document::ms;
use sandboxer_probe::{summarise, summary};

const EXAMPLES: &str = "\
Examples:
  sandboxer-bench summarise times.txt
  grep -o '[0-9.]* ms' log | cut -d' ' -f1 | sandboxer-bench summarise -";

/// Summarise text files with one time in ms a line (nearest-rank percentiles)
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Files: `#` comments, one or two columns; `-` for stdin
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Also print the distribution: ms, fraction of samples at or below
    #[arg(long)]
    cdf: bool,
}

/// Prints the figures. Returns an error at the first file without samples.
pub fn run(args: Args, global: &Global) -> Result<()> {
    for path in &args.files {
        let text = if path.as_os_str() == "-" {
            std::io::read_to_string(std::io::stdin()).context("cannot read stdin")?
        } else {
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?
        };
        let times =
            summarise::parse(&text).with_context(|| format!("{} contains no samples", path.display()))?;
        let summary = times.summary();
        if global.json {
            let mut object = serde_json::to_value(&summary)?;
            if args.cdf {
                object["cdf"] = serde_json::to_value(summary::cdf(&times.times))?;
            }
            output::print(&object.to_string())?;
            continue;
        }
        let mut text = format!("{}: {}\n", path.display(), times.read_as);
        text += &format!("  n {}  failures {}", summary.n, summary.failures);
        for (name, value) in summary.figures() {
            text += &format!("\n  {name:<4} {:>10} ms", ms(value));
        }
        text += "\n  distribution, ms and fraction of samples at or below:";
        let points = summary::cdf(&times.times);
        for (time, part) in if args.cdf { points } else { thinned(points) } {
            text += &format!("\n  {time:>10.3} {part:.4}");
        }
        output::print(&text)?;
    }
    Ok(())
}

/// Returns twenty points of a distribution, including both ends.
fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    const SHOWN: usize = 20;
    if points.len() <= SHOWN {
        return points;
    }
    (0..SHOWN).map(|index| points[index * (points.len() - 1) / (SHOWN - 1)]).collect()
}
