//! Calls to an agent: typed, with timeouts, and errors that name the pod and the call.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use sandboxer_base::{Code, clock::now_ns, failpoint::pass};
use sandboxer_protocol::{
    agent::{self as wire, AgentClient},
    id::{ContainerId, ExecId, SandboxId},
    link::{LinkError, LinkKey},
};
use tokio::sync::watch;
use ttrpc::context::{Context, with_duration};

use super::{
    bounds::{Violation, plain},
    outbox::Room,
    timing::Reading,
};
use crate::Signal;

/// Factor of the timeout for creating a container or an exec, which is slow in a slow guest.
const LONG_CALL: u32 = 6;

/// Most readings of a guest's clock for one comparison, and how fast one must be to stop.
const CLOCK_READINGS: usize = 4;
const QUICK_READING: Duration = Duration::from_millis(2);

/// Why a call to an agent failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The session could not be established.
    #[error("cannot reach the agent of pod {pod}")]
    Greeting {
        /// The pod.
        pod: SandboxId,
        /// The cause.
        source: LinkError,
    },
    /// The agent returned an error.
    #[error("agent of pod {pod} failed {call}: {message}")]
    Refused {
        /// The pod.
        pod: SandboxId,
        /// The call.
        call: &'static str,
        /// The error's code.
        code: Code,
        /// The agent's message.
        message: String,
    },
    /// No response, or an unreadable one.
    #[error("agent of pod {pod} did not respond to {call}")]
    Failed {
        /// The pod.
        pod: SandboxId,
        /// The call.
        call: &'static str,
        /// The transport's error.
        source: ttrpc::Error,
    },
    /// A container is still running after SIGKILL.
    #[error(
        "guest of pod {pod} did not kill container {container} within {limit:?}; killing its VMM"
    )]
    KeptAlive {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// The time limit.
        limit: Duration,
    },
    /// The guest violated the protocol.
    #[error("ended the session with the guest of pod {pod}; killing its VMM")]
    Violated {
        /// The pod.
        pod: SandboxId,
        /// The violation.
        source: Violation,
    },
}

impl GuestError {
    /// Returns the code of the response.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused { code, .. } => *code,
            Self::Greeting { source: LinkError::Version { .. } | LinkError::Refused(_), .. } => {
                Code::FailedPrecondition
            }
            Self::Greeting { .. } | Self::Failed { .. } | Self::KeptAlive { .. } | Self::Violated { .. } => {
                Code::Unavailable
            }
        }
    }
}

/// The sessions with one guest's agent, one after another. Cheap to clone; all clones share them.
#[derive(Clone)]
pub struct Agent {
    pod: SandboxId,
    session: Arc<watch::Sender<Session>>,
    timeout: Duration,
}

/// One session.
#[derive(Clone)]
struct Session {
    /// Number of earlier sessions.
    number: u64,
    client: AgentClient,
    room: Room,
    violation: watch::Receiver<Option<Violation>>,
    /// Another session will be established after its end.
    followed: bool,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Agent({})", self.pod)
    }
}

/// Makes one call; its error names it.
macro_rules! call {
    ($self:ident, $rpc:ident, $deadline:expr, $request:expr) => {{
        let session = $self.session.borrow().clone();
        call!($self, session, $rpc, $deadline, $request).map_err(|error| $self.error(stringify!($rpc), error))
    }};
    ($self:ident, $session:ident, $rpc:ident, $deadline:expr, $request:expr) => {{
        pass(format_args!("before the agent is asked to {}", stringify!($rpc)));
        let deadline = $deadline;
        let answer = match $session.room(&deadline).await {
            Ok(()) => $session.client.$rpc(deadline, &$request).await,
            Err(error) => Err(error),
        };
        pass(format_args!("the agent has answered {}", stringify!($rpc)));
        answer
    }};
}

/// Makes a call that may be repeated: in the next session if its session ends. Waits up to `limit` for that
/// session.
macro_rules! call_again {
    ($self:ident, $rpc:ident, $deadline:expr, $limit:expr, $request:expr) => {{
        loop {
            let session = $self.session.borrow().clone();
            match call!($self, session, $rpc, $deadline, $request) {
                Err(error) if is_end(&error) && $self.next_session(session.number, $limit).await => {}
                answer => break answer.map_err(|error| $self.error(stringify!($rpc), error)),
            }
        }
    }};
}

/// Returns whether a call failed because its session has ended.
fn is_end(error: &ttrpc::Error) -> bool {
    use ttrpc::Error::{Eof, LocalClosed, RemoteClosed, Socket};
    matches!(error, Eof | LocalClosed | RemoteClosed | Socket(_))
}

impl Agent {
    pub(super) fn new(
        pod: SandboxId,
        client: AgentClient,
        room: Room,
        violation: watch::Receiver<Option<Violation>>,
        timeout: Duration,
    ) -> Self {
        let session = Session { number: 0, client, room, violation, followed: false };
        Self { pod, session: Arc::new(watch::Sender::new(session)), timeout }
    }

    /// Makes repeatable calls wait for the next session if this one ends; the caller must establish it.
    pub fn follow(&self) {
        self.session.send_modify(|session| session.followed = true);
    }

    /// Ends that: calls that wait for another session fail.
    pub fn give_up(&self) {
        self.session.send_modify(|session| session.followed = false);
    }

    /// Continues with the session of `next`, which was newly established.
    pub fn resume(&self, next: &Self) {
        let next = next.session.borrow().clone();
        self.session.send_modify(|session| {
            *session = Session { number: session.number + 1, followed: session.followed, ..next };
        });
    }

    /// Waits for a session after the one with that number; returns `false` if there will be none, or not
    /// within `limit`.
    async fn next_session(&self, number: u64, limit: Duration) -> bool {
        let mut session = self.session.subscribe();
        let next = session.wait_for(|session| session.number > number || !session.followed);
        match tokio::time::timeout(limit, next).await {
            Ok(Ok(session)) => session.number > number,
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Waits for the session's end; returns the violation if that was the cause. Otherwise the session ends
    /// with its VM, or with this daemon, and the next daemon establishes a new one.
    pub async fn violated(&self) -> Option<GuestError> {
        let mut violation = self.session.borrow().violation.clone();
        let source = violation.wait_for(Option::is_some).await.ok()?.clone()?;
        Some(GuestError::Violated { pod: self.pod.clone(), source })
    }

    /// Returns the violation if the guest has committed one.
    pub fn violation(&self) -> Option<GuestError> {
        let session = self.session.borrow();
        let source = session.violation.borrow().clone()?;
        Some(GuestError::Violated { pod: self.pod.clone(), source })
    }

    /// Returns how long a killed process may take to exit.
    pub fn patience(&self) -> Duration {
        self.timeout * LONG_CALL
    }

    /// Returns an error: `container` has not exited within `limit`.
    pub fn kept_alive(&self, container: ContainerId, limit: Duration) -> GuestError {
        GuestError::KeptAlive { pod: self.pod.clone(), container, limit }
    }

    /// Returns the same sessions with errors that name another pod.
    pub fn of(self, pod: &SandboxId) -> Self {
        Self { pod: pod.clone(), ..self }
    }

    /// Sets the guest's identity.
    pub async fn configure_pod(&self, request: wire::ConfigurePodRequest) -> Result<(), GuestError> {
        call!(self, configure_pod, self.short(), request).map(drop)
    }

    /// Changes the limits of all the pod's containers together.
    pub async fn update_pod(&self, limits: wire::PodLimits) -> Result<(), GuestError> {
        let request = wire::UpdatePodRequest { limits: Some(limits).into(), ..Default::default() };
        call!(self, update_pod, self.short(), request).map(drop)
    }

    /// Sets the guest's clock from the host's if it is wrong beyond the error of measurement. Returns whether
    /// to repeat this later: a guest with a clock device does it by itself.
    pub async fn sync_clock(&self) -> Result<bool, GuestError> {
        let mut best: Option<Reading> = None;
        for _ in 0..CLOCK_READINGS {
            let (asked_ns, asked) = (now_ns(), Instant::now());
            let said = match call!(self, sync_clock, self.short(), wire::SyncClockRequest::new()) {
                // The agent has an earlier version.
                Err(GuestError::Refused { .. }) => return Ok(false),
                said => said?,
            };
            if said.kept {
                return Ok(false);
            }
            let reading = Reading::of(asked_ns, asked.elapsed(), &said);
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

    /// Creates a container with a waiting init; returns the init's guest pid.
    pub async fn create_container(&self, request: wire::CreateContainerRequest) -> Result<u32, GuestError> {
        call!(self, create_container, self.long(), request).map(|answer| answer.pid)
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

    /// Starts a container's init or an exec; returns its guest pid.
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

    /// Sends a signal to a process, or to all of its container.
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
        // With an identifier the agent delivers it once, however often it is requested. A repeated SIGKILL is
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

    /// Writes input of a process; waits while the process does not read. Returns the offset up to which input
    /// was written.
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

    /// Lists the guest pids of a container.
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

    /// Connects to a port of the guest's loopback. Closes connections of another `owner`.
    pub async fn dial(&self, port: u16, owner: u64) -> Result<u64, GuestError> {
        let request = wire::DialRequest { port: port.into(), owner, ..Default::default() };
        call!(self, dial, self.short(), request).map(|answer| answer.connection)
    }

    /// Reads from a connection; waits while there is no data. Empty at the end.
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

    /// Returns whether the shares are mounted in the guest, which then carries their requests itself.
    pub async fn has_shares(&self) -> Result<bool, GuestError> {
        let request = wire::MountSharesRequest { ask: true, ..Default::default() };
        call!(self, mount_shares, self.short(), request).map(|answer| answer.mounted)
    }

    /// Mounts the shares in the guest. Requests use the disk with this serial or, if it is empty, streams
    /// that begin with `key`. Returns `false` if the agent's version does not support that.
    pub async fn mount_shares(&self, disk: &str, key: Option<&LinkKey>) -> Result<bool, GuestError> {
        let key = key.map(|key| key.as_bytes().to_vec()).unwrap_or_default();
        let request = wire::MountSharesRequest { disk: disk.to_owned(), key, ..Default::default() };
        call!(self, mount_shares, self.short(), request).map(|answer| answer.mounted)
    }

    /// Powers the guest off. A missing response is normal: watch the VM instead.
    pub async fn power_off(&self) {
        let client = self.session.borrow().client.clone();
        let _ = client.power_off(self.short(), &wire::PowerOffRequest::new()).await;
    }

    fn short(&self) -> Context {
        with_duration(self.timeout)
    }

    fn long(&self) -> Context {
        with_duration(self.timeout * LONG_CALL)
    }

    fn error(&self, call: &'static str, error: ttrpc::Error) -> GuestError {
        let pod = self.pod.clone();
        match error {
            ttrpc::Error::RpcStatus(status) => {
                let code = match status.code() {
                    ttrpc::Code::NOT_FOUND => Code::NotFound,
                    ttrpc::Code::ALREADY_EXISTS => Code::AlreadyExists,
                    ttrpc::Code::INVALID_ARGUMENT => Code::InvalidArgument,
                    ttrpc::Code::FAILED_PRECONDITION => Code::FailedPrecondition,
                    ttrpc::Code::UNIMPLEMENTED => Code::Unimplemented,
                    ttrpc::Code::DEADLINE_EXCEEDED => Code::DeadlineExceeded,
                    _ => Code::Internal,
                };
                GuestError::Refused { pod, call, code, message: plain(&status.message) }
            }
            source => GuestError::Failed { pod, call, source },
        }
    }
}

impl Session {
    /// Waits until the guest has read most of the earlier calls, up to the call's timeout.
    async fn room(&self, deadline: &Context) -> Result<(), ttrpc::Error> {
        let limit = match u64::try_from(deadline.timeout_nano) {
            Ok(nanos) if nanos > 0 => Duration::from_nanos(nanos),
            // No timeout.
            _ => Duration::MAX,
        };
        let room = tokio::time::timeout(limit, self.room.wait()).await;
        room.map_err(|_| ttrpc::Error::Others("the guest does not read calls".to_owned()))
    }
}

fn text(id: Option<&ExecId>) -> String {
    id.map(ToString::to_string).unwrap_or_default()
}
