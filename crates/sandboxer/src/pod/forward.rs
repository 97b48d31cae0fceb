//! Port forwarding: containerd connects to localhost in the pod's network namespace, and reaches the same port of the
//! guest's loopback. Host ports of a hostNetwork pod are forwarded in the same way. The other way go queries of names: see
//! `resolve`.

use std::{io, net, path::Path, sync::Arc, time::Duration};

use futures::{FutureExt, future};
use rustix::net::sockopt;
use sandboxer_base::chain;
use sandboxer_guest::{Agent, GuestError};
use sandboxer_host::network::{namespace, steer};
use sandboxer_protocol::id::SandboxId;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Semaphore, oneshot},
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

use super::{resolve, spec::PodSpec};
use crate::error::PodError;

/// Maximum number of concurrent connections of a pod: half of the agent's limit.
const MAX_CONNECTIONS: usize = 128;
/// Size of a copy buffer, bytes.
const CHUNK: usize = 64 << 10;
/// Pause after a failure to accept a connection.
const RESPITE: Duration = Duration::from_millis(100);
/// Interval of checks whether a client that has closed its side still listens. A guest may be silent for as long as it
/// wants meanwhile. The kernel probes the client's kernel, which replies only for an open socket.
const LOOK: Duration = Duration::from_secs(10);
/// Time of silence after which the kernel sends the first probe.
const QUIET: Duration = Duration::from_secs(60);
/// Number of unanswered probes after which the client counts as gone.
const QUESTIONS: u32 = 6;

/// The forwarding of ports to a running pod. Ends when dropped.
#[derive(Debug)]
pub struct Forwarding {
    _task: AbortOnDropHandle<()>,
    /// Carries queries to a name server in the pod's network namespace.
    _resolving: Option<AbortOnDropHandle<()>>,
    /// The pod's listeners on the host.
    host_ports: Vec<net::TcpListener>,
}

impl Forwarding {
    /// Begins to forward: connections in the pod's network namespace or, if it has none, those of `host_ports`.
    pub fn begin(spec: &PodSpec, host_ports: Vec<net::TcpListener>, agent: Agent) -> Self {
        let (pod, netns) = (spec.id.clone(), spec.netns.clone());
        let resolving = match (&spec.bundle, &spec.netns) {
            (Some(bundle), Some(netns)) if spec.alone => {
                let serving = resolve::serve(pod.clone(), bundle.clone(), netns.clone(), agent.clone());
                Some(AbortOnDropHandle::new(tokio::spawn(serving)))
            }
            _ => None,
        };
        let copies = host_ports.iter().filter_map(|listener| listener.try_clone().ok()).collect();
        let forwarding = async move {
            match netns {
                Some(netns) => serve(pod, &netns, agent).await,
                None => serve_host(pod, host_ports, agent).await,
            }
        };
        let task = AbortOnDropHandle::new(tokio::spawn(forwarding));
        Self { _task: task, _resolving: resolving, host_ports: copies }
    }

    /// Ends the forwarding. Returns the pod's listeners on the host, which are still open.
    pub fn end(self) -> Vec<net::TcpListener> {
        self.host_ports
    }
}

/// Forwards connections to the loopback of the pod's namespace `netns`, until the returned future is dropped.
async fn serve(pod: SandboxId, netns: &Path, agent: Agent) {
    if let Err(error) = try_serve(&pod, netns, agent).await {
        // The pod works without port forwarding.
        tracing::warn!(%pod, error = chain(&error), "cannot forward ports to the pod");
    }
}

async fn try_serve(pod: &SandboxId, netns: &Path, agent: Agent) -> Result<(), PodError> {
    let failed = |source| PodError::Path {
        pod: pod.clone(),
        action: "listen for port-forward in",
        path: netns.to_owned(),
        source,
    };
    let path = netns.to_owned();
    let steered = tokio::task::spawn_blocking(move || steer::listen(namespace::open(&path)?)).await;
    let steered = steered.unwrap_or_else(|panic| Err(io::Error::other(panic))).map_err(failed)?;
    carry(pod, vec![steered.listener], agent).await.map_err(failed)
}

/// Forwards connections of `listeners` on the host to the same ports of the pod, until the returned future is dropped.
async fn serve_host(pod: SandboxId, listeners: Vec<net::TcpListener>, agent: Agent) {
    if let Err(error) = carry(&pod, listeners, agent).await {
        tracing::error!(%pod, error = chain(&error), "cannot forward the host's ports to the pod");
    }
}

/// Forwards connections until the returned future is dropped.
async fn carry(pod: &SandboxId, listeners: Vec<net::TcpListener>, agent: Agent) -> io::Result<()> {
    let listeners: Vec<_> = listeners.into_iter().map(TcpListener::from_std).collect::<Result<_, _>>()?;
    // The agent distinguishes this daemon from an earlier one by this number.
    let owner = rand::random();
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    future::join_all(listeners.iter().map(|listener| accept(pod, listener, &agent, owner, &places))).await;
    Ok(())
}

/// Accepts connections of one listener forever.
async fn accept(pod: &SandboxId, listener: &TcpListener, agent: &Agent, owner: u64, places: &Arc<Semaphore>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let stream = match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        // The connection broke at once, or no descriptors are left.
                        tracing::warn!(%pod, %error, "cannot accept a connection to the pod");
                        tokio::time::sleep(RESPITE).await;
                        continue;
                    }
                };
                let Ok(place) = places.clone().try_acquire_owned() else {
                    tracing::warn!(%pod, "{MAX_CONNECTIONS} connections are forwarded already: rejected one more");
                    refuse(stream);
                    continue;
                };
                let (pod, agent) = (pod.clone(), agent.clone());
                connections.spawn(async move {
                    if let Err(error) = forward(stream, &agent, owner).await {
                        tracing::debug!(%pod, error = chain(&error), "a forwarded connection ended");
                    }
                    drop(place);
                });
            }
            // Drop finished connections.
            Some(_) = connections.join_next() => {}
        }
    }
}

/// The reason why a forwarded connection ended early.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error("the connection on the host failed")]
    Host(#[from] io::Error),
    #[error("the guest sent {0} bytes at once, at most {CHUNK} are taken")]
    TooMuch(usize),
}

async fn forward(stream: TcpStream, agent: &Agent, owner: u64) -> Result<(), Ended> {
    let port = stream.local_addr()?.port();
    sockopt::set_socket_keepalive(&stream, true).map_err(io::Error::from)?;
    sockopt::set_tcp_keepidle(&stream, QUIET).map_err(io::Error::from)?;
    sockopt::set_tcp_keepintvl(&stream, LOOK).map_err(io::Error::from)?;
    sockopt::set_tcp_keepcnt(&stream, QUESTIONS).map_err(io::Error::from)?;
    let connection = match agent.dial(port, owner).await {
        Ok(connection) => connection,
        Err(error) => {
            refuse(stream);
            return Err(error.into());
        }
    };
    let (from, to) = stream.into_split();
    let (input_end, input_ended) = oneshot::channel();
    let copied = tokio::try_join!(
        into_guest(from, agent, connection, input_end),
        out_of_guest(to, agent, connection, input_ended)
    );
    agent.close_connection(connection).await?;
    copied.map(drop)
}

async fn into_guest(
    mut from: OwnedReadHalf,
    agent: &Agent,
    connection: u64,
    input_end: oneshot::Sender<()>,
) -> Result<(), Ended> {
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = from.read(&mut chunk).await?;
        agent.write_connection(connection, chunk[..count].to_vec(), count == 0).await?;
        if count == 0 {
            // The other direction may have ended before.
            let _ = input_end.send(());
            return Ok(());
        }
    }
}

async fn out_of_guest(
    mut to: OwnedWriteHalf,
    agent: &Agent,
    connection: u64,
    input_ended: oneshot::Receiver<()>,
) -> Result<(), Ended> {
    let input_ended = input_ended.shared();
    loop {
        let client_gone = input_ended.clone().then(|_| wait_until_gone(to.as_ref()));
        let data = tokio::select! {
            data = agent.read_connection(connection) => data?,
            error = client_gone => return Err(error.into()),
        };
        if data.len() > CHUNK {
            return Err(Ended::TooMuch(data.len()));
        }
        if data.is_empty() {
            to.shutdown().await?;
            return Ok(());
        }
        to.write_all(&data).await?;
    }
}

/// Waits until the client of a connection is gone. The client's side is closed, so reading cannot detect this.
async fn wait_until_gone(stream: &TcpStream) -> io::Error {
    loop {
        tokio::time::sleep(LOOK).await;
        match stream.take_error() {
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => return error,
        }
    }
}

/// Resets a connection, as if no process listened.
fn refuse(stream: TcpStream) {
    // Without a reset, the client would see an empty response.
    let _ = stream.set_zero_linger();
}
