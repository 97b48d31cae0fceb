//! Log lines on stderr, without blocking.

use std::{
    fmt,
    io::{self, Write},
    os::fd::AsFd,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The most bytes that are written atomically to a pipe (POSIX's PIPE_BUF on Linux).
const MAX_LINE: usize = 4096;

/// Writes a line to stderr, as `eprintln!` does, but never panics or blocks: see [`line`].
macro_rules! log {
    ($($message:tt)*) => { $crate::log::line(format_args!($($message)*)) };
}
pub(crate) use log;

/// Writes a line to stderr if it can be written now. A closed or full log loses lines, but it must not stop the process
/// to which containerd is connected.
pub fn line(message: fmt::Arguments<'_>) {
    let mut line = format!("sandboxer-front: {message}");
    let end = (0..MAX_LINE).rev().find(|end| line.is_char_boundary(*end)).unwrap_or_default();
    line.truncate(end.min(line.len()));
    line.push('\n');
    let stderr = io::stderr().lock();
    let mut polled = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    let takes = poll(&mut polled, PollTimeout::ZERO).is_ok()
        && polled[0].revents().is_some_and(|events| events.contains(PollFlags::POLLOUT));
    if takes {
        let _ = { stderr }.write_all(line.as_bytes());
    }
}
