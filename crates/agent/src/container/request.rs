//! Requests to create containers and execs.

use std::hash::Hash;

use sandboxer_protocol::id::{ContainerId, ExecId};

use crate::{
    io::StdioSpec,
    rootfs::Plan,
    runtime::{File, SeenDevice},
};

/// A request to create a container.
#[derive(Debug, Hash)]
pub struct Create {
    /// The container's identifier, chosen by containerd.
    pub id: ContainerId,
    /// The OCI spec, JSON.
    pub spec: Vec<u8>,
    /// The disks of the root file system.
    pub rootfs: Plan,
    /// The streams of the init.
    pub stdio: StdioSpec,
    /// Files to place in the container.
    pub files: Vec<File>,
    /// The processes that the container sees beside its own.
    pub sees: PidMode,
    /// The disks that the container gets as device nodes.
    pub devices: Vec<SeenDevice>,
}

/// The processes that a container sees beside its own.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum PidMode {
    /// No other processes.
    Own,
    /// The processes of every container of the pod with this mode.
    Pod,
    /// The processes of this container.
    Container(ContainerId),
}

/// A request to create an exec.
#[derive(Debug, Hash)]
pub struct CreateExec {
    /// The exec's identifier, chosen by containerd.
    pub id: ExecId,
    /// The OCI process, JSON.
    pub process: Vec<u8>,
    /// The exec's streams.
    pub stdio: StdioSpec,
}
