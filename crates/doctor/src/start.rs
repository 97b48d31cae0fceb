//! The checks at the daemon's start.

use sandboxer_config::{Config, VmmChoice};
use sandboxer_vmm::{VmmInfo, cloud_hypervisor, firecracker, qemu};

use super::{
    filesystems, host::Host, hotplug, initramfs, kernel, namespaces, verdict::Check, verdict::Verdict, vmm,
};

/// The reasons why pods cannot run here, one sentence per failed check.
#[derive(Debug, thiserror::Error)]
#[error("pods cannot run here: {}", sentences(.0))]
pub struct Unfit(Vec<Check>);

fn sentences(checks: &[Check]) -> String {
    checks.iter().map(Check::to_string).collect::<Vec<_>>().join(" | ")
}

/// Runs the checks for `chosen`, the VMMs of the pods. Returns failures in the words of `sandboxer-cli check` and logs
/// warnings.
pub async fn fit(config: &Config, chosen: &[VmmInfo]) -> Result<(), Unfit> {
    let host = Host::default();
    let vmms = async {
        let mut checks = Vec::new();
        for vmm in chosen {
            checks.push(there(config, vmm).await);
        }
        checks
    };
    let (vmms, mkfs) = tokio::join!(vmms, filesystems::read_mkfs(&config.rootfs.mkfs_erofs));
    let unlike_cloud_hypervisor = chosen.iter().any(|vmm| vmm.name != cloud_hypervisor::NAME);
    let used = chosen.iter().map(|vmm| vmm.name).collect();
    let others = [
        hotplug::judge(&config.vm, &used),
        kernel::judge(&kernel::read_headers(&config.vm.kernel)),
        initramfs::judge(&initramfs::read(&config.vm.initramfs)),
        filesystems::mkfs(&mkfs),
        filesystems::overlay(filesystems::filesystem(&host, "overlay")),
        namespaces::judge(namespaces::read().as_ref(), config.vm.jail && unlike_cloud_hypervisor),
    ];
    let checks: Vec<Check> = vmms.into_iter().chain(others).collect();
    for check in checks.iter().filter(|check| check.verdict == Verdict::Warning) {
        tracing::warn!("{check}");
    }
    let unfit: Vec<_> = checks.into_iter().filter(|check| check.verdict == Verdict::Failure).collect();
    if unfit.is_empty() { Ok(()) } else { Err(Unfit(unfit)) }
}

/// Checks the program of a VMM.
async fn there(config: &Config, vmm: &VmmInfo) -> Check {
    match vmm.name {
        cloud_hypervisor::NAME => {
            let reading = vmm::read(&config.vm.cloud_hypervisor).await;
            vmm::cloud_hypervisor(VmmChoice::CloudHypervisor, &reading)
        }
        firecracker::NAME => {
            vmm::firecracker(VmmChoice::Firecracker, &vmm::read(&config.vm.firecracker).await)
        }
        _ => vmm::qemu(&vmm::read(&qemu::program(&config.vm, vmm.accelerator)).await, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(name: &'static str) -> VmmInfo {
        VmmInfo { name, version: String::new(), accelerator: "kvm", accelerator_reason: String::new() }
    }

    #[tokio::test]
    async fn only_the_vmm_that_was_chosen_has_to_be_there() {
        let mut config = Config::default();
        config.vm.qemu = Some("/nonexistent/qemu".into());
        config.vm.cloud_hypervisor = "/nonexistent/ch".into();
        config.vm.firecracker = "/nonexistent/fc".into();
        for (name, named, other) in [
            ("qemu", "qemu: \"/nonexistent/qemu\" does not exist", "/nonexistent/ch"),
            ("cloud-hypervisor", "cloud-hypervisor: \"/nonexistent/ch\" does not exist", "/nonexistent/qemu"),
            ("firecracker", "firecracker: \"/nonexistent/fc\" does not exist", "/nonexistent/qemu"),
        ] {
            let refusal = fit(&config, &[chosen(name)]).await.unwrap_err().to_string();
            assert!(refusal.contains(named) && !refusal.contains(other), "{refusal}");
        }
        // Each VMM that a handler names is checked, too.
        let refusal = fit(&config, &[chosen("qemu"), chosen("firecracker")]).await.unwrap_err().to_string();
        assert!(refusal.contains("/nonexistent/qemu") && refusal.contains("/nonexistent/fc"), "{refusal}");
        assert!(!refusal.contains("/nonexistent/ch"), "{refusal}");
    }

    #[tokio::test]
    async fn everything_that_is_missing_is_named_at_once() {
        let mut config = Config::default();
        config.vm.qemu = Some("/nonexistent/qemu".into());
        config.vm.kernel = "/nonexistent/vmlinux".into();
        config.vm.initramfs = "/nonexistent/initramfs".into();
        config.rootfs.mkfs_erofs = "/nonexistent/mkfs.erofs".into();
        let refusal = fit(&config, &[chosen("qemu")]).await.unwrap_err().to_string();
        for named in [
            "qemu: \"/nonexistent/qemu\" does not exist; install it, or set vm.qemu",
            "guest kernel: cannot read \"/nonexistent/vmlinux\"",
            "initramfs: cannot read \"/nonexistent/initramfs\"",
            "mkfs.erofs: \"/nonexistent/mkfs.erofs\" does not exist",
        ] {
            assert!(refusal.contains(named), "{named}: {refusal}");
        }
    }
}
