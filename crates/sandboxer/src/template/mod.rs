//! Templates: frozen VMs that pods are copied from.
//!
//! ```text
//!  Templates::get ─▶ Template ─▶ Vmm::restore                         a pod, about 50 ms later
//!      │ none yet, or stale
//!      └─▶ key (of inputs) ─▶ image::load ─▶ Template
//!                               │ none on disk, or damaged
//!                               └─▶ build: boot, wait for the agent, prepare, freeze ─▶ image::write
//! ```
//!
//! A template is created from a VM that belonged to no pod. Its guest was prepared: it has run a container of ours, so
//! that copies do little for the first time, and it has mounted a scratch disk. On disk a template is a directory below
//! `state_dir/templates`, named by the hash of all its inputs. For use, it is read into sealed memory and checked on
//! the way. So pods are copies of exactly the checked content, and neither a disk error nor a compromised VMM can
//! change it.

mod bounds;
mod build;
pub(crate) mod image;
mod key;
pub(crate) mod pages;
mod slot;
mod store;

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use sandboxer_guest::Agent;
use sandboxer_protocol::{id::SandboxId, link::LinkKey};

pub use build::{BuildError, template_id};
pub use image::{Manifest, TemplateError};
pub(crate) use key::Stamp;
pub use key::{Inputs, ScratchInput, TemplateKey};
pub use slot::Missing;
pub use store::{TemplateView, Templates, run_dir};

use sandboxer_host::rootfs::EmptyScratch;
pub use sandboxer_vmm::Shape;
use sandboxer_vmm::{DiskLimits, Frozen, Vm, VmmKey};

use crate::error::PodError;

/// A kind of VM: all VMs of one kind are copies of the same template. A shape alone means the configured VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kind {
    /// The VMM of these VMs.
    pub vmm: VmmKey,
    /// The size of these VMs.
    pub shape: Shape,
}

impl Kind {
    /// Returns this kind with another number of network interfaces.
    pub const fn with_nics(self, nics: u8) -> Self {
        Self { shape: Shape { nics, ..self.shape }, ..self }
    }
}

impl From<Shape> for Kind {
    fn from(shape: Shape) -> Self {
        Self { vmm: VmmKey::default(), shape }
    }
}

/// A frozen VM, checked and in memory.
#[derive(Debug)]
pub struct Template {
    /// The hash of the template's inputs.
    pub key: TemplateKey,
    /// The size of the template's VMs.
    pub shape: Shape,
    /// Key of the link to the agents of the VMs, until each gets its own.
    pub link_key: LinkKey,
    /// Limits of the scratch disk that the guest has mounted, if any; each copy needs a disk of its own with these
    /// limits.
    pub scratch_limits: Option<DiskLimits>,
    /// The files that the VMM restores.
    pub frozen: Frozen,
}

/// Scratch disks of a template's VM and of its copies.
#[derive(Debug, Clone)]
pub struct ScratchDisks {
    /// The empty file system that all these disks are copies of.
    pub empty: EmptyScratch,
    /// Limits of each disk. A VMM may keep the limits of the template's VM.
    pub limits: DiskLimits,
}

/// The preparation of the guest of a VM that is about to be frozen.
#[async_trait]
pub trait Preparation: fmt::Debug + Send + Sync {
    /// Returns the scratch disks, if there are any.
    async fn scratch_disks(&self) -> Result<Option<ScratchDisks>, PodError>;

    /// Prepares the guest of `vm`, which has `nics` network interfaces.
    async fn prepare(
        &self,
        id: &SandboxId,
        vm: &Arc<dyn Vm>,
        agent: &Agent,
        nics: u8,
    ) -> Result<(), PodError>;
}
