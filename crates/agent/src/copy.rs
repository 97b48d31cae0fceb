//! Copies a directory tree of an image with the metadata that a file system keeps: owners, modes, extended attributes,
//! times and hard links. Sockets are left out.

use std::{
    collections::HashMap,
    ffi::CString,
    fs::{self, DirBuilder, File, Metadata, OpenOptions},
    io,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{
            DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
            lchown, symlink,
        },
    },
    path::{Path, PathBuf},
};

use nix::sys::stat::{Mode, SFlag, UtimensatFlags, mknod, utimensat};
use nix::sys::time::TimeSpec;

/// The longest list of names, and the longest value, of extended attributes in Linux, bytes.
const MAX_ATTRIBUTE: usize = 64 << 10;

/// Copies directory `from` to `to`, which exists and is empty. No other process may change either of them meanwhile.
pub fn tree(from: &Path, to: &Path) -> io::Result<()> {
    // The path may be a symlink of /proc to a descriptor.
    let from = &from.join(".");
    inside(from, to, &mut HashMap::new())?;
    attributes(from, to, &fs::metadata(from)?)
}

fn inside(from: &Path, to: &Path, linked: &mut HashMap<(u64, u64), PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let meta = fs::symlink_metadata(&source)?;
        let kind = meta.file_type();
        if kind.is_socket() {
            continue;
        }
        if !kind.is_dir() && meta.nlink() > 1 {
            if let Some(first) = linked.get(&(meta.dev(), meta.ino())) {
                fs::hard_link(first, &target)?;
                continue;
            }
            linked.insert((meta.dev(), meta.ino()), target.clone());
        }
        if kind.is_dir() {
            DirBuilder::new().mode(0o700).create(&target)?;
            inside(&source, &target, linked)?;
        } else if kind.is_symlink() {
            symlink(fs::read_link(&source)?, &target)?;
        } else if kind.is_file() {
            let mut new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&target)?;
            io::copy(&mut File::open(&source)?, &mut new)?;
        } else {
            let kind = SFlag::from_bits_truncate(meta.mode() & libc::S_IFMT);
            mknod(&target, kind, Mode::empty(), meta.rdev())?;
        }
        attributes(&source, &target, &meta)?;
    }
    Ok(())
}

/// Copies to `to` the metadata of `from`, of which `meta` is a part.
fn attributes(from: &Path, to: &Path, meta: &Metadata) -> io::Result<()> {
    // The owner is set first: a change of the owner clears modes and capabilities.
    lchown(to, Some(meta.uid()), Some(meta.gid()))?;
    if !meta.file_type().is_symlink() {
        fs::set_permissions(to, fs::Permissions::from_mode(meta.mode() & 0o7777))?;
    }
    extended(from, to)?;
    let time = |seconds: i64, ns: i64| TimeSpec::new(seconds, ns);
    let (read, written) = (time(meta.atime(), meta.atime_nsec()), time(meta.mtime(), meta.mtime_nsec()));
    Ok(utimensat(nix::fcntl::AT_FDCWD, to, &read, &written, UtimensatFlags::NoFollowSymlink)?)
}

/// Copies extended attributes, except those that the target's file system does not support.
fn extended(from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (c_path(from)?, c_path(to)?);
    let Some(names) = filled(|buffer, length| {
        // SAFETY: the path is a C string, and the buffer has `length` bytes.
        unsafe { libc::llistxattr(from.as_ptr(), buffer.cast(), length) }
    })?
    else {
        return Ok(());
    };
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = CString::new(name)?;
        let value = filled(|buffer, length| {
            // SAFETY: as above, and the name is a C string.
            unsafe { libc::lgetxattr(from.as_ptr(), name.as_ptr(), buffer.cast(), length) }
        })?;
        let Some(value) = value else { continue };
        // SAFETY: all three pointers are to what their types say, of the given length.
        let set =
            unsafe { libc::lsetxattr(to.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
        match io::Error::last_os_error() {
            _ if set == 0 => {}
            error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            error => return Err(error),
        }
    }
    Ok(())
}

/// Returns the bytes that `read` writes to a buffer; `None` if there are no such attributes.
fn filled(read: impl FnOnce(*mut u8, usize) -> isize) -> io::Result<Option<Vec<u8>>> {
    let mut buffer = vec![0_u8; MAX_ATTRIBUTE];
    match usize::try_from(read(buffer.as_mut_ptr(), buffer.len())) {
        Ok(length) => {
            buffer.truncate(length);
            Ok(Some(buffer))
        }
        Err(_) => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENODATA)) => Ok(None),
            error => Err(error),
        },
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_copy_is_the_same_in_all_that_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(from.join("deep/er")).unwrap();
        fs::create_dir(&to).unwrap();
        fs::write(from.join("file"), "content").unwrap();
        fs::hard_link(from.join("file"), from.join("deep/same")).unwrap();
        fs::write(from.join("suid"), "x").unwrap();
        symlink("/nowhere", from.join("link")).unwrap();
        mknod(&from.join("pipe"), SFlag::S_IFIFO, Mode::from_bits_truncate(0o640), 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
        lchown(from.join("suid"), Some(1234), Some(5678)).unwrap();
        lchown(from.join("link"), Some(7), Some(8)).unwrap();
        fs::set_permissions(from.join("suid"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::set_permissions(&from, fs::Permissions::from_mode(0o1777)).unwrap();
        let old = TimeSpec::new(1_000_000_000, 42);
        utimensat(nix::fcntl::AT_FDCWD, &from.join("deep"), &old, &old, UtimensatFlags::NoFollowSymlink)
            .unwrap();

        tree(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(to.join("deep/same")).unwrap(), "content");
        let meta = |path: &Path| fs::symlink_metadata(path).unwrap();
        assert_eq!(meta(&to.join("deep/same")).ino(), meta(&to.join("file")).ino());
        assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("/nowhere"));
        assert!(!to.join("socket").exists());
        for name in ["", "file", "suid", "link", "pipe", "deep", "deep/er"] {
            let seen = |dir: &Path| {
                let metadata = meta(&dir.join(name));
                (metadata.mode(), metadata.uid(), metadata.gid(), metadata.mtime(), metadata.mtime_nsec())
            };
            assert_eq!(seen(&to), seen(&from), "{name:?}");
        }
        assert!(
            Command::new("diff")
                .arg("-r")
                .args(["--no-dereference", "-x", "socket", "-x", "pipe"])
                .args([&from, &to])
                .status()
                .unwrap()
                .success()
        );
    }
}
