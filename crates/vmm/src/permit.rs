//! Lets the user of one jail open one file of the host, such as a disk, that another user owns.
//!
//! A permit adds an entry to the file's access control list (acl(5)), as logind does for devices of a seat. Other users
//! are not affected, and the entry exists only while the VMM opens the file. The jail decides which files can be reached.
//!
//! A daemon that is killed meanwhile leaves an entry. The next daemon removes it when it adopts the VM. Entries of VMs
//! that are gone are removed when the file is next opened for a VMM.

use std::{
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Mutex, PoisonError},
};

use rustix::{
    fs::{XattrFlags, fgetxattr, fsetxattr, lgetxattr, lsetxattr},
    io::Errno,
};
use sandboxer_process::jail;

/// Name of the attribute that holds the list.
const ATTRIBUTE: &str = "system.posix_acl_access";
/// `POSIX_ACL_XATTR_VERSION` of `linux/posix_acl_xattr.h`; all fields are little-endian.
const VERSION: u32 = 2;
/// Tags of entries, in the required order: `linux/posix_acl.h`.
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const OWNING_GROUP: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;
/// User ID in entries that name no user.
const NOBODY: u32 = u32::MAX;
const READ: u16 = 4;
const WRITE: u16 = 2;
/// Maximum size of a list, bytes.
const MAX_LIST: usize = 4 + 8 * 512;

/// The existing permits: device and inode of the file, and the user. The lock is held while a list is read and written
/// (two system calls on an open file), or another thread's change could be lost. A lock on the file would do as well,
/// but a VMM that has the file open could hold it forever.
static PERMITS: Mutex<Vec<(u64, u64, u32)>> = Mutex::new(Vec::new());

/// An entry of a list: tag, permissions and user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    tag: u16,
    permissions: u16,
    id: u32,
}

/// A file that a user may open until this is dropped.
#[derive(Debug)]
pub struct Permit {
    file: File,
    user: u32,
    key: (u64, u64, u32),
}

impl Permit {
    /// Lets `user` open `file`. `None`: everybody is already allowed to.
    pub fn grant(file: File, user: u32, write: bool) -> io::Result<Option<Self>> {
        let wanted = if write { READ | WRITE } else { READ };
        let meta = file.metadata()?;
        let mode = meta.mode();
        if mode & u32::from(wanted) == u32::from(wanted) {
            return Ok(None);
        }
        let key = (meta.dev(), meta.ino(), user);
        let mut permits = PERMITS.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = match read(|buffer| fgetxattr(&file, ATTRIBUTE, buffer))? {
            Some(entries) => entries,
            None => of_mode(mode),
        };
        let is_left = |entry: &Entry| {
            let (tag, id) = (entry.tag, entry.id);
            tag == USER && jail::is_user(id) && !permits.contains(&(key.0, key.1, id))
        };
        let entries = entries.into_iter().filter(|entry| !is_left(entry)).collect();
        let entries = with_user(entries, user, wanted)?;
        fsetxattr(&file, ATTRIBUTE, &encode(&entries), XattrFlags::empty())?;
        permits.push(key);
        Ok(Some(Self { file, user, key }))
    }

    /// Revokes the permit for `path` that an earlier daemon gave to `user`. Does not open the file, which may be a
    /// device that does not respond. The directory must be the daemon's own.
    pub fn take_back(path: &Path, user: u32) -> io::Result<()> {
        let _alone = PERMITS.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match read(|buffer| lgetxattr(path, ATTRIBUTE, buffer)) {
            // The file system does not support lists.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => None,
            found => found?,
        };
        match found {
            Some(entries) if entries.iter().any(|entry| (entry.tag, entry.id) == (USER, user)) => {
                Ok(lsetxattr(path, ATTRIBUTE, &encode(&without_user(entries, user)), XattrFlags::empty())?)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut permits = PERMITS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = permits.iter().position(|permit| *permit == self.key) {
            permits.swap_remove(at);
        }
        if permits.contains(&self.key) {
            // The user has another permit for this file.
            return;
        }
        let removed = read(|buffer| fgetxattr(&self.file, ATTRIBUTE, buffer)).and_then(|entries| {
            let entries = without_user(entries.unwrap_or_default(), self.user);
            Ok(fsetxattr(&self.file, ATTRIBUTE, &encode(&entries), XattrFlags::empty())?)
        });
        if let Err(error) = removed {
            tracing::warn!(file = ?self.file, user = self.user, %error,
                "cannot remove a VMM's entry from a disk's access control list");
        }
    }
}

/// Reads a list. `None`: there is none.
fn read(get: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>) -> io::Result<Option<Vec<Entry>>> {
    let mut bytes = vec![0; MAX_LIST];
    match get(&mut bytes) {
        Ok(length) => decode(bytes.get(..length).unwrap_or_default()).map(Some),
        Err(Errno::NODATA) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns the list that is equivalent to a file's mode.
fn of_mode(mode: u32) -> Vec<Entry> {
    let entry = |tag, shift: u32| Entry {
        tag,
        permissions: u16::try_from(mode >> shift & 7).unwrap_or_default(),
        id: NOBODY,
    };
    vec![entry(OWNER, 6), entry(OWNING_GROUP, 3), entry(OTHERS, 0)]
}

/// Returns the list with an additional entry that gives `user` these permissions.
fn with_user(mut entries: Vec<Entry>, user: u32, permissions: u16) -> io::Result<Vec<Entry>> {
    entries.retain(|entry| (entry.tag, entry.id) != (USER, user));
    let position = |tag| entries.iter().position(|entry| entry.tag == tag);
    let (Some(owner), Some(group)) = (position(OWNER), position(OWNING_GROUP)) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "malformed access control list"));
    };
    match position(MASK) {
        // A wider mask would give others more permissions, too.
        Some(mask) if entries[mask].permissions & permissions != permissions => {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the mask of its access control list denies it to users: remove the list or widen the mask",
            ));
        }
        Some(_) => {}
        None => {
            let permissions = permissions | entries[group].permissions;
            let others = position(OTHERS).unwrap_or(entries.len());
            entries.insert(others, Entry { tag: MASK, permissions, id: NOBODY });
        }
    }
    entries.insert(owner + 1, Entry { tag: USER, permissions, id: user });
    Ok(entries)
}

/// Returns the list without entries for `user`, and without the mask if no entry names a user any more.
fn without_user(mut entries: Vec<Entry>, user: u32) -> Vec<Entry> {
    entries.retain(|entry| (entry.tag, entry.id) != (USER, user));
    if entries.iter().all(|entry| matches!(entry.tag, OWNER | OWNING_GROUP | OTHERS | MASK)) {
        entries.retain(|entry| entry.tag != MASK);
    }
    entries
}

fn encode(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for entry in entries {
        bytes.extend(entry.tag.to_le_bytes());
        bytes.extend(entry.permissions.to_le_bytes());
        bytes.extend(entry.id.to_le_bytes());
    }
    bytes
}

fn decode(bytes: &[u8]) -> io::Result<Vec<Entry>> {
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "malformed access control list");
    let (version, entries) = bytes.split_first_chunk::<4>().ok_or_else(malformed)?;
    let (entries, rest) = entries.as_chunks::<8>();
    if u32::from_le_bytes(*version) != VERSION || !rest.is_empty() {
        return Err(malformed());
    }
    Ok(entries
        .iter()
        .map(|&[t0, t1, p0, p1, i0, i1, i2, i3]| Entry {
            tag: u16::from_le_bytes([t0, t1]),
            permissions: u16::from_le_bytes([p0, p1]),
            id: u32::from_le_bytes([i0, i1, i2, i3]),
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{fs::PermissionsExt, process::CommandExt},
        process::Command,
    };

    use super::*;

    const SOMEBODY: u32 = 0x7000_1234;

    /// Returns whether a process of `user` can open `path` for reading and writing.
    fn opens(path: &Path, user: u32) -> bool {
        let script = format!("exec 3<>{}", path.display());
        let mut shell = Command::new("/bin/sh");
        // The test's directory is accessible to root only; the file is what is tested.
        let opened =
            shell.args(["-c", &script]).uid(user).gid(user).stderr(std::process::Stdio::null()).status();
        opened.unwrap().success()
    }

    #[test]
    fn one_user_may_open_the_file_for_a_while_and_nothing_is_left_of_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "content").unwrap();
        for mode in [0o600, 0o640] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let grant = |user| Permit::grant(File::open(&path).unwrap(), user, true);
            let permit = match grant(SOMEBODY) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    return println!("not tested: no access control lists here");
                }
                permit => permit.unwrap().expect("not everybody may"),
            };
            assert!(opens(&path, SOMEBODY) && !opens(&path, SOMEBODY + 1));
            let second = grant(SOMEBODY + 1).unwrap().unwrap();
            assert!(opens(&path, SOMEBODY) && opens(&path, SOMEBODY + 1));
            drop(permit);
            assert!(!opens(&path, SOMEBODY) && opens(&path, SOMEBODY + 1));
            drop(second);
            assert!(!opens(&path, SOMEBODY + 1));
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode);
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(
            Permit::grant(File::open(&path).unwrap(), SOMEBODY, false).unwrap().is_none(),
            "everybody may read"
        );
    }

    #[test]
    fn what_a_killed_daemon_left_is_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "content").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let list = |user, permissions| encode(&with_user(of_mode(0o600), user, permissions).unwrap());
        let leave = |user: u32| lsetxattr(&path, ATTRIBUTE, &list(user, READ | WRITE), XattrFlags::empty());
        if leave(SOMEBODY) == Err(Errno::OPNOTSUPP) {
            return println!("not tested: no access control lists here");
        }
        assert!(opens(&path, SOMEBODY));
        Permit::take_back(&path, SOMEBODY + 1).unwrap();
        assert!(opens(&path, SOMEBODY), "another user's");
        Permit::take_back(&path, SOMEBODY).unwrap();
        assert!(!opens(&path, SOMEBODY));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        Permit::take_back(&path, SOMEBODY).unwrap();

        // An entry of a VM that no daemon adopts is removed; an administrator's entry stays.
        for user in [SOMEBODY, 1000] {
            leave(user).unwrap();
            drop(Permit::grant(File::open(&path).unwrap(), SOMEBODY + 1, true).unwrap().unwrap());
            assert_eq!((opens(&path, user), opens(&path, SOMEBODY + 1)), (user == 1000, false), "{user}");
        }
    }

    #[test]
    fn lists_are_read_as_they_are_written_and_rubbish_is_refused() {
        let entry = |tag, permissions, id| Entry { tag, permissions, id };
        let list = vec![entry(OWNER, 6, NOBODY), entry(OWNING_GROUP, 4, NOBODY), entry(OTHERS, 0, NOBODY)];
        let granted = with_user(list.clone(), 7, 6).unwrap();
        assert_eq!(granted[1], entry(USER, 6, 7));
        assert_eq!(granted[3], entry(MASK, 6, NOBODY));
        assert_eq!(decode(&encode(&granted)).unwrap(), granted);
        assert_eq!(without_user(granted.clone(), 7), list);
        assert_eq!(without_user(with_user(granted.clone(), 8, 4).unwrap(), 8), granted);
        let narrow = vec![list[0], list[1], entry(MASK, 4, NOBODY), list[2]];
        assert_eq!(with_user(narrow, 7, 6).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        for rubbish in [&b""[..], &[2, 0, 0, 0, 1], &[3, 0, 0, 0]] {
            decode(rubbish).unwrap_err();
        }
    }
}
