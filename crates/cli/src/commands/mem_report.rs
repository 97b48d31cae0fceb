//! `sandboxer-cli mem-report`: the memory of pods.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sandboxer_command::target::Target;
use sandboxer_command::{interrupt, progress, vm};
use sandboxer_probe::{
    document::terminal,
    idle::Windows,
    ledger,
    memory::{FULL_REPEAT, Sweep},
    native::NATIVE,
    present, report, runtime_class,
    store::Store,
    vm::VM,
};

use crate::{Global, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli mem-report                               the pods that run now
  sandboxer-cli mem-report --sweep 1,5,10 --repeat 1
  sandboxer-cli mem-report --sweep 1,5 --runtime runc --runtime vm --vm-image \"$(scripts/bench-vm.sh)\"
  sandboxer-cli mem-report --sweep --runtimeclass        for kubectl apply -f -";

/// Measure the memory of pods by role: of the running pods, or of pods started in a sweep of counts
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Runtime handler; with --sweep also "native" for the command as a process of this host, or "vm" for conventional
    /// VMs; repeat to compare several
    #[arg(long = "runtime")]
    runtimes: Vec<String>,
    /// Disk of the VMs of the runtime "vm", in a directory with its kernel and initrd: `make bench-vm` makes one
    #[arg(long, value_name = "FILE", requires = "sweep")]
    vm_image: Option<PathBuf>,
    /// Start pods up to each of these counts and measure there: e.g. 1,5,10,20,30,50
    #[arg(long, value_delimiter = ',', num_args = 0..=1, default_missing_value = "1,5,10,20,30,50")]
    sweep: Vec<u32>,
    /// Repetitions of the sweep
    #[arg(long, default_value_t = FULL_REPEAT)]
    repeat: u32,
    /// Seconds of each of three or more windows in which the CPU time of the idle pods is measured, at the largest
    /// count; 0: not measured
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(..=3600))]
    idle: u64,
    /// Print a Kubernetes RuntimeClass with the measured overhead; with --sweep also of a pod that uses all of its
    /// memory limit
    #[arg(long)]
    runtimeclass: bool,
    /// Memory limit of that pod, MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(16..=1 << 20), requires = "runtimeclass")]
    busy_mib: u64,
    #[command(flatten)]
    target: Target,
    /// Directory for the result; it must not contain one yet
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Measures and prints. Returns an error for a partial run, after printing its result.
pub async fn run(args: Args, global: &Global) -> Result<()> {
    if args.sweep.is_empty() {
        return now(&args, global).await;
    }
    let mut counts = args.sweep.clone();
    counts.sort_unstable();
    counts.dedup();
    if counts.first() == Some(&0) || args.repeat == 0 {
        bail!("a sweep needs counts of at least 1 and at least one repetition");
    }
    if let Some(own) =
        args.runtimes.iter().find(|name| args.runtimeclass && [VM, NATIVE].contains(&name.as_str()))
    {
        bail!("{own} is no runtime handler: leave out --runtimeclass");
    }
    let bench = args.target.open(global)?;
    let runtimes = if args.runtimes.is_empty() { vec!["sandboxer".into()] } else { args.runtimes.clone() };
    let sweep = Sweep {
        runtimes,
        counts,
        repeat: args.repeat,
        recipe: args.target.recipe(),
        vm: vm::with_disk(args.vm_image.as_ref(), None),
        idle: Windows { length: Duration::from_secs(args.idle), ..Windows::default() },
    };
    let mut store = args.output.as_deref().map(Store::create).transpose()?;
    let cancel = interrupt::on_signal().context("cannot listen for Ctrl-C")?;
    let bar = progress::steps(u64::from(sweep.repeat) * (sweep.counts.len() * sweep.runtimes.len()) as u64);
    bar.tick();
    let mut progress = |point: &sandboxer_probe::memory::Point| {
        bar.set_message(format!("{} with {} pods: measured", point.runtime, point.ledger.pods));
        bar.inc(1);
    };
    let (report, _) = bench.memory(&sweep, store.as_mut(), &cancel, &mut progress).await?;
    bar.finish_and_clear();
    if args.runtimeclass && report.partial_reason.is_some() {
        // Only a whole sweep gives a valid overhead.
        eprintln!("no RuntimeClass is printed, because the sweep did not end");
    } else if args.runtimeclass {
        eprintln!("measuring a pod that uses all of its {} MiB", args.busy_mib);
        let busy = bench.busy(&sweep, args.busy_mib, &cancel).await.map_err(anyhow::Error::msg)?;
        for (runtime, marginal) in &report.marginal_kib_per_pod {
            let busy = busy.get(runtime).with_context(|| format!("no busy pod ran on {runtime}"))?;
            render::print(runtime_class::from_sweep(runtime, marginal, busy, &report).trim_end())?;
        }
    } else if global.json {
        render::print(report::render(&report).trim_end())?;
    } else {
        render::print(&terminal::render(&present::memory(&report, Vec::new())))?;
    }
    if let Some(store) = &store {
        eprintln!("result: {}", store.dir().display());
    }
    match report.partial_reason {
        Some(why) => bail!("the run is partial: {why}"),
        None => Ok(()),
    }
}

/// Prints the memory of the running pods.
async fn now(args: &Args, global: &Global) -> Result<()> {
    let bench = args.target.open(global)?;
    let running = bench.runtime.pods(&Default::default()).await?;
    let mut handlers: BTreeSet<String> =
        running.iter().filter(|pod| pod.running).map(|pod| pod.handler.clone()).collect();
    if !args.runtimes.is_empty() {
        handlers = args.runtimes.iter().cloned().collect();
    }
    let mut ledgers = BTreeMap::new();
    for handler in handlers {
        let mine = |pod: &sandboxer_probe::runtime::Listed| pod.handler == handler;
        ledgers.insert(handler.clone(), ledger::take(&bench.runtime, mine, &BTreeSet::new()).await?);
    }
    let recipe = args.target.recipe();
    let report = bench.ledgers(&ledgers, &recipe).await;
    if let Some(dir) = &args.output {
        let store = Store::create(dir)?;
        store.report(&report, &[])?;
        eprintln!("result: {}", dir.display());
    }
    if args.runtimeclass {
        for (handler, ledger) in &ledgers {
            render::print(runtime_class::from_ledger(handler, ledger)?.trim_end())?;
        }
    } else if global.json {
        render::print(report::render(&report).trim_end())?;
    } else if ledgers.is_empty() {
        render::print("no pods are running")?;
    } else {
        let processes =
            ledgers.iter().flat_map(|(handler, ledger)| present::ledger(handler, ledger)).collect();
        render::print(&terminal::render(&present::memory(&report, processes)))?;
    }
    Ok(())
}
