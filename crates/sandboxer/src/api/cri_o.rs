//! CRI-O's description of a pod, which it writes into the specification of the pod's sandbox container.
//!
//! CRI-O adds the pod's own annotations to those with which it describes a pod, after them: the author of a pod can
//! replace any of these. So what matters to others than that author is read from where no annotation reaches (namespaces,
//! control group, hostname), or from the pod's labels, of which kubelet sets those below and CRI-O adds them last.
//! The runtime handler is nowhere else: such an author can choose another of the node's.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use k8s_cri::v1::{
    LinuxContainerResources, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, PodSandboxConfig, PodSandboxMetadata,
};
use oci_spec::runtime::{LinuxNamespaceType, Spec};
use prost::Message;
use sandboxer_host::network::namespace;
use sandboxer_protocol::{
    controller::{ControllerCreateRequest, types::Sandbox},
    id::{ContainerId, SandboxId},
};
use serde::Deserialize;
use serde_json::json;

use super::{bundle, cri_metadata};
use crate::error::PodError;

/// CRI-O's annotations: what a container is, its pod, the pod's resources, namespaces, runtime handler and network.
pub const CONTAINER_TYPE: &str = "io.kubernetes.cri-o.ContainerType";
pub const SANDBOX_ID: &str = "io.kubernetes.cri-o.SandboxID";
const RESOURCES: &str = "io.kubernetes.cri-o.PodLinuxResources";
const NAMESPACES: &str = "io.kubernetes.cri-o.NamespaceOptions";
const HANDLER: &str = "io.kubernetes.cri-o.RuntimeHandler";
const NETWORK: &str = "io.kubernetes.cri-o.CNIResult";
/// Labels of kubelet, which CRI-O sets if its caller has not.
const NAME: &str = "io.kubernetes.pod.name";
const NAMESPACE: &str = "io.kubernetes.pod.namespace";
const UID: &str = "io.kubernetes.pod.uid";
/// The host's network and IPC namespaces.
const HOSTS_NETWORK: &str = "/proc/self/ns/net";
const HOSTS_IPC: &str = "/proc/self/ns/ipc";
/// Name of the file in a bundle that says that memory ran out.
const OOM: &str = "oom";
/// Prefix of the daemon's own annotations.
const OURS: &str = "io.sandboxer.";

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Namespaces {
    pid: i32,
}

/// The result of CNI.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Network {
    ips: Vec<Address>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Address {
    /// With the length of the prefix.
    address: String,
}

/// Returns the request that a sandbox controller would get for the pod `sandbox`, from the specification of the pod's
/// sandbox container.
pub fn create_request(sandbox: &ContainerId, spec: &Spec) -> Result<ControllerCreateRequest, String> {
    let none = HashMap::new();
    let annotations = spec.annotations().as_ref().unwrap_or(&none);
    let text = |name: &str| annotations.get(name).cloned().unwrap_or_default();
    let linux = spec.linux().as_ref();
    let namespaces = linux.and_then(|linux| linux.namespaces().as_deref()).unwrap_or_default();
    let of = |kind| namespaces.iter().find(|namespace| namespace.typ() == kind);
    let path = |kind| of(kind).and_then(|namespace| namespace.path().as_deref());
    let asked: Namespaces = described(annotations, NAMESPACES)?;
    let mode = |is_hosts| if is_hosts { NamespaceMode::Node } else { NamespaceMode::Pod };
    let ipc = path(LinuxNamespaceType::Ipc);
    let is_ipc_hosts = ipc.is_none_or(|path| is_hosts(path, HOSTS_IPC));
    // Without a namespace, its processes would see the host's, whatever is described.
    let pid = if of(LinuxNamespaceType::Pid).is_none() { NamespaceMode::Node.into() } else { asked.pid };
    let resources: Option<cri_metadata::Resources> = described(annotations, RESOURCES)?;
    let config = PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: text(NAME),
            namespace: text(NAMESPACE),
            uid: text(UID),
            ..Default::default()
        }),
        hostname: spec.hostname().clone().unwrap_or_default(),
        annotations: annotations
            .iter()
            .filter(|(name, _)| name.starts_with(OURS))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: linux
                .and_then(|linux| linux.cgroups_path().as_deref())
                .map(cgroup_parent)
                .unwrap_or_default(),
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(NamespaceOption {
                    pid,
                    ipc: mode(is_ipc_hosts).into(),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            resources: resources.map(LinuxContainerResources::from),
            ..Default::default()
        }),
        ..Default::default()
    };
    let netns = path(LinuxNamespaceType::Network);
    if netns.is_none() && of(LinuxNamespaceType::Network).is_some() {
        return Err("its network namespace has no path".to_owned());
    }
    let netns = netns.filter(|path| !is_hosts(path, HOSTS_NETWORK));
    let network: Network = described(annotations, NETWORK)?;
    let mut ips = network.ips.iter().map(|ip| ip.address.split('/').next().unwrap_or_default());
    let kept = json!({"Version": "v1", "Metadata": {
        "RuntimeHandler": text(HANDLER),
        "IP": ips.next().unwrap_or_default(),
        "AdditionalIPs": ips.collect::<Vec<_>>(),
    }});
    let any = |type_url: &str, value| prost_types::Any { type_url: type_url.to_owned(), value };
    let extension = (cri_metadata::EXTENSION.to_owned(), any("", kept.to_string().into_bytes()));
    Ok(ControllerCreateRequest {
        sandbox_id: sandbox.to_string(),
        options: Some(any("runtime.v1.PodSandboxConfig", config.encode_to_vec())),
        netns_path: netns.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
        sandbox: Some(Sandbox { extensions: [extension].into(), ..Default::default() }),
        ..Default::default()
    })
}

/// Returns whether the namespace at `path` is the host's: CRI-O gives a pod in the host's network a path, too.
fn is_hosts(path: &Path, hosts: &str) -> bool {
    namespace::is_same(path, hosts.as_ref()).unwrap_or_default()
}

/// Reads an annotation with JSON; the default if there is none, or if Go wrote `null`.
fn described<T: for<'a> Deserialize<'a> + Default>(
    annotations: &HashMap<String, String>,
    name: &str,
) -> Result<T, String> {
    let Some(text) = annotations.get(name) else { return Ok(T::default()) };
    serde_json::from_str::<Option<T>>(text)
        .map(Option::unwrap_or_default)
        .map_err(|error| format!("cannot read its annotation {name}: {error}"))
}

/// Returns the parent of a control group, whose path is `PARENT/NAME`, or `PARENT:PREFIX:NAME` for systemd.
fn cgroup_parent(path: &Path) -> String {
    let text = path.to_string_lossy();
    match text.split_once(':') {
        Some((slice, _)) => slice.to_owned(),
        None => path.parent().map(|parent| parent.to_string_lossy().into_owned()).unwrap_or_default(),
    }
}

/// Returns an error unless the container with this `bundle` belongs to the pod whose sandbox container has `of_pod`.
///
/// The UTS namespace shows it: CRI-O makes one for each pod, also in the host's network, and its path is in the
/// specifications of all its containers.
pub fn check_pod(
    container: &ContainerId,
    bundle: &Path,
    pod: &SandboxId,
    of_pod: Option<&Path>,
) -> Result<(), PodError> {
    let namespace = |spec: &Spec| -> Option<PathBuf> {
        let all = spec.linux().as_ref()?.namespaces().as_deref()?;
        all.iter().find(|one| one.typ() == LinuxNamespaceType::Uts)?.path().clone()
    };
    let own = namespace(&bundle::spec(container, bundle)?);
    let pods = match of_pod.filter(|dir| bundle::is_of_cri_o(dir)) {
        Some(dir) => namespace(&bundle::spec(pod, dir)?),
        None => None,
    };
    if own.is_some() && own == pods {
        return Ok(());
    }
    Err(PodError::Invalid {
        subject: format!("container {container}"),
        reason: format!(
            "its annotation {SANDBOX_ID:?} is {pod}, and it has another UTS namespace than that pod of CRI-O"
        ),
    })
}

/// Opens and closes the FIFO of a sandbox container's output for writing: nothing writes to it, and CRI-O, which reads it,
/// has a thread that waits for a writer. Without a reader yet, nothing happens.
pub fn end_output(path: &Path) {
    let opened = fs::OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path);
    if let Err(error) = opened {
        tracing::debug!(?path, %error, "cannot end the output of a sandbox container");
    }
}

/// Writes the file by which CRI-O learns, after each request for the state of a container that has ended, that memory ran
/// out: conmon writes it for its own.
pub fn note_oom(bundle: &Path) {
    let path = bundle.join(OOM);
    if !path.exists()
        && let Err(error) = fs::write(&path, "")
    {
        tracing::warn!(?path, %error, "CRI-O does not learn that a container's memory ran out");
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_config::Config;
    use sandboxer_process::cgroup::Hierarchies;
    use serde_json::Value;

    use super::*;
    use crate::{api::convert::pod_spec, pod::spec::PodSpec};

    /// The specification of a sandbox container as CRI-O 1.34 writes it, shortened.
    fn sandbox() -> Value {
        let annotations = json!({
            "io.kubernetes.cri-o.ContainerType": "sandbox",
            "io.kubernetes.cri-o.SandboxID": "p1",
            "io.kubernetes.cri-o.ResolvPath": "/run/containers/storage/overlay-containers/p1/userdata/resolv.conf",
            "io.kubernetes.cri-o.NamespaceOptions": r#"{"pid":1}"#,
            "io.kubernetes.cri-o.RuntimeHandler": "sandboxer",
            "io.kubernetes.cri-o.CNIResult":
                r#"{"cniVersion":"1.0.0","ips":[{"address":"10.85.0.7/16"},{"address":"2001:db8::7/64"}],"dns":{}}"#,
            "io.kubernetes.cri-o.PodLinuxOverhead": "null",
            "io.kubernetes.cri-o.PodLinuxResources":
                r#"{"cpu_period":100000,"cpu_quota":150000,"memory_limit_in_bytes":536870912}"#,
            "io.kubernetes.pod.name": "web",
            "io.kubernetes.pod.namespace": "shop",
            "io.kubernetes.pod.uid": "u1",
            "io.sandboxer.vcpus": "2",
        });
        json!({
            "ociVersion": "1.2.1",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["/pause"], "cwd": "/"},
            "root": {"path": "/var/lib/containers/storage/overlay/0a/merged", "readonly": true},
            "hostname": "web",
            "annotations": annotations,
            "linux": {
                "cgroupsPath": "/kubepods/podu1/crio-p1",
                "sysctl": {"net.core.somaxconn": "1024"},
                "namespaces": [
                    {"type": "pid"}, {"type": "mount"},
                    {"type": "network", "path": "/var/run/netns/0b"},
                    {"type": "ipc", "path": "/var/run/ipcns/0b"},
                    {"type": "uts", "path": "/var/run/utsns/0b"},
                ],
            },
        })
    }

    fn read(json: Value) -> Result<PodSpec, String> {
        let spec: Spec = serde_json::from_value(json).unwrap();
        let request = create_request(&"p1".parse().unwrap(), &spec)?;
        pod_spec(&request, &Config::default(), &Hierarchies::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_pod_is_the_one_that_cri_o_describes() {
        let spec = read(sandbox()).unwrap();
        assert_eq!((spec.name.as_str(), spec.namespace.as_str(), spec.uid.as_str()), ("web", "shop", "u1"));
        assert_eq!((spec.hostname.as_str(), spec.vcpus), ("web", 2));
        assert_eq!(spec.netns.as_deref(), Some("/var/run/netns/0b".as_ref()));
        assert_eq!(spec.ips, ["10.85.0.7", "2001:db8::7"].map(|ip| ip.parse::<std::net::IpAddr>().unwrap()));
        assert_eq!(spec.cgroup_parent, "/kubepods/podu1");
        assert_eq!((spec.limits.cpu_quota_us, spec.limits.memory_bytes), (150_000, 512 << 20));
        assert!(!spec.shared_pids && spec.resolv_conf.is_none());
        let mut bare = sandbox();
        for name in [RESOURCES, NAMESPACES, NETWORK] {
            bare["annotations"][name] = "null".into();
        }
        let spec = read(bare).unwrap();
        assert!(spec.shared_pids && spec.ips.is_empty(), "CRI's zero value");
    }

    #[test]
    fn a_control_group_is_below_its_parent_or_its_slice() {
        let of = |path: &str| cgroup_parent(Path::new(path));
        assert_eq!(of("kubepods-podu1.slice:crio:p1"), "kubepods-podu1.slice");
        assert_eq!(of("/kubepods/podu1/crio-p1"), "/kubepods/podu1");
        assert_eq!(of("crio-p1"), "");
    }

    #[test]
    fn namespaces_of_the_host_are_read_from_the_specification() {
        let without = |kind: &str| {
            let mut json = sandbox();
            json["linux"]["namespaces"].as_array_mut().unwrap().retain(|one| one["type"] != kind);
            read(json)
        };
        assert!(without("pid").unwrap_err().contains("the host's PID namespace"));
        assert!(without("ipc").unwrap_err().contains("the host's IPC namespace"));
        assert_eq!(without("network").unwrap().netns, None);
        // CRI-O keeps the host's at a path, too.
        let at = |kind: &str, path: &str| {
            let mut json = sandbox();
            let all = json["linux"]["namespaces"].as_array_mut().unwrap();
            all.iter_mut().find(|one| one["type"] == kind).unwrap()["path"] = path.into();
            read(json)
        };
        assert_eq!(at("network", HOSTS_NETWORK).unwrap().netns, None);
        assert!(at("ipc", HOSTS_IPC).unwrap_err().contains("the host's IPC namespace"));
        let mut broken = sandbox();
        broken["annotations"][RESOURCES] = "{".into();
        assert!(read(broken).unwrap_err().contains(RESOURCES));
    }

    #[test]
    fn a_container_joins_no_pod_whose_namespaces_it_does_not_have() {
        let dir = tempfile::tempdir().unwrap();
        let written = |name: &str, uts: Option<&str>, launched: &str| {
            let at = dir.path().join(name);
            fs::create_dir_all(&at).unwrap();
            let mut json = sandbox();
            json["linux"]["namespaces"] = json!([{"type": "uts", "path": uts}]);
            fs::write(at.join("config.json"), json.to_string()).unwrap();
            fs::write(at.join("sandboxer.json"), json!({"containerd": launched}).to_string()).unwrap();
            at
        };
        let pod = written("p1", Some("/run/utsns/0b"), "");
        let check = |bundle: &Path, pod: Option<&Path>| {
            check_pod(&"c1".parse().unwrap(), bundle, &"p1".parse().unwrap(), pod)
        };
        check(&written("c1", Some("/run/utsns/0b"), ""), Some(&pod)).unwrap();
        let of_containerd = written("p2", Some("/run/utsns/0b"), "/run/containerd/containerd.sock");
        for (bundle, pod) in [
            (written("c2", Some("/run/utsns/0c"), ""), Some(pod.as_path())),
            (written("c3", None, ""), Some(&pod)),
            (written("c4", Some("/run/utsns/0b"), ""), None),
            (written("c5", Some("/run/utsns/0b"), ""), Some(&of_containerd)),
        ] {
            let error = check(&bundle, pod).unwrap_err().to_string();
            assert!(error.contains("another UTS namespace"), "{error}");
        }
    }
}
