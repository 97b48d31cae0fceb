//! A small disk: the test program starts itself again where a small tmpfs is mounted.

use std::process::Command;

/// Variable with the directory of the disk, for the child.
pub const DISK: &str = "FULL_DISK_TEST_DIR";
/// Two pages: room for some fifty rows, and for no report beside them.
const SIZE: &str = "8k";

/// In user and mount namespaces of its own, so that it needs no root and the tmpfs ends with it.
pub fn on_small_disk(child: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size={SIZE} tmpfs \"${DISK}\" && exec \"$@\"");
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", &mount, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", child, "--nocapture"])
        .env(DISK, dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("rows kept: "));
}
