//! The initramfs: a cpio archive whose `/init` is the agent.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use sandboxer_protocol::{PROTOCOL_VERSION, SPOKEN, mark, newer};

use super::verdict::{Check, Fix, Subject};

/// Maximum size of an initramfs, bytes.
const MAX_BYTES: u64 = 256 << 20;
/// Maximum entries searched for `init`.
const MAX_ENTRIES: usize = 4096;

const INITRAMFS: Subject = Subject {
    name: "initramfs",
    why: "it contains the agent, which must speak the daemon's protocol version",
};

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// The file cannot be read.
    Unreadable(String),
    /// Reading did not end within [`PATIENCE`](super::PATIENCE).
    Slow,
    /// The file is not an archive of the format "newc"; it may be compressed.
    NoArchive,
    /// The archive has no executable `/init`.
    NoInit,
    /// The archive has an `/init` without a protocol mark.
    Unmarked,
    /// The archive has an agent with this protocol version.
    Agent(u32),
}

/// A file and its content.
#[derive(Debug, Clone)]
pub struct Reading {
    /// Path of the file.
    pub path: PathBuf,
    /// Size of the file, bytes.
    pub size: u64,
    /// Content of the file.
    pub content: Content,
}

impl Reading {
    /// Returns the reading of a file that could not be read in time.
    pub fn silent(path: &Path) -> Self {
        Self { path: path.to_owned(), size: 0, content: Content::Slow }
    }
}

/// Searches the file for the agent.
pub fn read(path: &Path) -> Reading {
    let read = File::open(path).and_then(|file| {
        let size = file.metadata()?.len();
        if size > MAX_BYTES {
            return Err(io::Error::other(format!("it has {size} bytes: too large for an initramfs")));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or_default());
        file.take(MAX_BYTES).read_to_end(&mut bytes).map(|_| bytes)
    });
    let (size, content) = match read {
        Err(error) => (0, Content::Unreadable(error.to_string())),
        Ok(bytes) => (bytes.len() as u64, content(&bytes)),
    };
    Reading { path: path.to_owned(), size, content }
}

fn content(archive: &[u8]) -> Content {
    match find_init(archive) {
        None => Content::NoArchive,
        Some(None) => Content::NoInit,
        Some(Some(init)) => mark::find(init).map_or(Content::Unmarked, Content::Agent),
    }
}

/// Returns the bytes of `/init`; the outer `None` means no archive. The format is Linux'
/// `Documentation/driver-api/early-userspace/buffer-format.rst`.
fn find_init(archive: &[u8]) -> Option<Option<&[u8]>> {
    const HEADER: usize = 110;
    const REGULAR: usize = 0o10_0000;
    const EXECUTABLE: usize = 0o100;
    let mut rest = archive;
    for _ in 0..MAX_ENTRIES {
        let header = rest.get(..HEADER)?;
        if !header.starts_with(b"070701") && !header.starts_with(b"070702") {
            return None;
        }
        // Thirteen fields of eight hex digits follow the magic number.
        let field = |index: usize| {
            let digits = header.get(6 + 8 * index..14 + 8 * index)?;
            usize::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
        };
        let (mode, length, name_length) = (field(1)?, field(6)?, field(11)?);
        // Name and content are padded to a multiple of four.
        let begin = (HEADER + name_length).next_multiple_of(4);
        let name = rest.get(HEADER..HEADER + name_length)?;
        let content = rest.get(begin..begin.checked_add(length)?)?;
        match name.strip_suffix(b"\0")? {
            b"init" | b"/init" | b"./init" if mode & REGULAR != 0 && mode & EXECUTABLE != 0 => {
                return Some(Some(content));
            }
            b"TRAILER!!!" => break,
            _ => rest = rest.get((begin + length).next_multiple_of(4)..).unwrap_or_default(),
        }
    }
    Some(None)
}

/// Checks the agent's protocol against this daemon's.
pub fn judge(reading: &Reading) -> Check {
    let path = &reading.path;
    let build = || {
        Fix::words(
            "install the initramfs of this daemon's version, or set vm.initramfs; `make guest-image` in \
             the source tree builds one",
        )
    };
    match &reading.content {
        Content::Agent(PROTOCOL_VERSION) => INITRAMFS.ok(format!(
            "its agent speaks protocol {PROTOCOL_VERSION}, {:.1} MiB",
            reading.size as f64 / f64::from(1 << 20)
        )),
        Content::Agent(older) if SPOKEN.contains(older) => INITRAMFS.warning(
            format!(
                "the agent in {path:?} speaks protocol {older}, the daemon speaks {PROTOCOL_VERSION}: pods start \
                 without {}",
                newer::lacked_by(*older)
            ),
            build(),
        ),
        Content::Agent(other) => INITRAMFS.failure(
            format!("the agent in {path:?} speaks protocol {other}, the daemon speaks {PROTOCOL_VERSION}"),
            build(),
        ),
        Content::Unmarked => INITRAMFS.warning(format!("/init in {path:?} has no protocol version"), build()),
        Content::NoInit => INITRAMFS.failure(format!("{path:?} has no /init"), build()),
        Content::NoArchive => {
            INITRAMFS.failure(format!("{path:?} is not a cpio archive (newc, uncompressed)"), build())
        }
        Content::Slow => INITRAMFS.warning(super::slow_file(path), super::ask_again()),
        Content::Unreadable(why) => INITRAMFS.failure(format!("cannot read {path:?}: {why}"), build()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    fn entry(name: &str, mode: u32, content: &[u8]) -> Vec<u8> {
        let mut entry = b"070701".to_vec();
        let fields = [1, mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        for field in fields {
            entry.extend(format!("{field:08X}").bytes());
        }
        entry.extend(name.bytes());
        entry.push(0);
        entry.resize(entry.len().next_multiple_of(4), 0);
        entry.extend(content);
        entry.resize(entry.len().next_multiple_of(4), 0);
        entry
    }

    fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
        [entries.concat(), entry("TRAILER!!!", 0, b"")].concat()
    }

    const RUN: u32 = 0o10_0755;

    #[test]
    fn an_initramfs_is_known_by_its_agent() {
        let dev = || entry("dev", 0o4_0755, b"");
        let agent = [b"\x7fELF".as_slice(), &mark::MARK, b"more"].concat();
        let newer = b"sandboxer-agent protocol 0000000999";
        let older = format!("sandboxer-agent protocol {:010}", SPOKEN.start());
        for (bytes, verdict, seen) in [
            (archive(&[dev(), entry("init", RUN, &agent)]), Verdict::Ok, "its agent speaks protocol"),
            (archive(&[entry("./init", RUN, &agent), dev()]), Verdict::Ok, "its agent speaks protocol"),
            (
                archive(&[entry("init", RUN, older.as_bytes())]),
                Verdict::Warning,
                "pods start without the node's",
            ),
            (archive(&[entry("init", RUN, newer)]), Verdict::Failure, "speaks protocol 999, the daemon"),
            (archive(&[entry("init", RUN, b"#!/bin/sh")]), Verdict::Warning, "has no protocol version"),
            (archive(&[entry("init", 0o10_0644, &agent)]), Verdict::Failure, "no /init"),
            (archive(&[dev()]), Verdict::Failure, "no /init"),
            (dev(), Verdict::Failure, "not a cpio archive"),
            (b"\x28\xb5\x2f\xfd compressed".to_vec(), Verdict::Failure, "not a cpio archive"),
            (Vec::new(), Verdict::Failure, "not a cpio archive"),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            let check = judge(&read(file.path()));
            assert_eq!(check.verdict, verdict, "{check}");
            assert!(check.seen.contains(seen), "{seen}: {check}");
        }
        let check = judge(&read("/nonexistent/initramfs".as_ref()));
        assert!(check.verdict == Verdict::Failure && check.seen.contains("No such file"), "{check}");
    }

    #[test]
    fn lengths_that_lie_lead_nowhere() {
        let whole = archive(&[entry("init", RUN, &mark::MARK)]);
        for at in 0..110 {
            for digit in *b"0Ff/" {
                let mut bytes = whole.clone();
                bytes[at] = digit;
                let _ = find_init(&bytes);
            }
        }
        for length in 0..whole.len() {
            let _ = find_init(&whole[..length]);
        }
        let endless = entry("file", RUN, b"").repeat(MAX_ENTRIES + 1);
        assert_eq!(find_init(&endless), Some(None));
    }
}
