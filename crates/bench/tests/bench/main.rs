//! The laboratory on doubles: workloads and their figures, and the program as people and scripts run it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

mod commands;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../../probe/tests/double/mod.rs"]
mod double;
mod full_disk;
mod kata_files;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../../probe/tests/double/made_up.rs"]
mod made_up;
#[path = "../../../probe/tests/double/small_disk.rs"]
mod small_disk;
mod vm;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../../probe/tests/double/vmm.rs"]
mod vmm;
mod workload;

use std::process::{Command, Stdio};

/// How a run of the program ended.
struct Outcome {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Runs the program to its end.
fn bench(line: &str) -> Outcome {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandboxer-bench"));
    command.args(line.split_whitespace()).env("SANDBOXER_SOCKET", "/nowhere/admin.sock").stdin(Stdio::null());
    let output = command.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    Outcome { code: output.status.code(), out, err }
}

impl Outcome {
    /// Returns what was printed by a run that succeeded without complaint.
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (Some(0), ""), "{}", self.out);
        self.out
    }

    /// Returns the complaint of a run that failed with `code` and printed nothing else.
    #[track_caller]
    fn failed(self, code: i32) -> String {
        assert_eq!((self.code, self.out.as_str()), (Some(code), ""), "{}", self.err);
        self.err
    }
}
