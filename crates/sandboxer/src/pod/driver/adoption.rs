//! The adoption of a pod that an earlier daemon left.

use std::sync::Arc;

use super::{
    CLOSED, Driver, OOM_KILLS,
    done::Done,
    found::FoundVm,
    running_pod::RunningPod,
    state::{Ending, State, Stopping, UnreachedPod},
};
use crate::{
    events::Kind,
    front,
    pod::{
        cgroup::CgroupAttach,
        container::{
            KILLED, Phase,
            io::{StdinCloser, Subject},
        },
        forward::Forwarding,
        host_ports,
        place::Place,
        recover::{
            containers::settle,
            unreached::{Reached, Resolved},
        },
        volumes::Volumes,
    },
    state::PodState,
};

impl Driver {
    /// Adopts the VM that an earlier daemon left.
    pub(super) fn adopt(&mut self, vm: FoundVm) {
        match vm {
            FoundVm::None => {}
            FoundVm::Reached(reached, place) => self.adopt_running(*reached, place),
            FoundVm::Unreached(vmm, place) => self.wait_for_answer(UnreachedPod { vmm, place }),
        }
    }

    /// Waits until an earlier daemon's pod responds or its VMM exits. Continues its stop if that daemon had begun it.
    fn wait_for_answer(&mut self, pod: UnreachedPod) {
        if self.status.borrow().state == PodState::Stopping {
            let what = Ending::Unreached(pod);
            self.state = State::Stopping(Stopping { what, in_progress: false, waiters: Vec::new() });
            return self.end_vm();
        }
        let (node, status, cancel, vmm) =
            (self.node.clone(), self.status.clone(), self.cancel.clone(), pod.vmm.clone());
        self.state = State::Unknown(pod);
        self.work.spawn(async move {
            let resolved = cancel.run_until_cancelled(vmm.resolve(&node, &status)).await;
            resolved.map_or(Done::Nothing, Done::Resolved)
        });
    }

    pub(super) fn resolved(&mut self, resolved: Resolved) {
        let place = match self.state.take() {
            State::Unknown(pod) => pod.place,
            // A stop came first and kills the guest.
            other => return self.state = other,
        };
        match resolved {
            Resolved::Reached(reached) => {
                tracing::info!(pod = %self.spec.id, "the pod answers again");
                self.adopt_running(*reached, place);
                self.save();
            }
            Resolved::Ended(reason) => {
                tracing::warn!(pod = %self.spec.id, reason, "VMM exited unexpectedly");
                self.stopped(reason, KILLED);
            }
        }
    }

    /// Continues where an earlier daemon stopped.
    fn adopt_running(&mut self, reached: Reached, place: Place) {
        let Reached { live, known, volumes, made } = reached;
        let (store, shares) = (self.node.volumes.clone(), self.volumes.shares.clone());
        self.volumes = Arc::new(Volumes::found(store, shares, self.spec.room.empty_dir_bytes, volumes, made));
        for (id, container) in &mut self.containers {
            settle(&self.node, &self.spec, id, container, &known);
        }
        let host_ports = host_ports::listen_again(&self.node.front, &self.spec);
        let is_in_cgroup = self.attach_to_cgroup(CgroupAttach::go_on(&self.node, &self.spec, &live.vm));
        let forwarding = Forwarding::begin(&self.spec, host_ports, live.agent.clone());
        let pod = Box::new(RunningPod::new(live.clone(), place, is_in_cgroup, forwarding));
        self.enter(State::Ready { pod, fault: None }, |status| {
            status.reason = String::new();
            status.recovered = true;
            status.overdue = false;
        });
        self.watch_vm(live.clone());
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
}
