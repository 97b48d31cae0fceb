//! `sandboxer-cli compare`: compares two results.

use std::path::PathBuf;

use anyhow::{Result, bail};
use sandboxer_probe::compare::{Comparison, Difference, compare};
use sandboxer_probe::document::{Table, mb, ms};
use sandboxer_probe::workload::compare as workloads;
use sandboxer_probe::workload::summary::shown;
use sandboxer_probe::{store, workload};

use crate::{Global, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli compare results/before results/after
  sandboxer-cli compare results/startup other-tool.txt --json";

/// Compare two results, and list differences that make them incomparable
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directory that `startup`, `mem-report` or `workload` wrote, or a text file of times
    a: PathBuf,
    /// The other result
    b: PathBuf,
}

/// Prints the comparison. Returns an error if the results have nothing in common.
pub fn run(args: Args, global: &Global) -> Result<()> {
    match [&args.a, &args.b].map(|path| workload::store::is_one(path)) {
        [false, false] => {}
        [true, true] => return workloads_of(&args, global),
        [first, _] => {
            let (one, other) = if first { (&args.a, &args.b) } else { (&args.b, &args.a) };
            bail!(
                "{} is a result of workload and {} is not: there is nothing to compare",
                one.display(),
                other.display()
            )
        }
    }
    let comparison = compare(&store::load(&args.a)?, &store::load(&args.b)?)?;
    if global.json {
        return render::print_json(&comparison);
    }
    Ok(render::print(&text(&comparison))?)
}

fn workloads_of(args: &Args, global: &Global) -> Result<()> {
    let comparison = workloads::compare(&workload::store::load(&args.a)?, &workload::store::load(&args.b)?)?;
    if global.json {
        return render::print_json(&comparison);
    }
    let mut text = heading(&comparison.names, &comparison.not_comparable, &comparison.differences);
    let [a, b] = &comparison.names;
    let mut rows = Table::new(3, ["probe", "metric", "runtime", a, b, "ratio of medians"]);
    for row in &comparison.rows {
        let ratio = row
            .ratio
            .map_or_else(|| "not measured: it needs four values on each side".into(), |ratio| ratio.short());
        let [of_a, of_b] = row.p50.map(shown);
        let probe = format!("{} {}", row.probe, row.case).trim_end().to_owned();
        rows.row([probe, row.metric.clone(), row.runtime.clone(), of_a, of_b, ratio]);
    }
    text += &format!("\n{rows}");
    Ok(render::print(&text)?)
}

/// Returns the names of the results, and their differences.
fn heading([a, b]: &[String; 2], not_comparable: &[Difference], others: &[Difference]) -> String {
    let mut text = format!("{b} over {a}\n");
    if !not_comparable.is_empty() {
        text += "\nNOT COMPARABLE: the runs differ in these, so the ratios do not show the runtimes' difference\n";
        text += &differences(not_comparable);
    }
    if !others.is_empty() {
        text += "\nthe runs also differ in these; keep them in mind with every ratio\n";
        text += &differences(others);
    }
    text + "\nthe two runs did not alternate: a small difference may come from the host\n"
}

fn text(comparison: &Comparison) -> String {
    let [a, b] = &comparison.names;
    let mut text = heading(&comparison.names, &comparison.not_comparable, &comparison.differences);
    if !comparison.startup.is_empty() {
        let mut rows = Table::new(2, ["start-up", "mode", a, b, "ratio of medians"]);
        for row in &comparison.startup {
            let [of_a, of_b] = row.p50_ms.map(|time| format!("{} {}", ms(time), comparison.clock.ms()));
            rows.row([row.runtime.clone(), row.mode.to_string(), of_a, of_b, row.shown()]);
        }
        text += &format!("\n{rows}\n");
    }
    if !comparison.memory.is_empty() {
        let mut rows = Table::new(1, ["memory, MB", "pods", "management", "", "total", ""]);
        for row in &comparison.memory {
            let management = row.management_kib.map(mb);
            let total = row.total_kib.map(mb);
            let names = [row.runtime.clone(), row.pods.to_string()];
            rows.row(names.into_iter().chain(management).chain(total));
        }
        text += &format!("\n{rows}\n");
    }
    text.trim_end().to_owned()
}

fn differences(list: &[Difference]) -> String {
    list.iter().map(|d| format!("  {}: {} | {}\n", d.what, d.values[0], d.values[1])).collect()
}
