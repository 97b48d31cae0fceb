//! What programs rely on that is more than reading and writing.

use std::{
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
};

use libc::{ENOENT, ESTALE, O_APPEND, O_CREAT, O_DIRECT, O_RDONLY, O_RDWR, O_WRONLY};
use sandboxer_share::attach::{Access, Source};

use crate::{
    kernel_double::{halves, named, op, words},
    server::{Server, source},
};

/// The flag `FOPEN_DIRECT_IO`.
const DIRECT: u32 = 1;

#[test]
fn files_whose_size_says_nothing_are_read_whole() {
    let server = Server::start();
    server.attach(0, Source { access: Access::ReadOnly, ..source(Path::new("/proc/sys/kernel")) }).unwrap();
    server.attach(1, Source { access: Access::ReadOnly, ..source(Path::new("/sys/kernel")) }).unwrap();
    server.attach(2, source(&server.host())).unwrap();
    fs::write(server.host().join("empty"), "").unwrap();
    let mut kernel = server.connect();
    kernel.init();
    for (share, name, size, at) in
        [("0", "ostype", 0, "/proc/sys/kernel/ostype"), ("1", "profiling", 4096, "/sys/kernel/profiling")]
    {
        let share = kernel.lookup(1, share).unwrap().node;
        let file = kernel.lookup(share, name).unwrap();
        assert_eq!(file.attributes.size, size, "{at}");
        let (handle, how) = kernel.open_as(file.node, O_RDONLY).unwrap();
        assert_eq!(how, DIRECT, "{at}: a kernel would read no more than its size");
        assert_eq!(kernel.read(file.node, handle, 0, 65536).unwrap(), fs::read(at).unwrap());
        kernel.release(file.node, handle).unwrap();
    }
    let share = kernel.lookup(1, "2").unwrap().node;
    let empty = kernel.lookup(share, "empty").unwrap().node;
    // It can be made longer, and mapped.
    assert_eq!(kernel.open_as(empty, O_RDWR).unwrap().1, 0);
}

#[test]
fn direct_reads_and_writes_are_as_others() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let flags = O_RDWR | O_DIRECT;
    let (file, handle) = kernel.create(share, "file", O_CREAT | flags, 0o600).unwrap();
    let [h0, h1] = halves(handle);
    for (offset, data) in [(0, vec![7; 8192]), (4096, vec![8])] {
        let message = kernel.write_request(file.node, handle, offset, &data, flags);
        let answer = kernel.exchange(&message).unwrap();
        kernel.parse(&answer).unwrap();
    }
    for (offset, expected) in [(0, vec![7; 4096]), (4095, vec![7, 8, 7])] {
        let body = words(&[h0, h1, offset, 0, expected.len() as u32, 0, 0, 0, flags as u32, 0]);
        assert_eq!(kernel.ask(op::READ, file.node, &body).unwrap(), expected, "{offset}");
    }
    assert_eq!(fs::metadata(server.host().join("file")).unwrap().len(), 8192);
}

/// Encodes an ACL: for each entry its tag, permissions and user or group.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut acl = words(&[2]);
    for (tag, permissions, id) in entries {
        acl.extend(tag.to_le_bytes());
        acl.extend(permissions.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    acl
}

const NOBODY: u32 = u32::MAX;

#[test]
fn access_control_lists_are_given_set_and_inherited() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    kernel.ask(op::MKDIR, share, &named(&[0o700, 0o022], &["dir"])).unwrap();
    let directory = kernel.lookup(share, "dir").unwrap().node;
    let granted = acl(&[(1, 7, NOBODY), (2, 7, 1234), (4, 0, NOBODY), (16, 7, NOBODY), (32, 0, NOBODY)]);
    for name in ["system.posix_acl_access", "system.posix_acl_default"] {
        kernel.setxattr(directory, name, &granted).unwrap();
        assert_eq!(kernel.getxattr(directory, name).unwrap(), granted, "{name}");
    }
    assert_eq!(kernel.getattr(directory).unwrap().mode & 0o7777, 0o770, "the mask is the group's mode");
    // The directory's default decides, not the mask of the process.
    let made =
        kernel.ask(op::CREATE, directory, &named(&[(O_CREAT | O_RDWR) as u32, 0o666, 0o077, 0], &["a"]));
    made.unwrap();
    kernel.ask(op::MKDIR, directory, &named(&[0o777, 0o077], &["d"])).unwrap();
    let mode = |path: &str| fs::metadata(server.host().join(path)).unwrap().mode() & 0o7777;
    assert_eq!((mode("dir/a"), mode("dir/d")), (0o660, 0o770));
    // Where there is no default, it does.
    let made = kernel.ask(op::CREATE, share, &named(&[(O_CREAT | O_RDWR) as u32, 0o666, 0o027, 0], &["b"]));
    made.unwrap();
    kernel.ask(op::MKNOD, share, &named(&[libc::S_IFREG | 0o666, 0, 0o077, 0], &["c"])).unwrap();
    assert_eq!((mode("b"), mode("c")), (0o640, 0o600));
}

#[test]
fn where_the_host_has_no_access_control_lists_no_file_has_one() {
    let server = Server::start();
    server.attach(0, Source { access: Access::ReadOnly, ..source(Path::new("/proc/sys/kernel")) }).unwrap();
    let mut kernel = server.connect();
    kernel.init();
    let share = kernel.lookup(1, "0").unwrap().node;
    let file = kernel.lookup(share, "ostype").unwrap().node;
    // With another error its kernel would refuse everything to whoever does not own the file.
    assert_eq!(kernel.getxattr(file, "system.posix_acl_access").unwrap_err(), libc::ENODATA);
    assert_eq!(kernel.getxattr(file, "user.note").unwrap_err(), libc::EOPNOTSUPP);
}

#[test]
fn a_file_that_the_host_replaces_is_stale_and_found_again() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let host = server.host();
    fs::write(host.join("file"), "old").unwrap();
    let old = kernel.lookup(share, "file").unwrap().node;
    let handle = kernel.open(old, O_RDONLY).unwrap();
    fs::write(host.join("next"), "new one").unwrap();
    fs::rename(host.join("next"), host.join("file")).unwrap();
    // Who has it open has the old one.
    assert_eq!((kernel.getattr(old).unwrap().size, kernel.getattr(old).unwrap().links), (3, 0));
    assert_eq!(kernel.read(old, handle, 0, 100).unwrap(), b"old");
    kernel.release(old, handle).unwrap();
    assert_eq!(kernel.getattr(old).unwrap_err(), ESTALE);
    assert_eq!(kernel.open(old, O_RDWR).unwrap_err(), ESTALE);
    let new = kernel.lookup(share, "file").unwrap().node;
    assert_ne!(new, old);
    assert_eq!(kernel.content(new).unwrap(), b"new one");
    // The file system may give the number of a removed file to the next one.
    for n in 0..50_u8 {
        fs::remove_file(host.join("file")).unwrap();
        fs::write(host.join("file"), [n]).unwrap();
        assert_eq!(kernel.content(new).unwrap_err(), ESTALE);
    }
}

#[test]
fn who_works_in_a_directory_goes_on_whoever_renames_it() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let host = server.host();
    fs::create_dir_all(host.join("a/b/c")).unwrap();
    fs::write(host.join("a/b/c/file"), "content").unwrap();
    let a = kernel.lookup(share, "a").unwrap().node;
    let b = kernel.lookup(a, "b").unwrap().node;
    let c = kernel.lookup(b, "c").unwrap().node;
    let file = kernel.lookup(c, "file").unwrap().node;
    // The guest: nothing below is looked up again.
    kernel.rename(share, "a", share, "moved", 0).unwrap();
    assert_eq!(kernel.content(file).unwrap(), b"content");
    kernel.rename(b, "c", share, "c", 0).unwrap();
    assert_eq!(kernel.content(file).unwrap(), b"content");
    assert_eq!(kernel.list(c), ["file"]);
    // The host.
    fs::rename(host.join("c"), host.join("moved/elsewhere")).unwrap();
    assert_eq!(kernel.list(c), ["file"]);
    assert_eq!(kernel.content(file).unwrap(), b"content");
    let (new, _) = kernel.create(c, "new", O_CREAT | O_RDWR, 0o600).unwrap();
    assert!(host.join("moved/elsewhere/new").exists());
    // Exchanged, each has the other's name.
    kernel.rename(c, "file", c, "new", libc::RENAME_EXCHANGE).unwrap();
    assert_eq!(kernel.content(file).unwrap(), b"content");
    assert_eq!(kernel.lookup(c, "file").unwrap().node, new.node);
    assert_eq!(kernel.lookup(c, "new").unwrap().node, file);
}

#[test]
fn a_file_with_two_names_is_found_by_the_one_that_is_left() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    fs::write(server.host().join("one"), "content").unwrap();
    let one = kernel.lookup(share, "one").unwrap().node;
    let [low, high] = halves(one);
    kernel.ask(op::LINK, share, &named(&[low, high], &["two"])).unwrap();
    kernel.ask(op::UNLINK, share, &named(&[], &["one"])).unwrap();
    assert_eq!(kernel.lookup(share, "one").unwrap_err(), ENOENT);
    assert_eq!(kernel.lookup(share, "two").unwrap().node, one);
    assert_eq!(kernel.content(one).unwrap(), b"content");
}

#[test]
fn paths_may_be_longer_than_one_system_call_takes() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let name = "long".repeat(60);
    let mut node = share;
    for _ in 0..40 {
        kernel.ask(op::MKDIR, node, &named(&[0o700, 0], &[&name])).unwrap();
        node = kernel.lookup(node, &name).unwrap().node;
    }
    // The directories above are kept open no longer.
    for n in 0..100 {
        fs::create_dir(server.host().join(n.to_string())).unwrap();
        let other = kernel.lookup(share, &n.to_string()).unwrap().node;
        assert!(kernel.lookup(other, "x").is_err());
    }
    let (file, handle) = kernel.create(node, "file", O_CREAT | O_RDWR, 0o600).unwrap();
    kernel.write(file.node, handle, 0, b"deep").unwrap();
    kernel.release(file.node, handle).unwrap();
    assert_eq!(kernel.content(file.node).unwrap(), b"deep");
}

#[test]
fn what_is_written_to_mapped_memory_lands_where_it_was_and_what_is_appended_at_the_end() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let (file, appending) = kernel.create(share, "file", O_CREAT | O_RDWR | O_APPEND, 0o600).unwrap();
    let mut write = |handle: u64, offset: u64, data: &[u8], flags: i32| {
        let message = kernel.write_request(file.node, handle, offset, data, flags);
        let answer = kernel.exchange(&message).unwrap();
        kernel.parse(&answer).unwrap();
    };
    write(appending, 0, b"first second", O_RDWR | O_APPEND);
    // A kernel writes pages back without a process's flags.
    write(appending, 6, b"SECOND", 0);
    write(appending, 0, b" third", O_RDWR | O_APPEND);
    assert_eq!(fs::read_to_string(server.host().join("file")).unwrap(), "first SECOND third");
    // A process may change its flags after the open.
    let plain = kernel.open(file.node, O_WRONLY).unwrap();
    let message = kernel.write_request(file.node, plain, 0, b" fourth", O_WRONLY | O_APPEND);
    kernel.exchange(&message).unwrap();
    assert_eq!(fs::read_to_string(server.host().join("file")).unwrap(), "first SECOND third fourth");
}

#[test]
fn holes_are_holes() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let (file, handle) = kernel.create(share, "sparse", O_CREAT | O_RDWR, 0o600).unwrap();
    kernel.write(file.node, handle, 1 << 20, b"data").unwrap();
    let [h0, h1] = halves(handle);
    let mut seek = |whence: i32| {
        let found = kernel.ask(op::LSEEK, file.node, &words(&[h0, h1, 0, 0, whence as u32, 0])).unwrap();
        u64::from_le_bytes(found.try_into().unwrap())
    };
    assert_eq!((seek(libc::SEEK_HOLE), seek(libc::SEEK_DATA)), (0, 1 << 20));
    let on_host = fs::metadata(server.host().join("sparse")).unwrap();
    assert!(on_host.blocks() * 512 < 1 << 20, "{} blocks", on_host.blocks());
    let punch = words(&[h0, h1, 1 << 20, 0, 4096, 0, 3, 0]);
    kernel.ask(op::FALLOCATE, file.node, &punch).unwrap();
    let mut read = [1; 4];
    fs::File::open(server.host().join("sparse")).unwrap().read_exact_at(&mut read, 1 << 20).unwrap();
    assert_eq!(read, [0; 4]);
}

#[test]
fn a_directory_has_itself_and_the_one_above() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    fs::write(server.host().join("file"), "").unwrap();
    let handle = kernel.opendir(share).unwrap();
    for opcode in [op::READDIR, op::READDIRPLUS] {
        let listed = kernel.read_as(opcode, share, handle, 0, 4096).unwrap();
        let head = if opcode == op::READDIRPLUS { 128 } else { 0 };
        let (mut names, mut rest) = (Vec::new(), &listed[..]);
        while !rest.is_empty() {
            let length = u32::from_le_bytes(rest[head + 16..head + 20].try_into().unwrap()) as usize;
            let name = String::from_utf8(rest[head + 24..head + 24 + length].to_vec()).unwrap();
            let node = (head > 0).then(|| u64::from_le_bytes(rest[..8].try_into().unwrap()));
            rest = &rest[head + (24 + length).next_multiple_of(8)..];
            assert!(node.is_none_or(|node| (node == 0) == name.starts_with('.')), "{name}: {node:?}");
            names.push(name);
        }
        names.sort();
        assert_eq!(names, [".", "..", "file"]);
    }
}

#[test]
fn a_large_directory_is_listed_once() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let mut expected: Vec<String> = (0..3000).map(|n| format!("{n:0100}")).collect();
    for name in &expected {
        fs::write(server.host().join(name), "").unwrap();
    }
    expected.sort();
    assert_eq!(kernel.list(share), expected);
}
