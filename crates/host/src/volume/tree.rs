//! Reads a directory of kubelet's projected files, to copy it into a guest.
//!
//! kubelet replaces all files at once, by a symlink (see the agent's `tree.rs`), and then removes the old
//! ones. If they vanish during a read, the read starts again with the new ones.

use std::{
    fs, io,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use sandboxer_protocol::agent as wire;

/// Most bytes of all files of one volume. A configMap or a Secret has at most 1 MiB, and the agent's largest
/// message 4 MiB.
const MAX_BYTES: u64 = 3 << 20;
/// Most files, directories and symlinks of one volume.
const MAX_ENTRIES: usize = 8192;
/// Most bytes of all paths of one volume.
const MAX_NAMES: usize = 512 << 10;
/// How often a read is retried. kubelet checks for changes about once a minute.
const ATTEMPTS: usize = 5;

/// Why a directory cannot be copied.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// It cannot be read.
    #[error("cannot read {path:?}")]
    Read {
        /// The path that cannot be read.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is larger than the limit.
    #[error("{path:?} has more than {most}, the limit for a copy into a guest")]
    TooLarge {
        /// The volume.
        path: PathBuf,
        /// The exceeded limit.
        most: String,
    },
    /// It contains a file that cannot be copied.
    #[error("{path:?} is {what}, which cannot be copied into a guest")]
    Kind {
        /// The file.
        path: PathBuf,
        /// The file's type.
        what: &'static str,
    },
}

/// Returns the owner of `path`, without following symlinks.
pub fn owner(path: &Path) -> Result<wire::Owner, TreeError> {
    let meta = fs::symlink_metadata(path);
    Ok(owner_of(&meta.map_err(|source| TreeError::Read { path: path.to_owned(), source })?))
}

fn owner_of(meta: &fs::Metadata) -> wire::Owner {
    wire::Owner { mode: meta.mode() & 0o7777, uid: meta.uid(), gid: meta.gid(), ..Default::default() }
}

/// Reads everything in `root`, directories before their contents, always in the same order.
pub fn read(root: &Path) -> Result<wire::Tree, TreeError> {
    let mut attempt = 1;
    loop {
        match Reading::new(root).read() {
            Err(TreeError::Read { source, path })
                if source.kind() == io::ErrorKind::NotFound && path != root && attempt < ATTEMPTS =>
            {
                attempt += 1;
            }
            read => return read,
        }
    }
}

struct Reading<'a> {
    root: &'a Path,
    entries: Vec<wire::Entry>,
    bytes: u64,
    names: usize,
}

impl<'a> Reading<'a> {
    fn new(root: &'a Path) -> Self {
        Self { root, entries: Vec::new(), bytes: 0, names: 0 }
    }

    fn read(mut self) -> Result<wire::Tree, TreeError> {
        // Only the version that `..data` points to: others are being written or removed.
        let current = fs::read_link(self.root.join("..data")).ok();
        self.directory(Path::new(""), current.as_deref())?;
        Ok(wire::Tree { entries: self.entries, ..Default::default() })
    }

    fn directory(&mut self, below: &Path, current: Option<&Path>) -> Result<(), TreeError> {
        let dir = self.root.join(below);
        let failed = |source| TreeError::Read { path: dir.clone(), source };
        let mut names = Vec::new();
        for entry in fs::read_dir(&dir).map_err(failed)? {
            names.push(entry.map_err(failed)?.file_name());
            if names.len() > MAX_ENTRIES {
                return Err(self.too_large(format!("{MAX_ENTRIES} files")));
            }
        }
        names.sort();
        for name in names {
            let is_version = name.as_bytes().starts_with(b"..") && name != "..data";
            if below.as_os_str().is_empty() && is_version && current.is_some_and(|current| current != name) {
                continue;
            }
            self.entry(below.join(name))?;
        }
        Ok(())
    }

    fn entry(&mut self, path: PathBuf) -> Result<(), TreeError> {
        let at = self.root.join(&path);
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
        let meta = fs::symlink_metadata(&at).map_err(failed)?;
        let mut entry = wire::Entry { path: text, owner: Some(owner_of(&meta)).into(), ..Default::default() };
        if meta.is_dir() {
            entry.set_directory(wire::Directory::new());
            self.entries.push(entry);
            return self.directory(&path, None);
        }
        if meta.is_symlink() {
            let target = fs::read_link(&at).map_err(failed)?;
            let target = target.to_str().ok_or_else(|| unfit("a symlink to a path that is not UTF-8"))?;
            self.names += target.len();
            entry.set_link(target.to_owned());
        } else if meta.is_file() {
            entry.set_file(self.file(&at)?);
        } else {
            return Err(unfit("neither a file, a directory nor a symlink"));
        }
        self.entries.push(entry);
        Ok(())
    }

    fn file(&mut self, at: &Path) -> Result<Vec<u8>, TreeError> {
        use std::io::Read;
        let failed = |source| TreeError::Read { path: at.to_owned(), source };
        let file = fs::OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
            .open(at)
            .map_err(failed)?;
        let mut content = Vec::new();
        // One byte more reveals a larger file.
        let room = MAX_BYTES - self.bytes;
        let length = file.take(room + 1).read_to_end(&mut content).map_err(failed)? as u64;
        if length > room {
            return Err(self.too_large(format!("{MAX_BYTES} bytes")));
        }
        self.bytes += length;
        Ok(content)
    }

    fn too_large(&self, most: String) -> TreeError {
        TreeError::TooLarge { path: self.root.to_owned(), most }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

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
