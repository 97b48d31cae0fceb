//! What PID 1 does before anything else can work: a root of its own, file systems, control groups, loopback.

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

use crate::{cgroup, network};

/// The new root is mounted here in the initramfs, for a moment.
const NEW_ROOT: &str = "/root.new";

/// The agent in the initramfs, and in the new root.
const FIRST_PROGRAM: &str = "/init";
const PROGRAM: &CStr = c"/agent";

/// Whether reading the kernel's log takes CAP_SYSLOG.
const DMESG_RESTRICT: &str = "/proc/sys/kernel/dmesg_restrict";

/// A directory with nothing in it.
pub const EMPTY: &str = "/var/empty";

/// Why the guest can't be made ready.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// A mount failed.
    #[error("cannot mount {fstype} on {path}")]
    Mount {
        /// Where.
        path: &'static str,
        /// What.
        fstype: &'static str,
        /// Why.
        source: nix::Error,
    },
    /// A directory, file or device could not be made or written.
    #[error("cannot {attempt} {}", path.display())]
    File {
        /// "create", "write", …
        attempt: &'static str,
        /// Of what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The agent could not go on from the new root.
    #[error("cannot move the agent out of the initramfs")]
    Program(#[source] io::Error),
    /// The initramfs could not be left.
    #[error("cannot leave the initramfs")]
    NewRoot(#[source] nix::Error),
    /// Loopback stays down.
    #[error("cannot bring the loopback interface up")]
    Loopback(#[source] io::Error),
}

struct Mount {
    path: &'static str,
    fstype: &'static str,
    flags: MsFlags,
    data: &'static str,
}

/// In this order: later ones lie in earlier ones.
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

/// Moves from the initramfs to a tmpfs, and answers only there, in a new program of this process.
///
/// The initramfs root has no parent mount, so `pivot_root` inside a container made below it fails with EINVAL. And a
/// tmpfs can hold the program in huge pages, which each of the processes that a container's making forks maps in three
/// faults, where it took dozens and unmapped each small page at its end.
pub fn settle() -> Result<(), InitError> {
    let program = OsStr::from_bytes(PROGRAM.to_bytes());
    if env::args_os().next().is_some_and(|name| name == program) {
        return Ok(());
    }
    create_dir(NEW_ROOT)?;
    mount(Some("tmpfs"), NEW_ROOT, Some("tmpfs"), MsFlags::empty(), Some("mode=0755,huge=within_size"))
        .map_err(|source| InitError::Mount { path: NEW_ROOT, fstype: "tmpfs", source })?;
    chdir(NEW_ROOT).map_err(InitError::NewRoot)?;
    move_program(Path::new("agent")).map_err(InitError::Program)?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>).map_err(InitError::NewRoot)?;
    chroot(".").map_err(InitError::NewRoot)?;
    let Err(error) = execv(PROGRAM, &[PROGRAM]);
    Err(InitError::Program(error.into()))
}

fn move_program(to: &Path) -> io::Result<()> {
    let mut from = fs::File::open(FIRST_PROGRAM)?;
    let mut program = fs::File::options().write(true).create_new(true).mode(0o700).open(to)?;
    // Ahead of its content: what lies within a file's size is put into huge pages.
    program.set_len(from.metadata()?.len())?;
    io::copy(&mut from, &mut program)?;
    fs::remove_file(FIRST_PROGRAM)
}

/// Makes the guest ready to run containers.
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

/// Keeps the kernel's log from containers without CAP_SYSLOG: it tells of the other containers, and in a VM of the pool
/// of what was done before the pod.
fn hide_kernel_log() -> Result<(), InitError> {
    fs::write(DMESG_RESTRICT, "1").map_err(|source| InitError::File {
        attempt: "write",
        path: DMESG_RESTRICT.into(),
        source,
    })
}

/// The kernel opens no console for init when the initramfs holds no `/dev/console`.
fn open_console() {
    let Ok(console) = fs::OpenOptions::new().read(true).write(true).open("/dev/console") else {
        return;
    };
    // Whatever fails here fails silently: there is nobody to tell.
    let _ = rustix::stdio::dup2_stdin(&console);
    let _ = rustix::stdio::dup2_stdout(&console);
    let _ = rustix::stdio::dup2_stderr(&console);
}
