//! Requests of a kernel, and their effects on the host.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
};

use libc::{EEXIST, ENOENT, ENOTEMPTY, EPERM, EROFS, O_APPEND, O_CREAT, O_EXCL, O_RDONLY, O_RDWR, O_WRONLY};
use sandboxer_share::attach::Access;

use crate::{
    kernel_double::{halves, named, op, words},
    server::{Server, source},
};

const MODE: u32 = 1;
const USER_AND_GROUP: u32 = 2 | 4;
const SIZE: u32 = 8;

#[test]
fn a_kernel_is_told_how_much_at_once() {
    let server = Server::start();
    let (flags, most) = server.connect().init();
    assert_eq!(most, 1 << 20);
    let (big_writes, own_umask, invalidates, acls, many_pages, posix_locks, flock) =
        (1 << 5, 1 << 6, 1 << 12, 1 << 20, 1 << 22, 1 << 1, 1 << 10);
    let wanted = big_writes | own_umask | invalidates | acls | many_pages;
    assert_eq!(flags & wanted, wanted, "{flags:x}");
    assert_eq!(flags & (posix_locks | flock), 0, "{flags:x}");
}

#[test]
fn files_are_made_written_read_renamed_and_removed() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let (file, handle) = kernel.create(share, "a", O_CREAT | O_EXCL | O_RDWR, 0o640).unwrap();
    assert_eq!(kernel.create(share, "a", O_CREAT | O_EXCL | O_RDWR, 0o640).unwrap_err(), EEXIST);
    let block = vec![b'x'; 128 << 10];
    assert_eq!(kernel.write(file.node, handle, 0, b"hello").unwrap(), 5);
    assert_eq!(kernel.write(file.node, handle, 5, &block).unwrap(), 128 << 10);
    assert_eq!(kernel.read(file.node, handle, 3, 4).unwrap(), b"loxx");
    assert_eq!(kernel.read(file.node, handle, 5, 128 << 10).unwrap(), block);
    assert_eq!(kernel.getattr(file.node).unwrap().size, 5 + (128 << 10));
    let on_host = fs::metadata(server.host().join("a")).unwrap();
    assert_eq!((on_host.len(), on_host.mode() & 0o7777), (5 + (128 << 10), 0o640));

    kernel.ask(op::MKDIR, share, &named(&[0o750, 0], &["d"])).unwrap();
    let dir = kernel.lookup(share, "d").unwrap().node;
    kernel.rename(share, "a", dir, "b", 0).unwrap();
    assert_eq!(kernel.lookup(share, "a").unwrap_err(), ENOENT);
    assert_eq!((kernel.list(share), kernel.list(dir)), (vec!["d".into()], vec!["b".to_owned()]));
    assert_eq!(kernel.ask(op::RMDIR, share, &named(&[], &["d"])).unwrap_err(), ENOTEMPTY);

    // Removed while open: still usable through the handle.
    kernel.ask(op::UNLINK, dir, &named(&[], &["b"])).unwrap();
    assert_eq!(kernel.read(file.node, handle, 0, 5).unwrap(), b"hello");
    kernel.ask(op::RMDIR, share, &named(&[], &["d"])).unwrap();
    assert_eq!(fs::read_dir(server.host()).unwrap().count(), 0);
}

#[test]
fn changes_on_the_host_are_seen_and_a_rename_swaps_or_refuses() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    for name in ["one", "two"] {
        fs::write(server.host().join(name), name).unwrap();
    }
    let one = kernel.lookup(share, "one").unwrap();
    fs::write(server.host().join("one"), "longer").unwrap();
    assert_eq!(kernel.getattr(one.node).unwrap().size, 6);
    assert_eq!(kernel.rename(share, "one", share, "two", libc::RENAME_NOREPLACE).unwrap_err(), EEXIST);
    kernel.rename(share, "one", share, "two", libc::RENAME_EXCHANGE).unwrap();
    assert_eq!(fs::read_to_string(server.host().join("two")).unwrap(), "longer");
    assert_eq!(kernel.lookup(share, "two").unwrap().node, one.node, "the same file under another name");
}

#[test]
fn what_is_appended_lands_at_the_end_whatever_the_host_wrote() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let flags = O_CREAT | O_WRONLY | O_APPEND;
    let (log, handle) = kernel.create(share, "log", flags, 0o600).unwrap();
    fs::write(server.host().join("log"), "from the host\n").unwrap();
    let message = kernel.write_request(log.node, handle, 0, b"from the guest\n", O_WRONLY | O_APPEND);
    kernel.exchange(&message).unwrap();
    assert_eq!(fs::read_to_string(server.host().join("log")).unwrap(), "from the host\nfrom the guest\n");
}

#[test]
fn files_belong_to_who_made_them_and_to_whom_they_are_given() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    fs::set_permissions(server.host(), fs::Permissions::from_mode(0o700)).unwrap();
    kernel.user = (1000, 2000);
    // The guest's kernel has checked the permission: the host does not check it again.
    let (made, _) = kernel.create(share, "made", O_CREAT | O_RDWR, 0o600).unwrap();
    kernel.ask(op::MKDIR, share, &named(&[0o700, 0], &["dir"])).unwrap();
    for name in ["made", "dir"] {
        let on_host = fs::metadata(server.host().join(name)).unwrap();
        assert_eq!((on_host.uid(), on_host.gid()), (1000, 2000), "{name}");
    }
    kernel.user = (0, 0);
    let given = kernel.setattr(made.node, USER_AND_GROUP, 0, 0, (7, 8)).unwrap();
    assert_eq!((given.uid, given.gid), (7, 8));
    let changed = kernel.setattr(made.node, MODE, 0, 0o2711, (0, 0)).unwrap();
    assert_eq!(changed.mode & 0o7777, 0o2711);
    assert_eq!(kernel.setattr(made.node, SIZE, 100, 0, (0, 0)).unwrap().size, 100);
    let on_host = fs::metadata(server.host().join("made")).unwrap();
    assert_eq!((on_host.uid(), on_host.gid(), on_host.mode() & 0o7777, on_host.len()), (7, 8, 0o2711, 100));
}

#[test]
fn a_file_that_is_written_to_or_cut_loses_what_made_it_another_users_program() {
    const KILL_IN_SETATTR: u32 = 1 << 11;
    const KILL_IN_WRITE: u32 = 1 << 2;
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    for (n, name) in ["cut", "written"].into_iter().enumerate() {
        let (file, handle) = kernel.create(share, name, O_CREAT | O_RDWR, 0o700).unwrap();
        kernel.setattr(file.node, MODE, 0, 0o6711, (0, 0)).unwrap();
        if n == 0 {
            kernel.setattr(file.node, SIZE | KILL_IN_SETATTR, 10, 0, (0, 0)).unwrap();
        } else {
            let mut message = kernel.write_request(file.node, handle, 0, b"x", O_RDWR);
            // `write_flags` in `fuse_write_in`.
            message[40 + 20..40 + 24].copy_from_slice(&KILL_IN_WRITE.to_le_bytes());
            let answer = kernel.exchange(&message).unwrap();
            kernel.parse(&answer).unwrap();
        }
        assert_eq!(fs::metadata(server.host().join(name)).unwrap().mode() & 0o7777, 0o711, "{name}");
    }
}

#[test]
fn links_fifos_attributes_and_space() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let (file, handle) = kernel.create(share, "file", O_CREAT | O_RDWR, 0o600).unwrap();
    let [low, high] = [file.node as u32, (file.node >> 32) as u32];
    kernel.ask(op::LINK, share, &named(&[low, high], &["hard"])).unwrap();
    assert_eq!(kernel.getattr(file.node).unwrap().links, 2);

    kernel.ask(op::SYMLINK, share, &named(&[], &["soft", "/etc/passwd"])).unwrap();
    let soft = kernel.lookup(share, "soft").unwrap();
    assert_eq!(soft.attributes.mode & libc::S_IFMT, libc::S_IFLNK);
    assert_eq!(kernel.ask(op::READLINK, soft.node, &[]).unwrap(), b"/etc/passwd");

    kernel.ask(op::MKNOD, share, &named(&[libc::S_IFIFO | 0o600, 0, 0, 0], &["fifo"])).unwrap();
    assert!(fs::metadata(server.host().join("fifo")).unwrap().file_type().is_fifo());
    let disk = named(&[libc::S_IFBLK | 0o600, 0x0800, 0, 0], &["disk"]);
    assert_eq!(kernel.ask(op::MKNOD, share, &disk).unwrap_err(), EPERM, "a device of the host was made");

    kernel.setxattr(file.node, "user.note", b"value").unwrap();
    assert_eq!(kernel.getxattr(file.node, "user.note").unwrap(), b"value");
    assert!(kernel.setxattr(file.node, "trusted.note", b"value").is_err());

    let [h0, h1] = [handle as u32, (handle >> 32) as u32];
    kernel.ask(op::FALLOCATE, file.node, &words(&[h0, h1, 0, 0, 4096, 0, 0, 0])).unwrap();
    kernel.ask(op::FSYNC, file.node, &words(&[h0, h1, 0, 0])).unwrap();
    assert_eq!(fs::metadata(server.host().join("hard")).unwrap().len(), 4096);
    let space = kernel.ask(op::STATFS, share, &[]).unwrap();
    assert_ne!(u64::from_le_bytes(space[..8].try_into().unwrap()), 0, "no blocks");
    kernel.release(file.node, handle).unwrap();
    assert!(kernel.read(file.node, handle, 0, 1).is_err(), "a handle that was given back");
}

/// The server's seccomp filter is strict: every request of a guest's kernel must still work.
#[test]
fn what_is_asked_for_beside_reading_and_writing_is_allowed() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let (file, handle) = kernel.create(share, "file", O_CREAT | O_RDWR, 0o600).unwrap();
    let [h0, h1] = halves(handle);
    kernel.ask(op::FLUSH, file.node, &words(&[h0, h1, 0, 0, 0, 0])).unwrap();
    let data = kernel.ask(op::LSEEK, file.node, &words(&[h0, h1, 0, 0, libc::SEEK_END as u32, 0])).unwrap();
    assert_eq!(data, 0_u64.to_le_bytes());
    kernel.setxattr(file.node, "user.note", b"value").unwrap();
    let names = kernel.ask(op::LISTXATTR, file.node, &words(&[256, 0])).unwrap();
    assert!(names.starts_with(b"user.note\0"), "{names:?}");
    kernel.ask(op::REMOVEXATTR, file.node, &named(&[], &["user.note"])).unwrap();
    let (times, by_handle) = (1 << 4 | 1 << 5, 1 << 6);
    for valid in [MODE | by_handle, SIZE | by_handle, times, times | by_handle] {
        // `valid`, then the handle.
        let mut body = words(&[valid, 0, h0, h1]);
        body.resize(88, 0);
        kernel.ask(op::SETATTR, file.node, &body).unwrap();
    }
    assert_eq!(fs::metadata(server.host().join("file")).unwrap().mtime(), 0);
    let directory = kernel.opendir(share).unwrap();
    let listed = kernel.read_as(op::READDIRPLUS, share, directory, 0, 4096).unwrap();
    assert!(listed.windows(4).any(|name| name == b"file"));
    let [d0, d1] = halves(directory);
    kernel.ask(op::FSYNCDIR, share, &words(&[d0, d1, 0, 0])).unwrap();
    kernel.ask(op::RELEASEDIR, share, &words(&[d0, d1, 0, 0, 0, 0])).unwrap();
}

#[test]
fn nothing_is_written_to_a_share_that_is_read_only() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadOnly);
    fs::write(server.host().join("file"), "content").unwrap();
    let file = kernel.lookup(share, "file").unwrap().node;
    let handle = kernel.open(file, O_RDONLY).unwrap();
    assert_eq!(kernel.read(file, handle, 0, 100).unwrap(), b"content");
    assert!(kernel.write(file, handle, 0, b"x").is_err());
    assert_eq!(kernel.open(file, O_RDWR).unwrap_err(), EROFS);
    assert_eq!(kernel.create(share, "new", O_CREAT | O_RDWR, 0o600).unwrap_err(), EROFS);
    assert_eq!(kernel.ask(op::UNLINK, share, &named(&[], &["file"])).unwrap_err(), EROFS);
    assert_eq!(kernel.rename(share, "file", share, "moved", 0).unwrap_err(), EROFS);
    assert_eq!(kernel.setattr(file, MODE, 0, 0o777, (0, 0)).unwrap_err(), EROFS);
    assert_eq!(kernel.setattr(file, SIZE, 0, 0, (0, 0)).unwrap_err(), EROFS);
    assert_eq!(kernel.setxattr(file, "user.note", b"x").unwrap_err(), EROFS);
    assert_eq!(fs::read_to_string(server.host().join("file")).unwrap(), "content");
}

#[test]
fn a_single_file_is_shared_without_its_neighbours() {
    let server = Server::start();
    fs::write(server.host().join("file"), "content").unwrap();
    fs::write(server.host().join("neighbour"), "secret").unwrap();
    server.attach(0, source(&server.host().join("file"))).unwrap();
    server.attach(1, source(server.host().as_path())).unwrap();
    let mut kernel = server.connect();
    kernel.init();
    assert_eq!(kernel.list(1), ["0", "1"]);
    let file = kernel.lookup(1, "0").unwrap();
    let handle = kernel.open(file.node, O_RDWR).unwrap();
    kernel.write(file.node, handle, 0, b"CON").unwrap();
    assert_eq!(fs::read_to_string(server.host().join("file")).unwrap(), "CONtent");
    assert!(kernel.lookup(file.node, "neighbour").is_err());
    assert!(kernel.ask(op::UNLINK, 1, &named(&[], &["0"])).is_err(), "the file itself was removed");
    assert!(server.host().join("file").exists());
}

#[test]
fn what_is_no_directory_and_no_file_is_refused_by_its_path() {
    let server = Server::start();
    let device = server.attach(0, source("/dev/null".as_ref())).unwrap_err().to_string();
    assert!(device.contains("/dev/null"), "{device}");
    let nothing = server.host().join("nothing");
    let missing = server.attach(0, source(&nothing)).unwrap_err().to_string();
    assert!(missing.contains("nothing"), "{missing}");
    // A symlink on the host is resolved on the host.
    let link = server.outside().join("link");
    symlink(server.host(), &link).unwrap();
    server.attach(0, source(&link)).unwrap();
}

#[test]
fn a_share_that_is_there_stays_as_it_is() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    let other = server.outside().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(server.host().join("first"), "").unwrap();
    server.attach(0, source(&other)).unwrap();
    assert_eq!(kernel.list(share), ["first"]);
}
