//! Gain of running a pod on its own NUMA node: `cargo bench -p sandboxer-e2e --bench placement`. Needs root, two NUMA
//! nodes, and the prerequisites of `make up bench-helper`. `scripts/bench-placement.sh` runs it in a node VM.
//!
//! 1 to N loops run at once, each in a pod of one vCPU or as a process of the host. A loop changes random places of a
//! working set in transactions that arrive at random at a mean rate; latency includes their time in the queue. The
//! bench climbs a ladder of rates and finds the highest one up to which all loops keep a bound of the 99th percentile
//! and do 95 % of the work. The throughput is the sum of the work done there. Series alternate:
//!
//! | series | |
//! |---|---|
//! | placed | pods, `[placement] policy = "numa"` |
//! | unplaced | pods, `policy = "off"` |
//! | pinned | processes, each restricted to the CPUs of one node; nodes in turns |
//! | unpinned | processes |
//!
//! The local share is the part of the loops' CPU time that was spent on the node of their memory: each thread's time
//! since the last sample, times the part of its process's memory that is on the node of the thread's CPU.
//!
//! The plan can be changed by `SANDBOXER_BENCH_ROUNDS` (3), `SANDBOXER_BENCH_PODS` (1,2,… up to the CPUs),
//! `SANDBOXER_BENCH_RATES` (transactions per second, ascending), `SANDBOXER_BENCH_BOUND_MS` (10),
//! `SANDBOXER_BENCH_SECONDS` (10, of each rate) and `SANDBOXER_BENCH_MIB` (64).

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use futures::future::{BoxFuture, FutureExt, try_join_all};
use k8s_cri::v1::Mount;
use sandboxer_base::Cpus;
use sandboxer_e2e::{
    case::{Case, Container, Pod, idle},
    cri::Cri,
    stack::Stack,
};
use sandboxer_probe::summary::median;
use sandboxer_process::{numa::Topology, residence::Residence};
use tokio::runtime::Runtime;

/// Directory of the host's NUMA nodes in sysfs.
const NODES: &str = "/sys/devices/system/node";
/// Path of the loops' program in its pod.
const IN_POD: &str = "/bench-helper";
/// Interval between two samples of where threads and memory are.
const SAMPLE: Duration = Duration::from_millis(500);
/// Fraction of the work that must be done.
const DONE: f64 = 0.95;
/// Ladder of rates of one loop, per second.
const RATES: &str = "500,700,1000,1400,2000,2800,4000,5600,8000,11000,16000,22000,32000";
/// Settings of the pool in the stack's daemon. The bench replaces them: the pool's VMs would run beside the loops.
const POOL: &str = "\nmin = 2\nmax = 2\n";
const NO_POOL: &str = "\nmin = 0\nmax = 0\n";

fn main() -> Result<()> {
    let topology = Topology::read(Path::new(NODES));
    let nodes = topology.nodes().len();
    ensure!(
        nodes >= 2,
        "nothing is measured: this host has {nodes} NUMA node; see scripts/bench-placement.sh"
    );
    let plan = Plan::of_environment()?;
    let runtime = Runtime::new()?;
    let stack = Arc::new(Stack::up(true)?);
    let cri = runtime.block_on(async { Cri::connect(stack.containerd_socket()?) })?;
    let case = Case { stack: Arc::clone(&stack), cri, handler: "sandboxer", name: "bench-placement".into() };
    let measured = runtime.block_on(measure(&case, &topology, &plan));
    let cleaned = runtime.block_on(case.clean_up());
    drop(case);
    Arc::into_inner(stack).context("the stack is still used")?.down()?;
    measured.and(cleaned)
}

/// Plan of the bench.
#[derive(Debug)]
struct Plan {
    rounds: usize,
    pods: Vec<usize>,
    rates: Vec<f64>,
    bound_ms: f64,
    seconds: f64,
    mib: u32,
    helper: PathBuf,
}

impl Plan {
    fn of_environment() -> Result<Self> {
        let cpus = std::thread::available_parallelism()?.get();
        let pods: Vec<String> = (1..=cpus).map(|pods| pods.to_string()).collect();
        let clone = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let helper = clone.join("target/bench-helper/x86_64-unknown-linux-gnu/release/bench-helper");
        ensure!(helper.exists(), "no {}: run 'make bench-helper' first", helper.display());
        let rates = list("SANDBOXER_BENCH_RATES", RATES)?;
        ensure!(rates.is_sorted(), "SANDBOXER_BENCH_RATES are to ascend");
        Ok(Self {
            rounds: setting("SANDBOXER_BENCH_ROUNDS", "3")?,
            pods: list("SANDBOXER_BENCH_PODS", &pods.join(","))?,
            rates,
            bound_ms: setting("SANDBOXER_BENCH_BOUND_MS", "10")?,
            seconds: setting("SANDBOXER_BENCH_SECONDS", "10")?,
            mib: setting("SANDBOXER_BENCH_MIB", "64")?,
            helper,
        })
    }

    /// Returns the command of a loop.
    fn command(&self, helper: &str, rate: f64) -> Vec<String> {
        let Self { seconds, mib, .. } = self;
        let options =
            [format!("--rate={rate}"), format!("--seconds={seconds}"), format!("--working-set={mib}")];
        [helper.to_owned(), "transactions".to_owned()].into_iter().chain(options).collect()
    }
}

fn setting<T: FromStr>(name: &str, default: &str) -> Result<T> {
    let text = std::env::var(name).unwrap_or_else(|_| default.to_owned());
    text.trim().parse().ok().with_context(|| format!("{name}={text} is no number"))
}

fn list<T: FromStr>(name: &str, default: &str) -> Result<Vec<T>> {
    let text = std::env::var(name).unwrap_or_else(|_| default.to_owned());
    let numbers = text.split(',').map(|number| number.trim().parse().ok());
    numbers.collect::<Option<_>>().with_context(|| format!("{name}={text} are no numbers"))
}

/// How loops run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Series {
    Placed,
    Unplaced,
    Pinned,
    Unpinned,
}

impl Series {
    /// All series; pods and processes alternate.
    const ALL: [Self; 4] = [Self::Placed, Self::Pinned, Self::Unplaced, Self::Unpinned];

    fn name(self) -> &'static str {
        match self {
            Self::Placed => "placed",
            Self::Unplaced => "unplaced",
            Self::Pinned => "pinned",
            Self::Unpinned => "unpinned",
        }
    }
}

/// Figures of a series with one number of loops, over all rounds.
#[derive(Debug, Default)]
struct Found {
    /// Transactions per second of all loops at the highest rate that keeps the bound; 0 if none does.
    per_s: Vec<f64>,
    /// The longest p99 of the loops at that rate, ms.
    p99_ms: Vec<f64>,
    /// Local shares at all rates.
    local: Vec<f64>,
    /// Number of rounds in which the ladder had no higher rate.
    at_top: usize,
}

async fn measure(case: &Case, topology: &Topology, plan: &Plan) -> Result<()> {
    let path = case.stack.dir().join("sandboxer/config.toml");
    let config = fs::read_to_string(&path)?;
    ensure!(config.contains(POOL), "{} has another pool", path.display());
    let mut found: HashMap<(usize, Series), Found> = HashMap::new();
    for round in 0..plan.rounds {
        let mut order = Series::ALL;
        if round % 2 == 1 {
            order.reverse();
        }
        for series in order {
            let policy = match series {
                Series::Placed => Some("numa"),
                Series::Unplaced => Some("off"),
                Series::Pinned | Series::Unpinned => None,
            };
            if let Some(policy) = policy {
                let config = config.replacen(POOL, NO_POOL, 1);
                fs::write(&path, format!("{config}\n[placement]\npolicy = \"{policy}\"\n"))?;
                case.stack.kill_worker()?;
            }
            for &pods in &plan.pods {
                let loops = Loops::start(case, topology, plan, series, pods).await?;
                climb(plan, &loops, found.entry((pods, series)).or_default()).await?;
                loops.end(case).await?;
            }
        }
    }
    print(plan, &found);
    Ok(())
}

/// Runs the loops at ascending rates until one is too high.
async fn climb(plan: &Plan, loops: &Loops<'_>, found: &mut Found) -> Result<()> {
    let (mut per_s, mut p99_ms, mut rungs) = (0.0, None, 0);
    for &rate in &plan.rates {
        let (done, local) = loops.run(rate).await?;
        let longest = done.iter().map(|done| done.p99_us / 1e3).fold(0.0, f64::max);
        let sum: f64 = done.iter().map(|done| done.per_s).sum();
        println!(
            "{} × {}: {rate} per s: {sum:.0} in all, p99 {longest:.2} ms, {} local",
            done.len(),
            loops.series.name(),
            percent(local)
        );
        found.local.extend(local);
        if longest > plan.bound_ms || done.iter().any(|done| done.per_s < rate * DONE) {
            break;
        }
        (per_s, p99_ms, rungs) = (sum, Some(longest), rungs + 1);
    }
    found.per_s.push(per_s);
    found.p99_ms.extend(p99_ms);
    found.at_top += usize::from(rungs == plan.rates.len());
    Ok(())
}

fn percent(share: Option<f64>) -> String {
    share.map_or("–".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

fn print(plan: &Plan, found: &HashMap<(usize, Series), Found>) {
    let Plan { rounds, bound_ms, seconds, mib, .. } = plan;
    println!(
        "\n{rounds} rounds, {seconds} s a rate, {mib} MiB a loop, p99 of at most {bound_ms} ms; medians"
    );
    if fs::read_to_string("/proc/cpuinfo").is_ok_and(|info| info.contains("QEMU TCG")) {
        println!(
            "This host's processors are emulated: all memory is as fast. Throughput says nothing of placement here."
        );
    }
    println!("| loops | series | per s, all loops | p99, ms | local | ÷ unpinned |");
    println!("|--:|---|--:|--:|--:|--:|");
    for &pods in &plan.pods {
        let per_s = |series| found.get(&(pods, series)).and_then(|found| median(&found.per_s));
        for series in [Series::Unpinned, Series::Pinned, Series::Unplaced, Series::Placed] {
            let Some(of) = found.get(&(pods, series)) else { continue };
            let ratio = per_s(series).zip(per_s(Series::Unpinned)).filter(|(_, base)| *base > 0.0);
            println!(
                "| {pods} | {} | {:.0}{} | {} | {} | {} |",
                series.name(),
                per_s(series).unwrap_or_default(),
                if of.at_top > 0 { "+" } else { "" },
                median(&of.p99_ms).map_or("–".to_owned(), |p99| format!("{p99:.2}")),
                percent(median(&of.local)),
                ratio.map_or("–".to_owned(), |(per_s, base)| format!("{:.2}", per_s / base)),
            );
        }
    }
}

/// Figures of a loop at a rate.
#[derive(Debug, Clone, Copy)]
struct Done {
    per_s: f64,
    p99_us: f64,
}

impl Done {
    /// Parses the line of `bench-helper`.
    fn parse(text: &str) -> Result<Self> {
        let line: serde_json::Value =
            serde_json::from_str(text.trim()).with_context(|| format!("{text:?}"))?;
        let metric =
            |name: &str| line["metrics"][name].as_f64().with_context(|| format!("no {name}: {text:?}"));
        Ok(Self { per_s: metric("per_s")?, p99_us: metric("p99_us")? })
    }
}

/// Processes of running loops, and the figures that each will return.
type Running<'a> = (Vec<u32>, Vec<BoxFuture<'a, Result<Done>>>);

/// Loops that run at once.
struct Loops<'a> {
    series: Series,
    topology: &'a Topology,
    plan: &'a Plan,
    count: usize,
    cri: Cri,
    /// Pods, each with its VMM and its loop's container; none for processes.
    pods: Vec<(Pod, u32, Container)>,
}

impl<'a> Loops<'a> {
    async fn start(
        case: &Case,
        topology: &'a Topology,
        plan: &'a Plan,
        series: Series,
        count: usize,
    ) -> Result<Self> {
        let mut pods = Vec::new();
        if matches!(series, Series::Placed | Series::Unplaced) {
            for _ in 0..count {
                let config = case.pod_config();
                let pod = case.pod_of(&case.cri.run_pod(&config, "sandboxer-boot").await?, config);
                let mut config = idle("loop");
                config.mounts.push(Mount {
                    container_path: IN_POD.into(),
                    host_path: plan.helper.canonicalize()?.display().to_string(),
                    readonly: true,
                    ..Default::default()
                });
                let container = pod.start(config).await?;
                let vmm = case.vmm_of(&pod.id).await?.as_raw().unsigned_abs();
                pods.push((pod, vmm, container));
            }
        }
        Ok(Self { series, topology, plan, count, cri: case.cri.clone(), pods })
    }

    async fn end(self, case: &Case) -> Result<()> {
        try_join_all(self.pods.iter().map(|(pod, ..)| case.remove(&pod.id))).await.map(drop)
    }

    /// Runs all loops at a rate. Returns the figures of each, and the local share.
    async fn run(&self, rate: f64) -> Result<(Vec<Done>, Option<f64>)> {
        let (processes, running) =
            if self.pods.is_empty() { self.processes(rate)? } else { self.in_pods(rate) };
        let mut running = try_join_all(running);
        let (mut local, mut ticks) = (Local::default(), tokio::time::interval(SAMPLE));
        loop {
            tokio::select! {
                done = &mut running => return Ok((done?, local.share())),
                _ = ticks.tick() => local.sample(self.topology, &processes),
            }
        }
    }

    fn in_pods(&self, rate: f64) -> Running<'_> {
        let command = self.plan.command(IN_POD, rate);
        let run = |container: &Container| {
            let (id, command) = (container.id.clone(), command.clone());
            async move {
                let words: Vec<&str> = command.iter().map(String::as_str).collect();
                let answer = self.cri.exec_sync(&id, &words, None).await?;
                ensure!(answer.exit_code == 0, "{}", String::from_utf8_lossy(&answer.stderr));
                Done::parse(&String::from_utf8(answer.stdout)?)
            }
            .boxed()
        };
        self.pods.iter().map(|(_, vmm, container)| (*vmm, run(container))).unzip()
    }

    fn processes(&self, rate: f64) -> Result<Running<'_>> {
        let nodes = self.topology.nodes();
        let start = |number: usize| {
            let words = self.plan.command(&self.plan.helper.display().to_string(), rate);
            let mut command = match self.series {
                Series::Pinned => {
                    let mut command = Command::new("taskset");
                    command.arg("-c").arg(nodes[number % nodes.len()].cpus.to_string()).arg(&words[0]);
                    command
                }
                _ => Command::new(&words[0]),
            };
            command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::piped());
            let child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
            let (pid, ended) = (child.id(), tokio::task::spawn_blocking(move || child.wait_with_output()));
            let done = async move {
                let output = ended.await??;
                ensure!(output.status.success(), "a loop: {}", output.status);
                Done::parse(&String::from_utf8(output.stdout)?)
            };
            anyhow::Ok((pid, done.boxed()))
        };
        let started = (0..self.count).map(start).collect::<Result<Vec<_>>>()?;
        Ok(started.into_iter().unzip())
    }
}

/// Share of processes' CPU time that was spent on the node of their memory.
#[derive(Debug, Default)]
struct Local {
    /// Clock ticks of each thread so far.
    ticks: HashMap<u32, u64>,
    /// Ticks since the first sample, and how many of them were on the node of the memory.
    all: f64,
    local: f64,
}

impl Local {
    /// Samples where the processes run. Skips processes that have ended.
    fn sample(&mut self, topology: &Topology, processes: &[u32]) {
        for &pid in processes {
            let Ok(Residence { memory, .. }) = Residence::read(pid) else { continue };
            let all: u64 = memory.values().sum();
            for (thread, ticks, cpu) in threads(pid) {
                let since = self.ticks.insert(thread, ticks).map_or(0, |before| ticks.saturating_sub(before));
                let node = Cpus::one(cpu).and_then(|cpu| topology.node_of(&cpu));
                let here = node.and_then(|node| memory.get(&node.id)).copied().unwrap_or_default();
                self.all += since as f64;
                self.local += since as f64 * here as f64 / all.max(1) as f64;
            }
        }
    }

    /// Returns the local share; `None` if nothing ran between two samples.
    fn share(&self) -> Option<f64> {
        (self.all > 0.0).then(|| self.local / self.all)
    }
}

/// Returns the threads of a process, each with its clock ticks and its last CPU.
fn threads(pid: u32) -> Vec<(u32, u64, u32)> {
    let thread = |entry: fs::DirEntry| {
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The third field begins after the name, which may contain anything.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let field = |number: usize| fields.get(number - 3)?.trim().parse::<u64>().ok();
        let ticks = field(14)? + field(15)?;
        Some((entry.file_name().to_str()?.parse().ok()?, ticks, field(39)?.try_into().ok()?))
    };
    fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten().filter_map(thread).collect()
}
