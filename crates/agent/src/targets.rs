//! Targets of a container's mounts. Symlinks in them are followed inside the container, even if their targets do not
//! exist yet.
//!
//! libcontainer creates a missing target, but not the target of a dangling symlink, which an image may well have
//! (`/etc/resolv.conf`, `/var/run`). So such targets are resolved beforehand, each as if the mounts before it were in
//! place. The result may be outdated by the time of the mount: libcontainer looks again, only inside the container's
//! root.

use std::{
    collections::VecDeque,
    ffi::OsString,
    path::{Component, Path, PathBuf},
};

use libcontainer::oci_spec::runtime::Mount;
use pathrs::Root;

use crate::failure::{Failure, internal};

/// The most symlinks in one path. The kernel's own limit is 40; other runtimes have this one.
const MAX_LINKS: usize = 255;

/// Links of procfs that lead to the container's root while it is prepared.
const TO_ROOT: [&str; 2] = ["/proc/self/root", "/proc/self/cwd"];

/// A container's file system with its mounts in place.
pub struct View<'a> {
    root: &'a Root,
    /// The mount points, without symlinks, in the order of their mounting, and what is mounted there.
    mounts: Vec<(PathBuf, Mounted)>,
}

enum Mounted {
    Dir(Root),
    /// A tmpfs, which is empty.
    Empty,
    /// A file system whose content is the kernel's, or a file.
    Other,
}

impl Mounted {
    fn open(mount: &Mount) -> Self {
        let source = mount.source().as_deref().filter(|_| is_bind(mount));
        match source.and_then(|source| Root::open(source).ok()) {
            Some(root) => Self::Dir(root),
            None if mount.typ().as_deref() == Some("tmpfs") => Self::Empty,
            None => Self::Other,
        }
    }
}

impl<'a> View<'a> {
    /// Returns the view with only the root file system in place.
    pub fn new(root: &'a Root) -> Self {
        Self { root, mounts: Vec::new() }
    }

    /// Adds `mounts` in their order; replaces each target that does not exist by one without symlinks.
    pub fn place(&mut self, mounts: &mut [Mount]) -> Result<(), Failure> {
        for mount in mounts {
            let target = self.followed(mount.destination())?;
            self.mounts.push((target.clone(), Mounted::open(mount)));
            if target != *mount.destination() {
                mount.set_destination(target);
            }
        }
        Ok(())
    }

    /// Returns `path` without symlinks. A component that does not exist is kept as it is.
    pub fn followed(&self, path: &Path) -> Result<PathBuf, Failure> {
        let mut rest: VecDeque<OsString> = parts(path);
        let (mut at, mut links) = (PathBuf::from("/"), 0);
        while let Some(part) = rest.pop_front() {
            if part == ".." {
                at.pop();
                continue;
            }
            let next = at.join(&part);
            let Some(link) = self.link(&next) else {
                at = next;
                continue;
            };
            links += 1;
            if links > MAX_LINKS {
                let message = format!("{} leads through more than {MAX_LINKS} symlinks", path.display());
                return Err(Failure::invalid(message));
            }
            if link.is_absolute() {
                at = PathBuf::from("/");
            }
            for part in parts(&link).into_iter().rev() {
                rest.push_front(part);
            }
        }
        Ok(at)
    }

    /// Returns the target of the symlink at `path`, whose directory has no symlink in its path. `None` if there is no
    /// symlink.
    fn link(&self, path: &Path) -> Option<PathBuf> {
        match self.position(path)? {
            Position::In(root, below) => root.readlink(below).ok(),
            Position::Empty | Position::Other => None,
        }
    }

    /// Returns where `path` is; `None` for a mount point, which is not a symlink.
    fn position<'p>(&self, path: &'p Path) -> Option<Position<'_, 'p>> {
        // A later mount covers earlier ones.
        for (target, mounted) in self.mounts.iter().rev() {
            if let Ok(below) = path.strip_prefix(target) {
                let position = match mounted {
                    Mounted::Dir(root) => Position::In(root, below),
                    Mounted::Empty => Position::Empty,
                    Mounted::Other => Position::Other,
                };
                return (!below.as_os_str().is_empty()).then_some(position);
            }
        }
        Some(Position::In(self.root, path))
    }

    /// Creates the directory `path` and its parents, if missing; like other runtimes, nothing behind a symlink that leads nowhere.
    /// Returns the path without symlinks if it is in a file system that does not exist yet, where nothing can be created.
    pub fn make_dir(&self, path: &Path) -> Result<Option<PathBuf>, Failure> {
        let failed = || internal::<pathrs::error::Error>(format!("cannot create {}", path.display()));
        let mut at = PathBuf::from("/");
        for part in parts(path) {
            if part == ".." {
                at.pop();
                continue;
            }
            let next = at.join(part);
            at = self.followed(&next)?;
            if let Some(Position::Other) = self.position(&at)
                && let Some(below) = TO_ROOT.iter().find_map(|link| at.strip_prefix(link).ok())
            {
                at = self.followed(&Path::new("/").join(below))?;
            }
            // Targets of mounts are created with the directories above them.
            if self.mounts.iter().any(|(target, _)| target.starts_with(&at)) {
                continue;
            }
            let position = self.position(&at);
            match position {
                None | Some(Position::Other) => continue,
                Some(Position::In(root, below)) if root.resolve(below).is_ok() => continue,
                Some(Position::In(..) | Position::Empty) => {}
            }
            if at != next {
                let message =
                    format!("cannot create {}: the symlink {} leads nowhere", path.display(), next.display());
                return Err(Failure::invalid(message));
            }
            // In an empty file system, no later component is a symlink.
            let Some(Position::In(root, below)) = position else { return self.followed(path).map(Some) };
            use std::os::unix::fs::PermissionsExt as _;
            root.mkdir_all(below, &std::fs::Permissions::from_mode(0o755)).map_err(failed())?;
        }
        Ok(None)
    }

    /// Returns whether a directory is mounted at `path`, which has no symlinks.
    pub fn is_bound(&self, path: &Path) -> bool {
        self.mounts.iter().any(|(target, mounted)| target == path && matches!(mounted, Mounted::Dir(_)))
    }
}

/// A place in a container.
enum Position<'v, 'p> {
    /// A path in a directory that exists.
    In(&'v Root, &'p Path),
    /// In an empty file system that does not exist yet.
    Empty,
    /// In a file system of the kernel.
    Other,
}

/// Returns the components of a path, without the root.
fn parts(path: &Path) -> VecDeque<OsString> {
    let part = |part: Component<'_>| match part {
        Component::Normal(_) | Component::ParentDir => Some(part.as_os_str().to_owned()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(part).collect()
}

fn is_bind(mount: &Mount) -> bool {
    mount.typ().as_deref() == Some("bind")
        || mount.options().iter().flatten().any(|option| option == "bind" || option == "rbind")
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use libcontainer::oci_spec::runtime::MountBuilder;

    use super::*;

    fn bind(at: &str, source: &Path) -> Mount {
        MountBuilder::default().destination(at).typ("bind").source(source).build().unwrap()
    }

    fn tmpfs(at: &str) -> Mount {
        MountBuilder::default().destination(at).typ("tmpfs").source("tmpfs").build().unwrap()
    }

    /// Returns the targets of `mounts` in a root whose files `image` creates.
    fn placed(image: impl FnOnce(&Path), mounts: &mut [Mount]) -> Result<Vec<String>, Failure> {
        let dir = tempfile::tempdir().unwrap();
        image(dir.path());
        let root = Root::open(dir.path()).unwrap();
        View::new(&root).place(mounts)?;
        Ok(mounts.iter().map(|mount| mount.destination().display().to_string()).collect())
    }

    #[test]
    fn a_dangling_link_of_the_image_leads_to_where_it_would() {
        let image = |root: &Path| {
            fs::create_dir_all(root.join("etc")).unwrap();
            fs::create_dir_all(root.join("var")).unwrap();
            symlink("../run/resolve/stub.conf", root.join("etc/resolv.conf")).unwrap();
            symlink("/run", root.join("var/run")).unwrap();
            symlink("../../../../../outside", root.join("var/up")).unwrap();
            symlink("two", root.join("one")).unwrap();
            symlink("/var/three", root.join("two")).unwrap();
        };
        let somewhere = tempfile::tempdir().unwrap();
        let paths = ["/etc/resolv.conf", "/var/run/secrets", "/var/up/x", "/one/x", "/new/../plain"];
        let mut mounts = paths.map(|at| bind(at, somewhere.path()));
        let destinations = placed(image, &mut mounts).unwrap();
        assert_eq!(
            destinations,
            ["/run/resolve/stub.conf", "/run/secrets", "/outside/x", "/var/three/x", "/plain"]
        );
    }

    #[test]
    fn a_link_in_a_volume_is_followed_there_and_into_other_mounts() {
        let volume = tempfile::tempdir().unwrap();
        symlink("deeper/end", volume.path().join("in")).unwrap();
        symlink("/tmp/x", volume.path().join("out")).unwrap();
        symlink("/data/in", volume.path().join("again")).unwrap();
        let other = tempfile::tempdir().unwrap();
        let mut mounts = [
            bind("/data", volume.path()),
            tmpfs("/tmp"),
            bind("/data/in", other.path()),
            bind("/data/out/y", other.path()),
            bind("/data/again/z", other.path()),
        ];
        let image = |root: &Path| symlink("/elsewhere", root.join("tmp")).unwrap();
        let destinations = placed(image, &mut mounts).unwrap();
        let expected = ["/data", "/elsewhere", "/data/deeper/end", "/elsewhere/x/y", "/data/deeper/end/z"];
        assert_eq!(destinations, expected, "the image's /tmp is a symlink, and a tmpfs is at its target");
    }

    #[test]
    fn links_without_an_end_are_refused() {
        let image = |root: &Path| symlink("loop", root.join("loop")).unwrap();
        let failure = placed(image, &mut [tmpfs("/loop/x")]).unwrap_err();
        assert!(failure.message.contains("/loop/x leads through more than 255 symlinks"), "{failure}");
    }

    #[test]
    fn a_directory_is_made_where_the_container_will_see_it() {
        let (image, volume) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        symlink("/data/target", image.path().join("work")).unwrap();
        let root = Root::open(image.path()).unwrap();
        let mut view = View::new(&root);
        view.place(&mut [bind("/data", volume.path()), tmpfs("/scratch")]).unwrap();
        view.make_dir(Path::new("/work/dir")).unwrap_err();
        fs::create_dir(volume.path().join("target")).unwrap();
        view.make_dir(Path::new("/work/dir/deep")).unwrap();
        assert!(volume.path().join("target/dir/deep").is_dir());
        let later = view.make_dir(Path::new("/scratch/dir")).unwrap();
        assert_eq!(later.as_deref(), Some(Path::new("/scratch/dir")), "nothing can be made in it yet");
        assert!(!image.path().join("scratch").exists());
        assert!(view.is_bound(Path::new("/data")) && !view.is_bound(Path::new("/scratch")));
        view.make_dir(Path::new("/data")).unwrap();
    }

    #[test]
    fn what_the_kernel_has_is_taken_as_it_is() {
        let image = tempfile::tempdir().unwrap();
        symlink("/proc/self/root", image.path().join("root")).unwrap();
        symlink("/sys/fs", image.path().join("sysfs")).unwrap();
        symlink("/scratch/new", image.path().join("work")).unwrap();
        let root = Root::open(image.path()).unwrap();
        let mut view = View::new(&root);
        let of_kernel = |kind: &str| {
            MountBuilder::default().destination(format!("/{kind}")).typ(kind).source(kind).build().unwrap()
        };
        view.place(&mut [of_kernel("proc"), of_kernel("sys"), tmpfs("/scratch")]).unwrap();
        assert_eq!(view.make_dir(Path::new("/root/new/deep")).unwrap(), None);
        assert!(image.path().join("new/deep").is_dir());
        assert_eq!(view.make_dir(Path::new("/sysfs")).unwrap(), None);
        view.make_dir(Path::new("/work")).unwrap_err();
    }

    #[test]
    fn no_directory_is_made_behind_a_dangling_link_of_the_image() {
        let image = tempfile::tempdir().unwrap();
        symlink("/nowhere", image.path().join("work")).unwrap();
        let root = Root::open(image.path()).unwrap();
        let view = View::new(&root);
        view.make_dir(Path::new("/work")).unwrap_err();
        assert!(!image.path().join("nowhere").exists());
        let mut view = View::new(&root);
        view.place(&mut [tmpfs("/nowhere/yet")]).unwrap();
        view.make_dir(Path::new("/work")).unwrap();
        view.make_dir(Path::new("/made/deep")).unwrap();
    }
}
