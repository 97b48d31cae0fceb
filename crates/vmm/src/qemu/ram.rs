//! Takes the guest's memory out of the stream to which QEMU writes a VM.
//!
//! ```text
//!  QEMU's stream ─▶ split ─┬─▶ memory    the guest's pages, at their places in a sparse file
//!                          └─▶ state     the same stream without these pages
//! ```
//!
//! QEMU writes the pages of memory that is not in a shared file into its stream. A copy would read all of them again,
//! and no two copies would share a page. What is left of the stream is what QEMU writes for a VM whose memory is in a
//! shared file, so a copy is restored as one of a template.
//!
//! The format is QEMU's `migration/ram.c` and `migration/savevm.c`, version 3, of 2014 and later. A guest may have
//! broken into its QEMU: every length is checked.

use std::{
    fs::File,
    io::{self, BufRead, Write},
    os::unix::fs::FileExt,
};

/// The beginning of a stream: `QEVM`, and the version.
const MAGIC: [u8; 8] = [b'Q', b'E', b'V', b'M', 0, 0, 0, 3];
/// The most bytes of a name.
const MAX_NAME: u32 = 255;
/// Size of a page, bytes.
const PAGE: usize = 4096;
/// The most bytes of neighbouring pages that are written at once.
const RUN: usize = 64 * PAGE;
/// The most bytes of the rest of the stream: devices, and memory of theirs such as a display's or a program's of the firmware.
const MAX_STATE: u64 = 128 << 20;
/// The most blocks of memory.
const MAX_BLOCKS: usize = 64;

/// What follows in the stream.
mod kind {
    pub const START: u8 = 0x01;
    pub const PART: u8 = 0x02;
    pub const END: u8 = 0x03;
    pub const SUBSECTION: u8 = 0x05;
    pub const CONFIGURATION: u8 = 0x07;
    pub const FOOTER: u8 = 0x7e;
}

/// The flags of a record of memory, in the low bits of its address.
mod flag {
    pub const ZERO: u64 = 0x02;
    pub const BLOCKS: u64 = 0x04;
    pub const PAGE: u64 = 0x08;
    pub const END: u64 = 0x10;
    pub const SAME_BLOCK: u64 = 0x20;
}

/// The name of the guest's memory in a QEMU whose machine made it, and in one that has it in a file.
const MADE: &[u8] = b"microvm.ram";
const IN_FILE: &[u8] = b"memory0";

/// Splits QEMU's stream of a stopped VM with `bytes` of memory. Returns the bytes of pages that are not empty.
pub fn split(stream: impl BufRead, state: impl Write, memory: &File, bytes: u64) -> io::Result<u64> {
    memory.set_len(bytes)?;
    let pages = usize::try_from(bytes / PAGE as u64).map_err(io::Error::other)?;
    let memory = Memory {
        file: memory,
        bytes,
        seen: vec![false; pages],
        run: Vec::with_capacity(RUN),
        at: 0,
        stored: 0,
    };
    let to = Bounded { to: state, left: MAX_STATE };
    Splitter { from: stream, to, main: Vec::new(), others: Vec::new(), is_main: false, memory }.split()
}

/// What takes a number of bytes and no more.
struct Bounded<W> {
    to: W,
    left: u64,
}

impl<W: Write> Write for Bounded<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            return Err(malformed(format!("the state of its devices has more than {} MiB", MAX_STATE >> 20)));
        }
        let written = self.to.write(bytes)?;
        self.left -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

struct Splitter<'a, R, W> {
    from: R,
    to: W,
    /// The name of the block that is the guest's memory.
    main: Vec<u8>,
    /// The names of the others.
    others: Vec<Vec<u8>>,
    /// Whether the last page was of that block.
    is_main: bool,
    memory: Memory<'a>,
}

/// The file of the guest's memory.
struct Memory<'a> {
    file: &'a File,
    bytes: u64,
    /// The pages that came already.
    seen: Vec<bool>,
    /// Neighbouring pages, from `at` on, that are not written yet.
    run: Vec<u8>,
    at: u64,
    stored: u64,
}

impl Memory<'_> {
    /// Takes a page, which comes once.
    fn put(&mut self, at: u64, page: &[u8]) -> io::Result<()> {
        let number = usize::try_from(at / PAGE as u64).unwrap_or(usize::MAX);
        match self.seen.get_mut(number) {
            Some(seen @ false) => *seen = true,
            Some(true) => return Err(malformed(format!("page {at:#x} of the guest's memory comes twice"))),
            None => return Err(malformed(format!("page {at:#x} is beyond the guest's memory"))),
        }
        if page.iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        if self.run.len() == RUN || at != self.at + self.run.len() as u64 {
            self.flush()?;
            self.at = at;
        }
        self.run.extend_from_slice(page);
        self.stored += page.len() as u64;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.run, self.at)?;
        self.run.clear();
        Ok(())
    }
}

impl<R: BufRead, W: Write> Splitter<'_, R, W> {
    fn split(mut self) -> io::Result<u64> {
        if self.copy::<8>()? != MAGIC {
            return Err(malformed("it does not begin like a stream of QEMU".into()));
        }
        if self.next()? == kind::CONFIGURATION {
            self.configuration()?;
        }
        let [kind] = self.copy::<1>()?;
        let section = self.copy::<4>()?;
        let [length] = self.copy::<1>()?;
        let name = self.copy_bytes(length.into())?;
        if kind != kind::START || name != b"ram" {
            let name = String::from_utf8_lossy(&name).into_owned();
            return Err(malformed(format!("its first section is of {name:?}, not of memory")));
        }
        // Instance and version.
        self.copy::<8>()?;
        self.records(section)?;
        loop {
            let [kind] = self.copy::<1>()?;
            if self.copy::<4>()? != section || !matches!(kind, kind::PART | kind::END) {
                return Err(malformed("a section of something else is among those of memory".into()));
            }
            self.records(section)?;
            if kind == kind::END {
                break;
            }
        }
        self.memory.flush()?;
        io::copy(&mut self.from, &mut self.to)?;
        self.to.flush()?;
        Ok(self.memory.stored)
    }

    /// Copies the name of the machine, and the capabilities that the other QEMU must have.
    fn configuration(&mut self) -> io::Result<()> {
        self.copy::<1>()?;
        let length = u32::from_be_bytes(self.copy()?);
        self.copy_bytes(length)?;
        while self.next()? == kind::SUBSECTION {
            self.copy::<1>()?;
            let [length] = self.copy::<1>()?;
            let name = self.copy_bytes(length.into())?;
            if name != b"configuration/capabilities" {
                let name = String::from_utf8_lossy(&name).into_owned();
                return Err(malformed(format!("its configuration has an unknown part {name:?}")));
            }
            // Version.
            self.copy::<4>()?;
            for _ in 0..u32::from_be_bytes(self.copy()?).min(MAX_NAME) {
                let [length] = self.copy::<1>()?;
                self.copy_bytes(length.into())?;
            }
        }
        Ok(())
    }

    /// Copies the records of one section of memory, without the guest's pages, and its footer.
    fn records(&mut self, section: [u8; 4]) -> io::Result<()> {
        let mut page = [0; PAGE];
        loop {
            let header = u64::from_be_bytes(self.read()?);
            let (at, flags) = (header & !(PAGE as u64 - 1), header & (PAGE as u64 - 1));
            match flags & !flag::SAME_BLOCK {
                flag::END if at == 0 => {
                    self.to.write_all(&header.to_be_bytes())?;
                    break;
                }
                // The sum of the blocks' lengths is in the place of the address, with all its bits.
                _ if self.main.is_empty() => self.blocks(header)?,
                flag::ZERO => {
                    let name = self.block_of(flags)?;
                    let [fill] = self.read::<1>()?;
                    if self.is_main {
                        page.fill(fill);
                        self.memory.put(at, &page)?;
                    } else {
                        self.pass(header, &name, &[fill])?;
                    }
                }
                flag::PAGE => {
                    let name = self.block_of(flags)?;
                    self.from.read_exact(&mut page)?;
                    if self.is_main {
                        self.memory.put(at, &page)?;
                    } else {
                        self.pass(header, &name, &page)?;
                    }
                }
                flags => {
                    return Err(malformed(format!("a record of memory has the unknown flags {flags:#x}")));
                }
            }
        }
        if self.copy::<1>()? != [kind::FOOTER] || self.copy::<4>()? != section {
            return Err(malformed("a section of memory has no footer".into()));
        }
        Ok(())
    }

    /// Copies the list of blocks, and finds the guest's memory in it.
    fn blocks(&mut self, header: u64) -> io::Result<()> {
        if header & (PAGE as u64 - 1) != flag::BLOCKS {
            return Err(malformed("its memory does not begin with a list of blocks".into()));
        }
        self.to.write_all(&header.to_be_bytes())?;
        let mut left = header & !(PAGE as u64 - 1);
        for _ in 0..MAX_BLOCKS {
            let [length] = self.read::<1>()?;
            let name = self.read_bytes(length.into())?;
            let (bytes, at) = (self.read::<8>()?, self.read::<8>()?);
            let (length, is_memory) = (u64::from_be_bytes(bytes), name == MADE || name == IN_FILE);
            let named = if is_memory { IN_FILE } else { &name };
            self.to.write_all(&[u8::try_from(named.len()).unwrap_or(u8::MAX)])?;
            self.to.write_all(named)?;
            self.to.write_all(&bytes)?;
            self.to.write_all(&at)?;
            if is_memory {
                if length != self.memory.bytes || !self.main.is_empty() {
                    return Err(malformed(format!(
                        "the guest's memory has {length} bytes, expected {}",
                        self.memory.bytes
                    )));
                }
                self.main = name;
            } else {
                self.others.push(name);
            }
            left = left.checked_sub(length).ok_or_else(|| malformed("its blocks are too long".into()))?;
            if left == 0 {
                break;
            }
        }
        match self.main.is_empty() || left != 0 {
            true => Err(malformed("the guest's memory is not among its blocks".into())),
            false => Ok(()),
        }
    }

    /// Reads the name of a page's block, unless it is that of the page before. Empty: it is.
    fn block_of(&mut self, flags: u64) -> io::Result<Vec<u8>> {
        if flags & flag::SAME_BLOCK != 0 {
            return Ok(Vec::new());
        }
        let [length] = self.read::<1>()?;
        let name = self.read_bytes(length.into())?;
        self.is_main = name == self.main;
        // A copy's memory may have the name that no block has here.
        if !self.is_main && !self.others.contains(&name) {
            let name = String::from_utf8_lossy(&name).into_owned();
            return Err(malformed(format!("a page is of {name:?}, which is not among its blocks")));
        }
        Ok(name)
    }

    /// Copies a page of another block.
    fn pass(&mut self, header: u64, name: &[u8], content: &[u8]) -> io::Result<()> {
        self.to.write_all(&header.to_be_bytes())?;
        if header & flag::SAME_BLOCK == 0 {
            self.to.write_all(&[u8::try_from(name.len()).unwrap_or(u8::MAX)])?;
            self.to.write_all(name)?;
        }
        self.to.write_all(content)
    }

    /// Returns the next byte, which stays in the stream.
    fn next(&mut self) -> io::Result<u8> {
        self.from.fill_buf()?.first().copied().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    fn read<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn read_bytes(&mut self, length: u32) -> io::Result<Vec<u8>> {
        if length > MAX_NAME {
            return Err(malformed(format!("a name has {length} bytes")));
        }
        let mut bytes = vec![0; length as usize];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn copy<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let bytes = self.read()?;
        self.to.write_all(&bytes)?;
        Ok(bytes)
    }

    fn copy_bytes(&mut self, length: u32) -> io::Result<Vec<u8>> {
        let bytes = self.read_bytes(length)?;
        self.to.write_all(&bytes)?;
        Ok(bytes)
    }
}

fn malformed(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What QEMU writes, piece by piece.
    #[derive(Default, Clone)]
    struct Stream(Vec<u8>);

    impl Stream {
        fn with(mut self, bytes: &[u8]) -> Self {
            self.0.extend_from_slice(bytes);
            self
        }

        fn named(self, name: &[u8]) -> Self {
            self.with(&[name.len() as u8]).with(name)
        }

        fn begun() -> Self {
            let capabilities = Self::default()
                .with(&[kind::SUBSECTION])
                .named(b"configuration/capabilities")
                .with(&1_u32.to_be_bytes())
                .with(&1_u32.to_be_bytes())
                .named(b"x-ignore-shared");
            Self::default()
                .with(&MAGIC)
                .with(&[kind::CONFIGURATION])
                .with(&7_u32.to_be_bytes())
                .with(b"microvm")
                .with(&capabilities.0)
                .with(&[kind::START, 0, 0, 0, 2])
                .named(b"ram")
                .with(&[0; 4])
                .with(&4_u32.to_be_bytes())
        }

        fn blocks(self, memory: &[u8], bytes: u64) -> Self {
            self.with(&((bytes + 2 * PAGE as u64) | flag::BLOCKS).to_be_bytes())
                .named(memory)
                .with(&bytes.to_be_bytes())
                .with(&[0; 8])
                .named(b"pc.bios")
                .with(&(2 * PAGE as u64).to_be_bytes())
                .with(&0xffff_0000_u64.to_be_bytes())
        }

        fn page(self, block: &[u8], at: u64, fill: u8) -> Self {
            let same = if block.is_empty() { flag::SAME_BLOCK } else { 0 };
            let page = self.with(&(at | flag::PAGE | same).to_be_bytes());
            let page = if block.is_empty() { page } else { page.named(block) };
            page.with(&[fill; PAGE])
        }

        fn zero(self, at: u64) -> Self {
            self.with(&(at | flag::ZERO | flag::SAME_BLOCK).to_be_bytes()).with(&[0])
        }

        fn ended(self) -> Self {
            self.with(&flag::END.to_be_bytes()).with(&[kind::FOOTER, 0, 0, 0, 2])
        }

        fn section(self, kind: u8) -> Self {
            self.with(&[kind, 0, 0, 0, 2])
        }
    }

    fn run(stream: &[u8]) -> io::Result<(Vec<u8>, File, u64)> {
        let (mut state, memory) = (Vec::new(), tempfile::tempfile()?);
        let stored = split(stream, &mut state, &memory, MIB)?;
        Ok((state, memory, stored))
    }

    #[test]
    fn the_guests_pages_are_in_the_file_and_all_else_is_in_the_state() {
        for name in [MADE, IN_FILE] {
            let stream = Stream::begun().blocks(name, MIB).ended().section(kind::PART);
            let stream =
                stream.page(name, 0x1000, 7).page(b"", 0x2000, 8).zero(0x3000).page(b"pc.bios", 0, 9);
            let stream =
                stream.page(b"", 0x1000, 10).ended().section(kind::END).page(name, 0x4000, 11).ended();
            let (state, memory, stored) = run(&stream.with(b"devices").0).unwrap();
            assert_eq!(stored, 3 * PAGE as u64);
            let mut found = [0; 6];
            for (n, byte) in found.iter_mut().enumerate() {
                memory.read_exact_at(std::slice::from_mut(byte), (n * PAGE) as u64).unwrap();
            }
            assert_eq!(found, [0, 7, 8, 0, 11, 0]);
            assert_eq!(memory.metadata().unwrap().len(), MIB);
            let left =
                Stream::begun().blocks(IN_FILE, MIB).ended().section(kind::PART).page(b"pc.bios", 0, 9);
            let left = left.page(b"", 0x1000, 10).ended().section(kind::END).ended().with(b"devices");
            assert_eq!(state, left.0);
        }
    }

    #[test]
    fn a_stream_without_end_does_not_fill_the_disk() {
        let stream = Stream::begun().blocks(MADE, MIB).ended().section(kind::END).ended().0;
        let endless = io::BufReader::new(io::Read::chain(&stream[..], io::repeat(0)));
        let error = split(endless, io::sink(), &tempfile::tempfile().unwrap(), MIB).unwrap_err();
        assert!(error.to_string().contains("more than 128 MiB"), "{error}");
    }

    #[test]
    fn what_no_qemu_writes_is_refused_by_name() {
        let begun = || Stream::begun().blocks(MADE, MIB);
        for (stream, why) in [
            (Stream::default().with(b"rubbish!"), "does not begin like"),
            (Stream::begun().blocks(MADE, 2 * MIB), "has 2097152 bytes, expected 1048576"),
            (Stream::begun().blocks(b"another", MIB), "not among its blocks"),
            (Stream::begun().page(MADE, 0, 1), "does not begin with a list"),
            (begun().page(MADE, MIB, 1), "beyond the guest's memory"),
            (begun().page(IN_FILE, 0, 1), "is of \"memory0\", which is not among its blocks"),
            (begun().page(MADE, 0, 1).page(MADE, 0, 1), "comes twice"),
            (begun().with(&0x40_u64.to_be_bytes()), "unknown flags 0x40"),
            (begun().ended().with(&[4, 0, 0, 0, 9]), "something else"),
        ] {
            let error = run(&stream.with(&[0; PAGE]).0).unwrap_err();
            assert!(error.to_string().contains(why), "{why}: {error}");
        }
        let whole = begun().ended().section(kind::END).ended().0;
        for length in 0..whole.len() {
            assert_eq!(run(&whole[..length]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{length}");
        }
        run(&whole).unwrap();
    }
}
