//! Whether the VMMs of the pods can resize a running VM as configured.

use std::collections::BTreeSet;

use sandboxer_config::{Config, VmConfig, VmmName};
use sandboxer_vmm::{cloud_hypervisor, firecracker};

use super::verdict::{Check, Fix, Subject};

/// The value of `VmmInfo::name`.
const QEMU: &str = "qemu";

const HOTPLUG: Subject =
    Subject { name: "hotplug", why: "a VM's size follows the limits of its running pod" };

/// Returns the names of the VMMs that run pods: the default VMM and those of runtime handlers.
pub fn used(config: &Config, default: Option<&'static str>) -> BTreeSet<&'static str> {
    let default = match default {
        Some("Firecracker") => firecracker::NAME,
        Some(_) => cloud_hypervisor::NAME,
        None => QEMU,
    };
    let name_of = |vmm: VmmName| match vmm {
        VmmName::Qemu => QEMU,
        VmmName::CloudHypervisor => cloud_hypervisor::NAME,
        VmmName::Firecracker => firecracker::NAME,
    };
    config.handlers.values().filter_map(|handler| handler.vmm).map(name_of).chain([default]).collect()
}

/// Checks the keys for hotplug against the VMMs that run pods.
pub fn judge(config: &VmConfig, used: &BTreeSet<&'static str>) -> Check {
    let (mib, vcpus) = (config.hotplug_memory_mib, config.hotplug_vcpus);
    if mib == 0 && vcpus == 0 {
        return HOTPLUG
            .not_applicable("vm.hotplug_memory_mib and vm.hotplug_vcpus are 0: VMs keep their size");
    }
    let mut without = Vec::new();
    for vmm in used {
        if mib > 0 && *vmm == QEMU {
            without.push(format!("vm.hotplug_memory_mib has no effect on VMs of {vmm}"));
        }
        if vcpus > 0 && *vmm != cloud_hypervisor::NAME {
            without.push(format!("vm.hotplug_vcpus has no effect on VMs of {vmm}"));
        }
    }
    if vcpus > 0 && config.max_vcpus <= 1 {
        without.push("vm.hotplug_vcpus has no effect: vm.max_vcpus is 1".to_owned());
    }
    if without.is_empty() {
        return HOTPLUG.ok(format!("VMs can get {mib} MiB and {vcpus} vCPUs beside those of their start"));
    }
    let fix = "set these keys to 0, or run the pods in a VMM that has it: Cloud Hypervisor can change memory and vCPUs, Firecracker memory";
    HOTPLUG.warning(without.join("; "), Fix::words(fix))
}

#[cfg(test)]
mod tests {
    use sandboxer_config::Handler;

    use super::*;
    use crate::Verdict;

    #[test]
    fn a_key_without_effect_is_named_with_its_vmm() {
        let config = |hotplug_memory_mib, hotplug_vcpus| VmConfig {
            hotplug_memory_mib,
            hotplug_vcpus,
            max_vcpus: 8,
            ..Config::default().vm
        };
        let seen = |mib, vcpus, vmms: &[&'static str]| {
            let check = judge(&config(mib, vcpus), &vmms.iter().copied().collect());
            (check.verdict, check.seen)
        };
        assert_eq!(seen(0, 0, &["qemu"]).0, Verdict::NotApplicable);
        assert_eq!(seen(128, 2, &["cloud-hypervisor"]).0, Verdict::Ok);
        assert_eq!(seen(128, 0, &["cloud-hypervisor", "firecracker"]).0, Verdict::Ok);
        let both = "vm.hotplug_memory_mib has no effect on VMs of qemu; vm.hotplug_vcpus has no effect on VMs of qemu";
        assert_eq!(seen(128, 1, &["qemu", "cloud-hypervisor"]), (Verdict::Warning, both.to_owned()));
        let one = "vm.hotplug_vcpus has no effect on VMs of firecracker";
        assert_eq!(seen(128, 1, &["firecracker"]), (Verdict::Warning, one.to_owned()));
        let few = judge(&VmConfig { max_vcpus: 1, ..config(0, 1) }, &["cloud-hypervisor"].into());
        assert!(few.seen.contains("vm.max_vcpus is 1"), "{few}");
    }

    #[test]
    fn handlers_name_further_vmms() {
        let mut config = Config::default();
        assert_eq!(used(&config, None), ["qemu"].into());
        assert_eq!(used(&config, Some("Cloud Hypervisor")), ["cloud-hypervisor"].into());
        let handler = Handler { vmm: Some(VmmName::Firecracker), ..Handler::default() };
        config.handlers.insert("fc".into(), handler);
        assert_eq!(used(&config, Some("Firecracker")), ["firecracker"].into());
        assert_eq!(used(&config, None), ["firecracker", "qemu"].into());
    }
}
