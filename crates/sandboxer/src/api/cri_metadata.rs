//! CRI's description of a pod, which containerd stores with the pod's sandbox container: Go's messages as JSON.
//!
//! The description contains all that a sandbox controller's `Create` receives. Fields that the daemon does not use are
//! not read.

use std::collections::HashMap;

use k8s_cri::v1::{
    DnsConfig, HugepageLimit, LinuxContainerResources, LinuxPodSandboxConfig, LinuxSandboxSecurityContext,
    NamespaceOption, PodSandboxConfig, PodSandboxMetadata, UserNamespace,
};
use prost::Message;
use sandboxer_protocol::controller::{ControllerCreateRequest, types::Sandbox};
use serde::Deserialize;

/// The only supported version of this description.
const VERSION: &str = "v1";
/// Name of the extension in which a sandbox controller receives the description.
pub const EXTENSION: &str = "metadata";

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Versioned {
    version: String,
    metadata: Metadata,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Metadata {
    config: Config,
    #[serde(default)]
    net_n_s_path: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    metadata: Option<Name>,
    hostname: String,
    dns_config: Option<Dns>,
    annotations: HashMap<String, String>,
    linux: Option<Linux>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Name {
    name: String,
    uid: String,
    namespace: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Dns {
    servers: Vec<String>,
    searches: Vec<String>,
    options: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Linux {
    cgroup_parent: String,
    security_context: Option<Security>,
    sysctls: HashMap<String, String>,
    resources: Option<Resources>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Security {
    namespace_options: Option<Namespaces>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Namespaces {
    network: i32,
    pid: i32,
    ipc: i32,
    userns_options: Option<User>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct User {
    mode: i32,
}

/// The limits of a pod's containers together.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Resources {
    cpu_period: i64,
    cpu_quota: i64,
    cpu_shares: i64,
    memory_limit_in_bytes: i64,
    hugepage_limits: Vec<HugePages>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct HugePages {
    page_size: String,
    limit: u64,
}

/// Returns the request that a sandbox controller would get for the pod `sandbox`, from containerd's description of the
/// pod.
pub fn create_request(sandbox: &str, description: &[u8]) -> Result<ControllerCreateRequest, String> {
    let unreadable = |error| format!("cannot read CRI's description of it: {error}");
    let Versioned { version, metadata } = serde_json::from_slice(description).map_err(unreadable)?;
    if version != VERSION {
        return Err(format!("CRI's description of it has version {version:?}, not {VERSION:?}"));
    }
    let config = PodSandboxConfig::from(metadata.config);
    let options = prost_types::Any {
        type_url: "runtime.v1.PodSandboxConfig".to_owned(),
        value: config.encode_to_vec(),
    };
    let description = prost_types::Any { type_url: String::new(), value: description.to_vec() };
    Ok(ControllerCreateRequest {
        sandbox_id: sandbox.to_owned(),
        options: Some(options),
        netns_path: metadata.net_n_s_path,
        sandbox: Some(Sandbox {
            extensions: [(EXTENSION.to_owned(), description)].into(),
            ..Default::default()
        }),
        ..Default::default()
    })
}

impl From<Config> for PodSandboxConfig {
    fn from(config: Config) -> Self {
        let Config { metadata, hostname, dns_config, annotations, linux } = config;
        Self {
            metadata: metadata.map(|Name { name, uid, namespace }| PodSandboxMetadata {
                name,
                uid,
                namespace,
                ..Default::default()
            }),
            hostname,
            dns_config: dns_config.map(|Dns { servers, searches, options }| DnsConfig {
                servers,
                searches,
                options,
            }),
            annotations,
            linux: linux.map(Into::into),
            ..Default::default()
        }
    }
}

impl From<Linux> for LinuxPodSandboxConfig {
    fn from(linux: Linux) -> Self {
        let Linux { cgroup_parent, security_context, sysctls, resources } = linux;
        Self {
            cgroup_parent,
            security_context: security_context.map(|security| LinuxSandboxSecurityContext {
                namespace_options: security.namespace_options.map(Into::into),
                ..Default::default()
            }),
            sysctls,
            resources: resources.map(Into::into),
            ..Default::default()
        }
    }
}

impl From<Resources> for LinuxContainerResources {
    fn from(resources: Resources) -> Self {
        Self {
            cpu_period: resources.cpu_period,
            cpu_quota: resources.cpu_quota,
            cpu_shares: resources.cpu_shares,
            memory_limit_in_bytes: resources.memory_limit_in_bytes,
            hugepage_limits: resources.hugepage_limits.into_iter().map(Into::into).collect(),
            ..Default::default()
        }
    }
}

impl From<HugePages> for HugepageLimit {
    fn from(HugePages { page_size, limit }: HugePages) -> Self {
        Self { page_size, limit }
    }
}

impl From<Namespaces> for NamespaceOption {
    fn from(namespaces: Namespaces) -> Self {
        let Namespaces { network, pid, ipc, userns_options } = namespaces;
        Self {
            network,
            pid,
            ipc,
            userns_options: userns_options.map(|User { mode }| UserNamespace { mode, ..Default::default() }),
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_config::{Config, StartPath};
    use sandboxer_process::cgroup::Hierarchies;

    use super::*;
    use crate::{api::convert::pod_spec, error::PodError, pod::spec::PodSpec};

    /// A description as containerd 1.7 writes it, shortened.
    const DESCRIPTION: &str = r#"{"Version":"v1","Metadata":{"ID":"0a1b","Name":"web_e2e_uid-1_0",
        "Config":{"metadata":{"name":"web","uid":"uid-1","namespace":"e2e"},"hostname":"pod",
            "log_directory":"/var/log/pods/web","dns_config":{"servers":["192.0.2.53"],"searches":["e2e.svc"]},
            "labels":{"app":"web"},"annotations":{"io.sandboxer.vcpus":"2"},
            "linux":{"cgroup_parent":"/kubepods/pod1","security_context":{"namespace_options":{"pid":1},"seccomp":{}},
                "sysctls":{"net.core.somaxconn":"1024"},
                "resources":{"cpu_period":100000,"cpu_quota":150000,"memory_limit_in_bytes":536870912}}},
        "NetNSPath":"/var/run/netns/cni-1","IP":"192.0.2.7","AdditionalIPs":["2001:db8::7"],
        "RuntimeHandler":"cold","CNIResult":{"Interfaces":{}},"ProcessLabel":""}}"#;

    fn spec(description: &str) -> Result<PodSpec, PodError> {
        let mut config = Config::default();
        let cold = sandboxer_config::Handler { start_path: StartPath::Boot, vmm: None };
        config.handlers.insert("cold".into(), cold);
        let request = create_request("0a1b", description.as_bytes()).unwrap();
        pod_spec(&request, &config, &Hierarchies::default())
    }

    #[test]
    fn the_pod_is_the_one_that_a_sandbox_controller_would_make() {
        let spec = spec(DESCRIPTION).unwrap();
        assert_eq!((spec.name.as_str(), spec.namespace.as_str(), spec.uid.as_str()), ("web", "e2e", "uid-1"));
        assert_eq!((spec.hostname.as_str(), spec.vcpus), ("pod", 2));
        assert_eq!(spec.netns.as_deref(), Some("/var/run/netns/cni-1".as_ref()));
        assert_eq!(spec.ips.len(), 2);
        assert_eq!(spec.resolv_conf.as_deref(), Some("nameserver 192.0.2.53\nsearch e2e.svc\n"));
        assert_eq!(spec.cgroup_parent, "/kubepods/pod1");
        assert!(!spec.shared_pids);
        assert_eq!(spec.sysctls["net.core.somaxconn"], "1024");
        assert_eq!((spec.limits.cpu_quota_us, spec.limits.memory_bytes), (150_000, 512 << 20));
        assert_eq!(spec.start_path, StartPath::Boot, "the runtime handler's");
    }

    #[test]
    fn a_limit_of_huge_pages_puts_the_vm_into_them() {
        let with = |limits: &str| {
            let limits = format!(r#""resources":{{"hugepage_limits":{limits},"cpu_period""#);
            spec(&DESCRIPTION.replace(r#""resources":{"cpu_period""#, &limits).replace("cold", "usual"))
        };
        let spec = with(r#"[{"page_size":"2MB","limit":1073741824},{"page_size":"1GB","limit":0}]"#).unwrap();
        assert!(spec.huge_pages && spec.memory_mib.is_multiple_of(2));
        assert_eq!(spec.start_path, StartPath::Boot, "copies of a template are not in huge pages");
        let spec = with(r#"[{"page_size":"2MB"}]"#).unwrap();
        assert_eq!((spec.huge_pages, spec.start_path), (false, StartPath::Pool));
        let error = with(r#"[{"page_size":"1GB","limit":1073741824}]"#).unwrap_err().to_string();
        assert!(error.contains("1GB"), "{error}");
    }

    #[test]
    fn go_leaves_out_what_is_zero() {
        let bare = r#"{"Version":"v1","Metadata":{"Config":{"metadata":{"name":"n"},"linux":
            {"security_context":{"namespace_options":{"network":2}}}},"NetNSPath":"","AdditionalIPs":null}}"#;
        let spec = spec(bare).unwrap();
        assert!(spec.netns.is_none() && spec.ips.is_empty());
        assert!(spec.shared_pids, "CRI's zero value");
    }

    #[test]
    fn what_a_pod_cannot_have_is_refused_on_this_route_too() {
        for (options, says) in
            [(r#"{"pid":2}"#, "PID namespace"), (r#"{"pid":1,"userns_options":{}}"#, "user namespace")]
        {
            let description = DESCRIPTION.replace(r#"{"pid":1}"#, options);
            let error = spec(&description).unwrap_err();
            assert_eq!(error.code(), sandboxer_base::Code::Unimplemented);
            assert!(error.to_string().contains(says), "{error}");
        }
        // No user namespace is requested.
        spec(&DESCRIPTION.replace(r#"{"pid":1}"#, r#"{"pid":1,"userns_options":{"mode":2}}"#)).unwrap();
    }

    #[test]
    fn another_description_is_an_error() {
        for (text, says) in [
            ("{", "cannot read CRI's description"),
            (r#"{"Version":"v1","Metadata":{"Config":null}}"#, "cannot read CRI's description"),
            (r#"{"Version":"v2","Metadata":{"Config":{}}}"#, "has version \"v2\""),
        ] {
            let error = create_request("0a1b", text.as_bytes()).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
