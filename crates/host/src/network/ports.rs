//! Ports of the host that lead into a pod with the host's network: its VM cannot be in the host's network,
//! but connections to the host can be forwarded to it.

use std::{io, net::TcpListener};

/// Listens on a port of all the host's addresses, of both families if the host has both.
pub fn listen(port: u16) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(("::", port)).or_else(|error| match error.raw_os_error() {
        Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL) => TcpListener::bind(("0.0.0.0", port)),
        _ => Err(error),
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::{net::TcpStream, os::fd::AsRawFd};

    use super::*;

    #[test]
    fn a_port_has_one_listener_at_a_time_and_is_free_after_it() {
        let listener = listen(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect(("127.0.0.1", port)).unwrap();
        assert_eq!(listen(port).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        // Listening succeeds at once, even if another process still has the port open.
        let _other = listener.try_clone().unwrap();
        nix::sys::socket::shutdown(listener.as_raw_fd(), nix::sys::socket::Shutdown::Both).unwrap();
        listen(port).unwrap();
    }
}
