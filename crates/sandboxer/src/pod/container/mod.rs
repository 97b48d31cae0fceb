//! Containers of a pod: their state in the pod's task, and the work on them.

mod copy;
mod devices;
pub mod io;
mod mounts;
pub mod resources;
pub mod spec;
pub mod spool;
pub mod start;
pub mod stats;

use std::{collections::HashMap, path::PathBuf, sync::Arc};

use sandboxer_host::rootfs::{Lease, Mount};
use sandboxer_protocol::id::{ContainerId, ExecId};
use sandboxer_vmm::DiskRecord;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{
    front::EntryHandle,
    pod::{
        journal::{ContainerRecord, ProcessRecord},
        limits::SharedLimits,
        stages::Stages,
    },
    state::{PodState, PodStatus},
};

/// Kind of the front's entry for an exec's FIFOs.
pub const EXEC: &str = "exec";

/// Exit code of a process that ended with its VM, as for SIGKILL.
pub const KILLED: u32 = 137;

/// The parameters of a container to create.
#[derive(Debug)]
pub struct NewContainer {
    /// The container's id at containerd.
    pub id: ContainerId,
    /// The container's bundle directory, with `config.json`.
    pub bundle: PathBuf,
    /// The mounts of the container's snapshot.
    pub mounts: Vec<Mount>,
    /// The directory of the host that is the container's root file system, if it has no snapshot.
    pub root: Option<PathBuf>,
    /// The FIFOs of the container's init.
    pub stdio: StdioPaths,
    /// Containers that run in the same pod; set by the pod's task.
    pub beside: Vec<ContainerId>,
}

/// FIFOs of a process on the host; an empty path means no such stream.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StdioPaths {
    /// The FIFO that the process reads.
    pub stdin: PathBuf,
    /// The FIFO that the process writes.
    pub stdout: PathBuf,
    /// The FIFO that the process writes errors to; unused with a terminal.
    pub stderr: PathBuf,
    /// Whether the process has one terminal instead of three pipes.
    pub terminal: bool,
}

/// The exit of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Exit code, or 128 + signal.
    pub code: u32,
    /// Time of the exit, ns since 1970.
    pub at_ns: u64,
    /// The reason, if the code alone does not show it; else empty.
    pub reason: String,
}

/// Returns the exit of the sandbox container of a pod with this status, if it has exited. A pause program does not exit
/// by itself: a stop on request counts as its kill.
pub fn sandbox_exit(status: &PodStatus) -> Option<Exit> {
    let code = if status.exit_status == 0 { KILLED } else { status.exit_status };
    let ended = status.state == PodState::Stopped || status.overdue;
    ended.then(|| Exit { code, at_ns: status.exited_at_ns, reason: status.reason.clone() })
}

/// The phase of a process, readable without a request to the pod's task.
///
/// ```text
/// Created ──start──▶ Starting ──▶ Running ──▶ Exited
///    ╰───────── a signal, or its pod stopped ────▶╯
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// The process is created and waits for its start.
    Created,
    /// The start of the process is in progress.
    Starting,
    /// The process is running.
    Running,
    /// The process has exited.
    Exited(Exit),
}

impl Phase {
    /// Returns the phase's name, for messages.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Phase::Created => "created",
            Phase::Starting => "starting",
            Phase::Running => "running",
            Phase::Exited(_) => "exited",
        }
    }

    /// Returns the exit, if the process has exited.
    pub const fn exit(&self) -> Option<&Exit> {
        match self {
            Phase::Exited(exit) => Some(exit),
            Phase::Created | Phase::Starting | Phase::Running => None,
        }
    }
}

/// A process: a container's init or an exec.
#[derive(Debug)]
pub struct Process {
    /// PID in the guest; 0 before the process is created.
    pub pid: u32,
    /// The process's FIFOs.
    pub stdio: StdioPaths,
    /// The process's phase.
    pub phase: watch::Sender<Phase>,
    /// The process's streams, until they are copied.
    pub io: Option<io::Io>,
    /// Writes to the process's stderr when the guest cannot; present until the exit.
    pub stderr_writer: Option<io::StderrWriter>,
    /// The copies of the process's streams, while it runs.
    pub running: Option<io::RunningIo>,
    /// Signals the running stdin copy to finish.
    pub stdin: Option<io::StdinCloser>,
    /// Whether the process's stdin was closed before its start.
    pub is_stdin_closed: bool,
    /// The process's output after its exit.
    pub last_output: Option<io::LastOutput>,
    /// Whether the pod's task waits for the process's exit.
    pub is_followed: bool,
    /// The process's exit, if it came during the start.
    pub early_exit: Option<Exit>,
    /// The front's copies of the process's streams, until it has exited.
    front_handle: Option<EntryHandle>,
}

impl Process {
    /// Returns a created process, which waits for its start.
    pub fn created(pid: u32, stdio: StdioPaths, io: io::Io) -> Self {
        Self::at(Phase::Created, pid, stdio, Some(io))
    }

    /// Returns a process in `phase`.
    pub fn at(phase: Phase, pid: u32, stdio: StdioPaths, mut io: Option<io::Io>) -> Self {
        let stderr_writer = io.as_mut().and_then(io::Io::take_stderr_writer);
        let front_handle = io.as_ref().and_then(io::Io::front_handle);
        Self {
            pid,
            stdio,
            phase: watch::Sender::new(phase),
            io,
            stderr_writer,
            running: None,
            stdin: None,
            is_stdin_closed: false,
            last_output: None,
            is_followed: false,
            early_exit: None,
            front_handle,
        }
    }

    /// Records the exit, unless it is already known. The streams are closed after the last output.
    pub fn end(&mut self, exit: Exit) {
        self.io = None;
        self.stderr_writer = None;
        self.stdin = None;
        self.pass_last_output();
        if let Some(front_handle) = self.front_handle.take() {
            front_handle.release();
        }
        if !self.has_exited() {
            self.phase.send_replace(Phase::Exited(exit));
        }
    }

    /// Records the exit as [`Process::end`] does, and closes the streams now.
    pub fn close(&mut self, exit: Exit) {
        self.running = None;
        self.end(exit);
        if let Some(last_output) = self.last_output.take() {
            last_output.give_up();
        }
    }

    /// Delivers the last output of an exited process, if its streams are copied.
    pub fn pass_last_output(&mut self) {
        if let Some(running) = self.running.take() {
            self.last_output = Some(io::LastOutput::deliver(running, self.front_handle.take()));
        }
    }

    /// Returns whether the process has exited.
    pub fn has_exited(&self) -> bool {
        matches!(*self.phase.borrow(), Phase::Exited(_))
    }

    /// Returns the process's record for the journal.
    pub fn record(&self) -> ProcessRecord {
        let phase = self.phase.borrow();
        ProcessRecord {
            pid: self.pid,
            started: *phase != Phase::Created,
            exit: phase.exit().cloned(),
            stdio: self.stdio.clone(),
        }
    }
}

/// A container of a pod.
#[derive(Debug)]
pub struct Container {
    /// The container's bundle directory.
    pub bundle: PathBuf,
    /// Disks attached for the container.
    pub disks: Vec<DiskRecord>,
    /// Leases that prevent the eviction of the container's disk images.
    pub leases: Vec<Lease>,
    /// Path of the container's termination message on the host.
    pub message: Option<PathBuf>,
    /// CPUs of the host that the container may use, as a list; `None`: all.
    pub cpus: Option<String>,
    /// Memory nodes of the host that the container may use, as a list; `None`: all.
    pub mems: Option<String>,
    /// The container's limits, shared with a change of limits in progress.
    pub limits: Arc<SharedLimits>,
    /// The container's init.
    pub init: Process,
    /// The container's execs.
    pub execs: HashMap<ExecId, Process>,
    /// Whether its processes were frozen, and have not been thawed since; see [`Self::is_paused`].
    pub paused: bool,
    /// The stages of the container's start.
    pub stages: Stages,
}

impl Container {
    /// Returns the container's init and execs.
    pub fn processes_mut(&mut self) -> impl Iterator<Item = &mut Process> {
        std::iter::once(&mut self.init).chain(self.execs.values_mut())
    }

    /// Returns the container's init (no `exec`) or an exec.
    pub fn process(&self, exec: Option<&ExecId>) -> Option<&Process> {
        match exec {
            None => Some(&self.init),
            Some(exec) => self.execs.get(exec),
        }
    }

    /// Returns the container's init (no `exec`) or an exec.
    pub fn process_mut(&mut self, exec: Option<&ExecId>) -> Option<&mut Process> {
        match exec {
            None => Some(&mut self.init),
            Some(exec) => self.execs.get_mut(exec),
        }
    }

    /// Returns whether the container is paused; the exit of its init ends a pause.
    pub fn is_paused(&self) -> bool {
        self.paused && !self.init.has_exited()
    }

    /// Returns the container's record for the journal.
    pub fn record(&self, id: &ContainerId) -> ContainerRecord {
        ContainerRecord {
            id: id.clone(),
            bundle: self.bundle.clone(),
            disks: self.disks.clone(),
            message: self.message.clone(),
            cpus: self.cpus.clone(),
            mems: self.mems.clone(),
            memory_limit: self.limits.get().memory_bytes,
            cpu_limit: self.limits.get().cpu_micros,
            init: self.init.record(),
            execs: self.execs.iter().map(|(id, exec)| (id.clone(), exec.record())).collect(),
        }
    }
}
