//! Live files and directories of the host in a pod: one process serves them, started with the first.
//!
//! ```text
//! share ──▶ server (sandboxer-share, jailed) ◀──socket──▶ VMM ◀──a disk, or vsock──▶ guest's kernel
//! ```
//!
//! The daemon connects the two and manages the process; the data does not pass through the daemon. A share stays until
//! its pod stops: its container may be restarted, and others may use it, too. The process outlives the daemon as a VMM
//! does, and continues to serve meanwhile.

mod server;

use std::{
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_base::{Code, digest};
use sandboxer_guest::{Agent, GuestError};
use sandboxer_host::helper::{HelperError, Helpers};
use sandboxer_process::{cgroup::Cgroup, strays};
use sandboxer_protocol::{
    id::SandboxId,
    link::LinkKey,
    share::{DISK_SERIAL, GUEST_DIR},
};
use sandboxer_share::attach::{Access, AttachError};
use sandboxer_vmm::{ShareTransport, Vm, VmmError};
use serde::{Deserialize, Serialize};

use self::server::Server;

/// A file or directory of the host that a container uses live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// A file or a directory.
    pub source: PathBuf,
    /// What the pod can write to.
    pub access: Access,
    /// Later mounts of the host below it appear in it.
    pub follows_mounts: bool,
    /// Identifies it among the pod's shares; equal for containers that share it.
    name: String,
}

impl Share {
    /// Returns the share of `source`, with `inode` as its device and inode. The same request for the same inode
    /// gives the same share.
    pub fn of(source: &Path, inode: (u64, u64), access: Access, follows_mounts: bool) -> io::Result<Self> {
        let (device, inode) = inode;
        let identity = format!("{device} {inode} {access:?} {follows_mounts} ");
        let mut identity = [identity.as_bytes(), source.as_os_str().as_bytes()].concat();
        // A hash has a fixed length, which fits all shares.
        identity = digest::of(&mut identity.as_slice())?.into_bytes();
        identity.truncate(16);
        let name = String::from_utf8_lossy(&identity).into_owned();
        Ok(Self { source: source.to_owned(), access, follows_mounts, name })
    }

    /// Returns its path in the guest.
    pub fn guest_path(&self) -> PathBuf {
        Path::new(GUEST_DIR).join(&self.name)
    }
}

/// What the next daemon needs to adopt the process that serves a pod's shares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareRecord {
    /// Its process id.
    pub pid: u32,
    /// Its start, clock ticks since boot.
    pub start_time: u64,
    /// How the guest's requests reach it. Records of earlier daemons have none.
    #[serde(default, rename = "way")]
    pub transport: Option<ShareTransport>,
    /// Prefix of each of the guest's streams, if the requests arrive by streams.
    #[serde(default)]
    pub key: Option<LinkKey>,
}

/// Returns the process that serves the shares of the pod with this run directory, if one runs.
pub fn server_of(run_dir: &Path) -> Option<u32> {
    let ShareRecord { pid, start_time, .. } = server::recorded(run_dir)?;
    sandboxer_process::is_running(pid, start_time).then_some(pid)
}

/// Why a share cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The process that serves shares cannot be started or reached.
    #[error("cannot {action} {path:?} to serve shares of pod {pod}")]
    Server {
        /// The pod.
        pod: SandboxId,
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It ended before it served.
    #[error("{program:?} cannot serve shares of pod {pod}: {output}")]
    Refused {
        /// The pod.
        pod: SandboxId,
        /// The program.
        program: PathBuf,
        /// Its last output.
        output: String,
    },
    /// It has ended, and with it all shares of the pod.
    #[error("the process that serves shares of pod {0} has ended: restart the pod")]
    Ended(SandboxId),
    /// The share cannot be passed to it.
    #[error("cannot share {path:?} with pod {pod}")]
    Attach {
        /// The pod.
        pod: SandboxId,
        /// What was to be shared.
        path: PathBuf,
        /// Why not.
        source: AttachError,
    },
    /// The path helper failed or did not answer.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// The guest refuses shares.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The guest's agent is of an earlier version.
    #[error("the guest of pod {0} runs an agent of an earlier version without shares: restart the pod")]
    EarlierAgent(SandboxId),
    /// The VMM cannot connect the guest to it.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// A leftover process cannot be killed.
    #[error(transparent)]
    Strays(#[from] strays::StrayError),
}

impl ShareError {
    /// Returns the code for the caller.
    pub fn code(&self) -> Code {
        match self {
            Self::Helper(error) => error.code(),
            Self::Ended(_) | Self::EarlierAgent(_) => Code::FailedPrecondition,
            Self::Guest(error) => error.code(),
            Self::Server { .. }
            | Self::Refused { .. }
            | Self::Attach { .. }
            | Self::Vmm(_)
            | Self::Strays(_) => Code::Internal,
        }
    }
}

/// The shares of one pod. Clones refer to the same shares.
#[derive(Debug, Clone)]
pub struct Shares(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pod: SandboxId,
    run_dir: PathBuf,
    memory_mib: u64,
    helpers: Helpers,
    /// Control group in which the process is counted.
    cgroup: Option<Cgroup>,
    // Held while the process is started or gets a share: two containers created at once need one process. Only
    // container creation in this pod waits for it.
    server: tokio::sync::Mutex<Option<Server>>,
}

impl Shares {
    /// Returns shares without a process yet; it will be counted in `cgroup`.
    pub fn new(
        pod: SandboxId,
        run_dir: PathBuf,
        memory_mib: u64,
        cgroup: Option<Cgroup>,
        helpers: Helpers,
    ) -> Self {
        Self(Arc::new(Inner { pod, run_dir, memory_mib, helpers, cgroup, server: Default::default() }))
    }

    /// Returns their pod.
    pub fn pod(&self) -> &SandboxId {
        &self.0.pod
    }

    /// Attaches each of `shares` to the guest. Shares that it has already stay unchanged.
    pub async fn give(&self, vm: &dyn Vm, agent: &Agent, shares: &[Share]) -> Result<(), ShareError> {
        if shares.is_empty() {
            return Ok(());
        }
        let Inner { pod, helpers, .. } = &*self.0;
        let mut trees = Vec::with_capacity(shares.len());
        for share in shares {
            // Before the lock: a share on a hung server must not block other containers.
            let Share { source, access, follows_mounts, .. } = share;
            trees.push(helpers.take_share(pod, source, *access, *follows_mounts).await?);
        }
        let mut serving = self.0.server.lock().await;
        let server = match &mut *serving {
            Some(server) if server.has_ended() => return Err(ShareError::Ended(pod.clone())),
            Some(server) => server,
            none => none.insert(self.start(vm, agent).await?),
        };
        for (share, tree) in shares.iter().zip(trees) {
            let path = &share.source;
            let failed = |source| ShareError::Attach { pod: pod.clone(), path: path.clone(), source };
            server.attach(share, tree).await.map_err(failed)?;
        }
        Ok(())
    }

    /// Starts the process and connects the guest to it.
    async fn start(&self, vm: &dyn Vm, agent: &Agent) -> Result<Server, ShareError> {
        let Inner { pod, run_dir, memory_mib, .. } = &*self.0;
        let listener = vm.listen_for_shares()?;
        // Recorded before the guest mounts anything: a guest with mounts needs its server.
        let server = Server::start(pod, run_dir, *memory_mib, listener).await?;
        let led = async { tokio::try_join!(self.lead(vm, agent, &server), self.count(server.pid())) };
        match led.await {
            Ok(_) => Ok(server),
            Err(error) => {
                server.end().await;
                Err(error)
            }
        }
    }

    /// Makes the guest mount its shares, with this server behind them.
    async fn lead(&self, vm: &dyn Vm, agent: &Agent, server: &Server) -> Result<(), ShareError> {
        vm.connect_shares().await?;
        let disk = match server.transport() {
            ShareTransport::Disk => DISK_SERIAL,
            ShareTransport::Streams => "",
        };
        match agent.mount_shares(disk, server.key()).await? {
            true => Ok(()),
            false => Err(ShareError::EarlierAgent(self.0.pod.clone())),
        }
    }

    /// Moves process `pid` to the pod's control group, which takes some ms.
    async fn count(&self, pid: u32) -> Result<(), ShareError> {
        let Some(cgroup) = self.0.cgroup.clone() else { return Ok(()) };
        let entered = tokio::task::spawn_blocking(move || cgroup.enter(pid)).await;
        let entered = entered.unwrap_or_else(|ended| Err((PathBuf::new(), io::Error::other(ended))));
        let pod = self.0.pod.clone();
        entered.map_err(|(path, source)| ShareError::Server { pod, action: "enter", path, source })
    }

    /// Adopts what an earlier daemon left: `earlier` names the process, if the run directory does not. `guest` is the
    /// pod's VM and agent, if it lives; `vmm` is its process.
    pub async fn take_up(
        &self,
        earlier: Option<ShareRecord>,
        guest: Option<(&dyn Vm, &Agent)>,
        vmm: u32,
    ) -> Result<(), ShareError> {
        let Inner { pod, run_dir, .. } = &*self.0;
        let (Some(record), Some((vm, agent))) = (server::recorded(run_dir).or(earlier), guest) else {
            // A process without a record, or of a pod that is gone: its directory shows that there may be one.
            if run_dir.join(server::ROOT).exists() {
                strays::end_below(pod, run_dir, &[vmm].into())?;
            }
            return Ok(());
        };
        let server = Server::adopt(pod, run_dir, &record)?;
        let mut serving = self.0.server.lock().await;
        let server = serving.insert(server);
        if server.has_ended() {
            // The guest has received an error for each request since.
            tracing::warn!(%pod, "the pod's shares are lost");
            return Ok(());
        }
        self.count(record.pid).await?;
        // Only the process may have been started.
        match agent.has_shares().await? {
            true => Ok(()),
            false => self.lead(vm, agent, server).await,
        }
    }

    /// Ends the process, if there is one, and waits until it is gone. The guest must have ended before.
    pub async fn end(&self) {
        let server = self.0.server.lock().await.take();
        if let Some(server) = server {
            server.end().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use crate::share::*;

    #[test]
    fn who_asks_for_the_same_has_it_in_common() {
        use Access::{ReadOnly, ReadWrite};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("volume");
        std::fs::create_dir(&path).unwrap();
        let inode = || {
            let found = std::fs::metadata(&path).unwrap();
            (found.dev(), found.ino())
        };
        let share = |access, follows| Share::of(&path, inode(), access, follows).unwrap();
        assert_eq!(share(ReadWrite, false), share(ReadWrite, false));
        assert_ne!(share(ReadWrite, false).guest_path(), share(ReadOnly, false).guest_path());
        assert_ne!(share(ReadWrite, false).guest_path(), share(ReadWrite, true).guest_path());
        let before = share(ReadWrite, false);
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_ne!(
            before.guest_path(),
            share(ReadWrite, false).guest_path(),
            "another directory of that name"
        );
    }
}
