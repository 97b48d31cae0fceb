//! One listening socket for every port of a network namespace's loopback.
//!
//! containerd forwards a port by entering the pod's namespace and connecting to localhost there, where nobody
//! listens: the pod is in its machine. A program of a few instructions, run by the kernel where it looks for who
//! listens, names this socket whatever the port (`BPF_PROG_TYPE_SK_LOOKUP`, Linux 5.9). It sees new connections of
//! loopback alone, and is gone with its descriptor.

use std::{
    io,
    net::TcpListener,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use super::namespace;

/// A listener at every port of a loopback.
#[derive(Debug)]
pub struct Steered {
    /// Where connections come in; the port that was meant is their local one.
    pub listener: TcpListener,
    /// Keeps them coming.
    pub link: OwnedFd,
}

/// Listens in `namespace`. Blocks while it is set up, some 2 ms.
pub fn listen(namespace: impl AsFd + Sync) -> io::Result<Steered> {
    let namespace = namespace.as_fd();
    let listener = namespace::within(namespace, || {
        // Of both families, unless the host has but one.
        TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("127.0.0.1:0"))
    })?;
    listener.set_nonblocking(true)?;
    let map = socket_map()?;
    put(&map, &listener)?;
    let program = load(&program(&map))?;
    let link = attach(&program, namespace)?;
    Ok(Steered { listener, link })
}

// Numbers of bpf(2), from linux/bpf.h.
const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE_ELEM: libc::c_long = 2;
const PROG_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;
const MAP_TYPE_SOCKMAP: u32 = 15;
const PROG_TYPE_SK_LOOKUP: u32 = 30;
const ATTACH_SK_LOOKUP: u32 = 36;

/// Calls bpf(2) with a command's own part of its attributes; what is left out is zero to the kernel.
///
/// # Safety
/// `attributes` are those of `command`, and every pointer in them leads to what the command takes there.
unsafe fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<libc::c_long> {
    // SAFETY: as promised by the caller; the kernel reads no more than the size it is told.
    match unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) } {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer),
    }
}

/// As [`bpf`], for commands that answer a descriptor.
///
/// # Safety
/// As of [`bpf`].
unsafe fn bpf_fd<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: as promised by the caller.
    let fd = unsafe { bpf(command, attributes) }?;
    let fd = fd.try_into().map_err(io::Error::other)?;
    // SAFETY: the kernel has just opened it, for nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn number(fd: &impl AsRawFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// An array of one socket.
fn socket_map() -> io::Result<OwnedFd> {
    #[repr(C)]
    struct MapCreate {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
    }
    let attributes = MapCreate { map_type: MAP_TYPE_SOCKMAP, key_size: 4, value_size: 8, max_entries: 1 };
    // SAFETY: these are the attributes of the command, and hold no pointer.
    unsafe { bpf_fd(MAP_CREATE, &attributes) }
}

fn put(map: &OwnedFd, socket: &TcpListener) -> io::Result<()> {
    #[repr(C)]
    struct MapUpdate<'a> {
        map: u32,
        _pad: u32,
        key: &'a u32,
        value: &'a u64,
        flags: u64,
    }
    let (key, value) = (0, number(socket).into());
    let attributes = MapUpdate { map: number(map), _pad: 0, key: &key, value: &value, flags: 0 };
    // SAFETY: these are the attributes of the command; key and value have the sizes the map was made with.
    unsafe { bpf(MAP_UPDATE_ELEM, &attributes) }.map(drop)
}

fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
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
        program_type: PROG_TYPE_SK_LOOKUP,
        instruction_count: program.len().try_into().map_err(io::Error::other)?,
        instructions: program.as_ptr(),
        license: c"Apache-2.0".as_ptr(),
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
        name: *b"sandboxer\0\0\0\0\0\0\0",
        interface: 0,
        expected_attach_type: ATTACH_SK_LOOKUP,
    };
    // SAFETY: these are the attributes of the command; so many instructions and a string are where they lead.
    unsafe { bpf_fd(PROG_LOAD, &attributes) }
}

fn attach(program: &OwnedFd, namespace: impl AsFd) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct LinkCreate {
        program: u32,
        target: u32,
        attach_type: u32,
        flags: u32,
    }
    let target = number(&namespace.as_fd());
    let attributes = LinkCreate { program: number(program), target, attach_type: ATTACH_SK_LOOKUP, flags: 0 };
    // SAFETY: these are the attributes of the command, and hold no pointer.
    unsafe { bpf_fd(LINK_CREATE, &attributes) }
}

/// An instruction of the kernel's virtual machine, as it takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Instruction {
    code: u8,
    /// Destination in the lower half, source in the upper.
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: to | from << 4, offset, immediate }
}

// Codes of instructions, from linux/bpf.h and linux/bpf_common.h.
const LOAD_WORD: u8 = 0x61;
const STORE_WORD: u8 = 0x62;
const LOAD_64: u8 = 0x18;
const SET: u8 = 0xb7;
const COPY: u8 = 0xbf;
const ADD: u8 = 0x07;
const JUMP_IF_EQUAL: u8 = 0x15;
const JUMP_IF_NOT: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// Says of a [`LOAD_64`] that it loads a map, by its descriptor.
const OF_MAP: u8 = 1;
// Numbers of the kernel's functions.
const MAP_LOOKUP_ELEM: i32 = 1;
const SK_RELEASE: i32 = 86;
const SK_ASSIGN: i32 = 124;
// Where things are in `struct bpf_sk_lookup`.
const PROTOCOL: i16 = 12;
const INTERFACE: i16 = 64;
/// Index of loopback in each namespace.
const LOOPBACK: i32 = 1;
const SK_PASS: i32 = 1;

/// If the connection is of TCP and comes by loopback, the socket in `map` takes it; else the kernel goes on looking.
fn program(map: &OwnedFd) -> [Instruction; 21] {
    [
        instruction(COPY, 6, 1, 0, 0),
        instruction(LOAD_WORD, 2, 6, PROTOCOL, 0),
        instruction(JUMP_IF_NOT, 2, 0, 16, libc::IPPROTO_TCP),
        instruction(LOAD_WORD, 2, 6, INTERFACE, 0),
        instruction(JUMP_IF_NOT, 2, 0, 14, LOOPBACK),
        // The socket, by key 0.
        instruction(STORE_WORD, 10, 0, -4, 0),
        instruction(LOAD_64, 1, OF_MAP, 0, map.as_raw_fd()),
        instruction(0, 0, 0, 0, 0),
        instruction(COPY, 2, 10, 0, 0),
        instruction(ADD, 2, 0, 0, -4),
        instruction(CALL, 0, 0, 0, MAP_LOOKUP_ELEM),
        instruction(JUMP_IF_EQUAL, 0, 0, 7, 0),
        // It takes the connection. That it can't is found out by who connects.
        instruction(COPY, 7, 0, 0, 0),
        instruction(COPY, 1, 6, 0, 0),
        instruction(COPY, 2, 7, 0, 0),
        instruction(SET, 3, 0, 0, 0),
        instruction(CALL, 0, 0, 0, SK_ASSIGN),
        instruction(COPY, 1, 7, 0, 0),
        instruction(CALL, 0, 0, 0, SK_RELEASE),
        // Where the jumps lead.
        instruction(SET, 0, 0, 0, SK_PASS),
        instruction(EXIT, 0, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::network::link;
    use sandboxer_netlink::Netlink;
    use std::{
        io::{Read, Write},
        net::TcpStream,
    };

    #[test]
    fn every_port_of_a_loopback_leads_to_one_listener_until_it_is_gone() {
        let namespace = namespace::fresh().expect("only root makes network namespaces");
        let loopback_up = || link::set_up(&mut Netlink::open()?, LOOPBACK.cast_unsigned(), 65536);
        namespace::within(&namespace, loopback_up).unwrap();
        let steered = listen(&namespace).unwrap();
        steered.listener.set_nonblocking(false).unwrap();
        for (ip, port) in [("127.0.0.1", 80), ("127.0.0.1", 65535), ("::1", 8080)] {
            let mut client = namespace::within(&namespace, || TcpStream::connect((ip, port))).unwrap();
            let (mut server, _) = steered.listener.accept().unwrap();
            assert_eq!(server.local_addr().unwrap().port(), port);
            client.write_all(b"hello").unwrap();
            let mut heard = [0; 5];
            server.read_exact(&mut heard).unwrap();
            assert_eq!(&heard, b"hello");
        }
        drop(steered);
        let refused = namespace::within(&namespace, || TcpStream::connect("127.0.0.1:80")).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
