//! `sandboxer-bench merge`: merges several runs into one result.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sandboxer_bench::merge::{join, merge};
use sandboxer_bench::workload::join as rounds_of;
use sandboxer_command::{Global, output};
use sandboxer_probe::store::{self, Loaded, Store};
use sandboxer_probe::workload;

const EXAMPLES: &str = "\
Examples:
  sandboxer-bench merge runs/qemu runs/cloud-hypervisor runs/groups --output results/startup
  sandboxer-bench merge --parts runs/qemu.1 runs/qemu.2 --output runs/qemu
  sandboxer-bench merge --parts runs/workload.1 runs/workload.2 --output runs/workload";

/// Merge several runs into one result; each ratio stays within its run
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directories that `startup`, `mem-report` or, with --parts, `workload` wrote
    #[arg(required = true)]
    results: Vec<PathBuf>,
    /// Directory for the result; it must not contain one yet
    #[arg(long)]
    output: PathBuf,
    /// The runs are parts of one: same handlers in the same order, on VMs of the same kind
    #[arg(long)]
    parts: bool,
}

/// Merges the runs. Returns an error if they cannot be merged.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if args.results.iter().any(|dir| workload::store::is_one(dir)) {
        rounds(&args)?;
        return done(&args.output, global);
    }
    let loaded: Vec<Loaded> = args.results.iter().map(|path| store::load(path)).collect::<Result<_, _>>()?;
    let (report, samples) = if args.parts { join(&loaded) } else { merge(&loaded) }?;
    let mut store = Store::create(&args.output)?;
    store.clock = report.clock;
    for sample in &samples {
        store.sample(sample)?;
    }
    if let Some(rows) = ledgers(&args.results)? {
        store.write("ledger.csv", rows.as_bytes())?;
    }
    store.report(&report, &samples)?;
    done(&args.output, global)
}

/// Joins rounds of workloads. The tools' output stays with the parts.
fn rounds(args: &Args) -> Result<()> {
    if !args.parts {
        bail!("results of workload are merged only as parts of one measurement: add --parts");
    }
    let parts = args.results.iter().map(|dir| workload::store::load(dir)).collect::<Result<Vec<_>, _>>()?;
    let (report, runs) = rounds_of::join(&parts)?;
    let mut store = workload::store::Store::create(&args.output)?;
    for run in &runs {
        store.row(run)?;
    }
    Ok(store.report(&report)?)
}

fn done(output: &Path, global: &Global) -> Result<()> {
    if global.json {
        return output::print_json(&serde_json::json!({ "result": output }));
    }
    Ok(output::print(&format!("result: {}", output.display()))?)
}

/// Returns the lines of all ledgers under one header; `None` if there is no ledger.
fn ledgers(results: &[PathBuf]) -> Result<Option<String>> {
    let mut all: Option<String> = None;
    for dir in results {
        let path: &Path = &dir.join("ledger.csv");
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        match &mut all {
            None => all = Some(text),
            Some(all) => all.push_str(text.split_once('\n').map_or("", |(_, rows)| rows)),
        }
    }
    Ok(all)
}
