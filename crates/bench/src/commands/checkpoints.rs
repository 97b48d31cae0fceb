//! `sandboxer-bench checkpoints`: what saving a pod costs, and what starts of its copies do.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use sandboxer_bench::checkpoints::{self, Context, Kind, Plan, Report};
use sandboxer_command::target::Target;
use sandboxer_command::{Global, interrupt, output, progress};
use sandboxer_probe::document::{Table, ms};
use sandboxer_probe::ratio::Ratio;
use sandboxer_probe::summary::Summary;

const EXAMPLES: &str = "\
Examples:
  sandboxer-bench checkpoints --runtime sandboxer --runtime runc
  sandboxer-bench checkpoints --mib 128 --copies 20 --rounds 5 --json";

/// Measure the time to save a pod, and that of starts from there, beside cold starts of the same program
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Runtime handler; repeat to compare several: they alternate. runc has cold starts only
    #[arg(long = "runtime", default_values_t = ["sandboxer".to_owned(), "runc".to_owned()])]
    runtimes: Vec<String>,
    /// Memory that the program fills before it prints, MiB, several separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [16, 128], value_parser = clap::value_parser!(u64).range(1..=16384))]
    mib: Vec<u64>,
    /// Rounds; each has a cold start, a save, a start from there, and groups of both kinds
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Pods of a group, which start at once; 0 for no groups
    #[arg(long, default_value_t = 10)]
    copies: u32,
    #[command(flatten)]
    target: Target,
    /// File for the result, JSON; it must not exist yet
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Measures and prints. Returns an error for a partial run and for failures, after printing the result.
pub async fn run(args: Args, global: &Global) -> Result<()> {
    let bench = args.target.open(global)?;
    let daemon = bench.trace.as_ref().with_context(|| {
        format!("checkpoints are the daemon's, and there is none at {}", global.socket.display())
    })?;
    let output = args.output.as_deref().map(|path| {
        std::fs::File::create_new(path).with_context(|| format!("cannot create {}", path.display()))
    });
    let output = output.transpose()?;
    let plan = Plan {
        runtimes: args.runtimes,
        mib: args.mib,
        rounds: args.rounds,
        copies: args.copies,
        recipe: args.target.recipe(),
    };
    let cancel = interrupt::on_signal().context("cannot listen for Ctrl-C")?;
    let bar = progress::steps(u64::from(plan.rounds) * (plan.runtimes.len() * plan.mib.len()) as u64);
    let mut progress = |runtime: &str| {
        bar.set_message(runtime.to_owned());
        bar.inc(1);
    };
    let context =
        Context { runtime: &bench.runtime, daemon, watch: &bench.watch, clock: bench.clock, cancel: &cancel };
    let report = checkpoints::run(&context, &plan, &mut progress).await?;
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
    let header = ["runtime", "MiB filled", "what", "n", "failed", "min", "p50", "p90", "max", "over runc"];
    let mut rows = Table::new(3, header);
    let at_once = |what: &str| format!("{what}, {} at once", report.copies);
    for series in &report.series {
        let over =
            report.over_runc.iter().find(|over| (&over.runtime, over.mib) == (&series.runtime, series.mib));
        let over = |kind: Kind| {
            over.and_then(|over| over.ratios.get(&kind)).map_or_else(|| "–".into(), Ratio::short)
        };
        let of = |kind: Kind, what: String| (what, series.summary(kind), over(kind));
        let kinds = [
            of(Kind::Cold, "cold start".into()),
            of(Kind::ColdGroup, at_once("cold start")),
            of(Kind::Save, "save".into()),
            ("pause in it".into(), Summary::new(&series.paused_ms, 0), "–".into()),
            of(Kind::Restore, "start from it".into()),
            of(Kind::Copies, at_once("start from it")),
        ];
        for (what, times, over) in kinds.into_iter().filter(|(_, times, _)| times.n > 0) {
            let mut row = vec![series.runtime.clone(), series.mib.to_string(), what];
            row.extend([times.n.to_string(), times.failures.to_string()]);
            row.extend([times.min_ms, times.p50_ms, times.p90_ms, times.max_ms].map(ms));
            row.push(over);
            rows.row(row);
        }
    }
    let mut text = format!(
        "checkpoints, {}, to the first byte; \"over runc\" is over its cold starts of the same program, as many at once\n\n{rows}",
        report.clock.ms()
    );
    for series in report.series.iter().filter(|series| series.stored_bytes > 0) {
        let mib = series.stored_bytes as f64 / f64::from(1 << 20);
        text += &format!(
            "\n{}, {} MiB filled: a checkpoint takes {mib:.1} MiB, with the image",
            series.runtime, series.mib
        );
    }
    for series in &report.series {
        for (kind, why) in &series.failures {
            text += &format!("\n{}, {} MiB, {kind:?}: {why}", series.runtime, series.mib);
        }
    }
    text
}
