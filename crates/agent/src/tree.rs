//! Updates a directory to contain the given files, as kubelet does on its node.
//!
//! kubelet keeps a version of all files in its own directory, `..<time>`, with a symlink `..data` to it and a
//! symlink through `..data` for each file. A new version is complete before `..data` is replaced, so a
//! process that watches the symlink sees all files change at once. Files are written in the same order here.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{Read as _, Write as _},
    os::{
        fd::AsFd,
        unix::fs::{PermissionsExt as _, chown, fchown},
    },
    path::{Component, Path, PathBuf},
};

use pathrs::{
    InodeType, Root,
    error::Error,
    flags::{OpenFlags, RenameFlags},
};

use crate::failure::{Failure, internal};

/// The symlink that is replaced after its target is complete.
const DATA: &str = "..data";
/// The temporary name of a new entry; kubelet allows no key that begins like this.
const NEW: &str = "..new";

/// The owner and permissions of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The permission bits.
    pub mode: u32,
    /// The user ID.
    pub uid: u32,
    /// The group ID.
    pub gid: u32,
}

/// An entry of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The path relative to the tree's root.
    pub path: PathBuf,
    /// The owner and permissions, which are ignored for a symlink.
    pub owner: Owner,
    /// The kind of the entry, with its content.
    pub kind: Kind,
}

/// The kind of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Directory,
    /// A file and its content.
    File(Vec<u8>),
    /// A symbolic link and its target.
    Link(PathBuf),
}

impl Owner {
    /// Applies the owner and permissions to `path`, which no container can replace.
    pub fn apply_to(self, path: &Path) -> Result<(), Failure> {
        chown(path, Some(self.uid), Some(self.gid))
            .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(self.mode & 0o7777)))
            .map_err(internal(format!("cannot set the owner of {}", path.display())))
    }
}

impl Entry {
    /// Checks that the entry's path is below the tree's root.
    pub fn check(&self) -> Result<(), Failure> {
        let parts: Vec<_> = self.path.components().collect();
        if !parts.is_empty() && parts.iter().all(|part| matches!(part, Component::Normal(_))) {
            Ok(())
        } else {
            Err(Failure::invalid(format!("tree: {:?} is not a path below its root", self.path)))
        }
    }
}

/// Makes `dir` contain exactly `entries`. Resolves paths within `dir`, even if containers write there.
pub fn mirror(dir: &Path, owner: Owner, entries: &[Entry]) -> Result<(), Failure> {
    fs::create_dir_all(dir).map_err(internal(format!("cannot create {}", dir.display())))?;
    let tree = Tree(Root::open(dir).map_err(internal(format!("cannot open {}", dir.display())))?);
    tree.own(Path::new("."), owner)?;
    for entry in entries {
        match &entry.kind {
            Kind::Directory => tree.directory(&entry.path, entry.owner)?,
            Kind::File(content) => tree.file(&entry.path, entry.owner, content)?,
            Kind::Link(_) => {}
        }
    }
    let links = || {
        entries.iter().filter_map(|entry| match &entry.kind {
            Kind::Link(target) => Some((&entry.path, target)),
            Kind::Directory | Kind::File(_) => None,
        })
    };
    let is_data = |path: &Path| path == Path::new(DATA);
    for (path, target) in
        links().filter(|(path, _)| is_data(path)).chain(links().filter(|(path, _)| !is_data(path)))
    {
        tree.link(path, target)?;
    }
    let entry_paths: HashSet<&Path> = entries.iter().map(|entry| entry.path.as_path()).collect();
    for path in superfluous(dir, &entry_paths)? {
        tree.clear(&path)?;
    }
    Ok(())
}

struct Tree(Root);

impl Tree {
    fn directory(&self, path: &Path, owner: Owner) -> Result<(), Failure> {
        if !self.is_directory(path) {
            self.clear(path)?;
            let kind = InodeType::Directory(fs::Permissions::from_mode(0o700));
            self.0.create(path, &kind).map_err(failed("create", path))?;
        }
        self.own(path, owner)
    }

    fn file(&self, path: &Path, owner: Owner, content: &[u8]) -> Result<(), Failure> {
        if self.holds(path, content) {
            return self.own(path, owner);
        }
        if self.is_directory(path) {
            self.clear(path)?;
        }
        let new = path.with_file_name(NEW);
        self.clear(&new)?;
        let flags = OpenFlags::O_CREAT | OpenFlags::O_EXCL | OpenFlags::O_WRONLY;
        let mut file = self
            .0
            .create_file(&new, flags, &fs::Permissions::from_mode(0o600))
            .map_err(failed("create", path))?;
        file.write_all(content).map_err(internal(format!("cannot write {}", path.display())))?;
        own(&file, owner, path)?;
        self.0.rename(&new, path, RenameFlags::empty()).map_err(failed("name", path))
    }

    fn link(&self, path: &Path, target: &Path) -> Result<(), Failure> {
        if self.0.readlink(path).is_ok_and(|there| there == target) {
            return Ok(());
        }
        if self.is_directory(path) {
            self.clear(path)?;
        }
        let new = path.with_file_name(NEW);
        self.clear(&new)?;
        self.0.create(&new, &InodeType::Symlink(target.to_owned())).map_err(failed("create", path))?;
        self.0.rename(&new, path, RenameFlags::empty()).map_err(failed("name", path))
    }

    /// Returns whether `path` itself is a directory.
    fn is_directory(&self, path: &Path) -> bool {
        let flags = OpenFlags::O_DIRECTORY | OpenFlags::O_NOFOLLOW | OpenFlags::O_RDONLY;
        self.0.open_subpath(path, flags).is_ok()
    }

    fn holds(&self, path: &Path, content: &[u8]) -> bool {
        let flags = OpenFlags::O_NOFOLLOW | OpenFlags::O_RDONLY | OpenFlags::O_NONBLOCK;
        let Ok(file) = self.0.open_subpath(path, flags) else { return false };
        if !file.metadata().is_ok_and(|file| file.is_file()) {
            return false;
        }
        let mut there = Vec::with_capacity(content.len() + 1);
        // One more byte detects a longer file.
        file.take(content.len() as u64 + 1).read_to_end(&mut there).is_ok() && there == content
    }

    fn own(&self, path: &Path, owner: Owner) -> Result<(), Failure> {
        let flags = OpenFlags::O_NOFOLLOW | OpenFlags::O_RDONLY | OpenFlags::O_NONBLOCK;
        let file = self.0.open_subpath(path, flags).map_err(failed("open", path))?;
        own(&file, owner, path)
    }

    /// Removes `path` if it exists.
    fn clear(&self, path: &Path) -> Result<(), Failure> {
        match self.0.remove_all(path) {
            Err(error) if error.kind() != pathrs::error::ErrorKind::OsError(Some(libc::ENOENT)) => {
                Err(failed("remove", path)(error))
            }
            _ => Ok(()),
        }
    }
}

fn own(file: &File, owner: Owner, path: &Path) -> Result<(), Failure> {
    fchown(file.as_fd(), Some(owner.uid), Some(owner.gid))
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(owner.mode & 0o7777)))
        .map_err(internal(format!("cannot set the owner of {}", path.display())))
}

fn failed(action: &str, path: &Path) -> impl FnOnce(Error) -> Failure {
    internal(format!("cannot {action} {}", path.display()))
}

/// Returns the paths in `dir` that are not in `entry_paths`, without the contents of directories that are removed as a whole.
/// Symlinks come first: they point to later paths.
fn superfluous(dir: &Path, entry_paths: &HashSet<&Path>) -> Result<Vec<PathBuf>, Failure> {
    let (mut links, mut others, mut pending) = (Vec::new(), Vec::new(), vec![PathBuf::new()]);
    while let Some(below) = pending.pop() {
        let read = || internal(format!("cannot read {}", dir.join(&below).display()));
        for entry in fs::read_dir(dir.join(&below)).map_err(read())? {
            let entry = entry.map_err(read())?;
            let path = below.join(entry.file_name());
            let kind = entry.file_type().map_err(read())?;
            match entry_paths.contains(path.as_path()) {
                true if kind.is_dir() => pending.push(path),
                true => {}
                false if kind.is_symlink() => links.push(path),
                false => others.push(path),
            }
        }
    }
    links.extend(others);
    Ok(links)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    fn entry(path: &str, kind: Kind) -> Entry {
        // SAFETY: neither call can fail or accesses memory.
        let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
        let mode = if kind == Kind::Directory { 0o755 } else { 0o640 };
        Entry { path: path.into(), owner: Owner { mode, uid, gid }, kind }
    }

    fn file(path: &str, content: &str) -> Entry {
        entry(path, Kind::File(content.into()))
    }

    fn link(path: &str, target: &str) -> Entry {
        entry(path, Kind::Link(target.into()))
    }

    fn put(dir: &Path, entries: &[Entry]) {
        mirror(dir, entry("", Kind::Directory).owner, entries).unwrap();
    }

    /// Returns kubelet's entries for files with these contents.
    fn version(name: &str, files: &[(&str, &str)]) -> Vec<Entry> {
        let mut entries = vec![entry(name, Kind::Directory), link("..data", name)];
        for (key, content) in files {
            entries.push(file(&format!("{name}/{key}"), content));
            entries.push(link(key, &format!("..data/{key}")));
        }
        entries
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_new_version_replaces_the_old_one_whole() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("v");
        put(&dir, &version("..1", &[("a", "1"), ("b", "1")]));
        assert_eq!(fs::read_to_string(dir.join("a")).unwrap(), "1");
        assert_eq!(fs::metadata(dir.join("a")).unwrap().mode() & 0o777, 0o640);
        let open_file = File::open(dir.join("a")).unwrap();
        put(&dir, &version("..2", &[("a", "2"), ("c", "2")]));
        assert_eq!(names(&dir), ["..2", "..data", "a", "c"]);
        assert_eq!(fs::read_to_string(dir.join("a")).unwrap(), "2");
        let mut old = String::new();
        (&open_file).read_to_string(&mut old).unwrap();
        assert_eq!(old, "1", "who has a file open keeps it");
        put(&dir, &[]);
        assert!(names(&dir).is_empty());
    }

    #[test]
    fn whoever_waits_for_the_link_to_change_finds_all_files_changed() {
        use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), &version("..1", &[("a", "1"), ("b", "1")]));
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
        inotify.add_watch(dir.path(), AddWatchFlags::IN_ALL_EVENTS).unwrap();
        put(dir.path(), &version("..2", &[("a", "2"), ("b", "2")]));
        let events = inotify.read_events().unwrap();
        let at = |mask, name: &str| {
            let position = events.iter().position(|event| {
                event.mask.contains(mask)
                    && event.name.as_deref().is_some_and(|event_name| event_name == name)
            });
            position.unwrap_or_else(|| panic!("no {mask:?} of {name}: {events:?}"))
        };
        let replaced = at(AddWatchFlags::IN_MOVED_TO, "..data");
        assert!(at(AddWatchFlags::IN_CREATE, "..2") < replaced, "{events:?}");
        assert!(replaced < at(AddWatchFlags::IN_DELETE, "..1"), "{events:?}");
        assert!(
            !events.iter().any(|event| event.name.as_deref().is_some_and(|event_name| event_name == "a")),
            "{events:?}"
        );
    }

    #[test]
    fn what_is_as_it_shall_be_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let entries = version("..1", &[("a", "1")]);
        put(dir.path(), &entries);
        let inode = |path: &str| fs::symlink_metadata(dir.path().join(path)).unwrap().ino();
        let before = [inode("..1/a"), inode("..data"), inode("a")];
        put(dir.path(), &entries);
        assert_eq!(before, [inode("..1/a"), inode("..data"), inode("a")]);
    }

    #[test]
    fn one_kind_of_thing_takes_the_place_of_another() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), &[entry("x", Kind::Directory), file("x/y", ""), link("z", "x")]);
        put(dir.path(), &[file("x", "now a file"), entry("z", Kind::Directory)]);
        assert_eq!(fs::read_to_string(dir.path().join("x")).unwrap(), "now a file");
        assert!(dir.path().join("z").symlink_metadata().unwrap().is_dir());
        put(dir.path(), &[link("x", "z"), link("z", "nowhere")]);
        assert_eq!(fs::read_link(dir.path().join("z")).unwrap(), Path::new("nowhere"));
    }

    #[test]
    fn links_that_a_container_left_lead_nowhere_outside() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, outside) = (dir.path().join("tree"), dir.path().join("outside"));
        fs::create_dir_all(&outside).unwrap();
        fs::write(outside.join("f"), "untouched").unwrap();
        fs::create_dir(&tree).unwrap();
        symlink(&outside, tree.join("d")).unwrap();
        symlink(outside.join("f"), tree.join("f")).unwrap();
        symlink(outside.join("f"), tree.join(NEW)).unwrap();
        put(&tree, &[entry("d", Kind::Directory), file("d/f", "inside"), file("f", "inside")]);
        assert_eq!(fs::read_to_string(outside.join("f")).unwrap(), "untouched");
        assert_eq!(fs::read_to_string(tree.join("d/f")).unwrap(), "inside");
        assert_eq!(names(&outside), ["f"]);
    }

    #[test]
    fn paths_that_leave_the_tree_are_refused() {
        for bad in ["", "/a", "../a", "a/../b", "."] {
            assert!(file(bad, "").check().is_err(), "{bad:?}");
        }
        assert!(file("..data/a", "").check().is_ok());
    }
}
