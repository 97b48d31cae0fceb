//! A VMM of an earlier daemon's that may give no answer: all that can be done is to wait for its end, or to bring that
//! about.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::future;
use sandboxer_process::{Process, Written, strays};
use sandboxer_protocol::id::SandboxId;

use super::{VmExit, VmRecord, VmmError, run_dir::host};

/// How long a process that was killed may take to be gone before this is told as an error.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// A VMM that is held by its process alone.
#[async_trait]
pub trait Held: Send + Sync + fmt::Debug {
    /// Waits for the end of its process, by event. Cancel-safe; returns again when called again.
    async fn ended(&self) -> VmExit;

    /// Kills it and waits until its process is gone.
    async fn end(&self) -> Result<(), VmmError>;

    /// Returns what it has written so far; none if the system doesn't say.
    fn written(&self) -> Option<Written>;
}

/// The VMM processes of one pod, by pidfd. Commonly one.
#[derive(Debug)]
pub struct HeldProcesses {
    pod: SandboxId,
    processes: Vec<Arc<Process>>,
}

impl HeldProcesses {
    /// Holds the process of a recorded VM. `None`: it has ended.
    pub fn of(record: &VmRecord) -> Result<Option<Self>, VmmError> {
        let proc = PathBuf::from(format!("/proc/{}", record.pid));
        let found = sandboxer_process::adopt(record.pid, record.start_time);
        let found = found.map_err(host(&record.pod, "look at", proc))?;
        Ok(found.map(|process| Self { pod: record.pod.clone(), processes: vec![Arc::new(process)] }))
    }

    /// Holds the processes that were started for the VM of `pod` in `run_dir`, and that no record names. `None`:
    /// there is none.
    pub fn strays(pod: &SandboxId, run_dir: &std::path::Path) -> Result<Option<Self>, VmmError> {
        let strays = strays::of(run_dir).map_err(host(pod, "look for a VMM of", run_dir.to_owned()))?;
        let mut processes = Vec::new();
        for stray in strays {
            let pid = stray.pid;
            let proc = PathBuf::from(format!("/proc/{pid}"));
            let held =
                sandboxer_process::held(pid, stray.into_pidfd()).map_err(host(pod, "look at", proc))?;
            processes.extend(held.map(Arc::new));
        }
        Ok((!processes.is_empty()).then(|| Self { pod: pod.clone(), processes }))
    }

    /// Returns its process ids.
    pub fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(|process| process.pid()).collect()
    }
}

#[async_trait]
impl Held for HeldProcesses {
    async fn ended(&self) -> VmExit {
        let ends = future::join_all(self.processes.iter().map(|process| process.exited())).await;
        let how = ends.first().map_or_else(|| "is gone".to_owned(), ToString::to_string);
        VmExit { how, last_lines: Vec::new() }
    }

    async fn end(&self) -> Result<(), VmmError> {
        for process in &self.processes {
            let proc = PathBuf::from(format!("/proc/{}", process.pid()));
            process.kill().map_err(host(&self.pod, "kill", proc))?;
        }
        let gone = tokio::time::timeout(KILL_TIMEOUT, self.ended()).await;
        gone.map(drop).map_err(|_| VmmError::Hung {
            pod: self.pod.clone(),
            call: "SIGKILL".into(),
            limit: KILL_TIMEOUT,
        })
    }

    fn written(&self) -> Option<Written> {
        let all = self.processes.iter().filter_map(|process| sandboxer_process::written(process.pid()));
        all.reduce(|a, b| Written { stored: a.stored + b.stored, called: a.called + b.called })
    }
}
