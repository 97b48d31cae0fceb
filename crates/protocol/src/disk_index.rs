//! The index of a guest's disks, for a VMM that gives them no serial numbers: the content of the guest's first disk.
//!
//! ```text
//! sandboxer disks 1
//! SLOT SECTORS SERIAL
//! …
//! ```
//!
//! Zeroes fill the rest. Slot 0 is the guest's second disk. A disk exists once its slot's device has this number of
//! sectors.

/// The word on a guest's kernel command line that says that its first disk is an index.
pub const WORD: &str = "sandboxer.disks=index";
/// The size of the index, bytes.
pub const BYTES: usize = 4096;
/// The size of a sector, bytes.
pub const SECTOR: usize = 512;
/// The first line of the index.
const TITLE: &str = "sandboxer disks 1";

/// A disk in a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The number of the slot, from 0.
    pub slot: usize,
    /// The size of the disk, sectors.
    pub sectors: u64,
    /// The serial number of the disk.
    pub serial: String,
}

/// Formats an index. Leaves out entries that do not fit.
pub fn format<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Vec<u8> {
    let mut text = format!("{TITLE}\n").into_bytes();
    for Entry { slot, sectors, serial } in entries {
        let line = format!("{slot} {sectors} {serial}\n");
        if text.len() + line.len() <= BYTES {
            text.extend(line.as_bytes());
        }
    }
    text.resize(BYTES, 0);
    text
}

/// Parses an index; `None` if it is malformed.
pub fn parse(index: &[u8]) -> Option<Vec<Entry>> {
    let text = std::str::from_utf8(index).ok()?.trim_end_matches('\0');
    let mut lines = text.lines();
    if lines.next()? != TITLE {
        return None;
    }
    lines
        .map(|line| {
            let mut words = line.splitn(3, ' ');
            let (slot, sectors) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            Some(Entry { slot, sectors, serial: words.next()?.to_owned() })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(slot: usize, sectors: u64, serial: &str) -> Entry {
        Entry { slot, sectors, serial: serial.to_owned() }
    }

    #[test]
    fn an_index_is_read_as_it_was_written() {
        for entries in [vec![], vec![entry(0, 2, "root-1"), entry(19, u64::MAX, "01234567890123456789")]] {
            let written = format(&entries);
            assert_eq!(written.len(), BYTES);
            assert_eq!(parse(&written), Some(entries));
        }
    }

    #[test]
    fn rubbish_is_no_index() {
        for rubbish in
            ["", "\0", "sandboxer disks 2\n", "sandboxer disks 1\n1 2\n", "sandboxer disks 1\nx 2 a\n"]
        {
            assert_eq!(parse(rubbish.as_bytes()), None, "{rubbish:?}");
        }
        assert_eq!(parse(&[0xff; 10]), None);
    }
}
