//! A bind mount with the properties of its source on the host.

use std::{fs, io::Read, os::unix::fs::MetadataExt, path::Path};

use oci_spec::runtime::Mount;
use serde::{Deserialize, Serialize};

use super::{Kind, Volume, VolumeError, classify};

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
}

/// Owner and permissions of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMeta {
    /// Permissions.
    pub mode: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl Bound {
    /// Examines the source of `mount`. Also returns the content of a file that is copied. Blocks as long as
    /// the source's file system does: for helpers.
    pub fn look(mount: &Mount) -> Result<(Self, Vec<u8>), VolumeError> {
        let volume = classify(mount)?;
        let failed = |action| {
            let (at, path) = (volume.at.clone(), volume.source.clone());
            move |source| VolumeError::Path { at, action, path, source }
        };
        let found = fs::metadata(&volume.source).map_err(failed("stat"))?;
        let inode = (found.dev(), found.ino());
        let is_copied = match &volume.kind {
            Kind::File | Kind::TerminationMessage => true,
            Kind::ProjectedPart => found.is_file(),
            Kind::Projected | Kind::EmptyDir(_) | Kind::Live => false,
        };
        if !is_copied {
            return Ok((Self { volume, file: None, inode }, Vec::new()));
        }
        let (file, content) = read(&volume.source).map_err(failed("read"))?;
        if content.len() as u64 > MAX_FILE {
            let (at, path) = (volume.at, volume.source);
            return Err(VolumeError::FileTooLarge { at, path, most: MAX_FILE });
        }
        Ok((Self { volume, file: Some(file), inode }, content))
    }
}

/// Reads a file and its content, up to one byte more than the limit.
fn read(path: &Path) -> std::io::Result<(FileMeta, Vec<u8>)> {
    let file = fs::File::open(path)?;
    let meta = file.metadata()?;
    let mut content = Vec::new();
    // The file may grow: the limit still holds, and one byte more reveals it.
    file.take(MAX_FILE + 1).read_to_end(&mut content)?;
    Ok((FileMeta { mode: meta.mode() & 0o7777, uid: meta.uid(), gid: meta.gid() }, content))
}
