//! Keeps the memory of a running VM in step with the memory limits of its pod.
//!
//! The VM's memory is read from its VMM each time, never from its guest, which could report anything. A limit beyond
//! the maximum size of a VM changes nothing here; the agent rejects it, as it does for a VM that cannot grow.

use std::time::Duration;

use sandboxer_base::chain;
use sandboxer_protocol::id::SandboxId;
use sandboxer_vmm::{HOTPLUG_STEP_MIB, HotpluggedMemory, Vm, VmmError, hotplug};

use crate::error::PodError;

/// Memory that the guest itself needs, so that a container can use its limit to the last byte: this many MiB, plus a
/// fraction of the rest for the kernel's page structures and reserves. Measured once each by `MemAvailable` next to an
/// idle container: of 256, 512, 1024 and 4096 MiB a guest keeps 49, 55, 101 and 261.
const GUEST_OVERHEAD_MIB: u64 = 48;
const GUEST_SHARE: u64 = 16;

/// Maximum time without progress while a guest plugs or unplugs memory. It looks for memory to unplug again after 5
/// seconds, and later less often.
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
    /// Memory of the VM at boot, MiB.
    boot_mib: u64,
    /// Maximum memory of a pod, MiB.
    max_mib: u64,
}

impl Memory {
    /// Returns the memory of a pod's VM that booted with `boot_mib`.
    pub fn new(pod: SandboxId, boot_mib: u64, max_mib: u64) -> Self {
        Self { pod, boot_mib, max_mib }
    }

    /// Returns the memory that a VM needs for a limit of `bytes` in addition to its memory at boot, MiB. `None`: the
    /// limit exceeds its maximum of `most` MiB.
    fn needed(&self, bytes: u64, most: u64) -> Option<u64> {
        let most = most.min(self.max_mib.saturating_sub(self.boot_mib));
        let most = most - most % HOTPLUG_STEP_MIB;
        if bytes.div_ceil(1 << 20) > self.boot_mib + most {
            return None;
        }
        let beside_boot = with_guest_mib(bytes).saturating_sub(self.boot_mib);
        Some(beside_boot.next_multiple_of(HOTPLUG_STEP_MIB).min(most))
    }

    /// Plugs memory until the guest has enough for a limit of `bytes`. Returns the size requested before, if it has
    /// changed.
    pub async fn plug(&self, vm: &dyn Vm, bytes: u64) -> Result<Option<u64>, PodError> {
        let Some(now) = vm.hotplugged_memory().await? else { return Ok(None) };
        let Some(needed) = self.needed(bytes, now.max_mib) else { return Ok(None) };
        if needed <= now.plugged_mib.min(now.requested_mib) {
            return Ok(None);
        }
        vm.request_memory(needed).await?;
        let reached = hotplug::settled(vm, PLUG_PATIENCE).await?.map_or(0, |reached| reached.plugged_mib);
        if reached >= needed {
            tracing::info!(pod = %self.pod, plugged_mib = reached, "the pod's VM has grown");
            return Ok(Some(now.requested_mib));
        }
        let reason =
            format!("its guest took {reached} MiB of {needed} MiB that it needs beside those of its boot");
        tracing::warn!(pod = %self.pod, reason, "cannot raise the limits of a pod");
        self.undo(vm, Some(now.requested_mib)).await;
        Err(PodError::Failed { subject: format!("pod {}", self.pod), reason })
    }

    /// Requests the size from before [`Memory::plug`], and does not wait for it.
    pub async fn undo(&self, vm: &dyn Vm, before: Option<u64>) {
        if let Some(mib) = before
            && let Err(error) = vm.request_memory(mib).await
        {
            tracing::warn!(pod = %self.pod, error = chain(&error), "cannot take memory back from a guest");
        }
    }

    /// Unplugs memory not needed for a limit of `bytes`, and logs how much the guest cannot free.
    pub async fn unplug(&self, vm: &dyn Vm, bytes: u64) {
        match self.try_unplug(vm, bytes).await {
            Ok(None) => {}
            Ok(Some(HotpluggedMemory { plugged_mib, requested_mib, .. })) => tracing::warn!(
                pod = %self.pod, requested_mib, plugged_mib, "a guest cannot free all memory that its pod does not need any more"
            ),
            Err(error) => {
                tracing::warn!(pod = %self.pod, error = chain(&error), "cannot take memory back from a guest");
            }
        }
    }

    /// Unplugs memory not needed for a limit of `bytes`. Returns the guest's memory if it is still more.
    async fn try_unplug(&self, vm: &dyn Vm, bytes: u64) -> Result<Option<HotpluggedMemory>, VmmError> {
        let Some(now) = vm.hotplugged_memory().await? else { return Ok(None) };
        let Some(needed) = self.needed(bytes, now.max_mib) else { return Ok(None) };
        if needed >= now.requested_mib {
            return Ok(None);
        }
        vm.request_memory(needed).await?;
        let left = hotplug::settled(vm, UNPLUG_PATIENCE).await?.filter(|left| left.plugged_mib > needed);
        if left.is_none() {
            tracing::info!(pod = %self.pod, plugged_mib = needed, "the pod's VM has shrunk");
        }
        Ok(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_vm_has_what_its_limit_needs_in_steps() {
        let memory = Memory::new("p".parse().unwrap(), 256, 1024);
        let needed = |mib: u64| memory.needed(mib * MIB, 512);
        assert_eq!((needed(1), needed(128), needed(195)), (Some(0), Some(0), Some(0)));
        assert_eq!((needed(200), needed(512), needed(600)), (Some(128), Some(384), Some(512)));
        assert_eq!(needed(768), Some(512), "as much as it can have: the agent knows whether that is enough");
        assert_eq!(needed(769), None);
        assert_eq!(memory.needed(i64::MAX as u64, 512), None);
        assert_eq!(memory.needed(1000 * MIB, 1 << 20), Some(768), "no pod has more than that");
    }
}
