//! Translates the bundle that containerd wrote into the spec for the agent.
//!
//! containerd describes a container on this host, but it runs in a guest. References to the host are translated if they
//! keep their meaning, dropped if a kernel per pod makes them void, and otherwise rejected by name.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use oci_spec::runtime::{
    Hooks, Linux, LinuxNamespace, LinuxNamespaceBuilder, LinuxNamespaceType, PosixRlimit, Process, Spec,
};
use sandboxer_base::Cpus;
use sandboxer_host::{helper::Helpers, volume::Needed};
use sandboxer_process::rlimits::Rlimits;
use sandboxer_protocol::{
    agent::{BlockDevice, File, create_container_request::Processes},
    id::ContainerId,
};

use super::{
    NewContainer, devices,
    mounts::{self, AllLooked, Mounts},
};
use crate::{
    checkpoint::Identity,
    error::PodError,
    pod::{limits::ContainerLimits, quantity, spec::PodSpec},
    share::Share,
};

/// Maximum size of `config.json`, bytes: the agent's largest message is 4 MiB.
pub const MAX_SPEC: u64 = 3 << 20;

/// Annotation of a pod or a container with the size of the writable layer.
pub const ROOTFS_SIZE: &str = "io.sandboxer.rootfs-size";

/// Annotations of containerd's CRI with a container's name in its pod, and the name of its image.
const CONTAINER_NAME: &str = "io.kubernetes.cri.container-name";
const IMAGE_NAME: &str = "io.kubernetes.cri.image-name";

/// Default AppArmor profiles of containerd, docker, nerdctl and CRI-O, and the name for no profile.
const DEFAULT_APPARMOR: &str = "cri-containerd.apparmor.d";
const OTHER_DEFAULTS: [&str; 3] = ["docker-default", "nerdctl-default", "crio-default"];
const UNCONFINED: &str = "unconfined";

/// A container's spec for the guest.
#[derive(Debug)]
pub struct GuestSpec {
    /// The OCI runtime spec, as JSON.
    pub json: Vec<u8>,
    /// Files that replace files of the image.
    pub files: Vec<File>,
    /// The processes that the container sees.
    pub processes: Option<Processes>,
    /// Disks that the container sees as devices.
    pub devices: Vec<BlockDevice>,
    /// Volumes that the guest must have first.
    pub needed: Vec<Needed>,
    /// The container's live shares.
    pub shares: Vec<Share>,
    /// The path in the guest of the share that is the root file system; `None`: disks are.
    pub root: Option<PathBuf>,
    /// Path of the container's termination message on the host.
    pub message: Option<PathBuf>,
    /// CPUs of the host that the container may use, as a list; `None`: all. They confine the VMM, not the guest.
    pub cpus: Option<String>,
    /// Memory nodes of the host that the container may use, as a list; `None`: all.
    pub mems: Option<String>,
    /// The container's limits.
    pub limits: ContainerLimits,
    /// Maximum size of the container's root file system, bytes, if requested.
    pub rootfs_bytes: Option<u64>,
    /// Whether the container writes to no disk of its own: its root file system is read-only, and its image has no
    /// volumes.
    pub is_read_only: bool,
}

/// Reads `config.json` in the bundle of `new`, has `helpers` read the host paths in it, and translates it for the guest
/// of `pod`. Volumes of the image are on the container's disk if they are to be `on_disk`.
pub async fn read(
    pod: &PodSpec,
    new: &NewContainer,
    helpers: &Helpers,
    on_disk: bool,
) -> Result<GuestSpec, PodError> {
    let (container, path) = (&new.id, new.bundle.join("config.json"));
    let text = read_bounded(&path, MAX_SPEC).map_err(|error| match error {
        ReadError::TooLarge(length) => too_large(container, length),
        ReadError::Io(source) => {
            PodError::Path { pod: pod.id.clone(), action: "read container spec", path: path.clone(), source }
        }
    })?;
    let spec = parse_json(new, &text)?;
    let mounts = spec.mounts().as_deref().unwrap_or_default();
    let looked = mounts::look(helpers, pod, container, mounts, on_disk).await?;
    let root = match &new.root {
        Some(root) => Some(mounts::root(helpers, pod, container, root).await?),
        None => None,
    };
    let mut guest_spec = convert(pod, new, spec, looked, on_disk)?;
    if let Some(root) = root {
        guest_spec.root = Some(root.guest_path());
        guest_spec.shares.push(root);
    }
    Ok(guest_spec)
}

/// Reads by what the container with this bundle is recognised, except for the digest of its image.
pub fn identity(container: &ContainerId, bundle: &Path) -> Result<Identity, PodError> {
    let path = bundle.join("config.json");
    let text = read_bounded(&path, MAX_SPEC).map_err(|error| match error {
        ReadError::TooLarge(length) => too_large(container, length),
        ReadError::Io(error) => invalid(container, format!("cannot read {}: {error}", path.display())),
    })?;
    let spec: Spec = serde_json::from_slice(&text)
        .map_err(|error| invalid(container, format!("its config.json cannot be understood: {error}")))?;
    let annotation = |name: &str| {
        let found = spec.annotations().as_ref().and_then(|all| all.get(name).cloned());
        found.ok_or_else(|| invalid(container, format!("its config.json has no annotation {name}")))
    };
    let process = spec.process().as_ref();
    Ok(Identity {
        name: annotation(CONTAINER_NAME)?,
        image: annotation(IMAGE_NAME)?,
        digest: None,
        args: process.and_then(|process| process.args().clone()).unwrap_or_default(),
        cwd: process.map(|process| process.cwd().display().to_string()).unwrap_or_default(),
        user: process.map(|process| [process.user().uid(), process.user().gid()]).unwrap_or_default(),
    })
}

/// Returns the error for a spec of this length.
pub fn too_large(container: &ContainerId, length: u64) -> PodError {
    let reason = format!(
        "its spec has {length} bytes, at most {MAX_SPEC} are taken: make its environment or its arguments smaller"
    );
    invalid(container, reason)
}

/// Reads a container's spec and translates it for the guest of `pod`.
#[cfg(fuzzing)]
pub(crate) fn parse(pod: &PodSpec, new: &NewContainer, text: &[u8]) -> Result<GuestSpec, PodError> {
    let spec = parse_json(new, text)?;
    let kubelet = sandboxer_host::volume::Kubelet { root: "/var/lib/kubelet".into(), uid: pod.uid.clone() };
    let looked = mounts::looked_at(pod, &kubelet, spec.mounts().as_deref().unwrap_or_default())?;
    convert(pod, new, spec, looked, pod.image_volumes_on_disk)
}

fn parse_json(new: &NewContainer, text: &[u8]) -> Result<Spec, PodError> {
    serde_json::from_slice(text)
        .map_err(|error| invalid(&new.id, format!("its config.json cannot be understood: {error}")))
}

/// Parses an exec's OCI process object and translates it for a guest.
pub fn exec(container: &ContainerId, json: &[u8]) -> Result<Vec<u8>, PodError> {
    if json.len() as u64 > MAX_SPEC {
        let length = json.len();
        return Err(invalid(
            container,
            format!("an exec's spec has {length} bytes, at most {MAX_SPEC} are taken"),
        ));
    }
    let mut process: Process = serde_json::from_slice(json)
        .map_err(|error| invalid(container, format!("an exec's spec cannot be understood: {error}")))?;
    drop_host_labels(container, &mut process)?;
    serialise(container, &process)
}

fn convert(
    pod: &PodSpec,
    new: &NewContainer,
    mut spec: Spec,
    looked: AllLooked,
    on_disk: bool,
) -> Result<GuestSpec, PodError> {
    let container = &new.id;
    if spec.hooks().as_ref().is_some_and(|hooks| *hooks != Default::default()) {
        return Err(unsupported(container, "OCI hooks", "they are programs of the host"));
    }
    let requested = spec.mounts().clone().unwrap_or_default();
    let mounted: Vec<_> = requested.iter().map(|mount| mount.destination().clone()).collect();
    let Mounts { guest_mounts, mut files, mut needed, shares, message, has_image_volumes } =
        mounts::convert(pod, container, requested, looked, on_disk)?;
    spec.set_mounts(Some(guest_mounts));
    if let Some(process) = spec.process_mut() {
        drop_host_labels(container, process)?;
        limit(container, process, &pod.rlimits)?;
    }
    let (mut devices, mut processes, mut cpus, mut mems) = (Vec::new(), None, None, None);
    let mut limits = ContainerLimits::default();
    if let Some(linux) = spec.linux_mut() {
        limits = linux.resources().as_ref().map(ContainerLimits::from_resources).unwrap_or_default();
        (cpus, mems) = cpuset(container, linux)?;
        processes = seen_processes(pod, new, linux)?;
        let (disks, seen) = devices::convert(container, linux)?;
        needed.extend(disks);
        devices = seen;
        convert_linux(container, linux)?;
        if pod.alone {
            // They are the pod's, and set at its start. To the guest's runtime they would be the host's.
            linux.set_sysctl(None);
        }
    }
    let annotation = spec.annotations().as_ref().and_then(|annotations| annotations.get(ROOTFS_SIZE));
    let rootfs_bytes = match annotation {
        Some(text) => Some(quantity::space(ROOTFS_SIZE, text).map_err(|reason| invalid(container, reason))?),
        None => pod.room.rootfs_bytes,
    };
    let root_is_read_only =
        spec.root().as_ref().and_then(oci_spec::runtime::Root::readonly).unwrap_or_default();
    // The pod's own files are as read-only as the root; mounted files have their own option.
    for file in files.iter_mut().filter(|file| !mounted.iter().any(|at| *at == Path::new(&file.path))) {
        file.read_only = root_is_read_only;
    }
    let is_read_only = root_is_read_only && !has_image_volumes;
    // The hostname is the guest's; the others have no meaning in a guest. Hooks are empty here.
    spec.set_hostname(None).set_domainname(None).set_annotations(None).set_hooks(None::<Hooks>);
    let json = serialise(container, &spec)?;
    Ok(GuestSpec {
        json,
        files,
        processes,
        devices,
        needed,
        shares,
        root: None,
        message,
        cpus,
        mems,
        limits,
        rootfs_bytes,
        is_read_only,
    })
}

/// Returns the CPUs and the memory nodes of the host that the container may use.
fn cpuset(container: &ContainerId, linux: &Linux) -> Result<(Option<String>, Option<String>), PodError> {
    let cpu = linux.resources().as_ref().and_then(|resources| resources.cpu().as_ref());
    let parsed = |list: Option<&String>, what| match list.filter(|list| !list.is_empty()) {
        None => Ok(None),
        Some(list) => match Cpus::parse(list) {
            Some(set) => Ok(Some(set.to_string())),
            None => Err(invalid(container, format!("{list:?} is no list of {what}"))),
        },
    };
    let cpus = parsed(cpu.and_then(|cpu| cpu.cpus().as_ref()), "CPUs")?;
    Ok((cpus, parsed(cpu.and_then(|cpu| cpu.mems().as_ref()), "memory nodes")?))
}

/// Returns the PID mode of the container. containerd names the target PID namespace by host PID, and we report the
/// VMM's PID for every container. So the path shows *that* a namespace is shared, not whose. If only one container
/// runs, it must be that one.
fn seen_processes(pod: &PodSpec, new: &NewContainer, linux: &Linux) -> Result<Option<Processes>, PodError> {
    let container = &new.id;
    let namespaces = linux.namespaces().as_deref().unwrap_or_default();
    let pids = namespaces.iter().find(|namespace| namespace.typ() == LinuxNamespaceType::Pid);
    match pids.map(|pids| pids.path().is_some()) {
        None => Err(unsupported(container, "the host's PID namespace", "a guest has a kernel of its own")),
        Some(false) => Ok(None),
        Some(true) if pod.shared_pids => Ok(Some(Processes::OfPod(true))),
        Some(true) => match new.beside.as_slice() {
            [only] => Ok(Some(Processes::OfContainer(only.to_string()))),
            several => Err(unsupported(
                container,
                &format!("the PID namespace of one of {} running containers", several.len()),
                "containerd does not tell which is meant; set shareProcessNamespace in the pod to debug them",
            )),
        },
    }
}

fn convert_linux(container: &ContainerId, linux: &mut Linux) -> Result<(), PodError> {
    let namespaces = linux.namespaces().clone().unwrap_or_default();
    if namespaces.iter().any(|ns| ns.typ() == LinuxNamespaceType::User) {
        return Err(unsupported(container, "a user namespace", "its ids would be the host's"));
    }
    // Network, IPC and UTS belong to the pod, so to the guest; the other namespaces have no host path.
    linux.set_namespaces(Some(
        [LinuxNamespaceType::Mount, LinuxNamespaceType::Pid, LinuxNamespaceType::Cgroup]
            .into_iter()
            .map(|kind| namespace(container, kind))
            .collect::<Result<_, _>>()?,
    ));
    if let Some(resources) = linux.resources_mut() {
        // Device rules and I/O limits name devices of the host; CPU sets name its CPUs.
        let rules = resources.devices().iter().flatten();
        let applicable: Vec<_> = rules.filter(|rule| devices::holds_in_a_guest(rule)).cloned().collect();
        resources
            .set_devices((!applicable.is_empty()).then_some(applicable))
            .set_block_io(None)
            .set_network(None)
            .set_rdma(None);
        if let Some(cpu) = resources.cpu_mut() {
            cpu.set_cpus(None).set_mems(None).set_realtime_period(None).set_realtime_runtime(None);
            // CRI-O writes 0 for what is not set, and so does runc read it.
            let [shares, period] =
                [cpu.shares(), cpu.period()].map(|value| value.filter(|value| *value != 0));
            let quota = cpu.quota().filter(|value| *value != 0);
            cpu.set_shares(shares).set_period(period).set_quota(quota);
        }
        if let Some(memory) = resources.memory_mut() {
            // A guest has no swap; the rest belongs to cgroup v1.
            memory.set_swap(None).set_swappiness(None).set_kernel(None).set_kernel_tcp(None);
            let limit = memory.limit().filter(|value| *value != 0);
            memory.set_limit(limit);
        }
    }
    linux.set_cgroups_path(None).set_mount_label(None).set_intel_rdt(None).set_rootfs_propagation(None);
    Ok(())
}

fn namespace(container: &ContainerId, kind: LinuxNamespaceType) -> Result<LinuxNamespace, PodError> {
    LinuxNamespaceBuilder::default().typ(kind).build().map_err(|error| invalid(container, error.to_string()))
}

/// Removes AppArmor and SELinux labels: the host's policies are not loaded in a guest. Rejects an AppArmor profile that
/// was requested by name, because nothing would confine the container.
fn drop_host_labels(container: &ContainerId, process: &mut Process) -> Result<(), PodError> {
    if let Some(profile) = process.apparmor_profile()
        && ![DEFAULT_APPARMOR, UNCONFINED, ""].contains(&profile.as_str())
        && !OTHER_DEFAULTS.contains(&profile.as_str())
    {
        let why = "the host's profiles are not loaded in a guest; seccomp profiles are (seccompProfile)";
        return Err(unsupported(container, &format!("the AppArmor profile {profile:?}"), why));
    }
    process.set_apparmor_profile(None).set_selinux_label(None);
    Ok(())
}

/// Sets the resource limits of a process that its specification does not set.
fn limit(container: &ContainerId, process: &mut Process, limits: &Rlimits) -> Result<(), PodError> {
    let mut all = process.rlimits().clone().unwrap_or_default();
    for (name, [soft, hard]) in limits {
        let json = serde_json::json!({"type": name, "soft": soft, "hard": hard});
        let limit: PosixRlimit =
            serde_json::from_value(json).map_err(|error| invalid(container, format!("{name}: {error}")))?;
        if !all.iter().any(|known| known.typ() == limit.typ()) {
            all.push(limit);
        }
    }
    process.set_rlimits((!all.is_empty()).then_some(all));
    Ok(())
}

enum ReadError {
    TooLarge(u64),
    Io(std::io::Error),
}

fn read_bounded(path: &Path, most: u64) -> Result<Vec<u8>, ReadError> {
    let file = fs::File::open(path).map_err(ReadError::Io)?;
    let length = file.metadata().map_err(ReadError::Io)?.len();
    if length > most {
        return Err(ReadError::TooLarge(length));
    }
    let mut content = Vec::new();
    // The file may grow, or not be a regular file: the bound holds in any case.
    file.take(most).read_to_end(&mut content).map_err(ReadError::Io)?;
    Ok(content)
}

fn serialise(container: &ContainerId, value: &impl serde::Serialize) -> Result<Vec<u8>, PodError> {
    serde_json::to_vec(value).map_err(|error| invalid(container, error.to_string()))
}

pub(super) fn invalid(container: &ContainerId, reason: String) -> PodError {
    PodError::Invalid { subject: format!("container {container}"), reason }
}

pub(super) fn unsupported(container: &ContainerId, what: &str, why: &str) -> PodError {
    PodError::Unsupported(format!("container {container}: {what} is not available in a microVM pod: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::journal::tests::record;

    fn new(bundle: &Path, beside: &[&str]) -> NewContainer {
        NewContainer {
            id: "c".parse().unwrap(),
            bundle: bundle.to_owned(),
            mounts: Vec::new(),
            root: None,
            stdio: Default::default(),
            beside: beside.iter().map(|id| id.parse().unwrap()).collect(),
        }
    }

    fn convert_json(edit: impl FnOnce(&mut serde_json::Value)) -> Result<(Spec, Vec<File>), PodError> {
        let mut json = serde_json::json!({
            "ociVersion": "1.1.0",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "cwd": "/", "apparmorProfile": DEFAULT_APPARMOR,
                        "capabilities": {"bounding": ["CAP_CHOWN"]}},
            "root": {"path": "rootfs"},
            "hostname": "h",
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "linux": {
                "cgroupsPath": "/k8s.io/c",
                "resources": {"devices": [{"allow": false, "access": "rwm"}],
                              "memory": {"limit": 1000, "swap": 2000}, "cpu": {"shares": 2, "cpus": "0-3"}},
                "namespaces": [{"type": "pid"}, {"type": "ipc", "path": "/proc/1/ns/ipc"},
                               {"type": "network", "path": "/proc/1/ns/net"}, {"type": "mount"}]
            }
        });
        edit(&mut json);
        let bundle = tempfile::tempdir().unwrap();
        fs::write(bundle.path().join("config.json"), json.to_string()).unwrap();
        // The spec names nothing on the host that a helper would read.
        let helpers = Helpers::new(None, std::time::Duration::ZERO);
        let (pod, new) = (record("web").spec, new(bundle.path(), &[]));
        let guest = futures::executor::block_on(read(&pod, &new, &helpers, true))?;
        Ok((serde_json::from_slice(&guest.json).unwrap(), guest.files))
    }

    #[test]
    fn the_pods_own_files_are_as_read_only_as_the_root_file_system() {
        for is_read_only in [false, true] {
            let edit = |json: &mut serde_json::Value| json["root"]["readonly"] = is_read_only.into();
            let (_, files) = convert_json(edit).unwrap();
            assert!(!files.is_empty());
            assert!(files.iter().all(|file| file.read_only == is_read_only), "{files:?}");
        }
    }

    #[test]
    fn nothing_of_the_host_reaches_the_guest() {
        let (spec, files) = convert_json(|json| json["hooks"] = serde_json::json!({})).unwrap();
        assert!(spec.hooks().is_none());
        let linux = spec.linux().as_ref().unwrap();
        assert!(linux.namespaces().iter().flatten().all(|ns| ns.path().is_none()));
        assert!(linux.cgroups_path().is_none());
        let resources = linux.resources().as_ref().unwrap();
        assert!(resources.devices().is_none());
        assert_eq!(resources.memory().unwrap().limit(), Some(1000));
        assert_eq!(resources.memory().unwrap().swap(), None);
        assert_eq!(resources.cpu().as_ref().unwrap().shares(), Some(2));
        assert_eq!(resources.cpu().as_ref().unwrap().cpus(), &None);
        assert_eq!(spec.process().as_ref().unwrap().apparmor_profile(), &None);
        assert!(files.iter().any(|f| f.path == "/etc/hostname" && f.content == b"web\n"));
    }

    #[test]
    fn a_limit_of_nothing_is_none() {
        let (spec, _) = convert_json(|json| {
            json["linux"]["resources"] =
                serde_json::json!({"memory": {"limit": 0}, "cpu": {"shares": 0, "quota": 0, "period": 0}});
        })
        .unwrap();
        let resources = spec.linux().as_ref().unwrap().resources().clone().unwrap();
        assert_eq!(resources.memory().unwrap().limit(), None);
        let cpu = resources.cpu().clone().unwrap();
        assert_eq!((cpu.shares(), cpu.quota(), cpu.period()), (None, None, None));
    }

    #[test]
    fn sysctls_of_a_container_without_a_pod_are_its_pods() {
        let spec: Spec = serde_json::from_value(serde_json::json!({
            "ociVersion": "1.3.0",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "cwd": "/"},
            "linux": {"sysctl": {"net.ipv4.ip_unprivileged_port_start": "0"}, "namespaces": [{"type": "pid"}]}
        }))
        .unwrap();
        let pod = PodSpec { alone: true, ..record("c").spec };
        let guest = convert(&pod, &new(Path::new("/"), &[]), spec, AllLooked::new(), true).unwrap();
        let spec: Spec = serde_json::from_slice(&guest.json).unwrap();
        assert_eq!(spec.linux().as_ref().unwrap().sysctl(), &None);
    }

    #[test]
    fn a_profile_of_apparmor_that_was_asked_for_is_refused_by_name() {
        let convert_with_profile =
            |profile: &str| convert_json(|json| json["process"]["apparmorProfile"] = profile.into());
        let error = convert_with_profile("k8s-deny-write").unwrap_err();
        assert_eq!(error.code(), sandboxer_base::Code::Unimplemented);
        assert!(error.to_string().contains("the AppArmor profile \"k8s-deny-write\""), "{error}");
        convert_with_profile(UNCONFINED).unwrap();
    }

    #[test]
    fn limits_are_those_of_the_spec_and_then_those_of_containerd() {
        let mut process: Process =
            serde_json::from_value(serde_json::json!({"user": {"uid": 0, "gid": 0}, "cwd": "/",
            "rlimits": [{"type": "RLIMIT_CORE", "soft": 1, "hard": 2}]}))
            .unwrap();
        let of_containerd =
            [("RLIMIT_CORE".to_owned(), [0, 0]), ("RLIMIT_NOFILE".to_owned(), [20_000, u64::MAX])].into();
        limit(&"c".parse().unwrap(), &mut process, &of_containerd).unwrap();
        let all = process.rlimits().clone().unwrap();
        let seen: Vec<_> = all.iter().map(|limit| (limit.soft(), limit.hard())).collect();
        assert_eq!(seen, [(1, 2), (20_000, u64::MAX)]);
    }

    #[test]
    fn hooks_are_refused() {
        let hooks = serde_json::json!({"prestart": [{"path": "/bin/true"}]});
        let text = convert_json(|json| json["hooks"] = hooks).unwrap_err().to_string();
        assert!(text.contains("OCI hooks"), "{text}");
    }

    #[test]
    fn processes_are_shared_with_the_pod_and_never_with_the_host() {
        let seen = |namespaces: serde_json::Value, shared_pids: bool, beside: &[&str]| {
            let linux: Linux = serde_json::from_value(serde_json::json!({"namespaces": namespaces})).unwrap();
            let pod = PodSpec { shared_pids, ..record("p").spec };
            seen_processes(&pod, &new(Path::new("/"), beside), &linux)
        };
        let joined = serde_json::json!([{"type": "pid", "path": "/proc/1/ns/pid"}]);
        assert_eq!(seen(serde_json::json!([{"type": "pid"}]), true, &[]).unwrap(), None);
        assert_eq!(seen(joined.clone(), true, &["a", "b"]).unwrap(), Some(Processes::OfPod(true)));
        let target = seen(joined.clone(), false, &["a"]).unwrap();
        assert_eq!(target, Some(Processes::OfContainer("a".to_owned())));
        for beside in [&[][..], &["a", "b"]] {
            let target = seen(joined.clone(), false, beside).unwrap_err().to_string();
            assert!(target.contains("shareProcessNamespace"), "{target}");
        }
        let host = seen(serde_json::json!([{"type": "mount"}]), true, &[]).unwrap_err().to_string();
        assert!(host.contains("host's PID namespace"), "{host}");
    }

    #[test]
    fn an_unknown_capability_and_a_huge_environment_are_named() {
        let unknown = convert_json(|json| {
            json["process"]["capabilities"]["bounding"] = serde_json::json!(["CAP_SUPERPOWER"]);
        });
        let text = unknown.unwrap_err().to_string();
        assert!(text.contains("SUPERPOWER"), "{text}");
        let huge = convert_json(|json| {
            json["process"]["env"] = serde_json::json!([format!("X={}", "y".repeat(10 << 20))]);
        });
        let text = huge.unwrap_err().to_string();
        assert!(text.contains("environment") && text.contains(&MAX_SPEC.to_string()), "{text}");
    }
}
