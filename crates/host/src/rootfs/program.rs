//! Runs the programs that create file systems, with limits.

use std::{
    ffi::{OsStr, OsString},
    io::{self, Read},
    os::fd::OwnedFd,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use nix::sched::{CloneFlags, unshare};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, pidfd_open, pidfd_send_signal, setrlimit};
use sandboxer_process::jail::Jail;

use super::BuildError;

/// Most bytes of a program's stderr in an error.
const STDERR_LEN: usize = 1024;
/// Most memory of mkfs.erofs, bytes: it needs about 300 bytes per file.
const MAX_MEMORY_BYTES: u64 = 4 << 30;

/// Restrictions of a program.
#[derive(Debug)]
pub struct Confined {
    /// The jail; `None`: the program runs like the daemon. A jail is for the one program that the calling thread
    /// starts: later ones would be in the jail's PID namespace.
    pub jail: Option<Jail>,
    /// The time after which the program is killed.
    pub limit: Duration,
}

/// Runs a program that creates `path`. `setting` names the config key of the program's path, for errors.
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
    // The thread starts before the PID namespace is left: no thread can be created afterwards.
    let watchdog = Watchdog::start(limit).map_err(failed)?;
    if jail.is_some() {
        unshare(CloneFlags::CLONE_NEWPID).map_err(|errno| failed(errno.into()))?;
    }
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    // SAFETY: between fork and exec only system calls are made; nothing is allocated, and no lock is taken.
    unsafe {
        command.pre_exec(move || {
            setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
            // Without a jail the limit may already be lower, as in a helper.
            let Some(jail) = &jail else { return Ok(()) };
            setrlimit(
                Resource::As,
                Rlimit { current: Some(MAX_MEMORY_BYTES), maximum: Some(MAX_MEMORY_BYTES) },
            )?;
            jail.enter()
        })
    };
    let mut child = command.spawn().map_err(failed)?;
    watchdog.watch(&child).map_err(failed)?;
    let stderr = child.stderr.take().map(tail).transpose();
    // The child is reaped in any case.
    let status = child.wait().map_err(failed)?;
    if watchdog.has_killed() {
        return Err(BuildError::TooSlow { program: program.to_owned(), path: path.to_owned(), limit });
    }
    if status.success() {
        return Ok(());
    }
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, signal) => format!("was killed by signal {}", signal.unwrap_or_default()),
    };
    let stderr = stderr.map_err(failed)?.unwrap_or_default();
    let stderr = String::from_utf8_lossy(&stderr).trim().replace('\n', " ");
    Err(BuildError::Failed { program: program.to_owned(), how, path: path.to_owned(), stderr })
}

/// A thread that kills a child after a time limit.
struct Watchdog {
    killed: Arc<AtomicBool>,
    /// The sender of the child's pidfd; dropping it ends the thread.
    child: mpsc::Sender<OwnedFd>,
}

impl Watchdog {
    fn start(limit: Duration) -> io::Result<Self> {
        let (child, started) = mpsc::channel::<OwnedFd>();
        let killed = Arc::<AtomicBool>::default();
        let flag = killed.clone();
        thread::Builder::new().name("mkfs-limit".into()).spawn(move || {
            let Ok(pidfd) = started.recv() else { return };
            if started.recv_timeout(limit).err() == Some(RecvTimeoutError::Timeout) {
                flag.store(true, Ordering::Release);
                // Harmless if the child has just exited: it is not reaped yet.
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
            }
        })?;
        Ok(Self { killed, child })
    }

    fn watch(&self, child: &Child) -> io::Result<()> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        self.child.send(pidfd).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }

    fn has_killed(&self) -> bool {
        self.killed.load(Ordering::Acquire)
    }
}

/// Reads a stream to its end; returns its last bytes.
fn tail(mut stream: impl Read) -> io::Result<Vec<u8>> {
    let (mut last, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(last),
            Ok(count) => last.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        last.drain(..last.len().saturating_sub(STDERR_LEN));
    }
}

#[cfg(test)]
pub mod tests {
    use std::{
        collections::BTreeMap,
        path::PathBuf,
        sync::{Mutex, PoisonError},
    };

    use super::*;

    /// How often each program ran: a jailed one cannot report it.
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
        assert_eq!(error.to_string(), "\"sleep\" did not create \"/out\" within 50ms and was killed");
    }

    #[test]
    fn a_program_that_fails_says_why_in_few_words() {
        let stderr = |script: &str| {
            run(Path::new("sh"), ["-c", script], Path::new("/out"), "", FREE)
                .map_err(|error| error.to_string())
        };
        assert_eq!(stderr("exit 0"), Ok(()));
        let text =
            stderr("echo begin >&2; yes long | head -n 100000 >&2; echo 'the end' >&2; exit 3").unwrap_err();
        assert!(text.contains("exited with status 3") && text.ends_with("the end"), "{text}");
        assert!(text.len() < STDERR_LEN + 200 && !text.contains("begin"), "{text}");
        assert!(stderr("kill -9 $$").unwrap_err().contains("killed by signal 9"));
        let text = run(Path::new("/no/mkfs"), ["x"], Path::new("/out"), " or set rootfs.mkfs_erofs", FREE)
            .unwrap_err();
        assert!(text.to_string().contains("install it or set rootfs.mkfs_erofs"), "{text}");
    }
}
