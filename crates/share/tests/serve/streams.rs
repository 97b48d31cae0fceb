//! Streams: of a guest's kernel, and of unauthorized clients.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use sandboxer_protocol::{link::LinkKey, share::SLOTS};

use crate::{
    kernel_double::Kernel,
    server::{KEY, Server},
};

/// Returns whether the server has closed the stream, at once or during further writes.
fn is_hung_up_on(stream: &mut UnixStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
        .read(&mut [0])
        .map_or_else(|error| error.kind() == std::io::ErrorKind::ConnectionReset, |read| read == 0)
}

#[test]
fn who_does_not_know_the_key_is_hung_up_on_and_the_guests_kernel_is_served() {
    let server = Server::start();
    let mut other = *KEY.as_bytes();
    other[LinkKey::LEN - 1] ^= 1;
    let init = Kernel::over(server.connect_raw()).request(26, 0, &[0; 64]);
    for key in [&other[..], &[0; LinkKey::LEN], &init[..LinkKey::LEN]] {
        let mut stranger = server.connect_raw();
        stranger.write_all(key).unwrap();
        assert!(is_hung_up_on(&mut stranger), "{key:?}");
    }
    // Incomplete keys are waited for, up to the timeout.
    let halves = [0, LinkKey::LEN / 2].map(|length| {
        let mut half = server.connect_raw();
        half.write_all(&KEY.as_bytes()[..length]).unwrap();
        half
    });
    server.connect().init();
    for mut half in halves {
        assert!(is_hung_up_on(&mut half), "half a key");
    }
}

#[test]
fn there_are_as_many_streams_as_requests_at_a_time_and_none_waits() {
    let server = Server::start();
    let mut kernels: Vec<Kernel> = (0..SLOTS).map(|_| server.connect()).collect();
    for kernel in &mut kernels {
        kernel.init();
    }
    // More than fit into a listener's queue.
    for _ in 0..200 {
        assert!(is_hung_up_on(&mut server.connect_raw()));
    }
    for kernel in &mut kernels {
        kernel.init();
    }
    // A closed stream's place becomes free shortly afterwards.
    kernels.pop();
    let began = std::time::Instant::now();
    loop {
        let mut next = server.connect_raw();
        let is_open = next.write_all(KEY.as_bytes()).is_ok();
        let mut next = Kernel::over(next);
        let init = next.request(26, 0, &[0; 64]);
        if is_open && next.exchange(&init).is_some() {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "its place is kept");
    }
}
