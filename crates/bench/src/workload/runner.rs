//! Many runs in a fair order: in each round, every variant of every probe runs once on each runtime in turn, so that
//! drift of the host affects all of them. Failures stay in the data, and every pod is removed afterwards.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use sandboxer_probe::log::{Printed, plain};
use sandboxer_probe::options::Resources;
use sandboxer_probe::process;
use sandboxer_probe::sample::Outcome;
use sandboxer_probe::timeline;
use sandboxer_probe::vm::VM;
use sandboxer_probe::workload::cpu::RoleUse;
use sandboxer_probe::workload::definition::{Image, Storage};
use sandboxer_probe::workload::facts::{self, Facts};
use sandboxer_probe::workload::run::{Commands, Figures, Power, Run, handler};

use super::container::{ContainerError, Spec, Started, Starter};
use super::cpu::{self, Pods, Reading};
use super::host::Look;
use super::native::NATIVE;
use super::output::{self, OutputError};
use super::plan::{Plan, Step, inside};
use super::volume::Volume;

/// Path of a block device in a container.
const DEVICE: &str = "/dev/bench";
/// Why a variant has no figures in the series vm.
const NOT_IN_VM: &str = "is not available in series vm";
/// CRI's period of a quota, µs.
const PERIOD: i64 = 100_000;

/// Receives each run with the tool's output; an error (such as a full disk) ends the measurement.
pub type Sink<'a> = &'a mut (dyn FnMut(&Run, &Printed) -> Result<(), String> + Send);

/// Runs a plan.
pub struct Runner<'a> {
    plan: &'a Plan,
    starter: Starter,
    /// Images that are not on the node.
    missing: Vec<Image>,
    /// Resources of each runtime's containers.
    pub sides: BTreeMap<String, Facts>,
    /// Notes on the runs.
    pub notes: Vec<String>,
    /// Every run so far.
    pub runs: Vec<Run>,
    begun: Instant,
    serial: u64,
}

/// Why a run has no figures.
struct Failure {
    at: String,
    why: String,
    interrupted: bool,
}

impl From<ContainerError> for Failure {
    fn from(error: ContainerError) -> Self {
        let interrupted = matches!(error, ContainerError::Interrupted);
        Self { at: error.step().to_owned(), why: error.to_string(), interrupted }
    }
}

impl Failure {
    fn at(step: &str, why: impl ToString) -> Self {
        Self { at: step.to_owned(), why: why.to_string(), interrupted: false }
    }
}

/// Data of one run besides its figures.
#[derive(Default)]
struct Attempt {
    commands: Commands,
    facts: Option<Facts>,
    printed: Printed,
    cpu: Option<RoleUse>,
    power: Power,
    /// Volume of the run; dropped last, after the pod's removal.
    volume: Option<Volume>,
}

impl<'a> Runner<'a> {
    /// Creates a runner that has no runs yet.
    pub fn new(plan: &'a Plan, starter: Starter, missing: Vec<Image>) -> Self {
        let (sides, notes, runs) = Default::default();
        Self { plan, starter, missing, sides, notes, runs, begun: Instant::now(), serial: 0 }
    }

    /// Starts one container on each runtime and reads its resources. A failure adds a note; the runtime's runs then
    /// fail on their own.
    pub async fn look_inside(&mut self) {
        for handler in &self.plan.trusted {
            self.notes.push(format!(
                "{handler}: its containers do not see their limits: equal ones were requested, and are not checked"
            ));
        }
        for handler in &self.plan.runtimes {
            let spec = self.spec(handler, "facts", vec!["bench-helper".into(), "facts".into()]);
            let limit = self.plan.recipe.timeout;
            let looked = async {
                let started = self.starter.start(&spec).await?;
                self.starter.finish(&started, Duration::ZERO, limit).await
            };
            match looked.await.map(|printed| self.facts_of(handler, &printed.stdout)) {
                Ok(Some(facts)) => drop(self.sides.insert(handler.clone(), facts)),
                Ok(None) => self.notes.push(format!("{handler}: bench-helper printed no facts")),
                Err(error) => {
                    self.notes.push(format!("{handler}: cannot read a container's resources: {error}"))
                }
            }
            self.remove_pods().await;
        }
    }

    /// Returns the facts in the output of a series' container, with the plan's limits if the handler hides them.
    fn facts_of(&self, series: &str, text: &str) -> Option<Facts> {
        let mut facts = Facts::find(text)?;
        if self.plan.trusted.iter().any(|trusted| trusted == handler(series)) {
            // gVisor does show a limit: the host's memory.
            let (cpus, memory) = (f64::from(self.plan.cpus), self.plan.memory);
            facts.quota_cpus = Some(facts.quota_cpus.map_or(cpus, |seen| seen.min(cpus)));
            facts.memory_limit = Some(facts.memory_limit.map_or(memory, |seen| seen.min(memory)));
        }
        Some(facts)
    }

    /// Returns the number of threads that every runtime can run at once.
    pub fn threads(&self) -> u32 {
        facts::threads(self.sides.values())
    }

    /// Returns the difference that makes two of the runtimes incomparable, if any.
    pub fn unequal(&self) -> Option<String> {
        let mut sides = self.sides.iter();
        let (first, mine) = sides.next()?;
        sides.find_map(|(other, theirs)| Some(format!("{first} and {other}: {}", mine.differs(theirs)?)))
    }

    /// Runs everything. Returns as an error the reason for an early end.
    pub async fn run(&mut self, sink: Sink<'_>) -> Result<(), String> {
        let threads = self.threads();
        let warm_up = (self.plan.warm_up, self.plan.warm_up_steps(), true);
        for (rounds, steps, warm_up) in [warm_up, (self.plan.repeat, self.plan.steps(), false)] {
            for round in 0..rounds {
                let order = self.plan.order(round);
                for step in &steps {
                    for handler in &order {
                        self.one(step, handler, threads, (round, warm_up), sink).await?;
                    }
                }
            }
        }
        Ok(())
    }

    async fn one(
        &mut self,
        step: &Step,
        handler: &str,
        threads: u32,
        (round, warm_up): (u32, bool),
        sink: Sink<'_>,
    ) -> Result<(), String> {
        let (begun, host, mut attempt) = (Instant::now(), Look::now(), Attempt::default());
        self.serial += 1;
        let done = self.attempt(step, handler, threads, &mut attempt).await;
        let host = host.since();
        self.remove_pods().await;
        let (outcome, figures, failure) = match done {
            Ok(figures) => (Outcome::Ok, figures, None),
            Err(failure) if failure.interrupted => (Outcome::Interrupted, Figures::new(), None),
            Err(failure) => (Outcome::Failed, Figures::new(), Some(failure)),
        };
        let (failed_at, error) = failure.map(|failure| (failure.at, plain(&failure.why))).unwrap_or_default();
        let run = Run {
            runtime: handler.to_owned(),
            probe: step.probe.name.clone(),
            case: step.case.clone(),
            round,
            warm_up,
            begun_s: begun.saturating_duration_since(self.begun).as_secs_f64(),
            took_s: begun.elapsed().as_secs_f64(),
            outcome,
            failed_at,
            error,
            commands: attempt.commands,
            threads: step.threads(threads),
            figures,
            facts: attempt.facts,
            host,
            cpu: attempt.cpu,
            power: attempt.power,
        };
        let stored = sink(&run, &attempt.printed);
        self.runs.push(run);
        stored?;
        if self.starter.cancel.is_cancelled() {
            return Err("interrupted".into());
        }
        Ok(())
    }

    async fn attempt(
        &self,
        step: &Step,
        handler: &str,
        threads: u32,
        attempt: &mut Attempt,
    ) -> Result<Figures, Failure> {
        self.possible(step, handler)?;
        match step.probe.port {
            None => self.run_tool(step, handler, threads, attempt).await?,
            Some(port) => self.serve(step, handler, threads, port, attempt).await?,
        }
        self.same_as_before(handler, attempt.facts.as_ref())?;
        figures(step, &attempt.printed)
    }

    /// Rejects a variant that cannot run here.
    fn possible(&self, step: &Step, series: &str) -> Result<(), Failure> {
        let image = step.probe.image;
        if handler(series) == VM {
            possible_in_vm(step)?;
        } else if self.missing.contains(&image) && handler(series) != NATIVE {
            let name = self.starter.image(image);
            let why = format!(
                "{name} is not on the node: `make bench-image BENCH_IMAGES='bench-small bench-build'`"
            );
            return Err(Failure::at("image", why));
        }
        if self.plan.memory < step.needs() {
            let why = format!(
                "pods have {} MiB of memory and it needs {}: use --memory",
                self.plan.memory >> 20,
                step.needs() >> 20
            );
            return Err(Failure::at("memory", why));
        }
        Ok(())
    }

    /// Runs the tool in the pod under test.
    async fn run_tool(
        &self,
        step: &Step,
        series: &str,
        threads: u32,
        attempt: &mut Attempt,
    ) -> Result<(), Failure> {
        self.volume(step, series, step.storage(), attempt)?;
        let device = attempt.volume.as_ref().and_then(Volume::device);
        let path = match device {
            // A native tool uses the host's devices.
            Some(device) if handler(series) == NATIVE => device.host_path.display().to_string(),
            _ => DEVICE.to_owned(),
        };
        attempt.commands = commands(step, threads, "", &path)?;
        let mut spec = self.spec(series, "tool", inside(&attempt.commands.tool, None, step.storage()));
        spec.image = step.probe.image;
        add_volume(&mut spec, attempt)?;
        let started = self.starter.start(&spec).await?;
        let (before, power) = (Reading::now(), self.plan.meter.begin());
        let limit = step.deadline(self.plan.recipe.timeout);
        let finished = self.starter.finish(&started, step.takes, limit).await;
        attempt.power = self.plan.meter.since(&power);
        if finished.is_ok() {
            attempt.cpu = self.roles(before, &started, &started).await;
        }
        self.keep(&started, attempt);
        attempt.facts = self.facts_of(series, &attempt.printed.stderr);
        attempt.printed = finished?;
        Ok(())
    }

    /// Returns the CPU time by role since `before`, for the tested container's run; `None` if `/proc` cannot be read.
    async fn roles(&self, before: Reading, tested: &Started, tool: &Started) -> Option<RoleUse> {
        let client = if std::ptr::eq(tested, tool) { None } else { self.starter.ids(tool).await };
        let socket = self.starter.runtime.socket().to_owned();
        let in_vm = matches!(tested, Started::Vm(_));
        let (tested, tool_s) = (self.starter.ids(tested).await, self.starter.ran_s(tool).await);
        let work = move || {
            let pods = Pods { tested, client, cri: process::listener(&socket), in_vm };
            cpu::since(&before, &pods, tool_s).ok()
        };
        tokio::task::spawn_blocking(work).await.ok().flatten()
    }

    /// Runs the server in the pod under test, and the tool in a pod of the clients' runtime.
    async fn serve(
        &self,
        step: &Step,
        handler: &str,
        threads: u32,
        port: u16,
        attempt: &mut Attempt,
    ) -> Result<(), Failure> {
        attempt.commands = commands(step, threads, "", DEVICE)?;
        let storage = step.probe.server_storage;
        let mut spec = self.spec(handler, "server", inside(&attempt.commands.server, Some(port), storage));
        spec.port = Some(port);
        self.volume(step, handler, storage, attempt)?;
        add_volume(&mut spec, attempt)?;
        let server = self.starter.start(&spec).await?;
        let address = self.starter.serving(&server).await?;
        attempt.commands = commands(step, threads, &address, DEVICE)?;
        let mut spec =
            self.spec(&self.plan.client_runtime, "client", inside(&attempt.commands.tool, None, None));
        spec.resources = None;
        let of_client = |error: ContainerError| {
            let failure = Failure::from(error);
            Failure { at: format!("client: {}", failure.at), ..failure }
        };
        let client = self.starter.start(&spec).await.map_err(of_client)?;
        let (before, power) = (Reading::now(), self.plan.meter.begin());
        let limit = step.deadline(self.plan.recipe.timeout);
        let finished = self.starter.finish(&client, step.takes, limit).await;
        attempt.power = self.plan.meter.since(&power);
        if finished.is_ok() {
            attempt.cpu = self.roles(before, &server, &client).await;
        }
        self.keep(&client, attempt);
        let served = self.starter.printed(&server);
        attempt.facts = self.facts_of(handler, &served.stderr);
        attempt.printed = finished.map_err(|error| {
            let failure = of_client(error);
            Failure {
                why: format!("{}; the server's last output: {}", failure.why, served.last_words()),
                ..failure
            }
        })?;
        Ok(())
    }

    /// Creates the volume of a run.
    fn volume(
        &self,
        step: &Step,
        series: &str,
        storage: Option<Storage>,
        attempt: &mut Attempt,
    ) -> Result<(), Failure> {
        let Some(storage) = storage else { return Ok(()) };
        if handler(series) == VM && storage == Storage::Share {
            return Err(Failure::at("volume", format!("a share {NOT_IN_VM}")));
        }
        attempt.volume = Volume::make(&self.plan.volumes, storage, step.size()).map_err(|error| {
            Failure::at("volume", format!("cannot create one in {}: {error}", self.plan.volumes.display()))
        })?;
        Ok(())
    }

    /// Reads and keeps the output, even after a failure.
    fn keep(&self, started: &Started, attempt: &mut Attempt) {
        attempt.printed = self.starter.printed(started);
    }

    /// Rejects a container whose resources differ from those of its runtime's first container.
    fn same_as_before(&self, handler: &str, facts: Option<&Facts>) -> Result<(), Failure> {
        let facts = facts.ok_or_else(|| Failure::at("facts", "its container did not print its resources"))?;
        match self.sides.get(handler).and_then(|before| before.differs(facts)) {
            Some(why) => {
                Err(Failure::at("facts", format!("its container had other resources than the first: {why}")))
            }
            None => Ok(()),
        }
    }

    fn spec<'s>(&self, series: &'s str, what: &str, command: Vec<String>) -> Spec<'s> {
        let resources = Resources {
            cpu_quota: i64::from(self.plan.cpus) * PERIOD,
            cpu_period: PERIOD,
            memory_limit: i64::try_from(self.plan.memory).unwrap_or(i64::MAX),
            ..Resources::default()
        };
        let handler = handler(series);
        Spec {
            name: format!("{}-{}-{what}-{handler}", self.plan.recipe.run, self.serial),
            handler,
            command,
            resources: Some(resources),
            mounts: Vec::new(),
            devices: Vec::new(),
            image: Image::default(),
            cpus: self.plan.cpus,
            memory: self.plan.memory,
            disks: Vec::new(),
            port: None,
        }
    }

    /// Removes all pods of the run by its label, including those whose start failed.
    async fn remove_pods(&mut self) {
        if let Err(error) = timeline::remove_all(&self.starter.runtime, &self.plan.recipe.run).await {
            let label = format!("{}={}", timeline::RUN_LABEL, self.plan.recipe.run);
            let note = plain(&format!("pods with label {label} may still exist: {error}"));
            // The same error would recur after each run.
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
    }
}

fn commands(step: &Step, threads: u32, server: &str, device: &str) -> Result<Commands, Failure> {
    step.commands(threads, server, device).map_err(|error| Failure::at("command", error))
}

/// Rejects a variant that is unavailable in the series vm.
fn possible_in_vm(step: &Step) -> Result<(), Failure> {
    match step.probe.image {
        Image::BenchSmall => Ok(()),
        Image::BenchBuild => Err(Failure::at("image", format!("bench-build {NOT_IN_VM}"))),
    }
}

fn add_volume(spec: &mut Spec<'_>, attempt: &Attempt) -> Result<(), Failure> {
    let volume = attempt.volume.as_ref();
    if let Some(volume) = volume.filter(|_| spec.handler == VM) {
        let disk = volume.disk().map_err(|error| Failure::at("volume", error))?;
        spec.disks.push(disk);
        return Ok(());
    }
    spec.mounts.extend(volume.and_then(Volume::mount));
    spec.devices.extend(volume.and_then(Volume::device));
    Ok(())
}

fn figures(step: &Step, printed: &Printed) -> Result<Figures, Failure> {
    let all = output::parse(step.probe.output, &printed.stdout).map_err(|error| {
        let last_line =
            if matches!(error, OutputError::Failed { .. }) { String::new() } else { printed.last_words() };
        Failure::at(
            "output",
            format!("{error}; its last line: {last_line}").trim_end_matches("; its last line: "),
        )
    })?;
    let missing = step.probe.metrics.iter().find(|metric| !all.contains_key(&metric.name));
    match missing {
        Some(metric) => Err(Failure::at("output", format!("the output has no {}", metric.name))),
        None => Ok(all.into_iter().filter(|(name, _)| step.probe.metric(name).is_some()).collect()),
    }
}
