//! Looks for the VMM of a recorded pod.

use std::sync::Arc;

use async_trait::async_trait;
use sandboxer_base::chain;
use sandboxer_process::Written;
use sandboxer_vmm::{Held, HeldProcesses, VmExit, VmmError};

use super::unreached::{FIRST_ATTEMPT, FIRST_PAUSE, Reached, Unreached, is_broken, reach};
use crate::{
    error::PodError,
    pod::{daemon_state::DaemonState, journal::PodRecord},
    share::Shares,
    state::PodState,
};

/// The state of a recorded pod's VM.
pub(super) enum Left {
    /// No VMM process exists; with the reason, if it is known.
    Nothing(Option<PodError>),
    /// The VM and its agent respond.
    Answering(Box<Reached>),
    /// The VMM runs, but the pod could not be reached.
    Running(Arc<Unreached>),
}

/// Looks for a pod's VM. Kills it if the pod was starting.
pub(super) async fn look(node: &Arc<DaemonState>, record: &PodRecord, shares: &Shares) -> Left {
    let running = |vmm: Arc<dyn Held>, error: &PodError| {
        let first_error = chain(error);
        tracing::error!(pod = %record.spec.id, error = first_error, "cannot reach the pod's running VMM; retrying");
        Left::Running(Arc::new(Unreached {
            record: record.clone(),
            shares: shares.clone(),
            vmm,
            first_error,
        }))
    };
    let vmm = match hold(node, record) {
        Ok(Some(vmm)) => vmm,
        Ok(None) => return Left::Nothing(None),
        Err(error) => {
            let later = Later { node: node.clone(), record: record.clone() };
            return running(Arc::new(later), &error.into());
        }
    };
    if let (PodState::Stopping, Some(_)) = (record.status.state, &record.vm) {
        // The guest's unwritten data have to reach the disks. Not awaited here: other pods must not wait for that.
        return Left::Running(Arc::new(Unreached {
            record: record.clone(),
            shares: shares.clone(),
            vmm,
            first_error: String::new(),
        }));
    }
    if record.status.state != PodState::Ready || record.vm.is_none() {
        return match vmm.end().await {
            Ok(()) => Left::Nothing(None),
            Err(error) => running(vmm, &error.into()),
        };
    }
    let reached = tokio::select! {
        reached = tokio::time::timeout(FIRST_ATTEMPT, reach(node, record, shares)) => reached,
        _ = vmm.ended() => return Left::Nothing(None),
    };
    let late = |_| {
        let (subject, reason) =
            (format!("pod {}", record.spec.id), format!("no answer within {FIRST_ATTEMPT:?}"));
        Err(PodError::Failed { subject, reason })
    };
    let reached = reached.unwrap_or_else(late);
    match reached {
        Ok(reached) => Left::Answering(Box::new(reached)),
        Err(error) if is_broken(&error) => match vmm.end().await {
            Ok(()) => Left::Nothing(Some(error)),
            Err(left) => running(vmm, &left.into()),
        },
        Err(error) => running(vmm, &error),
    }
}

/// Returns the VMM of a pod: the recorded one or, because a daemon may have died between start and record, the one that
/// was started for the pod's directory.
fn hold(node: &DaemonState, record: &PodRecord) -> Result<Option<Arc<dyn Held>>, VmmError> {
    if let Some(vm) = &record.vm {
        return node.vmms.hold(vm);
    }
    let strays = HeldProcesses::strays(&record.spec.id, &node.run_dir(&record.spec.id))?;
    Ok(strays.map(|strays| {
        tracing::warn!(pod = %record.spec.id, pids = ?strays.pids(), "killing a VMM without a record");
        Arc::new(strays) as Arc<dyn Held>
    }))
}

/// A VMM that could not be looked up, and may run.
#[derive(Debug)]
struct Later {
    node: Arc<DaemonState>,
    record: PodRecord,
}

impl Later {
    /// Opens the VMM as soon as possible. `None`: there is no VMM.
    async fn hold(&self) -> Option<Arc<dyn Held>> {
        loop {
            match hold(&self.node, &self.record) {
                Ok(vmm) => return vmm,
                Err(error) => {
                    tracing::warn!(pod = %self.record.spec.id, error = chain(&error), "cannot look for the pod's VMM");
                    tokio::time::sleep(FIRST_PAUSE).await;
                }
            }
        }
    }
}

#[async_trait]
impl Held for Later {
    async fn ended(&self) -> VmExit {
        match self.hold().await {
            Some(vmm) => vmm.ended().await,
            None => VmExit { how: "is gone".to_owned(), last_lines: Vec::new() },
        }
    }

    async fn end(&self) -> Result<(), VmmError> {
        match hold(&self.node, &self.record)? {
            Some(vmm) => vmm.end().await,
            None => Ok(()),
        }
    }

    fn written(&self) -> Option<Written> {
        None
    }
}
