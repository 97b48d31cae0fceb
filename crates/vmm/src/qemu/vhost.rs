//! The host's kernel carries packets between taps and guests (vhost-net), in place of QEMU.
//!
//! A jailed QEMU cannot open the device. It inherits one open file for each network interface.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use sandboxer_config::VhostNet;
use sandboxer_protocol::id::SandboxId;

use super::{super::VmmError, super::run_dir::path_error, command_line::Execution};

const DEVICE: &str = "/dev/vhost-net";

/// Returns whether VMs are to use it.
pub fn is_wanted(config: VhostNet, execution: Execution) -> bool {
    match (config, execution) {
        (VhostNet::Off, _) => false,
        // QEMU has the guest's notifications brought to the kernel by KVM.
        (VhostNet::Auto, Execution::Tcg { .. }) => false,
        (VhostNet::Auto, Execution::Kvm) => open_one(Path::new(DEVICE)).is_ok(),
    }
}

/// Opens it for each of the pod's `nics` network interfaces.
pub fn open(pod: &SandboxId, nics: usize) -> Result<Vec<OwnedFd>, VmmError> {
    let opened = (0..nics).map(|_| open_one(Path::new(DEVICE))).collect::<io::Result<_>>();
    opened.map_err(path_error(pod, "open", PathBuf::from(DEVICE)))
}

fn open_one(device: &Path) -> io::Result<OwnedFd> {
    fs::File::options().read(true).write(true).open(device).map(OwnedFd::from)
}
