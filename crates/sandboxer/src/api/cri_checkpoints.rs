//! CRI's `CheckpointPod` and `RestorePod` (KEP-5823), at the admin socket, until containerd passes them on.
//!
//! ```text
//!  CheckpointPod ─▶ a checkpoint of the store ─▶ the file `pod.checkpoint` in the caller's directory, as one exports it
//!  RestorePod    ─▶ compared ─▶ a checkpoint of the store ─▶ RunPodSandbox and CreateContainer of containerd, by annotation
//! ```
//!
//! What is in the store meanwhile is removed in the end. A call whose caller has gone is undone.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::{self, File},
    io::{self, BufReader, BufWriter, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use k8s_cri::v1::{
    ContainerConfig, CreateContainerRequest, CreateContainerResponse, PodSandboxConfig,
    RemovePodSandboxRequest, RemovePodSandboxResponse, RunPodSandboxRequest, RunPodSandboxResponse,
    StopPodSandboxRequest, StopPodSandboxResponse,
};
use sandboxer_base::{chain, digest::hex, failpoint::fail};
use sandboxer_protocol::{
    cri::{
        CheckpointPodRequest, CheckpointPodResponse, RestorePodRequest, RestorePodResponse,
        RestoredContainer, runtime_service_client::RuntimeServiceClient,
        runtime_service_server::RuntimeService,
    },
    id::Id,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, transport::Channel};

use super::convert::{self, RESTORE_FROM};
use crate::{
    checkpoint::{Identity, Manifest, archive},
    containerd,
    error::PodError,
    pod::{DaemonState, container::Phase},
};

/// Time limit of a request to containerd. The caller has a shorter one.
const LIMIT: Duration = Duration::from_secs(600);
/// Name of the file in a caller's directory.
const FILE: &str = "pod.checkpoint";

/// Serves the two calls for a node.
#[derive(Debug)]
pub struct CriCheckpoints {
    node: Arc<DaemonState>,
}

impl CriCheckpoints {
    /// Creates the service for `node`.
    pub fn new(node: Arc<DaemonState>) -> Self {
        Self { node }
    }
}

#[tonic::async_trait]
impl RuntimeService for CriCheckpoints {
    async fn checkpoint_pod(
        &self,
        request: Request<CheckpointPodRequest>,
    ) -> Result<Response<CheckpointPodResponse>, Status> {
        let (node, request) = (self.node.clone(), request.into_inner());
        until_the_caller_has_gone(move |gone| async move { checkpoint(&node, request, gone).await }).await?;
        Ok(Response::new(CheckpointPodResponse {}))
    }

    async fn restore_pod(
        &self,
        request: Request<RestorePodRequest>,
    ) -> Result<Response<RestorePodResponse>, Status> {
        let (node, request) = (self.node.clone(), request.into_inner());
        let restored =
            until_the_caller_has_gone(move |gone| async move { restore(&node, request, gone).await }).await?;
        Ok(Response::new(restored))
    }

    async fn run_pod_sandbox(
        &self,
        _: Request<RunPodSandboxRequest>,
    ) -> Result<Response<RunPodSandboxResponse>, Status> {
        Err(of_containerd())
    }

    async fn stop_pod_sandbox(
        &self,
        _: Request<StopPodSandboxRequest>,
    ) -> Result<Response<StopPodSandboxResponse>, Status> {
        Err(of_containerd())
    }

    async fn remove_pod_sandbox(
        &self,
        _: Request<RemovePodSandboxRequest>,
    ) -> Result<Response<RemovePodSandboxResponse>, Status> {
        Err(of_containerd())
    }

    async fn create_container(
        &self,
        _: Request<CreateContainerRequest>,
    ) -> Result<Response<CreateContainerResponse>, Status> {
        Err(of_containerd())
    }
}

fn of_containerd() -> Status {
    Status::unimplemented("the daemon has only CheckpointPod and RestorePod of CRI: ask containerd")
}

/// Does work to its end or, once the caller has gone, to where it can be undone.
async fn until_the_caller_has_gone<
    T: Send + 'static,
    W: Future<Output = Result<T, Status>> + Send + 'static,
>(
    work: impl FnOnce(CancellationToken) -> W,
) -> Result<T, Status> {
    let gone = CancellationToken::new();
    let _guard = gone.clone().drop_guard();
    tokio::spawn(work(gone)).await.unwrap_or_else(|panic| Err(Status::internal(panic.to_string())))
}

fn without_options(options: &HashMap<String, String>) -> Result<(), Status> {
    match options.keys().min() {
        None => Ok(()),
        Some(name) => Err(Status::invalid_argument(format!("option {name:?} is not known: there are none"))),
    }
}

/// Returns a name in the store for the time of a call.
fn temporary() -> String {
    format!("cri-{}", hex(&rand::random::<u64>().to_be_bytes()))
}

/// A checkpoint of the store that is removed when this is dropped.
struct Temporary<'a> {
    node: &'a DaemonState,
    namespace: String,
    name: String,
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.node.checkpoints.remove(&self.namespace, &self.name) {
            let (namespace, name) = (&self.namespace, &self.name);
            tracing::warn!(
                namespace,
                name,
                error = chain(&error),
                "cannot remove a checkpoint that was made for a call of CRI"
            );
        }
    }
}

async fn checkpoint(
    node: &DaemonState,
    request: CheckpointPodRequest,
    gone: CancellationToken,
) -> Result<(), Status> {
    let CheckpointPodRequest { pod_sandbox_id, output_path, container_ids, options } = request;
    without_options(&options)?;
    let to = blocking(move || empty_directory(Path::new(&output_path))).await?;
    let pod = node.registry.pod(&convert::id("sandbox id", &pod_sandbox_id)?)?;
    let asked: BTreeSet<&str> = container_ids.iter().map(String::as_str).collect();
    if asked.is_empty() || asked.len() != container_ids.len() {
        return Err(Status::invalid_argument(format!(
            "pod {}: containers to save must be named, each once",
            pod.id()
        )));
    }
    let all = pod.inspect().await?.containers;
    if let Some(other) = asked.iter().find(|id| !all.iter().any(|container| container.id.as_str() == **id)) {
        return Err(Status::invalid_argument(format!("pod {}: it has no container {other:?}", pod.id())));
    }
    for container in &all {
        let (id, runs) = (&container.id, container.phase == Phase::Running && !container.paused);
        let why = match (runs, asked.contains(id.as_str())) {
            (true, true) | (false, false) => continue,
            (false, true) => "does not run",
            (true, false) => "runs and is not named: all are saved together",
        };
        return Err(Status::failed_precondition(format!("pod {}: container {id} {why}", pod.id())));
    }
    let name = temporary();
    let manifest = pod.checkpoint(name.clone()).await?;
    let saved = Temporary { node, namespace: manifest.namespace.to_string(), name };
    let held = node.checkpoints.hold(&saved.namespace, &saved.name)?;
    let path = to.join(FILE);
    let written = tokio::task::spawn_blocking(move || {
        let failed = |error: io::Error| format!("cannot write {}: {error}", path.display());
        let file = fail(format_args!("a checkpoint is written for CRI: {}", path.display()))
            .and_then(|()| File::options().write(true).create_new(true).mode(0o600).open(&path))
            .map_err(failed)?;
        let written = archive::export(&held, &mut BufWriter::new(Cancelled { of: &file, gone }))
            .and_then(|()| file.sync_all());
        drop(held);
        written.map_err(|error| {
            // The first error is reported.
            let _ = fs::remove_file(&path);
            failed(error)
        })
    });
    let written = written.await.map_err(|panic| Status::internal(panic.to_string()))?;
    written.map_err(|reason| Status::internal(format!("pod {}: {reason}", pod.id())))
}

/// A file that takes nothing once the caller has gone.
struct Cancelled<'a> {
    of: &'a File,
    gone: CancellationToken,
}

impl Write for Cancelled<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.gone.is_cancelled() {
            true => Err(io::Error::other("the caller has gone")),
            false => self.of.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.of.flush()
    }
}

fn empty_directory(path: &Path) -> Result<PathBuf, Status> {
    if !path.is_absolute() {
        return Err(Status::invalid_argument(format!("output_path {path:?} is not absolute")));
    }
    let mut entries = fs::read_dir(path)
        .map_err(|error| Status::invalid_argument(format!("output_path {path:?} cannot be read: {error}")))?;
    match entries.next() {
        None => Ok(path.to_owned()),
        Some(_) => Err(Status::failed_precondition(format!("output_path {path:?} is not empty"))),
    }
}

async fn restore(
    node: &DaemonState,
    request: RestorePodRequest,
    gone: CancellationToken,
) -> Result<RestorePodResponse, Status> {
    let RestorePodRequest { checkpoint_path, config, runtime_handler, options, container_configs } = request;
    without_options(&options)?;
    let mut config = config.ok_or_else(|| Status::invalid_argument("the pod has no config"))?;
    let wanted = by_name(container_configs)?;
    let path = Path::new(&checkpoint_path).join(FILE);
    if !path.is_absolute() {
        return Err(Status::invalid_argument(format!("checkpoint_path {checkpoint_path:?} is not absolute")));
    }
    let (manifest, read) = blocking({
        let path = path.clone();
        move || {
            let file = File::open(&path).map_err(|error| {
                Status::invalid_argument(format!("cannot open {}: {error}", path.display()))
            })?;
            let manifest = archive::head(&mut BufReader::new(&file)).map_err(|reason| {
                Status::invalid_argument(format!("cannot restore a pod from {}: {reason}", path.display()))
            })?;
            Ok((manifest, path))
        }
    })
    .await?;
    let refused = |reason: String| {
        Status::failed_precondition(format!("cannot restore a pod from {checkpoint_path:?}: {reason}"))
    };
    compare(&manifest, &config, &wanted).map_err(refused)?;
    // A sandbox container's bundle is of no use: there is none yet.
    let socket = containerd::socket(None, node.config.containerd_ttrpc.as_deref())
        .ok_or_else(|| refused("the daemon does not know its containerd: set containerd.ttrpc".to_owned()))?;
    let channel = containerd::connect_for(&socket, LIMIT).map_err(refused)?;

    let name = temporary();
    let id: Id = name.parse().map_err(|source| PodError::Id { what: "checkpoint", source })?;
    let checkpoints = node.checkpoints.clone();
    let imported = blocking(move || {
        let file = File::open(&read)
            .map_err(|error| Status::invalid_argument(format!("cannot open {}: {error}", read.display())))?;
        Ok(archive::import(&checkpoints, None, Some(id), BufReader::new(file))?)
    });
    let namespace = imported.await?.namespace.to_string();
    // The pod has what it needs of it once it runs, so no daemon finds it again.
    let _removed = Temporary { node, namespace, name: name.clone() };
    config.annotations.insert(RESTORE_FROM.to_owned(), name);
    let mut cri = RuntimeServiceClient::new(channel);
    let request = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler };
    // Not cancelled: what is half made could not be named.
    let pod = cri.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id;
    let created = gone.run_until_cancelled(create(&mut cri, &pod, &config, wanted)).await;
    match created.unwrap_or_else(|| Err(Status::cancelled("the caller has gone"))) {
        Ok(restored_containers) => Ok(RestorePodResponse { pod_sandbox_id: pod, restored_containers }),
        Err(error) => {
            // With its containers.
            let stopped = cri.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pod.clone() }).await;
            let removed =
                cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: pod.clone() }).await;
            for failed in [stopped.err(), removed.err()].into_iter().flatten() {
                tracing::error!(pod, error = failed.message(), "cannot remove a pod whose restore failed");
            }
            Err(error)
        }
    }
}

/// Creates the containers, in the order of their names.
async fn create(
    cri: &mut RuntimeServiceClient<Channel>,
    pod: &str,
    config: &PodSandboxConfig,
    wanted: BTreeMap<String, ContainerConfig>,
) -> Result<Vec<RestoredContainer>, Status> {
    let mut restored = Vec::new();
    for (name, container) in wanted {
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.to_owned(),
            config: Some(container),
            sandbox_config: Some(config.clone()),
        };
        let container_id = cri.create_container(request).await?.into_inner().container_id;
        restored.push(RestoredContainer { name, container_id });
    }
    Ok(restored)
}

fn by_name(configs: Vec<ContainerConfig>) -> Result<BTreeMap<String, ContainerConfig>, Status> {
    if configs.is_empty() {
        return Err(Status::invalid_argument("no container_configs are given"));
    }
    let mut wanted = BTreeMap::new();
    for config in configs {
        let name = config.metadata.as_ref().map(|metadata| metadata.name.clone()).unwrap_or_default();
        if name.is_empty() {
            return Err(Status::invalid_argument("a container has no name"));
        }
        if wanted.insert(name.clone(), config).is_some() {
            return Err(Status::invalid_argument(format!("two containers have the name {name:?}")));
        }
    }
    Ok(wanted)
}

/// Returns in words why a pod cannot go on from this checkpoint, as far as that can be told before it is made.
fn compare(
    manifest: &Manifest,
    pod: &PodSandboxConfig,
    wanted: &BTreeMap<String, ContainerConfig>,
) -> Result<(), String> {
    let namespace = pod.metadata.as_ref().map(|metadata| metadata.namespace.as_str()).unwrap_or_default();
    if namespace != manifest.namespace.as_str() {
        return Err(format!("it is of the namespace {}, and the pod of {namespace:?}", manifest.namespace));
    }
    let saved: BTreeMap<&str, &Identity> =
        manifest.containers.iter().map(|saved| (saved.identity.name.as_str(), &saved.identity)).collect();
    if !saved.keys().copied().eq(wanted.keys().map(String::as_str)) {
        let has: Vec<_> = saved.keys().copied().collect();
        let given: Vec<_> = wanted.keys().map(String::as_str).collect();
        return Err(format!(
            "it has the containers {}, and those given are {}",
            has.join(", "),
            given.join(", ")
        ));
    }
    let differs = saved.values().zip(wanted.values()).find_map(|(saved, wanted)| {
        difference(saved, wanted).map(|how| format!("container {:?} is another one: {how}", saved.name))
    });
    differs.map_or(Ok(()), Err)
}

/// Returns in words how a container differs from a saved one. What its image says is not known here, and is compared when it starts.
fn difference(saved: &Identity, wanted: &ContainerConfig) -> Option<String> {
    let differs = |what: &str, is: String, was: String| Some(format!("its {what} is {is}, and was {was}"));
    if let Some(image) = &wanted.image {
        let digest = Some(&image.image).filter(|image| image.starts_with("sha256:"));
        let name =
            if image.user_specified_image.is_empty() { &image.image } else { &image.user_specified_image };
        match (&saved.digest, digest) {
            (Some(was), Some(is)) if was != is => {
                return differs(&format!("image {name}"), is.clone(), was.clone());
            }
            // Compared when the container starts, if it was not here.
            (_, Some(_)) => {}
            (_, None) if *name != saved.image => return differs("image", name.clone(), saved.image.clone()),
            (_, None) => {}
        }
    }
    let given = [wanted.command.as_slice(), &wanted.args].concat();
    let fits = if wanted.command.is_empty() { saved.args.ends_with(&given) } else { saved.args == given };
    if !fits {
        return differs("command", format!("{given:?}"), format!("{:?}", saved.args));
    }
    if !wanted.working_dir.is_empty() && wanted.working_dir != saved.cwd {
        return differs("working directory", wanted.working_dir.clone(), saved.cwd.clone());
    }
    let security = wanted.linux.as_ref().and_then(|linux| linux.security_context.as_ref())?;
    let [uid, gid] = saved.user.map(i64::from);
    for (what, id, was) in [("user", &security.run_as_user, uid), ("group", &security.run_as_group, gid)] {
        if let Some(id) = id.as_ref().filter(|id| id.value != was) {
            return differs(what, id.value.to_string(), was.to_string());
        }
    }
    None
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panic| Err(Status::internal(panic.to_string())))
}
