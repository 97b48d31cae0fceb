//! A Unix stream that passes open files with its first bytes.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::UnixStream,
};

/// Maximum number of files passed at once.
const MAX_FILES: usize = 16;

/// The stream, and the files that have not been passed yet.
pub struct Passing {
    stream: UnixStream,
    files: Vec<OwnedFd>,
}

impl Passing {
    /// Returns a stream that passes `files`. With more than [`MAX_FILES`], the first write fails.
    pub fn new(stream: UnixStream, files: Vec<OwnedFd>) -> Self {
        Self { stream, files }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files: Vec<_> = self.files.iter().map(AsFd::as_fd).collect();
        if !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many files to pass at once"));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        Ok(sendmsg(&self.stream, &[io::IoSlice::new(bytes)], &mut control, flags)?)
    }
}

impl AsyncWrite for Passing {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.files.is_empty() {
            return Pin::new(&mut this.stream).poll_write(cx, bytes);
        }
        loop {
            ready!(this.stream.poll_write_ready(cx))?;
            match this.stream.try_io(Interest::WRITABLE, || this.send(bytes)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => {
                    this.files.clear();
                    return Poll::Ready(sent);
                }
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

impl AsyncRead for Passing {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buffer)
    }
}
