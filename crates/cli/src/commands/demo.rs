//! `sandboxer-cli demo`: starts pods in microVMs through a stock containerd, then measures them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::future::join_all;
use sandboxer_probe::{
    attribution::Role,
    ledger::{self, Ledger},
    measure::Bench,
    memory::Sweep,
    runtime::Listed,
    startup::Plan,
    store::Store,
    timeline::{self, RUN_LABEL, Recipe},
};
use tokio_util::sync::CancellationToken;

use super::target::Target;
use super::{interrupt, startup, tables};
use crate::{Global, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli demo
  sandboxer-cli demo --pods 2 --serial 3 --sweep 1,2     shorter
  sandboxer-cli demo --baseline ''                       no comparison with runc";

/// Start pods in microVMs, show what runs inside and outside, and measure time and memory
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Number of pods
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pods: u32,
    /// Runtime handler of the pods
    #[arg(long, default_value = "sandboxer")]
    runtime: String,
    /// Runtime handler to compare with; empty for none
    #[arg(long, default_value = "runc")]
    baseline: String,
    /// Measured starts, per runtime
    #[arg(long, default_value_t = 10)]
    serial: u32,
    /// Pod counts at which memory is measured
    #[arg(long, value_delimiter = ',', default_value = "1,5,10")]
    sweep: Vec<u32>,
    #[command(flatten)]
    target: Target,
    /// Directory for the results; it must not contain any yet
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Runs the demo. Removes every pod that it started before it returns.
pub async fn run(args: Args, global: &Global) -> Result<()> {
    let bench = args.target.open(global)?;
    let cancel = interrupt::on_signal().context("cannot listen for Ctrl-C")?;
    let mut recipe = args.target.recipe();
    recipe.command = ["sh", "-c", "echo \"hello from $(hostname), kernel $(uname -r)\"; exec sleep 86400"]
        .map(str::to_owned)
        .to_vec();

    let shown = show(&args, &bench, &recipe, &cancel).await;
    let removed = timeline::remove_all(&bench.runtime, &recipe.run).await;
    shown?;
    heading(&format!("{} pods removed", removed?))?;
    if cancel.is_cancelled() {
        bail!("interrupted");
    }
    figures(&args, &bench, &cancel).await
}

fn heading(text: &str) -> std::io::Result<()> {
    render::print(&format!("\n── {text}\n"))
}

async fn show(args: &Args, bench: &Bench, recipe: &Recipe, cancel: &CancellationToken) -> Result<()> {
    let version = bench.runtime.version().await?;
    render::print(&format!("{} {} at {}", version.name, version.version, bench.runtime.socket().display()))?;
    if let Some(trace) = &bench.trace {
        let daemon = trace.version().await.map_err(|status| {
            anyhow::anyhow!("no daemon answers at {}: {}", trace.socket().display(), status.message())
        })?;
        render::print(&format!(
            "sandboxer {}, pid {}: {} {} on {} ({})",
            daemon.version,
            daemon.front_pid,
            daemon.vmm,
            daemon.vmm_version,
            daemon.accelerator,
            daemon.accelerator_reason
        ))?;
    }
    sandboxer_probe::startup::check_handlers(&bench.runtime, std::slice::from_ref(&args.runtime)).await?;

    heading(&format!("{} pods with one container each, on handler {}", args.pods, args.runtime))?;
    let starts = (1..=args.pods).map(|number| {
        let name = format!("demo-{number}");
        async move {
            let start =
                timeline::start(&bench.runtime, &bench.watch, recipe, &args.runtime, &name, cancel).await;
            (name, start)
        }
    });
    let starts = join_all(starts).await;
    let mut rows = tables::table(&["pod", "id", "container", "first byte after, ms", "its log"], 5);
    let mut first = None;
    for (name, start) in &starts {
        if let Err(error) = &start.end {
            bail!("pod {name} did not start: {error}");
        }
        let (pod, container) = (start.pod_id.as_deref().unwrap_or_default(), start.container_id.as_deref());
        let container = container.unwrap_or_default();
        first.get_or_insert(container);
        let log = std::fs::read_to_string(bench.watch.dir().join(format!("{name}.log")))?;
        let line =
            log.lines().next().and_then(|line| line.splitn(4, ' ').nth(3)).unwrap_or_default().to_owned();
        let ms = start.stamps.first_byte.map(|time| time.as_secs_f64() * 1e3);
        rows.add_row([name.clone(), render::short(pod), render::short(container), tables::ms(ms), line]);
    }
    render::print(&format!("{rows}"))?;

    let Some(container) = first else { bail!("no container started") };
    heading("inside and outside")?;
    let inside = exec(bench, container, "uname -r").await?;
    let outside = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    render::print(&format!("$ uname -r        inside {inside}, outside {}", outside.trim()))?;
    for command in ["id", "ps", "free -m"] {
        render::print(&format!("$ {command}  (exec in demo-1)\n{}", exec(bench, container, command).await?))?;
    }

    heading("processes on the host, and how each was matched to a pod")?;
    let mine = |pod: &Listed| pod.labels.get(RUN_LABEL) == Some(&recipe.run);
    let ledger = ledger::take(&bench.runtime, mine, &BTreeSet::new()).await?;
    render::print(&tables::ledger(&args.runtime, &ledger))?;
    render::print(&format!(
        "{} resident, {} VMMs for {} pods, {} shims, {} pause containers",
        count(&ledger, Role::Daemon),
        count(&ledger, Role::Vmm),
        ledger.pods,
        count(&ledger, Role::Shim),
        count(&ledger, Role::Pause)
    ))?;
    Ok(())
}

fn count(ledger: &Ledger, role: Role) -> usize {
    ledger.entries.iter().filter(|entry| entry.found.role == role).count()
}

async fn exec(bench: &Bench, container: &str, command: &str) -> Result<String> {
    let output = bench.runtime.exec_sync(container, ["sh", "-c", command], None).await?;
    if output.exit_code != 0 {
        bail!(
            "'{command}' exited with {}: {}",
            output.exit_code,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

async fn figures(args: &Args, bench: &Bench, cancel: &CancellationToken) -> Result<()> {
    let output = args.output.as_ref();
    let runtimes: Vec<String> =
        [&args.runtime, &args.baseline].into_iter().filter(|name| !name.is_empty()).cloned().collect();

    let recipe = args.target.recipe();
    // Pods of other runtimes, and copies of a template, have no VM that could be booted alone.
    let mut bare_boot = bench.bare_boot(&format!("{}-boot", args.runtime), &recipe).await;
    if bare_boot.is_err() {
        bare_boot = bench.bare_boot(&args.runtime, &recipe).await;
    }
    if let Err(error) = &bare_boot {
        eprintln!("no bare boot for comparison: {error}");
    }
    let plan = Plan {
        runtimes: runtimes.clone(),
        serial: args.serial,
        group: 0,
        rounds: 0,
        warm_up: 1,
        // The daemon refills its pool during the pause.
        pause: Duration::from_secs(1),
        recipe,
        bare_boot: bare_boot.ok(),
        vm: None,
    };
    let mut store = output.map(|dir| Store::create(&dir.join("startup"))).transpose()?;
    let bar = startup::bar(plan.pods());
    let mut progress = |_: &sandboxer_probe::sample::Sample| bar.inc(1);
    let (report, samples) = bench.startup(&plan, store.as_mut(), cancel, &mut progress).await?;
    bar.finish_and_clear();
    heading("start-up")?;
    render::print(&format!("{}{}", tables::startup(&report), tables::remarks(&report)))?;
    if let Some(why) = report.partial_reason {
        bail!("the run is partial: {why}");
    }
    drop(samples);

    let sweep =
        Sweep { runtimes, counts: args.sweep.clone(), repeat: 1, recipe: args.target.recipe(), vm: None };
    let mut store = output.map(|dir| Store::create(&dir.join("memory"))).transpose()?;
    let (report, _) = bench.memory(&sweep, store.as_mut(), cancel, &mut |_| ()).await?;
    heading("memory")?;
    render::print(&format!("{}{}", tables::memory(&report), tables::remarks(&report)))?;
    if let Some(why) = report.partial_reason {
        bail!("the run is partial: {why}");
    }
    if let Some(dir) = output {
        let page = dir.join("report.html");
        super::report::write(&[dir.join("startup"), dir.join("memory")], &page)?;
        render::print(&format!("\nreport: {}", page.display()))?;
    }
    Ok(())
}
