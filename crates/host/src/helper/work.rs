//! The helper's side: all access to paths that may be on remote storage.
//!
//! No state is kept between requests, so a helper can be killed at any time.

use std::{
    fs, io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

use oci_spec::runtime::Mount;
use protobuf::Message;
use rustix::fs::inotify::{self, WatchFlags};
use sandboxer_base::{Code, chain};
use sandboxer_share::attach::{self, Access, AttachError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::wire::Frame;
use crate::{
    helper::message,
    rootfs::{self, BuildError, Chain, FsType},
    volume::{self, Bound, VolumeError, tree},
};

/// A request to a helper.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Examine a bind mount.
    Look {
        /// As in the container's spec.
        mount: Box<Mount>,
    },
    /// Read the files of a directory that kubelet writes.
    ReadTree {
        /// The directory.
        dir: PathBuf,
    },
    /// Get the owner of a directory.
    Owner {
        /// The directory.
        dir: PathBuf,
    },
    /// Watch a directory for changes with the inotify instance that comes with the request.
    Watch {
        /// The directory.
        dir: PathBuf,
    },
    /// Create the disk of an emptyDir, unless it exists.
    Disk {
        /// The emptyDir's directory.
        dir: PathBuf,
        /// The disk's size.
        bytes: u64,
        /// An empty disk of that size, to copy.
        empty: Option<PathBuf>,
    },
    /// Open and close a block device, to detect a hung one.
    TryDevice {
        /// The device.
        path: PathBuf,
        /// Open it read-only.
        read_only: bool,
    },
    /// Clone the mount of a share's source.
    TakeShare {
        /// A file or a directory.
        source: PathBuf,
        /// The writable part of the share.
        #[serde(with = "AccessSchema")]
        access: Access,
        /// Later mounts of the host below it appear in it.
        follows_mounts: bool,
    },
    /// Write the bytes of the request to a termination message's file.
    WriteMessage {
        /// The file.
        path: PathBuf,
    },
    /// Compute the key of a chain of layers.
    LayersKey {
        /// The layers.
        chain: Chain,
    },
    /// Check whether a layer is empty.
    IsLayerEmpty {
        /// The layer.
        dir: PathBuf,
    },
    /// Check the superblock of an image.
    CheckImage {
        /// The image, or a device.
        path: PathBuf,
        /// The expected file system.
        fstype: FsType,
    },
    /// Create a snapshotter's writable file system, unless it exists.
    Scratch {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
}

/// [`Access`] for serde.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Access")]
enum AccessSchema {
    ReadWrite,
    ReadOnly,
    RecursivelyReadOnly,
}

/// Why a helper's operation failed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Refusal {
    /// The code of the response.
    pub code: Code,
    /// The error with its causes.
    pub text: String,
}

/// A helper's response.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer<T> {
    /// The operation's result.
    Done(T),
    /// The operation failed.
    Refused(Refusal),
}

/// How long an idle helper waits for a request before it exits.
const IDLE: Duration = Duration::from_secs(10);
/// How many times longer creating a file system may take than another request.
const MAKING: u32 = 6;

impl Request {
    /// Returns the path that is accessed.
    pub fn path(&self) -> &Path {
        match self {
            Self::Look { mount } => mount.source().as_deref().unwrap_or(Path::new("")),
            Self::ReadTree { dir }
            | Self::Owner { dir }
            | Self::Watch { dir }
            | Self::Disk { dir, .. }
            | Self::IsLayerEmpty { dir } => dir,
            Self::TryDevice { path, .. }
            | Self::WriteMessage { path }
            | Self::CheckImage { path, .. }
            | Self::Scratch { path, .. } => path,
            Self::TakeShare { source, .. } => source,
            Self::LayersKey { chain } => chain.dirs.first().map_or(Path::new(""), PathBuf::as_path),
        }
    }

    /// Returns the operation, for error messages.
    pub fn action(&self) -> &'static str {
        match self {
            Self::Look { .. } | Self::Owner { .. } | Self::LayersKey { .. } => "stat",
            Self::ReadTree { .. } | Self::IsLayerEmpty { .. } | Self::CheckImage { .. } => "read",
            Self::Watch { .. } => "watch",
            Self::Disk { .. } | Self::Scratch { .. } => "create a disk at",
            Self::TryDevice { .. } => "open",
            Self::TakeShare { .. } => "share",
            Self::WriteMessage { .. } => "write",
        }
    }

    /// Returns the timeout of the request, where most requests have `look`.
    pub fn limit(&self, look: Duration) -> Duration {
        match self {
            Self::Disk { .. } | Self::Scratch { .. } => look * MAKING,
            _ => look,
        }
    }
}

impl Refusal {
    fn internal(text: String) -> Self {
        Self { code: Code::Internal, text }
    }

    fn host(action: &str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::internal(format!("cannot {action} {path:?}: {}", chain(&error)))
    }
}

impl From<VolumeError> for Refusal {
    fn from(error: VolumeError) -> Self {
        Self { code: error.code(), text: chain(&error) }
    }
}

impl From<BuildError> for Refusal {
    fn from(error: BuildError) -> Self {
        Self { code: error.code(), text: chain(&error) }
    }
}

impl From<AttachError> for Refusal {
    fn from(error: AttachError) -> Self {
        let code = if matches!(error, AttachError::Kind(_)) { Code::Unimplemented } else { Code::Internal };
        Self { code, text: chain(&error) }
    }
}

/// Serves the daemon at the other end of `stream` until it disconnects, or sends nothing for a while.
pub fn serve(mut stream: UnixStream) -> io::Result<()> {
    loop {
        let mut waiting = [rustix::event::PollFd::new(&stream, rustix::event::PollFlags::IN)];
        let idle = rustix::event::Timespec::try_from(IDLE).ok();
        match rustix::event::poll(&mut waiting, idle.as_ref()) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
            Ok(0) => return Ok(()),
            Ok(_) => {}
        }
        let Some(frame) = Frame::receive(&mut stream)? else { return Ok(()) };
        answer(frame)?.send(&mut stream)?;
    }
}

fn answer(asked: Frame) -> io::Result<Frame> {
    let refused = |refusal| {
        Ok(Frame { json: serde_json::to_vec(&Answer::<()>::Refused(refusal))?, ..Frame::default() })
    };
    let request = match parse(&asked.json) {
        Ok(request) => request,
        Err(refusal) => return refused(refusal),
    };
    run(request, asked.bytes, asked.descriptor).or_else(refused)
}

/// Parses the JSON of a frame.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(json).map_err(|error| {
        Refusal::internal(format!("cannot parse a frame between helper and daemon: {}", chain(&error)))
    })
}

fn run(request: Request, bytes: Vec<u8>, descriptor: Option<OwnedFd>) -> Result<Frame, Refusal> {
    match request {
        Request::Look { mount } => {
            let (bound, content) = Bound::look(&mount)?;
            Ok(Frame { bytes: content, ..done(&bound)? })
        }
        Request::ReadTree { dir } => {
            if !dir.exists() {
                return done(&false);
            }
            let read = tree::read(&dir).map_err(VolumeError::Files)?;
            let bytes = read.write_to_bytes().map_err(VolumeError::Encode)?;
            Ok(Frame { bytes, ..done(&true)? })
        }
        Request::Owner { dir } => {
            let owner = tree::owner(&dir).map_err(VolumeError::Files)?;
            done(&(owner.mode, owner.uid, owner.gid))
        }
        Request::Watch { dir } => {
            let failed = |source| VolumeError::Watch { dir: dir.clone(), source };
            let instance = descriptor.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
            done(&watch(instance, &dir).map_err(failed)?)
        }
        Request::Disk { dir, bytes, empty } => done(&volume::make_disk(&dir, bytes, empty.as_deref())?),
        Request::TryDevice { path, read_only } => {
            let opened = fs::File::options().read(true).write(!read_only).open(&path);
            opened.map_err(Refusal::host("open", &path))?;
            done(&())
        }
        Request::TakeShare { source, access, follows_mounts } => {
            let taken = attach::take(attach::Source { path: &source, access, follows_mounts })?;
            Ok(Frame { descriptor: Some(taken.mount), ..done(&taken.is_dir)? })
        }
        Request::WriteMessage { path } => {
            message::write(&path, &bytes).map_err(Refusal::host("write", &path))?;
            done(&())
        }
        Request::LayersKey { chain } => done(&rootfs::key_of(&chain)?),
        Request::IsLayerEmpty { dir } => {
            let mut entries = dir.read_dir().map_err(Refusal::host("read", &dir))?;
            done(&entries.next().is_none())
        }
        Request::CheckImage { path, fstype } => {
            rootfs::check_image(&path, fstype)?;
            done(&())
        }
        Request::Scratch { path, bytes } => {
            rootfs::ext4::ensure(&path, bytes, rootfs::ext4::Use::Kept)?;
            done(&())
        }
    }
}

/// Adds a watch to an inotify instance of the daemon; returns its number.
fn watch(instance: OwnedFd, dir: &Path) -> io::Result<i32> {
    let flags = WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::MOVED_TO
        | WatchFlags::CLOSE_WRITE
        | WatchFlags::ONLYDIR;
    Ok(inotify::add_watch(&instance, dir, flags)?)
}

fn done<T: Serialize>(what: &T) -> Result<Frame, Refusal> {
    let json =
        serde_json::to_vec(&Answer::Done(what)).map_err(|error| Refusal::internal(error.to_string()))?;
    Ok(Frame { json, ..Frame::default() })
}
