//! Handles results of work on containers and execs: updates the records of their processes and replies to the callers.

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use sandboxer_base::{chain, clock::now_ns};
use sandboxer_protocol::id::{ContainerId, ExecId};

use super::{Driver, OOM_KILLS, answer, done::Done, journal_failed};
use crate::{
    error::PodError,
    events::{Kind, TaskDetail},
    front::EntryHandle,
    pod::{
        container::{
            Container, EXEC, Exit, KILLED, NewContainer, Phase, Process, StdioPaths,
            io::{Io, Subject},
            start::{self as work, Created},
        },
        journal::JournalError,
        limits::SharedLimits,
        request::Reply,
    },
};

/// Pause after each report of the OOM killer: a guest can report anything, at any rate.
const OOM_KILL_PAUSE: Duration = Duration::from_millis(100);

impl Driver {
    pub(super) fn container_created(
        &mut self,
        new: NewContainer,
        result: Result<Box<Created>, PodError>,
        reply: Reply<()>,
    ) {
        let Some(making) = self.being_made.get(&new.id) else { return };
        let (stages, is_deleted) = (making.stages.clone(), !making.deletions.is_empty());
        let made = match result {
            Ok(created) if self.state.running().is_some() => Ok(created),
            Ok(created) => {
                created.io.let_go();
                created.intent.release();
                Err(self.wrong_state("create a container"))
            }
            Err(error) => Err(error),
        };
        let created = match made {
            Ok(created) => created,
            Err(error) => return self.not_made(&new.id, error, Ok(()), reply),
        };
        let Created { pid, io, disks, leases, message, cpus, mems, limits, intent, adopted } = *created;
        if let (Some(restored), Some(adopted)) = (&mut self.restored, adopted) {
            restored.adopted.push(adopted.name);
            restored.renamed.extend(adopted.renamed);
        }
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
        self.insert_container(new.id.clone(), Box::new(container));
        if is_deleted || reply.is_closed() {
            return self.undo_container(new.id, intent, self.unwanted(), reply);
        }
        self.follow_init(&new.id);
        let written = self.next_record();
        let id = new.id;
        self.work.spawn(async move { Done::ContainerRecorded { id, intent, result: written.await, reply } });
    }

    /// Handles the writing of a created container's record. Undoes the creation if the write failed, because the next
    /// worker would not know the container, or if the caller is gone, because nobody would.
    pub(super) fn container_recorded(
        &mut self,
        id: ContainerId,
        intent: EntryHandle,
        result: Result<(), JournalError>,
        reply: Reply<()>,
    ) {
        if let Err(error) = result {
            let why = journal_failed(&self.spec, &error);
            return self.undo_container(id, intent, why, reply);
        }
        let is_deleted = self.being_made.get(&id).is_some_and(|making| !making.deletions.is_empty());
        if is_deleted || reply.is_closed() {
            return self.undo_container(id, intent, self.unwanted(), reply);
        }
        // The record is on disk.
        intent.release();
        self.being_made.remove(&id);
        if let Some(container) = self.containers.get(&id) {
            let task = self.task(None, container.bundle.clone(), None);
            self.node.events.container(&self.spec.id, &id, Kind::ContainerCreated, "", task);
        }
        answer(reply, Ok(()));
        self.remove_if_due();
    }

    fn unwanted(&self) -> PodError {
        PodError::Cancelled(self.spec.id.clone())
    }

    /// Removes a created container without an owner, because of `why`.
    fn undo_container(&mut self, id: ContainerId, intent: EntryHandle, why: PodError, reply: Reply<()>) {
        tracing::warn!(pod = %self.spec.id, container = %id, error = chain(&why), "undoing the creation of a container");
        let disks = match self.take_container(&id, &never_started()) {
            Some(container) => work::serials(&container.disks),
            // The pod is being removed.
            None => Vec::new(),
        };
        let live = self.running_vm();
        self.work.spawn(async move {
            let result = match live {
                Some(live) => work::delete(&live, &id, &disks).await,
                // The guest is gone, with everything in it.
                None => Ok(()),
            };
            Done::ContainerUndone { id, intent, why, result, reply }
        });
    }

    pub(super) fn container_undone(
        &mut self,
        id: &ContainerId,
        intent: EntryHandle,
        why: PodError,
        result: Result<(), PodError>,
        reply: Reply<()>,
    ) {
        match &result {
            Ok(()) => intent.release(),
            // The next worker finds the intent.
            Err(error) => {
                tracing::error!(pod = %self.spec.id, container = %id, error = chain(error), "cannot undo the creation of a container");
            }
        }
        // The container may be on the record.
        self.save();
        self.not_made(id, why, result, reply);
    }

    /// Replies to callers that wait for a container that does not exist; `undone`: whether nothing of it is left.
    fn not_made(&mut self, id: &ContainerId, why: PodError, undone: Result<(), PodError>, reply: Reply<()>) {
        // Here and not only in the request: the caller may have gone, and the id would stay taken forever.
        self.node.registry.remove_container(id);
        answer(reply, Err(why));
        let deletions = self.being_made.remove(id).map(|making| making.deletions).unwrap_or_default();
        let undone = undone.map(|()| never_started()).map_err(Arc::new);
        for deletion in deletions {
            answer(deletion, undone.clone().map_err(PodError::Shared));
        }
        self.remove_if_due();
    }

    pub(super) fn insert_container(&mut self, id: ContainerId, container: Box<Container>) {
        self.resizer.add(&id, container.limits.clone());
        self.containers.insert(id, container);
        self.place();
    }

    /// Removes a container and everything that this task and the front keep for it. Processes that have not exited get
    /// `exit`.
    pub(super) fn take_container(&mut self, id: &ContainerId, exit: &Exit) -> Option<Box<Container>> {
        let mut container = self.containers.remove(id)?;
        for process in container.processes_mut() {
            process.close(exit.clone());
        }
        let execs: Vec<_> = container.execs.keys().cloned().collect();
        self.forget_process(id, None, &execs);
        self.resizer.remove(id);
        self.readings.forget(Some(id));
        self.place();
        Some(container)
    }

    /// Returns the details that containerd's events contain for a process of this pod.
    pub(super) fn task(&self, exec: Option<ExecId>, bundle: PathBuf, exit: Option<&Exit>) -> TaskDetail {
        let pid = self.status.borrow().vmm_pid;
        TaskDetail { exec, pid, bundle, exit: exit.map(|exit| (exit.code, exit.at_ns)) }
    }

    pub(super) fn exec_created(
        &mut self,
        id: ContainerId,
        exec: ExecId,
        stdio: StdioPaths,
        result: Result<Io, PodError>,
        reply: Reply<()>,
    ) {
        self.execs_being_made.remove(&(id.clone(), exec.clone()));
        match result {
            Err(error) => answer(reply, Err(error)),
            Ok(io) => {
                // Before the reply: the next worker needs it to find the streams.
                let known = self.process(&id, None).map(drop);
                let noted = known.and_then(|()| self.note(EXEC, &id, Some(&exec), &stdio));
                let noted =
                    noted.and_then(|()| if reply.is_closed() { Err(self.unwanted()) } else { Ok(()) });
                match (noted, self.containers.get_mut(&id)) {
                    (Ok(()), Some(container)) => {
                        container.execs.insert(exec.clone(), Process::created(0, stdio, io));
                        let task = self.task(Some(exec), PathBuf::new(), None);
                        self.node.events.container(&self.spec.id, &id, Kind::ExecCreated, "", task);
                        answer(reply, Ok(()));
                    }
                    (noted, _) => {
                        io.let_go();
                        let why = noted.err().unwrap_or_else(|| PodError::NoContainer(id.clone()));
                        self.undo_exec(id, exec, why, reply);
                    }
                }
            }
        }
        self.remove_if_due();
    }

    /// Removes an exec without an owner from its guest, because of `why`.
    fn undo_exec(&mut self, id: ContainerId, exec: ExecId, why: PodError, reply: Reply<()>) {
        self.forget_process(&id, Some(&exec), &[]);
        let (live, pod) = (self.running_vm(), self.spec.id.clone());
        self.work.spawn(async move {
            if let Some(live) = live
                && let Err(error) = live.agent.delete_exec(&id, &exec).await
            {
                tracing::warn!(%pod, container = %id, %exec, %error, "cannot undo the creation of an exec");
            }
            answer(reply, Err(why));
            Done::Nothing
        });
    }

    pub(super) fn process_started(
        &mut self,
        subject: Subject,
        result: Result<u32, PodError>,
        reply: Reply<()>,
    ) {
        let pid = match result {
            Ok(pid) => pid,
            Err(error) => {
                // The process never ran: waiters see an exit with the code for that.
                let exit = Exit { code: 128, at_ns: now_ns(), reason: chain(&error) };
                if let Ok(process) = self.process_mut(&subject.container, subject.exec.as_ref()) {
                    (process.running, process.early_exit) = (None, None);
                    // As with runc's shim, no event reports the end of an exec whose start was not reported either.
                    if subject.exec.is_some() {
                        process.end(exit);
                        return answer(reply, Err(error));
                    }
                }
                self.process_ended(&subject, exit);
                return answer(reply, Err(error));
            }
        };
        if let Err(error) = self.live("start a process") {
            return answer(reply, Err(error));
        }
        let kind = if subject.exec.is_none() { Kind::ContainerStarted } else { Kind::ExecStarted };
        let mut early_exit = None;
        if let Ok(process) = self.process_mut(&subject.container, subject.exec.as_ref()) {
            process.pid = pid;
            process.phase.send_replace(Phase::Running);
            early_exit = process.early_exit.take();
        }
        let task = self.task(subject.exec.clone(), PathBuf::new(), None);
        let detail = format!("guest process {pid}");
        self.node.events.container(&self.spec.id, &subject.container, kind, detail, task);
        match subject.exec {
            None => {
                self.save_then(reply, Ok(()));
                if let Some(exit) = early_exit {
                    self.process_ended(&subject, exit);
                }
            }
            Some(_) => {
                self.follow(subject, now_ns());
                // The agent knows.
                answer(reply, Ok(()));
            }
        }
    }

    /// Waits for the exit of a container's init from its creation on, so that its exit is reported whatever ends it.
    pub(super) fn follow_init(&mut self, id: &ContainerId) {
        self.follow(Subject { container: id.clone(), exec: None }, now_ns());
    }

    /// Waits for the exit of a process that existed at `since` or later.
    pub(super) fn follow(&mut self, subject: Subject, since: u64) {
        let Some(live) = self.running_vm() else { return };
        let Ok(process) = self.process_mut(&subject.container, subject.exec.as_ref()) else { return };
        process.is_followed = true;
        let container = self.containers.get(&subject.container).filter(|_| subject.exec.is_none());
        let message = container.and_then(|container| container.message.clone());
        let helpers = self.node.volumes.helpers.on_behalf_of(&self.spec.uid);
        self.work.spawn(async move {
            let exit = work::follow(&live, &subject, since, message, &helpers).await;
            Done::ProcessEnded { subject, exit }
        });
    }

    /// Handles the exit of a followed process. Its start is reported first.
    pub(super) fn exit_seen(&mut self, subject: &Subject, exit: Exit) {
        let agent = self.running_vm().map(|live| live.agent);
        let Ok(process) = self.process_mut(&subject.container, subject.exec.as_ref()) else { return };
        if *process.phase.borrow() == Phase::Starting {
            process.early_exit = Some(exit);
            return;
        }
        // A start that an earlier worker had sent when it died may arrive after this one has looked: the process then runs and exits, and
        // nobody has read its output.
        if let (Some(io), Some(agent)) = (process.io.take(), agent) {
            process.running = Some(io.run(&agent, subject, true).0);
        }
        self.process_ended(subject, exit);
    }

    fn process_ended(&mut self, subject: &Subject, exit: Exit) {
        let kind = if subject.exec.is_none() { Kind::ContainerExited } else { Kind::ExecExited };
        let detail = match exit.reason.as_str() {
            "" => format!("exit code {}", exit.code),
            reason => format!("exit code {}: {reason}", exit.code),
        };
        let task = self.task(subject.exec.clone(), PathBuf::new(), Some(&exit));
        let process = self.process_mut(&subject.container, subject.exec.as_ref());
        let Ok(process) = process.map_err(drop).and_then(|process| match process.has_exited() {
            false => Ok(process),
            true => Err(()),
        }) else {
            return;
        };
        process.end(exit);
        // containerd asks whether the OOM killer was active.
        self.readings.forget(Some(&subject.container));
        self.readings.forget(None);
        self.node.events.container(&self.spec.id, &subject.container, kind, detail, task);
        if subject.exec.is_none() {
            self.resizer.remove(&subject.container);
            self.save();
        }
    }

    /// Waits for the OOM killer in the guest. Events up to the number `seen` have been reported, the last `just_now` of
    /// them just before.
    pub(super) fn watch_oom_killer(&mut self, seen: u64, just_now: u32) {
        let Some(live) = self.running_vm() else { return };
        let cancel = self.cancel.clone();
        self.work.spawn(async move {
            let next = async {
                tokio::time::sleep(OOM_KILL_PAUSE * just_now).await;
                live.agent.next_oom_kills(seen).await
            };
            match cancel.run_until_cancelled(next).await {
                Some(Ok((containers, last))) if last > seen => Done::OutOfMemory { containers, seen: last },
                // A response without an event is not a report.
                Some(Ok(_)) | None => Done::Nothing,
                Some(Err(error)) => {
                    tracing::debug!(error = chain(&error), "no reports of the guest's OOM killer");
                    Done::Nothing
                }
            }
        });
    }

    /// Reports that the OOM killer killed processes of these containers.
    pub(super) fn out_of_memory(&mut self, ids: &[ContainerId], seen: u64) {
        for id in ids {
            let Some(container) = self.containers.get(id) else { continue };
            let task = self.task(None, container.bundle.clone(), None);
            self.node.events.container(&self.spec.id, id, Kind::ContainerOutOfMemory, "", task);
        }
        if let Err(error) = self.note(OOM_KILLS, &self.spec.id, None, &seen) {
            tracing::warn!(error = chain(&error), "a report of the OOM killer may be repeated");
        }
        self.watch_oom_killer(seen, u32::try_from(ids.len()).unwrap_or(u32::MAX).max(1));
    }

    /// Reports the exits of the processes that a deletion has just killed: the init, if it waited for its start, and
    /// execs beside it.
    fn report_killed(&mut self, id: &ContainerId) {
        let Some(container) = self.containers.get(id) else { return };
        let execs = container.execs.iter().filter(|(_, exec)| *exec.phase.borrow() == Phase::Running);
        let execs = execs.map(|(exec, _)| Some(exec.clone()));
        for exec in execs.chain([None]).collect::<Vec<_>>() {
            self.process_ended(&Subject { container: id.clone(), exec }, killed());
        }
    }

    pub(super) fn deleted(
        &mut self,
        id: ContainerId,
        exec: Option<ExecId>,
        result: Result<Exit, PodError>,
        reply: Reply<Exit>,
    ) {
        let removed = result.and_then(|exit| self.process(&id, exec.as_ref()).map(|_| exit));
        if let Ok(exit) = &removed {
            let task = self.task(exec.clone(), PathBuf::new(), Some(exit));
            match &exec {
                Some(exec) => {
                    let removed =
                        self.containers.get_mut(&id).and_then(|container| container.execs.remove(exec));
                    if let Some(mut process) = removed {
                        process.close(never_started());
                    }
                    self.forget_process(&id, Some(exec), &[]);
                }
                None => {
                    self.report_killed(&id);
                    self.take_container(&id, &never_started());
                    self.node.registry.remove_container(&id);
                    self.node.events.container(&self.spec.id, &id, Kind::ContainerDeleted, "", task);
                }
            }
        }
        match exec {
            Some(_) => answer(reply, removed),
            None => self.save_then(reply, removed),
        }
    }
}

/// Returns the exit of a process that was never started, and so has none of its own.
pub(super) fn never_started() -> Exit {
    Exit { code: KILLED, at_ns: now_ns(), reason: "it was never started".to_owned() }
}

/// Returns the exit of a process that the deletion of its container has killed.
fn killed() -> Exit {
    Exit { code: KILLED, at_ns: now_ns(), reason: "its container was deleted".to_owned() }
}

/// Returns the answer to the deletion of a process that had not exited before: as of runc's shim, no code and no time.
pub(super) fn no_exit() -> Exit {
    Exit { code: 0, at_ns: 0, reason: String::new() }
}
