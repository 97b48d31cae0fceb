//! One pod with one container, from its release to its first byte. This is the whole measuring path: the
//! same calls for every runtime, and nothing between the stamps but what CRI asks for.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::first_byte::{LogWatch, WatchError};
use crate::options::{ContainerOptions, Network, PodOptions};
use crate::runtime::{Runtime, RuntimeError};

/// Label that all pods of a probe carry; its value is the run's name.
pub const RUN_LABEL: &str = "io.sandboxer.probe.run";
/// Label that tells the pods of a run apart.
const POD_LABEL: &str = "io.sandboxer.probe.pod";

/// A removal that takes longer has failed. Never part of a time.
const REMOVAL_LIMIT: Duration = Duration::from_secs(120);

/// What every pod of a measurement has in common.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// Name of the run, unique on the node.
    pub run: String,
    /// Image; must be present.
    pub image: String,
    /// A command that prints at once and then stays.
    pub command: Vec<String>,
    /// Network mode.
    pub network: Network,
    /// Parent of the pods' cgroups; the runtime's own when empty.
    pub cgroup_parent: String,
    /// Annotations of the pods.
    pub annotations: HashMap<String, String>,
    /// After this long a start is a failure.
    pub timeout: Duration,
}

impl Recipe {
    /// Returns what is run when nobody asks for something else: one byte more than nothing, then sleep.
    pub fn default_command() -> Vec<String> {
        ["sh", "-c", "echo started; exec sleep 86400"].map(str::to_owned).to_vec()
    }

    fn pod(&self, name: &str, handler: &str, logs: PathBuf) -> PodOptions {
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
            ..PodOptions::new(name, handler)
        }
    }
}

/// When each step was over, since the release.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stamps {
    /// RunPodSandbox answered.
    pub pod: Option<Duration>,
    /// CreateContainer answered.
    pub created: Option<Duration>,
    /// StartContainer answered.
    pub started: Option<Duration>,
    /// The first byte stood in the log.
    pub first_byte: Option<Duration>,
}

/// What became of a start.
#[derive(Debug)]
pub struct Start {
    /// The release.
    pub released: Instant,
    /// How far it came, and when.
    pub stamps: Stamps,
    /// Sandbox id, once there was one.
    pub pod_id: Option<String>,
    /// Container id, once there was one.
    pub container_id: Option<String>,
    /// Why it came no further.
    pub end: Result<(), StartError>,
}

/// Why a container's first byte was not seen.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The runtime refused.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// Too late.
    #[error("{step} was not over {limit:?} after the pod's release")]
    Timeout {
        /// What was waited for.
        step: &'static str,
        /// The time-out.
        limit: Duration,
    },
    /// The measurement was ended.
    #[error("interrupted")]
    Interrupted,
    /// No way to see the first byte.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// It printed something, and not on stdout: it is not the command that ran.
    #[error("the container's first line is not its own output: {0}")]
    NotItsOutput(String),
}

impl StartError {
    /// Returns the CRI call, or step, at which it failed.
    pub fn step(&self) -> &'static str {
        match self {
            StartError::Runtime(
                RuntimeError::Refused { call, .. } | RuntimeError::Incomplete { call, .. },
            ) => call,
            StartError::Runtime(_) => "connect",
            StartError::Timeout { step, .. } => step,
            StartError::Interrupted => "interrupted",
            StartError::Watch(_) | StartError::NotItsOutput(_) => "first byte",
        }
    }
}

/// Starts a pod and its container on `handler` and waits for the first byte. Leaves the pod as it is,
/// whatever became of it: see [`remove`].
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

/// Checks that the first line in a CRI log (`time stream tag text`) is from stdout. Runs after the last time stamp.
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
            // The first byte was seen before the rest of its line was written.
            _ => match tokio::time::timeout(limit, more.seen()).await {
                Ok(seen) => drop(seen?),
                Err(_) => return not_its(line),
            },
        }
    }
    watch.forget(file);
    Ok(())
}

/// Removes a pod that [`start`] left, also one whose id never came back, and its log.
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
    // Whether a log is there depends on how far the pod came.
    let _ = tokio::fs::remove_file(watch.dir().join(format!("{name}.log"))).await;
    Ok(())
}

/// Removes every pod of a run; what could not be removed stands in the error.
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
