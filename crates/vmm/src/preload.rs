//! A library that is preloaded into a VMM that runs a copy of a template, so that the VMM can drop pages that the
//! guest has freed. `preload/discard.rs` explains what it does and why.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Write},
    os::fd::{AsRawFd, OwnedFd},
    sync::OnceLock,
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// The library's content, an ELF file.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/discard.so"));

/// Adds the library to the files that a VMM inherits. Returns the environment variable that loads it.
///
/// All VMMs have the same file, which no process can change. A static program ignores the variable.
pub fn add(inherited: &mut Vec<OwnedFd>) -> io::Result<(&'static str, OsString)> {
    static FILE: OnceLock<File> = OnceLock::new();
    let file = match FILE.get() {
        Some(file) => file,
        None => {
            let made = sealed()?;
            FILE.get_or_init(|| made)
        }
    };
    let file = file.try_clone()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    inherited.push(file.into());
    Ok(("LD_PRELOAD", path.into()))
}

fn sealed() -> io::Result<File> {
    let mut file = File::from(memfd_create("discard.so", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.write_all(LIBRARY)?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::{fs::FileExt, process::CommandExt},
        process::Command,
    };

    use rustix::{
        fs::{FallocateFlags, fallocate},
        io::{FdFlags, fcntl_setfd},
    };

    use super::*;

    const PAGE: u64 = 4096;

    /// Punches a hole into the first page of `file` with a program of the distribution. Returns whether that
    /// succeeded.
    fn punch(file: &File, preloaded: bool, more: &[&str]) -> bool {
        let mut inherited = vec![file.try_clone().unwrap().into()];
        let variable = add(&mut inherited).unwrap();
        let mut command = Command::new("fallocate");
        command.args(more).args(["--offset", "0", "--length", "4096"]);
        command.arg(format!("/proc/self/fd/{}", inherited[0].as_raw_fd()));
        if preloaded {
            command.envs([variable]);
        }
        // SAFETY: the closure only makes system calls.
        unsafe {
            command
                .pre_exec(move || inherited.iter().try_for_each(|fd| Ok(fcntl_setfd(fd, FdFlags::empty())?)));
        }
        command.output().expect("util-linux is installed").status.success()
    }

    fn memory(sealed: bool) -> File {
        let file =
            File::from(memfd_create("memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
        file.write_all_at(&[7; 2 * PAGE as usize], 0).unwrap();
        if sealed {
            fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW).unwrap();
        }
        file
    }

    fn first_byte(file: &File) -> u8 {
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        byte[0]
    }

    #[test]
    fn a_hole_in_sealed_memory_is_no_error_and_no_hole() {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(
            fallocate(memory(true), hole, 0, PAGE),
            Err(rustix::io::Errno::PERM),
            "the kernel lets it"
        );
        assert!(!punch(&memory(true), false, &["--punch-hole"]), "this program tells no errors");
        let shared = memory(true);
        assert!(punch(&shared, true, &["--punch-hole"]));
        assert_eq!(first_byte(&shared), 7, "others lost a page");
    }

    #[test]
    fn other_calls_are_the_kernels() {
        let own = memory(false);
        assert!(punch(&own, true, &["--punch-hole"]));
        assert_eq!(first_byte(&own), 0, "there is no hole");
        assert!(!punch(&memory(true), true, &["--zero-range"]), "zeroes that were not written");
    }

    #[test]
    fn nobody_can_change_the_library() {
        let mut inherited = Vec::new();
        add(&mut inherited).unwrap();
        add(&mut inherited).unwrap();
        let file = File::from(inherited.remove(0));
        assert_eq!(file.write_at(b"x", 0).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(file.set_len(0).is_err());
    }
}
