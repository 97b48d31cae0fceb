//! One container: made, started, joined by execs, removed. Each step runs once however often the
//! host asks, and ends even if the host goes away meanwhile.
//!
//! ```text
//!  (create) ──▶ making ──▶ created ──start──▶ running ──init dies──▶ stopped ──delete──▶ gone
//!                 └─fails─▶ gone      └────────────── delete ───────────────────────────▶ gone
//! ```

use std::{
    collections::HashMap,
    fs::File as OpenFile,
    hash::{DefaultHasher, Hash, Hasher as _},
    io::{Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use sandboxer_protocol::id::{ContainerId, ExecId};
use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time::timeout,
};

use crate::{
    cgroup::Cgroup,
    clock,
    console::Console,
    disk,
    events::OomWatch,
    failure::{Failure, Kind, internal},
    io::{self, Wanted},
    log,
    pids::SharedPids,
    process::{Exit, Process, State, kill},
    reaper::Reaper,
    rootfs::{Dir, Plan},
    runtime::{self, BlockDevice, File, SeenDevice, Stdio},
    stats::{self, Stats},
    sync::lock,
    worker::{Causes, Done, Workers},
};

/// How long killed processes may take to be gone, and frozen ones to stand still.
const PROMPT: Duration = Duration::from_secs(10);

/// Longest message of a container, bytes: kubelet reads as much, from the end.
const MAX_MESSAGE: u64 = 4096;

/// Exit code of a process that never ran, as shells have it.
const NEVER_RAN: u32 = 255;

/// What a container shall be.
#[derive(Debug, Hash)]
pub struct Create {
    /// Chosen by containerd.
    pub id: ContainerId,
    /// OCI spec, JSON.
    pub spec: Vec<u8>,
    /// From which disks.
    pub rootfs: Plan,
    /// The init's streams.
    pub stdio: Wanted,
    /// Placed in the container.
    pub files: Vec<File>,
    /// What it sees beside its own processes.
    pub sees: PidMode,
    /// Disks that it finds as devices.
    pub devices: Vec<SeenDevice>,
}

/// Whose processes a container sees beside its own.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum PidMode {
    /// Nobody's.
    Own,
    /// Those of every container of the pod that says so too.
    Pod,
    /// Those of this container.
    Container(ContainerId),
}

/// What an exec shall be.
#[derive(Debug, Hash)]
pub struct CreateExec {
    /// Chosen by containerd.
    pub id: ExecId,
    /// OCI process, JSON.
    pub process: Vec<u8>,
    /// Its streams.
    pub stdio: Wanted,
}

/// What all containers share.
pub struct Shared {
    /// Tells of deaths.
    pub reaper: Arc<Reaper>,
    /// Run the runtime.
    pub workers: Workers,
    /// Watches memory groups.
    pub oom: Arc<OomWatch>,
    /// The pod's process namespace.
    pub pids: SharedPids,
}

/// A container.
pub struct Container {
    id: ContainerId,
    cgroup: Cgroup,
    /// Tells a repeated request from another one for the same id.
    fingerprint: u64,
    /// Its init is not PID 1: its end ends nothing else.
    sees_others: bool,
    init: Arc<Process>,
    /// The file in which it may leave a message.
    message: Option<PathBuf>,
    made: watch::Sender<Option<Result<i32, Failure>>>,
    // Held over awaits on purpose: start and removal exclude each other.
    start: AsyncMutex<Start>,
    // Never held across an await.
    execs: Mutex<HashMap<ExecId, Arc<Exec>>>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Start {
    /// Ends when the init executes its program.
    causes: Option<Causes>,
    outcome: Option<Result<i32, Failure>>,
}

struct Exec {
    fingerprint: u64,
    request: CreateExec,
    process: Arc<Process>,
    // Held over the start, which happens once.
    outcome: AsyncMutex<Option<Result<i32, Failure>>>,
}

fn fingerprint(request: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    request.hash(&mut hasher);
    hasher.finish()
}

impl Container {
    /// Returns a container that is about to be made.
    pub fn new(request: &Create, shared: Arc<Shared>) -> Self {
        Self {
            id: request.id.clone(),
            cgroup: Cgroup::of(&request.id),
            fingerprint: fingerprint(request),
            sees_others: request.sees != PidMode::Own,
            init: Arc::new(Process::new(request.stdio)),
            message: request
                .files
                .iter()
                .position(|file| file.is_message)
                .map(|n| Dir::of(&request.id).file(n)),
            made: watch::Sender::new(None),
            start: AsyncMutex::default(),
            execs: Mutex::default(),
            shared,
        }
    }

    /// Returns whether `request` is the one that it was made for.
    pub fn is_for(&self, request: &Create) -> bool {
        self.fingerprint == fingerprint(request)
    }

    /// Makes it, in the process namespace `pids` unless it gets one of its own; on failure nothing is left of it.
    pub async fn make(&self, request: &Create, pids: Option<&Path>) -> Result<i32, Failure> {
        let made = self.try_make(request, pids).await;
        match made {
            Ok(pid) => Ok(pid),
            Err(failure) => Err(match self.discard().await {
                Ok(()) => failure,
                Err(undo) => Failure::new(failure.kind, format!("{failure} (and clean-up failed: {undo})")),
            }),
        }
    }

    /// Tells those who wait for it to be made.
    pub fn announce(&self, made: Result<i32, Failure>) {
        self.made.send_replace(Some(made));
    }

    /// Waits until it is made; answers its init's guest pid.
    pub async fn is_made(&self) -> Result<i32, Failure> {
        let mut made = self.made.subscribe();
        let made = made.wait_for(Option::is_some).await.map_err(internal("container was forgotten"))?;
        made.clone().unwrap_or_else(|| Err(Failure::precondition("container is being made")))
    }

    async fn try_make(&self, request: &Create, pids: Option<&Path>) -> Result<i32, Failure> {
        let disks = request.rootfs.locate().await?;
        let mut devices = Vec::with_capacity(request.devices.len());
        for seen in &request.devices {
            devices.push(BlockDevice { node: disk::find(&seen.serial).await?, seen });
        }
        let done = self
            .launch(&self.init, |stdio| {
                runtime::create(&request.id, &request.spec, &disks, &request.files, &devices, pids, stdio)
            })
            .await?;
        let Done { result, since, causes } = done;
        let pid = result.map_err(|failure| causes.explain(failure))?;
        self.shared.oom.add(&self.id).map_err(internal("cannot watch for the OOM killer"))?;
        self.init.created(pid);
        self.watch(&self.init, pid, since);
        self.start.lock().await.causes = Some(causes);
        Ok(pid)
    }

    /// Runs `job` in a worker with the streams that `process` wants, and connects their other ends.
    async fn launch(
        &self,
        process: &Process,
        job: impl FnOnce(&Stdio<'_>) -> Result<i32, Failure>,
    ) -> Result<Done<i32>, Failure> {
        let wanted = process.wanted();
        if wanted.terminal {
            let console = Console::open()?;
            let done = self.shared.workers.run(&[], || job(&Stdio::Terminal(console.path()))).await?;
            if done.result.is_ok() {
                process.connect_terminal(console.take_master()?)?;
            }
            return Ok(done);
        }
        let (ours, theirs) = io::pipes(wanted)?;
        let done = self.shared.workers.run(&theirs.all(), || job(&Stdio::Pipes(&theirs))).await?;
        drop(theirs);
        if done.result.is_ok() {
            process.connect_pipes(ours)?;
        }
        Ok(done)
    }

    fn watch(&self, process: &Arc<Process>, pid: i32, since: crate::reaper::Since) {
        let (oom, id) = (Arc::clone(&self.shared.oom), self.id.clone());
        // What a container leaves running ends with its init, as the kernel has it where that is PID 1.
        let survivors = (self.sees_others && Arc::ptr_eq(process, &self.init)).then(|| Cgroup::of(&self.id));
        process.watch(self.shared.reaper.claim(pid, since), move || {
            if let Some(Err(error)) = survivors.as_ref().map(Cgroup::kill) {
                log::say(&format!("cannot end what container {id} left running: {error}"));
            }
            oom.look(&id)
        });
    }

    /// Starts the init.
    pub async fn start(&self) -> Result<i32, Failure> {
        let pid = self.is_made().await?;
        let mut start = self.start.lock().await;
        if let Some(outcome) = &start.outcome {
            return outcome.clone();
        }
        if matches!(self.init.state(), State::Exited { .. }) {
            return Err(Failure::precondition("container's init ended before it was started"));
        }
        let outcome = self.try_start(start.causes.take()).await.map(|()| pid);
        match outcome {
            Ok(pid) => self.init.running(pid),
            // What waits to be started would wait for ever.
            Err(_) => drop(self.cgroup.kill()),
        }
        start.outcome = Some(outcome.clone());
        outcome
    }

    async fn try_start(&self, causes: Option<Causes>) -> Result<(), Failure> {
        runtime::start(&self.id)?;
        match causes {
            Some(causes) => causes.until_executed().await,
            None => Ok(()),
        }
    }

    /// Registers an exec.
    pub fn create_exec(&self, request: CreateExec) -> Result<(), Failure> {
        self.running_pid()?;
        let fingerprint = fingerprint(&request);
        let mut execs = lock(&self.execs);
        if let Some(known) = execs.get(&request.id) {
            return if known.fingerprint == fingerprint {
                Ok(())
            } else {
                let message = format!("exec {} exists already in container {}", request.id, self.id);
                Err(Failure::new(Kind::AlreadyExists, message))
            };
        }
        let process = Arc::new(Process::new(request.stdio));
        let id = request.id.clone();
        execs.insert(id, Arc::new(Exec { fingerprint, request, process, outcome: AsyncMutex::default() }));
        Ok(())
    }

    /// Starts an exec.
    pub async fn start_exec(&self, id: &ExecId) -> Result<i32, Failure> {
        let exec = self.exec(id)?;
        let mut outcome = exec.outcome.lock().await;
        if let Some(outcome) = &*outcome {
            return outcome.clone();
        }
        let started = self.try_start_exec(&exec).await;
        if started.is_err() {
            // Whoever waits for it waits for an end that would not come.
            exec.process.give_up(Exit { code: NEVER_RAN, at_ns: clock::realtime_ns(), oom_killed: false });
        }
        *outcome = Some(started.clone());
        started
    }

    async fn try_start_exec(&self, exec: &Exec) -> Result<i32, Failure> {
        self.running_pid()?;
        let request = &exec.request;
        let job = |stdio: &Stdio<'_>| runtime::exec(&self.id, request.id.as_str(), &request.process, stdio);
        let Done { result, since, causes } = self.launch(&exec.process, job).await?;
        let pid = result.map_err(|failure| causes.explain(failure))?;
        exec.process.running(pid);
        self.watch(&exec.process, pid, since);
        Ok(pid)
    }

    /// Guest pid of its init, while that runs.
    pub fn running_pid(&self) -> Result<i32, Failure> {
        match self.init.state() {
            State::Running { pid } => Ok(pid),
            State::Created { .. } => {
                Err(Failure::precondition(format!("container {} has not been started", self.id)))
            }
            State::Exited { .. } => Err(Failure::precondition(format!("container {} has stopped", self.id))),
        }
    }

    fn exec(&self, id: &ExecId) -> Result<Arc<Exec>, Failure> {
        let exec = lock(&self.execs).get(id).cloned();
        exec.ok_or_else(|| Failure::not_found(format!("no exec {id} in container {}", self.id)))
    }

    /// Forgets an exec that has ended or never began.
    pub fn delete_exec(&self, id: &ExecId) -> Result<(), Failure> {
        let mut execs = lock(&self.execs);
        let Some(exec) = execs.get(id) else { return Ok(()) };
        if matches!(exec.process.state(), State::Running { .. }) {
            return Err(Failure::precondition(format!("exec {id} of container {} still runs", self.id)));
        }
        exec.process.disconnect();
        execs.remove(id);
        Ok(())
    }

    /// Returns its init, or one of its execs.
    pub fn process(&self, exec: Option<&ExecId>) -> Result<Arc<Process>, Failure> {
        match exec {
            None => Ok(Arc::clone(&self.init)),
            Some(id) => Ok(Arc::clone(&self.exec(id)?.process)),
        }
    }

    /// Returns the end of the message that it has left, if it may leave one.
    pub fn message(&self) -> Vec<u8> {
        self.message.as_deref().and_then(|path| tail(path, MAX_MESSAGE).ok()).unwrap_or_default()
    }

    /// Returns every process of it that the host knows; execs with their identifiers.
    pub fn processes(&self) -> Vec<(Option<ExecId>, Arc<Process>)> {
        let mut all = vec![(None, Arc::clone(&self.init))];
        all.extend(lock(&self.execs).iter().map(|(id, exec)| (Some(id.clone()), Arc::clone(&exec.process))));
        all
    }

    /// Returns whether its processes stand still.
    pub fn is_paused(&self) -> bool {
        self.cgroup.is_frozen()
    }

    /// Sends `signal` to every process in it, whether the host knows of it or not.
    pub fn signal_all(&self, signal: i32) -> Result<(), Failure> {
        if !self.cgroup.is_populated() {
            return Err(Failure::not_found(format!("container {} has no process left", self.id)));
        }
        let failed = || internal(format!("cannot signal container {}", self.id));
        if signal == libc::SIGKILL {
            return self.cgroup.kill().map_err(failed());
        }
        for pid in self.cgroup.pids().map_err(failed())? {
            match i32::try_from(pid).map(|pid| kill(pid, signal)) {
                // Gone since the list was read.
                Ok(Ok(()) | Err(nix::errno::Errno::ESRCH)) | Err(_) => {}
                Ok(Err(error)) => return Err(internal(format!("cannot signal process {pid}"))(error)),
            }
        }
        Ok(())
    }

    /// Stops or resumes all its processes.
    pub async fn freeze(&self, frozen: bool) -> Result<(), Failure> {
        self.running_pid()?;
        let verb = if frozen { "pause" } else { "resume" };
        let done = self.cgroup.freeze(frozen, PROMPT).await;
        match done.map_err(internal(format!("cannot {verb} container {}", self.id)))? {
            true => Ok(()),
            false => {
                let message = format!("container {} did not {verb} within {} s", self.id, PROMPT.as_secs());
                Err(Failure::new(Kind::DeadlineExceeded, message))
            }
        }
    }

    /// Changes its limits.
    pub async fn update(&self, resources: &[u8]) -> Result<(), Failure> {
        self.is_made().await?;
        let done = self.shared.workers.run(&[], || runtime::update(&self.id, resources)).await?;
        done.result.map_err(|failure| done.causes.explain(failure))
    }

    /// Guest pids of all its processes.
    pub fn pids(&self) -> Result<Vec<u32>, Failure> {
        match self.cgroup.pids() {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(internal(format!("cannot list the processes of container {}", self.id))(error))
            }
            pids => Ok(pids.unwrap_or_default()),
        }
    }

    /// Readings.
    pub fn stats(&self) -> Stats {
        stats::of_container(&self.cgroup, &Dir::of(&self.id).writable())
    }

    /// Removes it, unless its init runs.
    pub async fn remove(&self) -> Result<(), Failure> {
        // One that could not be made has removed itself.
        if self.is_made().await.is_err() {
            return Ok(());
        }
        let _excludes_a_start = self.start.lock().await;
        if let State::Running { .. } = self.init.state() {
            return Err(Failure::precondition(format!("container {} still runs: kill it first", self.id)));
        }
        self.discard().await
    }

    /// Kills what is left and removes every trace.
    async fn discard(&self) -> Result<(), Failure> {
        self.cgroup.kill().map_err(internal(format!("cannot kill container {}", self.id)))?;
        if !self.cgroup.is_emptied(PROMPT).await {
            let message =
                format!("processes of container {} survived their kill for {} s", self.id, PROMPT.as_secs());
            return Err(Failure::new(Kind::DeadlineExceeded, message));
        }
        if !matches!(self.init.state(), State::Created { pid: None }) {
            let _ = timeout(PROMPT, self.init.wait()).await;
        }
        self.shared.oom.remove(&self.id);
        for (_, process) in self.processes() {
            process.disconnect();
        }
        let done = self.shared.workers.run(&[], || runtime::remove(&self.id)).await?;
        done.result.map_err(|failure| done.causes.explain(failure))
    }
}

/// At most the last `most` bytes of a file.
fn tail(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut file = OpenFile::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text)?;
    Ok(text)
}
