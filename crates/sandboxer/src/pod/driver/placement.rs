//! On which of the host's CPUs a pod's VMM runs: those of its containers together, as CRI gives them.
//!
//! A guest doesn't know the host's CPUs, so a container of several can't be held to its own: all run on the union.
//! kubelet's static CPU policy gives sets to those that have CPUs of their own, and the others the rest.

use std::convert::Infallible;

use sandboxer_base::chain;
use sandboxer_process::cpus::Cpus;
use sandboxer_protocol::id::ContainerId;
use tokio::sync::oneshot;

use super::{Done, Driver};
use crate::pod::container::Container;

impl Driver {
    /// Takes the CPUs that an update of a container's resources names, if it does.
    pub(super) fn update_cpus(&mut self, of: &ContainerId, resources: &[u8]) {
        let said = serde_json::from_slice::<serde_json::Value>(resources).unwrap_or_default();
        let Some(cpus) = said["cpu"]["cpus"].as_str().filter(|cpus| !cpus.is_empty()) else { return };
        if let Some(container) = self.containers.get_mut(of) {
            container.cpus = Some(cpus.to_owned());
            self.place();
        }
    }

    /// Has the VMM run on the CPUs of its containers, after what was begun before.
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
            // It is in its group then. One that can't be has been given up.
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
