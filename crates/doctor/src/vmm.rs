//! The programs of VMMs.

use std::path::{Path, PathBuf};

use sandboxer_config::{VmConfig, VmmChoice};
use sandboxer_vmm::version::{self, Supported, VersionError};

use super::{
    kvm,
    program::{self, Answer},
    verdict::{Check, Fix, Subject},
};

const QEMU: Subject = Subject { name: "qemu", why: "it runs the pods' VMs" };
const CLOUD_HYPERVISOR: Subject =
    Subject { name: "cloud-hypervisor", why: "with KVM it uses less memory per pod than QEMU" };

const FIRECRACKER: Subject =
    Subject { name: "firecracker", why: "it runs the pods' VMs if vm.vmm or a handler names it" };

/// A VMM's program and its version output.
#[derive(Debug, Clone)]
pub struct Reading {
    /// The program, as configured.
    pub program: PathBuf,
    /// Output of `--version`.
    pub answer: Answer,
}

impl Reading {
    /// Returns the VMM's version, or the reason why it is not usable.
    fn version(&self, supported: &Supported) -> Result<String, String> {
        let program = self.program.display().to_string();
        self.line().and_then(|line| supported.parse(line, program).map_err(|error| error.to_string()))
    }

    /// Returns the line that the program printed, or the reason why it printed nothing.
    fn line(&self) -> Result<&str, String> {
        match &self.answer {
            Answer::Printed(line) => Ok(line),
            Answer::Missing => Err(format!("{:?} does not exist", self.program)),
            Answer::Broken(how) => Err(format!("{:?} {how}", self.program)),
            Answer::Silent => Err(program::too_slow(&self.program)),
        }
    }
}

/// Runs the program with `--version`.
pub async fn read(program: &Path) -> Reading {
    Reading { program: program.to_owned(), answer: program::ask(program, "--version").await }
}

/// Returns the name of the VMM that runs pods, or `None` if it is QEMU. Decides like `vmm::detect`; `reading` is Cloud
/// Hypervisor's.
pub fn other_than_qemu(config: &VmConfig, kvm: &kvm::Reading, reading: &Reading) -> Option<&'static str> {
    let is_cloud_hypervisor = match config.vmm {
        VmmChoice::Qemu => false,
        VmmChoice::Firecracker => return Some("Firecracker"),
        VmmChoice::CloudHypervisor => true,
        VmmChoice::Auto => {
            kvm.is_used(config.accelerator) && reading.version(&version::CLOUD_HYPERVISOR).is_ok()
        }
    };
    is_cloud_hypervisor.then_some("Cloud Hypervisor")
}

/// Checks QEMU, if pods run in it.
pub fn qemu(reading: &Reading, other: Option<&'static str>) -> Check {
    let check = judge_qemu(reading);
    match other {
        None => check,
        Some(other) => QEMU.not_applicable(format!("pods run in {other}; {}", check.seen)),
    }
}

fn judge_qemu(reading: &Reading) -> Check {
    let Reading { program, answer } = reading;
    let install = || {
        Fix::commands("install it, or set vm.qemu in the configuration", ["apt-get install qemu-system-x86"])
    };
    match answer {
        Answer::Printed(line) => match version::QEMU.parse(line, String::new()) {
            Ok(version) => QEMU.ok(version),
            Err(VersionError::Unsupported { version, supported, .. }) => {
                QEMU.warning(version, Fix::words(format!("use QEMU {supported}; older ones are not tested")))
            }
            Err(_) => QEMU.failure(format!("{program:?} is not QEMU: it printed {line:?}"), install()),
        },
        Answer::Missing => QEMU.failure(format!("{program:?} does not exist"), install()),
        Answer::Broken(how) => QEMU.failure(format!("{program:?} {how}"), install()),
        Answer::Silent => QEMU.warning(
            program::too_slow(program),
            Fix::words("retry when the host is less busy; if it stays slow, check that it is QEMU"),
        ),
    }
}

/// Checks Cloud Hypervisor. The configuration decides whether it may be absent.
pub fn cloud_hypervisor(configured: VmmChoice, reading: &Reading) -> Check {
    let Reading { program, answer } = reading;
    let seen = match reading.version(&version::CLOUD_HYPERVISOR) {
        Ok(version) if matches!(configured, VmmChoice::Auto | VmmChoice::CloudHypervisor) => {
            return CLOUD_HYPERVISOR.ok(version);
        }
        Ok(seen) | Err(seen) => seen,
    };
    let install = format!("install a static release binary, {}", version::CLOUD_HYPERVISOR);
    match (configured, answer) {
        (VmmChoice::Qemu, _) => CLOUD_HYPERVISOR.not_applicable(format!("vm.vmm is \"qemu\"; {seen}")),
        (VmmChoice::Firecracker, _) => {
            CLOUD_HYPERVISOR.not_applicable(format!("vm.vmm is \"firecracker\"; {seen}"))
        }
        (VmmChoice::Auto, Answer::Missing) => CLOUD_HYPERVISOR.not_applicable("not installed"),
        (VmmChoice::Auto, _) => {
            CLOUD_HYPERVISOR.warning(seen, Fix::words(format!("{install}, or remove {program:?}")))
        }
        (VmmChoice::CloudHypervisor, _) => CLOUD_HYPERVISOR.failure(
            seen,
            Fix::words(format!("{install}, or set vm.cloud_hypervisor, or vm.vmm to \"auto\"")),
        ),
    }
}

/// Checks Firecracker, if the configuration names it.
pub fn firecracker(configured: VmmChoice, reading: &Reading) -> Check {
    match (configured, reading.version(&version::FIRECRACKER)) {
        (VmmChoice::Firecracker, Ok(version)) => FIRECRACKER.ok(version),
        (VmmChoice::Firecracker, Err(why)) => FIRECRACKER.failure(
            why,
            Fix::words(format!(
                "install a release binary, {}, or set vm.firecracker, or vm.vmm to \"auto\"",
                version::FIRECRACKER
            )),
        ),
        (_, Ok(seen) | Err(seen)) => {
            FIRECRACKER.not_applicable(format!("the configuration does not name it; {seen}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_config::Accelerator;

    use super::*;
    use crate::Verdict;

    fn reading(answer: Answer) -> Reading {
        Reading { program: "vmm".into(), answer }
    }

    #[test]
    fn qemu_must_answer_and_be_qemu() {
        for (answer, verdict, seen) in [
            (Answer::Printed("QEMU emulator version 7.2.22 (Debian)".into()), Verdict::Ok, "7.2.22 (Debian)"),
            (Answer::Printed("QEMU emulator version 10.0.2".into()), Verdict::Ok, "10.0.2"),
            (Answer::Printed("QEMU emulator version 5.2.0".into()), Verdict::Warning, "5.2.0"),
            (Answer::Printed("hello".into()), Verdict::Failure, "\"vmm\" is not QEMU: it printed \"hello\""),
            (Answer::Missing, Verdict::Failure, "\"vmm\" does not exist"),
            (Answer::Broken("ended with 3".into()), Verdict::Failure, "\"vmm\" ended with 3"),
            (Answer::Silent, Verdict::Warning, "\"vmm\" is slow: no version within 5s"),
        ] {
            let check = qemu(&reading(answer), None);
            assert_eq!((check.verdict, check.seen.as_str()), (verdict, seen));
        }
    }

    #[test]
    fn only_the_vmm_that_runs_pods_has_to_be_there() {
        let check = qemu(&reading(Answer::Missing), Some("Cloud Hypervisor"));
        assert_eq!(check.verdict, Verdict::NotApplicable);
        assert_eq!(check.seen, "pods run in Cloud Hypervisor; \"vmm\" does not exist");

        let printed = |line: &str| Answer::Printed(line.into());
        let (na, ok) = (Verdict::NotApplicable, Verdict::Ok);
        for (answer, auto, named) in [
            (printed("cloud-hypervisor v52.0"), ok, ok),
            (printed("cloud-hypervisor v51.0"), Verdict::Warning, Verdict::Failure),
            (printed("hello"), Verdict::Warning, Verdict::Failure),
            (Answer::Missing, na, Verdict::Failure),
            (Answer::Broken("ended with 1".into()), Verdict::Warning, Verdict::Failure),
            (Answer::Silent, Verdict::Warning, Verdict::Failure),
        ] {
            let reading = reading(answer);
            let verdict = |configured| cloud_hypervisor(configured, &reading).verdict;
            let verdicts = [VmmChoice::Auto, VmmChoice::CloudHypervisor, VmmChoice::Qemu].map(verdict);
            assert_eq!(verdicts, [auto, named, na], "{reading:?}");
        }
        let missing = cloud_hypervisor(VmmChoice::CloudHypervisor, &reading(Answer::Missing));
        assert!(
            missing.to_string().contains("v52 to v53, or set vm.cloud_hypervisor, or vm.vmm to"),
            "{missing}"
        );
    }

    #[test]
    fn firecracker_must_be_there_if_it_is_named() {
        let printed = |line: &str| reading(Answer::Printed(line.into()));
        let known = printed("Firecracker v1.16.1");
        assert_eq!(firecracker(VmmChoice::Firecracker, &known).verdict, Verdict::Ok);
        for unusable in [
            printed("Firecracker v1.13.0"),
            printed("hello"),
            reading(Answer::Missing),
            reading(Answer::Silent),
        ] {
            let check = firecracker(VmmChoice::Firecracker, &unusable);
            assert_eq!(check.verdict, Verdict::Failure, "{unusable:?}");
            assert!(check.to_string().contains("v1.14 to v1.16, or set vm.firecracker"), "{check}");
        }
        for configured in [VmmChoice::Auto, VmmChoice::Qemu, VmmChoice::CloudHypervisor] {
            assert_eq!(firecracker(configured, &known).verdict, Verdict::NotApplicable);
        }
        let other = cloud_hypervisor(VmmChoice::Firecracker, &printed("cloud-hypervisor v53.0"));
        assert_eq!(other.verdict, Verdict::NotApplicable, "{other}");
    }

    #[test]
    fn left_the_choice_it_is_cloud_hypervisor_where_that_and_kvm_can_be_used() {
        let auto = sandboxer_config::Config::default().vm;
        let config_of = |vmm, accelerator| VmConfig { vmm, accelerator, ..auto.clone() };
        let known = reading(Answer::Printed("cloud-hypervisor v53.0".into()));
        let old = reading(Answer::Printed("cloud-hypervisor v51.0".into()));
        let (usable, silent) = (kvm::Reading::Usable(4e7), kvm::Reading::Silent);
        let slow = kvm::Reading::Unusable(sandboxer_vmm::kvm::KvmUnusable::Slow { rate: 1e6 });
        let ch = Some("Cloud Hypervisor");
        for (config, kvm, reading, there) in [
            (&auto, &usable, &known, ch),
            (&auto, &usable, &old, None),
            (&auto, &silent, &known, None),
            (&auto, &slow, &known, None),
            (&config_of(VmmChoice::Auto, Accelerator::Kvm), &slow, &known, ch),
            (&config_of(VmmChoice::Auto, Accelerator::Tcg), &usable, &known, None),
            (&config_of(VmmChoice::Qemu, Accelerator::Auto), &usable, &known, None),
            (&config_of(VmmChoice::CloudHypervisor, Accelerator::Auto), &silent, &old, ch),
            (&config_of(VmmChoice::Firecracker, Accelerator::Auto), &silent, &known, Some("Firecracker")),
        ] {
            assert_eq!(other_than_qemu(config, kvm, reading), there, "{config:?} {kvm:?} {reading:?}");
        }
    }
}
