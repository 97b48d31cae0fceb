//! vhost-net: the host's kernel, instead of QEMU, carries packets between taps and guests.
//!
//! A jailed QEMU cannot open the device, so it inherits one open file for each network interface.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use sandboxer_config::VhostNet;
use sandboxer_process::vhost::{self, Carriers};
use sandboxer_protocol::id::SandboxId;

use super::command_line::{Execution, VHOST};
use crate::{VmmError, run_dir::path_error};

const DEVICE: &str = "/dev/vhost-net";

/// Returns whether VMs are to use vhost-net.
pub fn is_wanted(config: VhostNet, execution: Execution) -> bool {
    match (config, execution) {
        // Without KVM the kernel is not notified that a guest has packets to send.
        (VhostNet::Off, _) | (VhostNet::Auto, Execution::Tcg { .. }) => false,
        (VhostNet::Auto, Execution::Kvm) => open_one().is_ok(),
    }
}

/// Opens `/dev/vhost-net` for each of the pod's `nics` network interfaces.
pub fn open(pod: &SandboxId, nics: usize) -> Result<Vec<OwnedFd>, VmmError> {
    let opened = (0..nics).map(|_| open_one()).collect::<io::Result<_>>();
    opened.map_err(path_error(pod, "open", PathBuf::from(DEVICE)))
}

fn open_one() -> io::Result<OwnedFd> {
    fs::File::options().read(true).write(true).open(Path::new(DEVICE)).map(OwnedFd::from)
}

/// The kernel threads that carry the packets of one VM.
#[derive(Debug)]
pub struct Packets {
    /// Process ID of the VM's QEMU.
    pid: u32,
    /// Number of threads; 0: QEMU carries the packets.
    count: usize,
    found: OnceLock<Carriers>,
}

impl Packets {
    /// Returns the `count` threads of the QEMU with this process ID.
    pub fn new(pid: u32, count: usize) -> Arc<Self> {
        Arc::new(Self { pid, count, found: OnceLock::new() })
    }

    /// Returns the threads of a QEMU that an earlier daemon started.
    pub fn of_running(pid: u32) -> Arc<Self> {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        Self::new(pid, String::from_utf8_lossy(&arguments).matches(VHOST).count())
    }

    /// Finds the threads. The first call blocks.
    pub fn carriers(&self) -> &Carriers {
        self.found.get_or_init(|| {
            let found = match self.count {
                0 => Ok(Carriers::default()),
                count => vhost::find(self.pid, count),
            };
            found.unwrap_or_else(|error| {
                tracing::warn!(pid = self.pid, %error, "cannot find the kernel's threads for a VM's packets (vhost-net)");
                Carriers::default()
            })
        })
    }

    /// Finds and configures the threads, in parallel with the VM's start.
    pub fn prepare(self: &Arc<Self>) {
        if self.count == 0 {
            return;
        }
        let packets = self.clone();
        tokio::task::spawn_blocking(move || {
            let carriers = packets.carriers();
            let (pid, count) = (packets.pid, packets.count);
            if carriers.threads.len() + carriers.processes.len() < count {
                tracing::warn!(
                    pid,
                    count,
                    ?carriers,
                    "some of the kernel's threads for a VM's packets (vhost-net) were not found"
                );
            }
            match carriers.serve_in_batches() {
                // The VM has ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => {
                    tracing::warn!(pid, %error, "packets of a VM are slow: the kernel's thread carries each alone")
                }
                Ok(()) => {}
            }
        });
    }
}
