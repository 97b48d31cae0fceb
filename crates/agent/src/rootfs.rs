//! Mounts a container's root file system from disks, or from a share of the host, and unmounts it.
//!
//! ```text
//! /run/sandboxer/containers/<id>/
//!   config.json    the bundle's spec
//!   l0, l1, …      read-only layers, uppermost first
//!   w/             the writable file system: u/ (upper) and w/ (overlay's work directory)
//!   s/             instead of w/, a scratch disk: see `scratch`
//!   f0, f1, …      files bound into the container
//!   d0, d1, …      device nodes bound into the container
//!   v0, v1, …      parts of volumes bound into the container
//!   cwd/           its working directory, if that is in a tmpfs; beside u/ if there is one
//!   rootfs/        the container's root
//! ```
//!
//! Layers are mounted for each container; the kernel shares the page cache below.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use sandboxer_protocol::{
    id::{ContainerId, Id},
    share::GUEST_DIR,
};

use crate::{
    disk,
    failure::{Failure, internal},
    scratch,
};

const CONTAINERS: &str = "/run/sandboxer/containers";

/// The most layers of one container: the disks that the host can attach, minus the writable disk.
const MAX_LAYERS: usize = 64;

/// A disk by its serial.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Disk {
    /// The serial, as set by the host.
    pub serial: String,
    /// The file system type: "erofs" or "ext4".
    pub fstype: String,
    /// Whether the disk is mounted read-only.
    pub read_only: bool,
    /// Whether the disk's content is discarded with its container.
    pub scratch: bool,
}

/// The writable part of a root file system.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Writable {
    /// Guest memory, with a limit.
    Tmpfs {
        /// Most bytes; 0 means half of the guest's memory.
        size_bytes: u64,
    },
    /// A disk, which also holds the overlay's work directory.
    Overlay(Disk),
    /// The root disk itself, without an overlay.
    Whole(Disk),
    /// The root itself, a share of the host at this path, without an overlay.
    Share(PathBuf),
}

/// The parts of a root file system.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Read-only layers, uppermost first.
    pub lower: Vec<Disk>,
    /// The writable part.
    pub writable: Writable,
}

impl Disk {
    /// Checks the disk's file system type and serial.
    pub fn check(&self) -> Result<(), Failure> {
        let Self { serial, fstype, scratch, .. } = self;
        if !["erofs", "ext4"].contains(&fstype.as_str()) {
            return Err(Failure::invalid(format!(
                "disk {serial:?}: file system {fstype:?} is neither erofs nor ext4"
            )));
        }
        // The serial is also a directory's name.
        if *scratch && serial.parse::<Id>().is_err() {
            return Err(Failure::invalid(format!(
                "scratch disk {serial:?}: its serial is not an identifier"
            )));
        }
        if serial.is_empty() {
            return Err(Failure::invalid("a disk has no serial"));
        }
        Ok(())
    }
}

impl Plan {
    /// Checks that the parts fit together.
    pub fn check(&self) -> Result<(), Failure> {
        let disks = self.lower.iter().chain(match &self.writable {
            Writable::Tmpfs { .. } | Writable::Share(_) => None,
            Writable::Overlay(disk) | Writable::Whole(disk) => Some(disk),
        });
        for disk in disks {
            disk.check()?;
        }
        match (&self.writable, self.lower.len()) {
            (Writable::Share(path), _) if !is_share(path) => {
                Err(Failure::invalid(format!("rootfs: {path:?} is not a share of the host")))
            }
            (Writable::Share(_), 1..) => Err(Failure::invalid("rootfs: a share takes no layers below it")),
            (Writable::Whole(_), 1..) => {
                Err(Failure::invalid("rootfs: a whole disk takes no layers below it"))
            }
            (Writable::Tmpfs { .. } | Writable::Overlay(_), 0) => {
                Err(Failure::invalid("rootfs: an overlay needs a layer"))
            }
            (_, count) if count > MAX_LAYERS => {
                Err(Failure::invalid(format!("rootfs: {count} layers, at most {MAX_LAYERS} are mounted")))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the root is the host's, and may block whoever looks at it.
    pub fn is_shared(&self) -> bool {
        matches!(self.writable, Writable::Share(_))
    }

    /// Waits for all disks.
    pub async fn locate(&self) -> Result<Located, Failure> {
        let mut lower = Vec::new();
        for disk in &self.lower {
            lower.push(Device {
                node: disk::find(&disk.serial).await?,
                fstype: disk.fstype.clone(),
                read_only: true,
            });
        }
        let device = async |disk: &Disk| {
            let node = disk::find(&disk.serial).await?;
            Ok::<_, Failure>(Device { node, fstype: disk.fstype.clone(), read_only: disk.read_only })
        };
        let writable = match &self.writable {
            Writable::Tmpfs { size_bytes } => LocatedWritable::Tmpfs { size_bytes: *size_bytes },
            Writable::Overlay(disk) if disk.scratch => LocatedWritable::Scratch(scratch::locate(disk).await?),
            Writable::Overlay(disk) => LocatedWritable::Overlay(device(disk).await?),
            Writable::Whole(disk) => LocatedWritable::Whole(device(disk).await?),
            Writable::Share(path) => LocatedWritable::Share(path.clone()),
        };
        Ok(Located { lower, writable })
    }
}

/// A [`Plan`] with the device nodes of its disks.
pub struct Located {
    lower: Vec<Device>,
    writable: LocatedWritable,
}

struct Device {
    node: PathBuf,
    fstype: String,
    read_only: bool,
}

enum LocatedWritable {
    Tmpfs { size_bytes: u64 },
    Scratch(scratch::Located),
    Overlay(Device),
    Whole(Device),
    Share(PathBuf),
}

/// The directories for the writable file system; scratch disks use the last one.
const WRITABLES: [&str; 2] = ["w", SCRATCH];
/// The directory on which a scratch disk is mounted.
const SCRATCH: &str = "s";

/// One container's directory.
#[derive(Debug, Clone)]
pub struct Dir {
    path: PathBuf,
}

impl Dir {
    /// Returns the directory of container `id`; it may not exist.
    pub fn of_container(id: &ContainerId) -> Self {
        Self { path: Path::new(CONTAINERS).join(id) }
    }

    /// Returns the bundle's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the mount point of the container's root.
    pub fn rootfs(&self) -> PathBuf {
        self.path.join("rootfs")
    }

    /// Returns the path of the `n`th file bound into the container.
    pub fn file(&self, n: usize) -> PathBuf {
        self.path.join(format!("f{n}"))
    }

    /// Returns the path of the `n`th device node bound into the container.
    pub fn device(&self, n: usize) -> PathBuf {
        self.path.join(format!("d{n}"))
    }

    /// Returns the path of the part of a volume that is the source of the `n`th mount.
    pub fn volume(&self, n: usize) -> PathBuf {
        self.path.join(format!("v{n}"))
    }

    /// Returns the path of a working directory that is bound into the container.
    pub fn working_dir(&self) -> PathBuf {
        let writable = self.writable();
        if writable == self.rootfs() { self.path.join("cwd") } else { writable.join("cwd") }
    }

    /// Returns the mount point of the writable file system.
    pub fn writable(&self) -> PathBuf {
        let mounted = WRITABLES.map(|name| self.path.join(name)).into_iter().find(|path| path.exists());
        mounted.unwrap_or_else(|| self.rootfs())
    }

    /// Returns the mount point of the scratch disk, if there is one.
    fn scratch(&self) -> Option<PathBuf> {
        let path = self.path.join(SCRATCH);
        path.exists().then_some(path)
    }

    /// Returns the mount points of the scratch disks of all containers.
    pub fn scratches() -> Vec<PathBuf> {
        let all = fs::read_dir(CONTAINERS).into_iter().flatten().flatten();
        all.filter_map(|entry| Self { path: entry.path() }.scratch()).collect()
    }

    /// Creates the directory and mounts the root file system. Blocks on disks, so only workers call it.
    pub fn assemble(&self, plan: &Located) -> Result<(), Failure> {
        create_dir(&self.rootfs())?;
        if let LocatedWritable::Whole(device) = &plan.writable {
            return device.mount(&self.rootfs());
        }
        if let LocatedWritable::Share(path) = &plan.writable {
            let bind = MsFlags::MS_BIND | MsFlags::MS_REC;
            return mount(Some(path), &self.rootfs(), None::<&str>, bind, None::<&str>).map_err(internal(
                format!("cannot mount {} on {}", path.display(), self.rootfs().display()),
            ));
        }
        let mut lowerdir = String::from("lowerdir=");
        for (n, layer) in plan.lower.iter().enumerate() {
            let path = self.path.join(format!("l{n}"));
            create_dir(&path)?;
            layer.mount(&path)?;
            // The paths are relative: the options of all layers must fit in one page.
            lowerdir.push_str(&format!("{}l{n}", if n > 0 { ":" } else { "" }));
        }
        let name = if let LocatedWritable::Scratch(_) = &plan.writable { SCRATCH } else { "w" };
        let writable = self.path.join(name);
        create_dir(&writable)?;
        match &plan.writable {
            LocatedWritable::Tmpfs { size_bytes: 0 } => mount_tmpfs(&writable, "mode=0755")?,
            LocatedWritable::Tmpfs { size_bytes } => {
                mount_tmpfs(&writable, &format!("mode=0755,size={size_bytes}"))?
            }
            LocatedWritable::Scratch(disk) => disk.place(&writable)?,
            LocatedWritable::Overlay(device) => device.mount(&writable)?,
            // These were handled above.
            LocatedWritable::Whole(_) | LocatedWritable::Share(_) => {}
        }
        let upper = writable.join("u");
        create_dir(&upper)?;
        create_dir(&writable.join("w"))?;
        // The overlay's root has the attributes of its upper directory, and must have those of the image.
        let top = self.path.join("l0");
        let metadata = fs::metadata(&top).map_err(internal(format!("cannot read {}", top.display())))?;
        chown(&upper, Some(metadata.uid()), Some(metadata.gid()))
            .and_then(|()| fs::set_permissions(&upper, fs::Permissions::from_mode(metadata.mode() & 0o7777)))
            .map_err(internal(format!("cannot prepare {}", upper.display())))?;

        nix::unistd::chdir(&self.path).map_err(internal(format!("cannot enter {}", self.path.display())))?;
        let options = format!("{lowerdir},upperdir={name}/u,workdir={name}/w");
        let mounted =
            mount(Some("overlay"), "rootfs", Some("overlay"), MsFlags::empty(), Some(options.as_str()));
        let back = nix::unistd::chdir("/");
        mounted.and(back).map_err(internal(format!("cannot mount an overlay on {}", self.rootfs().display())))
    }

    /// Unmounts everything in the directory and removes it. A missing directory is no error. Blocks on disks, so only
    /// workers call it.
    pub fn dismantle(&self) -> Result<(), Failure> {
        if let Some(path) = self.scratch() {
            scratch::shut_down([path]);
        }
        for path in mounts_below(&self.path)?.iter().rev() {
            // The set-up of another container may hold a copy of the mount for a moment.
            umount2(path, MntFlags::empty())
                .or_else(|_| umount2(path, MntFlags::MNT_DETACH))
                .map_err(internal(format!("cannot unmount {}", path.display())))?;
        }
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(internal(format!("cannot remove {}", self.path.display()))(error))
            }
            _ => Ok(()),
        }
    }
}

impl Device {
    fn mount(&self, path: &Path) -> Result<(), Failure> {
        let Self { node, fstype, read_only } = self;
        let flags = if *read_only { MsFlags::MS_RDONLY } else { MsFlags::empty() };
        mount(Some(node), path, Some(fstype.as_str()), flags, None::<&str>).map_err(internal(format!(
            "cannot mount {} as {fstype} on {}",
            node.display(),
            path.display()
        )))
    }
}

/// Returns whether a path is that of a share.
fn is_share(path: &Path) -> bool {
    let name = path.strip_prefix(GUEST_DIR).ok().and_then(Path::to_str);
    name.is_some_and(|name| name.parse::<Id>().is_ok())
}

fn mount_tmpfs(path: &Path, options: &str) -> Result<(), Failure> {
    mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options))
        .map_err(internal(format!("cannot mount a tmpfs ({options}) on {}", path.display())))
}

fn create_dir(path: &Path) -> Result<(), Failure> {
    fs::create_dir_all(path).map_err(internal(format!("cannot create {}", path.display())))
}

/// Returns the mount points below `dir` in the order of their mounting.
fn mounts_below(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let table =
        fs::read_to_string("/proc/self/mountinfo").map_err(internal("cannot read the mount table"))?;
    Ok(mount_points(&table).filter(|path| path.starts_with(dir) && path != dir).collect())
}

/// Returns the mount points of a mount table. The agent's own paths need no unescaping: identifiers contain neither
/// blanks nor backslashes.
fn mount_points(table: &str) -> impl Iterator<Item = PathBuf> {
    table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(serial: &str, fstype: &str) -> Disk {
        Disk { serial: serial.into(), fstype: fstype.into(), read_only: true, scratch: false }
    }

    #[test]
    fn plans_that_make_no_root_are_refused() {
        let refusal = |lower: Vec<Disk>, writable| Plan { lower, writable }.check().unwrap_err().message;
        let tmpfs = || Writable::Tmpfs { size_bytes: 0 };
        assert!(refusal(vec![], tmpfs()).contains("needs a layer"));
        assert!(refusal(vec![disk("a", "xfs")], tmpfs()).contains(r#"disk "a": file system "xfs""#));
        assert!(
            refusal(vec![disk("a", "erofs")], Writable::Whole(disk("b", "ext4"))).contains("takes no layers")
        );
        assert!(refusal(vec![disk("", "erofs")], tmpfs()).contains("no serial"));
        let astray = Disk { scratch: true, read_only: false, ..disk("../s", "ext4") };
        assert!(refusal(vec![disk("a", "erofs")], Writable::Overlay(astray)).contains("not an identifier"));
        assert!(Plan { lower: vec![], writable: Writable::Whole(disk("b", "ext4")) }.check().is_ok());
        let share = |path: &str| Writable::Share(path.into());
        for path in ["/run/sandboxer/shares", "/run/sandboxer/shares/../volumes", "/etc", "5e"] {
            assert!(refusal(vec![], share(path)).contains("is not a share"), "{path}");
        }
        let shared = || share("/run/sandboxer/shares/5e0a");
        assert!(refusal(vec![disk("a", "erofs")], shared()).contains("takes no layers"));
        assert!(Plan { lower: vec![], writable: shared() }.check().is_ok());
    }

    #[test]
    fn a_mount_table_yields_its_mount_points() {
        let table = "22 1 0:20 / / rw shared:1 - tmpfs tmpfs rw\n\
                     31 22 253:0 / /run/sandboxer/containers/a/l0 ro - erofs /dev/vda ro\n";
        let points: Vec<_> = mount_points(table).collect();
        assert_eq!(points, [PathBuf::from("/"), PathBuf::from("/run/sandboxer/containers/a/l0")]);
    }
}
