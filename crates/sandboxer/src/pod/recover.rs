//! Taking up the pods that an earlier daemon left, all at once, before this one says ready.
//!
//! | record | VM | then |
//! |---|---|---|
//! | ready | alive, agent answers | the pod is ready again, its containers' output goes on |
//! | ready | alive; VMM or agent gives no answer, or a wrong one | the pod is unknown, and its containers are as recorded; this is tried again for as long as the VMM lives |
//! | ready | gone | the pod has stopped; containerd is told when it asks |
//! | starting | whatever is left of it is ended | forgotten: containerd heard of its failed start and forgot it, too |
//! | stopping | whatever is left of it is ended | the pod has stopped |
//! | created, stopped | none | as recorded |
//! | can't be understood | left alone | moved to quarantine and reported; the record before it is used, if it can be |
//!
//! That a VM is gone, or ended, is what the kernel says of its process. What nobody else can: a pod that were told
//! stopped while its VMM runs would be started anew, and both would write to the same volumes.
//!
//! A container that was half-made is undone, and so is an exec: whoever asked for it asks again, through the
//! front. Those that were made are found again with their streams, which the front has kept.
//!
//! When the front dies, containerd declares all containers dead and removes their bundles. Such a container is
//! ended here: in its place a new one is started, and both would run.

use std::{collections::HashMap, io, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::future;
use sandboxer_base::{Code, chain, clock::now_ns};
use sandboxer_guest::{GuestError, Signal};
use sandboxer_host::{rootfs, volume::Needed};
use sandboxer_process::Written;
use sandboxer_protocol::{
    agent::{self as wire, ProcessState},
    id::{ContainerId, ExecId},
};
use sandboxer_vmm::{Held, HeldProcesses, Vm, VmExit, VmmError};
use tokio::sync::watch;

use super::{
    DaemonState, PodHandle,
    driver::{EXEC, Found},
    journal::{ContainerRecord, PodRecord, ProcessRecord},
    quarantine::Quarantine,
    spec::PodSpec,
    stages::Stages,
    state::{PodState, PodStatus},
};
use crate::{
    error::PodError,
    front,
    pod::{
        self,
        container::{
            Container, Exit, KILLED, Phase, Process, StdioPaths,
            io::{Io, Subject},
            start::{INTENT, Intent, RunningVm},
        },
    },
    share::Shares,
};

/// What recovery came to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Recovered {
    /// Pods that are ready again.
    pub alive: u32,
    /// Pods whose VMMs run and that have not answered yet.
    pub unknown: u32,
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
    pub fn read(node: &DaemonState) -> io::Result<Self> {
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

    /// Processes of their VMs.
    pub fn vmms(&self) -> impl Iterator<Item = u32> {
        self.pods.iter().filter_map(|record| Some(record.vm.as_ref()?.pid))
    }
}

/// Takes up every recorded pod. Returns when each is in the registry.
pub async fn recover(node: &Arc<DaemonState>, records: Records) -> Recovered {
    let mut recovered = Recovered { quarantined: records.quarantined, ..Recovered::default() };
    for taken_up in future::join_all(records.pods.into_iter().map(|record| take_up(node, record))).await {
        match taken_up {
            TakenUp::Alive => recovered.alive += 1,
            TakenUp::Unknown => recovered.unknown += 1,
            TakenUp::Stopped => recovered.stopped += 1,
            TakenUp::Forgotten => {}
        }
    }
    recovered
}

enum TakenUp {
    Alive,
    Unknown,
    Stopped,
    Forgotten,
}

/// What is left of a pod's VM.
enum Left {
    /// No process. Why, if that is known.
    Nothing(Option<PodError>),
    /// It answers.
    Answering(Box<Reached>),
    /// Its VMM runs, and this is wrong with it.
    Running(Arc<Unreached>),
}

/// Takes up one pod.
async fn take_up(node: &Arc<DaemonState>, record: PodRecord) -> TakenUp {
    let id = record.spec.id.clone();
    let shares = shares_of(node, &record.spec);
    let left = look(node, &record, &shares).await;
    if let (Left::Nothing(_), PodState::Starting) = (&left, record.status.state) {
        clear_shares(&shares, &record).await;
        match forget(node, &record.spec).await {
            Ok(()) => return TakenUp::Forgotten,
            Err(error) => {
                tracing::error!(pod = %id, error = chain(&*error), "a pod that never was ready cannot be forgotten");
            }
        }
    }
    let mut status = record.status.clone();
    let (outcome, reached, unreached) = match left {
        Left::Answering(reached) => {
            status.recovered = true;
            (TakenUp::Alive, Some(*reached), None)
        }
        Left::Running(unreached) => {
            // Of one that was not ready nothing is left to be had but its VMM's end.
            let was_ready = status.state == PodState::Ready;
            status.state = if was_ready { PodState::Unknown } else { PodState::Stopping };
            status.reason = unreached.first_error.clone();
            (TakenUp::Unknown, None, Some(unreached))
        }
        Left::Nothing(why) => {
            clear_shares(&shares, &record).await;
            if status.state != PodState::Created {
                stopped(&mut status, why);
            }
            (TakenUp::Stopped, None, None)
        }
    };
    let alive = !matches!(outcome, TakenUp::Stopped);
    let forgotten_start = !matches!(outcome, TakenUp::Alive) && record.status.state == PodState::Starting;
    let PodRecord { spec, link_key, containers: recorded, .. } = record;
    let mut forgotten = Vec::new();
    for container in recorded.iter().filter(|_| alive) {
        if let Ok(false) = tokio::fs::try_exists(&container.bundle).await {
            forgotten.push(container.id.clone());
        }
    }
    let containers = recorded
        .into_iter()
        .map(|container| (container.id.clone(), take_up_container(node, container, alive, &spec)))
        .collect::<HashMap<_, _>>();
    let ids: Vec<ContainerId> = containers.keys().cloned().collect();
    let shared = node.clone();
    let inserted = node.registry.insert(&id, || {
        let found = Found { reached, unreached, containers, shares: Some(shares) };
        pod::spawn(shared, spec, link_key, status, found)
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
    if forgotten_start {
        // containerd has forgotten it; so must this daemon, once it can.
        tokio::spawn(async move {
            let _ = handle.stopped().await;
            if let Err(error) = handle.remove().await {
                tracing::error!(pod = %handle.id(), error = chain(&error), "a pod that never was ready cannot be removed");
            }
        });
    }
    outcome
}

/// Notes that a pod has stopped while no daemon was there.
fn stopped(status: &mut PodStatus, why: Option<PodError>) {
    let was_ready = status.state == PodState::Ready;
    if let Some(error) = why {
        status.reason = format!("lost while the daemon was away: {}", chain(&error));
    } else if was_ready && status.reason.is_empty() {
        status.reason = "its VMM ended while the daemon was away".to_owned();
    }
    let was_asked = status.reason.is_empty();
    status.state = PodState::Stopped;
    status.exit_status = if was_asked { 0 } else { KILLED };
    status.vmm_pid = 0;
    if status.exited_at_ns == 0 {
        status.exited_at_ns = now_ns();
    }
}

/// Looks for what is left of a pod's VM. One of a pod that was not ready is ended.
async fn look(node: &Arc<DaemonState>, record: &PodRecord, shares: &Shares) -> Left {
    let running = |vmm: Arc<dyn Held>, error: &PodError| {
        let first_error = chain(error);
        tracing::error!(pod = %record.spec.id, error = first_error, "the pod's VMM runs and cannot be reached; this is tried again");
        Left::Running(Arc::new(Unreached {
            record: record.clone(),
            shares: shares.clone(),
            vmm,
            first_error,
        }))
    };
    let vmm = match hold(node, record) {
        Ok(Some(vmm)) => vmm,
        Ok(None) => return Left::Nothing(None),
        Err(error) => {
            let later = Later { node: node.clone(), record: record.clone() };
            return running(Arc::new(later), &error.into());
        }
    };
    if record.status.state != PodState::Ready || record.vm.is_none() {
        return match vmm.end().await {
            Ok(()) => Left::Nothing(None),
            Err(error) => running(vmm, &error.into()),
        };
    }
    let reached = tokio::select! {
        reached = tokio::time::timeout(FIRST_ATTEMPT, reach(node, record, shares)) => reached,
        _ = vmm.ended() => return Left::Nothing(None),
    };
    let late = |_| {
        let (subject, reason) =
            (format!("pod {}", record.spec.id), format!("no answer within {FIRST_ATTEMPT:?}"));
        Err(PodError::Failed { subject, reason })
    };
    let reached = reached.unwrap_or_else(late);
    match reached {
        Ok(reached) => Left::Answering(Box::new(reached)),
        Err(error) if is_broken(&error) => match vmm.end().await {
            Ok(()) => Left::Nothing(Some(error)),
            Err(left) => running(vmm, &left.into()),
        },
        Err(error) => running(vmm, &error),
    }
}

/// Returns the VMM of a pod: that on record, or, since a daemon may have died between starting and noting one, that which was
/// started for the pod's directory.
fn hold(node: &DaemonState, record: &PodRecord) -> Result<Option<Arc<dyn Held>>, VmmError> {
    if let Some(vm) = &record.vm {
        return node.vmm.hold(vm);
    }
    let strays = HeldProcesses::strays(&record.spec.id, &node.run_dir(&record.spec.id))?;
    Ok(strays.map(|strays| {
        tracing::warn!(pod = %record.spec.id, pids = ?strays.pids(), "killing a VMM without a record");
        Arc::new(strays) as Arc<dyn Held>
    }))
}

/// The VMM of a pod that could not be looked for: it may run.
#[derive(Debug)]
struct Later {
    node: Arc<DaemonState>,
    record: PodRecord,
}

impl Later {
    /// Holds it as soon as that works. None: there is none.
    async fn hold(&self) -> Option<Arc<dyn Held>> {
        loop {
            match hold(&self.node, &self.record) {
                Ok(held) => return held,
                Err(error) => {
                    tracing::warn!(pod = %self.record.spec.id, error = chain(&error), "cannot look for the pod's VMM");
                    tokio::time::sleep(FIRST_PAUSE).await;
                }
            }
        }
    }
}

#[async_trait]
impl Held for Later {
    async fn ended(&self) -> VmExit {
        match self.hold().await {
            Some(held) => held.ended().await,
            None => VmExit { how: "is gone".to_owned(), last_lines: Vec::new() },
        }
    }

    async fn end(&self) -> Result<(), VmmError> {
        match hold(&self.node, &self.record)? {
            Some(held) => held.end().await,
            None => Ok(()),
        }
    }

    fn written(&self) -> Option<Written> {
        None
    }
}

/// Removes what is left on disk of a pod that nobody was told of.
async fn forget(node: &DaemonState, spec: &PodSpec) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let id = &spec.id;
    pod::stop::clear(node, spec).await?;
    node.journal.pod(id).remove().await?;
    tracing::info!(pod = %id, "a start that an earlier daemon did not finish is undone");
    Ok(())
}

/// Kills a container that containerd no longer knows, and forgets it.
async fn end_forgotten(pod: PodHandle, container: ContainerId) {
    let ended = async {
        pod.resolved().await;
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

/// A pod whose guest answers.
#[derive(Debug)]
pub struct Reached {
    /// Its VM and agent.
    pub live: RunningVm,
    /// Processes that the agent knows.
    pub known: Vec<wire::Process>,
    /// Its volumes as recorded.
    pub volumes: Vec<Needed>,
    /// Volumes that the agent knows.
    pub made: Vec<String>,
}

/// How long other pods wait for one that does not answer, before the daemon says ready.
const FIRST_ATTEMPT: Duration = Duration::from_secs(20);
/// The pause before the first further attempt; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// How long a pod is waited for before whoever wants it is told to have it stopped.
const OVERDUE_AFTER: Duration = Duration::from_secs(120);

/// A pod that an earlier daemon left, whose VMM runs and which has not answered this daemon.
#[derive(Debug)]
pub struct Unreached {
    /// What is on record of it.
    pub record: PodRecord,
    /// Its VMM.
    pub vmm: Arc<dyn Held>,
    shares: Shares,
    first_error: String,
}

/// What became of an unknown pod.
#[derive(Debug)]
pub enum Resolved {
    /// It answers.
    Reached(Box<Reached>),
    /// Its VMM has ended.
    Ended(String),
}

impl Unreached {
    /// Tries again until the pod answers or its VMM has ended. `told` learns how it goes.
    pub async fn resolve(&self, node: &Arc<DaemonState>, told: &watch::Sender<PodStatus>) -> Resolved {
        let overdue = async {
            tokio::time::sleep(OVERDUE_AFTER).await;
            tracing::error!(
                pod = %self.record.spec.id,
                "the pod has not answered for {OVERDUE_AFTER:?}; containerd is told that it is not ready. Stop the pod: its VMM is killed then"
            );
            told.send_modify(|status| status.overdue = true);
            future::pending().await
        };
        let ended = tokio::select! {
            resolved = self.reached(node, told) => match resolved {
                Ok(reached) => return Resolved::Reached(reached),
                Err(reason) => reason,
            },
            exit = self.vmm.ended() => format!("its VMM {} before it had answered: {}", exit.how, told.borrow().reason),
            () = overdue => String::new(),
        };
        self.end_shares().await;
        Resolved::Ended(ended)
    }

    /// Tries until the pod answers. An error: its guest has broken the session, and its VMM has been ended for it.
    async fn reached(
        &self,
        node: &Arc<DaemonState>,
        told: &watch::Sender<PodStatus>,
    ) -> Result<Box<Reached>, String> {
        let mut pause = FIRST_PAUSE;
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
            let error = match reach(node, &self.record, &self.shares).await {
                Ok(reached) => return Ok(Box::new(reached)),
                Err(error) if is_broken(&error) => match self.vmm.end().await {
                    Ok(()) => return Err(chain(&error)),
                    Err(left) => left.into(),
                },
                Err(error) => error,
            };
            let reason = chain(&error);
            if told.borrow().reason != reason {
                tracing::warn!(pod = %self.record.spec.id, error = reason, "the pod cannot be reached yet");
                told.send_modify(|status| status.reason = reason);
            }
        }
    }

    /// Ends what served the pod's shares. Its VMM has ended before.
    pub async fn end_shares(&self) {
        clear_shares(&self.shares, &self.record).await;
    }
}

/// Returns whether the guest did what no guest does: it is not asked again.
fn is_broken(error: &PodError) -> bool {
    matches!(error, PodError::Guest(GuestError::Violated { .. }))
}

/// Reaches the guest of a pod that was ready, and has it undo what nobody waits for any more.
async fn reach(node: &Arc<DaemonState>, record: &PodRecord, shares: &Shares) -> Result<Reached, PodError> {
    let id = &record.spec.id;
    let gone =
        || PodError::Failed { subject: format!("VMM of pod {id}"), reason: "it is about to end".to_owned() };
    let recorded = record.vm.as_ref().ok_or_else(gone)?;
    let vm = node.vmm.adopt(recorded).await?.ok_or_else(gone)?;
    let live = greet(node, record, &vm).await?;
    let asked = async {
        let known = live.agent.processes().await?;
        let made = live.agent.volumes().await?;
        if let Err(error) = shares.take_up(record.shares.clone(), Some(live.guest()), recorded.pid).await {
            tracing::error!(pod = %id, error = chain(&error), "the pod's shares cannot be taken up");
        }
        undo_half_made(node, &live, record, &known).await;
        end_denied(&live, record, &known).await?;
        Ok((known, made))
    };
    match asked.await {
        Ok((known, made)) => Ok(Reached { live, known, made, volumes: record.volumes.clone() }),
        Err(error) => Err(live.agent.violation().map_or(error, PodError::from)),
    }
}

/// Ends the containers that ran by the record and that the agent doesn't know: what is told as ended must not run.
async fn end_denied(live: &RunningVm, record: &PodRecord, known: &[wire::Process]) -> Result<(), PodError> {
    for container in record.containers.iter().filter(|container| container.init.exit.is_none()) {
        if !known.iter().any(|process| process.container_id == container.id.as_str()) {
            tracing::warn!(pod = %record.spec.id, container = %container.id, "the agent doesn't know a container that is on record; it is ended");
            live.agent.delete_container(&container.id).await?;
        }
    }
    Ok(())
}

/// Returns the shares of a pod.
fn shares_of(node: &DaemonState, spec: &PodSpec) -> Shares {
    let cgroup = node.cgroups.of(&spec.cgroup_parent, &spec.id);
    let helpers = node.volumes.helpers.clone();
    Shares::new(spec.id.clone(), node.run_dir(&spec.id), spec.memory_mib, cgroup, helpers)
}

/// Ends what served the shares of a pod that lives no more.
async fn clear_shares(shares: &Shares, record: &PodRecord) {
    shares.end().await;
    let vmm = record.vm.as_ref().map_or(0, |vm| vm.pid);
    if let Err(error) = shares.take_up(record.shares.clone(), None, vmm).await {
        tracing::error!(pod = %record.spec.id, error = chain(&error), "what served the pod's shares cannot be ended");
    }
}

async fn greet(node: &DaemonState, record: &PodRecord, vm: &Arc<dyn Vm>) -> Result<RunningVm, PodError> {
    let limit = node.config.vm.agent_timeout;
    let id = &record.spec.id;
    let greeting = sandboxer_guest::connect(id, vm.as_ref(), &record.link_key, node.config.vm.agent_timeout);
    match tokio::time::timeout(limit, greeting).await {
        Ok(greeted) => {
            let (agent, _) = greeted?;
            Ok(RunningVm { vm: vm.clone(), agent })
        }
        Err(_) => {
            let console = vm.last_lines().await.join(" | ");
            Err(PodError::NotReady { pod: id.clone(), limit, console })
        }
    }
}

/// Returns a container as recorded; of a pod that is not `alive`, ended.
fn take_up_container(node: &DaemonState, record: ContainerRecord, alive: bool, spec: &PodSpec) -> Container {
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

/// Brings a container to where its agent says that it stands; `known`: the processes that the agent has.
pub fn settle(
    node: &DaemonState,
    spec: &PodSpec,
    id: &ContainerId,
    container: &mut Container,
    known: &[wire::Process],
) {
    let known: Vec<_> = known.iter().filter(|process| process.container_id == id.as_str()).collect();
    container.paused = known.iter().any(|process| process.state == ProcessState::PAUSED.into());
    // Those that no record has, and of which the front has heard.
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

/// An ended process is followed like a running one: its last output may still be to come.
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

/// Removes what an earlier worker was making when it died: containers that are not on record, with their disks,
/// and execs that nobody was told of.
async fn undo_half_made(node: &DaemonState, live: &RunningVm, record: &PodRecord, known: &[wire::Process]) {
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
            undone = undone.and(live.vm.detach_disk(&serial).await.map_err(PodError::from));
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

/// Returns where a process stands by its record.
fn phase_of(record: &ProcessRecord, alive: bool) -> Phase {
    match &record.exit {
        Some(exit) => Phase::Exited(exit.clone()),
        None if !alive => Phase::Exited(ended_unseen()),
        None if record.started => Phase::Running,
        None => Phase::Created,
    }
}
