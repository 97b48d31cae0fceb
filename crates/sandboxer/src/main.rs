//! Parse, build, bind, recover, announce ready, serve, drain.

use std::{io::IsTerminal as _, path::PathBuf, process::ExitCode};

use anyhow::Context;
use clap::Parser;
use sandboxer::{config::Config, daemon};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

/// Threads that serve requests. All work is waiting for VMMs, guests and disks; a third thread
/// would only cost its stack.
const WORKERS: usize = 2;
/// Threads for blocking file operations.
const BLOCKING: usize = 8;

/// Runs every pod of this node in a microVM of its own, for containerd.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:\n  \
        sandboxer                                    serve, with /etc/sandboxer/config.toml if it is there\n  \
        sandboxer --config ./my.toml --check-config  say what is wrong with a configuration\n  \
        sandboxer --log debug                        tell more"
)]
struct Options {
    /// Configuration file; its keys are shown by `sandboxer-cli config default`.
    #[arg(long, value_name = "FILE", env = "SANDBOXER_CONFIG")]
    config: Option<PathBuf>,
    /// Read the configuration, say whether it is fine, and exit.
    #[arg(long)]
    check_config: bool,
    /// What to log: error, warn, info, debug, trace, or a filter such as sandboxer::pod=debug.
    #[arg(long, value_name = "FILTER", default_value = "info", env = "SANDBOXER_LOG")]
    log: String,
    /// Log JSON lines.
    #[arg(long)]
    log_json: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match start(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sandboxer: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(options: &Options) -> anyhow::Result<()> {
    let config = Config::load_or_default(options.config.as_deref())?;
    if options.check_config {
        println!("the configuration is fine");
        return Ok(());
    }
    let filter = EnvFilter::try_new(&options.log).with_context(|| format!("--log {:?}", options.log))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    if options.log_json {
        log.json().init()
    } else {
        log.init()
    }

    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING)
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(serve(config))
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot watch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot watch SIGINT")?;
    let asked = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        asked.cancel();
    });
    daemon::run(config, shutdown, |recovered| {
        tracing::info!(
            alive = recovered.alive,
            stopped = recovered.stopped,
            quarantined = recovered.quarantined,
            "ready"
        );
        // Under no service manager this does nothing.
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    })
    .await?;
    Ok(())
}
