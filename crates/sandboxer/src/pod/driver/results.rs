//! Results of work: each updates the pod, and its callers get their replies.

use std::path::PathBuf;

use sandboxer_vmm::Shape;

use super::{
    Driver, answer,
    done::{Done, Limited},
    journal_failed,
};
use crate::{
    events::Kind,
    pod::{journal::JournalError, resize::Change},
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
            Done::PodStarted(Ok(started)) => self.pod_started(started),
            Done::PodStarted(Err(error)) => self.start_failed(error),
            Done::PodStopped(Ok(())) => self.stopped(String::new(), 0),
            Done::PodStopped(Err(error)) => self.stop_failed(error),
            Done::Resolved(resolved) => self.resolved(resolved),
            Done::VmEnded(exit) => self.vm_ended(exit),
            Done::GuestLost(error) => self.guest_lost(error),
            Done::ContainerCreated { new, result, reply } => self.container_created(*new, result, reply),
            Done::ContainerRecorded { id, intent, result, reply } => {
                self.container_recorded(id, intent, result, reply);
            }
            Done::ContainerUndone { id, intent, why, result, reply } => {
                self.container_undone(&id, intent, why, result, reply);
            }
            Done::ExecCreated { id, exec, stdio, result, reply } => {
                self.exec_created(id, exec, stdio, result, reply);
            }
            Done::ProcessStarted { subject, result, reply } => self.process_started(subject, result, reply),
            Done::ProcessEnded { subject, exit } => self.exit_seen(&subject, exit),
            Done::OutOfMemory { containers, seen } => self.out_of_memory(&containers, seen),
            Done::Written(written) => self.written(written),
            Done::Rewrite(pause) => self.rewrite(pause),
            Done::Saved { result, goes_on, stop, reply } => self.saved(*result, goes_on, stop, reply),
            Done::Moved { result, reply } => self.moved(result, reply),
            Done::Deleted { id, exec, result, reply } => self.deleted(id, exec, result, reply),
            Done::Paused { id, paused, result, reply } => {
                if result.is_ok()
                    && let Some(container) = self.containers.get_mut(&id)
                {
                    container.paused = paused;
                    let kind = if paused { Kind::ContainerPaused } else { Kind::ContainerResumed };
                    let task = self.task(None, PathBuf::new(), None);
                    self.node.events.container(&self.spec.id, &id, kind, "", task);
                }
                answer(reply, result);
            }
        }
    }

    /// Records changed limits of the pod or of a container before the reply, because the caller relies on them. Only
    /// then does the VM shrink.
    fn limited(&mut self, Limited { container, change, result, reply }: Limited) {
        // Cached statistics contain the old limits.
        if let Some((id, _)) = &container {
            self.readings.forget(Some(id));
        }
        self.readings.forget(None);
        if let Some(change) = &change {
            self.spec.limits = self.spec.limits.changed_by(change.limits());
        }
        let is_changed = result.is_ok();
        if let Some((id, cpus)) = container.filter(|_| is_changed) {
            self.update_cpus(&id, cpus);
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
        if let Some(seat) = self.state.place().and_then(|place| place.placement.seat.as_ref()) {
            seat.resize(vcpus, memory_mib);
        }
    }
}
