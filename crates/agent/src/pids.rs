//! The process namespace that containers of a pod share, and its PID 1.
//!
//! A namespace exists as long as its PID 1, which becomes the parent of its orphans. PID 1 is a process of the agent,
//! so that no container has this role. It sleeps, has no privileges, and lets the kernel reap its children.

use std::path::PathBuf;

use nix::{
    sched::{CloneFlags, unshare},
    unistd::{ForkResult, Gid, Uid, chdir, chroot, fork, setgid, setgroups, setuid},
};
use tokio::sync::OnceCell;

use crate::{
    failure::{Failure, internal},
    init,
    worker::Workers,
};

/// User and group of the namespace's PID 1. It is not the `nobody` that a container may use.
const PAUSE_ID: u32 = 65535;

/// The namespace, created when the first container needs it.
#[derive(Default)]
pub struct SharedPids(OnceCell<i32>);

impl SharedPids {
    /// Returns the path of the namespace.
    pub async fn namespace(&self, workers: &Workers) -> Result<PathBuf, Failure> {
        let pause = self.0.get_or_try_init(|| async { workers.run(&[], make).await?.result }).await?;
        Ok(namespace_of(*pause))
    }
}

/// Returns the path of the process namespace of guest process `pid`.
pub fn namespace_of(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/ns/pid"))
}

/// Creates a namespace and its PID 1, in a worker; returns the guest pid of that process.
fn make() -> Result<i32, Failure> {
    let failed = |what: &str| internal::<nix::Error>(format!("cannot {what} the pod's process namespace"));
    unshare(CloneFlags::CLONE_NEWPID).map_err(failed("create"))?;
    #[expect(clippy::disallowed_methods, reason = "a worker has one thread")]
    // SAFETY: a worker is a fork of a process with one thread, so it has one thread itself.
    match unsafe { fork() }.map_err(failed("start PID 1 of"))? {
        ForkResult::Parent { child } => Ok(child.as_raw()),
        ForkResult::Child => pause(),
    }
}

/// Runs the namespace's PID 1. It keeps no descriptor, no privilege and no file.
fn pause() -> ! {
    let drop_privileges = || {
        chroot(init::EMPTY)?;
        chdir("/")?;
        setgroups(&[])?;
        setgid(Gid::from_raw(PAUSE_ID))?;
        setuid(Uid::from_raw(PAUSE_ID))
    };
    // SAFETY: this process uses nothing of the agent from here on. It has one thread; the actions set run no code of
    // ours, and neither does `_exit`.
    unsafe {
        libc::close_range(0, libc::c_uint::MAX, 0);
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        libc::prctl(libc::PR_SET_NAME, c"pause".as_ptr());
        if drop_privileges().is_err() || libc::prctl(libc::PR_SET_DUMPABLE, 0) != 0 {
            libc::_exit(1);
        }
        loop {
            libc::pause();
        }
    }
}
