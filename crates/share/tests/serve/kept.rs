//! What the server keeps of files that nobody has open: nothing that the host would notice.

use std::{fs, path::Path, thread};

use libc::{EMFILE, ESTALE, O_RDONLY};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};
use sandboxer_share::attach::{Access, Source};

use crate::{
    kernel_double::Kernel,
    server::{Server, source, streams},
};

/// Runs `test` in a mount namespace of its own.
fn alone(test: impl FnOnce() + Send + 'static) {
    let tested = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        test();
    });
    if let Err(panicked) = tested.join() {
        std::panic::resume_unwind(panicked);
    }
}

fn tmpfs(at: &Path) {
    let options = Some("nr_inodes=0");
    mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), options).unwrap();
}

/// Shares a directory in which later mounts of the host appear.
fn following(server: &Server) -> (Kernel, u64) {
    let host = server.host();
    tmpfs(&host);
    mount(None::<&str>, &host, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
    server.attach(0, Source { follows_mounts: true, ..source(&host) }).unwrap();
    let mut kernel = server.connect();
    kernel.init();
    let share = kernel.lookup(1, "0").unwrap().node;
    (kernel, share)
}

/// Makes a mount with a file in it.
fn fill(directory: &Path) {
    fs::create_dir_all(directory).unwrap();
    tmpfs(directory);
    fs::create_dir(directory.join("deep")).unwrap();
    fs::write(directory.join("deep/file"), directory.as_os_str().as_encoded_bytes()).unwrap();
}

/// Reads the file as a process of the guest does, whose kernel forgets nothing.
fn read(kernel: &mut Kernel, share: u64, name: &str) -> Vec<u8> {
    let directory = kernel.lookup(share, name).unwrap().node;
    let deep = kernel.lookup(directory, "deep").unwrap().node;
    assert_eq!(kernel.list(deep), ["file"]);
    let file = kernel.lookup(deep, "file").unwrap().node;
    kernel.getattr(file).unwrap();
    kernel.content(file).unwrap()
}

#[test]
fn what_the_host_mounts_below_a_share_it_can_unmount_after_it_was_read() {
    alone(|| {
        let server = Server::start();
        let (mut kernel, share) = following(&server);
        let below = server.host().join("below");
        for round in 0..20 {
            fill(&below);
            assert_eq!(read(&mut kernel, share, "below"), below.as_os_str().as_encoded_bytes(), "{round}");
            umount2(&below, MntFlags::empty()).unwrap_or_else(|errno| panic!("round {round}: {errno}"));
        }
        assert_eq!(kernel.list(share), ["below"]);
        drop(server);
    });
}

#[test]
fn what_the_host_mounts_over_a_share_it_can_unmount() {
    alone(|| {
        let server = Server::start();
        let (mut kernel, _) = following(&server);
        fill(&server.host());
        let share = kernel.lookup(1, "0").unwrap().node;
        let deep = kernel.lookup(share, "deep").unwrap().node;
        assert_eq!(kernel.list(deep), ["file"]);
        umount2(&server.host(), MntFlags::empty()).unwrap();
        drop(server);
    });
}

#[test]
fn a_thousand_mounts_come_and_go_while_a_guest_reads() {
    alone(|| {
        let server = Server::start_with(&streams(), 4096, 256);
        let (mut kernel, share) = following(&server);
        let at = |name: &str| server.host().join(name);
        let names: Vec<String> = (0..300).map(|n| format!("m{n}")).collect();
        for name in &names {
            fill(&at(name));
            assert_eq!(read(&mut kernel, share, name), at(name).as_os_str().as_encoded_bytes());
        }
        for round in 0..1000 {
            let name = &names[round % names.len()];
            umount2(&at(name), MntFlags::empty()).unwrap_or_else(|errno| panic!("{name}: {errno}"));
            fill(&at(name));
            assert_eq!(read(&mut kernel, share, name), at(name).as_os_str().as_encoded_bytes(), "{round}");
        }
        for name in &names {
            umount2(&at(name), MntFlags::empty()).unwrap();
        }
        drop(server);
    });
}

#[test]
fn a_hundred_thousand_files_are_known_and_none_stays_open() {
    const FILES: u32 = 100_000;
    alone(|| {
        let server = Server::start_with(&streams(), 2 * FILES, 256);
        let host = server.host();
        tmpfs(&host);
        for directory in 0..FILES / 1000 {
            let path = host.join(directory.to_string());
            fs::create_dir(&path).unwrap();
            for file in 0..1000 {
                fs::File::create(path.join(file.to_string())).unwrap();
            }
        }
        fs::write(host.join("0/0"), "the first").unwrap();
        server.attach(0, source(&host)).unwrap();
        let mut kernel = server.connect();
        kernel.init();
        let share = kernel.lookup(1, "0").unwrap().node;
        let mut first = None;
        for directory in 0..FILES / 1000 {
            let node = kernel.lookup(share, &directory.to_string()).unwrap().node;
            for file in 0..1000 {
                let found = kernel.lookup(node, &file.to_string()).unwrap().node;
                first.get_or_insert(found);
            }
        }
        assert!(server.descriptors() < 128, "{} descriptors", server.descriptors());
        assert_eq!(kernel.content(first.unwrap()).unwrap(), b"the first");
        drop(server);
    });
}

#[test]
fn a_full_table_forgets_what_is_not_used_and_nothing_that_is_open() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    fs::write(server.host().join("open"), "open").unwrap();
    let open = kernel.lookup(share, "open").unwrap().node;
    let handle = kernel.open(open, O_RDONLY).unwrap();
    fs::remove_file(server.host().join("open")).unwrap();
    for n in 0..2000 {
        fs::write(server.host().join(n.to_string()), "").unwrap();
    }
    let found: Vec<_> = (0..2000).map(|n| kernel.lookup(share, &n.to_string()).unwrap().node).collect();
    let known = found.iter().filter(|node| kernel.getattr(**node).is_ok()).count();
    assert!((100..=256).contains(&known), "{known}");
    assert_eq!(kernel.getattr(found[0]).unwrap_err(), ESTALE);
    let again = kernel.lookup(share, "0").unwrap().node;
    assert!(kernel.getattr(again).is_ok());
    assert_eq!(kernel.getattr(open).unwrap().links, 0);
    assert_eq!(kernel.read(open, handle, 0, 100).unwrap(), b"open");
}

#[test]
fn more_files_than_may_be_open_are_refused_and_everything_else_goes_on() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    fs::write(server.host().join("file"), "content").unwrap();
    let file = kernel.lookup(share, "file").unwrap().node;
    let mut handles = Vec::new();
    let refused = loop {
        match kernel.open(file, O_RDONLY) {
            Ok(handle) => handles.push(handle),
            Err(errno) => break errno,
        }
        assert!(handles.len() < 256, "more than the server may open");
    };
    assert_eq!(refused, EMFILE);
    assert!(handles.len() > 100, "{}", handles.len());
    let made = kernel.create(share, "new", libc::O_CREAT | libc::O_RDWR, 0o600);
    assert_eq!((made.unwrap_err(), server.host().join("new").exists()), (EMFILE, false));
    for n in 0..100 {
        fs::create_dir(server.host().join(n.to_string())).unwrap();
        let directory = kernel.lookup(share, &n.to_string()).unwrap().node;
        assert!(kernel.lookup(directory, "x").is_err());
    }
    assert_eq!(kernel.getattr(file).unwrap().size, 7);
    kernel.release(file, handles.pop().unwrap()).unwrap();
    assert_eq!(kernel.content(file).unwrap(), b"content");
}

#[test]
fn a_file_that_the_host_removes_is_gone_unless_it_is_open() {
    alone(|| {
        let server = Server::start();
        let host = server.host();
        tmpfs(&host);
        let free = || nix::sys::statvfs::statvfs(&host).unwrap().blocks_free();
        server.attach(0, source(&host)).unwrap();
        let mut kernel = server.connect();
        kernel.init();
        let share = kernel.lookup(1, "0").unwrap().node;
        let before = free();
        fs::write(host.join("large"), vec![1; 4 << 20]).unwrap();
        let large = kernel.lookup(share, "large").unwrap().node;
        assert_eq!(kernel.content(large).unwrap().len(), 4096);
        let handle = kernel.open(large, O_RDONLY).unwrap();
        fs::remove_file(host.join("large")).unwrap();
        assert_eq!(kernel.getattr(large).unwrap().size, 4 << 20);
        assert!(free() < before);
        kernel.release(large, handle).unwrap();
        assert_eq!(free(), before);
        assert_eq!(kernel.getattr(large).unwrap_err(), ESTALE);
        drop(server);
    });
}
