//! A test double of a guest's kernel: sends raw FUSE messages (Linux' `include/uapi/linux/fuse.h`), one at a
//! time, over either transport.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use sandboxer_protocol::share::Head;

use crate::vmm_double::Disk;

/// Kinds of requests.
pub mod op {
    pub use sandboxer_protocol::share::opcode::*;
    pub const WRITE: u32 = 16;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const LSEEK: u32 = 46;
}

/// The result of a look-up.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub node: u64,
    pub attributes: Attributes,
}

/// Some of a file's attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    pub size: u64,
    pub mode: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
}

type Answer<T> = Result<T, i32>;

/// The transport of messages.
pub enum Transport {
    Stream(UnixStream),
    /// This slot of a disk.
    Disk(Disk, usize),
}

/// A kernel that is connected to the server.
pub struct Kernel {
    transport: Transport,
    pub unique: u64,
    /// The calling user.
    pub user: (u32, u32),
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Parses a `struct fuse_attr`.
fn attributes(bytes: &[u8]) -> Attributes {
    Attributes {
        size: u64_at(bytes, 8),
        mode: u32_at(bytes, 60),
        links: u32_at(bytes, 64),
        uid: u32_at(bytes, 68),
        gid: u32_at(bytes, 72),
    }
}

/// Parses a `struct fuse_entry_out`.
fn entry(bytes: &[u8]) -> Entry {
    Entry { node: u64_at(bytes, 0), attributes: attributes(&bytes[40..]) }
}

/// Encodes consecutive 32-bit fields.
pub fn words(fields: &[u32]) -> Vec<u8> {
    fields.iter().flat_map(|field| field.to_le_bytes()).collect()
}

/// Encodes `fields`, then zero-terminated names.
pub fn named(fields: &[u32], names: &[&str]) -> Vec<u8> {
    let mut body = words(fields);
    for name in names {
        body.extend(name.as_bytes());
        body.push(0);
    }
    body
}

pub fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

impl Kernel {
    pub fn over(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self::by(Transport::Stream(stream))
    }

    pub fn by(transport: Transport) -> Self {
        Self { transport, unique: 2, user: (0, 0) }
    }

    /// Returns the bytes of a request.
    pub fn request(&mut self, opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        self.unique += 2;
        let mut message = words(&[(40 + body.len()) as u32, opcode]);
        message.extend(self.unique.to_le_bytes());
        message.extend(node.to_le_bytes());
        message.extend(words(&[self.user.0, self.user.1, 1, 0]));
        message.extend(body);
        message
    }

    /// Sends a request; returns the response, empty if there is none for it; `None` if the server has closed.
    pub fn exchange(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        match &mut self.transport {
            Transport::Disk(disk, slot) => Some(disk.exchange(*slot, message)),
            Transport::Stream(stream) => {
                stream.write_all(message).ok()?;
                match Head::parse(message) {
                    Some(head) if !head.is_answered() => Some(Vec::new()),
                    _ => self.receive(),
                }
            }
        }
    }

    pub fn send_raw(&mut self, bytes: &[u8]) {
        let Transport::Stream(stream) = &mut self.transport else { panic!("only over a stream") };
        stream.write_all(bytes).unwrap();
    }

    /// Receives the next response; `None` if the server has closed.
    pub fn receive(&mut self) -> Option<Vec<u8>> {
        let Transport::Stream(stream) = &mut self.transport else { panic!("only over a stream") };
        let mut length = [0; 4];
        match stream.read_exact(&mut length) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("no answer"),
            Err(_) => return None,
            Ok(()) => {}
        }
        let mut message = vec![0; u32::from_le_bytes(length) as usize];
        message[..4].copy_from_slice(&length);
        stream.read_exact(&mut message[4..]).unwrap();
        Some(message)
    }

    /// Parses a response.
    pub fn parse(&self, answer: &[u8]) -> Answer<Vec<u8>> {
        assert_eq!((u32_at(answer, 0) as usize, u64_at(answer, 8)), (answer.len(), self.unique));
        match u32_at(answer, 4).cast_signed() {
            0 => Ok(answer[16..].to_vec()),
            error => Err(-error),
        }
    }

    /// Sends a request and waits for the response.
    pub fn ask(&mut self, opcode: u32, node: u64, body: &[u8]) -> Answer<Vec<u8>> {
        let message = self.request(opcode, node, body);
        let answer = self.exchange(&message).expect("the server hung up");
        self.parse(&answer)
    }

    /// Sends the INIT request; returns the negotiated flags and the most bytes of a write.
    pub fn init(&mut self) -> (u32, u32) {
        // All features of a kernel, and 64 KiB of read-ahead.
        let mut body = words(&[7, 36, 65536, 0x7fff_ffff]);
        body.resize(64, 0);
        let agreed = self.ask(op::INIT, 0, &body).unwrap();
        (u32_at(&agreed, 12), u32_at(&agreed, 20))
    }

    pub fn lookup(&mut self, parent: u64, name: &str) -> Answer<Entry> {
        self.ask(op::LOOKUP, parent, &named(&[], &[name])).map(|answer| entry(&answer))
    }

    pub fn getattr(&mut self, node: u64) -> Answer<Attributes> {
        self.ask(op::GETATTR, node, &words(&[0; 4])).map(|answer| attributes(&answer[16..]))
    }

    /// Creates and opens a file; returns its handle.
    pub fn create(&mut self, parent: u64, name: &str, flags: i32, mode: u32) -> Answer<(Entry, u64)> {
        let body = named(&[flags as u32, mode, 0, 0], &[name]);
        self.ask(op::CREATE, parent, &body).map(|answer| (entry(&answer), u64_at(&answer, 128)))
    }

    pub fn open(&mut self, node: u64, flags: i32) -> Answer<u64> {
        self.open_as(node, flags).map(|(handle, _)| handle)
    }

    /// Opens a file; returns its handle and the answer's flags.
    pub fn open_as(&mut self, node: u64, flags: i32) -> Answer<(u64, u32)> {
        let answer = self.ask(op::OPEN, node, &words(&[flags as u32, 0]))?;
        Ok((u64_at(&answer, 0), u32_at(&answer, 8)))
    }

    pub fn release(&mut self, node: u64, handle: u64) -> Answer<()> {
        let [h0, h1] = halves(handle);
        self.ask(op::RELEASE, node, &words(&[h0, h1, 0, 0, 0, 0])).map(drop)
    }

    pub fn forget(&mut self, node: u64, count: u64) {
        let [c0, c1] = halves(count);
        let forget = self.request(op::FORGET, node, &words(&[c0, c1]));
        assert_eq!(self.exchange(&forget), Some(Vec::new()));
    }

    /// Reads a file as a process does: opens it, reads it and closes it.
    pub fn content(&mut self, node: u64) -> Answer<Vec<u8>> {
        let handle = self.open(node, libc::O_RDONLY)?;
        let content = self.read(node, handle, 0, 4096);
        self.release(node, handle)?;
        content
    }

    pub fn opendir(&mut self, node: u64) -> Answer<u64> {
        self.ask(op::OPENDIR, node, &words(&[0, 0])).map(|answer| u64_at(&answer, 0))
    }

    pub fn write_request(&mut self, node: u64, handle: u64, offset: u64, data: &[u8], flags: i32) -> Vec<u8> {
        let [h0, h1] = halves(handle);
        let [o0, o1] = halves(offset);
        let mut body = words(&[h0, h1, o0, o1, data.len() as u32, 0, 0, 0, flags as u32, 0]);
        body.extend(data);
        self.request(op::WRITE, node, &body)
    }

    pub fn write(&mut self, node: u64, handle: u64, offset: u64, data: &[u8]) -> Answer<u32> {
        let message = self.write_request(node, handle, offset, data, libc::O_RDWR);
        let answer = self.exchange(&message).expect("the server hung up");
        self.parse(&answer).map(|answer| u32_at(&answer, 0))
    }

    pub fn read(&mut self, node: u64, handle: u64, offset: u64, size: u32) -> Answer<Vec<u8>> {
        self.read_as(op::READ, node, handle, offset, size)
    }

    pub fn read_as(
        &mut self,
        opcode: u32,
        node: u64,
        handle: u64,
        offset: u64,
        size: u32,
    ) -> Answer<Vec<u8>> {
        let [h0, h1] = halves(handle);
        let [o0, o1] = halves(offset);
        self.ask(opcode, node, &words(&[h0, h1, o0, o1, size, 0, 0, 0, 0, 0]))
    }

    /// Lists a directory without itself and the one above.
    pub fn list(&mut self, node: u64) -> Vec<String> {
        let handle = self.opendir(node).unwrap();
        let (mut names, mut offset) = (Vec::new(), 0);
        loop {
            let listed = self.read_as(op::READDIR, node, handle, offset, 4096).unwrap();
            if listed.is_empty() {
                names.sort();
                let [d0, d1] = halves(handle);
                self.ask(op::RELEASEDIR, node, &words(&[d0, d1, 0, 0, 0, 0])).unwrap();
                names.retain(|name| name != "." && name != "..");
                return names;
            }
            let mut rest = &listed[..];
            while !rest.is_empty() {
                // `struct fuse_dirent`.
                offset = u64_at(rest, 8);
                let length = u32_at(rest, 16) as usize;
                names.push(String::from_utf8(rest[24..24 + length].to_vec()).unwrap());
                rest = &rest[(24 + length).next_multiple_of(8)..];
            }
        }
    }

    /// Sets the attributes in `valid` (`FATTR_…`): mode, size, user and group.
    pub fn setattr(
        &mut self,
        node: u64,
        valid: u32,
        size: u64,
        mode: u32,
        user: (u32, u32),
    ) -> Answer<Attributes> {
        let [s0, s1] = halves(size);
        let mut body = words(&[valid, 0, 0, 0, s0, s1]);
        body.resize(68, 0);
        body.extend(words(&[mode, 0, user.0, user.1, 0]));
        self.ask(op::SETATTR, node, &body).map(|answer| attributes(&answer[16..]))
    }

    pub fn rename(&mut self, parent: u64, name: &str, to: u64, new: &str, flags: u32) -> Answer<()> {
        let [t0, t1] = halves(to);
        self.ask(op::RENAME2, parent, &named(&[t0, t1, flags, 0], &[name, new])).map(drop)
    }

    pub fn setxattr(&mut self, node: u64, name: &str, value: &[u8]) -> Answer<()> {
        let body = [named(&[value.len() as u32, 0, 0, 0], &[name]), value.to_vec()].concat();
        self.ask(op::SETXATTR, node, &body).map(drop)
    }

    pub fn getxattr(&mut self, node: u64, name: &str) -> Answer<Vec<u8>> {
        self.ask(op::GETXATTR, node, &named(&[256, 0], &[name]))
    }
}
