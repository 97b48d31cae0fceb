//! Between the FIFOs that containerd made and a process in the guest.
//!
//! Output is pulled from the agent by offset: asking for the next byte acknowledges those before
//! it, so nothing is acknowledged before it is in the FIFO. Input is pushed by offset. Nothing here
//! buffers more than one message per stream.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_protocol::{
    agent::{OutputStream, ReadOutputRequest, WriteInputRequest},
    id::{ContainerId, ExecId, SandboxId},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::unix::pipe::{OpenOptions, Receiver, Sender},
    sync::Notify,
    task::JoinSet,
};

use super::StdioPaths;
use crate::{error::PodError, guest::Agent};

/// Most bytes moved by one call to the agent.
const CHUNK: usize = 64 << 10;

/// A process's FIFOs, open.
#[derive(Debug)]
pub struct Io {
    stdin: Option<Receiver>,
    stdout: Option<Sender>,
    stderr: Option<Sender>,
    voice: Option<Voice>,
}

/// The daemon's own way to a container's error stream, for what the guest can't say any more.
///
/// As long as it is there the FIFO has a writer, so containerd reads on until the process's end is known.
#[derive(Debug)]
pub struct Voice(Sender);

impl Voice {
    /// Writes one line, as far as the FIFO takes it.
    pub fn say(&self, words: &str) {
        if let Err(error) = self.0.try_write(format!("sandboxer: {words}\n").as_bytes()) {
            tracing::debug!(%error, "no room for a container's last words");
        }
    }
}

/// Ends a running stdin copy once what lies in its FIFO is delivered.
#[derive(Debug, Clone)]
pub struct StdinCloser(Arc<Notify>);

impl StdinCloser {
    /// Nothing more will be written to the FIFO.
    pub fn close(&self) {
        self.0.notify_one();
    }
}

/// A process's streams, being copied. Dropping it ends the copies.
#[derive(Debug)]
pub struct RunningIo {
    outputs: JoinSet<()>,
    /// Input is held back until it is notified.
    started: Arc<Notify>,
    // Held for its drop: it ends the copy.
    _stdin: JoinSet<()>,
}

impl RunningIo {
    /// Lets input in: the agent takes none before the process has been started.
    pub fn let_in(&self) {
        self.started.notify_one();
    }

    /// Waits until all output there will ever be is in the FIFOs.
    pub async fn drained(&mut self) {
        while self.outputs.join_next().await.is_some() {}
    }
}

/// Which process's streams.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The container.
    pub container: ContainerId,
    /// The exec, or the container's init.
    pub exec: Option<ExecId>,
}

impl Io {
    /// Opens the FIFOs; containerd need not have its ends open.
    ///
    /// Outputs are opened for reading, too: writing then never fails for want of a reader, so a
    /// containerd that restarts breaks no container. Input is not: it ends when its last writer has
    /// gone, which some clients say instead of asking for a close.
    pub fn open(pod: &SandboxId, paths: &StdioPaths) -> Result<Self, PodError> {
        let opened = |path: &Path, what: io::Result<()>| {
            what.map_err(|source| PodError::Host {
                pod: pod.clone(),
                action: "open stdio FIFO",
                path: path.to_owned(),
                source,
            })
        };
        let mut io = Self::silent();
        let mut options = OpenOptions::new();
        options.read_write(true);
        if let Some(path) = wanted(&paths.stdin) {
            opened(path, OpenOptions::new().open_receiver(path).map(|fifo| io.stdin = Some(fifo)))?;
        }
        if let Some(path) = wanted(&paths.stdout) {
            opened(path, options.open_sender(path).map(|fifo| io.stdout = Some(fifo)))?;
        }
        if let Some(path) = wanted(&paths.stderr).filter(|_| !paths.terminal) {
            opened(path, options.open_sender(path).map(|fifo| io.stderr = Some(fifo)))?;
        }
        let voice = if paths.terminal { &paths.stdout } else { &paths.stderr };
        if let Some(path) = wanted(voice) {
            opened(path, options.open_sender(path).map(|fifo| io.voice = Some(Voice(fifo))))?;
        }
        Ok(io)
    }

    /// For a process whose FIFOs are gone: what it prints goes nowhere, its end is seen all the same.
    pub fn silent() -> Self {
        Self { stdin: None, stdout: None, stderr: None, voice: None }
    }

    /// Takes the daemon's own way to the process's error stream; there is one.
    pub fn take_voice(&mut self) -> Option<Voice> {
        self.voice.take()
    }

    /// Starts copying. `resume`: an earlier daemon began it.
    pub fn run(self, agent: &Agent, subject: &Subject, resume: bool) -> (RunningIo, Option<StdinCloser>) {
        let mut outputs = JoinSet::new();
        for (stream, fifo) in [(OutputStream::STDOUT, self.stdout), (OutputStream::STDERR, self.stderr)] {
            if let Some(fifo) = fifo {
                outputs.spawn(copy_output(agent.clone(), subject.clone(), stream, fifo, resume));
            }
        }
        let started = Arc::new(Notify::new());
        let mut stdin = JoinSet::new();
        let closer = self.stdin.map(|fifo| {
            let closer = StdinCloser(Arc::default());
            let copy = copy_input(agent.clone(), subject.clone(), fifo, closer.clone(), resume);
            let started = started.clone();
            stdin.spawn(async move {
                started.notified().await;
                copy.await;
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

fn wanted(path: &PathBuf) -> Option<&PathBuf> {
    Some(path).filter(|path| !path.as_os_str().is_empty())
}

async fn copy_output(agent: Agent, of: Subject, stream: OutputStream, mut fifo: Sender, resume: bool) {
    let mut request = ReadOutputRequest {
        container_id: of.container.to_string(),
        exec_id: of.exec.as_ref().map(ToString::to_string).unwrap_or_default(),
        stream: stream.into(),
        max_bytes: CHUNK as u32,
        resume,
        ..Default::default()
    };
    loop {
        let answer = match agent.read_output(request.clone()).await {
            Ok(answer) if answer.data.len() <= CHUNK => answer,
            Ok(_) => {
                return tracing::warn!(container = %of.container, "agent sent more output than asked for");
            }
            // The machine is gone, or the container: whoever waits learns it elsewhere.
            Err(error) => return tracing::debug!(container = %of.container, %error, "output ends"),
        };
        if let Err(error) = fifo.write_all(&answer.data).await {
            return tracing::warn!(container = %of.container, %error, "cannot write to the output FIFO");
        }
        if answer.end {
            return;
        }
        request.offset = answer.offset + answer.data.len() as u64;
        request.resume = false;
    }
}

async fn copy_input(agent: Agent, of: Subject, mut fifo: Receiver, closer: StdinCloser, resume: bool) {
    let mut offset = 0;
    let mut chunk = Vec::new();
    let mut ending = false;
    if resume {
        // Nothing, at the beginning: the answer tells how far an earlier daemon got.
        let nothing = WriteInputRequest {
            container_id: of.container.to_string(),
            exec_id: of.exec.as_ref().map(ToString::to_string).unwrap_or_default(),
            ..Default::default()
        };
        match agent.write_input(nothing).await {
            Ok(taken) => offset = taken,
            Err(error) => return tracing::debug!(container = %of.container, %error, "stdin ends"),
        }
    }
    loop {
        if ending {
            // What was written before the close is in the FIFO already. The kernel is asked, not tokio,
            // which may not have heard of it yet.
            chunk.resize(CHUNK, 0);
            let count = rustix::io::read(&fifo, &mut chunk[..]).unwrap_or(0);
            chunk.truncate(count);
        } else {
            chunk.reserve(CHUNK);
            tokio::select! {
                biased;
                () = closer.0.notified() => { ending = true; continue }
                read = fifo.read_buf(&mut chunk) => match read {
                    Ok(0) => { ending = true; continue }
                    Ok(_) => {}
                    Err(error) => {
                        return tracing::warn!(container = %of.container, %error, "cannot read the stdin FIFO");
                    }
                }
            }
        }
        let end = ending && chunk.is_empty();
        let count = chunk.len() as u64;
        let request = WriteInputRequest {
            container_id: of.container.to_string(),
            exec_id: of.exec.as_ref().map(ToString::to_string).unwrap_or_default(),
            offset,
            data: std::mem::take(&mut chunk),
            end,
            ..Default::default()
        };
        if let Err(error) = agent.write_input(request).await {
            return tracing::debug!(container = %of.container, %error, "stdin ends");
        }
        if end {
            return;
        }
        offset += count;
    }
}
