//! The daemon on a VM that lacks what it needs.

use std::{fs, process::Command};

use sandboxer::api::preflight;
use sandboxer_protocol::SPOKEN;

#[test]
fn a_daemon_refuses_to_start_in_the_words_of_the_check() {
    let dir = tempfile::tempdir().unwrap();
    let (kernel, initramfs) = (dir.path().join("vmlinux"), dir.path().join("initramfs.cpio"));
    fs::write(&initramfs, "no archive").unwrap();
    let config = dir.path().join("config.toml");
    let (run_dir, state_dir) = (dir.path().join("run"), dir.path().join("state"));
    let text = format!(
        "run_dir = {run_dir:?}\nstate_dir = {state_dir:?}\n[vm]\nkernel = {kernel:?}\ninitramfs = {initramfs:?}\n"
    );
    fs::write(&config, text).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_sandboxer"))
        .arg("--config")
        .arg(&config)
        .env_remove("SANDBOXER_LOG")
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let missing =
        format!("guest kernel: cannot read {kernel:?}: No such file or directory (os error 2); install");
    let broken = format!("initramfs: {initramfs:?} is not a cpio archive (newc, uncompressed); install");
    for sentence in [missing, broken] {
        assert!(stderr.contains(&sentence), "{sentence}\n{stderr}");
    }
    assert!(!run_dir.join("controller.sock").exists(), "it listened before it knew");
}

#[tokio::test]
async fn a_build_tells_the_protocols_that_it_speaks() {
    let spoken = preflight::spoken_by(env!("CARGO_BIN_EXE_sandboxer").as_ref()).await;
    assert_eq!(spoken, Some(SPOKEN));
}
