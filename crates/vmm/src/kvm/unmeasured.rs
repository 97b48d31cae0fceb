//! The test of KVM on a processor for which there is no guest to measure it with.

use kvm_ioctls::Kvm;

use super::{KvmUnusable, uninterrupted};

/// Creates a VM and nothing more, so that KVM is used only if the configuration names it.
pub fn measure(kvm: &Kvm) -> Result<f64, KvmUnusable> {
    let setup = |error: kvm_ioctls::Error| KvmUnusable::Setup { action: "create a VM", source: error.into() };
    uninterrupted(|| kvm.create_vm()).map_err(setup)?;
    Err(KvmUnusable::Unmeasured)
}
