//! Connects the FIFOs that containerd created with a process in the guest.
//!
//! The front keeps the FIFOs open, so that containerd sees an end of file when the process ends, and not when this worker dies.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_base::chain;
use sandboxer_guest::Agent;
use sandboxer_protocol::{
    agent::OutputStream,
    id::{ContainerId, ExecId, SandboxId},
};
use tokio::{sync::Notify, task::JoinSet};

use super::{
    StdioPaths,
    copy::{copy_input, copy_output, logged},
    spool::{Inlet, Outlet},
};
use crate::{
    error::PodError,
    front::{self, Front, Kept},
};

/// Names at the front of a process's streams: FIFO and memfd of stdin, stdout and stderr, as far as they exist.
const STREAMS: &str = "streams";

/// The names of a process's streams.
const STDIO: [&str; 3] = ["stdin", "stdout", "stderr"];

/// A process's FIFOs, open.
#[derive(Debug, Default)]
pub struct Io {
    stdin: Option<Inlet>,
    stdout: Option<Outlet>,
    stderr: Option<Outlet>,
    stderr_writer: Option<StderrWriter>,
    /// Their copy at the front.
    kept: Option<Kept>,
    /// An earlier worker had copied an unknown part.
    forgotten: bool,
}

/// Writes to a container's stderr for the daemon, when the guest cannot any more.
///
/// While it exists, the FIFO has a writer, so containerd reads on until the process's exit is known.
#[derive(Debug)]
pub struct StderrWriter(OwnedFd);

impl StderrWriter {
    /// Writes one line, as much as the FIFO accepts.
    pub fn write_line(&self, words: &str) {
        if let Err(error) = rustix::io::write(&self.0, format!("sandboxer: {words}\n").as_bytes()) {
            tracing::debug!(%error, "cannot write to the container's standard error");
        }
    }
}

/// Ends a running stdin copy after the content of its FIFO is delivered.
#[derive(Debug, Clone)]
pub struct StdinCloser(Arc<Notify>);

impl StdinCloser {
    /// Signals that nothing more will be written to the FIFO.
    pub fn close(&self) {
        self.0.notify_one();
    }

    /// Waits for the signal.
    pub async fn closed(&self) {
        self.0.notified().await;
    }
}

/// The running copies of a process's streams. Dropping it ends them.
#[derive(Debug)]
pub struct RunningIo {
    outputs: JoinSet<()>,
    /// Input is held back until it is notified.
    started: Arc<Notify>,
    // Held for its drop, which ends the copy.
    _stdin: JoinSet<()>,
}

impl RunningIo {
    /// Releases the input: the agent accepts none before the process has started.
    pub fn let_in(&self) {
        self.started.notify_one();
    }

    /// Waits until all output is in the FIFOs.
    pub async fn drained(&mut self) {
        while self.outputs.join_next().await.is_some() {}
    }
}

/// The process of the streams.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The container.
    pub container: ContainerId,
    /// The exec, or the container's init.
    pub exec: Option<ExecId>,
}

impl Subject {
    /// Returns the key under which the front keeps it.
    pub fn key(&self, kind: &str) -> String {
        front::key(kind, &self.container, self.exec.as_ref())
    }
}

impl Io {
    /// Opens the FIFOs, and stores them at the front until [`Io::let_go`] or the process's exit; containerd need not have
    /// its ends open.
    ///
    /// Outputs are also opened for reading: a write then never fails without a reader, so a
    /// restart of containerd does not break a container. Input is not: it ends when its last writer
    /// closes, which some clients do instead of a CloseIO request.
    pub fn open(
        front: &Arc<Front>,
        pod: &SandboxId,
        subject: &Subject,
        paths: &StdioPaths,
    ) -> Result<Self, PodError> {
        // Those that an earlier worker opened for the same request: containerd has them open and must not see
        // an end of file in between.
        if let Ok(Some(io)) = Self::inherit(front, subject, paths) {
            return Ok(io);
        }
        let opened = Self::open_anew(front, pod, subject, paths);
        // Stored as one by now, or closed.
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
            ..Self::default()
        };
        let kept = io.find_voice(paths).and_then(|()| {
            let fds: Vec<_> = (io.stdin.iter().flat_map(Inlet::fds))
                .chain(io.stdout.iter().chain(&io.stderr).flat_map(Outlet::fds))
                .collect();
            front.keep(&subject.key(STREAMS), paths, &fds)
        });
        io.kept = Some(kept.map_err(|source| PodError::Front {
            pod: pod.clone(),
            what: subject.key(STREAMS).into(),
            source,
        })?);
        Ok(io)
    }

    /// Adopts the streams of a process that an earlier worker started: those that the front has kept, or the
    /// FIFOs opened again. If they are gone, its output is lost; its exit is still reported.
    pub fn take_up(front: &Arc<Front>, pod: &SandboxId, subject: &Subject, paths: &StdioPaths) -> Self {
        match Self::inherit(front, subject, paths) {
            Ok(Some(io)) => return io,
            Ok(None) if front.is_new() => {}
            // It had exited, and they were released.
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

    fn inherit(front: &Arc<Front>, subject: &Subject, paths: &StdioPaths) -> io::Result<Option<Self>> {
        let Some((entry, kept)) = front.take_kept(&subject.key(STREAMS)) else { return Ok(None) };
        // If the earlier worker was killed before it reported this, the front has single copies too: containerd would not
        // see the end of file.
        let opened = STDIO.map(|stream| opening(subject, stream));
        opened.iter().filter(|key| front.has(key)).for_each(|key| front.forget(key));
        if entry.note::<StdioPaths>().as_ref() != Some(paths) {
            return Err(io::Error::other("they lead somewhere else"));
        }
        let mut fds = entry.fds.into_iter();
        let mut pair = || fds.next().zip(fds.next()).ok_or(io::ErrorKind::UnexpectedEof);
        let mut io = Self { kept: Some(kept), ..Self::default() };
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
        io.find_voice(paths)?;
        Ok(Some(io))
    }

    fn find_voice(&mut self, paths: &StdioPaths) -> io::Result<()> {
        let of = if paths.terminal { &self.stdout } else { &self.stderr };
        if let Some([fifo, _]) = of.as_ref().map(Outlet::fds) {
            self.stderr_writer = Some(StderrWriter(fifo.try_clone_to_owned()?));
        }
        Ok(())
    }

    /// Takes the daemon's writer of the process's stderr; there is one.
    pub fn take_stderr_writer(&mut self) -> Option<StderrWriter> {
        self.stderr_writer.take()
    }

    /// Returns its copy at the front.
    pub fn kept(&self) -> Option<Kept> {
        self.kept.clone()
    }

    /// Closes all streams: the process will not exist.
    pub fn let_go(self) {
        if let Some(kept) = &self.kept {
            kept.release();
        }
    }

    /// Starts the copies. `resume`: the process was started by an earlier worker.
    pub fn run(self, agent: &Agent, subject: &Subject, resume: bool) -> (RunningIo, Option<StdinCloser>) {
        let lost = resume && self.forgotten;
        let mut outputs = JoinSet::new();
        for (stream, outlet) in [(OutputStream::STDOUT, self.stdout), (OutputStream::STDERR, self.stderr)] {
            if let Some(outlet) = outlet {
                let copy = copy_output(agent.clone(), subject.clone(), stream, outlet, lost);
                // Boxed: what waits for it has space for it twice.
                outputs.spawn(logged(subject.clone(), Box::pin(copy)));
            }
        }
        let started = Arc::new(Notify::new());
        let mut stdin = JoinSet::new();
        let closer = self.stdin.map(|inlet| {
            let closer = StdinCloser(Arc::default());
            let copy =
                Box::pin(copy_input(agent.clone(), subject.clone(), inlet, closer.clone(), resume, lost));
            let (started, of) = (started.clone(), subject.clone());
            stdin.spawn(async move {
                started.notified().await;
                logged(of, copy).await;
            });
            closer
        });
        let running = RunningIo { outputs, started, _stdin: stdin };
        if resume {
            running.let_in();
        }
        (running, closer)
    }
}

/// Returns the name at the front of a single FIFO of a process, until all of them are stored as one.
fn opening(subject: &Subject, stream: &str) -> String {
    subject.key(&format!("opening-{stream}"))
}

fn wanted(path: &PathBuf) -> Option<&PathBuf> {
    Some(path).filter(|path| !path.as_os_str().is_empty())
}
