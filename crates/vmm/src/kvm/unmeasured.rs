//! On a processor for which there is no guest to measure KVM with.

use kvm_ioctls::Kvm;

use super::KvmUnusable;

/// Creates a VM and no more: KVM is used only if it is configured by name.
pub fn measure(kvm: &Kvm) -> Result<f64, KvmUnusable> {
    let setup = |error: kvm_ioctls::Error| KvmUnusable::Setup { action: "create a VM", source: error.into() };
    kvm.create_vm().map_err(setup)?;
    Err(KvmUnusable::Unmeasured)
}
