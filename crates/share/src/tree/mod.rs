//! The files below [`ROOT`]: those that the guest's kernel knows ([`nodes`]) and has open ([`handles`]), and their
//! places ([`place`]).
//!
//! ```text
//!  request ─▶ node ─▶ names from an open directory ─▶ openat2, beneath it ─▶ is it the same file? ─▶ the call
//!               └─▶ a file that is open anyway ───────────────────────────────────────────────────────▲
//! ```
//!
//! A file that is not at its recorded place is stale (ESTALE): the guest's kernel then looks its path up again.
//! Symlinks are never followed here; the guest resolves them.

mod handles;
mod nodes;
mod place;

use std::{
    ffi::CStr,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::Context;
use rustix::{
    fs::{
        AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, Timespec, Timestamps,
        UTIME_NOW, UTIME_OMIT, Uid, XattrFlags,
    },
    io::Errno,
    process::{Resource, getrlimit},
};
use sandboxer_share::wire::{Answer, Changes, Name, Request, Result, Time};

use self::{
    handles::{Handles, Open},
    nodes::{MAX_CACHED_DIRS, Nodes, ROOT},
    place::{Content, Seen, beneath, by_path, look, reopen},
};
use crate::caller::without_fsetid;

/// How long the guest's kernel may cache names and attributes, which is how late it may notice a change on the host.
/// Contents are revalidated whenever a file is opened or its attributes have changed.
const FRESH: Duration = Duration::from_millis(100);

/// The descriptors that are not the guest's open files: kept directories, those of the requests in progress, and the
/// process's own.
const RESERVED: u64 = MAX_CACHED_DIRS as u64 + 64;

/// The most bytes of a directory's entries in one call.
const LISTED: usize = 32 << 10;

/// `FOPEN_DIRECT_IO`: the guest's kernel neither caches the content nor relies on the size.
const DIRECT: u32 = 1;

/// The files of the shares.
pub struct Tree {
    nodes: Mutex<Nodes>,
    handles: Handles,
}

/// An open file, and its attributes if they are known.
struct Found {
    file: Arc<OwnedFd>,
    seen: Option<Seen>,
}

impl Found {
    fn seen(&self) -> Result<Seen> {
        self.seen.map_or_else(|| look(&self.file, c""), Ok)
    }
}

/// Locks a mutex. It is never poisoned: a thread that panics ends the process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tree {
    /// Opens the directory of shares. A guest may know up to `most` files.
    pub fn open(root: &Path, most: usize) -> anyhow::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty()).context("cannot open the shares' root")?;
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let open = usize::try_from(descriptors.saturating_sub(RESERVED)).unwrap_or(usize::MAX);
        Ok(Self { nodes: Mutex::new(Nodes::below(root, most)), handles: Handles::new(open) })
    }

    /// Carries out a request about a node; writes the part of the response after the header.
    pub fn carry_out(&self, node: u64, request: &Request<'_>, answer: &mut Answer<'_>) -> Result<()> {
        match *request {
            Request::Init { .. } => Err(Errno::INVAL),
            Request::Interrupt => Ok(()),
            Request::Destroy => {
                self.handles.clear();
                lock(&self.nodes).clear();
                Ok(())
            }
            Request::Forget { count } => {
                lock(&self.nodes).forget(node, count);
                Ok(())
            }
            Request::BatchForget { ref forgotten } => {
                let mut nodes = lock(&self.nodes);
                forgotten.iter().for_each(|&(node, count)| nodes.forget(node, count));
                Ok(())
            }
            Request::Lookup { name } => {
                let (found, seen) = self.lookup(node, name)?;
                answer.entry(found, &seen.stat, FRESH)
            }
            Request::GetAttributes { handle } => {
                let open = handle.and_then(|handle| self.handles.get(node, handle).ok());
                let seen = match open {
                    Some(open) => look(&open.file, c"")?,
                    None => self.see(node)?,
                };
                answer.stat(&seen.stat, FRESH)
            }
            Request::SetAttributes(ref changes) => answer.stat(&self.change(node, changes)?.stat, FRESH),
            Request::ReadLink => {
                let target = rustix::fs::readlinkat(self.find(node)?.file, c"", Vec::new())?;
                answer.bytes(target.to_bytes())
            }
            Request::MakeLink { name, target } => self.made(node, name, answer, |directory| {
                rustix::fs::symlinkat(target, directory, name.as_c_str())
            }),
            Request::MakeNode { name, mode, device, umask } => self.made(node, name, answer, |directory| {
                let (kind, device) = (FileType::from_raw_mode(mode), device_of(device));
                masked(umask, || {
                    rustix::fs::mknodat(directory, name.as_c_str(), kind, Mode::from_raw_mode(mode), device)
                })
            }),
            Request::MakeDirectory { name, mode, umask } => self.made(node, name, answer, |directory| {
                masked(umask, || rustix::fs::mkdirat(directory, name.as_c_str(), Mode::from_raw_mode(mode)))
            }),
            Request::Link { file, name } => {
                let file = self.find(file)?.file;
                self.made(node, name, answer, |directory| {
                    by_path(&file, |path| {
                        rustix::fs::linkat(CWD, path, directory, name.as_c_str(), AtFlags::SYMLINK_FOLLOW)
                    })
                })
            }
            Request::Remove { name, directory } => {
                let flags = if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                rustix::fs::unlinkat(self.find(node)?.file, name.as_c_str(), flags)
            }
            Request::Rename { name, to, new, flags } => self.rename((node, name), (to, new), flags),
            Request::Open { flags, kill } => {
                let (handle, how) = self.open_file(node, flags, kill)?;
                answer.opened(handle, how)
            }
            Request::OpenDirectory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY;
                let directory = reopen(self.find(node)?.file, flags)?;
                answer.opened(self.handles.add(node, Open::new(directory, flags, Content::Stored))?, 0)
            }
            Request::Create { name, flags, mode, umask, kill } => {
                self.create(node, name, flags, Mode::from_raw_mode(mode), umask, kill, answer)
            }
            Request::Read { handle, offset, size } => {
                let open = self.handles.get(node, handle)?;
                answer.fill(size, |buffer| open.read(offset, buffer))
            }
            Request::Write { handle, offset, flags, data, kill } => {
                let open = self.handles.get(node, handle)?;
                let append = flags & libc::O_APPEND.cast_unsigned() != 0;
                let written = killing(kill, || open.write(offset, data, append))?;
                answer.words(&[written as u32, 0])
            }
            Request::List { handle, offset, size, plus } => {
                let open = self.handles.get(node, handle)?;
                self.list(node, &open, offset, size, plus, answer)
            }
            Request::Release { handle } => self.handles.release(node, handle),
            // The host's file system may return an error from a close.
            Request::Flush { handle } => rustix::io::dup(&self.handles.get(node, handle)?.file).map(drop),
            Request::Sync { handle, only_data } => {
                let open = self.handles.get(node, handle)?;
                if only_data { rustix::fs::fdatasync(&open.file) } else { rustix::fs::fsync(&open.file) }
            }
            Request::Allocate { handle, offset, length, mode } => {
                let open = self.handles.get(node, handle)?;
                rustix::fs::fallocate(&open.file, FallocateFlags::from_bits_retain(mode), offset, length)
            }
            Request::Seek { handle, offset, whence } => {
                let at = self.handles.get(node, handle)?.seek(offset, whence)?;
                answer.longs(&[at])
            }
            Request::Space => {
                let space = rustix::fs::fstatvfs(self.find(node)?.file)?;
                answer.longs(&[
                    space.f_blocks,
                    space.f_bfree,
                    space.f_bavail,
                    space.f_files,
                    space.f_ffree,
                ])?;
                let sizes = [space.f_bsize, space.f_namemax, space.f_frsize];
                answer.words(&sizes.map(|size| u32::try_from(size).unwrap_or(u32::MAX)))?;
                answer.words(&[0; 7])
            }
            Request::SetAttribute { name, value, flags, kill } => {
                let flags = XattrFlags::from_bits_retain(flags);
                by_path(self.find(node)?.file, |path| {
                    killing(kill, || rustix::fs::setxattr(path, name, value, flags))
                })
            }
            Request::GetAttribute { name, size } => {
                let got = by_path(self.find(node)?.file, |path| {
                    sized(size, answer, |buffer| rustix::fs::getxattr(path, name, buffer))
                });
                match got {
                    // Without ACL support, a file has no ACL. A guest's kernel would take the error for the result of
                    // its check of permissions.
                    Err(Errno::OPNOTSUPP) if is_acl(name) => Err(Errno::NODATA),
                    got => got,
                }
            }
            Request::ListAttributes { size } => by_path(self.find(node)?.file, |path| {
                sized(size, answer, |buffer| rustix::fs::listxattr(path, buffer))
            }),
            Request::RemoveAttribute { name } => {
                by_path(self.find(node)?.file, |path| rustix::fs::removexattr(path, name))
            }
        }
    }

    /// Finds a node's file.
    ///
    /// # Errors
    ///
    /// `ESTALE`: the file is no longer where it was found.
    fn find(&self, node: u64) -> Result<Found> {
        if node == ROOT {
            return Ok(Found { file: lock(&self.nodes).root(), seen: None });
        }
        let way = lock(&self.nodes).way(node)?;
        // The open file may have another name by now, or none.
        if let Some(open) = self.handles.any_of(node) {
            return Ok(Found { file: Arc::clone(&open.file), seen: None });
        }
        let mut file = way.from;
        if way.paths.is_empty() {
            return Ok(Found { file, seen: None });
        }
        for path in &way.paths {
            file = Arc::new(place::open_beneath(&file, path).map_err(stale)?);
        }
        let seen = look(&file, c"")?;
        if seen.identity != way.identity {
            return Err(Errno::STALE);
        }
        if way.is_attached && seen.kind().is_dir() {
            lock(&self.nodes).keep(node, &file);
        }
        Ok(Found { file, seen: Some(seen) })
    }

    /// Examines a node's file. This is the most frequent request, so it opens nothing unless it must.
    fn see(&self, node: u64) -> Result<Seen> {
        if node != ROOT && self.handles.any_of(node).is_none() {
            let way = lock(&self.nodes).way(node)?;
            if let [name] = &*way.paths
                && !name.to_bytes().contains(&b'/')
            {
                let seen = look(&way.from, name).map_err(stale)?;
                return if seen.identity == way.identity { Ok(seen) } else { Err(Errno::STALE) };
            }
        }
        self.find(node)?.seen()
    }

    fn lookup(&self, parent: u64, name: Name<'_>) -> Result<(u64, Seen)> {
        let directory = self.find(parent)?.file;
        let seen = look(&directory, name.as_c_str())?;
        Ok((self.give(parent, name, &seen)?, seen))
    }

    /// Gives the guest's kernel a file that was found as `name` in `parent`.
    fn give(&self, parent: u64, name: Name<'_>, seen: &Seen) -> Result<u64> {
        let (name, identity) = (name.as_c_str(), seen.identity);
        let is_attached = parent == ROOT && {
            let nodes = lock(&self.nodes);
            let (is_known, root) = (nodes.knows(identity), nodes.root());
            drop(nodes);
            !is_known && place::is_attached(root, name)
        };
        let is_open = |node| self.handles.any_of(node).is_some();
        lock(&self.nodes).give(parent, name, identity, is_attached, is_open)
    }

    /// Creates a file with `make`, and writes its entry to the response.
    fn made(
        &self,
        parent: u64,
        name: Name<'_>,
        answer: &mut Answer<'_>,
        make: impl FnOnce(&OwnedFd) -> Result<()>,
    ) -> Result<()> {
        make(&self.find(parent)?.file)?;
        let (node, seen) = self.lookup(parent, name)?;
        answer.entry(node, &seen.stat, FRESH)
    }

    fn rename(&self, from: (u64, Name<'_>), to: (u64, Name<'_>), flags: u32) -> Result<()> {
        let ((parent, name), (new_parent, new)) = (from, to);
        let (name, new) = (name.as_c_str(), new.as_c_str());
        let (directory, new_directory) = (self.find(parent)?.file, self.find(new_parent)?.file);
        let flags = RenameFlags::from_bits_retain(flags);
        let moved = look(&directory, name).ok();
        let other = look(&new_directory, new).ok().filter(|_| flags.contains(RenameFlags::EXCHANGE));
        rustix::fs::renameat_with(&directory, name, &new_directory, new, flags)?;
        // The files in a directory move with it, and processes that use them continue.
        let mut nodes = lock(&self.nodes);
        for (seen, parent, name) in [(moved, new_parent, new), (other, parent, name)] {
            if let Some(seen) = seen {
                nodes.moved(seen.identity, parent, name);
            }
        }
        Ok(())
    }

    /// Opens a regular file; returns its handle, and the flags by which the guest's kernel treats it.
    fn open_file(&self, node: u64, flags: u32, kill: bool) -> Result<(u64, u32)> {
        self.handles.check_free()?;
        let found = self.find(node)?;
        let stat = match found.seen()? {
            seen if seen.kind().is_file() => seen.stat,
            seen if seen.kind().is_dir() => return Err(Errno::ISDIR),
            // The host's devices are not for the guest, and the other kinds do not concern the host.
            _ => return Err(Errno::NXIO),
        };
        let mut flags = own(flags);
        let content = place::is_made_up(&found.file, &stat, !flags.intersects(OFlags::RWMODE));
        if content == Content::OfTheKernel {
            // Opening must not occupy one of a few threads until something happens on the host.
            flags |= OFlags::NONBLOCK;
        }
        let file = killing(kill, || reopen(&found.file, flags))?;
        let handle = self.handles.add(node, Open::new(file, flags, content))?;
        Ok((handle, if content == Content::Stored { 0 } else { DIRECT }))
    }

    #[expect(clippy::too_many_arguments, reason = "so many has the request")]
    fn create(
        &self,
        parent: u64,
        name: Name<'_>,
        flags: u32,
        mode: Mode,
        umask: u32,
        kill: bool,
        answer: &mut Answer<'_>,
    ) -> Result<()> {
        self.handles.check_free()?;
        let directory = self.find(parent)?.file;
        let new = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = masked(umask, || {
            rustix::fs::openat2(&directory, name.as_c_str(), own(flags) | new, mode, beneath())
        });
        let (node, seen, opened) = match made {
            Ok(file) => {
                let seen = look(&file, c"")?;
                let node = self.give(parent, name, &seen)?;
                let open = Open::new(file, own(flags), Content::Stored);
                (node, seen, self.handles.add(node, open).map(|handle| (handle, 0)))
            }
            // The file was not created by this request, so it may be anything.
            Err(Errno::EXIST) if flags & libc::O_EXCL.cast_unsigned() == 0 => {
                let (node, seen) = self.lookup(parent, name)?;
                (node, seen, self.open_file(node, flags, kill))
            }
            Err(errno) => return Err(errno),
        };
        let (handle, how) = opened.inspect_err(|_| lock(&self.nodes).forget(node, 1))?;
        answer.entry(node, &seen.stat, FRESH)?;
        answer.opened(handle, how)
    }

    fn change(&self, node: u64, changes: &Changes) -> Result<Seen> {
        let file = self.find(node)?.file;
        if let Some(mode) = changes.mode {
            let mode = Mode::from_raw_mode(mode);
            by_path(&file, |path| rustix::fs::chmodat(CWD, path, mode, AtFlags::empty()))?;
        }
        if (changes.uid, changes.gid) != (None, None) {
            if changes.uid == Some(u32::MAX) || changes.gid == Some(u32::MAX) {
                return Err(Errno::INVAL);
            }
            let (uid, gid) = (changes.uid.map(Uid::from_raw), changes.gid.map(Gid::from_raw));
            rustix::fs::chownat(&file, c"", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if let Some(size) = changes.size {
            killing(changes.kill, || self.cut(node, &file, changes.handle, size))?;
        }
        if (changes.accessed, changes.modified) != (None, None) {
            let time = |time| match time {
                None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
                Some(Time::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
                Some(Time::At(seconds, nanoseconds)) => {
                    Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() }
                }
            };
            let times =
                Timestamps { last_access: time(changes.accessed), last_modification: time(changes.modified) };
            rustix::fs::utimensat(&file, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        look(&file, c"")
    }

    /// Sets a file's length.
    fn cut(&self, node: u64, file: &OwnedFd, handle: Option<u64>, size: u64) -> Result<()> {
        if let Some(open) = handle.and_then(|handle| self.handles.get(node, handle).ok()) {
            match rustix::fs::ftruncate(&open.file, size) {
                // The descriptor is open for reading.
                Err(Errno::INVAL | Errno::BADF) => {}
                done => return done,
            }
        }
        let size = i64::try_from(size).map_err(|_| Errno::FBIG)?;
        by_path(file, |path| {
            nix::unistd::truncate(path, size).map_err(|errno| Errno::from_raw_os_error(errno as i32))
        })
    }

    /// Lists a directory from `offset` on.
    fn list(
        &self,
        node: u64,
        open: &Open,
        offset: u64,
        size: usize,
        plus: bool,
        answer: &mut Answer<'_>,
    ) -> Result<()> {
        // An entry with attributes takes more space in the response than here.
        let length = if plus { size / 4 } else { size }.clamp(512, LISTED);
        let mut buffer = vec![0; length];
        let length = open.list(offset, &mut buffer)?;
        let mut rest = buffer.get(..length).ok_or(Errno::IO)?;
        while let Some((entry, after)) = Entry::first(rest) {
            if answer.written() + Answer::listed_length(entry.name.to_bytes(), plus) > size {
                break;
            }
            if plus {
                // Without a node, an entry is only a name: this holds for `.` and `..`, and for files that were removed
                // meanwhile.
                match Name::new(entry.name).and_then(|name| self.lookup(node, name)) {
                    Ok((node, seen)) => answer.entry(node, &seen.stat, FRESH)?,
                    Err(_) => answer.bytes(&[0; 128])?,
                }
            }
            answer.listed(entry.inode, entry.next, entry.kind, entry.name.to_bytes())?;
            rest = after;
        }
        Ok(())
    }
}

/// An entry of a directory: `struct linux_dirent64`.
struct Entry<'a> {
    inode: u64,
    /// The offset of the next entry.
    next: u64,
    kind: u32,
    name: &'a CStr,
}

impl<'a> Entry<'a> {
    /// Parses the first of some entries; returns it, and the remaining ones.
    fn first(entries: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let number = |at: usize| Some(u64::from_ne_bytes(entries.get(at..at + 8)?.try_into().ok()?));
        let length = u16::from_ne_bytes(entries.get(16..18)?.try_into().ok()?);
        let (entry, rest) = entries.split_at_checked(length.into())?;
        let name = CStr::from_bytes_until_nul(entry.get(19..)?).ok()?;
        Some((Self { inode: number(0)?, next: number(8)?, kind: u32::from(entry[18]), name }, rest))
    }
}

/// Returns the error for a file if opening its path has failed with `errno`.
fn stale(errno: Errno) -> Errno {
    match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::AGAIN => Errno::STALE,
        other => other,
    }
}

/// Returns those flags of the guest's process with which a file is opened. `O_DIRECT` is not among them: it concerns
/// the process and the guest's cache, and the data that arrives here is not aligned.
fn own(flags: u32) -> OFlags {
    let mask =
        OFlags::RWMODE | OFlags::APPEND | OFlags::TRUNC | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME;
    OFlags::from_bits_retain(flags) & mask
}

/// Returns whether an attribute is an ACL, which the guest's kernel requests by itself.
fn is_acl(name: &CStr) -> bool {
    name == c"system.posix_acl_access" || name == c"system.posix_acl_default"
}

/// Returns the number of a device in the system's encoding.
fn device_of(device: u32) -> u64 {
    let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00);
    rustix::fs::makedev(major, minor)
}

/// Runs `make` with a mask of permissions, which a directory's default ACL may replace. Each thread has its own mask.
fn masked<T>(umask: u32, make: impl FnOnce() -> T) -> T {
    rustix::process::umask(Mode::from_raw_mode(umask & 0o777));
    let made = make();
    rustix::process::umask(Mode::empty());
    made
}

/// Runs `work`. With `kill`, the kernel clears the set-user-ID and set-group-ID bits of a file that it changes.
fn killing<T>(kill: bool, work: impl FnOnce() -> Result<T>) -> Result<T> {
    if kill { without_fsetid(work).map_err(|_| Errno::PERM)? } else { work() }
}

/// Responds with the bytes that `get` writes, or with their number if `size` is 0.
fn sized(size: usize, answer: &mut Answer<'_>, get: impl FnOnce(&mut [u8]) -> Result<usize>) -> Result<()> {
    if size > 0 {
        return answer.fill(size, get);
    }
    let length = get(&mut [])?;
    answer.words(&[u32::try_from(length).unwrap_or(u32::MAX), 0])
}
