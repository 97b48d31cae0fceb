//! `bench-helper native` on this host, with the host's own root as the image. Needs root.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Runs a command in a directory `group` that stands for a control group: a double with the files of one.
fn native(group: &Path, more: &[&str], words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bench-helper"))
        .args(["native", "--root=/"])
        .arg(format!("--cgroup={}", group.display()))
        .args(more)
        .arg("--")
        .args(words)
        .output()
        .unwrap()
}

fn double_group() -> tempfile::TempDir {
    let group = tempfile::tempdir().unwrap();
    fs::write(group.path().join("cgroup.procs"), "").unwrap();
    fs::write(group.path().join("cpu.max"), "150000 100000\n").unwrap();
    fs::write(group.path().join("memory.max"), "268435456\n").unwrap();
    group
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn it_joins_its_group_and_sees_the_limits_where_containers_do() {
    let group = double_group();
    let limits = ["cat", "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/memory.max"];
    assert_eq!(stdout(&native(group.path(), &[], &limits)), "150000 100000\n268435456\n");
    assert_eq!(fs::read_to_string(group.path().join("cgroup.procs")).unwrap(), "0");
}

#[test]
fn its_files_are_there_and_its_mounts_end_with_it() {
    let (group, from, to) = (double_group(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(from.path().join("file"), "text").unwrap();
    let bind = format!("--bind={}={}", from.path().display(), to.path().display());
    let inside = to.path().join("file");
    assert_eq!(stdout(&native(group.path(), &[&bind], &["cat", inside.to_str().unwrap()])), "text");
    assert!(!inside.exists(), "a mount stayed");
}

#[test]
fn only_its_mounts_are_in_another_namespace() {
    let group = double_group();
    for (name, same) in [("net", true), ("pid", true), ("ipc", true), ("uts", true), ("mnt", false)] {
        let path = format!("/proc/self/ns/{name}");
        let inside = stdout(&native(group.path(), &[], &["readlink", &path]));
        let mine = fs::read_link(&path).unwrap();
        assert_eq!(inside.trim() == mine.to_str().unwrap(), same, "{name}");
    }
}

#[test]
fn a_root_or_a_command_that_is_not_there_is_named() {
    let group = double_group();
    let output = native(group.path(), &[], &["no-such-tool-at-all"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot run no-such-tool-at-all"));
    let output = native(Path::new("/no/such"), &[], &["true"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/cgroup.procs"));
}
