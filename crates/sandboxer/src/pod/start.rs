//! The start of a pod, top to bottom. Each phase (`start/phases.rs`) consumes the previous one, so a half-started pod
//! cannot be used. Each phase registers its undo step, so a failed start leaves nothing behind.
//!
//! ```text
//!  Prepared ─▶ claim   ─▶ Greeted ─▶ configure ─▶ StartedPod   from the pool
//!           ─▶ restore ─▶ Running ─▶ greet ─▶ …                as a copy of a template
//!           ─▶ boot    ─▶ Running ─▶ greet ─▶ …
//!           ─▶ go_on   ─▶ Running ─▶ greet ─▶ …                  from a checkpoint; there is no other path for it
//! ```
//!
//! If the pool or a template cannot provide a VM, the start falls back to the next slower path. The caller of
//! RunPodSandbox does not notice.

mod phases;
mod source;

use std::{collections::BTreeMap, mem, net::TcpListener};

use sandboxer_base::{Code, chain};
use sandboxer_config::{StartPath, VmmName};
use sandboxer_host::network::{self, Interface};
use sandboxer_protocol::{id::Id, link::LinkKey, stage::Stage};
use sandboxer_vmm::{DiskRecord, VmmError, VmmKey};
use tokio::{sync::SemaphorePermit, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    admission::Work,
    cgroup::{self, CgroupAttach},
    checkpoint::{Restored, misfit},
    daemon_state::DaemonState,
    host_ports,
    place::{self, Place},
    running_vm::RunningVm,
    spec::PodSpec,
    stages::Stages,
    start_paths,
    undo::Undo,
};
use crate::{
    checkpoint::{self, Restoring},
    error::PodError,
    template::Kind,
};
pub use phases::vm_ended;
use phases::{Greeted, PooledResources, Prepared};
use source::{Source, SourceVm};

/// A pod whose start is complete.
#[derive(Debug)]
pub struct StartedPod {
    /// The pod's VM and agent.
    pub live: RunningVm,
    /// Guest kernel version.
    pub kernel_release: String,
    /// The start path that provided the VM; `None`: the pod was restored.
    pub start_path: Option<StartPath>,
    /// The saved containers with which the pod goes on.
    pub restored: Option<Restored>,
    /// The pod's network interfaces.
    pub interfaces: Vec<Interface>,
    /// Listeners on the host's ports that lead to the pod.
    pub host_ports: Vec<TcpListener>,
    /// The move of the VMM into the pod's cgroup, if it is still in progress.
    pub cgroup_attach: Option<CgroupAttach>,
    /// A scratch disk that the guest has already mounted.
    pub spare: Option<DiskRecord>,
    /// The place of the VMM.
    pub place: Place,
}

/// Maximum number of boots per pod. Each boot gets an equal share of the remaining time.
///
/// With emulated guests on an overloaded host, about one boot in 130 hung before its agent ran; a second boot nearly
/// always succeeded.
const BOOTS: u32 = 2;

/// Divisor of the remaining time for a start path faster than a boot, so that a hang leaves enough for the others.
const FASTER: u32 = 4;

/// Starts a pod. If this is cancelled or fails, everything is undone before it returns.
pub async fn start(
    node: &DaemonState,
    spec: &PodSpec,
    key: &LinkKey,
    stages: &Stages,
    cancel: &CancellationToken,
) -> Result<StartedPod, PodError> {
    let _urgent = node.admission.urgent();
    let interfaces = stages.run(Stage::Netns, interfaces(node, spec)).await?;
    // Check before anything is created.
    let host_ports = host_ports::listen(&node.front, spec)?;
    let kind = Kind { vmm: vmm(node, spec)?, shape: spec.shape(interfaces.len()) };
    let place = place::choose(node, spec, kind)?;
    let deadline = Instant::now() + node.config.vm.boot_timeout;
    let interfaces = &interfaces;
    let mut start =
        Start { node, spec, kind, interfaces, host_ports, key, stages, place, deadline, boots: BOOTS };
    if spec.misses_pool {
        node.start_paths.missed(StartPath::Pool, "huge-pages", None);
    }
    if let Some(name) = &spec.restore_from {
        // No other VM would do.
        let restored = async {
            let vm = SourceVm::Checkpoint(Box::new(saved(node, spec, kind, name).await?));
            let source = Source { vm, place: start.place.clone() };
            start.attempt(source, cancel).await
        };
        let restored = restored.await;
        node.checkpoints.counts.restores.add(restored.is_ok());
        return restored;
    }
    let mut start_path = spec.start_path;
    loop {
        let failed = match Source::take(node, spec, kind, &start.place, start_path) {
            Ok(source) => match start.attempt(source, cancel).await {
                Ok(started) => {
                    node.start_paths.taken(start_path);
                    return Ok(started);
                }
                Err(error) => error,
            },
            Err(reason) => {
                node.start_paths.missed(start_path, reason, None);
                start_path = start_path.slower();
                continue;
            }
        };
        let is_silent = matches!(failed, PodError::NotReady { .. } | PodError::Vmm(VmmError::Hung { .. }));
        match failed.code() {
            // Another VM would fail in the same way.
            Code::Cancelled | Code::InvalidArgument => return Err(failed),
            _ if start_path != StartPath::Boot => {}
            _ if is_silent && start.boots > 1 => start.boots -= 1,
            _ => return Err(failed),
        }
        tracing::debug!(pod = %spec.id, %start_path, error = chain(&failed), "the pod gets another VM");
        node.start_paths.missed(start_path, start_paths::reason(start_path, &failed), Some(&failed));
        start_path = start_path.slower();
    }
}

/// Returns the checkpoint from which the pod is restored, if it fits the pod and this host.
async fn saved(node: &DaemonState, spec: &PodSpec, kind: Kind, name: &Id) -> Result<Restoring, PodError> {
    let namespace = spec.restore_namespace.as_ref().map_or(spec.namespace.as_str(), Id::as_str);
    let refused =
        |reason: String| checkpoint::refused(namespace, name.as_str(), Code::FailedPrecondition, reason);
    // Whether there is one is not told.
    let share_from = &node.config.checkpoints.share_from;
    if namespace != spec.namespace && !share_from.iter().any(|shared| shared == namespace) {
        let reason = format!(
            "pods of namespace {:?} may not be restored from it: checkpoints.share_from has no {namespace:?}",
            spec.namespace
        );
        return Err(refused(reason));
    }
    let restoring = node.checkpoints.load(namespace, name.as_str()).await?;
    let manifest = &restoring.saved.manifest;
    if let Some(reason) = misfit(manifest, spec, kind.shape) {
        return Err(refused(reason));
    }
    let inputs = node.templates.inputs(kind).await;
    let inputs =
        inputs.map_err(|error| refused(format!("cannot compare it with this host: {}", chain(&error))))?;
    match manifest.misfit(&inputs) {
        Some(reason) => Err(refused(reason)),
        None => Ok(restoring),
    }
}

/// Returns the pod's VMM. Its handler may have named one to an earlier daemon that this one does not have.
fn vmm(node: &DaemonState, spec: &PodSpec) -> Result<VmmKey, PodError> {
    node.vmms.key(spec.vmm).ok_or_else(|| PodError::Invalid {
        subject: format!("pod {}", spec.id),
        reason: format!(
            "its VMM is {}, which this daemon was not configured for: make the pod again, or name the VMM in [handlers]",
            spec.vmm.map_or("", VmmName::as_str)
        ),
    })
}

/// Returns the pod's network interfaces.
async fn interfaces(node: &DaemonState, spec: &PodSpec) -> Result<Vec<Interface>, PodError> {
    match &spec.netns {
        Some(netns) => Ok(network::look(&spec.id, netns, node.config.network.foreign_rules).await?),
        None => {
            tracing::warn!(
                pod = %spec.id,
                "a VM cannot use the host's network: the pod has loopback only"
            );
            Ok(Vec::new())
        }
    }
}

/// State that all attempts to start one pod share.
struct Start<'a> {
    node: &'a DaemonState,
    spec: &'a PodSpec,
    kind: Kind,
    interfaces: &'a [Interface],
    /// The pod's listeners on the host, until an attempt succeeds.
    host_ports: Vec<TcpListener>,
    key: &'a LinkKey,
    stages: &'a Stages,
    /// The place of a VM that is created for the pod.
    place: Place,
    /// The deadline of all attempts together. Time spent waiting for admission is added to it.
    deadline: Instant,
    /// Number of remaining boots.
    boots: u32,
}

impl<'a> Start<'a> {
    async fn attempt(
        &mut self,
        mut source: Source,
        cancel: &CancellationToken,
    ) -> Result<StartedPod, PodError> {
        let spec = self.spec;
        let mut undo = Undo::default();
        // Before the first point at which the start can be cancelled.
        let resources = source.vm.resources(&spec.id, &mut undo);
        let result = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(PodError::Cancelled(spec.id.clone())),
            result = self.phases(source, resources, &mut undo) => result,
        };
        if result.is_ok() {
            undo.forget();
        } else if let Err(left) = undo.run().await {
            tracing::error!(pod = %spec.id, left, "cannot undo a failed start completely");
        }
        result
    }

    async fn phases(
        &mut self,
        source: Source,
        resources: Option<PooledResources>,
        undo: &mut Undo,
    ) -> Result<StartedPod, PodError> {
        let Self { node, spec, kind, interfaces, key, stages, .. } = *self;
        let Source { vm, place } = source;
        let preparing = async {
            let place = cgroup::make(node, spec, place, undo)?;
            let prepared = Prepared::new(node, spec, kind, interfaces, resources, undo).await?;
            Ok::<_, PodError>((prepared, place))
        };
        let (prepared, place) = stages.run(Stage::Network, preparing).await?;
        let mut restored = None;
        let greeted = match vm {
            SourceVm::Checkpoint(restoring) => {
                let _permit = stages.run(Stage::Queue, self.turn()).await?;
                let until = self.until(1);
                let manifest = &restoring.saved.manifest;
                restored = Some(Restored {
                    checkpoint: [manifest.namespace.to_string(), manifest.name.to_string()],
                    containers: manifest.containers.clone(),
                    adopted: Vec::new(),
                    volumes: manifest.volumes.clone(),
                    renamed: BTreeMap::new(),
                });
                let running = stages.run(Stage::Restore, prepared.go_on(&restoring, until, undo)).await?;
                stages
                    .run(Stage::AgentReady, async {
                        running.greet(&manifest.link_key).await?.configure(key).await
                    })
                    .await
            }
            SourceVm::Pool(warm) => {
                let until = self.until(FASTER);
                let greeted = stages.run(Stage::Claim, prepared.claim(warm, until)).await?;
                stages.run(Stage::AgentReady, greeted.configure(key)).await
            }
            SourceVm::Template(template) => {
                let _permit = stages.run(Stage::Queue, self.turn()).await?;
                let until = self.until(FASTER);
                let running = stages.run(Stage::Restore, prepared.restore(&template, until, undo)).await?;
                stages
                    .run(Stage::AgentReady, async {
                        running.greet(&template.link_key).await?.configure(key).await
                    })
                    .await
            }
            SourceVm::Boot => {
                let _permit = stages.run(Stage::Queue, self.turn()).await?;
                let until = self.until(self.boots);
                let running = stages.run(Stage::VmmSpawn, prepared.boot(key, until, undo)).await?;
                let greeted = stages.run(Stage::Boot, running.greet(key)).await?;
                stages.run(Stage::AgentReady, greeted.configure(key)).await
            }
        };
        let Greeted { live, kernel_release, start_path, interfaces, cgroup_attach, spare, .. } = greeted?;
        let host_ports = mem::take(&mut self.host_ports);
        Ok(StartedPod {
            live,
            kernel_release,
            start_path,
            restored,
            interfaces,
            host_ports,
            cgroup_attach,
            spare,
            place,
        })
    }

    /// Waits for admission of a new VM, and moves the deadline by the time waited.
    async fn turn(&mut self) -> Result<Option<SemaphorePermit<'a>>, PodError> {
        let began = Instant::now();
        let place = self.node.admission.enter(Work::Vm).await;
        self.deadline += began.elapsed();
        Ok(place)
    }

    /// Returns the deadline for one of `parts` equal parts of the remaining time.
    fn until(&self, parts: u32) -> Instant {
        let now = Instant::now();
        now + self.deadline.saturating_duration_since(now) / parts
    }
}
