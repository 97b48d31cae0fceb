//! The functions that a test supplies in place of a guest.

use std::path::PathBuf;

use sandboxer_protocol::{boot::BootParams, link::LinkKey};
use sandboxer_vmm::{DiskSpec, VmExit};
use tokio::{net::UnixStream, sync::watch};

/// The argument of the guest function, which is called once for each stream that the host opens.
#[derive(Debug)]
pub struct FakeGuest {
    /// Boot parameters, as on the kernel command line of a real guest.
    pub boot: BootParams,
    /// The key with which the agent authenticates the host; the same for the VM's lifetime.
    pub link_key: watch::Sender<LinkKey>,
    /// The guest's end of the link.
    pub stream: UnixStream,
    /// Disks that are attached now.
    pub disks: watch::Receiver<Vec<DiskSpec>>,
    /// The guest's current memory, MiB.
    pub memory_mib: watch::Receiver<u64>,
    /// The guest's current number of vCPUs.
    pub vcpus: watch::Receiver<u32>,
    /// Path of the socket to which the guest connects for each stream of file requests.
    pub shares: PathBuf,
    /// The guest's power switch.
    pub power: Power,
}

/// Ends a fake VM from within.
#[derive(Debug, Clone)]
pub struct Power(pub(crate) watch::Sender<Option<VmExit>>);

impl Power {
    /// Ends the VM: its VMM exits with status 0 after these last lines.
    pub fn off(&self, last_lines: &[&str]) {
        let last_lines = last_lines.iter().map(|&line| line.to_owned()).collect();
        end(&self.0, VmExit { how: "exited with status 0".into(), last_lines });
    }
}

/// Sets how a VM ended, unless it has ended already. Returns whether it was set.
pub(crate) fn end(switch: &watch::Sender<Option<VmExit>>, exit: VmExit) -> bool {
    switch.send_if_modified(|state| {
        let running = state.is_none();
        if running {
            *state = Some(exit);
        }
        running
    })
}
