//! Errors of root file systems.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use sandboxer_base::Code;
use sandboxer_protocol::id::{ContainerId, SandboxId};

use super::{FsType, mounts::Refusal};
use crate::helper::HelperError;

/// Why a container's root file system cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// Its snapshot has an unsupported type.
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
    /// Its disks cannot be created.
    #[error("cannot create the root file system of container {container} in pod {pod}")]
    Build {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// The cause; shared with others that waited for the same image.
        source: Arc<BuildError>,
    },
    /// Its writable disk cannot be created.
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
    /// The store's own directory failed.
    #[error("cannot open the root file systems' store")]
    Open(#[from] BuildError),
}

impl RootfsError {
    /// Returns the code of the response.
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
    /// Returns the code of the response.
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

/// Why an image cannot be created or used.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// An operation on a file or directory of the host failed.
    #[error("cannot {action} {path:?}")]
    Path {
        /// The operation.
        action: &'static str,
        /// Its path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The merged view of a chain of layers cannot be mounted.
    #[error("cannot mount the merged view of layers {layers:?}: {hint}")]
    View {
        /// Uppermost first.
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
        /// "exited with status 1", "was killed by signal 9".
        how: String,
        /// The file it was to create.
        path: PathBuf,
        /// The end of its stderr.
        stderr: String,
    },
    /// A program exceeded its time limit.
    #[error("{program:?} did not create {path:?} within {limit:?} and was killed")]
    TooSlow {
        /// The program.
        program: PathBuf,
        /// The file it was to create.
        path: PathBuf,
        /// The time limit.
        limit: Duration,
    },
    /// The file system that holds the images is full.
    #[error("no space left in {dir:?} for an image of {layers:?}: free some, or lower rootfs.cache_mib")]
    Full {
        /// The store.
        dir: PathBuf,
        /// The source of the image.
        layers: Vec<PathBuf>,
    },
    /// The files of a snapshot are larger than the limit, holes included.
    #[error("files of {layers:?} have {bytes} bytes, holes included, which is more than an image may hold")]
    TooLarge {
        /// The source of the image.
        layers: Vec<PathBuf>,
        /// Sum of the files' sizes.
        bytes: u64,
    },
    /// Directories are nested too deep.
    #[error(
        "the directory {path:?} of a snapshot lies too deep: an image may have {most} directories in one another"
    )]
    TooDeep {
        /// The first that is too deep.
        path: PathBuf,
        /// The limit.
        most: usize,
    },
    /// Too many whiteouts without a lower file.
    #[error(
        "the snapshot has more whiteouts of files that no lower layer has than {most} bytes of paths can name; \
         the last one is {path:?}"
    )]
    TooManyGhosts {
        /// The first beyond the limit.
        path: PathBuf,
        /// Limit of the length of all their paths, bytes.
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
    /// A helper failed or timed out.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopped,
}
