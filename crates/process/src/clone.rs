//! Starts a child in a control group with one system call.
//!
//! A process that moves into a version 2 group waits for an RCU grace period, about 15 ms; a process that is started
//! in the group does not. The standard library's `Command` does not support this.

use std::{
    ffi::{CString, OsStr, OsString},
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    ptr,
};

/// The value in `linux/sched.h`; the type of `libc`'s constant is too small.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// Errors of kernels before 5.7, and of a seccomp filter that forbids the call.
const UNKNOWN: [i32; 4] = [libc::ENOSYS, libc::EINVAL, libc::E2BIG, libc::EPERM];

/// Memory that a child uses between clone and exec, when it only makes system calls.
pub struct PreparedChild {
    program: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    dir: CString,
    /// The child's stdin, stdout and stderr.
    stdio: [OwnedFd; 3],
}

impl PreparedChild {
    /// Prepares a child that executes the program at the path `program` in the directory `dir`.
    pub fn new(
        program: &Path,
        arguments: &[OsString],
        environment: &[(&str, OsString)],
        dir: &Path,
        stdio: [OwnedFd; 3],
    ) -> io::Result<Self> {
        let text = |text: &OsStr| CString::new(text.as_bytes()).map_err(io::Error::from);
        let variable = |(name, value): &(&str, OsString)| {
            let mut pair = OsString::from(name);
            pair.push("=");
            pair.push(value);
            text(&pair)
        };
        let all = [program.as_os_str()].into_iter().chain(arguments.iter().map(OsString::as_os_str));
        Ok(Self {
            program: text(program.as_os_str())?,
            arguments: all.map(text).collect::<io::Result<_>>()?,
            environment: environment.iter().map(variable).collect::<io::Result<_>>()?,
            dir: text(dir.as_os_str())?,
            stdio,
        })
    }

    /// Starts the child in the control group whose directory is `group`, as the first process of a PID namespace if
    /// `alone`. `prepare` runs in the child before exec and only makes system calls. Returns the PID, or `None` if the
    /// kernel lacks the call.
    pub fn start_in(
        &self,
        group: BorrowedFd<'_>,
        alone: bool,
        prepare: impl Fn() -> io::Result<()>,
    ) -> io::Result<Option<i32>> {
        let pointers = |texts: &[CString]| -> Vec<*const libc::c_char> {
            texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
        };
        let (arguments, environment) = (pointers(&self.arguments), pointers(&self.environment));
        // exec closes the child's end.
        let (mut failure, report) = io::pipe()?;
        // SAFETY: all zeroes requests a plain copy of this process.
        let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
        how.flags = CLONE_INTO_CGROUP | if alone { libc::CLONE_NEWPID as u64 } else { 0 };
        how.exit_signal = libc::SIGCHLD as u64;
        how.cgroup = group.as_raw_fd() as u64;
        // SAFETY: the child has its own copy of this process's memory, in which other threads may have held locks.
        // Until it executes its program, it only makes system calls, with data that was prepared before, and it never
        // returns from here.
        let child = unsafe { libc::syscall(libc::SYS_clone3, &raw const how, std::mem::size_of_val(&how)) };
        if child == 0 {
            let failed = self.become_program(&arguments, &environment, prepare);
            let errno = failed.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes();
            // SAFETY: the bytes outlive the call, and the process ends.
            unsafe {
                libc::write(report.as_raw_fd(), errno.as_ptr().cast(), errno.len());
                libc::_exit(1)
            }
        }
        if child < 0 {
            let error = io::Error::last_os_error();
            return if error.raw_os_error().is_some_and(|errno| UNKNOWN.contains(&errno)) {
                Ok(None)
            } else {
                Err(error)
            };
        }
        drop(report);
        let child = child as i32;
        let mut errno = [0; 4];
        match failure.read_exact(&mut errno) {
            // The program was executed.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Some(child)),
            result => {
                reap(child);
                result?;
                Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno)))
            }
        }
    }

    /// In the child: executes the program, or returns the error.
    fn become_program(
        &self,
        arguments: &[*const libc::c_char],
        environment: &[*const libc::c_char],
        prepare: impl Fn() -> io::Result<()>,
    ) -> io::Error {
        // SAFETY: every pointer is to data of which this child has a copy, and lists of pointers end with null. Only
        // this process is changed.
        unsafe {
            for (number, file) in (0..).zip(&self.stdio) {
                if libc::dup2(file.as_raw_fd(), number) < 0 {
                    return io::Error::last_os_error();
                }
            }
            if libc::chdir(self.dir.as_ptr()) < 0 {
                return io::Error::last_os_error();
            }
            // Programs expect default signal handling.
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            if let Err(error) = prepare() {
                return error;
            }
            libc::execve(self.program.as_ptr(), arguments.as_ptr(), environment.as_ptr());
        }
        io::Error::last_os_error()
    }
}

/// Reaps a child that failed before exec.
fn reap(child: i32) {
    // SAFETY: the child belongs to this process, no other code knows it, and its status is not needed.
    unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
}

/// Opens `/dev/null`.
pub fn dev_null() -> io::Result<OwnedFd> {
    Ok(File::open("/dev/null")?.into())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::fd::AsFd,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
        time::Duration,
    };

    use super::*;
    use crate::jail;

    /// Returns the version 2 group that this process is in: hosts of these tests have one, alone or beside those of
    /// version 1.
    fn own_group() -> File {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).expect("a group of version 2");
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 ")).expect("version 2 is mounted");
        File::open(Path::new(mount.split(' ').nth(4).unwrap()).join(own)).unwrap()
    }

    fn prepared_child(program: &str, arguments: &[&str], out: io::PipeWriter) -> PreparedChild {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        let stdio = [dev_null().unwrap(), out.into(), dev_null().unwrap()];
        PreparedChild::new(Path::new(program), &arguments, &[("A", "b".into())], Path::new("/"), stdio)
            .unwrap()
    }

    #[test]
    fn a_child_has_its_directory_words_and_environment() {
        let (mut output, out) = io::pipe().unwrap();
        let prepared = AtomicBool::new(false);
        let child = prepared_child("/bin/sh", &["-c", "pwd; echo $A; cat /proc/self/cgroup"], out);
        let started = child.start_in(own_group().as_fd(), false, || {
            prepared.store(true, Ordering::Relaxed);
            Ok(())
        });
        drop(child);
        let pid = started.unwrap().expect("a kernel of 5.7 or later");
        let mut words = String::new();
        output.read_to_string(&mut words).unwrap();
        reap(pid);
        assert!(words.starts_with("/\nb\n"), "{words}");
        assert!(words.contains("0::/"), "{words}");
        assert!(!prepared.load(Ordering::Relaxed), "the child's memory is its own");
    }

    #[test]
    fn a_child_that_becomes_no_program_says_why() {
        let (_, out) = io::pipe().unwrap();
        let fail = || Err(io::Error::from_raw_os_error(libc::EXDEV));
        let failed =
            prepared_child("/bin/true", &[], out).start_in(own_group().as_fd(), false, fail).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::EXDEV));
        let (_, out) = io::pipe().unwrap();
        let missing = prepared_child("/bin/none", &[], out).start_in(own_group().as_fd(), false, || Ok(()));
        assert_eq!(missing.unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }

    #[test]
    fn a_group_that_is_none_is_an_error_or_no_such_call() {
        let (_, out) = io::pipe().unwrap();
        let nowhere = File::open("/dev/null").unwrap();
        let failed =
            prepared_child("/bin/true", &[], out).start_in(nowhere.as_fd(), false, || Ok(())).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::EBADF));
    }

    /// The C library's own functions for this wait for threads that the child does not have.
    #[test]
    fn a_child_gets_a_user_whatever_other_threads_do() {
        let stop = Arc::new(AtomicBool::new(false));
        let busy = [(); 3].map(|()| {
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::thread::spawn(|| ()).join().unwrap();
                }
            })
        });
        let (done, started) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for _ in 0..300 {
                let (_, out) = io::pipe().unwrap();
                let child = prepared_child("/bin/true", &[], out);
                let started = child.start_in(own_group().as_fd(), false, || {
                    jail::set_groups(&[0])?;
                    jail::set_user(0)
                });
                reap(started.unwrap().expect("a kernel of 5.7 or later"));
                done.send(()).unwrap();
            }
        });
        for n in 0..300 {
            let started = started.recv_timeout(Duration::from_secs(20));
            started.unwrap_or_else(|_| panic!("child {n} has not become its program"));
        }
        stop.store(true, Ordering::Relaxed);
        busy.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
