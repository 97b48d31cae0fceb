//! What is visible in a tree of files, in an image and through overlayfs.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use sha2::{Digest, Sha256};

/// Runs `work` on a thread in its own mount namespace.
pub fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNS).expect("these tests need root");
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
                .unwrap();
            work()
        });
        thread.join().unwrap()
    })
}

/// The visible properties of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    pub mode: u32,
    owner: (u32, u32),
    device: u64,
    /// `None` for directories: their size depends on the file system.
    size: Option<u64>,
    modified: (i64, i64),
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub content: Vec<u8>,
    /// The first name, in order, of the same file.
    same_as: PathBuf,
}

pub fn see(root: &Path) -> BTreeMap<PathBuf, Seen> {
    let (mut seen, mut inodes) = (BTreeMap::new(), BTreeMap::new());
    let mut todo = vec![root.to_owned()];
    let mut paths = Vec::new();
    while let Some(path) = todo.pop() {
        // A whiteout without a lower file is listed, but cannot be opened.
        let Ok(meta) = path.symlink_metadata() else { continue };
        if meta.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        paths.push(path);
    }
    paths.sort();
    for path in paths {
        let meta = path.symlink_metadata().unwrap();
        let name = path.strip_prefix(root).unwrap().to_owned();
        let kind = meta.file_type();
        let content = if kind.is_symlink() {
            fs::read_link(&path).unwrap().as_os_str().as_bytes().to_owned()
        } else if kind.is_file() {
            Sha256::digest(fs::read(&path).unwrap()).to_vec()
        } else {
            Vec::new()
        };
        let same_as = inodes.entry((meta.dev(), meta.ino())).or_insert(name.clone()).clone();
        seen.insert(
            name,
            Seen {
                mode: meta.mode(),
                owner: (meta.uid(), meta.gid()),
                device: if kind.is_char_device() || kind.is_block_device() { meta.rdev() } else { 0 },
                size: (!kind.is_dir()).then(|| meta.size()),
                modified: (meta.mtime(), meta.mtime_nsec()),
                xattrs: xattrs(&path),
                content,
                same_as,
            },
        );
    }
    seen
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 4096];
    let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    names[..length]
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let mut value = vec![0; 4096];
            let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
            value.truncate(length);
            (name.to_owned(), value)
        })
        .collect()
}

pub fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
}

/// Reads an image through the kernel.
pub fn see_image(image: &Path) -> BTreeMap<PathBuf, Seen> {
    apart(|| {
        let at = tempfile::tempdir().unwrap();
        let mounted =
            Command::new("mount").args(["-t", "erofs", "-o", "loop,ro"]).arg(image).arg(at.path()).status();
        assert!(mounted.unwrap().success());
        let seen = see(at.path());
        // Detached: a child that another test has just forked may hold a file of the mount until it calls exec.
        nix::mount::umount2(at.path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
        seen
    })
}

/// Reads layers through overlayfs.
pub fn see_overlay(layers: &[&Path], empty: &Path) -> BTreeMap<PathBuf, Seen> {
    apart(|| {
        fs::create_dir_all(empty).unwrap();
        let at = tempfile::tempdir().unwrap();
        let list: Vec<_> = layers.iter().chain([&empty]).map(|layer| layer.to_str().unwrap()).collect();
        let options = format!("lowerdir={}", list.join(":"));
        mount(Some("o"), at.path(), Some("overlay"), MsFlags::MS_RDONLY, Some(options.as_str())).unwrap();
        let seen = see(at.path());
        // Detached: a child that another test has just forked may hold a file of the mount until it calls exec.
        nix::mount::umount2(at.path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
        seen
    })
}
