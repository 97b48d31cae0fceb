//! Calls to an agent: typed, with timeouts, and errors that name the pod and the call.

use std::{sync::Arc, time::Duration};

use protobuf::MessageDyn;
use sandboxer_base::Code;
use sandboxer_protocol::{
    PROTOCOL_VERSION,
    agent::AgentClient,
    id::{ContainerId, SandboxId},
    newer::{self, Newer},
};
use tokio::sync::watch;
use ttrpc::context::{Context, with_duration};

use crate::{GuestError, bounds::plain, calls::Calls, error::NOT_READ};

/// The factor of the timeout for creating a container or an exec, which is slow in a slow guest.
const LONG_CALL: u32 = 6;

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
    /// The number of earlier sessions.
    number: u64,
    client: AgentClient<Calls>,
    calls: Calls,
    /// The protocol's version.
    version: u32,
    /// Whether another session will be established after this one ends.
    has_successor: bool,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Agent({})", self.pod)
    }
}

/// Makes one call, which its error names.
macro_rules! call {
    ($self:ident, $rpc:ident, $deadline:expr, $request:expr) => {{
        let session = $self.session.borrow().clone();
        $self.fits(&session, stringify!($rpc), &$request)?;
        call!($self, session, $rpc, $deadline, $request).map_err(|error| $self.error(stringify!($rpc), error))
    }};
    ($self:ident, $session:ident, $rpc:ident, $deadline:expr, $request:expr) => {{
        pass(format_args!("before the agent is asked to {}", stringify!($rpc)));
        let deadline = $deadline;
        let answer = match $session.wait_for_capacity(&deadline).await {
            Ok(()) => $session.client.$rpc(deadline, &$request).await,
            Err(error) => Err(error),
        };
        pass(format_args!("the agent has answered {}", stringify!($rpc)));
        answer
    }};
}

/// Makes a call that may be repeated in the next session if its session ends. Waits up to `limit` for that session.
macro_rules! call_again {
    ($self:ident, $rpc:ident, $deadline:expr, $limit:expr, $request:expr) => {{
        loop {
            let session = $self.session.borrow().clone();
            $self.fits(&session, stringify!($rpc), &$request)?;
            match call!($self, session, $rpc, $deadline, $request) {
                // The future is boxed: it is rarely needed, and these calls wait for long.
                Err(error)
                    if is_end(&error) && Box::pin($self.next_session(session.number, $limit)).await => {}
                answer => break answer.map_err(|error| $self.error(stringify!($rpc), error)),
            }
        }
    }};
}

mod calls;

/// Returns whether a call failed because its session has ended.
fn is_end(error: &ttrpc::Error) -> bool {
    use ttrpc::Error::{Eof, LocalClosed, RemoteClosed, Socket};
    matches!(error, Eof | LocalClosed | RemoteClosed | Socket(_))
}

impl Agent {
    pub(super) fn new(pod: SandboxId, calls: Calls, version: u32, timeout: Duration) -> Self {
        let client = AgentClient::new(calls.clone());
        let session = Session { number: 0, client, calls, version, has_successor: false };
        Self { pod, session: Arc::new(watch::Sender::new(session)), timeout }
    }

    /// Returns whether the agent knows a part of the protocol. Sending one that it does not know is an error.
    pub fn knows(&self, part: &Newer) -> bool {
        self.session.borrow().version >= part.since
    }

    /// Fails if a call has a part that the session's agent does not know, and would ignore.
    fn fits(
        &self,
        session: &Session,
        call: &'static str,
        request: &dyn MessageDyn,
    ) -> Result<(), GuestError> {
        if session.version >= PROTOCOL_VERSION {
            return Ok(());
        }
        let (pod, version) = (self.pod.clone(), session.version);
        match newer::in_message(request, version) {
            None => Ok(()),
            Some(Newer { what, .. }) => Err(GuestError::TooOld { pod, call, version, what }),
        }
    }

    /// Makes repeatable calls wait for the next session if this one ends; the caller must establish it.
    pub fn follow(&self) {
        self.session.send_modify(|session| session.has_successor = true);
    }

    /// Makes calls that wait for another session fail.
    pub fn give_up(&self) {
        self.session.send_modify(|session| session.has_successor = false);
    }

    /// Continues with the session of `next`, which was just established.
    pub fn resume(&self, next: &Self) {
        let next = next.session.borrow().clone();
        self.session.send_modify(|session| {
            *session = Session { number: session.number + 1, has_successor: session.has_successor, ..next };
        });
    }

    /// Waits for a session after the one with the number `number`; returns `false` if there will be none, or not within
    /// `limit`.
    async fn next_session(&self, number: u64, limit: Duration) -> bool {
        let mut session = self.session.subscribe();
        let next = session.wait_for(|session| session.number > number || !session.has_successor);
        match tokio::time::timeout(limit, next).await {
            Ok(Ok(session)) => session.number > number,
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Waits for the session's end; returns the violation if that was the cause. Otherwise the session ends with its VM
    /// or with this daemon, and the next daemon establishes a new one.
    pub async fn violated(&self) -> Option<GuestError> {
        let calls = self.session.borrow().calls.clone();
        let source = calls.end().await?;
        Some(GuestError::Violated { pod: self.pod.clone(), source })
    }

    /// Returns the violation if the guest has committed one.
    pub fn violation(&self) -> Option<GuestError> {
        let source = self.session.borrow().calls.violation()?;
        Some(GuestError::Violated { pod: self.pod.clone(), source })
    }

    /// Returns how long a killed process may take to exit.
    pub fn patience(&self) -> Duration {
        self.timeout * LONG_CALL
    }

    /// Returns the error that `container` has not exited within `limit`.
    pub fn not_exited(&self, container: ContainerId, limit: Duration) -> GuestError {
        GuestError::KeptAlive { pod: self.pod.clone(), container, limit }
    }

    /// Returns the same sessions with errors that name another pod.
    pub fn for_pod(self, pod: &SandboxId) -> Self {
        Self { pod: pod.clone(), ..self }
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
    async fn wait_for_capacity(&self, deadline: &Context) -> Result<(), ttrpc::Error> {
        if self.calls.has_capacity() {
            return Ok(());
        }
        let limit = match u64::try_from(deadline.timeout_nano) {
            Ok(nanos) if nanos > 0 => Duration::from_nanos(nanos),
            // No timeout.
            _ => Duration::MAX,
        };
        let result = Box::pin(tokio::time::timeout(limit, self.calls.wait_for_capacity())).await;
        result.map_err(|_| ttrpc::Error::Others(NOT_READ.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_protocol::{
        IMAGE_VOLUME, SPOKEN,
        agent::{CreateContainerRequest, PodLimits},
    };
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn what_an_older_agent_would_ignore_is_refused_by_name_and_not_sent() {
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let limit = Duration::from_millis(50);
        let agent = Agent::new("web".parse().unwrap(), Calls::over(ours), *SPOKEN.start(), limit);
        let spec = format!(r#"{{"mounts": [{{"destination": "/data", "source": "{IMAGE_VOLUME}"}}]}}"#);
        let create = CreateContainerRequest { spec_json: spec.into_bytes(), ..Default::default() };
        let error = agent.create_container(create).await.unwrap_err();
        assert!(matches!(error, GuestError::TooOld { call: "create_container", .. }), "{error}");
        assert_eq!(error.code(), Code::FailedPrecondition);
        let error = agent.update_pod(PodLimits { processes: 9, ..Default::default() }).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the agent of pod web speaks protocol 6 and cannot update_pod with a limit of the pod's processes: a \
             guest keeps the agent that it was started with, so start the pod anew, with the initramfs of this \
             daemon's version"
        );
        assert!(!agent.knows(&newer::PROCESSES));

        // What it knows is sent, in the first bytes that arrive.
        let error = agent.update_pod(PodLimits { memory_bytes: 9, ..Default::default() }).await.unwrap_err();
        assert!(matches!(error, GuestError::Failed { .. }), "{error}");
        let mut sent = vec![0; 4096];
        let count = theirs.read(&mut sent).await.unwrap();
        let sent = String::from_utf8_lossy(&sent[..count]).into_owned();
        assert!(sent.contains("UpdatePod") && !sent.contains("CreateContainer"), "{sent:?}");
    }
}
