//! Requests to create containers and execs.

use std::hash::Hash;

use sandboxer_protocol::id::{ContainerId, ExecId};

use crate::{
    io::Wanted,
    rootfs::Plan,
    runtime::{File, SeenDevice},
};

/// A request to create a container.
#[derive(Debug, Hash)]
pub struct Create {
    /// Chosen by containerd.
    pub id: ContainerId,
    /// OCI spec, JSON.
    pub spec: Vec<u8>,
    /// The disks of its root file system.
    pub rootfs: Plan,
    /// The streams of its init.
    pub stdio: Wanted,
    /// Files to place in the container.
    pub files: Vec<File>,
    /// Processes that it sees beside its own.
    pub sees: PidMode,
    /// Disks that it gets as device nodes.
    pub devices: Vec<SeenDevice>,
}

/// Which processes a container sees beside its own.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum PidMode {
    /// None.
    Own,
    /// Those of every container of the pod with this mode.
    Pod,
    /// Those of this container.
    Container(ContainerId),
}

/// A request to create an exec.
#[derive(Debug, Hash)]
pub struct CreateExec {
    /// Chosen by containerd.
    pub id: ExecId,
    /// OCI process, JSON.
    pub process: Vec<u8>,
    /// Its streams.
    pub stdio: Wanted,
}
