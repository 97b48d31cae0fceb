//! An rtnetlink client: one request at a time.
//!
//! The client blocks on purpose: on the host it runs in a thread that has entered a pod's network namespace and ends
//! afterwards, and in a guest in the only thread. The kernel responds within the sending call.

mod link;

use std::{io, num::NonZeroI32};

pub use link::Link;
pub use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, Nla};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
pub use netlink_packet_route as packet;
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkExtentMask, LinkMessage},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// The maximum number of objects of one dump.
const MAX_OBJECTS: usize = 16 << 10;

/// The maximum length of a datagram, bytes. The kernel sends at most 32 KiB, except for a single larger object.
const DATAGRAM: usize = 64 << 10;

/// An rtnetlink socket in the network namespace in which it was opened.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    datagram: Vec<u8>,
}

impl Netlink {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // With this, dumps contain only requested objects.
        socket.set_netlink_get_strict_chk(true)?;
        Ok(Self { socket, sequence: 0, datagram: Vec::with_capacity(DATAGRAM) })
    }

    /// Sends a request and waits for its acknowledgement. `flags` are, for example, [`NLM_F_CREATE`].
    pub fn request(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.converse(message, NLM_F_ACK | flags, |_: RouteNetlinkMessage| Ok(()))
    }

    /// Returns all objects of the kind of `message`, which is a `Get…`.
    pub fn dump(&mut self, message: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.all(message)
    }

    /// Returns all network devices.
    pub fn links(&mut self) -> io::Result<Vec<Link>> {
        let mut all = LinkMessage::default();
        all.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        self.all(RouteNetlinkMessage::GetLink(all))
    }

    fn all<T: NetlinkDeserializable>(&mut self, message: RouteNetlinkMessage) -> io::Result<Vec<T>> {
        let mut found = Vec::new();
        self.converse(message, NLM_F_DUMP, |object| {
            if found.len() == MAX_OBJECTS {
                return Err(io::Error::other(format!("more than {MAX_OBJECTS} objects of one kind")));
            }
            found.push(object);
            Ok(())
        })?;
        Ok(found)
    }

    fn converse<T: NetlinkDeserializable>(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
        mut take: impl FnMut(T) -> io::Result<()>,
    ) -> io::Result<()> {
        self.sequence += 1;
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        loop {
            self.datagram.clear();
            // A buffer of fixed size needs no peek for each message, which halves the number of system calls.
            let length = self.socket.recv(&mut self.datagram, libc::MSG_TRUNC)?;
            if length > self.datagram.len() {
                return Err(io::Error::other(format!("a message has {length} bytes, more than {DATAGRAM}")));
            }
            let mut rest = self.datagram.as_slice();
            while !rest.is_empty() {
                let answer = NetlinkMessage::<T>::deserialize(rest).map_err(io::Error::other)?;
                // Messages are padded to four bytes, except the last.
                let length = (answer.header.length as usize).next_multiple_of(4);
                rest = rest.get(length.max(4)..).unwrap_or_default();
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                match answer.payload {
                    NetlinkPayload::InnerMessage(object) => take(object)?,
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(error) => return outcome(error.code),
                    _ => {}
                }
            }
        }
    }
}

/// Reads an acknowledgement: an error message whose code is 0.
fn outcome(code: Option<NonZeroI32>) -> io::Result<()> {
    match code {
        None => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.get().saturating_abs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn loopback_is_among_the_links_and_what_is_not_there_is_an_error() {
        let mut netlink = Netlink::open().unwrap();
        let links = netlink.dump(RouteNetlinkMessage::GetLink(LinkMessage::default())).unwrap();
        let is_loopback = |message: &RouteNetlinkMessage| {
            let RouteNetlinkMessage::NewLink(link) = message else { return false };
            link.attributes.contains(&LinkAttribute::IfName("lo".into()))
        };
        assert!(links.iter().any(is_loopback), "{links:?}");
        let few = netlink.links().unwrap();
        assert_eq!(few.len(), links.len());
        let loopback = few.iter().find(|link| link.name == "lo").unwrap();
        assert_eq!((loopback.index, loopback.permanent_address.is_empty()), (1, true));

        let mut nowhere = LinkMessage::default();
        nowhere.header.index = i32::MAX.unsigned_abs();
        let error = netlink.request(RouteNetlinkMessage::SetLink(nowhere), 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(19), "no such device: {error}");
    }
}
