//! `delete`: containerd has closed or lost its connection for a container, and removes the container next.
//!
//! Usually the container was deleted before, and there is nothing to do. Otherwise containerd is about to report it as
//! dead, so it must not keep running: this program makes the daemon kill it. If the daemon does not respond, this
//! program exits anyway, within containerd's five seconds.
//!
//! A sandbox container is its pod: the daemon stops the VM. If the daemon cannot be reached now, it removes the pod
//! later, when it finds that containerd has removed the bundle.

use std::{path::PathBuf, sync::mpsc, thread, time::Duration};

use containerd_shim_protos::{
    Client, TaskClient,
    api::{DeleteRequest, DeleteResponse, KillRequest, WaitRequest},
    ttrpc::{
        self, Code,
        context::{self, Context},
    },
};
use protobuf::well_known_types::timestamp::Timestamp;

use crate::{args::Args, bundle};

/// The time limit of all requests to the daemon, below containerd's `io.containerd.timeout.shim.cleanup` of 5 s.
const TIMEOUT: Duration = Duration::from_secs(3);

const SIGKILL: u32 = 9;

/// The exit status of a container whose end is unknown: killed.
const KILLED: u32 = 128 + SIGKILL;

/// Kills the container if it still exists. Returns its exit, as far as known.
pub fn delete(args: &Args) -> DeleteResponse {
    let dir = args.bundle.clone().unwrap_or_else(|| PathBuf::from("."));
    let exit = bundle::address(&dir).and_then(|address| {
        let (namespace, id) = (args.namespace.clone(), args.id.clone());
        within(TIMEOUT, move || end(&address, &namespace, &id).ok())
    });
    exit.unwrap_or_else(|| DeleteResponse {
        exit_status: KILLED,
        exited_at: Some(Timestamp::now()).into(),
        ..Default::default()
    })
}

/// Returns the result of `ask`, unless it exceeds `limit`: even connecting may block, and this process exits with its
/// main thread.
fn within<T: Send + 'static>(limit: Duration, ask: impl FnOnce() -> Option<T> + Send + 'static) -> Option<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::spawn(move || sender.send(ask()));
    receiver.recv_timeout(limit).ok().flatten()
}

/// Makes the daemon kill and delete the container.
fn end(address: &str, namespace: &str, id: &str) -> Result<DeleteResponse, ttrpc::Error> {
    let daemon = TaskClient::new(Client::connect(address)?);
    let kill = KillRequest { id: id.to_owned(), signal: SIGKILL, all: true, ..Default::default() };
    match daemon.kill(context(namespace), &kill) {
        Ok(_) => {
            let wait = WaitRequest { id: id.to_owned(), ..Default::default() };
            daemon.wait(context(namespace), &wait)?;
        }
        // The container does not exist, or has already exited.
        Err(error) if is_not_found(&error) => {}
        Err(error) => return Err(error),
    }
    daemon.delete(context(namespace), &DeleteRequest { id: id.to_owned(), ..Default::default() })
}

fn is_not_found(error: &ttrpc::Error) -> bool {
    matches!(error, ttrpc::Error::RpcStatus(status) if status.code() == Code::NOT_FOUND)
}

fn context(namespace: &str) -> Context {
    let mut context = context::with_duration(TIMEOUT);
    context.add("containerd-namespace-ttrpc".to_owned(), namespace.to_owned());
    context
}
