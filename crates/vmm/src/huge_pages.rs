//! Guest memory in huge pages of the host, which are reserved before the VMM starts, so that none is missing when the
//! guest uses it.

use std::os::fd::OwnedFd;

use sandboxer_process::huge_pages::Reserved;

use super::{VmSpec, VmmError};

/// Reserves the memory of a VM in a file that is owned by `user`. `None`: the VM has ordinary memory.
pub(super) fn reserve(spec: &VmSpec, user: Option<u32>) -> Result<Option<OwnedFd>, VmmError> {
    if !spec.huge_pages {
        return Ok(None);
    }
    let error = |source| VmmError::HugePages { pod: spec.pod.clone(), source };
    let file = Reserved::new(spec.memory_mib << 20, spec.cgroup.as_ref()).map_err(error)?.into_file();
    std::os::unix::fs::fchown(&file, user, user).map_err(|source| VmmError::Path {
        pod: spec.pod.clone(),
        action: "pass",
        path: "memory".into(),
        source,
    })?;
    Ok(Some(file))
}
