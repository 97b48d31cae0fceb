//! Private functions for the targets in `fuzz/`, compiled only for them.

#![allow(missing_docs, reason = "each is documented where it is")]

pub fn qmp_message(line: &str) -> bool {
    crate::qmp::is_message(line)
}

pub fn vmm_event(text: &str) -> bool {
    serde_json::from_str::<crate::cloud_hypervisor::events::Event>(text).is_ok()
}

/// Splits a stream of QEMU for a VM of 1 MiB. Returns the guest's memory, the rest of the stream, and the bytes of pages.
pub fn split_ram(stream: &[u8]) -> std::io::Result<(std::fs::File, Vec<u8>, u64)> {
    let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC)?.into();
    let mut state = Vec::new();
    let stored = crate::qemu::ram::split(stream, &mut state, &memory, 1 << 20)?;
    Ok((memory, state, stored))
}
