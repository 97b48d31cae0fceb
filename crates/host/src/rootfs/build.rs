//! Creates an EROFS image from a directory tree.
//!
//! A chain of layers is mounted read-only with overlayfs, so the kernel resolves whiteouts, opaque
//! directories and renames. The mount is in a mount namespace of the building thread and its mkfs only: the
//! host never sees it, and it ends with them.

use std::{
    ffi::OsString,
    fmt::Write as _,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::statvfs::statvfs,
};
use tokio::sync::oneshot;

use super::{
    BuildError, FsType,
    cell::{self, Cell},
    mounts::Chain,
    program::{Confined, run},
    superblock,
    tree::Tree,
};

/// Files keep their holes if these are larger than this in total. mkfs.erofs writes holes as zeros unless it stores
/// files as deduplicated chunks, which takes about 5 s per GiB; so chunks are not the default.
const HOLES_WORTH_KEEPING: u64 = 64 << 20;
/// The chunk size, bytes: small compared to the data, large compared to the 4-byte entry in the chunk map.
const CHUNK: &str = "--chunksize=65536";
/// The throughput, bytes per second, of the slowest host for which the time limit must suffice.
const SLOWEST: u64 = 4 << 20;
/// Most bytes of all files of a tree, holes included. An image with petabytes of holes is an attack.
const MAX_IMAGE_BYTES: u64 = 256 << 30;

/// The time limit of the walk through a tree: there may be millions of files on a slow disk, and the walk holds one of
/// the build permits.
const WALK_TIME: Duration = Duration::from_secs(120);

/// Stores every extended attribute with its file. Sharing equal attributes needs another walk, in which mkfs.erofs 1.5
/// fails at [ghosts](Tree::ghosts) even if they are excluded.
const XATTRS_INLINE: &str = "-x2147483647";
/// Stores every file's tail in its own blocks: a guest reads 185 MB in 5,700 files in 2.8 s instead of 3.9 s (TCG,
/// median of 6), and the image is 7 % larger. See docs/decisions/0002-rootfs-as-erofs.md.
const ENDS_IN_BLOCKS: &str = "-Enoinline_data";

/// The source of an image.
#[derive(Debug, Clone)]
pub enum Content {
    /// The merged view of layers.
    Chain(Chain),
    /// One directory with a whole root file system.
    Directory(PathBuf),
    /// One directory above other disks, with overlay's whiteouts.
    Upper(PathBuf),
}

impl Content {
    /// Returns the directories, uppermost first.
    pub fn dirs(&self) -> Vec<PathBuf> {
        match self {
            Content::Chain(chain) => chain.dirs.clone(),
            Content::Directory(dir) | Content::Upper(dir) => vec![dir.clone()],
        }
    }
}

/// An image to create.
#[derive(Debug)]
pub struct Job {
    /// The program mkfs.erofs.
    pub mkfs: PathBuf,
    /// The source.
    pub content: Content,
    /// An existing directory of the store, empty on the host, on which the merged view is mounted.
    pub work: PathBuf,
    /// The path of the image, which is removed on failure.
    pub image: PathBuf,
}

/// Creates an image; it is complete and synced when this returns.
///
/// If the future is dropped, the image is still completed, as an unfinished file.
pub async fn image(job: Job) -> Result<(), BuildError> {
    let (done, result) = oneshot::channel();
    let started = thread::Builder::new().name("mkfs".into()).spawn(move || {
        let made = make(&job);
        if made.is_err() {
            // The file may not exist. The first error is reported.
            let _ = fs::remove_file(&job.image);
        }
        // The receiver is gone if the daemon is stopping.
        let _ = done.send(made);
    });
    started.map_err(|source| BuildError::Path {
        action: "start a thread for",
        path: "mkfs".into(),
        source,
    })?;
    result.await.unwrap_or(Err(BuildError::Stopped))
}

fn make(job: &Job) -> Result<(), BuildError> {
    let root = match &job.content {
        Content::Directory(dir) | Content::Upper(dir) => dir.clone(),
        Content::Chain(chain) => mount_view(chain, &job.work)?,
    };
    let dir = job.image.parent().unwrap_or(Path::new("/"));
    let full = |needed| BuildError::Full { dir: dir.to_owned(), layers: job.content.dirs(), needed };
    let tree = Tree::walk(&root, matches!(job.content, Content::Upper(_)), WALK_TIME)?;
    let bytes = tree.data.saturating_add(tree.holes);
    if bytes > MAX_IMAGE_BYTES {
        return Err(BuildError::TooLarge { layers: job.content.dirs(), bytes });
    }
    let keep_holes = tree.holes > HOLES_WORTH_KEEPING;
    let needed = if keep_holes { tree.data } else { bytes };
    if free_bytes(dir).is_some_and(|free| needed > free) {
        return Err(full(needed));
    }

    let mut args: Vec<OsString> = vec!["--quiet".into(), XATTRS_INLINE.into(), ENDS_IN_BLOCKS.into()];
    if keep_holes {
        args.push(CHUNK.into());
    }
    args.extend(tree.ghosts.iter().map(|ghost| {
        let mut arg = OsString::from("--exclude-path=");
        arg.push(ghost);
        arg
    }));
    let cell = Cell::new(job, &root)?;
    args.extend([cell::IMAGE.into(), cell::TREE.into()]);
    let setting = " or set rootfs.mkfs_erofs";
    let confined = Confined { jail: Some(cell.jail()?), limit: time_for(bytes) };
    run(&job.mkfs, args, &job.image, setting, confined).map_err(|error| match error {
        BuildError::Failed { stderr, .. } if stderr.contains("No space left") => full(0),
        // mkfs.erofs does not always report why a write failed.
        BuildError::Failed { .. } if free_bytes(dir).is_some_and(|free| free < 64 << 10) => full(0),
        other => other,
    })?;
    cell::take_back(&job.image).map_err(|source| match source.kind() {
        io::ErrorKind::StorageFull => full(0),
        _ => BuildError::Path { action: "write", path: job.image.clone(), source },
    })?;
    let image = File::open(&job.image).map_err(|source| BuildError::Path {
        action: "read image",
        path: job.image.clone(),
        source,
    })?;
    superblock::check(&image, &job.image, FsType::Erofs)
}

/// Returns the time limit of mkfs.erofs for this many bytes of files: a few minutes, plus the time of a slow disk.
fn time_for(bytes: u64) -> Duration {
    Duration::from_secs(300 + bytes / SLOWEST)
}

/// Moves this thread to a new mount namespace and mounts the chain's merged view; returns its path.
fn mount_view(chain: &Chain, work: &Path) -> Result<PathBuf, BuildError> {
    let failed = |hint| {
        move |errno: Errno| BuildError::View { layers: chain.dirs.clone(), hint, source: errno.into() }
    };
    let host = |path: &Path| {
        let path = path.to_owned();
        move |source| BuildError::Path { action: "create", path, source }
    };
    const PRIVILEGE: &str = "the daemon needs CAP_SYS_ADMIN";

    // The thread also gets its own current directory.
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed(PRIVILEGE))?;
    // A slave mount still receives the host's unmounts, so this namespace keeps no mount busy.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)
        .map_err(failed(PRIVILEGE))?;
    mount(Some("sandboxer"), work, Some("tmpfs"), MsFlags::empty(), Some("size=1m,mode=0700"))
        .map_err(failed(PRIVILEGE))?;

    // Mount options are limited to one page, so short symlinks stand for long paths.
    let mut options = String::from("lowerdir=");
    for (index, dir) in chain.dirs.iter().enumerate() {
        let link = work.join(index.to_string());
        std::os::unix::fs::symlink(dir, &link).map_err(host(&link))?;
        // Writing to a String cannot fail.
        let _ = write!(options, "{}{index}", if index == 0 { "" } else { ":" });
    }
    if let [_] = chain.dirs[..] {
        // The kernel needs at least two layers; an empty one below changes nothing.
        let empty = work.join("empty");
        fs::create_dir(&empty).map_err(host(&empty))?;
        options.push_str(":empty");
    }
    for option in &chain.options {
        let _ = write!(options, ",{option}");
    }
    let view = work.join("view");
    fs::create_dir(&view).map_err(host(&view))?;
    nix::unistd::chdir(work).map_err(failed("its working directory cannot be entered"))?;
    mount(Some("overlay"), "view", Some("overlay"), MsFlags::MS_RDONLY, Some(options.as_str()))
        .map_err(failed("are all layers there, and does the kernel have overlayfs?"))?;
    Ok(view)
}

/// Returns the free bytes on the file system of `dir`, if known.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    let stat = statvfs(dir).ok()?;
    stat.blocks_available().checked_mul(stat.fragment_size())
}
