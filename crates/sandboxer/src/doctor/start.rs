//! The checks that the daemon depends on, before it promises anything.

use super::{filesystems, host::Host, initramfs, kernel, verdict::Check, verdict::Verdict, vmm};
use crate::config::Config;

/// What keeps pods from running here, one sentence each.
#[derive(Debug, thiserror::Error)]
#[error("pods cannot run here: {}", sentences(.0))]
pub struct Unfit(Vec<Check>);

fn sentences(checks: &[Check]) -> String {
    checks.iter().map(Check::to_string).collect::<Vec<_>>().join(" | ")
}

/// Refuses in the words of `sandboxer-cli check`; what that only warns of goes to the log.
pub async fn fit(config: &Config) -> Result<(), Unfit> {
    let host = Host::default();
    let (qemu, mkfs) =
        tokio::join!(vmm::read(&config.vm.qemu), filesystems::read_mkfs(&config.rootfs.mkfs_erofs));
    let checks = [
        vmm::qemu(&qemu),
        kernel::judge(&kernel::read_headers(&config.vm.kernel)),
        initramfs::judge(&initramfs::read(&config.vm.initramfs)),
        filesystems::mkfs(&mkfs),
        filesystems::overlay(filesystems::filesystem(&host, "overlay")),
    ];
    for check in checks.iter().filter(|check| check.verdict == Verdict::Warning) {
        tracing::warn!("{check}");
    }
    let unfit: Vec<_> = checks.into_iter().filter(|check| check.verdict == Verdict::Failure).collect();
    if unfit.is_empty() { Ok(()) } else { Err(Unfit(unfit)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn everything_that_is_missing_is_named_at_once() {
        let mut config = Config::default();
        config.vm.qemu = "/nonexistent/qemu".into();
        config.vm.kernel = "/nonexistent/vmlinux".into();
        config.vm.initramfs = "/nonexistent/initramfs".into();
        config.rootfs.mkfs_erofs = "/nonexistent/mkfs.erofs".into();
        let refusal = fit(&config).await.unwrap_err().to_string();
        for named in [
            "qemu: there is no \"/nonexistent/qemu\"; install it, or set vm.qemu",
            "guest kernel: cannot read \"/nonexistent/vmlinux\"",
            "initramfs: cannot read \"/nonexistent/initramfs\"",
            "mkfs.erofs: there is no \"/nonexistent/mkfs.erofs\"",
        ] {
            assert!(refusal.contains(named), "{named}: {refusal}");
        }
    }
}
