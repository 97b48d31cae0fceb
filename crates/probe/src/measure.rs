//! Whole measurements, from the check of what was asked for to the finished report. The CLI, the benches and
//! the demo all come through here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sandboxer_base::chain;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::bare_boot::{BareBoot, BareBootError};
use crate::clock::Clock;
use crate::first_byte::{LogWatch, WatchError};
use crate::ledger::Ledger;
use crate::manifest::{Facts, Manifest};
use crate::memory::{self, Point, Sweep};
use crate::options::Network;
use crate::overhead;
use crate::report::Report;
use crate::runtime::{Runtime, RuntimeError};
use crate::sample::Sample;
use crate::startup::{self, Plan, PlanError};
use crate::store::{Store, StoreError};
use crate::timeline::{self, Recipe};
use crate::trace::Trace;

/// Why there is no result at all. What ends a run half-way is in its report instead.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// What was asked for can't be measured.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// First bytes can't be seen.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// No place for logs.
    #[error("cannot make a directory for container logs in {path}")]
    Logs {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Why there is no machine to boot alone.
#[derive(Debug, thiserror::Error)]
pub enum BareMachineError {
    /// Nobody tells which process a pod's machine is.
    #[error("a bare boot needs the daemon's admin socket: it tells which process a pod's machine is")]
    NoTrace,
    /// No pod to look at.
    #[error("no pod whose machine could be booted alone: {0}")]
    Unknown(String),
    /// Its machine can't be imitated.
    #[error(transparent)]
    Machine(#[from] BareBootError),
}

impl From<RuntimeError> for MeasureError {
    fn from(error: RuntimeError) -> Self {
        MeasureError::Plan(error.into())
    }
}

/// Where and with what is measured.
pub struct Bench {
    /// The CRI runtime.
    pub runtime: Runtime,
    /// A daemon's trace, where there is one.
    pub trace: Option<Trace>,
    /// Watches the logs of the pods.
    pub watch: Arc<LogWatch>,
    /// By which its times are.
    pub clock: Clock,
    // Removed last.
    _logs: tempfile::TempDir,
}

impl Bench {
    /// Measures on the runtime at `endpoint`; the daemon's admin socket provides the stages of a start.
    pub fn open(endpoint: &str, admin: Option<&Path>) -> Result<Self, MeasureError> {
        let runtime = Runtime::connect(endpoint)?;
        let parent = std::env::temp_dir();
        let logs = tempfile::Builder::new()
            .prefix("sandboxer-probe-")
            .tempdir_in(&parent)
            .map_err(|source| MeasureError::Logs { path: parent, source })?;
        let watch = Arc::new(LogWatch::new(logs.path())?);
        let (trace, clock) = (admin.map(Trace::connect), Clock::of_host());
        Ok(Self { runtime, trace, watch, clock, _logs: logs })
    }

    /// Returns the machine of this handler's pods, to be booted alone: one pod is started to see how it is made.
    pub async fn bare_boot(&self, handler: &str, recipe: &Recipe) -> Result<BareBoot, BareMachineError> {
        let trace = self.trace.as_ref().ok_or(BareMachineError::NoTrace)?;
        let name = format!("{}-bare", recipe.run);
        let start =
            timeline::start(&self.runtime, &self.watch, recipe, handler, &name, &CancellationToken::new())
                .await;
        let machine = match (&start.end, &start.pod_id) {
            (Ok(()), Some(id)) => match trace.pod(id).await {
                Ok(pod) => BareBoot::like(pod.vmm_pid as i32).map_err(BareMachineError::from),
                Err(status) => Err(BareMachineError::Unknown(status.message().to_owned())),
            },
            (Err(error), _) => Err(BareMachineError::Unknown(error.to_string())),
            (Ok(()), None) => Err(BareMachineError::Unknown("it has no id".into())),
        };
        let removed =
            timeline::remove(&self.runtime, &self.watch, recipe, &name, start.pod_id.as_deref()).await;
        let machine = machine?;
        removed.map_err(|error| BareMachineError::Unknown(error.to_string()))?;
        Ok(machine)
    }

    /// Measures start-up. Rows are kept as they come; the report is written at the end, also of a partial run.
    pub async fn startup(
        &self,
        plan: &Plan,
        mut store: Option<&mut Store>,
        cancel: &CancellationToken,
        progress: &mut (dyn FnMut(&Sample) + Send),
    ) -> Result<(Report, Vec<Sample>), MeasureError> {
        startup::check(&self.runtime, plan).await?;
        let mut report = self.report(&plan.runtimes, &plan.recipe, startup_facts(plan)).await;
        if let Some(store) = &mut store {
            store.clock = self.clock;
        }
        report.overhead = Some(overhead::measure(&self.runtime, &self.watch).await);
        let mut keep = |sample: &Sample| {
            progress(sample);
            store.as_mut().map_or(Ok(()), |store| store.sample(sample).map_err(|error| chain(&error)))
        };
        let run =
            startup::run(&self.runtime, self.watch.clone(), self.trace.as_ref(), plan, cancel, &mut keep)
                .await;
        report.manifest.add_machines(run.machines);
        report.add_startup(&plan.runtimes, &run.samples, &run.batches);
        report.explain_exits(&run.no_exits);
        report.add_bare_boots(&plan.runtimes[0], &run.samples, &run.bare_boots, &run.bare_failures);
        report.notes.extend(run.notes);
        if plan.warm_up > 0 {
            report.notes.push(format!("{} warm-up starts per runtime are in no figure", plan.warm_up));
        }
        end(&mut report, run.partial);
        let kept = store.map_or(Ok(()), |store| store.report(&report, &run.samples));
        or_partial(&mut report, kept);
        Ok((report, run.samples))
    }

    /// Measures memory over a sweep of pod counts.
    pub async fn memory(
        &self,
        sweep: &Sweep,
        store: Option<&mut Store>,
        cancel: &CancellationToken,
        progress: &mut (dyn FnMut(&Point) + Send),
    ) -> Result<(Report, Vec<Point>), MeasureError> {
        let plan = Plan {
            runtimes: sweep.runtimes.clone(),
            serial: 1,
            group: 0,
            rounds: 0,
            warm_up: 0,
            pause: Duration::ZERO,
            recipe: sweep.recipe.clone(),
            bare_boot: None,
        };
        startup::check(&self.runtime, &plan).await?;
        let facts = [("sweep".to_owned(), json!(sweep.counts)), ("repeat".to_owned(), json!(sweep.repeat))];
        let mut report = self.report(&sweep.runtimes, &sweep.recipe, facts.into()).await;
        let taken =
            memory::sweep(&self.runtime, &self.watch, self.trace.as_ref(), sweep, cancel, progress).await;
        report.manifest.add_machines(taken.machines);
        report.add_memory(&taken.points);
        report.quick = sweep.counts != memory::FULL_SWEEP || sweep.repeat < memory::FULL_REPEAT;
        report.notes.extend(taken.notes);
        end(&mut report, taken.partial);
        let kept = store.map_or(Ok(()), |store| {
            store.ledgers(&taken.points)?;
            store.report(&report, &[])
        });
        or_partial(&mut report, kept);
        Ok((report, taken.points))
    }

    /// Returns what ledgers of running pods come to, by handler.
    pub async fn ledgers(&self, ledgers: &BTreeMap<String, Ledger>, recipe: &Recipe) -> Report {
        let handlers: Vec<String> = ledgers.keys().cloned().collect();
        let mut report = self.report(&handlers, recipe, Facts::new()).await;
        let points: Vec<Point> = ledgers
            .iter()
            .map(|(runtime, ledger)| Point {
                runtime: runtime.clone(),
                repetition: 0,
                ledger: ledger.clone(),
                idle_daemon_kib: None,
                available_fall_kib: None,
                idle_cpu_millicores: None,
            })
            .collect();
        report.add_memory(&points);
        for row in &report.memory {
            let mut absent = |what: &str, why: &str| {
                report.not_measured.insert(format!("memory.{}.{what}", row.runtime), why.to_owned());
            };
            absent("goes_away_kib", "pods that run already have no 'before': use a sweep");
            absent("available_fall_kib", "pods that run already have no 'before': use a sweep");
            absent("idle_cpu_millicores", "pods that run already need not be idle: use a sweep");
        }
        report
    }

    /// Creates a report with conditions and clock, and no figures yet.
    async fn report(&self, handlers: &[String], recipe: &Recipe, plan: Facts) -> Report {
        let manifest = Manifest::take(&self.runtime, self.trace.as_ref(), handlers, recipe, plan).await;
        Report { clock: self.clock, ..Report::new(manifest) }
    }
}

/// Returns a name for a run that no other on this node has.
pub fn run_name() -> String {
    format!("probe-{:08x}", rand::random::<u32>())
}

/// Returns a pod of `image` as every measurement has it.
pub fn recipe(image: &str, network: Network, timeout: std::time::Duration) -> Recipe {
    Recipe {
        run: run_name(),
        image: image.to_owned(),
        command: Recipe::default_command(),
        network,
        cgroup_parent: String::new(),
        annotations: Default::default(),
        timeout,
    }
}

fn startup_facts(plan: &Plan) -> Facts {
    let facts = [
        ("runtimes", json!(plan.runtimes)),
        ("serial", json!(plan.serial)),
        ("group", json!(plan.group)),
        ("rounds", json!(plan.rounds)),
        ("warm_up", json!(plan.warm_up)),
        ("pause_s", json!(plan.pause.as_secs_f64())),
    ];
    facts.map(|(name, fact)| (name.to_owned(), fact)).into()
}

fn end(report: &mut Report, partial: Option<String>) {
    report.partial = partial.is_some();
    report.partial_reason = partial;
}

/// Marks the report as partial if it could not be written. It is still returned and can be printed.
fn or_partial(report: &mut Report, kept: Result<(), StoreError>) {
    let Err(error) = kept else { return };
    let why = format!("not all of the result is on disk: {}", chain(&error));
    report.partial = true;
    report.partial_reason = Some(match report.partial_reason.take() {
        Some(before) => format!("{before}; {why}"),
        None => why,
    });
}
