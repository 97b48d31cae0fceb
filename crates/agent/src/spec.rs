//! Adapts an OCI spec to this guest.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use libcontainer::oci_spec::runtime::{
    Capability, Hooks, LinuxBuilder, LinuxNamespaceType, LinuxSeccompAction, Mount, MountBuilder, Process,
    RootBuilder, Spec,
};
use sandboxer_protocol::id::ContainerId;
use serde_json::Value;

use crate::{
    cgroup, devices,
    failure::{Failure, Kind, internal},
};

/// A file that is mounted over `path` in the container.
#[derive(Debug)]
pub struct BoundFile {
    /// The path in the container.
    pub path: String,
    /// The path in the guest.
    pub source: PathBuf,
    /// Whether the container cannot write to it.
    pub read_only: bool,
}

/// Parses a container's spec from the host.
pub fn parse(json: &[u8]) -> Result<Spec, Failure> {
    serde_json::from_slice(json).map_err(|error| refusal(json, "spec", "/process", &error))
}

/// Parses an exec's process from the host.
pub fn parse_process(json: &[u8]) -> Result<Process, Failure> {
    serde_json::from_slice(json).map_err(|error| refusal(json, "process", "", &error))
}

/// Returns the reason why `json` cannot be parsed. Describes an unknown capability of the process, which is at the JSON
/// pointer `process`, better than the parser does. The check runs only after a failure: parsing each text twice would
/// be slow in an emulated guest.
fn refusal(json: &[u8], what: &str, process: &str, error: &serde_json::Error) -> Failure {
    let value = serde_json::from_slice::<Value>(json).unwrap_or_default();
    match value.pointer(process).map(check_capabilities) {
        Some(Err(failure)) => failure,
        _ => {
            Failure::caused(Kind::InvalidArgument, format!("{what} is not a valid OCI runtime {what}"), error)
        }
    }
}

/// Checks the capabilities' names: the parser's error names neither the set nor the capability.
fn check_capabilities(process: &Value) -> Result<(), Failure> {
    let Some(sets) = process.get("capabilities").and_then(Value::as_object) else {
        return Ok(());
    };
    for (set, names) in sets {
        for name in names.as_array().into_iter().flatten().filter_map(Value::as_str) {
            if serde_json::from_value::<Capability>(Value::from(name)).is_err() {
                let message = format!("process.capabilities.{set}: unknown capability {name:?}");
                return Err(Failure::invalid(message));
            }
        }
    }
    Ok(())
}

/// Sets the guest's own values in the spec, and removes settings that this kernel does not support.
pub fn fit(
    spec: &mut Spec,
    id: &ContainerId,
    rootfs: &Path,
    terminal: bool,
    files: &[BoundFile],
) -> Result<(), Failure> {
    let refused = |what: &str| {
        internal::<libcontainer::oci_spec::OciSpecError>(format!("cannot set {what} in the spec"))
    };
    let read_only = spec.root().as_ref().and_then(|root| root.readonly()).unwrap_or(false);
    let root = RootBuilder::default().path(rootfs).readonly(read_only).build().map_err(refused("root"))?;
    spec.set_root(Some(root));
    // Hooks are programs of the host.
    spec.set_hooks(None::<Hooks>);

    let mut process = spec.process().clone().ok_or_else(|| Failure::invalid("spec has no process"))?;
    fit_process(&mut process, terminal);
    spec.set_process(Some(process));

    let mut linux = match spec.linux() {
        Some(linux) => linux.clone(),
        None => LinuxBuilder::default().build().map_err(refused("linux"))?,
    };
    linux.set_cgroups_path(Some(cgroup::spec_path(id)));
    if let Some(filter) = linux.seccomp() {
        let notifies = filter.default_action() == LinuxSeccompAction::ScmpActNotify
            || filter
                .syscalls()
                .iter()
                .flatten()
                .any(|rule| rule.action() == LinuxSeccompAction::ScmpActNotify);
        if notifies {
            return Err(Failure::invalid("linux.seccomp: SCMP_ACT_NOTIFY has no listener in a guest"));
        }
    }
    if let Some(mut resources) = linux.resources().clone() {
        if devices::allow_all(resources.devices().as_deref().unwrap_or_default()) {
            let mut listed = linux.devices().clone().unwrap_or_default();
            for device in devices::all().map_err(internal("cannot list the guest's devices"))? {
                if !listed.iter().any(|known| known.path() == device.path()) {
                    listed.push(device);
                }
            }
            linux.set_devices(Some(listed));
        }
        fit_resources(&mut resources);
        linux.set_resources(Some(resources));
    }
    spec.set_linux(Some(linux));

    let mut mounts = spec.mounts().clone().unwrap_or_default();
    // As containerd sorts all of them: beneath whatever has a deeper target.
    for file in files {
        let bound = bind(file).map_err(refused("mounts"))?;
        let depth = |mount: &Mount| mount.destination().components().count();
        let at = mounts.iter().rposition(|mount| depth(mount) <= depth(&bound)).map_or(0, |last| last + 1);
        mounts.insert(at, bound);
    }
    spec.set_mounts(Some(mounts));
    Ok(())
}

/// Makes the container join the process namespace at `path` instead of a new one.
pub fn join_pids(spec: &mut Spec, path: &Path) {
    let namespaces = spec.linux_mut().as_mut().and_then(|linux| linux.namespaces_mut().as_mut());
    for namespace in namespaces.into_iter().flatten() {
        if namespace.typ() == LinuxNamespaceType::Pid {
            namespace.set_path(Some(path.to_owned()));
        }
    }
}

/// Adapts a container's process to this guest.
pub fn fit_process(process: &mut Process, terminal: bool) {
    process.set_terminal(Some(terminal));
    // libcontainer handles an explicit `false` as if it were `true`, and loads the filter after the capability to do so
    // has been dropped.
    if process.no_new_privileges() == Some(false) {
        process.set_no_new_privileges(None);
    }
}

/// Removes limits that the guest cannot apply: a guest has no swap, and may lack a huge-page size of its host.
pub fn fit_resources(resources: &mut libcontainer::oci_spec::runtime::LinuxResources) {
    if let Some(memory) = resources.memory() {
        let mut memory = *memory;
        memory.set_swap(None);
        memory.set_swappiness(None);
        resources.set_memory(Some(memory));
    }
    if let Some(unified) = resources.unified() {
        let usable = unified.iter().filter(|(name, _)| !name.starts_with("memory.swap."));
        let usable: HashMap<_, _> = usable.map(|(name, value)| (name.clone(), value.clone())).collect();
        resources.set_unified(Some(usable));
    }
    if let Some(limits) = resources.hugepage_limits() {
        let usable: Vec<_> = limits
            .iter()
            .filter(|limit| limit.limit() > 0 || has_huge_pages(limit.page_size()))
            .cloned()
            .collect();
        resources.set_hugepage_limits(Some(usable));
    }
}

fn has_huge_pages(size: &str) -> bool {
    cgroup::Cgroup::of_all().file(&format!("hugetlb.{size}.max")).exists()
}

/// Returns the mount of a file or directory.
pub fn bind(file: &BoundFile) -> Result<Mount, libcontainer::oci_spec::OciSpecError> {
    let access = if file.read_only { "ro" } else { "rw" };
    MountBuilder::default()
        .destination(&file.path)
        .typ("bind")
        .source(&file.source)
        .options(vec!["bind".to_owned(), access.to_owned(), "rprivate".to_owned()])
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: &str = r#"{"ociVersion":"1.1.0","root":{"path":"/host/rootfs","readonly":true},
        "process":{"cwd":"/","args":["sh"],"user":{"uid":0,"gid":0},"noNewPrivileges":false,
          "capabilities":{"bounding":["CAP_CHOWN"],"effective":["CAP_CHOWN"]}},
        "linux":{"cgroupsPath":"/host/cgroup","resources":{"memory":{"limit":1048576,"swap":1048576},
          "unified":{"memory.swap.max":"0","memory.high":"1000000"}}}}"#;

    #[test]
    fn what_belongs_to_the_host_is_replaced() {
        let mut spec = parse(SPEC.as_bytes()).unwrap();
        let file = BoundFile { path: "/etc/hosts".into(), source: "/run/x/0".into(), read_only: true };
        fit(&mut spec, &"web".parse().unwrap(), Path::new("/run/rootfs"), true, &[file]).unwrap();
        let root = spec.root().clone().unwrap();
        assert_eq!((root.path().as_path(), root.readonly()), (Path::new("/run/rootfs"), Some(true)));
        let linux = spec.linux().clone().unwrap();
        assert_eq!(linux.cgroups_path().as_deref(), Some(Path::new("/sandboxer/web")));
        let memory = linux.resources().as_ref().unwrap().memory().unwrap();
        assert_eq!((memory.limit(), memory.swap()), (Some(1 << 20), None), "a guest has no swap");
        let unified = linux.resources().as_ref().unwrap().unified().clone().unwrap();
        assert_eq!(unified, [("memory.high".to_owned(), "1000000".to_owned())].into());
        let process = spec.process().clone().unwrap();
        assert_eq!((process.terminal(), process.no_new_privileges()), (Some(true), None));
        let mount = spec.mounts().as_ref().unwrap().last().unwrap().clone();
        assert_eq!(mount.destination(), Path::new("/etc/hosts"));
        assert!(mount.options().as_ref().unwrap().contains(&"ro".to_owned()));
    }

    #[test]
    fn a_file_is_beneath_deeper_mounts_and_above_all_others() {
        let mounts = r#""mounts":[{"destination":"/proc","type":"proc"},{"destination":"/etc","type":"bind"},
            {"destination":"/a/link/to-etc","type":"bind"}],"linux":{"#;
        let mut spec = parse(SPEC.replace(r#""linux":{"#, mounts).as_bytes()).unwrap();
        let file = |path: &str| BoundFile { path: path.into(), source: "/run/x/0".into(), read_only: true };
        let files = [file("/etc/hosts"), file("/etc/hostname")];
        fit(&mut spec, &"web".parse().unwrap(), Path::new("/run/rootfs"), true, &files).unwrap();
        let targets = spec.mounts().iter().flatten().map(|mount| mount.destination().display().to_string());
        let expected = ["/proc", "/etc", "/etc/hosts", "/etc/hostname", "/a/link/to-etc"];
        assert_eq!(targets.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn an_unknown_capability_is_named_with_its_set() {
        let json = SPEC.replace(r#""effective":["CAP_CHOWN"]"#, r#""effective":["CAP_FLY"]"#);
        let failure = parse(json.as_bytes()).unwrap_err();
        assert_eq!(failure.message, r#"process.capabilities.effective: unknown capability "CAP_FLY""#);
        assert_eq!(failure.kind, Kind::InvalidArgument);
    }

    #[test]
    fn a_filter_that_wants_a_listener_is_refused() {
        let json = SPEC.replace(r#""linux":{"#, r#""linux":{"seccomp":{"defaultAction":"SCMP_ACT_NOTIFY"},"#);
        let mut spec = parse(json.as_bytes()).unwrap();
        let failure = fit(&mut spec, &"web".parse().unwrap(), Path::new("/r"), false, &[]).unwrap_err();
        assert!(failure.message.contains("SCMP_ACT_NOTIFY"), "{failure}");
    }

    #[test]
    fn rubbish_is_called_so() {
        let failure = parse(b"{]").unwrap_err();
        assert!(failure.message.starts_with("spec is not a valid OCI runtime spec: "), "{failure}");
    }
}
