//! How a file is found, and distinguished from another file with its name.
//!
//! The host, and whoever may write below a share, may rename, link and replace files at any time. So a file that was
//! found is compared with the expected one ([`Identity`]), and only files beneath its directory are opened.

use std::{
    ffi::{CStr, CString},
    fs,
    hash::{BuildHasher, RandomState},
    io::{BufRead, BufReader},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::LazyLock,
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags},
    io::Errno,
};
use sandboxer_share::wire::Result;

/// `STATX_MNT_ID_UNIQUE` (Linux 6.8): numbers of mounts are never reused.
const UNIQUE_MOUNT: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// The identity of a file. Two files never have the same one, not even one after the other, if the file system provides
/// handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    pub mount: u64,
    device: (u32, u32),
    inode: u64,
    /// A hash of the file's handle, which changes when an inode number is reused.
    generation: u64,
}

/// The properties of a file, found by a name or a descriptor.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    pub stat: Statx,
    pub identity: Identity,
}

impl Seen {
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.stx_mode.into())
    }
}

/// Looks up `name` in a directory or, if it is empty, the descriptor itself. Opens nothing.
pub fn look(at: impl AsFd, name: &CStr) -> Result<Seen> {
    let mut flags = AtFlags::SYMLINK_NOFOLLOW;
    if name.is_empty() {
        flags |= AtFlags::EMPTY_PATH;
    }
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID | UNIQUE_MOUNT;
    let stat = rustix::fs::statx(&at, name, flags, wanted)?;
    let identity = Identity {
        mount: stat.stx_mnt_id,
        device: (stat.stx_dev_major, stat.stx_dev_minor),
        inode: stat.stx_ino,
        generation: generation(at, name),
    };
    Ok(Seen { stat, identity })
}

/// `struct file_handle` of open_by_handle_at(2).
#[repr(C)]
struct Handle {
    length: u32,
    kind: i32,
    bytes: [u8; libc::MAX_HANDLE_SZ as usize],
}

/// Returns a hash of a file's handle; 0 if it has none. It is only compared: the server may not open by handle.
fn generation(at: impl AsFd, name: &CStr) -> u64 {
    /// The types of handles of FUSE file systems, which change while the file stays.
    const OF_FUSE: [i32; 2] = [0x81, 0x82];
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    let mut handle = Handle { length: libc::MAX_HANDLE_SZ as u32, kind: 0, bytes: [0; _] };
    let (mut mount, flags) = (0_i32, if name.is_empty() { libc::AT_EMPTY_PATH } else { 0 });
    // SAFETY: the name is a C string, and the kernel writes no more than the handle's stated length and a number; all
    // of them outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            at.as_fd().as_raw_fd(),
            name.as_ptr(),
            &raw mut handle,
            &raw mut mount,
            flags,
        )
    };
    let bytes = handle.bytes.get(..handle.length as usize);
    match bytes {
        Some(bytes) if done == 0 && !OF_FUSE.contains(&handle.kind) => HASHER.hash_one((handle.kind, bytes)),
        _ => 0,
    }
}

/// Opens `path`, one or more names, beneath a directory. The descriptor serves only to find files.
pub fn open_beneath(directory: impl AsFd, path: &CStr) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(directory, path, flags, Mode::empty(), beneath())
}

/// Returns the rules by which every name below a share is resolved.
pub fn beneath() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS
}

/// Runs `call` with a path of the open file, for calls that do not accept an `O_PATH` descriptor. The file stays open
/// during the call: afterwards the path would be another file's.
pub fn by_path<T>(file: impl AsFd, call: impl FnOnce(&CStr) -> Result<T>) -> Result<T> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    call(&CString::new(path).map_err(|_| Errno::INVAL)?)
}

/// Opens an open file once more, with other flags.
pub fn reopen(file: impl AsFd, flags: OFlags) -> Result<OwnedFd> {
    by_path(file, |path| {
        rustix::fs::openat(CWD, path, flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
    })
}

/// Returns whether `name` is the mount that was attached there, not one that covers it, which the host may remove
/// again.
pub fn is_attached(root: impl AsFd, name: &CStr) -> bool {
    let number = |name: &CStr| {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
        rustix::fs::statx(&root, name, flags, StatxFlags::MNT_ID).map(|stat| stat.stx_mnt_id.to_string())
    };
    let (Ok(root), Ok(mount)) = (number(c""), number(name)) else { return false };
    let Ok(mounts) = fs::File::open("/proc/self/mountinfo") else { return false };
    BufReader::new(mounts).lines().map_while(|line| line.ok()).any(|line| {
        let mut fields = line.split(' ');
        (fields.next(), fields.next()) == (Some(&mount), Some(&root))
    })
}

/// Returns how far a file's size describes its content: the kernel may generate the content when it is read, or the
/// file system may not know the size in advance. `for_reading`: the file will not be written.
pub fn is_made_up(file: impl AsFd, stat: &Statx, for_reading: bool) -> Content {
    // A file system without a device, with a file without blocks in use: all other file systems know their files'
    // sizes.
    if stat.stx_dev_major != 0 || stat.stx_blocks != 0 {
        return Content::Stored;
    }
    match rustix::fs::fstatfs(file).map(|space| space.f_type.cast_unsigned() as u32) {
        Ok(magic) if OF_THE_KERNEL.contains(&magic) => Content::OfTheKernel,
        Ok(FUSE) if stat.stx_size == 0 && for_reading => Content::Unknown,
        _ => Content::Stored,
    }
}

/// The relation of a file's size to its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The size is exact.
    Stored,
    /// The size is unknown: the content may be longer.
    Unknown,
    /// The size is unknown, and a read may wait for an event of the host.
    OfTheKernel,
}

const FUSE: u32 = 0x6573_5546;

/// `f_type` of file systems whose files the kernel generates (Linux' `include/uapi/linux/magic.h`).
const OF_THE_KERNEL: [u32; 16] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xf97c_ff8c, // selinuxfs
    0x4341_5d53, // smackfs
    0x5a3c_69f0, // apparmorfs
    0x6265_6570, // configfs
    0x4249_4e4d, // binfmt_misc
    0xcafe_4a11, // bpf
    0xde5e_81e4, // efivarfs
    0x6165_676c, // pstore
    0x0765_5821, // resctrl
];
