//! Pods that a restart of containerd puts at risk.
//!
//! containerd 2 recovers the sandboxes of another controller without their creation time
//! (`internal/cri/server/restart.go`, 2.0 to 2.4): neither `Status` nor its store can restore that. kubelet takes the
//! newest sandbox of a pod for the current one. If all are equally old, it may take an older, dead one, and then it
//! ends the running pod.

use std::collections::BTreeMap;

use k8s_cri::v1::{
    ListPodSandboxRequest, PodSandbox, PodSandboxState, runtime_service_client::RuntimeServiceClient,
};
use serde_json::Value;

use super::{
    PATIENCE,
    containerd::{HAS_CONTROLLERS, OWN_SANDBOXER},
    cri::{self, MAX_ANSWER_BYTES, RuntimeStatus},
    program,
    verdict::{Check, Fix, Subject},
};

const SANDBOXES: Subject = Subject {
    name: "sandboxes",
    why: "after its restart containerd does not know which sandbox of a pod is the newest; kubelet may then end a pod that \
          runs and also has an older, dead sandbox",
};

/// Maximum number of pods that the text names.
const MAX_NAMED: usize = 3;

/// A pod with a dead sandbox beside the running one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endangered {
    /// Name of the pod: `namespace/name`.
    pub pod: String,
    /// IDs of the pod's dead sandboxes.
    pub dead: Vec<String>,
}

/// Reads which pods are endangered; `None` if containerd does not respond or has no handler with another controller.
pub async fn read(reading: &cri::Reading) -> Option<Result<Vec<Endangered>, String>> {
    let runtime = reading.runtime()?;
    let handlers = handlers(runtime);
    if handlers.is_empty() {
        return None;
    }
    let listed = tokio::time::timeout(PATIENCE, list(&reading.endpoint)).await;
    Some(listed.unwrap_or_else(|_| Err(cri::silent())).map(|all| endangered(all, &handlers)))
}

/// Returns the runtime handlers whose pods have another controller.
fn handlers(runtime: &RuntimeStatus) -> Vec<String> {
    let runtimes = runtime.config.get("containerd").and_then(|containerd| containerd.get("runtimes"));
    let all = runtimes.and_then(Value::as_object).into_iter().flatten();
    let others = all.filter(|(_, handler)| {
        let controller = handler.get("sandboxer").and_then(Value::as_str).unwrap_or_default();
        !controller.is_empty() && controller != OWN_SANDBOXER
    });
    others.map(|(name, _)| name.clone()).collect()
}

async fn list(endpoint: &str) -> Result<Vec<PodSandbox>, String> {
    let channel = cri::grpc(cri::socket(endpoint))?.connect_lazy();
    let mut cri = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
    let answer = cri.list_pod_sandbox(ListPodSandboxRequest::default()).await;
    answer.map(|answer| answer.into_inner().items).map_err(|status| status.message().to_owned())
}

fn endangered(all: Vec<PodSandbox>, handlers: &[String]) -> Vec<Endangered> {
    let mut pods: BTreeMap<(String, String), (bool, Vec<String>)> = BTreeMap::new();
    for sandbox in all.into_iter().filter(|sandbox| handlers.contains(&sandbox.runtime_handler)) {
        let metadata = sandbox.metadata.unwrap_or_default();
        let pod = (format!("{}/{}", metadata.namespace, metadata.name), metadata.uid);
        let (runs, dead) = pods.entry(pod).or_default();
        match sandbox.state == i32::from(PodSandboxState::SandboxReady) {
            true => *runs = true,
            false => dead.push(sandbox.id),
        }
    }
    let both = pods.into_iter().filter(|(_, (runs, dead))| *runs && !dead.is_empty());
    both.map(|((pod, _), (_, dead))| Endangered { pod, dead }).collect()
}

/// Checks that no pod has a dead sandbox beside the running one.
pub fn judge(reading: &cri::Reading, found: Option<&Result<Vec<Endangered>, String>>) -> Check {
    let Some(runtime) = reading.runtime() else { return SANDBOXES.not_applicable("no containerd answers") };
    if program::version(&runtime.version).is_some_and(|version| version < HAS_CONTROLLERS) {
        return SANDBOXES.not_applicable(format!("containerd {} knows it", runtime.version));
    }
    let endangered = match found {
        None => return SANDBOXES.not_applicable("containerd has no runtime handler with another controller"),
        Some(Err(why)) => {
            let seen = format!("cannot list the pods of containerd {}: {why}", runtime.version);
            return SANDBOXES.warning(seen, super::ask_again());
        }
        Some(Ok(endangered)) => endangered,
    };
    if endangered.is_empty() {
        return SANDBOXES.ok("no pod has a dead sandbox beside the one that runs");
    }
    let named: Vec<_> = endangered.iter().take(MAX_NAMED).map(|entry| entry.pod.as_str()).collect();
    let more = match endangered.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let seen = format!("pods with a dead sandbox beside the one that runs: {}{more}", named.join(", "));
    let dead = endangered.iter().flat_map(|entry| &entry.dead);
    SANDBOXES.warning(
        seen,
        Fix::commands(
            "before containerd is restarted, remove the dead sandboxes, with the logs of their containers; or drain the node",
            dead.map(|id| format!("crictl rmp {id}")),
        ),
    )
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1::PodSandboxMetadata;
    use serde_json::json;

    use super::*;
    use crate::Verdict;

    fn reading(version: &str) -> cri::Reading {
        let runtimes = json!({
            "sandboxer": { "sandboxer": "sandboxer" }, "runc": { "sandboxer": "podsandbox" }, "old": {},
        });
        let runtime = RuntimeStatus {
            name: "containerd".into(),
            version: version.into(),
            pid: None,
            config: json!({ "containerd": { "runtimes": runtimes } }),
            network: Ok(()),
        };
        cri::Reading { endpoint: "unix:///c.sock".into(), runtime: Ok(runtime) }
    }

    fn sandbox(id: &str, pod: &str, uid: &str, state: PodSandboxState, handler: &str) -> PodSandbox {
        let metadata =
            PodSandboxMetadata { name: pod.into(), uid: uid.into(), namespace: "web".into(), attempt: 0 };
        PodSandbox {
            id: id.into(),
            metadata: Some(metadata),
            state: state.into(),
            runtime_handler: handler.into(),
            ..PodSandbox::default()
        }
    }

    #[test]
    fn a_pod_is_endangered_by_a_dead_sandbox_beside_the_one_that_runs() {
        use PodSandboxState::{SandboxNotready as Dead, SandboxReady as Ready};
        let all = vec![
            sandbox("1", "both", "u1", Dead, "sandboxer"),
            sandbox("2", "both", "u1", Ready, "sandboxer"),
            sandbox("3", "both", "u1", Dead, "sandboxer"),
            // Another pod of the same name, which kubelet distinguishes by UID.
            sandbox("4", "both", "u2", Dead, "sandboxer"),
            sandbox("5", "runs", "u3", Ready, "sandboxer"),
            sandbox("6", "over", "u4", Dead, "sandboxer"),
            sandbox("7", "runc", "u5", Dead, "runc"),
            sandbox("8", "runc", "u5", Ready, "runc"),
        ];
        let handlers = handlers(reading("v2.4.2").runtime().unwrap());
        assert_eq!(handlers, ["sandboxer"]);
        let found = endangered(all, &handlers);
        assert_eq!(found, [Endangered { pod: "web/both".into(), dead: vec!["1".into(), "3".into()] }]);
    }

    #[test]
    fn only_endangered_pods_are_a_warning_and_each_dead_sandbox_is_a_command() {
        let endangered = |count: usize| {
            let entry = |at| Endangered { pod: format!("web/p{at}"), dead: vec![format!("id{at}")] };
            (0..count).map(entry).collect::<Vec<_>>()
        };
        for (version, found, verdict, seen) in [
            ("v2.4.2", Some(Ok(endangered(0))), Verdict::Ok, "no pod"),
            ("v2.0.5", Some(Ok(endangered(2))), Verdict::Warning, "web/p0, web/p1"),
            ("v2.4.2", Some(Ok(endangered(5))), Verdict::Warning, "web/p2 and 2 more"),
            ("v2.4.2", Some(Err("silence".to_owned())), Verdict::Warning, "v2.4.2: silence"),
            ("v2.4.2", None, Verdict::NotApplicable, "no runtime handler"),
            ("v1.7.27", Some(Ok(endangered(2))), Verdict::NotApplicable, "1.7.27 knows it"),
        ] {
            let check = judge(&reading(version), found.as_ref());
            assert_eq!(check.verdict, verdict, "{check}");
            assert!(check.seen.contains(seen), "{seen}: {check}");
        }
        let fix = judge(&reading("v2.4.2"), Some(&Ok(endangered(5)))).fix.unwrap();
        assert_eq!(fix.commands.len(), 5);
        assert_eq!(fix.commands[4], "crictl rmp id4");
        let none = cri::Reading { endpoint: "x".into(), runtime: Err("gone".into()) };
        assert_eq!(judge(&none, None).verdict, Verdict::NotApplicable);
    }
}
