//! A VMM of an earlier daemon that may not respond. The daemon can only wait for its end or kill it.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::future;
use sandboxer_process::{Process, Written, strays};
use sandboxer_protocol::id::SandboxId;

use super::{VmExit, VmRecord, VmmError, process::process_error, run_dir::path_error};

/// How long a killed process may take to disappear before that is an error.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// A VMM of which only the processes are known.
#[async_trait]
pub trait Held: Send + Sync + fmt::Debug {
    /// Waits for the end of the VMM process, by event. Cancel-safe; can be called repeatedly.
    async fn ended(&self) -> VmExit;

    /// Kills the VMM and waits until its process is gone.
    async fn end(&self) -> Result<(), VmmError>;

    /// Returns what the VMM has written so far; `None` if the kernel does not report it.
    fn written(&self) -> Option<Written>;
}

/// The VMM processes of one pod, held by pidfd; usually one.
#[derive(Debug)]
pub struct HeldProcesses {
    pod: SandboxId,
    processes: Vec<Arc<Process>>,
}

impl HeldProcesses {
    /// Opens the process of a recorded VM. `None`: the VM has ended.
    pub fn open(record: &VmRecord) -> Result<Option<Self>, VmmError> {
        let found = record.process()?;
        Ok(found.map(|process| Self { pod: record.pod.clone(), processes: vec![Arc::new(process)] }))
    }

    /// Opens the processes that were started without a record for the VM of `pod` in `run_dir`. `None`: there are
    /// none.
    pub fn strays(pod: &SandboxId, run_dir: &std::path::Path) -> Result<Option<Self>, VmmError> {
        let strays = strays::started_for(run_dir).map_err(path_error(
            pod,
            "search for a VMM of",
            run_dir.to_owned(),
        ))?;
        let mut processes = Vec::new();
        for stray in strays {
            let pid = stray.pid;
            let process = sandboxer_process::from_pidfd(pid, stray.into_pidfd());
            let process = process.map_err(process_error(pod, "inspect", pid))?;
            processes.extend(process.map(Arc::new));
        }
        Ok((!processes.is_empty()).then(|| Self { pod: pod.clone(), processes }))
    }

    /// Returns the IDs of the processes.
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
            process.kill().map_err(process_error(&self.pod, "kill", process.pid()))?;
        }
        let ended = tokio::time::timeout(KILL_TIMEOUT, self.ended()).await;
        ended.map(drop).map_err(|_| VmmError::Hung {
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
