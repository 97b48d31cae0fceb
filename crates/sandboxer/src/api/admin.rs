//! The admin service: the state of a running daemon, for people and tools.

use std::{collections::BTreeMap, pin::Pin, sync::Arc};

use futures::{Stream, StreamExt, stream};
use sandboxer_base::clock::now_ns;
use sandboxer_host::network::Interface;
use sandboxer_process::confinement::Confinement;
use sandboxer_protocol::{
    PROTOCOL_VERSION,
    admin::{
        BuildTemplateRequest, Checkpoint, CheckpointPart, ConsoleLogChunk, ConsoleLogRequest, Container,
        CreateCheckpointRequest, DestroyQuarantinedRequest, Event, EventsRequest, Exec,
        ExportCheckpointRequest, ImportCheckpointRequest, InspectCheckpointRequest, InspectPodRequest, Jail,
        Limit, ListCheckpointsRequest, ListCheckpointsResponse, ListPlacesRequest, ListPlacesResponse,
        ListPodsRequest, ListPodsResponse, ListQuarantineRequest, ListQuarantineResponse,
        ListTemplatesRequest, ListTemplatesResponse, MovePodRequest, MovePodResponse, Pod, Quarantined,
        ReleaseQuarantinedRequest, ReloadRequest, ReloadResponse, RemoveCheckpointRequest,
        RemoveTemplateRequest, ShowQuarantinedRequest, ShowQuarantinedResponse, StageTime, StageTimesRequest,
        StageTimesResponse, Sysctl, Template, VerifyTemplateRequest, VersionRequest, VersionResponse,
        admin_server::Admin,
    },
};
use sandboxer_vmm::{VmmKey, console};
use tonic::{Request, Response, Status, Streaming};

use super::{checkpoints, places, preflight, quarantine, templates, traffic};
use crate::{
    events,
    pod::{
        ContainerView, DaemonState, PodHandle, PodView, container::Phase, stage_times::StageSummary,
        stages::Step,
    },
    share,
};

/// Serves [`Admin`] for a node.
#[derive(Debug)]
pub struct AdminService {
    node: Arc<DaemonState>,
    started_at_ns: u64,
    recovered_pods: u32,
}

impl AdminService {
    /// Creates the service for `node`, which found `recovered_pods` of its pods running.
    pub fn new(node: Arc<DaemonState>, recovered_pods: u32) -> Self {
        Self { node, started_at_ns: now_ns(), recovered_pods }
    }

    async fn inspect(&self, pod: &PodHandle) -> Result<Pod, Status> {
        let view = pod.inspect().await?;
        Ok(pod_message(&self.node, view))
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Admin for AdminService {
    type ConsoleLogStream = Answers<ConsoleLogChunk>;
    type EventsStream = Answers<Event>;
    type BuildTemplateStream = Answers<Template>;
    type CreateCheckpointStream = Answers<Checkpoint>;
    type ExportCheckpointStream = Answers<CheckpointPart>;
    type ImportCheckpointStream = Answers<Checkpoint>;
    type MovePodStream = Answers<MovePodResponse>;

    async fn version(&self, _: Request<VersionRequest>) -> Result<Response<VersionResponse>, Status> {
        let vmms = &self.node.vmms;
        let vmm = vmms.get(VmmKey::default()).info();
        let others = vmms.keys().skip(1).map(|key| vmms.get(key).info());
        let handlers_vmms = others.map(|info| format!("{} {}", info.name, info.version));
        let config = &self.node.config.vm;
        Ok(Response::new(VersionResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol_version: PROTOCOL_VERSION,
            worker_pid: std::process::id(),
            front_pid: self.node.front.pid(),
            keeper_pid: self.node.front.keeper_pid(),
            vmm: vmm.name.to_owned(),
            vmm_version: vmm.version,
            accelerator: vmm.accelerator.to_owned(),
            accelerator_reason: vmm.accelerator_reason,
            kernel: config.kernel.to_string_lossy().into_owned(),
            initramfs: config.initramfs.to_string_lossy().into_owned(),
            recovered_pods: self.recovered_pods,
            started_at_ns: self.started_at_ns,
            handlers_vmms: handlers_vmms.collect(),
            reloads: self.node.front.reloads().count,
            reload_error: self.node.front.reloads().error.clone(),
        }))
    }

    async fn reload(&self, _: Request<ReloadRequest>) -> Result<Response<ReloadResponse>, Status> {
        let front = &self.node.front;
        if let Some(why) = preflight::refusal(&self.node).await {
            return Err(Status::failed_precondition(format!("cannot reload: {why}")));
        }
        front.reload().map_err(|error| Status::failed_precondition(format!("cannot reload: {error}")))?;
        Ok(Response::new(ReloadResponse { reloads: front.reloads().count }))
    }

    async fn list_pods(&self, _: Request<ListPodsRequest>) -> Result<Response<ListPodsResponse>, Status> {
        let mut pods = Vec::new();
        for pod in self.node.registry.pods() {
            // A pod that is removed meanwhile does not make the list fail.
            if let Ok(message) = self.inspect(&pod).await {
                pods.push(message);
            }
        }
        pods.sort_by(|a, b| (a.created_at_ns, &a.id).cmp(&(b.created_at_ns, &b.id)));
        let records_problem = self.node.journal.trouble().unwrap_or_default();
        Ok(Response::new(ListPodsResponse { pods, records_problem }))
    }

    async fn inspect_pod(&self, request: Request<InspectPodRequest>) -> Result<Response<Pod>, Status> {
        let pod = self.node.registry.pod_by_prefix(&request.get_ref().id)?;
        let view = pod.inspect().await?;
        let traffic = traffic::read(&view).await;
        let mut message = pod_message(&self.node, view);
        traffic.add_to(&mut message.interfaces);
        if let Some(place) = &mut message.place {
            places::add_memory(place).await;
        }
        let jail_of = |pid| {
            // A process that exits at this moment has no confinement.
            let seen = Confinement::read(pid).inspect_err(|error| {
                tracing::debug!(pod = message.id, pid, %error, "cannot inspect a jail");
            });
            seen.ok().map(jail_message)
        };
        let jail = Some(message.vmm_pid).filter(|pid| *pid != 0).and_then(jail_of);
        let shares_jail = share::server_of(&self.node.run_dir(pod.id())).and_then(jail_of);
        (message.jail, message.shares_jail) = (jail, shares_jail);
        Ok(Response::new(message))
    }

    async fn stage_times(
        &self,
        _: Request<StageTimesRequest>,
    ) -> Result<Response<StageTimesResponse>, Status> {
        let times = &self.node.stage_times;
        Ok(Response::new(StageTimesResponse {
            stages: times.summaries().into_iter().map(summary_message).collect(),
            over_ns: u64::try_from(times.age().as_nanos()).unwrap_or(u64::MAX),
        }))
    }

    async fn console_log(
        &self,
        request: Request<ConsoleLogRequest>,
    ) -> Result<Response<Self::ConsoleLogStream>, Status> {
        let request = request.into_inner();
        let pod = self.node.registry.pod_by_prefix(&request.id)?;
        let reader = console::Reader::open(&self.node.run_dir(pod.id()))
            .map_err(|error| Status::not_found(format!("console log of pod {}: {error}", pod.id())))?;
        let chunks = reader.into_stream(request.follow).map(|chunk| match chunk {
            Ok(data) => Ok(ConsoleLogChunk { data }),
            Err(error) => Err(Status::internal(error.to_string())),
        });
        Ok(Response::new(Box::pin(chunks)))
    }

    async fn events(&self, _: Request<EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        let listener = self.node.events.listen();
        let events = stream::unfold(listener, |mut listener| async move {
            use tokio::sync::broadcast::error::RecvError;
            let event = match listener.recv().await {
                Ok(event) => Ok(event_message(event)),
                Err(RecvError::Lagged(lost)) => {
                    Err(Status::data_loss(format!("{lost} events came faster than they were read")))
                }
                Err(RecvError::Closed) => return None,
            };
            Some((event, listener))
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn list_templates(
        &self,
        _: Request<ListTemplatesRequest>,
    ) -> Result<Response<ListTemplatesResponse>, Status> {
        templates::list(&self.node).await.map(Response::new)
    }

    async fn build_template(
        &self,
        request: Request<BuildTemplateRequest>,
    ) -> Result<Response<Self::BuildTemplateStream>, Status> {
        let built = templates::build(self.node.clone(), request.into_inner())?;
        Ok(Response::new(Box::pin(stream::once(built))))
    }

    async fn verify_template(
        &self,
        request: Request<VerifyTemplateRequest>,
    ) -> Result<Response<Template>, Status> {
        templates::verify(&self.node, &request.get_ref().key).await.map(Response::new)
    }

    async fn remove_template(
        &self,
        request: Request<RemoveTemplateRequest>,
    ) -> Result<Response<Template>, Status> {
        templates::remove(&self.node, &request.get_ref().key).await.map(Response::new)
    }

    async fn create_checkpoint(
        &self,
        request: Request<CreateCheckpointRequest>,
    ) -> Result<Response<Self::CreateCheckpointStream>, Status> {
        let made = checkpoints::create(&self.node, request.into_inner())?;
        Ok(Response::new(Box::pin(stream::once(made))))
    }

    async fn list_checkpoints(
        &self,
        _: Request<ListCheckpointsRequest>,
    ) -> Result<Response<ListCheckpointsResponse>, Status> {
        checkpoints::list(&self.node).await.map(Response::new)
    }

    async fn inspect_checkpoint(
        &self,
        request: Request<InspectCheckpointRequest>,
    ) -> Result<Response<Checkpoint>, Status> {
        let InspectCheckpointRequest { namespace, name } = request.into_inner();
        checkpoints::inspect(&self.node, namespace, name).await.map(Response::new)
    }

    async fn remove_checkpoint(
        &self,
        request: Request<RemoveCheckpointRequest>,
    ) -> Result<Response<Checkpoint>, Status> {
        let RemoveCheckpointRequest { namespace, name } = request.into_inner();
        checkpoints::remove(&self.node, namespace, name).await.map(Response::new)
    }

    async fn export_checkpoint(
        &self,
        request: Request<ExportCheckpointRequest>,
    ) -> Result<Response<Self::ExportCheckpointStream>, Status> {
        let ExportCheckpointRequest { namespace, name } = request.into_inner();
        let parts = checkpoints::export(&self.node, namespace, name)?;
        Ok(Response::new(Box::pin(parts)))
    }

    async fn import_checkpoint(
        &self,
        request: Request<Streaming<ImportCheckpointRequest>>,
    ) -> Result<Response<Self::ImportCheckpointStream>, Status> {
        let made = checkpoints::import(self.node.clone(), request.into_inner());
        Ok(Response::new(Box::pin(stream::once(made))))
    }

    async fn list_places(
        &self,
        request: Request<ListPlacesRequest>,
    ) -> Result<Response<ListPlacesResponse>, Status> {
        places::list(&self.node, &request.get_ref().id).await.map(Response::new)
    }

    async fn move_pod(
        &self,
        request: Request<MovePodRequest>,
    ) -> Result<Response<Self::MovePodStream>, Status> {
        let moved = places::move_pod(&self.node, request.get_ref())?;
        Ok(Response::new(Box::pin(stream::once(moved))))
    }

    async fn list_quarantine(
        &self,
        _: Request<ListQuarantineRequest>,
    ) -> Result<Response<ListQuarantineResponse>, Status> {
        quarantine::list(&self.node).await.map(Response::new)
    }

    async fn show_quarantined(
        &self,
        request: Request<ShowQuarantinedRequest>,
    ) -> Result<Response<ShowQuarantinedResponse>, Status> {
        quarantine::show(&self.node, request.into_inner().name).await.map(Response::new)
    }

    async fn release_quarantined(
        &self,
        request: Request<ReleaseQuarantinedRequest>,
    ) -> Result<Response<Quarantined>, Status> {
        quarantine::release(&self.node, request.into_inner().name).await.map(Response::new)
    }

    async fn destroy_quarantined(
        &self,
        request: Request<DestroyQuarantinedRequest>,
    ) -> Result<Response<Quarantined>, Status> {
        quarantine::destroy(&self.node, request.into_inner().name).await.map(Response::new)
    }
}

fn pod_message(node: &DaemonState, view: PodView) -> Pod {
    let place = Some(places::message(&view));
    let PodView { spec, size, status, vmm, steps, containers, .. } = view;
    Pod {
        place,
        console_log: node.run_dir(&spec.id).join(console::FILE).to_string_lossy().into_owned(),
        id: spec.id.to_string(),
        name: spec.name,
        namespace: spec.namespace,
        uid: spec.uid,
        state: status.state.to_string(),
        reason: status.reason,
        created_at_ns: status.created_at_ns,
        vmm_pid: status.vmm_pid,
        vmm,
        vcpus: size.vcpus,
        memory_mib: size.memory_mib,
        boot_vcpus: spec.vcpus,
        boot_memory_mib: spec.memory_mib,
        kernel_release: status.kernel_release,
        containers: containers.into_iter().map(container_message).collect(),
        stages: steps.into_iter().map(stage_message).collect(),
        recovered: status.recovered,
        start_path: match (&spec.restore_from, status.start_path) {
            (_, Some(start_path)) => start_path.to_string(),
            (Some(_), None) if status.vmm_pid != 0 => "checkpoint".to_owned(),
            (_, None) => String::new(),
        },
        interfaces: status.interfaces.iter().map(interface_message).collect(),
        jail: None,
        shares_jail: None,
        sysctls: sysctls(&spec.node_sysctls, true).chain(sysctls(&spec.sysctls, false)).collect(),
        container_limits: spec
            .rlimits
            .into_iter()
            .map(|(name, [soft, hard])| Limit { name, soft, hard })
            .collect(),
        max_processes: spec.max_processes.unwrap_or_default(),
    }
}

fn sysctls(values: &BTreeMap<String, String>, of_node: bool) -> impl Iterator<Item = Sysctl> {
    values.iter().map(move |(name, value)| Sysctl { name: name.clone(), value: value.clone(), of_node })
}

fn jail_message(seen: Confinement) -> Jail {
    Jail {
        pid: seen.pid,
        uid: seen.uid,
        gid: seen.gid,
        groups: seen.groups,
        own_namespaces: seen.own_namespaces,
        shared_namespaces: seen.shared_namespaces,
        capabilities: seen.capabilities,
        capability_bounds: seen.capability_bounds,
        no_new_privileges: seen.no_new_privileges,
        seccomp: seen.seccomp.to_owned(),
        seccomp_filters: seen.seccomp_filters,
        root: seen.root,
        mounts: seen.mounts,
        writable_mounts: seen.writable_mounts,
        cgroup: seen.cgroup,
        limits: seen.limits.into_iter().map(|(name, soft, hard)| Limit { name, soft, hard }).collect(),
    }
}

fn interface_message(interface: &Interface) -> sandboxer_protocol::admin::Interface {
    sandboxer_protocol::admin::Interface {
        name: interface.name.clone(),
        mac: interface.mac.to_string(),
        mtu: interface.mtu,
        addresses: interface.addresses.iter().map(ToString::to_string).collect(),
        host_device: interface.host_device(),
        ..Default::default()
    }
}

fn container_message(view: ContainerView) -> Container {
    let (exit_code, reason) = exit(&view.phase);
    Container {
        id: view.id.to_string(),
        state: if view.paused { "paused" } else { view.phase.as_str() }.to_owned(),
        guest_pid: view.pid,
        exit_code,
        reason,
        execs: view
            .execs
            .into_iter()
            .map(|(id, guest_pid, phase)| Exec {
                id: id.to_string(),
                state: phase.as_str().to_owned(),
                guest_pid,
                exit_code: exit(&phase).0,
            })
            .collect(),
        stages: view.steps.into_iter().map(stage_message).collect(),
        disks: view.disks.iter().map(|disk| disk.to_string_lossy().into_owned()).collect(),
    }
}

fn exit(phase: &Phase) -> (u32, String) {
    phase.exit().map(|exit| (exit.code, exit.reason.clone())).unwrap_or_default()
}

fn stage_message(step: Step) -> StageTime {
    StageTime {
        stage: step.stage.as_str().to_owned(),
        begin_ns: step.begin_ns,
        duration_ns: step.duration_ns,
        outcome: step.outcome.as_str().to_owned(),
    }
}

fn summary_message(summary: StageSummary) -> sandboxer_protocol::admin::StageSummary {
    let (min_ns, max_ns) = summary.range_ns();
    sandboxer_protocol::admin::StageSummary {
        stage: summary.stage.as_str().to_owned(),
        outcome: summary.outcome.as_str().to_owned(),
        count: summary.count(),
        sum_ns: summary.sum_ns,
        min_ns,
        p50_ns: summary.quantile_ns(0.5),
        p90_ns: summary.quantile_ns(0.9),
        p95_ns: summary.quantile_ns(0.95),
        p99_ns: summary.quantile_ns(0.99),
        max_ns,
    }
}

fn event_message(event: events::Event) -> Event {
    Event {
        at_ns: event.at_ns,
        pod: event.pod.to_string(),
        container: event.container.map(|id| id.to_string()).unwrap_or_default(),
        kind: event.kind.as_str().to_owned(),
        detail: event.detail,
    }
}
