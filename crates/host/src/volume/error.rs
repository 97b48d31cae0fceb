//! Errors of volumes.

use std::{io, path::PathBuf};

use sandboxer_base::Code;

use super::tree::TreeError;
use crate::{helper::HelperError, rootfs::BuildError};

/// Why a volume cannot be provided.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A pod with a kernel of its own cannot have this volume.
    #[error("volume {}: {what} is not available in a microVM pod{hint}", at.display())]
    Unsupported {
        /// The path in the container.
        at: PathBuf,
        /// The requested feature.
        what: String,
        /// Advice, after a colon, or empty.
        hint: &'static str,
    },
    /// The volume's source cannot be examined.
    #[error("volume {}: cannot {action} {path:?}", at.display())]
    Path {
        /// The path in the container.
        at: PathBuf,
        /// The failed operation.
        action: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file is too large to copy.
    #[error("volume {}: {path:?} has more than {most} bytes, the limit for a file that is copied", at.display())]
    FileTooLarge {
        /// The path in the container.
        at: PathBuf,
        /// The path on the host.
        path: PathBuf,
        /// The limit, bytes.
        most: u64,
    },
    /// The files of the volume cannot be copied.
    #[error(transparent)]
    Files(#[from] TreeError),
    /// The helper failed or timed out.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// The files of the volume cannot be sent.
    #[error("cannot encode files for a guest")]
    Encode(#[source] protobuf::Error),
    /// The volume cannot be kept up to date.
    #[error("cannot watch {dir:?} for changes{}", too_many(source))]
    Watch {
        /// The volume's directory on the host.
        dir: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The disk of an emptyDir cannot be created.
    #[error("cannot create a disk for an emptyDir")]
    Disk(#[from] BuildError),
    /// The emptyDir's directory cannot hold a VM's disk.
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
    /// Returns the gRPC code of the response.
    pub fn code(&self) -> Code {
        match self {
            Self::Unsupported { .. } | Self::Files(TreeError::Kind { .. }) => Code::Unimplemented,
            Self::Files(TreeError::TooLarge { .. }) | Self::FileTooLarge { .. } => Code::InvalidArgument,
            Self::NotLocal { .. } => Code::FailedPrecondition,
            Self::Helper(error) => error.code(),
            Self::Disk(error) => error.code(),
            _ => Code::Internal,
        }
    }
}

/// Returns a hint if inotify has no watches left.
fn too_many(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull => " (fs.inotify.max_user_watches is too low)",
        _ => "",
    }
}
