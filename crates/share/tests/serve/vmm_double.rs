//! A test double of a VMM with the server's disk: speaks NBD like QEMU.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use sandboxer_protocol::share::{
    SLOTS,
    disk::{self, ANSWER, DONE, FIRST, MESSAGE, SECTOR, SIZE, SLOT, STATE},
};

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;

pub struct Disk(pub UnixStream);

impl Disk {
    /// Connects and negotiates.
    pub fn over(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut disk = Self(stream);
        assert_eq!(disk.take(18), b"NBDMAGICIHAVEOPT\0\x03");
        disk.0.write_all(&3_u32.to_be_bytes()).unwrap();
        // Structured replies are not supported.
        assert_eq!(disk.option(8, &[]), (0x8000_0001, Vec::new()));
        let (kind, export) = disk.option(7, &[0; 6]);
        assert_eq!((kind, &export[..2]), (3, &[0, 0][..]));
        assert_eq!(u64::from_be_bytes(export[2..10].try_into().unwrap()), SIZE as u64);
        assert_eq!(disk.option_reply().0, 3, "sizes of blocks");
        assert_eq!(disk.option_reply(), (1, Vec::new()));
        disk
    }

    fn option(&mut self, option: u32, data: &[u8]) -> (u32, Vec<u8>) {
        let head =
            [b"IHAVEOPT".as_slice(), &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()].concat();
        self.0.write_all(&[&head, data].concat()).unwrap();
        self.option_reply()
    }

    fn option_reply(&mut self) -> (u32, Vec<u8>) {
        let head = self.take(20);
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        (word(12), self.take(word(16) as usize))
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Sends a request without waiting.
    pub fn ask(&mut self, kind: u16, cookie: u64, offset: usize, length: usize, data: &[u8]) {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([[0; 2], kind.to_be_bytes()].concat());
        request.extend(cookie.to_be_bytes());
        request.extend((offset as u64).to_be_bytes());
        request.extend((length as u32).to_be_bytes());
        request.extend(data);
        self.0.write_all(&request).unwrap();
    }

    /// Receives the next reply's error and cookie.
    pub fn answered(&mut self) -> (u32, u64) {
        let head = self.take(16);
        assert_eq!(head[..4], 0x6744_6698_u32.to_be_bytes());
        let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
        (error, u64::from_be_bytes(head[8..].try_into().unwrap()))
    }

    pub fn write(&mut self, offset: usize, data: &[u8]) -> u32 {
        self.ask(WRITE, 7, offset, data.len(), data);
        self.answered().0
    }

    pub fn read(&mut self, offset: usize, length: usize) -> Vec<u8> {
        self.ask(READ, 8, offset, length, &[]);
        assert_eq!(self.answered(), (0, 8));
        self.take(length)
    }

    /// Receives the data after a successful reply to a read of this length.
    pub fn data(&mut self, length: usize) -> Vec<u8> {
        self.take(length)
    }

    /// Exchanges a message like a guest's carrier.
    pub fn exchange(&mut self, slot: usize, message: &[u8]) -> Vec<u8> {
        assert!(slot < SLOTS);
        let mut padded = message.to_vec();
        padded.resize(message.len().next_multiple_of(SECTOR), 0);
        assert_eq!(self.write(slot * SLOT, &padded), 0);
        let to_read = disk::to_read(message);
        loop {
            let answer = self.read(slot * SLOT + ANSWER + FIRST, to_read);
            if state(&answer) == DONE {
                return message_in(&answer);
            }
        }
    }
}

/// Returns the state in a response, read from its first sector on.
pub fn state(answer: &[u8]) -> u32 {
    u32::from_le_bytes(answer[STATE - FIRST..STATE - FIRST + 4].try_into().unwrap())
}

/// Returns the message in it.
pub fn message_in(answer: &[u8]) -> Vec<u8> {
    let message = &answer[MESSAGE - FIRST..];
    message[..u32::from_le_bytes(message[..4].try_into().unwrap()) as usize].to_vec()
}
