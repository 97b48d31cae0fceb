//! A running server with shares of a temporary directory.

use std::{
    fs,
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal,
    setrlimit, waitid,
};
use sandboxer_protocol::link::LinkKey;
use sandboxer_share::attach::{Access, AttachError, Source, put, take};
use tempfile::TempDir;

use crate::{kernel_double::Kernel, vmm_double::Disk};

/// The key of streams.
pub const KEY: LinkKey = LinkKey::from_bytes([7; LinkKey::LEN]);

/// The transport with [`KEY`].
pub fn streams() -> String {
    format!("streams:{}", KEY.to_hex())
}

/// The server. Dropping it kills it.
pub struct Server {
    pub pid: i32,
    pidfd: OwnedFd,
    dir: TempDir,
}

impl Server {
    /// Starts a server without a share, for streams.
    pub fn start() -> Self {
        Self::start_by(&streams())
    }

    /// Starts a server with this transport.
    pub fn start_by(transport: &str) -> Self {
        Self::start_with(transport, 256, 256)
    }

    /// Starts a server for a guest that may know `files` files, on a host where a process may open few.
    pub fn start_with(transport: &str, files: u32, descriptors: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("run")).unwrap();
        fs::create_dir(dir.path().join("host")).unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_sandboxer-share"));
        program
            .arg(listener.as_raw_fd().to_string())
            .arg(dir.path().join("run"))
            .arg(files.to_string())
            .arg(transport)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let limit = Rlimit { current: Some(descriptors), maximum: Some(descriptors) };
        // SAFETY: between fork and exec two system calls are made.
        unsafe {
            program.pre_exec(move || {
                setrlimit(Resource::Nofile, limit)?;
                Ok(rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty())?)
            })
        };
        let mut started = program.spawn().unwrap();
        let mut words = String::new();
        started.stdout.take().unwrap().read_to_string(&mut words).unwrap();
        assert!(started.wait().unwrap().success(), "it did not start");
        let pid = words.trim().parse().unwrap();
        let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        Self { pid, pidfd, dir }
    }

    /// Starts a server that shares [`Server::host`] as number 0, and a kernel that has looked it up.
    pub fn sharing(access: Access) -> (Self, Kernel, u64) {
        let server = Self::start();
        server.attach(0, Source { access, ..source(&server.host()) }).unwrap();
        let mut kernel = server.connect();
        kernel.init();
        let share = kernel.lookup(1, "0").unwrap().node;
        (server, kernel, share)
    }

    /// Returns the shared directory.
    pub fn host(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    /// Returns a directory that is not shared.
    pub fn outside(&self) -> &Path {
        self.dir.path()
    }

    pub fn attach(&self, number: u32, source: Source<'_>) -> Result<(), AttachError> {
        let found = rustix::fs::open(
            source.path,
            rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        );
        let found = found.map_err(|errno| AttachError::Source {
            action: "open",
            path: source.path.to_owned(),
            source: errno.into(),
        })?;
        put(self.pidfd.as_fd(), &number.to_string(), &take(found.as_fd(), source)?)
    }

    /// Returns a kernel with its own stream.
    pub fn connect(&self) -> Kernel {
        let mut stream = self.connect_raw();
        stream.write_all(KEY.as_bytes()).unwrap();
        Kernel::over(stream)
    }

    /// Returns a VMM with the server's disk.
    pub fn disk(&self) -> Disk {
        Disk::over(self.connect_raw())
    }

    pub fn connect_raw(&self) -> UnixStream {
        UnixStream::connect(self.dir.path().join("socket")).unwrap()
    }

    /// Returns the number of its open files.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).unwrap().count()
    }

    pub fn proc(&self, file: &str) -> String {
        let path = format!("/proc/{}/{file}", self.pid);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }
}

/// Returns a share of `path` with the usual options.
pub fn source(path: &Path) -> Source<'_> {
    Source { path, access: Access::ReadWrite, follows_mounts: false }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
    }
}
