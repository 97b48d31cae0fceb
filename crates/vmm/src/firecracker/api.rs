//! A typed client of Firecracker's API. The VMM runs a hostile guest: a response of an unexpected type is an error.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use hyper::{Method, StatusCode, body::Bytes};
use serde::Serialize;

use super::wire::{
    Action, Balloon, BootSource, Drive, DrivePatch, Entropy, Instance, Machine, MemoryHotplug, MemoryRequest,
    MemoryStatus, Net, SnapshotCreate, SnapshotLoad, VmState, Vsock,
};
pub use crate::http::ApiError;
use crate::{
    http::{Call, one_line, read, write},
    jail_dir::JailDir,
};

/// Name of the API's socket in the VMM's jail directory.
pub const SOCKET: &str = "api.sock";
/// API path of the memory that the guest can get while it runs.
const MEMORY: &str = "/hotplug/memory";
/// Delay between attempts to connect to a VMM that starts. Firecracker does not announce its socket and cannot inherit
/// one.
const AGAIN: Duration = Duration::from_millis(1);

/// The API of one VMM.
#[derive(Debug, Clone)]
pub struct Api {
    jail_dir: Arc<JailDir>,
    limit: Duration,
}

impl Api {
    /// Returns the API of the VMM with this jail directory; no call takes longer than `limit`.
    pub fn new(jail_dir: Arc<JailDir>, limit: Duration) -> Self {
        Self { jail_dir, limit }
    }

    /// Waits until the VMM listens on its socket.
    pub async fn listens(&self) -> Result<(), ApiError> {
        let listens = async {
            loop {
                match self.jail_dir.connect(SOCKET) {
                    Err(error) if starts(&error) => tokio::time::sleep(AGAIN).await,
                    connected => return connected.map(drop).map_err(unreachable),
                }
            }
        };
        tokio::time::timeout(self.limit, listens).await.unwrap_or(Err(ApiError::Timeout(self.limit)))
    }

    /// Returns the VMM's version and the VM's state.
    pub async fn instance(&self) -> Result<Instance, ApiError> {
        read(&self.call(Method::GET, "/", Bytes::new(), StatusCode::OK).await?)
    }

    /// Sets the number of CPUs and the size of the memory.
    pub async fn machine(&self, machine: &Machine) -> Result<(), ApiError> {
        self.put("/machine-config", machine).await
    }

    /// Sets the kernel, the initramfs and the kernel command line.
    pub async fn boot_source(&self, source: &BootSource) -> Result<(), ApiError> {
        self.put("/boot-source", source).await
    }

    /// Adds a drive to a VM that has not been booted.
    pub async fn drive(&self, drive: &Drive) -> Result<(), ApiError> {
        self.put(&format!("/drives/{}", drive.drive_id), drive).await
    }

    /// Points a drive to another file. The guest sees the new size.
    pub async fn patch_drive(&self, patch: &DrivePatch) -> Result<(), ApiError> {
        self.patch(&format!("/drives/{}", patch.drive_id), patch).await
    }

    /// Adds the vsock.
    pub async fn vsock(&self, vsock: &Vsock) -> Result<(), ApiError> {
        self.put("/vsock", vsock).await
    }

    /// Adds a source of randomness.
    pub async fn entropy(&self) -> Result<(), ApiError> {
        self.put("/entropy", &Entropy {}).await
    }

    /// Adds the balloon.
    pub async fn balloon(&self, balloon: &Balloon) -> Result<(), ApiError> {
        self.put("/balloon", balloon).await
    }

    /// Adds memory that the guest can get while it runs to a VM that has not been booted.
    pub async fn memory_hotplug(&self, memory: &MemoryHotplug) -> Result<(), ApiError> {
        self.put(MEMORY, memory).await
    }

    /// Requests that the guest has this much of the memory that it can get. The guest follows later.
    pub async fn request_memory(&self, request: &MemoryRequest) -> Result<(), ApiError> {
        self.patch(MEMORY, request).await
    }

    /// Returns how much of the memory that it can get the guest has.
    pub async fn memory(&self) -> Result<MemoryStatus, ApiError> {
        read(&self.call(Method::GET, MEMORY, Bytes::new(), StatusCode::OK).await?)
    }

    /// Adds a network interface to a VM that has not been booted.
    pub async fn net(&self, net: &Net) -> Result<(), ApiError> {
        self.put(&format!("/network-interfaces/{}", net.iface_id), net).await
    }

    /// Boots the VM.
    pub async fn start(&self) -> Result<(), ApiError> {
        self.put("/actions", &Action::InstanceStart).await
    }

    /// Stops the CPUs, or lets them run again.
    pub async fn set_state(&self, state: VmState) -> Result<(), ApiError> {
        self.patch("/vm", &state).await
    }

    /// Writes a snapshot of a paused VM.
    pub async fn snapshot(&self, snapshot: &SnapshotCreate) -> Result<(), ApiError> {
        self.put("/snapshot/create", snapshot).await
    }

    /// Creates the VM from a snapshot, paused.
    pub async fn load(&self, load: &SnapshotLoad) -> Result<(), ApiError> {
        self.put("/snapshot/load", load).await
    }

    async fn put(&self, path: &str, body: &impl Serialize) -> Result<(), ApiError> {
        self.call(Method::PUT, path, write(body)?, StatusCode::NO_CONTENT).await.map(drop)
    }

    async fn patch(&self, path: &str, body: &impl Serialize) -> Result<(), ApiError> {
        self.call(Method::PATCH, path, write(body)?, StatusCode::NO_CONTENT).await.map(drop)
    }

    /// Sends one request. Returns the body of the response if its status is `due`.
    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        due: StatusCode,
    ) -> Result<Bytes, ApiError> {
        let socket = self.jail_dir.connect(SOCKET).map_err(unreachable)?;
        Call { method, path, body, due: &[due] }.send_on(socket, self.limit, reason).await
    }
}

/// Returns whether the error means that the VMM does not listen yet.
fn starts(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn unreachable(source: io::Error) -> ApiError {
    ApiError::Connect { path: PathBuf::from(SOCKET), source }
}

/// Returns the reason of a refusal: one line, bounded.
fn reason(answer: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Fault {
        fault_message: String,
    }
    match serde_json::from_slice::<Fault>(answer) {
        Ok(fault) => one_line(&fault.fault_message),
        Err(_) => one_line(&String::from_utf8_lossy(answer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_line() {
        assert_eq!(reason(br#"{"fault_message":"Invalid drive\nid"}"#), "Invalid drive id");
        assert_eq!(reason(b"not JSON"), "not JSON");
    }
}
