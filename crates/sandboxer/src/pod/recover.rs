//! Taking up the pods that an earlier daemon left, all at once, before this one says ready.
//!
//! | record | machine | then |
//! |---|---|---|
//! | ready | alive, agent answers | the pod is ready again, its containers' output goes on |
//! | ready | gone, or its agent is silent | the pod has stopped; containerd is told when it asks |
//! | starting | whatever is left of it is ended | forgotten: containerd heard of its failed start and forgot it, too |
//! | stopping | whatever is left of it is ended | the pod has stopped |
//! | created, stopped | none | as recorded |
//! | can't be understood | left alone | moved to quarantine and reported; the record before it is used, if it can be |
//!
//! A container that was half-made is undone, and so is an exec: whoever asked for it asks again, through the
//! front. Those that were made are found again with their streams, which the front has kept.
//!
//! When the front dies, containerd declares all containers dead and removes their bundles. Such a container is
//! ended here: in its place a new one is started, and both would run.

use std::{collections::HashMap, io, sync::Arc};

use futures::future;
use sandboxer_protocol::{
    agent::{self as wire, ProcessState},
    id::{ContainerId, ExecId},
};

use super::{
    Node, PodHandle, Signal,
    driver::{EXEC, Found},
    host_ports,
    journal::{ContainerRecord, PodRecord, ProcessRecord},
    quarantine::Quarantine,
    spec::PodSpec,
    stages::Stages,
    state::PodState,
};
use crate::{
    clock::now_ns,
    container::{
        Container, Exit, KILLED, Phase, Process,
        io::{Io, Subject},
        start::{INTENT, Intent, Live},
    },
    error::{Code, PodError, chain},
    front, guest,
    host::{rootfs, share::Shares},
    pod,
    vmm::{self, Machine},
};

/// What recovery came to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Recovered {
    /// Pods that are ready again.
    pub alive: u32,
    /// Pods that had stopped, or have now.
    pub stopped: u32,
    /// Records that could not be understood.
    pub quarantined: u32,
}

/// What earlier daemons have recorded.
#[derive(Debug, Default)]
pub struct Records {
    pods: Vec<PodRecord>,
    quarantined: u32,
}

impl Records {
    /// Reads all there are. One that can't be understood is put aside, and its pod taken up by the one before it. What
    /// was made of the pod in between is then mended as after a worker's death: by what its agent and its VMM say.
    pub fn read(node: &Node) -> io::Result<Self> {
        let mut records = Self::default();
        for record in node.journal.records()? {
            match record {
                Ok(record) => records.pods.push(record),
                Err(error) => {
                    let before = node.journal.instead_of(&error);
                    Quarantine::of(&node.config).put_aside(&error, before.is_some())?;
                    match before {
                        Some(record) => {
                            node.journal.go_back(error.path())?;
                            records.pods.push(record);
                        }
                        None => records.quarantined += 1,
                    }
                }
            }
        }
        Ok(records)
    }

    /// Processes of their machines.
    pub fn vmms(&self) -> impl Iterator<Item = u32> {
        self.pods.iter().filter_map(|record| Some(record.machine.as_ref()?.pid))
    }
}

/// Takes up every recorded pod. Answers when each is in the registry.
pub async fn recover(node: &Arc<Node>, records: Records) -> Recovered {
    let mut recovered = Recovered { quarantined: records.quarantined, ..Recovered::default() };
    for taken_up in future::join_all(records.pods.into_iter().map(|record| take_up(node, record))).await {
        match taken_up {
            TakenUp::Alive => recovered.alive += 1,
            TakenUp::Stopped => recovered.stopped += 1,
            TakenUp::Forgotten => {}
        }
    }
    recovered
}

enum TakenUp {
    Alive,
    Stopped,
    Forgotten,
}

/// Takes up one pod.
async fn take_up(node: &Arc<Node>, mut record: PodRecord) -> TakenUp {
    let id = record.spec.id.clone();
    let live = match reach(node, &record).await {
        Ok(None) if record.status.state == PodState::Starting => match forget(node, &record.spec).await {
            Ok(()) => return TakenUp::Forgotten,
            Err(error) => {
                tracing::error!(pod = %id, error = chain(&*error), "a pod that never was ready can't be forgotten");
                None
            }
        },
        Ok(live) => live,
        Err(error) => {
            tracing::error!(pod = %id, error = chain(&error), "the pod can't be taken up");
            record.status.reason = format!("lost while the daemon was away: {}", chain(&error));
            None
        }
    };
    let shares = take_up_shares(node, &record, live.as_ref()).await;
    let known = match &live {
        Some(live) => live.agent.processes().await.unwrap_or_else(|error| {
            tracing::warn!(pod = %id, error = chain(&error), "the agent doesn't tell its processes");
            Vec::new()
        }),
        None => Vec::new(),
    };
    let volumes = match &live {
        Some(live) => match live.agent.volumes().await {
            Ok(made) => Some((std::mem::take(&mut record.volumes), made)),
            Err(error) => {
                tracing::warn!(pod = %id, error = chain(&error), "the agent doesn't tell its volumes");
                None
            }
        },
        None => None,
    };
    let alive = live.is_some();
    if let Some(live) = &live {
        undo_half_made(node, live, &record, &known).await;
    }
    record.status.recovered = alive;
    if !alive && record.status.state != PodState::Created {
        if record.status.state == PodState::Ready && record.status.reason.is_empty() {
            record.status.reason = "its VMM ended while the daemon was away".to_owned();
        }
        let was_asked = record.status.reason.is_empty();
        record.status.state = PodState::Stopped;
        record.status.exit_status = if was_asked { 0 } else { KILLED };
        record.status.vmm_pid = 0;
        if record.status.exited_at_ns == 0 {
            record.status.exited_at_ns = now_ns();
        }
    }
    let mut forgotten = Vec::new();
    for container in record.containers.iter().filter(|_| alive) {
        if let Ok(false) = tokio::fs::try_exists(&container.bundle).await {
            forgotten.push(container.id.clone());
        }
    }
    let containers = record
        .containers
        .into_iter()
        .map(|container| {
            (container.id.clone(), take_up_container(node, container, &known, alive, &record.spec))
        })
        .collect::<HashMap<_, _>>();
    let (spec, key, status) = (record.spec, record.link_key, record.status);
    let host_ports = match &live {
        Some(_) => host_ports::listen_again(&node.front, &spec),
        None => Vec::new(),
    };
    let ids: Vec<ContainerId> = containers.keys().cloned().collect();
    let shared = node.clone();
    let inserted = node.registry.insert(&id, || {
        pod::spawn(
            shared,
            spec,
            key,
            status,
            Found { live, containers, volumes, shares: Some(shares), host_ports },
        )
    });
    let handle = match inserted {
        Ok(handle) => handle,
        Err(error) => {
            tracing::error!(pod = %id, %error, "two records name the same pod");
            return TakenUp::Stopped;
        }
    };
    for container in ids {
        if let Err(error) = node.registry.insert_container(&container, &id) {
            tracing::error!(pod = %id, %error, "two pods' records name the same container");
        }
    }
    for container in forgotten {
        // Not waited for: ready pods must not wait for one container's end.
        tokio::spawn(end_forgotten(handle.clone(), container));
    }
    if alive { TakenUp::Alive } else { TakenUp::Stopped }
}

/// Removes what is left on disk of a pod that nobody was told of.
async fn forget(node: &Node, spec: &PodSpec) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let id = &spec.id;
    pod::stop::clear(node, spec).await?;
    node.journal.pod(id).remove().await?;
    tracing::info!(pod = %id, "a start that an earlier daemon did not finish is undone");
    Ok(())
}

/// Kills a container that containerd no longer knows, and forgets it.
async fn end_forgotten(pod: PodHandle, container: ContainerId) {
    let ended = async {
        match pod.signal(container.clone(), None, Signal::KILL, true).await {
            // It ended by itself meanwhile.
            Err(error) if error.code() == Code::NotFound => {}
            signalled => signalled?,
        }
        let mut init = pod.process(container.clone(), None).await?;
        // An error would say that the container is gone, which is as good.
        let _ = init.phase.wait_for(|phase| phase.exit().is_some()).await;
        pod.delete(container.clone(), None).await
    };
    match ended.await {
        Ok(_) => tracing::info!(pod = %pod.id(), %container, "ended: containerd has forgotten it"),
        Err(error) => {
            tracing::warn!(pod = %pod.id(), %container, error = chain(&error), "containerd has forgotten it, but it may still run");
        }
    }
}

/// The machine and agent of a pod that was ready; whatever else is left of a pod is ended.
async fn reach(node: &Node, record: &PodRecord) -> Result<Option<Live>, PodError> {
    let id = &record.spec.id;
    let run_dir = node.run_dir(id);
    let Some(machine) = &record.machine else {
        // Killed between spawn and record, a daemon leaves a VMM that only its directory names.
        vmm::strays::end(id, &run_dir)?;
        return Ok(None);
    };
    let Some(machine) = node.vmm.adopt(machine).await? else {
        return Ok(None);
    };
    if record.status.state != PodState::Ready {
        machine.kill().await?;
        return Ok(None);
    }
    match greet(node, record, &machine).await {
        Ok(live) => Ok(Some(live)),
        Err(error) => {
            // Nobody can use it any more, and containerd is told that it has stopped.
            machine.kill().await?;
            Err(error)
        }
    }
}

/// The shares of a pod, served again if it lives; else nothing is left of what served them.
async fn take_up_shares(node: &Node, record: &PodRecord, live: Option<&Live>) -> Shares {
    let id = &record.spec.id;
    let cgroup = node.cgroups.of(&record.spec.cgroup_parent, id);
    let shares = Shares::new(id.clone(), node.run_dir(id), record.spec.memory_mib, cgroup);
    let vmm = record.machine.as_ref().map_or(0, |machine| machine.pid);
    let taken_up = shares.take_up(record.shares.clone(), live.map(|live| &live.agent), vmm).await;
    if let Err(error) = taken_up {
        tracing::error!(pod = %id, error = chain(&error), "the pod's shares can't be taken up");
    }
    shares
}

async fn greet(node: &Node, record: &PodRecord, machine: &Arc<dyn Machine>) -> Result<Live, PodError> {
    let limit = node.config.vm.agent_timeout;
    let id = &record.spec.id;
    let greeting = guest::connect(id, machine.as_ref(), &record.link_key, &node.config.vm);
    match tokio::time::timeout(limit, greeting).await {
        Ok(greeted) => greeted.map(|(agent, _)| Live { machine: machine.clone(), agent }),
        Err(_) => {
            let console = machine.last_lines().await.join(" | ");
            Err(PodError::NotReady { pod: id.clone(), limit, console })
        }
    }
}

fn take_up_container(
    node: &Node,
    record: ContainerRecord,
    known: &[wire::Process],
    alive: bool,
    spec: &pod::spec::PodSpec,
) -> Container {
    let process = |record: ProcessRecord, exec: Option<&ExecId>, container: &ContainerId| {
        let name = exec.map(ToString::to_string).unwrap_or_default();
        let found = known
            .iter()
            .find(|process| process.container_id == container.as_str() && process.exec_id == name);
        let phase = phase_of(&record, found, alive);
        let running = matches!(phase, Phase::Created | Phase::Running);
        let io = running.then(|| {
            let subject = Subject { container: container.clone(), exec: exec.cloned() };
            Io::take_up(&node.front, &spec.id, &subject, &record.stdio)
        });
        Process::at(phase, record.pid, record.stdio, io)
    };
    let execs = execs(node, &record, known);
    Container {
        init: process(record.init, None, &record.id),
        execs: execs
            .into_iter()
            .map(|(exec, record_of)| (exec.clone(), process(record_of, Some(&exec), &record.id)))
            .collect(),
        leases: record.disks.iter().filter_map(|disk| node.rootfs.lease(&disk.path)).collect(),
        message: record.message,
        bundle: record.bundle,
        disks: record.disks,
        paused: known.iter().any(|process| {
            process.container_id == record.id.as_str() && process.state == ProcessState::PAUSED.into()
        }),
        stages: Stages::new(spec.id.clone(), node.stage_times.clone()),
    }
}

/// Execs of a container: those on record, and those that the front has heard of, if the agent has them.
fn execs(node: &Node, container: &ContainerRecord, known: &[wire::Process]) -> Vec<(ExecId, ProcessRecord)> {
    let mut execs: HashMap<_, _> = container.execs.iter().cloned().collect();
    for process in known.iter().filter(|process| process.container_id == container.id.as_str()) {
        let Ok(exec) = process.exec_id.parse::<ExecId>() else { continue };
        if let Some(entry) = node.front.take(&front::key(EXEC, &container.id, Some(&exec)))
            && let Some(stdio) = entry.note()
        {
            execs.entry(exec).or_insert(ProcessRecord {
                pid: process.pid,
                started: false,
                exit: None,
                stdio,
            });
        }
    }
    execs.into_iter().collect()
}

/// Removes what an earlier worker was making when it died: containers that are not on record, with their disks,
/// and execs that nobody was told of.
async fn undo_half_made(node: &Node, live: &Live, record: &PodRecord, known: &[wire::Process]) {
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
                    tracing::warn!(%pod, %container, %exec, %error, "an exec that is on no record stays");
                }
            }
        }
    }
    for (container, disks) in unfinished {
        // Forgotten when nothing is left to undo and not before: this worker may die, too.
        let intent = front::key(INTENT, &container, None);
        if record.containers.iter().any(|recorded| recorded.id == container) {
            node.front.forget(&intent);
            continue;
        }
        let mut undone = live.agent.delete_container(&container).await.map_err(PodError::from);
        // Of a container that was on a record which is lost, nothing says which disks it has.
        let disks = if disks.is_empty() { rootfs::serials(&container) } else { disks };
        for serial in disks {
            undone = undone.and(live.machine.detach_disk(&serial).await.map_err(PodError::from));
        }
        match undone {
            Ok(()) => {
                node.front.forget(&intent);
                tracing::info!(%pod, %container, "what an earlier worker was making is undone");
            }
            Err(error) => {
                tracing::warn!(%pod, %container, error = chain(&error), "what an earlier worker was making stays");
            }
        }
    }
}

/// Where a process stands: as recorded if it had ended, else as the agent says.
fn phase_of(record: &ProcessRecord, found: Option<&wire::Process>, alive: bool) -> Phase {
    if let Some(exit) = &record.exit {
        return Phase::Exited(exit.clone());
    }
    match found.filter(|_| alive) {
        // An ended process is followed like a running one: its last output may still be to come.
        Some(_) if record.started => Phase::Running,
        Some(process) if process.state == ProcessState::CREATED.into() => Phase::Created,
        Some(_) => Phase::Running,
        None => Phase::Exited(Exit {
            code: KILLED,
            at_ns: now_ns(),
            reason: "it ended while the daemon was away".to_owned(),
        }),
    }
}
