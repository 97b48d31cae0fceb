//! Connects the FIFOs that containerd created with a process in the guest.
//!
//! The front keeps the FIFOs open, so that containerd sees an end of file when the process ends, and not when this
//! worker dies.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_guest::Agent;
use sandboxer_protocol::{
    agent::OutputStream,
    id::{ContainerId, ExecId, SandboxId},
};
use tokio::{sync::Notify, task::JoinSet};
use tokio_util::task::AbortOnDropHandle;

use super::{
    StdioPaths,
    copy::{copy_input, copy_output, logged},
    spool::{Inlet, Outlet},
};
use crate::{
    error::PodError,
    front::{self, EntryHandle, Front},
};

/// Kind of the front's entry with a process's streams: the FIFO and memfd of stdin, stdout and stderr, as far as they
/// exist.
const STREAMS: &str = "streams";

/// The names of a process's streams.
const STDIO: [&str; 3] = ["stdin", "stdout", "stderr"];

/// The open FIFOs of a process.
#[derive(Debug, Default)]
pub struct Io {
    stdin: Option<Inlet>,
    stdout: Option<Outlet>,
    stderr: Option<Outlet>,
    stderr_writer: Option<StderrWriter>,
    /// Whether the process has a terminal.
    has_terminal: bool,
    /// The streams' copy at the front.
    front_handle: Option<EntryHandle>,
    /// Whether an earlier worker had copied an unknown part.
    forgotten: bool,
}

/// Writes to a container's stderr for the daemon when the guest no longer can.
///
/// While it exists, the FIFO has a writer, so containerd reads on until the process's exit is known.
#[derive(Debug)]
pub struct StderrWriter(OwnedFd);

impl StderrWriter {
    /// Writes one line, or as much of it as the FIFO accepts.
    pub fn write_line(&self, words: &str) {
        if let Err(error) = rustix::io::write(&self.0, format!("sandboxer: {words}\n").as_bytes()) {
            tracing::debug!(%error, "cannot write to the container's standard error");
        }
    }
}

/// Ends a running stdin copy after the content of its FIFO has been delivered.
#[derive(Debug, Clone)]
pub struct StdinCloser(Arc<Notify>);

impl StdinCloser {
    /// Signals that nothing more will be written to the FIFO.
    pub fn close(&self) {
        self.0.notify_one();
    }

    /// Waits for the signal of [`StdinCloser::close`].
    pub async fn closed(&self) {
        self.0.notified().await;
    }
}

/// The running copies of a process's streams. Dropping it ends the copies.
#[derive(Debug)]
pub struct RunningIo {
    outputs: JoinSet<()>,
    /// Releases the input, which is held back until then.
    started: Arc<Notify>,
    // Held for its drop, which ends the copy.
    stdin: JoinSet<()>,
}

impl RunningIo {
    /// Returns the handle that releases the input: the agent accepts none before the process has started.
    pub fn gate(&self) -> Arc<Notify> {
        self.started.clone()
    }

    /// Ends the input, and waits until all output is in the FIFOs.
    pub async fn drained(self) {
        let Self { mut outputs, stdin, .. } = self;
        drop(stdin);
        while outputs.join_next().await.is_some() {}
    }
}

/// The last output of an exited process, on its way into the FIFOs, which are closed after it. The exit is reported
/// without waiting for it: containerd's clients may read slowly, or not at all.
///
/// Dropping it ends the copies of this worker, but the front keeps the streams for the next one.
#[derive(Debug)]
pub struct LastOutput {
    passing: AbortOnDropHandle<()>,
    front_handle: Option<EntryHandle>,
}

impl LastOutput {
    /// Delivers the output that `running` has not copied yet. `front_handle`: the streams at the front.
    pub fn deliver(running: RunningIo, front_handle: Option<EntryHandle>) -> Self {
        let at_front = front_handle.clone();
        let passing = tokio::spawn(async move {
            running.drained().await;
            if let Some(front_handle) = at_front {
                front_handle.release();
            }
        });
        Self { passing: AbortOnDropHandle::new(passing), front_handle }
    }

    /// Waits until all output has been delivered, but at most for `limit`; then the rest is lost.
    pub async fn within(mut self, limit: Duration) {
        if tokio::time::timeout(limit, &mut self.passing).await.is_err() {
            self.give_up();
        }
    }

    /// Closes the streams; output that has not been delivered is lost.
    pub fn give_up(self) {
        drop(self.passing);
        if let Some(front_handle) = self.front_handle {
            front_handle.release();
        }
    }
}

/// The process that the streams belong to.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The container.
    pub container: ContainerId,
    /// The exec; `None`: the container's init.
    pub exec: Option<ExecId>,
}

impl Subject {
    /// Returns the key of the process's entry of this `kind` at the front.
    pub fn key(&self, kind: &str) -> String {
        front::key(kind, &self.container, self.exec.as_ref())
    }
}

impl Io {
    /// Opens the FIFOs, and stores them at the front until [`Io::let_go`] or the process's exit; containerd need not
    /// have opened its ends.
    ///
    /// Outputs are also opened for reading: a write then never fails without a reader, so a restart of containerd does
    /// not break a container. Input is not: it ends when its last writer closes, which some clients do instead of a
    /// CloseIO request.
    pub fn open(
        front: &Arc<Front>,
        pod: &SandboxId,
        subject: &Subject,
        paths: &StdioPaths,
    ) -> Result<Self, PodError> {
        // The FIFOs that an earlier worker opened for the same request: containerd has them open and must not see an
        // end of file in between.
        if let Ok(Some(io)) = Self::inherit(front, subject, paths) {
            return Ok(io);
        }
        let opened = Self::open_anew(front, pod, subject, paths);
        // The single entries have been merged into one by now, or closed.
        STDIO.iter().for_each(|stream| front.forget(&opening(subject, stream)));
        opened
    }

    fn open_anew(
        front: &Arc<Front>,
        pod: &SandboxId,
        subject: &Subject,
        paths: &StdioPaths,
    ) -> Result<Self, PodError> {
        let failed = |path: &Path| {
            let (pod, path) = (pod.clone(), path.to_owned());
            move |source| PodError::Path { pod, action: "open stdio FIFO", path, source }
        };
        let inlet = |path: &PathBuf| {
            front.open(&opening(subject, "stdin"), path, true).and_then(Inlet::new).map_err(failed(path))
        };
        let outlet = |stream: &str, path: &PathBuf| {
            front.open(&opening(subject, stream), path, false).and_then(Outlet::new).map_err(failed(path))
        };
        let (stdout, stderr) = (wanted(&paths.stdout), wanted(&paths.stderr).filter(|_| !paths.terminal));
        let mut io = Self {
            stdin: wanted(&paths.stdin).map(inlet).transpose()?,
            stdout: stdout.map(|path| outlet("stdout", path)).transpose()?,
            stderr: stderr.map(|path| outlet("stderr", path)).transpose()?,
            has_terminal: paths.terminal,
            ..Self::default()
        };
        let front_handle = io.find_stderr_writer(paths).and_then(|()| {
            let fds: Vec<_> = (io.stdin.iter().flat_map(Inlet::fds))
                .chain(io.stdout.iter().chain(&io.stderr).flat_map(Outlet::fds))
                .collect();
            front.keep(&subject.key(STREAMS), paths, &fds)
        });
        io.front_handle = Some(front_handle.map_err(|source| PodError::Front {
            pod: pod.clone(),
            what: subject.key(STREAMS).into(),
            source,
        })?);
        Ok(io)
    }

    /// Adopts the streams of a process that an earlier worker started: those the front has kept, or the FIFOs opened
    /// again. If they are gone, the output is lost; the exit is still reported.
    pub fn adopt(front: &Arc<Front>, pod: &SandboxId, subject: &Subject, paths: &StdioPaths) -> Self {
        match Self::inherit(front, subject, paths) {
            Ok(Some(io)) => return io,
            Ok(None) if front.is_new() => {}
            // The process had exited, and its streams were released.
            Ok(None) => return Self::default(),
            Err(error) => {
                tracing::warn!(container = %subject.container, %error, "cannot use the stored streams of the process");
                return Self::default();
            }
        }
        match Self::open(front, pod, subject, paths) {
            Ok(io) => Self { forgotten: true, ..io },
            Err(error) => {
                tracing::warn!(container = %subject.container, error = chain(&error), "its output is lost");
                Self::default()
            }
        }
    }

    /// Adopts the streams of an exited process, if an earlier worker had not delivered its last output.
    pub fn adopt_rest(front: &Arc<Front>, subject: &Subject, paths: &StdioPaths) -> Option<Self> {
        Self::inherit(front, subject, paths).unwrap_or_else(|error| {
            tracing::warn!(container = %subject.container, %error, "the last output of the process is lost");
            front.forget(&subject.key(STREAMS));
            None
        })
    }

    fn inherit(front: &Arc<Front>, subject: &Subject, paths: &StdioPaths) -> io::Result<Option<Self>> {
        let Some((entry, front_handle)) = front.take_with_handle(&subject.key(STREAMS)) else {
            return Ok(None);
        };
        // If the earlier worker was killed before it reported this, the front has single copies too, and containerd
        // would not see the end of file.
        let opened = STDIO.map(|stream| opening(subject, stream));
        opened.iter().filter(|key| front.has(key)).for_each(|key| front.forget(key));
        if entry.note::<StdioPaths>().as_ref() != Some(paths) {
            return Err(io::Error::other("they lead somewhere else"));
        }
        let mut fds = entry.fds.into_iter();
        let mut pair = || fds.next().zip(fds.next()).ok_or(io::ErrorKind::UnexpectedEof);
        let mut io =
            Self { front_handle: Some(front_handle), has_terminal: paths.terminal, ..Self::default() };
        if wanted(&paths.stdin).is_some() {
            let (fifo, spool) = pair()?;
            io.stdin = Some(Inlet::inherited(fifo, spool)?);
        }
        if wanted(&paths.stdout).is_some() {
            let (fifo, spool) = pair()?;
            io.stdout = Some(Outlet::inherited(fifo, spool)?);
        }
        if wanted(&paths.stderr).is_some() && !paths.terminal {
            let (fifo, spool) = pair()?;
            io.stderr = Some(Outlet::inherited(fifo, spool)?);
        }
        io.find_stderr_writer(paths)?;
        Ok(Some(io))
    }

    fn find_stderr_writer(&mut self, paths: &StdioPaths) -> io::Result<()> {
        let outlet = if paths.terminal { &self.stdout } else { &self.stderr };
        if let Some([fifo, _]) = outlet.as_ref().map(Outlet::fds) {
            self.stderr_writer = Some(StderrWriter(fifo.try_clone_to_owned()?));
        }
        Ok(())
    }

    /// Takes the daemon's writer of the process's stderr; there is only one.
    pub fn take_stderr_writer(&mut self) -> Option<StderrWriter> {
        self.stderr_writer.take()
    }

    /// Returns the handle of the streams' copy at the front.
    pub fn front_handle(&self) -> Option<EntryHandle> {
        self.front_handle.clone()
    }

    /// Closes all streams: the process will not exist.
    pub fn let_go(self) {
        if let Some(front_handle) = &self.front_handle {
            front_handle.release();
        }
    }

    /// Starts the copies. `resume`: whether an earlier worker started the process.
    pub fn run(self, agent: &Agent, subject: &Subject, resume: bool) -> (RunningIo, Option<StdinCloser>) {
        let lost = resume && self.forgotten;
        let mut outputs = JoinSet::new();
        for (stream, outlet) in [(OutputStream::STDOUT, self.stdout), (OutputStream::STDERR, self.stderr)] {
            if let Some(outlet) = outlet {
                let copy = copy_output(agent.clone(), subject.clone(), stream, outlet, lost);
                // Boxed: the waiting future would reserve space for it twice.
                outputs.spawn(logged(subject.clone(), Box::pin(copy)));
            }
        }
        let started = Arc::new(Notify::new());
        let mut stdin = JoinSet::new();
        let closer = self.stdin.map(|inlet| {
            let closer = StdinCloser(Arc::default());
            let ends = (closer.clone(), self.has_terminal);
            let copy = Box::pin(copy_input(agent.clone(), subject.clone(), inlet, ends, resume, lost));
            let (started, subject) = (started.clone(), subject.clone());
            stdin.spawn(async move {
                started.notified().await;
                logged(subject, copy).await;
            });
            closer
        });
        let running = RunningIo { outputs, started, stdin };
        if resume {
            running.started.notify_one();
        }
        (running, closer)
    }
}

/// Returns the key at the front of a single FIFO of a process, until all of them are stored as one entry.
fn opening(subject: &Subject, stream: &str) -> String {
    subject.key(&format!("opening-{stream}"))
}

fn wanted(path: &PathBuf) -> Option<&PathBuf> {
    Some(path).filter(|path| !path.as_os_str().is_empty())
}
