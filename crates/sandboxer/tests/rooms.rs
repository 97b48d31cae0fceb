//! The dependencies between crates have one direction: as listed here.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::{collections::BTreeMap, process::Command};

/// Each crate of the workspace with those it may use, lowest first. Tests and benches may use all.
const MAY_USE: [(&str, &[&str]); 19] = [
    ("sandboxer-base", &[]),
    ("sandboxer-bench-helper", &[]),
    ("sandboxer-bpf", &[]),
    ("sandboxer-config", &[]),
    ("sandboxer-netlink", &[]),
    ("sandboxer-protocol", &[]),
    ("sandboxer-process", &["protocol"]),
    ("sandboxer-share", &["protocol"]),
    ("sandboxer-front", &[]),
    ("sandboxer-vmm", &["base", "config", "process", "protocol"]),
    ("sandboxer-vmm-fake", &["process", "protocol", "vmm"]),
    ("sandboxer-guest", &["base", "protocol", "vmm"]),
    ("sandboxer-host", &["base", "bpf", "config", "netlink", "process", "protocol", "share", "vmm"]),
    ("sandboxer-doctor", &["base", "config", "host", "process", "protocol", "vmm"]),
    (
        "sandboxer",
        &["base", "config", "doctor", "front", "guest", "host", "process", "protocol", "share", "vmm"],
    ),
    ("sandboxer-agent", &["base", "bpf", "netlink", "protocol"]),
    ("sandboxer-probe", &["base", "protocol"]),
    ("sandboxer-cli", &["base", "config", "doctor", "probe", "protocol"]),
    ("containerd-shim-sandboxer-v1", &[]),
];

#[test]
fn crates_use_what_is_below_them_and_nothing_else() {
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let may_use: BTreeMap<_, _> = MAY_USE.into_iter().collect();
    let packages = metadata["packages"].as_array().unwrap();
    let ours: Vec<&str> = packages.iter().map(|package| package["name"].as_str().unwrap()).collect();
    for package in packages {
        let name = package["name"].as_str().unwrap();
        if name == "sandboxer-e2e" {
            continue;
        }
        let allowed = may_use.get(name).unwrap_or_else(|| panic!("{name} is not in the list of this test"));
        for dependency in package["dependencies"].as_array().unwrap() {
            let used = dependency["name"].as_str().unwrap();
            if dependency["kind"].is_null() && ours.contains(&used) {
                let short = used.strip_prefix("sandboxer-").unwrap_or(used);
                assert!(allowed.contains(&short), "{name} uses {used}");
            }
        }
    }
}
