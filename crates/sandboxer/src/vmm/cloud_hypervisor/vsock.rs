//! The way to the agent: a hybrid vsock, whose host side are unix sockets.
//!
//! ```text
//! vsock.sock         the VMM listens; `CONNECT 1024\n` leads to the guest's port 1024, `OK …\n` says so
//! vsock.sock_1024    we listen; a guest that connects to its host's port 1024 comes out here
//! ```
//!
//! A connection to a guest whose agent doesn't listen yet is refused, and nothing tells when to try again.
//! So the agent, once it listens, connects to its host and hangs up: that is waited for.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::net::Shutdown;
use sandboxer_protocol::boot::AGENT_VSOCK_PORT;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

use crate::vmm::socket;

/// The VMM's socket, in the machine's directory.
pub const SOCKET: &str = "vsock.sock";
/// Longest answer to `CONNECT`: "OK ", a port of up to ten digits, the end of the line.
const MAX_ANSWER: usize = 14;

/// Name of our socket.
pub fn announcements() -> String {
    format!("{SOCKET}_{AGENT_VSOCK_PORT}")
}

/// The way to one guest's agent.
#[derive(Debug)]
pub struct Link {
    run_dir: PathBuf,
    heard: Arc<Heard>,
}

/// What is known of the agent.
#[derive(Debug)]
struct Heard {
    announced: UnixListener,
    /// Whether the agent may listen: it has announced itself, or may have before we listened.
    listens: AtomicBool,
    /// Another hold on the stream given out last.
    last: Mutex<Option<OwnedFd>>,
}

impl Link {
    /// To a guest that is about to start.
    pub fn new(run_dir: &Path) -> io::Result<Self> {
        Self::listening(run_dir, false)
    }

    /// To a guest that has been running.
    pub fn of_running(run_dir: &Path) -> io::Result<Self> {
        // An earlier daemon's.
        match fs::remove_file(run_dir.join(announcements())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Self::listening(run_dir, true),
        }
    }

    fn listening(run_dir: &Path, listens: bool) -> io::Result<Self> {
        let announced = socket::listen(run_dir, &announcements())?;
        announced.set_nonblocking(true)?;
        Ok(Self {
            run_dir: run_dir.to_owned(),
            heard: Arc::new(Heard {
                announced: UnixListener::from_std(announced)?,
                listens: AtomicBool::new(listens),
                last: Mutex::default(),
            }),
        })
    }

    /// The same way, the machine's directory having been moved.
    pub fn moved(&self, run_dir: &Path) -> Self {
        Self { run_dir: run_dir.to_owned(), heard: self.heard.clone() }
    }

    /// A stream to the agent, as soon as it listens; the one before is dead.
    pub async fn stream(&self) -> io::Result<UnixStream> {
        self.cut();
        loop {
            if !self.heard.listens.load(Ordering::Relaxed) {
                self.heard.announced.accept().await?;
                self.heard.listens.store(true, Ordering::Relaxed);
            }
            if let Some(stream) = self.connect().await? {
                *self.heard.last.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(stream.as_fd().try_clone_to_owned()?);
                return Ok(stream);
            }
            self.heard.listens.store(false, Ordering::Relaxed);
        }
    }

    fn cut(&self) {
        if let Some(last) = self.heard.last.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // One that is dead already is what is wanted.
            let _ = rustix::net::shutdown(&last, Shutdown::Both);
        }
    }

    /// A connection to the agent; none: nobody listens in the guest.
    async fn connect(&self) -> io::Result<Option<UnixStream>> {
        let mut stream = socket::connect(&self.run_dir, SOCKET)?;
        let gone = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
        };
        match stream.write_all(format!("CONNECT {AGENT_VSOCK_PORT}\n").as_bytes()).await {
            Err(error) if gone(&error) => return Ok(None),
            written => written?,
        }
        // Byte by byte: what follows the line is the agent's.
        let mut answer = Vec::with_capacity(MAX_ANSWER);
        while answer.last() != Some(&b'\n') && answer.len() < MAX_ANSWER {
            let mut byte = [0];
            match stream.read(&mut byte).await {
                Ok(0) => return Ok(None),
                Err(error) if gone(&error) => return Ok(None),
                read => read?,
            };
            answer.extend(byte);
        }
        match answer.starts_with(b"OK ") && answer.ends_with(b"\n") {
            true => Ok(Some(stream)),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the VMM answers CONNECT with {:?}", String::from_utf8_lossy(&answer)),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt, BufReader};

    /// A VMM that answers one connection after the other with these, and then ends each.
    fn vmm(run_dir: &Path, answers: &'static [&'static str]) {
        let listener = socket::listen(run_dir, SOCKET).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = UnixListener::from_std(listener).unwrap();
        tokio::spawn(async move {
            for answer in answers {
                let mut stream = BufReader::new(listener.accept().await.unwrap().0);
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                assert_eq!(line, "CONNECT 1024\n");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
    }

    fn announce(run_dir: &Path) {
        drop(socket::connect(run_dir, "vsock.sock_1024").unwrap());
    }

    #[tokio::test]
    async fn the_agent_is_connected_to_once_it_has_announced_itself() {
        let dir = tempfile::tempdir().unwrap();
        let link = Link::new(dir.path()).unwrap();
        vmm(dir.path(), &["OK 1073741824\nhello", "OK 1073741825\n"]);
        {
            let early = link.stream();
            tokio::pin!(early);
            assert!(futures::poll!(&mut early).is_pending(), "connected before the agent listens");
        }
        announce(dir.path());
        let mut stream = link.stream().await.unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).await.unwrap();
        assert_eq!(said, "hello");
        link.stream().await.expect("one announcement is enough");
    }

    #[tokio::test]
    async fn an_agent_that_doesnt_listen_yet_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        drop(Link::new(dir.path()).unwrap());
        let link = Link::of_running(dir.path()).unwrap();
        vmm(dir.path(), &["", "OK 1\n"]);
        announce(dir.path());
        link.stream().await.unwrap();
    }

    #[tokio::test]
    async fn rubbish_is_an_error() {
        for rubbish in ["no", "OK 1073741824073741824\n", "HTTP/1.1 200 \n"] {
            let dir = tempfile::tempdir().unwrap();
            let link = Link::of_running(dir.path()).unwrap();
            vmm(dir.path(), Vec::leak(vec![rubbish]));
            match link.stream() {
                // Two bytes and the end: like nobody there, hence waited for.
                stream if rubbish == "no" => {
                    tokio::pin!(stream);
                    assert!(futures::poll!(&mut stream).is_pending());
                }
                stream => assert_eq!(stream.await.unwrap_err().kind(), io::ErrorKind::InvalidData),
            }
        }
    }
}
