//! A running VM of a jailed VMM.

use std::{
    fmt, fs,
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, chown},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_protocol::id::SandboxId;
use tokio::time::Instant;

use super::VmmProcess;
use crate::{
    AgentStream, Destination, DiskRecord, DiskSpec, FREEZABLE, HotpluggedMemory, MEMORY, SavedDisk,
    ShareListener, ShareTransport, Vcpus, Vm, VmExit, VmRecord, VmmError, hotplug,
    http::ApiError,
    jail_dir::{JailDir, disk_path},
    mounted_disk::{self, MountedDisk},
    run_dir::path_error,
    vsock::{self, Link},
};

/// Name of the directory in the jail directory to which the VMM writes its snapshot.
const FROZEN: &str = "frozen";

/// The part of a running VM that differs from those of other jailed VMMs: the calls of its API.
#[async_trait]
pub trait VmDriver: fmt::Debug + Send + Sync + Sized + 'static {
    /// The VMM's sockets and pipes in the VM's directory.
    const FILES: &'static [&'static str];
    /// Names and maximum sizes of the files that [`VmDriver::snapshot`] writes, in addition to the memory.
    const SNAPSHOT: &'static [(&'static str, u64)];
    /// The call of [`VmDriver::version`], in errors.
    const VERSION_CALL: &'static str;

    /// Returns the version that the VMM reports.
    async fn version(&self) -> Result<String, ApiError>;

    /// Returns the driver of the same VM, whose directory is now `run_dir`.
    fn assigned(&self, run_dir: &Path) -> Self;

    /// Attaches a disk, as [`Vm::attach_disk`] does. Errors name `call`.
    async fn attach_disk(&self, vm: &Jailed, disk: &DiskSpec, call: &str) -> Result<(), VmmError>;

    /// Detaches a disk, as [`Vm::detach_disk`] does. Errors name `call`.
    async fn detach_disk(&self, vm: &Jailed, serial: &str, call: &str) -> Result<(), VmmError>;

    /// Returns the memory in addition to the boot memory, as [`Vm::hotplugged_memory`] does.
    async fn hotplugged_memory(&self, vm: &Jailed) -> Result<Option<HotpluggedMemory>, VmmError>;

    /// Requests memory, as [`Vm::request_memory`] does. Errors name `call`.
    async fn request_memory(&self, vm: &Jailed, mib: u64, call: &str) -> Result<(), VmmError>;

    /// Returns the number of vCPUs, as [`Vm::vcpus`] does.
    async fn vcpus(&self, _: &Jailed) -> Result<Option<Vcpus>, VmmError> {
        Ok(None)
    }

    /// Requests vCPUs, as [`Vm::request_vcpus`] does.
    async fn request_vcpus(&self, vm: &Jailed, count: u32) -> Result<(), VmmError> {
        Err(hotplug::vcpus_refused(&vm.process.record, count))
    }

    /// Stops the guest, as [`Vm::pause`] does.
    async fn pause(&self, vm: &Jailed) -> Result<(), VmmError>;

    /// Lets the guest run, as [`Vm::resume`] does.
    async fn resume(&self, vm: &Jailed) -> Result<(), VmmError>;

    /// Stops the CPUs and writes the files of [`VmDriver::SNAPSHOT`] to `dir`, a path in the jail.
    async fn snapshot(&self, vm: &Jailed, dir: &Path) -> Result<(), VmmError>;

    /// Pauses and saves the guest, as [`Vm::checkpoint`] does, not before `freezable` (see [`FREEZABLE`]).
    async fn checkpoint(
        &self,
        vm: &Jailed,
        to: &Destination,
        disks: &[DiskRecord],
        freezable: Instant,
    ) -> Result<Vec<SavedDisk>, VmmError>;

    /// Frees what a frozen VM's memory file need not hold.
    fn compact_memory(_: &Path) -> io::Result<()> {
        Ok(())
    }
}

/// A VMM's process with its jail directory and its vsock.
#[derive(Debug, Clone)]
pub struct Jailed {
    /// The VMM's process.
    pub process: VmmProcess,
    /// The writable directory in the jail.
    pub jail_dir: Arc<JailDir>,
    /// User ID of the VMM.
    pub user: u32,
    /// Time limit of each call.
    pub call_timeout: Duration,
    link: Link,
}

impl Jailed {
    /// Opens the jail of `process`, which runs as `user`, and listens for its agent; `announced`: the agent may already
    /// have announced itself.
    pub(super) async fn open(
        process: VmmProcess,
        user: u32,
        call_timeout: Duration,
        announced: bool,
    ) -> Result<Self, VmmError> {
        let jail_dir = match JailDir::open(&process.handle) {
            Ok(jail_dir) => Arc::new(jail_dir),
            Err(_) if process.is_ending().await => return Err(process.died("its start").await),
            Err(error) => {
                let path = PathBuf::from(format!("/proc/{}/root", process.handle.pid()));
                return Err(path_error(&process.record.pod, "open the jail", path)(error));
            }
        };
        let link = if announced { Link::of_running(jail_dir.clone()) } else { Link::new(jail_dir.clone()) };
        let link =
            link.map_err(path_error(&process.record.pod, "listen on", vsock::announcements().into()))?;
        Ok(Self { process, jail_dir, user, call_timeout, link })
    }

    /// Returns the pod that errors name.
    pub fn pod(&self) -> &SandboxId {
        &self.process.record.pod
    }

    /// Returns the error of a `call` that is refused before it is made.
    pub fn refused(&self, call: &str, reason: impl Into<String>) -> VmmError {
        VmmError::Refused { pod: self.pod().clone(), call: call.to_owned(), reason: reason.into() }
    }

    /// Mounts these disks in the jail for the duration of `call`, in which the VMM opens them.
    pub async fn mount(&self, call: &str, disks: &[DiskSpec]) -> Result<Vec<MountedDisk>, VmmError> {
        let (process, user) = (self.process.handle.clone(), self.user);
        let (disks, pod) = (disks.to_vec(), self.pod().clone());
        let mount = move || -> Result<Vec<MountedDisk>, VmmError> {
            let mount = |disk: &DiskSpec| {
                let mounted = MountedDisk::new(process.clone(), user, disk);
                mounted.map_err(path_error(&pod, "mount disk", disk.file.name().to_owned()))
            };
            disks.iter().map(mount).collect()
        };
        match tokio::task::spawn_blocking(mount).await {
            Ok(Err(_)) if self.process.is_ending().await => Err(self.process.died(call).await),
            Ok(mounted) => mounted,
            Err(panic) => {
                Err(path_error(self.pod(), "mount disks in", disk_path(""))(io::Error::other(panic)))
            }
        }
    }

    /// Unmounts the disks that an earlier daemon left in the jail, and revokes the user's permits for them.
    pub(super) async fn unmount_all(&self) -> Result<(), VmmError> {
        let (process, user) = (self.process.handle.clone(), self.user);
        let unmounted = tokio::task::spawn_blocking(move || mounted_disk::clear(&process, user)).await;
        let unmounted = unmounted.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        unmounted.map_err(path_error(self.pod(), "unmount disks in", disk_path("")))
    }
}

/// A VM of a jailed VMM.
#[derive(Debug)]
pub struct JailedVm<D> {
    vm: Jailed,
    driver: D,
    /// Time from which the VM can be frozen; see [`FREEZABLE`].
    freezable: Instant,
}

impl<D> JailedVm<D> {
    /// Returns a VM that was created or adopted now.
    pub(super) fn new(vm: Jailed, driver: D) -> Self {
        Self { vm, driver, freezable: Instant::now() + FREEZABLE }
    }
}

#[async_trait]
impl<D: VmDriver> Vm for JailedVm<D> {
    fn record(&self) -> VmRecord {
        self.vm.process.record.clone()
    }

    async fn agent_stream(&self) -> Result<Box<dyn AgentStream>, VmmError> {
        let process = &self.vm.process;
        tokio::select! {
            stream = self.vm.link.stream() => match stream {
                Ok(stream) => Ok(Box::new(stream)),
                Err(source) => Err(path_error(self.vm.pod(), "connect to", vsock::SOCKET.into())(source)),
            },
            _ = process.handle.exited() => Err(process.died("a connection to the agent").await),
        }
    }

    async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError> {
        self.driver.attach_disk(&self.vm, disk, &disk.attaching()).await
    }

    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError> {
        self.driver.detach_disk(&self.vm, serial, &format!("detaching disk {serial}")).await
    }

    async fn hotplugged_memory(&self) -> Result<Option<HotpluggedMemory>, VmmError> {
        self.driver.hotplugged_memory(&self.vm).await
    }

    async fn request_memory(&self, mib: u64) -> Result<(), VmmError> {
        self.driver.request_memory(&self.vm, mib, &hotplug::call(mib)).await
    }

    async fn vcpus(&self) -> Result<Option<Vcpus>, VmmError> {
        self.driver.vcpus(&self.vm).await
    }

    async fn request_vcpus(&self, count: u32) -> Result<(), VmmError> {
        self.driver.request_vcpus(&self.vm, count).await
    }

    fn listen_for_shares(&self) -> Result<ShareListener, VmmError> {
        let name = vsock::shares();
        let listener = self.vm.jail_dir.listen(&name);
        let listener = listener.map_err(path_error(self.vm.pod(), "listen on", name.into()))?;
        Ok(ShareListener { socket: listener.into(), transport: ShareTransport::Streams })
    }

    /// Does nothing: a guest with a vsock connects to its host's ports by itself.
    async fn connect_shares(&self) -> Result<(), VmmError> {
        Ok(())
    }

    async fn pause(&self) -> Result<(), VmmError> {
        self.driver.pause(&self.vm).await
    }

    async fn resume(&self) -> Result<(), VmmError> {
        self.driver.resume(&self.vm).await
    }

    async fn freeze(&self, dir: &Path) -> Result<(), VmmError> {
        let Jailed { jail_dir, link, call_timeout, .. } = &self.vm;
        let pod = self.vm.pod();
        // A connection that still exists in the copy would break the copy's next ones.
        let closed = tokio::time::timeout(*call_timeout, link.close()).await;
        closed.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(path_error(
            pod,
            "close the agent's connection on",
            vsock::SOCKET.into(),
        ))?;
        tokio::time::sleep_until(self.freezable).await;
        let snapshot = jail_dir.make_dir(FROZEN).map_err(path_error(pod, "create", FROZEN.into()))?;
        self.driver.snapshot(&self.vm, &snapshot).await?;
        store::<D>(jail_dir, dir).map_err(path_error(pod, "store a frozen VM in", dir.to_owned()))
    }

    async fn checkpoint(&self, to: &Destination, disks: &[DiskRecord]) -> Result<Vec<SavedDisk>, VmmError> {
        self.driver.checkpoint(&self.vm, to, disks, self.freezable).await
    }

    fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Arc<dyn Vm>, VmmError> {
        let vm = Jailed { process: self.vm.process.assign(pod, run_dir)?, ..self.vm.clone() };
        Ok(Arc::new(Self { vm, driver: self.driver.assigned(run_dir), freezable: self.freezable }))
    }

    async fn last_lines(&self) -> Vec<String> {
        self.vm.process.captures.last_lines().await
    }

    async fn exited(&self) -> VmExit {
        self.vm.process.exit().await
    }

    async fn kill(&self) -> Result<(), VmmError> {
        let VmmProcess { record, handle, .. } = &self.vm.process;
        record.kill(handle, self.vm.call_timeout, D::FILES).await
    }
}

/// Copies a snapshot from the jail to `dir`. The memory is already there; its owner becomes root, so that the VMM's
/// user can no longer open it.
fn store<D: VmDriver>(jail_dir: &JailDir, dir: &Path) -> io::Result<()> {
    for (name, max) in D::SNAPSHOT {
        let content = jail_dir.read(FROZEN, name, *max)?;
        let file = fs::File::options().write(true).create_new(true).mode(0o600).open(dir.join(name));
        file?.write_all(&content)?;
    }
    let memory = dir.join(MEMORY);
    chown(&memory, Some(0), Some(0))?;
    D::compact_memory(&memory)
}
