//! Selects the host CPUs for a pod's VMM: the union of its containers' CPU sets from CRI.
//!
//! A guest does not know the host's CPUs, so its containers cannot be held to their own sets: all run on the union.
//! kubelet's static CPU policy gives exclusive CPUs to some containers, and the rest to all others.

use std::convert::Infallible;

use sandboxer_base::chain;
use sandboxer_process::cpus::Cpus;
use sandboxer_protocol::id::ContainerId;
use tokio::sync::oneshot;

use super::{Done, Driver};
use crate::pod::container::Container;

impl Driver {
    /// Reads the CPU set of a container's resource update, if it has one.
    pub(super) fn update_cpus(&mut self, of: &ContainerId, resources: &[u8]) {
        let said = serde_json::from_slice::<serde_json::Value>(resources).unwrap_or_default();
        let Some(cpus) = said["cpu"]["cpus"].as_str().filter(|cpus| !cpus.is_empty()) else { return };
        if let Some(container) = self.containers.get_mut(of) {
            container.cpus = Some(cpus.to_owned());
            self.place();
        }
    }

    /// Confines the VMM to the CPUs of its containers, after earlier updates are complete.
    pub(super) fn place(&mut self) {
        let ended = |container: &Container| container.init.phase.borrow().exit().is_some();
        let there = self.containers.values().filter(|container| !ended(container));
        let cpus = Cpus::union(there.map(|container| container.cpus.as_deref().and_then(Cpus::parse)));
        let Some(live) = self.live.as_ref().filter(|_| self.placed != cpus) else { return };
        let Some(cgroup) = self.node.cgroups.of(&self.spec.cgroup_parent, &self.spec.id) else { return };
        self.placed.clone_from(&cpus);
        let (vmm, pod, mut counted) = (live.vm.record().pid, self.spec.id.clone(), self.counted.clone());
        let (over, placing) = oneshot::channel::<Infallible>();
        let before = self.placing.replace(placing);
        self.work.spawn(async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            // It is in its control group then; a VMM that could not be moved has been killed.
            let _ = counted.wait_for(|counted| *counted).await;
            let list = cpus.as_ref().map(Cpus::to_string);
            let confined = tokio::task::spawn_blocking(move || cgroup.confine(vmm, list.as_deref())).await;
            if let Ok(Err((path, error))) = confined {
                let cpus = cpus.map_or_else(|| "all".to_owned(), |cpus| cpus.to_string());
                tracing::warn!(%pod, path = %path.display(), error = chain(&error),
                    "cannot confine the VMM to CPUs {cpus}: it runs on all of the pod's control group");
            }
            drop(over);
            Done::Nothing
        });
    }
}
