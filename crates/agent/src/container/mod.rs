//! One container: created, started, joined by execs, removed. Each step runs once, however often the host requests it,
//! and completes even if the host disconnects.
//!
//! ```text
//!  (create) ──▶ creating ─▶ created ──start──▶ running ──init dies──▶ stopped ──delete──▶ gone
//!                └─fails──▶ gone      └────────────── delete ───────────────────────────▶ gone
//! ```

mod execs;
mod request;

use std::{
    collections::HashMap,
    fs::File as OpenFile,
    hash::{DefaultHasher, Hash, Hasher as _},
    io::{Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use sandboxer_protocol::id::{ContainerId, ExecId};
use tokio::{
    sync::{Mutex as AsyncMutex, RwLock, watch},
    time::timeout,
};

use self::execs::Exec;
pub use self::request::{Create, CreateExec, PidMode};
use crate::{
    cgroup::Cgroup,
    console::Console,
    disk,
    events::OomWatch,
    failure::{Failure, Kind, internal},
    io, log,
    pids::SharedPids,
    process::{Exit, Process, State, kill},
    reaper::Reaper,
    rootfs::Dir,
    runtime::{self, BlockDevice, File, Stdio},
    stats::{self, Stats},
    sync::lock,
    worker::{Causes, Outcome, Workers},
};

/// How long killed processes may take to exit, and frozen ones to freeze.
const PROMPT: Duration = Duration::from_secs(10);

/// The exit code of a process that was killed by SIGKILL.
const KILLED: u32 = 128 + libc::SIGKILL.unsigned_abs();
/// The exit code of runc's init that a signal ends before its start, if it is PID 1 of its namespace.
const ENDED_AS_PID_1: u32 = 2;

/// The longest termination message of a container, bytes: kubelet reads this much, from the end.
const MAX_MESSAGE: u64 = 4096;

/// The state that all containers share.
pub struct Shared {
    /// The reaper, which reports exits of processes.
    pub reaper: Arc<Reaper>,
    /// The workers, which run operations of the container runtime.
    pub workers: Workers,
    /// The watch of the containers' memory control groups.
    pub oom: Arc<OomWatch>,
    /// The pod's process namespace.
    pub pids: SharedPids,
}

pub struct Container {
    id: ContainerId,
    cgroup: Cgroup,
    /// The hash of the request that created the container. It distinguishes a repeated request from another one with
    /// the same ID.
    fingerprint: u64,
    /// Whether the init is not PID 1 of its namespace, so that its exit ends no other process.
    sees_others: bool,
    /// Whether the root file system is a share of the host.
    is_root_shared: bool,
    init: Arc<Process>,
    /// The exit code of an init that a signal ended before its start.
    unstarted: Arc<OnceLock<u32>>,
    /// The file for the termination message, if the container has one.
    message: Option<PathBuf>,
    /// The paths in the container of the files that were placed in it.
    files: Vec<String>,
    /// Whether the container goes on in a copy of its guest, and waits to be started.
    hold: Mutex<Hold>,
    /// How long the creation took: until the disks were found, and from then on.
    took: OnceLock<(Duration, Duration)>,
    created: watch::Sender<Option<Result<i32, Failure>>>,
    // The state of the start. The lock is held across awaits on purpose: start and removal exclude each other.
    start: AsyncMutex<Start>,
    // The execs. The lock is never held across an await.
    execs: Mutex<HashMap<ExecId, Arc<Exec>>>,
    // Execs are started under it, and the container is frozen when none is being started. The lock is held across awaits
    // on purpose.
    starting: RwLock<()>,
    shared: Arc<Shared>,
}

/// Whether a container that runs waits to be started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Hold {
    /// The container was created in this guest.
    #[default]
    Never,
    /// The container is frozen until its start.
    Held,
    /// The container was held, and goes on.
    Released,
}

#[derive(Default)]
struct Start {
    /// The pipe of causes, which is closed when the init executes its program.
    causes: Option<Causes>,
    outcome: Option<Result<i32, Failure>>,
}

fn fingerprint(request: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    request.hash(&mut hasher);
    hasher.finish()
}

impl Container {
    /// Creates the record of a container that is about to be created.
    pub fn new(request: &Create, shared: Arc<Shared>) -> Self {
        Self {
            id: request.id.clone(),
            cgroup: Cgroup::of_container(&request.id),
            fingerprint: fingerprint(request),
            sees_others: request.sees != PidMode::Own,
            is_root_shared: request.rootfs.is_shared(),
            init: Arc::new(Process::new(request.stdio)),
            unstarted: Arc::default(),
            message: request
                .files
                .iter()
                .position(|file| file.is_message)
                .map(|n| Dir::of_container(&request.id).file(n)),
            files: request.files.iter().map(|file| file.path.clone()).collect(),
            hold: Mutex::default(),
            took: OnceLock::new(),
            created: watch::Sender::new(None),
            start: AsyncMutex::default(),
            execs: Mutex::default(),
            starting: RwLock::default(),
            shared,
        }
    }

    /// Returns whether `request` is the one that created the container.
    pub fn is_for(&self, request: &Create) -> bool {
        self.fingerprint == fingerprint(request)
    }

    /// Creates the container in the process namespace `pids`, or without one in its own; undoes everything on failure.
    pub async fn create(&self, request: &Create, pids: Option<&Path>) -> Result<i32, Failure> {
        let created = self.try_create(request, pids).await;
        match created {
            Ok(pid) => Ok(pid),
            Err(failure) => Err(match self.discard().await {
                Ok(()) => failure,
                Err(undo) => Failure::new(failure.kind, format!("{failure} (and cannot clean up: {undo})")),
            }),
        }
    }

    /// Returns how long the creation took: until the disks were found, and from then on.
    pub fn took(&self) -> (Duration, Duration) {
        self.took.get().copied().unwrap_or_default()
    }

    /// Publishes the result of the creation.
    pub fn announce(&self, created: Result<i32, Failure>) {
        self.created.send_replace(Some(created));
    }

    /// Waits until the container is created; returns its init's guest PID.
    pub async fn wait_created(&self) -> Result<i32, Failure> {
        let mut created = self.created.subscribe();
        let created = created
            .wait_for(Option::is_some)
            .await
            .map_err(internal("container's creation was abandoned"))?;
        created.clone().unwrap_or_else(|| Err(Failure::precondition("container is being created")))
    }

    async fn try_create(&self, request: &Create, pids: Option<&Path>) -> Result<i32, Failure> {
        let began = Instant::now();
        let disks = request.rootfs.locate().await?;
        let mut devices = Vec::with_capacity(request.devices.len());
        for seen in &request.devices {
            devices.push(BlockDevice { node: disk::find(&seen.serial).await?, seen });
        }
        let find_time = began.elapsed();
        let outcome = self
            .launch(&self.init, |stdio| {
                runtime::create(&request.id, &request.spec, &disks, &request.files, &devices, pids, stdio)
            })
            .await?;
        let Outcome { result, since, causes } = outcome;
        let pid = result.map_err(|failure| causes.explain(failure))?;
        self.shared.oom.add(&self.id).map_err(internal("cannot watch for the OOM killer"))?;
        self.init.created(pid);
        self.watch(&self.init, pid, since);
        self.start.lock().await.causes = Some(causes);
        let _ = self.took.set((find_time, began.elapsed() - find_time));
        Ok(pid)
    }

    /// Runs `job` in a worker with the streams of `process`, and connects the agent's ends.
    async fn launch(
        &self,
        process: &Process,
        job: impl FnOnce(&Stdio<'_>) -> Result<i32, Failure>,
    ) -> Result<Outcome<i32>, Failure> {
        let stdio = process.stdio();
        if stdio.terminal {
            let console = Console::open()?;
            let outcome = self.shared.workers.run(&[], || job(&Stdio::Terminal(console.path()))).await?;
            if outcome.result.is_ok() {
                process.connect_terminal(console.take_master()?)?;
            }
            return Ok(outcome);
        }
        let (ours, theirs) = io::pipes(stdio)?;
        let outcome = self.shared.workers.run(&theirs.all(), || job(&Stdio::Pipes(&theirs))).await?;
        drop(theirs);
        if outcome.result.is_ok() {
            process.connect_pipes(ours)?;
        }
        Ok(outcome)
    }

    fn watch(&self, process: &Arc<Process>, pid: i32, since: crate::reaper::Since) {
        let (oom, id) = (Arc::clone(&self.shared.oom), self.id.clone());
        let is_init = Arc::ptr_eq(process, &self.init);
        let unstarted = is_init.then(|| Arc::clone(&self.unstarted));
        // Processes that the init leaves must end with it: the kernel ensures this only where the init is PID 1.
        let survivors = (self.sees_others && is_init).then(|| Cgroup::of_container(&self.id));
        process.watch(self.shared.reaper.claim(pid, since), move |death| {
            if let Some(Err(error)) = survivors.as_ref().map(Cgroup::kill) {
                log::print(&format!("cannot kill the remaining processes of container {id}: {error}"));
            }
            let is_killed = death.code == KILLED;
            if !is_killed {
                oom.look(&id);
            }
            Exit {
                code: unstarted.as_ref().and_then(|code| code.get().copied()).unwrap_or(death.code),
                at_ns: death.at_ns,
                oom_killed: is_killed && oom.explains(&id),
            }
        });
    }

    /// Starts the init. A repeated call returns the first result.
    pub async fn start(&self) -> Result<i32, Failure> {
        let pid = self.wait_created().await?;
        let mut start = self.start.lock().await;
        if self.is_held() {
            // An exit before the start is reported as that of any process.
            if matches!(self.init.state(), State::Running { .. }) {
                self.set_frozen(false).await?;
            }
            *lock(&self.hold) = Hold::Released;
        }
        if let Some(outcome) = &start.outcome {
            return outcome.clone();
        }
        if matches!(self.init.state(), State::Exited { .. }) {
            return Err(Failure::precondition("container's init exited before it was started"));
        }
        let outcome = self.try_start(start.causes.take()).await.map(|()| pid);
        match outcome {
            Ok(pid) => self.init.running(pid),
            // A process that waits to be started would wait forever.
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

    /// Holds a container of the guest of which this one is a copy: it is frozen, and goes on when it is started. Its
    /// streams begin anew, its execs end, and `files` replace the content of those at their paths. Its init then gets
    /// `signal`, unless that is 0, before it does anything else.
    pub fn hold(&self, files: &[File], signal: u32) -> Result<(), Failure> {
        // One that is held already gets another identifier.
        let State::Running { pid } = self.init.state() else {
            return Err(Failure::precondition(format!("container {} does not run", self.id)));
        };
        let signal = i32::try_from(signal).ok().filter(|signal| (0..=libc::SIGRTMAX()).contains(signal));
        let signal = signal.ok_or_else(|| Failure::invalid("invalid signal for a container that goes on"))?;
        if !self.is_paused() {
            return Err(Failure::precondition(format!(
                "container {} was not frozen when it was copied",
                self.id
            )));
        }
        for file in files {
            let Some(n) = self.files.iter().position(|path| *path == file.path) else { continue };
            let path = Dir::of_container(&self.id).file(n);
            // The termination message is the container's own, and so is its place on the host.
            if self.message.as_ref() != Some(&path) {
                std::fs::write(&path, &file.content)
                    .map_err(internal(format!("cannot write the file for {}", file.path)))?;
            }
        }
        self.init.begin_anew()?;
        self.end_execs();
        *lock(&self.hold) = Hold::Held;
        if signal != 0 {
            // It waits with the frozen process. One that has exited meanwhile needs none.
            let _ = kill(pid, signal);
        }
        Ok(())
    }

    /// Returns whether the container goes on in a copy of its guest and waits to be started.
    pub fn is_held(&self) -> bool {
        *lock(&self.hold) == Hold::Held
    }

    /// Returns whether the container goes on, or is to go on, in a copy of its guest.
    pub fn is_adopted(&self) -> bool {
        *lock(&self.hold) != Hold::Never
    }

    /// Returns the identifier with which the container was created.
    pub fn created_as(&self) -> &ContainerId {
        &self.id
    }

    /// Returns the guest PID of the init while it runs.
    pub fn running_pid(&self) -> Result<i32, Failure> {
        match self.init.state() {
            State::Running { .. } if self.is_held() => {
                Err(Failure::precondition(format!("container {} has not been started", self.id)))
            }
            State::Running { pid } => Ok(pid),
            State::Created { .. } => {
                Err(Failure::precondition(format!("container {} has not been started", self.id)))
            }
            State::Exited { .. } => Err(Failure::precondition(format!("container {} has stopped", self.id))),
        }
    }

    /// Returns the init, or one of the execs.
    pub fn process(&self, exec: Option<&ExecId>) -> Result<Arc<Process>, Failure> {
        match exec {
            None => Ok(Arc::clone(&self.init)),
            Some(id) => Ok(Arc::clone(&self.exec(id)?.process)),
        }
    }

    /// Returns the end of the termination message, empty if the container left none.
    pub fn message(&self) -> Vec<u8> {
        self.message.as_deref().and_then(|path| tail(path, MAX_MESSAGE).ok()).unwrap_or_default()
    }

    /// Returns all processes of the container that the host knows; execs with their identifiers.
    pub fn processes(&self) -> Vec<(Option<ExecId>, Arc<Process>)> {
        let mut all = vec![(None, Arc::clone(&self.init))];
        all.extend(lock(&self.execs).iter().map(|(id, exec)| (Some(id.clone()), Arc::clone(&exec.process))));
        all
    }

    /// Returns whether the container's processes are frozen.
    pub fn is_paused(&self) -> bool {
        self.cgroup.is_frozen()
    }

    /// Sends `signal` to the init, or to an exec.
    pub fn signal(&self, exec: Option<&ExecId>, signal: i32) -> Result<(), Failure> {
        match exec {
            None => self.signal_init(signal),
            Some(id) => self.exec(id)?.process.signal(&self.shared.reaper, signal),
        }
    }

    /// Signals the init. One that waits for its start runs this program, and PID 1 of its namespace ignores signals
    /// that it does not handle. Users expect the behaviour of runc's init, which is the Go runtime's: four signals end
    /// it.
    fn signal_init(&self, signal: i32) -> Result<(), Failure> {
        let waits = matches!(self.init.state(), State::Created { pid: Some(_) }) || self.is_held();
        let signal = match signal {
            libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT if waits => {
                let code = if self.sees_others && signal != libc::SIGQUIT {
                    128 + signal.unsigned_abs()
                } else {
                    ENDED_AS_PID_1
                };
                let _ = self.unstarted.set(code);
                libc::SIGKILL
            }
            libc::SIGKILL | libc::SIGSTOP | libc::SIGCONT => signal,
            _ if waits => return Ok(()),
            _ => signal,
        };
        self.init.signal(&self.shared.reaper, signal)
    }

    /// Sends `signal` to every process in the container, including those that the host does not know.
    pub fn signal_all(&self, signal: i32) -> Result<(), Failure> {
        if !self.cgroup.is_populated() {
            return Err(Failure::not_found(format!("container {} has no process left", self.id)));
        }
        let failed = || internal(format!("cannot signal container {}", self.id));
        if signal != libc::SIGKILL && (matches!(self.init.state(), State::Created { .. }) || self.is_held()) {
            return self.signal_init(signal);
        }
        if signal == libc::SIGKILL {
            return self.cgroup.kill().map_err(failed());
        }
        for pid in self.cgroup.pids().map_err(failed())? {
            match i32::try_from(pid).map(|pid| kill(pid, signal)) {
                // The process exited after the list was read.
                Ok(Ok(()) | Err(nix::errno::Errno::ESRCH)) | Err(_) => {}
                Ok(Err(error)) => return Err(internal(format!("cannot signal process {pid}"))(error)),
            }
        }
        Ok(())
    }

    /// Freezes or thaws all processes of the container.
    pub async fn freeze(&self, frozen: bool) -> Result<(), Failure> {
        self.running_pid()?;
        self.set_frozen(frozen).await
    }

    async fn set_frozen(&self, frozen: bool) -> Result<(), Failure> {
        let verb = if frozen { "pause" } else { "resume" };
        let late = |what: &str| {
            let message =
                format!("{what} container {} did not {verb} within {} s", self.id, PROMPT.as_secs());
            Failure::new(Kind::DeadlineExceeded, message)
        };
        // An exec that is frozen before its program runs would block its worker until the container is resumed.
        let _no_exec_starts = match frozen {
            true => {
                let wait = timeout(PROMPT, self.starting.write()).await;
                Some(wait.map_err(|_| late("an exec is being started:"))?)
            }
            false => None,
        };
        let result = self.cgroup.freeze(frozen, PROMPT).await;
        match result.map_err(internal(format!("cannot {verb} container {}", self.id)))? {
            true => Ok(()),
            false => Err(late("processes of")),
        }
    }

    /// Changes the container's resource limits.
    pub async fn update(&self, resources: &[u8]) -> Result<(), Failure> {
        self.wait_created().await?;
        self.shared.workers.run(&[], || runtime::update(&self.id, resources)).await?.into_result()
    }

    /// Returns the guest PIDs of all the container's processes.
    pub fn pids(&self) -> Result<Vec<u32>, Failure> {
        match self.cgroup.pids() {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(internal(format!("cannot list the processes of container {}", self.id))(error))
            }
            pids => Ok(pids.unwrap_or_default()),
        }
    }

    /// Reads the container's resource usage.
    pub fn stats(&self) -> Stats {
        // The agent never looks at the host's files, which may block.
        let writable = (!self.is_root_shared).then(|| Dir::of_container(&self.id).writable());
        stats::of_container(&self.cgroup, writable.as_deref())
    }

    /// Removes the container, unless its init is running.
    pub async fn remove(&self) -> Result<(), Failure> {
        // A container that could not be created has removed itself.
        if self.wait_created().await.is_err() {
            return Ok(());
        }
        let _excludes_a_start = self.start.lock().await;
        if matches!(self.init.state(), State::Running { .. }) && !self.is_held() {
            return Err(Failure::precondition(format!(
                "container {} is still running: kill it first",
                self.id
            )));
        }
        self.discard().await
    }

    /// Kills the container's remaining processes and removes all its state.
    async fn discard(&self) -> Result<(), Failure> {
        self.cgroup.kill().map_err(internal(format!("cannot kill container {}", self.id)))?;
        if !self.cgroup.wait_empty(PROMPT).await {
            let message = format!(
                "processes of container {} did not exit within {} s after SIGKILL",
                self.id,
                PROMPT.as_secs()
            );
            return Err(Failure::new(Kind::DeadlineExceeded, message));
        }
        if !matches!(self.init.state(), State::Created { pid: None }) {
            let _ = timeout(PROMPT, self.init.wait()).await;
        }
        self.shared.oom.remove(&self.id);
        for (_, process) in self.processes() {
            process.disconnect();
        }
        self.shared.workers.run(&[], || runtime::remove(&self.id)).await?.into_result()
    }
}

/// Returns at most the last `most` bytes of a file.
fn tail(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut file = OpenFile::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text)?;
    Ok(text)
}
