//! `sandboxer-bench workload`: the performance of workloads on any runtime.

mod list;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sandboxer_bench::workload::measure;
use sandboxer_bench::workload::native::Native;
use sandboxer_bench::workload::plan::{self, Plan};
use sandboxer_bench::workload::power::Meter;
use sandboxer_command::{Global, interrupt, output, progress, vm};
use sandboxer_probe::clock::Clock;
use sandboxer_probe::document::terminal;
use sandboxer_probe::measure::{self as probe, Bench};
use sandboxer_probe::options::Network;
use sandboxer_probe::present;
use sandboxer_probe::workload::definition::{self, Probe, Profile};
use sandboxer_probe::workload::report;
use sandboxer_probe::workload::run::Run;
use sandboxer_probe::workload::store::{Loaded, Store};

/// Time to start and remove a pod, ms; added to its tool's time to estimate the remaining time.
const POD_MS: u64 = 2_500;

const EXAMPLES: &str = "\
Examples:
  sandboxer-bench workload list
  sandboxer-bench workload --probe cpu --probe redis --runtime runc --runtime sandboxer
  sandboxer-bench workload --runtime runc --runtime sandboxer --profile paper --repeat 10 --output target/workload
  sandboxer-bench workload --probe cpu --runtime runc --runtime runc --repeat 10   # two equal runtimes
  sandboxer-bench workload --probe cpu --runtime runc --runtime sandboxer --runtime vm --vm-image \"$(scripts/bench-vm.sh)\"
  sandboxer-bench workload --probe cpu --runtime runc --json | jq '.series[] | {runtime, case, name, p50}'

`make bench-image` builds the image with the tools from Debian packages and loads it.";

/// Measure workloads on any runtimes: processor, memory, calls, jitter, files, network, servers
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    /// Probe to run; repeat for more [default: all that `workload list` shows]
    #[arg(long = "probe", value_name = "PROBE")]
    probes: Vec<String>,
    /// Runtime handler, "native" for processes of this host, or "vm" for conventional VMs (QEMU's machine q35, Debian's
    /// kernel, systemd); repeat to compare several: they alternate. The same one twice ("runc" and "runc#2") shows how
    /// much two equal runtimes differ
    #[arg(long = "runtime", default_value = "sandboxer")]
    runtimes: Vec<String>,
    /// Unpacked image in which tools of the runtime "native" run: `make bench-native` makes one
    #[arg(long, value_name = "DIR")]
    native_root: Option<PathBuf>,
    /// Unpacked image with compilers and checkers, for native runs of the probe pipeline
    #[arg(long, value_name = "DIR", requires = "native_root")]
    native_build_root: Option<PathBuf>,
    /// Address of this host at which pods reach native servers [default: the default route's]
    #[arg(long, value_name = "ADDRESS", requires = "native_root")]
    native_address: Option<std::net::IpAddr>,
    /// Disk of the VMs of the runtime "vm", in a directory with its kernel and initrd: `make bench-vm` makes one
    #[arg(long, value_name = "FILE")]
    vm_image: Option<PathBuf>,
    /// Address of this host at which pods reach servers in VMs [default: the default route's]
    #[arg(long, value_name = "ADDRESS", requires = "vm_image")]
    vm_address: Option<std::net::IpAddr>,
    /// Runtime handler of the pods that clients of servers run in
    #[arg(long, default_value = "runc")]
    client_runtime: String,
    /// Parameters: quick (scaled down) or paper (the studies')
    #[arg(long, default_value_t)]
    profile: Profile,
    /// Measured rounds: in each, every probe runs once on every runtime; ratios need four
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Warm-up rounds: in each, every runtime runs the first variant of each probe
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=100))]
    warm_up: u32,
    /// Processors of each pod, by quota
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    cpus: u32,
    /// Memory of each pod, MiB
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..=1 << 24))]
    memory: u64,
    /// Runtime handler whose containers do not see their limits, such as gVisor's: the requested ones are assumed, and
    /// the result says so; repeat for more
    #[arg(long = "trust-limits", value_name = "RUNTIME")]
    trusted: Vec<String>,
    /// CRI endpoint of the container runtime
    #[arg(
        long,
        env = "CONTAINER_RUNTIME_ENDPOINT",
        default_value = "unix:///run/containerd/containerd.sock"
    )]
    endpoint: String,
    /// Image with the tools; it must be on the node
    #[arg(long, default_value = "localhost/sandboxer/bench-small:latest")]
    image: String,
    /// Image with compilers and checkers, for the probe pipeline
    #[arg(long, default_value = "localhost/sandboxer/bench-build:latest")]
    build_image: String,
    /// File that a power meter appends to, lines "time,watts" (RFC 3339 or seconds since 1970) [default: the
    /// processors' own counters, if there are any]
    #[arg(long, value_name = "FILE")]
    power_csv: Option<PathBuf>,
    /// Network of the pods: pod or host; servers and their clients need pod
    #[arg(long, default_value_t)]
    network: Network,
    /// Parent of the pods' cgroups
    #[arg(long, env = "SANDBOXER_CGROUP_PARENT", default_value = "")]
    cgroup_parent: String,
    /// Host directory for volumes; file probes measure its disk [default: the directory for temporary files]
    #[arg(long, value_name = "DIR")]
    volumes: Option<PathBuf>,
    /// Timeout of a pod's start, in seconds; a tool gets four times its expected duration on top
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Clock of this host's times: wall or virtual [default: from the kernel's command line, else wall]
    #[arg(long, env = "SANDBOXER_CLOCK")]
    clock: Option<Clock>,
    /// Directory for the result; it must not contain one yet
    #[arg(long)]
    output: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    List(list::Args),
}

/// Measures and prints. Returns an error for a partial run and for failures, after printing the result.
pub async fn run(args: Args, global: &Global) -> Result<()> {
    if let Some(Verb::List(args)) = args.verb {
        return list::run(&args, global);
    }
    let admin = global.socket.exists().then_some(global.socket.as_path());
    let mut bench = Bench::open(&args.endpoint, admin)?;
    bench.clock = args.clock.unwrap_or(bench.clock);
    let output = args.output.clone();
    let plan = plan(args)?;
    measure::check(&bench, &plan).await?;
    let mut store = output.as_deref().map(Store::create).transpose()?;
    let cancel = interrupt::on_signal().context("cannot listen for Ctrl-C")?;
    let bar = progress::time(plan.takes().as_millis() as u64 + plan.runs() * POD_MS);
    let takes = |run: &Run| {
        let steps = plan.steps();
        let step = steps.iter().find(|step| step.probe.name == run.probe && step.case == run.case);
        step.map_or(0, |step| step.takes.as_millis() as u64) + POD_MS
    };
    let mut progress = |run: &Run| {
        bar.set_message(format!("{} {} {}", run.runtime, run.probe, run.case).trim_end().to_owned());
        bar.inc(takes(run));
    };
    let measured = measure::measure(&bench, &plan, store.as_mut(), &cancel, &mut progress).await;
    bar.finish_and_clear();
    let (report, runs) = measured?;
    let measured = Loaded { name: String::new(), report, runs };
    let (report, runs) = (&measured.report, &measured.runs);
    if global.json {
        output::print(report::render(report)?.trim_end())?;
    } else {
        output::print(&terminal::render(&present::workload(&measured)))?;
    }
    if let Some(store) = &store {
        eprintln!("result: {}", store.dir().display());
    }
    match (&report.partial_reason, report.failures(runs)) {
        (Some(why), _) => bail!("the measurement is partial: {why}"),
        (None, 0) => Ok(()),
        (None, failures) => {
            bail!("{failures} of {} runs failed: see 'not measured' and runs.jsonl", runs.len())
        }
    }
}

fn plan(args: Args) -> Result<Plan> {
    let mut recipe = probe::recipe(&args.image, args.network, Duration::from_secs(args.timeout));
    recipe.cgroup_parent = args.cgroup_parent;
    Ok(Plan {
        probes: chosen(&args.probes)?,
        runtimes: plan::series(&args.runtimes),
        native: args.native_root.map(|root| Native {
            build_root: args.native_build_root,
            ..Native::new(root, args.native_address.map(|address| address.to_string()))
        }),
        vm: vm::with_disk(args.vm_image.as_ref(), args.vm_address.map(|address| address.to_string())),
        client_runtime: args.client_runtime,
        profile: args.profile,
        repeat: args.repeat,
        warm_up: args.warm_up,
        cpus: args.cpus,
        memory: args.memory << 20,
        volumes: args.volumes.unwrap_or_else(std::env::temp_dir),
        trusted: args.trusted,
        recipe,
        build_image: args.build_image,
        meter: Meter::find(args.power_csv),
    })
}

/// Returns the named probes in the order of their definition, each once; all if no name is given.
fn chosen(names: &[String]) -> Result<Vec<Probe>> {
    let all = definition::all();
    if let Some(unknown) = names.iter().find(|name| all.iter().all(|probe| probe.name != **name)) {
        let known: Vec<&str> = all.iter().map(|probe| &*probe.name).collect();
        bail!("no probe is named '{unknown}': choose from {}", known.join(", "));
    }
    Ok(all.into_iter().filter(|probe| names.is_empty() || names.contains(&probe.name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_probes_are_named_with_those_that_are_there() {
        let error = chosen(&["cpu".into(), "gpu".into()]).unwrap_err().to_string();
        assert!(error.contains("'gpu'") && error.contains("redis"), "{error}");
        assert_eq!(chosen(&["redis".into(), "cpu".into(), "cpu".into()]).unwrap().len(), 2);
        assert_eq!(chosen(&[]).unwrap().len(), definition::all().len());
    }
}
