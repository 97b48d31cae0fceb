//! The methods of the agent's ttrpc service.

use std::sync::Arc;

use async_trait::async_trait;
use protobuf::MessageField;
use sandboxer_protocol::{
    agent::{self as wire, Agent},
    link::LinkKey,
};
use ttrpc::r#async::TtrpcContext;

use crate::{
    clock,
    container::CreateExec,
    cpus,
    failure::{Failure, Kind, internal},
    limits::Limits,
    messages::{self, container_id, guest_pid, id},
    pod::{self, Identity},
    stats,
    sync::detached,
    timekeeper,
};

use super::Service;

type Response<T> = ttrpc::Result<T>;

fn refuse(failure: Failure) -> ttrpc::Error {
    use ttrpc::Code;
    let code = match failure.kind {
        Kind::NotFound => Code::NOT_FOUND,
        Kind::AlreadyExists => Code::ALREADY_EXISTS,
        Kind::InvalidArgument => Code::INVALID_ARGUMENT,
        Kind::FailedPrecondition => Code::FAILED_PRECONDITION,
        Kind::DeadlineExceeded => Code::DEADLINE_EXCEEDED,
        Kind::Internal => Code::INTERNAL,
    };
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, failure.message))
}

fn limits_of(limits: Option<&wire::PodLimits>) -> Response<Limits> {
    let limits = limits.map(Limits::of_pod).transpose().map_err(refuse)?;
    Ok(limits.unwrap_or_default())
}

#[async_trait]
impl Agent for Service {
    async fn configure_pod(
        &self,
        _: &TtrpcContext,
        request: wire::ConfigurePodRequest,
    ) -> Response<wire::ConfigurePodResponse> {
        let identity = Identity {
            hostname: request.hostname,
            realtime_ns: request.realtime_ns,
            entropy: request.entropy,
            shm_bytes: request.shm_bytes,
            sysctls: request.sysctls,
            host_sysctls: request.host_sysctls,
            interfaces: request.interfaces,
            removes_other_cards: request.removes_other_cards,
            limits: limits_of(request.limits.as_ref())?,
        };
        let link_key = match <[u8; LinkKey::LEN]>::try_from(request.link_key.as_slice()) {
            Ok(bytes) => Some(LinkKey::from_bytes(bytes)),
            Err(_) if request.link_key.is_empty() => None,
            Err(_) => return Err(refuse(Failure::invalid("link_key: must have 32 bytes"))),
        };
        pod::configure(&identity).await.map_err(refuse)?;
        if let Some(key) = link_key {
            self.link_key.send_replace(key);
        }
        Ok(wire::ConfigurePodResponse::default())
    }

    async fn update_pod(
        &self,
        _: &TtrpcContext,
        request: wire::UpdatePodRequest,
    ) -> Response<wire::UpdatePodResponse> {
        let limits = limits_of(request.limits.as_ref())?;
        pod::update(&limits).map_err(refuse)?;
        Ok(wire::UpdatePodResponse::default())
    }

    async fn online_cpus(
        &self,
        _: &TtrpcContext,
        request: wire::OnlineCpusRequest,
    ) -> Response<wire::OnlineCpusResponse> {
        let online = cpus::online(request.count).await.map_err(refuse)?;
        Ok(wire::OnlineCpusResponse { online, ..Default::default() })
    }

    async fn sync_clock(
        &self,
        _: &TtrpcContext,
        request: wire::SyncClockRequest,
    ) -> Response<wire::SyncClockResponse> {
        if request.realtime_ns > 0 {
            let set = timekeeper::set_by(request.at_boottime_ns, request.realtime_ns);
            set.map_err(|error| refuse(internal("cannot set the clock")(error)))?;
        }
        Ok(wire::SyncClockResponse {
            boottime_ns: clock::boottime_ns(),
            realtime_ns: clock::realtime_ns(),
            kept: timekeeper::is_kept(),
            ..Default::default()
        })
    }

    async fn put_volume(
        &self,
        _: &TtrpcContext,
        request: wire::PutVolumeRequest,
    ) -> Response<wire::PutVolumeResponse> {
        let (volumes, put) = (Arc::clone(&self.volumes), messages::put(request).map_err(refuse)?);
        detached(async move { volumes.put(put).await }).await.map_err(refuse)?;
        Ok(wire::PutVolumeResponse::default())
    }

    async fn list_volumes(
        &self,
        _: &TtrpcContext,
        _: wire::ListVolumesRequest,
    ) -> Response<wire::ListVolumesResponse> {
        let volume_ids = self.volumes.all().iter().map(ToString::to_string).collect();
        Ok(wire::ListVolumesResponse { volume_ids, ..Default::default() })
    }

    async fn prepare_disk(
        &self,
        _: &TtrpcContext,
        request: wire::PrepareDiskRequest,
    ) -> Response<wire::PrepareDiskResponse> {
        let (containers, disk) = (Arc::clone(&self.containers), messages::scratch(&request).map_err(refuse)?);
        detached(async move { containers.prepare(&disk).await }).await.map_err(refuse)?;
        Ok(wire::PrepareDiskResponse::default())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: wire::CreateContainerRequest,
    ) -> Response<wire::CreateContainerResponse> {
        let request = messages::create(request).map_err(refuse)?;
        let id = request.id.clone();
        let pid = self.containers.create(request).await.map_err(refuse)?;
        let (disks, runtime) = self.containers.get(&id).map(|container| container.took()).unwrap_or_default();
        let nanos = |took: std::time::Duration| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        Ok(wire::CreateContainerResponse {
            pid: guest_pid(pid),
            disks_ns: nanos(disks),
            runtime_ns: nanos(runtime),
            ..Default::default()
        })
    }

    async fn adopt_container(
        &self,
        _: &TtrpcContext,
        request: wire::AdoptContainerRequest,
    ) -> Response<wire::AdoptContainerResponse> {
        let id = container_id(&request.container_id).map_err(refuse)?;
        let source = container_id(&request.of).map_err(refuse)?;
        let files: Vec<_> = request.files.into_iter().map(messages::file).collect();
        let container = self.containers.adopt(&id, &source, &files, request.signal).map_err(refuse)?;
        let pid = container.wait_created().await.map_err(refuse)?;
        Ok(wire::AdoptContainerResponse { pid: guest_pid(pid), ..Default::default() })
    }

    async fn delete_container(
        &self,
        _: &TtrpcContext,
        request: wire::DeleteContainerRequest,
    ) -> Response<wire::DeleteContainerResponse> {
        let id = container_id(&request.container_id).map_err(refuse)?;
        self.containers.delete(&id).await.map_err(refuse)?;
        Ok(wire::DeleteContainerResponse::default())
    }

    async fn list_containers(
        &self,
        _: &TtrpcContext,
        _: wire::ListContainersRequest,
    ) -> Response<wire::ListContainersResponse> {
        Ok(wire::ListContainersResponse { processes: self.list(), ..Default::default() })
    }

    async fn create_exec(
        &self,
        _: &TtrpcContext,
        request: wire::CreateExecRequest,
    ) -> Response<wire::CreateExecResponse> {
        let create = || {
            let container = self.container(&request.container_id)?;
            let id = id("exec_id", &request.exec_id)?;
            let stdio = messages::stdio_spec(&request.stdio);
            container.create_exec(CreateExec { id, process: request.process_json, stdio })
        };
        create().map_err(refuse)?;
        Ok(wire::CreateExecResponse::default())
    }

    async fn start_process(
        &self,
        _: &TtrpcContext,
        request: wire::StartProcessRequest,
    ) -> Response<wire::StartProcessResponse> {
        let pid = self.start(&request).await.map_err(refuse)?;
        Ok(wire::StartProcessResponse { pid: guest_pid(pid), ..Default::default() })
    }

    async fn wait_process(
        &self,
        _: &TtrpcContext,
        request: wire::WaitProcessRequest,
    ) -> Response<wire::WaitProcessResponse> {
        let process = self.process(&request.container_id, &request.exec_id).map_err(refuse)?;
        let mut exit = messages::exited(process.wait().await.map_err(refuse)?);
        if request.exec_id.is_empty()
            && let Ok(container) = self.container(&request.container_id)
        {
            exit.message = container.message();
        }
        Ok(wire::WaitProcessResponse { exit: MessageField::some(exit), ..Default::default() })
    }

    async fn signal_process(
        &self,
        _: &TtrpcContext,
        request: wire::SignalProcessRequest,
    ) -> Response<wire::SignalProcessResponse> {
        self.signal(&request).map_err(refuse)?;
        Ok(wire::SignalProcessResponse::default())
    }

    async fn delete_exec(
        &self,
        _: &TtrpcContext,
        request: wire::DeleteExecRequest,
    ) -> Response<wire::DeleteExecResponse> {
        let delete = || {
            let id = id("exec_id", &request.exec_id)?;
            match self.container(&request.container_id) {
                Ok(container) => container.delete_exec(&id),
                // The exec was deleted with its container.
                Err(_) => Ok(()),
            }
        };
        delete().map_err(refuse)?;
        Ok(wire::DeleteExecResponse::default())
    }

    async fn resize_terminal(
        &self,
        _: &TtrpcContext,
        request: wire::ResizeTerminalRequest,
    ) -> Response<wire::ResizeTerminalResponse> {
        let size = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
        self.process(&request.container_id, &request.exec_id)
            .and_then(|process| process.resize(size(request.columns), size(request.rows)))
            .map_err(refuse)?;
        Ok(wire::ResizeTerminalResponse::default())
    }

    async fn read_output(
        &self,
        _: &TtrpcContext,
        request: wire::ReadOutputRequest,
    ) -> Response<wire::ReadOutputResponse> {
        self.read(&request).await.map_err(refuse)
    }

    async fn write_input(
        &self,
        _: &TtrpcContext,
        request: wire::WriteInputRequest,
    ) -> Response<wire::WriteInputResponse> {
        let input = self
            .process(&request.container_id, &request.exec_id)
            .and_then(|process| process.input())
            .map_err(refuse)?;
        let taken = input.write(request.offset, &request.data, request.end).await.map_err(refuse)?;
        Ok(wire::WriteInputResponse { taken, ..Default::default() })
    }

    async fn update_container(
        &self,
        _: &TtrpcContext,
        request: wire::UpdateContainerRequest,
    ) -> Response<wire::UpdateContainerResponse> {
        let container = self.container(&request.container_id).map_err(refuse)?;
        let update = detached(async move { container.update(&request.resources_json).await });
        update.await.map_err(refuse)?;
        Ok(wire::UpdateContainerResponse::default())
    }

    async fn pause_container(
        &self,
        _: &TtrpcContext,
        request: wire::PauseContainerRequest,
    ) -> Response<wire::PauseContainerResponse> {
        let container = self.container(&request.container_id).map_err(refuse)?;
        container.freeze(true).await.map_err(refuse)?;
        Ok(wire::PauseContainerResponse::default())
    }

    async fn resume_container(
        &self,
        _: &TtrpcContext,
        request: wire::ResumeContainerRequest,
    ) -> Response<wire::ResumeContainerResponse> {
        let container = self.container(&request.container_id).map_err(refuse)?;
        container.freeze(false).await.map_err(refuse)?;
        Ok(wire::ResumeContainerResponse::default())
    }

    async fn list_processes(
        &self,
        _: &TtrpcContext,
        request: wire::ListProcessesRequest,
    ) -> Response<wire::ListProcessesResponse> {
        let container = self.container(&request.container_id).map_err(refuse)?;
        Ok(wire::ListProcessesResponse { pids: container.pids().map_err(refuse)?, ..Default::default() })
    }

    async fn stats(&self, _: &TtrpcContext, request: wire::StatsRequest) -> Response<wire::StatsResponse> {
        if request.container_id.is_empty() {
            return Ok(messages::stats(&stats::of_guest()));
        }
        let container = self.container(&request.container_id).map_err(refuse)?;
        Ok(messages::stats(&container.stats()))
    }

    async fn dial(&self, _: &TtrpcContext, request: wire::DialRequest) -> Response<wire::DialResponse> {
        let port = u16::try_from(request.port)
            .map_err(|_| refuse(Failure::invalid(format!("invalid port {}", request.port))))?;
        let connection = self.connections.dial(port, request.owner).await.map_err(refuse)?;
        Ok(wire::DialResponse { connection, ..Default::default() })
    }

    async fn read_connection(
        &self,
        _: &TtrpcContext,
        request: wire::ReadConnectionRequest,
    ) -> Response<wire::ReadConnectionResponse> {
        let data = self.connections.read(request.connection).await.map_err(refuse)?;
        Ok(wire::ReadConnectionResponse { end: data.is_empty(), data, ..Default::default() })
    }

    async fn write_connection(
        &self,
        _: &TtrpcContext,
        request: wire::WriteConnectionRequest,
    ) -> Response<wire::WriteConnectionResponse> {
        self.connections.write(request.connection, &request.data, request.end).await.map_err(refuse)?;
        Ok(wire::WriteConnectionResponse::default())
    }

    async fn close_connection(
        &self,
        _: &TtrpcContext,
        request: wire::CloseConnectionRequest,
    ) -> Response<wire::CloseConnectionResponse> {
        self.connections.close(request.connection);
        Ok(wire::CloseConnectionResponse::default())
    }

    async fn take_query(
        &self,
        _: &TtrpcContext,
        request: wire::TakeQueryRequest,
    ) -> Response<wire::TakeQueryResponse> {
        let address = <[u8; 4]>::try_from(request.address.as_slice())
            .map_err(|_| refuse(Failure::invalid("the address of a name server has four bytes")))?;
        let (query, data) = self.resolver.take(address.into()).await.map_err(refuse)?;
        Ok(wire::TakeQueryResponse { query, data, ..Default::default() })
    }

    async fn answer_query(
        &self,
        _: &TtrpcContext,
        request: wire::AnswerQueryRequest,
    ) -> Response<wire::AnswerQueryResponse> {
        self.resolver.answer(request.query, &request.data).await;
        Ok(wire::AnswerQueryResponse::default())
    }

    async fn next_events(
        &self,
        _: &TtrpcContext,
        request: wire::NextEventsRequest,
    ) -> Response<wire::NextEventsResponse> {
        let events = self.events.next(request.after).await;
        let wire_event = |event: crate::events::Event| {
            // A copy of the container's guest may have given it another id.
            let container_id = self.containers.now_called(&event.oom).to_string();
            let oom = wire::Oom { container_id, ..Default::default() };
            wire::Event {
                sequence: event.sequence,
                kind: Some(wire::event::Kind::Oom(oom)),
                ..Default::default()
            }
        };
        Ok(wire::NextEventsResponse {
            events: events.into_iter().map(wire_event).collect(),
            ..Default::default()
        })
    }

    async fn mount_shares(
        &self,
        _: &TtrpcContext,
        request: wire::MountSharesRequest,
    ) -> Response<wire::MountSharesResponse> {
        if !request.ask {
            let shares = Arc::clone(&self.shares);
            detached(async move { shares.mount(&request.disk, request.key).await }).await.map_err(refuse)?;
        }
        Ok(wire::MountSharesResponse { mounted: self.shares.are_mounted().await, ..Default::default() })
    }

    async fn power_off(
        &self,
        _: &TtrpcContext,
        _: wire::PowerOffRequest,
    ) -> Response<wire::PowerOffResponse> {
        let shares = Arc::clone(&self.shares);
        // The call returns only on failure.
        Err(refuse(
            detached::<()>(async move { Err(pod::power_off(&shares).await) })
                .await
                .err()
                .unwrap_or_else(|| Failure::new(Kind::Internal, "guest did not power off")),
        ))
    }
}
