//! The subjects of the tests, and the context of a case.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test helper fails its test")]

pub mod cases;
pub mod faults;
pub mod pods;
pub mod proof;
pub mod tap;

use std::{
    env,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use libtest_mimic::{Completion, Failed, Trial};
use sandboxer_config::VmConfig;
use sandboxer_vmm::{
    Vm, VmSpec, Vmm,
    cloud_hypervisor::{
        CloudHypervisor,
        api::{Api, ApiError},
    },
    kvm::{self, KvmUnusable},
};

use crate::{
    double::{self, behaviour::Behaviour},
    test_guest::{Pod, vm_config},
};

/// Path of the real binary, if there is one.
const REAL: &str = "CLOUD_HYPERVISOR";
/// Far longer than anything these tests wait for on a busy host.
const LONG: Duration = Duration::from_secs(90);

/// The VMM under test.
#[derive(Debug, Clone)]
pub enum Subject {
    /// A double with this behaviour.
    Double(Behaviour),
    /// The real one.
    Real(PathBuf),
}

/// How a case ended that did not fail.
pub enum Outcome {
    Done,
    /// Skipped, and why.
    Skipped(String),
}

/// A running case.
pub type Work = Pin<Box<dyn Future<Output = Result<Outcome>>>>;
/// A case in the list.
pub type Case = (&'static str, fn(Subject) -> Work);

/// `cases![first, second]` makes the list of a file's cases.
#[macro_export]
macro_rules! listed {
    ($($name:ident),+ $(,)?) => {
        [$((stringify!($name), |subject| -> $crate::cloud_hypervisor_suite::Work {
            Box::pin($name(subject))
        })),+] as [$crate::cloud_hypervisor_suite::Case; _]
    };
}

impl Subject {
    /// Returns the real binary, if one is configured.
    pub fn real() -> Option<Self> {
        env::var_os(REAL).map(|path| Self::Real(path.into()))
    }

    /// Creates the driver for this subject.
    pub async fn vmm(&self, pod: &Pod, config: VmConfig) -> Result<CloudHypervisor> {
        let program = match self {
            Self::Double(behaviour) => double::install(&pod.path(""), behaviour),
            Self::Real(program) => program.clone(),
        };
        let config = VmConfig { cloud_hypervisor: program, ..config };
        Ok(CloudHypervisor::new(&config, "it is tested".into()).await?)
    }
}

/// A running VM, and its VMM's API.
pub struct Running {
    pub pod: Pod,
    pub spec: VmSpec,
    pub vmm: CloudHypervisor,
    pub vm: Arc<dyn Vm>,
    pub api: Api,
}

impl Running {
    /// Boots a VM whose guest does nothing.
    pub async fn of(subject: &Subject) -> Result<Self> {
        Self::with(subject, vm_config()).await
    }

    pub async fn with(subject: &Subject, config: VmConfig) -> Result<Self> {
        let pod = Pod::new("contract");
        let spec = pod.halting_spec();
        let vmm = subject.vmm(&pod, config).await?;
        let vm = vmm.boot(&spec).await?;
        let api = Api::new(&spec.run_dir, LONG);
        Ok(Self { pod, spec, vmm, vm, api })
    }

    /// Returns where this process finds the `/run` of its VMM.
    pub fn in_room(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root/run", self.vm.record().pid)).join(name)
    }

    /// Kills the VM.
    pub async fn end(self) -> Result<Outcome> {
        self.vm.kill().await?;
        Ok(Outcome::Done)
    }
}

/// Returns the reason of a refused call.
pub fn refusal<T>(result: Result<T, ApiError>) -> Result<String> {
    match result {
        Err(ApiError::Refused { reason, .. }) => Ok(reason),
        Err(other) => Err(other).context("refused in another way than the API does"),
        Ok(_) => bail!("taken instead of refused"),
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

/// Runs a case to its end.
pub fn run(case: impl Future<Output = Result<Outcome>>) -> Result<Outcome> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(case)
}

/// Returns a test of one case on one subject.
pub fn trial(group: &str, subject: &Subject, (name, case): Case) -> Trial {
    let subject = subject.clone();
    Trial::ignorable_test(format!("{group}::{name}"), move || match run(case(subject)) {
        Ok(Outcome::Done) => Ok(Completion::Completed),
        Ok(Outcome::Skipped(why)) => Ok(Completion::ignored_with(why)),
        Err(error) => Err(Failed::from(format!("{error:?}"))),
    })
}

/// Returns a test that cannot run here, counted as ignored.
pub fn skipped(name: &str, why: String) -> Trial {
    Trial::ignorable_test(name, move || Ok(Completion::ignored_with(why)))
}
