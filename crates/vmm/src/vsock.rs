//! The connection to the agent, a hybrid vsock: on the host its ports are Unix sockets.
//!
//! ```text
//! vsock.sock         the VMM listens; `CONNECT 1024\n` connects to the guest's port 1024, the response is `OK …\n`
//! vsock.sock_1025    the server of the guest's shares listens, if any; each connection is one of the guest's
//! vsock.sock_1024    the daemon listens; a guest's connection to its host's port 1024 arrives here
//! ```
//!
//! A connection to a guest whose agent does not listen yet is refused, and no event reports when to retry. So the
//! agent, once it listens, connects to its host and hangs up; the daemon waits for that.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::net::Shutdown;
use sandboxer_protocol::{boot::AGENT_VSOCK_PORT, share::VSOCK_PORT};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

use crate::jail_dir::JailDir;

/// Name of the VMM's socket in its jail directory.
pub const SOCKET: &str = "vsock.sock";
/// Maximum length of a response to `CONNECT`: "OK ", a port of up to ten digits, the end of the line.
const MAX_ANSWER: usize = 14;
/// Time limits for a response, in seconds; after each the attempt is repeated. A restored guest may receive `CONNECT`
/// before it listens to its vsock again; it never responds to this attempt, but to a later one.
const ANSWER_SECONDS: [u64; 6] = [1, 1, 2, 4, 8, 16];

/// How often an attempt is repeated that is refused, and after which time. A copy of a VM that was saved with a connection may still
/// have that one, and refuses a new one to which its VMM has given the same number. The next has another number.
const REFUSALS: u32 = 2;
const REFUSED: Duration = Duration::from_millis(20);

/// Returns the name of the daemon's socket.
pub fn announcements() -> String {
    format!("{SOCKET}_{AGENT_VSOCK_PORT}")
}

/// Returns the name of the socket on which a guest's file requests arrive.
pub fn shares() -> String {
    format!("{SOCKET}_{VSOCK_PORT}")
}

/// The connection to one guest's agent, which all clones share.
#[derive(Debug, Clone)]
pub struct Link {
    jail_dir: Arc<JailDir>,
    agent: Arc<AgentState>,
}

/// The state of the agent, as far as the daemon knows it.
#[derive(Debug)]
struct AgentState {
    announcements: UnixListener,
    /// Whether the agent may listen: it has announced itself, or may have done so before the daemon listened.
    listens: AtomicBool,
    /// A duplicate of the stream that was opened last.
    last: Mutex<Option<OwnedFd>>,
}

impl Link {
    /// Returns the link to a guest that is about to start.
    pub fn new(jail_dir: Arc<JailDir>) -> io::Result<Self> {
        Self::listening(jail_dir, false)
    }

    /// Returns the link to a guest that is already running.
    pub fn of_running(jail_dir: Arc<JailDir>) -> io::Result<Self> {
        Self::listening(jail_dir, true)
    }

    fn listening(jail_dir: Arc<JailDir>, listens: bool) -> io::Result<Self> {
        let announcements = jail_dir.listen(&announcements())?;
        announcements.set_nonblocking(true)?;
        Ok(Self {
            jail_dir,
            agent: Arc::new(AgentState {
                announcements: UnixListener::from_std(announcements)?,
                listens: AtomicBool::new(listens),
                last: Mutex::default(),
            }),
        })
    }

    /// Opens a stream to the agent as soon as it listens, and kills the previous stream.
    pub async fn stream(&self) -> io::Result<UnixStream> {
        self.cut();
        loop {
            if !self.agent.listens.load(Ordering::Relaxed) {
                self.agent.announcements.accept().await?;
                self.agent.listens.store(true, Ordering::Relaxed);
            }
            if let Some(stream) = self.attempts().await? {
                *self.agent.last.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(stream.as_fd().try_clone_to_owned()?);
                return Ok(stream);
            }
            self.agent.listens.store(false, Ordering::Relaxed);
        }
    }

    /// Closes the stream that was opened last, and waits until the guest has closed it, too.
    pub async fn close(&self) -> io::Result<()> {
        let Some(last) = self.last() else { return Ok(()) };
        match rustix::net::shutdown(&last, Shutdown::Write) {
            // The guest closed the stream first.
            Ok(()) | Err(rustix::io::Errno::NOTCONN) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut last = UnixStream::from_std(last.into())?;
        let mut rest = [0; 4096];
        loop {
            match last.read(&mut rest).await {
                Ok(0) => return Ok(()),
                Err(error) if is_disconnect(&error) => return Ok(()),
                read => read?,
            };
        }
    }

    fn last(&self) -> Option<OwnedFd> {
        self.agent.last.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn cut(&self) {
        if let Some(last) = self.last() {
            // A stream that is dead already is fine.
            let _ = rustix::net::shutdown(&last, Shutdown::Both);
        }
    }

    /// Connects as [`Link::connect`] does; retries an attempt without a response, up to a bound, and one that is refused.
    async fn attempts(&self) -> io::Result<Option<UnixStream>> {
        let mut refusals = 0;
        for limit in ANSWER_SECONDS.map(Duration::from_secs) {
            match tokio::time::timeout(limit, self.connect()).await {
                Ok(Ok(None)) if refusals < REFUSALS => {
                    refusals += 1;
                    tokio::time::sleep(REFUSED).await;
                }
                Ok(connected) => return connected,
                Err(_) => tracing::debug!(?limit, "agent did not answer CONNECT; retrying"),
            }
        }
        let (times, words) = (ANSWER_SECONDS.len(), "VMM did not answer CONNECT");
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("{words} in {times} attempts")))
    }

    /// Connects to the agent. `None`: no process listens in the guest.
    async fn connect(&self) -> io::Result<Option<UnixStream>> {
        let mut stream = self.jail_dir.connect(SOCKET)?;
        match stream.write_all(format!("CONNECT {AGENT_VSOCK_PORT}\n").as_bytes()).await {
            Err(error) if is_disconnect(&error) => return Ok(None),
            written => written?,
        }
        // Byte by byte, because what follows the line is for the agent's reader.
        let mut answer = Vec::with_capacity(MAX_ANSWER);
        while answer.last() != Some(&b'\n') && answer.len() < MAX_ANSWER {
            let mut byte = [0];
            match stream.read(&mut byte).await {
                Ok(0) => return Ok(None),
                Err(error) if is_disconnect(&error) => return Ok(None),
                read => read?,
            };
            answer.extend(byte);
        }
        match answer.starts_with(b"OK ") && answer.ends_with(b"\n") {
            true => Ok(Some(stream)),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("VMM answered CONNECT with {:?}", String::from_utf8_lossy(&answer)),
            )),
        }
    }
}

fn is_disconnect(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sandboxer_process::socket;
    use tokio::io::{AsyncBufReadExt, BufReader};

    use super::*;

    /// Starts a VMM that sends one of `answers` on each connection, in order, and then closes it.
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
        let link = Link::new(JailDir::at(dir.path())).unwrap();
        vmm(dir.path(), &["OK 1073741824\nhello", "OK 1073741825\n"]);
        {
            let early = link.stream();
            tokio::pin!(early);
            assert!(futures::poll!(&mut early).is_pending(), "connected before the agent listens");
        }
        announce(dir.path());
        let mut stream = link.stream().await.unwrap();
        let mut received = String::new();
        stream.read_to_string(&mut received).await.unwrap();
        assert_eq!(received, "hello");
        link.stream().await.expect("one announcement is enough");
    }

    #[tokio::test]
    async fn a_copy_that_has_a_connection_of_the_same_number_is_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let link = Link::of_running(JailDir::at(dir.path())).unwrap();
        vmm(dir.path(), &["", "OK 1\n"]);
        link.stream().await.unwrap();
    }

    #[tokio::test]
    async fn an_agent_that_doesnt_listen_yet_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        drop(Link::new(JailDir::at(dir.path())).unwrap());
        let link = Link::of_running(JailDir::at(dir.path())).unwrap();
        vmm(dir.path(), &["", "", "", "OK 1\n"]);
        announce(dir.path());
        link.stream().await.unwrap();
    }

    #[tokio::test]
    async fn rubbish_is_an_error() {
        for rubbish in ["no", "OK 1073741824073741824\n", "HTTP/1.1 200 \n"] {
            let dir = tempfile::tempdir().unwrap();
            let link = Link::of_running(JailDir::at(dir.path())).unwrap();
            vmm(dir.path(), Vec::leak(vec![rubbish]));
            match link.stream() {
                // Two bytes and the end, as if the agent did not listen, so the link waits.
                stream if rubbish == "no" => {
                    tokio::pin!(stream);
                    assert!(futures::poll!(&mut stream).is_pending());
                }
                stream => assert_eq!(stream.await.unwrap_err().kind(), io::ErrorKind::InvalidData),
            }
        }
    }

    /// As right after a restore, a connection never gets a response while the guest's vsock is being reset.
    #[tokio::test(start_paused = true)]
    async fn a_connect_that_is_never_answered_is_made_again_a_bounded_number_of_times() {
        let dir = tempfile::tempdir().unwrap();
        let link = Link::of_running(JailDir::at(dir.path())).unwrap();
        let listener = socket::listen(dir.path(), SOCKET).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = UnixListener::from_std(listener).unwrap();
        let guest = tokio::spawn(async move {
            let silent = listener.accept().await.unwrap().0;
            let mut answered = listener.accept().await.unwrap().0;
            answered.write_all(b"OK 7\n").await.unwrap();
            drop((silent, answered));
            let mut all = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                all.push(stream);
            }
        });
        link.stream().await.expect("the second attempt is answered");
        let error = link.stream().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        guest.abort();
    }

    #[tokio::test]
    async fn a_closed_stream_is_one_that_the_guest_has_let_go_of() {
        let dir = tempfile::tempdir().unwrap();
        let link = Link::of_running(JailDir::at(dir.path())).unwrap();
        link.close().await.expect("no stream is none to close");
        let listener = socket::listen(dir.path(), SOCKET).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = UnixListener::from_std(listener).unwrap();
        let (stream, accepted) = tokio::join!(link.stream(), async {
            let mut stream = listener.accept().await.unwrap().0;
            stream.write_all(b"OK 7\nlast words").await.unwrap();
            stream
        });
        let mut guest = BufReader::new(accepted);
        drop(stream.unwrap());
        let closing = link.close();
        tokio::pin!(closing);
        assert!(futures::poll!(&mut closing).is_pending(), "the guest still has it");
        let mut line = String::new();
        guest.read_line(&mut line).await.unwrap();
        assert_eq!(guest.read_line(&mut line).await.unwrap(), 0, "the guest is told that it ends");
        drop(guest);
        closing.await.unwrap();
    }
}
