//! Cloud Hypervisor as the subject of the tests.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test helper fails its test")]

pub mod cases;
pub mod faults;
pub mod pods;
pub mod proof;
pub mod tap;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use sandboxer_config::VmConfig;
use sandboxer_vmm::{
    MEMORY, Vm,
    cloud_hypervisor::{
        self,
        api::{Api, ApiError},
        wire::VmState,
    },
};

use crate::{
    double::{self, behaviour::Behaviour},
    test_guest::Pod,
    vmm_suite::{LONG, Subject},
};

/// The Cloud Hypervisor under test.
#[derive(Debug, Clone)]
pub enum CloudHypervisor {
    /// A double with this behaviour.
    Double(Behaviour),
    Real(PathBuf),
}

impl Subject for CloudHypervisor {
    type Vmm = cloud_hypervisor::CloudHypervisor;

    const NAME: &'static str = cloud_hypervisor::NAME;
    const PROGRAM: &'static str = "CLOUD_HYPERVISOR";
    const TEMPLATE: &'static [&'static str] = &["config.json", MEMORY, "state.json"];
    const HAS_JAIL_DIR: bool = true;
    const HAS_HOTPLUG_MEMORY: bool = true;
    const SAVES: bool = true;
    const HAS_HOTPLUG_VCPUS: bool = true;
    // The guest has to let go of it.
    const DETACHES_ALONE: bool = false;

    fn real(program: PathBuf) -> Self {
        Self::Real(program)
    }

    fn is_real(&self) -> bool {
        matches!(self, Self::Real(_))
    }

    async fn vmm(&self, pod: &Pod, config: VmConfig) -> Result<Self::Vmm> {
        let program = match self {
            Self::Double(behaviour) => double::install(&pod.path(""), behaviour),
            Self::Real(program) => program.clone(),
        };
        let config = VmConfig { cloud_hypervisor: program, ..config };
        Ok(Self::Vmm::new(&config, "it is tested".into()).await?)
    }

    async fn is_running(&self, vm: &dyn Vm) -> Result<Option<bool>> {
        Ok(Some(api(vm).info().await?.state == VmState::Running))
    }
}

/// Returns the API of a VM's VMM.
pub fn api(vm: &dyn Vm) -> Api {
    Api::new(&vm.record().run_dir, LONG)
}

/// Returns the reason of a refused call.
pub fn refusal<T>(result: Result<T, ApiError>) -> Result<String> {
    match result {
        Err(ApiError::Refused { reason, .. }) => Ok(reason),
        Err(other) => Err(other).context("refused in another way than the API does"),
        Ok(_) => bail!("taken instead of refused"),
    }
}
