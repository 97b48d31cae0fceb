//! Why a root file system can't be made.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use sandboxer_base::Code;
use sandboxer_protocol::id::{ContainerId, SandboxId};

use super::{FsType, mounts::Refusal};
use crate::helper::HelperError;

/// Why a container has no root file system.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// Its snapshot is of a kind that can't be a disk.
    #[error("snapshot of container {container} in pod {pod} cannot become a disk")]
    Mount {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// Which mount, and what to do.
        #[source]
        refusal: Refusal,
    },
    /// Its disks can't be made.
    #[error("cannot make the root file system of container {container} in pod {pod}")]
    Build {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// Why; shared with the others that waited for the same image.
        source: Arc<BuildError>,
    },
    /// It has no disk to write to.
    #[error(
        "cannot make a disk for what container {container} in pod {pod} writes: make room below state_dir, or set \
         rootfs.writable to \"memory\""
    )]
    Scratch {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// Why.
        source: Box<BuildError>,
    },
    /// The store's own directory fails.
    #[error("cannot open the root file systems' store")]
    Open(#[from] BuildError),
}

impl RootfsError {
    /// Returns the code to answer with.
    pub fn code(&self) -> Code {
        match self {
            Self::Mount { .. } => Code::Unimplemented,
            Self::Build { source, .. } => source.code(),
            Self::Scratch { source, .. } => source.code(),
            Self::Open(_) => Code::Internal,
        }
    }
}

impl BuildError {
    /// Returns the code to answer with.
    pub fn code(&self) -> Code {
        match self {
            Self::Image { .. }
            | Self::TooLarge { .. }
            | Self::TooDeep { .. }
            | Self::TooManyGhosts { .. } => Code::FailedPrecondition,
            Self::Helper(error) => error.code(),
            _ => Code::Internal,
        }
    }
}

/// Why an image can't be made or used.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A file or directory of the host is in the way.
    #[error("cannot {action} {path:?}")]
    Host {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The read-only view of a chain of layers can't be mounted.
    #[error("cannot mount the merged view of layers {layers:?}: {hint}")]
    View {
        /// Uppermost first.
        layers: Vec<PathBuf>,
        /// What to do.
        hint: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A program isn't there or can't be run.
    #[error("cannot run {program:?}: install it{setting}")]
    Program {
        /// The program.
        program: PathBuf,
        /// Where else to set it; may be empty.
        setting: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A program said no.
    #[error("{program:?} {how} while making {path:?}: {stderr}")]
    Failed {
        /// The program.
        program: PathBuf,
        /// "exited with status 1", "was killed by signal 9".
        how: String,
        /// What it was to make.
        path: PathBuf,
        /// The last it said.
        stderr: String,
    },
    /// A program did not come to an end.
    #[error("{program:?} was not done with {path:?} within {limit:?} and was killed")]
    TooSlow {
        /// The program.
        program: PathBuf,
        /// What it was to make.
        path: PathBuf,
        /// How long it had.
        limit: Duration,
    },
    /// The file system that holds the images is full.
    #[error("no space left in {dir:?} for an image of {layers:?}: free some, or lower rootfs.cache_mib")]
    Full {
        /// The store.
        dir: PathBuf,
        /// What the image was to hold.
        layers: Vec<PathBuf>,
    },
    /// The files of a snapshot seem larger than any image should be.
    #[error("files of {layers:?} have {bytes} bytes, holes included, which is more than an image may hold")]
    TooLarge {
        /// What the image was to hold.
        layers: Vec<PathBuf>,
        /// Sum of the files' sizes.
        bytes: u64,
    },
    /// Directories lie in one another too deep.
    #[error(
        "the directory {path:?} of a snapshot lies too deep: an image may have {most} directories in one another"
    )]
    TooDeep {
        /// The first that is too deep.
        path: PathBuf,
        /// How deep they may lie.
        most: usize,
    },
    /// Too many whiteouts hide nothing.
    #[error(
        "the snapshot has more whiteouts of files that no lower layer has than {most} bytes of paths can name; \
         the last one is {path:?}"
    )]
    TooManyGhosts {
        /// The first that is too many.
        path: PathBuf,
        /// Bytes that all their paths may have.
        most: usize,
    },
    /// An image isn't what it is said to be.
    #[error("{path:?} is no usable {fstype} image: {reason}; pull the container's image again")]
    Image {
        /// The image.
        path: PathBuf,
        /// What it should be.
        fstype: FsType,
        /// What is wrong with it.
        reason: String,
    },
    /// Whoever touched a path for the daemon failed, or did not answer.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// The daemon is ending.
    #[error("the daemon is stopping")]
    Stopped,
}
