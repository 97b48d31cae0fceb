//! A whole measurement, from the check of the plan to the result.

use std::collections::BTreeMap;

use sandboxer_base::chain;
use sandboxer_probe::clock::Clock;
use sandboxer_probe::log::Printed;
use sandboxer_probe::manifest::{self, Facts, Manifest};
use sandboxer_probe::measure::Bench;
use sandboxer_probe::options::Network;
use sandboxer_probe::runtime::RuntimeError;
use sandboxer_probe::startup::{PlanError, check_handlers};
use sandboxer_probe::vm::{VM, Vm};
use sandboxer_probe::workload::definition::Image;
use sandboxer_probe::workload::facts;
use sandboxer_probe::workload::report::{POWER, Report};
use sandboxer_probe::workload::run::Run;
use sandboxer_probe::workload::store::Store;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::container::Starter;
use super::native::NATIVE;
use super::plan::Plan;
use super::power::Meter;
use super::runner::Runner;

/// Why there is no result. A measurement that ends early returns a result with the reason instead.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// The plan names something that does not exist.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The image with the tools is not on the node.
    #[error("image {0} is not on the node: build and load it with `make bench-image`")]
    NoImage(String),
    /// A probe has a server, which clients cannot reach without the pod network.
    #[error("probe {0} has server and clients in separate pods: it needs the pod network")]
    HostNetwork(String),
    /// The series native has no image.
    #[error(
        "series native needs the unpacked image: make one with `make bench-native` and name it with --native-root"
    )]
    NoNative,
    /// The directory is not an unpacked image.
    #[error("{0} is not an unpacked image with bench-helper in it: make one with `make bench-native`")]
    NativeRoot(std::path::PathBuf),
    /// No container reported its resources.
    #[error("nothing can be measured: {0}")]
    NoSide(String),
    /// The runtimes' containers have different resources.
    #[error(
        "cannot compare the runtimes: their containers have different resources: {0}. If one has the requested limits and does not \
         see them, name it with --trust-limits"
    )]
    Unequal(String),
}

impl From<RuntimeError> for WorkloadError {
    fn from(error: RuntimeError) -> Self {
        WorkloadError::Plan(error.into())
    }
}

/// Checks that the handlers and the image exist. Starts nothing.
pub async fn check(bench: &Bench, plan: &Plan) -> Result<(), WorkloadError> {
    if plan.runtimes.is_empty() {
        return Err(PlanError::Empty("name at least one runtime handler").into());
    }
    if plan.repeat == 0 || plan.probes.is_empty() {
        return Err(PlanError::Empty("request at least one round and one probe").into());
    }
    let serving = plan.probes.iter().find(|probe| !probe.server.is_empty());
    if let (Some(probe), Network::Host) = (serving, plan.recipe.network) {
        return Err(WorkloadError::HostNetwork(probe.name.clone()));
    }
    match &plan.native {
        None if plan.has_native() => return Err(WorkloadError::NoNative),
        Some(native) if plan.has_native() && !native.is_there() => {
            return Err(WorkloadError::NativeRoot(native.root.clone()));
        }
        _ => {}
    }
    plan.vms().map_err(PlanError::Vm)?;
    bench.runtime.version().await?;
    let mut handlers = plan.handlers();
    if serving.is_some() {
        handlers.push(plan.client_runtime.clone());
    }
    check_handlers(&bench.runtime, &handlers).await?;
    match bench.runtime.image(&plan.recipe.image).await? {
        Some(_) => Ok(()),
        None => Err(WorkloadError::NoImage(plan.recipe.image.clone())),
    }
}

/// Measures. Writes each run at once, and the result at the end, even of a partial measurement.
pub async fn measure(
    bench: &Bench,
    plan: &Plan,
    mut store: Option<&mut Store>,
    cancel: &CancellationToken,
    progress: &mut (dyn FnMut(&Run) + Send),
) -> Result<(Report, Vec<Run>), WorkloadError> {
    check(bench, plan).await?;
    let facts = plan_facts(plan);
    let handlers = plan.handlers();
    let mut manifest =
        Manifest::take(&bench.runtime, bench.trace.as_ref(), &handlers, &plan.recipe, facts).await;
    if let Some(native) = plan.native.as_ref().filter(|_| plan.has_native()) {
        let facts = [
            (
                "type",
                json!("process of this host in the unpacked image; of namespaces only one for its mounts"),
            ),
            ("root", json!(native.root)),
            ("address_of_servers", json!(native.address())),
        ];
        manifest.runtimes.insert(NATIVE.into(), facts.map(|(name, fact)| (name.to_owned(), fact)).into());
    }
    if let Some(vm) = plan.vms().map_err(PlanError::Vm)? {
        manifest.runtimes.insert(VM.into(), vm.facts(plan.cpus, plan.memory));
    }
    let starter = Starter {
        runtime: bench.runtime.clone(),
        recipe: plan.recipe.clone(),
        build_image: plan.build_image.clone(),
        logs: bench.watch.dir().to_owned(),
        native: plan.native.clone(),
        vm: plan.vm.clone(),
        cancel: cancel.clone(),
    };
    let missing = missing(bench, plan, &starter).await?;
    let mut runner = Runner::new(plan, starter, missing);
    runner.look_inside().await;
    if runner.sides.is_empty() && !cancel.is_cancelled() {
        return Err(WorkloadError::NoSide(runner.notes.join("; ")));
    }
    if let Some(difference) = runner.unequal() {
        return Err(WorkloadError::Unequal(difference));
    }
    let mut keep = |run: &Run, printed: &Printed| {
        progress(run);
        store.as_mut().map_or(Ok(()), |store| store.run(run, printed).map_err(|error| chain(&error)))
    };
    let ended = runner.run(&mut keep).await;
    let mut report = result(plan, manifest, bench.clock, runner.sides, &runner.runs);
    report.notes.extend(runner.notes);
    report.notes.extend(plan.vms().ok().flatten().and_then(Vm::remark));
    end(&mut report, ended.err());
    if let Some(Err(error)) = store.map(|store| store.report(&report)) {
        let why = format!("cannot write the whole result: {}", chain(&error));
        end(&mut report, Some(why));
    }
    Ok((report, runner.runs))
}

/// Returns the images of the plan's probes that are not on the node. The image of most tools has already been checked.
async fn missing(bench: &Bench, plan: &Plan, starter: &Starter) -> Result<Vec<Image>, WorkloadError> {
    let build =
        plan.probes.iter().any(|probe| probe.image == Image::BenchBuild) && !plan.handlers().is_empty();
    if build && bench.runtime.image(starter.image(Image::BenchBuild)).await?.is_none() {
        return Ok(vec![Image::BenchBuild]);
    }
    Ok(Vec::new())
}

/// Returns the result of a plan's runs.
fn result(
    plan: &Plan,
    manifest: Manifest,
    clock: Clock,
    sides: BTreeMap<String, facts::Facts>,
    runs: &[Run],
) -> Report {
    let mut report = Report {
        clock,
        repeat: plan.repeat,
        warm_up: plan.warm_up,
        threads: facts::threads(sides.values()),
        client_runtime: plan.client_runtime.clone(),
        sides,
        not_measured: no_power(&plan.meter, runs).into_iter().collect(),
        ..Report::new(plan.probes.clone(), plan.profile, &plan.runtimes, manifest)
    };
    report.evaluate(&plan.runtimes, runs);
    report
}

/// Returns the key and the reason if there are no power figures.
fn no_power(meter: &Meter, runs: &[Run]) -> Option<(String, String)> {
    let known = runs.iter().any(|run| run.power.watts.is_some());
    let first = runs.iter().map(|run| &run.power.source).find(|source| !source.is_empty());
    let why = match (meter, first) {
        (_, Some(source)) => source.strip_prefix("not measured: ").unwrap_or(source),
        (Meter::None(why), None) => why,
        (_, None) => "no run had an end",
    };
    (!known).then(|| (POWER.to_owned(), why.to_owned()))
}

/// Records the reason for an early end; keeps the first one.
fn end(report: &mut Report, why: Option<String>) {
    let Some(why) = why else { return };
    report.partial = true;
    report.partial_reason = Some(match report.partial_reason.take() {
        Some(before) => format!("{before}; {why}"),
        None => why,
    });
}

fn plan_facts(plan: &Plan) -> Facts {
    let probes: Vec<&str> = plan.probes.iter().map(|probe| &*probe.name).collect();
    let facts = [
        ("runtimes", json!(plan.runtimes)),
        ("client_runtime", json!(plan.client_runtime)),
        ("probes", json!(probes)),
        ("profile", json!(plan.profile)),
        ("repeat", json!(plan.repeat)),
        ("warm_up", json!(plan.warm_up)),
        ("cpus", json!(plan.cpus)),
        ("memory_bytes", json!(plan.memory)),
        ("build_image", json!(plan.build_image)),
        ("volumes", manifest::storage(&plan.volumes)),
    ];
    facts.map(|(name, fact)| (name.to_owned(), fact)).into()
}
