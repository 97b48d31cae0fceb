//! The socket to which libcontainer sends the master of a process's terminal.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::failure::{Failure, Kind, internal};

const DIR: &str = "/run/sandboxer/console";

/// A socket that receives one terminal.
pub struct Console {
    listener: UnixListener,
    path: PathBuf,
}

impl Console {
    /// Opens a socket for one process.
    pub fn open() -> Result<Self, Failure> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let path = Path::new(DIR).join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
        let listener = fs::create_dir_all(DIR).and_then(|()| {
            let listener = UnixListener::bind(&path)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let listener = listener.map_err(internal("cannot open a console socket"))?;
        Ok(Self { listener, path })
    }

    /// Returns the socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Receives the terminal's master. Does not wait: the process sent it before its creation was reported.
    pub fn take_master(self) -> Result<OwnedFd, Failure> {
        let (sender, _) =
            self.listener.accept().map_err(internal("cannot accept the runtime's terminal connection"))?;
        receive(&sender)
            .map_err(internal("cannot receive the terminal"))?
            .ok_or_else(|| Failure::new(Kind::Internal, "runtime sent no terminal"))
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn receive(sender: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut name = [0; 256];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(sender, &mut [io::IoSliceMut::new(&mut name)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let sent = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(sent)
}
