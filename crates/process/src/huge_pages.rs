//! Huge pages for files in memory.

use std::{
    fs::File,
    io,
    os::fd::AsRawFd,
    ptr::{self, NonNull},
};

/// Bytes of a huge page of x86-64 and arm64.
pub const HUGE_PAGE: u64 = 2 << 20;
/// As in `linux/mman.h`; since Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;

/// Puts these parts of a file in memory, each of [`HUGE_PAGE`] bytes at one of its offsets, into huge pages. Its content stays. Returns how many
/// were: none on kernels without the call, fewer if memory is fragmented.
pub fn collapse(file: &File, offsets: &[u64]) -> io::Result<usize> {
    let mapping = Mapping::of(file)?;
    Ok(offsets.iter().filter(|&&offset| mapping.collapse(offset)).count())
}

/// A file's mapping, aligned like its offsets.
struct Mapping {
    reserved: NonNull<libc::c_void>,
    at: *mut libc::c_void,
    bytes: usize,
}

impl Mapping {
    fn of(file: &File) -> io::Result<Self> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let reserve = bytes + HUGE_PAGE as usize;
        let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses the place, which nothing else uses.
        let reserved = unsafe { libc::mmap(ptr::null_mut(), reserve, libc::PROT_NONE, nothing, -1, 0) };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let reserved = NonNull::new(reserved).ok_or(io::ErrorKind::OutOfMemory)?;
        let at = reserved.as_ptr().map_addr(|at| at.next_multiple_of(HUGE_PAGE as usize));
        let mapping = Self { reserved, at, bytes };
        let here = libc::MAP_PRIVATE | libc::MAP_FIXED;
        // SAFETY: it replaces a part of what was just reserved.
        let mapped = unsafe { libc::mmap(at, bytes, libc::PROT_READ, here, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(mapping)
    }

    fn collapse(&self, offset: u64) -> bool {
        let offset = offset as usize;
        let inside = offset.is_multiple_of(HUGE_PAGE as usize) && offset + HUGE_PAGE as usize <= self.bytes;
        // SAFETY: it is a part of this mapping, whose content does not change.
        inside && unsafe { libc::madvise(self.at.byte_add(offset), HUGE_PAGE as usize, MADV_COLLAPSE) } == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole reservation is this mapping's, and nothing has a reference into it.
        unsafe { libc::munmap(self.reserved.as_ptr(), self.bytes + HUGE_PAGE as usize) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn parts_get_huge_pages_and_keep_their_content() {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(4 * HUGE_PAGE).unwrap();
        let content: Vec<u8> = (0..HUGE_PAGE).map(|at| (at / 4096) as u8).collect();
        file.write_all_at(&content, 2 * HUGE_PAGE).unwrap();
        // Beside a part that is not aligned, and one that is beyond the end.
        let got = collapse(&file, &[2 * HUGE_PAGE, 4096, 4 * HUGE_PAGE]).unwrap();
        assert!(got <= 1);
        let mut found = vec![0; content.len()];
        file.read_exact_at(&mut found, 2 * HUGE_PAGE).unwrap();
        assert!(found == content);
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut version = release.split('.').map(|part| part.parse::<u32>().unwrap_or_default());
        if (version.next(), version.next()) >= (Some(6), Some(1)) {
            assert_eq!(got, 1, "Linux {release}");
        }
    }
}
