//! Checkpoints: pods saved while they run, of which new pods are copies.
//!
//! ```text
//!  Checkpoints::draft ─▶ Draft ── the pod's task writes its files ──▶ Draft::finish ─▶ a checkpoint
//!  Checkpoints::load  ─▶ Restoring ─▶ Vmm::restore                                     a pod that goes on where it was
//! ```
//!
//! A checkpoint holds the memory of a tenant, so only root can enter its directory, and only pods of its namespace are
//! restored from it. For use, memory and state are read into sealed memory and checked on the way, as a template's.

pub mod archive;
pub mod counts;
pub mod manifest;
mod store;

use sandboxer_base::Code;

pub use manifest::{Identity, Manifest, SavedContainer, SavedDisk, VolumeKind, disk_file};
pub use store::{Checkpoints, Draft, InUse, Restoring, View};

use crate::error::PodError;

/// Returns the error that a checkpoint cannot be used.
pub fn refused(namespace: &str, name: &str, code: Code, reason: impl Into<String>) -> PodError {
    PodError::Checkpoint {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        reason: reason.into(),
        code,
    }
}
