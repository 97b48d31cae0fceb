//! The subjects of the tests, and the context of a case.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test helper fails its test")]

pub mod cases;
pub mod jailer;
pub mod pods;

use std::{
    env,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, OnceLock},
};

use anyhow::Result;
use libtest_mimic::{Completion, Failed, Trial};
use sandboxer_config::VmConfig;
use sandboxer_vmm::{
    Vm, Vmm,
    firecracker::Firecracker,
    kvm::{self, KvmUnusable},
};

use crate::{
    double,
    test_guest::{Pod, vm_config},
};

/// Path of the real binary, if there is one.
const REAL: &str = "FIRECRACKER";

/// The VMM under test.
#[derive(Debug, Clone)]
pub enum Subject {
    /// A double of this version.
    Double(&'static str),
    /// The real one.
    Real(PathBuf),
}

/// A running case.
pub type Work = Pin<Box<dyn Future<Output = Result<()>>>>;
/// A case in the list.
pub type Case = (&'static str, fn(Subject) -> Work);

/// Returns cases from the names of their functions.
#[macro_export]
macro_rules! listed {
    ($($name:ident),+ $(,)?) => {
        [$((stringify!($name), |subject| -> $crate::firecracker_suite::Work {
            Box::pin($name(subject))
        })),+] as [$crate::firecracker_suite::Case; _]
    };
}

impl Subject {
    /// Returns the real binary, if one is configured.
    pub fn real() -> Option<Self> {
        env::var_os(REAL).map(|path| Self::Real(path.into()))
    }

    /// Creates the driver for this subject.
    pub async fn vmm(&self, pod: &Pod) -> Result<Firecracker> {
        let firecracker = match self {
            Self::Double(version) => double::install(&pod.path(""), version),
            Self::Real(program) => program.clone(),
        };
        Ok(Firecracker::new(&VmConfig { firecracker, ..vm_config() }, "it is tested".into()).await?)
    }
}

/// A running VM.
pub struct Running {
    pub pod: Pod,
    pub vmm: Firecracker,
    pub vm: Arc<dyn Vm>,
}

impl Running {
    /// Boots a VM whose guest does nothing.
    pub async fn of(subject: &Subject) -> Result<Self> {
        let pod = Pod::new("contract");
        let vmm = subject.vmm(&pod).await?;
        let vm = vmm.boot(&pod.halting_spec()).await?;
        Ok(Self { pod, vmm, vm })
    }

    /// Returns where this process finds the `/run` of its VMM.
    pub fn in_room(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root/run", self.vm.record().pid)).join(name)
    }

    /// Kills the VM.
    pub async fn end(self) -> Result<()> {
        Ok(self.vm.kill().await?)
    }
}

/// Returns why KVM is not usable, if it is not.
pub fn kvm_unusable() -> Option<&'static str> {
    static WHY: OnceLock<Option<String>> = OnceLock::new();
    // Slow is good enough if it is configured by name.
    let asked_for = || env::var("SANDBOXER_TEST_ACCELERATOR").is_ok_and(|name| name == "kvm");
    let measure = || match kvm::measure(Path::new("/dev/kvm")) {
        Ok(_) => None,
        Err(KvmUnusable::Slow { .. }) if asked_for() => None,
        Err(why) => Some(why.to_string()),
    };
    WHY.get_or_init(measure).as_deref()
}

/// Returns tests of these cases on the real binary, ignored if there is `why` to.
pub fn on_real(group: &str, cases: impl IntoIterator<Item = Case>, missing: Option<String>) -> Vec<Trial> {
    let trials = cases.into_iter().map(|case| match (Subject::real(), kvm_unusable(), &missing) {
        (None, _, _) => skipped(group, case, "FIRECRACKER names no binary".into()),
        (_, Some(why), _) => skipped(group, case, why.to_owned()),
        (_, _, Some(why)) => skipped(group, case, why.clone()),
        (Some(real), None, None) => trial(group, &real, case),
    });
    trials.collect()
}

/// Returns a test of one case on one subject.
pub fn trial(group: &str, subject: &Subject, (name, case): Case) -> Trial {
    let subject = subject.clone();
    Trial::test(format!("{group}::{name}"), move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(case(subject)).map_err(|error| Failed::from(format!("{error:?}")))
    })
}

/// Returns a test that cannot run here, counted as ignored.
fn skipped(group: &str, (name, _): Case, why: String) -> Trial {
    Trial::ignorable_test(format!("{group}::{name}"), move || Ok(Completion::ignored_with(why)))
}
