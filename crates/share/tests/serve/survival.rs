//! Daemons die; what was asked through them is neither lost nor done twice.

use std::fs;

use libc::{O_CREAT, O_RDWR, O_WRONLY};
use sandboxer_share::attach::Access;

use crate::{
    kernel_double::{named, op},
    server::Server,
};

#[test]
fn what_was_done_for_a_daemon_that_died_is_not_done_again() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let making = kernel.request(op::MKDIR, share, &named(&[0o700, 0], &["dir"]));
    kernel.send(3, &making);
    // It is done, and the answer is lost with who asked for it.
    let (_, first) = kernel.receive().unwrap();
    let unique = kernel.unique;
    drop(kernel);

    let mut kernel = server.connect();
    kernel.send(3, &making);
    let (slot, again) = kernel.receive().unwrap();
    assert_eq!((slot, &again), (3, &first), "carried out again, it would fail");
    // A request of its own is another one.
    kernel.unique = unique;
    let anew = kernel.request(op::MKDIR, share, &named(&[0o700, 0], &["dir"]));
    kernel.send(3, &anew);
    let (_, answer) = kernel.receive().unwrap();
    assert_eq!(kernel.said(&answer).unwrap_err(), libc::EEXIST);
}

#[test]
fn what_is_appended_is_appended_once_and_what_is_read_is_read_again() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let (log, handle) = kernel.create(share, "log", O_CREAT | O_WRONLY | libc::O_APPEND, 0o600).unwrap();
    let (file, reading) = kernel.create(share, "file", O_CREAT | O_RDWR, 0o600).unwrap();
    let block = vec![7; 128 << 10];
    kernel.write(file.node, reading, 0, &block).unwrap();
    let appending = kernel.write_request(log.node, handle, 0, b"line\n", O_WRONLY | libc::O_APPEND);
    for _ in 0..4 {
        kernel.send(1, &appending);
        kernel.receive().unwrap();
        kernel = {
            let unique = kernel.unique;
            let mut next = server.connect();
            next.unique = unique;
            next
        };
    }
    assert_eq!(fs::read_to_string(server.host().join("log")).unwrap(), "line\n");
    for _ in 0..2 {
        assert_eq!(kernel.read(file.node, reading, 0, 128 << 10).unwrap(), block);
    }
}

#[test]
fn a_daemon_that_dies_in_the_middle_of_a_message_is_followed_by_another() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let making = kernel.request(op::MKDIR, share, &named(&[0o700, 0], &["dir"]));
    for cut in [1, 7, 8, 20, making.len()] {
        let mut dying = server.connect();
        let framed = [&sandboxer_protocol::share::frame_head(2, &making)[..], &making].concat();
        dying.send_raw(&framed[..cut]);
    }
    assert!(!server.host().join("dir").exists());
    let unique = kernel.unique;
    kernel = server.connect();
    kernel.unique = unique;
    kernel.send(2, &making);
    let (_, answer) = kernel.receive().unwrap();
    kernel.said(&answer).unwrap();
    assert!(server.host().join("dir").exists());
}

#[test]
fn many_requests_under_way_are_each_answered_in_their_slot() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let mut asked = Vec::new();
    for slot in 0..16 {
        let making = kernel.request(op::MKDIR, share, &named(&[0o700, 0], &[&format!("d{slot}")]));
        asked.push((slot, kernel.unique));
        kernel.send(slot, &making);
    }
    let mut answered: Vec<_> = (0..16)
        .map(|_| {
            let (slot, answer) = kernel.receive().unwrap();
            (slot, u64::from_le_bytes(answer[8..16].try_into().unwrap()))
        })
        .collect();
    answered.sort_unstable();
    assert_eq!(answered, asked);
    assert_eq!(fs::read_dir(server.host()).unwrap().count(), 16);
}
