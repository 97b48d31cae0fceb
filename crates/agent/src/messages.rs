//! Converts and checks the host's requests, and builds the responses.

use std::str::FromStr;

use protobuf::MessageField;
use sandboxer_protocol::{
    agent as wire,
    id::{ContainerId, ExecId, Id},
};

use crate::{
    container::{Create, PidMode},
    failure::{Failure, Kind},
    io::StdioSpec,
    process::{Exit, Process, State},
    rootfs::{Disk, Plan, Writable},
    runtime::{self, File, SeenDevice},
    stats::Stats,
    tree::{Entry, Kind as EntryKind, Owner},
    volume::{Content, Put},
};

/// Parses an identifier of the field `what`.
pub fn id(what: &str, text: &str) -> Result<Id, Failure> {
    Id::from_str(text).map_err(|error| Failure::caused(Kind::InvalidArgument, what, &error))
}

/// Parses the container's identifier.
pub fn container_id(text: &str) -> Result<ContainerId, Failure> {
    id("container_id", text)
}

/// Parses the exec's identifier; empty means the container's init.
pub fn exec_id(text: &str) -> Result<Option<ExecId>, Failure> {
    if text.is_empty() { Ok(None) } else { id("exec_id", text).map(Some) }
}

/// Returns the streams that a process gets.
pub fn stdio_spec(stdio: &wire::Stdio) -> StdioSpec {
    StdioSpec { stdin: stdio.stdin, stdout: stdio.stdout, stderr: stdio.stderr, terminal: stdio.terminal }
}

fn disk(disk: &wire::Disk) -> Disk {
    Disk {
        serial: disk.serial.clone(),
        fstype: disk.fstype.clone(),
        read_only: disk.read_only,
        scratch: disk.scratch,
    }
}

fn plan(rootfs: &wire::Rootfs) -> Result<Plan, Failure> {
    use wire::rootfs::Writable as W;
    let writable = match &rootfs.writable {
        Some(W::Tmpfs(upper)) => Writable::Tmpfs { size_bytes: upper.size_bytes },
        Some(W::Overlay(upper)) => Writable::Overlay(disk(upper)),
        Some(W::Whole(root)) => Writable::Whole(disk(root)),
        Some(W::Share(path)) => Writable::Share(path.into()),
        _ => return Err(Failure::invalid("rootfs: has no writable part")),
    };
    let plan = Plan { lower: rootfs.lower.iter().map(disk).collect(), writable };
    plan.check()?;
    Ok(plan)
}

/// Converts a file to place in a container.
pub fn file(file: wire::File) -> File {
    File {
        path: file.path,
        content: file.content,
        owner: Owner { mode: file.mode, uid: file.uid, gid: file.gid },
        read_only: file.read_only,
        is_message: file.is_message,
    }
}

/// Converts a request to create a container.
pub fn create(request: wire::CreateContainerRequest) -> Result<Create, Failure> {
    use wire::create_container_request::Processes;
    let rootfs = request.rootfs.as_ref().ok_or_else(|| Failure::invalid("request has no rootfs"))?;
    let device = |device: wire::BlockDevice| SeenDevice {
        serial: device.serial,
        path: device.path,
        owner: owner(&device.owner),
        read_only: device.read_only,
    };
    let rootfs = plan(rootfs)?;
    let files: Vec<File> = request.files.into_iter().map(file).collect();
    let sees = match &request.processes {
        None | Some(Processes::OfPod(false)) => PidMode::Own,
        Some(Processes::OfPod(true)) => PidMode::Pod,
        Some(Processes::OfContainer(other)) => PidMode::Container(id("of_container", other)?),
        Some(_) => return Err(Failure::invalid("processes: unknown mode")),
    };
    let devices: Vec<SeenDevice> = request.block_devices.into_iter().map(device).collect();
    let paths = files.iter().map(|file| &file.path).chain(devices.iter().map(|device| &device.path));
    runtime::check_paths(paths.map(String::as_str))?;
    Ok(Create {
        id: container_id(&request.container_id)?,
        stdio: stdio_spec(&request.stdio),
        rootfs,
        spec: request.spec_json,
        files,
        sees,
        devices,
    })
}

fn owner(owner: &wire::Owner) -> Owner {
    Owner { mode: owner.mode, uid: owner.uid, gid: owner.gid }
}

fn entry(entry: wire::Entry) -> Result<Entry, Failure> {
    use wire::entry::Kind as K;
    let kind = match entry.kind {
        Some(K::File(content)) => EntryKind::File(content),
        Some(K::Link(target)) => EntryKind::Link(target.into()),
        Some(K::Directory(_)) => EntryKind::Directory,
        _ => return Err(Failure::invalid(format!("tree: {:?} has no kind", entry.path))),
    };
    let entry = Entry { path: entry.path.into(), owner: owner(&entry.owner), kind };
    entry.check().map(|()| entry)
}

/// Converts a request to create a volume.
pub fn put(request: wire::PutVolumeRequest) -> Result<Put, Failure> {
    use wire::put_volume_request::Content as C;
    let content = match request.content {
        Some(C::Tree(tree)) => Content::Tree(tree.entries.into_iter().map(entry).collect::<Result<_, _>>()?),
        Some(C::Memory(memory)) => Content::Memory { size_bytes: memory.size_bytes },
        Some(C::Disk(wire_disk)) => {
            let disk = disk(&wire_disk);
            disk.check()?;
            Content::Disk(disk)
        }
        _ => return Err(Failure::invalid("volume: has no content")),
    };
    Ok(Put { id: id("volume_id", &request.volume_id)?, owner: owner(&request.owner), content })
}

/// Converts a request to prepare a scratch disk.
pub fn scratch(request: &wire::PrepareDiskRequest) -> Result<Disk, Failure> {
    let wire_disk = request.disk.as_ref().ok_or_else(|| Failure::invalid("request has no disk"))?;
    let disk = disk(wire_disk);
    disk.check()?;
    if !disk.scratch || disk.read_only {
        return Err(Failure::invalid(format!("disk {:?} is not a writable scratch disk", disk.serial)));
    }
    Ok(disk)
}

/// Converts a PID for the wire.
pub fn guest_pid(pid: i32) -> u32 {
    pid.unsigned_abs()
}

/// Converts a process's exit for the wire.
pub fn exited(exit: Exit) -> wire::Exit {
    wire::Exit { code: exit.code, at_ns: exit.at_ns, oom_killed: exit.oom_killed, ..Default::default() }
}

/// Builds the description of a container's init or of an exec. The container may be paused, and held until its start.
pub fn process(
    container: &ContainerId,
    exec: Option<&ExecId>,
    process: &Process,
    is_paused: bool,
    is_held: bool,
) -> wire::Process {
    let (state, pid, exit) = match process.state() {
        State::Running { pid } if is_held && exec.is_none() => (wire::ProcessState::CREATED, Some(pid), None),
        State::Created { pid } => (wire::ProcessState::CREATED, pid, None),
        State::Running { pid } if is_paused => (wire::ProcessState::PAUSED, Some(pid), None),
        State::Running { pid } => (wire::ProcessState::RUNNING, Some(pid), None),
        State::Exited { pid, exit } => (wire::ProcessState::EXITED, pid, Some(exit)),
    };
    wire::Process {
        container_id: container.to_string(),
        exec_id: exec.map(ToString::to_string).unwrap_or_default(),
        pid: pid.map_or(0, guest_pid),
        state: state.into(),
        exit: exit.map(exited).map_or_else(MessageField::none, MessageField::some),
        ..Default::default()
    }
}

/// Converts the resource usage of a container or of the pod.
pub fn stats(stats: &Stats) -> wire::StatsResponse {
    wire::StatsResponse {
        cpu_usage_us: stats.cpu_usage_us,
        cpu_user_us: stats.cpu_user_us,
        cpu_system_us: stats.cpu_system_us,
        cpu_periods: stats.cpu_periods,
        cpu_throttled_periods: stats.cpu_throttled_periods,
        cpu_throttled_us: stats.cpu_throttled_us,
        memory_usage: stats.memory_usage,
        memory_limit: stats.memory_limit,
        memory_anon: stats.memory_anon,
        memory_file: stats.memory_file,
        memory_inactive_file: stats.memory_inactive_file,
        memory_page_faults: stats.memory_page_faults,
        memory_major_page_faults: stats.memory_major_page_faults,
        memory_swap: stats.memory_swap,
        pids: stats.pids,
        pids_limit: stats.pids_limit,
        oom_kills: stats.oom_kills,
        fs_used: stats.fs_used,
        fs_inodes: stats.fs_inodes,
        ..Default::default()
    }
}
