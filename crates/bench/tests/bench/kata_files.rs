//! What `make bench-kata` says of a directory that is not what it needs: one line, before anything is built. And what it does when a
//! part of the measurement fails, with doubles for the node VM, its payload and our programs.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use tempfile::TempDir;

const CONFIGURATION: &str = "[hypervisor.qemu]\npath = \"q\"\nkernel = \"k\"\nimage = \"i\"\ndefault_memory = 2048\nvirtio_fs_daemon = \"v\"\n";

/// Returns the exit code and the output on stderr.
fn check(dir: &str) -> (Option<i32>, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/bench-kata.sh");
    let output = Command::new("bash").arg(script).arg("--check").env("KATA_DIR", dir).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    (output.status.code(), stderr)
}

fn refused(dir: &Path, words: &str) {
    let (code, stderr) = check(dir.to_str().unwrap());
    assert!(code == Some(1) && stderr.contains(words), "{code:?}: {stderr}");
}

#[test]
fn what_is_missing_or_of_another_version_is_named_in_one_line() {
    assert!(check("").1.contains("KATA_DIR is not set"));
    let dir = tempfile::tempdir().unwrap();
    refused(&dir.path().join("none"), "is no directory");
    let write = |name: &str, text: &str, mode: u32| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    write("virtiofsd", "x", 0o755);
    write("vmlinux", "\u{7f}ELF", 0o644);
    refused(
        dir.path(),
        "lacks containerd-shim-kata-v2 (the shim), configuration.toml (the shim's configuration, as its build generated it), \
         kata.img or kata.initrd (the guest root)",
    );
    // A shim that hangs when it is asked for its version holds nothing up: its version is just not said.
    write("containerd-shim-kata-v2", "#!/bin/sh\nexec sleep 3600\n", 0o644);
    write("kata.initrd", "x", 0o644);
    write("configuration.toml", "[hypervisor.clh]\n", 0o644);
    refused(dir.path(), "not executable in KATA_DIR");
    write("containerd-shim-kata-v2", "#!/bin/sh\nexec sleep 3600\n", 0o755);
    refused(
        dir.path(),
        "configuration.toml has no table [hypervisor.qemu]: it is of another version or hypervisor",
    );
    write("configuration.toml", &CONFIGURATION.replace("default_memory", "memory_mib"), 0o644);
    refused(dir.path(), "configuration.toml does not set default_memory: it is of another version");
    write("configuration.toml", CONFIGURATION, 0o644);
    write("containerd-shim-kata-v2-rs", "x", 0o755);
    refused(dir.path(), "has a Rust shim and no configuration-rs.toml");
    fs::remove_file(dir.path().join("containerd-shim-kata-v2-rs")).unwrap();
    write("vmlinux", "bzImage", 0o644);
    refused(dir.path(), "vmlinux is no uncompressed kernel");
    write("vmlinux", "\u{7f}ELF", 0o644);
    let (code, stderr) = check(dir.path().to_str().unwrap());
    assert!(code == Some(0) && stderr.contains("has all that is needed"), "{code:?}: {stderr}");
    assert!(stderr.contains("a shim that says no version within 5 s"), "{stderr}");
}

/// A double of `scripts/node.sh`: "measures" by writing results that say nothing. DIES names a run that ends after two parts,
/// FAILS one of whose starts one fails, as with a shim that hangs: that is in the figures.
const NODE_DOUBLE: &str = r#"#!/usr/bin/env bash
while [[ $1 != -- ]]; do [[ $1 != --out ]] || out=$2; echo "$1" >>"$NODE_ARGUMENTS"; shift; done
shift
verb=$2 name=$3 first=$4 parts=$5
echo "the double runs $name"
[[ $verb == startup ]] || { [[ $name != "$DIES" ]] || exit 137; mkdir -p "$out/$name"; echo {} >"$out/$name/report.json"; exit 0; }
for ((n = first; n < first + parts; n++)); do
    [[ $name != "$DIES" || $n -lt 3 ]] || exit 137
    mkdir -p "$out/$name.$n"
done
[[ $name != "$FAILS" ]] || exit 1
"#;

/// A double of `sandboxer-bench`: merges results that say nothing.
const BENCH_DOUBLE: &str = r#"#!/usr/bin/env bash
while [[ $1 != --output ]]; do shift; done
mkdir -p "$2"
echo {} >"$2/report.json"
"#;

/// A double of `sandboxer-cli`: names the results that it reports.
const CLI_DOUBLE: &str = r#"#!/usr/bin/env bash
[[ $1 != report ]] || echo "reported: $*"
"#;

/// A tree with the scripts, the doubles, and files that pass for Kata's.
struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts");
        for name in ["bench-kata.sh", "lib.sh", "node/parts.sh"] {
            tree.write(&format!("scripts/{name}"), &fs::read_to_string(scripts.join(name)).unwrap());
        }
        tree.write("scripts/node.sh", NODE_DOUBLE);
        tree.write("scripts/node/payload.sh", "#!/bin/sh\n");
        tree.write("target/release/sandboxer-cli", CLI_DOUBLE);
        tree.write("target/release/sandboxer-bench", BENCH_DOUBLE);
        tree.write("kata/containerd-shim-kata-v2", "#!/bin/sh\necho version 0.0\n");
        tree.write("kata/virtiofsd", "x");
        tree.write("kata/vmlinux", "\u{7f}ELF");
        tree.write("kata/kata.initrd", "x");
        tree.write("kata/configuration.toml", CONFIGURATION);
        tree
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Measures. Returns the exit code, and all that was said.
    fn measure(&self, dies: &str, fails: &str) -> (Option<i32>, String) {
        let output = Command::new("bash")
            .arg(self.0.path().join("scripts/bench-kata.sh"))
            .env("KATA_DIR", self.0.path().join("kata"))
            .env("NODE_ARGUMENTS", self.0.path().join("arguments"))
            .env("DIES", dies)
            .env("FAILS", fails)
            .output()
            .unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), format!("{out}{err}"))
    }
}

#[test]
fn a_run_that_dies_in_the_middle_is_named_and_the_others_go_on() {
    let tree = Tree::new();
    let (code, stderr) = tree.measure("host", "");
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.contains("host: only 2 of 5 parts were measured; exit code 137; the output is"),
        "{stderr}"
    );
    assert!(stderr.contains("the double runs host"), "its last words are missing: {stderr}");
    let runs = tree.0.path().join("target/bench-kata/runs");
    let reported = stderr.lines().find(|line| line.starts_with("reported:")).unwrap();
    for (part, is_there) in [("serial", true), ("host", false), ("groups", true), ("memory", true)] {
        assert_eq!(reported.contains(&format!("runs/{part}")), is_there, "{reported}");
        assert_eq!(runs.join(part).join("report.json").exists(), is_there, "{part}");
    }
    assert!(stderr.contains("failed, or not whole: host; their output is in"), "{stderr}");
    // The next call measures what is missing.
    let (code, stderr) = tree.measure("", "");
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(stderr.matches("exists already").count(), 3, "{stderr}");
    assert!(runs.join("host/report.json").exists());
}

#[test]
fn a_memory_run_that_dies_is_named_with_its_exit_code() {
    let (code, stderr) = Tree::new().measure("memory", "");
    assert!(code == Some(1) && stderr.contains("memory: exit code 137; the output is"), "{code:?}: {stderr}");
    assert!(stderr.contains("failed, or not whole: memory;"), "{stderr}");
}

#[test]
fn a_start_that_hangs_is_bounded_and_in_the_figures() {
    let tree = Tree::new();
    let (code, stderr) = tree.measure("", "serial");
    assert_eq!(code, Some(0), "{stderr}");
    let arguments = fs::read_to_string(tree.0.path().join("arguments")).unwrap();
    let times = |word: &str| arguments.lines().filter(|line| *line == word).count();
    assert_eq!((times("START_TIMEOUT=120"), times("--stall"), times("--limit")), (4, 4, 4), "{arguments}");
}
