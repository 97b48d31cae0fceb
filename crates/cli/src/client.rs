//! Client of the daemon's admin socket.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use hyper_util::rt::TokioIo;
use sandboxer_protocol::admin::{VersionRequest, VersionResponse, admin_client::AdminClient};
use tokio::net::UnixStream;
use tonic::{
    Code, Response, Status,
    transport::{Channel, Endpoint},
};

/// Deadline of the daemon's first response; later messages of a stream have none.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a request to the daemon failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens on the socket.
    #[error(
        "no sandboxer daemon answers at {socket:?} ({cause}): start one, or set its admin socket with --socket or SANDBOXER_SOCKET"
    )]
    NoDaemon { socket: PathBuf, cause: &'static str },
    /// This user has no permission to connect.
    #[error("no permission to use {0:?}: only the daemon's user may connect, usually root")]
    NotPermitted(PathBuf),
    /// connect(2) failed for another reason.
    #[error("cannot connect to {socket:?}")]
    Connect { socket: PathBuf, source: io::Error },
    /// The connection failed: the socket is no admin service, or the daemon ended.
    #[error("connection to the daemon at {socket:?} failed: is this its admin socket?")]
    Transport { socket: PathBuf, source: tonic::transport::Error },
    /// The daemon returned an error.
    #[error("{0}")]
    Refused(String),
    /// The daemon closed the stream.
    #[error("the daemon closed the connection: {0}")]
    Lost(String),
    /// The daemon did not respond within the deadline.
    #[error(
        "the daemon did not answer within {} s: see its log, it may still be adopting earlier pods",
        ANSWER_TIMEOUT.as_secs()
    )]
    Silent,
    /// The daemon is older or newer than this program.
    #[error("the daemon does not know this request: use a daemon of the same version as this program")]
    Unknown,
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::Unimplemented => ClientError::Unknown,
            // tonic's client reports its own timeout with this code; the daemon cancels no admin request.
            Code::Cancelled | Code::DeadlineExceeded => ClientError::Silent,
            Code::Unavailable | Code::Unknown => ClientError::Lost(status.message().to_owned()),
            _ => ClientError::Refused(status.message().to_owned()),
        }
    }
}

/// Returns the daemon's answer to a request.
pub fn answer<T>(response: Result<Response<T>, Status>) -> Result<T, ClientError> {
    Ok(response?.into_inner())
}

/// Returns the versions of the daemon at `socket`.
pub async fn version(socket: &Path) -> Result<VersionResponse, ClientError> {
    answer(connect(socket).await?.version(VersionRequest {}).await)
}

/// Connects to the admin service at `socket`.
pub async fn connect(socket: &Path) -> Result<AdminClient<Channel>, ClientError> {
    let no_daemon = |cause| ClientError::NoDaemon { socket: socket.to_owned(), cause };
    let stream = UnixStream::connect(socket).await.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => no_daemon("no such file"),
        io::ErrorKind::ConnectionRefused => no_daemon("no process listens on the socket"),
        io::ErrorKind::PermissionDenied => ClientError::NotPermitted(socket.to_owned()),
        _ => ClientError::Connect { socket: socket.to_owned(), source },
    })?;
    // There is only one connection: tonic calls this again only after it broke.
    let stream = Mutex::new(Some(TokioIo::new(stream)));
    let take = move |_| {
        let stream = stream.lock().ok().and_then(|mut stream| stream.take());
        let closed = || io::Error::new(io::ErrorKind::ConnectionAborted, "the daemon closed the connection");
        std::future::ready(stream.ok_or_else(closed))
    };
    let channel = Endpoint::from_static("http://sandboxer.invalid")
        .timeout(ANSWER_TIMEOUT)
        .connect_with_connector(tower::service_fn(take))
        .await
        .map_err(|source| ClientError::Transport { socket: socket.to_owned(), source })?;
    Ok(AdminClient::new(channel))
}
