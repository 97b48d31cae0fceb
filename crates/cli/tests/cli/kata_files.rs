//! What `make bench-kata` says of a directory that is not what it needs: one line, before anything is built.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

const CONFIGURATION: &str = "[hypervisor.qemu]\npath = \"q\"\nkernel = \"k\"\nimage = \"i\"\ndefault_memory = 2048\nvirtio_fs_daemon = \"v\"\n";

/// Returns the exit code, and what was said.
fn check(dir: &str) -> (Option<i32>, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/bench-kata.sh");
    let output = Command::new("bash").arg(script).arg("--check").env("KATA_DIR", dir).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    (output.status.code(), said)
}

fn refused(dir: &Path, words: &str) {
    let (code, said) = check(dir.to_str().unwrap());
    assert!(code == Some(1) && said.contains(words), "{code:?}: {said}");
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
    let (code, said) = check(dir.path().to_str().unwrap());
    assert!(code == Some(0) && said.contains("has all that is needed"), "{code:?}: {said}");
}
