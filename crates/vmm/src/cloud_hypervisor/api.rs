//! A typed client of Cloud Hypervisor's API. The VMM runs a hostile guest: a response of an unexpected type is an
//! error.

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use hyper::{Method, StatusCode, body::Bytes};
use sandboxer_process::socket;
use serde::{Serialize, de::DeserializeOwned};

use super::{
    passing::Passing,
    wire::{
        Device, Disk, Net, PciDevice, Ping, Resize, ResizeZone, Restore, RestoredNet, Snapshot, VmConfig,
        VmInfo,
    },
};
pub use crate::http::ApiError;
use crate::http::{Call, one_line, read, write};

/// The API's socket, in the VM's directory.
pub const SOCKET: &str = "control.sock";
/// The API of one VMM.
#[derive(Debug)]
pub struct Api {
    run_dir: PathBuf,
    limit: Duration,
}

impl Api {
    /// Returns the API of the VMM whose socket is in `run_dir`; no call takes longer than `limit`.
    pub fn new(run_dir: &Path, limit: Duration) -> Self {
        Self { run_dir: run_dir.to_owned(), limit }
    }

    /// Returns the API of the same VMM, whose socket is now in `run_dir`.
    pub fn moved(&self, run_dir: &Path) -> Self {
        Self::new(run_dir, self.limit)
    }

    /// Returns the API of the same VMM, whose calls may take `factor` times as long.
    pub fn lasting(&self, factor: u32) -> Self {
        Self::new(&self.run_dir, self.limit * factor)
    }

    /// Returns the VMM's version and process.
    pub async fn ping(&self) -> Result<Ping, ApiError> {
        self.get("vmm.ping").await
    }

    /// Creates the VM, which does not run yet.
    pub async fn create(&self, config: &VmConfig) -> Result<(), ApiError> {
        self.put("vm.create", Some(config)).await
    }

    /// Boots the VM.
    pub async fn boot(&self) -> Result<(), ApiError> {
        self.act("vm.boot").await
    }

    /// Returns the state of the VM.
    pub async fn info(&self) -> Result<VmInfo, ApiError> {
        self.get("vm.info").await
    }

    /// Stops the CPUs.
    pub async fn pause(&self) -> Result<(), ApiError> {
        self.act("vm.pause").await
    }

    /// Lets the CPUs run again.
    pub async fn resume(&self) -> Result<(), ApiError> {
        self.act("vm.resume").await
    }

    /// Writes a snapshot of a paused VM to an existing directory.
    pub async fn snapshot(&self, dir: &Path) -> Result<(), ApiError> {
        let snapshot = Snapshot { destination_url: url(dir) };
        self.put("vm.snapshot", Some(&snapshot)).await
    }

    /// Creates the VM from a snapshot, paused. `nics` are the network cards that it had, each with its open tap.
    pub async fn restore(&self, dir: &Path, nics: Vec<(String, OwnedFd)>) -> Result<(), ApiError> {
        let (ids, taps): (Vec<_>, Vec<_>) = nics.into_iter().unzip();
        let net_fds = ids.into_iter().map(|id| RestoredNet { id, num_fds: 1 }).collect();
        let restore = Restore { source_url: url(dir), prefault: false, net_fds };
        let due = &[StatusCode::NO_CONTENT];
        self.call(Method::PUT, "vm.restore", write(&restore)?, taps, due).await.map(drop)
    }

    /// Attaches a disk.
    pub async fn add_disk(&self, disk: &Disk) -> Result<PciDevice, ApiError> {
        self.add("vm.add-disk", disk, Vec::new()).await
    }

    /// Attaches a network card, with one open tap for each pair of its queues.
    pub async fn add_net(&self, net: &Net, taps: Vec<OwnedFd>) -> Result<PciDevice, ApiError> {
        self.add("vm.add-net", net, taps).await
    }

    /// Requests the guest to release a device. An event reports the removal.
    pub async fn remove_device(&self, id: &str) -> Result<(), ApiError> {
        self.put("vm.remove-device", Some(&Device { id })).await
    }

    /// Changes the number of CPUs or the size of the memory.
    pub async fn resize(&self, resize: &Resize) -> Result<(), ApiError> {
        self.put("vm.resize", Some(resize)).await
    }

    /// Changes the size of a memory zone. The guest follows later.
    pub async fn resize_zone(&self, resize: &ResizeZone<'_>) -> Result<(), ApiError> {
        self.put("vm.resize-zone", Some(resize)).await
    }

    /// Stops the VM; its configuration stays.
    pub async fn shutdown(&self) -> Result<(), ApiError> {
        self.act("vm.shutdown").await
    }

    /// Stops the VM and deletes its configuration.
    pub async fn delete(&self) -> Result<(), ApiError> {
        self.act("vm.delete").await
    }

    /// Stops the VMM.
    pub async fn shutdown_vmm(&self) -> Result<(), ApiError> {
        // 204 in the specification, 200 in reality.
        let due = &[StatusCode::NO_CONTENT, StatusCode::OK];
        self.call(Method::PUT, "vmm.shutdown", Bytes::new(), Vec::new(), due).await.map(drop)
    }

    async fn get<A: DeserializeOwned>(&self, call: &'static str) -> Result<A, ApiError> {
        let answer = self.call(Method::GET, call, Bytes::new(), Vec::new(), &[StatusCode::OK]).await?;
        read(&answer)
    }

    async fn act(&self, call: &'static str) -> Result<(), ApiError> {
        self.put(call, None::<&()>).await
    }

    async fn put(&self, call: &'static str, body: Option<&impl Serialize>) -> Result<(), ApiError> {
        let body = body.map(write).transpose()?.unwrap_or_default();
        self.call(Method::PUT, call, body, Vec::new(), &[StatusCode::NO_CONTENT]).await.map(drop)
    }

    async fn add(
        &self,
        call: &'static str,
        device: &impl Serialize,
        passed: Vec<OwnedFd>,
    ) -> Result<PciDevice, ApiError> {
        let answer = self.call(Method::PUT, call, write(device)?, passed, &[StatusCode::OK]).await?;
        read(&answer)
    }

    /// Sends one request. Returns the body of the response if its status is in `due`.
    async fn call(
        &self,
        method: Method,
        call: &'static str,
        body: Bytes,
        passed: Vec<OwnedFd>,
        due: &[StatusCode],
    ) -> Result<Bytes, ApiError> {
        let socket = socket::connect(&self.run_dir, SOCKET)
            .map_err(|source| ApiError::Connect { path: self.run_dir.join(SOCKET), source })?;
        let call = Call { method, path: &format!("/api/v1/{call}"), body, due };
        call.send_on(Passing::new(socket, passed), self.limit, reason).await
    }
}

fn url(dir: &Path) -> String {
    format!("file://{}", dir.display())
}

/// Returns the reason of a refusal, from the response of any version: one line, bounded.
pub fn reason(answer: &[u8]) -> String {
    match serde_json::from_slice::<Vec<String>>(answer) {
        // From the outermost cause, which only repeats the call, to the innermost.
        Ok(causes) => one_line(&causes.join(": ")),
        Err(_) => one_line(&String::from_utf8_lossy(answer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_of_any_version_is_one_line() {
        assert_eq!(
            reason(br#"["Error from API","The VM could not boot"]"#),
            "Error from API: The VM could not boot"
        );
        assert_eq!(reason(b"VM is not created\nmore"), "VM is not created more");
    }
}
