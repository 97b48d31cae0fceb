//! An agent double for the daemon's tests: it keeps processes in a map and runs nothing.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use async_trait::async_trait;
use sandboxer_protocol::{
    SPOKEN,
    agent::{self as wire, Agent, Ready, create_agent},
    link::{self, LinkKey},
};
use sandboxer_vmm_fake::{FakeGuest, Power};
use tokio::sync::{mpsc, watch};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use ttrpc::{
    Code, Result,
    asynchronous::{Server, TtrpcContext, transport::Listener},
    get_status,
};

/// Output of every process of a [`FakeAgent`]. A container's init then continues to run; an exec has ended.
pub const OUTPUT: &[u8] = b"hello from nowhere\n";

/// Most bytes of an [output](FakeAgent::output) in one answer.
const PIECE: usize = 5000;

/// A container whose id begins so is never created.
pub const HANGS: &str = "hangs";

/// A container whose id begins so is created when [`FakeAgent::goes_on`] says so.
pub const LATE: &str = "late";

/// Containers and execs of one fake guest; they last as long as its VM, across sessions.
#[derive(Clone, Default)]
pub struct FakeAgent {
    /// By container and exec; the exec of a container's init is empty.
    processes: Arc<Mutex<HashMap<(String, String), Process>>>,
    /// The guest does not power off on request.
    pub lingers: Arc<AtomicBool>,
    /// The agent removes no container.
    pub keeps_containers: Arc<AtomicBool>,
    power: Option<Power>,
    link_key: Option<watch::Sender<LinkKey>>,
    /// Output of a process in place of [`OUTPUT`], in pieces.
    pub output: Option<Arc<[u8]>>,
    /// Containers that cannot be created.
    pub hanging: watch::Sender<usize>,
    /// Lets the late containers go on.
    pub goes_on: watch::Sender<bool>,
    /// Containers that the OOM killer was in, one entry for each time.
    pub oom_kills: watch::Sender<Vec<String>>,
    /// Processes whose input has ended: containers.
    pub ended_inputs: watch::Sender<Vec<String>>,
    /// Number of requests to power off.
    pub power_offs: Arc<std::sync::atomic::AtomicU32>,
    /// Lag of its clock behind the host's.
    pub behind_ns: Arc<Mutex<i64>>,
    /// Memory limits of containers that were changed, bytes; that of all together has no name.
    pub limits: Arc<Mutex<HashMap<String, u64>>>,
    /// Memory of its guest, MiB.
    pub memory_mib: Arc<Mutex<Option<watch::Receiver<u64>>>>,
    /// vCPUs of its guest.
    pub vcpus: Arc<Mutex<Option<watch::Receiver<u32>>>>,
    /// CPU limits of containers that were changed, µs in each second; that of all together has no name.
    pub cpu_limits: Arc<Mutex<HashMap<String, u64>>>,
    /// Most CPUs that its guest uses; 0: all that it has.
    pub uses_at_most: Arc<std::sync::atomic::AtomicU32>,
    /// CPUs that its guest uses; 0: those that it had at first.
    pub online: Arc<std::sync::atomic::AtomicU32>,
    /// The VMM provides a clock.
    keeps_time: bool,
    /// The agent speaks the oldest version alone.
    is_older: bool,
    /// The pod's identity, as the daemon sent it.
    pub identity: Arc<Mutex<wire::ConfigurePodRequest>>,
    /// Specifications of the containers that were created, in their order.
    pub specs: Arc<Mutex<Vec<serde_json::Value>>>,
    /// Root file systems of the containers.
    pub roots: Arc<Mutex<Vec<wire::Rootfs>>>,
    /// Containers that were adopted, and the ids of the saved ones.
    pub adoptions: Arc<Mutex<Vec<(String, String)>>>,
    /// Signals that adopted containers get when they go on.
    pub restore_signals: Arc<Mutex<Vec<u32>>>,
    /// Containers that were frozen at some time.
    pub ever_frozen: Arc<Mutex<std::collections::BTreeSet<String>>>,
    /// Containers that are frozen.
    pub frozen: Arc<Mutex<std::collections::BTreeSet<String>>>,
    began: Began,
}

/// When the guest started.
#[derive(Clone, Copy)]
struct Began(std::time::Instant);

impl Default for Began {
    fn default() -> Self {
        Self(std::time::Instant::now())
    }
}

#[derive(Clone)]
struct Process {
    started: bool,
    exit: watch::Sender<Option<u32>>,
}

impl FakeAgent {
    /// Returns an agent whose VMM provides a clock.
    #[allow(dead_code, reason = "not every test has one")]
    pub fn with_a_clock(self) -> Self {
        Self { keeps_time: true, ..self }
    }

    /// Returns an agent of the release before.
    #[allow(dead_code, reason = "not every test has one")]
    pub fn older(self) -> Self {
        Self { is_older: true, ..self }
    }

    /// Serves one stream of a guest, with the processes of earlier streams.
    pub fn serve(&self, guest: FakeGuest) {
        let key = guest.link_key.subscribe();
        *self.memory_mib.lock().unwrap() = Some(guest.memory_mib.clone());
        *self.vcpus.lock().unwrap() = Some(guest.vcpus.clone());
        let agent = Self { power: Some(guest.power.clone()), link_key: Some(guest.link_key), ..self.clone() };
        let oldest = *SPOKEN.start();
        let spoken = if self.is_older { oldest..=oldest } else { SPOKEN };
        tokio::spawn(async move {
            let (sessions, accepted) = mpsc::channel(1);
            let mut server = Server::new()
                .add_listener(Listener::new(ReceiverStream::new(accepted).map(Ok)))
                .register_service(create_agent(Arc::new(agent)));
            server.start().await.unwrap();
            let ready = || Ready { kernel_release: "fake".into(), ..Default::default() };
            let _ = link::serve_in(guest.stream, key, ready, sessions, spoken).await;
        });
    }

    /// Sets a limit that its guest has the memory for.
    fn limit(&self, group: String, bytes: i64) -> Result<()> {
        let mib = self.memory_mib.lock().unwrap().as_ref().map_or(0, |mib| *mib.borrow());
        match u64::try_from(bytes) {
            Ok(0) => {}
            Ok(bytes) if bytes > mib << 20 => return Err(status(Code::FAILED_PRECONDITION)),
            limit => drop(self.limits.lock().unwrap().insert(group, limit.unwrap_or(u64::MAX))),
        }
        Ok(())
    }

    /// Sets a limit that its guest uses CPUs for.
    fn limit_cpu(&self, group: String, quota_us: i64, period_us: u64) -> Result<()> {
        let online = match self.online.load(Ordering::Relaxed) {
            0 => 1,
            online => online.min(self.has_vcpus()),
        };
        let micros = u64::try_from(quota_us).map(|quota| quota * 1_000_000 / period_us.max(1));
        match micros {
            Ok(0) => {}
            Ok(micros) if micros > u64::from(online) * 1_000_000 => {
                return Err(status(Code::FAILED_PRECONDITION));
            }
            limit => drop(self.cpu_limits.lock().unwrap().insert(group, limit.unwrap_or(u64::MAX))),
        }
        Ok(())
    }

    /// Kills a container's init, as a signal from within its guest does.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn kill(&self, container: &str) {
        self.process(container.to_owned(), String::new()).unwrap().exit.send_replace(Some(137));
    }

    /// Returns the containers that it has.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn containers(&self) -> Vec<String> {
        self.names(|exec| exec.is_empty())
    }

    /// Returns the containers of the execs that it has.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn execs(&self) -> Vec<String> {
        self.names(|exec| !exec.is_empty())
    }

    fn names(&self, which: impl Fn(&str) -> bool) -> Vec<String> {
        let processes = self.processes.lock().unwrap();
        let names = processes.keys().filter(|(_, exec)| which(exec)).map(|(container, _)| container.clone());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    fn has_vcpus(&self) -> u32 {
        self.vcpus.lock().unwrap().as_ref().map_or(0, |vcpus| *vcpus.borrow())
    }

    fn process(&self, container: String, exec: String) -> Result<Process> {
        self.processes.lock().unwrap().get(&(container, exec)).cloned().ok_or_else(|| status(Code::NOT_FOUND))
    }

    fn add(&self, container: String, exec: String) {
        let process = Process { started: false, exit: watch::Sender::new(None) };
        self.processes.lock().unwrap().insert((container, exec), process);
    }
}

fn status(code: Code) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(get_status(code, "says the fake agent"))
}

#[async_trait]
impl Agent for FakeAgent {
    async fn configure_pod(
        &self,
        _: &TtrpcContext,
        request: wire::ConfigurePodRequest,
    ) -> Result<wire::ConfigurePodResponse> {
        assert!(request.entropy.len() >= 32 && request.realtime_ns > 0 && !request.hostname.is_empty());
        if let (Some(current), Ok(key)) = (&self.link_key, request.link_key.as_slice().try_into()) {
            current.send_replace(LinkKey::from_bytes(key));
        }
        *self.identity.lock().unwrap() = request;
        Ok(Default::default())
    }

    /// The guest uses nothing.
    async fn stats(&self, _: &TtrpcContext, _: wire::StatsRequest) -> Result<wire::StatsResponse> {
        Ok(Default::default())
    }

    async fn update_pod(
        &self,
        _: &TtrpcContext,
        request: wire::UpdatePodRequest,
    ) -> Result<wire::UpdatePodResponse> {
        let wire::PodLimits { cpu_quota_us, cpu_period_us, memory_bytes, .. } = *request.limits;
        self.limit_cpu(String::new(), cpu_quota_us, cpu_period_us)?;
        self.limit(String::new(), memory_bytes)?;
        Ok(Default::default())
    }

    async fn online_cpus(
        &self,
        _: &TtrpcContext,
        _: wire::OnlineCpusRequest,
    ) -> Result<wire::OnlineCpusResponse> {
        let (has, most) = (self.has_vcpus(), self.uses_at_most.load(Ordering::Relaxed));
        let online = if most == 0 { has } else { has.min(most) };
        self.online.store(online, Ordering::Relaxed);
        Ok(wire::OnlineCpusResponse { online, ..Default::default() })
    }

    async fn sync_clock(
        &self,
        _: &TtrpcContext,
        request: wire::SyncClockRequest,
    ) -> Result<wire::SyncClockResponse> {
        let mut behind = self.behind_ns.lock().unwrap();
        let boottime_ns = self.began.0.elapsed().as_nanos() as u64;
        let host = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as i64;
        if request.realtime_ns > 0 {
            // The host's current clock, from its earlier value.
            let now = request.realtime_ns as i64 + (boottime_ns - request.at_boottime_ns) as i64;
            *behind = host - now;
        }
        Ok(wire::SyncClockResponse {
            boottime_ns,
            realtime_ns: (host - *behind) as u64,
            kept: self.keeps_time,
            ..Default::default()
        })
    }

    async fn prepare_disk(
        &self,
        _: &TtrpcContext,
        request: wire::PrepareDiskRequest,
    ) -> Result<wire::PrepareDiskResponse> {
        assert!(request.disk.scratch && !request.disk.serial.is_empty());
        Ok(Default::default())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: wire::CreateContainerRequest,
    ) -> Result<wire::CreateContainerResponse> {
        if String::from_utf8_lossy(&request.spec_json).contains("nosuch") {
            return Err(status(Code::INVALID_ARGUMENT));
        }
        if request.container_id.starts_with(HANGS) {
            self.hanging.send_modify(|hanging| *hanging += 1);
            std::future::pending::<()>().await;
        }
        if request.container_id.starts_with(LATE) {
            self.hanging.send_modify(|hanging| *hanging += 1);
            let _ = self.goes_on.subscribe().wait_for(|goes_on| *goes_on).await;
        }
        self.roots.lock().unwrap().push(request.rootfs.clone().unwrap_or_default());
        self.specs.lock().unwrap().push(serde_json::from_slice(&request.spec_json).unwrap());
        self.add(request.container_id, String::new());
        // The second is more than any request takes: a guest may say anything.
        Ok(wire::CreateContainerResponse { pid: 7, disks_ns: 1, runtime_ns: u64::MAX, ..Default::default() })
    }

    async fn mount_shares(
        &self,
        _: &TtrpcContext,
        _: wire::MountSharesRequest,
    ) -> Result<wire::MountSharesResponse> {
        Ok(wire::MountSharesResponse { mounted: true, ..Default::default() })
    }

    async fn create_exec(
        &self,
        _: &TtrpcContext,
        request: wire::CreateExecRequest,
    ) -> Result<wire::CreateExecResponse> {
        self.process(request.container_id.clone(), String::new())?;
        self.add(request.container_id, request.exec_id);
        Ok(Default::default())
    }

    async fn delete_exec(
        &self,
        _: &TtrpcContext,
        request: wire::DeleteExecRequest,
    ) -> Result<wire::DeleteExecResponse> {
        self.processes.lock().unwrap().remove(&(request.container_id, request.exec_id));
        Ok(Default::default())
    }

    /// The container in the other guest, which has the same agent here, goes on.
    async fn adopt_container(
        &self,
        _: &TtrpcContext,
        request: wire::AdoptContainerRequest,
    ) -> Result<wire::AdoptContainerResponse> {
        self.process(request.of.clone(), String::new())?;
        let mut adoptions = self.adoptions.lock().unwrap();
        if adoptions.contains(&(request.of.clone(), request.container_id.clone())) {
            // It gets its former id back.
            self.processes.lock().unwrap().remove(&(request.of.clone(), String::new()));
        } else {
            self.add(request.container_id.clone(), String::new());
        }
        adoptions.push((request.container_id, request.of));
        self.restore_signals.lock().unwrap().push(request.signal);
        Ok(wire::AdoptContainerResponse { pid: 7, ..Default::default() })
    }

    async fn delete_container(
        &self,
        _: &TtrpcContext,
        request: wire::DeleteContainerRequest,
    ) -> Result<wire::DeleteContainerResponse> {
        if self.keeps_containers.load(Ordering::Relaxed) {
            return Err(status(Code::INTERNAL));
        }
        let mut processes = self.processes.lock().unwrap();
        let init = processes.get(&(request.container_id.clone(), String::new()));
        if init.is_some_and(|init| init.started && init.exit.borrow().is_none()) {
            return Err(status(Code::FAILED_PRECONDITION));
        }
        processes.retain(|(container, _), _| *container != request.container_id);
        Ok(Default::default())
    }

    async fn list_containers(
        &self,
        _: &TtrpcContext,
        _: wire::ListContainersRequest,
    ) -> Result<wire::ListContainersResponse> {
        let processes = self.processes.lock().unwrap();
        let message = |((container, exec), process): (&(String, String), &Process)| wire::Process {
            container_id: container.clone(),
            exec_id: exec.clone(),
            pid: 7,
            state: match (process.started, *process.exit.borrow()) {
                (_, Some(_)) => wire::ProcessState::EXITED,
                (true, None) => wire::ProcessState::RUNNING,
                (false, None) => wire::ProcessState::CREATED,
            }
            .into(),
            ..Default::default()
        };
        let processes = processes.iter().map(message).collect();
        Ok(wire::ListContainersResponse { processes, ..Default::default() })
    }

    async fn list_volumes(
        &self,
        _: &TtrpcContext,
        _: wire::ListVolumesRequest,
    ) -> Result<wire::ListVolumesResponse> {
        Ok(Default::default())
    }

    async fn start_process(
        &self,
        _: &TtrpcContext,
        request: wire::StartProcessRequest,
    ) -> Result<wire::StartProcessResponse> {
        let key = (request.container_id, request.exec_id);
        let mut processes = self.processes.lock().unwrap();
        let process = processes.get_mut(&key).ok_or_else(|| status(Code::NOT_FOUND))?;
        process.started = true;
        if key.0.starts_with("pool-") || key.0 == "template" || !key.1.is_empty() {
            // The container of a rehearsal ends by itself, as does an exec.
            process.exit.send_replace(Some(0));
        }
        Ok(wire::StartProcessResponse { pid: 7, ..Default::default() })
    }

    async fn update_container(
        &self,
        _: &TtrpcContext,
        request: wire::UpdateContainerRequest,
    ) -> Result<wire::UpdateContainerResponse> {
        // A guest has other CPUs and nodes than its host.
        let text = String::from_utf8_lossy(&request.resources_json);
        if text.contains("cpus") || text.contains("mems") {
            return Err(status(Code::INTERNAL));
        }
        let resources: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let number = |at| resources.pointer(at).and_then(serde_json::Value::as_i64).unwrap_or_default();
        let period = u64::try_from(number("/cpu/period")).unwrap();
        self.limit_cpu(request.container_id.clone(), number("/cpu/quota"), period)?;
        let limit = resources.pointer("/memory/limit").and_then(serde_json::Value::as_i64);
        self.limit(request.container_id, limit.unwrap_or_default())?;
        Ok(Default::default())
    }

    async fn wait_process(
        &self,
        _: &TtrpcContext,
        request: wire::WaitProcessRequest,
    ) -> Result<wire::WaitProcessResponse> {
        let process = self.process(request.container_id, request.exec_id)?;
        let code = process.exit.subscribe().wait_for(Option::is_some).await.map(|code| code.unwrap_or(0));
        let code = code.map_err(|_| status(Code::NOT_FOUND))?;
        let exit = wire::Exit { code, at_ns: 1, ..Default::default() };
        Ok(wire::WaitProcessResponse { exit: Some(exit).into(), ..Default::default() })
    }

    async fn signal_process(
        &self,
        _: &TtrpcContext,
        request: wire::SignalProcessRequest,
    ) -> Result<wire::SignalProcessResponse> {
        let process = self.process(request.container_id, request.exec_id)?;
        if process.exit.borrow().is_some() {
            return Err(status(Code::NOT_FOUND));
        }
        process.exit.send_replace(Some(128 + request.signal));
        Ok(Default::default())
    }

    async fn read_output(
        &self,
        _: &TtrpcContext,
        request: wire::ReadOutputRequest,
    ) -> Result<wire::ReadOutputResponse> {
        let process = self.process(request.container_id, request.exec_id)?;
        let from = if request.resume { 0 } else { request.offset };
        let rest = match &self.output {
            None => OUTPUT.get(from as usize..).unwrap_or_default(),
            Some(output) => {
                let rest = output.get(from as usize..).unwrap_or_default();
                rest.get(..PIECE).unwrap_or(rest)
            }
        };
        if rest.is_empty() {
            let _ = process.exit.subscribe().wait_for(Option::is_some).await;
        }
        Ok(wire::ReadOutputResponse {
            offset: from,
            data: rest.to_vec(),
            end: rest.is_empty(),
            ..Default::default()
        })
    }

    async fn write_input(
        &self,
        _: &TtrpcContext,
        request: wire::WriteInputRequest,
    ) -> Result<wire::WriteInputResponse> {
        if request.end {
            self.ended_inputs.send_modify(|ended| ended.push(request.container_id));
        }
        let taken = request.offset + request.data.len() as u64;
        Ok(wire::WriteInputResponse { taken, ..Default::default() })
    }

    async fn pause_container(
        &self,
        _: &TtrpcContext,
        request: wire::PauseContainerRequest,
    ) -> Result<wire::PauseContainerResponse> {
        self.ever_frozen.lock().unwrap().insert(request.container_id.clone());
        self.frozen.lock().unwrap().insert(request.container_id);
        Ok(Default::default())
    }

    async fn resume_container(
        &self,
        _: &TtrpcContext,
        request: wire::ResumeContainerRequest,
    ) -> Result<wire::ResumeContainerResponse> {
        self.frozen.lock().unwrap().remove(&request.container_id);
        Ok(Default::default())
    }

    async fn next_events(
        &self,
        _: &TtrpcContext,
        request: wire::NextEventsRequest,
    ) -> Result<wire::NextEventsResponse> {
        let mut kills = self.oom_kills.subscribe();
        let after = usize::try_from(request.after).unwrap();
        let kills = kills.wait_for(|kills| kills.len() > after).await.map_err(|_| status(Code::INTERNAL))?;
        let event = |(n, container): (usize, &String)| {
            let oom = wire::Oom { container_id: container.clone(), ..Default::default() };
            let kind = Some(wire::event::Kind::Oom(oom));
            wire::Event { sequence: n as u64 + 1, kind, ..Default::default() }
        };
        let events = kills.iter().enumerate().skip(after).map(event).collect();
        Ok(wire::NextEventsResponse { events, ..Default::default() })
    }

    async fn power_off(&self, _: &TtrpcContext, _: wire::PowerOffRequest) -> Result<wire::PowerOffResponse> {
        self.power_offs.fetch_add(1, Ordering::Relaxed);
        match &self.power {
            Some(power) if !self.lingers.load(Ordering::Relaxed) => power.off(&[]),
            _ => std::future::pending().await,
        }
        Ok(Default::default())
    }
}
