//! KVM, measured by running a guest on it.

use std::{io, path::Path};

use sandboxer_base::chain;
use sandboxer_config::{Accelerator, VmmChoice};
use sandboxer_vmm::{
    cloud_hypervisor, firecracker,
    kvm::{self, KvmUnusable},
};

use super::{
    PATIENCE, blocking,
    verdict::{Check, Fix, Subject},
};

const KVM: Subject =
    Subject { name: "kvm", why: "without it guests are emulated, which is several times slower" };

/// The result of the measurement.
#[derive(Debug)]
pub enum Reading {
    /// KVM is usable and executes this many guest instructions per second.
    Usable(f64),
    /// KVM is missing or unusable.
    Unusable(KvmUnusable),
    /// The measurement did not end in time.
    Silent,
}

impl Reading {
    /// Returns whether pods use KVM: it is fast, or it is configured and correct.
    pub fn is_used(&self, configured: Accelerator) -> bool {
        match self {
            Reading::Usable(_) => configured != Accelerator::Tcg,
            Reading::Unusable(KvmUnusable::Slow { .. }) => configured == Accelerator::Kvm,
            Reading::Unusable(_) | Reading::Silent => false,
        }
    }
}

/// Runs the test guest.
pub async fn read(device: &Path) -> Reading {
    let device = device.to_owned();
    match blocking(PATIENCE, move || kvm::measure(&device)).await {
        Some(Ok(rate)) => Reading::Usable(rate),
        Some(Err(unusable)) => Reading::Unusable(unusable),
        None => Reading::Silent,
    }
}

/// Checks the result against the configuration.
pub fn judge(vmm: VmmChoice, configured: Accelerator, reading: &Reading) -> Check {
    let (seen, fix) = match reading {
        Reading::Usable(rate) => {
            return KVM.ok(format!("runs {:.0} million guest instructions per second", rate / 1e6));
        }
        Reading::Unusable(unusable) => (chain(unusable), fix(unusable)),
        Reading::Silent => (format!("the KVM test did not end within {PATIENCE:?}"), nested()),
    };
    let needs_kvm = match vmm {
        VmmChoice::CloudHypervisor => Some(cloud_hypervisor::NAME),
        VmmChoice::Firecracker => Some(firecracker::NAME),
        VmmChoice::Auto | VmmChoice::Qemu => None,
    };
    let is_required = needs_kvm.is_some() || configured == Accelerator::Kvm;
    if let (true, Reading::Unusable(KvmUnusable::Slow { .. })) = (is_required, reading) {
        return KVM.warning(format!("{seen}; it is used because the configuration requires it"), fix);
    }
    let or_set = |fix: Fix, key: &str| Fix { what: format!("{}, or set {key} to \"auto\"", fix.what), ..fix };
    if let Some(vmm) = needs_kvm {
        return KVM.failure(format!("the configuration names \"{vmm}\"; {seen}"), or_set(fix, "vm.vmm"));
    }
    match configured {
        Accelerator::Tcg => KVM.not_applicable(format!("vm.accelerator is \"tcg\"; {seen}")),
        Accelerator::Auto => KVM.warning(seen, fix),
        Accelerator::Kvm => KVM.failure(seen, or_set(fix, "vm.accelerator")),
    }
}

fn fix(unusable: &KvmUnusable) -> Fix {
    if let KvmUnusable::Closed { .. } = unusable {
        return Fix::commands(
            "give a group access to it, as udev does",
            ["groupadd --force --system kvm", "chgrp kvm /dev/kvm", "chmod 0660 /dev/kvm"],
        );
    }
    let KvmUnusable::Open { source, .. } = unusable else { return nested() };
    match source.kind() {
        io::ErrorKind::PermissionDenied => Fix::words("run this as root"),
        _ => Fix::commands(
            "load the KVM module; if that fails, enable virtualization in the firmware",
            ["modprobe kvm_intel || modprobe kvm_amd"],
        ),
    }
}

fn nested() -> Fix {
    Fix::words("use a bare-metal host, or enable nested virtualization on the host of this VM")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    #[test]
    fn the_configuration_decides_how_bad_a_useless_kvm_is() {
        let slow = || Reading::Unusable(KvmUnusable::Slow { rate: 0.5e6 });
        let faulty = || Reading::Unusable(KvmUnusable::Fault { rate: 0.5e6, exit: "InternalError".into() });
        for (configured, reading, verdict) in [
            (Accelerator::Auto, Reading::Usable(4e7), Verdict::Ok),
            (Accelerator::Kvm, Reading::Usable(4e7), Verdict::Ok),
            (Accelerator::Tcg, Reading::Usable(4e7), Verdict::Ok),
            (Accelerator::Auto, slow(), Verdict::Warning),
            (Accelerator::Kvm, slow(), Verdict::Warning),
            (Accelerator::Kvm, faulty(), Verdict::Failure),
            (Accelerator::Auto, faulty(), Verdict::Warning),
            (Accelerator::Tcg, slow(), Verdict::NotApplicable),
            (Accelerator::Auto, Reading::Silent, Verdict::Warning),
            (Accelerator::Kvm, Reading::Silent, Verdict::Failure),
        ] {
            let check = judge(VmmChoice::Auto, configured, &reading);
            assert_eq!(check.verdict, verdict, "{configured:?} {reading:?}");
        }
        let slow = judge(VmmChoice::Auto, Accelerator::Auto, &slow());
        assert!(slow.seen.contains("0.5 million guest instructions"), "{slow}");
        assert!(!slow.seen.contains("interprets"), "{slow}");
        let named = Reading::Unusable(KvmUnusable::Slow { rate: 0.5e6 });
        let named = judge(VmmChoice::CloudHypervisor, Accelerator::Auto, &named);
        assert_eq!(named.verdict, Verdict::Warning);
        assert!(named.seen.ends_with("it is used because the configuration requires it"), "{named}");
        let silent = judge(VmmChoice::CloudHypervisor, Accelerator::Auto, &Reading::Silent);
        assert_eq!(silent.verdict, Verdict::Failure);
        assert!(silent.to_string().ends_with("or set vm.vmm to \"auto\""), "{silent}");
    }

    #[test]
    fn what_to_do_fits_what_is_wrong() {
        let open = |kind: io::ErrorKind| {
            let unusable = KvmUnusable::Open { path: "/dev/kvm".into(), source: kind.into() };
            judge(VmmChoice::Auto, Accelerator::Auto, &Reading::Unusable(unusable)).fix.unwrap()
        };
        assert!(open(io::ErrorKind::NotFound).commands[0].contains("modprobe"));
        assert_eq!(open(io::ErrorKind::PermissionDenied).what, "run this as root");
        let closed = KvmUnusable::Closed { path: "/dev/kvm".into(), mode: 0o600, group: 0 };
        let closed = judge(VmmChoice::Auto, Accelerator::Kvm, &Reading::Unusable(closed));
        assert_eq!(closed.verdict, Verdict::Failure);
        assert!(closed.fix.unwrap().commands.contains(&"chgrp kvm /dev/kvm".to_owned()));
        let required = judge(VmmChoice::Auto, Accelerator::Kvm, &Reading::Silent).fix.unwrap();
        assert!(required.what.ends_with("or set vm.accelerator to \"auto\""), "{required:?}");
    }

    #[tokio::test]
    async fn a_device_that_is_none_is_unusable() {
        assert!(matches!(
            read(Path::new("/nonexistent/kvm")).await,
            Reading::Unusable(KvmUnusable::Open { .. })
        ));
    }
}
