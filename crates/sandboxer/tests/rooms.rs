//! The dependencies between crates, and between the modules of the daemon, have one direction: as listed here.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Each crate of the workspace with those it may use, lowest first. Tests and benches may use all.
const MAY_USE: [(&str, &[&str]); 21] = [
    ("sandboxer-base", &[]),
    ("sandboxer-bench-helper", &[]),
    ("sandboxer-bpf", &[]),
    ("sandboxer-config", &["base"]),
    ("sandboxer-netlink", &[]),
    ("sandboxer-protocol", &[]),
    ("sandboxer-process", &["base", "protocol"]),
    ("sandboxer-share", &["protocol"]),
    ("sandboxer-front", &["base"]),
    ("sandboxer-vmm", &["base", "config", "process", "protocol"]),
    ("sandboxer-vmm-fake", &["base", "process", "protocol", "vmm"]),
    ("sandboxer-guest", &["base", "protocol", "vmm"]),
    ("sandboxer-host", &["base", "bpf", "config", "netlink", "process", "protocol", "share", "vmm"]),
    ("sandboxer-doctor", &["base", "config", "host", "process", "protocol", "vmm"]),
    (
        "sandboxer",
        &["base", "config", "doctor", "front", "guest", "host", "process", "protocol", "share", "vmm"],
    ),
    ("sandboxer-agent", &["base", "bpf", "netlink", "protocol"]),
    ("sandboxer-probe", &["base", "protocol"]),
    ("sandboxer-command", &["base", "doctor", "probe"]),
    ("sandboxer-bench", &["base", "command", "probe", "protocol"]),
    ("sandboxer-cli", &["base", "command", "config", "doctor", "probe", "process", "protocol"]),
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

/// The modules of this crate, lowest first. Each may use those before it.
const MODULES: [&str; 14] = [
    "traces",
    "containerd",
    "events",
    "front",
    "heap",
    "share",
    "state",
    "error",
    "taps",
    "template",
    "checkpoint",
    "pod",
    "api",
    "daemon",
];

#[test]
fn modules_of_the_daemon_use_what_is_below_them_and_nothing_else() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for (level, module) in MODULES.iter().enumerate() {
        let mut files = vec![];
        for path in [sources.join(format!("{module}.rs")), sources.join(module)] {
            sources_of(&path, &mut files);
        }
        assert!(!files.is_empty(), "there is no module {module}");
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            // Tests may use all.
            let text = text.split("#[cfg(test)]").next().unwrap();
            for used in modules_used(text) {
                let allowed = MODULES[..=level].contains(&used) || !MODULES.contains(&used);
                assert!(allowed, "{} uses {used}", file.display());
            }
        }
    }
}

/// Finds the source files at `path`: a file, or a directory with all that is below it. Adds nothing for other paths.
fn sources_of(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_file() {
        found.push(path.to_owned());
    }
    for entry in fs::read_dir(path).into_iter().flatten() {
        sources_of(&entry.unwrap().path(), found);
    }
}

/// Returns the modules that `text` names: `crate::NAME`, or the names within `crate::{…}`.
fn modules_used(text: &str) -> Vec<&str> {
    let mut used = vec![];
    for rest in text.split("crate::").skip(1) {
        let Some(group) = rest.strip_prefix('{') else {
            used.push(first_name(rest));
            continue;
        };
        let (mut depth, mut start) = (0_usize, 0);
        for (at, letter) in group.char_indices() {
            match letter {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    used.push(first_name(&group[start..at]));
                    start = at + 1;
                }
                _ => {}
            }
        }
        used.push(first_name(&group[start..]));
    }
    used.retain(|name| !name.is_empty());
    used
}

/// Returns the name at the beginning of `text`.
fn first_name(text: &str) -> &str {
    let text = text.trim_start();
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap_or_default()
}

#[test]
fn names_within_braces_are_found() {
    let text = "use crate::{\n    error::PodError,\n    pod::{self, container::{A, B}},\n    state,\n};\nuse crate::events::Kind;";
    assert_eq!(modules_used(text), ["error", "pod", "state", "events"]);
}
