//! Operations of libcontainer. All functions here except [`start`] block and run in a worker.

use std::{
    error::Error as _,
    fs,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use libcgroups::{
    common::{CgroupManager as _, ControllerOpt, WrappedIoError},
    v2::manager::V2ManagerError,
};
use libcontainer::{
    capabilities::CapabilityExt as _,
    container::{Container, ContainerStatus, builder::ContainerBuilder},
    oci_spec::runtime::{Capabilities, Capability, LinuxCapabilities, LinuxResources, Process, Spec},
    syscall::syscall::SyscallType,
};
use nix::{
    errno::Errno,
    sys::stat::{Mode, SFlag, mknod},
};
use pathrs::Root;
use sandboxer_protocol::id::ContainerId;

use crate::{
    cgroup::{self, Cgroup},
    device_rules::{self, Rule},
    devices,
    failure::{Failure, Kind, internal},
    io::ChildEnds,
    limits::{GuestSize, Limits},
    payload::Payload,
    rootfs::{Dir, Located},
    spec::{self, BoundFile},
    targets::View,
    tree::Owner,
    volume,
};

/// The directory of libcontainer's state.
pub const STATE: &str = "/run/sandboxer/state";

/// How a new process's streams are connected.
pub enum Stdio<'a> {
    /// Three pipes, of which these are the child's ends.
    Pipes(&'a ChildEnds),
    /// A terminal: its master is sent to the listener at this path.
    Terminal(&'a Path),
}

/// A file to place in a container.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct File {
    /// The path in the container.
    pub path: String,
    /// The file's content.
    pub content: Vec<u8>,
    /// The file's owner and permissions.
    pub owner: Owner,
    /// Whether the container cannot write to it.
    pub read_only: bool,
    /// Whether it is the termination message, whose final content is reported with the init's exit.
    pub is_message: bool,
}

/// A block device that a container gets at a path.
#[derive(Debug)]
pub struct BlockDevice<'a> {
    /// The guest's own device node.
    pub node: PathBuf,
    /// The device as the container sees it.
    pub seen: &'a SeenDevice,
}

/// A block device as a container sees it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SeenDevice {
    /// The serial of its disk.
    pub serial: String,
    /// The path in the container.
    pub path: String,
    /// The owner and permissions of its node.
    pub owner: Owner,
    /// Whether the container cannot write to it.
    pub read_only: bool,
}

/// Creates container `id` up to the point where its init waits; returns the init's guest PID. `pids` is the process
/// namespace that it joins, `None` for one of its own. Cleans nothing up on failure: see [`remove`].
pub fn create(
    id: &ContainerId,
    json: &[u8],
    plan: &Located,
    files: &[File],
    devices: &[BlockDevice<'_>],
    pids: Option<&Path>,
    stdio: &Stdio<'_>,
) -> Result<i32, Failure> {
    let mut spec = spec::parse(json)?;
    if let Some(resources) = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref()) {
        Limits::of_container(resources)?.check_new(&Cgroup::of_all(), GuestSize::this())?;
    }
    let dir = Dir::of_container(id);
    dir.assemble(plan)?;
    let mounts = spec.mounts_mut().get_or_insert_default();
    volume::stage(&dir, mounts)?;
    volume::from_image(&dir, mounts)?;
    let mut bound = write_files(&dir, files)?;
    let (nodes, disks) = make_nodes(&dir, devices)?;
    bound.extend(nodes);
    spec::fit(&mut spec, id, &dir.rootfs(), matches!(stdio, Stdio::Terminal(_)), &bound)?;
    if let Some(pids) = pids {
        spec::join_pids(&mut spec, pids);
    }
    place(&dir, &mut spec)?;
    let config = dir.path().join("config.json");
    spec.save(&config).map_err(internal(format!("cannot write {}", config.display())))?;
    fs::create_dir_all(STATE).map_err(internal(format!("cannot create {STATE}")))?;
    // If the group exists, libcontainer only moves the process there. Otherwise it enables every controller from the
    // root on, which is already done.
    Cgroup::of_container(id).create().map_err(internal("cannot create the control group"))?;

    let container = builder(id, Path::new(STATE), stdio, Payload::default())?
        .as_init(dir.path())
        .with_systemd(false)
        .with_detach(true)
        .build()
        .map_err(|error| Failure::caused(kind_of_create(&error), "cannot create the container", &error))?;
    confine(id, &spec, disks)?;
    pid_of(&container)
}

/// Enforces a container's device rules before it runs code of its own. A container that may use all devices is not
/// restricted.
fn confine(id: &ContainerId, spec: &Spec, disks: Vec<Rule>) -> Result<(), Failure> {
    let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
    let rules = resources.and_then(|resources| resources.devices().as_deref()).unwrap_or_default();
    if devices::allow_all(rules) {
        return Ok(());
    }
    device_rules::enforce(&Cgroup::of_container(id), &device_rules::all(rules, disks))
        .map_err(internal("cannot enforce the container's device rules"))
}

/// Makes the init of a created container execute its program: one write to a socket, and one small file.
///
/// No worker is forked for this. Measured under emulation on two cores: a worker took 11 of the 28 ms of a
/// start.
pub fn start(id: &ContainerId) -> Result<(), Failure> {
    load(id)?.start().map_err(internal("cannot start the container"))
}

/// Runs an exec in container `id`, whose init may still wait for its start; returns the exec's guest pid when its
/// program runs.
pub fn exec(
    id: &ContainerId,
    exec: &str,
    process: &[u8],
    stdio: &Stdio<'_>,
    init_waits: bool,
) -> Result<i32, Failure> {
    let mut process = spec::parse_process(process)?;
    spec::fit_process(&mut process, matches!(stdio, Stdio::Terminal(_)));
    let config = Dir::of_container(id).path().join("config.json");
    let spec = Spec::load(&config).map_err(internal(format!("cannot read {}", config.display())))?;
    if process.rlimits().is_none() {
        process.set_rlimits(spec.process().as_ref().and_then(|init| init.rlimits().clone()));
    }
    let filter = spec.linux().as_ref().and_then(|linux| linux.seccomp().clone());
    let drop_to = if filter.is_some() { keep_until_filtered(&mut process) } else { None };

    let file = Dir::of_container(id).path().join(format!("exec-{exec}.json"));
    let json = serde_json::to_vec(&process).map_err(internal("cannot encode the process"))?;
    fs::write(&file, json).map_err(internal(format!("cannot write {}", file.display())))?;
    let early = Dir::of_container(id).path().join(format!("early-{exec}"));
    let root = if init_waits {
        beside_a_waiting_init(id, &early)?;
        early.as_path()
    } else {
        Path::new(STATE)
    };
    let built = builder(id, root, stdio, Payload { filter, drop_to })?
        .as_tenant()
        .with_process(Some(&file))
        .with_sub_cgroup(group_for_execs(id)?)
        .with_detach(true)
        .build();
    let _ = fs::remove_file(&file);
    if init_waits {
        let _ = fs::remove_dir_all(&early);
    }
    built.map(|pid| pid.as_raw()).map_err(|error| {
        let cwd = process.cwd().display();
        Failure::caused(Kind::Internal, format!("cannot run the process (working directory {cwd})"), &error)
    })
}

/// Makes a copy of the state of container `id` below `root` that says that its init runs: libcontainer refuses an exec
/// beside an init that waits for its start, unlike runc.
fn beside_a_waiting_init(id: &ContainerId, root: &Path) -> Result<(), Failure> {
    let mut container = load(id)?;
    container.set_status(ContainerStatus::Running);
    container.root = root.join(id);
    fs::create_dir_all(&container.root)
        .map_err(internal(format!("cannot create {}", container.root.display())))?;
    container.save().map_err(internal("cannot write the container's state for an exec"))
}

/// Returns the group of the init, relative to the container's own group, if the container's own group cannot contain
/// processes: systemd and other container managers divide it and move its processes into groups below.
fn group_for_execs(id: &ContainerId) -> Result<Option<String>, Failure> {
    if !Cgroup::of_container(id).is_divided() {
        return Ok(None);
    }
    let file = format!("/proc/{}/cgroup", pid_of(&load(id)?)?);
    let text = fs::read_to_string(&file).map_err(internal(format!("cannot read {file}")))?;
    Ok(cgroup::below(id, &text))
}

/// Removes all state of container `id`: libcontainer's, cgroup, mounts and directory. Missing parts are no error. The
/// container's processes must have exited.
pub fn remove(id: &ContainerId) -> Result<(), Failure> {
    let state = Path::new(STATE).join(id);
    let state_removed = match fs::remove_dir_all(&state) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(internal(format!("cannot remove {}", state.display()))(error))
        }
        _ => Ok(()),
    };
    let cgroup_removed =
        Cgroup::of_container(id).remove().map_err(internal("cannot remove the control group"));
    // Each step runs even if another failed: a remaining mount would keep a disk busy.
    Dir::of_container(id).dismantle().and(cgroup_removed).and(state_removed)
}

/// Applies new resource limits.
pub fn update(id: &ContainerId, resources: &[u8]) -> Result<(), Failure> {
    let mut resources: LinuxResources = serde_json::from_slice(resources).map_err(|error| {
        Failure::caused(Kind::InvalidArgument, "resources are not valid OCI linux.resources", &error)
    })?;
    spec::fit_resources(&mut resources);
    Limits::of_container(&resources)
        .and_then(|limits| limits.check(&Cgroup::of_container(id), GuestSize::this()))
        .map_err(|failure| Failure::new(failure.kind, format!("container {id}: {failure}")))?;
    let manager = libcgroups::v2::manager::Manager::new("/sys/fs/cgroup".into(), cgroup::spec_path(id))
        .map_err(internal("cannot open the control group"))?;
    let changes = ControllerOpt {
        resources: &resources,
        disable_oom_killer: false,
        oom_score_adj: None,
        freezer_state: None,
    };
    manager.apply(&changes).map_err(|error| {
        let kind = if is_of_value(&error) { Kind::InvalidArgument } else { Kind::Internal };
        Failure::caused(kind, format!("container {id}: cannot apply resources"), &error)
    })
}

/// Returns whether the kernel, or the runtime, does not take a value: the caller's fault.
fn is_of_value(error: &V2ManagerError) -> bool {
    use V2ManagerError as E;
    let is_refused = |error: &WrappedIoError| {
        let number = error.inner().raw_os_error().map(Errno::from_raw);
        matches!(number, Some(Errno::EINVAL | Errno::ERANGE | Errno::EDOM | Errno::EOPNOTSUPP))
    };
    match error {
        E::CpuSetController(error) | E::PidsController(error) => is_refused(error),
        E::CpuController(_)
        | E::HugeTlbController(_)
        | E::IoController(_)
        | E::MemoryController(_)
        | E::UnifiedController(_) => {
            // What is not the kernel's answer is the runtime's own.
            let cause = error.source().and_then(|cause| cause.downcast_ref());
            cause.is_none_or(is_refused)
        }
        _ => false,
    }
}

fn builder(
    id: &ContainerId,
    root: &Path,
    stdio: &Stdio<'_>,
    payload: Payload,
) -> Result<ContainerBuilder, Failure> {
    let duplicate = |fd: &OwnedFd| fd.try_clone().map_err(internal("cannot duplicate a descriptor"));
    let builder = ContainerBuilder::new(id.to_string(), SyscallType::default())
        .with_root_path(root)
        .map_err(internal("cannot use the runtime's state directory"))?
        .with_executor(payload);
    Ok(match stdio {
        Stdio::Terminal(socket) => builder.with_console_socket(Some(*socket)),
        Stdio::Pipes(ends) => builder
            .with_stdin(duplicate(&ends.stdin)?)
            .with_stdout(duplicate(&ends.stdout)?)
            .with_stderr(duplicate(&ends.stderr)?),
    })
}

fn load(id: &ContainerId) -> Result<Container, Failure> {
    Container::load(Path::new(STATE).join(id)).map_err(internal("cannot read the container's state"))
}

fn pid_of(container: &Container) -> Result<i32, Failure> {
    let pid = container.pid().ok_or_else(|| Failure::new(Kind::Internal, "container has no process"))?;
    Ok(pid.as_raw())
}

/// Returns the kind of a failed creation: an invalid spec is the caller's error, everything else is internal.
fn kind_of_create(error: &libcontainer::error::LibcontainerError) -> Kind {
    use libcontainer::error::LibcontainerError as E;
    match error {
        E::InvalidSpec(_) | E::MissingSpec(_) | E::InvalidInput(_) | E::Spec(_) => Kind::InvalidArgument,
        _ => Kind::Internal,
    }
}

fn write_files(dir: &Dir, files: &[File]) -> Result<Vec<BoundFile>, Failure> {
    let mut bound = Vec::new();
    for (n, file) in files.iter().enumerate() {
        let source = dir.file(n);
        fs::write(&source, &file.content)
            .map_err(internal(format!("cannot write the file for {}", file.path)))?;
        file.owner.apply_to(&source)?;
        bound.push(BoundFile { path: file.path.clone(), source, read_only: file.read_only });
    }
    Ok(bound)
}

/// Creates the nodes of the devices with their permissions; returns them and the device rules that allow
/// their use.
fn make_nodes(dir: &Dir, devices: &[BlockDevice<'_>]) -> Result<(Vec<BoundFile>, Vec<Rule>), Failure> {
    let (mut bound, mut rules) = (Vec::new(), Vec::new());
    for (n, BlockDevice { node, seen }) in devices.iter().enumerate() {
        let source = dir.device(n);
        let failed = || format!("cannot create {} for {}", source.display(), seen.path);
        let device = fs::metadata(node).map_err(internal(failed()))?.rdev();
        mknod(&source, SFlag::S_IFBLK, Mode::empty(), device).map_err(internal(failed()))?;
        seen.owner.apply_to(&source)?;
        bound.push(BoundFile { path: seen.path.clone(), source, read_only: seen.read_only });
        rules.push(Rule::disk(device, seen.read_only));
    }
    Ok((bound, rules))
}

/// Finds the targets of the mounts, and creates the working directory: an image may name one that it does not contain,
/// and other runtimes create it too. In a file system that does not exist yet it is a mount.
fn place(dir: &Dir, spec: &mut Spec) -> Result<(), Failure> {
    let rootfs = dir.rootfs();
    // The image is not trusted: its symbolic links are resolved only inside it.
    let failed = internal::<pathrs::error::Error>(format!("cannot open {}", rootfs.display()));
    let root = Root::open(&rootfs).map_err(failed)?;
    let mut view = View::new(&root);
    view.place(spec.mounts_mut().get_or_insert_default())?;
    // libcontainer would create the container's devices in it.
    if view.is_bound(Path::new("/dev")) {
        return Err(Failure::invalid(
            "a volume cannot be all of /dev: mount what is needed of it below /dev",
        ));
    }
    let Some(cwd) = spec.process().as_ref().map(|process| process.cwd()) else { return Ok(()) };
    let later = if cwd.as_os_str().is_empty() { None } else { view.make_dir(cwd)? };
    if let Some(at) = later {
        let failed = || format!("cannot create the working directory {}", at.display());
        let source = dir.working_dir();
        fs::create_dir(&source).map_err(internal(failed()))?;
        let path = at.to_string_lossy().into_owned();
        let mount = spec::bind(&BoundFile { path, source, read_only: false }).map_err(internal(failed()))?;
        spec.mounts_mut().get_or_insert_default().push(mount);
    }
    Ok(())
}

/// Grants CAP_SYS_ADMIN to an exec that may gain privileges, which needs it to load its seccomp filter last. Returns
/// the capabilities that remain afterwards.
fn keep_until_filtered(process: &mut Process) -> Option<LinuxCapabilities> {
    if process.no_new_privileges() == Some(true) {
        return None;
    }
    let target = process.capabilities().clone()?;
    let mut lent = target.clone();
    let with_admin = |set: &Option<Capabilities>| {
        let mut set = set.clone().unwrap_or_default();
        set.insert(Capability::from_cap(caps::Capability::CAP_SYS_ADMIN));
        Some(set)
    };
    lent.set_effective(with_admin(target.effective()));
    lent.set_permitted(with_admin(target.permitted()));
    process.set_capabilities(Some(lent));
    Some(target)
}

/// Checks that paths of files and devices are absolute and have no "..".
pub fn check_paths<'a>(paths: impl IntoIterator<Item = &'a str>) -> Result<(), Failure> {
    for text in paths {
        let path = Path::new(text);
        let plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
        if !path.is_absolute() || !plain {
            return Err(Failure::invalid(format!("{text:?} is not an absolute path without \"..\"")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// Returns what a control group without files answers.
    fn answer(resources: serde_json::Value) -> V2ManagerError {
        let dir = tempfile::tempdir().unwrap();
        let group = libcgroups::v2::manager::Manager::new(dir.path().to_owned(), "/c".into()).unwrap();
        let resources: LinuxResources = serde_json::from_value(resources).unwrap();
        let changes = ControllerOpt {
            resources: &resources,
            disable_oom_killer: false,
            oom_score_adj: None,
            freezer_state: None,
        };
        group.apply(&changes).unwrap_err()
    }

    #[test]
    fn a_value_that_the_kernel_or_the_runtime_refuses_is_the_callers_fault() {
        let wrote = |errno: Errno| WrappedIoError::Write {
            err: io::Error::from(errno),
            path: "/sys/fs/cgroup/c/pids.max".into(),
            data: "1".to_owned(),
        };
        assert!(is_of_value(&V2ManagerError::PidsController(wrote(Errno::EINVAL))));
        assert!(is_of_value(&V2ManagerError::CpuSetController(wrote(Errno::ERANGE))));
        assert!(is_of_value(&answer(serde_json::json!({"memory": {"limit": -5}}))));
        assert!(!is_of_value(&V2ManagerError::PidsController(wrote(Errno::EIO))));
        assert!(!is_of_value(&V2ManagerError::WrappedIo(wrote(Errno::EINVAL))));
        // No such file: the group is gone.
        assert!(!is_of_value(&answer(serde_json::json!({"cpu": {"quota": 1000, "period": 1000}}))));
    }
}
