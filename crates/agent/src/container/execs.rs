//! Execs of a container.

use std::sync::Arc;

use sandboxer_protocol::id::ExecId;
use tokio::sync::Mutex as AsyncMutex;

use crate::{
    clock,
    failure::{Failure, Kind},
    process::{Exit, Process, State},
    runtime::{self, Stdio},
    sync::lock,
    worker::Outcome,
};

use super::{Container, CreateExec, fingerprint};

/// Exit code of a process that never ran, as in shells.
const NEVER_RAN: u32 = 255;

/// An exec and its state.
pub(super) struct Exec {
    pub(super) fingerprint: u64,
    pub(super) request: CreateExec,
    pub(super) process: Arc<Process>,
    // The result of the start, which runs once. The lock is held during the start.
    pub(super) outcome: AsyncMutex<Option<Result<i32, Failure>>>,
}

impl Container {
    /// Registers an exec.
    pub fn create_exec(&self, request: CreateExec) -> Result<(), Failure> {
        self.can_exec()?;
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

    /// Starts an exec. A repeated call returns the first result.
    pub async fn start_exec(&self, id: &ExecId) -> Result<i32, Failure> {
        let exec = self.exec(id)?;
        let mut outcome = exec.outcome.lock().await;
        if let Some(outcome) = &*outcome {
            return outcome.clone();
        }
        let started = self.try_start_exec(&exec).await;
        if started.is_err() {
            // Waiters would wait forever for an exit.
            exec.process.give_up(Exit { code: NEVER_RAN, at_ns: clock::realtime_ns(), oom_killed: false });
        }
        *outcome = Some(started.clone());
        started
    }

    /// Returns whether the init still waits for its start. Rejects an exec of a container without an init, and of a
    /// paused container: there the exec would wait in the container's control group, and block a worker that the pod's
    /// other requests need.
    fn can_exec(&self) -> Result<bool, Failure> {
        let init_waits = matches!(self.init.state(), State::Created { pid: Some(_) });
        if !init_waits {
            self.running_pid()?;
        }
        match self.is_paused() {
            false => Ok(init_waits),
            true => Err(Failure::precondition(format!(
                "container {} is paused: resume it before an exec",
                self.id
            ))),
        }
    }

    async fn try_start_exec(&self, exec: &Exec) -> Result<i32, Failure> {
        let _not_frozen_meanwhile = self.starting.read().await;
        let init_waits = self.can_exec()?;
        let request = &exec.request;
        let job = |stdio: &Stdio<'_>| {
            runtime::exec(&self.id, request.id.as_str(), &request.process, stdio, init_waits)
        };
        let Outcome { result, since, causes } = self.launch(&exec.process, job).await?;
        let pid = result.map_err(|failure| causes.explain(failure))?;
        exec.process.running(pid);
        self.watch(&exec.process, pid, since);
        Ok(pid)
    }

    pub(super) fn exec(&self, id: &ExecId) -> Result<Arc<Exec>, Failure> {
        let exec = lock(&self.execs).get(id).cloned();
        exec.ok_or_else(|| Failure::not_found(format!("no exec {id} in container {}", self.id)))
    }

    /// Ends all execs and forgets them: nobody is left who would read from them.
    pub(super) fn end_execs(&self) {
        for (_, exec) in lock(&self.execs).drain() {
            // A process that has exited is fine. A frozen one is killed, too.
            let _ = exec.process.signal(&self.shared.reaper, libc::SIGKILL);
            exec.process.disconnect();
        }
    }

    /// Deletes an exec that has exited or was never started.
    pub fn delete_exec(&self, id: &ExecId) -> Result<(), Failure> {
        let mut execs = lock(&self.execs);
        let Some(exec) = execs.get(id) else { return Ok(()) };
        if matches!(exec.process.state(), State::Running { .. }) {
            return Err(Failure::precondition(format!(
                "exec {id} of container {} is still running",
                self.id
            )));
        }
        exec.process.disconnect();
        execs.remove(id);
        Ok(())
    }
}
