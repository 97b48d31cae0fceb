//! Mounts of a snapshot: one a line, its parts between tabs. Every path that comes of them is absolute and climbs
//! nowhere.
#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use sandboxer_host::fuzzing::{rootfs_mounts, Lower, WantedWritable};
use sandboxer_host::rootfs::Mount;

fn is_plain(path: &Path) -> bool {
    path.is_absolute() && path.components().all(|part| part != Component::ParentDir)
}

fuzz_target!(|text: &str| {
    let mounts: Vec<Mount> = text
        .lines()
        .map(|line| {
            let mut parts = line.split('\t').map(str::to_owned);
            let mut next = || parts.next().unwrap_or_default();
            Mount { fstype: next(), source: next(), options: parts.collect() }
        })
        .collect();
    let Ok(wanted) = rootfs_mounts(&mounts) else { return };
    for lower in &wanted.lower {
        match lower {
            Lower::Directory(path) | Lower::Upper(path) | Lower::Image { path, .. } => {
                assert!(is_plain(path))
            }
            Lower::Chain(chain) => assert!(chain.dirs.iter().all(|dir| is_plain(dir))),
        }
    }
    match &wanted.writable {
        WantedWritable::Memory => {}
        WantedWritable::Whole { path } => assert!(is_plain(path)),
        WantedWritable::Scratch { path, size } => assert!(is_plain(path) && *size > 0),
    }
});
