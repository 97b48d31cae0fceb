//! Firecracker as the subject of the tests.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test helper fails its test")]

pub mod cases;
pub mod jailer;
pub mod pods;

use std::path::PathBuf;

use anyhow::Result;
use sandboxer_config::VmConfig;
use sandboxer_vmm::{MEMORY, firecracker};

use crate::{double, test_guest::Pod, vmm_suite::Subject};

/// The Firecracker under test.
#[derive(Debug, Clone)]
pub enum Firecracker {
    /// A double of this version.
    Double(&'static str),
    Real(PathBuf),
}

impl Subject for Firecracker {
    type Vmm = firecracker::Firecracker;

    const NAME: &'static str = firecracker::NAME;
    const PROGRAM: &'static str = "FIRECRACKER";
    const TEMPLATE: &'static [&'static str] = &[MEMORY, "state"];
    const HAS_JAIL_DIR: bool = true;
    const HAS_HOTPLUG_MEMORY: bool = true;
    const SAVES: bool = false;
    const HAS_HOTPLUG_VCPUS: bool = false;
    const DETACHES_ALONE: bool = true;

    fn real(program: PathBuf) -> Self {
        Self::Real(program)
    }

    fn is_real(&self) -> bool {
        matches!(self, Self::Real(_))
    }

    async fn vmm(&self, pod: &Pod, config: VmConfig) -> Result<Self::Vmm> {
        let firecracker = match self {
            Self::Double(version) => double::install(&pod.path(""), version),
            Self::Real(program) => program.clone(),
        };
        Ok(Self::Vmm::new(&VmConfig { firecracker, ..config }, "it is tested".into()).await?)
    }
}
