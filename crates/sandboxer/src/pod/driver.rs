//! The task that owns a pod.
//!
//! It takes requests and the results of work one at a time and never waits for either kind of work:
//! whatever takes time runs beside it and comes back as [`Done`]. So status and stop are answered
//! while a start is under way, and nothing needs a lock.

use std::{collections::HashMap, future::Future, sync::Arc};

use futures::FutureExt;
use sandboxer_protocol::{
    id::{ContainerId, ExecId},
    link::LinkKey,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{
    ContainerView, Node, PodHandle, PodView, ProcessView, QUEUED_REQUESTS, Reply, Request,
    journal::{JournalError, PodJournal, PodRecord, RECORD_VERSION},
    spec::PodSpec,
    stages::Stages,
    start::{self, Up},
    state::{PodState, PodStatus},
    stop,
};
use crate::{
    clock::now_ns,
    container::{
        Container, Exit, KILLED, NewContainer, Phase, Process, StdioPaths,
        io::{RunningIo, StdinCloser, Subject, last_words},
        start::{self as work, Created, Live},
    },
    error::{PodError, chain},
    events::Kind,
    vmm::{MachineExit, VmmError},
};

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
    let handle = PodHandle {
        id: spec.id.clone(),
        requests,
        status: status.subscribe(),
    };
    let mut driver = Driver {
        journal: node.journal.pod(&spec.id),
        stages: Stages::new(spec.id.clone()),
        node,
        spec,
        link_key,
        status,
        live: None,
        containers: found.containers,
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
            driver.take_up(live);
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
}

/// Work that has ended, and what it came to.
enum Done {
    /// Nothing the pod's state depends on.
    Nothing,
    PodStarted(Result<Up, PodError>),
    PodStopped(Result<(), VmmError>),
    MachineEnded(MachineExit),
    ContainerCreated {
        new: NewContainer,
        stages: Stages,
        result: Result<Created, PodError>,
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
        result: Result<(), PodError>,
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
    containers: HashMap<ContainerId, Container>,
    /// Containers whose making is under way.
    being_made: HashMap<ContainerId, Stages>,
    /// Ends a start under way.
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

    // ── requests ────────────────────────────────────────────────────────────────────────────────

    fn handle(&mut self, request: Request) {
        match request {
            Request::Start { reply } => self.on_start(reply),
            Request::Stop { reply } => self.on_stop(reply),
            Request::Remove { reply } => self.on_remove(reply),
            Request::CreateContainer { new, reply } => self.on_create_container(new, reply),
            Request::CreateExec {
                of,
                exec,
                process,
                stdio,
                reply,
            } => {
                self.on_create_exec(of, exec, process, stdio, reply);
            }
            Request::StartProcess { of, exec, reply } => self.on_start_process(of, exec, reply),
            Request::Process { of, exec, reply } => answer(reply, self.view_process(&of, exec.as_ref())),
            Request::Signal {
                of,
                exec,
                signal,
                all,
                reply,
            } => {
                let checked = self.running(&of, exec.as_ref());
                self.forward(checked, reply, move |live| async move {
                    Ok(live.agent.signal_process(&of, exec.as_ref(), signal, all).await?)
                });
            }
            Request::Delete { of, exec, reply } => self.on_delete(of, exec, reply),
            Request::CloseStdin { of, exec, reply } => {
                let closed = self.process(&of, exec.as_ref()).map(|process| {
                    if let Some(stdin) = &process.stdin {
                        stdin.close();
                    }
                });
                answer(reply, closed);
            }
            Request::Resize {
                of,
                exec,
                columns,
                rows,
                reply,
            } => {
                let checked = self.running(&of, exec.as_ref());
                self.forward(checked, reply, move |live| async move {
                    Ok(live
                        .agent
                        .resize_terminal(&of, exec.as_ref(), columns, rows)
                        .await?)
                });
            }
            Request::SetPaused { of, paused, reply } => self.on_set_paused(of, paused, reply),
            Request::Update { of, resources, reply } => {
                let checked = self.running(&of, None);
                self.forward(checked, reply, move |live| async move {
                    Ok(live.agent.update_container(&of, resources).await?)
                });
            }
            Request::Pids { of, reply } => {
                let checked = self.running(&of, None);
                self.forward(checked, reply, move |live| async move {
                    Ok(live.agent.pids(&of).await?)
                });
            }
            Request::Stats { of, reply } => {
                let checked = of.as_ref().map_or(Ok(()), |of| self.process(of, None).map(drop));
                self.forward(checked, reply, move |live| async move {
                    Ok(live.agent.stats(of.as_ref()).await?)
                });
            }
            Request::Inspect { reply } => answer(reply, Ok(self.view())),
        }
    }

    fn on_start(&mut self, reply: Reply<()>) {
        match self.state() {
            PodState::Ready => answer(reply, Ok(())),
            PodState::Starting => self.start_waiters.push(reply),
            PodState::Created => {
                self.start_waiters.push(reply);
                self.become_state(PodState::Starting);
                self.node.events.pod(&self.spec.id, Kind::PodStarting, "");
                self.stages = Stages::new(self.spec.id.clone());
                let (node, spec, key) = (self.node.clone(), self.spec.clone(), self.link_key.clone());
                let (stages, cancel) = (self.stages.clone(), self.cancel.clone());
                let intent = self.next_record();
                self.work.spawn(async move {
                    // On disk before the first process: a daemon that dies from here on leaves a
                    // trace that the next one finds.
                    if let Err(error) = intent.await {
                        return Done::PodStarted(Err(journal_failed(&spec, error)));
                    }
                    Done::PodStarted(start::start(&node, &spec, &key, &stages, &cancel).await)
                });
            }
            state @ (PodState::Stopping | PodState::Stopped) => {
                answer(reply, Err(self.wrong_state("start", state)));
            }
        }
    }

    fn on_stop(&mut self, reply: Reply<()>) {
        match self.state() {
            PodState::Stopped => return answer(reply, Ok(())),
            PodState::Created => {
                self.stopped(String::new(), 0);
                return answer(reply, Ok(()));
            }
            PodState::Stopping => {}
            PodState::Starting => {
                self.become_state(PodState::Stopping);
                self.cancel.cancel();
            }
            PodState::Ready => {
                self.become_state(PodState::Stopping);
                if let Some(live) = self.live.clone() {
                    self.work
                        .spawn(async move { Done::PodStopped(stop::stop(&live).await) });
                }
            }
        }
        self.stop_waiters.push(reply);
    }

    fn on_remove(&mut self, reply: Reply<()>) {
        let first = self.remove_waiters.is_empty();
        self.remove_waiters.push(reply);
        if !first {
            return;
        }
        if self.state() == PodState::Stopped {
            self.remove();
        } else {
            // Once stopped, the pod is removed: see `stopped`.
            let (reply, _) = tokio::sync::oneshot::channel();
            self.on_stop(reply);
        }
    }

    fn remove(&mut self) {
        let (node, journal, id) = (self.node.clone(), self.journal.clone(), self.spec.id.clone());
        self.containers.clear();
        self.work.spawn(async move {
            let cleared = stop::clear(&id, node.run_dir(&id)).await;
            let forgotten = journal.remove().await;
            if let Err(error) = forgotten {
                tracing::error!(pod = %id, error = chain(&error), "the pod's record stays on disk");
            }
            Done::Removed(cleared)
        });
    }

    fn answer_removed(&mut self, result: Result<(), PodError>) {
        if result.is_ok() {
            // Before the answer: whoever has it may use the id again.
            self.node.registry.remove(&self.spec.id);
            self.node.events.pod(&self.spec.id, Kind::PodRemoved, "");
        }
        let error = result.err().map(|error| chain(&error));
        for reply in self.remove_waiters.drain(..) {
            answer(reply, again(&error, &self.spec));
        }
    }

    fn on_create_container(&mut self, new: NewContainer, reply: Reply<()>) {
        let Some(live) = self.live.clone() else {
            return answer(reply, Err(self.wrong_state("create a container", self.state())));
        };
        if self.containers.contains_key(&new.id) || self.being_made.contains_key(&new.id) {
            return answer(reply, Err(PodError::ContainerExists(new.id)));
        }
        let stages = Stages::new(self.spec.id.clone());
        self.being_made.insert(new.id.clone(), stages.clone());
        let (node, spec) = (self.node.clone(), self.spec.clone());
        self.work.spawn(async move {
            let result = work::create(&spec, &live, &node.rootfs, &stages, &new).await;
            Done::ContainerCreated {
                new,
                stages,
                result,
                reply,
            }
        });
    }

    fn on_create_exec(
        &mut self,
        of: ContainerId,
        exec: ExecId,
        process: Vec<u8>,
        stdio: StdioPaths,
        reply: Reply<()>,
    ) {
        if let Err(error) = self.running(&of, None) {
            return answer(reply, Err(error));
        }
        if self.process(&of, Some(&exec)).is_ok() {
            return answer(reply, Err(PodError::ExecExists { container: of, exec }));
        }
        let Some(live) = self.live.clone() else {
            return answer(reply, Err(self.wrong_state("create an exec", self.state())));
        };
        let pod = self.spec.id.clone();
        self.work.spawn(async move {
            let result = work::create_exec(&pod, &live, &of, &exec, &process, &stdio).await;
            Done::ExecCreated {
                of,
                exec,
                stdio,
                result,
                reply,
            }
        });
    }

    fn on_start_process(&mut self, of: ContainerId, exec: Option<ExecId>, reply: Reply<()>) {
        let Some(live) = self.live.clone() else {
            return answer(reply, Err(self.wrong_state("start a process", self.state())));
        };
        let stages = self.containers.get(&of).map(|container| container.stages.clone());
        let process = match self.process_mut(&of, exec.as_ref()) {
            Ok(process) => process,
            Err(error) => return answer(reply, Err(error)),
        };
        let phase = process.phase.borrow().clone();
        let (Phase::Created, Some(io), Some(stages)) = (&phase, process.io.take(), stages) else {
            let subject = format!("process of container {of}");
            let state = phase.as_str().to_owned();
            return answer(
                reply,
                Err(PodError::State {
                    action: "start it",
                    subject,
                    state,
                }),
            );
        };
        process.phase.send_replace(Phase::Starting);
        let subject = Subject { container: of, exec };
        let (running, stdin) = io.run(&live.agent, &subject, false);
        process.stdin = stdin;
        self.work.spawn(async move {
            let release = work::release(&live, &subject);
            let result = match subject.exec {
                None => {
                    stages
                        .run(sandboxer_protocol::stage::Stage::ContainerStart, release)
                        .await
                }
                Some(_) => release.await,
            };
            Done::ProcessStarted {
                subject,
                result: result.map(|pid| (pid, running)),
                reply,
            }
        });
    }

    fn on_delete(&mut self, of: ContainerId, exec: Option<ExecId>, reply: Reply<Exit>) {
        let process = match self.process(&of, exec.as_ref()) {
            Ok(process) => process,
            Err(error) => return answer(reply, Err(error)),
        };
        let phase = process.phase.borrow().clone();
        if matches!(phase, Phase::Running | Phase::Starting) {
            let subject = format!("container {of}");
            let state = phase.as_str().to_owned();
            return answer(
                reply,
                Err(PodError::State {
                    action: "delete it",
                    subject,
                    state,
                }),
            );
        }
        let disks = self
            .containers
            .get(&of)
            .map(|c| c.disks.clone())
            .unwrap_or_default();
        let live = self.live.clone();
        self.work.spawn(async move {
            let result = match (&live, &exec) {
                // The guest is gone, and all that was in it.
                (None, _) => Ok(()),
                (Some(live), None) => work::delete(live, &of, &disks).await,
                (Some(live), Some(exec)) => live.agent.delete_exec(&of, exec).await.map_err(PodError::from),
            };
            Done::Deleted {
                of,
                exec,
                result,
                reply,
            }
        });
    }

    fn on_set_paused(&mut self, of: ContainerId, paused: bool, reply: Reply<()>) {
        if let Err(error) = self.running(&of, None) {
            return answer(reply, Err(error));
        }
        let Some(live) = self.live.clone() else {
            return answer(reply, Err(self.wrong_state("pause a container", self.state())));
        };
        self.work.spawn(async move {
            let result = match paused {
                true => live.agent.pause_container(&of).await,
                false => live.agent.resume_container(&of).await,
            };
            Done::Paused {
                of,
                paused,
                result: result.map_err(PodError::from),
                reply,
            }
        });
    }

    /// Has the agent asked something that changes nothing the pod's task keeps.
    fn forward<T, F>(
        &mut self,
        checked: Result<(), PodError>,
        reply: Reply<T>,
        ask: impl FnOnce(Live) -> F + Send + 'static,
    ) where
        T: Send + 'static,
        F: Future<Output = Result<T, PodError>> + Send,
    {
        match (checked, self.live.clone()) {
            (Err(error), _) => answer(reply, Err(error)),
            (Ok(()), None) => answer(reply, Err(self.wrong_state("ask the guest", self.state()))),
            (Ok(()), Some(live)) => {
                self.work.spawn(async move {
                    answer(reply, ask(live).await);
                    Done::Nothing
                });
            }
        }
    }

    // ── results ─────────────────────────────────────────────────────────────────────────────────

    fn apply(&mut self, done: Done) {
        match done {
            Done::Nothing | Done::Removed(_) => {}
            Done::PodStarted(Ok(up)) => self.pod_started(up),
            Done::PodStarted(Err(error)) => self.start_failed(error),
            Done::PodStopped(Ok(())) => self.stopped(String::new(), 0),
            Done::PodStopped(Err(error)) => {
                // The machine's end, should it come, still stops the pod.
                let text = chain(&error);
                tracing::error!(pod = %self.spec.id, error = text, "cannot end the pod's VMM");
                let error = Some(text);
                for reply in self.stop_waiters.drain(..).chain(self.remove_waiters.drain(..)) {
                    answer(reply, again(&error, &self.spec));
                }
            }
            Done::MachineEnded(exit) => self.machine_ended(exit),
            Done::ContainerCreated {
                new,
                stages,
                result,
                reply,
            } => {
                self.container_created(new, stages, result, reply);
            }
            Done::ExecCreated {
                of,
                exec,
                stdio,
                result,
                reply,
            } => {
                let made = result.and_then(|io| {
                    let container = self
                        .containers
                        .get_mut(&of)
                        .ok_or_else(|| PodError::NoContainer(of.clone()))?;
                    container.execs.insert(exec, Process::created(0, stdio, io));
                    Ok(())
                });
                self.save_then(reply, made);
            }
            Done::ProcessStarted {
                subject,
                result,
                reply,
            } => self.process_started(subject, result, reply),
            Done::ProcessEnded { subject, exit } => {
                self.process_ended(&subject, exit);
                self.save();
            }
            Done::Deleted {
                of,
                exec,
                result,
                reply,
            } => self.deleted(of, exec, result, reply),
            Done::Paused {
                of,
                paused,
                result,
                reply,
            } => {
                if result.is_ok()
                    && let Some(container) = self.containers.get_mut(&of)
                {
                    container.paused = paused;
                }
                answer(reply, result);
            }
        }
    }

    fn pod_started(&mut self, up: Up) {
        if self.state() == PodState::Stopping {
            // The stop came when the start was done already.
            let live = up.live;
            self.work
                .spawn(async move { Done::PodStopped(stop::stop(&live).await) });
            return;
        }
        let (pid, release) = (up.live.machine.record().pid, up.ready.kernel_release);
        self.status.send_modify(|status| {
            status.vmm_pid = pid;
            status.kernel_release = release;
        });
        self.become_state(PodState::Ready);
        self.live = Some(up.live);
        self.watch_machine();
        self.node
            .events
            .pod(&self.spec.id, Kind::PodReady, format!("VMM is process {pid}"));
        let waiters: Vec<_> = self.start_waiters.drain(..).collect();
        let recorded = self.next_record();
        let spec = self.spec.clone();
        self.work.spawn(async move {
            // On disk before containerd is told: what it believes in, the next daemon finds.
            let error = recorded.await.err().map(|error| chain(&error));
            for reply in waiters {
                answer(reply, again(&error, &spec));
            }
            Done::Nothing
        });
    }

    fn start_failed(&mut self, error: PodError) {
        let cancelled = matches!(error, PodError::Cancelled(_));
        let reason = chain(&error);
        let mut error = Some(error);
        for reply in self.start_waiters.drain(..) {
            let told = error
                .take()
                .unwrap_or_else(|| PodError::Cancelled(self.spec.id.clone()));
            answer(reply, Err(told));
        }
        if self.state() == PodState::Starting {
            self.become_state(PodState::Stopping);
        }
        if cancelled {
            self.stopped(String::new(), 0)
        } else {
            self.stopped(reason, 1)
        }
    }

    fn machine_ended(&mut self, exit: MachineExit) {
        // While the pod is being stopped this is what was wanted; `PodStopped` follows.
        if self.state() == PodState::Ready {
            let reason = start::machine_ended(&self.spec, exit).to_string();
            tracing::warn!(pod = %self.spec.id, reason, "the pod's VMM ended unasked");
            self.stopped(reason, KILLED);
        }
    }

    /// The pod holds nothing any more: everything that ran in it has ended.
    fn stopped(&mut self, reason: String, exit_status: u32) {
        if self.state() == PodState::Stopped {
            return;
        }
        self.live = None;
        let unasked = !reason.is_empty();
        let exit = Exit {
            code: KILLED,
            at_ns: now_ns(),
            reason: if unasked {
                reason.clone()
            } else {
                "its pod was stopped".to_owned()
            },
        };
        for container in self.containers.values_mut() {
            for process in std::iter::once(&mut container.init).chain(container.execs.values_mut()) {
                if unasked && *process.phase.borrow() == Phase::Running {
                    last_words(&process.stdio, &reason);
                }
                end(process, exit.clone());
            }
        }
        self.status.send_modify(|status| {
            status.exited_at_ns = exit.at_ns;
            status.exit_status = exit_status;
            status.vmm_pid = 0;
            status.reason = reason.clone();
        });
        self.become_state(PodState::Stopped);
        self.node.events.pod(&self.spec.id, Kind::PodStopped, reason);
        self.save();
        for reply in self.stop_waiters.drain(..) {
            answer(reply, Ok(()));
        }
        if !self.remove_waiters.is_empty() {
            self.remove();
        }
    }

    fn container_created(
        &mut self,
        new: NewContainer,
        stages: Stages,
        result: Result<Created, PodError>,
        reply: Reply<()>,
    ) {
        self.being_made.remove(&new.id);
        let created = match result {
            Ok(created) if self.live.is_some() => created,
            Ok(_) => return answer(reply, Err(self.wrong_state("create a container", self.state()))),
            Err(error) => return answer(reply, Err(error)),
        };
        let container = Container {
            bundle: new.bundle,
            disks: created.disks,
            leases: created.leases,
            init: Process::created(created.pid, new.stdio, created.io),
            execs: HashMap::new(),
            paused: false,
            stages,
        };
        self.containers.insert(new.id.clone(), container);
        self.node
            .events
            .container(&self.spec.id, &new.id, Kind::ContainerCreated, "");
        self.save_then(reply, Ok(()));
    }

    fn process_started(
        &mut self,
        subject: Subject,
        result: Result<(u32, RunningIo), PodError>,
        reply: Reply<()>,
    ) {
        let (pid, running) = match result {
            Ok(started) => started,
            Err(error) => {
                // It never ran: to whoever waits it has ended, with the code for that.
                let exit = Exit {
                    code: 128,
                    at_ns: now_ns(),
                    reason: chain(&error),
                };
                self.process_ended(&subject, exit);
                return self.save_then(reply, Err(error));
            }
        };
        let Some(live) = self.live.clone() else {
            return answer(reply, Err(self.wrong_state("start a process", self.state())));
        };
        let kind = if subject.exec.is_none() {
            Kind::ContainerStarted
        } else {
            Kind::ExecStarted
        };
        if let Ok(process) = self.process_mut(&subject.container, subject.exec.as_ref()) {
            process.pid = pid;
            process.phase.send_replace(Phase::Running);
        }
        self.node.events.container(
            &self.spec.id,
            &subject.container,
            kind,
            format!("guest process {pid}"),
        );
        self.follow(live, subject, running);
        self.save_then(reply, Ok(()));
    }

    fn follow(&mut self, live: Live, subject: Subject, running: RunningIo) {
        self.work.spawn(async move {
            let exit = work::follow(&live, &subject, running).await;
            Done::ProcessEnded { subject, exit }
        });
    }

    fn process_ended(&mut self, subject: &Subject, exit: Exit) {
        let kind = if subject.exec.is_none() {
            Kind::ContainerExited
        } else {
            Kind::ExecExited
        };
        let detail = match exit.reason.as_str() {
            "" => format!("exit code {}", exit.code),
            reason => format!("exit code {}: {reason}", exit.code),
        };
        if let Ok(process) = self.process_mut(&subject.container, subject.exec.as_ref()) {
            end(process, exit);
            self.node
                .events
                .container(&self.spec.id, &subject.container, kind, detail);
        }
    }

    fn deleted(
        &mut self,
        of: ContainerId,
        exec: Option<ExecId>,
        result: Result<(), PodError>,
        reply: Reply<Exit>,
    ) {
        // A process that was never let go has no end of its own.
        let unstarted = || Exit {
            code: KILLED,
            at_ns: now_ns(),
            reason: "it was never started".to_owned(),
        };
        let removed = result.and_then(|()| {
            let process = self.process(&of, exec.as_ref())?;
            let exit = process.phase.borrow().exit().cloned();
            Ok(exit.unwrap_or_else(unstarted))
        });
        if removed.is_ok() {
            match &exec {
                Some(exec) => {
                    self.containers
                        .get_mut(&of)
                        .and_then(|container| container.execs.remove(exec));
                }
                None => {
                    if let Some(mut container) = self.containers.remove(&of) {
                        end(&mut container.init, unstarted());
                    }
                    self.node.registry.remove_container(&of);
                    self.node
                        .events
                        .container(&self.spec.id, &of, Kind::ContainerDeleted, "");
                }
            }
        }
        self.save_then(reply, removed);
    }

    /// Goes on where an earlier daemon left off.
    fn take_up(&mut self, live: Live) {
        self.live = Some(live.clone());
        self.watch_machine();
        let mut running = Vec::new();
        for (id, container) in &mut self.containers {
            let execs = container
                .execs
                .iter_mut()
                .map(|(id, exec)| (Some(id.clone()), exec));
            for (exec, process) in std::iter::once((None, &mut container.init)).chain(execs) {
                if *process.phase.borrow() != Phase::Running {
                    continue;
                }
                let subject = Subject {
                    container: id.clone(),
                    exec,
                };
                if let Some(io) = process.io.take() {
                    let (copies, stdin): (_, Option<StdinCloser>) = io.run(&live.agent, &subject, true);
                    process.stdin = stdin;
                    running.push((subject, copies));
                }
            }
        }
        for (subject, copies) in running {
            self.follow(live.clone(), subject, copies);
        }
        self.node.events.pod(&self.spec.id, Kind::PodRecovered, "");
    }

    fn watch_machine(&mut self) {
        if let Some(live) = &self.live {
            let machine = live.machine.clone();
            self.work
                .spawn(async move { Done::MachineEnded(machine.exited().await) });
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
        PodError::State {
            action,
            subject: format!("pod {}", self.spec.id),
            state,
        }
    }

    fn process(&self, of: &ContainerId, exec: Option<&ExecId>) -> Result<&Process, PodError> {
        let container = self
            .containers
            .get(of)
            .ok_or_else(|| PodError::NoContainer(of.clone()))?;
        container.process(exec).ok_or_else(|| no_exec(of, exec))
    }

    fn process_mut(&mut self, of: &ContainerId, exec: Option<&ExecId>) -> Result<&mut Process, PodError> {
        let container = self
            .containers
            .get_mut(of)
            .ok_or_else(|| PodError::NoContainer(of.clone()))?;
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
        let container = self
            .containers
            .get(of)
            .ok_or_else(|| PodError::NoContainer(of.clone()))?;
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
            containers: self
                .containers
                .iter()
                .map(|(id, container)| container.record(id))
                .collect(),
        };
        let (journal, number) = (self.journal.clone(), self.records);
        async move { journal.write(number, record).await }
    }

    fn save(&mut self) {
        let (written, pod) = (self.next_record(), self.spec.id.clone());
        self.work.spawn(written.map(move |result| {
            if let Err(error) = result {
                tracing::error!(%pod, error = chain(&error), "the pod's record on disk is out of date");
            }
            Done::Nothing
        }));
    }

    /// Answers once what the answer says is on disk.
    fn save_then<T: Send + 'static>(&mut self, reply: Reply<T>, result: Result<T, PodError>) {
        let (written, pod) = (self.next_record(), self.spec.id.clone());
        self.work.spawn(written.map(move |recorded| {
            if let Err(error) = recorded {
                tracing::error!(%pod, error = chain(&error), "the pod's record on disk is out of date");
            }
            answer(reply, result);
            Done::Nothing
        }));
    }
}

fn end(process: &mut Process, exit: Exit) {
    process.io = None;
    process.stdin = None;
    if !process.has_exited() {
        process.phase.send_replace(Phase::Exited(exit));
    }
}

fn no_exec(of: &ContainerId, exec: Option<&ExecId>) -> PodError {
    match exec {
        Some(exec) => PodError::NoExec {
            container: of.clone(),
            exec: exec.clone(),
        },
        None => PodError::NoContainer(of.clone()),
    }
}

fn journal_failed(spec: &PodSpec, error: JournalError) -> PodError {
    PodError::Failed {
        subject: format!("pod {}", spec.id),
        reason: chain(&error),
    }
}

/// The same failure, for each of several that wait.
fn again(error: &Option<String>, spec: &PodSpec) -> Result<(), PodError> {
    match error {
        None => Ok(()),
        Some(text) => Err(PodError::Failed {
            subject: format!("pod {}", spec.id),
            reason: text.clone(),
        }),
    }
}

/// Whoever asked may have given up: that is no error.
fn answer<T>(reply: Reply<T>, result: Result<T, PodError>) {
    let _ = reply.send(result);
}
