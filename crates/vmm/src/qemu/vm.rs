//! A running QEMU.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd, RawFd},
        unix::{self, fs::OpenOptionsExt},
    },
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use rustix::net::Shutdown;
use sandboxer_process::{Process, jail, socket};
use sandboxer_protocol::{id::SandboxId, share::DISK_SERIAL};
use tokio::time::Instant;

use super::{command_line, ram, slots, vhost::Packets};
use crate::{
    AgentStream, Destination, DiskLimits, DiskRecord, DiskSpec, MEMORY, SavedDisk, ShareListener,
    ShareTransport, Vm, VmExit, VmRecord, VmmError,
    qmp::{Qmp, QmpError},
    run_dir::{Captures, path_error},
};

pub(super) const CONTROL: &str = "control.sock";
pub(super) const AGENT: &str = "agent.sock";
pub(super) const CONSOLE: &str = "console.sock";
/// Name of the socket of the process that serves the guest's shares.
pub(super) const SHARES: &str = "shares.sock";
/// Name of the file with the state of a frozen VM's devices.
pub(super) const STATE: &str = "state";

/// The factor of the time limit for writing the memory of a VM, which takes as long as the disk does.
const LONG_CALL: u32 = 12;
/// Time before a VM that was just saved is resumed again.
const FINALIZED: Duration = Duration::from_millis(5);
/// Size of the buffers of the stream with a VM's memory, bytes.
const STREAM_BUFFER: usize = 256 << 10;

/// Opens a file that a VMM has open, for reading. The guest may have broken into its VMM and chosen another one, so only a
/// regular file is opened: nothing that blocks or is endless.
fn opened(pid: u32, number: u64) -> io::Result<fs::File> {
    use std::os::unix::fs::OpenOptionsExt;
    let path = format!("/proc/{pid}/fd/{number}");
    let file = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is a device or a pipe, of which no copy can be made")),
    }
}

/// A VM run by QEMU. Clones refer to the same VM.
#[derive(Debug, Clone)]
pub(super) struct QemuVm {
    pub(super) record: VmRecord,
    pub(super) process: Arc<Process>,
    pub(super) qmp: Qmp,
    pub(super) captures: Arc<Captures>,
    pub(super) packets: Arc<Packets>,
    pub(super) call_timeout: Duration,
    /// A duplicate of the last agent stream. QEMU accepts the next one only once this is dead.
    pub(super) agent: Arc<Mutex<Option<OwnedFd>>>,
    /// Time from which the VM can be frozen, see [`FREEZABLE`](crate::FREEZABLE); `None`: at any time.
    pub(super) freezable: Option<Instant>,
}

impl QemuVm {
    /// Loads the state of a frozen VM from a file that QEMU inherited as descriptor `state`.
    pub(super) async fn load(&self, state: RawFd) -> Result<(), VmmError> {
        self.qmp.load(state, self.call_timeout).await.map_err(self.answer("loading a template"))
    }

    /// Hotplugs a disk.
    ///
    /// QEMU gets the commands together. It executes one after the other without waiting for the daemon in between.
    async fn plug(&self, disk: &DiskSpec, file: OwnedFd) -> Result<(), QmpError> {
        let (set, limit) = (command_line::set_of(&disk.serial), self.call_timeout);
        let node = command_line::block_node(disk, set);
        let (passed, added, plugged) = tokio::join!(
            biased;
            self.qmp.add_fd_to(set, file, limit),
            self.qmp.blockdev_add(&node, limit),
            self.connect(disk),
        );
        if let Err(error) = passed.and(added) {
            // The device may belong to another disk of this name.
            self.undo(self.qmp.remove_fd(set, limit)).await;
            return Err(error);
        }
        // The disk is limited before the guest has found it, or a moment later.
        let plugged = match plugged {
            Ok(()) => self.throttle(disk).await,
            refused => refused,
        };
        if plugged.is_err() {
            self.undo(self.unplug(&disk.serial)).await;
        }
        plugged
    }

    /// Removes the remains of a disk that was not attached.
    async fn undo(&self, removal: impl Future<Output = Result<(), QmpError>>) {
        if let Err(error) = removal.await {
            tracing::warn!(pod = %self.record.pod, %error, "cannot remove what is left of a disk that was not attached");
        }
    }

    /// Gives the guest a disk whose image QEMU already has: in the disk's slot, or with its own device.
    async fn connect(&self, disk: &DiskSpec) -> Result<(), QmpError> {
        if let Some(slot) = slots::of(&disk.serial) {
            match self.qmp.blockdev_reopen(&slot.filled(), self.call_timeout).await {
                Err(QmpError::Refused { reason, .. }) if slot.is_missing(&reason) => {}
                filled => return filled,
            }
        }
        self.add_device(&disk.serial, command_line::controller(disk)).await
    }

    /// Takes a disk from the guest, which may not have it.
    async fn disconnect(&self, serial: &str) -> Result<(), QmpError> {
        let (id, limit) = (command_line::device_id(serial), self.call_timeout);
        if let Some(slot) = slots::of(serial) {
            match self.qmp.blockdev_reopen(&slot.emptied(), limit).await {
                Err(QmpError::Refused { reason, .. }) if slot.is_missing(&reason) => {}
                // The next disk may have no limits.
                emptied => return emptied.and(self.qmp.throttle(&id, DiskLimits::default(), limit).await),
            }
        }
        self.qmp.device_del(&id, limit).await
    }

    /// Unplugs a disk and forgets its image.
    async fn unplug(&self, serial: &str) -> Result<(), QmpError> {
        let limit = self.call_timeout;
        self.disconnect(serial).await?;
        self.qmp.blockdev_del(&command_line::node_name(serial), limit).await?;
        // QEMU has the file open a second time.
        self.qmp.remove_fd(command_line::set_of(serial), limit).await
    }

    async fn throttle(&self, disk: &DiskSpec) -> Result<(), QmpError> {
        if disk.limits.is_none() {
            return Ok(());
        }
        let id = command_line::device_id(&disk.serial);
        self.qmp.throttle(&id, disk.limits, self.call_timeout).await
    }

    /// Limits the disks that a restored VM begins with.
    pub(super) async fn limit(&self, disks: &[DiskSpec]) -> Result<(), VmmError> {
        for disk in disks {
            self.throttle(disk).await.map_err(self.answer("limiting a disk"))?;
        }
        Ok(())
    }

    /// Adds a disk's device at `controller`, or at the only controller if an earlier daemon started the VM.
    async fn add_device(&self, serial: &str, controller: &str) -> Result<(), QmpError> {
        let add = |controller: &str| {
            self.qmp.device_add(command_line::disk_device(serial, controller), self.call_timeout)
        };
        match add(controller).await {
            Err(QmpError::Refused { reason, .. }) if command_line::lacks_controller(&reason, controller) => {
                add(command_line::READ_ONLY_DISKS).await
            }
            added => added,
        }
    }

    fn answer(&self, call: &str) -> impl FnOnce(QmpError) -> VmmError {
        answer(&self.record.pod, call)
    }

    /// Opens the files that QEMU has for `disks`. Returns them in the order in which another QEMU has to begin with
    /// them, so that each is at its place at its controller.
    async fn open_disks(&self, disks: &[DiskRecord]) -> Result<Vec<SavedDisk>, VmmError> {
        let (pod, limit) = (&self.record.pod, self.call_timeout);
        let passed = self.qmp.passed_fds(limit).await.map_err(self.answer("listing its files"))?;
        let mut found = Vec::new();
        for record in disks {
            let set = command_line::set_of(&record.serial);
            let Some((_, number)) = passed.iter().find(|(of, _)| *of == set) else {
                let reason = format!("the VM has no disk {}", record.serial);
                return Err(VmmError::Refused { pod: pod.clone(), call: "a checkpoint".into(), reason });
            };
            let file = opened(self.record.pid, *number);
            let file = file.map_err(path_error(pod, "open the file of a disk,", record.path.clone()))?;
            let place = self.qmp.scsi_id(&command_line::device_id(&record.serial), limit).await;
            let place = place.map_err(self.answer("looking for a disk"))?;
            found.push((place, SavedDisk { record: record.clone(), file }));
        }
        found.sort_by_key(|(place, _)| *place);
        let mut next = [0; 2];
        for (place, saved) in &found {
            let next = &mut next[usize::from(saved.record.read_only)];
            if let Some(place) = place {
                if place != next {
                    return Err(VmmError::Refused {
                        pod: pod.clone(),
                        call: "a checkpoint".into(),
                        reason: format!(
                            "disk {} is at place {place} of its controller and not at {next}, because a container \
                             before it was removed",
                            saved.record.serial
                        ),
                    });
                }
                *next += 1;
            }
        }
        Ok(found.into_iter().map(|(_, saved)| saved).collect())
    }
}

#[async_trait]
impl Vm for QemuVm {
    fn record(&self) -> VmRecord {
        self.record.clone()
    }

    async fn agent_stream(&self) -> Result<Box<dyn AgentStream>, VmmError> {
        let fresh = || -> io::Result<_> {
            let mut last = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(last) = last.take() {
                // A stream that is dead already is fine.
                let _ = rustix::net::shutdown(&last, Shutdown::Both);
            }
            let stream = socket::connect(&self.record.run_dir, AGENT)?;
            *last = Some(stream.as_fd().try_clone_to_owned()?);
            Ok(stream)
        };
        let stream =
            fresh().map_err(path_error(&self.record.pod, "connect to", self.record.run_dir.join(AGENT)))?;
        Ok(Box::new(stream))
    }

    async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError> {
        let pod = &self.record.pod;
        let name = disk.file.name();
        let file = disk.file.descriptor().map_err(path_error(pod, "attach", name.to_owned()))?;
        self.plug(disk, file).await.map_err(answer(pod, &disk.attaching()))
    }

    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError> {
        self.unplug(serial).await.map_err(answer(&self.record.pod, &format!("detaching disk {serial}")))
    }

    fn listen_for_shares(&self) -> Result<ShareListener, VmmError> {
        let run_dir = &self.record.run_dir;
        let listened = socket::listen_anew(run_dir, SHARES).and_then(|listener| {
            // Only the daemon can enter its directory, so it connects to the socket and passes it to QEMU open.
            let user = jail::user_of(&fs::metadata(run_dir)?);
            unix::fs::chown(socket::within(&socket::open(run_dir)?, SHARES), Some(user), Some(user))?;
            Ok(listener)
        });
        let listener = listened.map_err(path_error(&self.record.pod, "listen on", run_dir.join(SHARES)))?;
        Ok(ShareListener { socket: listener.into(), transport: ShareTransport::Disk })
    }

    async fn connect_shares(&self) -> Result<(), VmmError> {
        let (pod, path) = (&self.record.pod, self.record.run_dir.join(SHARES));
        self.detach_disk(DISK_SERIAL).await?;
        let socket =
            socket::handle(&self.record.run_dir, SHARES).map_err(path_error(pod, "open socket", path))?;
        let limit = self.call_timeout;
        let connected = async {
            let handed = self.qmp.add_fd(socket, limit).await?;
            let node = command_line::shares_node(handed.number);
            let added = self.qmp.blockdev_add(&node, limit).await;
            self.qmp.remove_fd(handed.set, limit).await.and(added)?;
            self.add_device(DISK_SERIAL, command_line::READ_ONLY_DISKS).await
        };
        connected.await.map_err(self.answer("connecting the guest to its shares"))
    }

    async fn pause(&self) -> Result<(), VmmError> {
        self.qmp.stop(self.call_timeout).await.map_err(self.answer("pausing the guest"))
    }

    async fn resume(&self) -> Result<(), VmmError> {
        let until = Instant::now() + self.call_timeout;
        loop {
            match self.qmp.cont(self.call_timeout).await {
                // It tells that it has saved the VM a moment before it has finished that.
                Err(QmpError::Refused { reason, .. })
                    if reason.contains("not finalized") && Instant::now() < until =>
                {
                    tokio::time::sleep(FINALIZED).await;
                }
                resumed => return resumed.map_err(self.answer("resuming the guest")),
            }
        }
    }

    async fn freeze(&self, dir: &Path) -> Result<(), VmmError> {
        if let Some(freezable) = self.freezable {
            tokio::time::sleep_until(freezable).await;
        }
        self.pause().await?;
        // From now on, the VMM's user must not change the memory.
        let memory = dir.join(MEMORY);
        unix::fs::chown(&memory, Some(0), Some(0)).map_err(path_error(
            &self.record.pod,
            "change the owner of",
            memory,
        ))?;
        let path = dir.join(STATE);
        let state = fs::File::options().write(true).create_new(true).mode(0o600).open(&path);
        let state = state.map_err(path_error(&self.record.pod, "create", path))?;
        self.qmp.save(state.into(), self.call_timeout).await.map_err(self.answer("freezing the guest"))
    }

    async fn checkpoint(&self, to: &Destination, disks: &[DiskRecord]) -> Result<Vec<SavedDisk>, VmmError> {
        if let Some(freezable) = self.freezable {
            tokio::time::sleep_until(freezable).await;
        }
        let saved = self.open_disks(disks).await?;
        let create = |name: &str| {
            let path = to.dir.join(name);
            let file = fs::File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
            file.map_err(path_error(&self.record.pod, "create", path))
        };
        let (memory, state) = (create(MEMORY)?, create(STATE)?);
        let pipe = path_error(&self.record.pod, "make a pipe for", to.dir.clone());
        let (stream, writer) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|errno| pipe(errno.into()))?;
        let bytes = to.memory_mib << 20;
        // The end of the stream is QEMU's: it comes at the latest with its exit.
        let splitting = tokio::task::spawn_blocking(move || {
            let stream = io::BufReader::with_capacity(STREAM_BUFFER, fs::File::from(stream));
            ram::split(stream, io::BufWriter::with_capacity(STREAM_BUFFER, state), &memory, bytes)
        });
        self.pause().await?;
        let limit = self.call_timeout * LONG_CALL;
        let sent = self.qmp.save_all(writer, limit).await.map_err(self.answer("saving the guest"));
        let kept = tokio::time::timeout(limit, splitting).await.map_err(io::Error::other);
        let kept = kept.and_then(|kept| kept.map_err(io::Error::other)).and_then(|kept| kept);
        match (sent, kept) {
            (Ok(()), Ok(_)) => Ok(saved),
            // QEMU did not write all.
            (Err(error), Ok(_)) => Err(error),
            (Err(error), Err(kept)) if kept.kind() == io::ErrorKind::UnexpectedEof => Err(error),
            // A full disk ends the reader first, and QEMU only sees that nobody reads.
            (_, Err(kept)) => {
                Err(path_error(&self.record.pod, "save the guest's memory in", to.dir.clone())(kept))
            }
        }
    }

    fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Arc<dyn Vm>, VmmError> {
        let record = self.record.assign(&self.process, pod, run_dir)?;
        Ok(Arc::new(Self { record, ..self.clone() }))
    }

    fn helpers(&self) -> Vec<u32> {
        self.packets.carriers().processes.clone()
    }

    async fn last_lines(&self) -> Vec<String> {
        self.captures.last_lines().await
    }

    async fn exited(&self) -> VmExit {
        let exit = self.process.exited().await;
        // Boxed: this waits for as long as the VM runs.
        let last_lines = Box::pin(async {
            self.captures.drained().await;
            self.captures.last_lines().await
        });
        VmExit { how: exit.to_string(), last_lines: last_lines.await }
    }

    async fn kill(&self) -> Result<(), VmmError> {
        let files = [CONTROL, AGENT, CONSOLE, SHARES];
        self.record.kill(&self.process, self.call_timeout, &files).await
    }
}

/// Returns a function that turns an error of QEMU into an error that names the pod and the call.
pub(super) fn answer(pod: &SandboxId, call: &str) -> impl FnOnce(QmpError) -> VmmError {
    let (pod, call) = (pod.clone(), call.to_owned());
    move |error| match error {
        QmpError::Timeout(limit) => VmmError::Hung { pod, call, limit },
        QmpError::Refused { reason, .. } => VmmError::Refused { pod, call, reason },
        QmpError::Malformed(reason) => VmmError::Malformed { pod, call, reason },
        QmpError::Closed => VmmError::Malformed { pod, call, reason: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::fd::AsRawFd};

    use super::*;

    #[test]
    fn of_what_a_vmm_has_open_only_files_are_read() {
        let here = std::process::id();
        let number = |fd: &dyn AsRawFd| u64::try_from(fd.as_raw_fd()).unwrap();
        let file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut &file, b"disk").unwrap();
        let mut text = String::new();
        opened(here, number(&file)).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "disk");
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        let error = opened(here, number(&pipe)).unwrap_err();
        assert!(error.to_string().contains("a device or a pipe"), "{error}");
    }
}
