//! `sandboxer-cli startup --kubeconfig`: start-up times by a cluster's own timestamps.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sandboxer_command::{interrupt, progress};
use sandboxer_probe::document::Table;
use sandboxer_probe::kubernetes::client::Client;
use sandboxer_probe::kubernetes::kubeconfig::Access;
use sandboxer_probe::kubernetes::report::{Class, Report};
use sandboxer_probe::kubernetes::startup::{Plan, Row, measure};
use sandboxer_probe::timeline::Recipe;
use sandboxer_probe::workload::summary::shown;

use crate::{Global, render};

/// Number of pods of each RuntimeClass without --serial: enough for a mean of timestamps of whole seconds.
const COUNT: u32 = 30;
/// Name of the result's file.
const FILE: &str = "kubernetes.json";

/// The cluster, and the RuntimeClasses to measure.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "A cluster")]
pub struct Cluster {
    /// Measure in the cluster of this kubeconfig, from a pod's creation until it is Ready, by the cluster's timestamps;
    /// their resolution is 1 s
    #[arg(long, value_name = "FILE", conflicts_with_all = ["runtimes", "parallel", "rounds", "pause", "bare_boot", "vm_image"])]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one]
    #[arg(long, requires = "kubeconfig")]
    context: Option<String>,
    /// Namespace of the pods [default: the context's]
    #[arg(long, requires = "kubeconfig")]
    namespace: Option<String>,
    /// RuntimeClass, "" for none; repeat to compare several: they alternate
    #[arg(long = "runtime-class", value_name = "NAME", requires = "kubeconfig")]
    classes: Vec<String>,
    /// Node that the pods run on, by its label kubernetes.io/hostname [default: the scheduler's choice]
    #[arg(long, requires = "kubeconfig")]
    node: Option<String>,
}

/// The pods to start.
pub struct Pods {
    /// Number of counted pods of each class, if the user sets it.
    pub count: Option<u32>,
    /// Number of warm-up pods of each class, which are not counted.
    pub warm_up: u32,
    /// Image, command and timeout of the pods.
    pub recipe: Recipe,
}

/// Measures and prints. Returns an error for a partial run and for failures, after printing the result.
pub async fn run(
    cluster: &Cluster,
    kubeconfig: &Path,
    pods: Pods,
    output: Option<&Path>,
    global: &Global,
) -> Result<()> {
    let access = Access::read(kubeconfig, cluster.context.as_deref())?;
    let client = Client::new(&access)?;
    let file = output.map(prepare).transpose()?;
    let plan = Plan {
        classes: if cluster.classes.is_empty() { vec!["sandboxer".into()] } else { cluster.classes.clone() },
        count: pods.count.unwrap_or(COUNT),
        warm_up: pods.warm_up,
        namespace: cluster.namespace.clone().unwrap_or(access.namespace),
        run: pods.recipe.run,
        image: pods.recipe.image,
        command: pods.recipe.command,
        node: cluster.node.clone(),
        timeout: pods.recipe.timeout,
    };
    let cancel = interrupt::on_signal().context("cannot listen for Ctrl-C")?;
    let bar = progress::steps(u64::from(plan.count + plan.warm_up) * plan.classes.len() as u64);
    let mut progress = |row: &Row| {
        bar.set_message(row.class.clone());
        bar.inc(1);
    };
    let report = measure(&client, &plan, &cancel, &mut progress).await?;
    bar.finish_and_clear();
    let json = serde_json::to_string_pretty(&report)?;
    if let Some(file) = &file {
        std::fs::write(file, format!("{json}\n"))
            .with_context(|| format!("cannot write {}", file.display()))?;
        eprintln!("result: {}", file.display());
    }
    let text = if global.json { json } else { table(&report) };
    render::print(&text)?;
    let failures: usize = report.classes.values().map(|class| class.failures).sum();
    match failures {
        _ if report.partial => bail!("the run is partial: interrupted"),
        0 => Ok(()),
        failures => bail!("{failures} pods did not get ready: see the notes"),
    }
}

/// Creates the directory of a result; rejects one that already contains a result.
fn prepare(dir: &Path) -> Result<PathBuf> {
    let file = dir.join(FILE);
    if file.exists() {
        bail!("{} has a result already: name another directory", dir.display());
    }
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(file)
}

fn table(report: &Report) -> String {
    let heading = ["RuntimeClass", "n", "failed", "mean s", "sd", "min", "p50", "p90", "max", "pods by s"];
    let mut rows = Table::new(1, heading);
    for (name, class) in &report.classes {
        let spread: Vec<String> = class.pods_by_s.iter().map(|(s, pods)| format!("{s} s: {pods}")).collect();
        let figures =
            [class.mean_s, class.sd_s, class.min_s, class.p50_s, class.p90_s, class.max_s].map(shown);
        let mut row = vec![name.clone(), class.n.to_string(), class.failures.to_string()];
        row.extend(figures);
        row.push(spread.join(", "));
        rows.row(row);
    }
    let mut text = rows.to_string();
    for (name, class) in &report.classes {
        text.push_str(&format!("\n{name}: mean s after creation: {}", steps(class)));
    }
    text.push_str(&format!("\n{}; API server {}", report.measures, report.cluster));
    for note in &report.notes {
        text.push_str(&format!("\nnote: {note}"));
    }
    text
}

/// Returns conditions and events in the order of their mean times.
fn steps(class: &Class) -> String {
    let mut steps: Vec<(&String, &f64)> =
        class.conditions_mean_s.iter().chain(&class.events_mean_s).collect();
    steps.sort_by(|a, b| a.1.total_cmp(b.1));
    let shown = |(name, mean): &(&String, &f64)| format!("{name} {mean:.2}");
    steps.iter().map(shown).collect::<Vec<_>>().join(", ")
}
