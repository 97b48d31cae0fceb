//! All containers of the guest, by identifier.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use sandboxer_protocol::id::ContainerId;

use crate::{
    container::{Container, Create, PidMode, Shared},
    failure::{Failure, Kind},
    pids,
    rootfs::Disk,
    runtime::File,
    scratch,
    sync::{detached, lock},
};

/// The most containers in one guest.
const MAX_CONTAINERS: usize = 1024;

pub struct Containers {
    shared: Arc<Shared>,
    // The lock is never held across an await.
    known: Mutex<HashMap<ContainerId, Arc<Container>>>,
}

impl Containers {
    /// Creates an empty set.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, known: Mutex::default() }
    }

    /// Returns the container `id`.
    pub fn get(&self, id: &ContainerId) -> Result<Arc<Container>, Failure> {
        lock(&self.known).get(id).cloned().ok_or_else(|| Failure::not_found(format!("no container {id}")))
    }

    /// Returns all containers.
    pub fn all(&self) -> Vec<(ContainerId, Arc<Container>)> {
        lock(&self.known).iter().map(|(id, container)| (id.clone(), Arc::clone(container))).collect()
    }

    /// Mounts a scratch disk before the container that names it is created.
    pub async fn prepare(&self, disk: &Disk) -> Result<(), Failure> {
        let located = scratch::locate(disk).await?;
        self.shared.workers.run(&[], || located.prepare()).await?.into_result()
    }

    /// Creates a container; a repeated request returns the first result.
    pub async fn create(self: &Arc<Self>, request: Create) -> Result<i32, Failure> {
        let (container, is_new) = self.enter(&request)?;
        if is_new {
            let (all, container) = (Arc::clone(self), Arc::clone(&container));
            tokio::spawn(async move {
                let created = match all.pids(&request.sees).await {
                    Ok(pids) => container.create(&request, pids.as_deref()).await,
                    Err(failure) => Err(failure),
                };
                if created.is_err() {
                    all.forget(&request.id, &container);
                }
                container.announce(created);
            });
        }
        container.wait_created().await
    }

    /// Returns the process namespace that a container with `sees` joins; `None` for one of its own.
    async fn pids(&self, sees: &PidMode) -> Result<Option<PathBuf>, Failure> {
        match sees {
            PidMode::Own => Ok(None),
            PidMode::Pod => self.shared.pids.namespace(&self.shared.workers).await.map(Some),
            PidMode::Container(id) => Ok(Some(pids::namespace_of(self.get(id)?.running_pid()?))),
        }
    }

    fn enter(&self, request: &Create) -> Result<(Arc<Container>, bool), Failure> {
        let mut known = lock(&self.known);
        if let Some(container) = known.get(&request.id) {
            return if container.is_for(request) {
                Ok((Arc::clone(container), false))
            } else {
                let message = format!("container {} exists already with another configuration", request.id);
                Err(Failure::new(Kind::AlreadyExists, message))
            };
        }
        if known.len() >= MAX_CONTAINERS {
            return Err(Failure::precondition(format!("guest has {MAX_CONTAINERS} containers already")));
        }
        let container = Arc::new(Container::new(request, Arc::clone(&self.shared)));
        known.insert(request.id.clone(), Arc::clone(&container));
        Ok((container, true))
    }

    /// Gives the container `source` the identifier `id` and holds it until it is started; a repeated request changes nothing.
    ///
    /// The container's control group, its mounts and the runtime's state keep their names.
    pub fn adopt(
        &self,
        id: &ContainerId,
        source: &ContainerId,
        files: &[File],
        signal: u32,
    ) -> Result<Arc<Container>, Failure> {
        let mut known = lock(&self.known);
        if let Some(container) = known.get(id) {
            return match container.is_adopted() {
                true => Ok(Arc::clone(container)),
                false => Err(Failure::new(Kind::AlreadyExists, format!("container {id} exists already"))),
            };
        }
        let container =
            known.get(source).ok_or_else(|| Failure::not_found(format!("no container {source}")))?;
        let container = Arc::clone(container);
        container.hold(files, signal)?;
        known.remove(source);
        known.insert(id.clone(), Arc::clone(&container));
        Ok(container)
    }

    /// Returns the identifier of the container that was created as `id`.
    pub fn now_called(&self, id: &ContainerId) -> ContainerId {
        let known = lock(&self.known);
        let entry = known.iter().find(|(_, container)| container.created_as() == id);
        entry.map_or_else(|| id.clone(), |(now, _)| now.clone())
    }

    /// Removes a stopped container. An unknown one is no error.
    pub async fn delete(self: &Arc<Self>, id: &ContainerId) -> Result<(), Failure> {
        let Ok(container) = self.get(id) else {
            return Ok(());
        };
        let (all, id) = (Arc::clone(self), id.clone());
        detached(async move {
            container.remove().await?;
            all.forget(&id, &container);
            Ok(())
        })
        .await
    }

    /// Removes `container` from the set, unless its identifier now belongs to another container.
    fn forget(&self, id: &ContainerId, container: &Arc<Container>) {
        let mut known = lock(&self.known);
        if known.get(id).is_some_and(|current| Arc::ptr_eq(current, container)) {
            known.remove(id);
        }
    }
}
