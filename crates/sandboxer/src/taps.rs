//! The taps of a VM that is about to start: files for a VMM that inherits them, names for one that opens them.

use std::{io, os::fd::OwnedFd, path::Path, sync::Arc};

use sandboxer_host::network::{self, Interface, NetLimits, PooledTap, TapPool};
use sandboxer_protocol::id::SandboxId;
use sandboxer_vmm::{NamedTaps, VmSpec, Vmm};

use crate::error::PodError;

/// The taps of a VM.
#[derive(Debug)]
pub enum VmTaps {
    /// The VM has no taps, or its VMM has them already.
    None,
    /// Taps that the VMM inherits.
    Open(Vec<Arc<OwnedFd>>),
    /// Taps that the VMM opens.
    Named(NamedTaps),
}

impl VmTaps {
    /// Creates the taps of a pod's interfaces, joined to these, with the pod's limits.
    pub async fn of_pod(
        vmm: &dyn Vmm,
        pool: &Arc<TapPool>,
        pod: &SandboxId,
        netns: &Path,
        interfaces: &[Interface],
        limits: NetLimits,
    ) -> Result<Self, PodError> {
        if !vmm.opens_taps() {
            return Ok(Self::Open(network::taps(pod, netns, interfaces, limits).await?));
        }
        let count = u8::try_from(interfaces.len()).unwrap_or(u8::MAX);
        let made = pool.named_taps(count).map_err(|source| PodError::Path {
            pod: pod.clone(),
            action: "make taps for the interfaces in",
            path: netns.to_owned(),
            source,
        });
        let (named, pooled) = made?;
        network::plug(pod, netns, interfaces, limits, (pool.clone(), pooled)).await?;
        Ok(Self::Named(named))
    }

    /// Creates `count` taps for a VM without a pod. Also returns the pooled taps, which join them to a pod's interfaces
    /// later.
    pub fn of_no_pod(vmm: &dyn Vmm, pool: &TapPool, count: u8) -> io::Result<(Self, Vec<PooledTap>)> {
        if vmm.opens_taps() {
            let (named, pooled) = pool.named_taps(count)?;
            return Ok((Self::Named(named), pooled));
        }
        let (files, pooled): (Vec<_>, _) = pool.taps(count)?.into_iter().unzip();
        Ok((Self::Open(files.into_iter().map(Arc::new).collect()), pooled))
    }

    /// Returns the number of taps.
    pub fn count(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Open(taps) => taps.len(),
            Self::Named(taps) => taps.names.len(),
        }
    }

    /// Adds the taps to the VM's `spec`.
    pub fn given_to(&self, spec: VmSpec) -> VmSpec {
        match self {
            Self::None => spec,
            Self::Open(taps) => VmSpec { taps: taps.clone(), ..spec },
            Self::Named(taps) => VmSpec { named_taps: Some(taps.clone()), ..spec },
        }
    }
}
