//! PID 1 of a sandboxer guest: prepares the guest, then runs containers for the host.
//!
//! ```text
//!  main ─▶ init (mounts, cgroups, loopback) ─▶ port (the link) ─▶ service ─▶ containers ─▶ container
//!                                                                              worker ◀──fork──┘
//!                                                                                └▶ runtime (libcontainer)
//! ```
//!
//! The agent is one process with one thread, so it may fork. Each operation of the container runtime runs in a process
//! of its own (see [`worker`]).

use std::{panic, sync::Arc};

use anyhow::{Context as _, ensure};
use futures::stream;
use sandboxer_protocol::{
    agent::{Ready, create_agent},
    boot::BootParams,
    mark::MARK,
};
use tokio::sync::{mpsc, watch};
use ttrpc::r#async::{Server, transport::Listener};

use crate::{
    container::Shared,
    containers::Containers,
    events::{Events, OomWatch},
    forward::Connections,
    pids::SharedPids,
    reaper::Reaper,
    resolver::Resolver,
    service::Service,
    shares::Shares,
    volume::Volumes,
    worker::Workers,
};

mod cgroup;
mod clock;
mod console;
mod container;
mod containers;
mod copy;
mod cpus;
mod device_rules;
mod devices;
mod disk;
mod events;
mod failure;
mod forward;
mod init;
mod io;
mod limits;
mod log;
mod messages;
mod network;
mod payload;
mod pids;
mod pipe_helper;
mod pod;
mod port;
mod process;
mod reaper;
mod resolver;
mod rootfs;
mod runtime;
mod scratch;
mod service;
mod shares;
mod spec;
mod stats;
mod sync;
mod targets;
mod timekeeper;
mod tree;
mod uevent;
mod volume;
mod worker;

fn main() -> anyhow::Result<()> {
    let init_ns = clock::boottime_ns();
    // Tools find the mark by reading this file without running it, but the linker drops unused symbols.
    std::hint::black_box(&MARK);
    // The agent mounts file systems and powers off, which would harm a host.
    ensure!(std::process::id() == 1, "sandboxer-agent runs as PID 1 of a guest only");
    panic::set_hook(Box::new(on_panic));
    let Err(error) = run(init_ns);
    log::print(&format!("fatal: {error:#}"));
    // If PID 1 returned, the kernel would panic without this message.
    Err(pod::power_off_now().into())
}

fn run(init_ns: u64) -> anyhow::Result<std::convert::Infallible> {
    init::settle()?;
    init::prepare()?;
    let cmdline = std::fs::read_to_string("/proc/cmdline").context("cannot read the kernel command line")?;
    let params = BootParams::parse(&cmdline)?;
    log::start(params.log.as_deref());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    runtime.block_on(serve(params, init_ns))
}

async fn serve(params: BootParams, init_ns: u64) -> anyhow::Result<std::convert::Infallible> {
    let reaper = Arc::<Reaper>::default();
    let events = Arc::<Events>::default();
    let oom = Arc::new(OomWatch::new(Arc::clone(&events)).context("cannot watch for the OOM killer")?);
    let workers = Workers::new(Arc::clone(&reaper));
    let pids = SharedPids::default();
    let shared = Arc::new(Shared { reaper: Arc::clone(&reaper), workers, oom: Arc::clone(&oom), pids });
    let volumes = Arc::new(Volumes::new(Arc::clone(&shared)));
    let containers = Arc::new(Containers::new(shared));
    let link_key = watch::Sender::new(params.link_key);
    let port_key = link_key.subscribe();
    let service = Arc::new(Service {
        containers,
        volumes,
        events,
        link_key,
        connections: Connections::default(),
        resolver: Resolver::default(),
        shares: Arc::<Shares>::default(),
        delivered: Default::default(),
    });

    let (sessions, accepted) = mpsc::channel(1);
    let accepted = stream::unfold(accepted, async |mut accepted| {
        let session = accepted.recv().await?;
        Some((Ok(session), accepted))
    });
    let mut server =
        Server::new().add_listener(Listener::new(accepted)).register_service(create_agent(service));
    server.start().await.context("cannot serve the agent's protocol")?;

    tokio::spawn(timekeeper::run());
    let kernel_release = pod::kernel_release();
    let ready = move || Ready {
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel_release: kernel_release.clone(),
        init_ns,
        ready_ns: clock::boottime_ns(),
        ..Ready::default()
    };
    tokio::select! {
        result = port::serve(port_key, ready, sessions) => result.context("link to the host failed")?,
        result = reaper.run() => result.context("processes can no longer be reaped")?,
        result = oom.run() => result.context("OOM watch failed")?,
    }
    anyhow::bail!("link to the host was closed")
}

/// Reports a panic: a worker exits with the message as its cause, and the agent powers the guest off.
fn on_panic(info: &panic::PanicHookInfo<'_>) {
    if log::is_worker() {
        log::cause(log::LOGGED, &info.to_string());
        // SAFETY: ends a worker without the agent's exit handlers.
        unsafe { libc::_exit(101) };
    }
    log::print(&format!("fatal: {info}"));
    log::print(&pod::power_off_now().to_string());
}
