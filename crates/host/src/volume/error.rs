//! Errors of volumes.

use std::{io, path::PathBuf};

use sandboxer_base::Code;

use super::tree::TreeError;
use crate::{helper::HelperError, rootfs::BuildError};

/// Why a volume cannot be provided.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A pod with a kernel of its own cannot have it.
    #[error("volume {}: {what} is not available in a microVM pod{hint}", at.display())]
    Unsupported {
        /// Path in the container.
        at: PathBuf,
        /// The requested feature.
        what: String,
        /// What to do instead, after a colon, or empty.
        hint: &'static str,
    },
    /// Its source cannot be examined.
    #[error("volume {}: cannot {action} {path:?}", at.display())]
    Path {
        /// Path in the container.
        at: PathBuf,
        /// The failed operation.
        action: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is a file that is too large to copy.
    #[error("volume {}: {path:?} has more than {most} bytes, the limit for a file that is copied", at.display())]
    FileTooLarge {
        /// Path in the container.
        at: PathBuf,
        /// Path on the host.
        path: PathBuf,
        /// The limit.
        most: u64,
    },
    /// Its files cannot be copied.
    #[error(transparent)]
    Files(#[from] TreeError),
    /// The helper failed or timed out.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// Its files cannot be sent.
    #[error("cannot encode files for a guest")]
    Encode(#[source] protobuf::Error),
    /// It cannot be kept up to date.
    #[error("cannot watch {dir:?} for changes{}", too_many(source))]
    Watch {
        /// Its directory on the host.
        dir: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Its disk cannot be created.
    #[error("cannot create a disk for an emptyDir")]
    Disk(#[from] BuildError),
    /// Its directory cannot hold a VM's disk.
    #[error(
        "cannot create a disk for an emptyDir in {dir:?}: it is on a network or FUSE file system; \
         keep kubelet's root directory on a local disk"
    )]
    NotLocal {
        /// The directory.
        dir: PathBuf,
    },
}

impl VolumeError {
    /// Returns the code of the response.
    pub fn code(&self) -> Code {
        match self {
            Self::Unsupported { .. } | Self::Files(TreeError::Kind { .. }) => Code::Unimplemented,
            Self::Files(TreeError::TooLarge { .. }) | Self::FileTooLarge { .. } => Code::InvalidArgument,
            Self::NotLocal { .. } => Code::FailedPrecondition,
            Self::Helper(error) => error.code(),
            _ => Code::Internal,
        }
    }
}

/// Returns a hint if there were too few inotify watches.
fn too_many(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull => " (fs.inotify.max_user_watches is too low)",
        _ => "",
    }
}
