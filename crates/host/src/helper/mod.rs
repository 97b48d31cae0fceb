//! Helpers: processes that access paths which may be on remote storage, on behalf of the daemon.
//!
//! ```text
//!  pod's task ──request──▶ helper ──▶ path ──▶ NFS, FUSE, a dead disk …
//!       ◀── DEADLINE_EXCEEDED ──┤ no response in time: killed; a helper that cannot be killed stays, and is counted
//! ```
//!
//! Access to an unresponsive file server blocks, often forever: no signal ends such a wait. So neither the
//! daemon's own threads access such paths, nor the few threads of its journal. A pod with a hung volume loses
//! a request; other pods lose nothing.
//!
//! Limits: the number of helpers of one pod, and of the node, hung ones included. A request for a path at
//! which a helper hangs fails at once, so retries cost nothing.

mod error;
mod message;
mod process;
mod wire;
mod work;

use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use protobuf::Message;
use sandboxer_protocol::{agent as wire_agent, id::SandboxId};
use sandboxer_share::attach::{Access, Tree};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit},
    time::Instant,
};

use self::{
    process::{End, Helper, start, start_thread},
    wire::Frame,
    work::Answer,
};
use super::{
    rootfs::{Chain, FsType},
    volume::Bound,
};

pub use self::{
    error::HelperError,
    work::{Request, serve},
};

/// The option that runs the daemon's program as a helper, with its socket as standard input.
pub const OPTION: &str = "path-helper";
/// Most helpers of one pod, including hung ones.
const MAX_OF_POD: usize = 4;
/// Most helpers of the node, including hung ones. Each takes about a MiB.
const MAX_OF_NODE: usize = 256;
/// Most helpers that work at once. A helper no longer counts after [`QUICK`]: it waits for storage.
const WORKING: usize = 8;
/// Most requests take less than a tenth of it.
const QUICK: Duration = Duration::from_millis(200);
/// Idle helpers that are kept for the next request; they exit after a while.
const KEPT: usize = 2;

/// The helpers of the node. Clones share them.
#[derive(Debug, Clone)]
pub struct Helpers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The daemon's own program; `None`: helpers are threads, for tests.
    program: Option<PathBuf>,
    /// Timeout of most requests.
    limit: Duration,
    working: Semaphore,
    // Held for look-ups in memory only.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Helper>,
    /// Number of running or hung helpers.
    running: usize,
    /// Each pod's permits, while they are used.
    pods: HashMap<SandboxId, Weak<Semaphore>>,
    /// Paths at which a helper hangs, and since when.
    hung: HashMap<PathBuf, Instant>,
}

/// Counts a helper until dropped.
struct Counted(Helpers);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.state().running -= 1;
    }
}

impl Helpers {
    /// Creates an empty set. `program` is the daemon's own; without it helpers are threads, which cannot be
    /// killed. `limit` is the timeout of most requests.
    pub fn new(program: Option<PathBuf>, limit: Duration) -> Self {
        let working = Semaphore::new(WORKING);
        Self(Arc::new(Inner { program, limit, working, state: Mutex::default() }))
    }

    /// Returns the number of hung helpers.
    pub fn hung(&self) -> usize {
        self.state().hung.len()
    }

    /// Examines a bind mount; returns its properties, and the content of a file that is copied.
    pub async fn look(
        &self,
        pod: &SandboxId,
        mount: &oci_spec::runtime::Mount,
    ) -> Result<(Bound, Vec<u8>), HelperError> {
        let (bound, frame) = self.ask(pod, Request::Look { mount: Box::new(mount.clone()) }).await?;
        Ok((bound, frame.bytes))
    }

    /// Reads the files of a directory that kubelet writes; `None` if the directory is gone.
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
        tree.map(Some).map_err(|error| HelperError::Broken {
            pod: pod.clone(),
            action: "read",
            path: dir.to_owned(),
            source: io::Error::other(error),
        })
    }

    /// Returns the owner of a directory.
    pub async fn owner(&self, pod: &SandboxId, dir: &Path) -> Result<wire_agent::Owner, HelperError> {
        let ((mode, uid, gid), _) = self.ask(pod, Request::Owner { dir: dir.to_owned() }).await?;
        Ok(wire_agent::Owner { mode, uid, gid, ..Default::default() })
    }

    /// Adds a watch on a directory to an inotify instance; returns its number.
    pub async fn watch(&self, pod: &SandboxId, dir: &Path, instance: OwnedFd) -> Result<i32, HelperError> {
        let request = Request::Watch { dir: dir.to_owned() };
        Ok(self.ask_with(pod, request, Vec::new(), Some(instance)).await?.0)
    }

    /// Clones the mount of a share's source.
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

    /// Writes a termination message to the file at `path`.
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

    /// Returns the key of a chain of layers.
    pub async fn layers_key(&self, pod: &SandboxId, chain: Chain) -> Result<String, HelperError> {
        Ok(self.ask(pod, Request::LayersKey { chain }).await?.0)
    }

    /// Returns whether a layer is empty.
    pub async fn is_layer_empty(&self, pod: &SandboxId, dir: PathBuf) -> Result<bool, HelperError> {
        Ok(self.ask(pod, Request::IsLayerEmpty { dir }).await?.0)
    }

    /// Checks the superblock of an image.
    pub async fn check_image(
        &self,
        pod: &SandboxId,
        path: PathBuf,
        fstype: FsType,
    ) -> Result<(), HelperError> {
        let ((), _) = self.ask(pod, Request::CheckImage { path, fstype }).await?;
        Ok(())
    }

    /// Sends a request without content or descriptor; returns the result and the frame that it came in.
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
        let json = serde_json::to_vec(&request).map_err(|error| HelperError::Broken {
            pod: pod.clone(),
            action: request.action(),
            path: request.path().to_owned(),
            source: error.into(),
        })?;
        let asked = Asked { pod: pod.clone(), request, frame: Frame { json, bytes, descriptor } };
        // Completes even if the caller is dropped: a helper with an unread response could not be used again.
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

        let mut helper = self.helper(true).await.map_err(|source| asked.broken(source))?;
        let deadline = Instant::now() + limit;
        loop {
            match answer(&asked, &mut helper, deadline, &mut working).await {
                Some(Ok(Some(frame))) => {
                    self.keep(helper);
                    return Ok(frame);
                }
                // An idle helper may have exited just now.
                Some(Ok(None) | Err(_)) if helper.used => {
                    helper = self.helper(false).await.map_err(|source| asked.broken(source))?;
                }
                Some(ended) => {
                    helper.end.kill();
                    let source = ended.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
                    return Err(asked.broken(source));
                }
                None => return Err(self.give_up(&asked, helper.end, (place, counted), limit)),
            }
        }
    }

    /// Kills a helper that does not respond. Until it exits it keeps its permits, and its path counts as
    /// hung.
    fn give_up(
        &self,
        asked: &Asked,
        end: End,
        held: (OwnedSemaphorePermit, Counted),
        waited: Duration,
    ) -> HelperError {
        let error = asked.silent(waited);
        tracing::warn!(pod = %asked.pod, path = ?asked.request.path(), "file server of a volume does not respond");
        let path = asked.request.path().to_owned();
        self.state()
            .hung
            .insert(path.clone(), Instant::now().checked_sub(waited).unwrap_or_else(Instant::now));
        end.kill();
        let helpers = self.clone();
        tokio::spawn(async move {
            end.exited().await;
            helpers.state().hung.remove(&path);
            drop(held);
        });
        error
    }

    /// Waits for a permit of the pod.
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
        places.acquire_owned().await.unwrap_or_else(|_| unreachable!("it is never closed"))
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

    /// Returns an idle helper, or starts a new one.
    async fn helper(&self, kept: bool) -> io::Result<Helper> {
        let idle = if kept { self.state().idle.pop() } else { None };
        match (idle, self.0.program.clone()) {
            (Some(helper), _) => Ok(helper),
            (None, Some(program)) => {
                let started = tokio::task::spawn_blocking(move || start(&program)).await;
                started.unwrap_or_else(|ended| Err(io::Error::other(ended)))
            }
            (None, None) => start_thread(),
        }
    }

    fn keep(&self, helper: Helper) {
        let mut state = self.state();
        if state.idle.len() < KEPT {
            state.idle.push(Helper { used: true, ..helper });
        }
        // Others exit when their connection closes.
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state half-changed.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends a request and receives the response; `None` after `deadline`. Releases the permit of working helpers
/// after [`QUICK`].
async fn answer(
    asked: &Asked,
    helper: &mut Helper,
    deadline: Instant,
    working: &mut Option<SemaphorePermit<'_>>,
) -> Option<io::Result<Option<Frame>>> {
    let answer = async {
        asked.frame.send_from_task(&mut helper.stream).await?;
        Frame::receive_in_task(&mut helper.stream).await
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

/// A request, and the pod that it is for.
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
