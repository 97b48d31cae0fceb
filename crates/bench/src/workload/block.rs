//! A block device for a tool: a loop device over a nameless file. The kernel removes both with their last user, so
//! nothing remains, even if the probe is killed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Control device of the kernel's loop devices.
const CONTROL: &str = "/dev/loop-control";
/// Attempts to get a free device: another program may take it first.
const ATTEMPTS: usize = 16;
/// The kernel's LO_FLAGS_AUTOCLEAR: the last user's end removes the device.
const AUTOCLEAR: u32 = 4;
/// The kernel's LO_FLAGS_DIRECT_IO: requests bypass the host's cache of the file.
const DIRECT_IO: u32 = 16;
/// Number of bytes written at once.
const CHUNK: usize = 1 << 20;

/// `struct loop_info64` from linux/loop.h.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` from linux/loop.h.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

mod calls {
    use super::Config;
    nix::ioctl_none_bad!(get_free, 0x4C82);
    nix::ioctl_write_ptr_bad!(configure, 0x4C0A, Config);
}

/// A loop device. Dropping it removes the device once no pod uses it.
#[derive(Debug)]
pub struct BlockDevice {
    node: PathBuf,
    direct: bool,
    // The only open descriptor besides the pods'.
    _open: File,
}

impl BlockDevice {
    /// Creates a device of this size whose data are in a file in `parent`. Writes the whole file, so that no read hits
    /// a hole.
    pub fn make(parent: &Path, size: u64) -> io::Result<Self> {
        let file = filled(parent, size)?;
        let control = named(CONTROL, OpenOptions::new().read(true).write(true).open(CONTROL))?;
        for _ in 0..ATTEMPTS {
            // SAFETY: the call takes no pointer; the descriptor is open.
            let number = unsafe { calls::get_free(control.as_raw_fd()) }.map_err(io::Error::from)?;
            let node = PathBuf::from(format!("/dev/loop{number}"));
            let device = OpenOptions::new().read(true).write(true).open(&node);
            let device = named(&node.display().to_string(), device)?;
            match attach(&device, &file, DIRECT_IO) {
                Err(Errno::EBUSY) => {}
                // The file system does not support direct I/O.
                Err(Errno::EINVAL) => match attach(&device, &file, 0) {
                    Err(Errno::EBUSY) => {}
                    attached => {
                        attached?;
                        return Ok(Self { node, direct: false, _open: device });
                    }
                },
                attached => {
                    attached?;
                    return Ok(Self { node, direct: true, _open: device });
                }
            }
        }
        Err(io::Error::other("no loop device stays free: other programs take each one first"))
    }

    /// Returns the path of the device node on the host.
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// Returns whether requests bypass the host's cache of its file.
    pub const fn is_direct(&self) -> bool {
        self.direct
    }
}

fn named<T>(path: &str, opened: io::Result<T>) -> io::Result<T> {
    opened.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("{path}: {error}; block devices need root and the kernel's loop module"),
        )
    })
}

/// Returns a nameless file with data that no device can compress.
fn filled(parent: &Path, size: u64) -> io::Result<File> {
    let mut file = tempfile::tempfile_in(parent)?;
    let (mut random, mut chunk) = (SmallRng::seed_from_u64(0xb10c), vec![0; CHUNK]);
    let mut left = size;
    while left > 0 {
        random.fill_bytes(&mut chunk);
        let part = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        file.write_all(&chunk[..part])?;
        left -= part as u64;
    }
    file.sync_all()?;
    Ok(file)
}

fn attach(device: &File, file: &File, more: u32) -> Result<(), Errno> {
    let mut file_name = [0; 64];
    let label = b"sandboxer-workload";
    file_name[..label.len()].copy_from_slice(label);
    let info = Info {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: AUTOCLEAR | more,
        file_name,
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
    let config = Config { fd: file.as_raw_fd().unsigned_abs(), block_size: 0, info, reserved: [0; 8] };
    // SAFETY: the kernel only reads `config`, which has the layout of linux/loop.h; both descriptors are open.
    unsafe { calls::configure(device.as_raw_fd(), &config) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_structures_have_these_sizes() {
        assert_eq!((size_of::<Info>(), size_of::<Config>()), (232, 304));
    }

    #[test]
    fn a_file_is_written_whole_and_has_no_name() {
        let parent = tempfile::tempdir().unwrap();
        let file = filled(parent.path(), CHUNK as u64 + 4096).unwrap();
        assert_eq!(file.metadata().unwrap().len(), CHUNK as u64 + 4096);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_device_has_its_size_and_ends_with_its_last_user() {
        let parent = tempfile::tempdir().unwrap();
        let device = BlockDevice::make(parent.path(), 8 << 20).unwrap();
        let name = device.node().file_name().unwrap().to_owned();
        let size = || std::fs::read_to_string(Path::new("/sys/block").join(&name).join("size")).unwrap();
        assert_eq!(size().trim(), "16384");
        // Stands for a pod.
        let user = File::open(device.node()).unwrap();
        drop(device);
        assert_eq!(size().trim(), "16384");
        drop(user);
        let begun = std::time::Instant::now();
        while size().trim() != "0" {
            assert!(begun.elapsed() < std::time::Duration::from_secs(20), "the loop device is still there");
        }
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    /// The directory of the child's device.
    const CHILD: &str = "BLOCK_DEVICE_TEST_DIR";

    #[test]
    fn a_user_that_is_killed_leaves_neither_device_nor_file() {
        use std::io::BufRead;
        let parent = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "workload::block::tests::child", "--nocapture"])
            .env(CHILD, parent.path())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = io::BufReader::new(child.stdout.take().unwrap()).lines();
        let node = lines
            .map(Result::unwrap)
            .find_map(|line| Some(line.split_once("device: ")?.1.to_owned()))
            .unwrap();
        let size = || std::fs::read_to_string(format!("/sys/block/{node}/size")).unwrap();
        assert_eq!(size().trim(), "16384");
        child.kill().unwrap();
        child.wait().unwrap();
        let begun = std::time::Instant::now();
        while size().trim() != "0" {
            assert!(begun.elapsed() < std::time::Duration::from_secs(20), "the loop device is still there");
        }
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    /// Runs in the child; does nothing without the variable.
    #[test]
    fn child() {
        let Some(parent) = std::env::var_os(CHILD) else { return };
        let device = BlockDevice::make(Path::new(&parent), 8 << 20).unwrap();
        println!("device: {}", device.node().file_name().unwrap().display());
        loop {
            std::thread::park();
        }
    }

    #[test]
    fn a_directory_that_is_missing_is_an_error() {
        assert!(BlockDevice::make(Path::new("/no/such"), 4096).is_err());
    }
}
