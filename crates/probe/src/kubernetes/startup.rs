//! Pods of a cluster, created one after the other on alternating RuntimeClasses, and the cluster's timestamps of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hyper::Method;
use jiff::Timestamp;
use rand::RngExt;
use sandboxer_base::chain;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::client::{ApiError, Client};
use super::report::{self, Report};
use crate::sample::Outcome;
use crate::timeline::RUN_LABEL;

/// Interval of the requests for a pod's state. No figure includes it: all times are the cluster's own timestamps.
const LOOK: Duration = Duration::from_millis(500);
/// Timeout of a pod's removal.
const REMOVAL_LIMIT: Duration = Duration::from_secs(60);
/// Reasons of a waiting container that mean it will not start.
const HOPELESS: [&str; 5] = [
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImagePullBackOff",
    "CreateContainerError",
    "RunContainerError",
];

/// Plan of a measurement in a cluster.
#[derive(Debug, Clone)]
pub struct Plan {
    /// RuntimeClasses, in the order in which they alternate; an empty name stands for none.
    pub classes: Vec<String>,
    /// Number of counted pods of each class.
    pub count: u32,
    /// Number of warm-up pods of each class, which are not counted.
    pub warm_up: u32,
    /// Namespace of the pods.
    pub namespace: String,
    /// Name of the run, unique in the namespace.
    pub run: String,
    /// Reference of the pods' image.
    pub image: String,
    /// Command of the containers, which must keep running.
    pub command: Vec<String>,
    /// Node on which the pods run; the scheduler's choice if `None`.
    pub node: Option<String>,
    /// Time after which a start has failed.
    pub timeout: Duration,
}

/// One pod. Times are s since its creation, by the cluster's clocks; `None` if the timestamp is missing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// RuntimeClass; empty for none.
    pub class: String,
    /// Number of the pod, from 0; warm-ups are numbered separately.
    pub index: u32,
    /// Whether the pod is a warm-up, which never counts.
    pub warm_up: bool,
    /// Node on which the pod ran.
    pub node: String,
    /// The reason for a failure, in one line; empty on success.
    pub error: String,
    /// Whether the start was interrupted, so that it does not count.
    pub interrupted: bool,
    /// The pod's `metadata.creationTimestamp`.
    pub created: String,
    /// Times of the pod's conditions that became true, such as "Ready".
    pub conditions: BTreeMap<String, f64>,
    /// Start of the pod's container.
    pub started_s: Option<f64>,
    /// Times of the pod's events by reason, such as "Scheduled"; the latest of each.
    pub events: BTreeMap<String, f64>,
}

impl Row {
    /// Returns the time from the pod's creation until it was Ready, s, if the pod counts.
    pub fn ready_s(&self) -> Option<f64> {
        self.conditions.get("Ready").copied().filter(|_| self.outcome() == Outcome::Ok && !self.warm_up)
    }

    /// Returns the outcome of the pod's start.
    pub fn outcome(&self) -> Outcome {
        match (self.interrupted, self.error.is_empty()) {
            (true, _) => Outcome::Interrupted,
            (false, true) => Outcome::Ok,
            (false, false) => Outcome::Failed,
        }
    }
}

/// Why nothing can be measured.
#[derive(Debug, thiserror::Error)]
pub enum StartupError {
    /// The plan measures nothing.
    #[error("name at least one RuntimeClass and request at least one pod")]
    Empty,
    /// A request to the API server failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The cluster has no such RuntimeClass.
    #[error("the cluster has no RuntimeClass '{0}'")]
    NoClass(String),
}

/// Measures. Failures stay in the rows. Ends early when `cancel` is cancelled. Removes every pod.
pub async fn measure(
    client: &Client,
    plan: &Plan,
    cancel: &CancellationToken,
    progress: &mut (dyn FnMut(&Row) + Send),
) -> Result<Report, StartupError> {
    if plan.classes.is_empty() || plan.count == 0 {
        return Err(StartupError::Empty);
    }
    let version = client.call(Method::GET, "/version", None).await?;
    for class in plan.classes.iter().filter(|class| !class.is_empty()) {
        let path = format!("/apis/node.k8s.io/v1/runtimeclasses/{class}");
        match client.call(Method::GET, &path, None).await {
            Err(error) if error.is_not_found() => return Err(StartupError::NoClass(class.clone())),
            found => drop(found?),
        }
    }
    let (mut rows, mut serial) = (Vec::new(), 0);
    for (count, warm_up) in [(plan.warm_up, true), (plan.count, false)] {
        for index in 0..count {
            for class in &plan.classes {
                if cancel.is_cancelled() {
                    break;
                }
                serial += 1;
                let row = Row { class: class.clone(), index, warm_up, ..Row::default() };
                let row = one(client, plan, &format!("{}-{serial}", plan.run), row, cancel).await;
                progress(&row);
                rows.push(row);
            }
        }
    }
    let notes = clean(client, plan).await.err().into_iter().collect();
    let version = version.get("gitVersion").and_then(Value::as_str).unwrap_or("unknown").to_owned();
    Ok(report::build(plan, version, rows, cancel.is_cancelled(), notes))
}

async fn one(client: &Client, plan: &Plan, name: &str, mut row: Row, cancel: &CancellationToken) -> Row {
    // Timestamps have whole seconds: only if pods are created at random fractions of a second is their mean true.
    let phase = Duration::from_secs_f64(rand::rng().random_range(0.0..1.0));
    let attempt = async {
        tokio::time::sleep(phase).await;
        let pods = format!("/api/v1/namespaces/{}/pods", plan.namespace);
        let pod = client
            .call(Method::POST, &pods, Some(&pod(plan, name, &row.class)))
            .await
            .map_err(|e| chain(&e))?;
        let pod = ready(client, plan, &format!("{pods}/{name}"), pod).await?;
        let events = events(client, plan, &pod).await.unwrap_or_default();
        Ok::<_, String>((pod, events))
    };
    tokio::select! {
        biased;
        () = cancel.cancelled() => row.interrupted = true,
        done = attempt => match done.and_then(|(pod, events)| stamps(&mut row, &pod, &events)) {
            Ok(()) => {}
            Err(why) => row.error = crate::log::plain(&why),
        }
    }
    if let Err(why) = remove(client, plan, name).await
        && row.error.is_empty()
        && !row.interrupted
    {
        row.error = crate::log::plain(&why);
    }
    row
}

fn pod(plan: &Plan, name: &str, class: &str) -> Value {
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "labels": { RUN_LABEL: plan.run } },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false,
            "containers": [{
                "name": "main",
                "image": plan.image,
                "imagePullPolicy": "IfNotPresent",
                "command": plan.command,
            }],
        },
    });
    if !class.is_empty() {
        pod["spec"]["runtimeClassName"] = json!(class);
    }
    if let Some(node) = &plan.node {
        pod["spec"]["nodeSelector"] = json!({ "kubernetes.io/hostname": node });
    }
    pod
}

/// Waits until a pod is Ready, and returns its state then.
async fn ready(client: &Client, plan: &Plan, path: &str, mut pod: Value) -> Result<Value, String> {
    let end = Instant::now() + plan.timeout;
    loop {
        if condition(&pod, "Ready").is_some() {
            return Ok(pod);
        }
        let phase = pod.pointer("/status/phase").and_then(Value::as_str).unwrap_or("Unknown").to_owned();
        let reason = waiting_reason(&pod);
        if matches!(&*phase, "Failed" | "Succeeded")
            || HOPELESS.iter().any(|hopeless| reason.starts_with(hopeless))
        {
            return Err(format!("the pod does not get ready: phase {phase}, {reason}"));
        }
        if Instant::now() >= end {
            return Err(format!("not ready within {:?}: phase {phase}, {reason}", plan.timeout));
        }
        tokio::time::sleep(LOOK).await;
        pod = client.call(Method::GET, path, None).await.map_err(|error| chain(&error))?;
    }
}

/// Returns why a pod is not ready yet: its container's reason, or else a condition's.
fn waiting_reason(pod: &Value) -> String {
    let text = |value: &Value| {
        let field = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        format!("{}: {}", field("reason"), field("message"))
    };
    let state = pod.pointer("/status/containerStatuses/0/state");
    if let Some(state) = state.and_then(|state| state.get("waiting").or_else(|| state.get("terminated"))) {
        return text(state);
    }
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
    let unmet = conditions.into_iter().flatten().find(|condition| condition["status"] == "False");
    unmet.map_or_else(|| "without a reason".into(), text)
}

/// Returns the time at which a condition became true.
fn condition(pod: &Value, kind: &str) -> Option<Timestamp> {
    let conditions = pod.pointer("/status/conditions")?.as_array()?;
    let condition =
        conditions.iter().find(|condition| condition["type"] == kind && condition["status"] == "True")?;
    condition.get("lastTransitionTime")?.as_str()?.parse().ok()
}

async fn events(client: &Client, plan: &Plan, pod: &Value) -> Result<Value, ApiError> {
    let uid = pod.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    let path =
        format!("/api/v1/namespaces/{}/events?fieldSelector=involvedObject.uid%3D{uid}", plan.namespace);
    client.call(Method::GET, &path, None).await
}

/// Reads the timestamps of a pod that is Ready.
fn stamps(row: &mut Row, pod: &Value, events: &Value) -> Result<(), String> {
    let created = pod.pointer("/metadata/creationTimestamp").and_then(Value::as_str).unwrap_or_default();
    let begin: Timestamp = created
        .parse()
        .map_err(|_| format!("the pod's creationTimestamp is '{created}', which is no time"))?;
    let since = |at: Timestamp| at.duration_since(begin).as_secs_f64();
    row.created = created.to_owned();
    row.node = pod.pointer("/spec/nodeName").and_then(Value::as_str).unwrap_or_default().to_owned();
    for kind in ["PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"] {
        row.conditions.extend(condition(pod, kind).map(|at| (kind.to_owned(), since(at))));
    }
    let started = pod.pointer("/status/containerStatuses/0/state/running/startedAt").and_then(Value::as_str);
    row.started_s = started.and_then(|at| at.parse().ok()).map(since);
    for event in events.get("items").and_then(Value::as_array).into_iter().flatten() {
        // Events of the scheduler have microseconds, events of a kubelet whole seconds.
        let at =
            ["eventTime", "lastTimestamp"].iter().find_map(|name| event.get(*name)?.as_str()?.parse().ok());
        if let (Some(reason), Some(at)) = (event.get("reason").and_then(Value::as_str), at) {
            row.events.insert(reason.to_owned(), since(at));
        }
    }
    Ok(())
}

/// Removes a pod and waits until it is gone.
async fn remove(client: &Client, plan: &Plan, name: &str) -> Result<(), String> {
    let path = format!("/api/v1/namespaces/{}/pods/{name}", plan.namespace);
    let end = Instant::now() + REMOVAL_LIMIT;
    let mut method = Method::DELETE;
    loop {
        match client.call(method, &path, None).await {
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(chain(&error)),
            Ok(_) if Instant::now() >= end => {
                return Err(format!("{path} still exists after {REMOVAL_LIMIT:?}"));
            }
            Ok(_) => tokio::time::sleep(LOOK / 2).await,
        }
        method = Method::GET;
    }
}

/// Removes all pods of the run, including those whose creation was interrupted.
async fn clean(client: &Client, plan: &Plan) -> Result<(), String> {
    let label = format!("{RUN_LABEL}%3D{}", plan.run);
    let path = format!("/api/v1/namespaces/{}/pods?labelSelector={label}", plan.namespace);
    match client.call(Method::DELETE, &path, None).await {
        Ok(_) => Ok(()),
        Err(error) => {
            Err(format!("pods with label {RUN_LABEL}={} may still exist: {}", plan.run, chain(&error)))
        }
    }
}
