//! `delete`: containerd has closed its connection for a container, or lost it, and forgets the
//! container next.
//!
//! Most often the container was deleted before and nothing is left to do. Otherwise containerd is
//! about to report it dead, so it must not live on where nobody can reach it: a daemon that can be
//! asked ends it. One that can't be asked keeps nobody waiting; containerd gives five seconds.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use containerd_shim_protos::{
    Client, TaskClient,
    api::{DeleteRequest, DeleteResponse, KillRequest, WaitRequest},
    ttrpc::{
        self, Code,
        context::{self, Context},
    },
};
use protobuf::well_known_types::timestamp::Timestamp;
use serde::Deserialize;

use crate::args::Args;

/// For everything that is said to the daemon, below containerd's `io.containerd.timeout.shim.cleanup` of 5 s.
const PATIENCE: Duration = Duration::from_secs(3);

const SIGKILL: u32 = 9;

/// What containerd reports of a container whose end nobody saw: killed.
const KILLED: u32 = 128 + SIGKILL;

/// containerd's note, in the bundle, of where the container's task service is.
#[derive(Debug, Deserialize)]
struct Bootstrap {
    address: String,
}

/// Ends the container if it is still there. How it ended, as far as that can be known.
pub fn delete(args: &Args) -> DeleteResponse {
    let bundle = args.bundle.clone().unwrap_or_else(|| PathBuf::from("."));
    let told = address(&bundle).and_then(|address| {
        let (namespace, id) = (args.namespace.clone(), args.id.clone());
        within(PATIENCE, move || end(&address, &namespace, &id).ok())
    });
    told.unwrap_or_else(|| DeleteResponse {
        exit_status: KILLED,
        exited_at: Some(Timestamp::now()).into(),
        ..Default::default()
    })
}

/// Returns where the container's task service is; none where containerd never wrote it down.
fn address(bundle: &Path) -> Option<String> {
    let text = fs::read(bundle.join("bootstrap.json")).ok()?;
    serde_json::from_slice::<Bootstrap>(&text).ok().map(|bootstrap| bootstrap.address)
}

/// Returns what `ask` answers, unless it takes too long: even connecting may block, and this process ends
/// with its main thread.
fn within<T: Send + 'static>(limit: Duration, ask: impl FnOnce() -> Option<T> + Send + 'static) -> Option<T> {
    let (told, answer) = mpsc::sync_channel(1);
    thread::spawn(move || told.send(ask()));
    answer.recv_timeout(limit).ok().flatten()
}

/// Has the daemon kill the container and forget it.
fn end(address: &str, namespace: &str, id: &str) -> Result<DeleteResponse, ttrpc::Error> {
    let daemon = TaskClient::new(Client::connect(address)?);
    let kill = KillRequest { id: id.to_owned(), signal: SIGKILL, all: true, ..Default::default() };
    match daemon.kill(context(namespace), &kill) {
        Ok(_) => {
            let wait = WaitRequest { id: id.to_owned(), ..Default::default() };
            daemon.wait(context(namespace), &wait)?;
        }
        // Nobody there, or it has ended already.
        Err(error) if is_not_found(&error) => {}
        Err(error) => return Err(error),
    }
    daemon.delete(context(namespace), &DeleteRequest { id: id.to_owned(), ..Default::default() })
}

fn is_not_found(error: &ttrpc::Error) -> bool {
    matches!(error, ttrpc::Error::RpcStatus(status) if status.code() == Code::NOT_FOUND)
}

fn context(namespace: &str) -> Context {
    let mut context = context::with_duration(PATIENCE);
    context.add("containerd-namespace-ttrpc".to_owned(), namespace.to_owned());
    context
}
