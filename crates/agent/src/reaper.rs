//! Reaps every process that exits in the guest, as only PID 1 can.
//!
//! ```text
//!  fork ──▶ running ──▶ reaped ──claimed────▶ its owner is notified
//!                          └──unclaimed──▶ kept for a while: a container's init may exit before
//!                                           the worker that created it has reported its pid
//! ```

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{Arc, Mutex},
};

use rustix::process::{WaitOptions, wait};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use crate::{clock, sync::lock};

/// The most unclaimed exits remembered. Between a worker's fork and its report, hardly any process exits except its own
/// children; the others are orphans of containers, which have no owner.
const MAX_UNCLAIMED: usize = 1024;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Death {
    /// The exit code, or 128 + signal.
    pub code: u32,
    /// The time of the exit: CLOCK_REALTIME, ns since 1970.
    pub at_ns: u64,
}

/// A point in the order of exits. A PID that is claimed since this point cannot be an earlier process with the same
/// number.
#[derive(Debug, Clone, Copy)]
pub struct Since(u64);

/// Reaps processes and notifies their owners.
#[derive(Default)]
pub struct Reaper {
    // The lock is never held across an await, so a plain mutex is enough.
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    deaths: u64,
    owners: HashMap<i32, oneshot::Sender<Death>>,
    unclaimed: VecDeque<(u64, i32, Death)>,
}

impl Reaper {
    /// Returns the current point in the order of exits. Must be called before a fork.
    pub fn now(&self) -> Since {
        Since(lock(&self.inner).deaths)
    }

    /// Returns a receiver of the exit of `pid`, which was forked after `since`.
    pub fn claim(&self, pid: i32, since: Since) -> oneshot::Receiver<Death> {
        let (owner, exited) = oneshot::channel();
        let mut inner = lock(&self.inner);
        let early = inner.unclaimed.iter().position(|&(at, dead, _)| dead == pid && at > since.0);
        match early.and_then(|at| inner.unclaimed.remove(at)) {
            Some((_, _, death)) => {
                let _ = owner.send(death);
            }
            None => {
                inner.owners.insert(pid, owner);
            }
        }
        exited
    }

    /// Returns whether `pid` was claimed and has not been reaped: only then is it safe to signal.
    pub fn is_alive(&self, pid: i32) -> bool {
        lock(&self.inner).owners.contains_key(&pid)
    }

    /// Reaps until the agent ends.
    pub async fn run(self: Arc<Self>) -> io::Result<()> {
        let mut children = signal(SignalKind::child())?;
        loop {
            self.reap();
            if children.recv().await.is_none() {
                return Err(io::Error::other("SIGCHLD is no longer delivered"));
            }
        }
    }

    /// Reaps all processes that have exited.
    pub fn reap(&self) {
        // nix's waitpid will not do: for an exit by a real-time signal it returns an error after the kernel has
        // released the process.
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let code = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => code.unsigned_abs(),
                (None, Some(signal)) => 128 + signal.unsigned_abs(),
                (None, None) => continue,
            };
            self.died(pid.as_raw_nonzero().get(), Death { code, at_ns: clock::realtime_ns() });
        }
    }

    fn died(&self, pid: i32, death: Death) {
        let mut inner = lock(&self.inner);
        inner.deaths += 1;
        match inner.owners.remove(&pid) {
            Some(owner) => {
                let _ = owner.send(death);
            }
            None => {
                let at = inner.deaths;
                inner.unclaimed.push_back((at, pid, death));
                if inner.unclaimed.len() > MAX_UNCLAIMED {
                    inner.unclaimed.pop_front();
                }
            }
        }
    }
}
