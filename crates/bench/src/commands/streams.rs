//! `sandboxer-bench streams`: the cost of commands in containers and of containers' logs.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use sandboxer_bench::streams::{self, Context, Plan, Report};
use sandboxer_command::target::Target;
use sandboxer_command::{Global, interrupt, output, progress};
use sandboxer_probe::document::{Table, ms};
use sandboxer_probe::ratio::Ratio;

const EXAMPLES: &str = "\
Examples:
  sandboxer-bench streams --runtime sandboxer --runtime runc
  sandboxer-bench streams --execs 0 --logs 3 --mib 100 --json";

/// Measure the time of a command in a container, and the rate of a container's log, on any runtimes
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Runtime handler; repeat to compare several: they alternate
    #[arg(long = "runtime", default_value = "sandboxer")]
    runtimes: Vec<String>,
    /// Commands (`true`) that are run in a container, per runtime
    #[arg(long, default_value_t = 20)]
    execs: u32,
    /// Logs that a container writes, per runtime
    #[arg(long, default_value_t = 5)]
    logs: u32,
    /// Size of a log, MiB. It must fit into a pod's /dev/shm
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=60))]
    mib: u64,
    /// Length of a line, bytes
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(2..=8192))]
    line: u64,
    #[command(flatten)]
    target: Target,
    /// File for the result, JSON; it must not exist yet
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Measures and prints. Returns an error for a partial run and for failures, after printing the result.
pub async fn run(args: Args, global: &Global) -> Result<()> {
    let bench = args.target.open(global)?;
    let output = args.output.as_deref().map(|path| {
        std::fs::File::create_new(path).with_context(|| format!("cannot create {}", path.display()))
    });
    let output = output.transpose()?;
    let plan = Plan {
        runtimes: args.runtimes,
        execs: args.execs,
        logs: args.logs,
        bytes: args.mib << 20,
        line: args.line,
        recipe: args.target.recipe(),
    };
    let cancel = interrupt::on_signal().context("cannot listen for Ctrl-C")?;
    let bar = progress::steps((u64::from(plan.execs) + u64::from(plan.logs)) * plan.runtimes.len() as u64);
    let mut progress = |runtime: &str| {
        bar.set_message(runtime.to_owned());
        bar.inc(1);
    };
    let context =
        Context { runtime: &bench.runtime, watch: &bench.watch, clock: bench.clock, cancel: &cancel };
    let report = streams::run(&context, &plan, &mut progress).await?;
    bar.finish_and_clear();
    if let Some(file) = output {
        serde_json::to_writer_pretty(file, &report).context("cannot write the result")?;
    }
    if global.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    match (&report.partial, report.failures()) {
        (Some(why), _) => bail!("the run is partial: {why}"),
        (None, 0) => Ok(()),
        (None, failures) => bail!("{failures} measurements failed"),
    }
}

fn text(report: &Report) -> String {
    let unit = report.clock.ms();
    let mut rows =
        Table::new(2, ["runtime", "what", "n", "failed", "min", "p50", "p90", "max", "MiB/s", "over runc"]);
    let over = |ratio: Option<&Ratio>| ratio.map_or_else(|| "–".into(), Ratio::short);
    for series in &report.series {
        let (name, mib) = (&series.runtime, report.bytes as f64 / f64::from(1 << 20));
        let kinds = [
            ("exec true", series.exec(), false, over(report.exec_over_runc.get(name))),
            ("log", series.log(), true, over(report.rate_over_runc.get(name))),
            ("log, container's clock", series.write(), true, "–".into()),
        ];
        for (what, times, has_rate, over) in kinds.into_iter().filter(|(_, times, ..)| times.n > 0) {
            let rate = times.p50_ms.filter(|_| has_rate).map(|ms| format!("{:.1}", mib * 1e3 / ms));
            let mut row = vec![name.clone(), what.into(), times.n.to_string(), times.failures.to_string()];
            row.extend([times.min_ms, times.p50_ms, times.p90_ms, times.max_ms].map(ms));
            row.extend([rate.unwrap_or_else(|| "–".into()), over]);
            rows.row(row);
        }
    }
    let mut text = format!(
        "streams, {unit}; a log is {} bytes in lines of {}; \"over runc\" is of times for execs, of rates for logs\n\n{rows}",
        report.bytes, report.line
    );
    for series in &report.series {
        for why in series.exec_failures.iter().chain(&series.log_failures) {
            text += &format!("\n{}: {why}", series.runtime);
        }
    }
    text
}
