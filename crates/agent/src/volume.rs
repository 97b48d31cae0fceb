//! Volumes: directories that the pod's containers share, each named by its identifier.
//!
//! ```text
//! /run/sandboxer/volumes/<id>/    files from the host, a tmpfs, or a disk's file system
//! ```
//!
//! Volumes exist until the guest ends. Containers bind-mount them, or directories in them.

use std::{
    collections::HashMap,
    fs,
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::PermissionsExt as _,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use libcontainer::oci_spec::runtime::Mount;
use nix::mount::{MsFlags, mount, umount};
use pathrs::{Handle, Root, error::ErrorKind};
use sandboxer_protocol::{IMAGE_VOLUME, VOLUMES_DIR, id::Id};
use tokio::sync::Mutex as AsyncMutex;

use crate::{
    container::Shared,
    copy, disk,
    failure::{Failure, internal},
    rootfs::{Dir, Disk},
    sync::lock,
    targets::View,
    tree::{self, Entry, Owner},
};

/// The most volumes of one guest.
const MAX_VOLUMES: usize = 256;

/// A request to create or update a volume.
#[derive(Debug)]
pub struct Put {
    /// The volume's identifier, chosen by the host.
    pub id: Id,
    /// The owner of the volume's directory.
    pub owner: Owner,
    /// The volume's content.
    pub content: Content,
}

/// The content of a volume.
#[derive(Debug)]
pub enum Content {
    /// Exactly these files.
    Tree(Vec<Entry>),
    /// Space in memory.
    Memory {
        /// Most bytes; 0 means half of the guest's memory.
        size_bytes: u64,
    },
    /// Space on a disk.
    Disk(Disk),
}

/// The volumes of the guest.
pub struct Volumes {
    shared: Arc<Shared>,
    // The lock is never held across an await.
    known: Mutex<HashMap<Id, Arc<Volume>>>,
}

/// Whether a volume exists. The lock is held across awaits on purpose: requests for one volume run one at a time.
type Volume = AsyncMutex<bool>;

impl Volumes {
    /// Creates an empty set.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, known: Mutex::default() }
    }

    /// Creates a volume. An existing one is unchanged, except that its files are updated.
    pub async fn put(&self, put: Put) -> Result<(), Failure> {
        let volume = self.enter(&put.id)?;
        let mut is_there = volume.lock().await;
        let dir = Path::new(VOLUMES_DIR).join(&put.id);
        match put.content {
            Content::Tree(entries) => tree::mirror(&dir, put.owner, &entries)?,
            Content::Memory { .. } | Content::Disk(_) if *is_there => {}
            Content::Memory { size_bytes } => {
                make_dir(&dir)?;
                let size = if size_bytes == 0 { String::new() } else { format!("size={size_bytes}") };
                mount(Some("tmpfs"), &dir, Some("tmpfs"), MsFlags::empty(), Some(size.as_str()))
                    .map_err(internal(format!("cannot mount a tmpfs ({size}) on {}", dir.display())))?;
                put.owner.apply_to(&dir)?;
            }
            Content::Disk(disk) => {
                let node = disk::find(&disk.serial).await?;
                let job = || mount_disk(&node, &disk, &dir, put.owner);
                self.shared.workers.run(&[], job).await?.into_result()?;
            }
        }
        *is_there = true;
        Ok(())
    }

    /// Returns every existing volume.
    pub fn all(&self) -> Vec<Id> {
        let known = lock(&self.known);
        // A volume that is being created does not exist yet.
        let there = known.iter().filter(|(_, volume)| volume.try_lock().is_ok_and(|there| *there));
        there.map(|(id, _)| id.clone()).collect()
    }

    fn enter(&self, id: &Id) -> Result<Arc<Volume>, Failure> {
        let mut known = lock(&self.known);
        if !known.contains_key(id) && known.len() >= MAX_VOLUMES {
            return Err(Failure::precondition(format!("guest has {MAX_VOLUMES} volumes already")));
        }
        Ok(Arc::clone(known.entry(id.clone()).or_default()))
    }
}

fn make_dir(dir: &Path) -> Result<(), Failure> {
    fs::create_dir_all(dir).map_err(internal(format!("cannot create {}", dir.display())))
}

/// Mounts a volume's disk. Blocks on the disk, so only workers call it.
fn mount_disk(node: &Path, disk: &Disk, dir: &Path, owner: Owner) -> Result<(), Failure> {
    make_dir(dir)?;
    let flags = if disk.read_only { MsFlags::MS_RDONLY } else { MsFlags::empty() };
    // The disk is sparse on the host: the kernel must not fill a new disk's inode tables with zeros in the background,
    // and must discard deleted blocks.
    let options = if disk.fstype == "ext4" { "noinit_itable,discard" } else { "" };
    mount(Some(node), dir, Some(disk.fstype.as_str()), flags, Some(options)).map_err(internal(format!(
        "cannot mount {} as {} on {}",
        node.display(),
        disk.fstype,
        dir.display()
    )))?;
    if disk.read_only {
        return Ok(());
    }
    // mkfs creates this directory, which may not be empty.
    let _ = fs::remove_dir(dir.join("lost+found"));
    let owned = owner.apply_to(dir);
    if owned.is_err() {
        // The first error is reported.
        let _ = umount(dir);
    }
    owned
}

/// Replaces each mount source inside a volume by one that no container can change.
///
/// Containers can write to volumes, including symlinks: the path is resolved within the volume, and its
/// target is mounted in the container's own directory.
pub fn stage(dir: &Dir, mounts: &mut [Mount]) -> Result<(), Failure> {
    for (n, mount) in mounts.iter_mut().enumerate() {
        let Some((volume, sub_path)) = mount.source().as_deref().and_then(in_volume) else { continue };
        if sub_path.as_os_str().is_empty() {
            continue;
        }
        let staged = dir.volume(n);
        bind_inside(&volume, &sub_path, &staged)?;
        mount.set_source(Some(staged));
    }
    Ok(())
}

/// Gives each mount of an image's volume ([`IMAGE_VOLUME`]) a directory with a copy of the image's files at the mount's
/// target. The directory is beside the upper directory of the container's overlay, so it is removed and counted with
/// it, and can be the upper directory of another overlay. If the root is not an overlay, the directory in the root
/// itself is used.
pub fn from_image(dir: &Dir, mounts: &mut [Mount]) -> Result<(), Failure> {
    let (rootfs, beside) = (dir.rootfs(), dir.writable());
    for (n, mount) in mounts.iter_mut().enumerate() {
        if mount.source().as_deref() != Some(Path::new(IMAGE_VOLUME)) {
            continue;
        }
        let at = mount.destination().clone();
        let failed = |action: &str| format!("cannot {action} the image's volume {}", at.display());
        let pathrs = |action: &str| internal::<pathrs::error::Error>(failed(action));
        // The image is not trusted: its symbolic links are resolved only inside it, and not by the kernel, which follows none of another
        // user's in a directory like /tmp.
        let root = Root::open(&rootfs).map_err(pathrs("open"))?;
        let at = View::new(&root).followed(&at)?;
        let image_dir = match root.resolve(&at) {
            Err(error) if is_absent(&error) => None,
            image_dir => {
                Some(image_dir.map_err(pathrs("find"))?).filter(|image_dir| path_of(image_dir).is_dir())
            }
        };
        let source = if beside == rootfs {
            let image_dir = match image_dir {
                Some(image_dir) => image_dir,
                None => root.mkdir_all(&at, &fs::Permissions::from_mode(0o755)).map_err(pathrs("create"))?,
            };
            fs::read_link(path_of(&image_dir)).map_err(internal(failed("find")))?
        } else {
            let source = beside.join(format!("v{n}"));
            fs::create_dir(&source).map_err(internal(failed("create")))?;
            if let Some(image_dir) = image_dir {
                copy::tree(&path_of(&image_dir), &source).map_err(internal(failed("copy")))?;
            }
            source
        };
        mount.set_source(Some(source));
    }
    Ok(())
}

fn is_absent(error: &pathrs::error::Error) -> bool {
    matches!(error.kind(), ErrorKind::OsError(Some(libc::ENOENT | libc::ENOTDIR)))
}

/// Splits a path in a volume into the volume's directory and the path below it.
fn in_volume(source: &Path) -> Option<(PathBuf, PathBuf)> {
    let mut parts = source.strip_prefix(VOLUMES_DIR).ok()?.components();
    let volume = Path::new(VOLUMES_DIR).join(parts.next()?);
    Some((volume, parts.as_path().to_owned()))
}

fn bind_inside(volume: &Path, sub_path: &Path, target: &Path) -> Result<(), Failure> {
    let failed = |action: &str| {
        let text = format!("cannot {action} {} in volume {}", sub_path.display(), volume.display());
        internal::<pathrs::error::Error>(text)
    };
    let root = Root::open(volume).map_err(failed("open"))?;
    let inside = match root.resolve(sub_path) {
        Err(error) if matches!(error.kind(), ErrorKind::OsError(Some(libc::ENOENT))) => {
            let created =
                root.mkdir_all(sub_path, &fs::Permissions::from_mode(0o755)).map_err(failed("create"))?;
            // As in kubelet: with the volume's own permissions.
            fs::metadata(volume)
                .and_then(|volume| fs::set_permissions(path_of(&created), volume.permissions()))
                .map_err(internal(format!("cannot set the permissions of {}", sub_path.display())))?;
            created
        }
        inside => inside.map_err(failed("find"))?,
    };
    let source = path_of(&inside);
    let placed = if source.is_dir() { fs::create_dir(target) } else { fs::File::create(target).map(drop) };
    placed.map_err(internal(format!("cannot create {}", target.display())))?;
    mount(Some(&source), target, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
        .map_err(internal(format!("cannot mount {} of {}", sub_path.display(), volume.display())))
}

/// Returns a path to an open handle that is independent of its current location.
fn path_of(handle: &Handle) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", handle.as_fd().as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_in_a_volume_or_it_is_not() {
        let parts = |path: &str| in_volume(Path::new(path));
        let volume = PathBuf::from("/run/sandboxer/volumes/v1");
        assert_eq!(parts("/run/sandboxer/volumes/v1"), Some((volume.clone(), "".into())));
        assert_eq!(parts("/run/sandboxer/volumes/v1/a/b"), Some((volume, "a/b".into())));
        assert_eq!(parts("/run/sandboxer/volumes"), None);
        assert_eq!(parts("/dev/shm"), None);
    }
}
