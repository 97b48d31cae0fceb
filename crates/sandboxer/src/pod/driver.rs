//! The task that owns a pod.
//!
//! It handles requests and results of work one at a time, and never blocks: slow work runs in other tasks, whose
//! results come back as [`Done`]. So status and stop are handled while a start is in progress, and no lock is needed.

mod placement;
mod processes;
mod requests;
mod results;

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    future::Future,
    net::TcpListener,
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use sandboxer_base::chain;
use sandboxer_front::control::NEEDS;
use sandboxer_process::cgroup::Bounds;
use sandboxer_protocol::{
    SPOKEN,
    id::{ContainerId, ExecId},
    link::LinkKey,
};
use sandboxer_vmm::{Shape, VmExit, VmRecord, VmmError};
use serde::Serialize;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use self::placement::HostCpus;
use super::{
    ContainerView, DaemonState, Moved, PodHandle, PodView, ProcessView, QUEUED_REQUESTS, Reply, Request,
    journal::{JournalError, PodJournal, PodRecord, RECORD_VERSION},
    placer::{Placement, Seat},
    readings::{Quiet, Readings},
    recover::{Reached, Resolved, Unreached},
    resize::{Change, Resizer},
    spec::PodSpec,
    stages::Stages,
    start::Up,
    volumes::Volumes,
};
use crate::{
    error::PodError,
    events::PodName,
    front::{self, Kept},
    pod::container::{
        Container, Exit, NewContainer, Process, StdioPaths,
        io::{Io, Subject},
        start::{Created, RunningVm},
    },
    share::Shares,
    state::{PodState, PodStatus},
};

/// Kinds of the front's entries for an exec's FIFOs and for a closed stdin.
pub(super) const EXEC: &str = "exec";
pub(super) const CLOSED: &str = "closed";
/// Kind of the front's entry with the number of the last reported event of a pod's OOM killer.
const OOM_KILLS: &str = "oom-kills";

/// Delay before a record that could not be written is retried; it doubles each time.
const FIRST_REWRITE: Duration = Duration::from_secs(1);
/// Maximum delay before such a retry.
const MAX_REWRITE: Duration = Duration::from_secs(30);

/// Spawns the task of a pod. `found` is what an earlier daemon left running.
pub fn spawn(
    node: Arc<DaemonState>,
    spec: PodSpec,
    link_key: LinkKey,
    status: PodStatus,
    mut found: Found,
) -> PodHandle {
    let (reached, unreached) = (found.reached.take(), found.unreached.take());
    let (mut driver, requests, handle) = driver(node, spec, link_key, status, found);
    if reached.is_some() || unreached.is_some() {
        driver.need_its_agent();
    }
    tokio::spawn(async move {
        if let Some(reached) = reached {
            driver.take_up(reached);
        }
        if let Some(unreached) = unreached {
            driver.wait_for_answer(unreached);
        }
        driver.run(requests).await;
    });
    handle
}

/// Returns the driver of a pod's task, its request queue, and its handle.
fn driver(
    node: Arc<DaemonState>,
    spec: PodSpec,
    link_key: LinkKey,
    status: PodStatus,
    found: Found,
) -> (Driver, mpsc::Receiver<Box<Request>>, PodHandle) {
    let (requests, receiver) = mpsc::channel(QUEUED_REQUESTS);
    let status = watch::Sender::new(status);
    let (store, disk_bytes) = (node.volumes.clone(), spec.room.empty_dir_bytes);
    let cgroup = node.cgroups.of(&spec.cgroup_parent, &spec.id);
    let helpers = node.volumes.helpers.of(&spec.uid);
    let none = || Shares::new(spec.id.clone(), node.run_dir(&spec.id), spec.memory_mib, cgroup, helpers);
    let shares = found.shares.unwrap_or_else(none);
    let volumes = Volumes::new(store, shares, disk_bytes);
    let size = spec.shape(status.borrow().interfaces.len());
    let (vcpus, memory_mib) = (node.config.vm.max_vcpus, node.config.vm.max_memory_mib);
    let resizer = Resizer::new(spec.id.clone(), size, Shape { vcpus, memory_mib, ..size }, spec.limits);
    let name = Arc::new(PodName {
        namespace: spec.namespace.clone(),
        name: spec.name.clone(),
        uid: spec.uid.clone(),
    });
    node.events.name(&spec.id, name.clone());
    let quiet = Quiet::on(node.vmms.get(node.vmms.key(spec.vmm).unwrap_or_default()).info().accelerator);
    for (id, container) in found.containers.iter().filter(|(_, container)| !container.init.has_exited()) {
        resizer.add(id, container.limits.clone());
    }
    let bundle = spec.bundle.as_deref().map(Into::into);
    let handle = PodHandle { id: spec.id.clone(), name, bundle, requests, status: status.subscribe() };
    let driver = Driver {
        journal: node.journal.pod(&spec.id),
        readings: Arc::new(Readings::new(spec.id.clone(), quiet, node.old_readings.clone())),
        stages: Stages::new(spec.id.clone(), node.stage_times.clone()),
        node,
        spec,
        link_key,
        status,
        live: None,
        unreached: None,
        ending: false,
        lost: None,
        counted: None,
        placed: found.placed,
        placement: found.placement,
        placing: None,
        forwarding: None,
        host_ports: Vec::new(),
        containers: found.containers,
        volumes: Arc::new(volumes),
        resizer: Arc::new(resizer),
        size,
        being_made: HashMap::new(),
        execs_being_made: HashSet::new(),
        cancel: CancellationToken::new(),
        start_waiters: Vec::new(),
        stop_waiters: Vec::new(),
        remove_waiters: Vec::new(),
        removing: false,
        work: JoinSet::new(),
        records: 0,
        unwritten: None,
    };
    (driver, receiver, handle)
}

/// The containers of a pod. Boxed: a map of one has space for four.
pub type Containers = HashMap<ContainerId, Box<Container>>;

/// What an earlier daemon left of a pod; empty for a new pod.
#[derive(Debug, Default)]
pub struct Found {
    /// The pod's VM and agent, if they respond.
    pub reached: Option<Reached>,
    /// The pod's VMM, if it runs but VM and agent do not respond.
    pub unreached: Option<Arc<Unreached>>,
    /// The pod's containers.
    pub containers: Containers,
    /// The pod's live shares.
    pub shares: Option<Shares>,
    /// The pod's placement.
    pub placement: Placement,
    /// The CPUs and memory nodes that the VMM is confined to.
    pub placed: Bounds,
}

/// Finished work and its result.
enum Done {
    /// Work that does not change the pod's state has finished.
    Nothing,
    PodStarted(Result<Up, PodError>),
    PodStopped(Result<(), VmmError>),
    Resolved(Resolved),
    VmEnded(VmExit),
    GuestLost(PodError),
    ContainerCreated {
        new: Box<NewContainer>,
        result: Result<Box<Created>, PodError>,
        reply: Reply<()>,
    },
    /// The record with a created container was written, or could not be.
    ContainerRecorded {
        of: ContainerId,
        intent: Kept,
        result: Result<(), JournalError>,
        reply: Reply<()>,
    },
    /// A created container without an owner was removed from its guest, or could not be.
    ContainerUndone {
        of: ContainerId,
        intent: Kept,
        why: PodError,
        result: Result<(), PodError>,
        reply: Reply<()>,
    },
    ExecCreated {
        of: ContainerId,
        exec: ExecId,
        stdio: StdioPaths,
        result: Result<Io, PodError>,
        reply: Reply<()>,
    },
    ProcessStarted {
        subject: Subject,
        result: Result<u32, PodError>,
        reply: Reply<()>,
    },
    ProcessEnded {
        subject: Subject,
        exit: Exit,
    },
    Deleted {
        of: ContainerId,
        exec: Option<ExecId>,
        result: Result<Exit, PodError>,
        reply: Reply<Exit>,
    },
    Paused {
        of: ContainerId,
        paused: bool,
        result: Result<(), PodError>,
        reply: Reply<()>,
    },
    Moved {
        result: Result<(Seat, Moved), PodError>,
        reply: Reply<Moved>,
    },
    /// The guest's OOM killer killed processes of these containers; `seen`: the number of its last event.
    OutOfMemory {
        of: Vec<ContainerId>,
        seen: u64,
    },
    /// Limits of a container, or of all together, have changed in the guest, or could not be changed.
    Limited(Limited),
    /// Changed limits were recorded, or could not be.
    LimitsRecorded {
        written: Result<(), JournalError>,
        /// The change of the VM's size.
        change: Option<Change>,
        is_changed: bool,
    },
    /// A record was written, or could not be.
    Written(Result<(), JournalError>),
    /// The pause before the next attempt to write the record has passed.
    Rewrite(Duration),
    /// The VM has this size; `None`: unknown.
    Measured(Option<Shape>),
    Removed(Result<(), PodError>),
}

/// A container whose creation is in progress.
struct Making {
    stages: Stages,
    /// Cancels the creation.
    cancel: CancellationToken,
    /// Callers that wait for the container's deletion.
    deletions: Vec<Reply<Exit>>,
}

/// A change of limits that the guest has applied or rejected.
struct Limited {
    /// The container, with the new CPUs and memory nodes of the host that it may use; `None`: the pod.
    of: Option<(ContainerId, HostCpus)>,
    /// The change of the VM's size.
    change: Option<Change>,
    result: Result<(), PodError>,
    reply: Reply<()>,
}

struct Driver {
    node: Arc<DaemonState>,
    spec: PodSpec,
    link_key: LinkKey,
    status: watch::Sender<PodStatus>,
    stages: Stages,
    /// The VM and its agent, while the pod is ready.
    live: Option<RunningVm>,
    /// The VMM of an earlier daemon's pod, while the pod's state is unknown, and until the VMM has exited.
    unreached: Option<Arc<Unreached>>,
    /// Whether the VM is being stopped.
    ending: bool,
    /// The fault of the guest for which its VM is being killed.
    lost: Option<PodError>,
    /// The CPUs and memory nodes that the VMM was last confined to.
    placed: Bounds,
    /// The pod's placement.
    placement: Placement,
    /// Completes when the VMM has been confined or moved.
    placing: Option<oneshot::Receiver<Infallible>>,
    /// Whether the VMM is in the pod's cgroup; closed without a value if the move failed. `None`: it is there.
    counted: Option<watch::Receiver<bool>>,
    /// The task that forwards ports while the pod is ready.
    forwarding: Option<AbortOnDropHandle<()>>,
    /// The pod's listeners on the host.
    host_ports: Vec<TcpListener>,
    containers: Containers,
    volumes: Arc<Volumes>,
    resizer: Arc<Resizer>,
    /// The size of the pod's VM, as far as this daemon knows.
    size: Shape,
    /// Statistics that the guest has reported.
    readings: Arc<Readings>,
    /// Containers whose creation is in progress, until it is recorded or undone.
    being_made: HashMap<ContainerId, Making>,
    /// Execs whose creation is in progress.
    execs_being_made: HashSet<(ContainerId, ExecId)>,
    /// Cancels a start in progress, and container starts that wait for admission.
    cancel: CancellationToken,
    start_waiters: Vec<Reply<()>>,
    stop_waiters: Vec<Reply<()>>,
    remove_waiters: Vec<Reply<()>>,
    /// Whether the pod is being removed.
    removing: bool,
    work: JoinSet<Done>,
    journal: PodJournal,
    /// Number of records written so far.
    records: u64,
    /// The delay before the next attempt, if the last record could not be written.
    unwritten: Option<Duration>,
}

impl Driver {
    async fn run(&mut self, mut requests: mpsc::Receiver<Box<Request>>) {
        loop {
            tokio::select! {
                request = requests.recv() => match request {
                    Some(request) => self.handle(*request),
                    // All handles are dropped: the daemon exits. VMs keep running.
                    None => return,
                },
                Some(done) = self.work.join_next() => match done {
                    Ok(Done::Removed(result)) => {
                        let removed = result.is_ok();
                        self.removing = false;
                        self.answer_removed(result);
                        if removed {
                            return;
                        }
                    }
                    Ok(done) => self.apply(done),
                    Err(error) => tracing::error!(pod = %self.spec.id, %error, "a task of this pod failed"),
                },
            }
        }
    }

    // ── state ───────────────────────────────────────────────────────────────────────────────────

    fn state(&self) -> PodState {
        self.status.borrow().state
    }

    /// Returns an error if the pod must not change to this state.
    fn may_become(&self, to: PodState) -> Result<(), PodError> {
        let from = self.state();
        if from.may_become(to) {
            return Ok(());
        }
        let error = PodError::Transition { pod: self.spec.id.clone(), from, to };
        tracing::error!(pod = %self.spec.id, %from, %to, "rejected an illegal state transition of the pod");
        Err(error)
    }

    fn become_state(&self, next: PodState) -> Result<(), PodError> {
        self.may_become(next)?;
        self.status.send_modify(|status| status.state = next);
        Ok(())
    }

    fn wrong_state(&self, action: &'static str, state: PodState) -> PodError {
        let status = self.status.borrow();
        if state == PodState::Unknown {
            let (subject, reason) = (format!("pod {}", self.spec.id), status.reason.clone());
            return PodError::Unreached { action, subject, reason };
        }
        let state = match status.reason.as_str() {
            "" => state.to_string(),
            reason => format!("{state} ({reason})"),
        };
        PodError::State { action, subject: format!("pod {}", self.spec.id), state }
    }

    fn process(&self, of: &ContainerId, exec: Option<&ExecId>) -> Result<&Process, PodError> {
        let container = self.containers.get(of).ok_or_else(|| PodError::NoContainer(of.clone()))?;
        container.process(exec).ok_or_else(|| no_exec(of, exec))
    }

    fn process_mut(&mut self, of: &ContainerId, exec: Option<&ExecId>) -> Result<&mut Process, PodError> {
        let container = self.containers.get_mut(of).ok_or_else(|| PodError::NoContainer(of.clone()))?;
        container.process_mut(exec).ok_or_else(|| no_exec(of, exec))
    }

    /// Returns an error if a process does not exist or has exited.
    fn running(&self, of: &ContainerId, exec: Option<&ExecId>) -> Result<(), PodError> {
        match self.process(of, exec)?.has_exited() {
            true => Err(PodError::ProcessEnded(of.clone())),
            false => Ok(()),
        }
    }

    fn view_process(&self, of: &ContainerId, exec: Option<&ExecId>) -> Result<ProcessView, PodError> {
        let process = self.process(of, exec)?;
        let container = self.containers.get(of).ok_or_else(|| PodError::NoContainer(of.clone()))?;
        Ok(ProcessView {
            bundle: container.bundle.clone(),
            stdio: process.stdio.clone(),
            paused: container.paused,
            phase: process.phase.subscribe(),
        })
    }

    /// Returns the size of the pod's VM, as far as this daemon knows, with the VM's current interfaces.
    fn shape(&self) -> Shape {
        let nics = self.spec.shape(self.status.borrow().interfaces.len()).nics;
        Shape { nics, ..self.size }
    }

    fn view(&self) -> PodView {
        let mut containers: Vec<_> = self
            .containers
            .iter()
            .map(|(id, container)| ContainerView {
                id: id.clone(),
                pid: container.init.pid,
                phase: container.init.phase.borrow().clone(),
                paused: container.paused,
                disks: container.disks.iter().map(|disk| disk.path.clone()).collect(),
                steps: container.stages.steps(),
                execs: container
                    .execs
                    .iter()
                    .map(|(id, exec)| (id.clone(), exec.pid, exec.phase.borrow().clone()))
                    .collect(),
            })
            .collect();
        containers.sort_by(|a, b| a.id.cmp(&b.id));
        PodView {
            spec: self.spec.clone(),
            size: self.shape(),
            status: self.status.borrow().clone(),
            vmm: self.live.as_ref().map(|live| live.vm.record().vmm).unwrap_or_default(),
            place: self.view_place(),
            steps: self.stages.steps(),
            containers,
        }
    }

    /// Waits until the VMM is in the pod's cgroup. A VMM that could not be moved has been killed.
    fn until_counted(&self) -> impl Future<Output = ()> + Send + use<> {
        let counted = self.counted.clone();
        async move {
            if let Some(mut counted) = counted {
                let _ = counted.wait_for(|counted| *counted).await;
            }
        }
    }

    // ── state that outlives this worker ─────────────────────────────────────────────────────────

    /// Stores a note about a process at the front.
    fn note(
        &self,
        kind: &str,
        of: &ContainerId,
        exec: Option<&ExecId>,
        note: &impl Serialize,
    ) -> Result<(), PodError> {
        let key = front::key(kind, of, exec);
        self.node.front.keep(&key, note, &[]).map(drop).map_err(|source| PodError::Front {
            pod: self.spec.id.clone(),
            what: format!("note {key}").into(),
            source,
        })
    }

    /// Tells the front which protocols the pod's agent may speak: a build without them must not take over.
    fn need_its_agent(&self) {
        if let Err(error) = self.note(NEEDS, &self.spec.id, None, &(SPOKEN.start(), SPOKEN.end())) {
            let error = chain(&error);
            tracing::warn!(pod = %self.spec.id, error, "a reload by a signal is not checked for this pod");
        }
    }

    /// Removes the notes about a process from the front and, for a container's init, the notes about its execs.
    fn forget_process(&self, of: &ContainerId, exec: Option<&ExecId>, execs: &[ExecId]) {
        for exec in std::iter::once(exec).chain(execs.iter().map(Some)) {
            for kind in [EXEC, CLOSED] {
                self.node.front.forget(&front::key(kind, of, exec));
            }
        }
    }

    /// Returns the VM's record for the journal.
    fn vm(&self) -> Option<VmRecord> {
        match (&self.live, &self.unreached) {
            (Some(live), _) => Some(live.vm.record()),
            (None, Some(unreached)) => unreached.record.vm.clone(),
            (None, None) => None,
        }
    }

    // ── the journal ─────────────────────────────────────────────────────────────────────────────

    /// Writes the current state of the pod to the journal.
    fn next_record(&mut self) -> impl Future<Output = Result<(), JournalError>> + Send + 'static {
        self.records += 1;
        let record = PodRecord {
            version: RECORD_VERSION,
            readable_from: None,
            spec: self.spec.clone(),
            status: self.status.borrow().recorded(),
            link_key: self.link_key.clone(),
            vm: self.vm(),
            containers: self.containers.iter().map(|(id, container)| container.record(id)).collect(),
            volumes: self.volumes.record(),
            placement: self.placement.record(),
            shares: None,
        };
        let (journal, number) = (self.journal.clone(), self.records);
        async move { journal.write(number, record).await }
    }

    /// Writes the current state of the pod to the journal; retries if that fails.
    fn save(&mut self) {
        let written = self.next_record();
        self.work.spawn(written.map(Done::Written));
    }

    /// Sends the result after the change is in the journal. If the write fails, the result is still true, and the write
    /// is retried.
    fn save_then<T: Send + 'static>(&mut self, reply: Reply<T>, result: Result<T, PodError>) {
        let written = self.next_record();
        self.work.spawn(written.map(move |written| {
            answer(reply, result);
            Done::Written(written)
        }));
    }

    fn written(&mut self, written: Result<(), JournalError>) {
        let Err(error) = written else {
            if self.unwritten.take().is_some() {
                tracing::info!(pod = %self.spec.id, "the pod's record is written again");
            }
            return;
        };
        if self.unwritten.is_some() {
            return;
        }
        tracing::error!(pod = %self.spec.id, error = chain(&error), "cannot write the pod's record: it is out of date until that works");
        self.rewrite_after(FIRST_REWRITE);
    }

    /// Writes the record after a pause, unless another has been written by then.
    fn rewrite_after(&mut self, pause: Duration) {
        self.unwritten = Some(pause);
        self.work.spawn(tokio::time::sleep(pause).map(move |()| Done::Rewrite(pause)));
    }

    fn rewrite(&mut self, pause: Duration) {
        if self.unwritten == Some(pause) {
            self.rewrite_after((2 * pause).min(MAX_REWRITE));
            self.save();
        }
    }
}

fn no_exec(of: &ContainerId, exec: Option<&ExecId>) -> PodError {
    match exec {
        Some(exec) => PodError::NoExec { container: of.clone(), exec: exec.clone() },
        None => PodError::NoContainer(of.clone()),
    }
}

fn journal_failed(spec: &PodSpec, error: &JournalError) -> PodError {
    PodError::Failed { subject: format!("pod {}", spec.id), reason: chain(error) }
}

/// Sends the same result to all waiters.
fn answer_all(waiters: impl IntoIterator<Item = Reply<()>>, result: Result<(), PodError>) {
    let result = result.map_err(Arc::new);
    for reply in waiters {
        answer(reply, result.clone().map_err(PodError::Shared));
    }
}

/// Sends the result. A caller that has gone is not an error.
fn answer<T>(reply: Reply<T>, result: Result<T, PodError>) {
    let _ = reply.send(result);
}

#[cfg(test)]
mod tests {
    use sandboxer_config::Config;
    use sandboxer_vmm_fake::FakeVmm;

    use super::*;
    use crate::{daemon, front::Front};

    #[tokio::test]
    async fn an_illegal_change_of_state_is_an_error_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (run_dir, state_dir) = (dir.path().join("run"), dir.path().join("state"));
        let config = Config { run_dir, state_dir, ..Config::default() };
        let node = daemon::node(config, Arc::new(FakeVmm::new(|_| ())), Front::none()).unwrap();
        let spec = PodSpec::plain("web".parse().unwrap(), 1, 128);
        let status = PodStatus::created(1);
        let (mut driver, _requests, pod) = driver(node, spec, LinkKey::random(), status, Found::default());

        let error = driver.become_state(PodState::Ready).unwrap_err();
        assert_eq!(
            error.to_string(),
            "pod web is created and cannot become ready: this is a fault of sandboxer, please report it"
        );
        assert_eq!(pod.status().state, PodState::Created);
        driver.become_state(PodState::Starting).unwrap();
        // Waiters for an impossible state get an error.
        let (reply, told) = tokio::sync::oneshot::channel();
        driver.stop_waiters.push(reply);
        driver.stopped("because".to_owned(), 1);
        assert!(
            matches!(told.await.unwrap().unwrap_err(), PodError::Shared(error) if matches!(*error, PodError::Transition { .. }))
        );
        assert_eq!((pod.status().state, pod.status().reason.as_str()), (PodState::Starting, ""));
    }
}
