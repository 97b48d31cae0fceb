//! The driver of Cloud Hypervisor, held to the published API.
//!
//! The suite of all VMMs (`vmm_suite`) and Cloud Hypervisor's own cases run against a double, which behaves as an old
//! and as a new version, and against the real binary that `CLOUD_HYPERVISOR` names. `faults` need a VMM that fails on
//! request, hence the double; `suite` proves that a double that differs from the API is detected; and
//! `boots_a_pod` needs the real binary, a usable KVM and `make guest-image`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

mod cloud_hypervisor_double;
mod cloud_hypervisor_suite;
mod double_guest;
mod test_guest;
mod vmm_suite;

use std::process::ExitCode;

use cloud_hypervisor_double as double;
use cloud_hypervisor_suite::{cases, faults, pods, proof, tap};
use libtest_mimic::Arguments;

fn main() -> ExitCode {
    if let Some(ended) = double::run_if_asked() {
        return ended;
    }
    tap::be_alone();
    let trials = [cases::trials(), faults::trials(), proof::trials(), pods::trials()];
    libtest_mimic::run(&Arguments::from_args(), trials.into_iter().flatten().collect()).exit_code()
}
