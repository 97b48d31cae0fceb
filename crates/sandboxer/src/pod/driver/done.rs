//! Finished work, as the pod's task gets it.

use std::time::Duration;

use sandboxer_protocol::id::{ContainerId, ExecId};
use sandboxer_vmm::{Shape, VmExit, VmmError};

use crate::{
    checkpoint::Manifest,
    error::PodError,
    front::EntryHandle,
    pod::{
        container::{
            Exit, NewContainer, StdioPaths,
            io::{Io, Subject},
            resources::HostCpus,
            start::Created,
        },
        journal::JournalError,
        placer::Seat,
        recover::unreached::Resolved,
        request::Reply,
        resize::Change,
        start::StartedPod,
        view::Moved,
    },
};

/// Finished work and its result.
pub(super) enum Done {
    /// Work that does not change the pod's state has finished.
    Nothing,
    PodStarted(Result<StartedPod, PodError>),
    PodStopped(Result<(), VmmError>),
    Resolved(Resolved),
    VmEnded(VmExit),
    GuestLost(PodError),
    ContainerCreated {
        new: Box<NewContainer>,
        result: Result<Box<Created>, PodError>,
        reply: Reply<()>,
    },
    /// The record with a created container was written, or could not be.
    ContainerRecorded {
        id: ContainerId,
        intent: EntryHandle,
        result: Result<(), JournalError>,
        reply: Reply<()>,
    },
    /// A created container without an owner was removed from its guest, or could not be.
    ContainerUndone {
        id: ContainerId,
        intent: EntryHandle,
        why: PodError,
        result: Result<(), PodError>,
        reply: Reply<()>,
    },
    ExecCreated {
        id: ContainerId,
        exec: ExecId,
        stdio: StdioPaths,
        result: Result<Io, PodError>,
        reply: Reply<()>,
    },
    ProcessStarted {
        subject: Subject,
        result: Result<u32, PodError>,
        reply: Reply<()>,
    },
    ProcessEnded {
        subject: Subject,
        exit: Exit,
    },
    Deleted {
        id: ContainerId,
        exec: Option<ExecId>,
        result: Result<Exit, PodError>,
        reply: Reply<Exit>,
    },
    Paused {
        id: ContainerId,
        paused: bool,
        result: Result<(), PodError>,
        reply: Reply<()>,
    },
    /// The pod was saved, or could not be; and whether it goes on.
    Saved {
        result: Box<Result<Manifest, PodError>>,
        goes_on: Result<(), PodError>,
        /// Whether the pod ends if it was saved.
        stop: bool,
        reply: Reply<Box<Manifest>>,
    },
    Moved {
        result: Result<(Seat, Moved), PodError>,
        reply: Reply<Moved>,
    },
    /// The guest's OOM killer killed processes of these containers; `seen`: the number of its last event.
    OutOfMemory {
        containers: Vec<ContainerId>,
        seen: u64,
    },
    /// Limits of a container, or of all together, have changed in the guest, or could not be changed.
    Limited(Limited),
    /// Changed limits were recorded, or could not be.
    LimitsRecorded {
        written: Result<(), JournalError>,
        /// The change of the VM's size.
        change: Option<Change>,
        is_changed: bool,
    },
    /// A record was written, or could not be.
    Written(Result<(), JournalError>),
    /// The pause before the next attempt to write the record has passed.
    Rewrite(Duration),
    /// The VM has this size; `None`: unknown.
    Measured(Option<Shape>),
    Removed(Result<(), PodError>),
}

/// A change of limits that the guest has applied or rejected.
pub(super) struct Limited {
    /// The container, with the new CPUs and memory nodes of the host that it may use; `None`: the pod.
    pub container: Option<(ContainerId, HostCpus)>,
    /// The change of the VM's size.
    pub change: Option<Change>,
    pub result: Result<(), PodError>,
    pub reply: Reply<()>,
}
