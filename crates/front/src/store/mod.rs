//! The store of descriptors, which outlives this process: the service manager keeps them for the next front.
//!
//! systemd has a store of descriptors for a service. It survives the death of all of the service's processes and is
//! handed to the next main process. On a host without systemd, the [`crate::keeper`] does the same, with the same
//! protocol.
//!
//! systemd compares each descriptor that it gets with all that it has. So only sockets go there one by one. All others,
//! which are by far the most, are in lots: see [`lot`].
//!
//! A descriptor is safe as soon as it is sent, even if its sender is killed at once. Its name in the store is its
//! number here, and the next front gives it the same number, so the journal can name descriptors by their numbers.

use std::{
    collections::HashMap,
    env,
    ffi::OsStr,
    io,
    mem::ManuallyDrop,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    rc::{Rc, Weak},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    libc,
    sys::{
        eventfd::{EfdFlags, EventFd},
        socket::{
            AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, UnixCredentials, sendmsg,
            setsockopt, socket, sockopt::SendTimeout,
        },
        stat::{SFlag, fstat},
        time::{TimeVal, TimeValLike},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, dup3_raw},
};

use self::lot::{change_lot, lot_of, lots};
use crate::log::log;

mod left;
mod lot;

pub use self::left::{Left, place};
pub use self::lot::{LOTS, pass_on, take_passed_on};

/// The variable by which systemd says that it has a store. Releases before 254 do not set it, so the unit does.
pub const STORE: &str = "FDSTORE";
/// The prefix of the journal's name in the store; its generation follows.
const JOURNAL: &str = "j";
/// The prefix of a socket's name; its number follows.
const NUMBER: &str = "n";
/// The longest wait for a manager that receives no messages, s.
const SEND_TIMEOUT: i64 = 10;

/// The service manager.
struct Manager {
    socket: OwnedFd,
    address: UnixAddr,
    /// The PID of this process, for children that send in its name.
    main: Pid,
}

static MANAGER: OnceLock<Manager> = OnceLock::new();
/// Whether a dropped descriptor is closed and removed from the store.
static REMOVES: AtomicBool = AtomicBool::new(false);
/// The descriptors that were dropped before [`REMOVES`] was set.
static DROPPED: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());
static REFUSED: AtomicBool = AtomicBool::new(false);
/// Connects to the service manager, if there is one.
pub fn connect() -> io::Result<()> {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let address = address(&path)?;
    let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, SendTimeout, &TimeVal::seconds(SEND_TIMEOUT))?;
    let _ = MANAGER.set(Manager { socket, address, main: nix::unistd::getpid() });
    Ok(())
}

/// Returns the address that `NOTIFY_SOCKET` names.
pub fn address(path: &OsStr) -> nix::Result<UnixAddr> {
    match path.as_bytes() {
        [b'@', name @ ..] => UnixAddr::new_abstract(name),
        path => UnixAddr::new(path),
    }
}

/// Makes a dropped descriptor be closed and removed from the store from now on. Until then this process owns nothing.
pub fn removes() {
    REMOVES.store(true, Relaxed);
    let dropped = std::mem::take(&mut *DROPPED.lock().unwrap_or_else(PoisonError::into_inner));
    dropped.into_iter().for_each(close);
}

/// Sends the service manager a message about the service.
pub fn tell(text: &str) {
    send(text, &[]).unwrap_or_else(refused);
}

fn remove_named(name: &str) {
    tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"));
}

fn push_named(fd: RawFd, name: &str) {
    // Without FDPOLL=0 a connection would leave the store when its peer closes.
    send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), &[fd]).unwrap_or_else(refused);
}

/// Puts a descriptor into the store.
fn push(fd: RawFd) {
    if MANAGER.get().is_none() {
        return;
    }
    match is_socket(fd) {
        true => push_named(fd, &format!("{NUMBER}{fd}")),
        false => change_lot(fd, |numbers| numbers.insert(fd)),
    }
}

/// Closes a descriptor after removing it from the store, so that its number is free in the store first.
fn close(fd: RawFd) {
    if MANAGER.get().is_some() {
        match is_socket(fd) {
            true => remove_named(&format!("{NUMBER}{fd}")),
            false => change_lot(fd, |numbers| numbers.remove(&fd)),
        }
    }
    // SAFETY: the caller gives up the descriptor.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
}

fn is_socket(fd: RawFd) -> bool {
    // SAFETY: a number without an open file results in an error.
    let stat = fstat(unsafe { BorrowedFd::borrow_raw(fd) });
    stat.is_ok_and(|stat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFSOCK)
}

fn refused(error: Errno) {
    if !REFUSED.swap(true, Relaxed) {
        log!(
            "the service manager takes no descriptors, so a death of the front would cost connections: {error}"
        );
    }
}

fn send(text: &str, fds: &[RawFd]) -> Result<(), Errno> {
    let Some(Manager { socket, address, main }) = MANAGER.get() else { return Ok(()) };
    let parts = [io::IoSlice::new(text.as_bytes())];
    let rights = ControlMessage::ScmRights(fds);
    // A child's message counts as the main process's, which lives longer.
    let me = UnixCredentials::new();
    let sender = libc::ucred { pid: main.as_raw(), uid: me.uid(), gid: me.gid() }.into();
    let credentials = ControlMessage::ScmCredentials(&sender);
    let mut attached = if fds.is_empty() { vec![credentials] } else { vec![credentials, rights] };
    loop {
        match sendmsg(socket.as_raw_fd(), &parts, &attached, MsgFlags::MSG_NOSIGNAL, Some(address)) {
            Err(Errno::EINTR) => {}
            // Only root may send in another process's name.
            Err(Errno::EPERM) if attached.len() > fds.len().min(1) => drop(attached.remove(0)),
            sent => return sent.map(drop),
        }
    }
}

/// The name of a descriptor in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    /// The descriptor is not in the store.
    None,
    /// The name is the descriptor's number.
    Number,
    /// The name is that of the journal of this generation.
    Journal(u32),
}

/// A descriptor that is also in the service manager's store until this is dropped.
#[derive(Debug)]
pub struct Stored {
    fd: ManuallyDrop<OwnedFd>,
    name: Name,
}

impl Stored {
    /// Returns a descriptor that is not in the store yet.
    pub fn not_yet(fd: OwnedFd) -> Self {
        Self { fd: ManuallyDrop::new(fd), name: Name::None }
    }

    /// Puts a descriptor into the store.
    pub fn new(fd: OwnedFd) -> Self {
        let mut stored = Self::not_yet(fd);
        stored.store();
        stored
    }

    /// Puts the descriptor into the store.
    pub fn store(&mut self) {
        self.name = Name::Number;
        push(self.fd.as_raw_fd());
    }

    /// Returns the owner of a descriptor that an earlier front put into the store.
    ///
    /// # Safety
    ///
    /// The descriptor must be open, and nothing else in this process may own it.
    pub unsafe fn taken(fd: RawFd) -> Self {
        // SAFETY: the caller guarantees it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let _ = fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
        Self { fd: ManuallyDrop::new(fd), name: Name::Number }
    }

    /// Puts the descriptor into the store as the journal of a generation.
    pub fn store_journal(&mut self, generation: u32) {
        self.mark_as_journal(generation);
        push_named(self.fd.as_raw_fd(), &format!("{JOURNAL}{generation}"));
    }

    /// Records that the descriptor is in the store as the journal of a generation.
    pub fn mark_as_journal(&mut self, generation: u32) {
        self.name = Name::Journal(generation);
    }

    /// Replaces this journal atomically by its next generation, at the same descriptor. Both are in the store.
    pub fn replace(&mut self, mut by: Self) -> io::Result<()> {
        nix::unistd::dup3(&*by.fd, &mut self.fd, OFlag::O_CLOEXEC)?;
        if let Name::Journal(before) = std::mem::replace(&mut self.name, by.name) {
            remove_named(&format!("{JOURNAL}{before}"));
        }
        by.name = Name::None;
        Ok(())
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        let fd = self.fd.as_raw_fd();
        match self.name {
            Name::Number if REMOVES.load(Relaxed) => close(fd),
            Name::Number if MANAGER.get().is_some() => {
                DROPPED.lock().unwrap_or_else(PoisonError::into_inner).push(fd);
            }
            // A front keeps its journal until it ends.
            Name::Journal(_) if MANAGER.get().is_some() => {}
            Name::Number | Name::Journal(_) | Name::None => {
                // SAFETY: the descriptor is not used any more.
                unsafe { ManuallyDrop::drop(&mut self.fd) }
            }
        }
    }
}

impl AsFd for Stored {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Stored {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// The stored descriptors by file. An open file can be in a store only once, so it is stored, and named, once.
#[derive(Debug, Default)]
pub struct Files(HashMap<(u64, u64), Vec<Weak<Stored>>>);

impl Files {
    /// Puts a descriptor into the store, or returns the stored one of the same open file.
    pub fn store(&mut self, fd: OwnedFd) -> Rc<Stored> {
        let same = |known: &Rc<Stored>| is_same(known.as_raw_fd(), fd.as_raw_fd());
        let known = self.of_same_file(&fd).find(same);
        known.unwrap_or_else(|| self.add(Stored::new(fd)))
    }

    /// Adds a stored descriptor.
    pub fn add(&mut self, stored: Stored) -> Rc<Stored> {
        let stored = Rc::new(stored);
        // A file without an inode number is not found, and stored anew.
        if let Some(file) = file(&stored) {
            let known = self.0.entry(file).or_default();
            known.retain(|known| known.strong_count() > 0);
            known.push(Rc::downgrade(&stored));
        }
        stored
    }

    /// Returns the stored descriptors of the same file.
    pub fn of_same_file(&self, fd: &impl AsFd) -> impl Iterator<Item = Rc<Stored>> {
        let known = file(fd).and_then(|file| self.0.get(&file));
        known.into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Forgets files that are no longer stored.
    pub fn tidy(&mut self) {
        self.0.retain(|_, known| known.iter().any(|known| known.strong_count() > 0));
    }
}

fn file(fd: &impl AsFd) -> Option<(u64, u64)> {
    fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Returns whether both descriptors refer to the same open file, as systemd compares them.
pub fn is_same(one: RawFd, other: RawFd) -> bool {
    const KCMP_FILE: libc::c_int = 0;
    let me = std::process::id();
    // SAFETY: the call takes numbers.
    unsafe { libc::syscall(libc::SYS_kcmp, me, me, KCMP_FILE, one, other) == 0 }
}

/// A number for a descriptor that does not exist yet.
#[derive(Debug)]
pub struct Reserved(OwnedFd);

impl Reserved {
    /// Reserves a number.
    pub fn new() -> io::Result<Self> {
        Ok(Self(EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?.into()))
    }

    /// Creates the descriptor, and puts it into the store.
    ///
    /// If this process is killed meanwhile, a child with the same table of descriptors completes both.
    pub fn fill(self, make: impl Fn() -> Result<OwnedFd, Errno>) -> Result<Stored, Errno> {
        let number = self.0.as_raw_fd();
        if MANAGER.get().is_some() {
            // This process does it, not the child: it must know the lot.
            lot_of(number, &mut lots())?;
        }
        guarded(|| {
            let made = make()?;
            // SAFETY: this process owns the number, and still owns it afterwards.
            std::mem::forget(unsafe { dup3_raw(made, number, OFlag::O_CLOEXEC)? });
            push(number);
            Ok(())
        })?;
        if MANAGER.get().is_some() && !is_socket(number) {
            lot_of(number, &mut lots())?.numbers.insert(number);
        }
        Ok(Stored { fd: ManuallyDrop::new(self.0), name: Name::Number })
    }
}

impl AsRawFd for Reserved {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Runs `run` in a child with this process's table of descriptors, and waits for it; runs it in this process if there
/// is no child, or if the child was killed.
fn guarded(run: impl Fn() -> Result<(), Errno>) -> Result<(), Errno> {
    let none = 0_usize;
    // SAFETY: without CLONE_VM this is a fork, and the child only makes system calls before it ends.
    match unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES, none, none, none, none) } {
        0 => {
            let code = run().err().map_or(0, |error| error as i32);
            // SAFETY: the child must not run this process's exit handlers and destructors.
            unsafe { libc::_exit(code) }
        }
        -1 => run(),
        child => match waitpid(Pid::from_raw(child as libc::pid_t), Some(WaitPidFlag::__WALL)) {
            Ok(WaitStatus::Exited(_, 0)) => Ok(()),
            Ok(WaitStatus::Exited(_, code)) => Err(Errno::from_raw(code)),
            _ => run(),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use nix::{
        sys::{
            memfd::{MFdFlags, memfd_create},
            signal::{Signal, raise},
        },
        unistd::getpid,
    };

    use super::*;

    pub(super) fn written(text: &str) -> OwnedFd {
        let mut file = std::fs::File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all(text.as_bytes()).unwrap();
        file.into()
    }

    pub(super) fn text(fd: RawFd) -> String {
        // SAFETY: the test has just opened the descriptor.
        let mut file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn what_a_killed_child_has_not_made_is_made_here() {
        let me = getpid();
        let stored = Reserved::new()
            .unwrap()
            .fill(|| {
                if getpid() != me {
                    raise(Signal::SIGKILL)?;
                }
                Ok(written("made"))
            })
            .unwrap();
        let copy = stored.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(text(std::os::fd::IntoRawFd::into_raw_fd(copy)), "made");
        let refused = Reserved::new().unwrap().fill(|| Err(Errno::ENXIO));
        assert_eq!(refused.unwrap_err(), Errno::ENXIO);
    }

    #[test]
    fn the_same_open_file_is_stored_once() {
        let (mut files, one) = (Files::default(), written("x"));
        let copy = one.try_clone().unwrap();
        let reopened = std::fs::File::open(format!("/proc/self/fd/{}", one.as_raw_fd())).unwrap();
        let stored = files.store(one);
        assert!(Rc::ptr_eq(&stored, &files.store(copy)));
        assert!(!Rc::ptr_eq(&stored, &files.store(reopened.into())));
        drop(stored);
        files.tidy();
        assert!(files.0.is_empty());
    }
}
