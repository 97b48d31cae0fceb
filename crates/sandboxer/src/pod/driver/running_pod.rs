//! The VM of a pod, with everything that exists as long as the VM runs.

use std::{convert::Infallible, future::Future, net::TcpListener};

use tokio::sync::{oneshot, watch};

use crate::pod::{forward::Forwarding, place::Place, running_vm::RunningVm};

/// A pod whose VM runs. It is built when its start or its adoption is complete, and ends with the VM.
pub(super) struct RunningPod {
    pub live: RunningVm,
    pub place: Place,
    /// Whether the VMM is in the pod's cgroup; closed without a value if the move failed. `None`: it is there.
    is_in_cgroup: Option<watch::Receiver<bool>>,
    forwarding: Forwarding,
    /// Completes when the VMM has been confined or moved.
    placing: Option<oneshot::Receiver<Infallible>>,
}

impl RunningPod {
    pub fn new(
        live: RunningVm,
        place: Place,
        is_in_cgroup: Option<watch::Receiver<bool>>,
        forwarding: Forwarding,
    ) -> Self {
        Self { live, place, is_in_cgroup, forwarding, placing: None }
    }

    /// Waits until the VMM is in the pod's cgroup. A VMM that could not be moved has been killed.
    pub fn until_in_cgroup(&self) -> impl Future<Output = ()> + Send + use<> {
        let is_in_cgroup = self.is_in_cgroup.clone();
        async move {
            if let Some(mut is_in_cgroup) = is_in_cgroup {
                let _ = is_in_cgroup.wait_for(|is_in_cgroup| *is_in_cgroup).await;
            }
        }
    }

    /// Runs the blocking `work` after the VMM is in its cgroup and earlier works are complete.
    pub fn in_turn<W: FnOnce() + Send + 'static>(
        &mut self,
        work: W,
    ) -> impl Future<Output = ()> + Send + use<W> {
        let in_cgroup = self.until_in_cgroup();
        let (over, placing) = oneshot::channel::<Infallible>();
        let before = self.placing.replace(placing);
        async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            in_cgroup.await;
            let _ = tokio::task::spawn_blocking(work).await;
            drop(over);
        }
    }

    /// Ends the forwarding of ports. Returns the pod's listeners on the host, which are still open.
    pub fn end(self) -> Vec<TcpListener> {
        self.forwarding.end()
    }
}
