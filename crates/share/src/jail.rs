//! The jail: its own namespaces, and a root that contains only a directory for shares and the process's own `/proc`,
//! which is needed to open a file by its descriptor.

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

/// The mount options of the root, with enough inodes for all shares.
const ROOT_OPTIONS: &str = "mode=0755,size=64k,nr_inodes=1024";

/// The end of a pipe on which the server signals that it is ready.
pub struct Ready(PipeWriter);

impl Ready {
    /// Signals that the server is ready.
    pub fn signal(mut self) -> io::Result<()> {
        self.0.write_all(b"!")
    }
}

/// Enters the jail. Returns `None` in the original process, after the server is ready and its PID was printed.
pub fn enter(run_dir: &Path) -> anyhow::Result<Option<Ready>> {
    let namespaces = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    unshare(namespaces).context("cannot create namespaces")?;
    let (ready, signal) = io::pipe().context("cannot create a pipe")?;
    match fork_sibling().context("cannot fork")? {
        0 => {
            drop(ready);
            make_root(run_dir)?;
            Ok(Some(Ready(signal)))
        }
        sibling => {
            drop(signal);
            await_sibling(sibling, ready).map(|()| None)
        }
    }
}

/// Forks, which is needed to enter a new PID namespace. The child's parent is this process's parent, the daemon, which
/// is notified of its exit. Returns 0 in the child.
fn fork_sibling() -> io::Result<i64> {
    let flags = libc::CLONE_PARENT | libc::SIGCHLD;
    // SAFETY: without its own stack and without shared memory this is fork(2), and this process has only one
    // thread.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(pid),
    }
}

fn await_sibling(sibling: i64, mut ready: PipeReader) -> anyhow::Result<()> {
    // A failed server has printed its error.
    if ready.read(&mut [0]).context("cannot read from the server's pipe")? == 0 {
        bail!("the server did not start");
    }
    writeln!(io::stdout(), "{sibling}").context("cannot print the server's pid")
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
        fs::create_dir(dir).with_context(|| format!("cannot create {dir:?}"))?;
    }
    mount(Some("proc"), "proc", Some("proc"), plain, Some("subset=pid")).context("cannot mount /proc")?;
    // The old root is stacked on the new one, then unmounted.
    pivot_root(".", ".").context("cannot change the root")?;
    umount2(".", MntFlags::MNT_DETACH).context("cannot leave the old root")?;
    chdir("/").context("cannot enter the new root")?;
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(none, "/", none, read_only | plain, none).context("cannot make the root read-only")
}
