//! Checkpoints, as people see them.

use sandboxer_protocol::admin::{Checkpoint, ListCheckpointsResponse, SavedContainer};

use super::{ago, cells};
use crate::admin_double::{AdminDouble, command};

fn two() -> AdminDouble {
    let counter = SavedContainer {
        name: "counter\x1b[2J".into(),
        image: "busybox:1".into(),
        args: vec!["sh".into(), "-c".into(), "count".into()],
    };
    let warm = Checkpoint {
        namespace: "default".into(),
        name: "warm".into(),
        pod: "3f2a".into(),
        pod_name: "web".into(),
        made_at_ns: ago(192),
        paused_ns: 87_000_000,
        stored_bytes: 44 << 20,
        vcpus: 1,
        memory_mib: 256,
        interfaces: 1,
        vmm: "qemu".into(),
        vmm_version: "7.2".into(),
        accelerator: "kvm".into(),
        containers: vec![counter],
        problem: String::new(),
    };
    let torn = Checkpoint {
        namespace: "shop".into(),
        name: "torn".into(),
        problem: "its manifest is damaged\nEOF".into(),
        ..Default::default()
    };
    let checkpoints = ListCheckpointsResponse { checkpoints: vec![warm, torn] };
    AdminDouble { checkpoints, ..Default::default() }
}

#[test]
fn checkpoints_are_listed_with_what_is_wrong_with_them() {
    let daemon = two().serve();
    let out = daemon.cli("checkpoint list").ok();
    let rows = cells(&out);
    assert_eq!(rows[0], ["NAMESPACE", "NAME", "AGE", "STORED", "PAUSED", "CONTAINERS", "STATE"]);
    assert_eq!((rows[1][1], &rows[1][3..]), ("warm", &["44.0 MiB", "87 ms", "counter^[[2J", "ready"][..]));
    assert_eq!(rows[2], ["shop", "torn", "-", "-", "-", "-", "its manifest is damaged EOF"]);
    let json: serde_json::Value = serde_json::from_str(&daemon.cli("checkpoint ls --json").ok()).unwrap();
    assert_eq!(
        (&json[0]["name"], &json[1]["problem"]),
        (&"warm".into(), &"its manifest is damaged\nEOF".into())
    );
    assert_eq!(AdminDouble::default().serve().cli("checkpoint list").ok(), "no checkpoints\n");
}

#[test]
fn one_is_made_shown_and_removed() {
    let daemon = two().serve();
    let made: serde_json::Value =
        serde_json::from_str(&daemon.cli("checkpoint create --json 3f2a new").ok()).unwrap();
    assert_eq!((&made[0]["pod"], &made[0]["name"]), (&"3f2a".into(), &"new".into()));
    let out = daemon.cli("checkpoint inspect warm").ok();
    for expected in [
        "Paused for  87 ms\n",
        "VM          1 vCPU, 256 MiB, 1 interfaces\n",
        "Container counter^[[2J of busybox:1: sh -c count",
    ] {
        assert!(out.contains(expected), "{expected:?} is not in\n{out}");
    }
    let error = daemon.cli("checkpoint inspect -n shop torn").failed(1);
    assert!(error.contains("checkpoint torn cannot be used: its manifest is damaged"), "{error}");
    let error = daemon.cli("checkpoint inspect torn").failed(1);
    assert!(error.contains("checkpoint default/torn: there is none"), "{error}");
    assert_eq!(cells(&daemon.cli("checkpoint rm -n shop torn").ok())[1][1], "torn");
}

#[test]
fn one_is_exported_to_a_new_file_and_imported_again() {
    let (daemon, dir) = (two().serve(), tempfile::tempdir().unwrap());
    let path = dir.path().join("warm.zst");
    let file = path.to_str().unwrap();
    let stdout = daemon.cli(&format!("checkpoint export warm {file}")).ok();
    assert!(stdout.starts_with(&format!("{file}: ")), "{stdout}");
    let meta = std::fs::metadata(&path).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o777, 0o600);
    assert!(meta.len() < 10_000, "it is not compressed: {} bytes", meta.len());
    let error = daemon.cli(&format!("checkpoint export warm {file}")).failed(1);
    assert!(error.contains("File exists"), "{error}");

    let made = daemon.cli(&format!("checkpoint import --json -n bank --name cold {file}")).ok();
    let made: serde_json::Value = serde_json::from_str(&made).unwrap();
    assert_eq!((&made[0]["namespace"], &made[0]["name"]), (&"bank".into(), &"cold".into()));
    let piped = command(&daemon.socket, "checkpoint export warm -").output().unwrap();
    assert_eq!(piped.stdout, std::fs::read(&path).unwrap());
    let mut import = command(&daemon.socket, "checkpoint import -");
    assert!(import.stdin(std::fs::File::open(&path).unwrap()).output().unwrap().status.success());
}

#[test]
fn what_is_no_archive_is_refused_and_what_breaks_off_leaves_no_file() {
    let (daemon, dir) = (two().serve(), tempfile::tempdir().unwrap());
    let path = dir.path().join("torn.zst");
    let file = path.to_str().unwrap();
    let error = daemon.cli(&format!("checkpoint export -n shop torn {file}")).failed(1);
    assert!(error.contains("its manifest is damaged") && !path.exists(), "{error}");
    daemon.cli(&format!("checkpoint export warm {file}")).ok();
    let whole = std::fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    for bad in [b"rubbish".to_vec(), Vec::new(), whole[..whole.len() - 5].to_vec(), flipped] {
        std::fs::write(&path, bad).unwrap();
        let error = daemon.cli(&format!("checkpoint import {file}")).failed(1);
        assert!(error.contains("is no exported checkpoint, or damaged"), "{error}");
    }
    let error = daemon.cli("checkpoint import /nowhere").failed(1);
    assert!(error.contains("cannot open /nowhere"), "{error}");
}
