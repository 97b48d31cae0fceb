//! Huge pages for files in memory: [`collapse`] makes them from the kernel's ordinary free memory, [`Reserved`] takes
//! pages that an administrator has set aside.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    ptr::{self, NonNull},
};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::cgroup::Cgroup;

/// Size of a huge page of x86-64 and arm64, bytes.
pub const HUGE_PAGE: u64 = 2 << 20;
/// The value in `linux/mman.h`; since Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;

/// Directory in which the kernel describes its huge pages of this size.
pub const HUGE_PAGES_DIR: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// The reason why no huge pages can be reserved.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// The kernel has no huge pages of this size.
    #[error("this kernel has no huge pages of 2 MiB")]
    Unsupported(#[source] io::Error),
    /// Too few huge pages are free.
    #[error(
        "{needed} huge pages of 2 MiB are needed and {free} are free: raise {path:?}, or end pods that have huge pages"
    )]
    TooFew {
        /// Number of pages that are needed.
        needed: u64,
        /// Number of pages that are neither used nor reserved.
        free: u64,
        /// File that sets the number of pages.
        path: PathBuf,
    },
    /// A control group forbids the huge pages.
    #[error(
        "{needed_mib} MiB in huge pages of 2 MiB are needed and {path:?} allows {allowed_mib} more: raise the limits hugepages-2Mi \
         of the pod's containers"
    )]
    Limited {
        /// Size that is needed, MiB.
        needed_mib: u64,
        /// Size that the group still allows, MiB.
        allowed_mib: u64,
        /// The file with the group's limit.
        path: PathBuf,
    },
    /// The kernel refused to reserve them.
    #[error("cannot reserve huge pages of 2 MiB")]
    Refused(#[source] io::Error),
}

/// A file in memory whose huge pages are all reserved. A process that maps it shared gets them at the first access,
/// from the NUMA node of its CPU while that has free ones, and charged to its own control group.
#[derive(Debug)]
pub struct Reserved(OwnedFd);

impl Reserved {
    /// Reserves `bytes`, a multiple of [`HUGE_PAGE`], for a process in `cgroup`.
    pub fn new(bytes: u64, cgroup: Option<&Cgroup>) -> Result<Self, ReserveError> {
        // Beyond its group's limit, a process is killed when it touches the memory.
        if let Some((path, allowed)) = cgroup.and_then(Cgroup::huge_pages_allowed)
            && allowed < bytes
        {
            return Err(ReserveError::Limited { needed_mib: bytes >> 20, allowed_mib: allowed >> 20, path });
        }
        let huge = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = memfd_create("memory", huge).map_err(|error| ReserveError::Unsupported(error.into()))?;
        rustix::fs::ftruncate(&file, bytes).map_err(|error| ReserveError::Refused(error.into()))?;
        let length =
            usize::try_from(bytes).map_err(|error| ReserveError::Refused(io::Error::other(error)))?;
        // The kernel reserves for the file, not for the mapping: what is mapped shared stays reserved until the file
        // is closed.
        // SAFETY: the kernel chooses the place, and nothing gets a reference to it.
        let mapped = unsafe {
            libc::mmap(ptr::null_mut(), length, libc::PROT_NONE, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if mapped == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::ENOMEM) => too_few(bytes, Path::new(HUGE_PAGES_DIR)),
                _ => ReserveError::Refused(error),
            });
        }
        // SAFETY: this is the whole mapping that was just made.
        unsafe { libc::munmap(mapped, length) };
        Ok(Self(file))
    }

    /// Returns the file.
    pub fn into_file(self) -> OwnedFd {
        self.0
    }
}

fn too_few(bytes: u64, dir: &Path) -> ReserveError {
    let read = |name: &str| {
        let text = fs::read_to_string(dir.join(name)).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or_default()
    };
    let free = read("free_hugepages").saturating_sub(read("resv_hugepages"));
    ReserveError::TooFew { needed: bytes / HUGE_PAGE, free, path: dir.join("nr_hugepages") }
}

/// Puts parts of a file in memory into huge pages: [`HUGE_PAGE`] bytes at each of `offsets`. The content stays.
/// Returns the number of parts that were moved: none on kernels without the call, fewer if memory is fragmented.
pub fn collapse(file: &File, offsets: &[u64]) -> io::Result<usize> {
    let mapping = Mapping::map(file)?;
    Ok(offsets.iter().filter(|&&offset| mapping.collapse(offset)).count())
}

/// A mapping of a file, aligned like the file's offsets.
struct Mapping {
    reserved: NonNull<libc::c_void>,
    at: *mut libc::c_void,
    bytes: usize,
}

impl Mapping {
    fn map(file: &File) -> io::Result<Self> {
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
        // SAFETY: this replaces a part of what was just reserved.
        let mapped = unsafe { libc::mmap(at, bytes, libc::PROT_READ, here, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(mapping)
    }

    fn collapse(&self, offset: u64) -> bool {
        let offset = offset as usize;
        let inside = offset.is_multiple_of(HUGE_PAGE as usize) && offset + HUGE_PAGE as usize <= self.bytes;
        // SAFETY: the range is a part of this mapping, whose content does not change.
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

    use super::*;
    use crate::cgroup::Hierarchies;

    #[test]
    fn more_huge_pages_than_there_are_cannot_be_reserved_and_the_error_says_what_to_do() {
        // No host has a PiB.
        let error = Reserved::new(1 << 50, None).unwrap_err();
        if let ReserveError::Unsupported(error) = &error {
            return println!("not tested: {error}");
        }
        let text = error.to_string();
        assert!(text.starts_with("536870912 huge pages of 2 MiB are needed and "), "{text}");
        assert!(text.contains("hugepages-2048kB/nr_hugepages"), "{text}");
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("free_hugepages"), "10\n").unwrap();
        fs::write(dir.path().join("resv_hugepages"), "7\n").unwrap();
        let ReserveError::TooFew { needed: 4, free: 3, .. } = too_few(4 * HUGE_PAGE, dir.path()) else {
            panic!("{:?}", too_few(4 * HUGE_PAGE, dir.path()));
        };
    }

    #[test]
    fn a_control_group_that_allows_too_few_is_named() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("hugetlb.2MB.max"), "4194304\n").unwrap();
        fs::write(root.path().join("hugetlb.2MB.current"), "2097152\n").unwrap();
        let group = Hierarchies::unified(root.path()).for_pod("kubepods", &"p".parse().unwrap()).unwrap();
        let error = Reserved::new(4 << 20, Some(&group)).unwrap_err().to_string();
        let expected = format!(
            "4 MiB in huge pages of 2 MiB are needed and {:?} allows 2 more: ",
            root.path().join("hugetlb.2MB.max")
        );
        assert!(error.starts_with(&expected), "{error}");
    }

    #[test]
    fn parts_get_huge_pages_and_keep_their_content() {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(4 * HUGE_PAGE).unwrap();
        let content: Vec<u8> = (0..HUGE_PAGE).map(|at| (at / 4096) as u8).collect();
        file.write_all_at(&content, 2 * HUGE_PAGE).unwrap();
        // In addition to a part that is not aligned, and one that is beyond the end.
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
