//! Checkpoints, as people see them.

use sandboxer_protocol::admin::{Checkpoint, ListCheckpointsResponse, SavedContainer};

use super::{ago, cells};
use crate::admin_double::AdminDouble;

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
    let said = daemon.cli("checkpoint inspect -n shop torn").failed(1);
    assert!(said.contains("checkpoint torn cannot be used: its manifest is damaged"), "{said}");
    let said = daemon.cli("checkpoint inspect torn").failed(1);
    assert!(said.contains("checkpoint default/torn: there is none"), "{said}");
    assert_eq!(cells(&daemon.cli("checkpoint rm -n shop torn").ok())[1][1], "torn");
}
