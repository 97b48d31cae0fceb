//! What the specification of a container says of the pod that it is.

use std::path::{Path, PathBuf};

use k8s_cri::v1::{
    LinuxContainerResources, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, PodSandboxConfig, PodSandboxMetadata,
};
use oci_spec::runtime::{LinuxNamespaceType, LinuxResources, Spec};
use prost::Message;
use sandboxer_protocol::{controller::ControllerCreateRequest, id::ContainerId};

use crate::error::PodError;

/// Prefix of the daemon's own annotations.
const OURS: &str = "io.sandboxer.";

/// The network that a container asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Network {
    /// A new network namespace, to which its caller may give interfaces before the start.
    New,
    /// The network namespace at this path.
    At(PathBuf),
}

/// Returns the network that a container asks for. Namespaces that a guest cannot share are an error.
pub fn network(id: &ContainerId, spec: &Spec) -> Result<Network, PodError> {
    let unsupported = |what: &str, why: &str| {
        Err(PodError::Unsupported(format!("container {id}: {what} is not available in a microVM pod: {why}")))
    };
    if spec.hooks().as_ref().is_some_and(|hooks| *hooks != Default::default()) {
        return unsupported("an OCI hook", "hooks are programs of the host that expect a process there");
    }
    let namespaces =
        spec.linux().as_ref().and_then(|linux| linux.namespaces().as_deref()).unwrap_or_default();
    let of = |kind| namespaces.iter().find(|namespace| namespace.typ() == kind);
    for (kind, name, option) in [
        (LinuxNamespaceType::Pid, "PID", "pid"),
        (LinuxNamespaceType::Ipc, "IPC", "ipc"),
        (LinuxNamespaceType::Uts, "UTS", "uts"),
    ] {
        match of(kind).map(|namespace| namespace.path().is_some()) {
            Some(false) => {}
            None => {
                return unsupported(
                    &format!("the host's {name} namespace (--{option}=host)"),
                    "a guest has a kernel of its own",
                );
            }
            Some(true) => {
                return unsupported(
                    &format!("another container's {name} namespace (--{option}=container:…)"),
                    "a guest has a kernel of its own",
                );
            }
        }
    }
    if of(LinuxNamespaceType::User).is_some() {
        return unsupported("a user namespace (--userns, userns-remap)", "its ids would be the host's");
    }
    match of(LinuxNamespaceType::Network) {
        Some(namespace) => Ok(namespace.path().clone().map_or(Network::New, Network::At)),
        None => unsupported(
            "the host's network (--network=host, --net-host)",
            "a guest has network cards of its own; give the container a network, or none",
        ),
    }
}

/// Returns the request for the pod that a container is. `of` is its namespace in containerd, and `netns` its network
/// namespace.
pub fn pod(id: &ContainerId, of: &str, spec: &Spec, netns: &Path) -> ControllerCreateRequest {
    let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
    let annotations = spec.annotations().iter().flatten().filter(|(name, _)| name.starts_with(OURS));
    let config = PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: id.to_string(),
            namespace: of.to_owned(),
            ..Default::default()
        }),
        hostname: spec.hostname().clone().unwrap_or_default(),
        annotations: annotations.map(|(name, value)| (name.clone(), value.clone())).collect(),
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(NamespaceOption {
                    pid: NamespaceMode::Container.into(),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            resources: resources.map(limits),
            ..Default::default()
        }),
        ..Default::default()
    };
    let value = config.encode_to_vec();
    ControllerCreateRequest {
        sandbox_id: id.to_string(),
        options: Some(prost_types::Any { type_url: "runtime.v1.PodSandboxConfig".to_owned(), value }),
        netns_path: netns.to_string_lossy().into_owned(),
        ..Default::default()
    }
}

/// Returns the limits that decide the size of the VM.
fn limits(resources: &LinuxResources) -> LinuxContainerResources {
    let (cpu, memory) = (resources.cpu().as_ref(), resources.memory().as_ref());
    let signed =
        |number: Option<u64>| number.and_then(|number| i64::try_from(number).ok()).unwrap_or_default();
    LinuxContainerResources {
        cpu_period: signed(cpu.and_then(|cpu| cpu.period())),
        cpu_quota: cpu.and_then(|cpu| cpu.quota()).unwrap_or_default(),
        cpu_shares: signed(cpu.and_then(|cpu| cpu.shares())),
        memory_limit_in_bytes: memory.and_then(|memory| memory.limit()).unwrap_or_default(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_config::Config;
    use sandboxer_process::cgroup::Hierarchies;
    use serde_json::json;

    use super::*;
    use crate::api::convert::pod_spec;

    const OWN: [&str; 5] = ["pid", "ipc", "uts", "mount", "network"];

    fn spec(namespaces: &[serde_json::Value]) -> Spec {
        serde_json::from_value(json!({
            "ociVersion": "1.2.0",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "cwd": "/"},
            "root": {"path": "rootfs"},
            "hostname": "web",
            "annotations": {"io.sandboxer.memory": "512Mi", "nerdctl/name": "x"},
            "linux": {
                "namespaces": namespaces,
                "resources": {"cpu": {"quota": 150_000, "period": 100_000}, "memory": {"limit": 268_435_456}},
            },
        }))
        .unwrap()
    }

    fn own(but: &str) -> Vec<serde_json::Value> {
        OWN.iter().filter(|kind| **kind != but).map(|kind| json!({"type": kind})).collect()
    }

    fn asked(namespaces: &[serde_json::Value]) -> Result<Network, PodError> {
        network(&"c1".parse().unwrap(), &spec(namespaces))
    }

    #[test]
    fn a_container_has_a_new_network_or_the_one_at_its_path() {
        assert_eq!(asked(&own("")).unwrap(), Network::New);
        let mut joined = own("network");
        joined.push(json!({"type": "network", "path": "/run/netns/x"}));
        assert_eq!(asked(&joined).unwrap(), Network::At("/run/netns/x".into()));
    }

    #[test]
    fn namespaces_that_a_guest_cannot_share_are_refused_by_the_callers_option() {
        let with = |but: &str, path: &str| {
            let mut namespaces = own(but);
            namespaces.push(json!({"type": but, "path": path}));
            namespaces
        };
        for (namespaces, says) in [
            (own("pid"), "the host's PID namespace (--pid=host)"),
            (own("ipc"), "the host's IPC namespace (--ipc=host)"),
            (own("uts"), "the host's UTS namespace (--uts=host)"),
            (own("network"), "the host's network (--network=host, --net-host)"),
            (with("pid", "/proc/7/ns/pid"), "another container's PID namespace (--pid=container:…)"),
            (with("user", "/proc/7/ns/user"), "a user namespace"),
        ] {
            let error = asked(&namespaces).unwrap_err();
            assert_eq!(error.code(), sandboxer_base::Code::Unimplemented);
            assert!(error.to_string().contains(&format!("container c1: {says}")), "{error}");
        }
        let mut hooked = spec(&own(""));
        hooked.set_hooks(serde_json::from_value(json!({"prestart": [{"path": "/bin/true"}]})).unwrap());
        let error = network(&"c1".parse().unwrap(), &hooked).unwrap_err().to_string();
        assert!(error.contains("an OCI hook"), "{error}");
    }

    #[test]
    fn the_pod_has_the_containers_size_name_and_annotations() {
        let request = pod(&"c1".parse().unwrap(), "moby", &spec(&own("")), Path::new("/run/x/netns/c1"));
        let spec = pod_spec(&request, &Config::default(), &Hierarchies::default()).unwrap();
        assert_eq!(
            (spec.namespace.as_str(), spec.name.as_str(), spec.hostname.as_str()),
            ("moby", "c1", "web")
        );
        assert_eq!((spec.vcpus, spec.memory_mib, spec.limits.memory_bytes), (2, 512, 256 << 20));
        assert_eq!(spec.netns.as_deref(), Some("/run/x/netns/c1".as_ref()));
        assert!(!spec.shared_pids);
    }
}
