//! Containers of a pod: their state in the pod's task, and the work on them.

mod copy;
mod devices;
pub mod io;
mod mounts;
pub mod spec;
pub mod spool;
pub mod start;
pub mod stats;

use std::{collections::HashMap, path::PathBuf, sync::Arc};

use sandboxer_host::rootfs::{Lease, Mount};
use sandboxer_protocol::id::{ContainerId, ExecId};
use sandboxer_vmm::DiskSpec;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{
    front::Kept,
    pod::{
        journal::{ContainerRecord, ProcessRecord},
        limits::SharedLimits,
        stages::Stages,
    },
};

/// Exit code of a process that ended with its VM, as for SIGKILL.
pub const KILLED: u32 = 137;

/// A requested container.
#[derive(Debug)]
pub struct NewContainer {
    /// containerd's id.
    pub id: ContainerId,
    /// Its bundle directory, with `config.json`.
    pub bundle: PathBuf,
    /// The snapshot's mounts.
    pub mounts: Vec<Mount>,
    /// Its FIFOs.
    pub stdio: StdioPaths,
    /// Containers that run in its pod; set by the pod's task.
    pub beside: Vec<ContainerId>,
}

/// FIFOs of a process on the host; an empty path means no such stream.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StdioPaths {
    /// Read by the process.
    pub stdin: PathBuf,
    /// Written by the process.
    pub stdout: PathBuf,
    /// Written by the process; unused with a terminal.
    pub stderr: PathBuf,
    /// One terminal instead of three pipes.
    pub terminal: bool,
}

/// The exit of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Exit code, or 128 + signal.
    pub code: u32,
    /// Time, ns since 1970.
    pub at_ns: u64,
    /// The reason, if the code alone does not say it; else empty.
    pub reason: String,
}

/// The phase of a process. Readable without a request to the pod's task.
///
/// ```text
/// Created ──start──▶ Starting ──▶ Running ──▶ Exited
///    ╰──────────── killed, or its pod stopped ───▶╯
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Created; waits for its start.
    Created,
    /// Starting.
    Starting,
    /// Running.
    Running,
    /// Exited.
    Exited(Exit),
}

impl Phase {
    /// Returns the phase for messages.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Phase::Created => "created",
            Phase::Starting => "starting",
            Phase::Running => "running",
            Phase::Exited(_) => "exited",
        }
    }

    /// Returns its exit, if it has exited.
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
    /// Guest pid; 0 before its creation.
    pub pid: u32,
    /// Its FIFOs.
    pub stdio: StdioPaths,
    /// Its state.
    pub phase: watch::Sender<Phase>,
    /// Its streams, until they are copied.
    pub io: Option<io::Io>,
    /// Writes to its stderr if the guest cannot; until it has exited.
    pub stderr_writer: Option<io::StderrWriter>,
    /// Tells the running stdin copy to finish.
    pub stdin: Option<io::StdinCloser>,
    /// The front's copies of its streams, until it has exited.
    kept: Option<Kept>,
}

impl Process {
    /// Returns a created process, which waits for its start.
    pub fn created(pid: u32, stdio: StdioPaths, io: io::Io) -> Self {
        Self::at(Phase::Created, pid, stdio, Some(io))
    }

    /// Returns a process in `phase`.
    pub fn at(phase: Phase, pid: u32, stdio: StdioPaths, mut io: Option<io::Io>) -> Self {
        let stderr_writer = io.as_mut().and_then(io::Io::take_stderr_writer);
        let kept = io.as_ref().and_then(io::Io::kept);
        Self { pid, stdio, phase: watch::Sender::new(phase), io, stderr_writer, stdin: None, kept }
    }

    /// Records its exit, unless that is known already, and releases its streams.
    pub fn end(&mut self, exit: Exit) {
        self.io = None;
        self.stderr_writer = None;
        self.stdin = None;
        if let Some(kept) = self.kept.take() {
            kept.release();
        }
        if !self.has_exited() {
            self.phase.send_replace(Phase::Exited(exit));
        }
    }

    /// Returns whether it has exited.
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
    /// Its bundle directory.
    pub bundle: PathBuf,
    /// Disks attached for it.
    pub disks: Vec<DiskSpec>,
    /// Prevents the eviction of its disk images.
    pub leases: Vec<Lease>,
    /// Path of its termination message on the host.
    pub message: Option<PathBuf>,
    /// CPUs of the host that it may use, as a list; none: all.
    pub cpus: Option<String>,
    /// Memory nodes of the host that it may use, as a list; none: all.
    pub mems: Option<String>,
    /// Its limits. A change of limits in progress has them, too.
    pub limits: Arc<SharedLimits>,
    /// Its init.
    pub init: Process,
    /// Its execs.
    pub execs: HashMap<ExecId, Process>,
    /// Paused.
    pub paused: bool,
    /// The steps of its start.
    pub stages: Stages,
}

impl Container {
    /// Returns its init (no `exec`) or an exec.
    pub fn process(&self, exec: Option<&ExecId>) -> Option<&Process> {
        match exec {
            None => Some(&self.init),
            Some(exec) => self.execs.get(exec),
        }
    }

    /// Returns its init (no `exec`) or an exec.
    pub fn process_mut(&mut self, exec: Option<&ExecId>) -> Option<&mut Process> {
        match exec {
            None => Some(&mut self.init),
            Some(exec) => self.execs.get_mut(exec),
        }
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
