//! The store of descriptors, which outlives this process: the service manager keeps them for the next front.
//!
//! systemd has a store of descriptors for a service. It survives the death of all of the service's processes and is
//! handed to the next main process. On a host without systemd, the [`crate::keeper`] does the same, with the same
//! protocol.
//!
//! systemd compares each descriptor that it gets with all that it has. So only sockets go there one by one. All others,
//! which are by far the most, are in **lots**. A lot is a socket pair whose two ends are in systemd's store, and which
//! contains one message with up to [`LOT`] descriptors. To add or remove one, the front sends another message and then
//! removes the previous one. (With sockets in messages, the kernel would look for cycles of them whenever any process
//! of the host closes a socket.)
//!
//! A descriptor is safe as soon as it is sent, even if its sender is killed at once. Its name in the store is its
//! number here, and the next front gives it the same number, so the journal can name descriptors by their numbers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    env,
    ffi::OsStr,
    io,
    mem::ManuallyDrop,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    rc::{Rc, Weak},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use nix::{
    cmsg_space,
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    libc,
    sys::{
        eventfd::{EfdFlags, EventFd},
        socket::{
            AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
            UnixCredentials, recv, recvmsg, sendmsg, setsockopt, socket, socketpair, sockopt::SendTimeout,
        },
        stat::{SFlag, fstat},
        time::{TimeVal, TimeValLike},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, dup3_raw},
};

use crate::log::log;

/// The variable by which systemd says that it has a store. Releases before 254 do not set it, so the unit does.
pub const STORE: &str = "FDSTORE";
/// The variable that lists the lots for another build, which replaces this one in its process.
pub const LOTS: &str = "SANDBOXER_LOTS";
/// The most descriptors in a lot, which are those with the same number divided by this. A message has at most 253.
const LOT: RawFd = 64;
/// The prefix of the journal's name in the store; its generation follows.
const JOURNAL: &str = "j";
/// The prefix of a socket's name; its number follows.
const NUMBER: &str = "n";
/// The prefixes of the names of a lot's ends; the quotient follows.
const ENDS: [&str; 2] = ["r", "w"];
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
// All lots. There is one thread; a child has a copy.
static ALL: Mutex<BTreeMap<RawFd, Lot>> = Mutex::new(BTreeMap::new());

fn lots() -> MutexGuard<'static, BTreeMap<RawFd, Lot>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

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

fn change_lot(fd: RawFd, change: impl FnOnce(&mut BTreeSet<RawFd>) -> bool) {
    let mut lots = lots();
    match lot_of(fd, &mut lots) {
        Ok(lot) => {
            change(&mut lot.numbers);
            lot.publish().unwrap_or_else(refused);
        }
        Err(error) => refused(error),
    }
}

/// Returns the lot for a number; creates it if necessary.
fn lot_of(fd: RawFd, lots: &mut BTreeMap<RawFd, Lot>) -> Result<&mut Lot, Errno> {
    use std::collections::btree_map::Entry;
    Ok(match lots.entry(fd / LOT) {
        Entry::Occupied(lot) => lot.into_mut(),
        Entry::Vacant(place) => {
            let (read, write) =
                socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
            for (end, prefix) in [&read, &write].into_iter().zip(ENDS) {
                push_named(end.as_raw_fd(), &format!("{prefix}{}", fd / LOT));
            }
            place.insert(Lot { ends: [read, write], numbers: BTreeSet::new() })
        }
    })
}

fn is_socket(fd: RawFd) -> bool {
    // SAFETY: a number without an open file results in an error.
    let stat = fstat(unsafe { BorrowedFd::borrow_raw(fd) });
    stat.is_ok_and(|stat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFSOCK)
}

/// A part of the store: a socket pair, whose last message has all of the lot's descriptors.
struct Lot {
    ends: [OwnedFd; 2],
    numbers: BTreeSet<RawFd>,
}

impl Lot {
    /// Sends a message with all descriptors, and removes the messages before it.
    fn publish(&self) -> Result<(), Errno> {
        let [read, write] = &self.ends;
        // The message is never empty: an empty one looks like none.
        let bytes: Vec<u8> =
            [0].into_iter().chain(self.numbers.iter().flat_map(|fd| fd.to_be_bytes())).collect();
        let fds: Vec<_> = self.numbers.iter().copied().collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let rights = if fds.is_empty() { &rights[..0] } else { &rights[..] };
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        sendmsg::<()>(write.as_raw_fd(), &[io::IoSlice::new(&bytes)], rights, flags, None)?;
        while waiting(read.as_fd())? > bytes.len() {
            recv(read.as_raw_fd(), &mut [], MsgFlags::MSG_DONTWAIT)?;
        }
        Ok(())
    }
}

/// Descriptors with their former numbers.
type Numbered = Vec<(RawFd, OwnedFd)>;

/// Returns the numbers and the descriptors in a lot, and leaves its last message there.
fn read_lot(read: BorrowedFd<'_>) -> io::Result<(BTreeSet<RawFd>, Numbered)> {
    let end = read.as_raw_fd();
    loop {
        let mut bytes = [0; 1 + 4 * LOT as usize];
        let mut space = cmsg_space!([RawFd; LOT as usize]);
        let mut parts = [io::IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK | MsgFlags::MSG_CMSG_CLOEXEC;
        let (length, fds) = match recvmsg::<()>(end, &mut parts, Some(&mut space), flags) {
            // The lot has no message yet.
            Err(Errno::EAGAIN) => return Ok(Default::default()),
            Err(error) => return Err(error.into()),
            Ok(received) => {
                let mut fds = Vec::new();
                for message in received.cmsgs()? {
                    if let ControlMessageOwned::ScmRights(raw) = message {
                        // SAFETY: the kernel has just created these descriptors, and they have no other owner.
                        fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                }
                (received.bytes, fds)
            }
        };
        if waiting(read)? > length {
            // A front was killed before it removed this message.
            recv(end, &mut [], MsgFlags::MSG_DONTWAIT)?;
            continue;
        }
        let numbers: Vec<_> =
            bytes[1..length].as_chunks().0.iter().map(|number| RawFd::from_be_bytes(*number)).collect();
        if numbers.len() != fds.len() {
            // The limit of open files was reached.
            return Err(Errno::EMFILE.into());
        }
        return Ok((numbers.iter().copied().collect(), numbers.into_iter().zip(fds).collect()));
    }
}

/// Returns the number of bytes that can be read.
fn waiting(fd: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut count: libc::c_int = 0;
    // SAFETY: the call writes one number.
    Errno::result(unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &mut count) })?;
    Ok(usize::try_from(count).unwrap_or_default())
}

/// Returns the value of [`LOTS`], and the descriptors that it names.
pub fn pass_on() -> (String, Vec<RawFd>) {
    let (mut text, mut fds) = (String::new(), Vec::new());
    for (quotient, lot) in lots().iter() {
        let ends = lot.ends.each_ref().map(AsRawFd::as_raw_fd);
        text += &format!("{quotient}:{}:{} ", ends[0], ends[1]);
        fds.extend(ends);
    }
    (text, fds)
}

/// Receives the lots that the previous build has passed on.
pub fn take_passed_on() -> io::Result<()> {
    for lot in env::var(LOTS).unwrap_or_default().split_whitespace() {
        let numbers: Vec<RawFd> = lot.split(':').filter_map(|number| number.parse().ok()).collect();
        let [quotient, read, write] = numbers[..] else { continue };
        // SAFETY: the previous build has left these descriptors for this one.
        let ends = [read, write].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        for end in &ends {
            fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        }
        let (numbers, _) = read_lot(ends[0].as_fd())?;
        lots().insert(quotient, Lot { ends, numbers });
    }
    Ok(())
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
    let of = libc::ucred { pid: main.as_raw(), uid: me.uid(), gid: me.gid() }.into();
    let credentials = ControlMessage::ScmCredentials(&of);
    let mut with = if fds.is_empty() { vec![credentials] } else { vec![credentials, rights] };
    loop {
        match sendmsg(socket.as_raw_fd(), &parts, &with, MsgFlags::MSG_NOSIGNAL, Some(address)) {
            Err(Errno::EINTR) => {}
            // Only root may send in another process's name.
            Err(Errno::EPERM) if with.len() > fds.len().min(1) => drop(with.remove(0)),
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
        self.is_journal(generation);
        push_named(self.fd.as_raw_fd(), &format!("{JOURNAL}{generation}"));
    }

    /// Records that the descriptor is in the store as the journal of a generation.
    pub fn is_journal(&mut self, generation: u32) {
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
        let known = self.of(&fd).find(same);
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
    pub fn of(&self, fd: &impl AsFd) -> impl Iterator<Item = Rc<Stored>> {
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

/// The descriptors that an earlier front left in the store.
#[derive(Debug, Default)]
pub struct Left {
    /// The journals, by generation.
    pub journals: BTreeMap<u32, RawFd>,
    /// All other descriptors, at their numbers.
    numbers: BTreeSet<RawFd>,
    /// The quotients of lots without one of their ends.
    halves: Vec<RawFd>,
}

impl Left {
    /// Receives the descriptors that the service manager has passed to this process, and moves each to its number. Must
    /// be called before any file is opened.
    pub fn take() -> io::Result<Self> {
        let (mut left, mut wanted) = (Self::default(), BTreeMap::new());
        let (mut journals, mut ends) = (Vec::new(), BTreeMap::<_, BTreeMap<_, _>>::new());
        for (name, fd) in passed() {
            // SAFETY: the descriptor was passed to this process.
            fcntl(unsafe { BorrowedFd::borrow_raw(fd) }, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
            let parts =
                name.split_at_checked(1).and_then(|(prefix, rest)| Some((prefix, rest.parse::<u32>().ok()?)));
            let Some((prefix, number)) = parts else { continue };
            let at = RawFd::try_from(number).unwrap_or_default();
            match ENDS.iter().position(|end| *end == prefix) {
                Some(end) => drop(ends.entry(at).or_default().insert(end, fd)),
                None if prefix == JOURNAL => journals.push((number, fd)),
                None if prefix == NUMBER => drop(wanted.insert(at, fd)),
                None => {}
            }
        }
        let (mut whole, mut of_lots) = (Vec::new(), Vec::new());
        for (quotient, ends) in ends {
            let [Some(read), Some(write)] = [0, 1].map(|end| ends.get(&end).copied()) else {
                // The other end was not stored yet, so the lot was empty.
                left.halves.push(quotient);
                continue;
            };
            // SAFETY: the descriptor was passed to this process.
            let (numbers, fds) = read_lot(unsafe { BorrowedFd::borrow_raw(read) })?;
            wanted.extend(fds.into_iter().map(|(number, fd)| (number, fd.into_raw_fd())));
            of_lots.extend([read, write]);
            whole.push((quotient, numbers));
        }
        let others = journals.iter().map(|(_, fd)| *fd).chain(of_lots);
        let mut moves: Vec<_> = others.map(|fd| (fd, None)).collect();
        moves.extend(wanted.into_iter().map(|(at, fd)| (fd, Some(at))));
        place(&mut moves)?;
        let mut moved = moves.into_iter().map(|(fd, _)| fd);
        left.journals = journals.into_iter().map(|(generation, _)| generation).zip(&mut moved).collect();
        for (quotient, numbers) in whole {
            let (Some(read), Some(write)) = (moved.next(), moved.next()) else { break };
            // SAFETY: the descriptors were passed to this process.
            let ends = [read, write].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
            lots().insert(quotient, Lot { ends, numbers });
        }
        left.numbers = moved.collect();
        Ok(left)
    }

    /// Removes the halves of lots from the store.
    pub fn remove_halves(&self) {
        for quotient in &self.halves {
            ENDS.iter().for_each(|prefix| remove_named(&format!("{prefix}{quotient}")));
        }
    }

    /// Closes the descriptors that are not in `kept`, and the journals except the generation `journal`; removes them
    /// from the store.
    pub fn close_but(&self, kept: &BTreeSet<RawFd>, journal: Option<u32>) {
        self.numbers.difference(kept).copied().for_each(close);
        for (generation, fd) in self.journals.iter().filter(|(generation, _)| Some(**generation) != journal) {
            remove_named(&format!("{JOURNAL}{generation}"));
            // SAFETY: nothing else owns the descriptor.
            drop(unsafe { OwnedFd::from_raw_fd(*fd) });
        }
    }
}

/// Returns the descriptors that the service manager has passed to this process, with their names.
fn passed() -> Vec<(String, RawFd)> {
    let number = |name| env::var(name).ok().and_then(|number| number.parse::<RawFd>().ok());
    if number("LISTEN_PID") != Some(nix::unistd::getpid().as_raw()) {
        return Vec::new();
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let count = usize::try_from(number("LISTEN_FDS").unwrap_or_default()).unwrap_or_default();
    names.split(':').map(str::to_owned).zip(3..).take(count).collect()
}

/// Moves descriptors to distinct numbers, with at most one additional descriptor open at a time. Those without a target
/// move only if they are in the way. Afterwards each `from` is the descriptor's current number.
pub fn place(moves: &mut [(RawFd, Option<RawFd>)]) -> io::Result<()> {
    let mut at: HashMap<RawFd, usize> = moves.iter().enumerate().map(|(n, (from, _))| (*from, n)).collect();
    for n in 0..moves.len() {
        let (from, Some(to)) = moves[n] else { continue };
        if from == to {
            continue;
        }
        if let Some(other) = at.remove(&to) {
            // SAFETY: the descriptor is open.
            let free = fcntl(unsafe { BorrowedFd::borrow_raw(to) }, FcntlArg::F_DUPFD_CLOEXEC(3))?;
            moves[other].0 = free;
            at.insert(free, other);
        }
        // SAFETY: the caller owns `from`, which is open, and the descriptor that was at `to` has moved.
        if unsafe { libc::dup3(from, to, libc::O_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor has moved, so nothing uses the old number.
        drop(unsafe { OwnedFd::from_raw_fd(from) });
        at.remove(&from);
        moves[n].0 = to;
        at.insert(to, n);
    }
    Ok(())
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

    fn written(text: &str) -> OwnedFd {
        let mut file = std::fs::File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all(text.as_bytes()).unwrap();
        file.into()
    }

    fn text(fd: RawFd) -> String {
        // SAFETY: the test has just opened the descriptor.
        let mut file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        text
    }

    /// The first of the numbers that parallel tests do not get.
    const BASE: RawFd = 700;

    #[test]
    fn descriptors_are_put_where_they_were_whatever_is_in_the_way() {
        use std::os::fd::IntoRawFd;
        let at = |number: RawFd, text: &str| {
            let fd = written(text).into_raw_fd();
            // SAFETY: both numbers are this test's.
            unsafe {
                assert_eq!(libc::dup3(fd, BASE + number, libc::O_CLOEXEC), BASE + number);
                libc::close(fd);
            }
            BASE + number
        };
        // A cycle of three, one that is already in place, one in the way of another, and one that moves further.
        let mut moves: Vec<_> = [(0, 1), (1, 2), (2, 0), (3, 3), (5, 4), (6, 9)]
            .map(|(from, to)| (at(from, &format!("for {to}")), Some(BASE + to)))
            .into();
        moves.push((at(4, "without"), None));
        place(&mut moves).unwrap();
        for (fd, to) in &moves {
            assert!(to.is_none_or(|to| to == *fd));
            let expected = to.map_or("without".to_owned(), |to| format!("for {}", to - BASE));
            assert_eq!(text(*fd), expected);
        }
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

    #[test]
    fn a_lot_has_what_was_put_into_it_last_whatever_a_killed_front_has_left_behind() {
        let (read, write) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let mut lot = Lot { ends: [read, write], numbers: BTreeSet::new() };
        assert!(read_lot(lot.ends[0].as_fd()).unwrap().1.is_empty());
        let all: Vec<_> = (0..LOT).map(|n| written(&format!("file {n}"))).collect();
        for fd in &all {
            lot.numbers.insert(fd.as_raw_fd());
            lot.publish().unwrap();
        }
        let check = |lot: &Lot| {
            let (numbers, fds) = read_lot(lot.ends[0].as_fd()).unwrap();
            assert_eq!(numbers, lot.numbers);
            for (number, fd) in fds {
                assert!(is_same(number, fd.as_raw_fd()), "{number}");
            }
        };
        check(&lot);
        // A message was sent, and the previous one not removed.
        let [_, write] = &lot.ends;
        let gone = lot.numbers.pop_first().unwrap();
        sendmsg::<()>(write.as_raw_fd(), &[io::IoSlice::new(&[0])], &[], MsgFlags::empty(), None).unwrap();
        lot.numbers.clear();
        check(&lot);
        lot.numbers.insert(gone);
        lot.publish().unwrap();
        check(&lot);
    }
}
