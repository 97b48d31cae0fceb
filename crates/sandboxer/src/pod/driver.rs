//! The task that owns a pod.
//!
//! It takes requests and the results of work one at a time and never waits for either kind of work:
//! whatever takes time runs beside it and comes back as [`Done`]. So status and stop are answered
//! while a start is under way, and nothing needs a lock.

mod requests;
mod results;

use std::{collections::HashMap, future::Future, net::TcpListener, sync::Arc};

use futures::FutureExt;
use sandboxer_protocol::{
    id::{ContainerId, ExecId},
    link::LinkKey,
};
use serde::Serialize;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::{
    ContainerView, Node, PodHandle, PodView, ProcessView, QUEUED_REQUESTS, Reply, Request, forward,
    host_ports,
    journal::{JournalError, PodJournal, PodRecord, RECORD_VERSION},
    spec::PodSpec,
    stages::Stages,
    start::{self, Counting, Up},
    state::{PodState, PodStatus},
    stop,
    volumes::Volumes,
};
use crate::{
    clock::now_ns,
    container::{
        Container, Exit, KILLED, NewContainer, Phase, Process, StdioPaths,
        io::{RunningIo, StdinCloser, Subject},
        start::{self as work, Created, Live, Means},
    },
    error::{PodError, chain},
    events::Kind,
    front,
    guest::GuestError,
    host::{share::Shares, volume::Needed},
    vmm::{MachineExit, VmmError},
};

/// What the front calls an exec's FIFOs, and a stdin that was closed.
pub(super) const EXEC: &str = "exec";
pub(super) const CLOSED: &str = "closed";

/// Starts the task of a pod. `found` is what an earlier daemon left running of it.
pub fn spawn(
    node: Arc<Node>,
    spec: PodSpec,
    link_key: LinkKey,
    status: PodStatus,
    found: Found,
) -> PodHandle {
    let (requests, receiver) = mpsc::channel(QUEUED_REQUESTS);
    let status = watch::Sender::new(status);
    let (store, disk_bytes) = (node.volumes.clone(), spec.room.empty_dir_bytes);
    let cgroup = node.cgroups.of(&spec.cgroup_parent, &spec.id);
    let none = || Shares::new(spec.id.clone(), node.run_dir(&spec.id), spec.memory_mib, cgroup);
    let shares = found.shares.unwrap_or_else(none);
    let volumes = match found.volumes {
        Some((recorded, made)) => Volumes::found(store, shares, disk_bytes, recorded, made),
        None => Volumes::new(store, shares, disk_bytes),
    };
    let handle = PodHandle { id: spec.id.clone(), requests, status: status.subscribe() };
    let mut driver = Driver {
        journal: node.journal.pod(&spec.id),
        stages: Stages::new(spec.id.clone(), node.stage_times.clone()),
        node,
        spec,
        link_key,
        status,
        live: None,
        lost: None,
        counted: watch::channel(true).1,
        forwarding: None,
        host_ports: Vec::new(),
        containers: found.containers,
        volumes: Arc::new(volumes),
        being_made: HashMap::new(),
        cancel: CancellationToken::new(),
        start_waiters: Vec::new(),
        stop_waiters: Vec::new(),
        remove_waiters: Vec::new(),
        work: JoinSet::new(),
        records: 0,
    };
    tokio::spawn(async move {
        if let Some(live) = found.live {
            driver.take_up(live, found.host_ports);
        }
        driver.run(receiver).await;
    });
    handle
}

/// What an earlier daemon left of a pod; nothing, for a new one.
#[derive(Debug, Default)]
pub struct Found {
    /// Its machine and agent, if they are alive.
    pub live: Option<Live>,
    /// Its containers.
    pub containers: HashMap<ContainerId, Container>,
    /// Its volumes as recorded, and those that its guest has.
    pub volumes: Option<(Vec<Needed>, Vec<String>)>,
    /// Its live shares.
    pub shares: Option<Shares>,
    /// Where connections come in that are for ports of the host.
    pub host_ports: Vec<TcpListener>,
}

/// Work that has ended, and what it came to.
enum Done {
    /// Nothing the pod's state depends on.
    Nothing,
    PodStarted(Result<Up, PodError>),
    PodStopped(Result<(), VmmError>),
    MachineEnded(MachineExit),
    GuestLost(PodError),
    ContainerCreated {
        new: Box<NewContainer>,
        stages: Stages,
        result: Result<Box<Created>, PodError>,
        reply: Reply<()>,
    },
    ExecCreated {
        of: ContainerId,
        exec: ExecId,
        stdio: StdioPaths,
        result: Result<crate::container::io::Io, PodError>,
        reply: Reply<()>,
    },
    ProcessStarted {
        subject: Subject,
        result: Result<(u32, RunningIo), PodError>,
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
    Removed(Result<(), PodError>),
}

struct Driver {
    node: Arc<Node>,
    spec: PodSpec,
    link_key: LinkKey,
    status: watch::Sender<PodStatus>,
    stages: Stages,
    /// Some while the pod is ready.
    live: Option<Live>,
    /// What the guest did, or did not do, for which its machine is being ended.
    lost: Option<PodError>,
    /// Whether its VMM is counted in the pod's control group; ends without that if it can't be.
    counted: watch::Receiver<bool>,
    /// Forwards ports while the pod is ready.
    forwarding: Option<AbortOnDropHandle<()>>,
    /// Where it listens on the host.
    host_ports: Vec<TcpListener>,
    containers: HashMap<ContainerId, Container>,
    volumes: Arc<Volumes>,
    /// Containers whose making is under way.
    being_made: HashMap<ContainerId, Stages>,
    /// Ends a start under way, and that of a container that waits for its turn.
    cancel: CancellationToken,
    start_waiters: Vec<Reply<()>>,
    stop_waiters: Vec<Reply<()>>,
    remove_waiters: Vec<Reply<()>>,
    work: JoinSet<Done>,
    journal: PodJournal,
    /// Records written so far: numbers the next one.
    records: u64,
}

impl Driver {
    async fn run(&mut self, mut requests: mpsc::Receiver<Request>) {
        loop {
            tokio::select! {
                request = requests.recv() => match request {
                    Some(request) => self.handle(request),
                    // Every handle is gone: the daemon is ending. Machines stay.
                    None => return,
                },
                Some(done) = self.work.join_next() => match done {
                    Ok(Done::Removed(result)) => {
                        let removed = result.is_ok();
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

    // ── looking ─────────────────────────────────────────────────────────────────────────────────

    fn state(&self) -> PodState {
        self.status.borrow().state
    }

    fn become_state(&self, next: PodState) {
        let now = self.state();
        debug_assert!(now.may_become(next), "{now} may not become {next}");
        self.status.send_modify(|status| status.state = next);
    }

    fn wrong_state(&self, action: &'static str, state: PodState) -> PodError {
        let status = self.status.borrow();
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

    /// Whether a process is there and has not ended.
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
            status: self.status.borrow().clone(),
            steps: self.stages.steps(),
            containers,
        }
    }

    // ── what outlives this worker ───────────────────────────────────────────────────────────────

    /// Has the front keep a note about a process.
    fn note(
        &self,
        kind: &str,
        of: &ContainerId,
        exec: Option<&ExecId>,
        note: &impl Serialize,
    ) -> Result<(), PodError> {
        let key = front::key(kind, of, exec);
        self.node.front.keep(&key, note, &[]).map(drop).map_err(|source| PodError::Host {
            pod: self.spec.id.clone(),
            action: "keep a note at the front,",
            path: key.into(),
            source,
        })
    }

    /// Has the front forget a process and, for a container's init, its execs.
    fn forget_process(&self, of: &ContainerId, exec: Option<&ExecId>, execs: &[ExecId]) {
        for exec in std::iter::once(exec).chain(execs.iter().map(Some)) {
            for kind in [EXEC, CLOSED] {
                self.node.front.forget(&front::key(kind, of, exec));
            }
        }
    }

    // ── the journal ─────────────────────────────────────────────────────────────────────────────

    /// Writes the pod as it stands now, when the answer is awaited.
    fn next_record(&mut self) -> impl Future<Output = Result<(), JournalError>> + Send + 'static {
        self.records += 1;
        let record = PodRecord {
            version: RECORD_VERSION,
            spec: self.spec.clone(),
            status: self.status.borrow().clone(),
            link_key: self.link_key.clone(),
            machine: self.live.as_ref().map(|live| live.machine.record()),
            containers: self.containers.iter().map(|(id, container)| container.record(id)).collect(),
            volumes: self.volumes.record(),
            shares: None,
        };
        let (journal, number) = (self.journal.clone(), self.records);
        async move { journal.write(number, record).await }
    }

    fn save(&mut self) {
        let (written, pod) = (self.next_record(), self.spec.id.clone());
        self.work.spawn(written.map(move |result| {
            if let Err(error) = result {
                tracing::error!(%pod, error = chain(&error), "the record of the pod is out of date");
            }
            Done::Nothing
        }));
    }

    /// Answers once what the answer says is on record.
    fn save_then<T: Send + 'static>(&mut self, reply: Reply<T>, result: Result<T, PodError>) {
        let (written, pod) = (self.next_record(), self.spec.id.clone());
        self.work.spawn(written.map(move |recorded| {
            if let Err(error) = recorded {
                tracing::error!(%pod, error = chain(&error), "the record of the pod is out of date");
            }
            answer(reply, result);
            Done::Nothing
        }));
    }
}

fn no_exec(of: &ContainerId, exec: Option<&ExecId>) -> PodError {
    match exec {
        Some(exec) => PodError::NoExec { container: of.clone(), exec: exec.clone() },
        None => PodError::NoContainer(of.clone()),
    }
}

fn journal_failed(spec: &PodSpec, error: JournalError) -> PodError {
    PodError::Failed { subject: format!("pod {}", spec.id), reason: chain(&error) }
}

/// The same failure, for each of several that wait.
fn again(error: &Option<String>, spec: &PodSpec) -> Result<(), PodError> {
    match error {
        None => Ok(()),
        Some(text) => Err(PodError::Failed { subject: format!("pod {}", spec.id), reason: text.clone() }),
    }
}

/// Whoever asked may have given up: that is no error.
fn answer<T>(reply: Reply<T>, result: Result<T, PodError>) {
    let _ = reply.send(result);
}
