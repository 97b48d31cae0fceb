//! Sparse files: guest memory is read page by page, and empty pages are skipped.

use std::{collections::BTreeMap, fs::File, io, os::unix::fs::FileExt};

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, memfd_create, seek};
use sha2::{Digest, Sha256};

use sandboxer_base::digest::hex;
use sandboxer_process::huge_pages::{HUGE_PAGE, collapse};

/// Page size, bytes.
pub const PAGE: usize = 4096;
/// Minimum number of non-empty pages for which a huge page is used, so that it takes at most a third more memory.
const MOSTLY: usize = 384;
/// Number of bytes read at once.
const CHUNK: usize = 64 * PAGE;

/// The length and content hash of a file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checksum {
    /// Length of the file, bytes, including holes.
    pub bytes: u64,
    /// Bytes in non-empty pages.
    pub stored: u64,
    /// SHA-256, hex, of each non-empty page, preceded by its offset (u64, big-endian).
    pub sha256: String,
}

/// Computes a file's checksum.
pub fn checksum(file: &File) -> io::Result<Checksum> {
    read(file, |_, _| Ok(()))
}

/// Copies a file into sealed memory, which no process can change. Parts that are mostly full are in huge pages: KVM
/// maps such a part as a whole while the guest only reads it, as with the code of its kernel.
pub fn seal(file: &File, name: &str) -> io::Result<(File, Checksum)> {
    let copy = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    copy.set_len(file.metadata()?.len())?;
    let mut pages: BTreeMap<u64, usize> = BTreeMap::new();
    let checksum = read(file, |page, offset| {
        *pages.entry(offset / HUGE_PAGE * HUGE_PAGE).or_default() += 1;
        copy.write_all_at(page, offset)
    })?;
    pages.retain(|_, count| *count >= MOSTLY);
    // Without huge pages, each page is mapped by itself.
    if let Err(error) = collapse(&copy, &pages.into_keys().collect::<Vec<_>>()) {
        tracing::debug!(%error, file = name, "no huge pages for a template");
    }
    fcntl_add_seals(&copy, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok((copy, checksum))
}

/// Calls `each` for each non-empty page, with its offset. Returns the file's checksum.
pub fn read(file: &File, mut each: impl FnMut(&[u8], u64) -> io::Result<()>) -> io::Result<Checksum> {
    let bytes = file.metadata()?.len();
    let (mut hash, mut stored, mut chunk) = (Sha256::new(), 0, vec![0; CHUNK]);
    let mut at = 0;
    while let Some(data) = next_data(file, at)? {
        // Pages are counted from the file's beginning, wherever the file system reports data.
        at = data / PAGE as u64 * PAGE as u64;
        let count = fill(file, &mut chunk, at)?;
        if count == 0 {
            break;
        }
        for page in chunk[..count].chunks(PAGE) {
            if page.iter().any(|&byte| byte != 0) {
                hash.update(at.to_be_bytes());
                hash.update(page);
                each(page, at)?;
                stored += page.len() as u64;
            }
            at += page.len() as u64;
        }
    }
    Ok(Checksum { bytes, stored, sha256: hex(&hash.finalize()) })
}

/// Returns the offset of the first data at or after `at`.
fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(at)) {
        Ok(data) => Ok(Some(data)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn fill(file: &File, chunk: &mut [u8], at: u64) -> io::Result<usize> {
    let mut count = 0;
    while count < chunk.len() {
        match file.read_at(&mut chunk[count..], at + count as u64)? {
            0 => break,
            read => count += read,
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn sparse() -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all(b"first page").unwrap();
        file.write_at(b"across", (10 << 20) - 3).unwrap();
        file.write_at(b"end", (64 << 20) - 3).unwrap();
        // Written but empty: the same as a hole.
        file.write_at(&[0; 3 * PAGE], 5 << 20).unwrap();
        file
    }

    #[test]
    fn a_copy_is_the_same_and_cannot_be_changed() {
        let file = sparse();
        let (copy, taken) = seal(&file, "test").unwrap();
        assert_eq!(taken, checksum(&file).unwrap());
        assert_eq!(taken, checksum(&copy).unwrap());
        assert_eq!((taken.bytes, taken.stored), (64 << 20, 4 * PAGE as u64));
        assert_eq!(copy.write_at(b"x", 0).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(copy.set_len(0).is_err());
    }

    #[test]
    fn any_bit_and_any_place_counts() {
        let (file, before) = (sparse(), checksum(&sparse()).unwrap());
        for (byte, at) in [(b"F", 0), (b"x", 20 << 20), (b"x", (64 << 20) - 1)] {
            let mut old = [0];
            file.read_exact_at(&mut old, at).unwrap();
            file.write_at(byte, at).unwrap();
            assert_ne!(checksum(&file).unwrap().sha256, before.sha256);
            file.write_at(&old, at).unwrap();
            assert_eq!(checksum(&file).unwrap(), before);
        }
        // The same page at another offset is different content.
        file.write_at(&[0; 10], 0).unwrap();
        file.write_at(b"first page", PAGE as u64).unwrap();
        assert_ne!(checksum(&file).unwrap().sha256, before.sha256);
    }
}
