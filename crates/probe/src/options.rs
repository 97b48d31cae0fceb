//! Options of pods and containers for probes and tests, and their conversion to CRI messages.

use std::collections::HashMap;
use std::path::PathBuf;

use k8s_cri::v1 as cri;
use serde::{Deserialize, Serialize};

/// Network of a pod. There is no third kind to measure: no kubelet uses CRI's scope CONTAINER, and containerd gives
/// such a pod an interface like any other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// One network namespace per pod, set up by CNI before the runtime handler is called.
    #[default]
    Pod,
    /// The node's network: no namespace is created and no CNI plugin is called. A handler that runs VMs may restrict
    /// it.
    Host,
}

impl Network {
    /// Returns the network's name on the command line.
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
    /// Name of the pod.
    pub name: String,
    /// Kubernetes namespace; "default" if empty.
    pub namespace: String,
    /// Uid of the pod; its name if empty.
    pub uid: String,
    /// Hostname inside the pod; the pod's name if empty.
    pub hostname: String,
    /// Runtime handler; the node's default if empty.
    pub handler: String,
    /// Network of the pod.
    pub network: Network,
    /// Parent of the pod's cgroups on the host; the runtime's own if empty.
    pub cgroup_parent: String,
    /// Directory of the containers' logs; without one there are no logs.
    pub log_directory: Option<PathBuf>,
    /// Labels of the pod.
    pub labels: HashMap<String, String>,
    /// Annotations of the pod.
    pub annotations: HashMap<String, String>,
    /// Sum of the resources of the pod's containers.
    pub resources: Option<Resources>,
}

impl PodOptions {
    /// Returns a pod named `name` on `handler`.
    pub fn new(name: impl Into<String>, handler: impl Into<String>) -> Self {
        Self { name: name.into(), handler: handler.into(), ..Self::default() }
    }

    /// Returns the pod as a CRI message.
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
            // With the node's network, a pod has the node's hostname: CRI rejects any other.
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

/// A container to create. If `command` and `args` are empty, the image's apply.
#[derive(Debug, Clone, Default)]
pub struct ContainerOptions {
    /// Name of the container, unique within its pod.
    pub name: String,
    /// Image reference; the image must be on the node.
    pub image: String,
    /// Command that replaces the image's entrypoint.
    pub command: Vec<String>,
    /// Arguments that replace the image's command.
    pub args: Vec<String>,
    /// Environment variables, as pairs of name and value.
    pub env: Vec<(String, String)>,
    /// Working directory; the image's if empty.
    pub working_dir: String,
    /// Mounts of host paths.
    pub mounts: Vec<Mount>,
    /// Devices of the host that the container may read and write.
    pub devices: Vec<Device>,
    /// Resource limits of the container.
    pub resources: Option<Resources>,
    /// User and privileges of the container.
    pub security: Security,
    /// Log file, relative to the pod's log directory; `<name>.log` if empty.
    pub log_path: String,
    /// Whether the container has a terminal.
    pub tty: bool,
    /// Whether the container's stdin stays open.
    pub stdin: bool,
    /// Labels of the container.
    pub labels: HashMap<String, String>,
    /// Annotations of the container.
    pub annotations: HashMap<String, String>,
}

impl ContainerOptions {
    /// Returns a container that runs `command` from `image`.
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

    /// Returns the name of the container's log in the pod's log directory.
    pub fn log_name(&self) -> String {
        if self.log_path.is_empty() { format!("{}.log", self.name) } else { self.log_path.clone() }
    }

    /// Returns the container as a CRI message, for a pod with this network.
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
    /// Whether the container may not write to the mount.
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

/// Resource limits; zero means none.
#[derive(Debug, Clone, Copy, Default)]
pub struct Resources {
    /// CPU time per period, µs.
    pub cpu_quota: i64,
    /// The period, µs; if zero and a quota is set, the kernel's 100,000.
    pub cpu_period: i64,
    /// CPU weight, as cgroup v1 counts it.
    pub cpu_shares: i64,
    /// Memory limit, bytes.
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
    /// User id; the image's user if `None`.
    pub user: Option<i64>,
    /// Group id; requires `user`.
    pub group: Option<i64>,
    /// Whether the root file system is read-only.
    pub read_only_rootfs: bool,
    /// Whether the container has all capabilities and devices.
    pub privileged: bool,
    /// Whether to set no_new_privs.
    pub no_new_privileges: bool,
    /// Capabilities added to the runtime's default set, such as "NET_ADMIN".
    pub add_capabilities: Vec<String>,
    /// Capabilities removed from the runtime's default set; "ALL" removes all.
    pub drop_capabilities: Vec<String>,
    /// Whether to use the runtime's default seccomp profile instead of none.
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
