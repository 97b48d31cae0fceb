//! `sandboxer-cli compare`: two results side by side.

use std::path::PathBuf;

use anyhow::Result;
use sandboxer_probe::{
    compare::{Comparison, Difference, compare},
    store,
};

use super::tables;
use crate::{Global, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli compare results/before results/after
  sandboxer-cli compare results/startup other-tool.txt --json";

/// Compare two results, and list differences that make them incomparable
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directory that `startup` or `mem-report` wrote, or a text file of times
    a: PathBuf,
    /// The other result
    b: PathBuf,
}

/// Prints the comparison. Returns an error if the two have nothing in common.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let comparison = compare(&store::load(&args.a)?, &store::load(&args.b)?)?;
    if global.json {
        return render::print_json(&comparison);
    }
    Ok(render::print(&text(&comparison))?)
}

fn text(comparison: &Comparison) -> String {
    let [a, b] = &comparison.of;
    let mut text = format!("{b} over {a}\n");
    if !comparison.not_comparable.is_empty() {
        text += "\nNOT COMPARABLE: the runs differ in these, so the ratios do not show the runtimes' difference\n";
        text += &differences(&comparison.not_comparable);
    }
    if !comparison.differences.is_empty() {
        text += "\nthe runs also differ in these; keep them in mind with every ratio\n";
        text += &differences(&comparison.differences);
    }
    text += "\nthe two runs did not alternate: a small difference may come from the host\n";
    if !comparison.startup.is_empty() {
        let mut rows = tables::table(&["start-up", "mode", a, b, "ratio of medians"], 2);
        for row in &comparison.startup {
            let ratio =
                row.ratio.map_or_else(|| "not measured: one side has no times".into(), |r| r.to_string());
            let [of_a, of_b] =
                row.p50_ms.map(|time| format!("{} {}", tables::ms(time), comparison.clock.ms()));
            rows.add_row([row.runtime.clone(), row.mode.to_string(), of_a, of_b, ratio]);
        }
        text += &format!("\n{rows}\n");
    }
    if !comparison.memory.is_empty() {
        let mut rows = tables::table(&["memory, MB", "pods", "management", "", "total", ""], 1);
        for row in &comparison.memory {
            let [ma, mb] = row.management_kib.map(tables::mb);
            let [ta, tb] = row.total_kib.map(tables::mb);
            rows.add_row([row.runtime.clone(), row.pods.to_string(), ma, mb, ta, tb]);
        }
        text += &format!("\n{rows}\n");
    }
    text.trim_end().to_owned()
}

fn differences(list: &[Difference]) -> String {
    list.iter().map(|d| format!("  {}: {} | {}\n", d.what, d.values[0], d.values[1])).collect()
}
