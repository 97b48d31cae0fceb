//! Runs a command on the host as in a container of the same image: in the image's root, under cgroup limits. The only
//! namespace is a mount namespace, so that the mounts end with the command.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Mount options of /dev/shm, as CRI runtimes give each container.
const SHARED_MEMORY: &std::ffi::CStr = c"mode=1777,size=64m";
/// Search path, as in the image's configuration.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Run a command on this host in an unpacked image, under cgroup limits (needs root)
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The unpacked image
    #[arg(long)]
    root: PathBuf,
    /// Cgroup to run in; one of each hierarchy with cgroup v1
    #[arg(long = "cgroup", value_name = "DIR")]
    cgroups: Vec<PathBuf>,
    /// Directory of the host and its path in the image, which must exist
    #[arg(long = "bind", value_name = "FROM=TO", value_parser = pair)]
    binds: Vec<(PathBuf, PathBuf)>,
    /// The command
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

fn pair(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (from, to) = text.split_once('=').ok_or("expected FROM=TO")?;
    Ok((from.into(), to.into()))
}

/// Executes the command. Returns only on failure.
pub fn run(args: &Args) -> Result<()> {
    args.cgroups.iter().try_for_each(|group| join(group))?;
    // SAFETY: the call does not unshare the table of file descriptors.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }
        .context("cannot make a mount namespace: run as root with CAP_SYS_ADMIN")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("cannot make the mounts private")?;
    mounts(args)?;
    std::os::unix::fs::chroot(&args.root)
        .with_context(|| format!("cannot enter the root {}", args.root.display()))?;
    std::env::set_current_dir("/").context("cannot enter the root's directory")?;
    let mut command = Command::new(&args.words[0]);
    command.args(&args.words[1..]).env_clear().env("PATH", PATH).env("HOME", "/root");
    Err(command.exec()).with_context(|| format!("cannot run {}", args.words[0]))
}

fn join(group: &Path) -> Result<()> {
    let path = group.join("cgroup.procs");
    OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(b"0"))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Mounts the host's file systems and directories below the root, with the limits where a container has them.
fn mounts(args: &Args) -> Result<()> {
    let below = |path: &str| args.root.join(path);
    // Opened now: the next mounts hide their paths.
    let groups: Vec<(fs::File, &Path)> = args
        .cgroups
        .iter()
        .map(|group| Ok((fs::File::open(group)?, &**group)))
        .collect::<std::io::Result<_>>()
        .context("cannot open a control group")?;
    file_system("proc", &below("proc"), None)?;
    bind(Path::new("/dev"), &below("dev"))?;
    file_system("tmpfs", &below("dev/shm"), Some(SHARED_MEMORY))?;
    bind(Path::new("/sys"), &below("sys"))?;
    match &groups[..] {
        [] => {}
        [(group, _)] => bind(&of_descriptor(group), &below("sys/fs/cgroup"))?,
        several => {
            file_system("tmpfs", &below("sys/fs/cgroup"), None)?;
            for (group, path) in several {
                let name = hierarchy(path).context("a control group has no hierarchy")?;
                let to = below("sys/fs/cgroup").join(name);
                fs::create_dir_all(&to).with_context(|| format!("cannot create {}", to.display()))?;
                bind(&of_descriptor(group), &to)?;
            }
        }
    }
    args.binds
        .iter()
        .try_for_each(|(from, to)| bind(from, &args.root.join(to.strip_prefix("/").unwrap_or(to))))
}

/// Returns the name of a cgroup v1 hierarchy, such as "cpu", from a path in it.
fn hierarchy(path: &Path) -> Option<&OsStr> {
    path.strip_prefix("/sys/fs/cgroup").ok()?.iter().next()
}

fn of_descriptor(file: &fs::File) -> PathBuf {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn file_system(kind: &str, at: &Path, options: Option<&std::ffi::CStr>) -> Result<()> {
    mount(kind, at, kind, MountFlags::empty(), options)
        .with_context(|| format!("cannot mount {kind} at {}", at.display()))
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    mount_bind(from, to).with_context(|| format!("cannot bind {} to {}", from.display(), to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_have_the_names_below_which_containers_find_them() {
        assert_eq!(hierarchy(Path::new("/sys/fs/cgroup/cpu/a")), Some(OsStr::new("cpu")));
        assert_eq!(hierarchy(Path::new("/elsewhere")), None);
        assert_eq!(pair("/a=/b"), Ok(("/a".into(), "/b".into())));
        assert!(pair("/a").is_err());
    }
}
