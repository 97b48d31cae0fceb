//! `sandboxer-cli report`: an HTML page of results.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sandboxer_probe::document::{html, markdown};
use sandboxer_probe::{figures::Palette, present, results::Results, store};

use crate::{Global, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli report results/startup results/memory
  sandboxer-cli report results/workload results/startup
  sandboxer-cli report results/startup --output page/index.html
  sandboxer-cli report results/kata --baseline kata --published         with published figures beside virtual times
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
    /// Runtime with which all others are compared, besides runc
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// Also draw published times beside virtual ones: they are ms of other hardware
    #[arg(long)]
    published: bool,
}

/// Options of a page, apart from its results.
#[derive(Debug, Default)]
pub struct Look<'a> {
    /// Runtime with which all others are compared.
    pub baseline: Option<&'a str>,
    /// Whether to draw published times beside virtual ones.
    pub published: bool,
}

/// Prints the page's path, or the tables.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let look = Look { baseline: args.baseline.as_deref(), published: args.published };
    if args.markdown {
        let (results, unusable) = load(&args.results, look.baseline)?;
        render::print(markdown::render(&present::tables(&results)).trim())?;
        return complete(unusable, args.results.len());
    }
    let first = &args.results[0];
    let page = args.output.unwrap_or_else(|| {
        let dir = if first.is_dir() { first.as_path() } else { first.parent().unwrap_or(Path::new(".")) };
        dir.join("report.html")
    });
    let (written, unusable) = write(&args.results, &page, &look)?;
    if global.json {
        render::print_json(&serde_json::json!({ "page": page, "plots": written }))?;
    } else {
        render::print(&format!("report: {}", page.display()))?;
    }
    complete(unusable, args.results.len())
}

/// Returns an error if some results could not be used.
fn complete(unusable: usize, all: usize) -> Result<()> {
    match unusable {
        0 => Ok(()),
        unusable => bail!("{unusable} of {all} results are missing: they cannot be used"),
    }
}

/// Loads the usable results, with ratios to the baseline, and reports the others. Returns the number of the others,
/// too.
fn load(paths: &[PathBuf], baseline: Option<&str>) -> Result<(Results, usize)> {
    let mut results = Results::default();
    let mut errors = Vec::new();
    for path in paths {
        match Results::load(std::slice::from_ref(path)) {
            Ok(one) => {
                results.startups.extend(one.startups);
                results.workloads.extend(one.workloads);
            }
            Err(error) => errors.push(anyhow::Error::new(error)),
        }
    }
    let last = (results.startups.is_empty() && results.workloads.is_empty()).then(|| errors.pop()).flatten();
    errors.iter().for_each(|error| eprintln!("left out: {error:#}"));
    if let Some(last) = last {
        return Err(last);
    }
    if let Some(baseline) = baseline {
        let with_starts = results.startups.iter_mut().filter(|result| !result.report.series.is_empty());
        for result in with_starts {
            result.report.set_baseline(&result.name, baseline, &result.samples)?;
        }
    }
    Ok((results, errors.len()))
}

/// Writes the page and the plots. Returns the plots' paths and the number of results that cannot be used.
pub fn write(results: &[PathBuf], page: &Path, look: &Look<'_>) -> Result<(Vec<PathBuf>, usize)> {
    let (results, unusable) = load(results, look.baseline)?;
    let palette = Palette::new(&results.startups, &results.workloads).with_published(look.published);
    let dir = page.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    store::write_whole(page, html::render(&present::page(&results, &palette)).as_bytes())?;
    Ok((store::write_plots(dir, &results.startups, &results.workloads, &palette)?, unusable))
}
