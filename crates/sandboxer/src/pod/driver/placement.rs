//! Selects the host's CPUs and memory for a pod's VMM, from CRI or else from the pod's place on a NUMA node, and moves
//! the VMM.
//!
//! A guest does not know the host's CPUs, so its containers cannot be confined to their own sets: all run on the union.
//! kubelet's static CPU policy gives exclusive CPUs to some containers, and the rest to all others.

use std::{io, path::PathBuf, sync::Arc, time::Instant};

use futures::FutureExt;
use sandboxer_base::{Cpus, chain};
use sandboxer_process::{
    cgroup::{Bounds, Cgroup},
    residence::{self, Residence},
};
use sandboxer_protocol::id::{ContainerId, SandboxId};
use sandboxer_vmm::{Shape, Vm};
use tokio::sync::oneshot;

use super::{Driver, answer, done::Done, state::State};
use crate::{
    error::PodError,
    pod::{
        container::{Container, resources::HostCpus},
        place::{self, Place},
        placer::{Placement, Placer, Seat},
        request::Reply,
        view::Moved,
    },
};

const BY_CRI: &str = "the CPU sets that CRI gave its containers";

impl Driver {
    /// Sets the CPUs and memory nodes of a container, after the guest has accepted the rest of the update.
    pub(super) fn update_cpus(&mut self, id: &ContainerId, HostCpus { cpus, mems }: HostCpus) {
        if let Some(container) = self.containers.get_mut(id).filter(|_| cpus.is_some() || mems.is_some()) {
            container.cpus = cpus.or_else(|| container.cpus.take());
            container.mems = mems.or_else(|| container.mems.take());
            self.place();
        }
    }

    /// Returns the bounds set by CRI: the unions of the containers' sets; empty if some container has no set.
    pub(super) fn by_cri(&self) -> Bounds {
        let ended = |container: &Container| container.init.phase.borrow().exit().is_some();
        let there = || self.containers.values().filter(|container| !ended(container));
        let parsed = |list: &Option<String>| list.as_deref().and_then(Cpus::parse);
        Bounds {
            cpus: Cpus::union(there().map(|container| parsed(&container.cpus))),
            nodes: Cpus::union(there().map(|container| parsed(&container.mems))),
        }
    }

    /// Confines the VMM to the CPUs of its containers, else to the CPUs of its place, after earlier changes are
    /// complete.
    pub(super) fn place(&mut self) {
        let Some(place) = self.state.place() else { return };
        let by_cri = self.by_cri();
        let bounds = match &by_cri {
            Bounds { cpus: None, nodes: None } => self.node.placer.bounds(place.placement.seat.as_ref()),
            Bounds { cpus: None, nodes } => Bounds { nodes: nodes.clone(), ..self.node.placer.bounds(None) },
            _ => by_cri.clone(),
        };
        let Some(cgroup) = self.node.cgroups.for_pod(&self.spec.cgroup_parent, &self.spec.id) else { return };
        let shape = self.shape();
        let Some(pod) = self.state.running_mut().filter(|pod| pod.place.bounds != bounds) else { return };
        let (vm, vmm) = (pod.live.vm.clone(), pod.live.vm.record().pid);
        let follow = follow_cri(&self.node.placer, &self.spec.id, &mut pod.place.placement, shape, &by_cri);
        pod.place.bounds.clone_from(&bounds);
        let id = self.spec.id.clone();
        let turn = pod.in_turn(move || {
            if let Err((path, error)) = confine(&cgroup, &*vm, &bounds) {
                let cpus = bounds.cpus.map_or_else(|| "all".to_owned(), |cpus| cpus.to_string());
                tracing::warn!(pod = %id, path = %path.display(), error = chain(&error),
                    "cannot confine the VMM to CPUs {cpus}: it runs on all of the pod's control group");
            } else if let Some((from, node)) = follow
                && let Err(error) = residence::migrate(vmm, &from, node)
            {
                tracing::warn!(pod = %id, node, %error, "cannot move the VMM's memory to the node of its CPUs");
            }
        });
        self.work.spawn(turn.map(|()| Done::Nothing));
    }

    /// Moves the VMM and its memory to a node.
    pub(super) fn on_move(&mut self, node: u32, reply: Reply<Moved>) {
        let (seat, cgroup) = value_or_answer!(reply, self.may_move(node));
        let Some(running) = self.state.running_mut() else { return };
        let (vm, pod, from) = (running.live.vm.clone(), self.spec.id.clone(), running.place.placement.node());
        let (bounds, others) = (self.node.placer.bounds(Some(&seat)), others(&self.node.placer, node));
        let (sender, moved) = oneshot::channel();
        let before = running.place.bounds.clone();
        let turn = running.in_turn(move || {
            let moved = move_memory(&cgroup, &*vm, &bounds, others, node).map_err(|reason| {
                if let Err((path, error)) = confine(&cgroup, &*vm, &before) {
                    tracing::warn!(%pod, path = %path.display(), %error, "cannot undo a move that failed");
                }
                PodError::Failed { subject: format!("cannot move pod {pod} to node {node}"), reason }
            });
            // The driver waits for it.
            let _ = sender.send(moved.map(|moved| (seat, Moved { from, ..moved })));
        });
        self.work.spawn(turn.map(|()| Done::Nothing));
        let id = self.spec.id.clone();
        self.work.spawn(async move {
            let result = moved.await.unwrap_or_else(|_| Err(PodError::Gone(id)));
            Done::Moved { result, reply }
        });
    }

    /// Returns the place on `node` and the cgroup to move, or the reason why the pod cannot be moved there.
    fn may_move(&self, node: u32) -> Result<(Seat, Cgroup), PodError> {
        let State::Ready { pod, .. } = &self.state else { return Err(self.wrong_state("move the pod")) };
        let refused = |reason: String| PodError::Unmovable { pod: self.spec.id.clone(), reason };
        let shape = self.shape();
        if self.by_cri() != Bounds::default() {
            return Err(refused(format!("{BY_CRI} say where it runs (kubelet's CPU manager)")));
        }
        if pod.place.placement.node() == Some(node) {
            return Err(refused(format!("it is on node {node}")));
        }
        if self.spec.huge_pages {
            return Err(refused("its memory is in huge pages".to_owned()));
        }
        let cgroup = self.node.cgroups.for_pod(&self.spec.cgroup_parent, &self.spec.id);
        let cgroup = cgroup.ok_or_else(|| refused(place::NO_PARENT.to_owned()))?;
        let seat = self.node.placer.seat_on(node, shape).map_err(|error| refused(error.to_string()))?;
        Ok((seat, cgroup))
    }

    pub(super) fn moved(&mut self, result: Result<(Seat, Moved), PodError>, reply: Reply<Moved>) {
        let (seat, moved) = value_or_answer!(reply, result);
        let (pod, node) = (&self.spec.id, seat.node());
        tracing::info!(%pod, from = moved.from, node, bytes = moved.bytes, took = ?moved.took, "moved the pod");
        if let Some(running) = self.state.running_mut() {
            let placement = Placement { seat: Some(seat), reason: "moved on request".to_owned() };
            running.place = Place::new(&self.node.placer, placement);
            // CRI may have set other bounds meanwhile.
            self.place();
        }
        self.save_then(reply, Ok(moved));
    }
}

/// Takes a place on the node that has all CPUs that CRI named. Returns the nodes from which memory is to be moved, and
/// the node; `None` if the VMM's memory is there, or if CRI chooses the memory nodes itself.
fn follow_cri(
    placer: &Arc<Placer>,
    pod: &SandboxId,
    placement: &mut Placement,
    shape: Shape,
    by_cri: &Bounds,
) -> Option<(Cpus, u32)> {
    let cpus = by_cri.cpus.as_ref().filter(|_| placer.is_active())?;
    let node = placer.node_of(cpus);
    let reason = BY_CRI.to_owned();
    if node.is_some() && node == placement.node() {
        placement.reason = reason;
        return None;
    }
    let seat = node.and_then(|node| placer.seat_again(node, shape).ok());
    tracing::info!(%pod, before = placement.node(), node, %cpus, "CRI chose the pod's CPUs");
    *placement = Placement { seat, reason };
    let node = node.filter(|_| by_cri.nodes.is_none())?;
    Some((others(placer, node)?, node))
}

/// Returns all nodes of the host except this one.
fn others(placer: &Placer, node: u32) -> Option<Cpus> {
    let all = Cpus::union(placer.topology().nodes().iter().map(|node| Cpus::one(node.id)))?;
    all.without(Cpus::one(node).as_ref())
}

/// Restricts the VMM to `bounds`, together with the kernel threads that serve it.
fn confine(cgroup: &Cgroup, vm: &dyn Vm, bounds: &Bounds) -> Result<(), (PathBuf, io::Error)> {
    let mut processes = vm.helpers();
    processes.push(vm.record().pid);
    cgroup.confine(&processes, bounds)
}

/// Confines the VMM to `bounds`, and moves its memory from the nodes `others` to `node`.
fn move_memory(
    cgroup: &Cgroup,
    vm: &dyn Vm,
    bounds: &Bounds,
    others: Option<Cpus>,
    node: u32,
) -> Result<Moved, String> {
    let vmm = vm.record().pid;
    let read = || {
        let path = format!("/proc/{vmm}/numa_maps");
        Residence::read(vmm).map_err(|error| format!("cannot read {path}: {error}"))
    };
    let before = read()?;
    let began = Instant::now();
    // The CPUs first: from then on, new memory is taken from their node.
    let confined = confine(cgroup, vm, bounds);
    confined.map_err(|(path, error)| format!("cannot write {}: {error}", path.display()))?;
    if let Some(others) = others {
        let migrated = residence::migrate(vmm, &others, node);
        migrated.map_err(|error| format!("the kernel does not move pages of process {vmm}: {error}"))?;
    }
    let took = began.elapsed();
    let left_bytes = read()?.remote_bytes(node);
    Ok(Moved { from: None, bytes: before.remote_bytes(node).saturating_sub(left_bytes), left_bytes, took })
}
