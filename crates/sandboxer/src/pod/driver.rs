//! The task that owns a pod.
//!
//! The task handles requests and results of work one at a time, and never blocks: slow work runs in other tasks, whose
//! results come back as [`Done`]. So status and stop are handled while a start is in progress, and no lock is needed.

/// Returns the value of a result; a request without one is answered with the error.
macro_rules! value_or_answer {
    ($reply:expr, $result:expr) => {
        match $result {
            Ok(value) => value,
            Err(error) => return answer($reply, Err(error)),
        }
    };
}

mod adoption;
mod checkpoint;
mod done;
mod found;
mod lifecycle;
mod placement;
mod processes;
mod record;
mod requests;
mod results;
mod running_pod;
mod state;
mod view;

use std::{
    collections::{HashMap, HashSet},
    mem,
    sync::Arc,
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_protocol::{
    id::{ContainerId, ExecId},
    link::LinkKey,
};
use sandboxer_vmm::Shape;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use self::{done::Done, found::Containers, state::State};
use super::{
    checkpoint::Restored,
    container::{Exit, Process},
    daemon_state::DaemonState,
    handle::PodHandle,
    journal::{JournalError, PodJournal},
    readings::{Quiet, Readings},
    request::{Reply, Request},
    resize::Resizer,
    running_vm::RunningVm,
    spec::PodSpec,
    stages::Stages,
    volumes::Volumes,
};
use crate::{
    error::PodError,
    events::PodName,
    share::Shares,
    state::{PodState, PodStatus},
};
pub use found::{Found, FoundVm};

/// Kind of the front's entry for a closed stdin.
const CLOSED: &str = "closed";
/// Kind of the front's entry with the number of the last reported event of a pod's OOM killer.
const OOM_KILLS: &str = "oom-kills";

/// Spawns the task of a pod. `found` is what an earlier daemon left running.
pub fn spawn(
    node: Arc<DaemonState>,
    spec: PodSpec,
    link_key: LinkKey,
    status: PodStatus,
    mut found: Found,
) -> PodHandle {
    let vm = mem::take(&mut found.vm);
    let (mut driver, requests, handle) = driver(node, spec, link_key, status, found);
    if !matches!(vm, FoundVm::None) {
        driver.need_its_agent();
    }
    tokio::spawn(async move {
        driver.adopt(vm);
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
    let state = match status.state {
        PodState::Created => State::Created,
        // A VM that an earlier daemon left is adopted before the first request.
        _ => State::Stopped { is_removing: false },
    };
    let status = watch::Sender::new(status);
    let (store, disk_bytes) = (node.volumes.clone(), spec.room.empty_dir_bytes);
    let cgroup = node.cgroups.for_pod(&spec.cgroup_parent, &spec.id);
    let helpers = node.volumes.helpers.on_behalf_of(&spec.uid);
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
        alone: spec.alone,
        of_cri_o: spec.is_of_cri_o(),
    });
    node.events.name(&spec.id, name.clone());
    let quiet = Quiet::on(node.vmms.get(node.vmms.key(spec.vmm).unwrap_or_default()).info().accelerator);
    for (id, container) in found.containers.iter().filter(|(_, container)| !container.init.has_exited()) {
        resizer.add(id, container.limits.clone());
    }
    let (handle, requests) = PodHandle::new(&spec, name, status.subscribe());
    let driver = Driver {
        journal: node.journal.pod(&spec.id),
        readings: Arc::new(Readings::new(spec.id.clone(), quiet, node.old_readings.clone())),
        stages: Stages::new(spec.id.clone(), node.stage_times.clone()),
        node,
        spec,
        link_key,
        status,
        state,
        containers: found.containers,
        volumes: Arc::new(volumes),
        resizer: Arc::new(resizer),
        size,
        being_made: HashMap::new(),
        execs_being_made: HashSet::new(),
        restored: found.restored,
        is_being_saved: false,
        cancel: CancellationToken::new(),
        remove_waiters: Vec::new(),
        work: JoinSet::new(),
        records: 0,
        unwritten: None,
    };
    (driver, requests, handle)
}

/// A container whose creation is in progress.
struct Making {
    stages: Stages,
    /// Cancels the creation.
    cancel: CancellationToken,
    /// Callers that wait for the container's deletion.
    deletions: Vec<Reply<Exit>>,
}

struct Driver {
    node: Arc<DaemonState>,
    spec: PodSpec,
    link_key: LinkKey,
    status: watch::Sender<PodStatus>,
    stages: Stages,
    state: State,
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
    /// The saved containers with which the pod goes on, if it was restored.
    restored: Option<Restored>,
    /// Whether the pod is being saved.
    is_being_saved: bool,
    /// Cancels a start in progress, and container starts that wait for admission.
    cancel: CancellationToken,
    /// Callers that wait until the pod has stopped and is removed.
    remove_waiters: Vec<Reply<()>>,
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
                        self.removed(result);
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

    /// Returns the pod's VM and its agent, while the pod is ready, and until the VM has ended.
    fn running_vm(&self) -> Option<RunningVm> {
        self.state.running().map(|pod| pod.live.clone())
    }

    /// Same as [`Driver::running_vm`], with the error of the request for `action`.
    fn live(&self, action: &'static str) -> Result<RunningVm, PodError> {
        self.running_vm().ok_or_else(|| self.wrong_state(action))
    }

    fn wrong_state(&self, action: &'static str) -> PodError {
        let status = self.status.borrow();
        let state = self.state.kind();
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

    fn process(&self, id: &ContainerId, exec: Option<&ExecId>) -> Result<&Process, PodError> {
        let container = self.containers.get(id).ok_or_else(|| PodError::NoContainer(id.clone()))?;
        container.process(exec).ok_or_else(|| no_exec(id, exec))
    }

    fn process_mut(&mut self, id: &ContainerId, exec: Option<&ExecId>) -> Result<&mut Process, PodError> {
        let container = self.containers.get_mut(id).ok_or_else(|| PodError::NoContainer(id.clone()))?;
        container.process_mut(exec).ok_or_else(|| no_exec(id, exec))
    }

    /// Returns an error if a process does not exist or has exited.
    fn running(&self, id: &ContainerId, exec: Option<&ExecId>) -> Result<(), PodError> {
        match self.process(id, exec)?.has_exited() {
            true => Err(PodError::ProcessEnded(id.clone())),
            false => Ok(()),
        }
    }
}

fn no_exec(id: &ContainerId, exec: Option<&ExecId>) -> PodError {
    match exec {
        Some(exec) => PodError::NoExec { container: id.clone(), exec: exec.clone() },
        None => PodError::NoContainer(id.clone()),
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
