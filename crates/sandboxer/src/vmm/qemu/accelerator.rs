//! Which accelerator QEMU runs with, and which QEMU it is.

use std::{path::Path, process::Stdio, time::Duration};

use crate::{
    config::Accelerator,
    vmm::kvm::{self, KvmUnusable},
};

/// A KVM that takes longer over its test than this is not usable; the test itself takes 0.15 s at most.
const KVM_TEST_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for `--version`.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// Why QEMU can't be used as configured.
#[derive(Debug, thiserror::Error)]
pub enum QemuSetupError {
    /// The configuration asks for KVM.
    #[error("accelerator \"kvm\" is configured and doesn't work here: set it to \"auto\" or \"tcg\"")]
    NoKvm(#[source] KvmUnusable),
    /// The test didn't come back.
    #[error(
        "accelerator \"kvm\" is configured and its test did not end within {0:?}: set it to \"auto\" or \"tcg\""
    )]
    KvmHung(Duration),
}

/// The accelerator, and why this one.
pub(super) async fn choose(configured: Accelerator) -> Result<(&'static str, String), QemuSetupError> {
    if configured == Accelerator::Tcg {
        return Ok(("tcg", "configured".into()));
    }
    let test = tokio::task::spawn_blocking(|| kvm::measure(Path::new("/dev/kvm")));
    let unusable = match tokio::time::timeout(KVM_TEST_LIMIT, test).await {
        Ok(Ok(Ok(rate))) => {
            let reason = format!("KVM runs {:.0} million guest instructions per second", rate / 1e6);
            return Ok(("kvm", reason));
        }
        Ok(Ok(Err(unusable))) => QemuSetupError::NoKvm(unusable),
        Ok(Err(_)) | Err(_) => QemuSetupError::KvmHung(KVM_TEST_LIMIT),
    };
    match (configured, unusable) {
        (Accelerator::Kvm, unusable) => Err(unusable),
        (_, QemuSetupError::NoKvm(unusable)) => Ok(("tcg", unusable.to_string())),
        (_, QemuSetupError::KvmHung(limit)) => {
            Ok(("tcg", format!("the test of KVM did not end within {limit:?}")))
        }
    }
}

/// The version QEMU reports. A QEMU that can't be run is no error yet: each boot will say so.
pub(super) async fn version(program: &Path) -> String {
    let output = tokio::process::Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .output();
    match tokio::time::timeout(VERSION_LIMIT, output).await {
        Ok(Ok(output)) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let line = text.lines().next().unwrap_or_default();
            line.trim_start_matches("QEMU emulator version ").chars().take(100).collect()
        }
        Ok(Err(error)) => format!("unknown: {error}"),
        Err(_) => format!("unknown: no answer within {VERSION_LIMIT:?}"),
    }
}
