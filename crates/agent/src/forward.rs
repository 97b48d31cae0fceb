//! The host's connections to ports of the pod's loopback.

use std::os::fd::{AsRawFd, RawFd};
use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nix::sys::socket::{Shutdown, shutdown};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    time::timeout,
};

use crate::failure::{Failure, Kind, internal};

/// The most connections at once.
const MAX_CONNECTIONS: usize = 256;
/// The most bytes per read.
const CHUNK: usize = 64 << 10;
/// The timeout to connect: on loopback a service accepts at once, or does not exist.
const DEADLINE: Duration = Duration::from_secs(5);
/// The loopback addresses, in the order in which they are tried.
const LOOPBACK: [IpAddr; 2] =
    [IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), IpAddr::V6(std::net::Ipv6Addr::LOCALHOST)];

/// The connections of one host.
#[derive(Debug, Default)]
pub struct Connections {
    // The lock is never held across an await.
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    owner: u64,
    last: u64,
    by_number: HashMap<u64, Arc<Connection>>,
}

/// A connection, whose two directions are independent of each other.
#[derive(Debug)]
struct Connection {
    socket: RawFd,
    from: tokio::sync::Mutex<OwnedReadHalf>,
    to: tokio::sync::Mutex<OwnedWriteHalf>,
}

impl Connections {
    /// Connects to a port. Closes the connections of any other owner.
    pub async fn dial(&self, port: u16, owner: u64) -> Result<u64, Failure> {
        self.admit(owner)?;
        let stream = timeout(DEADLINE, connect(port))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(|error| {
                Failure::caused(Kind::FailedPrecondition, format!("cannot connect to port {port}"), &error)
            })?;
        let socket = stream.as_raw_fd();
        let (from, to) = stream.into_split();
        let mut open = self.open();
        open.last += 1;
        let number = open.last;
        open.by_number.insert(number, Arc::new(Connection { socket, from: from.into(), to: to.into() }));
        Ok(number)
    }

    fn admit(&self, owner: u64) -> Result<(), Failure> {
        let mut open = self.open();
        if open.owner != owner {
            open.owner = owner;
            open.by_number.drain().for_each(|(_, connection)| connection.end());
        }
        if open.by_number.len() >= MAX_CONNECTIONS {
            let message = format!("too many forwarded connections (at most {MAX_CONNECTIONS})");
            return Err(Failure::precondition(message));
        }
        Ok(())
    }

    /// Returns received bytes; none at the end of the stream.
    pub async fn read(&self, number: u64) -> Result<Vec<u8>, Failure> {
        let connection = self.get(number)?;
        let mut data = vec![0; CHUNK];
        let count = connection.from.lock().await.read(&mut data).await;
        data.truncate(count.map_err(internal(format!("cannot read from connection {number}")))?);
        Ok(data)
    }

    /// Writes `data`; with `end`, shuts the direction down.
    pub async fn write(&self, number: u64, data: &[u8], end: bool) -> Result<(), Failure> {
        let connection = self.get(number)?;
        let mut to = connection.to.lock().await;
        let written = async {
            to.write_all(data).await?;
            if end { to.shutdown().await } else { Ok(()) }
        };
        written.await.map_err(internal(format!("cannot write to connection {number}")))
    }

    /// Closes a connection.
    pub fn close(&self, number: u64) {
        if let Some(connection) = self.open().by_number.remove(&number) {
            connection.end();
        }
    }

    fn get(&self, number: u64) -> Result<Arc<Connection>, Failure> {
        let connection = self.open().by_number.get(&number).cloned();
        connection.ok_or_else(|| Failure::not_found(format!("no connection {number}")))
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connection {
    /// Shuts both directions down, so that pending reads and writes end.
    fn end(&self) {
        // Fails if the other side has closed the connection, which is no problem.
        let _ = shutdown(self.socket, Shutdown::Both);
    }
}

async fn connect(port: u16) -> io::Result<TcpStream> {
    let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
    for ip in LOOPBACK {
        outcome = TcpStream::connect((ip, port)).await;
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Starts a service that sends back all bytes that it received, after the end of the input.
    async fn echo(ip: &str) -> u16 {
        let listener = TcpListener::bind((ip, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut received = Vec::new();
                    stream.read_to_end(&mut received).await.unwrap();
                    stream.write_all(&received).await.unwrap();
                });
            }
        });
        port
    }

    #[tokio::test]
    async fn bytes_go_both_ways_and_each_direction_ends_by_itself() {
        for ip in ["127.0.0.1", "::1"] {
            let connections = Connections::default();
            let number = connections.dial(echo(ip).await, 1).await.unwrap();
            connections.write(number, b"half ", false).await.unwrap();
            connections.write(number, b"closed", true).await.unwrap();
            let mut received = Vec::new();
            loop {
                let data = connections.read(number).await.unwrap();
                if data.is_empty() {
                    break;
                }
                received.extend(data);
            }
            assert_eq!(received, b"half closed", "{ip}");
        }
    }

    #[tokio::test]
    async fn what_waits_ends_with_its_connection_and_all_with_their_owner() {
        let connections = Arc::new(Connections::default());
        let port = echo("127.0.0.1").await;
        let (one, two) = (connections.dial(port, 1).await.unwrap(), connections.dial(port, 1).await.unwrap());
        let waiting = |number| {
            let connections = Arc::clone(&connections);
            tokio::spawn(async move { connections.read(number).await })
        };
        let (first, second) = (waiting(one), waiting(two));
        tokio::task::yield_now().await;
        connections.close(one);
        assert_eq!(first.await.unwrap().unwrap(), b"");
        connections.dial(port, 2).await.unwrap();
        assert_eq!(second.await.unwrap().unwrap(), b"");
        assert_eq!(connections.read(two).await.unwrap_err().kind, Kind::NotFound);
    }

    #[tokio::test]
    async fn nobody_there_and_too_many_are_said() {
        let connections = Connections::default();
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let error = connections.dial(free, 1).await.unwrap_err();
        assert_eq!(error.kind, Kind::FailedPrecondition);
        let port = echo("127.0.0.1").await;
        for _ in 0..MAX_CONNECTIONS {
            connections.dial(port, 1).await.unwrap();
        }
        assert!(connections.dial(port, 1).await.unwrap_err().message.contains("256"));
    }
}
