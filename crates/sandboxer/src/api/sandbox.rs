//! containerd's sandbox controller: creates, starts, stops and removes pods.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::Path,
    sync::Arc,
};

use sandboxer_base::clock::now_ns;
use sandboxer_protocol::{
    check::{ANSWERED_BY, CHECKED_POD},
    controller::{
        ControllerCreateRequest, ControllerCreateResponse, ControllerMetricsRequest,
        ControllerMetricsResponse, ControllerPlatformRequest, ControllerPlatformResponse,
        ControllerShutdownRequest, ControllerShutdownResponse, ControllerStartRequest,
        ControllerStartResponse, ControllerStatusRequest, ControllerStatusResponse, ControllerStopRequest,
        ControllerStopResponse, ControllerUpdateRequest, ControllerUpdateResponse, ControllerWaitRequest,
        ControllerWaitResponse,
        controller_server::Controller,
        types::{Metric, Platform},
    },
    link::LinkKey,
};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, transport::server::UdsConnectInfo};

use super::{
    bundle,
    convert::{grpc_time, id, pod_spec},
    quarantine,
    size::updated_limits,
    traced,
};
use crate::pod::starts::Starts;
use crate::{
    error::PodError,
    events::Kind,
    pod::{self, DaemonState, PodHandle, container::stats, of_node, spec::PodSpec},
    state::{PodState, PodStatus},
};

/// Version of the task API at the address that `Start` returns.
const TASK_API_VERSION: u32 = 3;

/// Serves [`Controller`] for the pods of a node.
#[derive(Debug)]
pub struct SandboxService {
    node: Arc<DaemonState>,
    /// Address of the task service for every container.
    task_address: String,
    /// Cancelled when this worker shuts down.
    ending: CancellationToken,
    starts: Arc<Starts>,
}

impl SandboxService {
    /// Creates the service. `Start` returns `task_address`: `ttrpc+unix:///path`. Once `ending` is cancelled, no caller
    /// waits.
    pub fn new(node: Arc<DaemonState>, task_address: String, ending: CancellationToken) -> io::Result<Self> {
        Ok(Self { starts: Starts::of(node.clone())?, node, task_address, ending })
    }

    /// Creates a pod for the containerd with PID `by`. `bundle` is the bundle of its sandbox container; `None`: the
    /// caller has a sandbox controller and needs none.
    pub(super) fn make(
        &self,
        request: &ControllerCreateRequest,
        bundle: Option<&Path>,
        by: Option<i32>,
    ) -> Result<PodHandle, Status> {
        let spec = self.spec(request, bundle, by)?;
        let pod = self.insert(spec)?;
        self.starts.created(pod.clone());
        Ok(pod)
    }

    /// Creates the pod of one container that no pod of CRI has, with this `bundle`. Its caller starts it.
    pub(super) fn make_alone(
        &self,
        request: &ControllerCreateRequest,
        bundle: &Path,
        by: Option<i32>,
    ) -> Result<PodHandle, PodError> {
        let spec = self.spec(request, Some(bundle), by)?;
        self.insert(PodSpec { alone: true, ..spec })
    }

    fn spec(
        &self,
        request: &ControllerCreateRequest,
        bundle: Option<&Path>,
        by: Option<i32>,
    ) -> Result<PodSpec, PodError> {
        let config = &self.node.config.containers;
        let spec = pod_spec(request, &self.node.config, &self.node.cgroups)?;
        let mut spec = PodSpec {
            bundle: bundle.map(Path::to_owned),
            rlimits: of_node::rlimits(by, config, &spec.node_sysctls),
            ..spec
        };
        // The sysctls that containerd adds to CRI's. With a container that stands for the pod, they are in its
        // specification.
        let added = match bundle {
            Some(bundle) => bundle::sysctls(bundle),
            None if spec.netns.is_some() => config.sysctls.clone(),
            None => BTreeMap::new(),
        };
        for (name, value) in added {
            spec.sysctls.entry(name).or_insert(value);
        }
        Ok(spec)
    }

    fn insert(&self, spec: PodSpec) -> Result<PodHandle, PodError> {
        let sandbox = spec.id.clone();
        let status = PodStatus::created(now_ns());
        let node = self.node.clone();
        let pod = self
            .node
            .registry
            .insert(&sandbox, || pod::spawn(node, spec, LinkKey::random(), status, Default::default()))?;
        self.node.events.pod(&sandbox, Kind::PodCreated, "");
        Ok(pod)
    }

    /// Records that containerd has shown that it knows the result of the pod's start.
    pub(super) fn shown(&self, pod: &PodHandle) {
        self.starts.shown(pod.id());
    }

    fn pod(&self, sandbox: &str) -> Result<PodHandle, PodError> {
        self.node.registry.pod(&id("sandbox id", sandbox)?)
    }

    /// Returns the pod, or an error. If its record is in quarantine and its VMM may run, the error is not "not found".
    async fn pod_or_held(&self, sandbox: &str) -> Result<PodHandle, Status> {
        match self.pod(sandbox) {
            Err(PodError::NoPod(id)) => {
                let held = quarantine::held(&self.node, &id).await?;
                Err(held.unwrap_or_else(|| PodError::NoPod(id).into()))
            }
            found => Ok(found?),
        }
    }

    /// Returns the pod. `None`: the pod was unknown, and its VMM has been killed.
    async fn pod_or_killed(&self, sandbox: &str) -> Result<Option<PodHandle>, Status> {
        match self.pod(sandbox) {
            Err(PodError::NoPod(id)) => match quarantine::kill(&self.node, &id).await? {
                true => Ok(None),
                false => Err(PodError::NoPod(id).into()),
            },
            found => Ok(Some(found?)),
        }
    }
}

/// Implementations of the requests that are traced.
impl SandboxService {
    async fn create_pod(
        &self,
        request: Request<ControllerCreateRequest>,
    ) -> Result<Response<ControllerCreateResponse>, Status> {
        let by = request.extensions().get::<UdsConnectInfo>().and_then(|peer| peer.peer_cred?.pid());
        let request = request.into_inner();
        self.make(&request, None, by)?;
        Ok(Response::new(ControllerCreateResponse { sandbox_id: request.sandbox_id }))
    }

    async fn start_pod(
        &self,
        request: Request<ControllerStartRequest>,
    ) -> Result<Response<ControllerStartResponse>, Status> {
        let pod = self.pod(&request.get_ref().sandbox_id)?;
        let first = pod.status().state == PodState::Created;
        let noted = first.then(|| self.starts.begins(&pod)).transpose();
        let noted = noted.map_err(|error| {
            Status::unavailable(format!("cannot note the start of pod {}: {error}", pod.id()))
        })?;
        match (pod.start().await, noted) {
            (Ok(()), Some(noted)) => noted.answered(),
            (Err(error), noted) => {
                if let Some(noted) = noted {
                    noted.failed().await;
                }
                return Err(error.into());
            }
            (Ok(()), None) => {}
        }
        let status = pod.status();
        Ok(Response::new(ControllerStartResponse {
            sandbox_id: pod.id().to_string(),
            pid: status.vmm_pid,
            created_at: grpc_time(status.created_at_ns),
            labels: HashMap::new(),
            address: self.task_address.clone(),
            version: TASK_API_VERSION,
            spec: None,
        }))
    }

    async fn stop_pod(
        &self,
        request: Request<ControllerStopRequest>,
    ) -> Result<Response<ControllerStopResponse>, Status> {
        if let Some(pod) = self.pod_or_killed(&request.get_ref().sandbox_id).await? {
            pod.stop().await?;
        }
        Ok(Response::new(ControllerStopResponse {}))
    }

    async fn shutdown_pod(
        &self,
        request: Request<ControllerShutdownRequest>,
    ) -> Result<Response<ControllerShutdownResponse>, Status> {
        let Some(pod) = self.pod_or_killed(&request.get_ref().sandbox_id).await? else {
            return Ok(Response::new(ControllerShutdownResponse {}));
        };
        match pod.remove().await {
            // Another removal was faster.
            Ok(()) | Err(PodError::Gone(_)) => Ok(Response::new(ControllerShutdownResponse {})),
            Err(error) => Err(error.into()),
        }
    }
}

#[tonic::async_trait]
impl Controller for SandboxService {
    async fn create(
        &self,
        request: Request<ControllerCreateRequest>,
    ) -> Result<Response<ControllerCreateResponse>, Status> {
        let sandbox = request.get_ref().sandbox_id.clone();
        let mut span = traced::by_grpc(
            &self.node,
            "containerd.services.sandbox.v1.Controller/Create",
            &request,
            &sandbox,
        );
        let result = span.run(self.create_pod(request)).await;
        if let Ok(pod) = self.pod(&sandbox) {
            traced::of_pod(&mut span, &pod);
        }
        traced::grpc_ended(span, &result);
        result
    }

    async fn start(
        &self,
        request: Request<ControllerStartRequest>,
    ) -> Result<Response<ControllerStartResponse>, Status> {
        let sandbox = request.get_ref().sandbox_id.clone();
        let span = traced::by_grpc(
            &self.node,
            "containerd.services.sandbox.v1.Controller/Start",
            &request,
            &sandbox,
        );
        let result = span.run(self.start_pod(request)).await;
        traced::grpc_ended(span, &result);
        result
    }

    async fn platform(
        &self,
        _: Request<ControllerPlatformRequest>,
    ) -> Result<Response<ControllerPlatformResponse>, Status> {
        let platform = Platform { os: "linux".into(), architecture: "amd64".into(), ..Default::default() };
        Ok(Response::new(ControllerPlatformResponse { platform: Some(platform) }))
    }

    async fn stop(
        &self,
        request: Request<ControllerStopRequest>,
    ) -> Result<Response<ControllerStopResponse>, Status> {
        let sandbox = request.get_ref().sandbox_id.clone();
        let span =
            traced::by_grpc(&self.node, "containerd.services.sandbox.v1.Controller/Stop", &request, &sandbox);
        let result = span.run(self.stop_pod(request)).await;
        traced::grpc_ended(span, &result);
        result
    }

    async fn wait(
        &self,
        request: Request<ControllerWaitRequest>,
    ) -> Result<Response<ControllerWaitResponse>, Status> {
        // Boxed: this waits for as long as the pod runs.
        let pod = Box::pin(self.pod_or_held(&request.get_ref().sandbox_id)).await?;
        self.starts.shown(pod.id());
        let status = tokio::select! {
            status = pod.stopped() => status?,
            // containerd retries after this error.
            () = self.ending.cancelled() => return Err(Status::unavailable("sandboxer is being restarted")),
        };
        Ok(Response::new(ControllerWaitResponse {
            exit_status: status.exit_status,
            exited_at: grpc_time(status.exited_at_ns),
        }))
    }

    async fn status(
        &self,
        request: Request<ControllerStatusRequest>,
    ) -> Result<Response<ControllerStatusResponse>, Status> {
        let request = request.into_inner();
        if request.verbose && request.sandbox_id == CHECKED_POD {
            let version = env!("CARGO_PKG_VERSION").to_owned();
            return Ok(Response::new(ControllerStatusResponse {
                sandbox_id: request.sandbox_id,
                state: "SANDBOX_NOTREADY".to_owned(),
                info: HashMap::from([(ANSWERED_BY.to_owned(), version)]),
                ..Default::default()
            }));
        }
        let pod = self.pod_or_held(&request.sandbox_id).await?;
        let status = pod.status();
        if status.state != PodState::Starting {
            self.starts.shown(pod.id());
        }
        if status.state == PodState::Unknown && !status.overdue {
            // Neither ready nor stopped: the caller keeps the last state and retries.
            let (action, subject) = ("read the state", format!("pod {}", pod.id()));
            return Err(PodError::Unreached { action, subject, reason: status.reason }.into());
        }
        let ready = status.state == PodState::Ready;
        let mut info = HashMap::new();
        if request.verbose {
            // containerd reads only these fields, by these names, for its own sandboxes.
            let cri_info = json!({
                "pid": status.vmm_pid,
                "processStatus": if ready { "running" } else { "stopped" },
            });
            info.insert("info".to_owned(), cri_info.to_string());
        }
        Ok(Response::new(ControllerStatusResponse {
            sandbox_id: request.sandbox_id,
            pid: status.vmm_pid,
            state: if ready { "SANDBOX_READY" } else { "SANDBOX_NOTREADY" }.to_owned(),
            info,
            created_at: grpc_time(status.created_at_ns),
            exited_at: grpc_time(status.exited_at_ns),
            extra: None,
            address: self.task_address.clone(),
            version: TASK_API_VERSION,
        }))
    }

    async fn shutdown(
        &self,
        request: Request<ControllerShutdownRequest>,
    ) -> Result<Response<ControllerShutdownResponse>, Status> {
        let sandbox = request.get_ref().sandbox_id.clone();
        let span = traced::by_grpc(
            &self.node,
            "containerd.services.sandbox.v1.Controller/Shutdown",
            &request,
            &sandbox,
        );
        let result = span.run(self.shutdown_pod(request)).await;
        traced::grpc_ended(span, &result);
        result
    }

    async fn metrics(
        &self,
        request: Request<ControllerMetricsRequest>,
    ) -> Result<Response<ControllerMetricsResponse>, Status> {
        let pod = self.pod(&request.get_ref().sandbox_id)?;
        let readings = pod.stats(None).await?;
        let value = stats::encode(&readings).map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(ControllerMetricsResponse {
            metrics: Some(Metric {
                timestamp: grpc_time(now_ns()),
                id: pod.id().to_string(),
                data: Some(prost_types::Any { type_url: stats::TYPE_URL.to_owned(), value }),
            }),
        }))
    }

    async fn update(
        &self,
        request: Request<ControllerUpdateRequest>,
    ) -> Result<Response<ControllerUpdateResponse>, Status> {
        let request = request.into_inner();
        let pod = self.pod(&request.sandbox_id)?;
        // Nothing else that containerd stores with a sandbox concerns the daemon.
        if let Some(limits) = updated_limits(pod.id(), &request)? {
            pod.update_pod(limits).await?;
        }
        Ok(Response::new(ControllerUpdateResponse {}))
    }
}
