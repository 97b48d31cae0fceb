//! A running VM's size follows the limits of its pod.
//!
//! ```text
//! limits rise:  plug ──▶ the guest has it ──▶ limits in the guest ──▶ answer
//! limits fall:  limits in the guest ──▶ answer ──▶ unplug ──▶ what the guest keeps stays, and is logged
//! ```
//!
//! [`Memory`] and [`Vcpus`] know what a limit needs. Without room to grow, only the limits in the guest change.

use std::sync::Arc;

use sandboxer_base::chain;
use sandboxer_guest::Agent;
use sandboxer_protocol::id::{ContainerId, SandboxId};
use sandboxer_vmm::{Shape, Vm, VmmError};
use tokio::sync::{Mutex, MutexGuard};

use super::{
    limits::{Amounts, ContainerLimits, SharedLimits, Sum},
    memory::Memory,
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
    // Held across calls on purpose: one change begins after the other has ended.
    limits: Mutex<Limits>,
}

/// One change.
pub struct Change<'a> {
    resizer: &'a Resizer,
    vm: &'a dyn Vm,
    agent: &'a Agent,
    /// Of all containers together.
    limits: MutexGuard<'a, Limits>,
}

/// The limits of a pod's containers before and after a change.
#[derive(Debug, Clone, Copy)]
struct Sums {
    before: Sum,
    after: Sum,
}

/// What was requested of a VM before it grew; `None`: that has not changed.
#[derive(Debug, Clone, Copy)]
struct Before {
    memory_mib: Option<u64>,
    vcpus: Option<u32>,
}

impl Resizer {
    /// Returns the size of a pod's VM that booted with `boot`; no pod has more than `max`.
    pub fn new(pod: SandboxId, boot: Shape, max: Shape, limits: Limits) -> Self {
        Self {
            memory: Memory::new(pod.clone(), boot.memory_mib, max.memory_mib),
            vcpus: Vcpus::new(pod.clone(), boot.vcpus, max.vcpus),
            pod,
            boot,
            limits: Mutex::new(limits),
        }
    }

    /// Begins a change, after all earlier ones have ended.
    pub async fn change<'a>(&'a self, vm: &'a dyn Vm, agent: &'a Agent) -> Change<'a> {
        Change { resizer: self, vm, agent, limits: self.limits.lock().await }
    }

    /// Returns the size of the VM now.
    pub async fn size(&self, vm: &dyn Vm) -> Result<Shape, VmmError> {
        let memory = vm.hotplugged_memory().await?.map_or(0, |memory| memory.plugged_mib);
        let vcpus = vm.vcpus().await?.map_or(self.boot.vcpus, |vcpus| vcpus.plugged);
        Ok(Shape { vcpus, memory_mib: self.boot.memory_mib + memory, ..self.boot })
    }
}

impl Change<'_> {
    /// Changes the limits of all containers together. Returns after the guest has them; [`Change::end`] is to be called
    /// after that.
    pub async fn of_pod(&mut self, limits: &Limits) -> Result<(), PodError> {
        let before = self.grow(Amounts::of_pod(limits)).await?;
        if let Err(error) = self.set(*limits).await {
            self.undo(before).await;
            return Err(error);
        }
        Ok(())
    }

    /// Changes the limits of one container, OCI's `linux.resources`. `all` are the pod's containers. Returns the sum of
    /// their limits, after the guest has them.
    pub async fn of_container(
        &mut self,
        of: &ContainerId,
        resources: Vec<u8>,
        all: &[(ContainerId, Arc<SharedLimits>)],
    ) -> Result<Sum, PodError> {
        let asked = ContainerLimits::of_json(&resources);
        let changed = |container: &ContainerId, limits: &SharedLimits| match container == of {
            true => asked.or(limits.get()),
            false => limits.get(),
        };
        let sums = Sums {
            before: Sum::of(all.iter().map(|(_, limits)| limits.get())),
            after: Sum::of(all.iter().map(|(container, limits)| changed(container, limits))),
        };
        let before = self.grow(sums.after.amounts.max(Amounts::of_pod(&self.limits))).await?;
        if let Err(error) = self.limit_container(of, resources, sums).await {
            self.undo(before).await;
            return Err(error);
        }
        for (container, limits) in all.iter().filter(|(container, _)| container == of) {
            limits.set(changed(container, limits));
        }
        Ok(sums.after)
    }

    /// A limit of the pod that is the sum of its containers' stays that: before 2.3, containerd does not pass it on.
    async fn limit_container(
        &mut self,
        of: &ContainerId,
        resources: Vec<u8>,
        sums: Sums,
    ) -> Result<(), PodError> {
        let before = *self.limits;
        if let Some(higher) = sums.followed_by(&before, |sum, all| sum > all) {
            self.set(higher).await?;
        }
        if let Err(error) = self.agent.update_container(of, resources).await {
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

    /// Unplugs what is not needed for the pod's limits and for those of its containers, `None` if they did not change.
    pub async fn end(&self, containers: Option<Sum>) {
        let none = Sum { amounts: Amounts::default(), all_memory: true, all_cpu: true };
        let Sum { amounts, all_memory, all_cpu } = containers.unwrap_or(none);
        let needed = amounts.max(Amounts::of_pod(&self.limits));
        // A container without a limit may need what there is.
        if all_memory && needed.memory_bytes > 0 {
            self.resizer.memory.unplug(self.vm, needed.memory_bytes).await;
        }
        if all_cpu && needed.cpu_micros > 0 {
            self.resizer.vcpus.unplug(self.vm, needed.cpu_micros).await;
        }
    }

    /// Returns the size of the VM now; `None`: its VMM does not say.
    pub async fn size(&self) -> Option<Shape> {
        self.resizer.size(self.vm).await.ok()
    }

    async fn set(&mut self, limits: Limits) -> Result<(), PodError> {
        self.agent.update_pod(limits.for_guest()).await?;
        *self.limits = self.limits.changed_by(limits);
        Ok(())
    }

    /// Returns once the guest has what is needed for limits of these amounts.
    async fn grow(&self, needed: Amounts) -> Result<Before, PodError> {
        let Resizer { memory, vcpus, .. } = self.resizer;
        let memory_mib = memory.plug(self.vm, needed.memory_bytes).await?;
        match vcpus.plug(self.vm, self.agent, needed.cpu_micros).await {
            Ok(vcpus) => Ok(Before { memory_mib, vcpus }),
            Err(error) => {
                memory.undo(self.vm, memory_mib).await;
                Err(error)
            }
        }
    }

    /// Requests what was there before [`Change::grow`], and does not wait for it.
    async fn undo(&self, Before { memory_mib, vcpus }: Before) {
        self.resizer.memory.undo(self.vm, memory_mib).await;
        self.resizer.vcpus.undo(self.vm, vcpus).await;
    }
}

impl Sums {
    /// Returns the limits of a pod, which now has `now`, that are the sums of its containers' limits and change with them in
    /// the direction of `changes`; `None`: there are none.
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
