//! Adopts the pods of an earlier daemon, many in parallel, before this one reports ready.
//!
//! | record | VM | then |
//! |---|---|---|
//! | ready | alive, agent answers | the pod is ready again, its containers' output goes on |
//! | ready | alive; no response, or an invalid one | unknown, containers as recorded; retried while the VMM lives |
//! | ready | gone | the pod has stopped; containerd learns it from its next request |
//! | starting | whatever is left of it is ended | forgotten: containerd heard of its failed start and forgot it, too |
//! | stopping | alive | the stop continues: the guest powers off, or is killed after the limits of a stop |
//! | stopping | gone | the pod has stopped |
//! | created, stopped | none | as recorded |
//! | unreadable | left alone | moved to quarantine and reported; the previous record is used, if it can be |
//!
//! Only the kernel decides whether a VM has ended: its process is gone. If a pod were reported stopped while its VMM
//! runs, a second one would be started, and both would write to the same volumes.
//!
//! A half-created container or exec is undone: the front repeats the caller's request. Finished ones are adopted with
//! their streams, which the front has kept.
//!
//! When the front dies, containerd marks all containers as dead and removes their bundles. Such a container is killed
//! here: otherwise it would run next to its replacement.

pub(super) mod containers;
pub(super) mod unreached;
mod vmm;

use std::{collections::HashMap, io, sync::Arc};

use futures::stream::{self, StreamExt};
use sandboxer_base::{Code, chain, clock::now_ns};
use sandboxer_guest::Signal;
use sandboxer_protocol::id::ContainerId;

use super::{
    daemon_state::DaemonState,
    driver::{Found, FoundVm},
    handle::PodHandle,
    journal::PodRecord,
    place::Place,
    quarantine::Quarantine,
    spec::PodSpec,
};
use crate::{
    error::{PodError, tolerate},
    pod::{self, container::KILLED},
    state::{PodState, PodStatus},
};
use containers::adopt_container;
use unreached::{clear_shares, shares_of};
use vmm::{Left, look};

/// Maximum number of pods that are adopted in parallel. Each gets several requests, and the content of its volumes
/// again, which uses memory in this process and in its guest. A pod that does not respond keeps its place for
/// [`unreached::FIRST_ATTEMPT`].
const AT_ONCE: usize = 32;

/// The result of recovery.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Recovered {
    /// Number of pods that are ready again.
    pub alive: u32,
    /// Number of pods whose VMMs run but have not responded yet.
    pub unknown: u32,
    /// Number of pods that have stopped.
    pub stopped: u32,
    /// Number of records that could not be parsed.
    pub quarantined: u32,
}

/// The records of earlier daemons.
#[derive(Debug, Default)]
pub struct Records {
    pods: Vec<PodRecord>,
    quarantined: u32,
}

impl Records {
    /// Reads all records. An unreadable record is moved to the quarantine, and its pod is adopted by its previous
    /// record. Changes between the two are repaired as after a worker's death, from the state of agent and VMM. A
    /// record that cannot be moved counts as quarantined where it is.
    pub fn read(node: &DaemonState) -> io::Result<Self> {
        let mut records = Self::default();
        for record in node.journal.records()? {
            match record {
                Ok(record) => records.pods.push(record),
                Err(error) => {
                    let before = node.journal.instead_of(&error);
                    let aside = Quarantine::of(&node.config).put_aside(&error, before.is_some());
                    let moved = aside.is_ok();
                    tolerate("put aside", error.path(), aside);
                    match before {
                        Some(record) => {
                            if moved {
                                tolerate("put back", error.path(), node.journal.go_back(error.path()));
                            }
                            records.pods.push(record);
                        }
                        None => records.quarantined += 1,
                    }
                }
            }
        }
        Ok(records)
    }

    /// Returns the PIDs of the recorded VMMs.
    pub fn vmms(&self) -> impl Iterator<Item = u32> {
        self.pods.iter().filter_map(|record| Some(record.vm.as_ref()?.pid))
    }
}

/// Adopts every recorded pod. Returns when all are in the registry.
pub async fn recover(node: &Arc<DaemonState>, records: Records) -> Recovered {
    let mut recovered = Recovered { quarantined: records.quarantined, ..Recovered::default() };
    let pods = records.pods.into_iter().map(|record| adopt(node, record));
    let mut adopted = stream::iter(pods).buffer_unordered(AT_ONCE);
    while let Some(adopted) = adopted.next().await {
        match adopted {
            Adopted::Alive => recovered.alive += 1,
            Adopted::Unknown => recovered.unknown += 1,
            Adopted::Stopped => recovered.stopped += 1,
            Adopted::Forgotten => {}
        }
    }
    recovered
}

enum Adopted {
    Alive,
    Unknown,
    Stopped,
    Forgotten,
}

/// Adopts one pod.
async fn adopt(node: &Arc<DaemonState>, record: PodRecord) -> Adopted {
    let id = record.spec.id.clone();
    let shares = shares_of(node, &record.spec);
    let left = look(node, &record, &shares).await;
    if let (Left::Nothing(_), PodState::Starting) = (&left, record.status.state) {
        clear_shares(&shares, &record).await;
        match forget(node, &record.spec).await {
            Ok(()) => return Adopted::Forgotten,
            Err(error) => {
                tracing::error!(pod = %id, error = chain(&*error), "cannot remove the record of a pod that was never ready");
            }
        }
    }
    let mut status = record.status.clone();
    let outcome = match &left {
        Left::Answering(_) => {
            status.recovered = true;
            Adopted::Alive
        }
        Left::Running(unreached) => {
            // A pod that was not ready cannot be adopted; its VMM is killed.
            let was_ready = status.state == PodState::Ready;
            status.state = if was_ready { PodState::Unknown } else { PodState::Stopping };
            status.reason = unreached.first_error.clone();
            Adopted::Unknown
        }
        Left::Nothing(why) => {
            clear_shares(&shares, &record).await;
            if status.state != PodState::Created {
                stopped(&mut status, why.as_ref());
            }
            Adopted::Stopped
        }
    };
    let alive = !matches!(outcome, Adopted::Stopped);
    let forgotten_start = !matches!(outcome, Adopted::Alive) && record.status.state == PodState::Starting;
    let PodRecord { spec, link_key, containers: recorded, placement, restored, .. } = record;
    let shape = spec.shape(status.interfaces.len());
    let cgroup = node.cgroups.for_pod(&spec.cgroup_parent, &spec.id).filter(|_| alive);
    let bounds = cgroup.map(|cgroup| cgroup.bounds()).unwrap_or_default();
    let place = Place { placement: node.placer.again(placement.filter(|_| alive), shape), bounds };
    let vm = match left {
        Left::Answering(reached) => FoundVm::Reached(reached, place),
        Left::Running(unreached) => FoundVm::Unreached(unreached, place),
        Left::Nothing(_) => FoundVm::None,
    };
    // Without the bundle of its sandbox container, the pod is removed with all its containers.
    let pod_is_forgotten = match &spec.bundle {
        Some(bundle) => matches!(tokio::fs::try_exists(bundle).await, Ok(false)),
        None => false,
    };
    let mut forgotten = Vec::new();
    for container in recorded.iter().filter(|_| alive && !pod_is_forgotten) {
        if let Ok(false) = tokio::fs::try_exists(&container.bundle).await {
            forgotten.push(container.id.clone());
        }
    }
    let containers = recorded
        .into_iter()
        .map(|container| (container.id.clone(), Box::new(adopt_container(node, container, alive, &spec))))
        .collect::<HashMap<_, _>>();
    let ids: Vec<ContainerId> = containers.keys().cloned().collect();
    let shared = node.clone();
    let inserted = node.registry.insert(&id, || {
        let found = Found { vm, containers, shares: Some(shares), restored };
        pod::spawn(shared, spec, link_key, status, found)
    });
    let handle = match inserted {
        Ok(handle) => handle,
        Err(error) => {
            tracing::error!(pod = %id, %error, "two records name the same pod");
            return Adopted::Stopped;
        }
    };
    for container in ids {
        if let Err(error) = node.registry.insert_container(&container, &id) {
            tracing::error!(pod = %id, %error, "two pods' records name the same container");
        }
    }
    for container in forgotten {
        // Not awaited: ready pods must not wait for one container's exit.
        tokio::spawn(end_forgotten(handle.clone(), container));
    }
    if forgotten_start {
        // containerd has forgotten the pod, so this daemon removes it as soon as it can.
        tokio::spawn(async move {
            let _ = handle.stopped().await;
            if let Err(error) = handle.remove().await {
                tracing::error!(pod = %handle.id(), error = chain(&error), "cannot remove a pod that was never ready");
            }
        });
    }
    outcome
}

/// Records that a pod stopped while no daemon was running.
fn stopped(status: &mut PodStatus, why: Option<&PodError>) {
    let was_ready = status.state == PodState::Ready;
    if let Some(error) = why {
        status.reason = format!("lost while the daemon was away: {}", chain(error));
    } else if was_ready && status.reason.is_empty() {
        status.reason = "its VMM ended while the daemon was away".to_owned();
    }
    let was_requested = status.reason.is_empty();
    status.state = PodState::Stopped;
    status.exit_status = if was_requested { 0 } else { KILLED };
    status.vmm_pid = 0;
    if status.exited_at_ns == 0 {
        status.exited_at_ns = now_ns();
    }
}

/// Removes the files of a pod that was never reported to containerd.
async fn forget(node: &DaemonState, spec: &PodSpec) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let id = &spec.id;
    pod::stop::clear(node, spec).await?;
    node.journal.pod(id).remove().await?;
    tracing::info!(pod = %id, "undid a start that an earlier daemon did not finish");
    Ok(())
}

/// Kills and removes a container that containerd no longer knows.
async fn end_forgotten(pod: PodHandle, container: ContainerId) {
    let ended = async {
        pod.resolved().await;
        match pod.signal(container.clone(), None, Signal::KILL, true).await {
            // The container exited meanwhile.
            Err(error) if error.code() == Code::NotFound => {}
            signalled => signalled?,
        }
        let mut init = pod.process(container.clone(), None).await?;
        // An error means that the container is gone, which is fine.
        let _ = init.phase.wait_for(|phase| phase.exit().is_some()).await;
        pod.delete(container.clone(), None).await
    };
    match ended.await {
        Ok(_) => tracing::info!(pod = %pod.id(), %container, "killed: containerd has forgotten it"),
        Err(error) => {
            tracing::warn!(pod = %pod.id(), %container, error = chain(&error), "containerd has forgotten it, but it may still run");
        }
    }
}
