//! Writing to the log, whatever has become of it.

use std::{
    fmt,
    io::{self, Write},
    os::fd::AsFd,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Bytes that a pipe which can be written to takes at once (POSIX's PIPE_BUF on Linux).
const MAX_LINE: usize = 4096;

/// Writes a line to stderr, as `eprintln!` does, but never panics and never waits: see [`line`].
macro_rules! say {
    ($($words:tt)*) => { $crate::say::line(format_args!($($words)*)) };
}
pub(crate) use say;

/// Writes a line to stderr if that takes it now. A log that is gone, full or read by nobody costs its lines, and not
/// what containerd is connected to.
pub fn line(words: fmt::Arguments<'_>) {
    let mut line = format!("sandboxer-front: {words}");
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
