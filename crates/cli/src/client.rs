//! The daemon, as its admin socket shows it.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use hyper_util::rt::TokioIo;
use sandboxer_protocol::admin::admin_client::AdminClient;
use tokio::net::UnixStream;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

/// How long the daemon may take to answer; what a stream then carries may take longer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the daemon did not say what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error(
        "no sandboxer daemon answers at {socket:?} ({cause}): start one, or name its admin socket with --socket or SANDBOXER_SOCKET"
    )]
    NoDaemon { socket: PathBuf, cause: &'static str },
    /// Not ours to use.
    #[error("not permitted to use {0:?}: the socket is its daemon's user's alone, usually root's")]
    NotPermitted(PathBuf),
    /// Something else about the socket.
    #[error("cannot connect to {socket:?}")]
    Connect { socket: PathBuf, source: io::Error },
    /// Connected, but it is no admin service, or it went away.
    #[error("connection to the daemon at {socket:?} failed: is this its admin socket?")]
    Transport { socket: PathBuf, source: tonic::transport::Error },
    /// The daemon's own answer.
    #[error("{0}")]
    Refused(String),
    /// It went away in mid-sentence.
    #[error("the daemon ended the connection: {0}")]
    Lost(String),
    /// It says nothing.
    #[error(
        "the daemon did not answer within {} s: see its log, it may still be taking up earlier pods",
        ANSWER_TIMEOUT.as_secs()
    )]
    Silent,
    /// It is older or newer than this program.
    #[error("the daemon does not know this request: is it of the same version as this program?")]
    Unknown,
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::Unimplemented => ClientError::Unknown,
            // tonic's client tells its own timeout by this code; the daemon cancels no admin request.
            Code::Cancelled | Code::DeadlineExceeded => ClientError::Silent,
            Code::Unavailable | Code::Unknown => ClientError::Lost(status.message().to_owned()),
            _ => ClientError::Refused(status.message().to_owned()),
        }
    }
}

/// Connects to the admin service at `socket`.
pub async fn connect(socket: &Path) -> Result<AdminClient<Channel>, ClientError> {
    let no_daemon = |cause| ClientError::NoDaemon { socket: socket.to_owned(), cause };
    let stream = UnixStream::connect(socket).await.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => no_daemon("no such file"),
        io::ErrorKind::ConnectionRefused => no_daemon("a socket that nobody serves"),
        io::ErrorKind::PermissionDenied => ClientError::NotPermitted(socket.to_owned()),
        _ => ClientError::Connect { socket: socket.to_owned(), source },
    })?;
    // One connection is all there is: tonic asks again only when it broke.
    let stream = Mutex::new(Some(TokioIo::new(stream)));
    let take = move |_| {
        let taken = stream.lock().ok().and_then(|mut stream| stream.take());
        let gone = || io::Error::new(io::ErrorKind::ConnectionAborted, "the daemon went away");
        std::future::ready(taken.ok_or_else(gone))
    };
    let channel = Endpoint::from_static("http://sandboxer.invalid")
        .timeout(ANSWER_TIMEOUT)
        .connect_with_connector(tower::service_fn(take))
        .await
        .map_err(|source| ClientError::Transport { socket: socket.to_owned(), source })?;
    Ok(AdminClient::new(channel))
}
