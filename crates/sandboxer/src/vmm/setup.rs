//! Which VMM this host's pods get.

use std::sync::Arc;

use super::{
    Vmm,
    qemu::{Qemu, QemuSetupError},
};
use crate::config::VmConfig;

/// Why no VMM can be used.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// QEMU can't be used as configured.
    #[error("QEMU cannot be used as configured")]
    Qemu(#[from] QemuSetupError),
}

/// Finds the VMM that the configuration asks for, and tries it.
pub async fn detect(config: &VmConfig) -> Result<Arc<dyn Vmm>, SetupError> {
    Ok(Arc::new(Qemu::new(config).await?))
}
