//! Memory and vCPUs that a guest gets and gives back while it runs.
//!
//! The VMM requests a memory size. The guest's kernel plugs and unplugs memory until it has that size, and reports
//! nothing. It releases vCPUs by itself, but uses new ones only after a process has brought them online.

use std::{fs, time::Duration};

use tokio::time::Instant;

use super::{Vm, VmRecord, VmmError};

/// Step in which memory is plugged, MiB: the size of a memory block of Linux on x86-64, and of a slot of Firecracker.
pub const HOTPLUG_STEP_MIB: u64 = 128;

/// Parameters on the kernel command line of a VM that can get memory.
///
/// Without the first, a process would have to bring each block of new memory online. With the second, new memory is
/// movable, so that it can be unplugged, unless the kernel itself would have too little memory.
pub(crate) const KERNEL_PARAMETERS: &str =
    "memhp_default_state=online memory_hotplug.online_policy=auto-movable";

/// First and longest delay between two checks of the guest. It takes a few milliseconds for each 128 MiB.
const FIRST_LOOK: Duration = Duration::from_millis(2);
const LAST_LOOK: Duration = Duration::from_millis(50);

/// A guest's memory in addition to its boot memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HotpluggedMemory {
    /// Size that the guest has, MiB.
    pub plugged_mib: u64,
    /// Size that was last requested, MiB.
    pub requested_mib: u64,
    /// Maximum size, MiB.
    pub max_mib: u64,
}

/// Waits until the guest has the requested memory or has made no progress for `patience`. Returns the memory that it
/// has then.
pub async fn settled(vm: &dyn Vm, patience: Duration) -> Result<Option<HotpluggedMemory>, VmmError> {
    let (mut last, mut changed, mut delay) = (None, Instant::now(), FIRST_LOOK);
    loop {
        let Some(now) = vm.hotplugged_memory().await? else { return Ok(None) };
        if last != Some(now) {
            (last, changed) = (Some(now), Instant::now());
        }
        if now.plugged_mib == now.requested_mib || changed.elapsed() >= patience {
            return Ok(Some(now));
        }
        tokio::time::sleep(delay).await;
        delay = LAST_LOOK.min(delay * 2);
    }
}

/// The number of a guest's vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vcpus {
    /// Number of vCPUs that the VMM runs.
    pub plugged: u32,
    /// Number of vCPUs that was last requested.
    pub requested: u32,
    /// Maximum number of vCPUs.
    pub max: u32,
}

/// Waits until the guest has released its surplus vCPUs or has released none for `patience`. Returns the number that
/// it has then.
pub async fn given_up(vm: &dyn Vm, patience: Duration) -> Result<Option<Vcpus>, VmmError> {
    let (mut last, mut changed, mut delay) = (None, Instant::now(), FIRST_LOOK);
    loop {
        let Some(now) = vm.vcpus().await? else { return Ok(None) };
        if last != Some(now) {
            (last, changed) = (Some(now), Instant::now());
        }
        if now.plugged <= now.requested || changed.elapsed() >= patience {
            return Ok(Some(now));
        }
        tokio::time::sleep(delay).await;
        delay = LAST_LOOK.min(delay * 2);
    }
}

/// Returns the number of a VMM's threads that run vCPUs. The kernel reports it; a guest cannot change it.
pub(crate) fn vcpu_threads(pid: u32) -> std::io::Result<u32> {
    let mut count = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that ends at this moment has no name.
        let name = fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
        count += u32::from(name.starts_with("vcpu"));
    }
    Ok(count)
}

/// Returns the error of a vCPU request to a VMM that cannot change their number.
pub(crate) fn vcpus_refused(record: &VmRecord, count: u32) -> VmmError {
    let reason = format!("{} cannot change the number of vCPUs of a running VM", record.vmm);
    VmmError::Refused { pod: record.pod.clone(), call: call_for_vcpus(count), reason }
}

/// Returns the name of a vCPU request in errors.
pub(crate) fn call_for_vcpus(count: u32) -> String {
    format!("a request for {count} vCPUs")
}

/// Returns the name of a memory request in errors.
pub(crate) fn call(mib: u64) -> String {
    format!("a request for {mib} MiB of hotplugged memory")
}
