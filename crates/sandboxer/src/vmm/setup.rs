//! Which VMM this host's pods get.

use std::sync::Arc;

use super::{
    Vmm,
    accelerator::{self, AcceleratorError},
    cloud_hypervisor::{CloudHypervisor, version::VersionError},
    qemu::Qemu,
};
use crate::config::{Accelerator, VmConfig, VmmChoice};

/// Why no VMM can be used.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Guests can't run as configured.
    #[error("no VMM can be used as configured")]
    Accelerator(#[from] AcceleratorError),
    /// The configuration asks for Cloud Hypervisor.
    #[error("vmm \"cloud-hypervisor\" is configured and cannot be used: set it to \"auto\" or \"qemu\"")]
    CloudHypervisor(#[from] VersionError),
    /// Cloud Hypervisor knows no emulation.
    #[error("vmm \"cloud-hypervisor\" needs KVM, and accelerator \"tcg\" is configured")]
    Emulated,
}

/// Finds the VMM that the configuration asks for, and tries it.
///
/// Left the choice, Cloud Hypervisor where it and KVM can be used, else QEMU with KVM, else QEMU emulating.
pub async fn detect(config: &VmConfig) -> Result<Arc<dyn Vmm>, SetupError> {
    match config.vmm {
        VmmChoice::Qemu => Ok(Arc::new(Qemu::new(config).await?)),
        VmmChoice::CloudHypervisor if config.accelerator == Accelerator::Tcg => Err(SetupError::Emulated),
        VmmChoice::CloudHypervisor => {
            let (_, reason) = accelerator::choose(Accelerator::Kvm).await?;
            Ok(Arc::new(CloudHypervisor::new(config, reason).await?))
        }
        VmmChoice::Auto => {
            let (accelerator, reason) = accelerator::choose(config.accelerator).await?;
            if accelerator != "kvm" {
                let reason = format!("{reason}; without KVM there is only QEMU");
                return Ok(Arc::new(Qemu::on(config, accelerator, reason).await));
            }
            match CloudHypervisor::new(config, reason.clone()).await {
                Ok(vmm) => Ok(Arc::new(vmm)),
                Err(unusable) => {
                    let reason = format!("{reason}; not in Cloud Hypervisor: {unusable}");
                    Ok(Arc::new(Qemu::on(config, accelerator, reason).await))
                }
            }
        }
    }
}
