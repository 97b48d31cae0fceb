//! Whole measurements, from the check of the plan to the report, for the CLI, the benches and the demo.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sandboxer_base::chain;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::bare_boot::{BareBoot, BareBootError};
use crate::busy::{self, Busy};
use crate::clock::Clock;
use crate::first_byte::{LogWatch, WatchError};
use crate::ledger::Ledger;
use crate::manifest::{Facts, Manifest};
use crate::memory::{self, Point, Sweep};
use crate::native::NATIVE;
use crate::options::Network;
use crate::overhead;
use crate::report::Report;
use crate::runtime::{Runtime, RuntimeError};
use crate::sample::Sample;
use crate::startup::{self, Plan, PlanError};
use crate::store::{Store, StoreError};
use crate::timeline::{self, Recipe};
use crate::trace::Trace;
use crate::vm::{self, VM};

/// Why there is no result. A run that ends early returns a report with the reason instead.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The plan cannot be measured.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// First bytes cannot be detected.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// The log directory cannot be created.
    #[error("cannot create a directory for container logs in {path}")]
    Logs {
        /// Path of the directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Why there is no VM to boot alone.
#[derive(Debug, thiserror::Error)]
pub enum BareVmError {
    /// Without a daemon, the pod's VMM process is unknown.
    #[error("a bare boot needs the daemon's admin socket, to find a pod's VMM process")]
    NoTrace,
    /// No pod could be started.
    #[error("cannot find a VM to boot alone: {0}")]
    Unknown(String),
    /// The pod's VM cannot be booted alone.
    #[error(transparent)]
    BareBoot(#[from] BareBootError),
}

impl From<RuntimeError> for MeasureError {
    fn from(error: RuntimeError) -> Self {
        MeasureError::Plan(error.into())
    }
}

/// Environment of a measurement.
pub struct Bench {
    /// The CRI runtime.
    pub runtime: Runtime,
    /// The daemon's admin socket; `None` without a daemon.
    pub trace: Option<Trace>,
    /// The watch on the pods' logs.
    pub watch: Arc<LogWatch>,
    /// Clock of the measured times.
    pub clock: Clock,
    // Must be dropped last.
    _logs: tempfile::TempDir,
}

impl Bench {
    /// Connects to the runtime at `endpoint`; the daemon's admin socket supplies the stages of a start.
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

    /// Returns the VM of this handler's pods, to boot it alone. Starts one pod to read its VMM's arguments.
    pub async fn bare_boot(&self, handler: &str, recipe: &Recipe) -> Result<BareBoot, BareVmError> {
        let trace = self.trace.as_ref().ok_or(BareVmError::NoTrace)?;
        let name = format!("{}-bare", recipe.run);
        let start =
            timeline::start(&self.runtime, &self.watch, recipe, handler, &name, &CancellationToken::new())
                .await;
        let vm = match (&start.end, &start.pod_id) {
            (Ok(()), Some(id)) => match trace.pod(id).await {
                Ok(pod) => BareBoot::like(pod.vmm_pid as i32).map_err(BareVmError::from),
                Err(status) => Err(BareVmError::Unknown(status.message().to_owned())),
            },
            (Err(error), _) => Err(BareVmError::Unknown(error.to_string())),
            (Ok(()), None) => Err(BareVmError::Unknown("it has no id".into())),
        };
        let removed =
            timeline::remove(&self.runtime, &self.watch, recipe, &name, start.pod_id.as_deref()).await;
        let vm = vm?;
        removed.map_err(|error| BareVmError::Unknown(error.to_string()))?;
        Ok(vm)
    }

    /// Measures start-up. Writes each row at once, and the report at the end, even of a partial run.
    pub async fn startup(
        &self,
        plan: &Plan,
        mut store: Option<&mut Store>,
        cancel: &CancellationToken,
        progress: &mut (dyn FnMut(&Sample) + Send),
    ) -> Result<(Report, Vec<Sample>), MeasureError> {
        startup::check(&self.runtime, plan).await?;
        let mut report = self.report(&plan.handlers(), &plan.recipe, startup_facts(plan)).await;
        add_own(&mut report, plan)?;
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
        report.manifest.add_vms(run.vms);
        report.baseline = plan.baseline.clone();
        report.add_startup(&plan.runtimes, &run.samples, &run.batches);
        report.explain_exits(&run.no_exits);
        report.add_rates(&run.rates);
        report.add_bare_boots(&plan.runtimes[0], &run.samples, &run.bare_boots, &run.bare_failures);
        report.notes.extend(run.notes);
        if plan.warm_up > 0 {
            report.notes.push(format!("{} warm-up starts per runtime are not included", plan.warm_up));
        }
        end(&mut report, run.partial);
        let written = store.map_or(Ok(()), |store| store.report(&report, &run.samples));
        mark_partial(&mut report, written);
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
            sustained: 0,
            warm_up: 0,
            pause: Duration::ZERO,
            recipe: sweep.recipe.clone(),
            bare_boot: None,
            vm: sweep.vm.clone(),
            baseline: None,
        };
        startup::check(&self.runtime, &plan).await?;
        let facts = [
            ("sweep", json!(sweep.counts)),
            ("repeat", json!(sweep.repeat)),
            ("idle_window_s", json!(sweep.idle.length.as_secs_f64())),
        ];
        let facts = facts.map(|(name, fact)| (name.to_owned(), fact));
        let mut report = self.report(&plan.handlers(), &sweep.recipe, facts.into()).await;
        add_own(&mut report, &plan)?;
        // Writes each point at once, so that a run that dies later keeps it.
        let (mut so_far, mut unwritten) = (Vec::new(), None);
        let mut keep = |point: &Point| {
            progress(point);
            so_far.push(point.clone());
            unwritten = store.as_ref().and_then(|store| store.ledgers(&so_far).err());
        };
        let taken =
            memory::sweep(&self.runtime, &self.watch, self.trace.as_ref(), sweep, cancel, &mut keep).await;
        report.manifest.add_vms(taken.vms);
        report.add_memory(&taken.points);
        report.quick = sweep.counts != memory::FULL_SWEEP || sweep.repeat < memory::FULL_REPEAT;
        report.notes.extend(taken.notes);
        end(&mut report, taken.partial);
        let written = match unwritten {
            Some(error) => Err(error),
            None => store.map_or(Ok(()), |store| store.report(&report, &[])),
        };
        mark_partial(&mut report, written);
        Ok((report, taken.points))
    }

    /// Measures a pod that uses all of its memory limit, on each runtime of the sweep.
    pub async fn busy(
        &self,
        sweep: &Sweep,
        limit_mib: u64,
        cancel: &CancellationToken,
    ) -> Result<BTreeMap<String, Busy>, String> {
        let mut all = BTreeMap::new();
        for handler in &sweep.runtimes {
            let busy =
                busy::measure(&self.runtime, &self.watch, &sweep.recipe, handler, limit_mib, cancel).await?;
            all.insert(handler.clone(), busy);
        }
        Ok(all)
    }

    /// Returns the report on ledgers of running pods, by handler.
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
                idle_cpu_millicores: Vec::new(),
            })
            .collect();
        report.add_memory(&points);
        for row in &report.memory {
            let mut absent = |what: &str, why: &str| {
                report.not_measured.insert(format!("memory.{}.{what}", row.runtime), why.to_owned());
            };
            absent("goes_away_kib", "the memory before the pods is unknown: use a sweep");
            absent("available_fall_kib", "the memory before the pods is unknown: use a sweep");
            absent("idle_cpu_millicores", "running pods may not be idle: use a sweep");
        }
        report
    }

    /// Returns a report with conditions and clock, without figures.
    async fn report(&self, handlers: &[String], recipe: &Recipe, plan: Facts) -> Report {
        let manifest = Manifest::take(&self.runtime, self.trace.as_ref(), handlers, recipe, plan).await;
        Report { clock: self.clock, ..Report::new(manifest) }
    }
}

/// Returns a unique name for a run.
pub fn run_name() -> String {
    format!("probe-{:08x}", rand::random::<u32>())
}

/// Returns the usual recipe, with `image`.
pub fn recipe(image: &str, network: Network, timeout: std::time::Duration) -> Recipe {
    Recipe {
        run: run_name(),
        image: image.to_owned(),
        command: Recipe::default_command(),
        network,
        cgroup_parent: String::new(),
        annotations: Default::default(),
        memory_mib: None,
        timeout,
    }
}

/// Adds the properties of the series `vm` and `native`, if they are measured.
fn add_own(report: &mut Report, plan: &Plan) -> Result<(), PlanError> {
    let runtimes = &mut report.manifest.runtimes;
    if let Some(vm) = plan.vms()? {
        let mut facts = vm.facts(vm::DEFAULT_CPUS, startup::vm_of(&plan.recipe, "").memory);
        facts.insert(
            "network".into(),
            json!("a link to the probe, which pings the guest and does nothing else"),
        );
        runtimes.insert(VM.into(), facts);
        report.notes.extend(vm.remark());
    }
    if plan.runtimes.iter().any(|name| name == NATIVE) {
        let what = json!("a process of this host: no image, namespaces or limits");
        runtimes.insert(NATIVE.into(), [("type".to_owned(), what)].into());
    }
    Ok(())
}

fn startup_facts(plan: &Plan) -> Facts {
    let facts = [
        ("runtimes", json!(plan.runtimes)),
        ("serial", json!(plan.serial)),
        ("group", json!(plan.group)),
        ("rounds", json!(plan.rounds)),
        ("sustained", json!(plan.sustained)),
        ("warm_up", json!(plan.warm_up)),
        ("pause_s", json!(plan.pause.as_secs_f64())),
    ];
    facts.map(|(name, fact)| (name.to_owned(), fact)).into()
}

fn end(report: &mut Report, partial: Option<String>) {
    report.partial = partial.is_some();
    report.partial_reason = partial;
}

/// Writes the report. The returned report is complete even if writing fails.
fn mark_partial(report: &mut Report, written: Result<(), StoreError>) {
    let Err(error) = written else { return };
    let why = format!("cannot write the whole result: {}", chain(&error));
    report.partial = true;
    report.partial_reason = Some(match report.partial_reason.take() {
        Some(before) => format!("{before}; {why}"),
        None => why,
    });
}
