//! Adopts the containers of an adopted pod.

use std::{collections::HashMap, sync::Arc};

use sandboxer_base::{chain, clock::now_ns};
use sandboxer_host::rootfs;
use sandboxer_protocol::{
    agent::{self as wire, ProcessState},
    id::{ContainerId, ExecId},
};

use crate::{
    error::PodError,
    front,
    pod::{
        DaemonState,
        container::{
            Container, Exit, KILLED, Phase, Process, StdioPaths,
            io::{Io, Subject},
            start::{INTENT, Intent, RunningVm},
        },
        driver::EXEC,
        journal::{ContainerRecord, PodRecord, ProcessRecord},
        limits::{ContainerLimits, SharedLimits},
        spec::PodSpec,
        stages::Stages,
    },
};

/// Returns a container as recorded; if its pod is not `alive`, it has exited.
pub(super) fn take_up_container(
    node: &DaemonState,
    record: ContainerRecord,
    alive: bool,
    spec: &PodSpec,
) -> Container {
    let process = |record: ProcessRecord, exec: Option<&ExecId>, container: &ContainerId| {
        let phase = phase_of(&record, alive);
        let io = phase.exit().is_none().then(|| take_up_io(node, spec, container, exec, &record.stdio));
        Process::at(phase, record.pid, record.stdio, io)
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

fn take_up_io(
    node: &DaemonState,
    spec: &PodSpec,
    container: &ContainerId,
    exec: Option<&ExecId>,
    stdio: &StdioPaths,
) -> Io {
    let subject = Subject { container: container.clone(), exec: exec.cloned() };
    Io::take_up(&node.front, &spec.id, &subject, stdio)
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
    // Those that no record has, but that the front knows.
    for process in &known {
        let Ok(exec) = process.exec_id.parse::<ExecId>() else { continue };
        let Some(entry) = node.front.take(&front::key(EXEC, id, Some(&exec))) else { continue };
        if let Some(stdio) = entry.note::<StdioPaths>()
            && !container.execs.contains_key(&exec)
        {
            let io = take_up_io(node, spec, id, Some(&exec), &stdio);
            container.execs.insert(exec, Process::at(Phase::Created, process.pid, stdio, Some(io)));
        }
    }
    let named = |name: &str| known.iter().find(|process| process.exec_id == name).copied();
    settle_process(&mut container.init, named(""));
    for (exec, process) in &mut container.execs {
        settle_process(process, named(exec.as_str()));
    }
}

/// Follows an ended process like a running one: its last output may still come.
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

/// Removes what an earlier worker was creating when it died: containers without a record, with their disks,
/// and execs that were never reported.
pub(super) async fn undo_half_made(
    node: &DaemonState,
    live: &RunningVm,
    record: &PodRecord,
    known: &[wire::Process],
) {
    let pod = &record.spec.id;
    let mut unfinished: HashMap<ContainerId, Vec<String>> = HashMap::new();
    for key in node.front.keys(&format!("{INTENT} ")) {
        let intent = node.front.peek::<Intent>(&key).filter(|intent| intent.pod == *pod);
        let container = key.split(' ').nth(1).and_then(|id| id.parse().ok());
        if let (Some(intent), Some(container)) = (intent, container) {
            unfinished.insert(container, intent.disks);
        }
    }
    for process in known {
        let Ok(container) = process.container_id.parse::<ContainerId>() else { continue };
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
        let mut undone = live.agent.delete_container(&container).await.map_err(PodError::from);
        // If the record of a container is lost, its disks are unknown.
        let disks = if disks.is_empty() { rootfs::serials(&container) } else { disks };
        for serial in disks {
            undone = undone.and(live.vm.detach_disk(&serial).await.map_err(PodError::from));
        }
        match undone {
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

/// Returns the phase of a process from its record.
fn phase_of(record: &ProcessRecord, alive: bool) -> Phase {
    match &record.exit {
        Some(exit) => Phase::Exited(exit.clone()),
        None if !alive => Phase::Exited(ended_unseen()),
        None if record.started => Phase::Running,
        None => Phase::Created,
    }
}
