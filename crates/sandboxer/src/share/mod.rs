//! Live files and directories of the host in a pod, all served by one process, which is started with the first share.
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
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
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
#[derive(Debug, Clone)]
pub struct Share {
    /// Path of the file or directory, for messages: it may lead elsewhere by now.
    pub source: PathBuf,
    /// The file or directory itself, opened as a path only: nothing can be read through it.
    found: Arc<OwnedFd>,
    /// The files that the pod may write to.
    pub access: Access,
    /// Whether later mounts of the host below the source appear in the share.
    pub follows_mounts: bool,
    /// Name of the share among the pod's; equal for containers that share it.
    name: String,
}

impl Share {
    /// Returns the share of the file or directory `found` at `source`, with `inode` as its device and inode. The same
    /// request for the same inode gives the same share.
    pub fn new(
        source: &Path,
        found: OwnedFd,
        inode: (u64, u64),
        access: Access,
        follows_mounts: bool,
    ) -> io::Result<Self> {
        let (device, inode) = inode;
        let identity = format!("{device} {inode} {access:?} {follows_mounts} ");
        let mut identity = [identity.as_bytes(), source.as_os_str().as_bytes()].concat();
        // A hash has a fixed length, which fits all shares.
        identity = digest::sha256(&mut identity.as_slice())?.into_bytes();
        identity.truncate(16);
        let name = String::from_utf8_lossy(&identity).into_owned();
        Ok(Self { source: source.to_owned(), found: Arc::new(found), access, follows_mounts, name })
    }

    /// Returns the share's path in the guest.
    pub fn guest_path(&self) -> PathBuf {
        Path::new(GUEST_DIR).join(&self.name)
    }
}

/// The state that the next daemon needs to adopt the process that serves a pod's shares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareRecord {
    /// PID of the server process.
    pub pid: u32,
    /// Start time of the process, clock ticks since boot.
    pub start_time: u64,
    /// The transport of the guest's requests. Records of earlier daemons have none.
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

/// A reason why a share cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The process that serves shares cannot be started or reached.
    #[error("cannot {action} {path:?} to serve shares of pod {pod}")]
    Server {
        /// The pod's id.
        pod: SandboxId,
        /// The attempted operation.
        action: &'static str,
        /// The path that the operation concerned.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The server process exited before it served.
    #[error("{program:?} cannot serve shares of pod {pod}: {output}")]
    Refused {
        /// The pod's id.
        pod: SandboxId,
        /// The path of the server program.
        program: PathBuf,
        /// The program's last output.
        output: String,
    },
    /// The server process has exited, and with it all shares of the pod.
    #[error("the process that serves shares of pod {0} has ended: restart the pod")]
    Ended(SandboxId),
    /// The share cannot be passed to the server process.
    #[error("cannot share {path:?} with pod {pod}")]
    Attach {
        /// The pod's id.
        pod: SandboxId,
        /// The path of the file or directory to share.
        path: PathBuf,
        /// The reason why it cannot be passed.
        source: AttachError,
    },
    /// The path helper failed or did not respond.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// The guest rejects shares.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The guest's agent is of an earlier version.
    #[error("the guest of pod {0} runs an agent of an earlier version without shares: restart the pod")]
    EarlierAgent(SandboxId),
    /// The VMM cannot connect the guest to the server process.
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
    /// Cgroup in which the process is counted.
    cgroup: Option<Cgroup>,
    // Held while the process is started or gets a share: two containers created at once need one process. Only
    // container creation in this pod waits for it.
    server: tokio::sync::Mutex<Option<Server>>,
}

impl Shares {
    /// Creates shares without a process yet; it will be counted in `cgroup`.
    pub fn new(
        pod: SandboxId,
        run_dir: PathBuf,
        memory_mib: u64,
        cgroup: Option<Cgroup>,
        helpers: Helpers,
    ) -> Self {
        Self(Arc::new(Inner { pod, run_dir, memory_mib, helpers, cgroup, server: Default::default() }))
    }

    /// Returns the pod's helpers.
    pub fn helpers(&self) -> &Helpers {
        &self.0.helpers
    }

    /// Returns the pod of these shares.
    pub fn pod(&self) -> &SandboxId {
        &self.0.pod
    }

    /// Attaches each of `shares` to the guest. Shares that the guest has already stay unchanged.
    pub async fn give(&self, vm: &dyn Vm, agent: &Agent, shares: &[Share]) -> Result<(), ShareError> {
        if shares.is_empty() {
            return Ok(());
        }
        let Inner { pod, helpers, .. } = &*self.0;
        let mut trees = Vec::with_capacity(shares.len());
        for share in shares {
            // Before the lock: a share on a hung server must not block other containers.
            let Share { source, found, access, follows_mounts, .. } = share;
            let found = found.try_clone().map_err(|error| ShareError::Server {
                pod: pod.clone(),
                action: "duplicate the descriptor of",
                path: source.clone(),
                source: error,
            })?;
            trees.push(helpers.take_share(pod, source, found, *access, *follows_mounts).await?);
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

    /// Makes the guest mount its shares from this server.
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

    /// Moves process `pid` to the pod's cgroup, which takes some ms.
    async fn count(&self, pid: u32) -> Result<(), ShareError> {
        let Some(cgroup) = self.0.cgroup.clone() else { return Ok(()) };
        let entered = tokio::task::spawn_blocking(move || cgroup.enter(pid)).await;
        let entered = entered.unwrap_or_else(|ended| Err((PathBuf::new(), io::Error::other(ended))));
        let pod = self.0.pod.clone();
        entered.map_err(|(path, source)| ShareError::Server { pod, action: "enter", path, source })
    }

    /// Adopts the server process of an earlier daemon: `earlier` names the process, if the run directory does not.
    /// `guest` is the pod's VM and agent, if the VM runs; `vmm` is its process.
    pub async fn adopt(
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
        // Perhaps only the process has been started.
        match agent.has_shares().await? {
            true => Ok(()),
            false => self.lead(vm, agent, server).await,
        }
    }

    /// Ends the process, if there is one, and waits for its exit. The guest must have ended before.
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
        let found = || std::fs::File::open(&path).unwrap().into();
        let share =
            |access, follows| Share::new(&path, found(), inode(), access, follows).unwrap().guest_path();
        assert_eq!(share(ReadWrite, false), share(ReadWrite, false));
        assert_ne!(share(ReadWrite, false), share(ReadOnly, false));
        assert_ne!(share(ReadWrite, false), share(ReadWrite, true));
        let before = share(ReadWrite, false);
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_ne!(before, share(ReadWrite, false), "another directory of that name");
    }
}
