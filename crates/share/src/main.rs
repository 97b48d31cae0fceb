//! Serves the shares of one pod. Its guest is untrusted: it can harm its own shares only.
//!
//! ```text
//!  main ─▶ jail (namespaces, an empty root) ─▶ confine (limits, capabilities) ─▶ serve ─▶ files ─▶ tree
//!                                               └ and system calls, per thread ◀─────┘
//! ```
//!
//! `sandboxer-share LISTENER RUN_DIR FILES WAY`: an inherited descriptor of a listening socket for the guest's
//! requests, an existing directory as mount point of the jail's root, the most files that the guest may know, and the
//! transport of requests: `disk`, or `streams:` and the key's hex digits (the key is not a secret on the host). Prints
//! its PID when it is ready. The daemon is not involved from then on.

use std::{
    fs::{self, File},
    os::{
        fd::{FromRawFd, RawFd},
        unix::net::UnixListener,
    },
    process::ExitCode,
};

use anyhow::{Context, ensure};
use rustix::fs::Mode;

use crate::files::Files;

mod caller;
mod confine;
mod disk;
mod files;
mod jail;
mod nbd;
mod serve;
mod stream;
mod tree;

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
    let [listener, run_dir, files, transport] = arguments.as_slice() else {
        anyhow::bail!("usage: sandboxer-share LISTENER RUN_DIR FILES disk|streams:KEY");
    };
    let transport =
        serve::Transport::named(transport).context("WAY must be \"disk\" or \"streams:\" and a key")?;
    let listener: RawFd = listener.parse().context("LISTENER must be a descriptor")?;
    let most_files: u32 = files.parse().context("FILES must be a number")?;
    ensure!(fs::metadata(format!("/proc/self/fd/{listener}")).is_ok(), "descriptor {listener} is not open");
    // SAFETY: the descriptor is open, and the daemon has passed it for this purpose.
    let listener = unsafe { UnixListener::from_raw_fd(listener) };
    let null = File::options().read(true).write(true).open("/dev/null").context("cannot open /dev/null")?;

    let Some(ready) = jail::enter(run_dir.as_ref())? else {
        return Ok(());
    };
    rustix::process::umask(Mode::empty());
    confine::limit(most_files.into())?;
    confine::drop_rights()?;
    serve::serve(listener, transport, Files::open(most_files as usize)?, &null, ready)
}
