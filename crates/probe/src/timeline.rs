//! One start of a pod with one container, from the start request to the first byte. Every runtime receives the same CRI
//! calls, and nothing else happens between the timestamps.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::first_byte::{LogWatch, WatchError};
use crate::native::{NATIVE, NativeError};
use crate::options::{ContainerOptions, Network, PodOptions, Resources};
use crate::runtime::{Runtime, RuntimeError};
use crate::vm::VmError;

/// Label of all pods of a run. Its value is the run's name.
pub const RUN_LABEL: &str = "io.sandboxer.probe.run";
/// Label that identifies a pod of a run.
const POD_LABEL: &str = "io.sandboxer.probe.pod";

/// Timeout of a removal. No time includes removals.
const REMOVAL_LIMIT: Duration = Duration::from_secs(120);

/// Properties of all pods of a measurement.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// Name of the run, unique on the node.
    pub run: String,
    /// Image reference; the image must be present.
    pub image: String,
    /// Command that prints at once and keeps running.
    pub command: Vec<String>,
    /// Network of the pods.
    pub network: Network,
    /// Parent of the pods' cgroups; the runtime's own if empty.
    pub cgroup_parent: String,
    /// Annotations of the pods.
    pub annotations: HashMap<String, String>,
    /// Memory limit of each pod and its container, MiB; `None` for no limits.
    pub memory_mib: Option<u64>,
    /// Timeout of a start.
    pub timeout: Duration,
}

impl Recipe {
    /// Returns the default command: prints a line, then sleeps.
    pub fn default_command() -> Vec<String> {
        ["sh", "-c", "echo started; exec sleep 86400"].map(str::to_owned).to_vec()
    }

    fn resources(&self) -> Option<Resources> {
        self.memory_mib.map(|mib| Resources { memory_limit: (mib << 20) as i64, ..Resources::default() })
    }

    /// Returns the options of a pod of the run.
    pub fn pod(&self, name: &str, handler: &str, logs: PathBuf) -> PodOptions {
        PodOptions {
            namespace: "sandboxer-probe".into(),
            // Two runs may give a pod the same name.
            uid: format!("{}-{name}", self.run),
            network: self.network,
            cgroup_parent: self.cgroup_parent.clone(),
            log_directory: Some(logs),
            labels: [(RUN_LABEL, &*self.run), (POD_LABEL, name)]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            annotations: self.annotations.clone(),
            resources: self.resources(),
            ..PodOptions::new(name, handler)
        }
    }
}

/// End of each step, since the start request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stamps {
    /// When RunPodSandbox returned.
    pub pod: Option<Duration>,
    /// When CreateContainer returned.
    pub created: Option<Duration>,
    /// When StartContainer returned.
    pub started: Option<Duration>,
    /// When the first byte was in the log.
    pub first_byte: Option<Duration>,
    /// When a VM of the series `vm` answered its first ping.
    pub first_ping: Option<Duration>,
}

/// Result of a start.
#[derive(Debug)]
pub struct Start {
    /// Time of the start request.
    pub released: Instant,
    /// Times of the completed steps.
    pub stamps: Stamps,
    /// The sandbox's id, once there was one.
    pub pod_id: Option<String>,
    /// The container's id, once there was one.
    pub container_id: Option<String>,
    /// Success, or the reason of the failure.
    pub end: Result<(), StartError>,
}

/// Why a start failed.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A CRI call failed.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The timeout expired.
    #[error("{step} did not finish within {limit:?} after the pod's start request")]
    Timeout {
        /// Name of the step.
        step: &'static str,
        /// The timeout that expired.
        limit: Duration,
    },
    /// The measurement was interrupted.
    #[error("interrupted")]
    Interrupted,
    /// The first byte cannot be detected.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// A VM of the series `vm` failed.
    #[error(transparent)]
    Vm(VmError),
    /// A process of the series `native` failed.
    #[error(transparent)]
    Native(NativeError),
    /// The first output is not on stdout: the command did not run.
    #[error("the container's first log line is not on stdout: {0}")]
    NotItsOutput(String),
}

impl StartError {
    /// Returns the CRI call or step that failed.
    pub fn step(&self) -> &'static str {
        match self {
            StartError::Runtime(
                RuntimeError::Refused { call, .. } | RuntimeError::Incomplete { call, .. },
            ) => call,
            StartError::Runtime(_) => "connect",
            StartError::Timeout { step, .. } => step,
            StartError::Interrupted => "interrupted",
            StartError::Vm(_) => "vm",
            StartError::Native(_) => NATIVE,
            StartError::Watch(_) | StartError::NotItsOutput(_) => "first byte",
        }
    }
}

/// Starts a pod and its container on `handler` and waits for the first byte. Does not remove the pod: see [`remove`].
pub async fn start(
    runtime: &Runtime,
    watch: &LogWatch,
    recipe: &Recipe,
    handler: &str,
    name: &str,
    cancel: &CancellationToken,
) -> Start {
    let pod = recipe.pod(name, handler, watch.dir().to_owned());
    let mut container = ContainerOptions::new("main", &recipe.image, recipe.command.clone());
    container.log_path = format!("{name}.log");
    container.resources = recipe.resources();
    let first_byte = watch.expect(&container.log_path);

    let mut begun = Start {
        released: Instant::now(),
        stamps: Stamps::default(),
        pod_id: None,
        container_id: None,
        end: Ok(()),
    };
    let mut step = "RunPodSandbox";
    let attempt = async {
        let pod_id = runtime.run_pod(&pod).await?;
        begun.stamps.pod = Some(begun.released.elapsed());
        step = "CreateContainer";
        let pod_id = begun.pod_id.insert(pod_id);
        let container_id = runtime.create_container(pod_id, &pod, &container).await?;
        begun.stamps.created = Some(begun.released.elapsed());
        step = "StartContainer";
        let container_id = begun.container_id.insert(container_id);
        runtime.start_container(container_id).await?;
        begun.stamps.started = Some(begun.released.elapsed());
        step = "first byte";
        let seen = first_byte.seen().await?;
        begun.stamps.first_byte = Some(seen.saturating_duration_since(begun.released));
        Ok(())
    };
    let end = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(StartError::Interrupted),
        end = tokio::time::timeout(recipe.timeout, attempt) => match end {
            Ok(end) => end,
            Err(_) => Err(StartError::Timeout { step, limit: recipe.timeout }),
        },
    };
    watch.forget(&container.log_path);
    begun.end = match end {
        Ok(()) => check_output(watch, &container.log_path, recipe.timeout).await,
        Err(error) => Err(error),
    };
    begun
}

/// Checks that the first line in a CRI log (`time stream tag text`) is from stdout. Runs after the last timestamp.
async fn check_output(watch: &LogWatch, file: &str, limit: Duration) -> Result<(), StartError> {
    let log = watch.dir().join(file);
    let not_its = |text: &str| Err(StartError::NotItsOutput(text.chars().take(200).collect()));
    loop {
        let more = watch.expect(file);
        let text =
            tokio::fs::read(&log).await.map_err(|error| StartError::NotItsOutput(error.to_string()))?;
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().next().unwrap_or_default();
        match line.splitn(3, ' ').collect::<Vec<_>>()[..] {
            [_, "stdout", _] => break,
            [_, _, _] => return not_its(line),
            // The rest of the first line has not been written yet.
            _ => match tokio::time::timeout(limit, more.seen()).await {
                Ok(seen) => drop(seen?),
                Err(_) => return not_its(line),
            },
        }
    }
    watch.forget(file);
    Ok(())
}

/// Removes a pod that [`start`] created, even one without a known id, and its log.
pub async fn remove(
    runtime: &Runtime,
    watch: &LogWatch,
    recipe: &Recipe,
    name: &str,
    pod_id: Option<&str>,
) -> Result<(), RuntimeError> {
    let ids = match pod_id {
        Some(id) => vec![id.to_owned()],
        None => find(runtime, [(RUN_LABEL, &*recipe.run), (POD_LABEL, name)]).await?,
    };
    for id in ids {
        end(runtime, &id).await?;
    }
    // The log may not exist if the start failed early.
    let _ = tokio::fs::remove_file(watch.dir().join(format!("{name}.log"))).await;
    Ok(())
}

/// Removes every pod of a run and returns their number, or an error if a pod could not be removed.
pub async fn remove_all(runtime: &Runtime, run: &str) -> Result<usize, RuntimeError> {
    let ids = find(runtime, [(RUN_LABEL, run)]).await?;
    let mut ends = tokio::task::JoinSet::new();
    for id in &ids {
        let (runtime, id) = (runtime.clone(), id.clone());
        ends.spawn(async move { end(&runtime, &id).await });
    }
    ends.join_all().await.into_iter().collect::<Result<Vec<()>, _>>()?;
    Ok(ids.len())
}

async fn find<const N: usize>(
    runtime: &Runtime,
    labels: [(&str, &str); N],
) -> Result<Vec<String>, RuntimeError> {
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    Ok(runtime.pods(&labels).await?.into_iter().map(|pod| pod.id).collect())
}

async fn end(runtime: &Runtime, id: &str) -> Result<(), RuntimeError> {
    let both = async {
        runtime.stop_pod(id).await?;
        runtime.remove_pod(id).await
    };
    tokio::time::timeout(REMOVAL_LIMIT, both).await.unwrap_or_else(|_| {
        Err(RuntimeError::Refused {
            call: "RemovePodSandbox",
            subject: id.to_owned(),
            code: tonic::Code::DeadlineExceeded,
            message: format!("not removed within {REMOVAL_LIMIT:?}"),
        })
    })
}
