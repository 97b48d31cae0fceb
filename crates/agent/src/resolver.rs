//! A name server on the guest's loopback that is really on the host's: docker's, which listens on the loopback of the pod's
//! network namespace there.
//!
//! ```text
//!  program ─UDP─▶ 127.0.0.11:53 ─TakeQuery─▶ daemon ─UDP─▶ 127.0.0.11:53 in the pod's namespace
//!     ╰──◀───────────────────────AnswerQuery─────────────────────╯
//! ```

use std::{
    collections::VecDeque,
    io,
    net::{Ipv4Addr, SocketAddr},
    os::fd::AsRawFd,
    sync::Mutex,
};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket, sockopt::ReuseAddr,
};
use tokio::{
    net::UdpSocket,
    sync::{OnceCell, watch},
};

use crate::{
    failure::{Failure, internal},
    sync::lock,
};

/// The port of a name server.
const PORT: u16 = 53;
/// The most queries without an answer; the oldest is forgotten first, and its program asks again.
const MAX_OPEN: usize = 256;
/// The most bytes of a query: more than programs send by UDP.
const MAX_QUERY: usize = 4096;

/// The name server. Listens from the first [`Resolver::take`] on.
pub struct Resolver {
    socket: OnceCell<UdpSocket>,
    // The lock is never held across an await.
    queries: Mutex<Queries>,
    /// Which call of [`Resolver::take`] waits: the last one. A daemon that died does not take the queries of the next.
    turn: watch::Sender<u64>,
}

impl Default for Resolver {
    fn default() -> Self {
        Self { socket: OnceCell::new(), queries: Mutex::default(), turn: watch::Sender::new(0) }
    }
}

/// The unanswered queries: each number and the address of the program that asked.
#[derive(Default)]
struct Queries {
    last: u64,
    open: VecDeque<(u64, SocketAddr)>,
}

impl Resolver {
    /// Listens at `address`, and waits for a query; returns it with its number.
    pub async fn take(&self, address: Ipv4Addr) -> Result<(u64, Vec<u8>), Failure> {
        self.take_at(SocketAddr::from((address, PORT))).await
    }

    async fn take_at(&self, address: SocketAddr) -> Result<(u64, Vec<u8>), Failure> {
        if !address.ip().is_loopback() {
            return Err(Failure::invalid(format!("{} is not on the loopback", address.ip())));
        }
        let listening = async || {
            listen(address).map_err(internal(format!("cannot listen at {address} for queries of names")))
        };
        let socket = self.socket.get_or_try_init(listening).await?;
        let mut turn = self.turn.subscribe();
        self.turn.send_modify(|turn| *turn += 1);
        let mine = *turn.borrow_and_update();
        let mut query = vec![0; MAX_QUERY];
        let (length, from) = tokio::select! {
            biased;
            _ = turn.wait_for(|turn| *turn != mine) => {
                return Err(Failure::precondition("another call waits for queries of names"));
            }
            received = socket.recv_from(&mut query) => received.map_err(internal("cannot receive a query of a name"))?,
        };
        query.truncate(length);
        let mut queries = lock(&self.queries);
        queries.last += 1;
        let number = queries.last;
        queries.open.push_back((number, from));
        if queries.open.len() > MAX_OPEN {
            queries.open.pop_front();
        }
        Ok((number, query))
    }

    /// Answers a query. One that is forgotten, or whose program has gone, needs no answer.
    pub async fn answer(&self, number: u64, data: &[u8]) {
        let from = {
            let mut queries = lock(&self.queries);
            let at = queries.open.iter().position(|(open, _)| *open == number);
            at.and_then(|at| queries.open.remove(at))
        };
        if let (Some((_, from)), Some(socket)) = (from, self.socket.get()) {
            let _ = socket.send_to(data, from).await;
        }
    }
}

/// Binds a socket. A program that listens at all addresses, as a name server in a container does, may do so beside it.
fn listen(address: SocketAddr) -> io::Result<UdpSocket> {
    let (kind, flags) = (SockType::Datagram, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC);
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, kind, flags, None)?;
    setsockopt(&socket, ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    UdpSocket::from_std(std::net::UdpSocket::from(socket))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::failure::Kind;

    async fn listening() -> (Arc<Resolver>, UdpSocket) {
        let resolver = Arc::new(Resolver::default());
        resolver.socket.set(UdpSocket::bind("127.0.0.1:0").await.unwrap()).unwrap();
        let program = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        program.connect(resolver.socket.get().unwrap().local_addr().unwrap()).await.unwrap();
        (resolver, program)
    }

    #[tokio::test]
    async fn each_answer_goes_to_the_program_that_asked() {
        let (resolver, one) = listening().await;
        let two = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        two.connect(one.peer_addr().unwrap()).await.unwrap();
        one.send(b"one?").await.unwrap();
        let (first, query) = resolver.take(Ipv4Addr::LOCALHOST).await.unwrap();
        assert_eq!(query, b"one?");
        two.send(b"two?").await.unwrap();
        let (second, query) = resolver.take(Ipv4Addr::LOCALHOST).await.unwrap();
        assert_eq!(query, b"two?");
        resolver.answer(second, b"two!").await;
        resolver.answer(first, b"one!").await;
        // Neither a second answer nor one to nothing goes anywhere.
        resolver.answer(first, b"again").await;
        resolver.answer(99, b"what").await;
        let mut buffer = [0; 16];
        for (program, answer) in [(&one, b"one!"), (&two, b"two!")] {
            let length = program.recv(&mut buffer).await.unwrap();
            assert_eq!(&buffer[..length], answer);
            assert!(program.try_recv(&mut buffer).is_err());
        }
    }

    #[tokio::test]
    async fn the_last_call_gets_the_next_query() {
        let (resolver, program) = listening().await;
        let waits = |resolver: &Arc<Resolver>| {
            let resolver = Arc::clone(resolver);
            tokio::spawn(async move { resolver.take(Ipv4Addr::LOCALHOST).await })
        };
        let earlier = waits(&resolver);
        tokio::task::yield_now().await;
        let later = waits(&resolver);
        assert_eq!(earlier.await.unwrap().unwrap_err().kind, Kind::FailedPrecondition);
        program.send(b"name?").await.unwrap();
        assert_eq!(later.await.unwrap().unwrap().1, b"name?");
    }

    #[tokio::test]
    async fn only_the_oldest_of_too_many_is_forgotten() {
        let (resolver, program) = listening().await;
        let mut numbers = Vec::new();
        for _ in 0..=MAX_OPEN {
            program.send(b"?").await.unwrap();
            numbers.push(resolver.take(Ipv4Addr::LOCALHOST).await.unwrap().0);
        }
        resolver.answer(numbers[0], b"forgotten").await;
        resolver.answer(numbers[1], b"known").await;
        let mut buffer = [0; 16];
        let length = program.recv(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..length], b"known");
    }

    #[tokio::test]
    async fn a_program_may_listen_at_all_addresses_beside_it() {
        let one = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let port = one.local_addr().unwrap().port();
        listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).unwrap();
        assert!(std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).is_err(), "it has to say so");
    }

    #[tokio::test]
    async fn it_listens_on_the_loopback_only() {
        let failure = Resolver::default().take(Ipv4Addr::UNSPECIFIED).await.unwrap_err();
        assert_eq!(failure.kind, Kind::InvalidArgument);
    }
}
