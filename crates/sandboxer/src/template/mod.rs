//! Templates: frozen VMs of which pods are copies.
//!
//! ```text
//!  Templates::get ─▶ Template ─▶ Vmm::restore                         a pod, some 50 ms later
//!      │ none yet, or stale
//!      └─▶ key (of inputs) ─▶ image::load ─▶ Template
//!                               │ none on disk, or damaged
//!                               └─▶ build: boot, wait for the agent, prepare, freeze ─▶ image::write
//! ```
//!
//! A template is made from a VM that belonged to no pod. Its guest was prepared: it has run a container of ours, so that
//! copies do little for the first time, and it has mounted a scratch disk. On disk a template is a
//! directory below `state_dir/templates`, named by the hash of all its inputs. To be used it is read into sealed
//! memory and checked on the way. So pods are copies of exactly what was checked, and neither a disk error nor a
//! compromised VMM can change it.

mod bounds;
mod build;
pub(crate) mod image;
mod key;
mod pages;
mod slot;
mod store;

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use sandboxer_guest::Agent;
use sandboxer_protocol::{id::SandboxId, link::LinkKey};

pub use build::{BuildError, template_id};
pub use image::{Manifest, TemplateError};
pub use key::{ScratchInput, TemplateKey};
pub use slot::Missing;
pub use store::{TemplateView, Templates, run_dir};

use sandboxer_host::rootfs::EmptyScratch;
pub use sandboxer_vmm::Shape;
use sandboxer_vmm::{DiskLimits, Frozen, Vm, VmmKey};

use crate::error::PodError;

/// VMs that are copies of one template at a time. A shape alone is of the configured VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kind {
    /// Their VMM.
    pub vmm: VmmKey,
    /// Their size.
    pub shape: Shape,
}

impl From<Shape> for Kind {
    fn from(shape: Shape) -> Self {
        Self { vmm: VmmKey::default(), shape }
    }
}

/// A frozen VM, checked and in memory.
#[derive(Debug)]
pub struct Template {
    /// The hash of its inputs.
    pub key: TemplateKey,
    /// The size of its VMs.
    pub shape: Shape,
    /// Key of the link to the agents of its VMs, until each gets its own.
    pub link_key: LinkKey,
    /// Its guest has mounted a scratch disk; each copy needs one of its own, with these limits.
    pub scratch_limits: Option<DiskLimits>,
    /// The files that its VMM restores.
    pub frozen: Frozen,
}

/// Scratch disks of a template's VM and of its copies.
#[derive(Debug, Clone)]
pub struct ScratchDisks {
    /// Of them all: the empty file system that each is a copy of.
    pub empty: EmptyScratch,
    /// Limits of each. A VMM may keep those of the template's VM.
    pub limits: DiskLimits,
}

/// Prepares the guest of a VM that is about to be frozen.
#[async_trait]
pub trait Preparation: fmt::Debug + Send + Sync {
    /// Returns the scratch disks, if there are any.
    async fn scratch_disks(&self) -> Result<Option<ScratchDisks>, PodError>;

    /// Prepares the guest of `vm`, with so many network interfaces.
    async fn prepare(
        &self,
        id: &SandboxId,
        vm: &Arc<dyn Vm>,
        agent: &Agent,
        nics: u8,
    ) -> Result<(), PodError>;
}
