//! A scratch disk that a guest mounts before a container needs it.
//!
//! The first container of a pod that writes to its root file system takes it. Later containers, and containers that
//! request another size, get a new disk when they are created. The guest of a template has it mounted, so a copy only
//! needs a file for it: the same empty file system. The template's guest still has in memory everything that it has
//! written to it. A VM that boots for its pod has the disk from the start, not mounted.

use std::sync::{Mutex, PoisonError};

use sandboxer_base::chain;
use sandboxer_host::rootfs::{FsType, RootfsStore, Scratch};
use sandboxer_protocol::{agent as wire, id::SandboxId};
use sandboxer_vmm::{DiskLimits, DiskRecord, DiskSpec, SPARE};

use crate::{error::PodError, pod::running_vm::RunningVm, template::Template};

/// The scratch disk that no container of the pod uses yet, if there is one.
#[derive(Debug, Default)]
pub struct Spare(
    // Held for a lookup, never across an await.
    Mutex<Option<DiskRecord>>,
);

impl Spare {
    /// Records the guest's spare disk, if it has one.
    pub fn put(&self, disk: Option<DiskRecord>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = disk;
    }

    /// Takes the disk for a container.
    pub fn take(&self) -> Option<DiskRecord> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The spare disk of a VM that is about to start.
#[derive(Debug)]
pub struct First {
    /// The disk's description for the VMM.
    pub disk: DiskSpec,
    /// The disk's file, until the VMM has opened it.
    pub file: Scratch,
}

/// Creates the disk of a VM that boots for `pod`. Returns `None` if containers write to memory, or if it cannot be
/// created: then a container that needs it fails.
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

/// Creates the disk of a copy of `template`, if the template's guest has one mounted.
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
    DiskSpec { serial: SPARE.to_owned(), file: file.file(), read_only: false, limits: DiskLimits::default() }
}

/// Attaches a spare disk to a VM and mounts it in the guest; returns `None` if containers write to memory.
pub async fn plug(
    rootfs: &RootfsStore,
    pod: &SandboxId,
    live: &RunningVm,
) -> Result<Option<DiskRecord>, PodError> {
    let Some(scratch) = rootfs.scratch(pod, pod, None).await? else { return Ok(None) };
    let disk = disk(&scratch);
    live.attach_disk(&disk).await?;
    let record = disk.record();
    // The VMM has it open, so the file can be unlinked and closed.
    drop((scratch, disk));
    let prepared = live.agent.prepare_disk(message(SPARE)).await;
    if prepared.is_err()
        && let Err(error) = live.vm.detach_disk(SPARE).await
    {
        tracing::warn!(%pod, error = chain(&error), "cannot detach a scratch disk");
    }
    prepared?;
    Ok(Some(record))
}

/// Describes a scratch disk to the agent.
pub fn message(serial: &str) -> wire::Disk {
    wire::Disk {
        serial: serial.to_owned(),
        fstype: FsType::Ext4.to_string(),
        read_only: false,
        scratch: true,
        ..Default::default()
    }
}
