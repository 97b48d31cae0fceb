//! Files that the host's root may not access, but the guest's user may: a file server that squashes root.

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::fd::AsRawFd,
    path::Path,
    thread,
};

use libc::{EACCES, EEXIST, ENOENT, ENOSYS, EPERM, O_CREAT, O_RDONLY, O_RDWR};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};
use sandboxer_share::attach::Access;

use crate::{
    kernel_double::{named, op, words},
    server::{Server, source},
};

/// The owner of the directory.
const OWNER: u32 = 1000;
const DIRECTORY: u64 = 2;
const NOTE: u64 = 3;
const CONTENT: &[u8] = b"content";

/// A file system with one directory, which only its owner may access: like an NFS server with root_squash, it
/// checks the user in each request.
struct Squashing {
    /// Name, node and mode of the directory's files.
    files: Vec<(String, u64, u32)>,
}

impl Squashing {
    /// Mounts it on `path`; serves it until it is unmounted.
    fn mount(path: &Path) {
        let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40755,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("squashing"), path, Some("fuse"), flags, Some(options.as_str())).unwrap();
        let mut files = Self { files: vec![("note".into(), NOTE, libc::S_IFREG | 0o600)] };
        thread::spawn(move || files.serve(device));
    }

    fn serve(&mut self, mut device: File) {
        let mut request = vec![0; 256 << 10];
        while let Ok(length) = device.read(&mut request) {
            let message = &request[..length];
            let (opcode, node, user) = (word(message, 4), long(message, 16), word(message, 24));
            if matches!(opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT) {
                continue;
            }
            let (error, body) = match self.answer(opcode, node, user, &message[40..]) {
                Ok(body) => (0, body),
                Err(error) => (-error, Vec::new()),
            };
            let head = words(&[16 + body.len() as u32, error.cast_unsigned()]);
            let answer = [&head, &message[8..16], &body[..]].concat();
            // Fails if the caller has been killed.
            let _ = device.write(&answer);
        }
    }

    fn answer(&mut self, opcode: u32, node: u64, user: u32, body: &[u8]) -> Result<Vec<u8>, i32> {
        let inside = match opcode {
            op::LOOKUP | op::MKDIR | op::UNLINK | op::RMDIR | op::RENAME2 => node == DIRECTORY,
            op::OPEN | op::OPENDIR | op::SETATTR => node >= DIRECTORY,
            _ => false,
        };
        if inside && user != OWNER {
            return Err(EACCES);
        }
        let name = |from: usize| {
            let name = body[from..].split(|&byte| byte == 0).next().unwrap();
            String::from_utf8(name.to_vec()).unwrap()
        };
        match opcode {
            // FUSE 7.31, writes of 4096 bytes.
            op::INIT => Ok([words(&[7, 31, 0, 0, 0, 4096, 1]), vec![0; 36]].concat()),
            op::LOOKUP if node == 1 && name(0) == "private" => Ok(self.entry(DIRECTORY)),
            op::LOOKUP if node == DIRECTORY => Ok(self.entry(self.named(&name(0))?)),
            op::LOOKUP => Err(ENOENT),
            op::GETATTR => Ok([vec![0; 16], self.attributes(node)].concat()),
            op::SETATTR => {
                let mode = word(body, 68);
                self.files.iter_mut().filter(|file| file.1 == node).for_each(|file| {
                    file.2 = file.2 & libc::S_IFMT | mode & 0o7777;
                });
                Ok([vec![0; 16], self.attributes(node)].concat())
            }
            op::MKDIR if self.named(&name(8)).is_ok() => Err(EEXIST),
            op::MKDIR => {
                let node = NOTE + 1 + self.files.len() as u64;
                self.files.push((name(8), node, libc::S_IFDIR | word(body, 0)));
                Ok(self.entry(node))
            }
            op::RMDIR => {
                let removed = self.named(&name(0))?;
                self.files.retain(|file| file.1 != removed);
                Ok(Vec::new())
            }
            op::OPEN | op::OPENDIR => Ok(vec![0; 16]),
            op::READ => Ok(CONTENT[(long(body, 8) as usize).min(CONTENT.len())..].to_vec()),
            op::READDIR if long(body, 8) == 0 => Ok(self.listed()),
            op::READDIR | op::FLUSH | op::RELEASE | op::RELEASEDIR => Ok(Vec::new()),
            _ => Err(ENOSYS),
        }
    }

    fn named(&self, name: &str) -> Result<u64, i32> {
        self.files.iter().find(|file| file.0 == name).map(|file| file.1).ok_or(ENOENT)
    }

    /// Encodes a `struct fuse_entry_out` that must not be cached.
    fn entry(&self, node: u64) -> Vec<u8> {
        [&node.to_le_bytes()[..], &[0; 32], &self.attributes(node)].concat()
    }

    /// Encodes a `struct fuse_attr`.
    fn attributes(&self, node: u64) -> Vec<u8> {
        let (mode, user) = match node {
            1 => (libc::S_IFDIR | 0o755, 0),
            DIRECTORY => (libc::S_IFDIR | 0o700, OWNER),
            _ => (self.files.iter().find(|file| file.1 == node).map_or(0, |file| file.2), OWNER),
        };
        let mut attributes = [node, CONTENT.len() as u64, 1, 0, 0, 0].map(u64::to_le_bytes).concat();
        attributes.extend(words(&[0, 0, 0, mode, 1, user, user, 0, 4096, 0]));
        attributes
    }

    /// Encodes a `struct fuse_dirent` for each file.
    fn listed(&self) -> Vec<u8> {
        let mut listed = Vec::new();
        for (at, (name, node, mode)) in self.files.iter().enumerate() {
            listed.extend([*node, at as u64 + 1].map(u64::to_le_bytes).concat());
            listed.extend(words(&[name.len() as u32, mode >> 12]));
            listed.extend(name.bytes());
            listed.resize(listed.len().next_multiple_of(8), 0);
        }
        listed
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn a_server_that_squashes_root_is_asked_as_who_asks() {
    // In a separate namespace of this thread.
    thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        let server = Server::start();
        let host = server.host();
        Squashing::mount(&host);
        server.attach(0, source(&host)).unwrap();
        let mut kernel = server.connect();
        kernel.init();
        let share = kernel.lookup(1, "0").unwrap().node;
        let private = kernel.lookup(share, "private").unwrap().node;

        for other in [(0, 0), (OWNER + 1, OWNER)] {
            kernel.user = other;
            assert_eq!(kernel.lookup(private, "note").unwrap_err(), EACCES, "{other:?}");
            assert_eq!(kernel.ask(op::MKDIR, private, &named(&[0o700, 0], &["x"])).unwrap_err(), EACCES);
        }
        kernel.user = (OWNER, OWNER);
        let note = kernel.lookup(private, "note").unwrap().node;
        let handle = kernel.open(note, O_RDONLY).unwrap();
        assert_eq!(kernel.read(note, handle, 0, 100).unwrap(), CONTENT);
        assert_eq!(kernel.setattr(note, 1, 0, 0o640, (0, 0)).unwrap().mode & 0o7777, 0o640);
        kernel.ask(op::MKDIR, private, &named(&[0o700, 0], &["made"])).unwrap();
        assert_eq!(kernel.list(private), ["made", "note"]);
        kernel.ask(op::RMDIR, private, &named(&[], &["made"])).unwrap();
        assert_eq!(kernel.list(private), ["note"]);

        // Another user must not open a file that one user has looked up.
        for other in [(0, 0), (OWNER + 1, OWNER)] {
            kernel.user = other;
            assert_eq!(kernel.open(note, O_RDONLY).unwrap_err(), EACCES, "{other:?}");
            assert_eq!(kernel.lookup(private, "note").unwrap_err(), EACCES, "{other:?}");
        }
        drop(server);
        umount2(&host, MntFlags::MNT_DETACH).unwrap();
    })
    .join()
    .unwrap();
}

#[test]
fn whoever_was_denied_is_denied_as_himself_and_the_next_one_is_served_as_before() {
    let (server, mut kernel, share) = Server::sharing(Access::ReadWrite);
    fs::write(server.host().join("file"), "content").unwrap();
    let file = kernel.lookup(share, "file").unwrap().node;
    // More often than there are threads: each must have restored its own user.
    for round in 0..16 {
        for user in [(1000, 1000), (u32::MAX, 1000), (1000, u32::MAX)] {
            kernel.user = user;
            assert_eq!(kernel.setxattr(file, "trusted.note", b"value").unwrap_err(), EPERM, "{user:?}");
        }
        kernel.user = (0, 0);
        let (made, _) = kernel.create(share, &format!("made{round}"), O_CREAT | O_RDWR, 0o600).unwrap();
        assert_eq!((made.attributes.uid, made.attributes.gid), (0, 0));
        kernel.setattr(file, 2 | 4, 0, 0, (7, 8)).unwrap();
    }
}
