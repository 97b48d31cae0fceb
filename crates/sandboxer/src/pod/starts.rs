//! Starts whose result containerd may not have received.
//!
//! containerd forgets a sandbox whose start failed, was cancelled, or whose response was lost, without another call to
//! the controller. So the daemon has to remove the pod. A file per start says that containerd has not yet shown that it
//! knows the result: the response is lost if containerd cancels its call at that moment, or if this process or the
//! front dies.

use std::{
    collections::HashSet,
    fs, io, mem,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_protocol::id::SandboxId;

use crate::{
    error::PodError,
    pod::{daemon_state::DaemonState, handle::PodHandle},
    state::PodState,
};

/// Name of the directory of these files, in the run directory.
const DIR: &str = "starts";

/// Time limit for containerd to show that it knows a pod. It queries a pod right after its start and waits on each pod
/// it knows. It connects to a new worker with a back-off of at most 3 s.
const SHOWN_WITHIN: Duration = Duration::from_secs(20);

/// Number of periods of [`SHOWN_WITHIN`] in which containerd has requested other pods, but not this one, whose network
/// namespace still exists. After them, containerd does not know the pod, and the namespace was left behind.
const ROUNDS: u32 = 30;

/// Started pods for which containerd has not yet shown that it knows the result.
#[derive(Debug)]
pub struct Starts {
    node: Arc<DaemonState>,
    dir: PathBuf,
    // A plain lock: held for a lookup, never across an await.
    untold: Mutex<HashSet<SandboxId>>,
    /// Number of containerd's requests so far.
    requests: AtomicU64,
}

impl Starts {
    /// Reads the notes that an earlier worker left. Pods that containerd does not know are removed after a while.
    pub fn of(node: Arc<DaemonState>) -> io::Result<Arc<Self>> {
        let dir = node.config.run_dir.join(DIR);
        fs::create_dir_all(&dir)?;
        let mut untold = HashSet::new();
        for entry in fs::read_dir(&dir)? {
            untold.extend(entry?.file_name().to_str().and_then(|name| name.parse().ok()));
        }
        let earlier: Vec<_> = untold.iter().cloned().collect();
        let starts = Arc::new(Self { node, dir, untold: Mutex::new(untold), requests: AtomicU64::default() });
        if !earlier.is_empty() {
            tokio::spawn(remove_forgotten(starts.clone(), earlier));
        }
        Ok(starts)
    }

    /// Removes a created pod later if containerd does not start it, because it has not received the response.
    pub fn created(self: &Arc<Self>, pod: PodHandle) {
        let starts = self.clone();
        tokio::spawn(async move {
            let mut rounds = Rounds::default();
            loop {
                rounds.next(&starts).await;
                if pod.status().state != PodState::Created {
                    return;
                }
                // Boxed: in most cases containerd has started it by then.
                if rounds.are_enough() || !Box::pin(has_network(&pod)).await {
                    return Box::pin(remove(&pod)).await;
                }
            }
        });
    }

    /// Records that a pod's first start begins.
    pub fn begins(self: &Arc<Self>, pod: &PodHandle) -> io::Result<FirstStart> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        fs::File::create(self.dir.join(pod.id()))?;
        self.untold().insert(pod.id().clone());
        Ok(FirstStart { starts: self.clone(), pod: Some(pod.clone()) })
    }

    /// Removes the note: containerd knows the result of the pod's start.
    pub fn shown(&self, pod: &SandboxId) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.forget(pod);
    }

    fn forget(&self, pod: &SandboxId) {
        if self.untold().remove(pod)
            && let Err(error) = fs::remove_file(self.dir.join(pod))
        {
            tracing::warn!(%pod, %error, "cannot remove the note of its start");
        }
    }

    fn untold(&self) -> MutexGuard<'_, HashSet<SandboxId>> {
        self.untold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pod's first start that has no result yet. If it is dropped because containerd cancelled the request, it removes
/// the pod.
#[derive(Debug)]
#[must_use]
pub struct FirstStart {
    starts: Arc<Starts>,
    pod: Option<PodHandle>,
}

impl FirstStart {
    /// Removes the pod, which did not start. Must be called before the response: its caller may reuse the id.
    pub async fn failed(mut self) {
        if let Some(pod) = self.pod.take() {
            undone(self.starts.clone(), pod).await;
        }
    }

    /// Records that the pod has started: removes it later if containerd does not receive the response.
    pub fn answered(mut self) {
        if let Some(pod) = self.pod.take() {
            tokio::spawn(remove_forgotten(self.starts.clone(), vec![pod.id().clone()]));
        }
    }
}

impl Drop for FirstStart {
    fn drop(&mut self) {
        if let Some(pod) = self.pod.take() {
            tokio::spawn(undone(self.starts.clone(), pod));
        }
    }
}

/// Counts the periods in which containerd has requested pods.
#[derive(Debug, Default)]
struct Rounds {
    requests: u64,
    count: u32,
}

impl Rounds {
    /// Waits one period, and counts it if containerd has requested any pod meanwhile.
    async fn next(&mut self, starts: &Starts) {
        tokio::time::sleep(SHOWN_WITHIN).await;
        let requests = starts.requests.load(Ordering::Relaxed);
        self.count += u32::from(requests > self.requests);
        self.requests = requests;
    }

    fn are_enough(&self) -> bool {
        self.count >= ROUNDS
    }
}

/// Removes the started pods among `pods` that containerd has forgotten.
async fn remove_forgotten(starts: Arc<Starts>, mut pods: Vec<SandboxId>) {
    let mut rounds = Rounds::default();
    while !pods.is_empty() {
        rounds.next(&starts).await;
        for id in mem::take(&mut pods) {
            if !starts.untold().contains(&id) {
                continue;
            }
            if let Ok(pod) = starts.node.registry.pod(&id) {
                // Boxed: in most cases containerd knows the pod by then.
                if !rounds.are_enough() && Box::pin(has_network(&pod)).await {
                    // containerd may be removing it, or may still request it.
                    pods.push(id);
                    continue;
                }
                tracing::info!(pod = %id, "removed: its start was never answered, and containerd does not ask for it");
                Box::pin(remove(&pod)).await;
            }
            starts.forget(&id);
        }
    }
}

/// Returns whether the pod's network namespace still exists at the requested path.
async fn has_network(pod: &PodHandle) -> bool {
    match pod.inspect().await.map(|view| view.spec.netns) {
        Ok(Some(netns)) => !matches!(tokio::fs::try_exists(netns).await, Ok(false)),
        _ => false,
    }
}

/// Removes a pod whose start has failed or was cancelled. The note is removed last: the next worker would need it.
async fn undone(starts: Arc<Starts>, pod: PodHandle) {
    remove(&pod).await;
    starts.forget(pod.id());
}

/// Removes a pod that containerd does not know.
async fn remove(pod: &PodHandle) {
    match pod.remove().await {
        Ok(()) | Err(PodError::Gone(_)) => {}
        Err(error) => {
            tracing::error!(pod = %pod.id(), error = chain(&error), "cannot remove a pod that did not start");
        }
    }
}
