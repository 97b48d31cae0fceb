//! A VMM's process with its output, for a VMM with an API.

use std::{
    future::Future,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_process::Process;
use sandboxer_protocol::id::SandboxId;

use crate::{
    DiskSpec, VmmError,
    http::ApiError,
    room::{Room, shown as path_of},
    run_dir::{Captures, path_error},
    shown::{self, Shown},
};

/// Time within which a process whose sockets are closed is gone; otherwise it lives on without them.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A VMM's process, which all clones watch.
#[derive(Debug, Clone)]
pub struct Watched {
    /// The pod that errors name.
    pub pod: SandboxId,
    /// The process.
    pub process: Arc<Process>,
    /// The output of the VMM and of its guest.
    pub captures: Arc<Captures>,
    /// The reason why the daemon ended the process.
    pub cause: Arc<OnceLock<&'static str>>,
}

impl Watched {
    /// Returns the process of `pod`'s VMM.
    pub fn new(pod: &SandboxId, process: Arc<Process>, captures: Captures) -> Self {
        Self { pod: pod.clone(), process, captures: Arc::new(captures), cause: Arc::default() }
    }

    /// Returns the same process, as the process of another pod.
    pub fn of(&self, pod: &SandboxId) -> Self {
        Self { pod: pod.clone(), ..self.clone() }
    }

    /// Waits for the response to `call` and turns each failure into one kind of error.
    pub async fn answered<T>(
        &self,
        call: &str,
        asked: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, VmmError> {
        let answer = tokio::select! {
            biased;
            answer = asked => answer,
            _ = self.process.exited() => return Err(self.died(call).await),
        };
        let (pod, call) = (self.pod.clone(), call.to_owned());
        match answer {
            Ok(answer) => Ok(answer),
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

    /// Opens the directory that the VMM can write to.
    pub async fn room(&self) -> Result<Arc<Room>, VmmError> {
        match Room::of(&self.process) {
            Ok(room) => Ok(Arc::new(room)),
            Err(_) if self.is_ending().await => Err(self.died("its start").await),
            Err(error) => {
                let path = PathBuf::from(format!("/proc/{}/root", self.process.pid()));
                Err(path_error(&self.pod, "open the jail", path)(error))
            }
        }
    }

    /// Makes these disks visible to the VMM, which runs as `user`, for the duration of `call`.
    pub async fn show(&self, call: &str, user: u32, disks: &[DiskSpec]) -> Result<Vec<Shown>, VmmError> {
        let (process, disks, pod) = (self.process.clone(), disks.to_vec(), self.pod.clone());
        let show = move || -> Result<Vec<Shown>, VmmError> {
            let show = |disk: &DiskSpec| {
                let shown = Shown::new(process.clone(), user, disk);
                shown.map_err(path_error(&pod, "mount disk", disk.file.name().to_owned()))
            };
            disks.iter().map(show).collect()
        };
        match tokio::task::spawn_blocking(show).await {
            Ok(Err(_)) if self.is_ending().await => Err(self.died(call).await),
            Ok(shown) => shown,
            Err(ended) => {
                Err(path_error(&self.pod, "mount disks in", path_of(""))(std::io::Error::other(ended)))
            }
        }
    }

    /// Removes from the jail the disks that an earlier daemon left there, and the permissions of its `user`.
    pub async fn clear(&self, user: u32) -> Result<(), VmmError> {
        let process = self.process.clone();
        let cleared = tokio::task::spawn_blocking(move || shown::clear(&process, user)).await;
        cleared.unwrap_or_else(|ended| Err(std::io::Error::other(ended))).map_err(path_error(
            &self.pod,
            "unmount disks in",
            path_of(""),
        ))
    }

    /// Returns whether the process is about to exit: its sockets close before it is gone.
    async fn is_ending(&self) -> bool {
        tokio::time::timeout(EXIT_TIMEOUT, self.process.exited()).await.is_ok()
    }

    /// Waits for the end of the process. Returns how it ended.
    pub async fn end(&self) -> String {
        let exit = self.process.exited().await;
        // Boxed: this waits for as long as the VMM runs.
        Box::pin(self.captures.drained()).await;
        match self.cause.get() {
            Some(cause) => format!("was killed after {cause}"),
            None => exit.to_string(),
        }
    }

    /// Returns the error of a call during which the process ended.
    pub async fn died(&self, call: &str) -> VmmError {
        let how = self.end().await;
        let last_lines = self.captures.last_lines().await.join(" | ");
        VmmError::Died { pod: self.pod.clone(), call: call.to_owned(), how, last_lines }
    }
}
