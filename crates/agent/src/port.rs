//! The agent's end of the link: a virtio-serial port, or vsock connections if there is a vsock device.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::task::AtomicWaker;
use nix::{
    errno::Errno,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};
use sandboxer_protocol::{
    agent::Ready,
    boot::{AGENT_PORT, AGENT_VSOCK_PORT},
    link::{self, LinkKey},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, DuplexStream, Interest, ReadBuf},
    sync::{mpsc, watch},
};
use tokio_vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener, VsockStream};

use crate::{sync::watched, uevent};

const PORTS: &str = "/sys/class/virtio-ports";
/// The directory with a symlink per vsock device.
const VSOCK_DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";

enum Found {
    Port(PathBuf),
    Vsock,
}

/// Serves the link until it fails; sends each session that a host opens to `sessions`.
pub async fn serve(
    key: watch::Receiver<LinkKey>,
    ready: impl Fn() -> Ready + Clone + Send + 'static,
    sessions: mpsc::Sender<DuplexStream>,
) -> io::Result<()> {
    // A port appears shortly after its device: the host announces it in a message.
    match uevent::wait_for(&["virtio-ports", "virtio"], None, find).await? {
        Some(Found::Port(path)) => link::serve(Port::open(&path)?, key, ready, sessions).await,
        Some(Found::Vsock) => serve_vsock(key, ready, sessions).await,
        None => Err(io::ErrorKind::NotFound.into()),
    }
}

fn find() -> Option<Found> {
    if let Some(port) = find_port() {
        return Some(Found::Port(port));
    }
    let bound = fs::read_dir(VSOCK_DRIVER).ok()?;
    let has_device = bound.flatten().any(|entry| entry.file_name().as_encoded_bytes().starts_with(b"virtio"));
    has_device.then_some(Found::Vsock)
}

fn find_port() -> Option<PathBuf> {
    fs::read_dir(PORTS).ok()?.flatten().find_map(|entry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        (name.trim() == AGENT_PORT).then(|| Path::new("/dev").join(entry.file_name()))
    })
}

async fn serve_vsock(
    key: watch::Receiver<LinkKey>,
    ready: impl Fn() -> Ready + Clone + Send + 'static,
    sessions: mpsc::Sender<DuplexStream>,
) -> io::Result<()> {
    let listener = VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, AGENT_VSOCK_PORT))?;
    tokio::spawn(announce());
    loop {
        let (connection, _) = listener.accept().await?;
        let (key, ready, sessions) = (key.clone(), ready.clone(), sessions.clone());
        tokio::spawn(async move {
            if let Err(error) = link::serve(connection, key, ready, sessions).await {
                tracing::debug!("vsock connection ended: {error}");
            }
        });
    }
}

/// Notifies a host that the agent listens, by connecting; nothing is sent over the connection.
async fn announce() {
    // A host that does not need the notification does not listen.
    if let Err(error) = VsockStream::connect(VsockAddr::new(VMADDR_CID_HOST, AGENT_VSOCK_PORT)).await {
        tracing::debug!("host does not wait for the agent: {error}");
    }
}

/// A virtio-serial port as an endless stream.
///
/// While no host is connected, the port reports a hang-up, returns 0 bytes for reads and accepts no writes. The same
/// descriptor works again when a host connects. tokio treats a hang-up as final, so a read would spin. Therefore an
/// edge-triggered epoll watches the port, and tokio watches the epoll.
struct Port {
    fd: OwnedFd,
    edges: Arc<Edges>,
    watch: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Edges {
    reader: AtomicWaker,
    writer: AtomicWaker,
}

impl Port {
    fn open(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let file = fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let fd = OwnedFd::from(file);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let all = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
        epoll.add(&fd, EpollEvent::new(all, 0))?;
        let readiness = watched(epoll.0.try_clone()?, Interest::READABLE)?;
        let edges = Arc::<Edges>::default();
        let woken = Arc::clone(&edges);
        let watch = tokio::spawn(async move {
            loop {
                let Ok(mut guard) = readiness.readable().await else {
                    return;
                };
                let mut event = [EpollEvent::empty()];
                // Consumes the edge; the port's state has already changed.
                let _ = epoll.wait(&mut event, EpollTimeout::ZERO);
                guard.clear_ready();
                woken.reader.wake();
                woken.writer.wake();
            }
        });
        Ok(Self { fd, edges, watch })
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

impl AsyncRead for Port {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // The waker is registered before the attempt, so that an edge in between wakes the task.
        self.edges.reader.register(cx.waker());
        match nix::unistd::read(&self.fd, buffer.initialize_unfilled()) {
            Ok(0) | Err(Errno::EAGAIN) => Poll::Pending,
            Err(Errno::EINTR) => again(cx),
            Ok(count) => {
                buffer.advance(count);
                Poll::Ready(Ok(()))
            }
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }
}

impl AsyncWrite for Port {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.edges.writer.register(cx.waker());
        match nix::unistd::write(&self.fd, bytes) {
            Err(Errno::EAGAIN) => Poll::Pending,
            Err(Errno::EINTR) => again(cx),
            Ok(count) => Poll::Ready(Ok(count)),
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Polls the task again: it was interrupted by a signal, and no edge will follow.
fn again<T>(cx: &Context<'_>) -> Poll<T> {
    cx.waker().wake_by_ref();
    Poll::Pending
}
