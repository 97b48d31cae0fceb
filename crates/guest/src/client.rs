//! Calls to an agent: typed, timed, and each error naming the pod and the call.

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

/// Making a container or an exec may take a slow guest a while: so many times the plain limit.
const LONG_CALL: u32 = 6;

/// How often at most a guest's clock is read for one comparison, and how soon an answer must come to be good enough.
const CLOCK_READINGS: usize = 4;
const QUICK_READING: Duration = Duration::from_millis(2);

/// Why an agent gave no answer, or a bad one.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// No session came about.
    #[error("cannot reach the agent of pod {pod}")]
    Greeting {
        /// The pod.
        pod: SandboxId,
        /// What went wrong.
        source: LinkError,
    },
    /// The agent said no.
    #[error("agent of pod {pod} refused {call}: {message}")]
    Refused {
        /// The pod.
        pod: SandboxId,
        /// What was asked.
        call: &'static str,
        /// Which kind of no.
        code: Code,
        /// Converts the limits for the agent.
        message: String,
    },
    /// No answer, or none that could be read.
    #[error("agent of pod {pod} did not answer {call}")]
    Failed {
        /// The pod.
        pod: SandboxId,
        /// What was asked.
        call: &'static str,
        /// What the transport said.
        source: ttrpc::Error,
    },
    /// It keeps what was killed.
    #[error(
        "guest of pod {pod} did not end container {container} within {limit:?} of being told to kill it, and its VMM is ended"
    )]
    KeptAlive {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// How long it had.
        limit: Duration,
    },
    /// It said what no agent says.
    #[error("the session with the guest of pod {pod} is over, and its VMM is ended")]
    Violated {
        /// The pod.
        pod: SandboxId,
        /// What the guest did.
        source: Violation,
    },
}

impl GuestError {
    /// Returns the code to answer with.
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

/// A session with one guest's agent, and those that follow it. Cheap to clone; all clones share them.
#[derive(Clone)]
pub struct Agent {
    pod: SandboxId,
    session: Arc<watch::Sender<Session>>,
    timeout: Duration,
}

/// What was greeted once.
#[derive(Clone)]
struct Session {
    /// How many there were before it.
    number: u64,
    client: AgentClient,
    room: Room,
    violation: watch::Receiver<Option<Violation>>,
    /// Somebody makes another one should it end.
    followed: bool,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Agent({})", self.pod)
    }
}

/// One call, its error naming it.
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

/// One call that may be made twice: in the next session, if the one that it is made in ends. Waits `limit` for that.
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

/// Returns whether a call failed because its session is over.
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

    /// Has calls that may be made twice wait for the next session, should this one end: the caller makes it.
    pub fn follow(&self) {
        self.session.send_modify(|session| session.followed = true);
    }

    /// Makes no other session any more: whoever waits for one is told.
    pub fn give_up(&self) {
        self.session.send_modify(|session| session.followed = false);
    }

    /// Goes on with the session of `next`, which was greeted anew.
    pub fn resume(&self, next: &Self) {
        let next = next.session.borrow().clone();
        self.session.send_modify(|session| {
            *session = Session { number: session.number + 1, followed: session.followed, ..next };
        });
    }

    /// Waits until there is a session after the one with that number; false if nobody makes one, or not within `limit`.
    async fn next_session(&self, number: u64, limit: Duration) -> bool {
        let mut session = self.session.subscribe();
        let next = session.wait_for(|session| session.number > number || !session.followed);
        match tokio::time::timeout(limit, next).await {
            Ok(Ok(session)) => session.number > number,
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Waits for the session's end, and tells what the guest did if it was that. A session that ends otherwise does
    /// so with its VM, or with this daemon, whose successor greets the agent anew.
    pub async fn violated(&self) -> Option<GuestError> {
        let mut violation = self.session.borrow().violation.clone();
        let source = violation.wait_for(Option::is_some).await.ok()?.clone()?;
        Some(GuestError::Violated { pod: self.pod.clone(), source })
    }

    /// Returns what the guest did, if it has broken the session.
    pub fn violation(&self) -> Option<GuestError> {
        let session = self.session.borrow();
        let source = session.violation.borrow().clone()?;
        Some(GuestError::Violated { pod: self.pod.clone(), source })
    }

    /// Returns how long a process may take to end that was killed.
    pub fn patience(&self) -> Duration {
        self.timeout * LONG_CALL
    }

    /// Returns that `container` has not ended within `limit`.
    pub fn kept_alive(&self, container: ContainerId, limit: Duration) -> GuestError {
        GuestError::KeptAlive { pod: self.pod.clone(), container, limit }
    }

    /// Returns the same session, its errors naming another pod.
    pub fn of(self, pod: &SandboxId) -> Self {
        Self { pod: pod.clone(), ..self }
    }

    /// Gives the guest its identity.
    pub async fn configure_pod(&self, request: wire::ConfigurePodRequest) -> Result<(), GuestError> {
        call!(self, configure_pod, self.short(), request).map(drop)
    }

    /// Changes what the pod's containers may use together.
    pub async fn update_pod(&self, limits: wire::PodLimits) -> Result<(), GuestError> {
        let request = wire::UpdatePodRequest { limits: Some(limits).into(), ..Default::default() };
        call!(self, update_pod, self.short(), request).map(drop)
    }

    /// Sets the guest's clock by the host's, if it is off by more than can be doubted. Returns whether that is to be done
    /// again later: a guest that has a clock of its VMM's does it by itself.
    pub async fn sync_clock(&self) -> Result<bool, GuestError> {
        let mut best: Option<Reading> = None;
        for _ in 0..CLOCK_READINGS {
            let (asked_ns, asked) = (now_ns(), Instant::now());
            let said = match call!(self, sync_clock, self.short(), wire::SyncClockRequest::new()) {
                // An agent of an earlier version.
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

    /// Makes a volume, or gives it other files.
    pub async fn put_volume(&self, request: wire::PutVolumeRequest) -> Result<(), GuestError> {
        call!(self, put_volume, self.long(), request).map(drop)
    }

    /// Returns every volume the agent knows.
    pub async fn volumes(&self) -> Result<Vec<String>, GuestError> {
        call!(self, list_volumes, self.short(), wire::ListVolumesRequest::new())
            .map(|answer| answer.volume_ids)
    }

    /// Has a scratch disk mounted ahead of its container.
    pub async fn prepare_disk(&self, disk: wire::Disk) -> Result<(), GuestError> {
        let request = wire::PrepareDiskRequest { disk: Some(disk).into(), ..Default::default() };
        call!(self, prepare_disk, self.long(), request).map(drop)
    }

    /// Makes a container; its init waits. Returns its guest pid.
    pub async fn create_container(&self, request: wire::CreateContainerRequest) -> Result<u32, GuestError> {
        call!(self, create_container, self.long(), request).map(|answer| answer.pid)
    }

    /// Removes a container and its mounts.
    pub async fn delete_container(&self, container: &ContainerId) -> Result<(), GuestError> {
        let request =
            wire::DeleteContainerRequest { container_id: container.to_string(), ..Default::default() };
        call!(self, delete_container, self.long(), request).map(drop)
    }

    /// Returns every process the agent knows.
    pub async fn processes(&self) -> Result<Vec<wire::Process>, GuestError> {
        call!(self, list_containers, self.short(), wire::ListContainersRequest::new())
            .map(|answer| answer.processes)
    }

    /// Registers an exec.
    pub async fn create_exec(&self, request: wire::CreateExecRequest) -> Result<(), GuestError> {
        call!(self, create_exec, self.short(), request).map(drop)
    }

    /// Starts a container's init or an exec. Returns its guest pid.
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

    /// Waits for a process's end, however long that takes.
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
        // With a name it is delivered once, however often it is asked for. To be killed twice is no more than once.
        match !signal.request.is_empty() || signal.number == Signal::KILL {
            true => call_again!(self, signal_process, self.short(), self.timeout, request).map(drop),
            false => call!(self, signal_process, self.short(), request).map(drop),
        }
    }

    /// Forgets an exec.
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

    /// Output of a process; waits while there is none.
    pub async fn read_output(
        &self,
        request: wire::ReadOutputRequest,
    ) -> Result<wire::ReadOutputResponse, GuestError> {
        call_again!(self, read_output, Context::default(), Duration::MAX, request)
    }

    /// Input for a process; waits while it takes none. Returns the offset up to which input was taken.
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

    /// Returns the guest pids of a container.
    pub async fn pids(&self, container: &ContainerId) -> Result<Vec<u32>, GuestError> {
        let request =
            wire::ListProcessesRequest { container_id: container.to_string(), ..Default::default() };
        call!(self, list_processes, self.short(), request).map(|answer| answer.pids)
    }

    /// Readings of a container, or of the whole guest.
    pub async fn stats(&self, container: Option<&ContainerId>) -> Result<wire::StatsResponse, GuestError> {
        let request = wire::StatsRequest { container_id: text(container), ..Default::default() };
        call_again!(self, stats, self.short(), self.timeout, request)
    }

    /// Connects to a port of the guest's loopback. Connections of another `owner` end.
    pub async fn dial(&self, port: u16, owner: u64) -> Result<u64, GuestError> {
        let request = wire::DialRequest { port: port.into(), owner, ..Default::default() };
        call!(self, dial, self.short(), request).map(|answer| answer.connection)
    }

    /// Returns what has come by a connection; waits while nothing has. Empty: nothing more will.
    pub async fn read_connection(&self, connection: u64) -> Result<Vec<u8>, GuestError> {
        let request = wire::ReadConnectionRequest { connection, ..Default::default() };
        call!(self, read_connection, Context::default(), request).map(|answer| answer.data)
    }

    /// Passes on what goes by a connection; waits while it takes none. `end`: nothing follows.
    pub async fn write_connection(
        &self,
        connection: u64,
        data: Vec<u8>,
        end: bool,
    ) -> Result<(), GuestError> {
        let request = wire::WriteConnectionRequest { connection, data, end, ..Default::default() };
        call!(self, write_connection, Context::default(), request).map(drop)
    }

    /// Ends a connection, and what waits for it.
    pub async fn close_connection(&self, connection: u64) -> Result<(), GuestError> {
        let request = wire::CloseConnectionRequest { connection, ..Default::default() };
        call!(self, close_connection, self.short(), request).map(drop)
    }

    /// Returns whether the shares are mounted in the guest, and it carries its requests itself.
    pub async fn has_shares(&self) -> Result<bool, GuestError> {
        let request = wire::MountSharesRequest { ask: true, ..Default::default() };
        call!(self, mount_shares, self.short(), request).map(|answer| answer.mounted)
    }

    /// Mounts the shares in the guest, whose requests go by the disk of this serial, or if it is empty by streams, which
    /// begin with `key`. False: this agent is of another time and doesn't carry them.
    pub async fn mount_shares(&self, disk: &str, key: Option<&LinkKey>) -> Result<bool, GuestError> {
        let key = key.map(|key| key.as_bytes().to_vec()).unwrap_or_default();
        let request = wire::MountSharesRequest { disk: disk.to_owned(), key, ..Default::default() };
        call!(self, mount_shares, self.short(), request).map(|answer| answer.mounted)
    }

    /// Asks the guest to power itself off. No answer is a fine answer: look at the VM.
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
    /// Waits until the guest has taken most of what it was asked before, for as long as the call may take.
    async fn room(&self, deadline: &Context) -> Result<(), ttrpc::Error> {
        let limit = match u64::try_from(deadline.timeout_nano) {
            Ok(nanos) if nanos > 0 => Duration::from_nanos(nanos),
            // None: it waits for as long as it takes.
            _ => Duration::MAX,
        };
        let room = tokio::time::timeout(limit, self.room.wait()).await;
        room.map_err(|_| ttrpc::Error::Others("the guest takes no calls".to_owned()))
    }
}

fn text(id: Option<&ExecId>) -> String {
    id.map(ToString::to_string).unwrap_or_default()
}
