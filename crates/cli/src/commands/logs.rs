//! `logs`: the output of a guest's console.

use std::io::{self, IsTerminal, Write};

use sandboxer_protocol::admin::ConsoleLogRequest;
use tokio_stream::StreamExt;

use super::PodId;
use crate::{Global, client, client::ClientError, render::Plain};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli logs 3f2a
  sandboxer-cli logs 3f2a --follow
  sandboxer-cli logs 3f2a | grep -i oom

This is the VM's console: guest kernel and agent. A container's own output: crictl logs.
On a terminal control characters are printed as text such as ^[, unless --raw is given.";

/// Show the console of a pod's guest
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    pod: PodId,
    /// Keep printing new output until the pod ends
    #[arg(short, long)]
    follow: bool,
    /// Pass control characters to the terminal
    #[arg(long)]
    raw: bool,
}

/// Copies the console to stdout.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let mut daemon = client::connect(&global.socket).await?;
    let request = ConsoleLogRequest { id: args.pod.id, follow: args.follow };
    let mut chunks = client::answer(daemon.console_log(request).await)?;
    let mut out = io::stdout().lock();
    let mut plain = (out.is_terminal() && !args.raw).then(Plain::default);
    while let Some(chunk) = chunks.next().await {
        let data = chunk.map_err(ClientError::from)?.data;
        match &mut plain {
            Some(plain) => out.write_all(&plain.filter(&data))?,
            None => out.write_all(&data)?,
        }
        out.flush()?;
    }
    Ok(())
}
