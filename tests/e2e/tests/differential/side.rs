//! One of the two sides: a pod of a runtime handler, in which the steps of a sequence are done.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, fs};

use anyhow::{Context, Result, ensure};
use containerd_client::services::v1::Container;
use containerd_client::types::Mount;
use nix::errno::Errno;
use sandboxer_e2e::case::{Case, Pod, shell};
use sandboxer_e2e::containerd::Containerd;
use sandboxer_e2e::failing::arm;
use sandboxer_e2e::fifo::{Fifos, READY};
use sandboxer_e2e::insist::{insist, once_seen};
use sandboxer_e2e::stack::Victim;
use sandboxer_e2e::stream::Session;
use serde_json::{Value, json};
use tokio::task::AbortHandle;
use tonic::{Code, Status};

use crate::known::Difference;
use crate::steps::{LIMITS, Part, Program, STREAMS, Step, Target, init};

/// Time for what happens by itself: an exit, an event, a removal.
pub const PATIENCE: Duration = Duration::from_secs(25);

/// The memory of a container whose child wants all.
const SMALL: u64 = 24 << 20;

/// The state of each process by its name; an exec's begins with its container's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State(BTreeMap<String, String>);

impl State {
    /// Returns whether a process has ended, as far as its state tells.
    pub fn has_ended(&self, name: &str) -> bool {
        self.0.get(name).is_none_or(|state| state.starts_with("stopped"))
    }

    /// Returns those that differ: what is compared, and the state on each side. Of a container that only one side has, its
    /// execs are passed over.
    pub fn unlike(&self, ours: &Self, step: &str) -> Vec<Difference> {
        let mut unlike = Vec::new();
        let mut missing = None;
        let names: BTreeSet<_> = self.0.keys().chain(ours.0.keys()).collect();
        for name in names {
            let [runc, ours] = [self, ours].map(|side| side.0.get(name).map_or("", String::as_str));
            let container = name.split('/').next();
            if runc == ours || missing.is_some() && missing == container {
                continue;
            }
            let is_exec = name.contains('/');
            if !is_exec && runc.starts_with("NotFound") {
                missing = container;
            }
            let what = format!("state of {} after {step}", if is_exec { "an exec" } else { "a container" });
            unlike.push(Difference { what, runc: runc.to_owned(), ours: ours.to_owned() });
        }
        unlike
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let states: Vec<_> = self.0.iter().map(|(name, state)| format!("{name} {state}")).collect();
        f.write_str(&states.join("; "))
    }
}

/// A pod, and what a sequence has made in it.
pub struct Side {
    case: Case,
    containerd: Containerd,
    pod: Pod,
    /// A container that CRI has made: those of a sequence have its record.
    template: Container,
    snapshotter: String,
    parent: String,
    dir: PathBuf,
    made: usize,
    /// Each container of the sequence by its id, and its root file system's snapshot.
    containers: BTreeMap<String, Vec<Mount>>,
    /// The last one in each place.
    current: BTreeMap<usize, String>,
    processes: BTreeMap<Target, Process>,
    by_cri: BTreeMap<usize, ByCri>,
}

/// A task or an exec.
struct Process {
    program: Program,
    fifos: Fifos,
    exit: Arc<Mutex<Option<u32>>>,
    waiting: AbortHandle,
    has_terminal: bool,
    started: bool,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.waiting.abort();
    }
}

/// A container that CRI knows.
struct ByCri {
    id: String,
    attached: Option<Session>,
}

/// Returns how an answer is compared: what it says, or the error's code.
fn comparable<T: ToString>(answer: Result<T, Status>) -> String {
    answer.map_or_else(|error| format!("{:?}", error.code()), |value| value.to_string())
}

fn done(answer: Result<(), Status>) -> String {
    comparable(answer.map(|()| "ok"))
}

impl Side {
    /// Starts a pod.
    pub async fn start(case: Case, containerd: Containerd) -> Result<Self> {
        let pod = case.pod().await.with_context(|| format!("a pod of {}", case.handler))?;
        let template = pod.create(shell("template", "true")).await?;
        let template = containerd.container(&template.id).await?;
        let snapshotter = template.snapshotter.clone();
        let parent = containerd.parent(&snapshotter, &template.snapshot_key).await?;
        let dir = case.stack.dir().join("fifos").join(&pod.id);
        fs::create_dir_all(&dir)?;
        Ok(Self {
            case,
            containerd,
            pod,
            template,
            snapshotter,
            parent,
            dir,
            made: 0,
            containers: BTreeMap::new(),
            current: BTreeMap::new(),
            processes: BTreeMap::new(),
            by_cri: BTreeMap::new(),
        })
    }

    /// Removes the pod, and what is left of a sequence that failed.
    pub async fn remove(self) -> Result<()> {
        let removed = self.case.remove(&self.pod.id).await;
        // A container whose pod is gone is gone; containerd is still to be told.
        for id in self.containers.keys() {
            let _ = self.containerd.kill(id, "", 9, false).await;
            let _ = self.containerd.delete(id, "").await;
            let _ = self.containerd.delete_container(id).await;
            let _ = self.containerd.remove_snapshot(&self.snapshotter, id).await;
        }
        let _ = fs::remove_dir_all(&self.dir);
        removed
    }

    fn id(&self, container: usize) -> String {
        self.current.get(&container).cloned().unwrap_or_else(|| format!("none-{container}"))
    }

    /// Returns the ids of the containers of the sequence, in the order of their creation.
    pub fn ids(&self) -> Vec<String> {
        self.containers.keys().cloned().collect()
    }

    /// Returns whether the process that a step is about will end by it, as far as its program tells.
    pub fn will_end(&self, step: Step) -> bool {
        let Some(target) = step.target() else { return false };
        let Some(process) = self.processes.get(&target) else { return false };
        match step {
            Step::Start { .. } => {
                process.program.ends() || process.program == Program::Reads && process.fifos.is_closed()
            }
            Step::Kill { signal: 9, .. } => true,
            Step::Kill { signal: 15, .. } => process.program == Program::Traps,
            Step::Kill { signal: 1 | 2 | 10, .. } => target.exec.is_some(),
            Step::CloseIo { .. } => process.started && process.program == Program::Reads,
            _ => false,
        }
    }

    /// Makes the record and the root file system of a new container.
    async fn new_container(&mut self, container: usize, program: Program, terminal: bool) -> Result<String> {
        self.made += 1;
        let id = format!("{}-{:04}-{container}", &self.pod.id[..16], self.made);
        let spec = self.template.spec.as_ref().context("a container without a spec")?;
        let text = std::str::from_utf8(&spec.value)?.replace(&self.template.id, &id);
        let mut value: Value = serde_json::from_str(&text)?;
        value["process"]["args"] = json!(program.args());
        value["process"]["terminal"] = json!(terminal);
        value["linux"]["resources"]["memory"] = json!({ "limit": SMALL });
        let mounts = self.containerd.prepare(&self.snapshotter, &id, &self.parent).await?;
        let mut record = self.template.clone();
        record.id.clone_from(&id);
        record.snapshot_key.clone_from(&id);
        // Without CRI's labels it is no container of CRI's.
        record.labels.clear();
        record.extensions.clear();
        record.spec.get_or_insert_default().value = serde_json::to_vec(&value)?;
        self.containerd.create_container(record).await?;
        self.containers.insert(id.clone(), mounts);
        self.current.insert(container, id.clone());
        Ok(id)
    }

    /// Returns the description of an exec.
    fn process(&self, program: Program, terminal: bool) -> Result<Vec<u8>> {
        let spec = self.template.spec.as_ref().context("a container without a spec")?;
        let mut value: Value = serde_json::from_slice(&spec.value)?;
        let mut process = value["process"].take();
        process["args"] = json!(program.args());
        process["terminal"] = json!(terminal);
        Ok(serde_json::to_vec(&process)?)
    }

    /// Does a step, and returns what the answer says.
    pub async fn perform(&mut self, step: Step) -> Result<String> {
        let containerd = self.containerd.clone();
        Ok(match step {
            Step::Create { target, program, terminal, stalled } => {
                self.create(target, program, terminal, stalled, None).await?
            }
            Step::CreateTwice { target, program, within_ms } => {
                self.create(target, program, false, false, Some(Duration::from_millis(within_ms))).await?
            }
            Step::Start { target } => {
                let answer = containerd.start(&self.id(target.container), &target.exec_id()).await;
                if answer.is_ok()
                    && let Some(process) = self.processes.get_mut(&target)
                {
                    process.started = true;
                    process.ready().await;
                }
                done(answer)
            }
            Step::Kill { target, signal, all } => {
                done(containerd.kill(&self.id(target.container), &target.exec_id(), signal, all).await)
            }
            // Before its start an exec of runc's takes no notice, and never sees an end; here it does. A terminal hangs up,
            // which ends runc's own program that waits in it; a guest has none.
            Step::CloseIo { target }
                if self.processes.get(&target).is_some_and(|process| {
                    !process.started && (target.exec.is_some() || process.has_terminal)
                }) =>
            {
                String::new()
            }
            Step::CloseIo { target } => {
                // As containerd's client: it closes its end first.
                if let Some(process) = self.processes.get_mut(&target) {
                    process.fifos.close_stdin();
                }
                done(containerd.close_io(&self.id(target.container), &target.exec_id()).await)
            }
            Step::Delete { target } => {
                let answer = containerd.delete(&self.id(target.container), &target.exec_id()).await;
                if answer.is_ok() {
                    self.processes.retain(|known, _| {
                        *known != target && !(target.exec.is_none() && known.container == target.container)
                    });
                }
                comparable(answer.map(|code| format!("ok, exit {code}")))
            }
            Step::Stall { target } | Step::Read { target } => {
                if let Some(process) = self.processes.get(&target) {
                    process.fifos.stall(matches!(step, Step::Stall { .. }));
                }
                String::new()
            }
            Step::Resize { target } => {
                done(containerd.resize(&self.id(target.container), &target.exec_id()).await)
            }
            Step::Pause { container } => done(containerd.pause(&self.id(container)).await),
            Step::Resume { container } => done(containerd.resume(&self.id(container)).await),
            Step::Update { container, limits } => {
                done(containerd.update(&self.id(container), LIMITS[limits % LIMITS.len()]).await)
            }
            Step::Pids { container } => comparable(containerd.pids(&self.id(container)).await.map(|_| "ok")),
            Step::PidsOften { container } => {
                let mut answer = Ok("ok");
                for _ in 0..STREAMS {
                    answer = answer.and(containerd.pids(&self.id(container)).await.map(|_| "ok"));
                }
                comparable(answer)
            }
            Step::CreateUnnoted { target, program } => {
                if self.case.in_vm() {
                    arm(
                        &self.case.stack,
                        &[format!("{} the front keeps a note: exec ", Errno::ENOSPC as i32)],
                    )?;
                    self.kill(Victim::Worker).await?;
                    let fifos = self.fifos(false, false)?;
                    let process = self.process(program, false)?;
                    let id = self.id(target.container);
                    let answer = containerd.exec(&id, &target.exec_id(), process, fifos.stdio()).await;
                    ensure!(answer.is_err(), "an exec was added, of which the daemon has no note");
                }
                String::new()
            }
            Step::Metrics { container } => comparable(containerd.metrics(&self.id(container)).await),
            Step::CriCreate { container, program } => self.cri_create(container, program).await?,
            Step::CriStart { container } => {
                let id = self.cri_id(container);
                done(self.case.cri.start(&id).await)
            }
            Step::CriStop { container, grace } => {
                let id = self.cri_id(container);
                done(once_seen(|| self.case.cri.stop(&id, grace)).await)
            }
            Step::CriRemove { container } => {
                let id = self.cri_id(container);
                let answer = self.case.cri.remove(&id).await;
                if answer.is_ok() {
                    self.by_cri.remove(&container);
                }
                done(answer)
            }
            Step::CriExec { container, program } => {
                let id = self.cri_id(container);
                let args = program.args();
                let args: Vec<_> = args.iter().map(String::as_str).collect();
                let answer = once_seen(|| self.case.cri.exec_sync(&id, &args, None)).await;
                comparable(answer.map(|answer| {
                    format!("ok, exit {}, {:?}", answer.exit_code, String::from_utf8_lossy(&answer.stdout))
                }))
            }
            Step::CriAttach { container } => {
                let id = self.cri_id(container);
                let answer = once_seen(|| self.case.cri.attach(&id, false)).await;
                if let (Ok(url), Some(entry)) = (&answer, self.by_cri.get_mut(&container)) {
                    entry.attached = Session::open(url).await.ok();
                }
                comparable(answer.map(|_| "ok"))
            }
            Step::RestartContainerd { .. } => String::new(),
            Step::KillDaemon { part } => {
                if self.case.in_vm() {
                    let victim = match part {
                        Part::Worker => Victim::Worker,
                        Part::Front => Victim::Front,
                    };
                    self.kill(victim).await?;
                }
                String::new()
            }
        })
    }

    /// Kills a part of the daemon. The next request waits for its successor.
    async fn kill(&self, victim: Victim) -> Result<()> {
        let stack = Arc::clone(&self.case.stack);
        tokio::task::spawn_blocking(move || stack.kill(victim)).await?.map(drop)
    }

    fn fifos(&mut self, terminal: bool, stalled: bool) -> Result<Fifos> {
        self.made += 1;
        Fifos::make(&self.dir, &format!("f{}", self.made), terminal, stalled)
    }

    async fn create(
        &mut self,
        target: Target,
        program: Program,
        terminal: bool,
        stalled: bool,
        deadline: Option<Duration>,
    ) -> Result<String> {
        let fifos = self.fifos(terminal, stalled)?;
        let is_new = !self.processes.contains_key(&target);
        let containerd = self.containerd.clone();
        let answer = if target.exec.is_some() {
            let process = self.process(program, terminal)?;
            containerd.exec(&self.id(target.container), &target.exec_id(), process, fifos.stdio()).await
        } else {
            let id = match is_new {
                true => self.new_container(target.container, program, terminal).await?,
                false => self.id(target.container),
            };
            let mounts = self.containers.get(&id).cloned().unwrap_or_default();
            let create = |deadline| {
                containerd.create_task(&id, mounts.clone(), fifos.stdio(), self.case.in_vm(), deadline)
            };
            match deadline {
                None => create(None).await,
                // Whoever gave up asks again, once what he began is cleaned up.
                Some(_) => match create(deadline).await {
                    Ok(()) => Ok(()),
                    Err(_) => {
                        let began = Instant::now();
                        loop {
                            match create(None).await {
                                // containerd itself says the second while it removes the bundle.
                                Err(error)
                                    if (error.code() == Code::AlreadyExists
                                        || error.message().ends_with(": file exists"))
                                        && is_new
                                        && began.elapsed() < PATIENCE =>
                                {
                                    tokio::time::sleep(Duration::from_millis(100)).await;
                                }
                                answer => break answer,
                            }
                        }
                    }
                },
            }
        };
        if answer.is_ok() && is_new {
            let mut process = Process::watch(containerd, self.id(target.container), target, program, fifos);
            process.has_terminal = terminal;
            self.processes.insert(target, process);
        }
        Ok(done(answer))
    }

    fn cri_id(&self, container: usize) -> String {
        self.by_cri.get(&container).map_or_else(|| format!("none-{container}"), |entry| entry.id.clone())
    }

    async fn cri_create(&mut self, container: usize, program: Program) -> Result<String> {
        if self.by_cri.contains_key(&container) {
            return Ok("there already".to_owned());
        }
        self.made += 1;
        let mut config = shell(&format!("c{}", self.made), "");
        config.command = program.args();
        config.stdin = true;
        let linux = config.linux.get_or_insert_default();
        linux.resources.get_or_insert_default().memory_limit_in_bytes = SMALL as i64;
        let created = insist("create a container", || self.pod.create(config.clone())).await;
        Ok(match created {
            Ok(created) => {
                self.by_cri.insert(container, ByCri { id: created.id, attached: None });
                "ok".to_owned()
            }
            Err(error) => match error.downcast_ref::<Status>() {
                Some(status) => format!("{:?}", status.code()),
                None => return Err(error),
            },
        })
    }

    /// Returns what there is, and in which state.
    pub async fn state(&self) -> State {
        let mut states = BTreeMap::new();
        for (target, process) in &self.processes {
            let state = self.containerd.state(&self.id(target.container), &target.exec_id()).await;
            let state = comparable(state.map(|state| match state.name {
                "stopped" => format!("stopped {}", state.exit),
                name => name.to_owned(),
            }));
            let wait_result = process.exited().map(|code| format!(", Wait {code}")).unwrap_or_default();
            states.insert(target.to_string(), format!("{state}{wait_result}"));
        }
        for (container, entry) in &self.by_cri {
            let status = once_seen(|| self.case.cri.status(&entry.id)).await;
            let status =
                comparable(status.map(|(status, _)| {
                    format!("{:?} {} {}", status.state(), status.exit_code, status.reason)
                }));
            states.insert(init(*container).to_string(), status);
        }
        State(states)
    }

    /// Returns how much each program has written that has ended. Who stalled it reads the rest now.
    pub fn output(&self) -> String {
        let ended = self.processes.iter().filter(|(_, process)| process.exited().is_some());
        let outputs = ended.map(|(target, process)| {
            process.fifos.stall(false);
            format!("{target} {} bytes", process.fifos.output().len())
        });
        outputs.collect::<Vec<_>>().join("; ")
    }

    /// Ends and deletes all that is left; returns what cannot be.
    pub async fn finish(&mut self) -> Result<Vec<String>> {
        let mut failed = Vec::new();
        for process in self.processes.values() {
            process.fifos.stall(false);
        }
        let left: Vec<_> = self.processes.keys().copied().filter(|target| target.exec.is_none()).collect();
        for target in left {
            let id = self.id(target.container);
            let _ = self.containerd.resume(&id).await;
            let _ = self.containerd.kill(&id, "", 9, false).await;
            let began = Instant::now();
            while began.elapsed() < PATIENCE
                && self.containerd.state(&id, "").await.is_ok_and(|state| state.name != "stopped")
            {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            for exec in self.processes.keys().filter(|known| known.container == target.container) {
                if exec.exec.is_some() {
                    let _ = self.containerd.delete(&id, &exec.exec_id()).await;
                }
            }
            // runc cannot remove the control group of a container whose execs have not all been reaped.
            let mut deleted = self.containerd.delete(&id, "").await;
            while began.elapsed() < PATIENCE
                && deleted.as_ref().is_err_and(|error| error.code() == Code::Unknown)
            {
                tokio::time::sleep(Duration::from_millis(100)).await;
                deleted = self.containerd.delete(&id, "").await;
            }
            match deleted {
                Ok(_) => {}
                Err(error) if error.code() == Code::NotFound => {}
                Err(error) => failed.push(format!("{target} cannot be deleted: {:?}", error.code())),
            }
        }
        self.processes.clear();
        for (container, entry) in std::mem::take(&mut self.by_cri) {
            drop(entry.attached);
            let _ = once_seen(|| self.case.cri.stop(&entry.id, 0)).await;
            let began = Instant::now();
            let mut answer = self.case.cri.remove(&entry.id).await;
            while answer.is_err() && began.elapsed() < PATIENCE {
                tokio::time::sleep(Duration::from_millis(100)).await;
                answer = self.case.cri.remove(&entry.id).await;
            }
            if let Err(error) = answer {
                failed.push(format!("{} cannot be removed: {:?}", init(container), error.code()));
            }
        }
        Ok(failed)
    }

    /// Forgets the containers of a finished sequence; returns what is left of them.
    pub async fn forget(&mut self) -> Result<Vec<String>> {
        let began = Instant::now();
        let mut left = loop {
            let mut left = Vec::new();
            let tasks = self.containerd.list().await?;
            for id in self.containers.keys() {
                left.extend(tasks.iter().filter(|task| *task == id).map(|_| "a task".to_owned()));
                left.extend(self.traces(id)?);
            }
            if left.is_empty() || began.elapsed() > PATIENCE {
                break left;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        for id in std::mem::take(&mut self.containers).into_keys() {
            if let Err(error) = self.containerd.delete_container(&id).await {
                left.push(format!("the record of a container: {:?}", error.code()));
            }
            if let Err(error) = self.containerd.remove_snapshot(&self.snapshotter, &id).await {
                left.push(format!("a snapshot: {:?}", error.code()));
            }
        }
        self.current.clear();
        Ok(left)
    }

    /// Returns what the host has of a container.
    fn traces(&self, id: &str) -> Result<Vec<String>> {
        let mut traces = Vec::new();
        let parent = self.case.stack.env("SANDBOXER_CGROUP_PARENT")?.trim_matches('/').to_owned();
        for hierarchy in fs::read_dir("/sys/fs/cgroup")?.flatten() {
            if hierarchy.path().join(&parent).join(id).exists() {
                traces.push(format!("a control group in {}", hierarchy.path().display()));
            }
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        traces.extend(mounts.lines().filter(|line| line.contains(id)).map(|_| "a mount".to_owned()));
        let dir = self.case.stack.dir();
        let mut dirs = vec![
            dir.join("containerd/state/io.containerd.runtime.v2.task/k8s.io"),
            dir.join("containerd/runc/k8s.io"),
        ];
        if self.case.in_vm() {
            dirs.extend(self.case.stack.daemon_dirs());
        }
        for dir in dirs {
            named(&dir, id, &mut traces);
        }
        Ok(traces)
    }
}

/// Finds files that have the id of a container in their name.
fn named(dir: &Path, id: &str, found: &mut Vec<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_name().to_string_lossy().contains(id) {
            found.push(path.display().to_string().replace(id, "ID"));
        } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            named(&path, id, found);
        }
    }
}

impl Process {
    /// Waits for the end of a process, as containerd's clients do from its creation on.
    fn watch(containerd: Containerd, id: String, target: Target, program: Program, fifos: Fifos) -> Self {
        let exit = Arc::new(Mutex::new(None));
        let to = Arc::clone(&exit);
        let waiting = tokio::spawn(async move {
            loop {
                match containerd.wait(&id, &target.exec_id()).await {
                    Ok(code) => {
                        *to.lock().unwrap_or_else(PoisonError::into_inner) = Some(code);
                        return;
                    }
                    Err(error) if error.code() == Code::NotFound => return,
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        });
        Self { program, fifos, exit, waiting: waiting.abort_handle(), has_terminal: false, started: false }
    }

    fn exited(&self) -> Option<u32> {
        *self.exit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until its program has said that it is ready, or has ended.
    async fn ready(&self) {
        let began = Instant::now();
        while !self.fifos.output().contains(READY) && self.exited().is_none() && began.elapsed() < PATIENCE {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Ends containerd and starts it again.
pub async fn restart_containerd(case: &Case, containerd: &Containerd, killed: bool) -> Result<()> {
    use nix::sys::signal::Signal;
    case.stack.end("containerd", if killed { Signal::SIGKILL } else { Signal::SIGTERM }).await?;
    let stack = Arc::clone(&case.stack);
    tokio::task::spawn_blocking(move || stack.run_up()).await??;
    let began = Instant::now();
    while containerd.list().await.is_err() {
        ensure!(began.elapsed() < PATIENCE, "containerd does not answer after its restart");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    insist("CRI after containerd's restart", || case.cri.pods(("e2e.case", "none"))).await.map(drop)
}
