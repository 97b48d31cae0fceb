//! Cloud Hypervisor's API: HTTP/1.1 on a unix socket; typed, bounded, with time limits.
//!
//! Each call has its own connection, so an abandoned call cannot disturb another. The VMM runs a hostile
//! guest: an answer over [`MAX_ANSWER`] or of another type than expected is an error.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{
    Method, Request, StatusCode,
    body::Bytes,
    client::conn::http1,
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use sandboxer_process::socket;
use serde::{Serialize, de::DeserializeOwned};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument;

use super::{
    passing::Passing,
    version,
    wire::{Counters, Device, Disk, Fs, Net, PciDevice, Ping, Resize, Restore, Snapshot, VmConfig, VmInfo},
};

/// The API's socket, in the VM's directory.
pub const SOCKET: &str = "control.sock";
/// Most bytes of an answer's body.
const MAX_ANSWER: usize = 1 << 20;

/// Why a call had no effect, or may have had none.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// No process listens.
    #[error("cannot connect to {path:?}")]
    Connect {
        /// The API's socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The VMM refused.
    #[error("{reason}")]
    Refused {
        /// Status of the answer.
        status: u16,
        /// In the VMM's words, bounded.
        reason: String,
    },
    /// An answer that is not valid.
    #[error("{0}")]
    Malformed(String),
    /// The connection ended before the answer did.
    #[error("connection ended before the answer")]
    Closed(#[source] hyper::Error),
}

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

    /// Returns the VMM's version and process.
    pub async fn ping(&self) -> Result<Ping, ApiError> {
        self.get("vmm.ping").await
    }

    /// Creates the VM. It does not run yet.
    pub async fn create(&self, config: &VmConfig) -> Result<(), ApiError> {
        self.put("vm.create", Some(config)).await
    }

    /// Runs the VM.
    pub async fn boot(&self) -> Result<(), ApiError> {
        self.act("vm.boot").await
    }

    /// Returns the state of the VM.
    pub async fn info(&self) -> Result<VmInfo, ApiError> {
        self.get("vm.info").await
    }

    /// Returns the traffic of its devices.
    pub async fn counters(&self) -> Result<Counters, ApiError> {
        self.get("vm.counters").await
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

    /// Creates the VM from a snapshot, paused.
    pub async fn restore(&self, dir: &Path) -> Result<(), ApiError> {
        let restore = Restore { source_url: url(dir), prefault: false };
        self.put("vm.restore", Some(&restore)).await
    }

    /// Attaches a disk.
    pub async fn add_disk(&self, disk: &Disk) -> Result<PciDevice, ApiError> {
        self.add("vm.add-disk", disk, Vec::new()).await
    }

    /// Attaches a network card; one open tap for each pair of its queues.
    pub async fn add_net(&self, net: &Net, taps: Vec<OwnedFd>) -> Result<PciDevice, ApiError> {
        self.add("vm.add-net", net, taps).await
    }

    /// Attaches a shared file system. The VM's memory has to be shared.
    pub async fn add_fs(&self, fs: &Fs) -> Result<PciDevice, ApiError> {
        self.add("vm.add-fs", fs, Vec::new()).await
    }

    /// Requests the guest to release a device. Its removal is an event.
    pub async fn remove_device(&self, id: &str) -> Result<(), ApiError> {
        self.put("vm.remove-device", Some(&Device { id })).await
    }

    /// Changes the number of CPUs or the memory.
    pub async fn resize(&self, resize: &Resize) -> Result<(), ApiError> {
        self.put("vm.resize", Some(resize)).await
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
        // 204 in the specification, 200 in fact.
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

    /// Sends one request. Returns the body of the answer if its status is in `due`.
    async fn call(
        &self,
        method: Method,
        call: &'static str,
        body: Bytes,
        passed: Vec<OwnedFd>,
        due: &[StatusCode],
    ) -> Result<Bytes, ApiError> {
        let exchange = self.exchange(method, call, body, passed);
        let (status, answer) = tokio::time::timeout(self.limit, exchange)
            .instrument(tracing::debug_span!("vmm_call", call))
            .await
            .map_err(|_| ApiError::Timeout(self.limit))??;
        match status {
            status if due.contains(&status) => Ok(answer),
            status if status.is_client_error() || status.is_server_error() => {
                Err(ApiError::Refused { status: status.as_u16(), reason: version::reason(&answer) })
            }
            status => Err(ApiError::Malformed(format!("status {status}, expected {}", due[0]))),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        call: &str,
        body: Bytes,
        passed: Vec<OwnedFd>,
    ) -> Result<(StatusCode, Bytes), ApiError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("/api/v1/{call}"))
            .header(HOST, "localhost")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| ApiError::Malformed(error.to_string()))?;
        let socket = socket::connect(&self.run_dir, SOCKET)
            .map_err(|source| ApiError::Connect { path: self.run_dir.join(SOCKET), source })?;
        let io = TokioIo::new(Passing::new(socket, passed));
        let (mut requests, connection) = http1::handshake(io).await.map_err(transport)?;
        // Ends with this call, whatever the other side does.
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let answer = requests.send_request(request).await.map_err(transport)?;
        let status = answer.status();
        let body =
            Limited::new(answer.into_body(), MAX_ANSWER).collect().await.map_err(|error| match error
                .downcast::<hyper::Error>(
            ) {
                Ok(error) => transport(*error),
                Err(error) if error.is::<LengthLimitError>() => {
                    ApiError::Malformed(format!("an answer longer than {MAX_ANSWER} bytes"))
                }
                Err(error) => ApiError::Malformed(error.to_string()),
            })?;
        Ok((status, body.to_bytes()))
    }
}

/// Returns the error of a broken connection, or of one whose other side does not speak HTTP.
fn transport(error: hyper::Error) -> ApiError {
    match error.is_parse() {
        true => ApiError::Malformed(format!("not HTTP: {error}")),
        false => ApiError::Closed(error),
    }
}

fn write(body: &impl Serialize) -> Result<Bytes, ApiError> {
    serde_json::to_vec(body).map(Bytes::from).map_err(|error| ApiError::Malformed(error.to_string()))
}

fn read<A: DeserializeOwned>(answer: &[u8]) -> Result<A, ApiError> {
    serde_json::from_slice(answer).map_err(|error| ApiError::Malformed(error.to_string()))
}

fn url(dir: &Path) -> String {
    format!("file://{}", dir.display())
}
