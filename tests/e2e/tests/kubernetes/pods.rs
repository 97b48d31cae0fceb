//! Pods of one case on one runtime class.

use std::cell::RefCell;
use std::fmt::Display;
use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sandboxer_e2e::case::BUSYBOX;
use serde_json::{Value, json};

use crate::node::{Node, eventually, run_within, text};
use crate::observed::{Outcome, Seen};

/// Timeout of a step: long, because several emulated guests share the processors with whatever else runs.
pub const PATIENCE: Duration = Duration::from_secs(180);

const JSON: &str = "application/json";
/// Kubernetes' own way to change a list of named things.
const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// One case on one class.
pub struct Run<'a> {
    pub node: &'a Node,
    /// `sandboxer` or `runc`.
    pub class: &'static str,
    /// Of the names of its objects.
    prefix: String,
    seen: RefCell<Vec<Seen>>,
    /// API paths of what is to be deleted.
    made: RefCell<Vec<String>>,
    /// Files of static pods.
    files: RefCell<Vec<PathBuf>>,
}

impl<'a> Run<'a> {
    /// Prepares a case.
    pub fn new(node: &'a Node, class: &'static str, case: &str) -> Self {
        let prefix = format!("{}-{class}", case.replace("::", "-").replace('_', "-"));
        Self {
            node,
            class,
            prefix,
            seen: RefCell::default(),
            made: RefCell::default(),
            files: RefCell::default(),
        }
    }

    /// Returns whether pods are microVMs.
    pub fn in_vm(&self) -> bool {
        self.class == "sandboxer"
    }

    /// Notes what is there, and what any runtime should show. The two classes are compared by it afterwards.
    pub fn see(&self, what: &str, seen: impl Display, wanted: impl Display) {
        let (seen, wanted) = (seen.to_string(), wanted.to_string());
        self.seen.borrow_mut().push(Seen { what: what.to_owned(), seen, wanted });
    }

    /// Ends the case: removes its objects.
    pub fn end(self, outcome: Result<()>) -> Outcome {
        for file in self.files.borrow().iter() {
            let _ = std::fs::remove_file(file);
        }
        for path in self.made.borrow().iter().rev() {
            let body = json!({ "gracePeriodSeconds": 0 });
            let _ = self.node.call("DELETE", path, Some((JSON, &body)));
        }
        Outcome { seen: self.seen.into_inner(), failed: outcome.err().map(|error| format!("{error:#}")) }
    }

    /// Returns the name of an object of this case.
    pub fn name(&self, suffix: &str) -> String {
        if suffix.is_empty() { self.prefix.clone() } else { format!("{}-{suffix}", self.prefix) }
    }

    /// Creates an object in the default namespace: `resource` is the plural of its kind.
    pub fn create(&self, resource: &str, suffix: &str, object: Value) -> Result<Value> {
        self.create_at(format!("/api/v1/namespaces/default/{resource}"), suffix, object)
    }

    /// Creates an object that is in no namespace.
    pub fn create_for_all(&self, resource: &str, suffix: &str, object: Value) -> Result<Value> {
        self.create_at(format!("/api/v1/{resource}"), suffix, object)
    }

    fn create_at(&self, all: String, suffix: &str, mut object: Value) -> Result<Value> {
        let name = self.name(suffix);
        object["metadata"]["name"] = json!(name);
        let created = self.node.call("POST", &all, Some((JSON, &object)))?;
        self.made.borrow_mut().push(format!("{all}/{name}"));
        Ok(created)
    }

    /// Changes an object.
    pub fn patch(&self, resource: &str, suffix: &str, patch: &Value) -> Result<Value> {
        let path = format!("/api/v1/namespaces/default/{resource}/{}", self.name(suffix));
        self.node.call("PATCH", &path, Some((STRATEGIC, patch)))
    }

    /// Changes an object's status, as a controller does.
    pub fn patch_status(&self, resource: &str, suffix: &str, patch: &Value) -> Result<Value> {
        let path = format!("/api/v1/namespaces/default/{resource}/{}/status", self.name(suffix));
        self.node.call("PATCH", &path, Some((STRATEGIC, patch)))
    }

    /// Gives kubelet a pod by a file, and waits until the API shows it. Its uid is that of its mirror in the API.
    pub fn static_pod(&self, suffix: &str, mut spec: Value) -> Result<Pod<'_>> {
        spec["runtimeClassName"] = json!(self.class);
        spec["terminationGracePeriodSeconds"] = json!(2);
        spec["enableServiceLinks"] = json!(false);
        spec["dnsPolicy"] = json!("Default");
        let metadata = json!({ "name": self.name(suffix), "namespace": "default" });
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec });
        let file = self.node.static_pods().join(format!("{}.json", self.name(suffix)));
        // Whole at once: kubelet reads the directory at any time, but no file whose name begins with a dot.
        let new = file.with_file_name(format!(".{}.new", self.name(suffix)));
        std::fs::write(&new, pod.to_string())?;
        std::fs::rename(&new, &file)?;
        self.files.borrow_mut().push(file);
        let name = format!("{}-node1", self.name(suffix));
        let path = format!("/api/v1/namespaces/default/pods/{name}");
        let mirror =
            eventually("the static pod's mirror", PATIENCE, || Ok(self.node.call("GET", &path, None).ok()))?;
        let uid = mirror["metadata"]["uid"].as_str().context("a pod has a uid")?.to_owned();
        Ok(Pod { run: self, name, uid })
    }

    /// Takes a static pod's file away.
    pub fn remove_static_pod(&self, suffix: &str) -> Result<()> {
        let file = self.node.static_pods().join(format!("{}.json", self.name(suffix)));
        Ok(std::fs::remove_file(file)?)
    }

    /// Creates a Deployment, and waits until all its pods are Ready.
    pub fn deployment(
        &self,
        suffix: &str,
        count: u32,
        annotations: &Value,
        mut spec: Value,
    ) -> Result<Vec<Pod<'_>>> {
        self.complete(&mut spec);
        let labels = json!({ "app": self.name(suffix) });
        let selected = format!("labelSelector=app%3D{}", self.name(suffix));
        let pods = format!("/api/v1/namespaces/default/pods?{selected}");
        // The last is deleted first. There is no controller that would delete what belongs to it.
        let owned = format!("/apis/apps/v1/namespaces/default/replicasets?{selected}");
        self.made.borrow_mut().extend([pods.clone(), owned]);
        let deployment = json!({ "metadata": {}, "spec": {
            "replicas": count, "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels, "annotations": annotations }, "spec": spec },
        } });
        self.create_at("/apis/apps/v1/namespaces/default/deployments".to_owned(), suffix, deployment)?;
        let patience = PATIENCE * count.div_ceil(3);
        let ready = eventually("Ready pods of a Deployment", patience, || {
            let list = self.node.call("GET", &pods, None)?;
            let all: Vec<_> = list["items"].as_array().into_iter().flatten().cloned().collect();
            let ready = all.len() == count as usize && all.iter().all(|pod| is_ready(&pod["status"]));
            Ok(ready.then_some(all))
        });
        let ready = ready.with_context(|| {
            let list = self.node.call("GET", &pods, None).unwrap_or_default();
            let all = list["items"].as_array().into_iter().flatten();
            all.map(|pod| brief(&pod["status"])).collect::<Vec<_>>().join("\n")
        })?;
        let field = |pod: &Value, name: &str| pod["metadata"][name].as_str().map(str::to_owned);
        let pods = ready
            .iter()
            .map(|pod| Some(Pod { run: self, name: field(pod, "name")?, uid: field(pod, "uid")? }));
        pods.collect::<Option<_>>().context("a pod has a name and a uid")
    }

    pub fn pod(&self, suffix: &str, mut spec: Value) -> Result<Pod<'_>> {
        self.complete(&mut spec);
        let labels = json!({ "labels": { "app": self.name(suffix) } });
        let created = self.create("pods", suffix, json!({ "metadata": labels, "spec": spec }))?;
        let uid = created["metadata"]["uid"].as_str().context("a pod has a uid")?.to_owned();
        Ok(Pod { run: self, name: self.name(suffix), uid })
    }

    /// Adds to a pod's specification what all have.
    fn complete(&self, spec: &mut Value) {
        spec["nodeName"] = json!("node1");
        spec["runtimeClassName"] = json!(self.class);
        for (key, value) in [
            ("terminationGracePeriodSeconds", json!(2)),
            ("automountServiceAccountToken", json!(false)),
            ("enableServiceLinks", json!(false)),
            ("serviceAccountName", json!("default")),
            // There is no cluster DNS, and kubelet would say so.
            ("dnsPolicy", json!("Default")),
        ] {
            if spec.get(key).is_none() {
                spec[key] = value;
            }
        }
    }

    /// Creates a pod of one container `c`, and waits until it is Ready.
    pub fn ready_pod(&self, suffix: &str, container: Value) -> Result<Pod<'_>> {
        let pod = self.pod(suffix, json!({ "containers": [container] }))?;
        pod.ready()?;
        Ok(pod)
    }
}

/// Returns a container that runs a script.
pub fn container(name: &str, script: &str) -> Value {
    json!({
        "name": name, "image": BUSYBOX, "imagePullPolicy": "Never", "command": ["sh", "-c", script],
        "resources": { "requests": { "cpu": "10m", "memory": "8Mi" } },
    })
}

/// Returns `value` with more fields.
pub fn merged(mut value: Value, more: Value) -> Value {
    if let (Some(fields), Value::Object(more)) = (value.as_object_mut(), more) {
        fields.extend(more);
    }
    value
}

/// Waits for a signal, and ends by TERM at once.
pub const WAIT: &str = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done";

pub struct Pod<'a> {
    run: &'a Run<'a>,
    /// The name of the pod.
    pub name: String,
    /// The uid of the pod.
    pub uid: String,
}

impl Pod<'_> {
    /// Returns what the API has of it.
    pub fn get(&self) -> Result<Value> {
        self.run.node.call("GET", &format!("/api/v1/namespaces/default/pods/{}", self.name), None)
    }

    /// Waits until `check` returns a value for its status.
    pub fn wait<T>(&self, what: &str, mut check: impl FnMut(&Value) -> Option<T>) -> Result<T> {
        let mut last = Value::Null;
        let found = eventually(what, PATIENCE, || {
            last = self.get()?["status"].clone();
            Ok(check(&last))
        });
        found.with_context(|| {
            let events = self.events(|_| true).unwrap_or_default();
            format!("pod {}: {}; events {events:?}", self.name, brief(&last))
        })
    }

    /// Waits until it is Ready.
    pub fn ready(&self) -> Result<()> {
        self.wait("Ready", |status| is_ready(status).then_some(()))
    }

    /// Waits until it has ended; returns its phase.
    pub fn ended(&self) -> Result<String> {
        self.wait("end", |status| {
            let phase = status["phase"].as_str()?;
            matches!(phase, "Succeeded" | "Failed").then(|| phase.to_owned())
        })
    }

    /// Changes its status' subresource, or the pod itself if `subresource` is empty.
    pub fn patch(&self, subresource: &str, patch: &Value) -> Result<Value> {
        let path = format!("/api/v1/namespaces/default/pods/{}/{subresource}", self.name);
        self.run.node.call("PATCH", path.trim_end_matches('/'), Some((STRATEGIC, patch)))
    }

    /// Deletes it as a user would; returns after how long it is gone.
    pub fn delete(&self) -> Result<Duration> {
        let path = format!("/api/v1/namespaces/default/pods/{}", self.name);
        let began = Instant::now();
        self.run.node.call("DELETE", &path, None)?;
        eventually("deletion", PATIENCE, || Ok(self.get().is_err().then_some(())))?;
        Ok(began.elapsed())
    }

    /// Runs `kubectl VERB NAME …` for at most [`PATIENCE`].
    pub fn kubectl(&self, verb: &str, more: &[&str]) -> Result<Output> {
        let arguments: Vec<_> = [verb, &self.name].into_iter().chain(more.iter().copied()).collect();
        run_within(&mut self.run.node.kubectl(&arguments), PATIENCE)
    }

    /// Runs a script in a container; returns its output, which must have been a success.
    pub fn exec(&self, container: &str, script: &str) -> Result<String> {
        let output = self.kubectl("exec", &["-c", container, "--", "sh", "-c", script])?;
        ensure!(output.status.success(), "exec {script:?}: {}", text(&output.stderr));
        Ok(text(&output.stdout))
    }

    /// Returns a container's log, after `kubectl logs` with these options.
    pub fn logs(&self, container: &str, options: &[&str]) -> Result<String> {
        let more: Vec<_> = ["-c", container].into_iter().chain(options.iter().copied()).collect();
        let output = self.kubectl("logs", &more)?;
        ensure!(output.status.success(), "logs: {}", text(&output.stderr));
        Ok(text(&output.stdout))
    }

    /// Returns whether kubelet has evicted it.
    pub fn is_evicted(&self) -> Result<bool> {
        Ok(!self.events(|reason| reason == "Evicted")?.is_empty())
    }

    /// Returns reasons and messages of its events that `select` takes, the oldest first.
    pub fn events(&self, select: impl Fn(&str) -> bool) -> Result<Vec<(String, String)>> {
        let path =
            format!("/api/v1/namespaces/default/events?fieldSelector=involvedObject.uid%3D{}", self.uid);
        let list = self.run.node.call("GET", &path, None)?;
        let mut events: Vec<_> = list["items"].as_array().into_iter().flatten().collect();
        events.sort_by_key(|event| event["firstTimestamp"].as_str().unwrap_or_default().to_owned());
        let field = |event: &Value, name: &str| event[name].as_str().unwrap_or_default().to_owned();
        let all = events.iter().map(|event| (field(event, "reason"), field(event, "message")));
        Ok(all.filter(|(reason, _)| select(reason)).collect())
    }
}

/// Returns whether a status has the condition Ready.
pub fn is_ready(status: &Value) -> bool {
    condition(status, "Ready") == "True"
}

/// Returns a condition's status.
pub fn condition<'a>(status: &'a Value, name: &str) -> &'a str {
    let all = status["conditions"].as_array().into_iter().flatten();
    let found =
        all.filter(|condition| condition["type"] == name).find_map(|condition| condition["status"].as_str());
    found.unwrap_or("absent")
}

/// Returns the status of a container, of any kind.
pub fn container_status<'a>(status: &'a Value, container: &str) -> &'a Value {
    let kinds = ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"];
    let mut all = kinds.iter().flat_map(|kind| status[kind].as_array().into_iter().flatten());
    all.find(|entry| entry["name"] == container).unwrap_or(&Value::Null)
}

/// Returns `REASON/CODE` of a container that has ended.
pub fn end_of(state: &Value) -> String {
    let ended = &state["terminated"];
    format!("{}/{}", ended["reason"].as_str().unwrap_or("-"), ended["exitCode"])
}

fn brief(status: &Value) -> String {
    let text = json!({
        "phase": status["phase"], "reason": status["reason"], "message": status["message"],
        "init": status["initContainerStatuses"], "containers": status["containerStatuses"],
    });
    text.to_string().chars().take(1500).collect()
}
