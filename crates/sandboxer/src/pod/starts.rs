//! Starts whose result containerd may not have received.
//!
//! containerd forgets a sandbox whose start failed or whose answer was lost, without another call to the controller. So the
//! daemon has to remove the pod: with the request if that is cancelled, or here if this process or the front died before
//! the answer was sent. A file per start says that containerd has not yet shown that it knows the result.

use std::{
    collections::HashSet,
    fs, io, mem,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_protocol::id::SandboxId;

use crate::{
    error::PodError,
    pod::{DaemonState, PodHandle},
};

/// Directory of the files, in the run directory.
const DIR: &str = "starts";

/// Time for containerd to show that it knows a pod. It queries a pod right after its start and waits on each pod it knows. It
/// connects to a new worker with a back-off of at most 3 s.
const SHOWN_WITHIN: Duration = Duration::from_secs(20);

/// Started pods for which containerd has not yet shown that it knows the result.
#[derive(Debug)]
pub struct Starts {
    node: Arc<DaemonState>,
    dir: PathBuf,
    // A plain lock: held for a lookup, never across an await.
    untold: Mutex<HashSet<SandboxId>>,
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
        let starts = Arc::new(Self { node, dir, untold: Mutex::new(untold) });
        if !earlier.is_empty() {
            tokio::spawn(remove_forgotten(starts.clone(), earlier));
        }
        Ok(starts)
    }

    /// Notes that a pod's first start begins.
    pub fn begins(&self, pod: &SandboxId) -> io::Result<()> {
        fs::File::create(self.dir.join(pod))?;
        self.untold().insert(pod.clone());
        Ok(())
    }

    /// Removes the note: containerd knows how the pod's start ended.
    pub fn shown(&self, pod: &SandboxId) {
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

/// Removes the pods of an earlier worker that containerd has forgotten.
async fn remove_forgotten(starts: Arc<Starts>, mut earlier: Vec<SandboxId>) {
    while !earlier.is_empty() {
        tokio::time::sleep(SHOWN_WITHIN).await;
        for id in mem::take(&mut earlier) {
            if !starts.untold().contains(&id) {
                continue;
            }
            if let Ok(pod) = starts.node.registry.pod(&id) {
                if has_network(&pod).await {
                    // containerd may be removing it, or may still ask for it.
                    earlier.push(id);
                    continue;
                }
                tracing::info!(pod = %id, "removed: its start was never answered, and containerd does not ask for it");
                remove(pod).await;
            }
            starts.shown(&id);
        }
    }
}

/// Returns whether the pod's network namespace is still at the requested path.
async fn has_network(pod: &PodHandle) -> bool {
    match pod.inspect().await.map(|view| view.spec.netns) {
        Ok(Some(netns)) => !matches!(tokio::fs::try_exists(netns).await, Ok(false)),
        _ => false,
    }
}

/// Removes a pod that containerd does not know.
pub async fn remove(pod: PodHandle) {
    match pod.remove().await {
        Ok(()) | Err(PodError::Gone(_)) => {}
        Err(error) => {
            tracing::error!(pod = %pod.id(), error = chain(&error), "cannot remove a pod that did not start");
        }
    }
}
