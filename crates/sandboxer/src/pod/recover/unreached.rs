//! Connects to guests of an earlier daemon, and retries until they respond.

use std::{sync::Arc, time::Duration};

use futures::future;
use sandboxer_base::chain;
use sandboxer_guest::GuestError;
use sandboxer_host::volume::Needed;
use sandboxer_protocol::agent as wire;
use sandboxer_vmm::{Held, Vm};
use tokio::sync::watch;

use super::containers::undo_half_made;
use crate::{
    error::PodError,
    front,
    pod::{checkpoint, daemon_state::DaemonState, journal::PodRecord, running_vm::RunningVm, spec::PodSpec},
    share::Shares,
    state::PodStatus,
};

/// A pod with a reachable guest.
#[derive(Debug)]
pub struct Reached {
    /// The pod's VM and agent.
    pub live: RunningVm,
    /// Processes that the agent knows.
    pub known: Vec<wire::Process>,
    /// The pod's volumes as recorded.
    pub volumes: Vec<Needed>,
    /// Volumes that the agent knows.
    pub made: Vec<String>,
}

/// Time that the daemon waits for pods that do not respond before it reports ready.
pub(super) const FIRST_ATTEMPT: Duration = Duration::from_secs(20);
/// Delay before the first retry; it doubles each time.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Maximum delay between two attempts.
pub(super) const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Time after which the pod is reported as not ready, so that the manager stops it.
const OVERDUE_AFTER: Duration = Duration::from_secs(120);

/// A pod of an earlier daemon whose VMM runs but which has not responded to this daemon.
#[derive(Debug)]
pub struct Unreached {
    /// The pod's record.
    pub record: PodRecord,
    /// The pod's VMM.
    pub vmm: Arc<dyn Held>,
    pub(super) shares: Shares,
    pub(super) first_error: String,
}

/// The outcome of an unknown pod.
#[derive(Debug)]
pub enum Resolved {
    /// The pod responds.
    Reached(Box<Reached>),
    /// The VMM has exited, for this reason.
    Ended(String),
}

impl Unreached {
    /// Retries until the pod responds or its VMM has exited. Reports progress to `pod_status`.
    pub async fn resolve(&self, node: &Arc<DaemonState>, pod_status: &watch::Sender<PodStatus>) -> Resolved {
        let overdue = async {
            tokio::time::sleep(OVERDUE_AFTER).await;
            tracing::error!(
                pod = %self.record.spec.id,
                "the pod has not answered for {OVERDUE_AFTER:?}; containerd is told that it is not ready. Stop the pod: its VMM is killed then"
            );
            pod_status.send_modify(|status| status.overdue = true);
            future::pending().await
        };
        let ended = tokio::select! {
            resolved = self.reached(node, pod_status) => match resolved {
                Ok(reached) => return Resolved::Reached(reached),
                Err(reason) => reason,
            },
            exit = self.vmm.ended() => format!("its VMM {} before it had answered: {}", exit.how, pod_status.borrow().reason),
            () = overdue => String::new(),
        };
        self.end_shares().await;
        Resolved::Ended(ended)
    }

    /// Retries until the pod responds. Returns an error if its guest broke the session; then its VMM has been killed.
    async fn reached(
        &self,
        node: &Arc<DaemonState>,
        pod_status: &watch::Sender<PodStatus>,
    ) -> Result<Box<Reached>, String> {
        let mut pause = FIRST_PAUSE;
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
            let error = match reach(node, &self.record, &self.shares).await {
                Ok(reached) => return Ok(Box::new(reached)),
                Err(error) if is_broken(&error) => match self.vmm.end().await {
                    Ok(()) => return Err(chain(&error)),
                    Err(left) => left.into(),
                },
                Err(error) => error,
            };
            let reason = chain(&error);
            if pod_status.borrow().reason != reason {
                tracing::warn!(pod = %self.record.spec.id, error = reason, "cannot reach the pod yet");
                pod_status.send_modify(|status| status.reason = reason);
            }
        }
    }

    /// Kills the server of the pod's shares. The VMM must have exited before.
    pub async fn end_shares(&self) {
        clear_shares(&self.shares, &self.record).await;
    }
}

/// Returns whether the guest broke the protocol; then there is no retry.
pub(super) fn is_broken(error: &PodError) -> bool {
    matches!(error, PodError::Guest(GuestError::Violated { .. }))
}

/// Connects to the guest of a pod that was ready, and undoes work in it that no caller waits for any more.
pub(super) async fn reach(
    node: &Arc<DaemonState>,
    record: &PodRecord,
    shares: &Shares,
) -> Result<Reached, PodError> {
    let id = &record.spec.id;
    let no_vmm =
        || PodError::Failed { subject: format!("VMM of pod {id}"), reason: "it is about to end".to_owned() };
    let recorded = record.vm.as_ref().ok_or_else(no_vmm)?;
    let vm = node.vmms.adopt(recorded).await?.ok_or_else(no_vmm)?;
    let frozen = checkpoint::resume_saved(node, &record.spec, vm.as_ref()).await?;
    let live = greet(node, record, &vm).await?;
    let work = async {
        if let Some(frozen) = &frozen {
            checkpoint::go_on(&live, frozen).await?;
            node.front.forget(&front::key(checkpoint::SAVING, id, None));
        }
        let known = live.agent.processes().await?;
        let made = live.agent.volumes().await?;
        if let Err(error) = shares.adopt(record.shares.clone(), Some(live.guest()), recorded.pid).await {
            tracing::error!(pod = %id, error = chain(&error), "cannot adopt the pod's shares");
        }
        undo_half_made(node, &live, record, &known).await;
        end_denied(&live, record, &known).await?;
        Ok((known, made))
    };
    match work.await {
        Ok((known, made)) => Ok(Reached { live, known, made, volumes: record.volumes.clone() }),
        Err(error) => Err(live.agent.violation().map_or(error, PodError::from)),
    }
}

/// Kills containers that ran according to the record but that the agent does not know: a container reported as exited
/// must not run.
pub(super) async fn end_denied(
    live: &RunningVm,
    record: &PodRecord,
    known: &[wire::Process],
) -> Result<(), PodError> {
    for container in record.containers.iter().filter(|container| container.init.exit.is_none()) {
        if !known.iter().any(|process| process.container_id == container.id.as_str()) {
            tracing::warn!(pod = %record.spec.id, container = %container.id, "the agent does not know a recorded container; killing it");
            live.agent.delete_container(&container.id).await?;
        }
    }
    Ok(())
}

/// Returns the shares of a pod.
pub(super) fn shares_of(node: &DaemonState, spec: &PodSpec) -> Shares {
    let cgroup = node.cgroups.for_pod(&spec.cgroup_parent, &spec.id);
    let helpers = node.volumes.helpers.on_behalf_of(&spec.uid);
    Shares::new(spec.id.clone(), node.run_dir(&spec.id), spec.memory_mib, cgroup, helpers)
}

/// Kills the server of the shares of a dead pod.
pub(super) async fn clear_shares(shares: &Shares, record: &PodRecord) {
    shares.end().await;
    let vmm = record.vm.as_ref().map_or(0, |vm| vm.pid);
    if let Err(error) = shares.adopt(record.shares.clone(), None, vmm).await {
        tracing::error!(pod = %record.spec.id, error = chain(&error), "cannot kill the server of the pod's shares");
    }
}

/// Requests the guest of a pod that an earlier daemon was stopping to power off: that daemon may not have done so. A
/// guest that does not respond is normal.
pub async fn power_off(node: &DaemonState, record: &PodRecord) {
    let request = async {
        let recorded = record.vm.as_ref()?;
        let vm = node.vmms.adopt(recorded).await.ok()??;
        greet(node, record, &vm).await.ok()?.agent.power_off().await;
        Some(())
    };
    if tokio::time::timeout(node.config.vm.agent_timeout, request).await.ok().flatten().is_none() {
        tracing::debug!(pod = %record.spec.id, "the guest of a pod that was being stopped does not answer");
    }
}

pub(super) async fn greet(
    node: &DaemonState,
    record: &PodRecord,
    vm: &Arc<dyn Vm>,
) -> Result<RunningVm, PodError> {
    let limit = node.config.vm.agent_timeout;
    let id = &record.spec.id;
    let greeting = sandboxer_guest::connect(id, vm.as_ref(), &record.link_key, node.config.vm.agent_timeout);
    match tokio::time::timeout(limit, greeting).await {
        Ok(greeted) => {
            let (agent, _) = greeted?;
            Ok(RunningVm { vm: vm.clone(), agent, disk_limits: record.spec.disk_limits })
        }
        Err(_) => {
            let console = vm.last_lines().await.join(" | ");
            Err(PodError::NotReady { pod: id.clone(), limit, console })
        }
    }
}
