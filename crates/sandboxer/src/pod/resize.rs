//! Keeps the size of a running VM in step with the limits of its pod.
//!
//! ```text
//! limits rise:  plug ──▶ the guest has it ──▶ limits in the guest ──▶ reply
//! limits fall:  limits in the guest ──▶ reply ──▶ unplug ──▶ what the guest keeps stays, and is logged
//! ```
//!
//! [`Memory`] and [`Vcpus`] know the size needed for a limit. Without room to grow, only the limits in the guest
//! change.

use std::{
    collections::HashMap,
    sync::{self, Arc, PoisonError},
};

use sandboxer_base::chain;
use sandboxer_protocol::id::{ContainerId, SandboxId};
use sandboxer_vmm::{Shape, Vm, VmmError};
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::{
    limits::{Amounts, ContainerLimits, SharedLimits, Sum},
    memory::Memory,
    running_vm::RunningVm,
    spec::Limits,
    vcpus::Vcpus,
};
use crate::error::PodError;

/// The size of a pod's VM, and the limits of all its containers together.
#[derive(Debug)]
pub struct Resizer {
    pod: SandboxId,
    boot: Shape,
    memory: Memory,
    vcpus: Vcpus,
    /// Limits of each container that has not exited.
    // A plain lock: held for a copy, never across an await.
    containers: sync::Mutex<HashMap<ContainerId, Arc<SharedLimits>>>,
    // Held across calls on purpose: one change begins after the other has ended.
    limits: Arc<Mutex<Limits>>,
}

/// A change of limits in progress.
pub struct Change {
    resizer: Arc<Resizer>,
    live: RunningVm,
    /// The limits of all containers together.
    limits: OwnedMutexGuard<Limits>,
    /// Whether the change concerns the limits of one container.
    changes_a_container: bool,
}

/// The limits of a pod's containers before and after a change.
#[derive(Debug, Clone, Copy)]
struct Sums {
    before: Sum,
    after: Sum,
}

/// The size requested of a VM before it grew; `None`: unchanged.
#[derive(Debug, Clone, Copy)]
struct Before {
    memory_mib: Option<u64>,
    vcpus: Option<u32>,
}

impl Resizer {
    /// Returns the size of a pod's VM that booted with `boot`; no pod may exceed `max`.
    pub fn new(pod: SandboxId, boot: Shape, max: Shape, limits: Limits) -> Self {
        Self {
            memory: Memory::new(pod.clone(), boot.memory_mib, max.memory_mib),
            vcpus: Vcpus::new(pod.clone(), boot.vcpus, max.vcpus),
            pod,
            boot,
            containers: sync::Mutex::default(),
            limits: Arc::new(Mutex::new(limits)),
        }
    }

    /// Adds a container: changes from now on preserve its limits.
    pub fn add(&self, container: &ContainerId, limits: Arc<SharedLimits>) {
        self.containers().insert(container.clone(), limits);
    }

    /// Removes a container that has exited.
    pub fn remove(&self, container: &ContainerId) {
        self.containers().remove(container);
    }

    fn containers(&self) -> sync::MutexGuard<'_, HashMap<ContainerId, Arc<SharedLimits>>> {
        self.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a change, after all earlier ones have ended.
    pub async fn change(self: &Arc<Self>, live: &RunningVm) -> Change {
        let limits = self.limits.clone().lock_owned().await;
        Change { resizer: self.clone(), live: live.clone(), limits, changes_a_container: false }
    }

    /// Returns the current size of the VM.
    pub async fn size(&self, vm: &dyn Vm) -> Result<Shape, VmmError> {
        let memory = vm.hotplugged_memory().await?.map_or(0, |memory| memory.plugged_mib);
        let vcpus = vm.vcpus().await?.map_or(self.boot.vcpus, |vcpus| vcpus.plugged);
        Ok(Shape { vcpus, memory_mib: self.boot.memory_mib + memory, ..self.boot })
    }
}

impl Change {
    /// Changes the limits of all containers together. Returns after the guest has them; the caller must then call
    /// [`Change::end`].
    pub async fn of_pod(&mut self, limits: &Limits) -> Result<(), PodError> {
        let before = self.grow(Amounts::of_pod(limits)).await?;
        if let Err(error) = self.set(*limits).await {
            self.undo(before).await;
            return Err(error);
        }
        Ok(())
    }

    /// Changes the limits of one container, OCI's `linux.resources`. Returns after the guest has them; the caller must
    /// then call [`Change::end`].
    pub async fn of_container(&mut self, id: &ContainerId, resources: Vec<u8>) -> Result<(), PodError> {
        // Now, not when the change was requested: an earlier one may have lasted.
        let all = self.resizer.containers().clone();
        let requested = ContainerLimits::of_json(&resources);
        let changed = |container: &ContainerId, limits: &SharedLimits| match container == id {
            true => requested.or(limits.get()),
            false => limits.get(),
        };
        let sums = Sums {
            before: Sum::from_limits(all.values().map(|limits| limits.get())),
            after: Sum::from_limits(all.iter().map(|(container, limits)| changed(container, limits))),
        };
        let before = self.grow(sums.after.amounts.max(Amounts::of_pod(&self.limits))).await?;
        if let Err(error) = self.limit_container(id, resources, sums).await {
            self.undo(before).await;
            return Err(error);
        }
        if let Some(limits) = all.get(id) {
            limits.set(changed(id, limits));
        }
        self.changes_a_container = true;
        Ok(())
    }

    /// Changes the limits of a container. A pod's limit that is the sum of its containers' limits stays their sum:
    /// containerd before 2.3 does not pass it on.
    async fn limit_container(
        &mut self,
        id: &ContainerId,
        resources: Vec<u8>,
        sums: Sums,
    ) -> Result<(), PodError> {
        let before = *self.limits;
        if let Some(higher) = sums.followed_by(&before, |sum, all| sum > all) {
            self.set(higher).await?;
        }
        if let Err(error) = self.live.agent.update_container(id, resources).await {
            if *self.limits != before
                && let Err(error) = self.set(before).await
            {
                tracing::warn!(pod = %self.resizer.pod, error = chain(&error), "cannot lower the limit of a pod again");
            }
            return Err(error.into());
        }
        if let Some(lower) = sums.followed_by(&before, |sum, all| sum < all)
            && let Err(error) = self.set(lower).await
        {
            tracing::debug!(pod = %self.resizer.pod, error = chain(&error), "the limit of a pod stays above its containers'");
        }
        Ok(())
    }

    /// Returns the limits of all containers together.
    pub fn limits(&self) -> Limits {
        *self.limits
    }

    /// Unplugs what is not needed for the pod's limits and, if a container's limit has changed, for the containers'
    /// limits.
    pub async fn end(&self) {
        // All current containers: one may have been created meanwhile.
        let all =
            if self.changes_a_container { self.resizer.containers().clone() } else { HashMap::default() };
        let Sum { amounts, all_memory, all_cpu } = Sum::from_limits(all.values().map(|limits| limits.get()));
        let needed = amounts.max(Amounts::of_pod(&self.limits));
        // A container without a limit may need all that there is.
        if all_memory && needed.memory_bytes > 0 {
            self.resizer.memory.unplug(self.live.vm.as_ref(), needed.memory_bytes).await;
        }
        if all_cpu && needed.cpu_micros > 0 {
            self.resizer.vcpus.unplug(self.live.vm.as_ref(), needed.cpu_micros).await;
        }
    }

    /// Returns the current size of the VM; `None`: its VMM does not report it.
    pub async fn size(&self) -> Option<Shape> {
        self.resizer.size(self.live.vm.as_ref()).await.ok()
    }

    async fn set(&mut self, limits: Limits) -> Result<(), PodError> {
        self.live.agent.update_pod(limits.for_guest()).await?;
        *self.limits = self.limits.changed_by(limits);
        Ok(())
    }

    /// Grows the VM until the guest has what limits of these amounts need.
    async fn grow(&self, needed: Amounts) -> Result<Before, PodError> {
        let Resizer { memory, vcpus, .. } = &*self.resizer;
        let memory_mib = memory.plug(self.live.vm.as_ref(), needed.memory_bytes).await?;
        match vcpus.plug(self.live.vm.as_ref(), &self.live.agent, needed.cpu_micros).await {
            Ok(vcpus) => Ok(Before { memory_mib, vcpus }),
            Err(error) => {
                memory.undo(self.live.vm.as_ref(), memory_mib).await;
                Err(error)
            }
        }
    }

    /// Requests the size from before [`Change::grow`], and does not wait for it.
    async fn undo(&self, Before { memory_mib, vcpus }: Before) {
        self.resizer.memory.undo(self.live.vm.as_ref(), memory_mib).await;
        self.resizer.vcpus.undo(self.live.vm.as_ref(), vcpus).await;
    }
}

impl Sums {
    /// Returns the new value of those limits of a pod, now `now`, that are the sums of its containers' limits and
    /// change with them in the direction of `changes`; `None` if there are none.
    fn followed_by(&self, now: &Limits, changes: impl Fn(u64, u64) -> bool) -> Option<Limits> {
        let (Self { before, after }, all) = (self, Amounts::of_pod(now));
        let follows = |complete: bool, before: u64, after: u64, all: u64| {
            if complete && before == all && changes(after, all) { after } else { 0 }
        };
        let (was, is) = (before.amounts, after.amounts);
        let amounts = Amounts {
            memory_bytes: follows(
                before.all_memory && after.all_memory,
                was.memory_bytes,
                is.memory_bytes,
                all.memory_bytes,
            ),
            cpu_micros: follows(
                before.all_cpu && after.all_cpu,
                was.cpu_micros,
                is.cpu_micros,
                all.cpu_micros,
            ),
        };
        (amounts != Amounts::default()).then(|| amounts.as_limits(now.cpu_period_us))
    }
}
