//! The agent's ttrpc service: converts requests of the wire into typed calls, and results into responses and status
//! codes.

mod rpc;

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use sandboxer_protocol::{agent as wire, link::LinkKey};
use tokio::sync::watch;

use crate::{
    container::Container,
    containers::Containers,
    events::Events,
    failure::Failure,
    forward::Connections,
    io::{CAPACITY, Output},
    messages::{self, container_id, exec_id},
    process::Process,
    resolver::Resolver,
    shares::Shares,
    sync::{detached, lock},
    volume::Volumes,
};

/// The agent's service.
pub struct Service {
    pub containers: Arc<Containers>,
    pub volumes: Arc<Volumes>,
    /// The queue of events.
    pub events: Arc<Events>,
    /// The key that the host's next session must present.
    pub link_key: watch::Sender<LinkKey>,
    /// The host's connections to ports of the pod.
    pub connections: Connections,
    /// The name server on the loopback that the host's answers for.
    pub resolver: Resolver,
    /// The host's file shares that are mounted in the guest.
    pub shares: Arc<Shares>,
    /// The request identifiers of the signals that were delivered last. The lock is held while a signal is delivered,
    /// so that one request is not delivered twice, and never across an await.
    pub delivered: Mutex<VecDeque<String>>,
}

/// The most deliveries remembered, and the longest identifier of a request, bytes.
const MAX_DELIVERED: usize = 256;
const MAX_REQUEST_ID_LEN: usize = 128;

impl Service {
    pub(super) fn container(&self, id: &str) -> Result<Arc<Container>, Failure> {
        self.containers.get(&container_id(id)?)
    }

    pub(super) fn process(&self, container: &str, exec: &str) -> Result<Arc<Process>, Failure> {
        self.container(container)?.process(exec_id(exec)?.as_ref())
    }

    pub(super) async fn start(&self, request: &wire::StartProcessRequest) -> Result<i32, Failure> {
        let container = self.container(&request.container_id)?;
        let exec = exec_id(&request.exec_id)?;
        detached(async move {
            match exec {
                None => container.start().await,
                Some(exec) => container.start_exec(&exec).await,
            }
        })
        .await
    }

    pub(super) fn signal(&self, request: &wire::SignalProcessRequest) -> Result<(), Failure> {
        let signal =
            i32::try_from(request.signal).ok().filter(|signal| (1..=libc::SIGRTMAX()).contains(signal));
        let signal = signal.ok_or_else(|| Failure::invalid(format!("invalid signal {}", request.signal)))?;
        if request.request.len() > MAX_REQUEST_ID_LEN {
            return Err(Failure::invalid("the request's identifier is too long"));
        }
        let mut delivered = lock(&self.delivered);
        if !request.request.is_empty() && delivered.contains(&request.request) {
            return Ok(());
        }
        match request.all {
            true => self.container(&request.container_id)?.signal_all(signal)?,
            false => {
                let exec = exec_id(&request.exec_id)?;
                self.container(&request.container_id)?.signal(exec.as_ref(), signal)?;
            }
        }
        if !request.request.is_empty() {
            delivered.push_back(request.request.clone());
            if delivered.len() > MAX_DELIVERED {
                delivered.pop_front();
            }
        }
        Ok(())
    }

    pub(super) fn output(&self, request: &wire::ReadOutputRequest) -> Result<Arc<Output>, Failure> {
        let process = self.process(&request.container_id, &request.exec_id)?;
        let stream = match request.stream.enum_value() {
            Ok(wire::OutputStream::STDOUT) => &process.stdout,
            Ok(wire::OutputStream::STDERR) => &process.stderr,
            Err(number) => return Err(Failure::invalid(format!("unknown output stream {number}"))),
        };
        stream.clone().ok_or_else(|| Failure::precondition("process was created without this output stream"))
    }

    pub(super) async fn read(
        &self,
        request: &wire::ReadOutputRequest,
    ) -> Result<wire::ReadOutputResponse, Failure> {
        let output = self.output(request)?;
        let offset = (!request.resume).then_some(request.offset);
        let max = usize::try_from(request.max_bytes).unwrap_or(CAPACITY);
        let chunk = output.read(offset, if max == 0 { CAPACITY } else { max.min(CAPACITY) }).await?;
        Ok(wire::ReadOutputResponse {
            offset: chunk.offset,
            data: chunk.bytes,
            end: chunk.end,
            ..Default::default()
        })
    }

    pub(super) fn list(&self) -> Vec<wire::Process> {
        let mut listed = Vec::new();
        for (id, container) in self.containers.all() {
            let (is_paused, is_held) = (container.is_paused(), container.is_held());
            let processes = container.processes();
            listed.extend(
                processes.iter().map(|(exec, process)| {
                    messages::process(&id, exec.as_ref(), process, is_paused, is_held)
                }),
            );
        }
        listed
    }
}
