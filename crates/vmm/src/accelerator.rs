//! The choice between KVM and emulation.

use std::{path::Path, time::Duration};

use sandboxer_config::Accelerator;

use super::kvm::{self, KvmUnusable};

/// Time limit of the KVM test, which takes 0.15 s on an idle host. A KVM that takes longer is not usable.
const KVM_TEST_LIMIT: Duration = Duration::from_secs(5);

/// The reason why guests cannot run as configured.
#[derive(Debug, thiserror::Error)]
pub enum AcceleratorError {
    /// The configuration requires KVM, which is not usable.
    #[error(
        "accelerator \"kvm\" is configured but does not work on this host: set it to \"auto\" or \"tcg\""
    )]
    NoKvm(#[source] KvmUnusable),
    /// The KVM test did not end.
    #[error(
        "accelerator \"kvm\" is configured but its test did not end within {0:?}: set it to \"auto\" or \"tcg\""
    )]
    KvmHung(Duration),
}

/// Returns the accelerator, and the reason for the choice.
pub async fn choose(configured: Accelerator) -> Result<(&'static str, String), AcceleratorError> {
    if configured == Accelerator::Tcg {
        return Ok(("tcg", "configured".into()));
    }
    let test = tokio::task::spawn_blocking(|| kvm::measure(Path::new("/dev/kvm")));
    let unusable = match tokio::time::timeout(KVM_TEST_LIMIT, test).await {
        Ok(Ok(Ok(rate))) => {
            let reason = format!("KVM runs {:.0} million guest instructions per second", rate / 1e6);
            return Ok(("kvm", reason));
        }
        Ok(Ok(Err(unusable))) => AcceleratorError::NoKvm(unusable),
        Ok(Err(_)) | Err(_) => AcceleratorError::KvmHung(KVM_TEST_LIMIT),
    };
    decide(configured, unusable)
}

/// Decides about a KVM that failed its test. One that is only too slow is used if the configuration names it.
fn decide(
    configured: Accelerator,
    unusable: AcceleratorError,
) -> Result<(&'static str, String), AcceleratorError> {
    match (configured, unusable) {
        (Accelerator::Kvm, AcceleratorError::NoKvm(slow @ KvmUnusable::Slow { .. })) => {
            tracing::warn!("{slow}; it is used because the configuration requires it");
            Ok(("kvm", format!("configured; {slow}")))
        }
        (Accelerator::Kvm, unusable) => Err(unusable),
        (_, AcceleratorError::NoKvm(unusable)) => Ok(("tcg", unusable.to_string())),
        (_, AcceleratorError::KvmHung(limit)) => {
            Ok(("tcg", format!("the test of KVM did not end within {limit:?}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kvm_that_is_slow_and_right_is_used_by_whoever_asks_for_it() {
        let slow = || AcceleratorError::NoKvm(KvmUnusable::Slow { rate: 1.6e6 });
        let (accelerator, reason) = decide(Accelerator::Kvm, slow()).unwrap();
        assert_eq!(accelerator, "kvm");
        assert!(reason.contains("1.6 million") && !reason.contains("interprets"), "{reason}");
        assert_eq!(decide(Accelerator::Auto, slow()).unwrap().0, "tcg");

        let wrong =
            || AcceleratorError::NoKvm(KvmUnusable::Fault { rate: 3e5, exit: "InternalError".into() });
        assert!(matches!(decide(Accelerator::Kvm, wrong()), Err(AcceleratorError::NoKvm(_))));
        assert_eq!(decide(Accelerator::Auto, wrong()).unwrap().0, "tcg");
        let hung = || AcceleratorError::KvmHung(KVM_TEST_LIMIT);
        assert!(matches!(decide(Accelerator::Kvm, hung()), Err(AcceleratorError::KvmHung(_))));
        assert_eq!(decide(Accelerator::Auto, hung()).unwrap().0, "tcg");
    }
}
