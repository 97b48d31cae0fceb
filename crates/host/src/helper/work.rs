//! The helper's side: all access to paths that may be on remote storage.
//!
//! No state is kept between requests, so a helper can be killed at any time.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
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
    beneath::{self, Dir, Kind},
    helper::message,
    rootfs::{
        self, BuildError, Chain, FsType,
        ext4::{Disk, Made, Use},
    },
    volume::{
        self, Kubelet, Looked, VolumeError,
        kubelet::{Own, Place},
        tree,
    },
};

/// A request to a helper.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Examine a bind mount.
    Look {
        /// The mount, as in the container's spec.
        mount: Box<Mount>,
        /// The properties by which the pod's own paths are recognized.
        kubelet: Kubelet,
    },
    /// Read the files of a directory that kubelet writes.
    ReadTree {
        /// The directory.
        dir: PathBuf,
        /// The stamp of a directory whose files need not be read.
        unless: Option<u64>,
        /// See [`Request::Look`].
        kubelet: Kubelet,
    },
    /// Get the owner of a directory.
    Owner {
        /// The directory.
        dir: PathBuf,
        /// See [`Request::Look`].
        kubelet: Kubelet,
    },
    /// Watch a directory for changes with the inotify instance that comes with the request.
    Watch {
        /// The directory.
        dir: PathBuf,
        /// See [`Request::Look`].
        kubelet: Kubelet,
    },
    /// Open the disk of an emptyDir; create it unless it exists. A file that comes with the request is an empty disk of
    /// that size, to be copied.
    Disk {
        /// The emptyDir's directory.
        dir: PathBuf,
        /// The disk's size.
        bytes: u64,
        /// See [`Request::Look`].
        kubelet: Kubelet,
    },
    /// Open a block device.
    Device {
        /// The device.
        path: PathBuf,
        /// Whether to open it read-only.
        read_only: bool,
    },
    /// Clone the mount of a share's source, which comes with the request.
    TakeShare {
        /// The path where the source was found, a file or a directory.
        path: PathBuf,
        /// The writable part of the share.
        #[serde(with = "AccessSchema")]
        access: Access,
        /// Whether later mounts of the host below the source appear in the share.
        follows_mounts: bool,
    },
    /// Write the bytes of the request to a termination message's file.
    WriteMessage {
        /// The file.
        path: PathBuf,
        /// See [`Request::Look`].
        kubelet: Kubelet,
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
    /// Open an image and check its superblock.
    Image {
        /// The image, or a device.
        path: PathBuf,
        /// The expected file system.
        fstype: FsType,
        /// Whether to open it read-only.
        read_only: bool,
    },
    /// Open a snapshotter's writable file system; create it unless it exists.
    Scratch {
        /// The file.
        path: PathBuf,
        /// The size of a new file, bytes.
        bytes: u64,
    },
}

/// The result of reading a directory.
#[derive(Debug, Serialize, Deserialize)]
pub enum Read {
    /// The directory is gone.
    Gone,
    /// The directory looks as it did when the daemon read it.
    Same,
    /// The directory's files come with the response; the value is its stamp.
    Tree(Option<u64>),
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
    /// The gRPC code of the response.
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
/// The factor by which creating a file system may take longer than another request.
const MAKING: u32 = 6;

impl Request {
    /// Returns the path that the request accesses.
    pub fn path(&self) -> &Path {
        match self {
            Self::Look { mount, .. } => mount.source().as_deref().unwrap_or(Path::new("")),
            Self::ReadTree { dir, .. }
            | Self::Owner { dir, .. }
            | Self::Watch { dir, .. }
            | Self::Disk { dir, .. }
            | Self::IsLayerEmpty { dir } => dir,
            Self::Device { path, .. }
            | Self::TakeShare { path, .. }
            | Self::WriteMessage { path, .. }
            | Self::Image { path, .. }
            | Self::Scratch { path, .. } => path,
            Self::LayersKey { chain } => chain.dirs.first().map_or(Path::new(""), PathBuf::as_path),
        }
    }

    /// Returns the name of the operation, for error messages.
    pub fn action(&self) -> &'static str {
        match self {
            Self::Look { .. } | Self::Owner { .. } | Self::LayersKey { .. } => "stat",
            Self::ReadTree { .. } | Self::IsLayerEmpty { .. } | Self::Image { .. } => "read",
            Self::Watch { .. } => "watch",
            Self::Disk { .. } | Self::Scratch { .. } => "create a disk at",
            Self::Device { .. } => "open",
            Self::TakeShare { .. } => "share",
            Self::WriteMessage { .. } => "write",
        }
    }

    /// Returns the timeout of the request, given the timeout `look` of most requests.
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

/// Serves the daemon at the other end of `stream` until it disconnects or sends nothing for a while.
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

fn answer(frame: Frame) -> io::Result<Frame> {
    let refused = |refusal| {
        Ok(Frame { json: serde_json::to_vec(&Answer::<()>::Refused(refusal))?, ..Frame::default() })
    };
    let request = match parse(&frame.json) {
        Ok(request) => request,
        Err(refusal) => return refused(refusal),
    };
    run(request, frame.bytes, frame.descriptor).or_else(refused)
}

/// Parses the JSON of a frame.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(json).map_err(|error| {
        Refusal::internal(format!("cannot parse a frame between helper and daemon: {}", chain(&error)))
    })
}

fn run(request: Request, bytes: Vec<u8>, descriptor: Option<OwnedFd>) -> Result<Frame, Refusal> {
    match request {
        Request::Look { mount, kubelet } => {
            let Looked { bound, content, source } = Looked::at(&mount, &kubelet)?;
            Ok(Frame { bytes: content, descriptor: source, ..done(&bound)? })
        }
        Request::ReadTree { dir, unless, kubelet } => {
            let host = Refusal::host("open", &dir);
            let dir = match own(&kubelet, &dir)?.open() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return done(&Read::Gone),
                dir => dir.map_err(host)?,
            };
            // The stamp is taken before the files are read, so that a change in the meantime is noticed.
            let stamp = tree::stamp(&dir).map_err(Refusal::host("stat", dir.path()))?;
            if stamp.is_some() && stamp == unless {
                return done(&Read::Same);
            }
            let read = tree::read(&dir).map_err(VolumeError::Files)?;
            let bytes = read.write_to_bytes().map_err(VolumeError::Encode)?;
            Ok(Frame { bytes, ..done(&Read::Tree(stamp))? })
        }
        Request::Owner { dir, kubelet } => {
            let dir = own(&kubelet, &dir)?.open().map_err(Refusal::host("open", &dir))?;
            let owner = tree::owner(&dir).map_err(VolumeError::Files)?;
            done(&(owner.mode, owner.uid, owner.gid))
        }
        Request::Watch { dir, kubelet } => {
            let failed = |source| VolumeError::Watch { dir: dir.clone(), source };
            let instance = descriptor.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
            let found = own(&kubelet, &dir)?.open().map_err(failed)?;
            done(&watch(instance, &found).map_err(failed)?)
        }
        Request::Disk { dir, bytes, kubelet } => {
            opened(volume::make_disk(&own(&kubelet, &dir)?, bytes, descriptor.map(File::from).as_ref())?)
        }
        Request::Device { path, read_only } => {
            let device = beneath::host(&path).and_then(|found| match found.kind() {
                Kind::Device => found.open(beneath::Access::for_disk(read_only)),
                _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no block device")),
            });
            opened(device.map_err(Refusal::host("open", &path))?)
        }
        Request::TakeShare { path, access, follows_mounts } => {
            let missing = || Refusal::internal(format!("no source came with the request to share {path:?}"));
            let found = descriptor.ok_or_else(missing)?;
            let source = attach::Source { path: &path, access, follows_mounts };
            let taken = attach::take(found.as_fd(), source)?;
            Ok(Frame { descriptor: Some(taken.mount), ..done(&taken.is_dir)? })
        }
        Request::WriteMessage { path, kubelet } => {
            let own = own(&kubelet, &path)?;
            let found = Dir::host(&own.pod).and_then(|pod| pod.find(own.path()));
            let written = found.and_then(|found| message::write(&found, &bytes));
            written.map_err(Refusal::host("write", &path))?;
            done(&())
        }
        Request::LayersKey { chain } => done(&rootfs::key_of(&chain)?),
        Request::IsLayerEmpty { dir } => {
            let mut entries = dir.read_dir().map_err(Refusal::host("read", &dir))?;
            done(&entries.next().is_none())
        }
        Request::Image { path, fstype, read_only } => {
            let image =
                beneath::host(&path).and_then(|found| found.open(beneath::Access::for_disk(read_only)));
            let image = image.map_err(Refusal::host("read image", &path))?;
            rootfs::check_image(&image, &path, fstype)?;
            opened(image)
        }
        Request::Scratch { path, bytes } => {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(Refusal::internal(format!("{path:?} is no path of a file")));
            };
            let dir = Dir::host(parent).map_err(Refusal::host("open", parent))?;
            let made = Made::New { bytes, purpose: Use::Kept };
            opened(Disk { dir: &dir, name, mark: None }.ensure(&made)?)
        }
    }
}

/// Returns a path as one of the pod's own. A path that another daemon recorded may not be one.
fn own<'a>(kubelet: &Kubelet, path: &'a Path) -> Result<Own<'a>, Refusal> {
    kubelet.split(path).filter(|own| own.place() != Place::Unknown).ok_or_else(|| Refusal {
        code: Code::FailedPrecondition,
        text: format!("{path:?} is no volume in the pod's directory at kubelet: start the pod again"),
    })
}

/// Returns a response with an open file.
fn opened(file: File) -> Result<Frame, Refusal> {
    Ok(Frame { descriptor: Some(file.into()), ..done(&())? })
}

/// Adds a watch to an inotify instance of the daemon; returns its number.
fn watch(instance: OwnedFd, dir: &Dir) -> io::Result<i32> {
    let flags = WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::MOVED_TO
        | WatchFlags::CLOSE_WRITE
        | WatchFlags::ONLYDIR;
    Ok(inotify::add_watch(&instance, beneath::itself(dir), flags)?)
}

fn done<T: Serialize>(what: &T) -> Result<Frame, Refusal> {
    let json =
        serde_json::to_vec(&Answer::Done(what)).map_err(|error| Refusal::internal(error.to_string()))?;
    Ok(Frame { json, ..Frame::default() })
}
