//! The pod's way through its states: start, stop, the end of its VM, removal.

use std::{iter, mem, path::PathBuf, sync::Arc};

use sandboxer_base::{chain, clock::now_ns};
use sandboxer_front::control::NEEDS;
use sandboxer_vmm::{VmExit, VmmError};
use tokio::sync::watch;

use super::{
    Driver, OOM_KILLS, answer, answer_all,
    done::Done,
    journal_failed,
    processes::never_started,
    running_pod::RunningPod,
    state::{Ending, State, Stopping},
};
use crate::{
    error::PodError,
    events::{Kind, TaskDetail},
    front,
    pod::{
        cgroup::CgroupAttach,
        checkpoint::{Restored, SAVING},
        container::{Exit, KILLED, sandbox_exit},
        forward::Forwarding,
        host_ports,
        request::Reply,
        running_vm::RunningVm,
        session,
        stages::Stages,
        start::{self, StartedPod},
        stop,
        volumes::Volumes,
    },
    state::{PodState, PodStatus},
    traces::SpanContext,
};

impl Driver {
    /// Changes the state, and publishes it with `change`.
    pub(super) fn enter(&mut self, state: State, change: impl FnOnce(&mut PodStatus)) {
        self.status.send_modify(|status| {
            status.state = state.kind();
            change(status);
        });
        self.state = state;
    }

    pub(super) fn on_start(&mut self, request: SpanContext, reply: Reply<()>) {
        match &mut self.state {
            State::Ready { .. } => answer(reply, Ok(())),
            State::Starting { waiters } => waiters.push(reply),
            State::Created => {
                self.enter(State::Starting { waiters: vec![reply] }, |_| ());
                self.need_its_agent();
                self.node.events.pod(&self.spec.id, Kind::PodStarting, "");
                let stages = Stages::new(self.spec.id.clone(), self.node.stage_times.clone());
                self.stages = stages.within(request);
                let (node, spec, key) = (self.node.clone(), self.spec.clone(), self.link_key.clone());
                let (stages, cancel) = (self.stages.clone(), self.cancel.clone());
                let intent = self.next_record();
                self.work.spawn(async move {
                    // Recorded before the first process: a daemon that dies after this leaves a trace that the next one
                    // finds.
                    if let Err(error) = intent.await {
                        return Done::PodStarted(Err(journal_failed(&spec, &error)));
                    }
                    Done::PodStarted(start::start(&node, &spec, &key, &stages, &cancel).await)
                });
            }
            State::Stopping(_) | State::Stopped { .. } | State::Unknown(_) => {
                answer(reply, Err(self.wrong_state("start")));
            }
        }
    }

    pub(super) fn pod_started(&mut self, started: StartedPod) {
        let StartedPod { live, kernel_release, start_path, interfaces, restored, .. } = started;
        if restored.is_some() {
            // A saved container may have the disk of this name.
            self.volumes.take_first_image();
        }
        self.restored = restored;
        let is_in_cgroup = self.attach_to_cgroup(started.cgroup_attach);
        let forwarding = Forwarding::begin(&self.spec, started.host_ports, live.agent.clone());
        let pod = Box::new(RunningPod::new(live.clone(), started.place, is_in_cgroup, forwarding));
        let waiters = match self.state.take() {
            State::Starting { waiters } => waiters,
            // The stop came when the start was already complete.
            State::Stopping(Stopping { what: Ending::Start { waiters: starts }, waiters, .. }) => {
                self.state = State::Stopping(Stopping { what: Ending::Vm(pod), in_progress: false, waiters });
                // If the VM cannot be ended, its exit is seen later.
                self.watch_vm(live);
                self.end_vm();
                return answer_all(starts, Err(PodError::Cancelled(self.spec.id.clone())));
            }
            // No other state has a start in progress.
            other => return self.state = other,
        };
        let pid = live.vm.record().pid;
        self.enter(State::Ready { pod, fault: None }, |status| {
            status.vmm_pid = pid;
            status.kernel_release = kernel_release;
            status.start_path = start_path;
            status.interfaces = interfaces;
        });
        self.volumes.spare.put(started.spare);
        self.watch_vm(live);
        self.watch_oom_killer(0, 0);
        let detail = match &self.restored {
            Some(Restored { checkpoint: [namespace, name], .. }) => {
                format!("VMM is process {pid}, from checkpoint {namespace}/{name}")
            }
            None => format!("VMM is process {pid}"),
        };
        self.node.events.pod_task(&self.spec.id, Kind::PodReady, detail, self.sandbox_task());
        let recorded = self.next_record();
        let spec = self.spec.clone();
        self.work.spawn(async move {
            // Recorded before containerd is notified, so that the next daemon knows what containerd knows.
            let written = recorded.await;
            answer_all(waiters, written.as_ref().map(drop).map_err(|error| journal_failed(&spec, error)));
            Done::Written(written)
        });
    }

    pub(super) fn start_failed(&mut self, error: PodError) {
        let cancelled = matches!(error, PodError::Cancelled(_));
        let reason = chain(&error);
        if let State::Starting { waiters }
        | State::Stopping(Stopping { what: Ending::Start { waiters }, .. }) = &mut self.state
        {
            answer_all(mem::take(waiters), Err(error));
        }
        if cancelled { self.stopped(String::new(), 0) } else { self.stopped(reason, 1) }
    }

    /// Waits for the move of a VMM into the pod's cgroup. Returns a channel that says when it is there.
    pub(super) fn attach_to_cgroup(&mut self, attach: Option<CgroupAttach>) -> Option<watch::Receiver<bool>> {
        let attach = attach?;
        let (sender, is_in_cgroup) = watch::channel(false);
        let spec = self.spec.clone();
        self.work.spawn(async move {
            match attach.done(&spec).await {
                Ok(()) => {
                    sender.send_replace(true);
                    Done::Nothing
                }
                Err(error) => Done::GuestLost(error),
            }
        });
        Some(is_in_cgroup)
    }

    pub(super) fn watch_vm(&mut self, live: RunningVm) {
        let vm = live.vm.clone();
        self.work.spawn(async move { Done::VmEnded(vm.exited().await) });
        let (node, pod, key) = (self.node.clone(), self.spec.id.clone(), self.link_key.clone());
        let cancel = self.cancel.clone();
        live.agent.follow();
        self.work.spawn(async move {
            // Boxed: the future that waits with it would have space for it twice.
            let session_end = Box::pin(session::keep(node, pod, key, live.clone()));
            let broken = cancel.run_until_cancelled(session_end).await;
            // The waiters get this error.
            live.agent.give_up();
            broken.map_or(Done::Nothing, Done::GuestLost)
        });
    }

    pub(super) fn vm_ended(&mut self, exit: VmExit) {
        match &mut self.state {
            // If an attempt is in progress, this is expected and `PodStopped` follows.
            State::Stopping(Stopping { in_progress: false, .. }) => self.stopped(String::new(), 0),
            State::Ready { fault, .. } => {
                let reason = match fault.take() {
                    Some(error) => chain(&error),
                    None => start::vm_ended(&self.spec, exit).to_string(),
                };
                tracing::warn!(pod = %self.spec.id, reason, "VMM exited unexpectedly");
                let shares = self.volumes.shares.clone();
                self.work.spawn(async move {
                    shares.end().await;
                    Done::Nothing
                });
                self.stopped(reason, KILLED);
            }
            _ => {}
        }
    }

    /// Ends the VM of a guest that broke its session or that cannot be controlled, or of a VMM that cannot be moved to
    /// its cgroup; the pod ends with it.
    pub(super) fn guest_lost(&mut self, error: PodError) {
        let pod = self.spec.id.clone();
        match &mut self.state {
            State::Unknown(unreached) => {
                let vmm = unreached.vmm.clone();
                self.status.send_modify(|status| status.reason = chain(&error));
                self.work.spawn(async move {
                    // The task that waits for the guest's response sees the exit.
                    if let Err(error) = vmm.vmm.end().await {
                        tracing::error!(%pod, error = chain(&error), "cannot kill the VMM of a faulty guest");
                    }
                    Done::Nothing
                });
            }
            State::Ready { pod: running, fault } => {
                *fault = Some(error);
                let vm = running.live.vm.clone();
                self.work.spawn(async move {
                    if let Err(error) = vm.kill().await {
                        tracing::error!(%pod, error = chain(&error), "cannot kill the VMM of a faulty guest");
                    }
                    Done::Nothing
                });
            }
            // The VM of a stopping pod is killed anyway.
            _ => {}
        }
    }

    pub(super) fn on_stop(&mut self, reply: Reply<()>) {
        self.stop();
        match &mut self.state {
            State::Stopping(stopping) => stopping.waiters.push(reply),
            _ => answer(reply, Ok(())),
        }
    }

    /// Stops the pod, unless that is in progress. On return the pod is stopping, or has stopped.
    pub(super) fn stop(&mut self) {
        let (what, in_progress) = match self.state.take() {
            State::Created => return self.stopped(String::new(), 0),
            // A start undoes its own work.
            State::Starting { waiters } => (Ending::Start { waiters }, true),
            State::Ready { pod, .. } => (Ending::Vm(pod), false),
            State::Unknown(pod) => (Ending::Unreached(pod), false),
            // If an earlier attempt has failed, its result was sent.
            state @ State::Stopping(_) => {
                self.state = state;
                return self.end_vm();
            }
            state @ State::Stopped { .. } => return self.state = state,
        };
        self.enter(State::Stopping(Stopping { what, in_progress, waiters: Vec::new() }), |_| ());
        self.cancel.cancel();
        self.end_vm();
    }

    /// Ends the VM of a stopping pod, unless that is in progress.
    pub(super) fn end_vm(&mut self) {
        let State::Stopping(stopping) = &mut self.state else { return };
        if mem::replace(&mut stopping.in_progress, true) {
            return;
        }
        let (node, spec, shares) = (self.node.clone(), self.spec.clone(), self.volumes.shares.clone());
        match &stopping.what {
            Ending::Start { .. } => {}
            Ending::Vm(pod) => {
                let (live, in_cgroup) = (pod.live.clone(), pod.until_in_cgroup());
                self.work.spawn(async move {
                    in_cgroup.await;
                    Done::PodStopped(stop::stop(&node, &spec, &live, &shares).await)
                });
            }
            Ending::Unreached(pod) => {
                let vmm = pod.vmm.clone();
                self.work
                    .spawn(async move { Done::PodStopped(stop::stop_unreached(&node, &spec, &vmm).await) });
            }
        }
    }

    /// Records that the pod has stopped: all its processes have ended.
    pub(super) fn stopped(&mut self, reason: String, exit_status: u32) {
        let (host_ports, stop_waiters) = self.state.take().end();
        self.state = State::Stopped { is_removing: false };
        for kind in [OOM_KILLS, NEEDS, SAVING] {
            self.node.front.forget(&front::key(kind, &self.spec.id, None));
        }
        self.cancel.cancel();
        // The volumes of the guest are no longer updated.
        self.volumes = Arc::new(Volumes::new(self.node.volumes.clone(), self.volumes.shares.clone(), None));
        host_ports::let_go(&self.node.front, &self.spec, &host_ports);
        let unasked = !reason.is_empty();
        let exit = Exit {
            code: KILLED,
            at_ns: now_ns(),
            reason: if unasked { reason.clone() } else { "its pod was stopped".to_owned() },
        };
        let mut ended = Vec::new();
        for (id, container) in &mut self.containers {
            let execs = container.execs.iter_mut().map(|(exec, process)| (Some(exec), process));
            for (exec, process) in iter::once((None, &mut container.init)).chain(execs) {
                if let Some(stderr_writer) = process.stderr_writer.as_ref().filter(|_| unasked) {
                    stderr_writer.write_line(&reason);
                }
                if process.phase.borrow().exit().is_none() {
                    ended.push((id.clone(), exec.cloned()));
                }
                process.end(exit.clone());
            }
        }
        for (container, exec) in ended {
            let kind = if exec.is_none() { Kind::ContainerExited } else { Kind::ExecExited };
            let task = self.task(exec, PathBuf::new(), Some(&exit));
            self.node.events.container(&self.spec.id, &container, kind, exit.reason.clone(), task);
        }
        let vmm_pid = self.status.borrow().vmm_pid;
        self.status.send_modify(|status| {
            status.exited_at_ns = exit.at_ns;
            status.exit_status = exit_status;
            status.vmm_pid = 0;
            status.reason = reason.clone();
            status.state = PodState::Stopped;
        });
        let task = self.sandbox_task().map(|task| TaskDetail { pid: vmm_pid, ..task });
        self.node.events.pod_task(&self.spec.id, Kind::PodStopped, reason, task);
        self.save();
        for reply in stop_waiters {
            answer(reply, Ok(()));
        }
        self.remove_if_due();
    }

    /// Records that the VMM could not be ended. If it exits later, the pod stops.
    pub(super) fn stop_failed(&mut self, error: VmmError) {
        tracing::error!(pod = %self.spec.id, error = chain(&error), "cannot kill the pod's VMM; the pod stays until it exits");
        let State::Stopping(stopping) = &mut self.state else { return };
        stopping.in_progress = false;
        let waiters = mem::take(&mut stopping.waiters);
        if let Ending::Unreached(pod) = &stopping.what {
            let vmm = pod.vmm.clone();
            self.work.spawn(async move { Done::VmEnded(vmm.vmm.ended().await) });
        }
        answer_all(waiters.into_iter().chain(self.remove_waiters.drain(..)), Err(error.into()));
    }

    pub(super) fn on_remove(&mut self, reply: Reply<()>) {
        self.remove_waiters.push(reply);
        // Once stopped, the pod is removed: see `stopped`.
        self.stop();
        self.remove_if_due();
    }

    /// Removes the pod if this was requested, the pod has stopped, and no creation in it is unfinished: a creation
    /// undoes its own work.
    pub(super) fn remove_if_due(&mut self) {
        let is_making = !self.being_made.is_empty() || !self.execs_being_made.is_empty();
        let State::Stopped { is_removing } = &mut self.state else { return };
        if self.remove_waiters.is_empty() || is_making || mem::replace(is_removing, true) {
            return;
        }
        let (node, journal, spec) = (self.node.clone(), self.journal.clone(), self.spec.clone());
        let shares = self.volumes.shares.clone();
        let containers: Vec<_> = self.containers.keys().cloned().collect();
        for id in containers {
            self.take_container(&id, &never_started());
        }
        self.work.spawn(async move {
            shares.end().await;
            let removed = async {
                stop::clear(&node, &spec).await?;
                // Last: without the record, the next worker could not find what is left.
                journal.remove().await.map_err(|error| journal_failed(&spec, &error))
            };
            Done::Removed(removed.await)
        });
    }

    pub(super) fn removed(&mut self, result: Result<(), PodError>) {
        self.state = State::Stopped { is_removing: false };
        if result.is_ok() {
            // Before the reply: the caller may reuse the id.
            self.node.registry.remove(&self.spec.id);
            self.node.events.pod_task(&self.spec.id, Kind::PodRemoved, "", self.sandbox_task());
        }
        answer_all(self.remove_waiters.drain(..), result);
    }

    /// Returns the details that containerd's events contain for the pod; `None` if it does not know the pod as a
    /// container.
    fn sandbox_task(&self) -> Option<TaskDetail> {
        let bundle = self.spec.bundle.clone().filter(|_| !self.spec.alone)?;
        let status = self.status.borrow();
        let exit = sandbox_exit(&status).map(|exit| (exit.code, exit.at_ns));
        Some(TaskDetail { exec: None, pid: status.vmm_pid, bundle, exit })
    }
}
