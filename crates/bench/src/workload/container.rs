//! Runs a pod with one container, with the same calls for every runtime and no exec: the output is the container's CRI
//! log. A tool of the series native is a process instead, a tool of the series vm runs in its own VM.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use sandboxer_probe::attribution::PodIds;
use sandboxer_probe::ledger;
use sandboxer_probe::log::{self, Printed};
use sandboxer_probe::options::{ContainerOptions, Device, Mount, PodOptions, Resources};
use sandboxer_probe::runtime::{Phase, Runtime, RuntimeError};
use sandboxer_probe::timeline::{RUN_LABEL, Recipe};
use sandboxer_probe::vm::arguments::{Disk, Forward};
use sandboxer_probe::vm::process::{RunningVm, Task};
use sandboxer_probe::vm::{VM, Vm, VmError};
use sandboxer_probe::workload::definition::Image;
use sandboxer_probe::workload::facts;
use tokio_util::sync::CancellationToken;

use super::native::{NATIVE, Native, Process, host_address};
use super::volume::POD_UID;

/// Polling interval for a container's end. The tool measures its own times.
const LOOK: Duration = Duration::from_millis(200);

/// A pod to start.
#[derive(Debug, Clone)]
pub struct Spec<'a> {
    /// Name of the pod, and of its log.
    pub name: String,
    /// Runtime handler.
    pub handler: &'a str,
    /// Command of the container.
    pub command: Vec<String>,
    /// Limits of pod and container; `None` for clients.
    pub resources: Option<Resources>,
    /// Volumes of the container.
    pub mounts: Vec<Mount>,
    /// Block devices of the container. A native tool uses the host's.
    pub devices: Vec<Device>,
    /// Image with the tool.
    pub image: Image,
    /// Number of processors of a VM.
    pub cpus: u32,
    /// Memory of a VM, bytes.
    pub memory: u64,
    /// Disks of a VM, in place of volumes and devices.
    pub disks: Vec<Disk>,
    /// Port of the server, which is forwarded to a VM.
    pub port: Option<u16>,
}

/// Why a container failed.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// A CRI call failed.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The timeout expired.
    #[error("{step} did not finish within {limit:?}; its last output: {last_output}")]
    Timeout {
        /// Name of the step.
        step: &'static str,
        /// The timeout that expired.
        limit: Duration,
        /// Last output of the tool.
        last_output: String,
    },
    /// The measurement was interrupted.
    #[error("interrupted")]
    Interrupted,
    /// The tool failed.
    #[error("the tool ended with exit code {code}{reason}; its last output: {last_output}")]
    Exit {
        /// Exit code of the tool.
        code: i32,
        /// The runtime's reason in parentheses, or empty.
        reason: String,
        /// Last output of the tool.
        last_output: String,
    },
    /// The container's log cannot be read.
    #[error("cannot read its log: {0}")]
    Log(std::io::Error),
    /// A server's pod has no address.
    #[error("its pod has no address: servers and their clients need the pod network")]
    NoAddress,
    /// No address of this host is known.
    #[error(
        "this host has no route, so its address is unknown: name one that pods reach with --native-address or --vm-address"
    )]
    NoHostAddress,
    /// A native tool cannot be run.
    #[error("cannot run it on this host: {0}")]
    Native(std::io::Error),
    /// A VM of the series vm failed.
    #[error(transparent)]
    Vm(#[from] VmError),
}

impl ContainerError {
    /// Returns the CRI call or step that failed.
    pub fn step(&self) -> &'static str {
        match self {
            ContainerError::Runtime(
                RuntimeError::Refused { call, .. } | RuntimeError::Incomplete { call, .. },
            ) => call,
            ContainerError::Runtime(_) => "connect",
            ContainerError::Timeout { step, .. } => step,
            ContainerError::Interrupted => "interrupted",
            ContainerError::Exit { .. } => "tool",
            ContainerError::Log(_) => "log",
            ContainerError::NoAddress | ContainerError::NoHostAddress => "address",
            ContainerError::Native(_) => "native",
            ContainerError::Vm(_) => VM,
        }
    }
}

/// Starts pods and containers of a run.
#[derive(Debug, Clone)]
pub struct Starter {
    /// Client of the CRI runtime.
    pub runtime: Runtime,
    /// Common properties of all pods.
    pub recipe: Recipe,
    /// Image with compilers and checkers.
    pub build_image: String,
    /// Directory of the containers' logs.
    pub logs: PathBuf,
    /// Environment for tools of the series native.
    pub native: Option<Native>,
    /// Configuration of the VMs of the series vm.
    pub vm: Option<Vm>,
    /// Token that ends the measurement.
    pub cancel: CancellationToken,
}

/// A started tool.
#[derive(Debug)]
pub enum Started {
    /// The tool runs in a pod.
    Pod {
        /// Id of the pod's sandbox.
        pod: String,
        /// Id of the container.
        container: String,
        /// Path of the container's log.
        log: PathBuf,
    },
    /// The tool runs as a process of the host.
    Native(Process),
    /// The tool runs in a VM of this probe.
    Vm(RunningVm),
}

impl Starter {
    /// Returns the reference of an image.
    pub fn image(&self, image: Image) -> &str {
        match image {
            Image::BenchSmall => &self.recipe.image,
            Image::BenchBuild => &self.build_image,
        }
    }

    /// Returns the ids by which the processes of a pod are found; `None` for a tool outside pods.
    pub async fn ids(&self, started: &Started) -> Option<PodIds> {
        let Started::Pod { pod, container, .. } = started else { return None };
        // Without the pod's process id, the other ties are used.
        let state = self.runtime.pod(pod, true).await.ok();
        let pid = state.and_then(|state| ledger::pid_in_info(state.info.get("info")?));
        Some(PodIds { pod: pod.clone(), containers: vec![container.clone()], pid })
    }

    /// Returns the running time of a tool that has ended, s, by the runtime's timestamps; `None` if they are absent.
    pub async fn ran_s(&self, started: &Started) -> Option<f64> {
        match started {
            Started::Pod { container, .. } => {
                let state = self.runtime.container(container, false).await.ok()?;
                let ns = state.finished_at.checked_sub(state.started_at)?;
                (state.started_at > 0 && ns > 0).then(|| ns as f64 / 1e9)
            }
            Started::Native(process) => process.ran_s(),
            Started::Vm(vm) => vm.ran_s(),
        }
    }

    /// Starts a pod and its container, or a native tool. A partial start is removed with the run's other pods.
    pub async fn start(&self, spec: &Spec<'_>) -> Result<Started, ContainerError> {
        if let Some(native) = self.native.as_ref().filter(|_| spec.handler == NATIVE) {
            return native.start(spec, &self.logs).map(Started::Native).map_err(ContainerError::Native);
        }
        if let Some(vm) = self.vm.as_ref().filter(|_| spec.handler == VM) {
            return self.start_vm(vm, spec).await;
        }
        let pod = PodOptions {
            namespace: "sandboxer-workload".into(),
            // A fixed uid: from it the runtime recognises the path of an emptyDir.
            uid: POD_UID.into(),
            network: self.recipe.network,
            cgroup_parent: self.recipe.cgroup_parent.clone(),
            log_directory: Some(self.logs.clone()),
            labels: [(RUN_LABEL.to_owned(), self.recipe.run.clone())].into(),
            annotations: self.recipe.annotations.clone(),
            resources: spec.resources,
            ..PodOptions::new(&spec.name, spec.handler)
        };
        let mut container = ContainerOptions::new("main", self.image(spec.image), spec.command.clone());
        container.log_path = format!("{}.log", spec.name);
        container.resources = spec.resources;
        container.mounts = spec.mounts.clone();
        container.devices = spec.devices.clone();
        let log = self.logs.join(container.log_name());
        let mut step = "RunPodSandbox";
        let attempt = async {
            let pod_id = self.runtime.run_pod(&pod).await?;
            step = "CreateContainer";
            let id = self.runtime.create_container(&pod_id, &pod, &container).await?;
            step = "StartContainer";
            self.runtime.start_container(&id).await?;
            Ok(Started::Pod { pod: pod_id, container: id, log })
        };
        let limit = self.recipe.timeout;
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(ContainerError::Interrupted),
            started = tokio::time::timeout(limit, attempt) => started.unwrap_or_else(|_| {
                Err(ContainerError::Timeout { step, limit, last_output: "nothing yet".into() })
            }),
        }
    }

    /// Starts a VM and waits until its unit has started the tool.
    async fn start_vm(&self, vm: &Vm, spec: &Spec<'_>) -> Result<Started, ContainerError> {
        let forward = match spec.port {
            Some(port) => Some(Forward { address: self.vm_address()?, port }),
            None => None,
        };
        let task = Task {
            name: spec.name.clone(),
            command: spec.command.clone(),
            cpus: spec.cpus,
            memory: spec.memory,
            resources: spec.resources,
            disks: spec.disks.clone(),
            forward,
            ping: false,
        };
        let attempt = async {
            let running = vm.start(&task)?;
            running.begun(self.recipe.timeout).await?;
            Ok(Started::Vm(running))
        };
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(ContainerError::Interrupted),
            started = attempt => started.map_err(ContainerError::Vm),
        }
    }

    /// Returns the address of this host from which ports are forwarded to VMs.
    fn vm_address(&self) -> Result<String, ContainerError> {
        let named = self.vm.as_ref().and_then(|vm| vm.address.clone());
        named.or_else(host_address).ok_or(ContainerError::NoHostAddress)
    }

    /// Waits for a container's end and returns its output. Does not poll before `takes` has passed, to avoid disturbing
    /// the measurement.
    pub async fn finish(
        &self,
        started: &Started,
        takes: Duration,
        limit: Duration,
    ) -> Result<Printed, ContainerError> {
        let end = Instant::now() + limit;
        let mut pause = takes.min(limit);
        loop {
            tokio::select! {
                biased;
                () = self.cancel.cancelled() => return Err(ContainerError::Interrupted),
                () = tokio::time::sleep(pause) => {}
            }
            pause = LOOK;
            // The timeout also covers a hung runtime.
            let left = end.saturating_duration_since(Instant::now());
            let look = tokio::time::timeout(left.max(LOOK), self.end_of(started));
            let late = || ContainerError::Timeout {
                step: "tool",
                limit,
                last_output: self.printed(started).last_words(),
            };
            if let Some((code, reason)) = look.await.map_err(|_| late())?? {
                return Self::ended(started, code, &reason);
            }
            if Instant::now() >= end {
                return Err(late());
            }
        }
    }

    /// Returns a tool's exit code and the runtime's reason; `None` while it runs.
    async fn end_of(&self, started: &Started) -> Result<Option<(i32, String)>, ContainerError> {
        match started {
            Started::Pod { container, .. } => {
                let state = self.runtime.container(container, false).await?;
                Ok((state.phase == Phase::Exited).then_some((state.exit_code, state.reason)))
            }
            Started::Native(process) => {
                let ended = process.ended().map_err(ContainerError::Native)?;
                Ok(ended.map(|code| (code, String::new())))
            }
            Started::Vm(vm) => Ok(vm.ended()?.map(|code| (code, String::new()))),
        }
    }

    fn ended(started: &Started, code: i32, reason: &str) -> Result<Printed, ContainerError> {
        let printed = started.output().map_err(ContainerError::Log)?;
        if code == 0 {
            return Ok(printed);
        }
        let reason =
            if reason.is_empty() || reason == "Error" { String::new() } else { format!(" ({reason})") };
        Err(ContainerError::Exit { code, reason, last_output: printed.last_words() })
    }

    /// Returns a container's output so far; empty output if its log does not exist.
    pub fn printed(&self, started: &Started) -> Printed {
        started.output().unwrap_or_default()
    }

    /// Waits until a server reports that it listens, and returns its pod's address.
    pub async fn serving(&self, started: &Started) -> Result<String, ContainerError> {
        let (limit, begun) = (self.recipe.timeout, Instant::now());
        while !facts::listens(&self.printed(started).stderr) {
            tokio::select! {
                biased;
                () = self.cancel.cancelled() => return Err(ContainerError::Interrupted),
                () = tokio::time::sleep(LOOK) => {}
            }
            if begun.elapsed() >= limit {
                let last_output = self.printed(started).last_words();
                return Err(ContainerError::Timeout { step: "server", limit, last_output });
            }
        }
        self.address(started).await
    }

    /// Returns the first address of a container's pod, or this host's address.
    async fn address(&self, started: &Started) -> Result<String, ContainerError> {
        match started {
            Started::Pod { pod, .. } => {
                let state = self.runtime.pod(pod, false).await?;
                state.addresses.into_iter().next().ok_or(ContainerError::NoAddress)
            }
            Started::Native(_) => {
                let address = self.native.as_ref().and_then(Native::address);
                address.ok_or(ContainerError::NoHostAddress)
            }
            Started::Vm(_) => self.vm_address(),
        }
    }
}

impl Started {
    fn output(&self) -> std::io::Result<Printed> {
        match self {
            Started::Pod { log, .. } => log::read(log),
            Started::Native(process) => process.printed(),
            Started::Vm(vm) => Ok(vm.printed()),
        }
    }
}
