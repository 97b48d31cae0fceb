//! `sandboxer-cli report`: an HTML page of results.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sandboxer_probe::{html, markdown, score::figures::Results, store};

use crate::{Global, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli report results/startup results/memory
  sandboxer-cli report results/workload results/startup
  sandboxer-cli report results/startup --output page/index.html
  sandboxer-cli report --markdown results/startup results/memory    tables for a README";

/// Write results as one self-contained HTML page, and their plots as SVG and PNG
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directories that `startup`, `mem-report` or `workload` wrote, or text files of times
    #[arg(required = true)]
    results: Vec<PathBuf>,
    /// File for the page; plots are written next to it [default: report.html in the first directory]
    #[arg(long)]
    output: Option<PathBuf>,
    /// Print the figures as Markdown tables instead, next to published ones
    #[arg(long, conflicts_with_all = ["output", "json"])]
    markdown: bool,
}

/// Prints the page's path, or the tables.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if args.markdown {
        let results = Results::load(&args.results)?;
        let text = markdown::tables(&results.startups) + &markdown::workloads(&results.workloads);
        return Ok(render::print(text.trim())?);
    }
    let first = &args.results[0];
    let page = args.output.unwrap_or_else(|| {
        let dir = if first.is_dir() { first.as_path() } else { first.parent().unwrap_or(Path::new(".")) };
        dir.join("report.html")
    });
    let written = write(&args.results, &page)?;
    if global.json {
        return render::print_json(&serde_json::json!({ "page": page, "plots": written }));
    }
    Ok(render::print(&format!("report: {}", page.display()))?)
}

/// Writes the page and the plots; the plots' paths.
pub fn write(results: &[PathBuf], page: &Path) -> Result<Vec<PathBuf>> {
    let Results { startups, workloads } = Results::load(results)?;
    let dir = page.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    store::write_whole(page, html::page(&startups, &workloads).as_bytes())?;
    Ok(store::write_plots(dir, &startups, &workloads)?)
}
