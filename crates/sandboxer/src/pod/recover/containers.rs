//! Adopts the containers of an adopted pod.

use std::{collections::HashMap, sync::Arc};

use sandboxer_base::{Code, chain, clock::now_ns};
use sandboxer_guest::Signal;
use sandboxer_host::rootfs;
use sandboxer_protocol::{
    agent::{self as wire, ProcessState},
    id::{ContainerId, ExecId},
};
use sandboxer_vmm::{FIRST_IMAGE, SPARE};

use crate::{
    error::PodError,
    front,
    pod::{
        container::{
            Container, EXEC, Exit, KILLED, Phase, Process, StdioPaths,
            io::{Io, Subject},
            start::{self, INTENT, Intent},
        },
        daemon_state::DaemonState,
        journal::{ContainerRecord, PodRecord, ProcessRecord},
        limits::{ContainerLimits, SharedLimits},
        running_vm::RunningVm,
        spec::PodSpec,
        stages::Stages,
    },
};

/// Returns a container as recorded; if its pod is not `alive`, the container has exited.
pub(super) fn adopt_container(
    node: &DaemonState,
    record: ContainerRecord,
    alive: bool,
    spec: &PodSpec,
) -> Container {
    let process = |record: ProcessRecord, exec: Option<&ExecId>, container: &ContainerId| {
        let phase = phase_of(&record, alive);
        let io = adopt_io(node, spec, container, exec, &record.stdio, phase.exit().is_some());
        match io {
            // No process writes to them any more.
            Some(io) if !alive => {
                io.let_go();
                Process::at(phase, record.pid, record.stdio, None)
            }
            io => Process::at(phase, record.pid, record.stdio, io),
        }
    };
    Container {
        init: process(record.init, None, &record.id),
        execs: record
            .execs
            .into_iter()
            .map(|(exec, recorded)| (exec.clone(), process(recorded, Some(&exec), &record.id)))
            .collect(),
        leases: record.disks.iter().filter_map(|disk| node.rootfs.lease(&disk.path)).collect(),
        message: record.message,
        cpus: record.cpus,
        mems: record.mems,
        limits: Arc::new(SharedLimits::new(ContainerLimits {
            memory_bytes: record.memory_limit,
            cpu_micros: record.cpu_limit,
        })),
        bundle: record.bundle,
        disks: record.disks,
        paused: false,
        stages: Stages::new(spec.id.clone(), node.stage_times.clone()),
    }
}

fn adopt_io(
    node: &DaemonState,
    spec: &PodSpec,
    container: &ContainerId,
    exec: Option<&ExecId>,
    stdio: &StdioPaths,
    has_exited: bool,
) -> Option<Io> {
    let subject = Subject { container: container.clone(), exec: exec.cloned() };
    match has_exited {
        true => Io::adopt_rest(&node.front, &subject, stdio),
        false => Some(Io::adopt(&node.front, &spec.id, &subject, stdio)),
    }
}

/// Sets a container to the state that its agent reports; `known`: the processes of the agent.
pub fn settle(
    node: &DaemonState,
    spec: &PodSpec,
    id: &ContainerId,
    container: &mut Container,
    known: &[wire::Process],
) {
    let known: Vec<_> = known.iter().filter(|process| process.container_id == id.as_str()).collect();
    container.paused = known.iter().any(|process| process.state == ProcessState::PAUSED.into());
    // Processes without a record that the front knows.
    for process in &known {
        let Ok(exec) = process.exec_id.parse::<ExecId>() else { continue };
        let Some(entry) = node.front.take(&front::key(EXEC, id, Some(&exec))) else { continue };
        if let Some(stdio) = entry.note::<StdioPaths>()
            && !container.execs.contains_key(&exec)
        {
            let io = adopt_io(node, spec, id, Some(&exec), &stdio, false);
            container.execs.insert(exec, Process::at(Phase::Created, process.pid, stdio, io));
        }
    }
    let named = |name: &str| known.iter().find(|process| process.exec_id == name).copied();
    settle_process(&mut container.init, named(""));
    container.execs.retain(|exec, process| {
        let found = named(exec.as_str());
        // Its note ends with it; a deletion alone writes no record.
        let is_noted = node.front.take(&front::key(EXEC, id, Some(exec))).is_some();
        let exists = found.is_some() || is_noted;
        match exists {
            true => settle_process(process, found),
            false => process.io.take().into_iter().for_each(Io::let_go),
        }
        exists
    });
}

/// Follows an exited process like a running one: its last output may still come.
fn settle_process(process: &mut Process, found: Option<&wire::Process>) {
    let phase = process.phase.borrow().clone();
    match (phase, found) {
        (Phase::Exited(_), _) => {}
        (Phase::Created, Some(found)) if found.state != ProcessState::CREATED.into() => {
            process.phase.send_replace(Phase::Running);
        }
        (_, Some(_)) => {}
        (_, None) => process.end(ended_unseen()),
    }
}

fn ended_unseen() -> Exit {
    Exit { code: KILLED, at_ns: now_ns(), reason: "it ended while the daemon was away".to_owned() }
}

/// Removes containers and execs that an earlier worker was creating when it died: containers without a record, with
/// their disks, and execs that were never reported.
pub(super) async fn undo_half_made(
    node: &DaemonState,
    live: &RunningVm,
    record: &PodRecord,
    known: &[wire::Process],
) {
    let pod = &record.spec.id;
    let mut unfinished: HashMap<ContainerId, Vec<String>> = HashMap::new();
    let mut saved: HashMap<ContainerId, ContainerId> = HashMap::new();
    for key in node.front.keys(&format!("{INTENT} ")) {
        let intent = node.front.peek::<Intent>(&key).filter(|intent| intent.pod == *pod);
        let container: Option<ContainerId> = key.split(' ').nth(1).and_then(|id| id.parse().ok());
        if let (Some(intent), Some(container)) = (intent, container) {
            saved.extend(intent.saved.map(|saved_id| (container.clone(), saved_id)));
            unfinished.insert(container, intent.disks);
        }
    }
    for process in known {
        let Ok(container) = process.container_id.parse::<ContainerId>() else { continue };
        if record.restored.as_ref().is_some_and(|restored| restored.holds(container.as_str())) {
            continue;
        }
        match process.exec_id.parse::<ExecId>() {
            Err(_) => drop(unfinished.entry(container).or_default()),
            Ok(exec) => {
                let recorded = record.containers.iter().find(|recorded| recorded.id == container);
                let recorded =
                    recorded.is_some_and(|recorded| recorded.execs.iter().any(|(id, _)| *id == exec));
                let noted = node.front.has(&front::key(EXEC, &container, Some(&exec)));
                if !recorded
                    && !noted
                    && let Err(error) = live.agent.delete_exec(&container, &exec).await
                {
                    tracing::warn!(%pod, %container, %exec, %error, "cannot remove an exec without a record");
                }
            }
        }
    }
    for (container, disks) in unfinished {
        // Removed only after everything is undone: this worker may die, too.
        let intent = front::key(INTENT, &container, None);
        if record.containers.iter().any(|recorded| recorded.id == container) {
            node.front.forget(&intent);
            continue;
        }
        // Nobody knows it by this id: it waits again to be adopted.
        if let Some(saved_id) = saved.get(&container)
            && give_back(live, &container, saved_id).await
        {
            node.front.forget(&intent);
            tracing::info!(%pod, %container, "a restored container waits again");
            continue;
        }
        // If the record of a container is lost, its disks are unknown.
        let disks = if disks.is_empty() { likely_disks(record, &container) } else { disks };
        match remove_half_made(live, &container, &disks).await {
            Ok(()) => {
                node.front.forget(&intent);
                tracing::info!(%pod, %container, "undid the unfinished work of an earlier worker");
            }
            Err(error) => {
                tracing::warn!(%pod, %container, error = chain(&error), "cannot undo the unfinished work of an earlier worker");
            }
        }
    }
}

/// Gives a saved container that was adopted its former id. Returns whether it has it now.
async fn give_back(live: &RunningVm, container: &ContainerId, saved_id: &ContainerId) -> bool {
    let request = wire::AdoptContainerRequest {
        container_id: saved_id.to_string(),
        of: container.to_string(),
        ..Default::default()
    };
    match live.agent.adopt_container(request).await {
        Ok(_) => true,
        // It was not adopted.
        Err(error) => matches!(error.code(), Code::NotFound | Code::AlreadyExists),
    }
}

/// Removes a container without a record from its guest, even if it runs: its record was lost with the disk, and
/// containerd is told that the container is gone.
async fn remove_half_made(
    live: &RunningVm,
    container: &ContainerId,
    disks: &[String],
) -> Result<(), PodError> {
    match start::delete(live, container, disks).await {
        Err(error) if error.code() == Code::FailedPrecondition => {}
        removed => return removed,
    }
    let kill = Signal { number: Signal::KILL, all: true, ..Signal::default() };
    match live.agent.signal_process(container, None, &kill).await {
        // The container has exited meanwhile.
        Err(error) if error.code() == Code::NotFound => {}
        killed => killed?,
    }
    let limit = live.agent.patience();
    let ended = tokio::time::timeout(limit, live.agent.wait_process(container, None)).await;
    ended.map_err(|_| live.agent.not_exited(container.clone(), limit))??;
    start::delete(live, container, disks).await
}

/// Returns the serial numbers that disks of a container may have, if nothing but the container is known. They include
/// the disks that the VM has had since its boot, unless a recorded container has them.
fn likely_disks(record: &PodRecord, container: &ContainerId) -> Vec<String> {
    let recorded: Vec<_> = record.containers.iter().flat_map(|recorded| &recorded.disks).collect();
    let at_boot = [FIRST_IMAGE, SPARE].map(str::to_owned).into_iter();
    let at_boot = at_boot.filter(|serial| recorded.iter().all(|disk| disk.serial != *serial));
    rootfs::serials(container).into_iter().chain(at_boot).collect()
}

/// Returns the phase of a process from its record.
fn phase_of(record: &ProcessRecord, alive: bool) -> Phase {
    match &record.exit {
        Some(exit) => Phase::Exited(exit.clone()),
        None if !alive => Phase::Exited(ended_unseen()),
        None if record.started => Phase::Running,
        None => Phase::Created,
    }
}
