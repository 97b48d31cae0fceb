//! Errors of root file systems.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use sandboxer_base::Code;
use sandboxer_protocol::id::{ContainerId, SandboxId};

use super::{FsType, mounts::Refusal};
use crate::helper::HelperError;

/// Why a container's root file system cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// The snapshot has an unsupported type.
    #[error("snapshot of container {container} in pod {pod} cannot become a disk")]
    Mount {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// The mount, and what to do.
        #[source]
        refusal: Refusal,
    },
    /// The disks cannot be created.
    #[error("cannot create the root file system of container {container} in pod {pod}")]
    Build {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// The cause, shared with others that waited for the same image.
        source: Arc<BuildError>,
    },
    /// The writable disk cannot be created.
    #[error(
        "cannot create the scratch disk of container {container} in pod {pod}: free space below state_dir, or set \
         rootfs.writable to \"memory\""
    )]
    Scratch {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// The cause.
        source: Box<BuildError>,
    },
    /// The store's own directory cannot be used.
    #[error("cannot open the root file systems' store")]
    Open(#[from] BuildError),
}

impl RootfsError {
    /// Returns the gRPC code of the response.
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
    /// Returns the gRPC code of the response.
    pub fn code(&self) -> Code {
        match self {
            Self::Image { .. }
            | Self::Foreign { .. }
            | Self::TooLarge { .. }
            | Self::TooDeep { .. }
            | Self::TooMany { .. }
            | Self::Marked { .. }
            | Self::TooManyGhosts { .. } => Code::FailedPrecondition,
            Self::Helper(error) => error.code(),
            _ => Code::Internal,
        }
    }
}

/// Why an image cannot be created or used.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// An operation on a file or directory of the host failed.
    #[error("cannot {action} {path:?}")]
    Path {
        /// The operation.
        action: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The merged view of a chain of layers cannot be mounted.
    #[error("cannot mount the merged view of layers {layers:?}: {hint}")]
    View {
        /// The layers, uppermost first.
        layers: Vec<PathBuf>,
        /// What to do.
        hint: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A program does not exist or cannot be run.
    #[error("cannot run {program:?}: install it{setting}")]
    Program {
        /// The program.
        program: PathBuf,
        /// The config key of its path, or empty.
        setting: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program:?} {how} while creating {path:?}: {stderr}")]
    Failed {
        /// The program.
        program: PathBuf,
        /// How it failed: "exited with status 1", "was killed by signal 9".
        how: String,
        /// The file that it should have created.
        path: PathBuf,
        /// The end of its stderr.
        stderr: String,
    },
    /// A program exceeded its time limit.
    #[error("{program:?} did not create {path:?} within {limit:?} and was killed")]
    TooSlow {
        /// The program.
        program: PathBuf,
        /// The file that it should have created.
        path: PathBuf,
        /// The time limit.
        limit: Duration,
    },
    /// The file system that holds the images is full.
    #[error("no space left in {dir:?} for an image of {layers:?}: free some, or lower rootfs.cache_mib")]
    Full {
        /// The store's directory.
        dir: PathBuf,
        /// The source of the image.
        layers: Vec<PathBuf>,
        /// Bytes that the image takes; 0: unknown.
        needed: u64,
    },
    /// The files of a snapshot are larger than the limit, holes included.
    #[error("files of {layers:?} have {bytes} bytes, holes included, which is more than an image may hold")]
    TooLarge {
        /// The source of the image.
        layers: Vec<PathBuf>,
        /// Sum of the files' sizes.
        bytes: u64,
    },
    /// Directories are nested too deeply.
    #[error(
        "the directory {path:?} of a snapshot lies too deep: an image may have {most} directories in one another"
    )]
    TooDeep {
        /// The first directory that is too deep.
        path: PathBuf,
        /// The limit.
        most: usize,
    },
    /// The walk through a snapshot takes too long.
    #[error(
        "the files of a snapshot were not read within {limit:?}, up to {path:?}: they are too many, or the disk is too slow"
    )]
    TooMany {
        /// The path that the walk had reached.
        path: PathBuf,
        /// The time limit.
        limit: Duration,
    },
    /// A snapshot's own directory has one of overlay's marks, which its image cannot have.
    #[error(
        "{path:?} in the snapshot has the attribute {mark:?}, which hides files of the images below and which an image cannot \
         keep: start from a new snapshot"
    )]
    Marked {
        /// The file.
        path: PathBuf,
        /// The attribute.
        mark: &'static str,
    },
    /// Too many whiteouts without a lower file.
    #[error(
        "the snapshot has more whiteouts of files that no lower layer has than {most} bytes of paths can name; \
         the last one is {path:?}"
    )]
    TooManyGhosts {
        /// The first whiteout beyond the limit.
        path: PathBuf,
        /// The most bytes of all their paths.
        most: usize,
    },
    /// An image is damaged, or of another type.
    #[error("{path:?} is not a usable {fstype} image: {reason}; pull the container's image again")]
    Image {
        /// The image.
        path: PathBuf,
        /// The expected file system.
        fstype: FsType,
        /// What is wrong with it.
        reason: String,
    },
    /// A file that the daemon did not create is in a disk's place.
    #[error("{path:?} is not the disk that was made for this volume: {what}; remove it, or the pod")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A helper failed or timed out.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopped,
}
