//! Host ports of hostNetwork pods. A worker listens on them, and the front keeps the sockets for the next worker;
//! clients wait while no worker runs.

use std::{
    net::TcpListener,
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
};

use nix::sys::socket::{Shutdown, shutdown};
use sandboxer_host::network::ports;

use super::spec::PodSpec;
use crate::{error::PodError, front::Front};

fn key(pod: &PodSpec, port: u16) -> String {
    format!("host-port {} {port}", pod.id)
}

/// Listens on all ports that a new pod requests, or on none if one is taken.
pub fn listen(front: &Arc<Front>, pod: &PodSpec) -> Result<Vec<TcpListener>, PodError> {
    let listen = |&port: &u16| {
        let listener = ports::listen(port).map_err(|error| PodError::State {
            action: "start the pod",
            subject: format!("TCP port {port} of the host, which pod {} asks for,", pod.id),
            state: format!("not to be had: {error}"),
        })?;
        keep(front, pod, port, &listener);
        Ok(listener)
    };
    let listeners: Result<Vec<_>, PodError> = pod.host_ports.iter().map(listen).collect();
    if listeners.is_err() {
        let_go(front, pod, &[]);
    }
    listeners
}

/// Returns the listeners of a running pod. Without a front the ports were released meanwhile, and other processes may
/// have taken some.
pub fn listen_again(front: &Arc<Front>, pod: &PodSpec) -> Vec<TcpListener> {
    let listen = |&port: &u16| {
        if let Some(fd) = front.take(&key(pod, port)).and_then(|mut entry| entry.fds.pop()) {
            return Some(fd.into());
        }
        match ports::listen(port) {
            Ok(listener) => {
                keep(front, pod, port, &listener);
                Some(listener)
            }
            Err(error) => {
                tracing::error!(pod = %pod.id, port, %error, "cannot listen on a port of the host for the pod again");
                None
            }
        }
    };
    pod.host_ports.iter().filter_map(listen).collect()
}

/// Releases the pod's host ports. They are free on return, even if `listeners` or the front's copies are still open.
pub fn let_go(front: &Front, pod: &PodSpec, listeners: &[TcpListener]) {
    for listener in listeners {
        if let Err(error) = shutdown(listener.as_raw_fd(), Shutdown::Both) {
            tracing::warn!(pod = %pod.id, %error, "cannot release a host port yet");
        }
    }
    for port in &pod.host_ports {
        front.forget(&key(pod, *port));
    }
}

fn keep(front: &Arc<Front>, pod: &PodSpec, port: u16, listener: &TcpListener) {
    if let Err(error) = front.keep(&key(pod, port), &(), &[listener.as_fd()]) {
        // The next worker listens again.
        tracing::warn!(pod = %pod.id, port, %error, "the front cannot store a host port's socket");
    }
}
