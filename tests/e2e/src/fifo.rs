//! The FIFOs of a process, with a reader that a test can stall.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use nix::sys::stat::Mode;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::containerd::Stdio;

/// What a program says when it is ready; a reader that stalls has read this far.
pub const READY: &str = "ready\n";

/// Streams of one process; the FIFOs are removed when this is dropped.
pub struct Fifos {
    paths: Vec<PathBuf>,
    stdio: Stdio,
    /// Held open, so that whoever reads does not find an end.
    stdin: Option<pipe::Sender>,
    output: Arc<Mutex<String>>,
    stalled: watch::Sender<bool>,
    readers: Vec<AbortHandle>,
}

impl Fifos {
    /// Makes them in `dir`, named by `name`, and reads what is written.
    pub fn make(dir: &Path, name: &str, terminal: bool, stalled: bool) -> Result<Self> {
        let make = |stream: &str| {
            let path = dir.join(format!("{name}-{stream}"));
            let _ = fs::remove_file(&path);
            nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR)
                .with_context(|| format!("cannot make the FIFO {}", path.display()))?;
            Ok::<_, anyhow::Error>(path)
        };
        let (stdin, stdout) = (make("stdin")?, make("stdout")?);
        let mut outputs = vec![stdout];
        if !terminal {
            outputs.push(make("stderr")?);
        }
        let both_ends = |path: &Path| {
            pipe::OpenOptions::new()
                .read_write(true)
                .open_receiver(path)
                .with_context(|| format!("cannot open {}", path.display()))
        };
        let output = Arc::new(Mutex::new(String::new()));
        let stalled = watch::Sender::new(stalled);
        let mut readers = Vec::new();
        for path in &outputs {
            let reading = read(both_ends(path)?, Arc::clone(&output), stalled.subscribe());
            readers.push(tokio::spawn(reading).abort_handle());
        }
        let text = |path: &PathBuf| path.display().to_string();
        let stdio = Stdio {
            stdin: text(&stdin),
            stdout: outputs.first().map(text).unwrap_or_default(),
            stderr: outputs.get(1).map(text).unwrap_or_default(),
            terminal,
        };
        let stdin_sender = Some(pipe::OpenOptions::new().read_write(true).open_sender(&stdin)?);
        let mut paths = outputs;
        paths.push(stdin);
        Ok(Self { paths, stdio, stdin: stdin_sender, output, stalled, readers })
    }

    /// Returns the paths for containerd.
    pub fn stdio(&self) -> Stdio {
        self.stdio.clone()
    }

    /// Returns what was read.
    pub fn output(&self) -> String {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes no more to stdin.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Returns whether nothing more is written to stdin.
    pub fn is_closed(&self) -> bool {
        self.stdin.is_none()
    }

    /// Stops reading, or reads on.
    pub fn stall(&self, stalled: bool) {
        self.stalled.send_replace(stalled);
    }
}

impl Drop for Fifos {
    fn drop(&mut self) {
        for reader in &self.readers {
            reader.abort();
        }
        for path in &self.paths {
            let _ = fs::remove_file(path);
        }
    }
}

/// Reads until it is told to stall, and then not beyond [`READY`].
async fn read(mut from: pipe::Receiver, to: Arc<Mutex<String>>, mut stalled: watch::Receiver<bool>) {
    let mut buffer = [0; 1 << 16];
    loop {
        let is_ready = to.lock().unwrap_or_else(PoisonError::into_inner).contains(READY);
        let is_stalled = *stalled.borrow_and_update();
        let most = match (is_stalled, is_ready) {
            (true, true) => {
                if stalled.changed().await.is_err() {
                    return;
                }
                continue;
            }
            (true, false) => 1,
            (false, _) => buffer.len(),
        };
        let read = tokio::select! {
            read = from.read(&mut buffer[..most]) => read,
            changed = stalled.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
        };
        let Ok(read @ 1..) = read else { return };
        let text = String::from_utf8_lossy(&buffer[..read]).replace('\r', "");
        to.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
    }
}
