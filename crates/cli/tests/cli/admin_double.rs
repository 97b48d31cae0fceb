//! In the daemon's place: an admin service whose pods a test makes up.

use std::{
    path::{Path, PathBuf},
    pin::Pin,
    process::{Command, Output, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use sandboxer_protocol::admin::{
    BuildTemplateRequest, Checkpoint, CheckpointPart, ConsoleLogChunk, ConsoleLogRequest,
    CreateCheckpointRequest, DestroyQuarantinedRequest, Event, EventsRequest, ExportCheckpointRequest,
    ImportCheckpointRequest, InspectCheckpointRequest, InspectPodRequest, ListCheckpointsRequest,
    ListCheckpointsResponse, ListPlacesRequest, ListPlacesResponse, ListPodsRequest, ListPodsResponse,
    ListQuarantineRequest, ListQuarantineResponse, ListTemplatesRequest, ListTemplatesResponse,
    MovePodRequest, MovePodResponse, Pod, Quarantined, ReleaseQuarantinedRequest, ReloadRequest,
    ReloadResponse, RemoveCheckpointRequest, RemoveTemplateRequest, ShowQuarantinedRequest,
    ShowQuarantinedResponse, StageSummary, StageTimesRequest, StageTimesResponse, Template,
    VerifyTemplateRequest, VersionRequest, VersionResponse,
    admin_server::{Admin, AdminServer},
};
use tokio::{net::UnixListener, runtime::Runtime};
use tokio_stream::{Stream, StreamExt, wrappers::UnixListenerStream};
use tonic::{Request, Response, Status, Streaming, transport::Server};

/// What the service knows.
#[derive(Debug, Clone, Default)]
pub struct AdminDouble {
    pub pods: Vec<Pod>,
    pub records_problem: &'static str,
    pub events: Vec<Event>,
    pub stages: Vec<StageSummary>,
    pub templates: ListTemplatesResponse,
    pub checkpoints: ListCheckpointsResponse,
    pub quarantine: ListQuarantineResponse,
    pub places: ListPlacesResponse,
    /// Names of entries that were asked to be destroyed.
    pub destroyed: Arc<Mutex<Vec<String>>>,
    /// Number of reloads, and why the last one failed.
    pub reloads: Arc<AtomicU32>,
    pub reload_error: &'static str,
    pub console: Vec<&'static [u8]>,
    /// Console chunks come again and again, as of a guest that never ends.
    pub chatty: bool,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Admin for AdminDouble {
    type ConsoleLogStream = Answers<ConsoleLogChunk>;
    type EventsStream = Answers<Event>;
    type BuildTemplateStream = Answers<Template>;
    type CreateCheckpointStream = Answers<Checkpoint>;
    type ExportCheckpointStream = Answers<CheckpointPart>;
    type ImportCheckpointStream = Answers<Checkpoint>;
    type MovePodStream = Answers<MovePodResponse>;

    async fn version(&self, _: Request<VersionRequest>) -> Result<Response<VersionResponse>, Status> {
        Ok(Response::new(VersionResponse {
            version: "9.8.7".into(),
            protocol_version: 6,
            worker_pid: 4321,
            front_pid: 4320,
            keeper_pid: 4319,
            vmm: "qemu".into(),
            vmm_version: "7.2.0".into(),
            accelerator: "tcg".into(),
            handlers_vmms: vec!["firecracker 1.16.1".into()],
            accelerator_reason: "no /dev/kvm".into(),
            recovered_pods: 2,
            reloads: self.reloads.load(Ordering::Relaxed),
            reload_error: self.reload_error.to_owned(),
            ..Default::default()
        }))
    }

    async fn reload(&self, _: Request<ReloadRequest>) -> Result<Response<ReloadResponse>, Status> {
        Ok(Response::new(ReloadResponse { reloads: self.reloads.fetch_add(1, Ordering::Relaxed) }))
    }

    async fn list_pods(&self, _: Request<ListPodsRequest>) -> Result<Response<ListPodsResponse>, Status> {
        let records_problem = self.records_problem.to_owned();
        Ok(Response::new(ListPodsResponse { pods: self.pods.clone(), records_problem }))
    }

    async fn inspect_pod(&self, request: Request<InspectPodRequest>) -> Result<Response<Pod>, Status> {
        self.pod(&request.get_ref().id).map(|pod| Response::new(pod.clone()))
    }

    async fn stage_times(
        &self,
        _: Request<StageTimesRequest>,
    ) -> Result<Response<StageTimesResponse>, Status> {
        Ok(Response::new(StageTimesResponse { stages: self.stages.clone(), over_ns: 90_000_000_000 }))
    }

    async fn console_log(
        &self,
        request: Request<ConsoleLogRequest>,
    ) -> Result<Response<Self::ConsoleLogStream>, Status> {
        self.pod(&request.get_ref().id)?;
        let chunks = self.console.clone().into_iter().map(|data| Ok(ConsoleLogChunk { data: data.to_vec() }));
        Ok(Response::new(match self.chatty {
            true => Box::pin(tokio_stream::iter(chunks.collect::<Vec<_>>().into_iter().cycle())),
            false => Box::pin(tokio_stream::iter(chunks.collect::<Vec<_>>())),
        }))
    }

    async fn events(&self, _: Request<EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        let events = tokio_stream::iter(self.events.clone().into_iter().map(Ok));
        let ended = tokio_stream::once(Err(Status::unavailable("the daemon was killed")));
        Ok(Response::new(Box::pin(events.chain(ended))))
    }

    async fn list_templates(
        &self,
        _: Request<ListTemplatesRequest>,
    ) -> Result<Response<ListTemplatesResponse>, Status> {
        Ok(Response::new(self.templates.clone()))
    }

    async fn build_template(
        &self,
        request: Request<BuildTemplateRequest>,
    ) -> Result<Response<Self::BuildTemplateStream>, Status> {
        let BuildTemplateRequest { vcpus, memory_mib, vmm } = request.into_inner();
        let built = Template { key: "b".repeat(32), vcpus, memory_mib, vmm, ..Default::default() };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(built)))))
    }

    async fn verify_template(
        &self,
        request: Request<VerifyTemplateRequest>,
    ) -> Result<Response<Template>, Status> {
        self.template(&request.get_ref().key)
    }

    async fn remove_template(
        &self,
        request: Request<RemoveTemplateRequest>,
    ) -> Result<Response<Template>, Status> {
        self.template(&request.get_ref().key)
    }

    async fn create_checkpoint(
        &self,
        request: Request<CreateCheckpointRequest>,
    ) -> Result<Response<Self::CreateCheckpointStream>, Status> {
        let CreateCheckpointRequest { pod, name, stop: _ } = request.into_inner();
        let made = Checkpoint { namespace: "default".into(), pod, name, ..Default::default() };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(made)))))
    }

    async fn list_checkpoints(
        &self,
        _: Request<ListCheckpointsRequest>,
    ) -> Result<Response<ListCheckpointsResponse>, Status> {
        Ok(Response::new(self.checkpoints.clone()))
    }

    async fn inspect_checkpoint(
        &self,
        request: Request<InspectCheckpointRequest>,
    ) -> Result<Response<Checkpoint>, Status> {
        self.checkpoint(&request.get_ref().namespace, &request.get_ref().name)
    }

    async fn remove_checkpoint(
        &self,
        request: Request<RemoveCheckpointRequest>,
    ) -> Result<Response<Checkpoint>, Status> {
        self.checkpoint(&request.get_ref().namespace, &request.get_ref().name)
    }

    /// The archive has 3 parts; that of a checkpoint with a problem breaks off.
    async fn export_checkpoint(
        &self,
        request: Request<ExportCheckpointRequest>,
    ) -> Result<Response<Self::ExportCheckpointStream>, Status> {
        let ExportCheckpointRequest { namespace, name } = request.into_inner();
        let found = self.checkpoint(&namespace, &name)?.into_inner();
        let part = |n: u8| Ok(CheckpointPart { data: vec![n; 100_000] });
        let mut parts = vec![part(1), part(2), part(3)];
        if !found.problem.is_empty() {
            parts[2] = Err(Status::failed_precondition(found.problem));
        }
        Ok(Response::new(Box::pin(tokio_stream::iter(parts))))
    }

    /// Takes only such an archive.
    async fn import_checkpoint(
        &self,
        request: Request<Streaming<ImportCheckpointRequest>>,
    ) -> Result<Response<Self::ImportCheckpointStream>, Status> {
        let mut requests = request.into_inner();
        let made = async move {
            let mut made = Checkpoint::default();
            let mut archive = Vec::new();
            while let Some(Ok(request)) = requests.next().await {
                if archive.is_empty() {
                    (made.namespace, made.name) = (request.namespace, request.name);
                }
                archive.extend(request.data);
            }
            match archive == [[1_u8; 100_000], [2; 100_000], [3; 100_000]].concat() {
                true => Ok(made),
                false => Err(Status::invalid_argument("the archive: it is cut off")),
            }
        };
        Ok(Response::new(Box::pin(futures::stream::once(made))))
    }

    async fn list_places(
        &self,
        request: Request<ListPlacesRequest>,
    ) -> Result<Response<ListPlacesResponse>, Status> {
        let mut answer = self.places.clone();
        answer.places.retain(|place| place.id.starts_with(&request.get_ref().id));
        Ok(Response::new(answer))
    }

    async fn move_pod(
        &self,
        request: Request<MovePodRequest>,
    ) -> Result<Response<Self::MovePodStream>, Status> {
        let MovePodRequest { id, node } = request.into_inner();
        if node > 1 {
            let why = format!("cannot move pod {id}: the host has no node {node}");
            return Err(Status::failed_precondition(why));
        }
        let place = self.places.places.iter().find(|place| place.id.starts_with(&id)).cloned();
        let place = place.map(|place| sandboxer_protocol::admin::Place { node: Some(node), ..place });
        let moved =
            MovePodResponse { from: Some(0), place, moved_bytes: 5 << 20, left_bytes: 0, took_ns: 7_000_000 };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(moved)))))
    }

    async fn list_quarantine(
        &self,
        _: Request<ListQuarantineRequest>,
    ) -> Result<Response<ListQuarantineResponse>, Status> {
        Ok(Response::new(self.quarantine.clone()))
    }

    async fn show_quarantined(
        &self,
        request: Request<ShowQuarantinedRequest>,
    ) -> Result<Response<ShowQuarantinedResponse>, Status> {
        let entry = Some(self.quarantined(&request.get_ref().name)?);
        let (report, record) = ("{\"at_ns\": 1}".to_owned(), "{\"version\":1,\x1b[2J".to_owned());
        Ok(Response::new(ShowQuarantinedResponse { entry, report, record }))
    }

    async fn release_quarantined(
        &self,
        request: Request<ReleaseQuarantinedRequest>,
    ) -> Result<Response<Quarantined>, Status> {
        self.quarantined(&request.get_ref().name).map(Response::new)
    }

    async fn destroy_quarantined(
        &self,
        request: Request<DestroyQuarantinedRequest>,
    ) -> Result<Response<Quarantined>, Status> {
        let name = request.into_inner().name;
        let entry = self.quarantined(&name)?;
        self.destroyed.lock().unwrap().push(name);
        Ok(Response::new(entry))
    }
}

impl AdminDouble {
    fn quarantined(&self, name: &str) -> Result<Quarantined, Status> {
        let found = self.quarantine.entries.iter().find(|entry| entry.name == name);
        found.cloned().ok_or_else(|| Status::not_found(format!("nothing in quarantine is called {name}")))
    }

    fn checkpoint(&self, namespace: &str, name: &str) -> Result<Response<Checkpoint>, Status> {
        let mut all = self.checkpoints.checkpoints.iter();
        let found = all.find(|checkpoint| checkpoint.namespace == namespace && checkpoint.name == name);
        let none = || Status::not_found(format!("checkpoint {namespace}/{name}: there is none"));
        found.cloned().map(Response::new).ok_or_else(none)
    }

    fn template(&self, prefix: &str) -> Result<Response<Template>, Status> {
        let found = self.templates.templates.iter().find(|template| template.key.starts_with(prefix));
        found.cloned().map(Response::new).ok_or_else(|| Status::not_found(format!("no template {prefix:?}")))
    }

    fn pod(&self, prefix: &str) -> Result<&Pod, Status> {
        let mut found = self.pods.iter().filter(|pod| pod.id.starts_with(prefix));
        match (found.next(), found.next()) {
            (Some(pod), None) => Ok(pod),
            (None, _) => Err(Status::invalid_argument(format!("pod {prefix:?}: no pod's id starts so"))),
            _ => Err(Status::invalid_argument(format!(
                "pod {prefix:?}: 2 pods' ids start so: give more of it"
            ))),
        }
    }

    /// Serves on a socket of its own until it is dropped.
    pub fn serve(self) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("admin.sock");
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(async { UnixListener::bind(&socket) }).unwrap();
        let server = Server::builder().add_service(AdminServer::new(self));
        runtime.spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        Daemon { socket, _runtime: runtime, _dir: dir }
    }
}

/// A double that serves.
#[derive(Debug)]
pub struct Daemon {
    pub socket: PathBuf,
    _runtime: Runtime,
    _dir: tempfile::TempDir,
}

impl Daemon {
    /// Runs the CLI against it.
    pub fn cli(&self, line: &str) -> Outcome {
        cli_at(&self.socket, line)
    }
}

/// Returns the CLI's command with `socket` in its environment, and nothing of the user's.
pub fn command(socket: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandboxer-cli"));
    command.args(line.split_whitespace()).env("SANDBOXER_SOCKET", socket).env("TZ", "UTC");
    command.stdin(Stdio::null());
    command
}

/// Runs the CLI to its end.
pub fn cli_at(socket: &Path, line: &str) -> Outcome {
    command(socket, line).output().unwrap().into()
}

/// How a run of the CLI ended.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Outcome {
    /// Returns what was printed by a run that succeeded without complaint.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (Some(0), ""), "{}", self.out);
        self.out
    }

    /// Returns the complaint of a run that failed with `code` and printed nothing else.
    #[track_caller]
    pub fn failed(self, code: i32) -> String {
        assert_eq!((self.code, self.out.as_str()), (Some(code), ""), "{}", self.err);
        self.err
    }
}
