//! The front's task connections: accepted, linked to the worker, watched.

use std::{
    io, mem,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    rc::Rc,
    time::Instant,
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{EpollEvent, EpollFlags},
        socket::{SockFlag, accept4, getsockopt, sockopt::PeerCredentials},
    },
    unistd::geteuid,
};
use sandboxer_base::failpoint::pass;

use crate::{
    connection::{Connection, Files, Side},
    control::Kind,
    journal::Record,
    log::log,
    store::{Reserved, Stored},
};

use super::{ACCEPT_PAUSE, Front, LISTENER, Linked, RELINK, TRIAL, Trial};

impl Front<'_> {
    pub(super) fn listen(&mut self, listener: Rc<Stored>) {
        if let Some(before) = self.listener.take() {
            let _ = self.epoll.delete(&before);
        }
        if let Err(error) = self.epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER)) {
            log!("cannot watch the task socket: {error}");
        }
        self.listener = Some(listener);
    }

    pub(super) fn watch_listener(&self, events: EpollFlags) {
        if let Some(listener) = &self.listener {
            let _ = self.epoll.modify(listener, &mut EpollEvent::new(events, LISTENER));
        }
    }

    pub(super) fn pause_accepting(&mut self) {
        self.watch_listener(EpollFlags::empty());
        self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
    }

    pub(super) fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        // A connection without files could not be kept.
        let (files, reserved) = match Files::create().and_then(|files| Ok((files, Reserved::new()?))) {
            Ok(made) => made,
            Err(error) => return self.starve(&error),
        };
        // The connection is recorded before it exists: if this process is killed meanwhile, the next one has it.
        let number = self.next_connection;
        self.next_connection += 1;
        self.journal
            .add(&Record::Connection { id: number, connection: files.description(reserved.as_raw_fd()) });
        pass(format_args!("the front is about to accept a connection"));
        let listener = listener.as_raw_fd();
        // SAFETY: the kernel has just created the descriptor, and it has no other owner.
        let accept = || Ok(unsafe { OwnedFd::from_raw_fd(accept4(listener, flags)?) });
        let client = match reserved.fill(accept) {
            Ok(client) => client,
            Err(error) => {
                self.journal.add(&Record::Closed(number));
                // Otherwise the client has disconnected.
                if let Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM = error {
                    self.starve(&error.into());
                }
                return;
            }
        };
        pass(format_args!("the front has accepted a connection"));
        self.has_logged_exhaustion = false;
        // The socket has mode 0600 in a directory with 0700; this check holds even if these were changed.
        let trusted = |uid: u32| uid == 0 || uid == geteuid().as_raw();
        if !getsockopt(&client, PeerCredentials).is_ok_and(|peer| trusted(peer.uid())) {
            self.journal.add(&Record::Closed(number));
            return log!("rejected a task connection: the peer is not root");
        }
        self.watch(number, Connection::new(number, client, files));
        self.link(number);
    }

    /// Waits a while before accepting again: the client keeps waiting, and epoll would report it forever.
    fn starve(&mut self, error: &io::Error) {
        self.pause_accepting();
        if !mem::replace(&mut self.has_logged_exhaustion, true) {
            log!(
                "cannot accept task connections: {error}; raise the limit of open files \
                 (LimitNOFILE= of the service)"
            );
        }
    }

    /// Watches a new connection.
    pub(super) fn watch(&mut self, number: u64, connection: Connection) {
        let watched = (EpollFlags::empty(), EpollFlags::empty());
        match self.epoll.add(connection.client(), EpollEvent::new(watched.0, number * 2)) {
            Ok(()) => drop(self.connections.insert(number, Linked { connection, watched })),
            Err(error) => {
                log!("cannot watch a task connection: {error}");
                self.journal.add(&Record::Closed(number));
            }
        }
    }

    /// Links a connection to the worker, if the worker is ready.
    pub(super) fn link(&mut self, number: u64) {
        let Some(worker) = self.worker.as_mut().filter(|worker| worker.ready.is_some()) else { return };
        let Some(linked) = self.connections.get_mut(&number) else { return };
        let mut linking = || -> io::Result<()> {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_nonblocking(true)?;
            self.epoll.add(&ours, EpollEvent::new(EpollFlags::empty(), number * 2 + 1))?;
            worker.queue(Kind::Connection, "", &[], vec![Rc::new(Stored::not_yet(theirs.into()))]);
            worker.flush();
            linked.connection.set_link(ours);
            linked.watched.1 = EpollFlags::empty();
            Ok(())
        };
        if let Err(error) = linking() {
            // The connection keeps its requests until it can be linked: if it were closed, containerd would take its
            // container for dead.
            if !mem::replace(&mut self.has_logged_exhaustion, true) {
                log!("cannot link task connections to the worker: {error}");
            }
            self.relink = Some(Instant::now() + RELINK);
            // New connections would use up the descriptors that this one needs.
            self.pause_accepting();
        }
        self.watch_worker();
        self.settle(number, Side::Open);
    }

    /// Sends the worker one suspect at a time, so that the cause is known if the worker dies.
    pub(super) fn send_suspect(&mut self) {
        if self.worker.as_ref().is_none_or(|worker| worker.ready.is_none()) {
            return;
        }
        let open = |trial: &Trial| {
            let linked = self.connections.get(&trial.connection);
            trial.until > Instant::now()
                && linked.is_some_and(|linked| linked.connection.awaits(trial.request))
        };
        if self.trial.as_ref().is_some_and(open) {
            return;
        }
        let suspects = self.connections.iter();
        let suspects = suspects.filter_map(|(number, linked)| Some((linked.connection.suspect()?, *number)));
        let Some((request, connection)) = suspects.min() else {
            self.trial = None;
            // A suspect without a link is found again when it is linked.
            self.has_suspects = self.relink.is_some();
            return;
        };
        self.trial = Some(Trial { connection, request, until: Instant::now() + TRIAL });
        if let Some(linked) = self.connections.get_mut(&connection) {
            linked.connection.send(request);
            // The socket may be full or closed, which its next event reports.
            let _ = linked.connection.flush_link();
        }
        self.settle(connection, Side::Open);
    }

    /// Links connections that have lost their link while the worker is running; closes those that lose it repeatedly.
    pub(super) fn link_again(&mut self) {
        let unlinked: Vec<_> = (self.connections.iter())
            .filter(|(_, linked)| linked.connection.link().is_none())
            .map(|(number, linked)| (*number, linked.connection.may_link()))
            .collect();
        for (number, may_link) in unlinked {
            if may_link { self.link(number) } else { self.settle(number, Side::Gone) }
        }
    }

    pub(super) fn serve(&mut self, number: u64, link: bool, events: EpollFlags) {
        let Some(Linked { connection, .. }) = self.connections.get_mut(&number) else { return };
        let closed = EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP;
        let side = if link {
            let mut side = Side::Open;
            if events.intersects(EpollFlags::EPOLLIN | closed) {
                side = connection.read_link(&mut self.scratch);
            }
            if side != Side::Gone {
                side = connection.flush_link();
            }
            if side == Side::Gone {
                return self.link_closed(number);
            }
            let side = connection.flush_client();
            connection.shorten(&mut self.journal);
            side
        } else {
            let mut side = Side::Open;
            if connection.link().is_none() && events.intersects(closed) {
                side = Side::Gone;
            } else if events.intersects(EpollFlags::EPOLLIN | closed) {
                side = connection.read_client(&mut self.scratch, &mut self.numbers, &mut self.journal);
            }
            match side {
                Side::Gone => side,
                _ if connection.flush_link() == Side::Gone => return self.link_closed(number),
                _ => connection.flush_client(),
            }
        };
        self.settle(number, side);
    }

    /// Handles a link that the worker has closed. Most likely the worker has exited, which will be noticed soon.
    pub(super) fn link_closed(&mut self, number: u64) {
        let Some(Linked { connection, .. }) = self.connections.get_mut(&number) else { return };
        connection.cut_link();
        let side = connection.flush_client();
        self.settle(number, side);
        if !self.is_ending && !self.is_replacing {
            self.relink.get_or_insert(Instant::now() + RELINK);
        }
    }

    /// Updates the events of a connection; closes the connection and its link if it is gone.
    pub(super) fn settle(&mut self, number: u64, side: Side) {
        let Some(Linked { connection, watched }) = self.connections.get_mut(&number) else { return };
        if side == Side::Gone {
            self.journal.add(&Record::Closed(number));
            // The service manager has the descriptor for a moment longer, so closing it would not end its events.
            let _ = self.epoll.delete(connection.client());
            self.connections.remove(&number);
            return;
        }
        let wanted = connection.interest();
        let watch = |fd: BorrowedFd<'_>, wanted: EpollFlags, watched: &mut EpollFlags, token: u64| {
            if wanted != *watched {
                let _ = self.epoll.modify(fd, &mut EpollEvent::new(wanted, token));
                *watched = wanted;
            }
        };
        watch(connection.client(), wanted.0, &mut watched.0, number * 2);
        if let Some(link) = connection.link() {
            watch(link, wanted.1, &mut watched.1, number * 2 + 1);
        }
    }
}
