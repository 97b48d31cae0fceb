//! Reads a directory of kubelet's projected files, to copy it into a guest.
//!
//! kubelet replaces all files at once, with a symlink (see the agent's `tree.rs`), and then removes the old ones. If
//! they vanish during a read, the read starts again with the new ones.

use std::{
    ffi::OsStr,
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Read},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use rustix::fs::Stat;
use sandboxer_protocol::agent as wire;

use crate::beneath::{Access, Dir, Kind, kind};

/// Most bytes of all files of one volume. A configMap or a Secret has at most 1 MiB, and the agent's largest message
/// has 4 MiB.
const MAX_BYTES: u64 = 3 << 20;
/// Most files, directories and symlinks of one volume.
const MAX_ENTRIES: usize = 8192;
/// Most bytes of all paths of one volume.
const MAX_NAMES: usize = 512 << 10;
/// The most nested directories. kubelet creates as many as the paths of the keys have.
const MAX_DEPTH: usize = 64;
/// How often a read is retried. kubelet checks for changes about once a minute.
const ATTEMPTS: usize = 5;

/// Why a directory cannot be copied.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// A file or directory cannot be read.
    #[error("cannot read {path:?}")]
    Read {
        /// The path that cannot be read.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The volume is larger than the limit.
    #[error("{path:?} has more than {most}, the limit for a copy into a guest")]
    TooLarge {
        /// The volume.
        path: PathBuf,
        /// The limit, with its unit.
        most: String,
    },
    /// The volume contains a file that cannot be copied.
    #[error("{path:?} is {what}, which cannot be copied into a guest")]
    Kind {
        /// The file.
        path: PathBuf,
        /// The file's type.
        what: &'static str,
    },
}

/// Returns the owner of a directory.
pub fn owner(dir: &Dir) -> Result<wire::Owner, TreeError> {
    let found = dir.find("").map_err(|source| TreeError::Read { path: dir.path().to_owned(), source })?;
    Ok(owner_of(found.stat()))
}

fn owner_of(stat: &Stat) -> wire::Owner {
    wire::Owner { mode: stat.st_mode & 0o7777, uid: stat.st_uid, gid: stat.st_gid, ..Default::default() }
}

/// Returns a stamp that changes when kubelet replaces the files of a volume: a hash of the properties of the directory
/// and of the version in use. `None`: the directory has no versions, so its files may change without it.
pub fn stamp(root: &Dir) -> io::Result<Option<u64>> {
    let Ok(current) = root.link(CURRENT) else { return Ok(None) };
    let found = root.find("")?;
    let stat = found.stat();
    let mut hash = DefaultHasher::new();
    (stat.st_dev, stat.st_ino, stat.st_mtime, stat.st_mtime_nsec, current).hash(&mut hash);
    Ok(Some(hash.finish()))
}

/// Reads everything in `root`, directories before their contents, always in the same order.
pub fn read(root: &Dir) -> Result<wire::Tree, TreeError> {
    let mut attempt = 1;
    loop {
        match Reading::new(root).read() {
            Err(TreeError::Read { source, path })
                if source.kind() == io::ErrorKind::NotFound && path != root.path() && attempt < ATTEMPTS =>
            {
                attempt += 1;
            }
            read => return read,
        }
    }
}

/// The name of the link to the version in use.
const CURRENT: &str = "..data";

struct Reading<'a> {
    root: &'a Dir,
    entries: Vec<wire::Entry>,
    bytes: u64,
    names: usize,
}

impl<'a> Reading<'a> {
    fn new(root: &'a Dir) -> Self {
        Self { root, entries: Vec::new(), bytes: 0, names: 0 }
    }

    fn read(mut self) -> Result<wire::Tree, TreeError> {
        // Only the version of `..data` is read: others are being written or removed.
        let current = self.root.link(CURRENT).ok();
        self.directory(self.root, Path::new(""), current.as_deref())?;
        Ok(wire::Tree { entries: self.entries, ..Default::default() })
    }

    /// Reads the directory `dir`, whose path in the volume is `below`.
    fn directory(&mut self, dir: &Dir, below: &Path, current: Option<&Path>) -> Result<(), TreeError> {
        let failed = |source| TreeError::Read { path: dir.path().to_owned(), source };
        let names = match dir.names(MAX_ENTRIES) {
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                return Err(self.too_large(format!("{MAX_ENTRIES} files")));
            }
            names => names.map_err(failed)?,
        };
        for name in names {
            let is_version = name.as_bytes().starts_with(b"..") && name != CURRENT;
            if below.as_os_str().is_empty() && is_version && current.is_some_and(|current| current != name) {
                continue;
            }
            self.entry(dir, &name, below.join(&name))?;
        }
        Ok(())
    }

    /// Reads `name` of `dir`, whose path in the volume is `path`.
    fn entry(&mut self, dir: &Dir, name: &OsStr, path: PathBuf) -> Result<(), TreeError> {
        let at = dir.path().join(name);
        let failed = |source| TreeError::Read { path: at.clone(), source };
        let unfit = |what| TreeError::Kind { path: at.clone(), what };
        let text = path.to_str().ok_or_else(|| unfit("not named in UTF-8"))?.to_owned();
        self.names += text.len();
        if self.entries.len() >= MAX_ENTRIES {
            return Err(self.too_large(format!("{MAX_ENTRIES} files")));
        }
        if self.names > MAX_NAMES {
            return Err(self.too_large(format!("{MAX_NAMES} bytes of names")));
        }
        let stat = dir.stat(name).map_err(failed)?;
        let mut entry = wire::Entry { path: text, owner: Some(owner_of(&stat)).into(), ..Default::default() };
        match kind(&stat) {
            Kind::Directory => {
                if path.components().count() > MAX_DEPTH {
                    return Err(self.too_large(format!("{MAX_DEPTH} directories in one another")));
                }
                entry.set_directory(wire::Directory::new());
                self.entries.push(entry);
                return self.directory(&dir.dir(name).map_err(failed)?, &path, None);
            }
            Kind::Link => {
                let target = dir.link(name).map_err(failed)?;
                let target = target.to_str().ok_or_else(|| unfit("a symlink to a path that is not UTF-8"))?;
                self.names += target.len();
                entry.set_link(target.to_owned());
            }
            Kind::File => entry.set_file(self.file(dir, name)?),
            Kind::Device | Kind::Other => return Err(unfit("neither a file, a directory nor a symlink")),
        }
        self.entries.push(entry);
        Ok(())
    }

    fn file(&mut self, dir: &Dir, name: &OsStr) -> Result<Vec<u8>, TreeError> {
        let failed = |source| TreeError::Read { path: dir.path().join(name), source };
        let file = dir.find(name).and_then(|found| found.open(Access::Read)).map_err(failed)?;
        let mut content = Vec::new();
        // One more byte reveals a larger file.
        let free = MAX_BYTES - self.bytes;
        let length = file.take(free + 1).read_to_end(&mut content).map_err(failed)? as u64;
        if length > free {
            return Err(self.too_large(format!("{MAX_BYTES} bytes")));
        }
        self.bytes += length;
        Ok(content)
    }

    fn too_large(&self, most: String) -> TreeError {
        TreeError::TooLarge { path: self.root.path().to_owned(), most }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::*;

    fn read(root: &Path) -> Result<wire::Tree, TreeError> {
        let dir = Dir::host(root).map_err(|source| TreeError::Read { path: root.to_owned(), source })?;
        super::read(&dir)
    }

    fn volume() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for version in ["..1", "..2"] {
            fs::create_dir_all(dir.path().join(version).join("sub")).unwrap();
            fs::write(dir.path().join(version).join("sub/key"), version).unwrap();
        }
        fs::set_permissions(dir.path().join("..2/sub/key"), fs::Permissions::from_mode(0o400)).unwrap();
        symlink("..2", dir.path().join("..data")).unwrap();
        symlink("..data/sub", dir.path().join("sub")).unwrap();
        dir
    }

    fn paths(tree: &wire::Tree) -> Vec<&str> {
        tree.entries.iter().map(|entry| entry.path.as_str()).collect()
    }

    #[test]
    fn the_version_in_use_is_read_with_its_links() {
        let dir = volume();
        let tree = read(dir.path()).unwrap();
        assert_eq!(paths(&tree), ["..2", "..2/sub", "..2/sub/key", "..data", "sub"]);
        let key = &tree.entries[2];
        assert_eq!((key.file(), key.owner.mode), (&b"..2"[..], 0o400));
        assert_eq!((tree.entries[3].link(), tree.entries[4].link()), ("..2", "..data/sub"));
        assert_eq!(tree, read(dir.path()).unwrap());
    }

    #[test]
    fn a_stamp_is_another_one_when_the_files_are_replaced() {
        let dir = volume();
        let stamp = || stamp(&Dir::host(dir.path()).unwrap()).unwrap();
        let before = stamp().unwrap();
        assert_eq!(stamp(), Some(before));
        symlink("..1", dir.path().join("..data_tmp")).unwrap();
        fs::rename(dir.path().join("..data_tmp"), dir.path().join("..data")).unwrap();
        assert_ne!(stamp(), Some(before));
        fs::remove_file(dir.path().join("..data")).unwrap();
        assert_eq!(stamp(), None, "there are no versions");
    }

    #[test]
    fn directories_in_one_another_have_an_end() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join(["d"; MAX_DEPTH].join("/"))).unwrap();
        read(dir.path()).unwrap();
        fs::create_dir(dir.path().join(["d"; MAX_DEPTH].join("/")).join("d")).unwrap();
        assert!(read(dir.path()).unwrap_err().to_string().contains("64 directories"));
    }

    #[test]
    fn a_directory_without_versions_is_read_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("..odd"), "x").unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        assert_eq!(paths(&read(dir.path()).unwrap()), ["..odd", "d"]);
    }

    #[test]
    fn what_is_too_much_or_no_file_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let says = |text: &str| {
            let error = read(dir.path()).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        let big = fs::File::create(dir.path().join("big")).unwrap();
        big.set_len(MAX_BYTES + 1).unwrap();
        says("3145728 bytes");
        big.set_len(MAX_BYTES).unwrap();
        read(dir.path()).unwrap();
        nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        says("pipe");
        fs::remove_file(dir.path().join("pipe")).unwrap();
        let many = dir.path().join("many");
        fs::create_dir(&many).unwrap();
        for n in 0..MAX_ENTRIES {
            fs::write(many.join(n.to_string()), "").unwrap();
        }
        says("8192 files");
        fs::remove_dir_all(dir.path()).unwrap();
        says("cannot read");
    }
}
