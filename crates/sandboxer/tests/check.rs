//! A node check can distinguish this daemon from another one at the same socket.

#![allow(clippy::unwrap_used)]

use std::{path::Path, sync::Arc};

use sandboxer::{api::sandbox::SandboxService, daemon, front::Front};
use sandboxer_config::Config;
use sandboxer_doctor::cri::reaches_us;
use sandboxer_protocol::controller::controller_server::ControllerServer;
use sandboxer_vmm_fake::FakeVmm;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{service::Routes, transport::Server};

/// Returns what is found at a socket where `services` are served.
async fn found(dir: &Path, services: Routes) -> Result<(), String> {
    let socket = dir.join("socket");
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let serving = tokio::spawn(Server::builder().add_routes(services).serve_with_incoming(incoming));
    let found = reaches_us(&socket, "sandboxer").await;
    serving.abort();
    std::fs::remove_file(socket).unwrap();
    found
}

#[tokio::test]
async fn the_daemon_is_known_by_what_it_tells_of_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (run_dir, state_dir) = (dir.path().join("run"), dir.path().join("state"));
    let config = Config { run_dir, state_dir, ..Config::default() };
    let node = daemon::node(config, Arc::new(FakeVmm::new(|_| ())), Front::none()).unwrap();
    let ours = SandboxService::new(node, "nowhere".into(), CancellationToken::new()).unwrap();
    assert_eq!(found(dir.path(), Routes::new(ControllerServer::new(ours))).await, Ok(()));
    found(dir.path(), Routes::default()).await.unwrap_err();
}
