//! What an earlier daemon left of a pod.

use std::{collections::HashMap, sync::Arc};

use sandboxer_protocol::id::ContainerId;

use crate::{
    pod::{
        checkpoint::Restored,
        container::Container,
        place::Place,
        recover::unreached::{Reached, Unreached},
    },
    share::Shares,
};

/// The containers of a pod. Boxed: a map of one has space for four.
pub type Containers = HashMap<ContainerId, Box<Container>>;

/// What an earlier daemon left of a pod; empty for a new pod.
#[derive(Debug, Default)]
pub struct Found {
    /// The pod's VM.
    pub vm: FoundVm,
    /// The pod's containers.
    pub containers: Containers,
    /// The pod's live shares.
    pub shares: Option<Shares>,
    /// The saved containers with which the pod goes on.
    pub restored: Option<Restored>,
}

/// The VM that an earlier daemon left of a pod.
#[derive(Debug, Default)]
pub enum FoundVm {
    /// No VM is left: the pod is new, or has stopped.
    #[default]
    None,
    /// The VM and its agent respond: the pod is ready.
    Reached(Box<Reached>, Place),
    /// The VMM runs, but VM or agent do not respond: the pod is unknown, or stopping.
    Unreached(Arc<Unreached>, Place),
}
