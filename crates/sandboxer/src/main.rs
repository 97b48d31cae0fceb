//! Entry point: parses options, then runs the front, a worker of the front, or a helper.

mod options;

use std::{
    io::IsTerminal as _,
    os::fd::{AsFd, FromRawFd, OwnedFd},
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, anyhow};
use clap::Parser;
use options::Options;
use rustix::process::{Resource, Rlimit, setrlimit};
use sandboxer::{daemon, front::Front, journald::Journald, privileges};
use sandboxer_config::Config;
use sandboxer_host::helper;
use sandboxer_protocol::SPOKEN;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::{Layer, filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

/// Number of threads that serve requests. They only wait for VMMs, guests and disks; a third thread would only cost its
/// stack.
const WORKERS: usize = 2;
/// Maximum number of threads for blocking file operations.
const BLOCKING: usize = 8;
/// Idle time after which such a thread ends and frees its stack of up to 90 KiB.
const IDLE: Duration = Duration::from_secs(2);
/// Maximum memory of a helper, bytes; the bound for what it reads of a volume is much lower.
const HELPER_MEMORY: u64 = 1 << 30;

/// The program that containerd stays connected to, in the same directory as this one.
const FRONT: &str = "sandboxer-front";

/// Runs the program.
pub fn main() -> ExitCode {
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
    if options.path_helper {
        return help();
    }
    if options.protocols {
        println!("{} {}", SPOKEN.start(), SPOKEN.end());
        return Ok(());
    }
    let mut config = Config::load_or_default(options.config.as_deref())?;
    if options.check_config {
        println!("the configuration is fine");
        return Ok(());
    }
    // The file may be replaced by another version, but helpers must be of this version.
    config.helper_program = Some("/proc/self/exe".into());
    // Before any other thread starts: each thread has its own capability sets.
    privileges::drop_unneeded()?;
    let Some(front) = options.front_fd else { return become_front() };
    // The error's text already contains its source.
    let filter: Targets = options.log.parse().map_err(|error| anyhow!("--log {:?}: {error}", options.log))?;
    let lines = tracing_subscriber::fmt::layer()
        // Otherwise the layer reports write errors with `eprintln!`, which panics when stderr is closed.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let lines = match Journald::of_stderr().filter(|_| !options.log_json) {
        Some(journald) => journald.boxed(),
        None if options.log_json => lines.json().boxed(),
        None => lines.boxed(),
    };
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();

    // SAFETY: only the front passes this option, and it passes this descriptor with it, for this use.
    let front = unsafe { OwnedFd::from_raw_fd(front) };
    rustix::io::fcntl_setfd(&front, rustix::io::FdFlags::CLOEXEC).context("--front-fd")?;
    let front =
        Front::connect(front).context("cannot receive the entries of earlier workers from the front")?;
    // The front kills a worker that closes its socket. A worker that ends with an error must first return its exit
    // code, so the socket stays open until the process ends.
    std::mem::forget(front.clone());

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING)
        .thread_keep_alive(IDLE)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let served = runtime.block_on(serve(config, front));
    // Dropping it would cancel running calls one by one, and containerd takes a cancelled Wait for the end of the pod.
    // If connections end with the process, it retries.
    std::mem::forget(runtime);
    served
}

/// Runs as a path helper.
fn help() -> anyhow::Result<()> {
    rustix::thread::set_name(c"sandboxer-path").context("cannot name this process")?;
    let most = |most| Rlimit { current: Some(most), maximum: Some(most) };
    setrlimit(Resource::Core, most(0)).context("cannot limit core files")?;
    setrlimit(Resource::As, most(HELPER_MEMORY)).context("cannot limit memory")?;
    let stream = std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
    helper::serve(stream.into()).context("cannot serve the daemon")
}

/// Executes the front, which starts this program again as its worker.
fn become_front() -> anyhow::Result<()> {
    let worker = std::env::current_exe().context("cannot find this program")?;
    let front = worker.with_file_name(FRONT);
    let error = Command::new(&front).arg(&worker).args(std::env::args_os().skip(1)).exec();
    Err(error).with_context(|| format!("cannot run {front:?}: install it beside {worker:?}"))
}

async fn serve(config: Config, front: Arc<Front>) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot watch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot watch SIGINT")?;
    let trigger = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        trigger.cancel();
    });
    let ready = front.clone();
    daemon::run(config, front, shutdown, |recovered| {
        tracing::info!(
            alive = recovered.alive,
            unknown = recovered.unknown,
            stopped = recovered.stopped,
            quarantined = recovered.quarantined,
            "ready"
        );
        ready.ready();
    })
    .await?;
    Ok(())
}
