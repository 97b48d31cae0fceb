//! Set-up of the guest by PID 1: a root of its own, file systems, control groups, loopback.

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

/// Temporary mount point of the new root in the initramfs.
const NEW_ROOT: &str = "/root.new";

/// Path of the agent in the initramfs, and in the new root.
const FIRST_PROGRAM: &str = "/init";
const PROGRAM: &CStr = c"/agent";

/// Sysctl: reading the kernel's log needs CAP_SYSLOG.
const DMESG_RESTRICT: &str = "/proc/sys/kernel/dmesg_restrict";
/// Sysctl: which messages the kernel prints on the console.
const PRINTED: &str = "/proc/sys/kernel/printk";
/// Sysctl: how much the kernel compacts memory before a huge page is requested.
const COMPACTION: &str = "/proc/sys/vm/compaction_proactiveness";

/// Parameter of the kernel: the smallest free block that is reported to the host, as a power of two of pages.
const REPORTING_ORDER: &str = "/sys/module/page_reporting/parameters/page_reporting_order";
/// 128 KiB. Of 100 MiB that were freed, the kernel's choice (2 MiB) left 12 with the guest.
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
        /// Why.
        source: nix::Error,
    },
    /// A directory, file or device could not be created or written.
    #[error("cannot {attempt} {}", path.display())]
    File {
        /// "create", "write", …
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
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

/// In this order: later ones are mounted inside earlier ones.
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

/// Moves from the initramfs to a tmpfs. The initramfs root has no parent mount, so `pivot_root` inside a container below it fails with
/// EINVAL.
///
/// In a template the program moves too and is executed again: this returns only in the new program. A tmpfs can hold it in huge pages:
/// each process that is forked to create a container then maps it in three page faults instead of dozens, and unmaps it as fast. A VM
/// that boots for one pod would pay more for the copy than its containers gain.
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
    // Set before the content is copied: only pages within the file's size become huge pages.
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

/// Hides the kernel's log from containers without CAP_SYSLOG: it contains messages about other containers,
/// and in a VM of the pool about the time before the pod.
fn hide_kernel_log() -> Result<(), InitError> {
    set(DMESG_RESTRICT, "1")
}

/// Lets the kernel print errors on the console, which it did not while it booted.
fn print_errors() -> Result<(), InitError> {
    const ERRORS: &str = "4";
    set(PRINTED, ERRORS)
}

/// Ends compaction ahead of requests: for that the kernel wakes twice a second, which was 30 of the 42 timer interrupts that
/// an idle guest had in ten seconds. A request for a huge page still compacts.
fn compact_on_request() -> Result<(), InitError> {
    set_if_known(COMPACTION, "0")
}

/// Lets the kernel report also small blocks of free memory to the host. It cannot be done on its command line: the balloon's
/// driver sets it when it finds its device.
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
    // A failure here has no place to be reported.
    let _ = rustix::stdio::dup2_stdin(&console);
    let _ = rustix::stdio::dup2_stdout(&console);
    let _ = rustix::stdio::dup2_stderr(&console);
}
