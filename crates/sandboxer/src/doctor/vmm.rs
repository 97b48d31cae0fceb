//! The programs that run machines.

use std::path::{Path, PathBuf};

use super::{
    program::{self, Answer},
    verdict::{Check, Fix, Subject},
};

/// The oldest QEMU whose machines were seen to run pods.
const QEMU_SEEN: (u32, u32) = (7, 2);

const QEMU: Subject = Subject { name: "qemu", why: "it runs the pods' machines" };
const CLOUD_HYPERVISOR: Subject =
    Subject { name: "cloud-hypervisor", why: "it needs less memory per pod than QEMU, where KVM is usable" };

/// A program and what it said.
#[derive(Debug, Clone)]
pub struct Reading {
    /// As configured.
    pub program: PathBuf,
    /// To `--version`.
    pub answer: Answer,
}

/// Asks for the version.
pub async fn read(program: &Path) -> Reading {
    Reading { program: program.to_owned(), answer: program::ask(program, "--version").await }
}

/// QEMU, as configured.
pub fn qemu(reading: &Reading) -> Check {
    let Reading { program, answer } = reading;
    let install = || {
        Fix::commands("install it, or set vm.qemu in the configuration", ["apt-get install qemu-system-x86"])
    };
    match answer {
        Answer::Said(line) => {
            let named = line.trim_start_matches("QEMU emulator version ");
            match program::version(line) {
                Some(version) if version >= QEMU_SEEN => QEMU.ok(named),
                Some(_) => {
                    QEMU.warning(named, Fix::words("use QEMU 7.2 or later, the oldest that was tried"))
                }
                None => QEMU.failure(format!("{program:?} says {line:?}, which is no QEMU"), install()),
            }
        }
        Answer::Missing => QEMU.failure(format!("there is no {program:?}"), install()),
        Answer::Broken(how) => QEMU.failure(format!("{program:?} {how}"), install()),
        Answer::Silent => QEMU.warning(
            format!("{program:?} did not tell its version within {:?}", program::LIMIT),
            Fix::words("see whether it is QEMU, and what keeps it"),
        ),
    }
}

/// Cloud Hypervisor, as found in `PATH`.
pub fn cloud_hypervisor(reading: &Reading) -> Check {
    match &reading.answer {
        Answer::Said(line) => CLOUD_HYPERVISOR.ok(line),
        Answer::Missing => CLOUD_HYPERVISOR.not_applicable("not installed"),
        Answer::Broken(how) => CLOUD_HYPERVISOR
            .warning(how, Fix::words("install a static binary of its releases, or remove this one")),
        Answer::Silent => CLOUD_HYPERVISOR.warning(
            format!("did not tell its version within {:?}", program::LIMIT),
            Fix::words("see whether it is Cloud Hypervisor, and what keeps it"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    fn reading(answer: Answer) -> Reading {
        Reading { program: "vmm".into(), answer }
    }

    #[test]
    fn qemu_must_answer_and_be_qemu() {
        for (answer, verdict, seen) in [
            (Answer::Said("QEMU emulator version 7.2.22 (Debian)".into()), Verdict::Ok, "7.2.22 (Debian)"),
            (Answer::Said("QEMU emulator version 10.0.2".into()), Verdict::Ok, "10.0.2"),
            (Answer::Said("QEMU emulator version 5.2.0".into()), Verdict::Warning, "5.2.0"),
            (Answer::Said("hello".into()), Verdict::Failure, "\"vmm\" says \"hello\", which is no QEMU"),
            (Answer::Missing, Verdict::Failure, "there is no \"vmm\""),
            (Answer::Broken("ended with 3".into()), Verdict::Failure, "\"vmm\" ended with 3"),
            (Answer::Silent, Verdict::Warning, "\"vmm\" did not tell its version within 1.2s"),
        ] {
            let check = qemu(&reading(answer));
            assert_eq!((check.verdict, check.seen.as_str()), (verdict, seen));
        }
    }

    #[test]
    fn cloud_hypervisor_may_be_absent() {
        for (answer, verdict) in [
            (Answer::Said("cloud-hypervisor v44.0".into()), Verdict::Ok),
            (Answer::Missing, Verdict::NotApplicable),
            (Answer::Broken("ended with 1".into()), Verdict::Warning),
            (Answer::Silent, Verdict::Warning),
        ] {
            assert_eq!(cloud_hypervisor(&reading(answer)).verdict, verdict);
        }
    }
}
