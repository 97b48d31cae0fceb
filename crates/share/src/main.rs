//! Serves the shares of one pod, whose guest is hostile: it may lose its own shares, and nothing else.
//!
//! ```text
//!  main ─▶ jail (namespaces, an empty root) ─▶ confine (limits, capabilities) ─▶ serve ─▶ files
//!                                               └ and what it may call, per thread ◀─┘
//! ```
//!
//! `sandboxer-share LISTENER RUN_DIR FILES WAY`: an inherited descriptor that listens where the guest's requests come
//! out, a directory that is there to mount on, how many files may be open, and by which way requests come: `disk`, or
//! `streams:` and the key's hex digits, which is no secret on the host. Prints its process id when it serves. The daemon has no part in it from then on.

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
mod disk;
mod files;
mod jail;
mod nbd;
mod serve;
mod stream;

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
    let [listener, run_dir, files, way] = arguments.as_slice() else {
        anyhow::bail!("usage: sandboxer-share LISTENER RUN_DIR FILES disk|streams:KEY");
    };
    let way = serve::Way::named(way).context("WAY is neither \"disk\" nor \"streams:\" and a key")?;
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
    serve::serve(listener, way, nowhere, entered)
}
