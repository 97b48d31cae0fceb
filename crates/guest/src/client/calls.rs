//! The calls to an agent, one method each.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use sandboxer_base::{clock::now_ns, failpoint::pass};
use sandboxer_protocol::{
    agent as wire,
    id::{ContainerId, ExecId},
    link::LinkKey,
};
use ttrpc::context::Context;

use crate::{GuestError, Signal, timing::Reading};

use super::{Agent, is_end};

/// The most events in one response: as many as an agent keeps.
const MAX_EVENTS: usize = 256;

/// The most readings of a guest's clock for one comparison, and how fast one must be to stop.
const CLOCK_READINGS: usize = 4;
const QUICK_READING: Duration = Duration::from_millis(2);

impl Agent {
    /// Sets the guest's identity.
    pub async fn configure_pod(&self, request: wire::ConfigurePodRequest) -> Result<(), GuestError> {
        call!(self, configure_pod, self.short(), request).map(drop)
    }

    /// Changes the limits of all the pod's containers together.
    pub async fn update_pod(&self, limits: wire::PodLimits) -> Result<(), GuestError> {
        let request = wire::UpdatePodRequest { limits: Some(limits).into(), ..Default::default() };
        call!(self, update_pod, self.short(), request).map(drop)
    }

    /// Makes the guest use all CPUs of its VM. Waits until `count` CPUs are online, at most a few seconds; returns the
    /// number online.
    pub async fn online_cpus(&self, count: u32) -> Result<u32, GuestError> {
        let request = wire::OnlineCpusRequest { count, ..Default::default() };
        call!(self, online_cpus, self.short(), request).map(|answer| answer.online)
    }

    /// Sets the guest's clock from the host's if it is wrong by more than the error of measurement. Returns whether to
    /// repeat this later: a guest with a clock device keeps its clock by itself.
    pub async fn sync_clock(&self) -> Result<bool, GuestError> {
        let mut best: Option<Reading> = None;
        for _ in 0..CLOCK_READINGS {
            let (requested_ns, requested) = (now_ns(), Instant::now());
            let response = match call!(self, sync_clock, self.short(), wire::SyncClockRequest::new()) {
                // The agent has an earlier version.
                Err(GuestError::Refused { .. }) => return Ok(false),
                response => response?,
            };
            if response.kept {
                return Ok(false);
            }
            let reading = Reading::from_response(requested_ns, requested.elapsed(), &response);
            if best.is_none_or(|best| reading.took < best.took) {
                best = Some(reading);
            }
            if reading.took < QUICK_READING {
                break;
            }
        }
        match best.and_then(|reading| reading.correction()) {
            Some(correction) => call!(self, sync_clock, self.short(), correction).map(|_| true),
            None => Ok(true),
        }
    }

    /// Creates a volume, or updates its files.
    pub async fn put_volume(&self, request: wire::PutVolumeRequest) -> Result<(), GuestError> {
        call!(self, put_volume, self.long(), request).map(drop)
    }

    /// Lists every volume of the agent.
    pub async fn volumes(&self) -> Result<Vec<String>, GuestError> {
        call!(self, list_volumes, self.short(), wire::ListVolumesRequest::new())
            .map(|answer| answer.volume_ids)
    }

    /// Mounts a scratch disk before its container is created.
    pub async fn prepare_disk(&self, disk: wire::Disk) -> Result<(), GuestError> {
        let request = wire::PrepareDiskRequest { disk: Some(disk).into(), ..Default::default() };
        call!(self, prepare_disk, self.long(), request).map(drop)
    }

    /// Creates a container with a waiting init; returns the init's guest PID.
    pub async fn create_container(
        &self,
        request: wire::CreateContainerRequest,
    ) -> Result<wire::CreateContainerResponse, GuestError> {
        call!(self, create_container, self.long(), request)
    }

    /// Gives a container of the guest of which this one is a copy the id `container`, and holds it until it is started;
    /// returns its init's guest PID.
    pub async fn adopt_container(&self, request: wire::AdoptContainerRequest) -> Result<u32, GuestError> {
        call!(self, adopt_container, self.short(), request).map(|answer| answer.pid)
    }

    /// Removes a container and its mounts.
    pub async fn delete_container(&self, container: &ContainerId) -> Result<(), GuestError> {
        let request =
            wire::DeleteContainerRequest { container_id: container.to_string(), ..Default::default() };
        call!(self, delete_container, self.long(), request).map(drop)
    }

    /// Lists every process of the agent.
    pub async fn processes(&self) -> Result<Vec<wire::Process>, GuestError> {
        call!(self, list_containers, self.short(), wire::ListContainersRequest::new())
            .map(|answer| answer.processes)
    }

    /// Registers an exec.
    pub async fn create_exec(&self, request: wire::CreateExecRequest) -> Result<(), GuestError> {
        call!(self, create_exec, self.short(), request).map(drop)
    }

    /// Starts a container's init or an exec; returns its guest PID.
    pub async fn start_process(
        &self,
        container: &ContainerId,
        exec: Option<&ExecId>,
    ) -> Result<u32, GuestError> {
        let request = wire::StartProcessRequest {
            container_id: container.to_string(),
            exec_id: text(exec),
            ..Default::default()
        };
        call!(self, start_process, self.long(), request).map(|answer| answer.pid)
    }

    /// Waits for a process's exit, without a limit.
    pub async fn wait_process(
        &self,
        container: &ContainerId,
        exec: Option<&ExecId>,
    ) -> Result<wire::Exit, GuestError> {
        let request = wire::WaitProcessRequest {
            container_id: container.to_string(),
            exec_id: text(exec),
            ..Default::default()
        };
        call_again!(self, wait_process, Context::default(), Duration::MAX, request)
            .map(|answer| answer.exit.into_option().unwrap_or_default())
    }

    /// Sends a signal to a process, or to all processes of its container.
    pub async fn signal_process(
        &self,
        container: &ContainerId,
        exec: Option<&ExecId>,
        signal: &Signal,
    ) -> Result<(), GuestError> {
        let request = wire::SignalProcessRequest {
            container_id: container.to_string(),
            exec_id: text(exec),
            signal: signal.number,
            all: signal.all,
            request: signal.request.clone(),
            ..Default::default()
        };
        // The agent delivers a signal with an identifier once, however often it is requested. A repeated SIGKILL is
        // harmless.
        match !signal.request.is_empty() || signal.number == Signal::KILL {
            true => call_again!(self, signal_process, self.short(), self.timeout, request).map(drop),
            false => call!(self, signal_process, self.short(), request).map(drop),
        }
    }

    /// Deletes an exec.
    pub async fn delete_exec(&self, container: &ContainerId, exec: &ExecId) -> Result<(), GuestError> {
        let request = wire::DeleteExecRequest {
            container_id: container.to_string(),
            exec_id: exec.to_string(),
            ..Default::default()
        };
        call!(self, delete_exec, self.short(), request).map(drop)
    }

    /// Sets a terminal's size.
    pub async fn resize_terminal(
        &self,
        container: &ContainerId,
        exec: Option<&ExecId>,
        columns: u32,
        rows: u32,
    ) -> Result<(), GuestError> {
        let request = wire::ResizeTerminalRequest {
            container_id: container.to_string(),
            exec_id: text(exec),
            columns,
            rows,
            ..Default::default()
        };
        call!(self, resize_terminal, self.short(), request).map(drop)
    }

    /// Reads output of a process; waits while there is none.
    pub async fn read_output(
        &self,
        request: wire::ReadOutputRequest,
    ) -> Result<wire::ReadOutputResponse, GuestError> {
        call_again!(self, read_output, Context::default(), Duration::MAX, request)
    }

    /// Writes input of a process; waits while the process does not read. Returns the offset up to which input was
    /// written.
    pub async fn write_input(&self, request: wire::WriteInputRequest) -> Result<u64, GuestError> {
        call_again!(self, write_input, Context::default(), Duration::MAX, request).map(|answer| answer.taken)
    }

    /// Changes a container's limits. `resources` is an OCI `linux.resources` object.
    pub async fn update_container(
        &self,
        container: &ContainerId,
        resources: Vec<u8>,
    ) -> Result<(), GuestError> {
        let request = wire::UpdateContainerRequest {
            container_id: container.to_string(),
            resources_json: resources,
            ..Default::default()
        };
        call!(self, update_container, self.short(), request).map(drop)
    }

    /// Freezes every process of a container.
    pub async fn pause_container(&self, container: &ContainerId) -> Result<(), GuestError> {
        let request =
            wire::PauseContainerRequest { container_id: container.to_string(), ..Default::default() };
        call!(self, pause_container, self.short(), request).map(drop)
    }

    /// Thaws a container.
    pub async fn resume_container(&self, container: &ContainerId) -> Result<(), GuestError> {
        let request =
            wire::ResumeContainerRequest { container_id: container.to_string(), ..Default::default() };
        call!(self, resume_container, self.short(), request).map(drop)
    }

    /// Lists the guest PIDs of a container.
    pub async fn pids(&self, container: &ContainerId) -> Result<Vec<u32>, GuestError> {
        let request =
            wire::ListProcessesRequest { container_id: container.to_string(), ..Default::default() };
        call!(self, list_processes, self.short(), request).map(|answer| answer.pids)
    }

    /// Reads the resource usage of a container, or of the whole guest.
    pub async fn stats(&self, container: Option<&ContainerId>) -> Result<wire::StatsResponse, GuestError> {
        let request = wire::StatsRequest { container_id: text(container), ..Default::default() };
        call_again!(self, stats, self.short(), self.timeout, request)
    }

    /// Waits for OOM kills after the event number `seen`. Returns the container of each kill since then, and the number
    /// of the last event.
    pub async fn next_oom_kills(&self, seen: u64) -> Result<(Vec<ContainerId>, u64), GuestError> {
        let request = wire::NextEventsRequest { after: seen, ..Default::default() };
        let answer = call_again!(self, next_events, Context::default(), Duration::MAX, request)?;
        let (mut kills, mut seen) = (Vec::new(), seen);
        for event in answer.events.iter().take(MAX_EVENTS) {
            if event.sequence <= seen {
                continue;
            }
            seen = event.sequence;
            if let Some(wire::event::Kind::Oom(oom)) = &event.kind
                && let Ok(container) = oom.container_id.parse()
            {
                kills.push(container);
            }
        }
        Ok((kills, seen))
    }

    /// Connects to a port of the guest's loopback. Closes connections of another `owner`.
    pub async fn dial(&self, port: u16, owner: u64) -> Result<u64, GuestError> {
        let request = wire::DialRequest { port: port.into(), owner, ..Default::default() };
        call!(self, dial, self.short(), request).map(|answer| answer.connection)
    }

    /// Reads from a connection; waits while there is no data. The result is empty at the end.
    pub async fn read_connection(&self, connection: u64) -> Result<Vec<u8>, GuestError> {
        let request = wire::ReadConnectionRequest { connection, ..Default::default() };
        call!(self, read_connection, Context::default(), request).map(|answer| answer.data)
    }

    /// Writes to a connection; waits while the peer does not read. `end` shuts the direction down.
    pub async fn write_connection(
        &self,
        connection: u64,
        data: Vec<u8>,
        end: bool,
    ) -> Result<(), GuestError> {
        let request = wire::WriteConnectionRequest { connection, data, end, ..Default::default() };
        call!(self, write_connection, Context::default(), request).map(drop)
    }

    /// Closes a connection, and ends calls that wait for it.
    pub async fn close_connection(&self, connection: u64) -> Result<(), GuestError> {
        let request = wire::CloseConnectionRequest { connection, ..Default::default() };
        call!(self, close_connection, self.short(), request).map(drop)
    }

    /// Waits for a query that a program of the guest sends to the name server at `address`, on the guest's loopback. Returns the
    /// query's number, and the query.
    pub async fn take_query(&self, address: Ipv4Addr) -> Result<(u64, Vec<u8>), GuestError> {
        let address = address.octets().to_vec();
        let request = wire::TakeQueryRequest { address, ..Default::default() };
        call_again!(self, take_query, Context::default(), Duration::MAX, request)
            .map(|answer| (answer.query, answer.data))
    }

    /// Gives a program of the guest the answer to its query.
    pub async fn answer_query(&self, query: u64, data: Vec<u8>) -> Result<(), GuestError> {
        let request = wire::AnswerQueryRequest { query, data, ..Default::default() };
        call!(self, answer_query, self.short(), request).map(drop)
    }

    /// Returns whether the shares are mounted in the guest, which then carries their requests itself.
    pub async fn has_shares(&self) -> Result<bool, GuestError> {
        let request = wire::MountSharesRequest { ask: true, ..Default::default() };
        call!(self, mount_shares, self.short(), request).map(|answer| answer.mounted)
    }

    /// Mounts the shares in the guest. Requests use the disk with this serial or, if it is empty, streams that begin
    /// with `key`. Returns `false` if the agent's version does not support that.
    pub async fn mount_shares(&self, disk: &str, key: Option<&LinkKey>) -> Result<bool, GuestError> {
        let key = key.map(|key| key.as_bytes().to_vec()).unwrap_or_default();
        let request = wire::MountSharesRequest { disk: disk.to_owned(), key, ..Default::default() };
        call!(self, mount_shares, self.short(), request).map(|answer| answer.mounted)
    }

    /// Powers the guest off. The response may be missing, so the caller must watch the VM instead.
    pub async fn power_off(&self) {
        let client = self.session.borrow().client.clone();
        let _ = client.power_off(self.short(), &wire::PowerOffRequest::new()).await;
    }
}

fn text(id: Option<&ExecId>) -> String {
    id.map(ToString::to_string).unwrap_or_default()
}
