//! Private functions for the targets in `fuzz/`, compiled only for them.

#![allow(missing_docs, reason = "each is documented where it is")]

pub fn qmp_message(line: &str) -> bool {
    crate::qmp::is_message(line)
}

pub fn vmm_event(text: &str) -> bool {
    serde_json::from_str::<crate::cloud_hypervisor::events::Event>(text).is_ok()
}
