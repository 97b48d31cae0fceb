//! The process namespace that containers of a pod share, and what holds it.
//!
//! A namespace lives as long as its PID 1, and each of its orphans becomes that one's child. So that no
//! container is more than the others, a process of the agent's is PID 1 there: it sleeps, owns nothing, and
//! the kernel reaps its children by itself.

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

/// Who the holder is: nobody, and not the `nobody` that a container may run as.
const HOLDER: u32 = 65535;

/// The namespace, made when the first container asks for it.
#[derive(Default)]
pub struct SharedPids(OnceCell<i32>);

impl SharedPids {
    /// Returns the file by which it is joined.
    pub async fn namespace(&self, workers: &Workers) -> Result<PathBuf, Failure> {
        let holder = self.0.get_or_try_init(|| async { workers.run(&[], make).await?.result }).await?;
        Ok(namespace_of(*holder))
    }
}

/// Returns the file by which the process namespace of guest process `pid` is joined.
pub fn namespace_of(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/ns/pid"))
}

/// Makes a namespace and its holder, in a worker; answers the holder's guest pid.
fn make() -> Result<i32, Failure> {
    let failed = |what: &str| internal::<nix::Error>(format!("cannot {what} the pod's process namespace"));
    unshare(CloneFlags::CLONE_NEWPID).map_err(failed("make"))?;
    #[expect(clippy::disallowed_methods, reason = "a worker has one thread")]
    // SAFETY: as a worker is a fork of a process with one thread, it has one thread itself.
    match unsafe { fork() }.map_err(failed("hold"))? {
        ForkResult::Parent { child } => Ok(child.as_raw()),
        ForkResult::Child => hold(),
    }
}

/// Returns the holder's whole life. It is given away nothing: no descriptor, no privilege, no file.
fn hold() -> ! {
    let nobody = || {
        chroot(init::EMPTY)?;
        chdir("/")?;
        setgroups(&[])?;
        setgid(Gid::from_raw(HOLDER))?;
        setuid(Uid::from_raw(HOLDER))
    };
    // SAFETY: this process touches nothing of the agent's from here on. It has one thread; the actions set
    // run no code of ours, and neither does `_exit`.
    unsafe {
        libc::close_range(0, libc::c_uint::MAX, 0);
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        libc::prctl(libc::PR_SET_NAME, c"pause".as_ptr());
        if nobody().is_err() || libc::prctl(libc::PR_SET_DUMPABLE, 0) != 0 {
            libc::_exit(1);
        }
        loop {
            libc::pause();
        }
    }
}
