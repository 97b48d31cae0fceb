//! Templates: frozen VMs of which pods are copies.
//!
//! ```text
//!  Templates::get ─▶ Template ─▶ Vmm::restore                         a pod, some 50 ms later
//!      │ none yet, or stale
//!      └─▶ key (of inputs) ─▶ image::load ─▶ Template
//!                               │ none on disk, or damaged
//!                               └─▶ build: boot, wait for the agent, freeze ─▶ image::write
//! ```
//!
//! A template is made from a VM that ran no container and belonged to no pod. On disk it is a
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

use sandboxer_protocol::link::LinkKey;

pub use build::{BuildError, template_id};
pub use image::{Manifest, TemplateError};
pub use key::TemplateKey;
pub use slot::Missing;
pub use store::{TemplateView, Templates, run_dir};

pub use sandboxer_vmm::Shape;
use sandboxer_vmm::{Frozen, VmmKey};

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
    /// The files that its VMM restores.
    pub frozen: Frozen,
}
