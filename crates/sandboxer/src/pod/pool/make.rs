//! Creation of one VM of the pool.

use std::{fs::DirBuilder, io, os::unix::fs::DirBuilderExt, sync::Arc};

use sandboxer_base::chain;
use sandboxer_protocol::id::SandboxId;
use sandboxer_vmm::{Vm, VmSpec};
use tokio_util::sync::CancellationToken;

use super::{Warm, run_dir};
use crate::{
    error::PodError,
    pod::{daemon_state::DaemonState, spare, undo::Undo},
    taps::VmTaps,
    template::{BuildError, Kind, Template},
};

/// A reason why a VM was not created.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The template cannot be used.
    #[error("the pool has no template of this size")]
    Template(#[from] BuildError),
    /// The VM or its agent failed.
    #[error("a VM of the pool failed")]
    Vm(#[from] PodError),
}

/// Creates a VM that waits. If this is cancelled or fails, nothing remains.
pub async fn warm(
    node: &Arc<DaemonState>,
    kind: Kind,
    cancel: &CancellationToken,
) -> Result<Warm, PoolError> {
    let template = node.templates.prepare(kind).await?;
    let mut undo = Undo::default();
    let limit = node.config.vm.boot_timeout;
    let id = new_id();
    let made = tokio::select! {
        () = cancel.cancelled() => Err(PodError::Cancelled(id.clone())),
        made = try_warm(node, (kind, &template), &id, &mut undo) => made,
        () = tokio::time::sleep(limit) => {
            Err(PodError::NotReady { pod: id.clone(), limit, console: "it was restored for the pool".into() })
        }
    };
    if made.is_ok() {
        undo.forget();
    } else if let Err(left) = undo.run().await {
        tracing::error!(left, "cannot clean up after a VM of the pool");
    }
    Ok(made?)
}

async fn try_warm(
    node: &Arc<DaemonState>,
    (kind, template): (Kind, &Template),
    id: &SandboxId,
    undo: &mut Undo,
) -> Result<Warm, PodError> {
    let config = &node.config.vm;
    let dir = run_dir(node).join(id);
    let host = |action| {
        let (pod, path) = (id.clone(), dir.clone());
        move |source| PodError::Path { pod, action, path, source }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(host("make run directory"))?;
    let left = dir.clone();
    undo.push("remove the run directory", async move { std::fs::remove_dir_all(left) });
    let spec = VmSpec::new(config, id.clone(), dir.clone(), template.shape, template.link_key.clone());
    let vmm = node.vmms.get(kind.vmm);
    let (taps, pooled_taps) =
        VmTaps::of_no_pod(vmm.as_ref(), &node.tap_pool, spec.nics).map_err(host("make taps for"))?;
    // The next pod of this size will be given this node, too.
    let seat = node.placer.seat(template.shape).ok().filter(|_| node.placer.places_idle());
    let cgroup = seat.as_ref().map_or(node.idle_cgroup.as_ref(), |seat| node.placer.idle(seat));
    let spare = spare::of_copy(&node.rootfs, id, template).await?;
    let disks = spare.iter().map(|spare| spare.disk.clone()).collect();
    let spec = VmSpec { background: true, cgroup: cgroup.cloned(), disks, ..taps.given_to(spec) };
    let restored = vmm.restore(&spec, &template.frozen).await;
    let vm = restored.inspect_err(|error| node.templates.not_restored(kind, template, error))?;
    let doomed = vm.clone();
    undo.push("end the VMM", async move { doomed.kill().await });
    vm.resume().await?;
    let (agent, ready) =
        sandboxer_guest::connect(id, vm.as_ref(), &template.link_key, config.agent_timeout).await?;
    // The VMM has the file open, so it can be unlinked and closed.
    let spare = spare.map(|spare| spare.disk.record());
    let spare = node.rehearsal.run(id, &vm, &agent, spec.nics, spare).await?;
    vm.pause().await?;
    Ok(Warm { vm, agent, ready, taps: pooled_taps, spare, seat, template: template.key.clone() })
}

/// Kills a waiting VM, and removes its directory.
pub async fn end(vm: &dyn Vm) {
    let record = vm.record();
    if let Err(error) = vm.kill().await {
        tracing::error!(pod = %record.pod, error = chain(&error), "cannot kill a VM of the pool");
    }
    match std::fs::remove_dir_all(&record.run_dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %record.run_dir.display(), %error, "cannot remove a directory of the pool");
        }
        _ => {}
    }
}

/// Returns a name that no VM of the pool has had before, in this or an earlier daemon.
fn new_id() -> SandboxId {
    #[expect(clippy::expect_used, reason = "letters, a hyphen and digits")]
    format!("pool-{:016x}", rand::random::<u64>()).parse().expect("is an id")
}
