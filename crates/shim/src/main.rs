//! `containerd-shim-sandboxer-v1`: the program that containerd executes for the runtime type
//! `io.containerd.sandboxer.v1`. It handles one request and exits; pods belong to the daemon.
//!
//! | arguments | when | output on stdout |
//! |---|---|---|
//! | `-info` | before the first container, and by CRI at its start | `containerd.types.RuntimeInfo` |
//! | `… delete` | when its connection for a container has closed | `containerd.task.v3.DeleteResponse` |
//! | `… start` | for a runtime without a sandbox controller | none: an error |
//!
//! On success stderr is empty: containerd would log its content as a warning at each removal.

mod args;
mod delete;
mod info;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::{Context, bail};
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
        Action::Delete => respond(&delete::delete(&args)),
        Action::Start => bail!(
            "cannot start {:?}: containerd before 2.0 is not supported yet; with a newer one give the runtime \
             `sandboxer = \"sandboxer\"` and configure [proxy_plugins.sandboxer] with type \"sandbox\"",
            args.id
        ),
        Action::Version => {
            let text = format!("{} {}\n", args::NAME, env!("CARGO_PKG_VERSION"));
            io::stdout().write_all(text.as_bytes()).context("cannot write version to stdout")
        }
    }
}

fn respond(message: &impl Message) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    message.write_to_writer(&mut out).context("cannot write the response to stdout")?;
    out.flush().context("cannot write the response to stdout")
}
