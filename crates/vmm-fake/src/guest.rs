//! What a test supplies in place of a guest.

use std::path::PathBuf;

use sandboxer_protocol::{boot::BootParams, link::LinkKey};
use sandboxer_vmm::{DiskSpec, VmExit};
use tokio::{net::UnixStream, sync::watch};

/// The argument of the guest function; it is called once for each stream that the host opens.
#[derive(Debug)]
pub struct FakeGuest {
    /// As on its kernel's command line.
    pub boot: BootParams,
    /// The key by which its agent authenticates the host; the same for the VM's lifetime.
    pub link_key: watch::Sender<LinkKey>,
    /// Its end of the link.
    pub stream: UnixStream,
    /// Disks that are attached now.
    pub disks: watch::Receiver<Vec<DiskSpec>>,
    /// Memory that it has now, MiB.
    pub memory_mib: watch::Receiver<u64>,
    /// Its vCPUs.
    pub vcpus: watch::Receiver<u32>,
    /// Socket to which it connects for each stream of file requests.
    pub shares: PathBuf,
    /// Its power switch.
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
