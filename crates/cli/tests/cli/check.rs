//! `check` on the VM that runs the tests, whatever that is worth.

use std::{fs, path::Path};

use sandboxer_vmm::kvm;
use serde_json::Value;

use crate::admin_double::{Outcome, command};

const SCHEMA: &str = include_str!("../../../probe/schema/check.schema.json");
/// Where no containerd listens.
const NOBODY: &str = "unix:///nonexistent/containerd.sock";

/// Runs the command with the daemon's defaults and without containerd, unless `line` says otherwise.
fn check(line: &str) -> Outcome {
    let mut command = command(Path::new("/nowhere/admin.sock"), &format!("check {line}"));
    command.env("CONTAINER_RUNTIME_ENDPOINT", NOBODY).env("SANDBOXER_CONFIG", "/dev/null");
    command.output().unwrap().into()
}

fn json(outcome: &Outcome) -> Value {
    serde_json::from_str(&outcome.out)
        .unwrap_or_else(|error| panic!("{error}: {}{}", outcome.out, outcome.err))
}

fn named<'a>(report: &'a Value, name: &str) -> &'a Value {
    let mut checks = report["checks"].as_array().unwrap().iter();
    checks.find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name} in {report}"))
}

#[test]
fn this_vm_is_told_as_the_schema_says() {
    let outcome = check("--json");
    let report = json(&outcome);
    let schema = jsonschema::validator_for(&serde_json::from_str(SCHEMA).unwrap()).unwrap();
    let errors: Vec<_> = schema.iter_errors(&report).map(|error| error.to_string()).collect();
    assert_eq!(errors, Vec::<String>::new(), "{report}");

    let verdicts =
        report["checks"].as_array().unwrap().iter().map(|check| check["verdict"].as_str().unwrap());
    let worst = verdicts.map(|verdict| ["ok", "warning", "failure"].iter().position(|it| *it == verdict));
    let worst = worst.flatten().max().unwrap();
    assert_eq!(outcome.code, i32::try_from(worst).ok(), "{report}");
    assert_eq!(report["verdict"], ["ok", "warning", "failure"][worst]);
}

#[test]
fn the_schema_refuses_what_is_no_report() {
    let schema = jsonschema::validator_for(&serde_json::from_str(SCHEMA).unwrap()).unwrap();
    let sound = json(&check("--json"));
    assert!(schema.is_valid(&sound));
    for spoil in [
        |report: &mut Value| report["schema"] = 2.into(),
        |report: &mut Value| report["checks"][0]["verdict"] = "fine".into(),
        |report: &mut Value| report["checks"][0]["more"] = 1.into(),
        |report: &mut Value| drop(report["checks"][0].as_object_mut().unwrap().remove("why")),
        |report: &mut Value| {
            report["checks"][0] =
                serde_json::json!({ "name": "x", "verdict": "failure", "seen": "x", "why": "x" })
        },
    ] {
        let mut report = sound.clone();
        spoil(&mut report);
        assert!(!schema.is_valid(&report), "{report}");
    }
}

#[test]
fn kvm_is_measured() {
    let report = json(&check("--json"));
    let seen = named(&report, "kvm");
    match kvm::measure(Path::new("/dev/kvm")) {
        Ok(_) => assert_eq!(seen["verdict"], "ok", "{seen}"),
        Err(unusable) => {
            assert_eq!(seen["verdict"], "warning", "{unusable}: {seen}");
            let ran = |text: &str| text.contains("million guest instructions per second");
            assert_eq!(ran(&unusable.to_string()), ran(seen["seen"].as_str().unwrap()), "{unusable}: {seen}");
        }
    }
}

#[test]
fn a_containerd_that_does_not_answer_is_a_failure_and_ends_in_2() {
    let outcome = check("--json");
    assert_eq!(outcome.code, Some(2), "{}", outcome.err);
    let report = json(&outcome);
    let containerd = named(&report, "containerd");
    assert_eq!(containerd["verdict"], "failure");
    assert!(containerd["seen"].as_str().unwrap().contains("No such file"), "{containerd}");
    assert_eq!(named(&report, "handler")["verdict"], "not_applicable");
}

#[test]
fn a_containerd_that_never_answers_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("c.sock");
    // Connections wait here for an accept that never comes.
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let outcome = check(&format!("--endpoint {} --json", socket.display()));
    let report = json(&outcome);
    assert!(named(&report, "containerd")["seen"].as_str().unwrap().contains("no answer within"), "{report}");
}

#[test]
fn the_table_fits_100_columns_and_hints_name_commands() {
    let table = check("");
    assert_eq!(table.code, Some(2));
    assert!(table.out.lines().all(|line| line.chars().count() <= 100), "{}", table.out);
    assert!(table.out.starts_with("CHECK "), "{}", table.out);
    let hints = check("--fix-hints");
    assert!(hints.out.contains("\n# containerd (failure): "), "{}", hints.out);
    assert!(hints.out.contains("\n  systemctl start containerd\n"), "{}", hints.out);
}

#[test]
fn more_pods_want_more() {
    let files =
        |pods: u32| named(&json(&check(&format!("--json --pods {pods}"))), "memory")["verdict"].clone();
    assert_ne!(files(100_000), "ok");
    assert_eq!(check("--pods 0").code, Some(2));
}

#[test]
fn a_broken_configuration_is_one_more_failure() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.toml");
    fs::write(&config, "[vm]\nkernal = \"/vmlinux\"\n").unwrap();
    let report = json(&check(&format!("--json --config {}", config.display())));
    let seen = named(&report, "configuration");
    assert_eq!(seen["verdict"], "failure");
    assert!(seen["seen"].as_str().unwrap().contains("line 2"), "{seen}");
    fs::write(&config, "[vm]\nkernel = \"/nonexistent/vmlinux\"\naccelerator = \"tcg\"\n").unwrap();
    let report = json(&check(&format!("--json --config {}", config.display())));
    assert!(named(&report, "guest kernel")["seen"].as_str().unwrap().contains("/nonexistent/vmlinux"));
    assert_ne!(named(&report, "kvm")["verdict"], "warning");
}

/// Runs with `--apply` of a file with this text; the outcome and the text afterwards.
fn apply(text: &str, flags: &str) -> (Outcome, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("containerd.toml");
    fs::write(&file, text).unwrap();
    let outcome = check(&format!("--containerd-config --apply {} {flags}", file.display()));
    let after = fs::read_to_string(&file).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "something is left beside the file");
    (outcome, after)
}

#[test]
fn a_file_of_containerds_changes_only_when_told_to() {
    const OWN: &str = "# mine\nversion = 3 # new\n";
    let printed = check("--containerd-config");
    assert_eq!(printed.code, Some(0), "{}", printed.err);
    assert!(
        printed.err.contains("No such file") && printed.err.contains("containerd 2.4"),
        "{}",
        printed.err
    );

    let (shown, after) = apply(OWN, "");
    assert_eq!((shown.code, after.as_str()), (Some(0), OWN), "{}", shown.err);
    assert!(shown.out.contains("\n+[proxy_plugins.sandboxer]\n"), "{}", shown.out);
    assert!(shown.out.contains("\n # mine\n") && shown.err.contains("--write"), "{}{}", shown.out, shown.err);

    let (written, once) = apply(OWN, "--write");
    assert_eq!(written.code, Some(0), "{}", written.err);
    assert_eq!(written.out, shown.out.replace(&path_of(&shown.out), &path_of(&written.out)));
    assert!(once.starts_with(OWN) && once.contains("io.containerd.sandboxer.v1"), "{once}");
    let (again, twice) = apply(&once, "--write");
    assert_eq!((again.out.as_str(), &twice), ("", &once));
    assert!(again.err.contains("already has these settings"), "{}", again.err);
}

/// Returns the file of which a diff is.
fn path_of(diff: &str) -> String {
    diff.lines().next().unwrap().strip_prefix("--- ").unwrap().to_owned()
}

#[test]
fn a_file_that_is_no_configuration_is_refused_and_left() {
    for (text, says) in
        [("version = 3\n[plugins\n", "line 2"), ("version = 2\n", "containerd config migrate")]
    {
        let (outcome, after) = apply(text, "--write");
        assert_eq!((outcome.code, outcome.out.as_str(), after.as_str()), (Some(2), "", text));
        assert!(outcome.err.contains(says), "{}", outcome.err);
    }
    let missing = check("--containerd-config --apply /nonexistent/c.toml");
    assert_eq!(missing.code, Some(2));
    assert!(missing.err.contains("cannot read \"/nonexistent/c.toml\""), "{}", missing.err);
    for usage in ["--apply /c.toml", "--containerd-config --write", "--containerd-config --json"] {
        assert_eq!(check(usage).code, Some(2), "{usage}");
    }
}

#[test]
fn the_settings_of_docker_are_printed_as_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.toml");
    fs::write(&config, "run_dir = \"/run/x\"\n").unwrap();
    let outcome = check(&format!("--docker-config --config {}", config.display()));
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    let runtime = &json(&outcome)["runtimes"]["sandboxer"];
    assert_eq!(runtime["runtimeType"], "io.containerd.sandboxer.v1");
    assert_eq!(runtime["options"]["ConfigPath"], config.to_str().unwrap());
    assert!(outcome.err.contains("/etc/docker/daemon.json"), "{}", outcome.err);
    fs::write(&config, "run_dri = 1\n").unwrap();
    assert_eq!(check(&format!("--docker-config --config {}", config.display())).code, Some(2));
    assert_eq!(check("--docker-config --containerd-config").code, Some(2));
}

#[test]
fn the_settings_of_cri_o_are_printed_as_a_file_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.toml");
    fs::write(&config, "run_dir = \"/run/x\"\n").unwrap();
    let outcome = check(&format!("--crio-config --config {}", config.display()));
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    let printed: toml_edit::DocumentMut = outcome.out.parse().unwrap();
    let runtime = &printed["crio"]["runtime"]["runtimes"]["sandboxer"];
    assert_eq!(runtime["runtime_type"].as_str(), Some("vm"));
    assert!(outcome.err.contains("/etc/crio/crio.conf.d"), "{}", outcome.err);
    assert!(outcome.err.contains(&format!("SANDBOXER_CONFIG={}", config.display())), "{}", outcome.err);
    assert_eq!(check("--crio-config --docker-config").code, Some(2));
}
