//! A network device with a minimum of attributes.

use netlink_packet_core::{DecodeError, NetlinkDeserializable, NetlinkHeader, NlasIterator};

/// The length of `struct ifinfomsg`, rtnetlink(7), bytes; it has the index at offset 4, and the flags at 8.
const HEAD: usize = 16;

/// A network device. The kernel reports fifty more attributes, which took an emulated guest 8 ms to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The device's index.
    pub index: u32,
    /// Whether the device is up.
    pub up: bool,
    /// The device's name.
    pub name: String,
    /// The device's permanent link-layer address; empty if it has none.
    pub permanent_address: Vec<u8>,
}

impl NetlinkDeserializable for Link {
    type Error = DecodeError;

    fn deserialize(_: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let word =
            |at: usize| payload.get(at..at + 4).and_then(|word| word.try_into().ok()).map(u32::from_ne_bytes);
        let (Some(index), Some(flags), Some(attributes)) = (word(4), word(8), payload.get(HEAD..)) else {
            return Err(DecodeError::from("a network device has less than 16 bytes"));
        };
        let up = flags & libc::IFF_UP.cast_unsigned() != 0;
        let mut link = Self { index, up, name: String::new(), permanent_address: Vec::new() };
        for attribute in NlasIterator::new(attributes) {
            let attribute = attribute?;
            match attribute.kind() {
                libc::IFLA_IFNAME => {
                    let text = attribute.value().split(|byte| *byte == 0).next().unwrap_or_default();
                    link.name = String::from_utf8_lossy(text).into_owned();
                }
                libc::IFLA_PERM_ADDRESS => link.permanent_address = attribute.value().to_vec(),
                _ => {}
            }
        }
        Ok(link)
    }
}
