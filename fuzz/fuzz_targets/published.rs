//! What others measured: reports, tables of samples, times in a text. What is read and written reads the same.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sandboxer_probe::{report, sample, summarise};

fuzz_target!(|bytes: &[u8]| {
    let _ = sample::read_samples(bytes, Path::new("fuzzed.csv"));
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(times) = summarise::parse(text) {
        let samples = times.samples("fuzzed");
        assert!(!samples.is_empty());
    }
    if let Ok(read) = report::parse(text) {
        let written = report::render(&read);
        let again = report::parse(&written).expect("a report that was written can be read");
        assert_eq!(report::render(&again), written);
    }
});
