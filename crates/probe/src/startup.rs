//! Many starts, in an order that is fair: runtimes alternate, groups are released by one barrier, failures
//! and interruptions stay in the data, and every pod is gone afterwards.

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
use crate::runtime::{Runtime, RuntimeError, Version};
use crate::sample::{Mode, Outcome, Sample};
use crate::timeline::{self, Recipe, Start, StartError};
use crate::trace::{self, Trace};

/// Starts per runtime below which a serial series is called quick.
pub const FULL_SERIAL: u32 = 500;

/// What to measure.
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
    /// Starts per handler before counting begins.
    pub warm_up: u32,
    /// Before each start or group: time for what the last one left to be done, such as filling a pool.
    pub pause: Duration,
    /// What each pod is.
    pub recipe: Recipe,
    /// A machine that is booted alone after each serial round, to compare with.
    pub bare_boot: Option<BareBoot>,
}

impl Plan {
    /// Pods that will be started.
    pub fn pods(&self) -> u64 {
        let each =
            u64::from(self.warm_up) + u64::from(self.serial) + u64::from(self.rounds) * u64::from(self.group);
        each * self.runtimes.len() as u64
    }
}

/// Why nothing can be measured.
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
        /// As asked for.
        handler: String,
        /// Those that are there.
        known: String,
    },
    /// No such image.
    #[error("image {0} is not on the node: pull or import it first, a start must not wait for a registry")]
    NoImage(String),
    /// Nothing to do.
    #[error("nothing to measure: {0}")]
    Empty(&'static str),
}

/// A group of pods that were released at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Handler.
    pub runtime: String,
    /// From 0.
    pub round: u32,
    /// From the first release to the last first byte, ms; `None` if a pod of it failed.
    pub wall_ms: Option<f64>,
    /// Between the first and the last release, ms.
    pub release_spread_ms: f64,
}

/// What came out.
#[derive(Debug, Default)]
pub struct Run {
    /// One per pod, in order of completion within a group.
    pub samples: Vec<Sample>,
    /// One per group that was complete.
    pub batches: Vec<Batch>,
    /// Times of bare boots, ms.
    pub bare_boots: Vec<f64>,
    /// Bare boots that failed, and why.
    pub bare_failures: Vec<String>,
    /// By handler: the machine of its first pod, where a daemon tells it.
    pub machines: BTreeMap<String, Facts>,
    /// By handler: why the exits of its guests are not known.
    pub no_exits: BTreeMap<String, String>,
    /// Why it ended before its time, if it did.
    pub partial: Option<String>,
    /// What a reader must know: pods that could not be removed, modes that were not honoured.
    pub notes: Vec<String>,
}

/// Checks that what the plan names is there. Nothing is started.
pub async fn check(runtime: &Runtime, plan: &Plan) -> Result<Version, PlanError> {
    if plan.runtimes.is_empty() {
        return Err(PlanError::Empty("name at least one runtime handler"));
    }
    if plan.serial == 0 && (plan.rounds == 0 || plan.group == 0) {
        return Err(PlanError::Empty("neither serial nor parallel starts were asked for"));
    }
    let version = runtime.version().await?;
    check_handlers(runtime, &plan.runtimes).await?;
    if runtime.image(&plan.recipe.image).await?.is_none() {
        return Err(PlanError::NoImage(plan.recipe.image.clone()));
    }
    Ok(version)
}

/// Checks that handlers are there, where the runtime tells its handlers.
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

/// Takes each sample as it comes; an error ends the run (a disk that is full).
pub type Sink<'a> = &'a mut (dyn FnMut(&Sample) -> Result<(), String> + Send);

/// Measures. Ends early, and says why, when `cancel` is cancelled, the runtime is gone or `sink` fails.
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
        Ok(count) => run.notes.push(format!("{count} pods had to be removed a second time")),
        Err(error) => run.notes.push(format!(
            "pods labelled {}={} may be left: {error}",
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
    cancel: CancellationToken,
    begun: Instant,
    run: Run,
    exits: Exits,
    serial: u64,
}

/// Where a pod stands in the plan.
#[derive(Clone)]
struct Place {
    handler: String,
    mode: Mode,
    round: u32,
    index: u32,
    warm_up: bool,
}

impl Runner {
    /// Runs all rounds. Err: why it ended early.
    async fn all(&mut self, plan: &Plan, sink: Sink<'_>) -> Result<(), String> {
        for (rounds, warm_up) in [(plan.warm_up, true), (plan.serial, false)] {
            for round in 0..rounds {
                for handler in &plan.runtimes {
                    let place =
                        Place { handler: handler.clone(), mode: Mode::Serial, round, index: 0, warm_up };
                    self.rest(plan.pause).await;
                    self.one(place, sink).await?;
                }
                if let Some(machine) = &plan.bare_boot {
                    self.bare_boot(machine, warm_up).await;
                }
            }
        }
        for round in 0..if plan.group == 0 { 0 } else { plan.rounds } {
            for handler in &plan.runtimes {
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
        let start =
            timeline::start(&self.runtime, &self.watch, &self.recipe, &place.handler, &name, &self.cancel)
                .await;
        self.finish(place, &name, start, &before, sink).await
    }

    /// Rests; nothing is measured meanwhile.
    async fn rest(&self, pause: Duration) {
        tokio::select! {
            () = self.cancel.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }

    async fn bare_boot(&mut self, machine: &BareBoot, warm_up: bool) {
        let booted = machine.run(self.recipe.timeout).await;
        match booted {
            _ if warm_up => {}
            Ok(time) => self.run.bare_boots.push(time.as_secs_f64() * 1e3),
            Err(error) => self.run.bare_failures.push(sandboxer_base::chain(&error)),
        }
    }

    /// Starts a group at a barrier; removals are outside all times.
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
            // The first reason to end counts; the other pods are removed and kept all the same.
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
        let removed =
            timeline::remove(&self.runtime, &self.watch, &self.recipe, name, start.pod_id.as_deref()).await;
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
            return Err(format!("the runtime went away: {error}"));
        }
        Ok(())
    }

    async fn sample(&mut self, place: &Place, start: &Start, before: &Result<Counts, String>) -> Sample {
        // A pod of another runtime is not known there.
        let told = match (&self.trace, &start.pod_id) {
            (Some(trace), Some(id)) => trace.pod(id).await.ok(),
            _ => None,
        };
        if let Some(pod) = &told {
            self.run.machines.entry(place.handler.clone()).or_insert_with(|| trace::machine(pod));
        }
        let exits = match &told {
            Some(pod) => before.clone().and_then(|before| self.exits.since(&before, pod.vmm_pid as i32)),
            None => Err("its pods run no VM that a daemon tells of".into()),
        };
        let kvm_exits = exits.map_err(|why| self.run.no_exits.insert(place.handler.clone(), why)).ok();
        let stages = told.as_ref().map(trace::stages).unwrap_or_default();
        let ms = |time: Option<Duration>| time.map(|time| time.as_secs_f64() * 1e3);
        let (outcome, failed_at, error) = match &start.end {
            Ok(()) => (Outcome::Ok, "", String::new()),
            Err(StartError::Interrupted) => (Outcome::Interrupted, "", String::new()),
            Err(error) => (Outcome::Failed, error.step(), error.to_string()),
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
            outcome,
            failed_at: failed_at.to_owned(),
            error: error.split_whitespace().collect::<Vec<_>>().join(" "),
            stages,
            kvm_exits,
        }
    }
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
