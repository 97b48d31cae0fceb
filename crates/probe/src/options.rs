//! Options of pods and containers for probes and tests, and their conversion to CRI messages.

use std::collections::HashMap;
use std::path::PathBuf;

use k8s_cri::v1 as cri;
use serde::{Deserialize, Serialize};

/// Network of a pod. There is no third one to measure: no kubelet uses CRI's scope CONTAINER, and
/// containerd gives such a pod an interface like every other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// One network namespace per pod, set up by CNI before the runtime handler is called.
    #[default]
    Pod,
    /// The node's network: no namespace is created and no CNI plugin is called. A handler that runs VMs may
    /// restrict it.
    Host,
}

impl Network {
    /// Parses a command line value.
    pub const fn as_str(self) -> &'static str {
        match self {
            Network::Pod => "pod",
            Network::Host => "host",
        }
    }
}

impl std::str::FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "pod" => Ok(Network::Pod),
            "host" => Ok(Network::Host),
            "none" => Err("CRI has no pods without a network: containerd would give it an interface all \
                           the same; use 'host' for a start without CNI"
                .into()),
            other => Err(format!("no such network mode '{other}': pod or host")),
        }
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A pod to run. Name and uid must be unique on the node.
#[derive(Debug, Clone, Default)]
pub struct PodOptions {
    /// Pod name.
    pub name: String,
    /// Kubernetes namespace; "default" when empty.
    pub namespace: String,
    /// Pod uid; the name when empty.
    pub uid: String,
    /// Hostname inside; the name when empty.
    pub hostname: String,
    /// Runtime handler; the node's default when empty.
    pub handler: String,
    /// Network namespace.
    pub network: Network,
    /// Parent of the pod's cgroups on the host; the runtime's own when empty.
    pub cgroup_parent: String,
    /// Directory of its containers' logs; without one there are no logs.
    pub log_directory: Option<PathBuf>,
    /// Labels.
    pub labels: HashMap<String, String>,
    /// Annotations.
    pub annotations: HashMap<String, String>,
    /// Sum of its containers' resources.
    pub resources: Option<Resources>,
}

impl PodOptions {
    /// Returns a pod of this name on this handler.
    pub fn new(name: impl Into<String>, handler: impl Into<String>) -> Self {
        Self { name: name.into(), handler: handler.into(), ..Self::default() }
    }

    /// Returns the CRI message.
    pub fn to_cri(&self) -> cri::PodSandboxConfig {
        let or_name = |text: &str| {
            if text.is_empty() { self.name.clone() } else { text.to_owned() }
        };
        let network = match self.network {
            Network::Pod => cri::NamespaceMode::Pod,
            Network::Host => cri::NamespaceMode::Node,
        };
        cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: self.name.clone(),
                uid: or_name(&self.uid),
                namespace: if self.namespace.is_empty() { "default".into() } else { self.namespace.clone() },
                attempt: 0,
            }),
            // With the node's network a pod has the node's hostname: CRI rejects another one.
            hostname: if self.network == Network::Host { String::new() } else { or_name(&self.hostname) },
            log_directory: self
                .log_directory
                .as_ref()
                .map(|path| path.display().to_string())
                .unwrap_or_default(),
            labels: self.labels.clone(),
            annotations: self.annotations.clone(),
            linux: Some(cri::LinuxPodSandboxConfig {
                cgroup_parent: self.cgroup_parent.clone(),
                security_context: Some(cri::LinuxSandboxSecurityContext {
                    namespace_options: Some(cri::NamespaceOption {
                        network: network as i32,
                        pid: cri::NamespaceMode::Container as i32,
                        ..Default::default()
                    }),
                    ..Default::default()
                }),
                resources: self.resources.map(Resources::to_cri),
                ..Default::default()
            }),
            ..Default::default()
        }
    }
}

/// A container to create. Empty `command` and `args` leave it to the image.
#[derive(Debug, Clone, Default)]
pub struct ContainerOptions {
    /// Unique within its pod.
    pub name: String,
    /// Image reference; must be present on the node.
    pub image: String,
    /// Replaces the image's entrypoint.
    pub command: Vec<String>,
    /// Replaces the image's command.
    pub args: Vec<String>,
    /// Environment.
    pub env: Vec<(String, String)>,
    /// Working directory; the image's when empty.
    pub working_dir: String,
    /// Mounts of host paths.
    pub mounts: Vec<Mount>,
    /// Devices of the host, which it may read and write.
    pub devices: Vec<Device>,
    /// Limits.
    pub resources: Option<Resources>,
    /// User and privileges.
    pub security: Security,
    /// Log file, relative to the pod's log directory; `<name>.log` when empty.
    pub log_path: String,
    /// With a terminal.
    pub tty: bool,
    /// Keeps stdin open.
    pub stdin: bool,
    /// Labels.
    pub labels: HashMap<String, String>,
    /// Annotations.
    pub annotations: HashMap<String, String>,
}

impl ContainerOptions {
    /// Returns a container running `command` of `image`.
    pub fn new(
        name: impl Into<String>,
        image: impl Into<String>,
        command: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        Self {
            name: name.into(),
            image: image.into(),
            command: command.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    /// Returns the file name of its log within the pod's log directory.
    pub fn log_name(&self) -> String {
        if self.log_path.is_empty() { format!("{}.log", self.name) } else { self.log_path.clone() }
    }

    /// Returns the CRI message, for a pod with this network.
    pub fn to_cri(&self, network: Network) -> cri::ContainerConfig {
        cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: self.name.clone(), attempt: 0 }),
            image: Some(cri::ImageSpec { image: self.image.clone(), ..Default::default() }),
            command: self.command.clone(),
            args: self.args.clone(),
            working_dir: self.working_dir.clone(),
            envs: self
                .env
                .iter()
                .map(|(key, value)| cri::KeyValue { key: key.clone(), value: value.clone() })
                .collect(),
            mounts: self.mounts.iter().map(Mount::to_cri).collect(),
            devices: self.devices.iter().map(Device::to_cri).collect(),
            labels: self.labels.clone(),
            annotations: self.annotations.clone(),
            log_path: self.log_name(),
            stdin: self.stdin,
            tty: self.tty,
            linux: Some(cri::LinuxContainerConfig {
                resources: self.resources.map(Resources::to_cri),
                security_context: Some(self.security.to_cri(network)),
            }),
            ..Default::default()
        }
    }
}

/// A host path in a container.
#[derive(Debug, Clone, Default)]
pub struct Mount {
    /// Path on the host.
    pub host_path: PathBuf,
    /// Path in the container.
    pub container_path: PathBuf,
    /// Read-only.
    pub read_only: bool,
}

impl Mount {
    fn to_cri(&self) -> cri::Mount {
        cri::Mount {
            host_path: self.host_path.display().to_string(),
            container_path: self.container_path.display().to_string(),
            readonly: self.read_only,
            ..Default::default()
        }
    }
}

/// A device of the host in a container.
#[derive(Debug, Clone, Default)]
pub struct Device {
    /// Path on the host.
    pub host_path: PathBuf,
    /// Path in the container.
    pub container_path: PathBuf,
}

impl Device {
    fn to_cri(&self) -> cri::Device {
        cri::Device {
            host_path: self.host_path.display().to_string(),
            container_path: self.container_path.display().to_string(),
            permissions: "rw".into(),
        }
    }
}

/// Limits; zero means none.
#[derive(Debug, Clone, Copy, Default)]
pub struct Resources {
    /// CPU time per period, µs.
    pub cpu_quota: i64,
    /// The period, µs; the kernel's 100,000 when zero and a quota is set.
    pub cpu_period: i64,
    /// CPU weight in cgroup v1's terms.
    pub cpu_shares: i64,
    /// Bytes.
    pub memory_limit: i64,
}

impl Resources {
    fn to_cri(self) -> cri::LinuxContainerResources {
        let period = if self.cpu_quota != 0 && self.cpu_period == 0 { 100_000 } else { self.cpu_period };
        cri::LinuxContainerResources {
            cpu_quota: self.cpu_quota,
            cpu_period: period,
            cpu_shares: self.cpu_shares,
            memory_limit_in_bytes: self.memory_limit,
            ..Default::default()
        }
    }
}

/// User and privileges of a container.
#[derive(Debug, Clone, Default)]
pub struct Security {
    /// User; the image's when `None`.
    pub user: Option<i64>,
    /// Group; needs `user`.
    pub group: Option<i64>,
    /// Read-only root file system.
    pub read_only_rootfs: bool,
    /// All capabilities, all devices.
    pub privileged: bool,
    /// Sets no_new_privs.
    pub no_new_privileges: bool,
    /// Capabilities added to the runtime's default set, e.g. "NET_ADMIN".
    pub add_capabilities: Vec<String>,
    /// Capabilities removed from it; "ALL" for all.
    pub drop_capabilities: Vec<String>,
    /// The runtime's default seccomp profile instead of none.
    pub seccomp: bool,
}

impl Security {
    fn to_cri(&self, network: Network) -> cri::LinuxContainerSecurityContext {
        let profile = if self.seccomp {
            cri::security_profile::ProfileType::RuntimeDefault
        } else {
            cri::security_profile::ProfileType::Unconfined
        };
        let network =
            if network == Network::Host { cri::NamespaceMode::Node } else { cri::NamespaceMode::Pod };
        cri::LinuxContainerSecurityContext {
            capabilities: Some(cri::Capability {
                add_capabilities: self.add_capabilities.clone(),
                drop_capabilities: self.drop_capabilities.clone(),
                ..Default::default()
            }),
            privileged: self.privileged,
            namespace_options: Some(cri::NamespaceOption {
                network: network as i32,
                pid: cri::NamespaceMode::Container as i32,
                ..Default::default()
            }),
            run_as_user: self.user.map(|value| cri::Int64Value { value }),
            run_as_group: self.group.map(|value| cri::Int64Value { value }),
            readonly_rootfs: self.read_only_rootfs,
            no_new_privs: self.no_new_privileges,
            seccomp: Some(cri::SecurityProfile {
                profile_type: profile as i32,
                localhost_ref: String::new(),
            }),
            ..Default::default()
        }
    }
}
