//! The driver of Firecracker, held to the contract of all VMMs.
//!
//! The suite of all VMMs (`vmm_suite`) and Firecracker's own cases run against a double and against the real binary
//! that `FIRECRACKER` names.
//! `contract` uses the double: its guest speaks the contract's language. `boots_a_pod` needs the real binary, a usable
//! KVM and `make guest-image`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

mod double_guest;
mod firecracker_double;
mod firecracker_suite;
mod test_guest;
mod vmm_suite;

use std::process::ExitCode;

use firecracker_double as double;
use firecracker_suite::{cases, jailer, pods};
use libtest_mimic::Arguments;

fn main() -> ExitCode {
    if let Some(ended) = double::run_if_asked() {
        return ended;
    }
    let trials = [cases::trials(), cases::contract(), jailer::trials(), pods::trials()];
    libtest_mimic::run(&Arguments::from_args(), trials.into_iter().flatten().collect()).exit_code()
}
