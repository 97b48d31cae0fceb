//! The state of a pod, as its task has it: each state with what exists in it and nowhere else.
//!
//! [`PodState`] is the same without the contents, for everybody else.

use std::{mem, net::TcpListener, sync::Arc};

use sandboxer_vmm::VmRecord;

use super::running_pod::RunningPod;
use crate::{
    error::PodError,
    pod::{place::Place, recover::unreached::Unreached, request::Reply},
    state::PodState,
};

/// The state of a pod. See `state.rs` for the transitions.
pub(super) enum State {
    /// The pod holds no resources.
    Created,
    /// A start is in progress.
    Starting { waiters: Vec<Reply<()>> },
    /// The VM runs and its agent responds. `fault`: the fault for which the VM is being killed.
    Ready { pod: Box<RunningPod>, fault: Option<PodError> },
    /// An earlier daemon's VMM runs, but VM and agent do not respond.
    Unknown(UnreachedPod),
    /// Something of the pod still runs, and is to end.
    Stopping(Stopping),
    /// Nothing of the pod runs.
    Stopped { is_removing: bool },
}

/// A pod that is being stopped.
pub(super) struct Stopping {
    pub what: Ending,
    /// Whether an attempt to end it is in progress. If one has failed, the pod stays until its VMM exits.
    pub in_progress: bool,
    pub waiters: Vec<Reply<()>>,
}

/// What a stop waits for.
pub(super) enum Ending {
    /// A start, which was cancelled and undoes its own work.
    Start { waiters: Vec<Reply<()>> },
    /// A VM with an agent.
    Vm(Box<RunningPod>),
    /// A VMM of an earlier daemon.
    Unreached(UnreachedPod),
}

/// A pod of an earlier daemon that has not responded to this one.
pub(super) struct UnreachedPod {
    pub vmm: Arc<Unreached>,
    pub place: Place,
}

impl State {
    /// Returns the state without its contents.
    pub fn kind(&self) -> PodState {
        match self {
            Self::Created => PodState::Created,
            Self::Starting { .. } => PodState::Starting,
            Self::Ready { .. } => PodState::Ready,
            Self::Unknown(_) => PodState::Unknown,
            Self::Stopping(_) => PodState::Stopping,
            Self::Stopped { .. } => PodState::Stopped,
        }
    }

    /// Takes the state apart. The caller sets the next state.
    pub fn take(&mut self) -> Self {
        mem::replace(self, Self::Created)
    }

    /// Returns the pod's VM with what belongs to it, while the pod is ready, and until the VM has ended.
    pub fn running(&self) -> Option<&RunningPod> {
        match self {
            Self::Ready { pod, .. } | Self::Stopping(Stopping { what: Ending::Vm(pod), .. }) => Some(pod),
            _ => None,
        }
    }

    /// Same as [`State::running`].
    pub fn running_mut(&mut self) -> Option<&mut RunningPod> {
        match self {
            Self::Ready { pod, .. } | Self::Stopping(Stopping { what: Ending::Vm(pod), .. }) => Some(pod),
            _ => None,
        }
    }

    /// Returns an earlier daemon's VMM, while the pod's state is unknown, and until the VMM has ended.
    pub fn unreached(&self) -> Option<&UnreachedPod> {
        match self {
            Self::Unknown(pod) | Self::Stopping(Stopping { what: Ending::Unreached(pod), .. }) => Some(pod),
            _ => None,
        }
    }

    /// Returns the place of the pod's VMM, if there is one.
    pub fn place(&self) -> Option<&Place> {
        self.running().map(|pod| &pod.place).or_else(|| self.unreached().map(|pod| &pod.place))
    }

    /// Returns the VM's record for the journal.
    pub fn vm_record(&self) -> Option<VmRecord> {
        match self.running() {
            Some(pod) => Some(pod.live.vm.record()),
            None => self.unreached()?.vmm.record.vm.clone(),
        }
    }

    /// Drops everything that exists only while the VMM runs. Returns the pod's listeners on the host, and the callers
    /// that wait for the stop.
    pub fn end(self) -> (Vec<TcpListener>, Vec<Reply<()>>) {
        match self {
            Self::Ready { pod, .. } => (pod.end(), Vec::new()),
            Self::Stopping(Stopping { what: Ending::Vm(pod), waiters, .. }) => (pod.end(), waiters),
            Self::Stopping(Stopping { waiters, .. }) => (Vec::new(), waiters),
            Self::Created | Self::Starting { .. } | Self::Unknown(_) | Self::Stopped { .. } => {
                Default::default()
            }
        }
    }
}
