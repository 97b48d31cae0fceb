//! A checkpoint that was exported somewhere: its manifest, a zero byte, and the pages of its files.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sandboxer::fuzzing::archive;

fuzz_target!(|bytes: &[u8]| {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    let (manifest, pages) = (&bytes[..end], bytes.get(end + 1..).unwrap_or_default());
    for (name, [length, said]) in archive(manifest, pages).unwrap_or_default() {
        assert_eq!(Path::new(&name).components().count(), 1, "{name:?}");
        assert!(name != "checkpoint.json" && !name.starts_with('.'), "{name:?}");
        assert_eq!(length, said, "{name:?}");
    }
});
