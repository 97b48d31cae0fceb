//! `sandboxer-bench gate`: compares starts with the last recorded ones.

use std::path::PathBuf;

use anyhow::{Result, bail};
use sandboxer_bench::gate::{self, Growth, Verdict};
use sandboxer_command::{Global, output};
use sandboxer_probe::document::Table;
use sandboxer_probe::store;

const EXAMPLES: &str = "\
Examples:
  sandboxer-bench gate target/bench-gate/qemu
  sandboxer-bench gate target/bench-gate/qemu --record --commit \"$(git rev-parse --short HEAD)\"";

/// Fail if a result is slower than the last recorded one, and name the slower stages
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directory that `startup` wrote, with serial starts of runc among others
    result: PathBuf,
    /// CSV file with the recorded results
    #[arg(long, default_value = "docs/results/history.csv")]
    history: PathBuf,
    /// Percentage by which a ratio or a stage may grow
    #[arg(long, default_value_t = 5.0)]
    allow: f64,
    /// Append this result to the recorded ones instead of comparing
    #[arg(long, requires = "commit")]
    record: bool,
    /// Version that was measured
    #[arg(long, default_value = "this one")]
    commit: String,
}

/// Compares or records. Returns an error if a figure grew by more than allowed, or if nothing could be compared.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let loaded = store::load(&args.result)?;
    let now = gate::recording(&loaded.report, &args.commit)?;
    if args.record {
        gate::append(&args.history, &now)?;
        return Ok(output::print(&format!("recorded in {}: {} rows", args.history.display(), now.len()))?);
    }
    let verdicts = gate::judge(&now, &gate::read(&args.history)?, args.allow);
    if verdicts.iter().all(|verdict| verdict.commit.is_none()) {
        bail!("{} has no recorded result to compare with", args.history.display());
    }
    if global.json {
        output::print_json(&verdicts)?;
    } else {
        output::print(&text(&verdicts, loaded.report.clock.ms()))?;
    }
    let slow: Vec<String> = verdicts.iter().filter(|verdict| !verdict.passes()).map(why).collect();
    if !slow.is_empty() {
        bail!("slower than recorded by more than {} %: {}", args.allow, slow.join("; "));
    }
    Ok(())
}

fn why(verdict: &Verdict) -> String {
    let ratio =
        verdict.over_runc.as_ref().filter(|_| verdict.slower).map(|growth| change("over runc", growth));
    let stages = verdict.grown.iter().map(|growth| change(&growth.what, growth));
    let all: Vec<String> = ratio.into_iter().chain(stages).collect();
    format!("{}: {}", verdict.runtime, all.join(", "))
}

fn change(what: &str, growth: &Growth) -> String {
    format!("{what} {:.2} → {:.2} ({:+.1} %)", growth.before, growth.now, growth.percent())
}

fn text(verdicts: &[Verdict], unit: &str) -> String {
    let mut rows = Table::new(2, ["runtime", "compared with", "over runc", "now", "change", "grown"]);
    for verdict in verdicts {
        let grown: Vec<String> =
            verdict.grown.iter().map(|growth| format!("{} {unit}", change(&growth.what, growth))).collect();
        let ratio = |figure: &dyn Fn(&Growth) -> String| {
            verdict.over_runc.as_ref().map_or_else(|| "–".into(), figure)
        };
        rows.row([
            verdict.runtime.clone(),
            verdict.commit.clone().unwrap_or_else(|| "no record".into()),
            ratio(&|growth| format!("{:.3}", growth.before)),
            ratio(&|growth| format!("{:.3}", growth.now)),
            ratio(&|growth| format!("{:+.1} %", growth.percent())),
            if grown.is_empty() { "–".into() } else { grown.join(", ") },
        ]);
    }
    rows.to_string()
}
