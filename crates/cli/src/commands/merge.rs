//! `sandboxer-cli merge`: several runs as one result.

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

/// Make one result of several runs; each ratio stays that of its run
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directories that `startup` or `mem-report` wrote
    #[arg(required = true)]
    results: Vec<PathBuf>,
    /// Where to write the result; it must not hold one already
    #[arg(long)]
    output: PathBuf,
    /// They are parts of one run: the same handlers in the same turns, on VMs of one kind
    #[arg(long)]
    parts: bool,
}

/// Merges runs; fails if they do not belong together.
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

/// Returns the lines of all ledgers below one heading; `None` without any.
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
