//! Makes an EROFS image of a directory tree.
//!
//! A chain of layers is mounted read-only by overlayfs, so whiteouts, opaque directories and renames are the
//! kernel's to resolve. The mount lives in a mount namespace that only the building thread and its mkfs are
//! in: the host never sees it, and it ends with them, however they end.

use std::{
    ffi::{OsStr, OsString},
    fmt::Write as _,
    fs::{self, File},
    io::{self, Read},
    os::fd::OwnedFd,
    os::unix::{
        fs::{FileTypeExt, MetadataExt},
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::statvfs::statvfs,
};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, pidfd_open, pidfd_send_signal, setrlimit};
use sandboxer_process::jail::Jail;
use tokio::sync::oneshot;

use super::{
    BuildError, FsType,
    cell::{self, Cell},
    mounts::Chain,
    superblock,
};

/// Most bytes of a program's stderr that get into an error.
const STDERR_LEN: usize = 1024;
/// Holes in a tree's files beyond which they are kept as holes. mkfs.erofs writes them out as zeros unless
/// files are stored as deduplicated chunks, which it makes at about 5 s per GiB; so not for everybody.
const HOLES_WORTH_KEEPING: u64 = 64 << 20;
/// Chunk size then, bytes: small beside the data, large beside its 4-byte entry in the chunk map.
const CHUNK: &str = "--chunksize=65536";
/// Bytes a second that a disk or a processor of no use any more still gets through.
const SLOWEST: u64 = 4 << 20;
/// Most memory of mkfs.erofs, bytes: it takes some 300 for each file.
const MAX_MEMORY_BYTES: u64 = 4 << 30;
/// Most bytes that all files of a tree may seem to have; an image of petabytes of holes is an attack.
const MAX_IMAGE_BYTES: u64 = 256 << 30;

/// Most directories that lie in one another. The walk keeps one open for each, with a buffer of 32 KiB.
const MAX_DEPTH: usize = 256;
/// Most bytes of the [ghosts](Tree::ghosts)' paths: each becomes an argument of mkfs.erofs, which the kernel takes 2 MiB of.
const MAX_GHOST_BYTES: usize = 1 << 20;

/// Every extended attribute beside its file. Sharing equal ones takes a walk of its own, in which mkfs.erofs 1.5
/// stumbles over [ghosts](Tree::ghosts) even if they are excluded.
const XATTRS_INLINE: &str = "-x2147483647";
/// Every file's end in blocks of its own: a guest reads 185 MB in 5,700 files in 2.8 s instead of 3.9 s (TCG,
/// median of 6) from an image that is 7 % larger. See docs/decisions/0002-rootfs-as-erofs.md.
const ENDS_IN_BLOCKS: &str = "-Enoinline_data";

/// What an image is made of.
#[derive(Debug, Clone)]
pub enum Content {
    /// The merged view of layers.
    Chain(Chain),
    /// A directory as it is, overlay's marks included.
    Directory(PathBuf),
}

impl Content {
    /// Returns the directories, uppermost first.
    pub fn dirs(&self) -> Vec<PathBuf> {
        match self {
            Content::Chain(chain) => chain.dirs.clone(),
            Content::Directory(dir) => vec![dir.clone()],
        }
    }
}

/// One image to make.
#[derive(Debug)]
pub struct Job {
    /// Program.
    pub mkfs: PathBuf,
    /// Of this.
    pub content: Content,
    /// Existing directory of this store, empty on the host; the view is mounted there.
    pub work: PathBuf,
    /// To be made; removed again if that fails.
    pub image: PathBuf,
}

/// Makes an image, complete and on the disk when this answers.
///
/// Dropping the future lets the image be made to its end; its file is then an unfinished one.
pub async fn image(job: Job) -> Result<(), BuildError> {
    let (done, result) = oneshot::channel();
    let started = thread::Builder::new().name("mkfs".into()).spawn(move || {
        let made = make(&job);
        if made.is_err() {
            // It may not even have been begun; what failed is what is told.
            let _ = fs::remove_file(&job.image);
        }
        // Nobody waits any more: the daemon is ending.
        let _ = done.send(made);
    });
    started.map_err(|source| BuildError::Host {
        action: "start a thread for",
        path: "mkfs".into(),
        source,
    })?;
    result.await.unwrap_or(Err(BuildError::Stopped))
}

fn make(job: &Job) -> Result<(), BuildError> {
    let root = match &job.content {
        Content::Directory(dir) => dir.clone(),
        Content::Chain(chain) => mount_view(chain, &job.work)?,
    };
    let dir = job.image.parent().unwrap_or(Path::new("/"));
    let full = || BuildError::Full { dir: dir.to_owned(), layers: job.content.dirs() };
    let tree = Tree::of(&root)?;
    let bytes = tree.data.saturating_add(tree.holes);
    if bytes > MAX_IMAGE_BYTES {
        return Err(BuildError::TooLarge { layers: job.content.dirs(), bytes });
    }
    let keep_holes = tree.holes > HOLES_WORTH_KEEPING;
    let needed = if keep_holes { tree.data } else { bytes };
    if free_bytes(dir).is_some_and(|free| needed > free) {
        return Err(full());
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
        BuildError::Failed { stderr, .. } if stderr.contains("No space left") => full(),
        // mkfs.erofs doesn't always say why it could not write.
        BuildError::Failed { .. } if free_bytes(dir).is_some_and(|free| free < 64 << 10) => full(),
        other => other,
    })?;
    let written = File::open(&job.image).and_then(|file| file.sync_all());
    written.map_err(|source| match source.kind() {
        io::ErrorKind::StorageFull => full(),
        _ => BuildError::Host { action: "write", path: job.image.clone(), source },
    })?;
    superblock::check(&job.image, FsType::Erofs)
}

/// Returns how long mkfs.erofs may take for files of so many bytes: some minutes, and what a slow disk needs.
fn time_for(bytes: u64) -> Duration {
    Duration::from_secs(300 + bytes / SLOWEST)
}

/// Leaves the host's mount namespace with this thread and mounts the chain's merged view; answers where.
fn mount_view(chain: &Chain, work: &Path) -> Result<PathBuf, BuildError> {
    let failed = |hint| {
        move |errno: Errno| BuildError::View { layers: chain.dirs.clone(), hint, source: errno.into() }
    };
    let host = |path: &Path| {
        let path = path.to_owned();
        move |source| BuildError::Host { action: "make", path, source }
    };
    const PRIVILEGE: &str = "the daemon needs CAP_SYS_ADMIN";

    // The thread gets a current directory of its own by this, too.
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed(PRIVILEGE))?;
    // A slave still sees the host's unmounts, so that nobody's mount is held by this namespace.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)
        .map_err(failed(PRIVILEGE))?;
    mount(Some("sandboxer"), work, Some("tmpfs"), MsFlags::empty(), Some("size=1m,mode=0700"))
        .map_err(failed(PRIVILEGE))?;

    // Mount options end after one page: long paths stand behind short names.
    let mut options = String::from("lowerdir=");
    for (index, dir) in chain.dirs.iter().enumerate() {
        let link = work.join(index.to_string());
        std::os::unix::fs::symlink(dir, &link).map_err(host(&link))?;
        // Writing to a String can't fail.
        let _ = write!(options, "{}{index}", if index == 0 { "" } else { ":" });
    }
    if let [_] = chain.dirs[..] {
        // One layer is no overlay to the kernel; an empty one below changes nothing that is seen.
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

/// What is to be known of a tree before an image is made of it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tree {
    /// Bytes with data in regular files.
    data: u64,
    /// Bytes without.
    holes: u64,
    /// Whiteouts of what no lower layer has: overlayfs lists them, but they are not there.
    ghosts: Vec<PathBuf>,
}

impl Tree {
    /// Walks the tree below `root`, with what that takes bounded by [`MAX_DEPTH`], however many entries there are:
    /// whoever made the image chose them.
    fn of(root: &Path) -> Result<Self, BuildError> {
        let mut tree = Self::default();
        let mut ghost_bytes = 0;
        let open = |path: &Path| fs::read_dir(path).map_err(|error| unreadable(path, error));
        let mut dir = root.to_owned();
        let mut walk = vec![open(root)?];
        while let Some(entries) = walk.last_mut() {
            let Some(entry) = entries.next() else {
                walk.pop();
                dir.pop();
                continue;
            };
            let entry = entry.map_err(|error| unreadable(&dir, error))?;
            let kind = entry.file_type().map_err(|error| unreadable(&dir, error))?;
            if kind.is_dir() {
                dir.push(entry.file_name());
                if walk.len() >= MAX_DEPTH {
                    return Err(BuildError::TooDeep { path: dir, most: MAX_DEPTH });
                }
                walk.push(open(&dir)?);
            } else if kind.is_char_device() {
                let path = entry.path();
                if matches!(path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound) {
                    let ghost = path.strip_prefix(root).unwrap_or(&path);
                    ghost_bytes += ghost.as_os_str().len();
                    if ghost_bytes > MAX_GHOST_BYTES {
                        return Err(BuildError::TooManyGhosts { path, most: MAX_GHOST_BYTES });
                    }
                    tree.ghosts.push(ghost.to_owned());
                }
            } else if kind.is_file() {
                let file = entry.metadata().map_err(|error| unreadable(&dir, error))?;
                let data = file.len().min(file.blocks().saturating_mul(512));
                tree.data = tree.data.saturating_add(data);
                tree.holes = tree.holes.saturating_add(file.len() - data);
            }
        }
        Ok(tree)
    }
}

fn unreadable(path: &Path, source: io::Error) -> BuildError {
    BuildError::Host { action: "read", path: path.to_owned(), source }
}

/// Free bytes where `dir` is, if the file system tells.
fn free_bytes(dir: &Path) -> Option<u64> {
    let stat = statvfs(dir).ok()?;
    stat.blocks_available().checked_mul(stat.fragment_size())
}

/// How a program is held.
#[derive(Debug)]
pub struct Confined {
    /// Where it runs; none: as the daemon. Only for the one program that the calling thread starts: whatever else that
    /// would start were of the jail's namespace of processes.
    pub jail: Option<Jail>,
    /// It is killed after so long.
    pub limit: Duration,
}

/// Runs a program that makes `path`. `setting` says where else the program can be set.
pub fn run(
    program: &Path,
    args: impl IntoIterator<Item = impl AsRef<OsStr>>,
    path: &Path,
    setting: &'static str,
    Confined { jail, limit }: Confined,
) -> Result<(), BuildError> {
    let failed = |source| BuildError::Program { program: program.to_owned(), setting, source };
    let args: Vec<OsString> = args.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
    #[cfg(test)]
    tests::count_run(program);
    // Begun before the namespace is left, in which no thread can be.
    let watch = Watch::begin(limit).map_err(failed)?;
    if jail.is_some() {
        unshare(CloneFlags::CLONE_NEWPID).map_err(|errno| failed(errno.into()))?;
    }
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    // SAFETY: between fork and exec only system calls are made; nothing is allocated, no lock is taken.
    unsafe {
        command.pre_exec(move || {
            setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
            // What isn't jailed may have a smaller bound already, as in a helper.
            let Some(jail) = &jail else { return Ok(()) };
            setrlimit(
                Resource::As,
                Rlimit { current: Some(MAX_MEMORY_BYTES), maximum: Some(MAX_MEMORY_BYTES) },
            )?;
            jail.enter()
        })
    };
    let mut child = command.spawn().map_err(failed)?;
    watch.over(&child).map_err(failed)?;
    let said = child.stderr.take().map(tail).transpose();
    // Reaped in any case.
    let status = child.wait().map_err(failed)?;
    if watch.has_killed() {
        return Err(BuildError::TooSlow { program: program.to_owned(), path: path.to_owned(), limit });
    }
    if status.success() {
        return Ok(());
    }
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, signal) => format!("was killed by signal {}", signal.unwrap_or_default()),
    };
    let said = said.map_err(failed)?.unwrap_or_default();
    let stderr = String::from_utf8_lossy(&said).trim().replace('\n', " ");
    Err(BuildError::Failed { program: program.to_owned(), how, path: path.to_owned(), stderr })
}

/// A thread that kills a child which takes too long.
struct Watch {
    killed: Arc<AtomicBool>,
    /// Dropped, it ends the thread.
    child: mpsc::Sender<OwnedFd>,
}

impl Watch {
    fn begin(limit: Duration) -> io::Result<Self> {
        let (child, told) = mpsc::channel::<OwnedFd>();
        let killed = Arc::<AtomicBool>::default();
        let flag = killed.clone();
        thread::Builder::new().name("mkfs-limit".into()).spawn(move || {
            let Ok(pidfd) = told.recv() else { return };
            if told.recv_timeout(limit).err() == Some(RecvTimeoutError::Timeout) {
                flag.store(true, Ordering::Release);
                // One that has ended just now is waited for as well.
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
            }
        })?;
        Ok(Self { killed, child })
    }

    fn over(&self, child: &Child) -> io::Result<()> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        self.child.send(pidfd).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }

    fn has_killed(&self) -> bool {
        self.killed.load(Ordering::Acquire)
    }
}

/// Returns the last bytes of a stream that is read to its end.
fn tail(mut stream: impl Read) -> io::Result<Vec<u8>> {
    let (mut kept, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(kept),
            Ok(count) => kept.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        kept.drain(..kept.len().saturating_sub(STDERR_LEN));
    }
}

#[cfg(test)]
pub mod tests {
    use std::{
        collections::BTreeMap,
        sync::{Mutex, PoisonError},
    };

    use super::*;

    /// How often each program was run: a jailed one can't tell itself.
    static RUNS: Mutex<BTreeMap<PathBuf, usize>> = Mutex::new(BTreeMap::new());

    pub fn count_run(program: &Path) {
        let mut runs = RUNS.lock().unwrap_or_else(PoisonError::into_inner);
        *runs.entry(program.to_owned()).or_default() += 1;
    }

    pub fn runs(program: &Path) -> usize {
        RUNS.lock().unwrap_or_else(PoisonError::into_inner).get(program).copied().unwrap_or_default()
    }

    const FREE: Confined = Confined { jail: None, limit: Duration::from_secs(60) };

    #[test]
    fn a_program_that_hangs_is_ended_and_named() {
        let limit = Duration::from_millis(50);
        let confined = Confined { jail: None, limit };
        let error = run(Path::new("sleep"), ["100"], Path::new("/out"), "", confined).unwrap_err();
        assert_eq!(error.to_string(), "\"sleep\" was not done with \"/out\" within 50ms and was killed");
    }

    #[test]
    fn a_tree_is_counted_in_all_its_directories() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["a/b/c/one", "a/two", "d/three", "four"] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, [7; 5000]).unwrap();
        }
        File::create(dir.path().join("a/hole")).unwrap().set_len(1 << 30).unwrap();
        let tree = Tree::of(dir.path()).unwrap();
        assert_eq!((tree.data, tree.holes), (4 * 5000, 1 << 30));
        assert!(tree.ghosts.is_empty());
    }

    #[test]
    fn directories_that_lie_too_deep_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let deepest = |depth: usize| dir.path().join(["d"; MAX_DEPTH + 1][..depth].join("/"));
        fs::create_dir_all(deepest(MAX_DEPTH - 1)).unwrap();
        assert!(Tree::of(dir.path()).is_ok());
        fs::create_dir_all(deepest(MAX_DEPTH)).unwrap();
        let text = Tree::of(dir.path()).unwrap_err().to_string();
        assert!(text.contains("/d/d/d") && text.contains("256"), "{text}");
    }

    #[test]
    fn a_program_that_fails_says_why_in_few_words() {
        let said = |script: &str| {
            run(Path::new("sh"), ["-c", script], Path::new("/out"), "", FREE)
                .map_err(|error| error.to_string())
        };
        assert_eq!(said("exit 0"), Ok(()));
        let text =
            said("echo begin >&2; yes long | head -n 100000 >&2; echo 'the end' >&2; exit 3").unwrap_err();
        assert!(text.contains("exited with status 3") && text.ends_with("the end"), "{text}");
        assert!(text.len() < STDERR_LEN + 200 && !text.contains("begin"), "{text}");
        assert!(said("kill -9 $$").unwrap_err().contains("killed by signal 9"));
        let text = run(Path::new("/no/mkfs"), ["x"], Path::new("/out"), " or set rootfs.mkfs_erofs", FREE)
            .unwrap_err();
        assert!(text.to_string().contains("install it or set rootfs.mkfs_erofs"), "{text}");
    }
}
