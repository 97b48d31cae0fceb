//! Storage of a tool's files; each kind has its own row. None is the container's root, which runtimes keep in memory,
//! on the host's disk or behind a process.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use sandboxer_probe::options::{Device, Mount};
use sandboxer_probe::vm::arguments::Disk;
use sandboxer_probe::workload::definition::{Storage, VOLUME};

use super::block::BlockDevice;

/// Path of a block device in a container.
const DEVICE: &str = "/dev/bench";

/// Size of the file with a VM's file system, bytes. The file is sparse: only what the tool writes takes space.
const DISK: u64 = 16 << 30;

/// Kubernetes uid of the pods that have a volume, as it appears in the volume's path.
pub const POD_UID: &str = "workload";

/// A volume on the host. Dropping it removes its files; drop it after its pod's removal.
#[derive(Debug)]
pub enum Volume {
    /// A directory.
    Directory {
        /// Mount of the directory in the container.
        mount: Mount,
        /// Guard that removes the directory when dropped.
        dir: tempfile::TempDir,
    },
    /// A block device.
    Device(BlockDevice),
}

impl Volume {
    /// Creates a volume below `parent`, of `size` bytes if it is a device; `None` for storage that needs none.
    pub fn make(parent: &Path, storage: Storage, size: u64) -> io::Result<Option<Self>> {
        // kubelet's path of an emptyDir contains the pod's uid; from it runtimes recognise the kind.
        let part = match storage {
            Storage::Tmpfs => return Ok(None),
            Storage::EmptyDir => "pods/workload/volumes/kubernetes.io~empty-dir/data",
            Storage::Share => "share",
            Storage::Block => return BlockDevice::make(parent, size).map(Volume::Device).map(Some),
        };
        let dir = tempfile::Builder::new().prefix("sandboxer-workload-").tempdir_in(parent)?;
        let host_path = dir.path().join(part);
        fs::create_dir_all(&host_path)?;
        // The tool may run as any user.
        fs::set_permissions(&host_path, fs::Permissions::from_mode(0o777))?;
        let mount = Mount { host_path, container_path: PathBuf::from(VOLUME), read_only: false };
        Ok(Some(Volume::Directory { mount, dir }))
    }

    /// Returns the volume as a container's mount.
    pub fn mount(&self) -> Option<Mount> {
        match self {
            Volume::Directory { mount, .. } => Some(mount.clone()),
            Volume::Device(_) => None,
        }
    }

    /// Returns the volume as a VM's disk. A directory becomes a file with an ext4 file system.
    pub fn disk(&self) -> io::Result<Disk> {
        match self {
            Volume::Directory { mount, .. } => {
                let path = mount.host_path.join("disk");
                fs::File::create(&path)?.set_len(DISK)?;
                // A new file system for each run is as empty as a new directory.
                let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&path).output()?;
                if !made.status.success() {
                    let stderr = String::from_utf8_lossy(&made.stderr).trim().to_owned();
                    return Err(io::Error::other(format!("mkfs.ext4 failed ({}): {stderr}", made.status)));
                }
                Ok(Disk { serial: "data", path, direct: false, read_only: false })
            }
            Volume::Device(device) => {
                Ok(Disk { serial: "bench", path: device.node().to_owned(), direct: true, read_only: false })
            }
        }
    }

    /// Returns the volume as a container's device.
    pub fn device(&self) -> Option<Device> {
        match self {
            Volume::Directory { .. } => None,
            Volume::Device(device) => {
                Some(Device { host_path: device.node().to_owned(), container_path: PathBuf::from(DEVICE) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_goes_with_its_files() {
        let parent = tempfile::tempdir().unwrap();
        for storage in [Storage::EmptyDir, Storage::Share] {
            let volume = Volume::make(parent.path(), storage, 0).unwrap().unwrap();
            fs::write(volume.mount().unwrap().host_path.join("file"), "text").unwrap();
            drop(volume);
        }
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
        assert!(Volume::make(parent.path(), Storage::Tmpfs, 0).unwrap().is_none());
        assert!(Volume::make(Path::new("/no/such"), Storage::Share, 0).is_err());
    }

    #[test]
    fn only_an_empty_dir_has_the_kubelets_path() {
        let parent = tempfile::tempdir().unwrap();
        let path = |storage| {
            let volume = Volume::make(parent.path(), storage, 0).unwrap().unwrap();
            volume.mount().unwrap().host_path
        };
        assert!(
            path(Storage::EmptyDir)
                .to_string_lossy()
                .contains("/pods/workload/volumes/kubernetes.io~empty-dir/")
        );
        assert!(!path(Storage::Share).to_string_lossy().contains("kubernetes.io"));
    }
}
