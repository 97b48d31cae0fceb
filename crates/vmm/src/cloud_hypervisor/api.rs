//! Cloud Hypervisor's API: HTTP/1.1 on a unix socket; typed, bounded, timed.
//!
//! Each call has a connection of its own, so nothing is shared that a call given up could spoil. The VMM
//! runs beside a hostile guest: an answer over [`MAX_ANSWER`] or in another shape than is due is an error.

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
    /// Nobody listens.
    #[error("cannot connect to {path:?}")]
    Connect {
        /// The API's socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The VMM said no.
    #[error("{reason}")]
    Refused {
        /// Status of the answer.
        status: u16,
        /// In the VMM's words, bounded.
        reason: String,
    },
    /// Not what is due.
    #[error("{0}")]
    Malformed(String),
    /// The connection ended before the answer did.
    #[error("the connection ended before the answer")]
    Closed(#[source] hyper::Error),
}

/// The API of one VMM.
#[derive(Debug)]
pub struct Api {
    run_dir: PathBuf,
    limit: Duration,
}

impl Api {
    /// Of the VMM whose socket is in `run_dir`; no call takes longer than `limit`.
    pub fn new(run_dir: &Path, limit: Duration) -> Self {
        Self { run_dir: run_dir.to_owned(), limit }
    }

    /// Returns who is there.
    pub async fn ping(&self) -> Result<Ping, ApiError> {
        self.get("vmm.ping").await
    }

    /// Describes the VM. It doesn't run yet.
    pub async fn create(&self, config: &VmConfig) -> Result<(), ApiError> {
        self.put("vm.create", Some(config)).await
    }

    /// Runs the VM.
    pub async fn boot(&self) -> Result<(), ApiError> {
        self.act("vm.boot").await
    }

    /// Returns what the VM is doing.
    pub async fn info(&self) -> Result<VmInfo, ApiError> {
        self.get("vm.info").await
    }

    /// Traffic of its devices.
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

    /// Writes a paused VM down, in an existing directory.
    pub async fn snapshot(&self, dir: &Path) -> Result<(), ApiError> {
        let snapshot = Snapshot { destination_url: url(dir) };
        self.put("vm.snapshot", Some(&snapshot)).await
    }

    /// Makes the VM of a snapshot, paused.
    pub async fn restore(&self, dir: &Path) -> Result<(), ApiError> {
        let restore = Restore { source_url: url(dir), prefault: false };
        self.put("vm.restore", Some(&restore)).await
    }

    /// Plugs a disk in.
    pub async fn add_disk(&self, disk: &Disk) -> Result<PciDevice, ApiError> {
        self.add("vm.add-disk", disk, Vec::new()).await
    }

    /// Plugs a network card in; one open tap for each pair of its queues.
    pub async fn add_net(&self, net: &Net, taps: Vec<OwnedFd>) -> Result<PciDevice, ApiError> {
        self.add("vm.add-net", net, taps).await
    }

    /// Plugs a shared file system in. The VM's memory has to be shared.
    pub async fn add_fs(&self, fs: &Fs) -> Result<PciDevice, ApiError> {
        self.add("vm.add-fs", fs, Vec::new()).await
    }

    /// Asks the guest to let go of a device. Its end is an event.
    pub async fn remove_device(&self, id: &str) -> Result<(), ApiError> {
        self.put("vm.remove-device", Some(&Device { id })).await
    }

    /// Changes the number of CPUs or the memory.
    pub async fn resize(&self, resize: &Resize) -> Result<(), ApiError> {
        self.put("vm.resize", Some(resize)).await
    }

    /// Ends the VM; its description stays.
    pub async fn shutdown(&self) -> Result<(), ApiError> {
        self.act("vm.shutdown").await
    }

    /// Forgets the VM, after ending it.
    pub async fn delete(&self) -> Result<(), ApiError> {
        self.act("vm.delete").await
    }

    /// Ends the VMM.
    pub async fn shutdown_vmm(&self) -> Result<(), ApiError> {
        // Described as 204, answered as 200.
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

    /// Returns one request and its answer's body, if its status is one that is `due`.
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
            status => Err(ApiError::Malformed(format!("status {status} where {} was due", due[0]))),
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
                    ApiError::Malformed(format!("an answer of over {MAX_ANSWER} bytes"))
                }
                Err(error) => ApiError::Malformed(error.to_string()),
            })?;
        Ok((status, body.to_bytes()))
    }
}

/// Returns a broken connection, or one on which somebody speaks no HTTP.
fn transport(error: hyper::Error) -> ApiError {
    match error.is_parse() {
        true => ApiError::Malformed(format!("no HTTP: {error}")),
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
