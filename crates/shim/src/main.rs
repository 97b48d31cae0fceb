//! `containerd-shim-sandboxer-v1`: the program that containerd executes for the runtime type
//! `io.containerd.sandboxer.v1`. It handles one request and exits; pods belong to the daemon.
//!
//! | arguments | when | output on stdout |
//! |---|---|---|
//! | `-info` | before the first container, and by CRI at its start | `containerd.types.RuntimeInfo` |
//! | `… delete` | when its connection for a container has closed | `containerd.task.v3.DeleteResponse` |
//! | `… start` | before each container, by a containerd without a sandbox controller, and by CRI-O | the daemon's address |
//! | `features` | by CRI-O at its start | the OCI features, as JSON |
//!
//! On success stderr is empty: containerd would log its content as a warning at each removal, and read it as a part of
//! the address at a start.

mod args;
mod bundle;
mod delete;
mod info;
mod start;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Context;
use protobuf::Message;

use args::{Action, Args};

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{}: {error}", args::NAME);
            return ExitCode::from(2);
        }
    };
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", args::NAME);
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    match args.action {
        Action::Info => respond(&info::info()),
        Action::Features => {
            write(info::features_json().as_bytes()).context("cannot write features to stdout")
        }
        Action::Delete => respond(&delete::delete(&args)),
        Action::Start => {
            let max_version = std::env::var("MAX_SHIM_VERSION").ok();
            let answer = start::start(&args, ".".as_ref(), io::stdin().lock(), max_version.as_deref())?;
            write(answer.as_bytes()).context("cannot write the daemon's address to stdout")
        }
        Action::Version => {
            let text = format!("{} {}\n", args::NAME, env!("CARGO_PKG_VERSION"));
            write(text.as_bytes()).context("cannot write version to stdout")
        }
    }
}

fn respond(message: &impl Message) -> anyhow::Result<()> {
    let bytes = message.write_to_bytes().context("cannot encode the response")?;
    write(&bytes).context("cannot write the response to stdout")
}

fn write(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}
