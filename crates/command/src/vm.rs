//! Configuration of VMs of the series `vm`.

use std::path::{Path, PathBuf};

use sandboxer_doctor::{KvmUnusable, measure_kvm};
use sandboxer_probe::vm::{Accelerator, Vm};

/// The device that QEMU opens for `-accel kvm`.
const KVM: &str = "/dev/kvm";

/// Returns the configuration of VMs with this root disk. They use KVM if it is usable, which is measured here.
pub fn with_disk(disk: Option<&PathBuf>, address: Option<String>) -> Option<Vm> {
    disk.map(|disk| Vm::new(disk, accelerator(measure_kvm(Path::new(KVM))), address))
}

fn accelerator(measured: Result<f64, KvmUnusable>) -> Accelerator {
    match measured {
        Ok(rate) => Accelerator {
            kvm: true,
            reason: format!("KVM runs {:.1} million guest instructions per second", rate / 1e6),
        },
        // VMs of this series run as this command's user, not in a jail.
        Err(error @ KvmUnusable::Closed { .. }) => Accelerator { kvm: true, reason: error.to_string() },
        Err(error) => Accelerator { kvm: false, reason: sandboxer_base::chain(&error) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_for_the_accelerator_is_kept() {
        assert!(accelerator(Ok(2e7)).kvm);
        assert!(accelerator(Err(KvmUnusable::Closed { path: KVM.into(), mode: 0o600, group: 0 })).kvm);
        let slow = accelerator(Err(KvmUnusable::Slow { rate: 3e5 }));
        assert!(!slow.kvm && slow.reason.contains("0.3 million"), "{slow:?}");
        assert!(with_disk(None, None).is_none());
    }
}
