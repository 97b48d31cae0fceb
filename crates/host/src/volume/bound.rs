//! A bind mount with the properties of its source on the host.

use std::{
    io::{self, Read},
    os::fd::OwnedFd,
};

use oci_spec::runtime::Mount;
use serde::{Deserialize, Serialize};

use super::{Kind, Kubelet, Volume, VolumeError, classify, host};
use crate::beneath::{self, Access, Found};

/// Largest host file that is copied into a container, bytes.
const MAX_FILE: u64 = 1 << 20;

/// A bind mount and its source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bound {
    /// The mount.
    pub volume: Volume,
    /// The source, if it is a file that is copied.
    pub file: Option<FileMeta>,
    /// Device and inode of the source.
    pub inode: (u64, u64),
    /// Whether the source is shared live, without other mounts below it now or later.
    pub is_one_mount: bool,
}

/// Owner and permissions of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMeta {
    /// The permissions.
    pub mode: u32,
    /// The user ID of the owner.
    pub uid: u32,
    /// The group ID of the owner.
    pub gid: u32,
}

/// The properties of a bind mount whose source was found.
#[derive(Debug)]
pub struct Looked {
    /// The mount.
    pub bound: Bound,
    /// The content of a file that is copied.
    pub content: Vec<u8>,
    /// The source of a live share, found and not opened. The share is of this file, not of its path.
    pub source: Option<OwnedFd>,
}

impl Looked {
    /// Examines the source of `mount`, of the pod of `kubelet`. Blocks as long as the source's file system does, so
    /// only helpers call it.
    pub fn at(mount: &Mount, kubelet: &Kubelet) -> Result<Self, VolumeError> {
        let (volume, found) = classify(mount, kubelet)?;
        let failed = |action| {
            let (at, path) = (volume.at.clone(), volume.source.clone());
            move |source| VolumeError::Path { at, action, path, source }
        };
        let inode = found.inode();
        // If in doubt, there are some: the guest then leaves it to the host to refuse writes.
        let has_mounts =
            || found.kind() == beneath::Kind::Directory && host::has_mounts_below(&found).unwrap_or(true);
        let is_one_mount = volume.kind == Kind::Live && !volume.follows_host_mounts && !has_mounts();
        let is_copied = match &volume.kind {
            Kind::File | Kind::TerminationMessage => true,
            Kind::ProjectedPart => found.kind() == beneath::Kind::File,
            Kind::Projected | Kind::EmptyDir(_) | Kind::Live => false,
        };
        if !is_copied {
            let source = (volume.kind == Kind::Live).then(|| found.into_fd());
            return Ok(Self {
                bound: Bound { volume, file: None, inode, is_one_mount },
                content: Vec::new(),
                source,
            });
        }
        let content = read(&found).map_err(failed("read"))?;
        if content.len() as u64 > MAX_FILE {
            let (at, path) = (volume.at, volume.source);
            return Err(VolumeError::FileTooLarge { at, path, most: MAX_FILE });
        }
        let stat = found.stat();
        let file = Some(FileMeta { mode: found.mode(), uid: stat.st_uid, gid: stat.st_gid });
        Ok(Self { bound: Bound { volume, file, inode, is_one_mount }, content, source: None })
    }
}

/// Reads a file, up to one byte more than the limit.
fn read(found: &Found) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    // The file may grow: the limit still holds, and one more byte reveals a larger file.
    found.open(Access::Read)?.take(MAX_FILE + 1).read_to_end(&mut content)?;
    Ok(content)
}
