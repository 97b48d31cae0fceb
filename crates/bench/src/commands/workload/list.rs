//! `sandboxer-bench workload list`: the list of probes.

use anyhow::Result;
use sandboxer_command::{Global, output};
use sandboxer_probe::document::Table;
use sandboxer_probe::workload::definition::{self, Better, Metric, Probe, Profile};

/// List the probes with their study, metrics and duration
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Also show the tools' command lines
    #[arg(long)]
    commands: bool,
}

/// Prints the probes; with --json their definitions.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let probes = definition::all();
    if global.json {
        return output::print_json(&probes);
    }
    let mut rows = Table::new(4, ["probe", "what", "metrics", "study", "variants", "quick s", "paper s"]);
    for probe in &probes {
        let variants =
            [Profile::Quick, Profile::Paper].map(|profile| probe.cases(profile).count().to_string());
        rows.row(vec![
            probe.name.clone(),
            format!("{} ({})", probe.what, probe.tool),
            probe.metrics.iter().map(metric).collect::<Vec<_>>().join(", "),
            probe.study.clone(),
            variants.join("/"),
            format!("{:.0}", probe.takes(Profile::Quick)),
            format!("{:.0}", probe.takes(Profile::Paper)),
        ]);
    }
    let mut text = rows.to_string();
    text.push_str("\nSeconds count the tools only: per round and runtime, over all variants.");
    if args.commands {
        text.push_str(&commands(&probes));
    }
    Ok(output::print(&text)?)
}

fn metric(metric: &Metric) -> String {
    let arrow = match metric.better {
        Better::Higher => "↑",
        Better::Lower => "↓",
    };
    format!("{} {arrow}", metric.name)
}

fn commands(probes: &[Probe]) -> String {
    let mut text = String::from("\n");
    for probe in probes {
        if !probe.server.is_empty() {
            text.push_str(&format!("\n{}, server: {}", probe.name, probe.server.join(" ")));
        }
        text.push_str(&format!("\n{}: {}", probe.name, probe.command.join(" ")));
    }
    text
}
