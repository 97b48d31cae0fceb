//! Handles results of work on containers and execs: updates the records of their processes and answers the callers.

use std::{collections::HashMap, path::PathBuf, sync::Arc};

use sandboxer_base::{chain, clock::now_ns};
use sandboxer_protocol::id::{ContainerId, ExecId};

use super::{Done, Driver, EXEC, answer};
use crate::{
    error::PodError,
    events::{Kind, TaskDetail},
    pod::{
        Reply,
        container::{
            Container, Exit, NewContainer, Phase, Process, StdioPaths,
            io::{Io, RunningIo, Subject},
            start::{self as work, Created, RunningVm},
        },
        limits::SharedLimits,
        stages::Stages,
    },
};

impl Driver {
    pub(super) fn container_created(
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
                // Here and not only in the request: the caller may have gone, and the id
                // would stay taken for ever.
                self.node.registry.remove_container(&new.id);
                return answer(reply, Err(error));
            }
        };
        let Created { pid, io, disks, leases, message, cpus, mems, limits, intent } = *created;
        let container = Container {
            bundle: new.bundle,
            disks,
            leases,
            message,
            cpus,
            mems,
            limits: Arc::new(SharedLimits::new(limits)),
            init: Process::created(pid, new.stdio, io),
            execs: HashMap::new(),
            paused: false,
            stages,
        };
        let task = self.task(None, container.bundle.clone(), None);
        self.containers.insert(new.id.clone(), Box::new(container));
        self.place();
        self.node.events.container(&self.spec.id, &new.id, Kind::ContainerCreated, "", task);
        let (written, pod) = (self.next_record(), self.spec.id.clone());
        self.work.spawn(async move {
            match written.await {
                // The record is written here.
                Ok(()) => intent.release(),
                Err(error) => {
                    tracing::error!(%pod, error = chain(&error), "cannot write the pod's record; it is out of date");
                }
            }
            answer(reply, Ok(()));
            Done::Nothing
        });
    }

    /// Returns what containerd's events say of a process of this pod.
    pub(super) fn task(&self, exec: Option<ExecId>, bundle: PathBuf, exit: Option<&Exit>) -> TaskDetail {
        let pid = self.status.borrow().vmm_pid;
        TaskDetail { exec, pid, bundle, exit: exit.map(|exit| (exit.code, exit.at_ns)) }
    }

    pub(super) fn exec_created(
        &mut self,
        of: ContainerId,
        exec: ExecId,
        stdio: StdioPaths,
        io: Io,
    ) -> Result<(), PodError> {
        if !self.containers.contains_key(&of) {
            io.let_go();
            return Err(PodError::NoContainer(of));
        }
        // Before the answer: the next worker needs it to find the streams.
        self.note(EXEC, &of, Some(&exec), &stdio)?;
        if let Some(container) = self.containers.get_mut(&of) {
            container.execs.insert(exec, Process::created(0, stdio, io));
        }
        Ok(())
    }

    pub(super) fn process_started(
        &mut self,
        subject: Subject,
        result: Result<(u32, RunningIo), PodError>,
        reply: Reply<()>,
    ) {
        let (pid, running) = match result {
            Ok(started) => started,
            Err(error) => {
                // It never ran: waiters see an exit with the code for that.
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
        let task = self.task(subject.exec.clone(), PathBuf::new(), None);
        let detail = format!("guest process {pid}");
        self.node.events.container(&self.spec.id, &subject.container, kind, detail, task);
        let exec = subject.exec.is_some();
        self.follow(live, subject, now_ns(), running);
        // For an exec, the agent knows.
        if exec { answer(reply, Ok(())) } else { self.save_then(reply, Ok(())) }
    }

    /// Waits for the exit of a process that ran at `since` or later.
    pub(super) fn follow(&mut self, live: RunningVm, subject: Subject, since: u64, running: RunningIo) {
        let container = self.containers.get(&subject.container).filter(|_| subject.exec.is_none());
        let message = container.and_then(|container| container.message.clone());
        let helpers = self.node.volumes.helpers.clone();
        self.work.spawn(async move {
            let exit = work::follow(&live, &subject, since, running, message, &helpers).await;
            Done::ProcessEnded { subject, exit }
        });
    }

    pub(super) fn process_ended(&mut self, subject: &Subject, exit: Exit) {
        let kind = if subject.exec.is_none() { Kind::ContainerExited } else { Kind::ExecExited };
        let detail = match exit.reason.as_str() {
            "" => format!("exit code {}", exit.code),
            reason => format!("exit code {}: {reason}", exit.code),
        };
        let out_of_memory = exit.reason == work::OUT_OF_MEMORY;
        let task = self.task(subject.exec.clone(), PathBuf::new(), Some(&exit));
        if let Ok(process) = self.process_mut(&subject.container, subject.exec.as_ref()) {
            process.end(exit);
            if out_of_memory {
                let events = &self.node.events;
                let (pod, container) = (&self.spec.id, &subject.container);
                events.container(pod, container, Kind::ContainerOutOfMemory, "", task.clone());
            }
            self.node.events.container(&self.spec.id, &subject.container, kind, detail, task);
        }
    }

    pub(super) fn deleted(
        &mut self,
        of: ContainerId,
        exec: Option<ExecId>,
        result: Result<Exit, PodError>,
        reply: Reply<Exit>,
    ) {
        let removed = result.and_then(|exit| self.process(&of, exec.as_ref()).map(|_| exit));
        if let Ok(exit) = &removed {
            let task = self.task(exec.clone(), PathBuf::new(), Some(exit));
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
                        self.place();
                        container.init.end(exit.clone());
                        for process in container.execs.values_mut() {
                            process.end(exit.clone());
                        }
                        let execs: Vec<_> = container.execs.into_keys().collect();
                        self.forget_process(&of, None, &execs);
                    }
                    self.readings.forget(Some(&of));
                    self.node.registry.remove_container(&of);
                    self.node.events.container(&self.spec.id, &of, Kind::ContainerDeleted, "", task);
                }
            }
        }
        match exec {
            Some(_) => answer(reply, removed),
            None => self.save_then(reply, removed),
        }
    }
}
