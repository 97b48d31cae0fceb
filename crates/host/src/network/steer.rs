//! One listening socket for every port of a network namespace's loopback.
//!
//! containerd forwards a port by connecting to localhost in the pod's namespace, where no process listens: the pod is
//! in its VM. A small BPF program, run by the kernel's socket look-up, selects this socket for every port
//! (`BPF_PROG_TYPE_SK_LOOKUP`, Linux 5.9). It handles new loopback connections only, and is removed with its
//! descriptor.

use std::{
    io,
    net::TcpListener,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use sandboxer_bpf::{Instruction, Kind, Program, SocketMap, code::*, instruction};

use super::namespace;

/// A listener on every port of a loopback interface.
#[derive(Debug)]
pub struct SkLookupListener {
    /// The socket that accepts the connections. The requested port is a connection's local port.
    pub listener: TcpListener,
    /// The descriptor that keeps the BPF program attached.
    pub link: OwnedFd,
}

/// Listens in `namespace`. Blocks for the set-up, about 2 ms.
pub fn listen(namespace: impl AsFd + Sync) -> io::Result<SkLookupListener> {
    let namespace = namespace.as_fd();
    let listener = namespace::within(namespace, || {
        // Listens on both families if the host has both.
        TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("127.0.0.1:0"))
    })?;
    listener.set_nonblocking(true)?;
    let map = SocketMap::with(&listener)?;
    let link = Program::load(Kind::SkLookup, &program(&map))?.link(namespace)?;
    Ok(SkLookupListener { listener, link })
}

/// Marks a [`LOAD_64`] as the load of a map, by its descriptor.
const OF_MAP: u8 = 1;
// Numbers of BPF helper functions.
const MAP_LOOKUP_ELEM: i32 = 1;
const SK_RELEASE: i32 = 86;
const SK_ASSIGN: i32 = 124;
// Offsets in `struct bpf_sk_lookup`.
const PROTOCOL: i16 = 12;
const INTERFACE: i16 = 64;
/// The index of the loopback interface in each namespace.
const LOOPBACK: i32 = 1;
const SK_PASS: i32 = 1;

/// Selects the socket in `map` for TCP connections by loopback. The kernel continues its look-up for others.
fn program(map: &SocketMap) -> [Instruction; 21] {
    [
        instruction(COPY, 6, 1, 0, 0),
        instruction(LOAD_WORD, 2, 6, PROTOCOL, 0),
        instruction(JUMP_IF_NOT, 2, 0, 16, libc::IPPROTO_TCP),
        instruction(LOAD_WORD, 2, 6, INTERFACE, 0),
        instruction(JUMP_IF_NOT, 2, 0, 14, LOOPBACK),
        // Looks the socket up, with key 0.
        instruction(STORE_WORD, 10, 0, -4, 0),
        instruction(LOAD_64, 1, OF_MAP, 0, map.as_raw_fd()),
        instruction(0, 0, 0, 0, 0),
        instruction(COPY, 2, 10, 0, 0),
        instruction(ADD, 2, 0, 0, -4),
        instruction(CALL, 0, 0, 0, MAP_LOOKUP_ELEM),
        instruction(JUMP_IF_EQUAL, 0, 0, 7, 0),
        // Assigns the connection to the socket. If that fails, the client gets an error.
        instruction(COPY, 7, 0, 0, 0),
        instruction(COPY, 1, 6, 0, 0),
        instruction(COPY, 2, 7, 0, 0),
        instruction(SET, 3, 0, 0, 0),
        instruction(CALL, 0, 0, 0, SK_ASSIGN),
        instruction(COPY, 1, 7, 0, 0),
        instruction(CALL, 0, 0, 0, SK_RELEASE),
        // Target of the jumps.
        instruction(SET, 0, 0, 0, SK_PASS),
        instruction(EXIT, 0, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpStream,
    };

    use sandboxer_netlink::Netlink;

    use super::*;
    use crate::network::link;

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
