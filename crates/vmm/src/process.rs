//! The process of a VMM: spawn, find, assign to a pod, kill.

use std::{ffi::OsString, fs, io, os::fd::OwnedFd, path::Path, time::Duration};

use sandboxer_process::{Equipment, Process, Starting};
use sandboxer_protocol::id::SandboxId;

use super::{
    VmRecord, VmSpec, VmmError,
    run_dir::{Files, path_error},
};

/// Maximum number of descriptors of a VMM. A VM with all its disks and network interfaces has about a hundred.
/// Firecracker makes room for as many as it may open when it starts: a daemon's limit of a million costs 8 MiB of
/// kernel memory per VM, which no process shows.
pub const OPEN_FILES: u64 = 4096;

/// Starts `program` as the VMM of `spec`. Returns the process and its stderr.
pub async fn spawn(
    program: &Path,
    arguments: Vec<OsString>,
    spec: &VmSpec,
    equipment: Equipment,
) -> Result<(Starting, OwnedFd), VmmError> {
    let equipment = Equipment { open_files: Some(OPEN_FILES), ..equipment };
    let (name, run_dir) = (program.to_owned(), spec.run_dir.clone());
    let spawned =
        tokio::task::spawn_blocking(move || sandboxer_process::spawn(&name, arguments, &run_dir, equipment));
    let spawned = spawned.await.unwrap_or_else(|panic| Err(io::Error::other(panic)));
    // After the VMM was created in its group, because the kernel holds another lock while it waits.
    sandboxer_process::cgroup::keep_moves_short();
    spawned.map_err(|source| VmmError::Spawn { pod: spec.pod.clone(), program: program.to_owned(), source })
}

impl VmRecord {
    /// Finds the process of the VMM. `None`: it has ended.
    pub(super) fn process(&self) -> Result<Option<Process>, VmmError> {
        let process = sandboxer_process::adopt(self.pid, self.start_time);
        process.map_err(process_error(&self.pod, "inspect", self.pid))
    }

    /// Assigns the VM to `pod`: gives its VMM, the process `process`, foreground priority and moves its directory to
    /// `run_dir`. Returns the new record.
    pub(super) fn assign(
        &self,
        process: &Process,
        pod: &SandboxId,
        run_dir: &Path,
    ) -> Result<Self, VmmError> {
        process.to_foreground().map_err(process_error(pod, "raise the priority of", self.pid))?;
        let moved = fs::rename(&self.run_dir, run_dir);
        moved.map_err(path_error(pod, "move a VM's directory to", run_dir.to_owned()))?;
        Ok(Self { pod: pod.clone(), run_dir: run_dir.to_owned(), ..self.clone() })
    }

    /// Kills the VMM, the process `process`, waits up to `limit` until it is gone, and removes the `files` in its
    /// directory.
    pub(super) async fn kill(
        &self,
        process: &Process,
        limit: Duration,
        files: &[&str],
    ) -> Result<(), VmmError> {
        process.kill().map_err(process_error(&self.pod, "kill", self.pid))?;
        let exit = tokio::time::timeout(limit, process.exited()).await;
        exit.map_err(|_| VmmError::Hung { pod: self.pod.clone(), call: "SIGKILL".into(), limit })?;
        drop(Files::of_ended(&self.run_dir, files));
        Ok(())
    }
}

/// Returns the outcome of connecting to the VMM of an earlier daemon. `Ok(None)`: the VMM ended meanwhile,
/// within `limit` after the failure.
pub async fn adopted<T>(
    process: &Process,
    limit: Duration,
    outcome: Result<T, VmmError>,
) -> Result<Option<T>, VmmError> {
    match outcome {
        Ok(vm) => Ok(Some(vm)),
        Err(error) => match tokio::time::timeout(limit, process.exited()).await {
            Ok(_) => Ok(None),
            Err(_) => Err(error),
        },
    }
}

/// Returns a function that turns an error of a VMM's process into an error that names the pod and the process.
pub fn process_error(pod: &SandboxId, action: &'static str, pid: u32) -> impl FnOnce(io::Error) -> VmmError {
    let pod = pod.clone();
    move |source| VmmError::Process { pod, action, pid, source }
}
