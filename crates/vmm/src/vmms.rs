//! The VMMs of one daemon.

use std::sync::Arc;

use sandboxer_config::VmmName;

use super::{Held, Vm, VmRecord, Vmm, VmmError};

/// The VMMs that run this daemon's pods: the configured one, and those of runtime handlers.
#[derive(Debug, Clone)]
pub struct Vmms {
    usual: Arc<dyn Vmm>,
    others: Vec<Arc<dyn Vmm>>,
}

/// The key of one of [`Vmms`]. The default is the configured VMM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VmmKey(Option<usize>);

impl Vmms {
    /// Returns the configured VMM and `others`, each of which has its own name.
    pub fn new(usual: Arc<dyn Vmm>, others: Vec<Arc<dyn Vmm>>) -> Self {
        Self { usual, others }
    }

    /// Returns the key of the VMM that a pod requests, or of the configured one if it requests none. `None`: this
    /// daemon does not have the VMM.
    pub fn key(&self, requested: Option<VmmName>) -> Option<VmmKey> {
        requested.map_or(Some(VmmKey::default()), |name| self.named(name.as_str()))
    }

    fn named(&self, name: &str) -> Option<VmmKey> {
        self.keys().find(|key| self.get(*key).info().name == name)
    }

    /// Returns the key of each VMM, the configured one first.
    pub fn keys(&self) -> impl Iterator<Item = VmmKey> + use<> {
        std::iter::once(VmmKey(None)).chain((0..self.others.len()).map(|index| VmmKey(Some(index))))
    }

    /// Returns the VMM of a key.
    pub fn get(&self, VmmKey(key): VmmKey) -> &Arc<dyn Vmm> {
        key.and_then(|index| self.others.get(index)).unwrap_or(&self.usual)
    }

    /// Returns the VMM for VMs of an earlier daemon: the VMM of the recorded name, else the configured one, which
    /// knows them all.
    fn vmm_of(&self, record: &VmRecord) -> &Arc<dyn Vmm> {
        self.get(self.named(&record.vmm).unwrap_or_default())
    }

    /// Adopts a VM, as [`Vmm::adopt`] does.
    pub async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>, VmmError> {
        self.vmm_of(record).adopt(record).await
    }

    /// Opens a handle to a VM's processes, as [`Vmm::hold`] does.
    pub fn hold(&self, record: &VmRecord) -> Result<Option<Arc<dyn Held>>, VmmError> {
        self.vmm_of(record).hold(record)
    }
}

impl From<Arc<dyn Vmm>> for Vmms {
    fn from(usual: Arc<dyn Vmm>) -> Self {
        Self::new(usual, Vec::new())
    }
}

impl<V: Vmm + 'static> From<Arc<V>> for Vmms {
    fn from(usual: Arc<V>) -> Self {
        Self::new(usual, Vec::new())
    }
}
