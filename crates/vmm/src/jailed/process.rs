//! The process of a jailed VMM, with its output.

use std::{
    future::Future,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_process::Process;
use sandboxer_protocol::id::SandboxId;
use tokio::net::unix::pipe;

use crate::{
    VmExit, VmRecord, VmmError,
    http::ApiError,
    run_dir::{Captures, path_error},
};

/// Time within which a process whose sockets are closed is gone; otherwise it lives on without them.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A VMM's process. Clones refer to the same process.
#[derive(Debug, Clone)]
pub struct VmmProcess {
    /// The VM's record, whose pod errors name.
    pub record: VmRecord,
    /// The process.
    pub handle: Arc<Process>,
    /// The output of the VMM and of its guest.
    pub captures: Arc<Captures>,
    /// The reason why the daemon ended the process.
    pub cause: Arc<OnceLock<&'static str>>,
}

impl VmmProcess {
    /// Starts copying the process's `stderr` and `console` to the VM's logs.
    pub fn new(
        record: VmRecord,
        handle: Arc<Process>,
        stderr: OwnedFd,
        console: OwnedFd,
    ) -> Result<Self, VmmError> {
        let VmRecord { pod, run_dir, console_log_bytes, .. } = &record;
        let captures = pipe::Receiver::from_owned_fd(console)
            .and_then(|console| Captures::start(stderr, console, run_dir, *console_log_bytes))
            .map_err(path_error(pod, "capture output in", run_dir.clone()))?;
        Ok(Self { record, handle, captures: Arc::new(captures), cause: Arc::default() })
    }

    /// Assigns the process to `pod`, as [`crate::Vm::assign`] does.
    pub fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Self, VmmError> {
        Ok(Self { record: self.record.assign(&self.handle, pod, run_dir)?, ..self.clone() })
    }

    /// Waits for the response to `call` and turns each failure into one kind of error.
    pub async fn call<T>(
        &self,
        call: &str,
        response: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, VmmError> {
        let response = tokio::select! {
            biased;
            response = response => response,
            _ = self.handle.exited() => return Err(self.died(call).await),
        };
        let (pod, call) = (self.record.pod.clone(), call.to_owned());
        match response {
            Ok(response) => Ok(response),
            Err(ApiError::Connect { .. } | ApiError::Closed(_)) if self.is_ending().await => {
                Err(self.died(&call).await)
            }
            Err(ApiError::Connect { path, source }) => {
                Err(VmmError::Path { pod, action: "connect to", path, source })
            }
            Err(ApiError::Timeout(limit)) => Err(VmmError::Hung { pod, call, limit }),
            Err(ApiError::Refused { reason, .. }) => Err(VmmError::Refused { pod, call, reason }),
            Err(error @ (ApiError::Malformed(_) | ApiError::Closed(_))) => {
                Err(VmmError::Malformed { pod, call, reason: chain(&error) })
            }
        }
    }

    /// Returns whether the process is about to exit: its sockets close before it is gone.
    pub async fn is_ending(&self) -> bool {
        tokio::time::timeout(EXIT_TIMEOUT, self.handle.exited()).await.is_ok()
    }

    /// Waits for the end of the process.
    pub async fn exit(&self) -> VmExit {
        let exit = self.handle.exited().await;
        // Boxed: this waits for as long as the VMM runs.
        let last_lines = Box::pin(async {
            self.captures.drained().await;
            self.captures.last_lines().await
        });
        let last_lines = last_lines.await;
        let how = match self.cause.get() {
            Some(cause) => format!("was killed after {cause}"),
            None => exit.to_string(),
        };
        VmExit { how, last_lines }
    }

    /// Returns the error of a call during which the process ended.
    pub async fn died(&self, call: &str) -> VmmError {
        let VmExit { how, last_lines } = self.exit().await;
        let (pod, call) = (self.record.pod.clone(), call.to_owned());
        VmmError::Died { pod, call, how, last_lines: last_lines.join(" | ") }
    }
}
