//! A running VM's memory follows the memory limits of its pod.
//!
//! ```text
//! limits rise:  plug ──▶ the guest has it ──▶ limits in the guest ──▶ answer
//! limits fall:  limits in the guest ──▶ answer ──▶ unplug ──▶ what the guest cannot free stays, and is logged
//! ```
//!
//! What a VM has is asked of its VMM each time, and nothing of its guest, which could say anything. A limit that is beyond the
//! largest size of a VM changes nothing here; the agent refuses it, as it does for a VM that cannot grow.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_guest::Agent;
use sandboxer_protocol::id::{ContainerId, SandboxId};
use sandboxer_vmm::{HOTPLUG_STEP_MIB, HotpluggedMemory, Vm, VmmError, hotplug};
use tokio::sync::{Mutex, MutexGuard};

use crate::{error::PodError, pod::spec::Limits};

/// The memory that the guest itself needs, so that a container can use its limit to the last byte: this many MiB, plus
/// a fraction of the rest for the kernel's page structures and reserves. Measured once each by `MemAvailable` beside an
/// idle container: of 256, 512, 1024 and 4096 MiB a guest keeps 49, 55, 101 and 261.
const GUEST_OVERHEAD_MIB: u64 = 48;
const GUEST_SHARE: u64 = 16;

/// How long a guest may make no progress while it plugs or unplugs. It looks for memory to unplug again after 5 seconds, and
/// later less often.
const PLUG_PATIENCE: Duration = Duration::from_secs(5);
const UNPLUG_PATIENCE: Duration = Duration::from_secs(2);

/// Returns the memory of a VM whose containers may use `bytes`, MiB.
pub fn with_guest_mib(bytes: u64) -> u64 {
    let limit = bytes.div_ceil(1 << 20);
    limit + limit / GUEST_SHARE + GUEST_OVERHEAD_MIB
}

/// The memory of a pod's VM.
#[derive(Debug)]
pub struct Memory {
    pod: SandboxId,
    /// That of the boot, MiB.
    boot_mib: u64,
    /// Most that a pod may have, MiB.
    max_mib: u64,
    // Held across calls on purpose: one change begins after the other has ended.
    limit: Mutex<i64>,
}

/// One change.
pub struct Change<'a> {
    memory: &'a Memory,
    /// The limit of all containers together, bytes; 0 or negative: none.
    limit: MutexGuard<'a, i64>,
}

/// The limits of a pod's containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    /// Of those that have one, bytes.
    bytes: u64,
    /// All have one.
    complete: bool,
}

impl Memory {
    /// Returns the memory of a pod's VM that booted with `boot_mib`. `limit`: see [`Limits::memory_bytes`].
    pub fn new(pod: SandboxId, boot_mib: u64, max_mib: u64, limit: i64) -> Self {
        Self { pod, boot_mib, max_mib, limit: Mutex::new(limit) }
    }

    /// Begins a change, after all earlier ones have ended.
    pub async fn change(&self) -> Change<'_> {
        Change { memory: self, limit: self.limit.lock().await }
    }

    /// Returns how much memory beside that of its boot a VM needs for a limit of `bytes`, MiB. `None`: the limit is beyond
    /// what it can have, `most` MiB.
    fn needed(&self, bytes: u64, most: u64) -> Option<u64> {
        let most = most.min(self.max_mib.saturating_sub(self.boot_mib));
        let most = most - most % HOTPLUG_STEP_MIB;
        if bytes.div_ceil(1 << 20) > self.boot_mib + most {
            return None;
        }
        let beside_boot = with_guest_mib(bytes).saturating_sub(self.boot_mib);
        Some(beside_boot.next_multiple_of(HOTPLUG_STEP_MIB).min(most))
    }
}

impl Change<'_> {
    /// Changes the limits of all containers together. Returns after the guest has them; [`Change::end`] is to be called
    /// after that.
    pub async fn of_pod(&mut self, vm: &dyn Vm, agent: &Agent, limits: &Limits) -> Result<(), PodError> {
        let before = self.plug(vm, limited(limits.memory_bytes)).await?;
        if let Err(error) = agent.update_pod(limits.for_guest()).await {
            self.undo(vm, before).await;
            return Err(error.into());
        }
        if limits.memory_bytes != 0 {
            *self.limit = limits.memory_bytes;
        }
        Ok(())
    }

    /// Changes the limits of one container, OCI's `linux.resources`, among them that of its memory. `all` are the pod's
    /// containers. Returns after the guest has them.
    pub async fn of_container(
        &mut self,
        vm: &dyn Vm,
        agent: &Agent,
        of: &ContainerId,
        resources: Vec<u8>,
        all: &[(ContainerId, Arc<AtomicI64>)],
    ) -> Result<Option<u64>, PodError> {
        let asked = memory_limit(&resources);
        let before = Sum::of(all.iter().map(|(_, limit)| limit.load(Ordering::Relaxed)));
        let after = Sum::of(all.iter().map(|(container, limit)| match container == of {
            true => asked,
            false => limit.load(Ordering::Relaxed),
        }));
        let plugged = self.plug(vm, after.bytes.max(limited(*self.limit))).await?;
        if let Err(error) = self.limit_container(agent, of, resources, (before, after)).await {
            self.undo(vm, plugged).await;
            return Err(error);
        }
        for (_, limit) in all.iter().filter(|(container, _)| container == of) {
            limit.store(asked, Ordering::Relaxed);
        }
        Ok(after.complete.then_some(after.bytes))
    }

    async fn limit_container(
        &mut self,
        agent: &Agent,
        of: &ContainerId,
        resources: Vec<u8>,
        (before, after): (Sum, Sum),
    ) -> Result<(), PodError> {
        let all = limited(*self.limit);
        // A limit of the pod that is the sum of its containers' stays that: before 2.3, containerd does not pass it on.
        let follows = before.complete && after.complete && before.bytes == all;
        if follows && after.bytes > all {
            self.set(agent, after.bytes).await?;
        }
        if let Err(error) = agent.update_container(of, resources).await {
            if *self.limit != as_limit(all)
                && let Err(error) = self.set(agent, all).await
            {
                tracing::warn!(pod = %self.memory.pod, error = chain(&error), "cannot lower the limit of a pod again");
            }
            return Err(error.into());
        }
        if follows
            && after.bytes < all
            && let Err(error) = self.set(agent, after.bytes).await
        {
            tracing::debug!(pod = %self.memory.pod, error = chain(&error), "the limit of a pod stays above its containers'");
        }
        Ok(())
    }

    /// Returns the limit of all containers together; see [`Limits::memory_bytes`].
    pub fn limit(&self) -> i64 {
        *self.limit
    }

    /// Unplugs what is not needed for the pod's limit and for `containers`, the sum of their limits.
    pub async fn end(self, vm: &dyn Vm, containers: u64) {
        let needed = containers.max(limited(*self.limit));
        if needed == 0 {
            return;
        }
        match self.unplug(vm, needed).await {
            Ok(None) => {}
            Ok(Some(HotpluggedMemory { plugged_mib, requested_mib, .. })) => tracing::warn!(
                pod = %self.memory.pod, requested_mib, plugged_mib, "a guest cannot free all memory that its pod does not need any more"
            ),
            Err(error) => {
                tracing::warn!(pod = %self.memory.pod, error = chain(&error), "cannot take memory back from a guest");
            }
        }
    }

    async fn set(&mut self, agent: &Agent, bytes: u64) -> Result<(), PodError> {
        let limits = Limits { memory_bytes: as_limit(bytes), ..Limits::default() };
        agent.update_pod(limits.for_guest()).await?;
        *self.limit = limits.memory_bytes;
        Ok(())
    }

    /// Returns once the guest has the memory that is needed for a limit of `bytes`: what it was requested to have before, if
    /// that has changed.
    async fn plug(&self, vm: &dyn Vm, bytes: u64) -> Result<Option<u64>, PodError> {
        let Some(now) = vm.hotplugged_memory().await? else { return Ok(None) };
        let Some(needed) = self.memory.needed(bytes, now.max_mib) else { return Ok(None) };
        if needed <= now.plugged_mib.min(now.requested_mib) {
            return Ok(None);
        }
        vm.request_memory(needed).await?;
        let reached = hotplug::settled(vm, PLUG_PATIENCE).await?.map_or(0, |reached| reached.plugged_mib);
        if reached >= needed {
            tracing::info!(pod = %self.memory.pod, plugged_mib = reached, "the pod's VM has grown");
            return Ok(Some(now.requested_mib));
        }
        let reason =
            format!("its guest took {reached} MiB of {needed} MiB that it needs beside those of its boot");
        tracing::warn!(pod = %self.memory.pod, reason, "cannot raise the limits of a pod");
        self.undo(vm, Some(now.requested_mib)).await;
        Err(PodError::Failed { subject: format!("pod {}", self.memory.pod), reason })
    }

    /// Requests what was there before [`Change::plug`], and does not wait for it.
    async fn undo(&self, vm: &dyn Vm, before: Option<u64>) {
        if let Some(mib) = before
            && let Err(error) = vm.request_memory(mib).await
        {
            tracing::warn!(pod = %self.memory.pod, error = chain(&error), "cannot take memory back from a guest");
        }
    }

    /// Unplugs what is not needed for a limit of `bytes`. Returns what the guest has if that is more.
    async fn unplug(&self, vm: &dyn Vm, bytes: u64) -> Result<Option<HotpluggedMemory>, VmmError> {
        let Some(now) = vm.hotplugged_memory().await? else { return Ok(None) };
        let Some(needed) = self.memory.needed(bytes, now.max_mib) else { return Ok(None) };
        if needed >= now.requested_mib {
            return Ok(None);
        }
        vm.request_memory(needed).await?;
        let left = hotplug::settled(vm, UNPLUG_PATIENCE).await?.filter(|left| left.plugged_mib > needed);
        if left.is_none() {
            tracing::info!(pod = %self.memory.pod, plugged_mib = needed, "the pod's VM has shrunk");
        }
        Ok(left)
    }
}

impl Sum {
    /// Returns the sum of these limits, as OCI has them.
    fn of(limits: impl Iterator<Item = i64>) -> Self {
        limits.fold(Self { bytes: 0, complete: true }, |sum, limit| Self {
            bytes: sum.bytes.saturating_add(limited(limit)),
            complete: sum.complete && limit > 0,
        })
    }
}

/// Returns the memory limit in OCI's `linux.resources`; 0: it has none.
pub fn memory_limit(resources: &[u8]) -> i64 {
    let resources: serde_json::Value = serde_json::from_slice(resources).unwrap_or_default();
    resources.pointer("/memory/limit").and_then(serde_json::Value::as_i64).unwrap_or_default()
}

/// Returns a limit in bytes; 0: there is none.
fn limited(limit: i64) -> u64 {
    u64::try_from(limit).unwrap_or_default()
}

fn as_limit(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_vm_has_what_its_limit_needs_in_steps() {
        let memory = Memory::new("p".parse().unwrap(), 256, 1024, 0);
        let needed = |mib: u64| memory.needed(mib * MIB, 512);
        assert_eq!((needed(1), needed(128), needed(195)), (Some(0), Some(0), Some(0)));
        assert_eq!((needed(200), needed(512), needed(600)), (Some(128), Some(384), Some(512)));
        assert_eq!(needed(768), Some(512), "as much as it can have: the agent knows whether that is enough");
        assert_eq!(needed(769), None);
        assert_eq!(memory.needed(i64::MAX as u64, 512), None);
        assert_eq!(memory.needed(1000 * MIB, 1 << 20), Some(768), "no pod has more than that");
    }

    #[test]
    fn a_container_says_its_limit_or_nothing() {
        assert_eq!(memory_limit(br#"{"memory":{"limit":67108864}}"#), 64 << 20);
        assert_eq!(memory_limit(br#"{"memory":{"limit":-1}}"#), -1);
        assert_eq!((memory_limit(br#"{"cpu":{"quota":1}}"#), memory_limit(b"?")), (0, 0));
    }
}
