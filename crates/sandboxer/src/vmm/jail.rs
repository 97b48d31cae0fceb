//! What a VMM process can see and do: as little as its machine needs.
//!
//! A machine that its guest broke out of is a process without a name's worth: a user of its own that owns nothing,
//! no capability and no way to gain one; namespaces of its own, with no network in them, no process but itself and
//! nobody to talk to; a root of read-only programs, its kernel and its initramfs. All else that it uses, sockets,
//! taps, disks and memory, is opened for it.
//!
//! Entered between fork and exec, so all that allocates is done before, by [`Jail::new`].

use std::{
    ffi::CString,
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use nix::sched::CloneFlags;

/// Users that VMMs run as begin here: above all that systemd.io's list of UIDs gives to anyone, and below 2^31.
const FIRST_USER: u32 = 0x7000_0000;
/// As many of them as the directories of machines can have numbers, but for a remainder.
const USERS: u64 = 0x0fff_ffff;

/// Namespaces of its own. That of its processes is made by whoever forks it.
const NAMESPACES: CloneFlags = CloneFlags::CLONE_NEWNS
    .union(CloneFlags::CLONE_NEWIPC)
    .union(CloneFlags::CLONE_NEWUTS)
    .union(CloneFlags::CLONE_NEWNET)
    .union(CloneFlags::CLONE_NEWCGROUP);

/// What every program needs to start, a wrapper with `#!/bin/sh` too; what of it isn't there, isn't needed.
const SYSTEM: [&str; 5] = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache"];
/// Devices that are the same to everybody.
const DEVICES: [&str; 2] = ["/dev/null", "/dev/urandom"];
/// Highest capability that there can be; a kernel knows fewer.
const LAST_CAPABILITY: libc::c_int = 63;

/// A jail, ready to be entered.
#[derive(Debug)]
pub struct Jail {
    /// Where the new root is made: any directory, over which it is mounted in the jail's own namespace.
    root: CString,
    steps: Vec<Step>,
    user: u32,
    groups: Vec<libc::gid_t>,
}

/// A step of making the root, from within it.
#[derive(Debug)]
enum Step {
    Dir(CString),
    File(CString),
    Link { to: CString, at: CString },
    Bind { from: CString, at: CString, flags: libc::c_ulong },
}

/// The user of the machine whose directory this is. The directory is the machine's as long as that lives, wherever it
/// is moved, and its number that of no other on its file system.
pub fn user_of(run_dir: &fs::Metadata) -> u32 {
    FIRST_USER + u32::try_from(run_dir.ino() % USERS).unwrap_or_default()
}

impl Jail {
    /// A jail for the machine whose directory is `run_dir`, in which `readable` can be read and `devices` used.
    pub fn new(run_dir: &Path, readable: &[&Path], devices: &[&Path]) -> io::Result<Self> {
        let user = user_of(&fs::metadata(run_dir)?);
        let mut jail = Self { root: text(run_dir)?, steps: Vec::new(), user, groups: Vec::new() };
        let read_only = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV;
        for path in SYSTEM.iter().map(Path::new).chain(readable.iter().copied()) {
            jail.show(path, read_only)?;
        }
        for path in DEVICES.iter().map(Path::new).chain(devices.iter().copied()) {
            jail.show(path, libc::MS_NOSUID | libc::MS_NOEXEC)?;
            // What a group may open, such as /dev/kvm, the VMM opens as a member.
            if let Ok(meta) = fs::metadata(path)
                && meta.gid() != 0
            {
                jail.groups.push(meta.gid());
            }
        }
        Ok(jail)
    }

    /// Its user, and its group likewise.
    pub fn user(&self) -> u32 {
        self.user
    }

    /// Shows what of the host is at `path` at the same path, links as they are.
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

    /// Enters it for good: as PID 1 of a namespace that its parent made. Between fork and exec only system calls
    /// are allowed, and only such are made.
    pub fn enter(&self) -> io::Result<()> {
        // SAFETY: every pointer is to a string of this jail's or a literal, which outlive the call; the calls change
        // this process alone, which has one thread and no other use but to execute the VMM.
        unsafe {
            done(libc::unshare(NAMESPACES.bits()))?;
            let nothing = std::ptr::null();
            let private = libc::MS_REC | libc::MS_PRIVATE;
            done(libc::mount(nothing, c"/".as_ptr(), nothing, private, std::ptr::null()))?;
            let root_flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
            let size = c"size=1m,mode=0755".as_ptr().cast();
            done(libc::mount(c"jail".as_ptr(), self.root.as_ptr(), c"tmpfs".as_ptr(), root_flags, size))?;
            done(libc::chdir(self.root.as_ptr()))?;
            for step in &self.steps {
                step.take()?;
            }
            done(libc::mkdir(c"proc".as_ptr(), 0o555))?;
            done(libc::mount(
                c"proc".as_ptr(),
                c"proc".as_ptr(),
                c"proc".as_ptr(),
                root_flags,
                std::ptr::null(),
            ))?;
            done(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) as libc::c_int)?;
            done(libc::umount2(c".".as_ptr(), libc::MNT_DETACH))?;
            let seal = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | root_flags;
            done(libc::mount(nothing, c"/".as_ptr(), nothing, seal, std::ptr::null()))?;
            done(libc::chdir(c"/".as_ptr()))?;
            for capability in 0..=LAST_CAPABILITY {
                match done(libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0)) {
                    // Beyond the last one.
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
                    dropped => dropped?,
                }
            }
            done(libc::setgroups(self.groups.len(), self.groups.as_ptr()))?;
            done(libc::setresgid(self.user, self.user, self.user))?;
            // With the user go all capabilities.
            done(libc::setresuid(self.user, self.user, self.user))?;
            done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        }
    }
}

impl Step {
    /// Takes it, in the working directory. Directories that are there already are fine.
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

fn text(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}
