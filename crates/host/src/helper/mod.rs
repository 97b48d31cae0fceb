//! Helpers: processes that, on behalf of the daemon, access paths that may be on remote storage.
//!
//! ```text
//!  pod's task ──request──▶ helper ──▶ path ──▶ NFS, FUSE, a dead disk …
//!       ◀── DEADLINE_EXCEEDED ──┤ no response in time: killed; a helper that cannot be killed stays, and is counted
//! ```
//!
//! Access to an unresponsive file server blocks, often forever: no signal ends such a wait. So neither the daemon's own
//! threads nor the few threads of its journal access such paths. A pod with a hung volume loses a request; other pods
//! lose nothing.
//!
//! Limits: the number of helpers of one pod, hung ones included, and those of [`places`]. A request for a path at which
//! a helper hangs fails at once, so retries cost nothing.

mod error;
mod message;
mod places;
mod process;
mod wire;
mod work;

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use protobuf::Message;
use sandboxer_protocol::{agent as wire_agent, id::SandboxId};
use sandboxer_share::attach::{Access, Tree};
use sandboxer_vmm::DiskFile;
use serde::de::DeserializeOwned;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit},
    time::Instant,
};

use self::{
    places::{FileSystem, Namespace, Places},
    process::{End, Helper, start, start_thread},
    wire::Frame,
    work::Answer,
};
use super::{
    rootfs::{Chain, FsType},
    volume::{self, Kubelet, Looked},
};

use self::work::Request;
pub use self::{error::HelperError, work::serve};

/// The option that runs the daemon's program as a helper, with its socket as standard input.
pub const OPTION: &str = "path-helper";
/// Most helpers of one pod, including hung ones.
const MAX_OF_POD: usize = 4;
/// The most helpers that work at once. After [`QUICK`] a helper no longer counts: it waits for storage.
const WORKING: usize = 8;
/// A time of which most requests take less than a tenth.
const QUICK: Duration = Duration::from_millis(200);
/// The number of idle helpers kept for the next request; they exit after a while.
const MAX_IDLE: usize = 2;

/// The helpers of the node, on behalf of one pod. Clones share them.
#[derive(Debug, Clone)]
pub struct Helpers {
    inner: Arc<Inner>,
    /// The properties by which the pod's own paths are recognized.
    kubelet: Kubelet,
}

#[derive(Debug)]
struct Inner {
    /// The daemon's own program; `None`: helpers are threads, for tests.
    program: Option<PathBuf>,
    /// Timeout of most requests.
    limit: Duration,
    working: Semaphore,
    namespaces: OnceLock<Namespaces>,
    // The lock is held for look-ups in memory only.
    state: Mutex<State>,
}

/// The function that returns the namespace of a pod.
struct Namespaces(Box<NamespaceOf>);

/// A function that returns the namespace of a pod, if the pod is known.
type NamespaceOf = dyn Fn(&SandboxId) -> Option<Namespace> + Send + Sync;

impl fmt::Debug for Namespaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Namespaces")
    }
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Helper>,
    places: Places,
    /// Each pod's permits, while they are used.
    pods: HashMap<SandboxId, Weak<Semaphore>>,
    /// Paths at which a helper hangs, and since when.
    hung: HashMap<PathBuf, Instant>,
}

/// The files of a directory that kubelet writes.
#[derive(Debug)]
pub enum TreeRead {
    /// The directory is gone.
    Gone,
    /// The directory looks as it did.
    Same,
    /// The directory was read.
    Tree {
        /// The files.
        tree: wire_agent::Tree,
        /// The stamp of the directory; `None`: its appearance does not show whether its files changed.
        stamp: Option<u64>,
    },
}

/// Counts a helper until dropped.
struct CountGuard {
    helpers: Helpers,
    namespace: Namespace,
    hung_at: Option<FileSystem>,
}

impl CountGuard {
    /// Counts the helper as hung from now on.
    fn hang(&mut self, at: FileSystem) {
        self.helpers.state().places.hang(&self.namespace, at.clone());
        self.hung_at = Some(at);
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.helpers.state().places.free(&self.namespace, self.hung_at.as_ref());
    }
}

impl Helpers {
    /// Creates an empty set, on behalf of no pod. `program` is the daemon's own program; without it helpers are
    /// threads, which cannot be killed. `limit` is the timeout of most requests.
    pub fn new(program: Option<PathBuf>, limit: Duration) -> Self {
        let working = Semaphore::new(WORKING);
        let namespaces = OnceLock::new();
        let inner = Arc::new(Inner { program, limit, working, namespaces, state: Mutex::default() });
        Self { inner, kubelet: Kubelet::default() }
    }

    /// Returns the same helpers, for pods of the kubelet with this root directory.
    pub fn with_kubelet_root(mut self, root: &Path) -> Self {
        self.kubelet.root = root.to_owned();
        self
    }

    /// Returns the same helpers on behalf of the pod with this Kubernetes uid.
    pub fn on_behalf_of(&self, uid: &str) -> Self {
        let mut helpers = self.clone();
        uid.clone_into(&mut helpers.kubelet.uid);
        helpers
    }

    /// Sets the function that returns a pod's namespace; only the first call counts. Until then, and for a pod that
    /// `namespace_of` does not know, each pod is a namespace of its own.
    pub fn know_namespaces(
        &self,
        namespace_of: impl Fn(&SandboxId) -> Option<Arc<str>> + Send + Sync + 'static,
    ) {
        // The first function stays.
        let _ = self.inner.namespaces.set(Namespaces(Box::new(namespace_of)));
    }

    /// Returns the number of hung helpers.
    pub fn hung(&self) -> usize {
        self.state().hung.len()
    }

    /// Examines a bind mount.
    pub async fn look(
        &self,
        pod: &SandboxId,
        mount: &oci_spec::runtime::Mount,
    ) -> Result<Looked, HelperError> {
        let request = Request::Look { mount: Box::new(mount.clone()), kubelet: self.kubelet.clone() };
        let (bound, frame) = self.ask(pod, request).await?;
        Ok(Looked { bound, content: frame.bytes, source: frame.descriptor })
    }

    /// Reads the files of a directory that kubelet writes, unless it looks as it did at `stamp`.
    pub async fn read_tree(
        &self,
        pod: &SandboxId,
        dir: &Path,
        stamp: Option<u64>,
    ) -> Result<TreeRead, HelperError> {
        let request = Request::ReadTree { dir: dir.to_owned(), unless: stamp, kubelet: self.kubelet.clone() };
        let (read, frame): (work::Read, _) = self.ask(pod, request).await?;
        let stamp = match read {
            work::Read::Gone => return Ok(TreeRead::Gone),
            work::Read::Same => return Ok(TreeRead::Same),
            work::Read::Tree(stamp) => stamp,
        };
        match wire_agent::Tree::parse_from_bytes(&frame.bytes) {
            Ok(tree) => Ok(TreeRead::Tree { tree, stamp }),
            Err(error) => Err(HelperError::Broken {
                pod: pod.clone(),
                action: "read",
                path: dir.to_owned(),
                source: io::Error::other(error),
            }),
        }
    }

    /// Returns the owner of a directory.
    pub async fn owner(&self, pod: &SandboxId, dir: &Path) -> Result<wire_agent::Owner, HelperError> {
        let request = Request::Owner { dir: dir.to_owned(), kubelet: self.kubelet.clone() };
        let ((mode, uid, gid), _) = self.ask(pod, request).await?;
        Ok(wire_agent::Owner { mode, uid, gid, ..Default::default() })
    }

    /// Adds a watch on a directory to an inotify instance; returns its number.
    pub async fn watch(&self, pod: &SandboxId, dir: &Path, instance: OwnedFd) -> Result<i32, HelperError> {
        let request = Request::Watch { dir: dir.to_owned(), kubelet: self.kubelet.clone() };
        Ok(self.ask_with(pod, request, Vec::new(), Some(instance)).await?.0)
    }

    /// Opens the disk of the emptyDir at `dir`; creates it unless it exists, as a copy of `empty` or a new one of
    /// `bytes`.
    pub async fn disk(
        &self,
        pod: &SandboxId,
        dir: &Path,
        bytes: u64,
        empty: Option<&File>,
    ) -> Result<DiskFile, HelperError> {
        let request = Request::Disk { dir: dir.to_owned(), bytes, kubelet: self.kubelet.clone() };
        let empty = empty.map(|empty| empty.try_clone().map(OwnedFd::from)).transpose();
        let empty = empty.map_err(|source| HelperError::Broken {
            pod: pod.clone(),
            action: request.action(),
            path: dir.to_owned(),
            source,
        })?;
        self.opened(pod, request, dir.join(volume::DISK), empty).await
    }

    /// Opens a block device.
    pub async fn device(
        &self,
        pod: &SandboxId,
        path: &Path,
        read_only: bool,
    ) -> Result<DiskFile, HelperError> {
        let request = Request::Device { path: path.to_owned(), read_only };
        self.opened(pod, request, path.to_owned(), None).await
    }

    /// Clones the mount of a share's source, which [`Helpers::look`] found at `path`.
    pub async fn take_share(
        &self,
        pod: &SandboxId,
        path: &Path,
        source: OwnedFd,
        access: Access,
        follows_mounts: bool,
    ) -> Result<Tree, HelperError> {
        let request = Request::TakeShare { path: path.to_owned(), access, follows_mounts };
        let (is_dir, frame) = self.ask_with(pod, request, Vec::new(), Some(source)).await?;
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
        let request = Request::WriteMessage { path: path.to_owned(), kubelet: self.kubelet.clone() };
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

    /// Opens an image, and checks its superblock.
    pub async fn image(
        &self,
        pod: &SandboxId,
        path: PathBuf,
        fstype: FsType,
        read_only: bool,
    ) -> Result<DiskFile, HelperError> {
        let request = Request::Image { path: path.clone(), fstype, read_only };
        self.opened(pod, request, path, None).await
    }

    /// Opens a snapshotter's writable file system; creates one of `bytes` unless it exists.
    pub async fn scratch(&self, pod: &SandboxId, path: PathBuf, bytes: u64) -> Result<DiskFile, HelperError> {
        let request = Request::Scratch { path: path.clone(), bytes };
        self.opened(pod, request, path, None).await
    }

    /// Sends a request whose response is an open disk, at `name`.
    async fn opened(
        &self,
        pod: &SandboxId,
        request: Request,
        name: PathBuf,
        descriptor: Option<OwnedFd>,
    ) -> Result<DiskFile, HelperError> {
        let action = request.action();
        let ((), frame) = self.ask_with(pod, request, Vec::new(), descriptor).await?;
        let opened = frame.descriptor.ok_or_else(|| io::ErrorKind::NotFound.into());
        let path = name.clone();
        opened.and_then(|opened| DiskFile::new(opened.into(), name)).map_err(|source| HelperError::Broken {
            pod: pod.clone(),
            action,
            path,
            source,
        })
    }

    /// Sends a request without content or descriptor; returns the result, and the frame of the response.
    async fn ask<T: DeserializeOwned>(
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
        let call = Call { pod: pod.clone(), request, frame: Frame { json, bytes, descriptor } };
        // Completes even if the caller is dropped: a helper with an unread response could not be used again.
        let helpers = self.clone();
        let answered = tokio::spawn(async move { helpers.exchange(call).await }).await;
        let frame = answered.unwrap_or(Err(HelperError::Stopped))?;
        match work::parse(&frame.json)? {
            Answer::Done(done) => Ok((done, frame)),
            Answer::Refused(refusal) => Err(refusal.into()),
        }
    }

    async fn exchange(&self, call: Call) -> Result<Frame, HelperError> {
        let limit = call.request.limit(self.inner.limit);
        if let Some(since) = self.state().hung.get(call.request.path()) {
            return Err(call.silent(since.elapsed()));
        }
        let permit = tokio::time::timeout(limit, self.pod_permit(&call.pod)).await;
        let permit = permit.map_err(|_| call.too_many(MAX_OF_POD, "this pod"))?;
        let guard = self.count_guard(&call).await?;
        let working = self.inner.working.acquire().await.map_err(|_| HelperError::Stopped)?;
        let mut working = Some(working);

        let mut helper = self.helper(true).await.map_err(|source| call.broken(source))?;
        let deadline = Instant::now() + limit;
        loop {
            match answer(&call, &mut helper, deadline, &mut working).await {
                Some(Ok(Some(frame))) => {
                    self.keep(helper);
                    return Ok(frame);
                }
                // An idle helper may have exited just now.
                Some(Ok(None) | Err(_)) if helper.used => {
                    helper = self.helper(false).await.map_err(|source| call.broken(source))?;
                }
                Some(ended) => {
                    helper.end.kill();
                    let source = ended.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
                    return Err(call.broken(source));
                }
                None => {
                    let mut guard = guard;
                    guard.hang(file_system(call.request.path()).await);
                    return Err(self.give_up(&call, helper.end, (permit, guard), limit));
                }
            }
        }
    }

    /// Kills a helper that does not respond. Until it exits it keeps its permits, and its path counts as hung.
    fn give_up(
        &self,
        call: &Call,
        end: End,
        permits: (OwnedSemaphorePermit, CountGuard),
        elapsed: Duration,
    ) -> HelperError {
        let error = call.silent(elapsed);
        tracing::warn!(pod = %call.pod, path = ?call.request.path(), "file server of a volume does not respond");
        let path = call.request.path().to_owned();
        self.state()
            .hung
            .insert(path.clone(), Instant::now().checked_sub(elapsed).unwrap_or_else(Instant::now));
        end.kill();
        let helpers = self.clone();
        tokio::spawn(async move {
            end.exited().await;
            helpers.state().hung.remove(&path);
            drop(permits);
        });
        error
    }

    /// Waits for a permit of the pod.
    async fn pod_permit(&self, pod: &SandboxId) -> OwnedSemaphorePermit {
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

    async fn count_guard(&self, call: &Call) -> Result<CountGuard, HelperError> {
        let known = self.inner.namespaces.get().and_then(|namespaces| namespaces.0(&call.pod));
        let namespace = known.unwrap_or_else(|| call.pod.as_str().into());
        // The file system is looked up only where it matters: the table of mounts is long.
        let hangs = self.state().places.hangs(&namespace);
        let at = if hangs { file_system(call.request.path()).await } else { None };
        let taken = self.state().places.take(&namespace, &at);
        taken.map_err(|full| {
            let (most, whose) = full.limit();
            call.too_many(most, whose)
        })?;
        Ok(CountGuard { helpers: self.clone(), namespace, hung_at: None })
    }

    /// Returns an idle helper, or starts a new one.
    async fn helper(&self, may_reuse: bool) -> io::Result<Helper> {
        let idle = if may_reuse { self.state().idle.pop() } else { None };
        match (idle, self.inner.program.clone()) {
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
        if state.idle.len() < MAX_IDLE {
            state.idle.push(Helper { used: true, ..helper });
        }
        // Other helpers exit when their connection closes.
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state half-changed.
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the file system at a path.
async fn file_system(path: &Path) -> FileSystem {
    let path = path.to_owned();
    tokio::task::spawn_blocking(move || places::file_system(&path)).await.ok().flatten()
}

/// Sends a request and receives the response; `None` after `deadline`. Releases the permit of working helpers after
/// [`QUICK`].
async fn answer(
    call: &Call,
    helper: &mut Helper,
    deadline: Instant,
    working: &mut Option<SemaphorePermit<'_>>,
) -> Option<io::Result<Option<Frame>>> {
    let answer = async {
        call.frame.send_from_task(&mut helper.stream).await?;
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
struct Call {
    pod: SandboxId,
    request: Request,
    frame: Frame,
}

impl Call {
    fn silent(&self, elapsed: Duration) -> HelperError {
        let (pod, path) = (self.pod.clone(), self.request.path().to_owned());
        HelperError::Silent { pod, action: self.request.action(), path, elapsed }
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
