//! Requests that come over streams, each answered on its own before the next one is read.

use std::{
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
};

use sandboxer_protocol::share::{Head, MAX_MESSAGE, REQUEST_HEAD};

use crate::files::{self, Files};

/// Serves one stream after the other, for good.
pub fn serve(listener: &UnixListener, files: &Files) -> io::Result<()> {
    let (mut request, mut room) = (vec![0; MAX_MESSAGE], files::room());
    loop {
        let (stream, _) = listener.accept()?;
        // However it ends: the guest knows, and may come again.
        let _ = converse(stream, files, &mut request, &mut room);
    }
}

fn converse(mut stream: UnixStream, files: &Files, request: &mut [u8], room: &mut [u8]) -> io::Result<()> {
    let rubbish = || io::Error::from(io::ErrorKind::InvalidData);
    loop {
        stream.read_exact(&mut request[..REQUEST_HEAD])?;
        let length = Head::begins(request).ok_or_else(rubbish)?;
        stream.read_exact(&mut request[REQUEST_HEAD..length])?;
        let head = Head::of(&request[..length]).ok_or_else(rubbish)?;
        stream.write_all(files.answer(head, &mut request[..length], room))?;
    }
}
