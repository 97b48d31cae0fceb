//! A VM from its start to its end.

use std::fs;
use std::io::{self, PipeReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::json;
use tokio::sync::watch;

use super::arguments::{Disk, Forward, Machine};
use super::ping::Pinger;
use super::port::Output;
use super::{VMM_MEMORY, Vm, VmError};
use crate::group::Groups;
use crate::log::{Printed, plain};
use crate::options::Resources;

/// Number of bytes kept from the end of the console.
const CONSOLE: usize = 4096;
/// Size of the disk that holds the command, bytes.
const COMMAND_DISK: usize = 64 << 10;
/// Timeout of the cgroup's removal.
const REMOVAL: Duration = Duration::from_secs(5);

/// A command that runs in its own VM.
#[derive(Debug, Clone)]
pub struct Task {
    /// Name of the VM's cgroup.
    pub name: String,
    /// The command.
    pub command: Vec<String>,
    /// Number of processors.
    pub cpus: u32,
    /// Memory, bytes.
    pub memory: u64,
    /// CPU limits of QEMU; `None` for no cgroup. The memory limit of the cgroup covers the VM and QEMU itself.
    pub resources: Option<Resources>,
    /// Disks for the command.
    pub disks: Vec<Disk>,
    /// Port that this host forwards to the command.
    pub forward: Option<Forward>,
    /// Whether the VM is pinged. It then has no other network.
    pub ping: bool,
}

/// A running VM. Dropping it kills QEMU.
#[derive(Debug)]
pub struct RunningVm {
    /// When QEMU was spawned.
    pub spawned: Instant,
    vmm: OwnedFd,
    pid: Pid,
    state: watch::Receiver<State>,
    console: Console,
    reader: Option<JoinHandle<()>>,
    groups: Option<Groups>,
    pinger: Option<Pinger>,
    // Must be removed last.
    _dir: tempfile::TempDir,
}

#[derive(Debug, Default)]
struct State {
    output: Output,
    failed: Option<VmError>,
}

/// The last output of QEMU and of the guest's console.
#[derive(Debug, Clone, Default)]
struct Console(Arc<Mutex<Vec<u8>>>);

impl Console {
    fn read(&self, mut from: PipeReader) {
        let mut buffer = [0; CONSOLE];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let mut tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            tail.extend_from_slice(&buffer[..count]);
            let excess = tail.len().saturating_sub(CONSOLE);
            tail.drain(..excess);
        }
    }

    fn last_words(&self) -> String {
        let tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&tail);
        let last = text.lines().rev().find(|line| !line.trim().is_empty()).map(plain);
        last.unwrap_or_else(|| "it printed nothing".into())
    }
}

impl Vm {
    /// Starts a VM. The command starts later: see [`RunningVm::begun`].
    pub fn start(&self, task: &Task) -> Result<RunningVm, VmError> {
        let host = |action| move |error: io::Error| VmError::Host { action, reason: error.to_string() };
        let dir = tempfile::Builder::new().prefix("sandboxer-vm-").tempdir();
        let dir = dir.map_err(host("create a directory for a VM"))?;
        let station = task.ping.then(|| dir.path().join("net"));
        let pinger = station.as_deref().map(Pinger::listen).transpose();
        let pinger = pinger.map_err(host("create the socket of a VM's network"))?;
        let mut machine = Machine {
            image: &self.image,
            accelerator: &self.accelerator,
            cpus: task.cpus,
            memory: task.memory,
            disks: vec![Disk {
                serial: "command",
                path: command_disk(dir.path().join("command"), &task.command)
                    .map_err(host("write a VM's command"))?,
                direct: false,
                read_only: true,
            }],
            forward: task.forward.clone(),
            station,
        };
        machine.disks.extend(task.disks.iter().cloned());
        let limits = task.resources.map(|limits| Resources {
            memory_limit: i64::try_from(task.memory + VMM_MEMORY).unwrap_or(i64::MAX),
            ..limits
        });
        let groups = limits.map(|limits| Groups::make(&self.groups, &task.name, limits)).transpose();
        let groups = groups.map_err(host("limit a VM"))?;
        let (ours, theirs) = UnixStream::pair().map_err(host("create the socket of a VM's port"))?;
        let (from_console, to_console) = io::pipe().map_err(host("create the pipe of a VM's console"))?;
        // The thread that spawns QEMU also waits for it, and QEMU dies with that thread: so QEMU also ends if this
        // process is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(&self.program).args(machine.arguments());
        // Ctrl-C must reach only this process, which then ends the VM.
        command.process_group(0).stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(to_console.try_clone().map_err(host("create the pipe of a VM's console"))?);
        command.stderr(to_console);
        let of_groups = groups.as_ref().map(|groups| groups.paths().to_vec()).unwrap_or_default();
        let (console, (to, from)) = (Console::default(), mpsc::sync_channel(1));
        let supervisor = {
            let console = console.clone();
            std::thread::spawn(move || supervise(command, &of_groups, &to, from_console, &console))
        };
        let spawned = Instant::now();
        let vmm = from.recv().unwrap_or_else(|_| Err(io::Error::other("its thread ended")));
        let (vmm, pid) = vmm.map_err(host("start QEMU with setpriv"))?;
        let (states, state) = watch::channel(State::default());
        let reader = {
            let console = console.clone();
            std::thread::spawn(move || read(ours, &states, supervisor, &console))
        };
        Ok(RunningVm { spawned, vmm, pid, state, console, reader: Some(reader), groups, pinger, _dir: dir })
    }
}

/// Writes the disk that holds the command.
fn command_disk(path: PathBuf, command: &[String]) -> io::Result<PathBuf> {
    let mut text = format!("{}\n", json!({ "command": command })).into_bytes();
    if text.len() > COMMAND_DISK {
        return Err(io::Error::other(format!("it is longer than {COMMAND_DISK} bytes")));
    }
    text.resize(COMMAND_DISK, 0);
    fs::write(&path, text)?;
    Ok(path)
}

/// Spawns QEMU, reads its console and waits for its end. Returns QEMU's exit status.
fn supervise(
    mut command: Command,
    groups: &[PathBuf],
    started: &mpsc::SyncSender<io::Result<(OwnedFd, Pid)>>,
    from: PipeReader,
    console: &Console,
) -> String {
    let spawned = command.spawn();
    // Its copies of QEMU's pipe ends would keep them open.
    drop(command);
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            let _ = started.send(Err(error));
            return String::new();
        }
    };
    let ready = limited(&child, groups);
    if ready.is_err() {
        // QEMU may already have ended.
        let _ = child.kill();
    }
    let _ = started.send(ready);
    console.read(from);
    child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
}

/// Moves a process that has just begun into the groups, before it starts threads. Returns its descriptor and process
/// id.
fn limited(child: &Child, groups: &[PathBuf]) -> io::Result<(OwnedFd, Pid)> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("its process has no number"))?;
    for group in groups {
        fs::write(group.join("cgroup.procs"), pid.as_raw_nonzero().to_string())?;
    }
    Ok((pidfd_open(pid, PidfdFlags::empty())?, pid))
}

/// Reads the guest's frames until the guest sends an invalid one or QEMU ends, then waits for QEMU's end.
fn read(
    mut port: UnixStream,
    states: &watch::Sender<State>,
    supervisor: JoinHandle<String>,
    console: &Console,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = port.read(&mut buffer) {
        let now = Instant::now();
        let mut refused = false;
        states.send_modify(|state| {
            if let Err(error) = state.output.add(&buffer[..count], now) {
                (state.failed, refused) = (Some(error.into()), true);
            }
        });
        // Later bytes stay in the socket.
        if refused {
            break;
        }
    }
    let status = supervisor.join().unwrap_or_else(|_| "its thread panicked".into());
    states.send_modify(|state| {
        let exited = || VmError::Exited { status, last_output: console.last_words() };
        if state.output.exit.is_none() {
            state.failed.get_or_insert_with(exited);
        }
    });
}

impl RunningVm {
    /// Waits until the guest's unit runs; returns the time from the spawn of QEMU.
    pub async fn begun(&self, limit: Duration) -> Result<Duration, VmError> {
        self.seen(limit, |output| output.begun).await
    }

    /// Waits for the command's first byte on stdout; returns the time from the spawn of QEMU.
    pub async fn first_byte(&self, limit: Duration) -> Result<Duration, VmError> {
        self.seen(limit, |output| output.first_byte).await
    }

    /// Waits for the first answered ping; returns the time from the spawn of QEMU. `None` without an answer, or if QEMU
    /// has not connected its network card yet.
    pub async fn first_ping(&self, limit: Duration) -> Option<Duration> {
        let answered = self.pinger.as_ref()?.answered(limit).await?;
        Some(answered.saturating_duration_since(self.spawned))
    }

    async fn seen(
        &self,
        limit: Duration,
        mark: impl Fn(&Output) -> Option<Instant>,
    ) -> Result<Duration, VmError> {
        let mut states = self.state.clone();
        let seen = states.wait_for(|state| mark(&state.output).is_some() || state.failed.is_some());
        let timeout = || VmError::NoUnit { limit, last_output: self.console.last_words() };
        let state = tokio::time::timeout(limit, seen).await.map_err(|_| timeout())?.map_err(|_| timeout())?;
        match (mark(&state.output), &state.failed) {
            (Some(at), _) => Ok(at.saturating_duration_since(self.spawned)),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Err(timeout()),
        }
    }

    /// Returns QEMU's process id.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Returns the command's exit code; `None` while it runs.
    pub fn ended(&self) -> Result<Option<i32>, VmError> {
        let state = self.state.borrow();
        match (state.output.exit, &state.failed) {
            (Some((code, _)), None) => Ok(Some(code)),
            (_, Some(error)) => Err(error.clone()),
            (None, None) => Ok(None),
        }
    }

    /// Returns the command's running time, s; `None` while it runs.
    pub fn ran_s(&self) -> Option<f64> {
        let state = self.state.borrow();
        let ((_, end), begun) = (state.output.exit?, state.output.begun?);
        Some(end.saturating_duration_since(begun).as_secs_f64())
    }

    /// Returns the command's output so far.
    pub fn printed(&self) -> Printed {
        self.state.borrow().output.printed()
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        // QEMU may have ended.
        let _ = pidfd_send_signal(&self.vmm, Signal::KILL);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        if let Some(groups) = &mut self.groups {
            groups.remove(REMOVAL);
        }
    }
}
