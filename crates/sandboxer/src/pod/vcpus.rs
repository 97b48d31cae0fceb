//! Keeps the vCPUs of a running VM in step with the CPU limits of its pod.
//!
//! The VM's vCPUs are read from its VMM each time. The guest reports only whether it uses new vCPUs, and a false report
//! harms only its own pod. A limit beyond the largest VM changes nothing here; the agent rejects it.

use std::time::Duration;

use sandboxer_base::chain;
use sandboxer_guest::Agent;
use sandboxer_protocol::id::SandboxId;
use sandboxer_vmm::{Vm, VmmError, hotplug};

use super::limits::CPU;
use crate::error::PodError;

/// Maximum time without progress while a guest gives up vCPUs.
const UNPLUG_PATIENCE: Duration = Duration::from_secs(2);

/// The vCPUs of a pod's VM.
#[derive(Debug)]
pub struct Vcpus {
    pod: SandboxId,
    /// Number of vCPUs at boot.
    boot: u32,
    /// Maximum number of vCPUs of a pod.
    max: u32,
}

impl Vcpus {
    /// Returns the vCPUs of a pod's VM that booted with `boot`.
    pub fn new(pod: SandboxId, boot: u32, max: u32) -> Self {
        Self { pod, boot, max }
    }

    /// Returns the number of vCPUs that a VM needs for a limit of `micros`, µs in each second. `None`: the limit
    /// exceeds its maximum of `most`.
    fn needed(&self, micros: u64, most: u32) -> Option<u32> {
        let most = most.min(self.max).max(self.boot);
        let wanted = u32::try_from(micros.div_ceil(CPU)).ok().filter(|wanted| *wanted <= most)?;
        Some(wanted.max(self.boot))
    }

    /// Plugs vCPUs until the guest uses enough for a limit of `micros`. Returns the number requested before, if it has
    /// changed.
    pub async fn plug(&self, vm: &dyn Vm, agent: &Agent, micros: u64) -> Result<Option<u32>, PodError> {
        let Some(mut now) = vm.vcpus().await? else { return Ok(None) };
        let Some(needed) = self.needed(micros, now.max) else { return Ok(None) };
        if needed <= now.plugged.min(now.requested) {
            return Ok(None);
        }
        if now.plugged > now.requested {
            // The VMM accepts no request before the guest has carried out the last one.
            now = hotplug::given_up(vm, UNPLUG_PATIENCE).await?.unwrap_or(now);
            if now.plugged > now.requested {
                let more = now.plugged - now.requested;
                return Err(self.failed(format!(
                    "its guest has not given up {more} vCPUs that its pod did not need any more, and gets no others before that"
                )));
            }
        }
        vm.request_vcpus(needed).await?;
        let reason = match agent.online_cpus(needed).await {
            Ok(online) if online >= needed => {
                tracing::info!(pod = %self.pod, vcpus = needed, "the pod's VM has more vCPUs");
                return Ok(Some(now.requested));
            }
            Ok(online) => format!("its guest uses {online} of the {needed} vCPUs that it needs"),
            Err(error) => chain(&error).to_string(),
        };
        tracing::warn!(pod = %self.pod, reason, "cannot raise the CPU limits of a pod");
        self.undo(vm, Some(now.requested)).await;
        Err(self.failed(reason))
    }

    /// Requests the number from before [`Vcpus::plug`], and does not wait for it.
    pub async fn undo(&self, vm: &dyn Vm, before: Option<u32>) {
        if let Some(count) = before
            && let Err(error) = vm.request_vcpus(count).await
        {
            tracing::warn!(pod = %self.pod, error = chain(&error), "cannot take vCPUs back from a guest");
        }
    }

    /// Unplugs vCPUs not needed for a limit of `micros`, and logs how many the guest does not give up.
    pub async fn unplug(&self, vm: &dyn Vm, micros: u64) {
        match self.try_unplug(vm, micros).await {
            Ok(None) => {}
            Ok(Some((needed, plugged))) if plugged > needed => tracing::warn!(
                pod = %self.pod, requested = needed, plugged, "a guest has not given up all vCPUs that its pod does not need any more"
            ),
            Ok(Some((needed, _))) => {
                tracing::info!(pod = %self.pod, vcpus = needed, "the pod's VM has fewer vCPUs");
            }
            Err(error) => {
                tracing::warn!(pod = %self.pod, error = chain(&error), "cannot take vCPUs back from a guest");
            }
        }
    }

    /// Unplugs vCPUs; returns the needed number and the guest's number after that, or `None` if the guest has no more
    /// than it needs.
    async fn try_unplug(&self, vm: &dyn Vm, micros: u64) -> Result<Option<(u32, u32)>, VmmError> {
        let Some(now) = vm.vcpus().await? else { return Ok(None) };
        let Some(needed) = self.needed(micros, now.max).filter(|needed| *needed < now.requested) else {
            return Ok(None);
        };
        vm.request_vcpus(needed).await?;
        let left = hotplug::given_up(vm, UNPLUG_PATIENCE).await?;
        Ok(Some((needed, left.map_or(needed, |left| left.plugged))))
    }

    fn failed(&self, reason: String) -> PodError {
        PodError::Failed { subject: format!("pod {}", self.pod), reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_has_a_vcpu_for_each_cpu_that_its_pod_may_use() {
        let vcpus = Vcpus::new("p".parse().unwrap(), 2, 6);
        let needed = |micros| vcpus.needed(micros, 8);
        assert_eq!(
            (needed(0), needed(1), needed(2_000_000)),
            (Some(2), Some(2), Some(2)),
            "never less than at its start"
        );
        assert_eq!((needed(2_000_001), needed(6_000_000)), (Some(3), Some(6)));
        assert_eq!((needed(6_000_001), needed(u64::MAX)), (None, None), "no pod has more");
        assert_eq!(vcpus.needed(4_000_000, 3), None, "its VM cannot have more");
        assert_eq!(vcpus.needed(2_000_000, 1), Some(2), "it has what it has");
    }
}
