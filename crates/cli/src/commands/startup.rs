//! `sandboxer-cli startup`: start-up times of pods.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sandboxer_command::target::Target;
use sandboxer_command::{interrupt, progress, vm};
use sandboxer_probe::{
    document::terminal,
    present, report,
    startup::{FULL_SERIAL, Plan},
    store::Store,
};

use super::cluster::{self, Cluster};
use crate::{Global, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli startup --serial 10 --parallel 0
  sandboxer-cli startup --runtime sandboxer --runtime runc --output target/startup
  sandboxer-cli startup --runtime sandboxer --runtime kata --runtime runc --baseline kata --serial 20 --parallel 8 --rounds 3
  sandboxer-cli startup --serial 0 --parallel 0 --sustained 100         what a pool keeps up
  sandboxer-cli startup --serial 10 --parallel 0 --bare-boot --json | jq .
  sandboxer-cli startup --runtime native --runtime runc --runtime vm --vm-image \"$(scripts/bench-vm.sh)\" --serial 10 --parallel 0
  sandboxer-cli startup --kubeconfig ~/.kube/config --runtime-class sandboxer --runtime-class runc";

/// Measure how fast pods start on any runtimes, which alternate
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Runtime handler, "native" for the command as a process of this host, or "vm" for a conventional VM (QEMU's
    /// machine q35, Debian's kernel, systemd); repeat to compare several: they alternate
    #[arg(long = "runtime", default_value = "sandboxer")]
    runtimes: Vec<String>,
    /// Serial starts (one after the other), per runtime [default: 500, of a cluster 30]
    #[arg(long)]
    serial: Option<u32>,
    /// Pods in a group that starts at once; 0 for no groups
    #[arg(long, default_value_t = 50)]
    parallel: u32,
    /// Groups per runtime
    #[arg(long, default_value_t = 10)]
    rounds: u32,
    /// Runtime with which all others are compared, besides runc: ratios to it, and how many times faster they are
    #[arg(long, value_name = "NAME", conflicts_with = "kubeconfig")]
    baseline: Option<String>,
    /// Starts per runtime one after the other without pauses and without alternating: how many pods a minute it keeps
    /// up, and the host's CPU time for each
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "kubeconfig")]
    sustained: u32,
    /// Warm-up starts per runtime
    #[arg(long, default_value_t = 1)]
    warm_up: u32,
    /// Seconds of pause before each start or group, for background work of the last one: a runtime with a pool of VMs
    /// refills it then, and not during another runtime's turn
    #[arg(long, default_value_t = 0.0, value_parser = clap::value_parser!(f64))]
    pause: f64,
    /// Boot the first runtime's VM without a pod after each serial round, for comparison
    #[arg(long)]
    bare_boot: bool,
    /// Disk of the VMs of the runtime "vm", in a directory with its kernel and initrd: `make bench-vm` makes one
    #[arg(long, value_name = "FILE")]
    vm_image: Option<PathBuf>,
    #[command(flatten)]
    cluster: Cluster,
    #[command(flatten)]
    target: Target,
    /// Directory for the result; it must not contain one yet
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Measures and prints. Returns an error for a partial run and for failures, after printing the result.
pub async fn run(args: Args, global: &Global) -> Result<()> {
    if let Some(kubeconfig) = &args.cluster.kubeconfig {
        let pods = cluster::Pods { count: args.serial, warm_up: args.warm_up, recipe: args.target.recipe() };
        return cluster::run(&args.cluster, kubeconfig, pods, args.output.as_deref(), global).await;
    }
    let bench = args.target.open(global)?;
    let recipe = args.target.recipe();
    let bare_boot = match args.runtimes.first() {
        Some(first) if args.bare_boot => Some(bench.bare_boot(first, &recipe).await?),
        _ => None,
    };
    let plan = Plan {
        runtimes: args.runtimes,
        serial: args.serial.unwrap_or(FULL_SERIAL),
        group: args.parallel,
        rounds: if args.parallel == 0 { 0 } else { args.rounds },
        sustained: args.sustained,
        warm_up: args.warm_up,
        pause: Duration::try_from_secs_f64(args.pause).context("--pause takes seconds from 0 up")?,
        recipe,
        bare_boot,
        vm: vm::with_disk(args.vm_image.as_ref(), None),
        baseline: args.baseline,
    };
    let mut store = args.output.as_deref().map(Store::create).transpose()?;
    let cancel = interrupt::on_signal().context("cannot listen for Ctrl-C")?;
    let bar = progress::steps(plan.pods());
    let mut progress = |sample: &sandboxer_probe::sample::Sample| {
        bar.set_message(format!("{} {}", sample.runtime, sample.mode));
        bar.inc(1);
    };
    let (report, _) = bench.startup(&plan, store.as_mut(), &cancel, &mut progress).await?;
    bar.finish_and_clear();
    if global.json {
        render::print(report::render(&report).trim_end())?;
    } else {
        render::print(&terminal::render(&present::startup(&report)))?;
    }
    if let Some(store) = &store {
        eprintln!("result: {}", store.dir().display());
    }
    let failures: usize = report.series.iter().map(|series| series.summary.failures).sum();
    match report.partial_reason {
        Some(why) => bail!("the run is partial: {why}"),
        None if failures > 0 => bail!("{failures} starts failed: see the notes"),
        None => Ok(()),
    }
}
