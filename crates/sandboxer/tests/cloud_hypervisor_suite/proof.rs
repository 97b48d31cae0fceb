//! Proof of the suite: a VMM that differs from the published API in one field or one status fails a case.

use anyhow::{Result, ensure};
use libtest_mimic::{Failed, Trial};

use super::{CloudHypervisor, cases::cases};
use crate::{double::behaviour::Behaviour, vmm_suite::run};

/// Type, field, and the field's name in a double.
const RENAMED: [(&str, &str, &str); 15] = [
    ("VmConfig", "payload", "payloads"),
    ("VmConfig", "landlock_rules", "landlock"),
    ("PayloadConfig", "cmdline", "command_line"),
    ("CpusConfig", "boot_vcpus", "vcpus"),
    ("MemoryConfig", "size", "bytes"),
    ("VsockConfig", "socket", "path"),
    ("ConsoleConfig", "mode", "kind"),
    ("DiskConfig", "readonly", "read_only"),
    ("NetConfig", "mac", "address"),
    ("VmRemoveDevice", "id", "device"),
    ("VmResize", "desired_vcpus", "vcpus"),
    ("RestoreConfig", "source_url", "url"),
    ("VmSnapshotConfig", "destination_url", "url"),
    ("VmInfo", "state", "status"),
    ("PciDeviceInfo", "bdf", "address"),
];

/// Call, and a double's answer in place of the described one.
const STATUSES: [(&str, u16); 10] = [
    ("vmm.ping", 204),
    ("vm.create", 200),
    ("vm.boot", 202),
    ("vm.info", 404),
    ("vm.pause", 200),
    ("vm.snapshot", 405),
    ("vm.restore", 500),
    ("vm.resize", 429),
    ("vm.add-disk", 204),
    ("vm.remove-device", 200),
];

pub fn trials() -> Vec<Trial> {
    let double = || Behaviour::for_version("v53.0");
    let renamed = RENAMED.into_iter().map(|(kind, field, to)| {
        (format!("{kind}.{field} is called {to}"), double().with_renamed(kind, field, to))
    });
    let statuses = STATUSES.into_iter().map(|(call, status)| {
        (format!("{call} is answered with {status}"), double().with_status(call, status))
    });
    renamed
        .chain(statuses)
        .map(|(what, behaviour)| {
            Trial::test(format!("suite::finds that {what}"), move || {
                fails(behaviour).map_err(|error| Failed::from(format!("{error:?}")))
            })
        })
        .collect()
}

/// Asserts that some case fails on such a double.
fn fails(behaviour: Behaviour) -> Result<()> {
    let failed = cases().find(|(_, case)| run(case(CloudHypervisor::Double(behaviour.clone()))).is_err());
    ensure!(failed.is_some(), "every case passes on {behaviour:?}");
    Ok(())
}
