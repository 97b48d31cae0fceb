//! A VMM's process, started without a shell, held by pidfd, and found again by PID and start time.
//!
//! Dropping a [`Process`] leaves the process alone, because VMs outlive the daemon. Only a process that is still
//! [`Starting`] dies with its handle.

use std::{
    ffi::OsString,
    fs::{self, File},
    future, io, ops,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::FdFlags,
    process::{
        Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, WaitOptions, getrlimit,
        kill_process, pidfd_open, pidfd_send_signal, setpriority_pgrp, setpriority_process, setrlimit,
        setsid, waitid, waitpid,
    },
    thread::{UnshareFlags, unshare_unsafe},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
};

use crate::{
    cgroup::CgroupEntries,
    clone::{self, PreparedChild},
    jail::Jail,
    strays,
};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The process exited with this status.
    Status(i32),
    /// A signal killed the process.
    Signal(i32),
    /// The end is unknown, because the process was an earlier daemon's child.
    Unknown,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => write!(f, "exited with status {status}"),
            Self::Signal(signal) => write!(f, "was killed by signal {signal}"),
            Self::Unknown => f.write_str("is gone"),
        }
    }
}

/// A process started by this daemon or an earlier one.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    start_time: u64,
    pidfd: Arc<AsyncFd<OwnedFd>>,
    exit: watch::Receiver<Option<Exit>>,
}

/// A process that is killed when this is dropped, until [`Starting::keep`].
#[derive(Debug)]
pub struct Starting {
    process: Arc<Process>,
    abandoned: bool,
}

/// Returns the path of a program, which is looked up in `PATH` if it is a plain name; the name itself if it is not
/// found.
pub fn find(program: &Path) -> PathBuf {
    if program.components().count() > 1 {
        return program.to_owned();
    }
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&dirs).map(|dir| dir.join(program)).find(|path| path.is_file());
    found.unwrap_or_else(|| program.to_owned())
}

/// Niceness of background processes.
const BACKGROUND: i32 = 10;

/// Options for starting a process.
#[derive(Debug, Default)]
pub struct Equipment {
    /// Files that the process inherits with the same numbers.
    pub inherited: Vec<OwnedFd>,
    /// The process's stdout; `None`: the pipe of its stderr.
    pub stdout: Option<OwnedFd>,
    /// Whether the process runs at low priority.
    pub background: bool,
    /// Jail that the process enters before exec.
    pub jail: Option<Jail>,
    /// Control groups that the process enters before exec, so that all its memory is charged to them.
    pub groups: CgroupEntries,
    /// Additional environment variables.
    pub environment: Vec<(&'static str, OsString)>,
    /// Maximum number of descriptors that the process can open; `None`: as many as this process.
    pub open_files: Option<u64>,
}

/// Starts `program` in its own session, so that signals to the daemon's session do not reach it.
///
/// The environment is `PATH`, [`strays::MARK`] with `run_dir`, which is also the working directory, and
/// [`Equipment::environment`]. The stderr is the returned pipe. Blocks for the time of a fork, and for a few ms more
/// if the process cannot be started in [`Equipment::groups`]. Call it where blocking is allowed, inside a runtime.
pub fn spawn(
    program: &Path,
    arguments: Vec<OsString>,
    run_dir: &Path,
    equipment: Equipment,
) -> io::Result<(Starting, OwnedFd)> {
    let Equipment { inherited, stdout, background, jail, groups, environment, open_files } = equipment;
    let alone = jail.is_some();
    // Without CAP_SYS_RESOURCE, no process can have more than this one.
    let open_files =
        open_files.map(|files| files.min(getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX)));
    let (words, their_words) = io::pipe()?;
    let stdout: OwnedFd = match stdout {
        Some(stdout) => stdout,
        None => their_words.try_clone()?.into(),
    };
    // Between fork and exec there are only async-signal-safe system calls: no allocation, no lock.
    let prepare = move || {
        setsid()?;
        if background {
            setpriority_process(None, BACKGROUND)?;
        }
        // A core dump would write the whole guest to the host's disk.
        setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
        if let Some(files) = open_files {
            setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum: Some(files) })?;
        }
        if let Some(jail) = &jail {
            jail.enter()?;
        }
        // Only in the child, because other children of the daemon must not inherit them.
        for fd in &inherited {
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(())
    };
    let path = std::env::var_os("PATH").map(|path| ("PATH", path));
    let environment: Vec<_> =
        path.into_iter().chain([(strays::MARK, run_dir.into())]).chain(environment).collect();
    let started = match &groups.dir {
        Some(group) => {
            let stdio = [clone::dev_null()?, stdout.try_clone()?, their_words.try_clone()?.into()];
            let child = PreparedChild::new(&find(program), &arguments, &environment, run_dir, stdio)?;
            child.start_in(group.as_fd(), alone, &prepare)?
        }
        None => None,
    };
    let pid = match started {
        Some(pid) => pid,
        None => {
            let mut command = Command::new(program);
            command
                .args(arguments)
                .current_dir(run_dir)
                .env_clear()
                .envs(environment)
                .stdin(Stdio::null())
                .stdout(stdout)
                .stderr(their_words);
            entered(command, groups.procs, alone, prepare)?
        }
    };
    // The child is not reaped yet, so the PID is still its own.
    let watched = match Pid::from_raw(pid) {
        Some(pid) => pidfd_open(pid, PidfdFlags::NONBLOCK)
            .map_err(io::Error::from)
            .and_then(|pidfd| Process::watched(pid, pidfd, true)),
        None => Err(io::ErrorKind::InvalidData.into()),
    };
    match watched {
        Ok(process) => Ok((Starting { process: Arc::new(process), abandoned: true }, words.into())),
        Err(error) => {
            if let Some(pid) = Pid::from_raw(pid) {
                kill_process(pid, Signal::KILL)?;
                waitpid(Some(pid), WaitOptions::empty())?;
            }
            Err(error)
        }
    }
}

/// Starts `command`. The child writes its PID to these `cgroup.procs` files and runs `prepare`. Returns the PID.
fn entered(
    mut command: Command,
    procs: Vec<File>,
    alone: bool,
    prepare: impl Fn() -> io::Result<()> + Send + Sync + 'static,
) -> io::Result<i32> {
    // SAFETY: between fork and exec there are only system calls, also in `prepare`.
    unsafe {
        command.pre_exec(move || {
            for file in &procs {
                // "0" is the writing process.
                rustix::io::write(file, b"0")?;
            }
            prepare()
        })
    };
    let child = if alone { spawn_alone(command)? } else { command.spawn()? };
    i32::try_from(child.id()).map_err(io::Error::other)
}

/// Starts `command` as the first process of a new PID namespace. Uses a temporary thread, because all later children
/// of the thread would be in the namespace, too.
fn spawn_alone(mut command: Command) -> io::Result<Child> {
    let alone = std::thread::Builder::new().name("spawn".to_owned()).spawn(move || {
        // SAFETY: no file descriptor is passed, and the call changes only this thread.
        unsafe { unshare_unsafe(UnshareFlags::NEWPID) }?;
        command.spawn()
    })?;
    alone.join().unwrap_or_else(|_| Err(io::Error::other("the thread that starts a process panicked")))
}

/// Returns the process `pid` if it is still the one that started at `start_time`.
pub fn adopt(pid: u32, start_time: u64) -> io::Result<Option<Process>> {
    let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return Ok(None);
    };
    let pidfd = match pidfd_open(raw, PidfdFlags::NONBLOCK) {
        Ok(pidfd) => pidfd,
        Err(rustix::io::Errno::SRCH) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    // Opens the pidfd first: if the PID was reused by then, the start time differs.
    let found = from_pidfd(pid, pidfd)?;
    Ok(found.filter(|found| found.start_time == start_time))
}

/// Returns the process `pid` of a pidfd, or `None` if it has ended.
pub fn from_pidfd(pid: u32, pidfd: OwnedFd) -> io::Result<Option<Process>> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    match Process::watched(pid, pidfd, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

/// Returns the process that has this PID now. Only for a live process that another child of this daemon created.
pub fn child(pid: u32) -> io::Result<Process> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Process::watched(pid, pidfd_open(pid, PidfdFlags::NONBLOCK)?, true)
}

impl Process {
    fn watched(pid: Pid, pidfd: OwnedFd, child: bool) -> io::Result<Self> {
        let start_time = start_time_of(pid)?;
        // SAFETY: the AsyncFd owns the OwnedFd, which stays open for its lifetime.
        let pidfd =
            unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }.map_err(io::Error::from)?;
        let pidfd = Arc::new(pidfd);
        let (ended, exit) = watch::channel(None);
        // A separate task, so that a child is reaped even if no caller waits for it.
        tokio::spawn(watch_exit(pidfd.clone(), child, ended));
        Ok(Self { pid, start_time, pidfd, exit })
    }

    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Returns the start time of the process, clock ticks since boot.
    pub fn start_time(&self) -> u64 {
        self.start_time
    }

    /// Returns the pidfd of the process.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.get_ref().as_fd()
    }

    /// Returns whether the process runs now, as the kernel reports.
    pub fn is_alive(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)], Some(&now)) == Ok(0)
    }

    /// Returns whether the process is known to have ended.
    pub fn has_ended(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Waits for the end of the process. Cancel-safe; can be called again.
    pub async fn exited(&self) -> Exit {
        let mut exit = self.exit.clone();
        let exit = exit.wait_for(Option::is_some).await.map(|exit| exit.unwrap_or(Exit::Unknown));
        match exit {
            Ok(exit) => exit,
            // The watching task ended with the daemon; the process may still run.
            Err(_) => future::pending().await,
        }
    }

    /// Resets the priority of all threads of the process to normal.
    pub fn to_foreground(&self) -> io::Result<()> {
        // The process has its own process group, so one call reaches all threads.
        Ok(setpriority_pgrp(Some(self.pid), 0)?)
    }

    /// Kills the process. No error if it has ended.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Stops all threads of the process, wherever they are, until [`Process::go_on`]. No error if it has ended.
    pub fn stop(&self) -> io::Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets the stopped process run again. No error if it has ended.
    pub fn go_on(&self) -> io::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(self.pidfd.get_ref(), signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Starting {
    /// Returns another handle, which does not kill the process when dropped.
    pub fn watched(&self) -> Arc<Process> {
        self.process.clone()
    }

    /// Disarms the kill, so that the process keeps running when the handle is dropped.
    pub fn keep(mut self) -> Arc<Process> {
        self.abandoned = false;
        self.process.clone()
    }
}

impl ops::Deref for Starting {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if self.abandoned
            && let Err(error) = self.process.kill()
        {
            tracing::error!(pid = self.process.pid(), %error, "cannot kill a process whose start failed");
        }
    }
}

async fn watch_exit(pidfd: Arc<AsyncFd<OwnedFd>>, child: bool, ended: watch::Sender<Option<Exit>>) {
    // A pidfd is readable once its process has ended. An error only means that this daemon ends.
    let exit = tokio::select! {
        readable = pidfd.readable() => match readable {
            Ok(_) if child => reap(&pidfd),
            Ok(_) => Exit::Unknown,
            Err(_) => return,
        },
        // No caller waits; a child must be reaped all the same.
        () = ended.closed(), if !child => return,
    };
    ended.send_replace(Some(exit));
}

fn reap(pidfd: &AsyncFd<OwnedFd>) -> Exit {
    let status =
        waitid(WaitId::PidFd(pidfd.get_ref().as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    match status {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(status), _) => Exit::Status(status),
            (None, Some(signal)) => Exit::Signal(signal),
            (None, None) => Exit::Unknown,
        },
        Ok(None) | Err(_) => Exit::Unknown,
    }
}

/// Returns whether `pid` is still the process that started at `start_time`.
pub fn is_running(pid: u32, start_time: u64) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| start_time_of(pid).is_ok_and(|found| found == start_time))
}

/// Returns field 22 of `/proc/PID/stat`. The second field is in parentheses and may contain anything.
fn start_time_of(pid: Pid) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
    stat.rsplit_once(')')
        .and_then(|(_, fields)| fields.split_ascii_whitespace().nth(19)?.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed /proc/PID/stat"))
}

#[cfg(test)]
mod tests;
