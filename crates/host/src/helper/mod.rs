//! Helpers: processes that touch paths which may lead to somebody's storage, in the daemon's place.
//!
//! ```text
//!  pod's task ──request──▶ helper ──▶ path ──▶ NFS, FUSE, a dead disk …
//!       ◀── DEADLINE_EXCEEDED ──┤ no answer in time: killed; what can't be killed is left behind, and counted
//! ```
//!
//! A server that does not answer stops whoever asks it, often for good: no signal ends such a wait. So neither the
//! daemon's own threads ask nor the few that its journal needs. A pod whose volume hangs loses a request; other pods
//! lose nothing.
//!
//! Bounds: of one pod so many helpers run or hang at a time, of the node so many. A path at which a helper still hangs
//! is refused at once, so that trying again costs nothing.

mod message;
mod wire;
mod work;

use std::{
    collections::HashMap,
    io,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream as StdStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::Duration,
};

use protobuf::Message;
use rustix::process::{Pid, Signal, kill_process_group};
use sandboxer_base::Code;
use sandboxer_protocol::{agent as wire_agent, id::SandboxId};
use sandboxer_share::attach::{Access, Tree};
use serde::de::DeserializeOwned;
use tokio::{
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, oneshot},
    time::Instant,
};

use self::{
    wire::Frame,
    work::{Answer, Refusal},
};
use super::{
    rootfs::{Chain, FsType},
    volume::Bound,
};

pub use self::work::{Request, serve};

/// The option that makes the daemon's program a helper, with its socket as standard input.
pub const OPTION: &str = "path-helper";
/// Helpers that one pod may have, hung ones among them.
const MAX_OF_POD: usize = 4;
/// Helpers that all pods together may have, hung ones among them. Each takes about a MiB.
const MAX_OF_NODE: usize = 256;
/// Helpers that work at once. One that works for longer than [`QUICK`] no longer counts: it waits for somebody.
const WORKING: usize = 8;
/// Most looks take less than a tenth of it.
const QUICK: Duration = Duration::from_millis(200);
/// Helpers that are kept for the next request; they end by themselves after a while.
const KEPT: usize = 2;

/// Why a helper's work failed.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// The path's server does not answer.
    #[error(
        "cannot {action} {path:?} for pod {pod}: the server of this volume does not answer (waited {waited:?}); \
         check the server, or unmount the volume with umount -f"
    )]
    Silent {
        /// The pod.
        pod: SandboxId,
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// How long was waited, by this request or an earlier one.
        waited: Duration,
    },
    /// Too many helpers wait already.
    #[error(
        "cannot {action} {path:?} for pod {pod}: {most} helpers of {whose} wait for volumes already; check their servers"
    )]
    TooMany {
        /// The pod.
        pod: SandboxId,
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The bound.
        most: usize,
        /// "this pod", "this node".
        whose: &'static str,
    },
    /// It can't be done.
    #[error("{text}")]
    Refused {
        /// The code to answer with.
        code: Code,
        /// Why, in full.
        text: String,
    },
    /// The helper itself failed.
    #[error("cannot {action} {path:?} for pod {pod}: the helper process failed")]
    Broken {
        /// The pod.
        pod: SandboxId,
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
    /// The daemon is ending.
    #[error("the daemon is stopping")]
    Stopped,
}

impl HelperError {
    /// Returns the code to answer with.
    pub fn code(&self) -> Code {
        match self {
            Self::Silent { .. } | Self::TooMany { .. } => Code::DeadlineExceeded,
            Self::Refused { code, .. } => *code,
            Self::Broken { .. } | Self::Stopped => Code::Internal,
        }
    }
}

impl From<Refusal> for HelperError {
    fn from(Refusal { code, text }: Refusal) -> Self {
        Self::Refused { code, text }
    }
}

/// The helpers of the node. Clones mean the same.
#[derive(Debug, Clone)]
pub struct Helpers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The daemon's own program; none: helpers are threads, for tests.
    program: Option<PathBuf>,
    /// How long a look may take.
    limit: Duration,
    working: Semaphore,
    // Held for look-ups in memory only.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Line>,
    /// Helpers that run or hang.
    running: usize,
    /// Each pod's places, as long as somebody uses them.
    pods: HashMap<SandboxId, Weak<Semaphore>>,
    /// Paths at which a helper hangs, and since when.
    hung: HashMap<PathBuf, Instant>,
}

/// A helper that has nothing to do, or is being asked.
#[derive(Debug)]
struct Line {
    stream: UnixStream,
    end: End,
    /// It has done something before.
    used: bool,
}

/// How a helper is ended, and its end seen.
#[derive(Debug)]
enum End {
    Process(sandboxer_process::Process),
    Thread(oneshot::Receiver<()>),
}

impl End {
    fn kill(&self) {
        let Self::Process(process) = self else { return };
        // It leads a group: programs that it runs end with it. One that has ended has no group.
        if let Some(pid) = i32::try_from(process.pid()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }

    async fn seen(self) {
        match self {
            Self::Process(process) => drop(process.exited().await),
            // An error says so, too.
            Self::Thread(ended) => drop(ended.await),
        }
    }
}

/// Counts a helper until dropped.
struct Counted(Helpers);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.state().running -= 1;
    }
}

impl Helpers {
    /// None yet. `program`: the daemon's own; without it helpers are threads, which can't be killed. A look may take as
    /// long as `limit`.
    pub fn new(program: Option<PathBuf>, limit: Duration) -> Self {
        let working = Semaphore::new(WORKING);
        Self(Arc::new(Inner { program, limit, working, state: Mutex::default() }))
    }

    /// Helpers that hang now.
    pub fn hung(&self) -> usize {
        self.state().hung.len()
    }

    /// Returns what a bind mount shows, and the content of a file that is to be copied.
    pub async fn look(
        &self,
        pod: &SandboxId,
        mount: &oci_spec::runtime::Mount,
    ) -> Result<(Bound, Vec<u8>), HelperError> {
        let (bound, frame) = self.ask(pod, Request::Look { mount: Box::new(mount.clone()) }).await?;
        Ok((bound, frame.bytes))
    }

    /// Returns the files of a directory that kubelet writes; none if the directory is gone.
    pub async fn read_tree(
        &self,
        pod: &SandboxId,
        dir: &Path,
    ) -> Result<Option<wire_agent::Tree>, HelperError> {
        let request = Request::ReadTree { dir: dir.to_owned() };
        let (there, frame): (bool, _) = self.ask(pod, request).await?;
        if !there {
            return Ok(None);
        }
        let tree = wire_agent::Tree::parse_from_bytes(&frame.bytes);
        tree.map(Some).map_err(|error| HelperError::Refused { code: Code::Internal, text: error.to_string() })
    }

    /// Returns whose a directory is.
    pub async fn owner(&self, pod: &SandboxId, dir: &Path) -> Result<wire_agent::Owner, HelperError> {
        let ((mode, uid, gid), _) = self.ask(pod, Request::Owner { dir: dir.to_owned() }).await?;
        Ok(wire_agent::Owner { mode, uid, gid, ..Default::default() })
    }

    /// Adds a watch on a directory to an inotify instance; answers its number.
    pub async fn watch(&self, pod: &SandboxId, dir: &Path, instance: OwnedFd) -> Result<i32, HelperError> {
        let request = Request::Watch { dir: dir.to_owned() };
        Ok(self.ask_with(pod, request, Vec::new(), Some(instance)).await?.0)
    }

    /// Takes a mount of what is to be shared.
    pub async fn take_share(
        &self,
        pod: &SandboxId,
        source: &Path,
        access: Access,
        follows_mounts: bool,
    ) -> Result<Tree, HelperError> {
        let request = Request::TakeShare { source: source.to_owned(), access, follows_mounts };
        let (is_dir, frame) = self.ask(pod, request).await?;
        let mount = frame.descriptor.ok_or(HelperError::Stopped)?;
        Ok(Tree { mount, is_dir })
    }

    /// Puts a message into the file at `path`.
    pub async fn write_message(
        &self,
        pod: &SandboxId,
        path: &Path,
        message: Vec<u8>,
    ) -> Result<(), HelperError> {
        let request = Request::WriteMessage { path: path.to_owned() };
        let ((), _) = self.ask_with(pod, request, message, None).await?;
        Ok(())
    }

    /// Returns what tells a chain of layers from others.
    pub async fn layers_key(&self, pod: &SandboxId, chain: Chain) -> Result<String, HelperError> {
        Ok(self.ask(pod, Request::LayersKey { chain }).await?.0)
    }

    /// Returns whether a layer is empty.
    pub async fn is_layer_empty(&self, pod: &SandboxId, dir: PathBuf) -> Result<bool, HelperError> {
        Ok(self.ask(pod, Request::IsLayerEmpty { dir }).await?.0)
    }

    /// Looks at the superblock of an image.
    pub async fn check_image(
        &self,
        pod: &SandboxId,
        path: PathBuf,
        fstype: FsType,
    ) -> Result<(), HelperError> {
        let ((), _) = self.ask(pod, Request::CheckImage { path, fstype }).await?;
        Ok(())
    }

    /// Asks for something that needs nothing but words.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        pod: &SandboxId,
        request: Request,
    ) -> Result<(T, Frame), HelperError> {
        self.ask_with(pod, request, Vec::new(), None).await
    }

    async fn ask_with<T: DeserializeOwned>(
        &self,
        pod: &SandboxId,
        request: Request,
        bytes: Vec<u8>,
        descriptor: Option<OwnedFd>,
    ) -> Result<(T, Frame), HelperError> {
        let json = serde_json::to_vec(&request)
            .map_err(|error| HelperError::Refused { code: Code::Internal, text: error.to_string() })?;
        let asked = Asked { pod: pod.clone(), request, frame: Frame { json, bytes, descriptor } };
        // To its end, whoever waits: a helper whose answer nobody reads is of no use to the next.
        let helpers = self.clone();
        let answered = tokio::spawn(async move { helpers.exchange(asked).await }).await;
        let frame = answered.unwrap_or(Err(HelperError::Stopped))?;
        match work::parse(&frame.json)? {
            Answer::Done(done) => Ok((done, frame)),
            Answer::Refused(refusal) => Err(refusal.into()),
        }
    }

    async fn exchange(&self, asked: Asked) -> Result<Frame, HelperError> {
        let limit = asked.request.limit(self.0.limit);
        if let Some(since) = self.state().hung.get(asked.request.path()) {
            return Err(asked.silent(since.elapsed()));
        }
        let place = tokio::time::timeout(limit, self.place(&asked.pod)).await;
        let place = place.map_err(|_| asked.too_many(MAX_OF_POD, "this pod"))?;
        let counted = self.count().ok_or_else(|| asked.too_many(MAX_OF_NODE, "this node"))?;
        let working = self.0.working.acquire().await.map_err(|_| HelperError::Stopped)?;
        let mut working = Some(working);

        let mut line = self.line(true).await.map_err(|source| asked.broken(source))?;
        let deadline = Instant::now() + limit;
        loop {
            match answer(&asked, &mut line, deadline, &mut working).await {
                Some(Ok(Some(frame))) => {
                    self.keep(line);
                    return Ok(frame);
                }
                // One that was kept may have ended just now.
                Some(Ok(None) | Err(_)) if line.used => {
                    line = self.line(false).await.map_err(|source| asked.broken(source))?;
                }
                Some(ended) => {
                    line.end.kill();
                    let source = ended.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
                    return Err(asked.broken(source));
                }
                None => return Err(self.give_up(&asked, line.end, (place, counted), limit)),
            }
        }
    }

    /// Kills a helper that does not answer. Until it is gone it keeps its place, and its path is known to hang.
    fn give_up(
        &self,
        asked: &Asked,
        end: End,
        held: (OwnedSemaphorePermit, Counted),
        waited: Duration,
    ) -> HelperError {
        let error = asked.silent(waited);
        tracing::warn!(pod = %asked.pod, path = ?asked.request.path(), "a volume's server does not answer");
        let path = asked.request.path().to_owned();
        self.state()
            .hung
            .insert(path.clone(), Instant::now().checked_sub(waited).unwrap_or_else(Instant::now));
        end.kill();
        let helpers = self.clone();
        tokio::spawn(async move {
            end.seen().await;
            helpers.state().hung.remove(&path);
            drop(held);
        });
        error
    }

    /// Returns a place among its pod's helpers.
    async fn place(&self, pod: &SandboxId) -> OwnedSemaphorePermit {
        let places = {
            let mut state = self.state();
            match state.pods.get(pod).and_then(Weak::upgrade) {
                Some(places) => places,
                None => {
                    let places = Arc::new(Semaphore::new(MAX_OF_POD));
                    state.pods.retain(|_, places| places.strong_count() > 0);
                    state.pods.insert(pod.clone(), Arc::downgrade(&places));
                    places
                }
            }
        };
        places.acquire_owned().await.unwrap_or_else(|_| unreachable!("nobody closes it"))
    }

    fn count(&self) -> Option<Counted> {
        let mut state = self.state();
        if state.running >= MAX_OF_NODE {
            return None;
        }
        state.running += 1;
        drop(state);
        Some(Counted(self.clone()))
    }

    /// Returns a helper that was kept, or a new one.
    async fn line(&self, kept: bool) -> io::Result<Line> {
        let idle = if kept { self.state().idle.pop() } else { None };
        match (idle, self.0.program.clone()) {
            (Some(line), _) => Ok(line),
            (None, Some(program)) => {
                let started = tokio::task::spawn_blocking(move || start(&program)).await;
                started.unwrap_or_else(|ended| Err(io::Error::other(ended)))
            }
            (None, None) => start_thread(),
        }
    }

    fn keep(&self, line: Line) {
        let mut state = self.state();
        if state.idle.len() < KEPT {
            state.idle.push(Line { used: true, ..line });
        }
        // The others end when their line does.
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under it leaves it half-done.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns what a helper answers until `deadline`; none: nothing. It is soon counted no more among those that work.
async fn answer(
    asked: &Asked,
    line: &mut Line,
    deadline: Instant,
    working: &mut Option<SemaphorePermit<'_>>,
) -> Option<io::Result<Option<Frame>>> {
    let answer = async {
        asked.frame.send_from_task(&mut line.stream).await?;
        Frame::receive_in_task(&mut line.stream).await
    };
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => Some(answer),
        () = tokio::time::sleep(QUICK) => {
            *working = None;
            tokio::time::timeout_at(deadline, &mut answer).await.ok()
        }
    }
}

/// A request, and who makes it.
struct Asked {
    pod: SandboxId,
    request: Request,
    frame: Frame,
}

impl Asked {
    fn silent(&self, waited: Duration) -> HelperError {
        let (pod, path) = (self.pod.clone(), self.request.path().to_owned());
        HelperError::Silent { pod, action: self.request.action(), path, waited }
    }

    fn too_many(&self, most: usize, whose: &'static str) -> HelperError {
        let (pod, path) = (self.pod.clone(), self.request.path().to_owned());
        HelperError::TooMany { pod, action: self.request.action(), path, most, whose }
    }

    fn broken(&self, source: io::Error) -> HelperError {
        let (pod, path) = (self.pod.clone(), self.request.path().to_owned());
        HelperError::Broken { pod, action: self.request.action(), path, source }
    }
}

/// Starts a helper process. Blocks for the time of a fork; inside a runtime.
fn start(program: &Path) -> io::Result<Line> {
    let (ours, theirs) = StdStream::pair()?;
    ours.set_nonblocking(true)?;
    let child = Command::new(program)
        .arg(format!("--{OPTION}"))
        .current_dir("/")
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        // Leads a group, so that what it runs can be ended with it.
        .process_group(0)
        .spawn()?;
    let end = End::Process(sandboxer_process::child(child.id())?);
    Ok(Line { stream: UnixStream::from_std(ours)?, end, used: false })
}

/// Starts a helper as a thread.
fn start_thread() -> io::Result<Line> {
    let (ours, theirs) = StdStream::pair()?;
    ours.set_nonblocking(true)?;
    let (alive, ended) = oneshot::channel::<()>();
    thread::Builder::new().name("helper".to_owned()).spawn(move || {
        // Whoever asked sees the end of the stream.
        let _ = serve(theirs);
        drop(alive);
    })?;
    Ok(Line { stream: UnixStream::from_std(ours)?, end: End::Thread(ended), used: false })
}
