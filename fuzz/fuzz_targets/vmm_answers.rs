//! What VMMs say: QEMU's lines, Cloud Hypervisor's events and answers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandboxer_vmm::fuzzing::{qmp_message, vmm_event};
use sandboxer_vmm::cloud_hypervisor::{api, wire::{PciDevice, Ping, VmInfo}};

fuzz_target!(|bytes: &[u8]| {
    let reason = api::reason(bytes);
    assert!(!reason.contains(char::is_control) && reason.chars().count() < 1000);
    let _ = serde_json::from_slice::<Ping>(bytes);
    let _ = serde_json::from_slice::<VmInfo>(bytes);
    let _ = serde_json::from_slice::<PciDevice>(bytes);
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    qmp_message(text);
    vmm_event(text);
});
