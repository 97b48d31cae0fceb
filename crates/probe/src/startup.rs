//! Many starts in a fair order: runtimes alternate, one barrier starts groups, failures and interruptions stay
//! in the data, and every pod is removed afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::bare_boot::BareBoot;
use crate::exits::{Counts, Exits};
use crate::first_byte::LogWatch;
use crate::manifest::Facts;
use crate::native::{NATIVE, Process};
use crate::runtime::{Runtime, RuntimeError, Version};
use crate::sample::{Mode, Outcome, Sample};
use crate::timeline::{self, Recipe, Stamps, Start, StartError};
use crate::trace::{self, Trace};
use crate::vm::process::Task;
use crate::vm::{self, VM, Vm, VmError};

/// Minimum starts per runtime of a full serial series.
pub const FULL_SERIAL: u32 = 500;
/// How long a VM may take from its command's first byte to its first answered ping.
const PING_TIMEOUT: Duration = Duration::from_secs(30);

/// Plan of a measurement.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Handlers, in the order in which they alternate.
    pub runtimes: Vec<String>,
    /// Serial starts per handler.
    pub serial: u32,
    /// Pods in a parallel group.
    pub group: u32,
    /// Parallel groups per handler.
    pub rounds: u32,
    /// Warm-up starts per handler.
    pub warm_up: u32,
    /// Pause before each start or group, for background work of the last one, such as filling a pool.
    pub pause: Duration,
    /// Recipe of the pods.
    pub recipe: Recipe,
    /// A VM to boot alone after each serial round, for comparison.
    pub bare_boot: Option<BareBoot>,
    /// How VMs of the series `vm` are run.
    pub vm: Option<Vm>,
}

impl Plan {
    /// Returns the number of pods to start.
    pub fn pods(&self) -> u64 {
        let serial = u64::from(self.warm_up) + u64::from(self.serial);
        let of_groups = u64::from(self.rounds) * u64::from(self.group);
        serial * self.runtimes.len() as u64 + of_groups * self.handlers().len() as u64
    }

    /// Returns the runtimes that are CRI handlers.
    pub fn handlers(&self) -> Vec<String> {
        self.runtimes.iter().filter(|name| ![VM, NATIVE].contains(&name.as_str())).cloned().collect()
    }

    /// Returns how VMs are run, if the series `vm` is part of it.
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
    /// The runtime does not answer.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// No such handler.
    #[error("the runtime at {endpoint} has no handler '{handler}'; it has {known}")]
    NoHandler {
        /// The socket.
        endpoint: String,
        /// The requested one.
        handler: String,
        /// The existing ones.
        known: String,
    },
    /// No such image.
    #[error("image {0} is not on the node: pull or import it first; a start must not include a pull")]
    NoImage(String),
    /// The series `vm` cannot be measured.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// Nothing to do.
    #[error("nothing to measure: {0}")]
    Empty(&'static str),
}

/// A group of pods that started at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Handler.
    pub runtime: String,
    /// From 0.
    pub round: u32,
    /// From the first start request to the last first byte, ms; `None` if a pod failed.
    pub wall_ms: Option<f64>,
    /// Between the first and the last start request, ms.
    pub release_spread_ms: f64,
}

/// Result of a measurement.
#[derive(Debug, Default)]
pub struct Run {
    /// One per pod, in order of completion within a group.
    pub samples: Vec<Sample>,
    /// One per complete group.
    pub batches: Vec<Batch>,
    /// Times of bare boots, ms.
    pub bare_boots: Vec<f64>,
    /// Bare boots that failed, and why.
    pub bare_failures: Vec<String>,
    /// By handler: the VM of its first pod, if a daemon reports it.
    pub vms: BTreeMap<String, Facts>,
    /// By handler: why the exits of its guests are unknown.
    pub no_exits: BTreeMap<String, String>,
    /// Why it ended early, if it did.
    pub partial: Option<String>,
    /// Notes, for example on pods that could not be removed.
    pub notes: Vec<String>,
}

/// Checks that handlers and image exist. Starts nothing.
pub async fn check(runtime: &Runtime, plan: &Plan) -> Result<Version, PlanError> {
    if plan.runtimes.is_empty() {
        return Err(PlanError::Empty("name at least one runtime handler"));
    }
    if plan.serial == 0 && (plan.rounds == 0 || plan.group == 0) {
        return Err(PlanError::Empty("request serial or parallel starts"));
    }
    plan.vms()?;
    let version = runtime.version().await?;
    check_handlers(runtime, &plan.handlers()).await?;
    if runtime.image(&plan.recipe.image).await?.is_none() {
        return Err(PlanError::NoImage(plan.recipe.image.clone()));
    }
    Ok(version)
}

/// Checks that handlers exist, if the runtime reports its handlers.
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

/// Measures. Ends early, with the reason, when `cancel` is cancelled, the runtime is gone or `sink` fails.
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
    /// Returns as an error why it ended early.
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
        self.finish(place, &name, start, &before, sink).await
    }

    /// Pauses; nothing is measured meanwhile.
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

    /// Starts a group. All pods wait at a barrier; removals are not part of any time.
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
        let mut ended = Ok(());
        for (index, name, start) in starts {
            let place =
                Place { handler: handler.to_owned(), mode: Mode::Parallel, round, index, warm_up: false };
            // The first reason to end is reported; the other pods are still recorded and removed.
            let finished = self.finish(place, &name, start, &before, sink).await;
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
        before: &Result<Counts, String>,
        sink: Sink<'_>,
    ) -> Result<(), String> {
        let sample = self.sample(&place, &start, before).await;
        let gone = matches!(start.end, Err(StartError::Runtime(RuntimeError::Unreachable { .. })));
        let removed = match &*place.handler {
            // They ended with their start.
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
        if gone && let Err(error) = self.runtime.version().await {
            return Err(format!("the runtime is gone: {error}"));
        }
        Ok(())
    }

    async fn sample(&mut self, place: &Place, start: &Start, before: &Result<Counts, String>) -> Sample {
        // The daemon does not know pods of other runtimes.
        let told = match (&self.trace, &start.pod_id) {
            (Some(trace), Some(id)) => trace.pod(id).await.ok(),
            _ => None,
        };
        if let Some(pod) = &told {
            self.run.vms.entry(place.handler.clone()).or_insert_with(|| trace::vm(pod));
        }
        let exits = match &told {
            Some(pod) => before.clone().and_then(|before| self.exits.since(&before, pod.vmm_pid as i32)),
            None => Err("no daemon reports a VM of its pods".into()),
        };
        let kvm_exits = exits.map_err(|why| self.run.no_exits.insert(place.handler.clone(), why)).ok();
        let stages = told.as_ref().map(trace::stages).unwrap_or_default();
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

/// Executes the command here, waits for its first byte, and kills it.
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

/// Returns the VM that a pod of a recipe is compared with.
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
        // The network may be up later. Without an answer the start has no such mark, and is none the worse.
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
