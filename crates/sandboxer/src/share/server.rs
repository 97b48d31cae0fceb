//! The process that serves a pod's shares: started, found again, connected to, ended.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_process::{Equipment, socket};
use sandboxer_protocol::id::SandboxId;
use sandboxer_share::attach::{AttachError, Tree, put};
use tokio::{io::AsyncReadExt, net::UnixStream, net::unix::pipe};

use crate::share::{Share, ShareError, ShareRecord};

/// Its socket in the pod's run directory.
pub const SOCKET: &str = "shares.sock";
/// The directory there on which it mounts its root, seen by itself alone.
const ROOT: &str = "shares";
/// Which process it is, in the same directory.
const RECORD: &str = "shares.json";
/// The program.
const PROGRAM: &str = "sandboxer-share";
/// How long it may take to serve.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest words of its that are read, bytes.
const MAX_WORDS: u64 = 4096;
/// Files a guest may know at a time, per MiB of its memory. Each takes its kernel about a KiB, so no guest
/// that is honest gets there; one that isn't makes this host's kernel hold no more than that either.
const FILES_PER_MIB: u64 = 1024;

/// A running process, or one that has ended since.
#[derive(Debug)]
pub struct Server {
    pod: SandboxId,
    run_dir: PathBuf,
    process: Option<sandboxer_process::Process>,
    record: ShareRecord,
}

impl Server {
    /// Starts it; answers when it serves.
    pub async fn start(pod: &SandboxId, run_dir: &Path, memory_mib: u64) -> Result<Self, ShareError> {
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
        let socket = run_dir.join(SOCKET);
        match fs::remove_file(&socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("replace", &socket)(error));
            }
            _ => {}
        }
        let listener: OwnedFd = socket::listen(run_dir, SOCKET).map_err(failed("listen on", &socket))?.into();
        let arguments = vec![
            listener.as_raw_fd().to_string().into(),
            root.into(),
            (memory_mib * FILES_PER_MIB).to_string().into(),
        ];
        let (starting, words) = sandboxer_process::spawn(
            &program,
            arguments,
            run_dir,
            Equipment { inherited: vec![listener], ..Equipment::default() },
        )
        .map_err(failed("start", &program))?;
        // It goes on as another process, whose id is told by the one that was started, which ends.
        let said = tokio::time::timeout(PATIENCE, said(words)).await;
        let said = said.map_err(io::Error::from).flatten().map_err(failed("hear from", &program))?;
        let Ok(pid) = said.trim().parse() else {
            return Err(ShareError::Refused { pod: pod.clone(), program, words: said.trim().to_owned() });
        };
        starting.keep();
        let found = sandboxer_process::child(pid).map_err(failed("watch", &program))?;
        let record = ShareRecord { pid, start_time: found.start_time() };
        note(run_dir, &record).map_err(failed("note", &run_dir.join(RECORD)))?;
        Ok(Self { pod: pod.clone(), run_dir: run_dir.to_owned(), process: Some(found), record })
    }

    /// The process that an earlier daemon started, whether or not it still runs.
    pub fn adopt(pod: &SandboxId, run_dir: &Path, record: &ShareRecord) -> Result<Self, ShareError> {
        let process = sandboxer_process::adopt(record.pid, record.start_time).map_err(|source| {
            ShareError::Server { pod: pod.clone(), action: "find", path: program(), source }
        })?;
        Ok(Self { pod: pod.clone(), run_dir: run_dir.to_owned(), process, record: record.clone() })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.record.pid
    }

    /// Whether it is known to have ended.
    pub fn has_ended(&self) -> bool {
        self.process.as_ref().is_none_or(sandboxer_process::Process::has_ended)
    }

    /// A connection, which ends the one before it.
    pub fn connect(&self) -> Result<UnixStream, ShareError> {
        socket::connect(&self.run_dir, SOCKET).map_err(|source| ShareError::Server {
            pod: self.pod.clone(),
            action: "connect to",
            path: self.run_dir.join(SOCKET),
            source,
        })
    }

    /// Gives it a share, of which `tree` is a mount.
    pub async fn attach(&self, share: &Share, tree: Tree) -> Result<(), AttachError> {
        let gone = |source| AttachError::Target { action: "be", source };
        let process = self.process.as_ref().ok_or_else(|| gone(io::ErrorKind::NotFound.into()))?;
        let (pidfd, name) = (process.pidfd().try_clone_to_owned().map_err(gone)?, share.name.clone());
        let attached = tokio::task::spawn_blocking(move || put(pidfd.as_fd(), &name, &tree));
        attached.await.map_err(|error| gone(io::Error::other(error)))?
    }

    /// Ends it and waits until it is gone.
    pub async fn end(self) {
        // With the directory it goes in any case; but the pod may go on without it.
        let _ = fs::remove_file(self.run_dir.join(RECORD));
        let Some(process) = self.process else { return };
        match process.kill() {
            Ok(()) => {
                let pid = process.pid();
                if tokio::time::timeout(PATIENCE, process.exited()).await.is_err() {
                    let pod = &self.pod;
                    tracing::warn!(%pod, pid, "the process that serves shares waits for a volume whose server does not answer: it ends when that does");
                }
            }
            Err(error) => {
                tracing::error!(pod = %self.pod, %error, "cannot end the process that serves shares")
            }
        }
    }
}

/// Which process serves the shares of the pod with this run directory, as an earlier daemon noted it.
pub fn recorded(run_dir: &Path) -> Option<ShareRecord> {
    serde_json::from_slice(&fs::read(run_dir.join(RECORD)).ok()?).ok()
}

/// Whole or not at all. Never synced: with the machine, the process ends, too.
fn note(run_dir: &Path, record: &ShareRecord) -> io::Result<()> {
    let new = run_dir.join("shares.new");
    fs::write(&new, serde_json::to_vec(record)?)?;
    fs::rename(new, run_dir.join(RECORD))
}

/// Beside the daemon's own program, else wherever programs are.
fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join(PROGRAM)));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| sandboxer_process::find(Path::new(PROGRAM)))
}

/// All that is written to a pipe.
async fn said(words: OwnedFd) -> io::Result<String> {
    let mut text = String::new();
    let words = pipe::Receiver::from_owned_fd(words)?;
    words.take(MAX_WORDS).read_to_string(&mut text).await?;
    Ok(text)
}
