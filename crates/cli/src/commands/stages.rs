//! `stages`: durations of the stages of all starts, from the daemon's own histograms.

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use sandboxer_probe::document::Table;
use sandboxer_protocol::admin::{StageSummary, StageTimesRequest, StageTimesResponse};

use crate::{Global, client, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli stages
  sandboxer-cli stages --watch
  sandboxer-cli stages --json | jq '.stages[] | {stage, p50_ns}'";

/// Show how long each stage of a start takes, over all starts since the daemon started
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Refresh every second, until Ctrl-C
    #[arg(short, long, conflicts_with = "json")]
    watch: bool,
}

/// Prints the table.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let mut daemon = client::connect(&global.socket).await?;
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        tick.tick().await;
        let answer = client::answer(daemon.stage_times(StageTimesRequest {}).await)?;
        if global.json {
            return render::print_json(&answer);
        }
        if args.watch && io::stdout().is_terminal() {
            // Cursor to the upper left corner, then clear to the end.
            render::print("\x1b[H\x1b[J")?;
        }
        render::print(&text(&answer))?;
        if !args.watch {
            return Ok(());
        }
    }
}

fn text(answer: &StageTimesResponse) -> String {
    if answer.stages.is_empty() {
        return format!("no start within {}", render::duration(answer.over_ns));
    }
    let mut rows =
        Table::new(2, ["STAGE", "OUTCOME", "COUNT", "MEAN", "MIN", "P50", "P90", "P95", "P99", "MAX"]);
    for stage in &answer.stages {
        rows.row(row(stage));
    }
    format!("{rows}\nwithin {}; times are exact to 1 %", render::duration(answer.over_ns))
}

fn row(stage: &StageSummary) -> Vec<String> {
    let mean = stage.sum_ns / stage.count.max(1);
    let times = [mean, stage.min_ns, stage.p50_ns, stage.p90_ns, stage.p95_ns, stage.p99_ns, stage.max_ns];
    let names = [render::plain(&stage.stage), render::plain(&stage.outcome), stage.count.to_string()];
    names.into_iter().chain(times.map(render::duration)).collect()
}
