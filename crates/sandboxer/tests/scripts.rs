//! `scripts/cargo-test.sh` runs a test that failed beside others once more alone, and `scripts/test-counts.awk` counts it once.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// What cargo prints when the second of two programs fails: its own lines are indented like the names of tests.
const FIRST: &str = "    Finished `test` profile [unoptimized] target(s) in 1.00s
     Running unittests src/lib.rs (target/debug/deps/one)

running 2 tests
test a::holds ... ok
test a::holds_too ... ok

test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/two.rs (target/debug/deps/two)

running 2 tests
test b::holds ... ok
test b::races ... FAILED

failures:

---- b::races stdout ----
    an indented line of the test

failures:
    b::races

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

error: test failed, to rerun pass `--test two`
";
const AGAIN: &str = "
running 1 test
test b::races ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.00s
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs the script beside a double of cargo, which fails at first and ends with `again` when it is asked for one test.
fn run_beside_a_double(again: i32) -> (Output, String) {
    let dir = tempfile::tempdir().unwrap();
    let calls = dir.path().join("asked");
    for (name, text) in [("first", FIRST), ("again", AGAIN)] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let double = format!(
        "#!/bin/sh\ncd {dir}\necho \"$@\" >>asked\ncase \"$*\" in *--exact*) cat again; exit {again} ;; esac\ncat first\nexit 101\n",
        dir = dir.path().display()
    );
    let cargo = dir.path().join("cargo");
    fs::write(&cargo, double).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
    let output = Command::new(root().join("scripts/cargo-test.sh"))
        .arg("-p")
        .arg("x")
        .env("PATH", path)
        .output()
        .unwrap();
    (output, fs::read_to_string(calls).unwrap())
}

fn counts_of(text: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    fs::write(&log, text).unwrap();
    let awk = Command::new("awk")
        .arg("-f")
        .arg(root().join("scripts/test-counts.awk"))
        .arg(&log)
        .stderr(Stdio::inherit())
        .output();
    String::from_utf8(awk.unwrap().stdout).unwrap().trim().to_owned()
}

#[test]
fn an_unsteady_test_is_named_and_counts_once() {
    let (output, calls) = run_beside_a_double(0);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(calls, "test --no-fail-fast -p x\ntest -p x -- --exact b::races\n");
    let words = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(words.ends_with("cargo-test.sh: unsteady, passed alone: b::races\n"), "{words}");
    assert_eq!(counts_of(&log_of(&output)), "4 0 1");
}

#[test]
fn a_test_that_fails_twice_fails_the_run_and_counts_once() {
    let (output, _) = run_beside_a_double(101);
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(counts_of(&log_of(&output)), "3 1 1");
}

/// Both streams as `make` shows them: the script speaks between the two runs of cargo.
fn log_of(output: &Output) -> Vec<u8> {
    let out = String::from_utf8(output.stdout.clone()).unwrap();
    let (first, again) = out.split_at(out.find(AGAIN).unwrap());
    let words = String::from_utf8(output.stderr.clone()).unwrap();
    let (begin, end) = words.split_at(words.find('\n').unwrap() + 1);
    format!("{first}{begin}{again}{end}").into_bytes()
}
