//! `sandboxer-cli merge`: merges several runs into one result.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sandboxer_probe::{
    merge::{join, merge},
    store::{self, Loaded, Store},
};

use crate::{Global, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli merge runs/qemu runs/cloud-hypervisor runs/groups --output results/startup
  sandboxer-cli merge --parts runs/qemu.1 runs/qemu.2 --output runs/qemu";

/// Merge several runs into one result; each ratio stays within its run
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directories that `startup` or `mem-report` wrote
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
    if global.json {
        return render::print_json(&serde_json::json!({ "result": args.output }));
    }
    Ok(render::print(&format!("result: {}", args.output.display()))?)
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
