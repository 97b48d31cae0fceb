//! Many starts in a fair order: runtimes alternate, a barrier releases all pods of a group at once, failures and
//! interruptions stay in the data, and every pod is removed afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::attribution::PodIds;
use crate::bare_boot::BareBoot;
use crate::exits::{Counts, Exits};
use crate::first_byte::LogWatch;
use crate::manifest::Facts;
use crate::native::{NATIVE, Process};
use crate::process;
use crate::rate::{Rate, SETTLE, processor_time};
use crate::runtime::{Runtime, RuntimeError, Version};
use crate::sample::{Mode, Outcome, Sample};
use crate::sides;
use crate::timeline::{self, Recipe, Stamps, Start, StartError};
use crate::trace::{self, Trace};
use crate::vm::process::Task;
use crate::vm::{self, VM, Vm, VmError};

/// Minimum number of starts per runtime in a full serial series.
pub const FULL_SERIAL: u32 = 500;
/// Timeout of a VM's first answered ping, from its command's first byte.
const PING_TIMEOUT: Duration = Duration::from_secs(30);

/// Plan of a measurement.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Handlers, in the order in which they alternate.
    pub runtimes: Vec<String>,
    /// Number of serial starts per handler.
    pub serial: u32,
    /// Number of pods in a parallel group.
    pub group: u32,
    /// Number of parallel groups per handler.
    pub rounds: u32,
    /// Number of starts per handler without a pause, to measure the sustained rate; 0: not measured.
    pub sustained: u32,
    /// Number of warm-up starts per handler.
    pub warm_up: u32,
    /// Pause before each start or group, for background work of the previous one, such as filling a pool.
    pub pause: Duration,
    /// Recipe of the pods.
    pub recipe: Recipe,
    /// VM to boot alone after each serial round, for comparison.
    pub bare_boot: Option<BareBoot>,
    /// Configuration of the VMs of the series `vm`.
    pub vm: Option<Vm>,
    /// Handler with which the others are compared, besides runc.
    pub baseline: Option<String>,
}

impl Plan {
    /// Returns the number of pods to start.
    pub fn pods(&self) -> u64 {
        let serial = u64::from(self.warm_up) + u64::from(self.serial);
        let of_groups = u64::from(self.rounds) * u64::from(self.group);
        let of_handlers = of_groups + u64::from(self.sustained);
        serial * self.runtimes.len() as u64 + of_handlers * self.handlers().len() as u64
    }

    /// Returns the runtimes that are CRI handlers.
    pub fn handlers(&self) -> Vec<String> {
        self.runtimes.iter().filter(|name| ![VM, NATIVE].contains(&name.as_str())).cloned().collect()
    }

    /// Returns the configuration of VMs, if the plan has the series `vm`.
    pub fn vms(&self) -> Result<Option<&Vm>, VmError> {
        if !self.runtimes.iter().any(|name| name == VM) {
            return Ok(None);
        }
        let vm = self.vm.as_ref().ok_or(VmError::NoImage)?;
        vm.image.check().map(|()| Some(vm))
    }
}

/// Why a plan cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The runtime does not respond.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The runtime has no such handler.
    #[error("the runtime at {endpoint} has no handler '{handler}'; it has {known}")]
    NoHandler {
        /// Path of the runtime's socket.
        endpoint: String,
        /// The requested handler.
        handler: String,
        /// The existing handlers.
        known: String,
    },
    /// The image is not on the node.
    #[error("image {0} is not on the node: pull or import it first; a start must not include a pull")]
    NoImage(String),
    /// The series `vm` cannot be measured.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The plan has nothing to measure.
    #[error("nothing to measure: {0}")]
    Empty(&'static str),
    /// The plan does not measure the baseline.
    #[error("the baseline '{baseline}' is not measured: add --runtime {baseline}, or choose from {runtimes}")]
    NoBaseline {
        /// Name of the baseline.
        baseline: String,
        /// The handlers that are measured.
        runtimes: String,
    },
}

/// A group of pods that started at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Runtime handler.
    pub runtime: String,
    /// Number of the group, from 0.
    pub round: u32,
    /// Time from the first start request to the last first byte, ms; `None` if a pod failed.
    pub wall_ms: Option<f64>,
    /// Time between the first and the last start request, ms.
    pub release_spread_ms: f64,
}

/// Result of a measurement.
#[derive(Debug, Default)]
pub struct Run {
    /// One sample per pod, in order of completion within a group.
    pub samples: Vec<Sample>,
    /// One entry per complete group.
    pub batches: Vec<Batch>,
    /// Sustained rate of each handler.
    pub rates: BTreeMap<String, Rate>,
    /// Times of bare boots, ms.
    pub bare_boots: Vec<f64>,
    /// Reasons for failed bare boots.
    pub bare_failures: Vec<String>,
    /// The VM of each handler's first pod, if a daemon reports it.
    pub vms: BTreeMap<String, Facts>,
    /// Reasons for which the exits of a handler's guests are unknown.
    pub no_exits: BTreeMap<String, String>,
    /// The reason for an early end; `None` if the measurement is complete.
    pub partial: Option<String>,
    /// Notes, for example on pods that could not be removed.
    pub notes: Vec<String>,
}

/// Checks that the handlers and the image exist. Starts nothing.
pub async fn check(runtime: &Runtime, plan: &Plan) -> Result<Version, PlanError> {
    if plan.runtimes.is_empty() {
        return Err(PlanError::Empty("name at least one runtime handler"));
    }
    if plan.serial == 0 && plan.sustained == 0 && (plan.rounds == 0 || plan.group == 0) {
        return Err(PlanError::Empty("request serial, parallel or sustained starts"));
    }
    if let Some(baseline) = plan.baseline.as_ref().filter(|baseline| !plan.runtimes.contains(baseline)) {
        let (baseline, runtimes) = (baseline.clone(), plan.runtimes.join(", "));
        return Err(PlanError::NoBaseline { baseline, runtimes });
    }
    plan.vms()?;
    let version = runtime.version().await?;
    check_handlers(runtime, &plan.handlers()).await?;
    if runtime.image(&plan.recipe.image).await?.is_none() {
        return Err(PlanError::NoImage(plan.recipe.image.clone()));
    }
    Ok(version)
}

/// Checks that the handlers exist, if the runtime reports its handlers.
pub async fn check_handlers(runtime: &Runtime, handlers: &[String]) -> Result<(), PlanError> {
    let (known, _) = runtime.describe().await?;
    for handler in handlers {
        if !known.is_empty() && !known.contains(handler) {
            let mut named: Vec<_> = known.into_iter().filter(|name| !name.is_empty()).collect();
            named.sort();
            return Err(PlanError::NoHandler {
                endpoint: runtime.socket().display().to_string(),
                handler: handler.clone(),
                known: named.join(", "),
            });
        }
    }
    Ok(())
}

/// Receives each sample; an error (such as a full disk) ends the run.
pub type Sink<'a> = &'a mut (dyn FnMut(&Sample) -> Result<(), String> + Send);

/// Measures. Ends early, with the reason, if `cancel` is cancelled, the runtime is gone or `sink` fails.
pub async fn run(
    runtime: &Runtime,
    watch: Arc<LogWatch>,
    trace: Option<&Trace>,
    plan: &Plan,
    cancel: &CancellationToken,
    sink: Sink<'_>,
) -> Run {
    let mut runner = Runner {
        runtime: runtime.clone(),
        watch,
        trace: trace.cloned(),
        recipe: Arc::new(plan.recipe.clone()),
        vm: plan.vm.clone(),
        cancel: cancel.clone(),
        begun: Instant::now(),
        run: Run::default(),
        exits: Exits::default(),
        serial: 0,
    };
    let ended = runner.all(plan, sink).await;
    let mut run = runner.run;
    run.partial = ended.err();
    match timeline::remove_all(runtime, &plan.recipe.run).await {
        Ok(0) => {}
        Ok(count) => run.notes.push(format!("{count} pods needed a second removal")),
        Err(error) => run.notes.push(format!(
            "pods with label {}={} may still exist: {error}",
            timeline::RUN_LABEL,
            plan.recipe.run
        )),
    }
    run
}

struct Runner {
    runtime: Runtime,
    watch: Arc<LogWatch>,
    trace: Option<Trace>,
    recipe: Arc<Recipe>,
    vm: Option<Vm>,
    cancel: CancellationToken,
    begun: Instant,
    run: Run,
    exits: Exits,
    serial: u64,
}

/// The exits of all VMs before a start, and the VMMs of the started pods.
type Guests<'a> = (&'a Result<Counts, String>, &'a BTreeMap<String, i32>);

/// Place of a pod in the plan.
#[derive(Clone)]
struct Place {
    handler: String,
    mode: Mode,
    round: u32,
    index: u32,
    warm_up: bool,
}

impl Runner {
    /// Runs the whole plan. Returns as an error the reason for an early end.
    async fn all(&mut self, plan: &Plan, sink: Sink<'_>) -> Result<(), String> {
        for (rounds, warm_up) in [(plan.warm_up, true), (plan.serial, false)] {
            for round in 0..rounds {
                for handler in &plan.runtimes {
                    let place =
                        Place { handler: handler.clone(), mode: Mode::Serial, round, index: 0, warm_up };
                    self.rest(plan.pause).await;
                    self.one(place, sink).await?;
                }
                if let Some(vm) = &plan.bare_boot {
                    self.bare_boot(vm, warm_up).await;
                }
            }
        }
        let rounds = if plan.group == 0 { 0 } else { plan.rounds };
        if rounds > 0 && plan.handlers().len() < plan.runtimes.len() {
            self.run.notes.push(format!("series {VM} and {NATIVE} are not started in groups"));
        }
        for round in 0..rounds {
            for handler in &plan.handlers() {
                self.rest(plan.pause).await;
                self.group(handler, round, plan.group, sink).await?;
            }
        }
        for handler in plan.handlers().iter().filter(|_| plan.sustained > 0) {
            self.rest(plan.pause.max(SETTLE)).await;
            self.sustained(handler, plan.sustained, sink).await?;
        }
        Ok(())
    }

    /// Starts and removes pods of one handler without a pause. Their CPU time includes the work that they leave behind.
    async fn sustained(&mut self, handler: &str, starts: u32, sink: Sink<'_>) -> Result<(), String> {
        let (before, begun, first) = (processor_time(), Instant::now(), self.run.samples.len());
        for round in 0..starts {
            let place =
                Place { handler: handler.to_owned(), mode: Mode::Sustained, round, index: 0, warm_up: false };
            self.one(place, sink).await?;
        }
        let seconds = begun.elapsed().as_secs_f64();
        self.rest(SETTLE).await;
        let processor_s = processor_time().zip(before).map(|(now, before)| (now - before).as_secs_f64());
        let pods = self.run.samples[first..].iter().filter(|sample| sample.time().is_some()).count();
        if pods > 0 {
            self.run.rates.insert(handler.to_owned(), Rate { pods, seconds, processor_s });
        }
        Ok(())
    }

    fn name(&mut self) -> String {
        self.serial += 1;
        format!("{}-{}", self.recipe.run, self.serial)
    }

    async fn one(&mut self, place: Place, sink: Sink<'_>) -> Result<(), String> {
        let name = self.name();
        let before = self.exits.look();
        let start = match self.vm.as_ref().filter(|_| place.handler == VM) {
            Some(vm) => start_vm(vm, &self.recipe, &name, &self.cancel).await,
            None if place.handler == NATIVE => start_native(&self.recipe, &self.cancel).await,
            None => {
                let handler = &place.handler;
                timeline::start(&self.runtime, &self.watch, &self.recipe, handler, &name, &self.cancel).await
            }
        };
        // Reading all processes of the host would add to the measured CPU time.
        let vmms = if place.mode == Mode::Sustained { BTreeMap::new() } else { self.vmms([&start]).await };
        self.look_at(&place.handler, &start, &vmms).await;
        self.finish(place, &name, start, (&before, &vmms), sink).await
    }

    /// Returns the VMMs of started pods, by pod: as the daemon reports them, or else by their processes.
    async fn vmms<'a>(&self, starts: impl IntoIterator<Item = &'a Start>) -> BTreeMap<String, i32> {
        let mut vmms = BTreeMap::new();
        let mut untraced = Vec::new();
        for start in starts {
            let (Ok(()), Some(id)) = (&start.end, &start.pod_id) else { continue };
            let traced = match &self.trace {
                Some(trace) => trace.pod(id).await.ok(),
                None => None,
            };
            match traced {
                Some(pod) => drop(vmms.insert(id.clone(), pod.vmm_pid as i32)),
                None => untraced.push(PodIds {
                    pod: id.clone(),
                    containers: start.container_id.iter().cloned().collect(),
                    pid: None,
                }),
            }
        }
        if !untraced.is_empty() {
            let found = tokio::task::spawn_blocking(move || {
                let table = process::table().unwrap_or_default();
                let vmm = |pod: PodIds| sides::vmm(&table, &pod).map(|vmm| (pod.pod, vmm));
                untraced.into_iter().filter_map(vmm).collect::<Vec<_>>()
            });
            vmms.extend(found.await.unwrap_or_default());
        }
        vmms
    }

    /// Notes what the first container of a handler sees, and the program of its VMM.
    async fn look_at(&mut self, handler: &str, start: &Start, vmms: &BTreeMap<String, i32>) {
        const SEES: &str = "container_sees";
        let noted = self.run.vms.get(handler).is_some_and(|facts| facts.contains_key(SEES));
        let (Ok(()), Some(pod), Some(container), false) =
            (&start.end, &start.pod_id, &start.container_id, noted)
        else {
            return;
        };
        let sees = sides::container_sees(&self.runtime, container).await;
        let facts = self.run.vms.entry(handler.to_owned()).or_default();
        facts.insert(SEES.into(), sees);
        if let Some(vmm) = vmms.get(pod) {
            facts.extend(sides::program(*vmm));
        }
    }

    /// Pauses. Nothing is measured meanwhile.
    async fn rest(&self, pause: Duration) {
        tokio::select! {
            () = self.cancel.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }

    async fn bare_boot(&mut self, vm: &BareBoot, warm_up: bool) {
        let booted = vm.run(self.recipe.timeout).await;
        match booted {
            _ if warm_up => {}
            Ok(time) => self.run.bare_boots.push(time.as_secs_f64() * 1e3),
            Err(error) => self.run.bare_failures.push(sandboxer_base::chain(&error)),
        }
    }

    /// Starts a group. All pods wait at a barrier; no time includes removals.
    async fn group(&mut self, handler: &str, round: u32, size: u32, sink: Sink<'_>) -> Result<(), String> {
        let barrier = Arc::new(Barrier::new(size as usize));
        let before = self.exits.look();
        let mut starts = JoinSet::new();
        for index in 0..size {
            let name = self.name();
            let (runtime, watch, recipe) = (self.runtime.clone(), self.watch.clone(), self.recipe.clone());
            let (barrier, cancel) = (barrier.clone(), self.cancel.clone());
            let handler = handler.to_owned();
            starts.spawn(async move {
                barrier.wait().await;
                let start = timeline::start(&runtime, &watch, &recipe, &handler, &name, &cancel).await;
                (index, name, start)
            });
        }
        let mut starts = starts.join_all().await;
        starts.sort_by_key(|(index, ..)| *index);
        if let Some(batch) = batch(handler, round, &starts) {
            self.run.batches.push(batch);
        }
        let vmms = self.vmms(starts.iter().map(|(.., start)| start)).await;
        if let Some((.., first)) = starts.first() {
            self.look_at(handler, first, &vmms).await;
        }
        let mut ended = Ok(());
        for (index, name, start) in starts {
            let place =
                Place { handler: handler.to_owned(), mode: Mode::Parallel, round, index, warm_up: false };
            // The first reason to end is reported; the other pods are still recorded and removed.
            let finished = self.finish(place, &name, start, (&before, &vmms), sink).await;
            ended = ended.and(finished);
        }
        ended
    }

    /// Records a start and removes its pod.
    async fn finish(
        &mut self,
        place: Place,
        name: &str,
        start: Start,
        guests: Guests<'_>,
        sink: Sink<'_>,
    ) -> Result<(), String> {
        let sample = self.sample(&place, &start, guests).await;
        let is_unreachable = matches!(start.end, Err(StartError::Runtime(RuntimeError::Unreachable { .. })));
        let removed = match &*place.handler {
            // The VM or process ended with its start.
            VM | NATIVE => Ok(()),
            _ => {
                let id = start.pod_id.as_deref();
                timeline::remove(&self.runtime, &self.watch, &self.recipe, name, id).await
            }
        };
        if let Err(error) = removed {
            self.run.notes.push(format!("pod {name} on {}: {error}", place.handler));
        }
        let stored = sink(&sample);
        let interrupted = sample.outcome == Outcome::Interrupted;
        self.run.samples.push(sample);
        stored?;
        if interrupted || self.cancel.is_cancelled() {
            return Err("interrupted".into());
        }
        if is_unreachable && let Err(error) = self.runtime.version().await {
            return Err(format!("the runtime is gone: {error}"));
        }
        Ok(())
    }

    async fn sample(&mut self, place: &Place, start: &Start, (before, vmms): Guests<'_>) -> Sample {
        // The daemon does not know pods of other runtimes.
        let traced = match (&self.trace, &start.pod_id) {
            (Some(trace), Some(id)) => trace.pod(id).await.ok(),
            _ => None,
        };
        if let Some(pod) = &traced {
            let facts = self.run.vms.entry(place.handler.clone()).or_default();
            for (name, fact) in trace::vm(pod) {
                facts.entry(name).or_insert(fact);
            }
        }
        let exits = match start.pod_id.as_ref().and_then(|id| vmms.get(id)) {
            Some(vmm) => before.clone().and_then(|before| self.exits.since(&before, *vmm)),
            None => Err("its pods have no VMM".into()),
        };
        let kvm_exits = exits.map_err(|why| self.run.no_exits.insert(place.handler.clone(), why)).ok();
        let stages = traced.as_ref().map(trace::stages).unwrap_or_default();
        let ms = |time: Option<Duration>| time.map(|time| time.as_secs_f64() * 1e3);
        let (outcome, failed_at, error) = match &start.end {
            Ok(()) => (Outcome::Ok, "", String::new()),
            Err(StartError::Interrupted) => (Outcome::Interrupted, "", String::new()),
            Err(error) => (Outcome::Failed, error.step(), sandboxer_base::chain(error)),
        };
        Sample {
            runtime: place.handler.clone(),
            mode: place.mode,
            round: place.round,
            index: place.index,
            warm_up: place.warm_up,
            released_ms: start.released.saturating_duration_since(self.begun).as_secs_f64() * 1e3,
            pod_ms: ms(start.stamps.pod),
            created_ms: ms(start.stamps.created),
            started_ms: ms(start.stamps.started),
            first_byte_ms: ms(start.stamps.first_byte),
            first_ping_ms: ms(start.stamps.first_ping),
            outcome,
            failed_at: failed_at.to_owned(),
            error: error.split_whitespace().collect::<Vec<_>>().join(" "),
            stages,
            kvm_exits,
        }
    }
}

/// Executes the command on this host, waits for its first byte, and kills it.
async fn start_native(recipe: &Recipe, cancel: &CancellationToken) -> Start {
    let mut start = begun();
    let end = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(StartError::Interrupted),
        end = Process::start(&recipe.command, recipe.timeout) => end.map_err(StartError::Native),
    };
    match end {
        Ok(process) => start.stamps.first_byte = Some(process.first_byte),
        Err(error) => start.end = Err(error),
    }
    start
}

/// Returns a start whose request is made now.
fn begun() -> Start {
    Start {
        released: Instant::now(),
        stamps: Stamps::default(),
        pod_id: None,
        container_id: None,
        end: Ok(()),
    }
}

/// Returns the VM with which a recipe's pods are compared.
pub fn vm_of(recipe: &Recipe, name: &str) -> Task {
    Task {
        name: name.to_owned(),
        command: recipe.command.clone(),
        cpus: vm::DEFAULT_CPUS,
        memory: recipe.memory_mib.map_or(vm::DEFAULT_MEMORY, |mib| mib << 20),
        resources: None,
        disks: Vec::new(),
        forward: None,
        ping: true,
    }
}

/// Starts a VM, waits for its command's first byte and the first answered ping, and kills it.
async fn start_vm(vm: &Vm, recipe: &Recipe, name: &str, cancel: &CancellationToken) -> Start {
    let task = vm_of(recipe, name);
    let mut start = begun();
    let attempt = async {
        let running = vm.start(&task)?;
        let since = |took: Duration| (running.spawned + took).saturating_duration_since(start.released);
        let first_byte = since(running.first_byte(recipe.timeout).await?);
        // The network may be up later. A start without an answer is still valid and only lacks this time.
        Ok((first_byte, running.first_ping(PING_TIMEOUT.min(recipe.timeout)).await.map(since)))
    };
    let end = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(StartError::Interrupted),
        end = attempt => end.map_err(StartError::Vm),
    };
    match end {
        Ok((first_byte, first_ping)) => {
            start.stamps.first_byte = Some(first_byte);
            start.stamps.first_ping = first_ping;
        }
        Err(error) => start.end = Err(error),
    }
    start
}

/// Returns the groups of samples, equal to the groups recorded at run time to within a µs.
pub fn batches_of(samples: &[Sample]) -> Vec<Batch> {
    let mut groups: Vec<((&str, u32), Vec<&Sample>)> = Vec::new();
    for sample in samples.iter().filter(|sample| sample.mode == Mode::Parallel && !sample.warm_up) {
        let key = (&*sample.runtime, sample.round);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(sample),
            None => groups.push((key, vec![sample])),
        }
    }
    let of_group = |((runtime, round), group): ((&str, u32), Vec<&Sample>)| {
        let released = group.iter().map(|sample| sample.released_ms);
        let (first, last) = (released.clone().fold(f64::INFINITY, f64::min), released.fold(0.0, f64::max));
        let ends: Option<Vec<f64>> =
            group.iter().map(|sample| Some(sample.released_ms + sample.time()?)).collect();
        Batch {
            runtime: runtime.to_owned(),
            round,
            wall_ms: ends.map(|ends| ends.into_iter().fold(first, f64::max) - first),
            release_spread_ms: last - first,
        }
    };
    groups.into_iter().map(of_group).collect()
}

fn batch(handler: &str, round: u32, starts: &[(u32, String, Start)]) -> Option<Batch> {
    let first = starts.iter().map(|(.., start)| start.released).min()?;
    let last = starts.iter().map(|(.., start)| start.released).max()?;
    let ends: Option<Vec<Instant>> = starts
        .iter()
        .map(|(.., start)| {
            start.end.as_ref().ok()?;
            Some(start.released + start.stamps.first_byte?)
        })
        .collect();
    let wall = ends.and_then(|ends| ends.into_iter().max()).map(|end| end.saturating_duration_since(first));
    Some(Batch {
        runtime: handler.to_owned(),
        round,
        wall_ms: wall.map(|wall| wall.as_secs_f64() * 1e3),
        release_spread_ms: last.saturating_duration_since(first).as_secs_f64() * 1e3,
    })
}
