//! The stream to which QEMU writes a running VM, of which the daemon takes the guest's memory. A guest may have broken into its QEMU.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandboxer_vmm::fuzzing::split_ram;

fuzz_target!(|stream: &[u8]| {
    let Ok((memory, state, stored)) = split_ram(stream) else { return };
    let length = memory.metadata().map(|meta| meta.len()).unwrap_or_default();
    assert!(length == 1 << 20 && stored <= length, "{stored} of {length} bytes");
    // Two names of blocks may become longer by nothing, all else shorter.
    assert!(state.len() <= stream.len());
    // What is left is the stream of a VM whose memory is elsewhere.
    let (_, again, stored) = split_ram(&state).expect("what is left is no stream");
    assert!(again == state && stored == 0);
});
