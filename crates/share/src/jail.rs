//! Namespaces of its own, and a root with nothing in it but a place for shares and the process's own `/proc`,
//! through which a file is opened that is known by descriptor.

use std::{
    fs,
    io::{self, PipeReader, PipeWriter, Read, Write},
    path::Path,
};

use anyhow::{Context, bail};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    unistd::{chdir, pivot_root},
};
use sandboxer_share::ROOT;

/// As many shares as the root takes, and some.
const ROOT_OPTIONS: &str = "mode=0755,size=64k,nr_inodes=1024";

/// The process that stays. Its caller is told when it serves.
pub struct Entered(PipeWriter);

impl Entered {
    /// Tells who started it that it serves.
    pub fn announce(mut self) -> io::Result<()> {
        self.0.write_all(b"!")
    }
}

/// Goes into the jail. `None` in the process that only waited for the other one to serve, and told who it is.
pub fn enter(run_dir: &Path) -> anyhow::Result<Option<Entered>> {
    let namespaces = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    unshare(namespaces).context("cannot make namespaces")?;
    let (serves, announced) = io::pipe().context("cannot make a pipe")?;
    match fork_sibling().context("cannot fork")? {
        0 => {
            drop(serves);
            make_root(run_dir)?;
            Ok(Some(Entered(announced)))
        }
        sibling => {
            drop(announced);
            introduce(sibling, serves).map(|()| None)
        }
    }
}

/// Returns a fork, by which alone a process gets into a new pid namespace, whose child is one of this process's parent:
/// the daemon hears of its end. 0 in the child.
fn fork_sibling() -> io::Result<i64> {
    let flags = libc::CLONE_PARENT | libc::SIGCHLD;
    // SAFETY: without a stack of its own and without shared memory this is fork(2), and there is one thread
    // that could be in the middle of something, which is here.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(pid),
    }
}

fn introduce(sibling: i64, mut serves: PipeReader) -> anyhow::Result<()> {
    // Its own words, should it fail, have been said.
    if serves.read(&mut [0]).context("cannot hear from the server")? == 0 {
        bail!("the server did not start");
    }
    writeln!(io::stdout(), "{sibling}").context("cannot tell the server's process id")
}

fn make_root(run_dir: &Path) -> anyhow::Result<()> {
    let none = None::<&str>;
    let plain = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot leave the host's mounts")?;
    mount(Some("sandboxer-share"), run_dir, Some("tmpfs"), plain, Some(ROOT_OPTIONS))
        .with_context(|| format!("cannot mount a root on {run_dir:?}"))?;
    chdir(run_dir).context("cannot enter the root")?;
    let shares = Path::new(ROOT).strip_prefix("/").unwrap_or(Path::new(ROOT));
    for dir in [Path::new("proc"), shares] {
        fs::create_dir(dir).with_context(|| format!("cannot make {dir:?}"))?;
    }
    mount(Some("proc"), "proc", Some("proc"), plain, Some("subset=pid")).context("cannot mount /proc")?;
    // The old root goes on top of the new one, and away.
    pivot_root(".", ".").context("cannot change the root")?;
    umount2(".", MntFlags::MNT_DETACH).context("cannot leave the old root")?;
    chdir("/").context("cannot enter the new root")?;
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(none, "/", none, read_only | plain, none).context("cannot make the root read-only")
}
