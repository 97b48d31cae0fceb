//! Handles results of work: updates the pod's state and replies to the waiters.

use std::{iter, net::TcpListener, path::PathBuf, sync::Arc};

use sandboxer_base::{chain, clock::now_ns};
use sandboxer_vmm::{Shape, VmExit, VmmError};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::{CLOSED, Done, Driver, Limited, NEEDS, OOM_KILLS, answer, answer_all, journal_failed};
use crate::{
    error::PodError,
    events::{Kind, TaskDetail},
    front,
    pod::{
        cgroup_attach::CgroupAttach,
        container::{
            Exit, KILLED, Phase,
            io::{StdinCloser, Subject},
        },
        forward, host_ports,
        journal::JournalError,
        placer::Placement,
        recover::{Reached, Resolved, Unreached, settle},
        resize::Change,
        sandbox_exit, session,
        start::{self, Up},
        volumes::Volumes,
    },
    state::PodState,
};

impl Driver {
    pub(super) fn apply(&mut self, done: Done) {
        match done {
            Done::Nothing | Done::Removed(_) => {}
            Done::Limited(limited) => self.limited(limited),
            Done::LimitsRecorded { written, change, is_changed } => {
                self.limits_recorded(written, change, is_changed);
            }
            Done::Measured(size) => self.measured(size),
            Done::PodStarted(Ok(up)) => self.pod_started(up),
            Done::PodStarted(Err(error)) => self.start_failed(error),
            Done::PodStopped(Ok(())) => {
                self.ending = false;
                self.stopped(String::new(), 0);
            }
            Done::PodStopped(Err(error)) => self.stop_failed(error),
            Done::Resolved(resolved) => self.resolved(resolved),
            Done::VmEnded(exit) => self.vm_ended(exit),
            Done::GuestLost(error) => self.guest_lost(error),
            Done::ContainerCreated { new, result, reply } => self.container_created(*new, result, reply),
            Done::ContainerRecorded { of, intent, result, reply } => {
                self.container_recorded(of, intent, result, reply);
            }
            Done::ContainerUndone { of, intent, why, result, reply } => {
                self.container_undone(&of, intent, why, result, reply);
            }
            Done::ExecCreated { of, exec, stdio, result, reply } => {
                self.exec_created(of, exec, stdio, result, reply);
            }
            Done::ProcessStarted { subject, result, reply } => self.process_started(subject, result, reply),
            Done::ProcessEnded { subject, exit } => self.exit_seen(&subject, exit),
            Done::OutOfMemory { of, seen } => self.out_of_memory(&of, seen),
            Done::Written(written) => self.written(written),
            Done::Rewrite(pause) => self.rewrite(pause),
            Done::Moved { result, reply } => self.moved(result, reply),
            Done::Deleted { of, exec, result, reply } => self.deleted(of, exec, result, reply),
            Done::Paused { of, paused, result, reply } => {
                if result.is_ok()
                    && let Some(container) = self.containers.get_mut(&of)
                {
                    container.paused = paused;
                    let kind = if paused { Kind::ContainerPaused } else { Kind::ContainerResumed };
                    let task = self.task(None, PathBuf::new(), None);
                    self.node.events.container(&self.spec.id, &of, kind, "", task);
                }
                answer(reply, result);
            }
        }
    }

    /// Records changed limits of the pod or of a container before the reply, because the caller relies on them. Only
    /// then does the VM shrink.
    fn limited(&mut self, Limited { of, change, result, reply }: Limited) {
        // Cached statistics contain the old limits.
        if let Some((of, _)) = &of {
            self.readings.forget(Some(of));
        }
        self.readings.forget(None);
        if let Some(change) = &change {
            self.spec.limits = self.spec.limits.changed_by(change.limits());
        }
        let is_changed = result.is_ok();
        if let Some((of, cpus)) = of.filter(|_| is_changed) {
            self.update_cpus(&of, cpus);
        }
        let (recorded, spec) = (self.next_record(), self.spec.clone());
        self.work.spawn(async move {
            let written = recorded.await;
            answer(
                reply,
                result.and(written.as_ref().map(drop).map_err(|error| journal_failed(&spec, error))),
            );
            Done::LimitsRecorded { written, change, is_changed }
        });
    }

    fn limits_recorded(
        &mut self,
        written: Result<(), JournalError>,
        change: Option<Change>,
        is_changed: bool,
    ) {
        if let Some(change) = change {
            let shrinks = is_changed && written.is_ok();
            self.work.spawn(async move {
                if shrinks {
                    change.end().await;
                }
                Done::Measured(change.size().await)
            });
        }
        self.written(written);
    }

    /// Accounts for the VM with its current size.
    fn measured(&mut self, size: Option<Shape>) {
        let Some(Shape { vcpus, memory_mib, .. }) = size else { return };
        self.size = Shape { vcpus, memory_mib, ..self.size };
        if let Some(seat) = &self.placement.seat {
            seat.resize(vcpus, memory_mib);
        }
    }

    fn pod_started(&mut self, up: Up) {
        self.wait_until_counted(up.counting);
        let unwanted = match self.state() {
            // The stop came when the start was already complete.
            PodState::Stopping => Err(PodError::Cancelled(self.spec.id.clone())),
            // The result belongs to no request.
            _ => self.may_become(PodState::Ready),
        };
        if let Err(error) = unwanted {
            self.live = Some(up.live);
            // If the VM cannot be ended, its exit is seen later.
            self.watch_vm();
            self.end_vm();
            return answer_all(self.start_waiters.drain(..), Err(error));
        }
        let (pid, release, start_path) = (up.live.vm.record().pid, up.ready.kernel_release, up.start_path);
        let interfaces = up.interfaces;
        self.status.send_modify(|status| {
            status.vmm_pid = pid;
            status.kernel_release = release;
            status.start_path = Some(start_path);
            status.interfaces = interfaces;
            status.state = PodState::Ready;
        });
        self.volumes.spare.put(up.spare);
        self.placed = self.node.placer.bounds(up.placement.seat.as_ref());
        self.placement = up.placement;
        self.live = Some(up.live);
        self.watch_vm();
        self.watch_oom_killer(0, 0);
        self.forward_ports(up.host_ports);
        let detail = format!("VMM is process {pid}");
        self.node.events.pod_task(&self.spec.id, Kind::PodReady, detail, self.sandbox_task());
        let waiters: Vec<_> = self.start_waiters.drain(..).collect();
        let recorded = self.next_record();
        let spec = self.spec.clone();
        self.work.spawn(async move {
            // Recorded before containerd is notified, so that the next daemon knows what containerd knows.
            let written = recorded.await;
            answer_all(waiters, written.as_ref().map(drop).map_err(|error| journal_failed(&spec, error)));
            Done::Written(written)
        });
    }

    fn wait_until_counted(&mut self, counting: Option<CgroupAttach>) {
        let Some(counting) = counting else { return };
        let (counted, is_counted) = watch::channel(false);
        self.counted = Some(is_counted);
        let spec = self.spec.clone();
        self.work.spawn(async move {
            match counting.done(&spec).await {
                Ok(()) => {
                    counted.send_replace(true);
                    Done::Nothing
                }
                Err(error) => Done::GuestLost(error),
            }
        });
    }

    fn start_failed(&mut self, error: PodError) {
        let cancelled = matches!(error, PodError::Cancelled(_));
        let reason = chain(&error);
        answer_all(self.start_waiters.drain(..), Err(error));
        if self.state() == PodState::Starting {
            // The state diagram allows it; an error has been logged.
            let _ = self.become_state(PodState::Stopping);
        }
        if cancelled { self.stopped(String::new(), 0) } else { self.stopped(reason, 1) }
    }

    fn vm_ended(&mut self, exit: VmExit) {
        // If the VM is being stopped, this is expected and `PodStopped` follows.
        if self.state() == PodState::Stopping && !self.ending {
            return self.stopped(String::new(), 0);
        }
        if self.state() == PodState::Ready {
            let reason = match self.lost.take() {
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
    }

    /// Ends the VM of a guest that broke its session or that cannot be controlled, or of a VMM that cannot be moved to
    /// its cgroup; the pod ends with it.
    fn guest_lost(&mut self, error: PodError) {
        if let (PodState::Unknown, Some(unreached)) = (self.state(), self.unreached.clone()) {
            let pod = self.spec.id.clone();
            self.status.send_modify(|status| status.reason = chain(&error));
            self.work.spawn(async move {
                // The task that waits for the guest's response sees the exit.
                if let Err(error) = unreached.vmm.end().await {
                    tracing::error!(%pod, error = chain(&error), "cannot kill the VMM of a faulty guest");
                }
                Done::Nothing
            });
            return;
        }
        // The VM of a stopping pod is killed anyway.
        let Some(live) = self.live.clone().filter(|_| self.state() == PodState::Ready) else { return };
        self.lost = Some(error);
        let pod = self.spec.id.clone();
        self.work.spawn(async move {
            if let Err(error) = live.vm.kill().await {
                tracing::error!(%pod, error = chain(&error), "cannot kill the VMM of a faulty guest");
            }
            Done::Nothing
        });
    }

    /// Records that the pod has stopped: all its processes have ended.
    pub(super) fn stopped(&mut self, reason: String, exit_status: u32) {
        if self.state() == PodState::Stopped {
            return;
        }
        if let Err(error) = self.may_become(PodState::Stopped) {
            return answer_all(self.stop_waiters.drain(..).chain(self.remove_waiters.drain(..)), Err(error));
        }
        self.live = None;
        self.unreached = None;
        self.placement = Placement::default();
        for kind in [OOM_KILLS, NEEDS] {
            self.node.front.forget(&front::key(kind, &self.spec.id, None));
        }
        self.cancel.cancel();
        // The volumes of the guest are no longer updated.
        self.volumes = Arc::new(Volumes::new(self.node.volumes.clone(), self.volumes.shares.clone(), None));
        self.forwarding = None;
        host_ports::let_go(&self.node.front, &self.spec, &std::mem::take(&mut self.host_ports));
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
        for reply in self.stop_waiters.drain(..) {
            answer(reply, Ok(()));
        }
        self.remove_if_due();
    }

    /// Records that the VMM could not be ended. If it exits later, the pod stops.
    fn stop_failed(&mut self, error: VmmError) {
        self.ending = false;
        tracing::error!(pod = %self.spec.id, error = chain(&error), "cannot kill the pod's VMM; the pod stays until it exits");
        answer_all(self.stop_waiters.drain(..).chain(self.remove_waiters.drain(..)), Err(error.into()));
        if let Some(unreached) = self.unreached.clone() {
            self.work.spawn(async move { Done::VmEnded(unreached.vmm.ended().await) });
        }
    }

    /// Waits until an earlier daemon's pod responds or its VMM exits.
    pub(super) fn wait_for_answer(&mut self, unreached: Arc<Unreached>) {
        self.unreached = Some(unreached.clone());
        if self.state() == PodState::Stopping {
            return self.end_vm();
        }
        let (node, told, cancel) = (self.node.clone(), self.status.clone(), self.cancel.clone());
        self.work.spawn(async move {
            let resolved = cancel.run_until_cancelled(unreached.resolve(&node, &told)).await;
            resolved.map_or(Done::Nothing, Done::Resolved)
        });
    }

    fn resolved(&mut self, resolved: Resolved) {
        // A stop came first and kills the guest.
        if self.state() != PodState::Unknown {
            return;
        }
        match resolved {
            Resolved::Reached(reached) => {
                tracing::info!(pod = %self.spec.id, "the pod answers again");
                self.status.send_modify(|status| {
                    status.reason = String::new();
                    status.recovered = true;
                    status.overdue = false;
                    status.state = PodState::Ready;
                });
                self.unreached = None;
                self.take_up(*reached);
                self.save();
            }
            Resolved::Ended(reason) => {
                tracing::warn!(pod = %self.spec.id, reason, "VMM exited unexpectedly");
                self.stopped(reason, KILLED);
            }
        }
    }

    /// Continues where an earlier daemon stopped.
    pub(super) fn take_up(&mut self, reached: Reached) {
        let Reached { live, known, volumes, made } = reached;
        let (store, shares) = (self.node.volumes.clone(), self.volumes.shares.clone());
        self.volumes = Arc::new(Volumes::found(store, shares, self.spec.room.empty_dir_bytes, volumes, made));
        for (id, container) in &mut self.containers {
            settle(&self.node, &self.spec, id, container, &known);
        }
        let host_ports = host_ports::listen_again(&self.node.front, &self.spec);
        self.live = Some(live.clone());
        self.watch_vm();
        self.wait_until_counted(CgroupAttach::go_on(&self.node, &self.spec, &live.vm));
        self.forward_ports(host_ports);
        self.place();
        let mut followed = Vec::new();
        for (id, container) in &mut self.containers {
            let execs = container.execs.iter_mut().map(|(id, exec)| (Some(id.clone()), exec));
            for (exec, process) in std::iter::once((None, &mut container.init)).chain(execs) {
                let subject = Subject { container: id.clone(), exec };
                process.is_stdin_closed = self.node.front.take(&subject.key(CLOSED)).is_some();
                let phase = process.phase.borrow().clone();
                if phase != Phase::Created
                    && let Some(io) = process.io.take()
                {
                    let (copies, stdin): (_, Option<StdinCloser>) = io.run(&live.agent, &subject, true);
                    if let Some(stdin) = stdin.as_ref().filter(|_| process.is_stdin_closed) {
                        stdin.close();
                    }
                    (process.running, process.stdin) = (Some(copies), stdin);
                }
                match phase {
                    Phase::Exited(_) => process.pass_last_output(),
                    // A created exec has no process to wait for.
                    Phase::Created if subject.exec.is_some() => {}
                    Phase::Created | Phase::Starting | Phase::Running => followed.push(subject),
                }
            }
        }
        let seen = self.node.front.take(&front::key(OOM_KILLS, &self.spec.id, None));
        self.watch_oom_killer(seen.and_then(|seen| seen.note()).unwrap_or_default(), 0);
        let created = self.status.borrow().created_at_ns;
        for subject in followed {
            self.follow(subject, created);
        }
        // An earlier daemon may have changed the size.
        let (resizer, vm) = (self.resizer.clone(), live.vm.clone());
        self.work.spawn(async move { Done::Measured(resizer.size(&*vm).await.ok()) });
        let volumes = self.volumes.clone();
        self.work.spawn(async move {
            volumes.go_on(&live).await;
            Done::Nothing
        });
        self.node.events.pod(&self.spec.id, Kind::PodRecovered, "");
    }

    fn watch_vm(&mut self) {
        if let Some(live) = &self.live {
            let (vm, live) = (live.vm.clone(), live.clone());
            self.work.spawn(async move { Done::VmEnded(vm.exited().await) });
            let (node, pod, key) = (self.node.clone(), self.spec.id.clone(), self.link_key.clone());
            let cancel = self.cancel.clone();
            live.agent.follow();
            self.work.spawn(async move {
                // Boxed: the future that waits with it would have space for it twice.
                let kept = Box::pin(session::keep(node, pod, key, live.clone()));
                let broken = cancel.run_until_cancelled(kept).await;
                // The waiters get this error.
                live.agent.give_up();
                broken.map_or(Done::Nothing, Done::GuestLost)
            });
        }
    }

    /// Returns the details that containerd's events contain for the pod; `None` if it does not know the pod as a
    /// container.
    fn sandbox_task(&self) -> Option<TaskDetail> {
        let bundle = self.spec.bundle.clone()?;
        let status = self.status.borrow();
        let exit = sandbox_exit(&status).map(|exit| (exit.code, exit.at_ns));
        Some(TaskDetail { exec: None, pid: status.vmm_pid, bundle, exit })
    }

    /// Sets up port forwarding in parallel with the start.
    fn forward_ports(&mut self, host_ports: Vec<TcpListener>) {
        let Some(live) = &self.live else { return };
        let (pod, netns, agent) = (self.spec.id.clone(), self.spec.netns.clone(), live.agent.clone());
        self.host_ports = host_ports.iter().filter_map(|listener| listener.try_clone().ok()).collect();
        let forwarding = async move {
            match netns {
                Some(netns) => forward::serve(pod, &netns, agent).await,
                None => forward::serve_host(pod, host_ports, agent).await,
            }
        };
        self.forwarding = Some(AbortOnDropHandle::new(tokio::spawn(forwarding)));
    }

    pub(super) fn answer_removed(&mut self, result: Result<(), PodError>) {
        if result.is_ok() {
            // Before the reply: the caller may reuse the id.
            self.node.registry.remove(&self.spec.id);
            self.node.events.pod_task(&self.spec.id, Kind::PodRemoved, "", self.sandbox_task());
        }
        answer_all(self.remove_waiters.drain(..), result);
    }
}
