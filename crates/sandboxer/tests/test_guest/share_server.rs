//! The program that serves shares, started as the daemon does it.

use std::{
    fs,
    os::{fd::AsRawFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::{
    io::FdFlags,
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
};
use sandboxer_protocol::link::LinkKey;
use sandboxer_vmm::{ShareListener, ShareTransport};

use super::Pod;

/// Prefix of streams.
pub const KEY: LinkKey = LinkKey::from_bytes([9; LinkKey::LEN]);
const PROGRAM: &str = "sandboxer-share";

/// A running server without a share. Dropping it kills it.
pub struct ShareServer(Pid);

impl ShareServer {
    /// Starts a server for the connections to `listener`.
    pub fn start(pod: &Pod, listener: ShareListener) -> Self {
        let root = pod.path("served");
        fs::create_dir(&root).unwrap();
        let ShareListener { socket, transport } = listener;
        let transport = match transport {
            ShareTransport::Disk => "disk".to_owned(),
            ShareTransport::Streams => format!("streams:{}", KEY.to_hex()),
        };
        let mut program = Command::new(built());
        program.arg(socket.as_raw_fd().to_string()).arg(root).args(["256", &transport]).stdin(Stdio::null());
        // SAFETY: between fork and exec only one system call is made.
        unsafe { program.pre_exec(move || Ok(rustix::io::fcntl_setfd(&socket, FdFlags::empty())?)) };
        let started = program.stderr(Stdio::inherit()).output().unwrap();
        let words = String::from_utf8(started.stdout).unwrap();
        Self(words.trim().parse().ok().and_then(Pid::from_raw).expect("its process id"))
    }
}

impl Drop for ShareServer {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
        let _ = waitpid(Some(self.0), WaitOptions::empty());
    }
}

/// Returns the newest one that was built.
fn built() -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let built = ["debug", "quick", "release"].map(|profile| target.join(profile).join(PROGRAM));
    let newest =
        built.into_iter().max_by_key(|path| fs::metadata(path).and_then(|found| found.modified()).ok());
    newest.filter(|path| path.is_file()).unwrap_or_else(|| panic!("{PROGRAM} is missing: run `make build`"))
}
