//! Serves the shares of one pod, whose guest is hostile: it may lose its own shares, and nothing else.
//!
//! ```text
//!  main ─▶ jail (namespaces, an empty root) ─▶ confine (limits, capabilities) ─▶ serve ─▶ files
//!                                               └ and what it may call, per thread ◀─┘
//! ```
//!
//! `sandboxer-share LISTENER RUN_DIR FILES`: an inherited descriptor that listens for the daemon, a directory
//! that is there to mount on, and how many files may be open. Prints its process id when it serves. One daemon
//! at a time is served; the next one connects when the first is gone, and gets the answers that were lost.

use std::{
    fs::{self, File},
    os::{
        fd::{FromRawFd, RawFd},
        unix::net::UnixListener,
    },
    process::ExitCode,
};

use anyhow::{Context, ensure};

mod caller;
mod confine;
mod files;
mod jail;
mod serve;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sandboxer-share: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [listener, run_dir, files] = arguments.as_slice() else {
        anyhow::bail!("usage: sandboxer-share LISTENER RUN_DIR FILES");
    };
    let listener: RawFd = listener.parse().context("LISTENER is no descriptor")?;
    let most_files = files.parse().context("FILES is no number")?;
    ensure!(fs::metadata(format!("/proc/self/fd/{listener}")).is_ok(), "descriptor {listener} is not open");
    // SAFETY: it is open, and whoever started this program left it for this.
    let listener = unsafe { UnixListener::from_raw_fd(listener) };
    let nowhere =
        File::options().read(true).write(true).open("/dev/null").context("cannot open /dev/null")?;

    let Some(entered) = jail::enter(run_dir.as_ref())? else {
        return Ok(());
    };
    confine::limit(most_files)?;
    confine::drop_rights()?;
    serve::serve(&listener, nowhere, entered)
}
