//! The server's privileges, as the kernel reports them.

use std::{collections::BTreeSet, fs, path::Path};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use sandboxer_share::attach::{Access, Source};

use crate::server::{Server, source};

fn field(status: &str, name: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {status}")).trim().to_owned()
}

#[test]
fn every_thread_has_few_capabilities_and_a_filter() {
    let (server, _kernel, _) = Server::sharing(Access::ReadWrite);
    // CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID, SETFCAP.
    let retained = format!("{:016x}", 0b1101_1011_u64 | 1 << 31);
    let mut threads = 0;
    for thread in fs::read_dir(format!("/proc/{}/task", server.pid)).unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            assert_eq!(field(&status, set), retained, "{set}");
        }
        for set in ["CapInh", "CapAmb"] {
            assert_eq!(field(&status, set), "0000000000000000", "{set}");
        }
        assert_eq!(field(&status, "Groups"), "", "as another user it would be in them, too");
        assert_eq!((field(&status, "NoNewPrivs"), field(&status, "Seccomp")), ("1".into(), "2".into()));
        threads += 1;
    }
    assert_eq!(threads, 5);
}

#[test]
fn it_has_namespaces_of_its_own_and_sees_its_shares_only() {
    let (server, _kernel, _) = Server::sharing(Access::ReadWrite);
    for namespace in ["mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        let namespace_of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
        assert_ne!(namespace_of(&server.pid.to_string()), namespace_of("self"), "{namespace}");
    }
    let mounts = server.proc("mountinfo");
    let points: BTreeSet<&str> = mounts.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    assert_eq!(points, ["/", "/proc", "/shares/0"].into());
    assert!(
        mounts.lines().filter(|line| line.contains(" / / ")).all(|line| line.contains(" / / ro,")),
        "{mounts}"
    );
    let root = Path::new("/proc").join(server.pid.to_string()).join("root");
    let seen: BTreeSet<_> = fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(seen, ["proc".into(), "shares".into()].into());
    assert_eq!(
        server.proc("net/dev").lines().filter(|line| line.contains(':')).count(),
        1,
        "more than loopback"
    );
}

#[test]
fn the_host_has_no_mount_more_and_a_dead_server_none_left() {
    let (server, ..) = Server::sharing(Access::ReadOnly);
    let there = server.outside().to_str().unwrap().to_owned();
    let mounts = || fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts().contains(&there));
    drop(server);
    assert!(!mounts().contains(&there));
}

#[test]
fn mounts_below_a_share_are_in_it_and_later_ones_appear_where_asked_for() {
    // In a separate namespace of this thread.
    std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        let server = Server::start();
        let host = server.host();
        mount(Some(&host), &host, none, MsFlags::MS_BIND, none).unwrap();
        mount(none, &host, none, MsFlags::MS_SHARED, none).unwrap();
        for dir in ["early", "late"] {
            fs::create_dir(host.join(dir)).unwrap();
        }
        let fill = |dir: &str| {
            mount(Some("tmpfs"), &host.join(dir), Some("tmpfs"), MsFlags::empty(), none).unwrap();
            fs::write(host.join(dir).join("file"), dir).unwrap();
        };
        fill("early");
        server.attach(0, source(&host)).unwrap();
        server.attach(1, Source { follows_mounts: true, ..source(&host) }).unwrap();
        server.attach(2, Source { access: Access::RecursivelyReadOnly, ..source(&host) }).unwrap();
        server.attach(3, Source { access: Access::ReadOnly, ..source(&host) }).unwrap();
        fill("late");
        let mut kernel = server.connect();
        kernel.init();
        for (share, dir, there) in [
            ("0", "early", true),
            ("0", "late", false),
            ("1", "early", true),
            ("1", "late", true),
            ("2", "late", false),
        ] {
            let share_node = kernel.lookup(1, share).unwrap().node;
            let dir_node = kernel.lookup(share_node, dir).unwrap().node;
            assert_eq!(kernel.lookup(dir_node, "file").is_ok(), there, "share {share}, {dir}");
        }
        let share = kernel.lookup(1, "2").unwrap().node;
        let early = kernel.lookup(share, "early").unwrap().node;
        let refused = kernel.create(early, "new", libc::O_CREAT | libc::O_RDWR, 0o600);
        assert_eq!(refused.unwrap_err(), libc::EROFS, "a mount below a recursively read-only share");
        let share = kernel.lookup(1, "3").unwrap().node;
        let refused = kernel.create(share, "new", libc::O_CREAT | libc::O_RDWR, 0o600);
        assert_eq!(refused.unwrap_err(), libc::EROFS, "a read-only share");
        let early = kernel.lookup(share, "early").unwrap().node;
        kernel.create(early, "new", libc::O_CREAT | libc::O_RDWR, 0o600).expect("a mount below is not meant");
        drop(server);
        // The unmounted directory is below no other mount.
        nix::mount::umount2(&host, nix::mount::MntFlags::MNT_DETACH).unwrap();
    })
    .join()
    .unwrap();
}
