//! What the pod's task does when work has ended: take the result into its state, tell who waits.

use super::*;

impl Driver {
    pub(super) fn apply(&mut self, done: Done) {
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
            Done::GuestLost(error) => self.guest_lost(error),
            Done::ContainerCreated { new, stages, result, reply } => {
                self.container_created(*new, stages, result, reply);
            }
            Done::ExecCreated { of, exec, stdio, result, reply } => {
                let made = result.and_then(|io| self.exec_created(of, exec, stdio, io));
                answer(reply, made);
            }
            Done::ProcessStarted { subject, result, reply } => self.process_started(subject, result, reply),
            Done::ProcessEnded { subject, exit } => {
                self.process_ended(&subject, exit);
                if subject.exec.is_none() {
                    self.save();
                }
            }
            Done::Deleted { of, exec, result, reply } => self.deleted(of, exec, result, reply),
            Done::Paused { of, paused, result, reply } => {
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
        self.wait_until_counted(up.counting);
        if self.state() == PodState::Stopping {
            // The stop came when the start was done already.
            self.live = Some(up.live);
            return self.end_machine();
        }
        let (pid, release, way) = (up.live.machine.record().pid, up.ready.kernel_release, up.way);
        let interfaces = up.interfaces;
        self.status.send_modify(|status| {
            status.vmm_pid = pid;
            status.kernel_release = release;
            status.way = Some(way);
            status.interfaces = interfaces;
        });
        self.become_state(PodState::Ready);
        self.live = Some(up.live);
        self.watch_machine();
        self.forward_ports(up.host_ports);
        self.node.events.pod(&self.spec.id, Kind::PodReady, format!("VMM is process {pid}"));
        let waiters: Vec<_> = self.start_waiters.drain(..).collect();
        let recorded = self.next_record();
        let spec = self.spec.clone();
        self.work.spawn(async move {
            // On record before containerd is told: what it believes in, the next daemon finds.
            let error = recorded.await.err().map(|error| chain(&error));
            for reply in waiters {
                answer(reply, again(&error, &spec));
            }
            Done::Nothing
        });
    }

    fn wait_until_counted(&mut self, counting: Option<Counting>) {
        let Some(counting) = counting else { return };
        let (counted, is_counted) = watch::channel(false);
        self.counted = is_counted;
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
        let mut error = Some(error);
        for reply in self.start_waiters.drain(..) {
            let told = error.take().unwrap_or_else(|| PodError::Cancelled(self.spec.id.clone()));
            answer(reply, Err(told));
        }
        if self.state() == PodState::Starting {
            self.become_state(PodState::Stopping);
        }
        if cancelled { self.stopped(String::new(), 0) } else { self.stopped(reason, 1) }
    }

    fn machine_ended(&mut self, exit: MachineExit) {
        // While the pod is being stopped this is what was wanted; `PodStopped` follows.
        if self.state() == PodState::Ready {
            let reason = match self.lost.take() {
                Some(error) => chain(&error),
                None => start::machine_ended(&self.spec, exit).to_string(),
            };
            tracing::warn!(pod = %self.spec.id, reason, "the pod ended unasked");
            let shares = self.volumes.shares.clone();
            self.work.spawn(async move {
                shares.end().await;
                Done::Nothing
            });
            self.stopped(reason, KILLED);
        }
    }

    /// A guest that broke its session, whose processes can't be ended or that can't be counted: its machine ends, and
    /// with that the pod.
    fn guest_lost(&mut self, error: PodError) {
        // A pod that is being stopped loses its machine anyway.
        let Some(live) = self.live.clone().filter(|_| self.state() == PodState::Ready) else { return };
        self.lost = Some(error);
        let pod = self.spec.id.clone();
        self.work.spawn(async move {
            if let Err(error) = live.machine.kill().await {
                tracing::error!(%pod, error = chain(&error), "cannot end the VMM of a guest that was given up");
            }
            Done::Nothing
        });
    }

    /// The pod holds nothing any more: everything that ran in it has ended.
    pub(super) fn stopped(&mut self, reason: String, exit_status: u32) {
        if self.state() == PodState::Stopped {
            return;
        }
        self.live = None;
        self.cancel.cancel();
        // Those that the guest had, which nobody keeps up to date any more.
        self.volumes = Arc::new(Volumes::new(self.node.volumes.clone(), self.volumes.shares.clone(), None));
        self.forwarding = None;
        host_ports::let_go(&self.node.front, &self.spec, &std::mem::take(&mut self.host_ports));
        let unasked = !reason.is_empty();
        let exit = Exit {
            code: KILLED,
            at_ns: now_ns(),
            reason: if unasked { reason.clone() } else { "its pod was stopped".to_owned() },
        };
        for container in self.containers.values_mut() {
            for process in std::iter::once(&mut container.init).chain(container.execs.values_mut()) {
                if let Some(voice) = process.voice.as_ref().filter(|_| unasked) {
                    voice.say(&reason);
                }
                process.end(exit.clone());
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
        result: Result<Box<Created>, PodError>,
        reply: Reply<()>,
    ) {
        self.being_made.remove(&new.id);
        let made = match result {
            Ok(created) if self.live.is_some() => Ok(created),
            Ok(created) => {
                created.io.let_go();
                created.intent.release();
                Err(self.wrong_state("create a container", self.state()))
            }
            Err(error) => Err(error),
        };
        let created = match made {
            Ok(created) => created,
            Err(error) => {
                // Here and not only where it was asked for: whoever asked may have given up, and the id
                // would never be free again.
                self.node.registry.remove_container(&new.id);
                return answer(reply, Err(error));
            }
        };
        let Created { pid, io, disks, leases, message, intent } = *created;
        let container = Container {
            bundle: new.bundle,
            disks,
            leases,
            message,
            init: Process::created(pid, new.stdio, io),
            execs: HashMap::new(),
            paused: false,
            stages,
        };
        self.containers.insert(new.id.clone(), container);
        self.node.events.container(&self.spec.id, &new.id, Kind::ContainerCreated, "");
        let (written, pod) = (self.next_record(), self.spec.id.clone());
        self.work.spawn(async move {
            match written.await {
                // From here on the record says so.
                Ok(()) => intent.release(),
                Err(error) => {
                    tracing::error!(%pod, error = chain(&error), "the record of the pod is out of date");
                }
            }
            answer(reply, Ok(()));
            Done::Nothing
        });
    }

    fn exec_created(
        &mut self,
        of: ContainerId,
        exec: ExecId,
        stdio: StdioPaths,
        io: crate::container::io::Io,
    ) -> Result<(), PodError> {
        if !self.containers.contains_key(&of) {
            io.let_go();
            return Err(PodError::NoContainer(of));
        }
        // Before the answer: the next worker finds its streams by it.
        self.note(EXEC, &of, Some(&exec), &stdio)?;
        if let Some(container) = self.containers.get_mut(&of) {
            container.execs.insert(exec, Process::created(0, stdio, io));
        }
        Ok(())
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
                let exit = Exit { code: 128, at_ns: now_ns(), reason: chain(&error) };
                self.process_ended(&subject, exit);
                return answer(reply, Err(error));
            }
        };
        let Some(live) = self.live.clone() else {
            return answer(reply, Err(self.wrong_state("start a process", self.state())));
        };
        let kind = if subject.exec.is_none() { Kind::ContainerStarted } else { Kind::ExecStarted };
        if let Ok(process) = self.process_mut(&subject.container, subject.exec.as_ref()) {
            process.pid = pid;
            process.phase.send_replace(Phase::Running);
        }
        self.node.events.container(&self.spec.id, &subject.container, kind, format!("guest process {pid}"));
        let exec = subject.exec.is_some();
        self.follow(live, subject, now_ns(), running);
        // Of an exec the agent knows.
        if exec { answer(reply, Ok(())) } else { self.save_then(reply, Ok(())) }
    }

    /// Waits for the end of a process that ran at `since` or later.
    fn follow(&mut self, live: Live, subject: Subject, since: u64, running: RunningIo) {
        let container = self.containers.get(&subject.container).filter(|_| subject.exec.is_none());
        let message = container.and_then(|container| container.message.clone());
        self.work.spawn(async move {
            let exit = work::follow(&live, &subject, since, running, message).await;
            Done::ProcessEnded { subject, exit }
        });
    }

    fn process_ended(&mut self, subject: &Subject, exit: Exit) {
        let kind = if subject.exec.is_none() { Kind::ContainerExited } else { Kind::ExecExited };
        let detail = match exit.reason.as_str() {
            "" => format!("exit code {}", exit.code),
            reason => format!("exit code {}: {reason}", exit.code),
        };
        let out_of_memory = exit.reason == work::OUT_OF_MEMORY;
        if let Ok(process) = self.process_mut(&subject.container, subject.exec.as_ref()) {
            process.end(exit);
            if out_of_memory {
                let events = &self.node.events;
                events.container(&self.spec.id, &subject.container, Kind::ContainerOutOfMemory, "");
            }
            self.node.events.container(&self.spec.id, &subject.container, kind, detail);
        }
    }

    fn deleted(
        &mut self,
        of: ContainerId,
        exec: Option<ExecId>,
        result: Result<Exit, PodError>,
        reply: Reply<Exit>,
    ) {
        let removed = result.and_then(|exit| self.process(&of, exec.as_ref()).map(|_| exit));
        if let Ok(exit) = &removed {
            match &exec {
                Some(exec) => {
                    let removed = self.containers.get_mut(&of).and_then(|of| of.execs.remove(exec));
                    if let Some(mut process) = removed {
                        process.end(exit.clone());
                    }
                    self.forget_process(&of, Some(exec), &[]);
                }
                None => {
                    if let Some(mut container) = self.containers.remove(&of) {
                        container.init.end(exit.clone());
                        for process in container.execs.values_mut() {
                            process.end(exit.clone());
                        }
                        let execs: Vec<_> = container.execs.into_keys().collect();
                        self.forget_process(&of, None, &execs);
                    }
                    self.node.registry.remove_container(&of);
                    self.node.events.container(&self.spec.id, &of, Kind::ContainerDeleted, "");
                }
            }
        }
        match exec {
            Some(_) => answer(reply, removed),
            None => self.save_then(reply, removed),
        }
    }

    /// Goes on where an earlier daemon left off.
    pub(super) fn take_up(&mut self, live: Live, host_ports: Vec<TcpListener>) {
        self.live = Some(live.clone());
        self.watch_machine();
        self.wait_until_counted(Counting::go_on(&self.node, &self.spec, live.machine.record().pid));
        self.forward_ports(host_ports);
        let mut running = Vec::new();
        for (id, container) in &mut self.containers {
            let execs = container.execs.iter_mut().map(|(id, exec)| (Some(id.clone()), exec));
            for (exec, process) in std::iter::once((None, &mut container.init)).chain(execs) {
                if *process.phase.borrow() != Phase::Running {
                    continue;
                }
                let subject = Subject { container: id.clone(), exec };
                if let Some(io) = process.io.take() {
                    let (copies, stdin): (_, Option<StdinCloser>) = io.run(&live.agent, &subject, true);
                    let closed = self.node.front.take(&subject.key(CLOSED)).is_some();
                    if let Some(stdin) = stdin.as_ref().filter(|_| closed) {
                        stdin.close();
                    }
                    process.stdin = stdin;
                    running.push((subject, copies));
                }
            }
        }
        let created = self.status.borrow().created_at_ns;
        for (subject, copies) in running {
            self.follow(live.clone(), subject, created, copies);
        }
        let volumes = self.volumes.clone();
        self.work.spawn(async move {
            volumes.go_on(&live).await;
            Done::Nothing
        });
        self.node.events.pod(&self.spec.id, Kind::PodRecovered, "");
    }

    fn watch_machine(&mut self) {
        if let Some(live) = &self.live {
            let Live { machine, agent } = live.clone();
            self.work.spawn(async move { Done::MachineEnded(machine.exited().await) });
            self.work.spawn(async move {
                agent.violated().await.map_or(Done::Nothing, |error| Done::GuestLost(error.into()))
            });
        }
    }

    /// Set up beside the start, which need not wait for it.
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
            // Before the answer: whoever has it may use the id again.
            self.node.registry.remove(&self.spec.id);
            self.node.events.pod(&self.spec.id, Kind::PodRemoved, "");
        }
        let error = result.err().map(|error| chain(&error));
        for reply in self.remove_waiters.drain(..) {
            answer(reply, again(&error, &self.spec));
        }
    }
}
