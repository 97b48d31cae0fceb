//! The series `native`: a tool from the same image as a process of the host, with the same limits. `bench-helper
//! native` enters the unpacked image.

use std::fs::{self, File};
use std::io;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use sandboxer_probe::group::Groups;
use sandboxer_probe::log::{self, Printed};
pub use sandboxer_probe::native::NATIVE;
use sandboxer_probe::workload::definition::Image;

use super::container::Spec;

/// Path of the helper in the image.
const HELPER: &str = "usr/bin/bench-helper";

/// Environment of native tools.
#[derive(Debug, Clone)]
pub struct Native {
    /// Path of the unpacked image.
    pub root: PathBuf,
    /// Path of the unpacked image with compilers and checkers, if there is one.
    pub build_root: Option<PathBuf>,
    /// Address at which clients in pods reach servers on this host.
    pub address: Option<String>,
    /// Directory of the cgroup file system; tests use another one.
    pub groups: PathBuf,
}

impl Native {
    /// Returns the environment of tools in the unpacked image `root`.
    pub fn new(root: PathBuf, address: Option<String>) -> Self {
        Self { root, build_root: None, address, groups: PathBuf::from("/sys/fs/cgroup") }
    }

    /// Returns whether the directory is an unpacked image with the helper.
    pub fn is_there(&self) -> bool {
        self.root.join(HELPER).is_file()
    }

    /// Returns the address of servers: the given one, or else the source address of routes out of this host.
    pub fn address(&self) -> Option<String> {
        self.address.clone().or_else(host_address)
    }

    /// Returns the unpacked image of a tool.
    fn root_of(&self, image: Image) -> io::Result<&Path> {
        match image {
            Image::BenchSmall => Ok(&self.root),
            Image::BenchBuild => self.build_root.as_deref().ok_or_else(|| {
                io::Error::other(
                    "its image is not unpacked: make it with `make bench-native NATIVE_IMAGE=bench-build \
                     NATIVE_ROOT=DIR` and name it with --native-build-root",
                )
            }),
        }
    }

    /// Starts a tool. Its cgroup and its output are named after it.
    pub fn start(&self, spec: &Spec<'_>, logs: &Path) -> io::Result<Process> {
        let (name, root) = (&spec.name, self.root_of(spec.image)?);
        let groups = Groups::make(&self.groups, name, spec.resources.unwrap_or_default())?;
        let outputs = ["out", "err"].map(|end| logs.join(format!("{name}.{end}")));
        let mut command = Command::new(root.join(HELPER));
        command.arg("native").arg("--root").arg(root);
        for group in groups.paths() {
            command.arg("--cgroup").arg(group);
        }
        for mount in &spec.mounts {
            let mut bind = mount.host_path.clone().into_os_string();
            bind.push("=");
            bind.push(&mount.container_path);
            command.arg("--bind").arg(bind);
        }
        command.arg("--").args(&spec.command).stdin(Stdio::null());
        command.stdout(File::create(&outputs[0])?).stderr(File::create(&outputs[1])?);
        let (begun, child) = (Instant::now(), command.spawn()?);
        let ended = watch(child.id());
        Ok(Process { child: Mutex::new(child), groups, outputs, begun, ended })
    }
}

/// Returns the source address of routes out of this host.
pub fn host_address() -> Option<String> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Sends nothing. The address is from a block reserved for documentation.
    socket.connect("192.0.2.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip().to_string())
}

/// A native tool. Dropping it kills the tool and everything that it started.
#[derive(Debug)]
pub struct Process {
    child: Mutex<Child>,
    groups: Groups,
    outputs: [PathBuf; 2],
    begun: Instant,
    ended: Arc<OnceLock<Instant>>,
}

/// Records when a child ends, without reaping it.
fn watch(pid: u32) -> Arc<OnceLock<Instant>> {
    let ended = Arc::new(OnceLock::new());
    let (into, pid) = (ended.clone(), i32::try_from(pid).ok().and_then(Pid::from_raw));
    std::thread::spawn(move || {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let exited = pid.map(|pid| waitid(WaitId::Pid(pid), options));
        // If another thread has already reaped the child, it has ended, too.
        if exited.is_some() {
            let _ = into.set(Instant::now());
        }
    });
    ended
}

impl Process {
    /// Returns the exit code; 128 plus the number for a signal, `None` while the tool runs.
    pub fn ended(&self) -> io::Result<Option<i32>> {
        use std::os::unix::process::ExitStatusExt;
        let status = self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()?;
        Ok(status.map(|status| status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())))
    }

    /// Returns the tool's running time, s; `None` while it runs.
    pub fn ran_s(&self) -> Option<f64> {
        Some(self.ended.get()?.duration_since(self.begun).as_secs_f64())
    }

    /// Returns the tool's output so far.
    pub fn printed(&self) -> io::Result<Printed> {
        let [stdout, stderr] = &self.outputs;
        Ok(Printed { stdout: log::bounded(stdout)?, stderr: log::bounded(stderr)? })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        // The tool may have ended; its group is emptied next.
        let _ = child.kill();
        let _ = child.wait();
        self.groups.remove(Duration::from_secs(5));
        self.outputs.iter().for_each(|output| drop(fs::remove_file(output)));
    }
}
