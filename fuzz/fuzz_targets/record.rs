//! A pod's record in the journal. One that is taken is written as it was read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandboxer::fuzzing::record;

fuzz_target!(|text: &[u8]| {
    let Ok(read) = record(text) else { return };
    let written = serde_json::to_vec(&read).expect("a record is JSON");
    let again = record(&written).expect("what was written can be read");
    assert_eq!(serde_json::to_vec(&again).expect("a record is JSON"), written);
});
