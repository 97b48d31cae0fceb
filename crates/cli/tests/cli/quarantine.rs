//! Records that were put aside, as people see them.

use std::{io::Write, process::Stdio};

use sandboxer_protocol::admin::{ListQuarantineResponse, Quarantined, QuarantinedProcess};

use super::{ago, cells};
use crate::admin_double::{AdminDouble, Outcome, command};

const TORN: &str = "1700000000000000000-web";
const OLD: &str = "1600000000000000000-job";

fn two_entries() -> AdminDouble {
    let torn = Quarantined {
        name: TORN.into(),
        put_aside_at_ns: ago(192),
        pod: "web".into(),
        bytes: 2048,
        path: "/state/pods/web.json".into(),
        problem: "journal record cannot be understood\nEOF \x1b[2J".into(),
        run_dir: "/run/pods/web".into(),
        run_dir_exists: true,
        processes: vec![QuarantinedProcess { pid: 71, command: "qemu\x07".into() }],
    };
    let old = Quarantined { name: OLD.into(), pod: "job".into(), bytes: 5, ..Default::default() };
    let quarantine = ListQuarantineResponse { entries: vec![old, torn], left_off: 3, bytes: 3 << 20 };
    AdminDouble { quarantine, ..Default::default() }
}

#[test]
fn a_list_tells_what_runs_and_what_is_left_off() {
    let out = two_entries().serve().cli("quarantine list").ok();
    let rows = cells(&out);
    assert_eq!(rows[0], ["NAME", "AGE", "SIZE", "RUN DIR", "PROCESSES", "PROBLEM"]);
    assert_eq!(rows[1], [OLD, "-", "5 B", "-", "-", "unknown: there is no report"]);
    assert_eq!((rows[2][0], &rows[2][2..5]), (TORN, &["2.0 KiB", "present", "71 qemu^G"][..]));
    assert_eq!(rows[2][5], "journal record cannot be understood EOF ^[[2J");
    assert!(out.ends_with("\n\n3 more are not listed; all of them use 3.0 MiB\n"), "{out}");
    let empty = AdminDouble::default().serve();
    assert_eq!(empty.cli("quarantine ls").ok(), "nothing is in quarantine\n");
    let json: serde_json::Value = serde_json::from_str(&empty.cli("quarantine list --json").ok()).unwrap();
    assert_eq!(json, serde_json::json!({ "entries": [], "left_off": 0, "bytes": 0 }));
}

#[test]
fn an_entry_is_shown_with_its_report_and_its_record() {
    let daemon = two_entries().serve();
    let out = daemon.cli(&format!("quarantine show {TORN}")).ok();
    for expected in [
        "Pod         web\n",
        "Path        /state/pods/web.json\n",
        "Run dir     /run/pods/web\n",
        "Processes   71 qemu^G\n",
        "\nReport\n{\"at_ns\": 1}\n",
        "\nRecord (truncated)\n{\"version\":1,^[[2J\n",
    ] {
        assert!(out.contains(expected), "{expected:?} is not in\n{out}");
    }
    let json = daemon.cli(&format!("quarantine show --json {TORN}")).ok();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["entry"]["processes"][0]["pid"], 71);
    assert_eq!(json["record"], "{\"version\":1,\x1b[2J");
    let old = daemon.cli(&format!("quarantine show {OLD}")).ok();
    assert!(old.contains("Processes   -\n") && old.contains("Path        -\n"), "{old}");
    let unknown = daemon.cli("quarantine show 17").failed(1);
    assert!(unknown.contains("nothing in quarantine is called 17"), "{unknown}");
}

#[test]
fn released_ones_are_told() {
    let daemon = two_entries().serve();
    let out = daemon.cli(&format!("quarantine release {OLD} {TORN}")).ok();
    assert_eq!(cells(&out).iter().skip(1).map(|row| row[0]).collect::<Vec<_>>(), [OLD, TORN]);
    daemon.cli("quarantine release").failed(2);
    daemon.cli("quarantine").failed(2);
}

#[test]
fn nothing_is_destroyed_unless_somebody_says_yes() {
    let double = two_entries();
    let destroyed = double.destroyed.clone();
    let daemon = double.serve();
    let refused = daemon.cli(&format!("quarantine destroy {TORN}")).failed(1);
    assert!(refused.contains("--yes"), "{refused}");
    // A pipe is not a terminal.
    let mut piped = command(&daemon.socket, &format!("quarantine destroy {TORN}"));
    let mut child =
        piped.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It may have ended before it reads.
    let _ = child.stdin.take().unwrap().write_all(b"yes\n");
    Outcome::from(child.wait_with_output().unwrap()).failed(1);
    assert!(destroyed.lock().unwrap().is_empty());

    let json = daemon.cli(&format!("quarantine destroy --yes --json {TORN}")).ok();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json[0]["name"].as_str(), json.as_array().unwrap().len()), (Some(TORN), 1));
    assert_eq!(*destroyed.lock().unwrap(), [TORN]);
    let prefix = daemon.cli("quarantine destroy --yes 1700").failed(1);
    assert!(prefix.contains("called 1700"), "{prefix}");
}
