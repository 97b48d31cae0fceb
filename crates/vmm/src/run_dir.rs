//! The directory of a running VM of any VMM: sockets, and logs of bounded size.

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

/// Maximum number of bytes kept of a VMM's stderr.
const VMM_LOG_BYTES: u64 = 64 << 10;
/// Number of last lines shown of the VMM's stderr.
const VMM_LINES: usize = 4;
/// Number of last lines shown of the guest's console: a panic with its call trace takes up to 20.
const CONSOLE_LINES: usize = 24;

/// The output of a VMM and of its guest, both of which may be hostile.
#[derive(Debug)]
pub struct Captures {
    vmm: Capture,
    console: Capture,
}

impl Captures {
    /// Copies a VMM's stderr to `vmm.log` and its guest's `console` to `console.log`.
    pub fn start(
        stderr: OwnedFd,
        console: impl AsyncRead + Send + Unpin + 'static,
        run_dir: &Path,
        console_bytes: u64,
    ) -> io::Result<Self> {
        let stderr = pipe::Receiver::from_owned_fd(stderr)?;
        // Through a handle, which still works after the directory is moved.
        let dir = Arc::new(socket::open(run_dir)?);
        Ok(Self {
            vmm: Capture::start(stderr, dir.clone(), "vmm.log", VMM_LOG_BYTES),
            console: Capture::start(console, dir, console::FILE, console_bytes),
        })
    }

    /// Waits until all output of an ended process is in the files.
    pub async fn drained(&self) {
        tokio::join!(self.vmm.drained(), self.console.drained());
    }

    /// Returns the lines of [`super::Vm::last_lines`].
    pub async fn last_lines(&self) -> Vec<String> {
        let mut lines = self.vmm.last_lines(VMM_LINES).await;
        lines.extend(self.console.last_lines(CONSOLE_LINES).await);
        lines
    }
}

/// Sockets and pipes of a VM that starts. Their files are removed on drop unless kept.
#[derive(Debug, Default)]
pub struct Files(Vec<PathBuf>);

impl Files {
    /// Returns the files of a VM that has ended.
    pub fn of_ended(run_dir: &Path, names: &[&str]) -> Self {
        Self(names.iter().map(|name| run_dir.join(name)).collect())
    }

    /// Listens on the socket `name`.
    pub fn listen(&mut self, spec: &VmSpec, name: &str) -> Result<OwnedFd, VmmError> {
        let path = spec.run_dir.join(name);
        let listener =
            socket::listen(&spec.run_dir, name).map_err(path_error(&spec.pod, "listen on", path.clone()))?;
        // Only files created here: an existing file may belong to a running VM.
        self.add(path);
        Ok(listener.into())
    }

    /// Adds the file `path`.
    pub fn add(&mut self, path: PathBuf) {
        self.0.push(path);
    }

    /// Keeps the files, because the VM runs.
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
    socket::connect(run_dir, name).map_err(path_error(pod, "connect to", run_dir.join(name)))
}

/// Opens the pipe to which a running VMM writes through its descriptor `fd`. An earlier reader may be dead; this makes
/// a new one.
pub fn reopen(record: &VmRecord, fd: i32) -> Result<OwnedFd, VmmError> {
    let path = PathBuf::from(format!("/proc/{}/fd/{fd}", record.pid));
    match fs::File::open(&path) {
        Ok(file) => Ok(file.into()),
        Err(source) => Err(path_error(&record.pod, "read", path)(source)),
    }
}

/// Returns a function that turns an error of the host into an error that names the pod and what was attempted.
pub fn path_error(
    pod: &SandboxId,
    action: &'static str,
    path: PathBuf,
) -> impl FnOnce(io::Error) -> VmmError {
    let pod = pod.clone();
    move |source| VmmError::Path { pod, action, path, source }
}
