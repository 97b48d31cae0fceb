//! Finds pods and containers by id.

use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use sandboxer_protocol::id::{ContainerId, SandboxId};

use super::handle::PodHandle;
use crate::error::PodError;

/// All pods of this node.
#[derive(Debug, Default)]
pub struct Registry {
    // Plain locks: held for a lookup or an insertion, never across an await.
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    pods: HashMap<SandboxId, PodHandle>,
    containers: HashMap<ContainerId, SandboxId>,
}

impl Registry {
    /// Adds the pod that `make` creates, unless its id is taken.
    pub fn insert(&self, id: &SandboxId, make: impl FnOnce() -> PodHandle) -> Result<PodHandle, PodError> {
        let mut inner = self.write();
        if inner.pods.contains_key(id) {
            return Err(PodError::PodExists(id.clone()));
        }
        let pod = make();
        inner.pods.insert(id.clone(), pod.clone());
        Ok(pod)
    }

    /// Removes a pod and its containers.
    pub fn remove(&self, id: &SandboxId) {
        let mut inner = self.write();
        inner.pods.remove(id);
        inner.containers.retain(|_, pod| pod != id);
    }

    /// Finds a pod.
    pub fn pod(&self, id: &SandboxId) -> Result<PodHandle, PodError> {
        self.read().pods.get(id).cloned().ok_or_else(|| PodError::NoPod(id.clone()))
    }

    /// Finds the only pod whose id starts with `prefix`.
    pub fn pod_by_prefix(&self, prefix: &str) -> Result<PodHandle, PodError> {
        let invalid = |reason: String| PodError::Invalid { subject: format!("pod {prefix:?}"), reason };
        let inner = self.read();
        if let Some(pod) = inner.pods.get(prefix) {
            return Ok(pod.clone());
        }
        let mut matches = inner.pods.iter().filter(|(id, _)| id.as_str().starts_with(prefix));
        match (matches.next(), matches.count()) {
            (Some((_, pod)), 0) => Ok(pod.clone()),
            (None, _) => Err(invalid("no pod's id starts so".into())),
            (Some(_), more) => Err(invalid(format!("{} pods' ids start so: give more of it", more + 1))),
        }
    }

    /// Returns all pods.
    pub fn pods(&self) -> Vec<PodHandle> {
        self.read().pods.values().cloned().collect()
    }

    /// Claims a container's id for a pod.
    pub fn insert_container(&self, container: &ContainerId, pod: &SandboxId) -> Result<(), PodError> {
        let mut inner = self.write();
        if inner.containers.contains_key(container) {
            return Err(PodError::ContainerExists(container.clone()));
        }
        inner.containers.insert(container.clone(), pod.clone());
        Ok(())
    }

    /// Releases a container's id.
    pub fn remove_container(&self, container: &ContainerId) {
        self.write().containers.remove(container);
    }

    /// Finds the pod of a container.
    pub fn pod_of(&self, container: &ContainerId) -> Result<PodHandle, PodError> {
        let inner = self.read();
        let pod = inner.containers.get(container).and_then(|pod| inner.pods.get(pod));
        pod.cloned().ok_or_else(|| PodError::NoContainer(container.clone()))
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}
