//! One EROFS image of a stack of directories.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    unistd::chdir,
};
use sha2::{Digest, Sha256};

use super::RootfsError;

/// Changes when images come to be made in another way.
const FORMAT: &[u8] = b"erofs 1: uncompressed, as merged by overlayfs";

/// Most bytes of a program's words that go into an error.
const WORDS: usize = 1024;

/// What an image of `dirs` is known by: the same directories, unchanged, have the same key. A
/// committed snapshot never changes; should its path be used again, inode and ctime differ.
pub fn key(dirs: &[PathBuf]) -> io::Result<String> {
    let mut hash = Sha256::new();
    hash.update(FORMAT);
    for dir in dirs {
        let meta = fs::metadata(dir)?;
        let path = dir.as_os_str().as_encoded_bytes();
        hash.update((path.len() as u64).to_le_bytes());
        hash.update(path);
        for number in [meta.dev(), meta.ino(), meta.ctime() as u64, meta.ctime_nsec() as u64] {
            hash.update(number.to_le_bytes());
        }
    }
    Ok(hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect())
}

/// Makes `image` of `dirs`, uppermost first, as overlayfs would show them. Whole or not at all; blocks.
/// `scratch` is a directory on the same file system, for what is half-made.
pub fn make(program: &Path, dirs: &[PathBuf], image: &Path, scratch: &Path) -> Result<(), RootfsError> {
    let host = |action, path: &Path| {
        let path = path.to_owned();
        move |source| RootfsError::Host { action, path, source }
    };
    let half_made = tempfile_in(scratch, image);
    let merged = Merged::of(dirs, &half_made.with_extension("dir"))?;
    let made = (|| {
        mkfs(program, &merged.path, &half_made)?;
        File::open(&half_made).and_then(|file| file.sync_all()).map_err(host("sync", &half_made))?;
        fs::rename(&half_made, image).map_err(host("name image", image))
    })();
    if made.is_err() {
        let _ = fs::remove_file(&half_made);
    }
    made
}

fn tempfile_in(scratch: &Path, image: &Path) -> PathBuf {
    scratch.join(image.file_name().unwrap_or_default()).with_extension("new")
}

fn mkfs(program: &Path, from: &Path, image: &Path) -> Result<(), RootfsError> {
    let output = Command::new(program)
        // Nothing of the time or the place it is made at: equal snapshots, equal images.
        .args(["--quiet", "-U", "00000000-0000-0000-0000-000000000000"])
        .arg(image)
        .arg(from)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| RootfsError::Host { action: "start", path: program.to_owned(), source })?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let tail = words.char_indices().rev().nth(WORDS).map_or(0, |(at, _)| at);
    Err(RootfsError::Mkfs {
        program: program.to_owned(),
        image: image.to_owned(),
        words: format!("{}; {}", output.status, words[tail..].trim().replace('\n', " | ")),
    })
}

/// Directories seen as one; unmounted when dropped.
struct Merged {
    path: PathBuf,
    mounted: bool,
}

impl Merged {
    fn of(dirs: &[PathBuf], at: &Path) -> Result<Self, RootfsError> {
        let host = |action, path: &Path| {
            let path = path.to_owned();
            move |source| RootfsError::Host { action, path, source }
        };
        if let [only] = dirs {
            return Ok(Self { path: only.clone(), mounted: false });
        }
        fs::create_dir_all(at).map_err(host("make directory", at))?;
        let merged = Self { path: at.to_owned(), mounted: true };
        mount_overlay(dirs, at).map_err(host("merge layers at", at))?;
        Ok(merged)
    }
}

impl Drop for Merged {
    fn drop(&mut self) {
        if self.mounted {
            unmount(&self.path);
        }
    }
}

/// Takes a merged view away; one that isn't mounted loses its directory only.
pub fn unmount(path: &Path) {
    let _ = umount2(path, MntFlags::MNT_DETACH);
    if let Err(error) = fs::remove_dir(path) {
        tracing::warn!(?path, %error, "a merged view's directory stays");
    }
}

/// Mounts `dirs` read-only as one. A mount's options fit into one page, which long paths of many
/// layers don't: so the paths are relative to the directory they share, in a thread of its own that
/// may go there.
fn mount_overlay(dirs: &[PathBuf], at: &Path) -> io::Result<()> {
    let shared = shared_parent(dirs);
    let names: Vec<String> = dirs
        .iter()
        .map(|dir| {
            let name = dir.strip_prefix(&shared).unwrap_or(dir).to_string_lossy();
            name.replace('\\', "\\\\").replace(':', "\\:").replace(',', "\\,")
        })
        .collect();
    let options = format!("lowerdir={}", names.join(":"));
    let at = at.to_owned();
    let mounting = thread::spawn(move || -> io::Result<()> {
        unshare(CloneFlags::CLONE_FS)?;
        chdir(&shared)?;
        mount(Some("overlay"), &at, Some("overlay"), MsFlags::MS_RDONLY, Some(options.as_str()))?;
        Ok(())
    });
    mounting.join().unwrap_or_else(|_| Err(io::Error::other("the mounting thread failed")))
}

fn shared_parent(dirs: &[PathBuf]) -> PathBuf {
    let mut shared = dirs.first().and_then(|dir| dir.parent()).unwrap_or(Path::new("/")).to_owned();
    while !dirs.iter().all(|dir| dir.starts_with(&shared) && *dir != shared) {
        if !shared.pop() {
            break;
        }
    }
    shared
}
