//! What a pod's task shows of the pod.

use sandboxer_process::cgroup::Bounds;
use sandboxer_protocol::id::{ContainerId, ExecId};
use sandboxer_vmm::Shape;

use super::Driver;
use crate::{
    error::PodError,
    pod::view::{ContainerView, PlaceView, PodView, ProcessView},
};

impl Driver {
    pub(super) fn view_process(
        &self,
        id: &ContainerId,
        exec: Option<&ExecId>,
    ) -> Result<ProcessView, PodError> {
        let process = self.process(id, exec)?;
        let container = self.containers.get(id).ok_or_else(|| PodError::NoContainer(id.clone()))?;
        Ok(ProcessView {
            bundle: container.bundle.clone(),
            stdio: process.stdio.clone(),
            paused: container.is_paused(),
            phase: process.phase.subscribe(),
        })
    }

    /// Returns the size of the pod's VM, as far as this daemon knows, with the VM's current interfaces.
    pub(super) fn shape(&self) -> Shape {
        let nics = self.spec.shape(self.status.borrow().interfaces.len()).nics;
        Shape { nics, ..self.size }
    }

    pub(super) fn view(&self) -> PodView {
        let mut containers: Vec<_> = self
            .containers
            .iter()
            .map(|(id, container)| ContainerView {
                id: id.clone(),
                pid: container.init.pid,
                phase: container.init.phase.borrow().clone(),
                paused: container.is_paused(),
                disks: container.disks.iter().map(|disk| disk.path.clone()).collect(),
                steps: container.stages.steps(),
                execs: container
                    .execs
                    .iter()
                    .map(|(id, exec)| (id.clone(), exec.pid, exec.phase.borrow().clone()))
                    .collect(),
            })
            .collect();
        containers.sort_by(|a, b| a.id.cmp(&b.id));
        PodView {
            spec: self.spec.clone(),
            size: self.shape(),
            status: self.status.borrow().clone(),
            vmm: self.state.running().map(|pod| pod.live.vm.record().vmm).unwrap_or_default(),
            place: self.view_place(),
            steps: self.stages.steps(),
            containers,
        }
    }

    /// Returns the placement of the VMM.
    fn view_place(&self) -> PlaceView {
        let place = self.state.place();
        PlaceView {
            node: place.and_then(|place| place.placement.node()),
            bounds: place.map(|place| place.bounds.clone()).unwrap_or_default(),
            by_cri: self.by_cri() != Bounds::default(),
            reason: place.map(|place| place.placement.reason.clone()).unwrap_or_default(),
        }
    }
}
