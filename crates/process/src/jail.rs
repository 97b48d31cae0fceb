//! The jail of a VMM process, which can see and do only what its VM needs.
//!
//! A compromised VMM has: its own user, which owns nothing; no capability and no means to gain one; its own namespaces
//! without network and without other processes; a root of read-only programs, its kernel and its initramfs. The daemon
//! opens everything else for it: sockets, taps, disks and memory. A VMM that creates sockets and files itself gets a
//! small private directory in memory; see [`Jail::with_writable_dir`].
//!
//! ```text
//! namespaces ─▶ root ─▶ user ─▶ user namespace ─▶ no capability ─▶ filter of system calls ─▶ exec
//! └────── of the host's user namespace ──────┘
//! ```
//!
//! The user namespace comes last: the other namespaces stay the host's, so that a capability in the user namespace
//! gives no power over them.
//!
//! The jail is entered between fork and exec, so [`Jail::new`] makes all allocations before.
//!
//! A tool of the daemon that parses the files of tenants ([`Jail::of_tool`]) has the same jail with less in it. It has
//! one capability, to read files of all owners, which it holds only in its user namespace and not on the host.

mod all_ids;

use std::{
    ffi::{CStr, CString},
    fs, io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::MetadataExt},
    },
    path::{Path, PathBuf},
};

use caps::Capability;
use nix::{
    sched::CloneFlags,
    sys::wait::{WaitStatus, waitpid},
    unistd::Pid,
};
use seccompiler::{BpfProgram, apply_filter};

use crate::seccomp;

/// The first user of VMMs: above all UIDs in systemd.io's list, and below 2^31.
const FIRST_USER: u32 = 0x7000_0000;
/// Number of users of VMMs.
const USERS: u64 = 0x0fef_ffff;
/// The first user of tools, above those of VMMs.
const FIRST_TOOL: u32 = 0x7ff0_0000;
/// Number of users of tools.
const TOOLS: u64 = 0x000f_fffe;

/// New namespaces of a jailed process. The parent creates the PID namespace.
const NAMESPACES: CloneFlags = CloneFlags::CLONE_NEWNS
    .union(CloneFlags::CLONE_NEWIPC)
    .union(CloneFlags::CLONE_NEWUTS)
    .union(CloneFlags::CLONE_NEWNET)
    .union(CloneFlags::CLONE_NEWCGROUP);

/// Paths that programs and `#!/bin/sh` wrappers need to start. Missing ones are skipped.
const SYSTEM: [&str; 5] = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache"];
/// Devices without state.
const DEVICES: [&str; 2] = ["/dev/null", "/dev/urandom"];
/// The directory in a jail to which its VMM can write, if it has one.
pub const WRITABLE_DIR: &str = "/run";
/// The directory in [`WRITABLE_DIR`] for files that the VMM gets while it runs. The VMM cannot write to it.
pub const SHOWN: &str = "disks";
/// Mount options of a VMM's writable directory. Its size is bounded: the state of a frozen VM with many vCPUs has a few MB.
const WRITABLE_DIR_OPTIONS: &CStr = c"size=16m,nr_inodes=64,mode=1777";
/// The securebit that keeps capabilities when the user changes (`SECBIT_NO_SETUID_FIXUP`).
const STAY: libc::c_ulong = 1 << 2;
/// The layout of capability sets, two words each (`_LINUX_CAPABILITY_VERSION_3`).
const CAPABILITY_VERSION: u32 = 0x2008_0522;
/// The capability of tools: to read files of all owners.
const OF_TOOLS: Capability = Capability::CAP_DAC_READ_SEARCH;
/// The highest possible capability; kernels have fewer.
const LAST_CAPABILITY: libc::c_int = 63;

/// A jail, ready to be entered.
#[derive(Debug)]
pub struct Jail {
    /// Mount point of the new root: any directory, mounted on only in the jail's own namespace.
    root: CString,
    steps: Vec<Step>,
    user: u32,
    /// Whether this is the jail of a tool.
    is_tool: bool,
    /// User namespace of a tool, in which each owner is itself. `None`: the kernel refuses it, or this is the jail of
    /// a VMM, which creates its own.
    user_namespace: Option<OwnedFd>,
    groups: Vec<libc::gid_t>,
    /// ID mapping of the user namespace: one user and group, mapped to itself.
    ids: String,
    /// Whether the jail has a [`WRITABLE_DIR`].
    has_writable_dir: bool,
    /// An existing network namespace that replaces a new one.
    network: Option<OwnedFd>,
    filters: Vec<BpfProgram>,
}

/// A step of creating the root, run inside the jail.
#[derive(Debug)]
enum Step {
    Dir(CString),
    File(CString),
    Link { to: CString, at: CString },
    Bind { from: CString, at: CString, flags: libc::c_ulong },
}

/// Returns the user of the VM with this directory. The directory exists for the VM's lifetime, even when it is moved,
/// and its inode number is unique on its file system.
pub fn user_of(run_dir: &fs::Metadata) -> u32 {
    FIRST_USER + u32::try_from(run_dir.ino() % USERS).unwrap_or_default()
}

/// Returns whether `id` is the user of a VM.
pub fn is_user(id: u32) -> bool {
    id.checked_sub(FIRST_USER).is_some_and(|number| u64::from(number) < USERS)
}

impl Jail {
    /// Returns a jail for the VM with directory `run_dir`, which can read `readable` and use `devices`.
    pub fn new(run_dir: &Path, readable: &[&Path], devices: &[&Path]) -> io::Result<Self> {
        let user = user_of(&fs::metadata(run_dir)?);
        let ids = format!("{user} {user} 1");
        let mut jail = Self {
            root: text(run_dir)?,
            steps: Vec::new(),
            user,
            is_tool: false,
            user_namespace: None,
            groups: Vec::new(),
            ids,
            has_writable_dir: false,
            network: None,
            filters: seccomp::filters()?,
        };
        let read_only = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV;
        for path in SYSTEM.iter().map(Path::new).chain(readable.iter().copied()) {
            jail.show(path, read_only)?;
        }
        for path in DEVICES.iter().map(Path::new).chain(devices.iter().copied()) {
            jail.show(path, libc::MS_NOSUID | libc::MS_NOEXEC)?;
            // The VMM is a member of the devices' groups, such as the group of /dev/kvm.
            if let Ok(meta) = fs::metadata(path)
                && meta.gid() != 0
            {
                jail.groups.push(meta.gid());
            }
        }
        Ok(jail)
    }

    /// Returns a jail for a tool of the daemon that parses files of tenants. The tool may read files of all owners and
    /// nothing more. It has the system's programs, `program` and the mounts of [`Jail::bind`], but no `/proc`. `root`
    /// is any directory. While the directory `own` exists, no other tool has the same user.
    pub fn of_tool(root: &Path, program: &Path, own: &Path) -> io::Result<Self> {
        let mut jail = Self::new(root, &[program], &[])?;
        let number = fs::metadata(own)?.ino() % TOOLS;
        jail.user = FIRST_TOOL + u32::try_from(number).unwrap_or_default();
        jail.is_tool = true;
        jail.filters.extend(seccomp::filters_of_tool()?);
        jail.user_namespace = match all_ids::user_namespace() {
            Ok(namespace) => Some(namespace),
            // As for VMMs, the jail works without a user namespace.
            Err(error) if refuses_user_namespaces(&error) => None,
            Err(error) => return Err(error),
        };
        Ok(jail)
    }

    /// Mounts `from` in the jail at `at`, a name in its root.
    pub fn bind(&mut self, from: &Path, at: &str, writable: bool) -> io::Result<()> {
        let is_dir = fs::metadata(from)?.is_dir();
        let (from, at) = (text(from)?, text(Path::new(at))?);
        self.steps.push(if is_dir { Step::Dir(at.clone()) } else { Step::File(at.clone()) });
        let read_only = if writable { 0 } else { libc::MS_RDONLY };
        let flags = read_only | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
        self.steps.push(Step::Bind { from, at, flags });
        Ok(())
    }

    /// Returns the jail with a [`WRITABLE_DIR`] in it.
    pub fn with_writable_dir(mut self) -> Self {
        self.has_writable_dir = true;
        self
    }

    /// Returns the jail for a program that makes threads but no processes.
    pub fn alone(mut self) -> io::Result<Self> {
        self.filters.extend(seccomp::filters_alone()?);
        Ok(self)
    }

    /// Returns the jail with an existing network namespace, which has the VM's taps, in place of a new one.
    pub fn with_network(mut self, namespace: OwnedFd) -> Self {
        self.network = Some(namespace);
        self
    }

    /// Adds a symbolic link to `to`, at the name `name` in the directory `dir` of the jail's root.
    pub fn link(&mut self, to: &Path, (dir, name): (&str, &str)) -> io::Result<()> {
        self.steps.push(Step::Dir(text(Path::new(dir))?));
        self.steps.push(Step::Link { to: text(to)?, at: text(&Path::new(dir).join(name))? });
        Ok(())
    }

    /// Returns the user of the jail, which is also the number of its group.
    pub fn user(&self) -> u32 {
        self.user
    }

    /// Mounts the host's `path` at the same path and keeps symbolic links.
    fn show(&mut self, path: &Path, flags: libc::c_ulong) -> io::Result<()> {
        let Ok(meta) = fs::symlink_metadata(path) else { return Ok(()) };
        let at = path.strip_prefix("/").unwrap_or(path);
        let covered = |step: &Step| match step {
            Step::Bind { from, .. } => {
                path.starts_with(Path::new(std::ffi::OsStr::from_bytes(from.as_bytes())))
            }
            _ => false,
        };
        if self.steps.iter().any(covered) {
            return Ok(());
        }
        let parents: Vec<PathBuf> = at.ancestors().skip(1).map(Path::to_owned).collect();
        for dir in parents.iter().rev().filter(|dir| !dir.as_os_str().is_empty()) {
            self.steps.push(Step::Dir(text(dir)?));
        }
        let file_type = meta.file_type();
        if file_type.is_symlink() {
            let target = fs::read_link(path)?;
            self.steps.push(Step::Link { to: text(&target)?, at: text(at)? });
            return match path.parent() {
                Some(parent) => self.show(&parent.join(target), flags),
                None => Ok(()),
            };
        }
        let made = text(at)?;
        self.steps.push(if file_type.is_dir() { Step::Dir(made) } else { Step::File(made) });
        self.steps.push(Step::Bind { from: text(path)?, at: text(at)?, flags });
        Ok(())
    }

    /// Enters the jail, as PID 1 of a namespace that the parent created. Only makes system calls, as required between
    /// fork and exec.
    pub fn enter(&self) -> io::Result<()> {
        // SAFETY: every pointer is to a string of this jail or a literal, which outlive the call. The calls change
        // only this process, which has one thread and only executes the VMM afterwards.
        unsafe {
            match &self.network {
                None => done(libc::unshare(NAMESPACES.bits()))?,
                Some(network) => {
                    done(libc::unshare(NAMESPACES.difference(CloneFlags::CLONE_NEWNET).bits()))?;
                    done(libc::setns(network.as_raw_fd(), libc::CLONE_NEWNET))?;
                }
            }
            let nothing = std::ptr::null();
            let private = libc::MS_REC | libc::MS_PRIVATE;
            done(libc::mount(nothing, c"/".as_ptr(), nothing, private, std::ptr::null()))?;
            let root_flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
            let size = c"size=1m,mode=0755".as_ptr().cast();
            done(libc::mount(c"jail".as_ptr(), self.root.as_ptr(), c"tmpfs".as_ptr(), root_flags, size))?;
            done(libc::chdir(self.root.as_ptr()))?;
            // The daemon's umask may be narrow, but the files here are for another user.
            libc::umask(0o022);
            for step in &self.steps {
                step.take()?;
            }
            if self.has_writable_dir {
                mount_writable_dir()?;
            }
            if !self.is_tool {
                mount_proc()?;
            }
            done(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) as libc::c_int)?;
            done(libc::umount2(c".".as_ptr(), libc::MNT_DETACH))?;
            let seal = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | root_flags;
            done(libc::mount(nothing, c"/".as_ptr(), nothing, seal, std::ptr::null()))?;
            done(libc::chdir(c"/".as_ptr()))?;
            set_groups(&self.groups)?;
            if self.is_tool {
                self.become_tool()?;
                return self.apply_filters();
            }
            // Some kernels permit the following only to root.
            done(libc::prctl(libc::PR_SET_SECUREBITS, STAY, 0, 0, 0))?;
            set_user(self.user)?;
            match done(libc::unshare(libc::CLONE_NEWUSER)) {
                Ok(()) => self.map_ids()?,
                // The jail works without a user namespace, too; `doctor` warns about it.
                Err(error) if refuses_user_namespaces(&error) => {}
                Err(error) => return Err(error),
            }
            drop_from_bound(u64::MAX)?;
            done(libc::prctl(libc::PR_SET_SECUREBITS, 0, 0, 0, 0))?;
            let (header, none) = ([CAPABILITY_VERSION, 0], [0_u32; 6]);
            done(libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) as libc::c_int)?;
            done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        }
        self.apply_filters()
    }

    /// Changes to the user of a tool, with one capability that remains when its program is executed.
    fn become_tool(&self) -> io::Result<()> {
        let bit = OF_TOOLS.bitmask();
        let word = bit as u32;
        let (header, sets) = ([CAPABILITY_VERSION, 0], [word, word, word, 0, 0, 0]);
        // SAFETY: as in `Jail::enter`.
        unsafe {
            if let Some(namespace) = &self.user_namespace {
                // From here on no capability is valid on the host.
                done(libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWUSER))?;
            }
            done(libc::prctl(libc::PR_SET_SECUREBITS, STAY, 0, 0, 0))?;
            set_user(self.user)?;
            drop_from_bound(!bit)?;
            done(libc::prctl(libc::PR_SET_SECUREBITS, 0, 0, 0, 0))?;
            done(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) as libc::c_int)?;
            let raise = libc::PR_CAP_AMBIENT_RAISE;
            done(libc::prctl(libc::PR_CAP_AMBIENT, raise, libc::c_ulong::from(OF_TOOLS.index()), 0, 0))?;
            done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        }
    }

    fn apply_filters(&self) -> io::Result<()> {
        // A failure only returns a number: nothing is allocated.
        self.filters
            .iter()
            .try_for_each(|filter| apply_filter(filter).map_err(|_| io::Error::last_os_error()))
    }

    /// Enters a new user namespace with one user and one group, and forbids further ones below it.
    fn map_ids(&self) -> io::Result<()> {
        // SAFETY: this changes only this process. It makes the changed user the owner of the files in /proc again.
        done(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) })?;
        write(c"/proc/self/setgroups", b"deny")?;
        write(c"/proc/self/uid_map", self.ids.as_bytes())?;
        write(c"/proc/self/gid_map", self.ids.as_bytes())?;
        write(c"/proc/sys/user/max_user_namespaces", b"0")
    }
}

/// Drops these capabilities, a bit mask, from the bounding set.
fn drop_from_bound(capabilities: u64) -> io::Result<()> {
    for capability in (0..=LAST_CAPABILITY).filter(|capability| capabilities >> capability & 1 == 1) {
        // SAFETY: this changes only this thread.
        match done(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) }) {
            // The kernel has no further capability.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            dropped => dropped?,
        }
    }
    Ok(())
}

/// Mounts the processes of the PID namespace at `/proc`.
fn mount_proc() -> io::Result<()> {
    let (name, flags) = (c"proc".as_ptr(), libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC);
    // SAFETY: as in `Jail::enter`.
    unsafe {
        done(libc::mkdir(name, 0o555))?;
        done(libc::mount(name, name, name, flags, std::ptr::null()))
    }
}

/// Creates [`WRITABLE_DIR`] in the working directory. The VMM can neither remove nor replace other users' files there.
fn mount_writable_dir() -> io::Result<()> {
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: as in `Jail::enter`.
    unsafe {
        done(libc::mkdir(c"run".as_ptr(), 0o755))?;
        let options = WRITABLE_DIR_OPTIONS.as_ptr().cast();
        done(libc::mount(c"room".as_ptr(), c"run".as_ptr(), c"tmpfs".as_ptr(), flags, options))?;
        done(libc::mkdir(c"run/disks".as_ptr(), 0o755))
    }
}

/// Returns whether the error means that the kernel does not permit user namespaces.
fn refuses_user_namespaces(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSPC | libc::EPERM | libc::EACCES))
}

/// Checks in a temporary process that the daemon's processes can have user namespaces. Returns the kernel's error if
/// not.
pub fn try_user_namespace() -> io::Result<()> {
    // SAFETY: the child makes two system calls and exits; it allocates nothing and takes no lock.
    let child = unsafe {
        match libc::fork() {
            0 => {
                let failed = done(libc::unshare(libc::CLONE_NEWUSER)).err();
                libc::_exit(failed.and_then(|error| error.raw_os_error()).unwrap_or_default())
            }
            child => child,
        }
    };
    done(child)?;
    match waitpid(Pid::from_raw(child), None)? {
        WaitStatus::Exited(_, 0) => Ok(()),
        WaitStatus::Exited(_, errno) => Err(io::Error::from_raw_os_error(errno)),
        other => Err(io::Error::other(format!("the test process ended with {other:?}"))),
    }
}

impl Step {
    /// Runs the step in the working directory. Existing directories are no error.
    fn take(&self) -> io::Result<()> {
        let nothing = std::ptr::null();
        // SAFETY: as in `Jail::enter`.
        unsafe {
            match self {
                Self::Dir(at) => match done(libc::mkdir(at.as_ptr(), 0o755)) {
                    Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
                    made => made,
                },
                Self::File(at) => {
                    let file =
                        libc::open(at.as_ptr(), libc::O_CREAT | libc::O_RDONLY | libc::O_CLOEXEC, 0o444);
                    done(file)?;
                    done(libc::close(file))
                }
                Self::Link { to, at } => done(libc::symlink(to.as_ptr(), at.as_ptr())),
                Self::Bind { from, at, flags } => {
                    done(libc::mount(from.as_ptr(), at.as_ptr(), nothing, libc::MS_BIND, nothing.cast()))?;
                    let remount = libc::MS_REMOUNT | libc::MS_BIND | flags;
                    done(libc::mount(nothing, at.as_ptr(), nothing, remount, nothing.cast()))
                }
            }
        }
    }
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Writes all of `words` with one call, as files of /proc require.
fn write(path: &CStr, words: &[u8]) -> io::Result<()> {
    // SAFETY: path and words outlive the calls, and the descriptor is closed once.
    unsafe {
        let file = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        done(file)?;
        let written = libc::write(file, words.as_ptr().cast(), words.len());
        let outcome = if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
        done(libc::close(file))?;
        outcome
    }
}

fn text(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

// The C library's functions are not used. They make all threads of a process do the same, and wait for them. A child
// of a process with threads has no other threads, but it has the library's list of them: it could wait forever for a
// thread that was just being created.

/// Sets the supplementary groups of this process, which has one thread.
pub(crate) fn set_groups(groups: &[libc::gid_t]) -> io::Result<()> {
    // SAFETY: the list outlives the call.
    done(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) } as libc::c_int)
}

/// Sets the user and the group of this process, which has one thread, to `user`.
pub(crate) fn set_user(user: libc::uid_t) -> io::Result<()> {
    // SAFETY: no pointer is passed.
    unsafe {
        done(libc::syscall(libc::SYS_setresgid, user, user, user) as libc::c_int)?;
        done(libc::syscall(libc::SYS_setresuid, user, user, user) as libc::c_int)
    }
}

#[cfg(test)]
mod tests;
