//! A scratch disk that a guest mounts before a container needs it.
//!
//! The first container of a pod that writes to its root file system takes it. Later containers, and those that request
//! another size, get a new disk when they are created. The guest of a template has it mounted, so a copy only needs a file
//! for it: the same empty file system, to which the guest of the template has written nothing that it does not still have in
//! memory. A VM that boots for its pod has it from the start, not mounted.

use std::sync::{Mutex, PoisonError};

use sandboxer_base::chain;
use sandboxer_host::rootfs::{FsType, RootfsStore, Scratch};
use sandboxer_protocol::{agent as wire, id::SandboxId};
use sandboxer_vmm::{DiskLimits, DiskSpec, SPARE};

use crate::{error::PodError, pod::container::start::RunningVm, template::Template};

/// The scratch disk that no container of the pod uses yet, if there is one.
#[derive(Debug, Default)]
pub struct Spare(
    // Held for a lookup, never across an await.
    Mutex<Option<DiskSpec>>,
);

impl Spare {
    /// Records that the guest has one.
    pub fn put(&self, disk: Option<DiskSpec>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = disk;
    }

    /// Takes it for a container.
    pub fn take(&self) -> Option<DiskSpec> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The disk of a VM that is about to start.
#[derive(Debug)]
pub struct First {
    /// The disk.
    pub disk: DiskSpec,
    /// Its file, until the VMM has opened it.
    pub file: Scratch,
}

/// Creates the disk of a VM that boots for `pod`; none if containers write to memory, or if it cannot be created: a container that
/// needs it fails then.
pub async fn of_boot(rootfs: &RootfsStore, pod: &SandboxId, limits: DiskLimits) -> Option<First> {
    match made(rootfs, pod, limits).await {
        Ok(first) => first,
        Err(error) => {
            tracing::warn!(%pod, error = chain(&error), "the pod starts without a disk for writes");
            None
        }
    }
}

async fn made(rootfs: &RootfsStore, pod: &SandboxId, limits: DiskLimits) -> Result<Option<First>, PodError> {
    let file = rootfs.scratch(pod, pod, None).await?;
    Ok(file.map(|file| First { disk: DiskSpec { limits, ..disk(&file) }, file }))
}

/// Creates the disk of a copy of `template`, whose guest has it mounted, if it has one.
pub async fn of_copy(
    rootfs: &RootfsStore,
    pod: &SandboxId,
    template: &Template,
) -> Result<Option<First>, PodError> {
    match template.scratch_limits {
        Some(limits) => made(rootfs, pod, limits).await,
        None => Ok(None),
    }
}

fn disk(file: &Scratch) -> DiskSpec {
    DiskSpec {
        serial: SPARE.to_owned(),
        path: file.path().to_owned(),
        read_only: false,
        limits: DiskLimits::default(),
    }
}

/// Attaches one to a VM and mounts it in the guest; none if containers write to memory.
pub async fn plug(
    rootfs: &RootfsStore,
    pod: &SandboxId,
    live: &RunningVm,
) -> Result<Option<DiskSpec>, PodError> {
    let Some(scratch) = rootfs.scratch(pod, pod, None).await? else { return Ok(None) };
    let disk = disk(&scratch);
    live.attach_disk(&disk).await?;
    // The VMM has it open, so the file can be unlinked.
    drop(scratch);
    let prepared = live.agent.prepare_disk(message(&disk)).await;
    if prepared.is_err()
        && let Err(error) = live.vm.detach_disk(SPARE).await
    {
        tracing::warn!(%pod, error = chain(&error), "cannot detach a scratch disk");
    }
    prepared?;
    Ok(Some(disk))
}

/// Converts a scratch disk for the agent.
pub fn message(disk: &DiskSpec) -> wire::Disk {
    wire::Disk {
        serial: disk.serial.clone(),
        fstype: FsType::Ext4.to_string(),
        read_only: false,
        scratch: true,
        ..Default::default()
    }
}
