//! The tests that all VMMs and their doubles pass, and what VMMs' own tests share.
//!
//! A VMM is a [`Subject`]. `cases.rs` needs no guest that boots; `pods.rs` boots the guest image.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test helper fails its test")]
#![allow(dead_code, reason = "several test programs use different parts of it")]
#![allow(unused_macros, unused_imports, reason = "several test programs use different parts of it")]

pub mod cases;
pub mod pods;

use std::{
    env, fs,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::{Context, Result};
use libtest_mimic::{Completion, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use sandboxer_config::VmConfig;
use sandboxer_vmm::{
    Vm, VmSpec, Vmm,
    kvm::{self, KvmUnusable},
};

use crate::test_guest::{Pod, vm_config};

/// Far longer than anything these tests wait for on a busy host.
pub const LONG: Duration = Duration::from_secs(90);

/// A VMM under test: a double of it, or the real one.
pub trait Subject: Clone + Send + Sync + 'static {
    /// The VMM's driver.
    type Vmm: Vmm;

    /// Value of `VmmInfo::name`.
    const NAME: &'static str;
    /// Variable with the path of the real program.
    const PROGRAM: &'static str;
    /// Names of the files of a frozen VM, in order.
    const TEMPLATE: &'static [&'static str];
    /// Whether the VMM has a directory in its jail that it can write to.
    const HAS_JAIL_DIR: bool;
    /// Whether a guest can get memory while it runs.
    const HAS_HOTPLUG_MEMORY: bool;
    /// Whether a guest can get vCPUs while it runs.
    const HAS_HOTPLUG_VCPUS: bool;
    /// Whether a VM can be saved while it runs.
    const SAVES: bool;
    /// Whether a disk can be detached from a guest that does nothing.
    const DETACHES_ALONE: bool;

    /// Returns the real VMM.
    fn real(program: PathBuf) -> Self;

    /// Returns whether this is the real VMM, not a double.
    fn is_real(&self) -> bool;

    /// Returns the driver. A double is installed in the directory of `pod`.
    async fn vmm(&self, pod: &Pod, config: VmConfig) -> Result<Self::Vmm>;

    /// Returns a VM for a case that needs no guest.
    fn spec(&self, pod: &Pod) -> VmSpec {
        pod.halting_spec()
    }

    /// Returns whether the guest of [`Subject::spec`] answers as `init.sh` does.
    fn answers(&self) -> bool {
        !self.is_real()
    }

    /// Returns whether the VMM of `vm` says that the guest's CPUs run; `None`: it does not say.
    async fn is_running(&self, _: &dyn Vm) -> Result<Option<bool>> {
        Ok(None)
    }
}

/// How a case ended that did not fail.
pub enum Outcome {
    Done,
    /// Skipped, and why.
    Skipped(String),
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Done
    }
}

/// A running case.
pub type Work = Pin<Box<dyn Future<Output = Result<Outcome>>>>;
/// A case in a list: its name and its function.
pub type Case<S> = (&'static str, fn(S) -> Work);

/// `listed![first, second]` makes a list of cases from the names of their functions.
#[macro_export]
macro_rules! listed {
    ($($name:ident),+ $(,)?) => {
        [$((stringify!($name), |subject| -> $crate::vmm_suite::Work {
            Box::pin(async move { Ok($crate::vmm_suite::Outcome::from($name(subject).await?)) })
        })),+] as [$crate::vmm_suite::Case<_>; _]
    };
}

/// A running VM.
pub struct Running<S: Subject> {
    pub pod: Pod,
    pub spec: VmSpec,
    pub vmm: S::Vmm,
    pub vm: Arc<dyn Vm>,
}

impl<S: Subject> Running<S> {
    /// Boots a VM whose guest does nothing.
    pub async fn start(subject: &S) -> Result<Self> {
        Self::start_with(subject, vm_config()).await
    }

    pub async fn start_with(subject: &S, config: VmConfig) -> Result<Self> {
        let pod = Pod::new("contract");
        let spec = subject.spec(&pod);
        let vmm = subject.vmm(&pod, config).await?;
        let vm = vmm.boot(&spec).await?;
        Ok(Self { pod, spec, vmm, vm })
    }

    /// Returns where this process finds the `/run` of its VMM.
    pub fn in_jail_dir(&self, name: &str) -> PathBuf {
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
    let is_configured = || env::var("SANDBOXER_TEST_ACCELERATOR").is_ok_and(|name| name == "kvm");
    let measure = || match kvm::measure(Path::new("/dev/kvm")) {
        Ok(_) => None,
        Err(KvmUnusable::Slow { .. }) if is_configured() => None,
        Err(why) => Some(why.to_string()),
    };
    WHY.get_or_init(measure).as_deref()
}

/// Runs a case to its end.
pub fn run<T>(case: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(case)
}

/// Returns a test of one case on one subject.
pub fn trial<S: Subject>(group: &str, subject: &S, (name, case): Case<S>) -> Trial {
    let subject = subject.clone();
    Trial::ignorable_test(format!("{group}::{name}"), move || match run(case(subject)) {
        Ok(Outcome::Done) => Ok(Completion::Completed),
        Ok(Outcome::Skipped(why)) => Ok(Completion::ignored_with(why)),
        Err(error) => Err(Failed::from(format!("{error:?}"))),
    })
}

/// Returns tests of these cases on the real program, ignored if there is none or for the reason `missing`.
pub fn on_real<S: Subject>(
    group: &str,
    cases: impl IntoIterator<Item = Case<S>>,
    missing: Option<String>,
) -> Vec<Trial> {
    let program = env::var_os(S::PROGRAM).ok_or_else(|| format!("{} names no binary", S::PROGRAM));
    let real = match (program, kvm_unusable(), missing) {
        (_, _, Some(why)) | (Err(why), _, _) => Err(why),
        (_, Some(why), _) => Err(why.to_owned()),
        (Ok(program), None, None) => Ok(S::real(program.into())),
    };
    let trials = cases.into_iter().map(|case| match &real {
        Ok(real) => trial(group, real, case),
        Err(why) => {
            let why = why.clone();
            Trial::ignorable_test(format!("{group}::{}", case.0), move || Ok(Completion::ignored_with(why)))
        }
    });
    trials.collect()
}

/// Returns the names in a VM's directory.
pub fn left_in(spec: &VmSpec) -> Result<Vec<String>> {
    fs::read_dir(&spec.run_dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Kills a VMM as if somebody else did.
pub fn kill(vm: &dyn Vm) -> Result<()> {
    let pid = Pid::from_raw(vm.record().pid.try_into()?).context("a VMM has a pid")?;
    Ok(kill_process(pid, Signal::KILL)?)
}
