//! The processes of helpers, and the connections to them.

use std::{
    io,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream as StdStream, process::CommandExt},
    },
    path::Path,
    process::{Command, Stdio},
    thread,
};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{net::UnixStream, sync::oneshot};

use super::{OPTION, serve};

/// The connection to an idle or working helper.
#[derive(Debug)]
pub(super) struct Helper {
    pub(super) stream: UnixStream,
    pub(super) end: End,
    /// Whether the helper has handled a request.
    pub(super) used: bool,
}

/// A handle with which a helper is killed, and its exit awaited.
#[derive(Debug)]
pub(super) enum End {
    Process(sandboxer_process::Process),
    Thread(oneshot::Receiver<()>),
}

impl End {
    pub(super) fn kill(&self) {
        let Self::Process(process) = self else { return };
        // The helper leads a group, so the programs that it runs are killed as well. A helper that has exited has no
        // group.
        if let Some(pid) = i32::try_from(process.pid()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }

    pub(super) async fn exited(self) {
        match self {
            Self::Process(process) => drop(process.exited().await),
            // An error means the end as well.
            Self::Thread(ended) => drop(ended.await),
        }
    }
}

/// Starts a helper process. Blocks for the time of a fork; needs a runtime.
pub(super) fn start(program: &Path) -> io::Result<Helper> {
    let (ours, theirs) = StdStream::pair()?;
    ours.set_nonblocking(true)?;
    let child = Command::new(program)
        .arg(format!("--{OPTION}"))
        .current_dir("/")
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        // The helper leads a group, so that the programs it runs can be killed with it.
        .process_group(0)
        .spawn()?;
    let end = End::Process(sandboxer_process::child(child.id())?);
    Ok(Helper { stream: UnixStream::from_std(ours)?, end, used: false })
}

/// Starts a helper as a thread.
pub(super) fn start_thread() -> io::Result<Helper> {
    let (ours, theirs) = StdStream::pair()?;
    ours.set_nonblocking(true)?;
    let (alive, ended) = oneshot::channel::<()>();
    thread::Builder::new().name("helper".to_owned()).spawn(move || {
        // The caller sees the end of the stream.
        let _ = serve(theirs);
        drop(alive);
    })?;
    Ok(Helper { stream: UnixStream::from_std(ours)?, end: End::Thread(ended), used: false })
}
