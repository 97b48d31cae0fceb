//! Access control: only root and the daemon's own user may connect. The sockets have mode 0600 in a directory of mode
//! 0700; this check still holds if somebody changed the modes or passed a socket on.

use std::io;

use futures::{Stream, StreamExt, future};
use tokio::net::UnixStream;

/// Filters connections: closes those of other users.
pub fn trusted<S>(incoming: S) -> impl Stream<Item = io::Result<UnixStream>> + Send + Unpin
where
    S: Stream<Item = io::Result<UnixStream>> + Send + Unpin,
{
    let own = rustix::process::geteuid().as_raw();
    incoming
        .filter(move |accepted| future::ready(accepted.as_ref().map_or(true, |peer| is_trusted(peer, own))))
}

fn is_trusted(peer: &UnixStream, own: u32) -> bool {
    match peer.peer_cred() {
        Ok(peer) if peer.uid() == 0 || peer.uid() == own => true,
        Ok(peer) => {
            tracing::warn!(uid = peer.uid(), pid = peer.pid(), "rejected connection: peer is not root");
            false
        }
        Err(error) => {
            tracing::warn!(%error, "rejected connection: no peer credentials");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use rustix::process::Uid;
    use tokio::{io::AsyncReadExt, net::UnixListener};
    use tokio_stream::wrappers::UnixListenerStream;

    use super::*;

    #[tokio::test]
    async fn another_user_is_hung_up_on_and_root_is_served() {
        assert!(rustix::process::geteuid().is_root(), "run tests as root");
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = dir.path().join("open.sock");
        let listener = UnixListener::bind(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        let mut served = trusted(UnixListenerStream::new(listener));

        let by = path.clone();
        let foreign = std::thread::spawn(move || {
            let nobody = Uid::from_raw(65534);
            // For this thread only.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            std::os::unix::net::UnixStream::connect(by).unwrap()
        });
        let foreign = foreign.join().unwrap();
        let _own = UnixStream::connect(&path).await.unwrap();
        let first = served.next().await.unwrap().unwrap();
        assert_eq!(first.peer_cred().unwrap().uid(), 0);
        foreign.set_nonblocking(true).unwrap();
        let mut foreign = UnixStream::from_std(foreign).unwrap();
        assert_eq!(foreign.read(&mut [0]).await.unwrap(), 0);
    }
}
