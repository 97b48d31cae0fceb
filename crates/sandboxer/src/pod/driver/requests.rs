//! Handles requests to the pod's task: changes its state and starts work, without waiting.

use std::{future::Future, time::Duration};

use futures::future::{OptionFuture, join_all};
use sandboxer_base::chain;
use sandboxer_guest::{GuestError, Signal};
use sandboxer_protocol::{
    id::{ContainerId, ExecId},
    newer,
    stage::Stage,
};

use super::{
    CLOSED, Driver, Making, answer,
    done::{Done, Limited},
    processes::no_exit,
    state::State,
};
use crate::{
    error::PodError,
    front,
    pod::{
        admission::Work,
        checkpoint,
        container::{
            self, Container, Exit, NewContainer, Phase, StdioPaths,
            io::Subject,
            resources::HostCpus,
            start::{self as work, CreateContext},
        },
        limits::ContainerLimits,
        request::{Reply, Request},
        running_vm::RunningVm,
        spec::Limits,
        stages::Stages,
    },
    state::PodState,
    traces::SpanContext,
};

/// Time limit of a deletion for output that nobody reads; then the rest is lost, as with a shim.
const OUTPUT_WITHIN: Duration = Duration::from_secs(2);

impl Driver {
    pub(super) fn handle(&mut self, request: Request) {
        match request {
            Request::Start { request, reply } => self.on_start(request, reply),
            Request::Stop { reply } => self.on_stop(reply),
            Request::Remove { reply } => self.on_remove(reply),
            Request::CreateContainer { new, request, reply } => self.on_create_container(new, request, reply),
            Request::CreateExec { id, exec, process, stdio, reply } => {
                self.on_create_exec(id, exec, process, stdio, reply);
            }
            Request::StartProcess { id, exec, again, request, reply } => {
                self.on_start_process(id, exec, again, request, reply);
            }
            Request::Process { id, exec, reply } => answer(reply, self.view_process(&id, exec.as_ref())),
            Request::Signal { id, exec, signal, reply } => self.on_signal(id, exec, signal, reply),
            Request::Delete { id, exec, reply } => self.on_delete(id, exec, reply),
            Request::CloseStdin { id, exec, reply } => {
                let closed = self.process_mut(&id, exec.as_ref()).map(|process| {
                    process.is_stdin_closed = true;
                    if let Some(stdin) = &process.stdin {
                        stdin.close();
                    }
                });
                let closed = closed.and_then(|()| self.note(CLOSED, &id, exec.as_ref(), &()));
                answer(reply, closed);
            }
            Request::Resize { id, exec, columns, rows, reply } => {
                let checked = self.running(&id, exec.as_ref());
                // As with runc's shim, a size for what has no terminal, or none yet, is no error, also of an ended container.
                let is_idle = self.process(&id, exec.as_ref()).is_ok_and(|process| {
                    !process.stdio.terminal
                        || (exec.is_some() && matches!(*process.phase.borrow(), Phase::Created))
                });
                if is_idle && (checked.is_ok() || exec.is_none()) {
                    return answer(reply, Ok(()));
                }
                self.forward(checked, reply, move |live| async move {
                    Ok(live.agent.resize_terminal(&id, exec.as_ref(), columns, rows).await?)
                });
            }
            Request::SetPaused { id, paused, reply } => self.on_set_paused(id, paused, reply),
            Request::Update { id, resources, reply } => self.on_update(id, resources, reply),
            Request::UpdatePod { limits, reply } => self.on_update_pod(limits, reply),
            Request::Pids { id, reply } => {
                // A containerd that starts takes a task without any for one that was never made, and forgets its exit: so an exited
                // container has its first process until it is deleted.
                if let Ok(init) = self.process(&id, None)
                    && init.has_exited()
                {
                    return answer(reply, Ok(vec![init.pid]));
                }
                let checked = self.running(&id, None);
                self.forward(checked, reply, move |live| async move { Ok(live.agent.pids(&id).await?) });
            }
            Request::Stats { container, reply } => {
                let checked = container.as_ref().map_or(Ok(()), |id| self.process(id, None).map(drop));
                let readings = self.readings.clone();
                self.forward(checked, reply, move |live| async move {
                    let subject = container.clone();
                    let agent = live.agent;
                    let read = async move { Ok(agent.stats(subject.as_ref()).await?) };
                    let vm = live.vm;
                    readings.read(container, move || vm.cpu_time(), read).await
                });
            }
            Request::SyncClock { reply } => {
                self.forward(Ok(()), reply, move |live| async move { Ok(live.agent.sync_clock().await?) });
            }
            Request::Move { node, reply } => self.on_move(node, reply),
            Request::Checkpoint { name, stop, reply } => self.on_checkpoint(name, stop, reply),
            Request::Inspect { reply } => answer(reply, Ok(self.view())),
        }
    }

    fn on_create_container(&mut self, mut new: NewContainer, request: SpanContext, reply: Reply<()>) {
        let State::Ready { pod, .. } = &self.state else {
            return answer(reply, Err(self.wrong_state("create a container")));
        };
        let (live, in_cgroup) = (pod.live.clone(), pod.until_in_cgroup());
        value_or_answer!(reply, self.not_being_saved("create a container"));
        if self.containers.contains_key(&new.id) || self.being_made.contains_key(&new.id) {
            return answer(reply, Err(PodError::ContainerExists(new.id)));
        }
        let runs = |container: &Container| *container.init.phase.borrow() == Phase::Running;
        let running = self.containers.iter().filter(|(_, container)| runs(container));
        new.beside = running.map(|(id, _)| id.clone()).collect();
        let stages = Stages::new(self.spec.id.clone(), self.node.stage_times.clone()).within(request);
        let cancel = self.cancel.child_token();
        let making = Making { stages: stages.clone(), cancel: cancel.clone(), deletions: Vec::new() };
        self.being_made.insert(new.id.clone(), making);
        let (node, spec, volumes) = (self.node.clone(), self.spec.clone(), self.volumes.clone());
        let restored = self.restored.clone();
        self.work.spawn(async move {
            let _urgent = node.admission.urgent();
            let turn = async {
                in_cgroup.await;
                node.admission.enter(Work::Container).await
            };
            let cancelled = || PodError::Cancelled(spec.id.clone());
            let made = async {
                let mut saved = None;
                if let Some(restored) = &restored {
                    let identify = checkpoint::identify(&node, &spec, &new.id, &new.bundle);
                    let identity = cancel.run_until_cancelled(identify).await.ok_or_else(cancelled)??;
                    if let Some(found) = restored.find(&identity)? {
                        restored.check_layers(&node, &spec, &new, (found, &identity)).await?;
                        saved = Some((restored, found));
                    }
                }
                // Before admission: a slow volume must not hold a permit.
                let on_disk = spec.image_volumes_on_disk && live.agent.knows(&newer::IMAGE_VOLUMES);
                let look = container::spec::read(&spec, &new, &node.volumes.helpers, on_disk);
                let mut guest_spec = cancel.run_until_cancelled(look).await.ok_or_else(cancelled)??;
                if let Some((restored, saved)) = saved {
                    let means = (&node.front, &*volumes);
                    return work::adopt(&spec, &live, means, &new, guest_spec, (restored, saved)).await;
                }
                if let Some(restored) = &restored {
                    restored.rename(&mut guest_spec)?;
                }
                let turn = async { cancel.run_until_cancelled(turn).await.ok_or_else(cancelled) };
                let place = stages.run(Stage::Queue, turn).await?;
                let (front, rootfs) = (&node.front, &node.rootfs);
                let (volumes, stages, cancel) = (&volumes, &stages, &cancel);
                let means = CreateContext { front, rootfs, volumes, stages, place, cancel };
                work::create(&spec, &live, means, &new, guest_spec).await
            };
            let result = made.await.map(Box::new);
            Done::ContainerCreated { new: Box::new(new), result, reply }
        });
    }

    fn on_create_exec(
        &mut self,
        id: ContainerId,
        exec: ExecId,
        process: Vec<u8>,
        stdio: StdioPaths,
        reply: Reply<()>,
    ) {
        let subject = (id.clone(), exec.clone());
        if self.process(&id, Some(&exec)).is_ok() || self.execs_being_made.contains(&subject) {
            return answer(reply, Err(PodError::ExecExists { container: id, exec }));
        }
        value_or_answer!(reply, self.running(&id, None));
        value_or_answer!(reply, self.not_being_saved("create an exec"));
        if self.containers.get(&id).is_some_and(|container| container.is_paused()) {
            let (subject, state) = (format!("container {id}"), "paused".to_owned());
            return answer(reply, Err(PodError::State { action: "create an exec", subject, state }));
        }
        let live = value_or_answer!(reply, self.live("create an exec"));
        self.execs_being_made.insert(subject);
        let (pod, front) = (self.spec.id.clone(), self.node.front.clone());
        self.work.spawn(async move {
            let result = work::create_exec(&pod, &live, &front, &id, &exec, &process, &stdio).await;
            Done::ExecCreated { id, exec, stdio, result, reply }
        });
    }

    fn on_start_process(
        &mut self,
        id: ContainerId,
        exec: Option<ExecId>,
        again: bool,
        request: SpanContext,
        reply: Reply<()>,
    ) {
        let live = value_or_answer!(reply, self.live("start a process"));
        value_or_answer!(reply, self.not_being_saved("start a process"));
        let stages = self.containers.get(&id).map(|container| container.stages.clone().within(request));
        let process = value_or_answer!(reply, self.process_mut(&id, exec.as_ref()));
        let phase = process.phase.borrow().clone();
        if again && matches!(phase, Phase::Running | Phase::Exited(_)) {
            // The agent starts a process once, and remembers the result.
            return self.forward(Ok(()), reply, move |live| async move {
                Ok(live.agent.start_process(&id, exec.as_ref()).await.map(drop)?)
            });
        }
        let (Phase::Created, Some(io), Some(stages)) = (&phase, process.io.take(), stages) else {
            let subject = format!("process of container {id}");
            let state = phase.as_str().to_owned();
            return answer(reply, Err(PodError::State { action: "start it", subject, state }));
        };
        process.phase.send_replace(Phase::Starting);
        let subject = Subject { container: id, exec };
        let (running, stdin) = io.run(&live.agent, &subject, false);
        if let Some(stdin) = stdin.as_ref().filter(|_| process.is_stdin_closed) {
            stdin.close();
        }
        process.stdin = stdin;
        let input = running.gate();
        process.running = Some(running);
        self.work.spawn(async move {
            let release = work::release(&live, &subject);
            let result = match subject.exec {
                None => stages.run(sandboxer_protocol::stage::Stage::ContainerStart, release).await,
                Some(_) => release.await,
            };
            input.notify_one();
            Done::ProcessStarted { subject, result, reply }
        });
    }

    fn on_signal(&mut self, id: ContainerId, exec: Option<ExecId>, signal: Signal, reply: Reply<()>) {
        // As with runc, none of its processes is left to be missed.
        if signal.all && exec.is_none() && self.process(&id, None).is_ok_and(|init| init.has_exited()) {
            return answer(reply, Ok(()));
        }
        // The agent knows whether the signal ended the process.
        let checked = match signal.again {
            true => self.process(&id, exec.as_ref()).map(drop),
            false => self.running(&id, exec.as_ref()),
        };
        let process = self.process(&id, exec.as_ref());
        let watched = process.map(|process| (process.phase.subscribe(), process.is_followed));
        let (mut phase, is_followed) = value_or_answer!(reply, checked.and(watched));
        let Some(live) = self.running_vm() else {
            return self.on_signal_unreached(id, exec, &signal, reply);
        };
        // The exit is reported after the termination message was written, which may have to wait for a volume.
        let has_message = self.containers.get(&id).is_some_and(|container| container.message.is_some());
        let writing = if has_message { self.node.config.volumes.timeout } else { Duration::ZERO };
        let limit = live.agent.patience() + writing;
        self.work.spawn(async move {
            let result = live.agent.signal_process(&id, exec.as_ref(), &signal).await;
            // A kill always kills, whatever the guest does.
            if exec.is_some() || signal.number != Signal::KILL {
                answer(reply, result.map_err(PodError::from));
                return Done::Nothing;
            }
            if let Err(error @ GuestError::Failed { .. }) = result {
                answer(reply, Ok(()));
                return Done::GuestLost(error.into());
            }
            answer(reply, result.map_err(PodError::from));
            // Only an exit that this daemon waits for can show that the guest does not end a process.
            if !is_followed {
                return Done::Nothing;
            }
            match tokio::time::timeout(limit, phase.wait_for(|phase| phase.exit().is_some())).await {
                Ok(_) => Done::Nothing,
                Err(_) => Done::GuestLost(live.agent.not_exited(id, limit).into()),
            }
        });
    }

    /// Handles a signal to an unreachable guest: the signal is lost, but a kill of a container ends the VMM, because
    /// containerd kills containers before it stops a pod.
    fn on_signal_unreached(
        &mut self,
        id: ContainerId,
        exec: Option<ExecId>,
        signal: &Signal,
        reply: Reply<()>,
    ) {
        let refused = self.wrong_state("signal a process");
        if !matches!(self.state, State::Unknown(_)) || exec.is_some() || signal.number != Signal::KILL {
            return answer(reply, Err(refused));
        }
        let (mut status, limit) = (self.status.subscribe(), self.node.config.vm.agent_timeout);
        self.work.spawn(async move {
            let resolved = status.wait_for(|status| status.state != PodState::Unknown);
            if tokio::time::timeout(limit, resolved).await.is_ok() {
                // The caller retries until the guest responds or everything has ended.
                answer(reply, Err(refused));
                return Done::Nothing;
            }
            tracing::warn!(container = %id, "killing the VMM of a pod that cannot be reached: its container is to be killed");
            answer(reply, Ok(()));
            Done::GuestLost(refused)
        });
    }

    fn on_delete(&mut self, id: ContainerId, exec: Option<ExecId>, reply: Reply<Exit>) {
        if let (Some(making), None) = (self.being_made.get_mut(&id), &exec) {
            // The creation ends, undoes its work and replies.
            making.cancel.cancel();
            return making.deletions.push(reply);
        }
        let process = value_or_answer!(reply, self.process(&id, exec.as_ref()));
        // The guest may have the container.
        if self.state.unreached().is_some() {
            return answer(reply, Err(self.wrong_state("delete a process")));
        }
        let phase = process.phase.borrow().clone();
        if matches!(phase, Phase::Running | Phase::Starting) {
            let subject = format!("container {id}");
            let state = phase.as_str().to_owned();
            return answer(reply, Err(PodError::State { action: "delete it", subject, state }));
        }
        let exit = phase.exit().cloned().unwrap_or_else(no_exit);
        let disks =
            self.containers.get(&id).map(|container| work::serials(&container.disks)).unwrap_or_default();
        let last_outputs: Vec<_> = match (self.containers.get_mut(&id), &exec) {
            (None, _) => Vec::new(),
            (Some(container), None) => {
                container.processes_mut().filter_map(|process| process.last_output.take()).collect()
            }
            (Some(container), Some(exec)) => container
                .process_mut(Some(exec))
                .and_then(|process| process.last_output.take())
                .into_iter()
                .collect(),
        };
        let live = self.running_vm();
        let (front, pod) = (self.node.front.clone(), self.spec.id.clone());
        // The exit is recorded before the agent forgets it.
        let recorded = exec.is_none().then(|| self.next_record());
        self.work.spawn(async move {
            if let Some(Err(error)) = OptionFuture::from(recorded).await {
                // The record is written again after the deletion.
                tracing::warn!(%pod, error = chain(&error), "cannot record a container's exit before its deletion");
            }
            join_all(last_outputs.into_iter().map(|last_output| last_output.within(OUTPUT_WITHIN))).await;
            front.remember_deleted(front::key(front::DELETED, &id, exec.as_ref()), &exit);
            let result = match (&live, &exec) {
                // The guest is gone, with everything in it.
                (None, _) => Ok(()),
                (Some(live), None) => work::delete(live, &id, &disks).await,
                (Some(live), Some(exec)) => live.agent.delete_exec(&id, exec).await.map_err(PodError::from),
            };
            Done::Deleted { id, exec, result: result.map(|()| exit), reply }
        });
    }

    fn on_set_paused(&mut self, id: ContainerId, paused: bool, reply: Reply<()>) {
        value_or_answer!(reply, self.running(&id, None));
        value_or_answer!(reply, self.not_being_saved("pause or resume a container"));
        let action = if paused { "pause a container" } else { "resume a container" };
        if self.containers.get(&id).is_some_and(|container| container.is_paused() == paused) {
            let state = if paused { "paused" } else { "running" }.to_owned();
            return answer(reply, Err(PodError::State { action, subject: format!("container {id}"), state }));
        }
        let live = value_or_answer!(reply, self.live(action));
        self.work.spawn(async move {
            let result = match paused {
                true => live.agent.pause_container(&id).await,
                false => live.agent.resume_container(&id).await,
            };
            Done::Paused { id, paused, result: result.map_err(PodError::from), reply }
        });
    }

    fn on_update(&mut self, id: ContainerId, resources: Vec<u8>, reply: Reply<()>) {
        value_or_answer!(reply, self.running(&id, None));
        let live = value_or_answer!(reply, self.live("ask the guest"));
        let (cpus, resources) = HostCpus::take(resources);
        let resizer = self.resizer.clone();
        self.work.spawn(async move {
            if ContainerLimits::of_json(&resources) == ContainerLimits::default() {
                let result = live.agent.update_container(&id, resources).await.map_err(PodError::from);
                let container = Some((id, cpus));
                return Done::Limited(Limited { container, change: None, result, reply });
            }
            let mut change = resizer.change(&live).await;
            let result = change.of_container(&id, resources).await;
            Done::Limited(Limited { container: Some((id, cpus)), change: Some(change), result, reply })
        });
    }

    fn on_update_pod(&mut self, limits: Limits, reply: Reply<()>) {
        let live = value_or_answer!(reply, self.live("ask the guest"));
        let limits = limits.without(self.node.cgroups.unlimited(&self.spec.cgroup_parent));
        let resizer = self.resizer.clone();
        self.work.spawn(async move {
            let mut change = resizer.change(&live).await;
            let result = change.of_pod(&limits).await;
            Done::Limited(Limited { container: None, change: Some(change), result, reply })
        });
    }

    /// Calls the agent in another task; the pod's state does not change.
    fn forward<T, F>(
        &mut self,
        checked: Result<(), PodError>,
        reply: Reply<T>,
        ask: impl FnOnce(RunningVm) -> F + Send + 'static,
    ) where
        T: Send + 'static,
        F: Future<Output = Result<T, PodError>> + Send,
    {
        match checked.and_then(|()| self.live("ask the guest")) {
            Err(error) => answer(reply, Err(error)),
            Ok(live) => {
                self.work.spawn(async move {
                    answer(reply, ask(live).await);
                    Done::Nothing
                });
            }
        }
    }
}
