//! The part of the NBD protocol that a VMM's disk needs: one export, simple replies, reads and writes.
//!
//! Follows the NetworkBlockDevice project's `doc/proto.md`. All integers are big-endian. The client is a VMM, which may
//! be compromised: everything that it sends is limited, and an unknown message ends the connection.

use std::io::{self, Read, Write};

use sandboxer_protocol::share::disk::{SECTOR, SIZE};

/// The most bytes of one request: a VMM splits longer ones.
pub const MAX_LENGTH: usize = 2 << 20;
/// Length of a request without its data, bytes.
pub const REQUEST: usize = 28;
/// Length of a reply without its data, bytes.
pub const REPLY: usize = 16;

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
/// `NBD_FLAG_FIXED_NEWSTYLE` and `NBD_FLAG_NO_ZEROES`.
const HANDSHAKE_FLAGS: u16 = 3;
/// `NBD_FLAG_HAS_FLAGS`: no flush, no trim, not read-only.
const EXPORT_FLAGS: u16 = 1;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = 0x8000_0001;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;
/// The longest option, bytes, and the most options.
const MAX_OPTION: usize = 4096;
const MAX_OPTIONS: usize = 32;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Negotiates the export with a VMM. Returns `false` if the VMM only queried it.
pub fn negotiate(stream: &mut (impl Read + Write)) -> io::Result<bool> {
    stream.write_all(&[&GREETING[..], &HANDSHAKE_FLAGS.to_be_bytes()].concat())?;
    let _client_flags: [u8; 4] = read(stream)?;
    for _ in 0..MAX_OPTIONS {
        let magic: [u8; 8] = read(stream)?;
        let option = u32::from_be_bytes(read(stream)?);
        let length = u32::from_be_bytes(read(stream)?) as usize;
        if magic != GREETING[8..] || length > MAX_OPTION {
            return Err(io::ErrorKind::InvalidData.into());
        }
        stream.read_exact(&mut vec![0; length])?;
        match option {
            OPTION_GO | OPTION_INFO => {
                let export = [&INFO_EXPORT.to_be_bytes()[..], &(SIZE as u64).to_be_bytes()];
                option_reply(
                    stream,
                    option,
                    REPLY_INFO,
                    &[&export.concat()[..], &EXPORT_FLAGS.to_be_bytes()].concat(),
                )?;
                let sizes = [SECTOR, 4096, MAX_LENGTH].map(|size| (size as u32).to_be_bytes()).concat();
                option_reply(
                    stream,
                    option,
                    REPLY_INFO,
                    &[&INFO_BLOCK_SIZE.to_be_bytes()[..], &sizes].concat(),
                )?;
                option_reply(stream, option, REPLY_ACK, &[])?;
                if option == OPTION_GO {
                    return Ok(true);
                }
            }
            OPTION_ABORT => {
                option_reply(stream, option, REPLY_ACK, &[])?;
                return Ok(false);
            }
            _ => option_reply(stream, option, REPLY_UNSUPPORTED, &[])?,
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

fn option_reply(stream: &mut impl Write, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let words = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
    stream.write_all(&[&OPTION_REPLY_MAGIC.to_be_bytes()[..], &words, data].concat())
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The command to read bytes of the disk.
    Read,
    /// The command to write the bytes after the request to the disk.
    Write,
    /// The command to disconnect.
    Disconnect,
    /// A command that was not offered.
    Other,
}

/// A request of a VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The command of the request.
    pub kind: Kind,
    /// The identifier that the VMM gave the request.
    pub cookie: u64,
    /// The offset of the first byte.
    pub offset: u64,
    /// The number of bytes, at most [`MAX_LENGTH`].
    pub length: usize,
}

impl Request {
    /// Parses a request; `None` if it is invalid.
    pub fn parse(bytes: &[u8; REQUEST]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let length = usize::try_from(word(24)?).ok()?;
        if word(0)? != REQUEST_MAGIC || length > MAX_LENGTH {
            return None;
        }
        let kind = match word(4)? & 0xffff {
            0 => Kind::Read,
            1 => Kind::Write,
            2 => Kind::Disconnect,
            _ => Kind::Other,
        };
        Some(Self { kind, cookie: long(8)?, offset: long(16)?, length })
    }
}

/// Returns the header of a reply. `errno` is 0 or an error number.
pub fn reply(cookie: u64, errno: i32) -> [u8; REPLY] {
    let mut reply = [0; REPLY];
    reply[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    reply[4..8].copy_from_slice(&errno.to_be_bytes());
    reply[8..].copy_from_slice(&cookie.to_be_bytes());
    reply
}
