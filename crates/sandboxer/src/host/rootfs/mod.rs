//! A container's snapshot as disks of its pod's machine.
//!
//! No file service runs between host and guest: what containerd would have mounted becomes block
//! devices. A snapshot of directories (overlayfs, native) becomes one read-only EROFS image, built
//! once per chain of layers and cached; a snapshotter's own images are plugged in as they are.

mod image;
mod snapshot;
mod store;

use std::{fmt, io, path::PathBuf};

use sandboxer_protocol::id::ContainerId;

use crate::{error::Code, vmm::DiskSpec};
pub use store::{Lease, RootfsStore};

/// A mount as containerd asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// "overlay", "bind", "erofs", "ext4", "format/mkdir/overlay", ….
    pub fstype: String,
    /// Path, device, or a name that means nothing.
    pub source: String,
    /// As in fstab.
    pub options: Vec<String>,
}

/// A file system that a guest mounts from a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FsType {
    /// Read-only, made by us or by the erofs snapshotter.
    Erofs,
    /// Writable.
    Ext4,
}

impl fmt::Display for FsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FsType::Erofs => "erofs",
            FsType::Ext4 => "ext4",
        })
    }
}

/// A disk and what is on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The disk.
    pub disk: DiskSpec,
    /// The file system on it.
    pub fstype: FsType,
}

/// Where what a container writes goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writable {
    /// Into guest memory; at most so many bytes, 0: half of it.
    Tmpfs {
        /// The bound.
        bytes: u64,
    },
    /// Onto a disk, over the layers.
    Overlay(Layer),
    /// Into the disk that is the whole root file system; there are no layers.
    Whole(Layer),
}

/// A container's root file system, as disks.
#[derive(Debug)]
pub struct RootfsPlan {
    /// Read-only layers, uppermost first.
    pub lower: Vec<Layer>,
    /// Where what is written goes.
    pub writable: Writable,
    /// Keeps the images of the cache among them.
    pub leases: Vec<Lease>,
}

/// Why a root file system can't be made.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// Something of the host failed.
    #[error("cannot {action} {path:?}")]
    Host {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// containerd asks for mounts that can't become disks.
    #[error("container {container}: {reason}")]
    Unsupported {
        /// The container.
        container: ContainerId,
        /// Which, and what to do.
        reason: String,
    },
    /// An image isn't what its mount says.
    #[error("container {container}: {path:?} is no {fstype} image: {reason}")]
    Damaged {
        /// The container.
        container: ContainerId,
        /// The image.
        path: PathBuf,
        /// What it should be.
        fstype: FsType,
        /// What is wrong with it.
        reason: String,
    },
    /// The program that makes images failed.
    #[error("{program:?} cannot make {image:?}: {words}")]
    Mkfs {
        /// The program.
        program: PathBuf,
        /// The image.
        image: PathBuf,
        /// Its last words.
        words: String,
    },
}

impl RootfsError {
    /// The code to answer with.
    pub fn code(&self) -> Code {
        match self {
            Self::Unsupported { .. } => Code::Unimplemented,
            Self::Damaged { .. } => Code::InvalidArgument,
            Self::Host { .. } | Self::Mkfs { .. } => Code::Internal,
        }
    }
}
