//! In the front's place: it keeps what workers tell it to keep, for the next ones.

use std::{
    collections::BTreeMap,
    fs::File,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    sync::{Arc, Mutex},
};

use nix::{fcntl::OFlag, sys::socket::MsgFlags};
use sandboxer::front::Front;
use sandboxer_front::control::{self, FOR_READING, Kind, Message};

/// Notes and descriptors, by key; and the sockets of all workers.
#[derive(Default)]
struct State {
    entries: BTreeMap<String, (Vec<u8>, Vec<OwnedFd>)>,
    workers: Vec<Arc<OwnedFd>>,
}

#[derive(Clone, Default)]
pub struct FrontDouble(Arc<Mutex<State>>);

impl FrontDouble {
    /// Returns what the next worker connects to.
    pub fn next(&self) -> Arc<Front> {
        self.read();
        let (theirs, ours) = control::answering().unwrap();
        let theirs = Arc::new(theirs);
        let mut state = self.0.lock().unwrap();
        for (key, (note, fds)) in &state.entries {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            control::send(theirs.as_fd(), Kind::Kept, key, note, &fds).unwrap();
        }
        control::send(theirs.as_fd(), Kind::AllKept, "", b"double", &[]).unwrap();
        state.workers.push(theirs.clone());
        drop(state);
        let this = self.clone();
        // Ends with the worker's end of the socket.
        std::thread::spawn(move || {
            while let Ok(Some(_)) = control::receive(theirs.as_fd(), MsgFlags::MSG_PEEK) {
                this.read();
            }
        });
        Front::connect(ours).unwrap()
    }

    /// Returns the keys of what is kept.
    pub fn keys(&self) -> Vec<String> {
        self.read();
        self.0.lock().unwrap().entries.keys().cloned().collect()
    }

    /// Takes all that workers have sent, also those that are dead.
    fn read(&self) {
        let mut state = self.0.lock().unwrap();
        for worker in state.workers.clone() {
            while let Ok(Some(message)) = control::receive(worker.as_fd(), MsgFlags::MSG_DONTWAIT) {
                state.take(message);
            }
        }
    }
}

impl State {
    fn take(&mut self, Message { kind, key, note, fds }: Message) {
        match kind {
            Kind::Keep => drop(self.entries.insert(key, (note, fds))),
            Kind::Forget => drop(self.entries.remove(&key)),
            Kind::Open => {
                let path = format!("/proc/self/fd/{}", fds[0].as_raw_fd());
                let mut how = File::options();
                how.read(true).write(note != FOR_READING).custom_flags(OFlag::O_NONBLOCK.bits());
                let fifo = how.open(path).unwrap();
                control::send(fds[1].as_fd(), Kind::Kept, &key, b"", &[fifo.as_fd()]).unwrap();
                self.entries.insert(key, (Vec::new(), vec![fifo.into()]));
            }
            _ => {}
        }
    }
}
