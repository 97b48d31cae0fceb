//! Sets the guest up as PID 1: its own root, file systems, control groups, loopback.

use std::{
    env,
    ffi::{CStr, OsStr},
    fs, io,
    os::unix::{ffi::OsStrExt as _, fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::{
    mount::{MsFlags, mount},
    unistd::{chdir, chroot, execv},
};

use sandboxer_protocol::boot::TEMPLATE;

use crate::{cgroup, network};

/// The temporary mount point of the new root in the initramfs.
const NEW_ROOT: &str = "/root.new";

/// The path of the agent in the initramfs, and in the new root.
const FIRST_PROGRAM: &str = "/init";
const PROGRAM: &CStr = c"/agent";

/// The sysctl that makes CAP_SYSLOG necessary for reading the kernel's log.
const DMESG_RESTRICT: &str = "/proc/sys/kernel/dmesg_restrict";
/// The sysctl that says which messages the kernel prints on the console.
const PRINTED: &str = "/proc/sys/kernel/printk";
/// The sysctl that says how much the kernel compacts memory before a huge page is requested.
const COMPACTION: &str = "/proc/sys/vm/compaction_proactiveness";

/// The kernel's parameter for the smallest free block that is reported to the host, as a power of two of pages.
const REPORTING_ORDER: &str = "/sys/module/page_reporting/parameters/page_reporting_order";
/// The order of 128 KiB. Of 100 MiB that were freed, the kernel's choice (2 MiB) left 12 MiB with the guest.
const REPORTED: &str = "5";

/// An empty directory.
pub const EMPTY: &str = "/var/empty";

/// Why the guest cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// A mount failed.
    #[error("cannot mount {fstype} on {path}")]
    Mount {
        /// The mount point.
        path: &'static str,
        /// The file system type.
        fstype: &'static str,
        /// The system's error.
        source: nix::Error,
    },
    /// A directory, file or device could not be created or written.
    #[error("cannot {attempt} {}", path.display())]
    File {
        /// The failed operation: "create", "write", ….
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The agent could not be copied to or executed from the new root.
    #[error("cannot move the agent out of the initramfs")]
    Program(#[source] io::Error),
    /// The root could not be changed.
    #[error("cannot leave the initramfs")]
    NewRoot(#[source] nix::Error),
    /// The loopback interface could not be brought up.
    #[error("cannot bring the loopback interface up")]
    Loopback(#[source] io::Error),
}

struct Mount {
    path: &'static str,
    fstype: &'static str,
    flags: MsFlags,
    data: &'static str,
}

/// The mounts, in the order of mounting: later ones are inside earlier ones.
const MOUNTS: &[Mount] = &[
    Mount { path: "/proc", fstype: "proc", flags: nodev_noexec(), data: "" },
    Mount { path: "/sys", fstype: "sysfs", flags: nodev_noexec(), data: "" },
    Mount { path: "/dev", fstype: "devtmpfs", flags: MsFlags::MS_NOSUID, data: "mode=0755" },
    Mount {
        path: "/dev/pts",
        fstype: "devpts",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC),
        data: "gid=5,mode=0620,ptmxmode=0666",
    },
    Mount { path: "/dev/shm", fstype: "tmpfs", flags: nodev_noexec(), data: "mode=1777,size=64m" },
    Mount { path: "/dev/mqueue", fstype: "mqueue", flags: nodev_noexec(), data: "" },
    Mount { path: "/sys/fs/cgroup", fstype: "cgroup2", flags: nodev_noexec(), data: "" },
];

const fn nodev_noexec() -> MsFlags {
    MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC)
}

/// Moves from the initramfs to a tmpfs. The initramfs root has no parent mount, so `pivot_root` inside a container
/// below it fails with EINVAL.
///
/// In a template, the program moves too and is executed again: this function returns only in the new program. A tmpfs
/// can hold it in huge pages. Each process that is forked to create a container then maps it in three page faults
/// instead of dozens, and unmaps it as fast. A VM that boots for one pod would pay more for the copy than its
/// containers gain.
pub fn settle() -> Result<(), InitError> {
    let program = OsStr::from_bytes(PROGRAM.to_bytes());
    if env::args_os().next().is_some_and(|name| name == program) {
        return Ok(());
    }
    create_dir(NEW_ROOT)?;
    mount(Some("tmpfs"), NEW_ROOT, Some("tmpfs"), MsFlags::empty(), Some("mode=0755,huge=within_size"))
        .map_err(|source| InitError::Mount { path: NEW_ROOT, fstype: "tmpfs", source })?;
    chdir(NEW_ROOT).map_err(InitError::NewRoot)?;
    let is_template = env::var_os(TEMPLATE).is_some();
    if is_template {
        move_program(Path::new("agent")).map_err(InitError::Program)?;
    }
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>).map_err(InitError::NewRoot)?;
    chroot(".").map_err(InitError::NewRoot)?;
    if !is_template {
        return Ok(());
    }
    let Err(error) = execv(PROGRAM, &[PROGRAM]);
    Err(InitError::Program(error.into()))
}

fn move_program(to: &Path) -> io::Result<()> {
    let mut from = fs::File::open(FIRST_PROGRAM)?;
    let mut program = fs::File::options().write(true).create_new(true).mode(0o700).open(to)?;
    // The length is set before the content is copied: only pages within the file's size become huge pages.
    program.set_len(from.metadata()?.len())?;
    io::copy(&mut from, &mut program)?;
    fs::remove_file(FIRST_PROGRAM)
}

/// Prepares the guest to run containers.
pub fn prepare() -> Result<(), InitError> {
    for Mount { path, fstype, flags, data } in MOUNTS {
        create_dir(path)?;
        mount(Some(*fstype), *path, Some(*fstype), *flags, Some(*data))
            .map_err(|source| InitError::Mount { path, fstype, source })?;
    }
    for dir in ["/run", "/tmp", "/etc", EMPTY] {
        create_dir(dir)?;
    }
    open_console();
    hide_kernel_log()?;
    print_errors()?;
    compact_on_request()?;
    report_small_blocks()?;
    cgroup::prepare().map_err(|(path, source)| InitError::File { attempt: "set up", path, source })?;
    network::loopback_up().map_err(InitError::Loopback)
}

fn create_dir(path: impl AsRef<Path>) -> Result<(), InitError> {
    let path = path.as_ref();
    fs::create_dir_all(path).map_err(|source| InitError::File {
        attempt: "create",
        path: path.to_owned(),
        source,
    })
}

/// Hides the kernel's log from containers without CAP_SYSLOG: it contains messages about other containers and, in a VM
/// of the pool, about the time before the pod.
fn hide_kernel_log() -> Result<(), InitError> {
    set(DMESG_RESTRICT, "1")
}

/// Makes the kernel print errors on the console, which it did not do while it booted.
fn print_errors() -> Result<(), InitError> {
    const ERRORS: &str = "4";
    set(PRINTED, ERRORS)
}

/// Turns off compaction ahead of requests. For it the kernel wakes twice a second, which caused 30 of the 42 timer
/// interrupts of an idle guest in ten seconds. A request for a huge page still compacts.
fn compact_on_request() -> Result<(), InitError> {
    set_if_known(COMPACTION, "0")
}

/// Makes the kernel report small blocks of free memory to the host, too. The kernel's command line cannot do this: the
/// balloon's driver sets the parameter when it finds its device.
fn report_small_blocks() -> Result<(), InitError> {
    set_if_known(REPORTING_ORDER, REPORTED)
}

/// Sets a parameter of the kernel, if this kernel has it.
fn set_if_known(path: &'static str, value: &str) -> Result<(), InitError> {
    match set(path, value) {
        Err(InitError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Sets a parameter of the kernel.
fn set(path: &'static str, value: &str) -> Result<(), InitError> {
    fs::write(path, value).map_err(|source| InitError::File { attempt: "write", path: path.into(), source })
}

/// Connects the standard streams to the console. The kernel opens none for init when the initramfs has no
/// `/dev/console`.
fn open_console() {
    let Ok(console) = fs::OpenOptions::new().read(true).write(true).open("/dev/console") else {
        return;
    };
    // A failure here cannot be reported anywhere.
    let _ = rustix::stdio::dup2_stdin(&console);
    let _ = rustix::stdio::dup2_stdout(&console);
    let _ = rustix::stdio::dup2_stderr(&console);
}
