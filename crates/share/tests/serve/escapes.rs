//! A hostile kernel: attempts to leave a share, or to disturb the server.

use std::{fs, os::unix::fs::symlink};

use libc::{EINVAL, O_CREAT, O_DIRECTORY, O_PATH, O_RDONLY, O_RDWR, O_TMPFILE};
use sandboxer_protocol::share::MAX_MESSAGE;
use sandboxer_share::attach::Access;

use crate::{
    kernel_double::{named, op, words},
    server::Server,
};

/// A file outside the share.
const SECRET: &str = "secret";

fn with_secret() -> (Server, crate::kernel_double::Kernel, u64) {
    let (server, kernel, share) = Server::sharing(Access::ReadWrite);
    fs::write(server.outside().join(SECRET), "secret").unwrap();
    symlink(server.outside(), server.host().join("up")).unwrap();
    symlink(server.outside().join(SECRET), server.host().join("link")).unwrap();
    symlink("/proc/self/fd", server.host().join("proc")).unwrap();
    (server, kernel, share)
}

#[test]
fn no_link_is_followed() {
    let (server, mut kernel, share) = with_secret();
    for name in ["up", "link", "proc"] {
        let link = kernel.lookup(share, name).unwrap();
        assert_eq!(link.attributes.mode & libc::S_IFMT, libc::S_IFLNK, "{name}");
        assert!(kernel.open(link.node, O_RDONLY).is_err(), "{name}");
        assert!(kernel.opendir(link.node).is_err(), "{name}");
        assert!(kernel.lookup(link.node, SECRET).is_err(), "{name}");
        assert!(kernel.create(link.node, "new", O_CREAT | O_RDWR, 0o600).is_err(), "{name}");
        for flags in [0, O_RDWR, O_RDWR | libc::O_TRUNC, O_RDONLY | libc::O_NOFOLLOW] {
            assert!(kernel.create(share, name, O_CREAT | flags, 0o600).is_err(), "{name} {flags:x}");
        }
        // Attributes are set on the symlink itself, or not at all.
        let _ = kernel.setattr(link.node, 1, 0, 0o777, (0, 0));
        let _ = kernel.setattr(link.node, 8, 0, 0, (0, 0));
        let _ = kernel.setxattr(link.node, "user.x", b"x");
    }
    assert_eq!(fs::read_to_string(server.outside().join(SECRET)).unwrap(), "secret");
    assert!(!server.outside().join("new").exists());
}

#[test]
fn a_name_is_one_component_that_goes_down() {
    let (server, mut kernel, share) = with_secret();
    fs::write(server.host().join("file"), "").unwrap();
    let [low, high] = [share as u32, (share >> 32) as u32];
    for name in ["..", "../secret", "../host", "up/secret", "/etc/passwd", "/proc/1/root", "./file"] {
        assert!(kernel.lookup(share, name).is_err(), "{name}");
        assert!(kernel.lookup(1, name).is_err(), "{name}");
    }
    for name in ["..", ".", "../new", "up/new", "/tmp/new", ""] {
        assert!(kernel.create(share, name, O_CREAT | O_RDWR, 0o600).is_err(), "{name}");
        assert!(kernel.ask(op::MKDIR, share, &named(&[0o700, 0], &[name])).is_err(), "{name}");
        assert!(
            kernel.ask(op::MKNOD, share, &named(&[libc::S_IFREG | 0o600, 0, 0, 0], &[name])).is_err(),
            "{name}"
        );
        assert!(kernel.ask(op::SYMLINK, share, &named(&[], &[name, "x"])).is_err(), "{name}");
        assert!(kernel.ask(op::LINK, share, &named(&[low, high], &[name])).is_err(), "{name}");
        assert!(kernel.ask(op::UNLINK, share, &named(&[], &[name])).is_err(), "{name}");
        assert!(kernel.ask(op::RMDIR, share, &named(&[], &[name])).is_err(), "{name}");
        assert!(kernel.rename(share, "file", share, name, 0).is_err(), "{name}");
        assert!(kernel.rename(share, name, share, "there", 0).is_err(), "{name}");
    }
    let mut left: Vec<_> = fs::read_dir(server.outside()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["host", "run", "secret", "socket"]);
}

#[test]
fn opening_does_not_do_what_an_open_does_not() {
    let (server, mut kernel, share) = with_secret();
    assert_eq!(kernel.create(share, "link", O_PATH, 0o600).unwrap_err(), EINVAL);
    assert_eq!(kernel.create(share, "x", O_TMPFILE | O_RDWR, 0o600).unwrap_err(), EINVAL);
    assert_eq!(kernel.open(share, O_TMPFILE | O_RDWR).unwrap_err(), EINVAL);
    assert_eq!(kernel.open(share, O_PATH | O_DIRECTORY).unwrap_err(), EINVAL);
    drop(server);
}

#[test]
fn the_root_takes_nothing() {
    let (server, mut kernel, _) = with_secret();
    assert!(kernel.create(1, "new", O_CREAT | O_RDWR, 0o600).is_err());
    assert!(kernel.ask(op::MKDIR, 1, &named(&[0o700, 0], &["new"])).is_err());
    assert!(kernel.ask(op::RMDIR, 1, &named(&[], &["0"])).is_err());
    assert!(kernel.rename(1, "0", 1, "1", 0).is_err());
    assert!(kernel.setattr(1, 1, 0, 0o777, (0, 0)).is_err());
    assert_eq!(kernel.list(1), ["0"]);
    drop(server);
}

#[test]
fn nodes_and_handles_that_were_never_given_are_none() {
    let (_server, mut kernel, share) = with_secret();
    for node in [0, 99, 12345, u64::MAX] {
        assert!(kernel.getattr(node).is_err(), "{node}");
        assert!(kernel.open(node, O_RDONLY).is_err(), "{node}");
        assert!(kernel.lookup(node, "x").is_err(), "{node}");
    }
    for handle in [0, 77, u64::MAX] {
        assert!(kernel.read(share, handle, 0, 10).is_err(), "{handle}");
        assert!(kernel.write(share, handle, 0, b"x").is_err(), "{handle}");
    }
    // More forgets than look-ups, also of the root: both stay valid.
    for node in [share, 1] {
        kernel.forget(node, u64::MAX);
    }
    assert!(kernel.getattr(share).is_err(), "it was forgotten");
    assert!(kernel.lookup(1, "0").is_ok());
}

#[test]
fn a_name_ends_at_its_first_zero() {
    let (_server, mut kernel, share) = with_secret();
    for name in [&b"..\0\0"[..], b"..\0up\0", b".\0\0\0", b"\0\0", b"../up\0\0"] {
        for node in [share, 1] {
            assert_eq!(kernel.ask(op::LOOKUP, node, name).unwrap_err(), EINVAL, "{name:?}");
        }
    }
}

#[test]
fn a_directory_that_becomes_a_link_leads_nowhere() {
    let (server, mut kernel, share) = with_secret();
    let (host, inside) = (server.host(), server.host().join("inside"));
    fs::create_dir(&inside).unwrap();
    fs::write(inside.join(SECRET), "inside").unwrap();
    let swap = |count: usize| {
        let host = fs::File::open(&host).unwrap();
        for _ in 0..count {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(&host, "inside", &host, "up", flags).unwrap();
        }
    };
    let tried = |kernel: &mut crate::kernel_double::Kernel| {
        let directory = kernel.lookup(share, "inside")?.node;
        let file = kernel.lookup(directory, SECRET)?.node;
        kernel.content(file)
    };
    std::thread::scope(|scope| {
        let swapping = scope.spawn(|| swap(5000));
        while !swapping.is_finished() {
            if let Ok(content) = tried(&mut kernel) {
                assert_eq!(content, b"inside");
            }
        }
    });
    // A file that was found is not looked for through a link either.
    assert_eq!(tried(&mut kernel).unwrap(), b"inside");
    let directory = kernel.lookup(share, "inside").unwrap().node;
    let file = kernel.lookup(directory, SECRET).unwrap().node;
    for n in 0..100 {
        fs::create_dir(host.join(n.to_string())).unwrap();
        let other = kernel.lookup(share, &n.to_string()).unwrap().node;
        assert!(kernel.lookup(other, "x").is_err());
    }
    swap(1);
    assert_eq!(kernel.content(file).unwrap_err(), libc::ESTALE);
}

#[test]
fn whoever_sends_no_requests_is_hung_up_on_and_the_next_one_is_served() {
    let (server, kernel, share) = Server::sharing(Access::ReadWrite);
    for length in [0, 8, 39, MAX_MESSAGE as u32 + 1, u32::MAX] {
        let rubbish = [&words(&[length])[..], &[0; 60]].concat();
        let mut other = server.connect();
        other.send_raw(&rubbish);
        assert_eq!(other.receive(), None, "{length}");
    }
    let mut next = server.connect();
    next.unique = kernel.unique + 1000;
    assert!(next.getattr(share).is_ok());
}

#[test]
fn requests_of_every_kind_with_every_kind_of_rubbish_are_answered() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    fs::write(server.host().join("file"), "content").unwrap();
    fs::write(server.outside().join(SECRET), "secret").unwrap();
    // Deterministic: a failure can be repeated.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..3000_u64 {
        let opcode = (round % 54) as u32;
        let length = (next() % 200) as usize;
        let small = next() % 2 == 0;
        let body: Vec<u8> =
            (0..length).map(|_| if small { (next() % 3) as u8 } else { next() as u8 }).collect();
        let node = [share, 1, next(), 0][(next() % 4) as usize];
        let message = kernel.request(opcode, node, &body);
        let answer = kernel.exchange(&message);
        assert!(answer.is_some(), "opcode {opcode}: the server is gone");
    }
    assert!(kernel.lookup(1, "0").is_ok());
    assert_eq!(fs::read_to_string(server.outside().join(SECRET)).unwrap(), "secret");
    let threads = fs::read_dir(format!("/proc/{}/task", server.pid)).unwrap().count();
    assert_eq!(threads, 5, "a thread panicked");
}
