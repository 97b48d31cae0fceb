//! Small BPF programs (bpf(2)): written by hand, loaded, attached.
//!
//! The daemon has one that selects a listening socket, and two that decide about a pod's packets. The agent has one, which limits a
//! container's devices. They need no compiler or object file.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

mod assembly;
mod instruction;

pub use assembly::{Assembly, Label};
pub use instruction::{Instruction, code, instruction};

// Numbers of bpf(2), from linux/bpf.h.
const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE_ELEM: libc::c_long = 2;
const PROG_LOAD: libc::c_long = 5;
const PROG_ATTACH: libc::c_long = 8;
const LINK_CREATE: libc::c_long = 28;
const MAP_TYPE_LRU_HASH: u32 = 9;
const MAP_TYPE_SOCKMAP: u32 = 15;
/// Permits further programs on groups below, in addition to this one.
const ALLOW_MULTI: u32 = 2;

/// The type of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A program that controls the devices of a control group (Linux 4.15).
    CgroupDevice,
    /// A program that selects the socket for a connection in a network namespace (Linux 5.9).
    SkLookup,
    /// A program that decides about the packets of a network device, as a filter of its traffic control (Linux 4.4).
    Classifier,
}

impl Kind {
    const fn program_type(self) -> u32 {
        match self {
            Self::CgroupDevice => 15,
            Self::SkLookup => 30,
            Self::Classifier => 3,
        }
    }

    const fn attach_type(self) -> u32 {
        match self {
            Self::CgroupDevice => 6,
            Self::SkLookup => 36,
            // Such a program is attached by its descriptor in a filter.
            Self::Classifier => 0,
        }
    }
}

/// A loaded program.
#[derive(Debug)]
pub struct Program {
    fd: OwnedFd,
    kind: Kind,
}

impl Program {
    /// Loads a program; the kernel verifies it.
    pub fn load(kind: Kind, instructions: &[Instruction]) -> io::Result<Self> {
        #[repr(C)]
        struct ProgramLoad {
            program_type: u32,
            instruction_count: u32,
            instructions: *const Instruction,
            license: *const libc::c_char,
            log_level: u32,
            log_size: u32,
            log: u64,
            kernel_version: u32,
            flags: u32,
            name: [u8; 16],
            interface: u32,
            expected_attach_type: u32,
        }
        let attributes = ProgramLoad {
            program_type: kind.program_type(),
            instruction_count: instructions.len().try_into().map_err(io::Error::other)?,
            instructions: instructions.as_ptr(),
            license: c"Apache-2.0".as_ptr(),
            log_level: 0,
            log_size: 0,
            log: 0,
            kernel_version: 0,
            flags: 0,
            name: *b"sandboxer\0\0\0\0\0\0\0",
            interface: 0,
            expected_attach_type: kind.attach_type(),
        };
        // SAFETY: these are the attributes of the command; the pointers are to the instructions and a string.
        Ok(Self { fd: unsafe { bpf_fd(PROG_LOAD, &attributes) }?, kind })
    }

    /// Attaches the program to `target` (a network namespace) until the returned link is closed.
    pub fn link(&self, target: impl AsFd) -> io::Result<OwnedFd> {
        #[repr(C)]
        struct LinkCreate {
            program: u32,
            target: u32,
            attach_type: u32,
            flags: u32,
        }
        let (program, target) = (number(&self.fd), number(&target.as_fd()));
        let attributes = LinkCreate { program, target, attach_type: self.kind.attach_type(), flags: 0 };
        // SAFETY: these are the attributes of the command, and hold no pointer.
        unsafe { bpf_fd(LINK_CREATE, &attributes) }
    }

    /// Attaches the program to a control group, and to groups below it, for the group's lifetime.
    pub fn attach(&self, cgroup: impl AsFd) -> io::Result<()> {
        #[repr(C)]
        struct ProgramAttach {
            target: u32,
            program: u32,
            attach_type: u32,
            flags: u32,
        }
        let (program, target) = (number(&self.fd), number(&cgroup.as_fd()));
        let attributes =
            ProgramAttach { target, program, attach_type: self.kind.attach_type(), flags: ALLOW_MULTI };
        // SAFETY: these are the attributes of the command, and hold no pointer.
        unsafe { bpf(PROG_ATTACH, &attributes) }.map(drop)
    }
}

impl AsRawFd for Program {
    fn as_raw_fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// A map with one socket at key 0.
#[derive(Debug)]
pub struct SocketMap(OwnedFd);

impl SocketMap {
    /// Creates a map with `socket` in it.
    pub fn with(socket: impl AsFd) -> io::Result<Self> {
        #[repr(C)]
        struct MapUpdate<'a> {
            map: u32,
            _pad: u32,
            key: &'a u32,
            value: &'a u64,
            flags: u64,
        }
        let map = map(MAP_TYPE_SOCKMAP, 4, 8, 1)?;
        let (key, value) = (0, number(&socket.as_fd()).into());
        let attributes = MapUpdate { map: number(&map), _pad: 0, key: &key, value: &value, flags: 0 };
        // SAFETY: these are the attributes of the command; key and value have the sizes the map was made with.
        unsafe { bpf(MAP_UPDATE_ELEM, &attributes) }?;
        Ok(Self(map))
    }
}

impl AsRawFd for SocketMap {
    fn as_raw_fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

/// A map of what was used last: when it is full, the kernel removes what was used longest ago.
#[derive(Debug)]
pub struct RecentMap(OwnedFd);

impl RecentMap {
    /// Creates an empty map; keys and values have these sizes, bytes.
    pub fn new(key_size: u32, value_size: u32, max_entries: u32) -> io::Result<Self> {
        map(MAP_TYPE_LRU_HASH, key_size, value_size, max_entries).map(Self)
    }
}

impl AsRawFd for RecentMap {
    fn as_raw_fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

fn map(map_type: u32, key_size: u32, value_size: u32, max_entries: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct MapCreate {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
    }
    let attributes = MapCreate { map_type, key_size, value_size, max_entries };
    // SAFETY: these are the attributes of the command, and hold no pointer.
    unsafe { bpf_fd(MAP_CREATE, &attributes) }
}

fn number(fd: &impl AsRawFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// Calls bpf(2) with a command's part of the attributes; the kernel treats the rest as zero.
///
/// # Safety
/// `attributes` must be the attributes of `command`, with valid pointers.
unsafe fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<libc::c_long> {
    // SAFETY: guaranteed by the caller; the kernel reads no more than the given size.
    match unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) } {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer),
    }
}

/// Same as [`bpf`], for commands that return a descriptor.
///
/// # Safety
/// See [`bpf`].
unsafe fn bpf_fd<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: guaranteed by the caller.
    let fd = unsafe { bpf(command, attributes) }?;
    let fd = fd.try_into().map_err(io::Error::other)?;
    // SAFETY: the kernel has just opened the descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
