//! `reload`: replaces the running build with the installed one, without effect on pods.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use sandboxer_protocol::admin::ReloadRequest;
use serde::Serialize;

use crate::{Global, client, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli reload                        after an upgrade of the package, or a change of the configuration
  systemctl reload sandboxer                  the same

Containers, their logs, execs and connections continue. Requests wait while the daemon is replaced.

Exit codes: 0 replaced, 1 not replaced (the old front continues, and serves with the new worker), 2 wrong usage.";

/// Interval between two checks of whether the daemon is back.
const INTERVAL: Duration = Duration::from_millis(100);

/// Replace the running daemon by the installed build, with the configuration as it is now
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Maximum time to wait until the new daemon responds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
}

#[derive(Debug, Serialize)]
struct Reloaded {
    version: String,
    worker_pid: u32,
    seconds: f64,
}

/// Reloads the daemon, and waits for the outcome.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let begin = Instant::now();
    let mut daemon = client::connect(&global.socket).await?;
    let before = client::answer(daemon.reload(ReloadRequest {}).await)?.reloads;
    let end = begin + Duration::from_secs(args.timeout);
    let now = loop {
        // Until the next worker listens, the socket's queue holds the request.
        let answer = match tokio::time::timeout_at(end.into(), client::version(&global.socket)).await {
            Ok(answer) => answer,
            Err(_) => bail!("the daemon did not come back within {} s: see its log", args.timeout),
        };
        match answer {
            Ok(version) if version.reloads > before => break version,
            Err(error) if Instant::now() >= end => {
                return Err(error).context(format!("the daemon did not come back within {} s", args.timeout));
            }
            _ => tokio::time::sleep(INTERVAL).await,
        }
    };
    if !now.reload_error.is_empty() {
        bail!("the front was not replaced: {}; containers continue with the old one", now.reload_error);
    }
    let reloaded =
        Reloaded { version: now.version, worker_pid: now.worker_pid, seconds: begin.elapsed().as_secs_f64() };
    if global.json {
        return render::print_json(&reloaded);
    }
    let Reloaded { version, worker_pid, seconds } = reloaded;
    let version = render::plain(&version);
    Ok(render::print(&format!("sandboxer {version} took over in {seconds:.1} s (worker {worker_pid})"))?)
}
