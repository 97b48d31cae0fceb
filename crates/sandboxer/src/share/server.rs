//! The process that serves a pod's shares: start, adopt, attach shares, end.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_process::Equipment;
use sandboxer_protocol::{id::SandboxId, link::LinkKey};
use sandboxer_share::attach::{AttachError, Tree, put};
use sandboxer_vmm::{ShareListener, ShareTransport};
use tokio::{io::AsyncReadExt, net::unix::pipe};

use super::{Share, ShareError, ShareRecord};

/// Directory in the pod's run directory on which the process mounts its root, visible to itself only.
pub const ROOT: &str = "shares";
/// Name of the process's record, in the same directory.
const RECORD: &str = "shares.json";
/// Name of the server program.
const PROGRAM: &str = "sandboxer-share";
/// Time limit for the process to become ready.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of bytes that are read of the process's output.
const MAX_OUTPUT: u64 = 4096;
/// Maximum number of files that a guest may know at a time, per MiB of its memory. Each takes about a KiB in the
/// guest's kernel, so an honest guest never reaches the limit; it also bounds the server's memory for a hostile one.
const FILES_PER_MIB: u64 = 1024;

/// A server process that runs, or has exited since.
#[derive(Debug)]
pub struct Server {
    pod: SandboxId,
    run_dir: PathBuf,
    process: Option<sandboxer_process::Process>,
    record: ShareRecord,
}

impl Server {
    /// Starts a server process. Returns once it serves connections to `listener`.
    pub async fn start(
        pod: &SandboxId,
        run_dir: &Path,
        memory_mib: u64,
        listener: ShareListener,
    ) -> Result<Self, ShareError> {
        let program = program();
        let failed = |action, path: &Path| {
            let (pod, path) = (pod.clone(), path.to_owned());
            move |source| ShareError::Server { pod, action, path, source }
        };
        let root = run_dir.join(ROOT);
        match fs::create_dir(&root) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("make", &root)(error));
            }
            _ => {}
        }
        let ShareListener { socket, transport } = listener;
        let key = (transport == ShareTransport::Streams).then(LinkKey::random);
        let arguments = vec![
            socket.as_raw_fd().to_string().into(),
            root.into(),
            (memory_mib * FILES_PER_MIB).to_string().into(),
            match &key {
                None => "disk".into(),
                Some(key) => format!("streams:{}", key.to_hex()).into(),
            },
        ];
        let (starting, pipe) = sandboxer_process::spawn(
            &program,
            arguments,
            run_dir,
            Equipment { inherited: vec![socket], ..Equipment::default() },
        )
        .map_err(failed("start", &program))?;
        // The server continues as a child process; the one that was started prints its id and exits.
        let read = tokio::time::timeout(PATIENCE, read_output(pipe)).await;
        let output =
            read.map_err(io::Error::from).flatten().map_err(failed("read the output of", &program))?;
        let Ok(pid) = output.trim().parse() else {
            return Err(ShareError::Refused { pod: pod.clone(), program, output: output.trim().to_owned() });
        };
        starting.keep();
        let found = sandboxer_process::child(pid).map_err(failed("watch", &program))?;
        let record = ShareRecord { pid, start_time: found.start_time(), transport: Some(transport), key };
        note(run_dir, &record).map_err(failed("write", &run_dir.join(RECORD)))?;
        Ok(Self { pod: pod.clone(), run_dir: run_dir.to_owned(), process: Some(found), record })
    }

    /// Finds the process that an earlier daemon started, whether or not it still runs.
    pub fn adopt(pod: &SandboxId, run_dir: &Path, record: &ShareRecord) -> Result<Self, ShareError> {
        let process = sandboxer_process::adopt(record.pid, record.start_time).map_err(|source| {
            ShareError::Server { pod: pod.clone(), action: "find", path: program(), source }
        })?;
        Ok(Self { pod: pod.clone(), run_dir: run_dir.to_owned(), process, record: record.clone() })
    }

    /// Returns the PID of the process.
    pub fn pid(&self) -> u32 {
        self.record.pid
    }

    /// Returns whether the process is known to have exited.
    pub fn has_ended(&self) -> bool {
        self.process.as_ref().is_none_or(sandboxer_process::Process::has_ended)
    }

    /// Returns the transport of the guest's requests.
    pub fn transport(&self) -> ShareTransport {
        // An earlier daemon's process supported neither: the agent reports that.
        self.record.transport.unwrap_or(ShareTransport::Disk)
    }

    /// Returns the prefix of each of the guest's streams.
    pub fn key(&self) -> Option<&LinkKey> {
        self.record.key.as_ref()
    }

    /// Passes a share to the process; `tree` is a mount of it.
    pub async fn attach(&self, share: &Share, tree: Tree) -> Result<(), AttachError> {
        let failed = |source| AttachError::Target { action: "use", source };
        let process = self.process.as_ref().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let (pidfd, name) = (process.pidfd().try_clone_to_owned().map_err(failed)?, share.name.clone());
        let attached = tokio::task::spawn_blocking(move || put(pidfd.as_fd(), &name, &tree));
        attached.await.map_err(|error| failed(io::Error::other(error)))?
    }

    /// Ends the process and waits for its exit.
    pub async fn end(self) {
        // The directory is removed with the pod in any case, but the pod may continue without the process.
        let _ = fs::remove_file(self.run_dir.join(RECORD));
        let Some(process) = self.process else { return };
        match process.kill() {
            Ok(()) => {
                let pid = process.pid();
                if tokio::time::timeout(PATIENCE, process.exited()).await.is_err() {
                    let pod = &self.pod;
                    tracing::warn!(%pod, pid, "the process that serves shares waits for a hung volume; it ends when the volume's server answers");
                }
            }
            Err(error) => {
                tracing::error!(pod = %self.pod, %error, "cannot kill the process that serves shares")
            }
        }
    }
}

/// Returns the record of the process that serves the shares of the pod with this run directory.
pub fn recorded(run_dir: &Path) -> Option<ShareRecord> {
    serde_json::from_slice(&fs::read(run_dir.join(RECORD)).ok()?).ok()
}

/// Writes the record, completely or not at all. Never synced: the process ends with the VM.
fn note(run_dir: &Path, record: &ShareRecord) -> io::Result<()> {
    let new = run_dir.join("shares.new");
    fs::write(&new, serde_json::to_vec(record)?)?;
    fs::rename(new, run_dir.join(RECORD))
}

/// Returns the program in the daemon's own directory, else the one in `PATH`.
fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join(PROGRAM)));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| sandboxer_process::find(Path::new(PROGRAM)))
}

/// Reads a pipe until its end.
async fn read_output(pipe: OwnedFd) -> io::Result<String> {
    let mut text = String::new();
    let pipe = pipe::Receiver::from_owned_fd(pipe)?;
    pipe.take(MAX_OUTPUT).read_to_string(&mut text).await?;
    Ok(text)
}
