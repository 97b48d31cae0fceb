//! Names for a container that is a pod by itself: the name server that its `resolv.conf` names may be on the loopback of its
//! network namespace, as docker's is for the names of other containers. The loopback that a container sees is its guest's, so the
//! daemon carries queries and answers between the two.

use std::{
    io::{self, Read},
    net::{Ipv4Addr, UdpSocket},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandboxer_base::{Code, chain};
use sandboxer_guest::Agent;
use sandboxer_host::{
    beneath::{self, Access},
    network::namespace,
};
use sandboxer_protocol::{id::SandboxId, newer};
use serde::Deserialize;
use tokio::{
    net,
    task::{JoinSet, spawn_blocking},
    time::{sleep, timeout},
};

use super::container::spec::MAX_SPEC;

/// The path of a container's list of name servers.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The most bytes of it that are read.
const MAX_RESOLV_CONF: u64 = 64 << 10;
/// The port of a name server.
const PORT: u16 = 53;
/// The most queries of a pod at once. Others wait in the guest.
const MAX_OPEN: usize = 64;
/// The most bytes of an answer: the most that UDP carries.
const MAX_ANSWER: usize = 64 << 10;
/// The most bytes of a query: the agent's most.
const MAX_QUERY: usize = 4096;
/// Timeout of an answer. docker's name server asks others for up to four seconds each.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
/// Pause after a failure.
const RESPITE: Duration = Duration::from_secs(1);

/// Carries queries of the pod with this `bundle`, if its name server is on the loopback of `netns`, until the returned future
/// is dropped.
pub async fn serve(pod: SandboxId, bundle: PathBuf, netns: PathBuf, agent: Agent) {
    let Some(server) = spawn_blocking(move || name_server(&bundle)).await.ok().flatten() else { return };
    if !agent.knows(&newer::TAKE_QUERY) {
        tracing::warn!(%pod, %server, "the guest's agent is of an earlier version, and asks no name server of the host");
        return;
    }
    let namespace = match namespace::open(&netns) {
        Ok(namespace) => Arc::new(namespace),
        Err(error) => {
            tracing::warn!(%pod, ?netns, %error, "cannot open the network namespace, whose name server the pod asks");
            return;
        }
    };
    let (mut queries, mut has_failed) = (JoinSet::new(), false);
    loop {
        let (number, query) = match agent.take_query(server).await {
            Ok(taken) => taken,
            // Another worker takes them.
            Err(error) if error.code() == Code::FailedPrecondition => return,
            // The session has ended, or the agent cannot listen.
            Err(error) => {
                if !has_failed {
                    tracing::warn!(%pod, %server, error = chain(&error), "cannot take the pod's queries of names");
                }
                has_failed = true;
                sleep(RESPITE).await;
                continue;
            }
        };
        has_failed = false;
        if query.len() > MAX_QUERY {
            continue;
        }
        while queries.try_join_next().is_some() {}
        if queries.len() >= MAX_OPEN {
            queries.join_next().await;
        }
        let (pod, namespace, agent) = (pod.clone(), namespace.clone(), agent.clone());
        queries.spawn(async move {
            match ask(namespace, server, &query).await {
                Ok(answer) => drop(agent.answer_query(number, answer).await),
                Err(error) => tracing::debug!(%pod, %server, %error, "a query of a name has no answer"),
            }
        });
    }
}

/// Asks the name server in `namespace`.
async fn ask(namespace: Arc<OwnedFd>, server: Ipv4Addr, query: &[u8]) -> io::Result<Vec<u8>> {
    let made = spawn_blocking(move || {
        namespace::within(&*namespace, || {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            socket.connect((server, PORT))?;
            socket.set_nonblocking(true)?;
            Ok::<_, io::Error>(socket)
        })
    });
    let socket = net::UdpSocket::from_std(made.await.map_err(io::Error::other)??)?;
    socket.send(query).await?;
    let mut answer = vec![0; MAX_ANSWER];
    let length = timeout(ANSWER_WITHIN, socket.recv(&mut answer)).await.map_err(io::Error::from)??;
    answer.truncate(length);
    Ok(answer)
}

/// Returns the name server of a container, if it is on the loopback.
fn name_server(bundle: &Path) -> Option<Ipv4Addr> {
    #[derive(Deserialize)]
    struct Spec {
        #[serde(default)]
        mounts: Vec<Mount>,
    }
    #[derive(Deserialize)]
    struct Mount {
        destination: PathBuf,
        source: Option<PathBuf>,
    }
    let spec: Spec = serde_json::from_slice(&bounded(&bundle.join("config.json"), MAX_SPEC)?).ok()?;
    let mount = spec.mounts.into_iter().rfind(|mount| mount.destination == Path::new(RESOLV_CONF))?;
    let text = bounded(&mount.source?, MAX_RESOLV_CONF)?;
    on_loopback(&String::from_utf8_lossy(&text))
}

/// Reads a regular file: the container may have put something else there.
fn bounded(path: &Path, most: u64) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    let file = beneath::host(path).and_then(|found| found.open(Access::Read)).ok()?;
    file.take(most).read_to_end(&mut text).ok()?;
    Some(text)
}

/// Returns the first name server of a `resolv.conf`, if it is on the loopback.
fn on_loopback(text: &str) -> Option<Ipv4Addr> {
    let mut servers =
        text.lines().filter_map(|line| line.strip_prefix("nameserver")?.split_whitespace().next());
    servers.next()?.parse().ok().filter(Ipv4Addr::is_loopback)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_a_first_name_server_on_the_loopback_is_the_namespaces_own() {
        let docker = "# Generated by Docker Engine.\nsearch shop\nnameserver 127.0.0.11\noptions ndots:0\n";
        assert_eq!(on_loopback(docker), Some(Ipv4Addr::new(127, 0, 0, 11)));
        for other in ["", "nameserver 192.0.2.1\nnameserver 127.0.0.11\n", "nameserver ::1\n", "nameserver\n"]
        {
            assert_eq!(on_loopback(other), None, "{other}");
        }
    }

    #[test]
    fn the_name_server_is_that_of_the_containers_last_resolv_conf() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        assert_eq!(name_server(dir.path()), None, "there is no specification");
        let (one, two) = (file("one", "nameserver 192.0.2.1\n"), file("two", "nameserver 127.0.0.11\n"));
        let spec = serde_json::json!({"mounts": [
            {"destination": "/proc", "type": "proc"},
            {"destination": RESOLV_CONF, "source": one},
            {"destination": RESOLV_CONF, "source": two},
        ]});
        file("config.json", &spec.to_string());
        assert_eq!(name_server(dir.path()), Some(Ipv4Addr::new(127, 0, 0, 11)));
    }

    #[tokio::test]
    async fn a_query_is_asked_in_the_namespace() {
        let here = || Arc::new(namespace::open(Path::new("/proc/self/ns/net")).unwrap());
        // Nothing listens there.
        let refused = ask(here(), Ipv4Addr::new(127, 94, 31, 7), b"?").await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
