//! Conversions from wire types to the daemon's, and from its errors to wire errors.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use k8s_cri::v1::{DnsConfig, NamespaceMode, PodSandboxConfig};
use prost::Message;
use sandboxer_base::{Code, chain};
use sandboxer_config::{Config, StartPath};
use sandboxer_process::cgroup::Hierarchies;
use sandboxer_protocol::{controller::ControllerCreateRequest, id::Id};
use sandboxer_vmm::Shape;

use super::{host_ports, huge_pages, limits, size};
use crate::{
    error::PodError,
    pod::{
        container::spec::ROOTFS_SIZE,
        of_node, quantity,
        spec::{PodSpec, Room},
    },
};

/// Maximum length of a hostname, bytes: `__NEW_UTS_LEN` of the kernel.
const MAX_HOSTNAME: usize = 64;
/// Maximum length of a label in DNS, bytes (RFC 1035).
const MAX_LABEL: usize = 63;

/// Annotation with the size of the disks of emptyDirs.
const EMPTY_DIR_SIZE: &str = "io.sandboxer.emptydir-size";

/// Annotation with the place of image volumes: "disk", in the guest, or "share", on the host.
const IMAGE_VOLUMES: &str = "io.sandboxer.image-volumes";

/// Annotation with the name of the checkpoint from which the pod is restored; of another namespace: `NAMESPACE/NAME`.
pub const RESTORE_FROM: &str = "io.sandboxer.restore-from";

/// Annotation with the name of the signal that restored containers get when they go on.
const RESTORE_SIGNAL: &str = "io.sandboxer.restore-signal";
/// Signals that may be named there, with their numbers in Linux.
const RESTORE_SIGNALS: [(&str, u32); 8] = [
    ("SIGHUP", 1),
    ("SIGUSR1", 10),
    ("SIGUSR2", 12),
    ("SIGALRM", 14),
    ("SIGCONT", 18),
    ("SIGURG", 23),
    ("SIGWINCH", 28),
    ("SIGPWR", 30),
];

/// Reads an identifier from a request. `what` completes "… is invalid".
pub fn id(what: &'static str, text: &str) -> Result<Id, PodError> {
    text.parse().map_err(|source| PodError::Id { what, source })
}

/// Reads an identifier that may be absent (empty).
pub fn optional_id(what: &'static str, text: &str) -> Result<Option<Id>, PodError> {
    if text.is_empty() { Ok(None) } else { id(what, text).map(Some) }
}

/// Returns the pod that a sandbox request describes, with defaults filled in.
pub fn pod_spec(
    request: &ControllerCreateRequest,
    config: &Config,
    cgroups: &Hierarchies,
) -> Result<PodSpec, PodError> {
    let defaults = &config.vm;
    let id = id("sandbox id", &request.sandbox_id)?;
    let invalid = |reason: String| PodError::Invalid { subject: format!("pod {id}"), reason };
    let asked = match &request.options {
        Some(any) => PodSandboxConfig::decode(any.value.as_slice())
            .map_err(|error| invalid(format!("cannot read its PodSandboxConfig: {error}")))?,
        None => PodSandboxConfig::default(),
    };
    let metadata = asked.metadata.unwrap_or_default();
    let linux = asked.linux.unwrap_or_default();
    let security = linux.security_context.unwrap_or_default();
    let namespaces = security.namespace_options.unwrap_or_default();
    for (name, mode) in [("PID", namespaces.pid), ("IPC", namespaces.ipc)] {
        if mode == NamespaceMode::Node as i32 {
            return Err(PodError::Unsupported(format!(
                "pod {id}: the host's {name} namespace is not available in a microVM pod"
            )));
        }
    }
    // containerd 2.x rejects this itself for a runtime that does not announce it.
    if namespaces.userns_options.is_some_and(|user| user.mode == NamespaceMode::Pod as i32) {
        return Err(PodError::Unsupported(format!(
            "pod {id}: a user namespace is not available in a microVM pod, which is separated from the host without one"
        )));
    }
    let hostname = hostname(asked.hostname, &metadata.name, &id).map_err(invalid)?;
    let cpus = std::thread::available_parallelism()
        .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX));
    let resources =
        size::without(linux.resources.unwrap_or_default(), cgroups.unlimited(&linux.cgroup_parent));
    let Shape { vcpus, memory_mib, .. } =
        size::shape(&asked.annotations, &resources, defaults, cpus).map_err(invalid)?;
    let huge_pages =
        huge_pages::asked(&asked.annotations, &resources, config.placement.huge_pages).map_err(invalid)?;
    let own_network = !request.netns_path.is_empty();
    let host_ports = host_ports::asked(&asked.annotations, own_network).map_err(invalid)?;
    let sandbox = SandboxMetadata::of(request).unwrap_or_default();
    let disk_limits = limits::disk(&asked.annotations, &config.limits).map_err(invalid)?;
    let net_limits = limits::network(&asked.annotations, &config.limits, own_network).map_err(invalid)?;
    let handler = config.handlers.get(&sandbox.runtime_handler).copied().unwrap_or_default();
    let start_path = if huge_pages { StartPath::Boot } else { handler.start_path };
    let image_volumes_on_disk = image_volumes_on_disk(&asked.annotations).map_err(invalid)?;
    let (restore_namespace, restore_from) = restore_from(&asked.annotations).map_err(invalid)?.unzip();
    let restore_signal = restore_signal(&asked.annotations).map_err(invalid)?;
    let max_processes = cgroups.max_processes(&linux.cgroup_parent);
    let node_sysctls = of_node::sysctls(&config.containers);
    if security.selinux_options.is_some_and(|options| !options.encode_to_vec().is_empty()) {
        tracing::warn!(pod = %id, "no SELinux policy is loaded in a guest: the pod's seLinuxOptions have no effect");
    }
    Ok(PodSpec {
        limits: size::limits(&resources),
        host_ports,
        start_path,
        misses_pool: huge_pages && handler.start_path == StartPath::Pool,
        disk_limits,
        net_limits,
        vmm: handler.vmm,
        restore_from,
        restore_namespace: restore_namespace.flatten(),
        restore_signal,
        vcpus,
        // A whole number of huge pages. Only configured sizes can be odd.
        memory_mib: if huge_pages { memory_mib.next_multiple_of(2) } else { memory_mib },
        huge_pages,
        room: Room {
            rootfs_bytes: space(&asked.annotations, ROOTFS_SIZE).map_err(invalid)?,
            empty_dir_bytes: space(&asked.annotations, EMPTY_DIR_SIZE).map_err(invalid)?,
        },
        bundle: None,
        alone: false,
        name: metadata.name,
        namespace: metadata.namespace,
        uid: metadata.uid,
        hostname,
        netns: own_network.then(|| request.netns_path.clone().into()),
        ips: sandbox.ips(),
        resolv_conf: asked.dns_config.as_ref().map(resolv_conf),
        cgroup_parent: linux.cgroup_parent,
        shared_pids: namespaces.pid == NamespaceMode::Pod as i32,
        sysctls: linux.sysctls.into_iter().collect::<BTreeMap<_, _>>(),
        max_processes,
        image_volumes_on_disk,
        rlimits: of_node::rlimits(None, &config.containers, &node_sysctls),
        node_sysctls,
        id: id.clone(),
    })
}

/// Returns the content of `/etc/resolv.conf`.
fn resolv_conf(dns: &DnsConfig) -> String {
    let mut text = String::new();
    for server in &dns.servers {
        text += &format!("nameserver {server}\n");
    }
    if !dns.searches.is_empty() {
        text += &format!("search {}\n", dns.searches.join(" "));
    }
    if !dns.options.is_empty() {
        text += &format!("options {}\n", dns.options.join(" "));
    }
    text
}

/// Returns the requested hostname, or the valid part of the pod's name, else of its id.
fn hostname(asked: String, name: &str, id: &Id) -> Result<String, String> {
    if asked.len() > MAX_HOSTNAME {
        return Err(format!(
            "its hostname {asked:?} is longer than {MAX_HOSTNAME} bytes, the maximum of Linux"
        ));
    }
    if !asked.is_empty() {
        return Ok(asked);
    }
    let fits = |text: &str| {
        let label: String =
            text.chars().filter(|c| c.is_ascii_alphanumeric() || "-.".contains(*c)).take(MAX_LABEL).collect();
        label.trim_matches(['-', '.']).to_owned()
    };
    Ok([fits(name), fits(id.as_str())].into_iter().find(|name| !name.is_empty()).unwrap_or_default())
}

/// The fields of containerd's sandbox metadata that are read here.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SandboxMetadata {
    /// The pod's runtime handler.
    runtime_handler: String,
    /// The pod's IP address from CNI; empty for a pod in the host's network.
    #[serde(default, rename = "IP")]
    ip: String,
    /// The pod's IP addresses of the other family.
    #[serde(default, rename = "AdditionalIPs")]
    additional_ips: Option<Vec<String>>,
}

impl SandboxMetadata {
    fn of(request: &ControllerCreateRequest) -> Option<Self> {
        #[derive(serde::Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Versioned {
            metadata: SandboxMetadata,
        }
        let kept = request.sandbox.as_ref()?.extensions.get("metadata")?;
        serde_json::from_slice::<Versioned>(&kept.value).ok().map(|kept| kept.metadata)
    }

    fn ips(&self) -> Vec<IpAddr> {
        let all = std::iter::once(&self.ip).chain(self.additional_ips.iter().flatten());
        all.filter_map(|ip| ip.parse().ok()).collect()
    }
}

fn image_volumes_on_disk(annotations: &HashMap<String, String>) -> Result<bool, String> {
    match annotations.get(IMAGE_VOLUMES).map(String::as_str) {
        None | Some("disk") => Ok(true),
        Some("share") => Ok(false),
        Some(other) => {
            Err(format!("annotation {IMAGE_VOLUMES} is {other:?}, it may be \"disk\" or \"share\""))
        }
    }
}

/// Returns the namespace, unless it is the pod's, and the name of the checkpoint.
fn restore_from(annotations: &HashMap<String, String>) -> Result<Option<(Option<Id>, Id)>, String> {
    let Some(text) = annotations.get(RESTORE_FROM) else { return Ok(None) };
    let parse = |text: &str| {
        text.parse::<Id>().map_err(|error| format!("annotation {RESTORE_FROM} names no checkpoint: {error}"))
    };
    Ok(Some(match text.split_once('/') {
        Some((namespace, name)) => (Some(parse(namespace)?), parse(name)?),
        None => (None, parse(text)?),
    }))
}

fn restore_signal(annotations: &HashMap<String, String>) -> Result<Option<u32>, String> {
    let Some(text) = annotations.get(RESTORE_SIGNAL) else { return Ok(None) };
    let found = RESTORE_SIGNALS.iter().find(|(name, _)| name == text);
    found.map(|(_, number)| Some(*number)).ok_or_else(|| {
        let names = RESTORE_SIGNALS.map(|(name, _)| name).join(", ");
        format!("annotation {RESTORE_SIGNAL} is {text:?}, it may be one of {names}")
    })
}

fn space(annotations: &HashMap<String, String>, name: &'static str) -> Result<Option<u64>, String> {
    annotations.get(name).map(|text| quantity::space(name, text)).transpose()
}

impl From<PodError> for tonic::Status {
    fn from(error: PodError) -> Self {
        let code = match error.code() {
            Code::NotFound => tonic::Code::NotFound,
            Code::AlreadyExists => tonic::Code::AlreadyExists,
            Code::InvalidArgument => tonic::Code::InvalidArgument,
            Code::FailedPrecondition => tonic::Code::FailedPrecondition,
            Code::Cancelled => tonic::Code::Cancelled,
            Code::DeadlineExceeded => tonic::Code::DeadlineExceeded,
            Code::Unavailable => tonic::Code::Unavailable,
            Code::Unimplemented => tonic::Code::Unimplemented,
            Code::Internal => tonic::Code::Internal,
        };
        tonic::Status::new(code, chain(&error))
    }
}

impl From<PodError> for ttrpc::Error {
    fn from(error: PodError) -> Self {
        let code = match error.code() {
            Code::NotFound => ttrpc::Code::NOT_FOUND,
            Code::AlreadyExists => ttrpc::Code::ALREADY_EXISTS,
            Code::InvalidArgument => ttrpc::Code::INVALID_ARGUMENT,
            Code::FailedPrecondition => ttrpc::Code::FAILED_PRECONDITION,
            Code::Cancelled => ttrpc::Code::CANCELLED,
            Code::DeadlineExceeded => ttrpc::Code::DEADLINE_EXCEEDED,
            Code::Unavailable => ttrpc::Code::UNAVAILABLE,
            Code::Unimplemented => ttrpc::Code::UNIMPLEMENTED,
            Code::Internal => ttrpc::Code::INTERNAL,
        };
        ttrpc::Error::RpcStatus(ttrpc::get_status(code, chain(&error)))
    }
}

/// Converts a gRPC error to ttrpc: the codes are the same.
pub fn ttrpc_status(status: &tonic::Status) -> ttrpc::Error {
    use protobuf::Enum;
    let code = ttrpc::Code::from_i32(i32::from(status.code())).unwrap_or(ttrpc::Code::UNKNOWN);
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, status.message().to_owned()))
}

/// Converts ns since 1970 to a gRPC timestamp; `None` for 0.
pub fn grpc_time(ns: u64) -> Option<prost_types::Timestamp> {
    let nanos = i32::try_from(ns % 1_000_000_000).unwrap_or_default();
    let seconds = i64::try_from(ns / 1_000_000_000).unwrap_or_default();
    (ns > 0).then_some(prost_types::Timestamp { seconds, nanos })
}

/// Converts ns since 1970 to a ttrpc timestamp; `None` for 0.
pub fn ttrpc_time(ns: u64) -> protobuf::MessageField<protobuf::well_known_types::timestamp::Timestamp> {
    grpc_time(ns)
        .map(|time| protobuf::well_known_types::timestamp::Timestamp {
            seconds: time.seconds,
            nanos: time.nanos,
            ..Default::default()
        })
        .into()
}

#[cfg(test)]
mod tests {
    use sandboxer_config::{Config, VmmName};
    use sandboxer_vmm::DiskLimits;

    use super::*;

    fn request(edit: impl FnOnce(&mut PodSandboxConfig)) -> ControllerCreateRequest {
        let mut config = PodSandboxConfig {
            metadata: Some(k8s_cri::v1::PodSandboxMetadata { name: "web".into(), ..Default::default() }),
            ..Default::default()
        };
        edit(&mut config);
        ControllerCreateRequest {
            sandbox_id: "0123abcd".into(),
            options: Some(prost_types::Any {
                type_url: "runtime.v1.PodSandboxConfig".into(),
                value: config.encode_to_vec(),
            }),
            ..Default::default()
        }
    }

    #[test]
    fn addresses_are_those_that_containerd_tells_and_not_all_pods_have_any() {
        let ips = |metadata: &str| {
            let mut request = request(|_| {});
            let kept = format!(r#"{{"Version":"v1","Metadata":{{"RuntimeHandler":"",{metadata}}}}}"#);
            let value = prost_types::Any { type_url: String::new(), value: kept.into_bytes() };
            request.sandbox.get_or_insert_default().extensions.insert("metadata".into(), value);
            pod_spec(&request, &Config::default(), &Hierarchies::default()).unwrap().ips
        };
        let both: [IpAddr; 2] = ["192.0.2.7".parse().unwrap(), "2001:db8::7".parse().unwrap()];
        assert_eq!(ips(r#""IP":"192.0.2.7","AdditionalIPs":["2001:db8::7"]"#), both);
        assert_eq!(ips(r#""IP":"","AdditionalIPs":null"#), [] as [IpAddr; 0]);
    }

    #[test]
    fn a_checkpoint_is_of_the_pods_namespace_or_of_a_named_one() {
        let asked = |name: &str, value: &str| {
            let request = request(|pod| {
                pod.annotations.insert(name.into(), value.into());
            });
            pod_spec(&request, &Config::default(), &Hierarchies::default())
        };
        let names = |value: &str| {
            let spec = asked(RESTORE_FROM, value).unwrap();
            (spec.restore_namespace.map(String::from), spec.restore_from.map(String::from))
        };
        assert_eq!(names("warm"), (None, Some("warm".into())));
        assert_eq!(names("golden/warm"), (Some("golden".into()), Some("warm".into())));
        for bad in ["", "/", "../warm", "a/b/c", "golden/", "/warm"] {
            let refused = asked(RESTORE_FROM, bad).unwrap_err().to_string();
            assert!(refused.contains("io.sandboxer.restore-from names no checkpoint"), "{refused}");
        }
        assert_eq!(asked(RESTORE_SIGNAL, "SIGUSR1").unwrap().restore_signal, Some(10));
        for bad in ["", "USR1", "10", "SIGKILL", "SIGSTOP", "SIGRTMIN"] {
            let refused = asked(RESTORE_SIGNAL, bad).unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument);
            assert!(refused.to_string().contains("it may be one of SIGHUP, SIGUSR1, "), "{refused}");
        }
    }

    #[test]
    fn limits_of_its_own_keep_a_pod_from_no_start_path() {
        let mut config = Config::default();
        let asked = |config: &Config, value: &str| {
            let request = request(|pod| {
                pod.annotations.insert("io.sandboxer.disk-bps".into(), value.into());
            });
            pod_spec(&request, config, &Hierarchies::default())
        };
        let own = asked(&config, "4Mi").unwrap();
        assert_eq!(
            (own.start_path, own.misses_pool, own.disk_limits.bytes.unwrap().per_second),
            (StartPath::Pool, false, 4 << 20)
        );
        let refused = asked(&config, "0").unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.to_string().contains("io.sandboxer.disk-bps is \"0\""), "{refused}");
        config.limits.disk_bps = Some(4 << 20);
        let plain = pod_spec(&request(|_| {}), &config, &Hierarchies::default()).unwrap();
        assert_eq!(
            (plain.start_path, plain.disk_limits),
            (StartPath::Pool, DiskLimits::configured(&config.limits))
        );
    }

    #[test]
    fn memory_in_huge_pages_keeps_a_pod_from_all_start_paths_but_a_boot() {
        let mut config = Config::default();
        let asked = |config: &Config| {
            let request =
                request(|pod| _ = pod.annotations.insert("io.sandboxer.huge-pages".into(), "2Mi".into()));
            let spec = pod_spec(&request, config, &Hierarchies::default()).unwrap();
            (spec.start_path, spec.misses_pool)
        };
        assert_eq!(asked(&config), (StartPath::Boot, true));
        // A pod whose runtime handler uses no pool is not counted as a miss.
        let handler = sandboxer_config::Handler { start_path: StartPath::Template, vmm: None };
        config.handlers.insert(String::new(), handler);
        assert_eq!(asked(&config), (StartPath::Boot, false));
    }

    #[test]
    fn start_path_and_vmm_are_those_of_the_runtime_handler() {
        let mut config = Config::default();
        let handler = |start_path, vmm| sandboxer_config::Handler { start_path, vmm };
        config.handlers.insert("cold".into(), handler(StartPath::Boot, None));
        config.handlers.insert("fc".into(), handler(StartPath::Pool, Some(VmmName::Firecracker)));
        let asked = |handler: &str| {
            let mut request = request(|_| {});
            let kept = format!(r#"{{"Version":"v1","Metadata":{{"ID":"p","RuntimeHandler":"{handler}"}}}}"#);
            let extensions = &mut request.sandbox.get_or_insert_default().extensions;
            let value = prost_types::Any { type_url: String::new(), value: kept.into_bytes() };
            extensions.insert("metadata".into(), value);
            let spec = pod_spec(&request, &config, &Hierarchies::default()).unwrap();
            (spec.start_path, spec.vmm)
        };
        assert_eq!(asked("cold"), (StartPath::Boot, None));
        assert_eq!(asked("fc"), (StartPath::Pool, Some(VmmName::Firecracker)));
        assert_eq!([asked("other"), asked("")], [(StartPath::Pool, None); 2]);
        assert_eq!(
            pod_spec(&request(|_| {}), &config, &Hierarchies::default()).unwrap().start_path,
            StartPath::Pool,
            "a containerd that tells none"
        );
    }

    #[test]
    fn ports_of_the_host_are_for_pods_in_its_network() {
        let mut own =
            request(|config| drop(config.annotations.insert(host_ports::ANNOTATION.into(), "80".into())));
        assert_eq!(pod_spec(&own, &Config::default(), &Hierarchies::default()).unwrap().host_ports, [80]);
        own.netns_path = "/run/netns/x".into();
        let error = pod_spec(&own, &Config::default(), &Hierarchies::default()).unwrap_err().to_string();
        assert!(error.contains("hostNetwork"), "{error}");
    }

    #[test]
    fn a_pod_without_hostname_is_called_by_what_of_its_name_is_one() {
        let named = |hostname: &str, name: &str| {
            let request = request(|config| {
                config.hostname = hostname.into();
                config.metadata.get_or_insert_default().name = name.into();
            });
            pod_spec(&request, &Config::default(), &Hierarchies::default()).map(|spec| spec.hostname)
        };
        assert_eq!(named("asked", "web").unwrap(), "asked");
        assert_eq!(named("", "web").unwrap(), "web");
        assert_eq!(named("", &("x".repeat(62) + "-" + "cut")).unwrap(), "x".repeat(62));
        assert_eq!(named("", "").unwrap(), "0123abcd");
        let error = named(&"x".repeat(65), "web").unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
    }

    #[test]
    fn an_id_that_leaves_its_directory_and_a_host_namespace_are_refused() {
        let mut escape = request(|_| {});
        escape.sandbox_id = "../x".into();
        let error = pod_spec(&escape, &Config::default(), &Hierarchies::default()).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        let host_pid = request(|config| {
            let options =
                k8s_cri::v1::NamespaceOption { pid: NamespaceMode::Node as i32, ..Default::default() };
            config.linux = Some(k8s_cri::v1::LinuxPodSandboxConfig {
                security_context: Some(k8s_cri::v1::LinuxSandboxSecurityContext {
                    namespace_options: Some(options),
                    ..Default::default()
                }),
                ..Default::default()
            });
        });
        let error = pod_spec(&host_pid, &Config::default(), &Hierarchies::default()).unwrap_err();
        assert!(error.to_string().contains("PID namespace"), "{error}");
    }
}
