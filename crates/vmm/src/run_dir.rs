//! What a running VM has in its directory, whoever runs it: sockets, and logs of bounded size.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_process::socket;
use sandboxer_protocol::id::SandboxId;
use tokio::{
    io::AsyncRead,
    net::{UnixStream, unix::pipe},
};

use super::{VmRecord, VmSpec, VmmError, capture::Capture, console};

/// Most bytes of a VMM's own words that are kept.
const VMM_LOG_BYTES: u64 = 64 << 10;
/// Lines of a VMM's last words.
const VMM_LINES: usize = 4;
/// Lines of the guest's: a panic with its call trace takes up to 20.
const CONSOLE_LINES: usize = 24;

/// What the two hostile parties of a VM print.
#[derive(Debug)]
pub struct Captures {
    vmm: Capture,
    console: Capture,
}

impl Captures {
    /// Copies a VMM's `words` to `vmm.log` and its guest's `console` to `console.log`.
    pub fn start(
        words: OwnedFd,
        console: impl AsyncRead + Send + Unpin + 'static,
        run_dir: &Path,
        console_bytes: u64,
    ) -> io::Result<Self> {
        let words = pipe::Receiver::from_owned_fd(words)?;
        // They go on in a directory that is moved.
        let dir = Arc::new(socket::open(run_dir)?);
        Ok(Self {
            vmm: Capture::start(words, dir.clone(), "vmm.log", VMM_LOG_BYTES),
            console: Capture::start(console, dir, console::FILE, console_bytes),
        })
    }

    /// All that an ended process printed is in the files from here on.
    pub async fn drained(&self) {
        tokio::join!(self.vmm.drained(), self.console.drained());
    }

    /// Same as [`super::Vm::last_lines`].
    pub async fn last_lines(&self) -> Vec<String> {
        let mut lines = self.vmm.last_lines(VMM_LINES).await;
        lines.extend(self.console.last_lines(CONSOLE_LINES).await);
        lines
    }
}

/// Sockets and pipes of a VM that starts, their files removed on drop unless kept.
#[derive(Debug, Default)]
pub struct Files(Vec<PathBuf>);

impl Files {
    /// Returns those of a VM that has ended.
    pub fn of_ended(run_dir: &Path, names: &[&str]) -> Self {
        Self(names.iter().map(|name| run_dir.join(name)).collect())
    }

    /// Listens on the socket `name`.
    pub fn listen(&mut self, spec: &VmSpec, name: &str) -> Result<OwnedFd, VmmError> {
        let path = spec.run_dir.join(name);
        let listener =
            socket::listen(&spec.run_dir, name).map_err(host(&spec.pod, "listen on", path.clone()))?;
        // Only what was made here: a file that was there may be a running VM's.
        self.add(path);
        Ok(listener.into())
    }

    /// Takes care of one more file.
    pub fn add(&mut self, path: PathBuf) {
        self.0.push(path);
    }

    /// The VM runs: its files stay.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for path in &self.0 {
            if let Err(error) = fs::remove_file(path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "cannot remove a VM's socket");
            }
        }
    }
}

/// Connects to the socket `name` of a VM.
pub fn connect(pod: &SandboxId, run_dir: &Path, name: &str) -> Result<UnixStream, VmmError> {
    socket::connect(run_dir, name).map_err(host(pod, "connect to", run_dir.join(name)))
}

/// Returns what a running VMM writes to its descriptor `fd`, a pipe. Who read it before may be dead: opening
/// it anew makes another reader.
pub fn reopen(record: &VmRecord, fd: i32) -> Result<OwnedFd, VmmError> {
    let path = PathBuf::from(format!("/proc/{}/fd/{fd}", record.pid));
    match fs::File::open(&path) {
        Ok(file) => Ok(file.into()),
        Err(source) => Err(host(&record.pod, "read", path)(source)),
    }
}

/// Makes of a host's error one that names the pod and what was attempted.
pub fn host(pod: &SandboxId, action: &'static str, path: PathBuf) -> impl FnOnce(io::Error) -> VmmError {
    let pod = pod.clone();
    move |source| VmmError::Host { pod, action, path, source }
}
