//! The CLI as people and scripts run it, against a double of the daemon.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

mod admin_double;
mod check;
mod checkpoint;
mod idle;
#[path = "../../../probe/tests/double/made_up.rs"]
mod made_up;
mod quarantine;
mod results;

use std::{
    io::{BufRead, BufReader},
    os::unix::net::UnixListener,
    path::Path,
    process::Stdio,
    time::{Duration, SystemTime},
};

use admin_double::{AdminDouble, cli_at, command};
use sandboxer_protocol::admin::{
    Container, Event, Exec, Jail, Limit, ListPlacesResponse, NodeMemory, NumaNode, Place, Pod, StageSummary,
    StageTime,
};

const WEB: &str = "3f2a9c0d11223344556677889900aabbccddeeff";
const JOB: &str = "3f77000000000000000000000000000000000000";

fn stage(name: &str, begin_ms: u64, took_ms: u64) -> StageTime {
    let outcome = "ok".to_owned();
    StageTime {
        stage: name.into(),
        begin_ns: begin_ms * 1_000_000,
        duration_ns: took_ms * 1_000_000,
        outcome,
    }
}

fn ago(seconds: u64) -> u64 {
    let at = SystemTime::now() - Duration::from_secs(seconds);
    u64::try_from(at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

fn web() -> Pod {
    Pod {
        id: WEB.into(),
        name: "web-0".into(),
        namespace: "shop".into(),
        uid: "u-1".into(),
        state: "ready".into(),
        created_at_ns: ago(2 * 3600 + 5 * 60 + 30),
        vmm_pid: 777,
        jail: Some(Jail {
            pid: 777,
            uid: 1_879_048_200,
            gid: 1_879_048_200,
            own_namespaces: vec!["mnt".into(), "pid".into()],
            shared_namespaces: vec!["user".into()],
            no_new_privileges: true,
            seccomp: "filter".into(),
            seccomp_filters: 1,
            root: "tmpfs ro,nosuid".into(),
            mounts: 9,
            writable_mounts: 2,
            cgroup: "/kubepods/pod1".into(),
            limits: vec![Limit { name: "Max open files".into(), soft: 1024, hard: u64::MAX }],
            ..Default::default()
        }),
        shares_jail: Some(Jail { pid: 778, cgroup: "/shares".into(), ..Default::default() }),
        vcpus: 2,
        memory_mib: 1536,
        kernel_release: "6.1.0-sandboxer".into(),
        containers: vec![
            Container {
                id: "c-running".into(),
                state: "running".into(),
                guest_pid: 71,
                execs: vec![Exec { id: "e-1".into(), state: "exited".into(), guest_pid: 90, exit_code: 3 }],
                disks: vec!["/var/lib/sandboxer/rootfs/abc.erofs".into()],
                stages: vec![stage("rootfs", 0, 20)],
                ..Default::default()
            },
            Container {
                id: "c-ended".into(),
                state: "exited".into(),
                exit_code: 137,
                reason: "killed: out of memory\n[ 9.1] Out of memory \x1b[2J".into(),
                ..Default::default()
            },
        ],
        stages: vec![stage("vmm_spawn", 1, 249), stage("boot", 250, 734)],
        ..Default::default()
    }
}

fn job() -> Pod {
    Pod {
        id: JOB.into(),
        name: "job".into(),
        namespace: "batch".into(),
        state: "starting".into(),
        created_at_ns: ago(5),
        vcpus: 1,
        memory_mib: 256,
        stages: vec![stage("vmm_spawn", 1, 249)],
        ..Default::default()
    }
}

fn two_pods() -> AdminDouble {
    AdminDouble { pods: vec![web(), job()], ..Default::default() }
}

/// Lines of cells; cells stand at least two spaces apart.
fn cells(table: &str) -> Vec<Vec<&str>> {
    table
        .lines()
        .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .collect()
}

#[test]
fn pods_is_a_table_for_people() {
    let out = two_pods().serve().cli("pods").ok();
    let rows = cells(&out);
    let header =
        ["POD ID", "NAME", "NAMESPACE", "STATE", "AGE", "START", "VCPUS", "MEMORY", "CONTAINERS", "VMM PID"];
    assert_eq!(rows[0], header);
    assert_eq!(
        rows[1],
        ["3f2a9c0d11223", "web-0", "shop", "ready", "2h5m", "984 ms", "2", "1.50 GiB", "1/2", "777"]
    );
    assert_eq!((&rows[2][..4], rows[2][5]), (&["3f77000000000", "job", "batch", "starting"][..], "-"));
    assert_eq!(rows.len(), 3);
}

#[test]
fn pods_can_be_narrowed_and_piped_on() {
    let daemon = two_pods().serve();
    assert_eq!(daemon.cli("pods --quiet").ok(), format!("{WEB}\n{JOB}\n"));
    assert_eq!(daemon.cli("pods -q --namespace shop").ok(), format!("{WEB}\n"));
    assert_eq!(daemon.cli("pods -q --state starting").ok(), format!("{JOB}\n"));
    assert_eq!(daemon.cli("pods -q --state starting -n shop").ok(), "");
}

#[test]
fn json_says_all_that_the_daemon_said() {
    let daemon = two_pods().serve();
    let pods: serde_json::Value = serde_json::from_str(&daemon.cli("pods --json").ok()).unwrap();
    assert_eq!(pods.as_array().unwrap().len(), 2);
    // Before the verb it means the same.
    let pod: serde_json::Value = serde_json::from_str(&daemon.cli("--json inspect 3f2").ok()).unwrap();
    assert_eq!(pod, pods[0]);
    assert_eq!(pod["id"], WEB);
    assert_eq!(pod["memory_mib"], 1536);
    assert_eq!(pod["stages"][1]["duration_ns"], 734_000_000);
    assert_eq!(pod["containers"][0]["execs"][0]["exit_code"], 3);
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&AdminDouble::default().serve().cli("pods --json").ok())
            .unwrap(),
        serde_json::json!([])
    );
}

#[test]
fn inspect_tells_where_the_time_went_and_obeys_no_guest() {
    let out = two_pods().serve().cli("inspect 3f2a").ok();
    for expected in [
        &format!("Pod         {WEB}\n"),
        "Name        shop/web-0\n",
        "Size        2 vCPU, 1.50 GiB\n",
        "Kernel      6.1.0-sandboxer\n",
        "Container c-running\n  running, guest pid 71\n  disk /var/lib/sandboxer/rootfs/abc.erofs\n",
        "  exec e-1: exited, guest pid 90, exit code 3\n",
        "exited with code 137: killed: out of memory\n    [ 9.1] Out of memory ^[[2J\n",
    ] {
        assert!(out.contains(expected), "{expected:?} is not in\n{out}");
    }
    assert!(cells(&out).contains(&vec!["boot", "250 ms", "734 ms", "ok"]), "{out}");
    let cells = cells(&out);
    for [what, is] in [
        ["User", "1879048200, group 1879048200, others: none"],
        ["Namespaces of its own", "mnt, pid"],
        ["Capabilities", "none, and can get none"],
        ["New privileges", "never"],
        ["Seccomp", "filter, 1 installed"],
        ["Mounts", "9, 2 of them writable"],
        ["Max open files", "1024"],
        ["Control group", "/shares"],
    ] {
        assert!(cells.contains(&vec![what, is]), "{what} {is} is not in\n{out}");
    }
    assert!(!out.contains('\x1b'), "{out:?}");
}

#[test]
fn a_prefix_must_mean_one_pod() {
    let daemon = two_pods().serve();
    let several = daemon.cli("inspect 3f").failed(1);
    assert!(several.contains("\"3f\"") && several.contains("give more of it"), "{several}");
    let none = daemon.cli("logs 99").failed(1);
    assert!(none.contains("\"99\"") && none.contains("no pod's id starts so"), "{none}");
}

#[test]
fn logs_are_copied_byte_for_byte_into_a_pipe() {
    let console: Vec<&[u8]> = vec![b"[ 0.0] Linux\r\n", b"\x1b[1mbold\xff", b"end"];
    let daemon = AdminDouble { console, ..two_pods() }.serve();
    let output = command(&daemon.socket, "logs 3f2a --follow").output().unwrap();
    assert_eq!(output.stdout, b"[ 0.0] Linux\r\n\x1b[1mbold\xffend");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let daemon = AdminDouble { console: vec![b"line\n"], chatty: true, ..two_pods() }.serve();
    let mut child = command(&daemon.socket, "logs 3f2a --follow")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = String::new();
    // The reader, and with it the pipe, is gone after one line.
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert_eq!(first, "line\n");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(0), &b""[..]));
}

#[test]
fn events_come_line_by_line_and_the_daemons_end_is_told() {
    let event = |pod: &str, kind: &str, container: &str, detail: &str| Event {
        at_ns: 1_700_000_000_123_456_789,
        pod: pod.into(),
        container: container.into(),
        kind: kind.into(),
        detail: detail.into(),
    };
    let events = vec![
        event(WEB, "pod-ready", "", ""),
        event(JOB, "container-exited", "c-1", "code 1\nlast words\x07"),
    ];
    let daemon = AdminDouble { events, ..Default::default() }.serve();

    let all = daemon.cli("events --follow");
    let lines = "2023-11-14 22:13:20.123  pod-ready          3f2a9c0d11223\n\
                 2023-11-14 22:13:20.123  container-exited   3f77000000000/c-1  code 1 | last words^G\n";
    assert_eq!(all.out, lines);
    assert_eq!(all.code, Some(1));
    assert!(all.err.contains("closed the connection: the daemon was killed"), "{}", all.err);

    let one = daemon.cli("events -f --json --pod 3f77").out;
    let parsed: serde_json::Value = serde_json::from_str(one.trim_end()).unwrap();
    assert_eq!(
        (&parsed["kind"], &parsed["at_ns"]),
        (&"container-exited".into(), &1_700_000_000_123_456_789_u64.into())
    );

    let usage = daemon.cli("events").failed(2);
    assert!(usage.contains("--follow"), "{usage}");
}

#[test]
fn version_names_both_sides() {
    let daemon = AdminDouble::default().serve();
    let out = daemon.cli("version").ok();
    assert!(out.contains("9.8.7 (protocol 6)") && out.contains("tcg: no /dev/kvm"), "{out}");
    let json: serde_json::Value = serde_json::from_str(&daemon.cli("version --json").ok()).unwrap();
    assert_eq!(json["client"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!((&json["daemon"]["worker_pid"], &json["daemon"]["front_pid"]), (&4321.into(), &4320.into()));
    assert_eq!(json["daemon"]["keeper_pid"], 4319);
    let words: Vec<_> = out.split_whitespace().collect();
    for process in [["keeper", "4319"], ["front", "4320"], ["worker", "4321,"]] {
        assert!(words.windows(2).any(|words| words == process), "no {process:?} in {out}");
    }
    assert_eq!(json["daemon"]["recovered_pods"], 2);

    let alone = cli_at(Path::new("/nowhere/admin.sock"), "version");
    assert_eq!(alone.code, Some(1));
    assert!(alone.out.contains(env!("CARGO_PKG_VERSION")), "{}", alone.out);
    assert!(cli_at(Path::new("/nowhere/admin.sock"), "version --client").ok().contains("sandboxer-cli"));
}

#[test]
fn a_reload_says_who_took_over_or_why_nobody_has() {
    let daemon = AdminDouble::default().serve();
    let out = daemon.cli("reload").ok();
    assert!(out.starts_with("sandboxer 9.8.7 took over in ") && out.contains("(worker 4321)"), "{out}");
    let json: serde_json::Value = serde_json::from_str(&daemon.cli("reload --json").ok()).unwrap();
    assert_eq!(json["worker_pid"], 4321);

    let refused = AdminDouble { reload_error: "it refuses the state", ..AdminDouble::default() }.serve();
    let error = refused.cli("reload").failed(1);
    assert!(error.contains("was not replaced: it refuses the state; containers continue"), "{error}");
}

#[test]
fn without_a_daemon_it_says_which_socket_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.sock");
    let dead = dir.path().join("dead.sock");
    drop(UnixListener::bind(&dead).unwrap());
    for (socket, cause) in [(&missing, "no such file"), (&dead, "no process listens")] {
        for verb in ["pods", "inspect 3f", "logs 3f", "events --follow"] {
            let error = cli_at(socket, verb).failed(1);
            let path = socket.to_str().unwrap();
            let mentions =
                [path, cause, "start one", "--socket", "SANDBOXER_SOCKET"].map(|text| error.contains(text));
            assert_eq!(mentions, [true; 5], "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
    // The flag wins over the environment.
    let error = cli_at(&dead, &format!("--socket {} pods", missing.display())).failed(1);
    assert!(error.contains("missing.sock"), "{error}");
}

#[test]
fn a_socket_that_is_no_admin_socket_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("other.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let error = cli_at(&socket, "pods").failed(1);
    assert!(error.contains("connection"), "{error}");
}

#[test]
fn wrong_usage_has_an_exit_code_of_its_own() {
    let nowhere = Path::new("/nowhere/admin.sock");
    for line in [
        "",
        "pods --sate ready",
        "pods --state happy",
        "inspect",
        "frobnicate",
        "--json logs 3f",
        "config",
        "completion tcsh",
        "startup --network none",
    ] {
        let outcome = cli_at(nowhere, line);
        assert_eq!((outcome.code, outcome.out.as_str()), (Some(2), ""), "{line:?}: {}", outcome.err);
        assert!(outcome.err.contains("--help"), "{line:?}: {}", outcome.err);
    }
}

#[test]
fn help_has_examples_for_every_verb_and_names_the_exit_codes() {
    let nowhere = Path::new("/nowhere/admin.sock");
    let help = cli_at(nowhere, "--help").ok();
    assert!(help.contains("Exit codes: 0 done, 1 failed, 2 wrong usage."), "{help}");
    let verbs: Vec<&str> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        // What is further to the right goes on with the line above.
        .filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|verb| *verb != "help")
        .collect();
    assert!(verbs.len() >= 7, "{verbs:?}");
    for verb in verbs {
        let help = cli_at(nowhere, &format!("{verb} --help")).ok();
        assert!(help.contains("\nExamples:\n  s"), "{verb}: {help}");
    }
}

#[test]
fn config_default_is_the_file_that_is_installed() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vmm-configs/sandboxer.toml");
    let out = cli_at(Path::new("/nowhere"), "config default").ok();
    assert_eq!(out, std::fs::read_to_string(file).unwrap());
}

#[test]
fn completions_are_scripts_that_their_shell_accepts() {
    for shell in ["bash", "zsh", "fish"] {
        let script = cli_at(Path::new("/nowhere"), &format!("completion {shell}")).ok();
        assert!(script.contains("inspect") && script.contains("follow"), "{shell}: {script}");
    }
    let script = cli_at(Path::new("/nowhere"), "completion bash").ok();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("completion.bash");
    std::fs::write(&path, script).unwrap();
    let complete = "source \"$0\"; COMP_WORDS=(sandboxer-cli insp); COMP_CWORD=1; _sandboxer__cli sandboxer-cli insp sandboxer-cli; echo \"${COMPREPLY[*]}\"";
    let output = std::process::Command::new("bash").args(["-c", complete]).arg(&path).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "inspect\n", "{:?}", output.stderr);
}

#[test]
fn every_command_and_the_daemon_have_a_man_page() {
    let nowhere = Path::new("/nowhere/admin.sock");
    let dir = tempfile::tempdir().unwrap();
    cli_at(nowhere, &format!("man {}", dir.path().display())).ok();
    let page = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    for command in ["", "-pods", "-check", "-template", "-checkpoint", "-quarantine", "-man"] {
        let name = format!("man1/sandboxer-cli{command}.1");
        assert!(page(&name).contains(".SH EXAMPLES\n.nf\n"), "{name}: {}", page(&name));
    }
    assert!(page("man1/sandboxer-cli-template-build.1").contains("\\-\\-vcpus"));
    let pods = page("man1/sandboxer-cli-pods.1");
    assert!(pods.contains("\nsandboxer\\-cli pods \\-\\-quiet | xargs"), "{pods}");
    let daemon = page("man8/sandboxer.8");
    assert!(daemon.contains("check\\-config") && !daemon.contains("front\\-fd"), "{daemon}");
}

#[test]
fn stages_are_shown_by_outcome() {
    let boot = StageSummary {
        stage: "boot".into(),
        outcome: "ok".into(),
        count: 4,
        sum_ns: 2_000_000_000,
        p50_ns: 450_000_000,
        max_ns: 700_000_000,
        ..Default::default()
    };
    let daemon = AdminDouble { stages: vec![boot], ..Default::default() }.serve();
    let shown = daemon.cli("stages");
    let line = shown.out.lines().find(|line| line.starts_with("boot")).unwrap();
    assert!(line.contains("ok") && line.contains("500 ms") && line.contains("450 ms"), "{line}");
    let json: serde_json::Value = serde_json::from_str(&daemon.cli("stages --json").out).unwrap();
    assert_eq!(json["stages"][0]["count"], 4);
    let mut child = command(&daemon.socket, "stages --watch").stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // Shown again and again until its reader is gone.
    let again = lines.map(Result::unwrap).filter(|line| line.starts_with("boot")).take(2).count();
    assert_eq!((again, child.wait().unwrap().code()), (2, Some(0)));
}

#[test]
fn places_are_shown_and_a_move_tells_its_cost() {
    let memory = vec![NodeMemory { node: 0, bytes: 1 << 20 }, NodeMemory { node: 1, bytes: 3 << 20 }];
    let place = Place {
        id: WEB.into(),
        node: Some(1),
        policy: "numa".into(),
        memory,
        cpus: "2-3".into(),
        ..Default::default()
    };
    let larger =
        Place { id: JOB.into(), policy: "none".into(), reason: "it is larger".into(), ..Default::default() };
    let node = NumaNode { id: 1, cpus: "2-3".into(), vms: 1, vcpus: 2, ..Default::default() };
    let places = ListPlacesResponse {
        policy: "numa".into(),
        active: true,
        nodes: vec![node],
        places: vec![place, larger],
    };
    let daemon = AdminDouble { places, ..Default::default() }.serve();
    let shown = daemon.cli("place").ok();
    for expected in ["Policy numa", "75.0 %", "0: 1.0 MiB, 1: 3.0 MiB", "it is larger"] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    assert!(!daemon.cli("place 3f2a").ok().contains("it is larger"));
    let json: serde_json::Value = serde_json::from_str(&daemon.cli("place --json").ok()).unwrap();
    assert_eq!(
        (&json["places"][0]["node"], &json["places"][1]["node"]),
        (&1.into(), &serde_json::Value::Null)
    );
    assert_eq!(json["places"][0]["memory"][1]["bytes"], 3 << 20);
    let moved = daemon.cli("place --move 3f2a 0").ok();
    assert_eq!(moved, "moved pod 3f2a9c0d11223 from node 0 to node 0: 5.0 MiB in 7.00 ms\n");
    let refused = daemon.cli("place --move 3f2a 7");
    assert!(refused.err.contains("cannot move pod 3f2a: the host has no node 7"), "{}", refused.err);
    let refused = daemon.cli("place --move 3f2a one");
    assert!(refused.err.contains("\"one\" is no number of a node"), "{}", refused.err);
}
