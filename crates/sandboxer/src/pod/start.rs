//! One pod's way up, top to bottom. Each phase takes the one before it, so a pod that is half-way
//! can't be used; each adds what undoes it, so a start that fails leaves nothing.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use nix::fcntl::AT_FDCWD;
use sandboxer_protocol::{
    agent::{ConfigurePodRequest, Ready},
    boot::BootParams,
    link::{LinkError, LinkKey},
    stage::Stage,
};
use tokio_util::sync::CancellationToken;

use super::{Node, spec::PodSpec, stages::Stages, undo::Undo};
use crate::{
    clock::now_ns,
    container::start::Live,
    error::{PodError, chain},
    guest::{self, GuestError},
    vmm::{Machine, MachineExit, VmSpec},
};

/// Fresh randomness a guest gets, bytes.
const ENTROPY: usize = 64;

/// How long a machine whose link broke is given to be seen to end.
const LAST_MOMENT: Duration = Duration::from_secs(1);

/// A pod that is up.
#[derive(Debug)]
pub struct Up {
    /// Its machine and agent.
    pub live: Live,
    /// The agent's first words.
    pub ready: Ready,
}

/// How often a machine whose agent doesn't show up is given up for a new one. Each has an equal
/// share of the time a pod may take.
///
/// Observed with emulated guests on a host with several times more work than processors: about one
/// boot in 130 stops for good before its agent runs. Another one then nearly always succeeds.
const ATTEMPTS: u32 = 2;

/// Brings a pod up. Cancelled or failed, it has undone all it did when it answers.
pub async fn start(
    node: &Node,
    spec: &PodSpec,
    key: &LinkKey,
    stages: &Stages,
    cancel: &CancellationToken,
) -> Result<Up, PodError> {
    let mut left = ATTEMPTS;
    loop {
        left -= 1;
        match attempt(node, spec, key, stages, cancel).await {
            Err(error @ PodError::NotReady { .. }) if left > 0 => {
                tracing::warn!(pod = %spec.id, error = chain(&error), "the pod gets another machine");
            }
            ended => return ended,
        }
    }
}

async fn attempt(
    node: &Node,
    spec: &PodSpec,
    key: &LinkKey,
    stages: &Stages,
    cancel: &CancellationToken,
) -> Result<Up, PodError> {
    let mut undo = Undo::default();
    let result = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(PodError::Cancelled(spec.id.clone())),
        result = phases(node, spec, key, stages, &mut undo) => result,
    };
    if result.is_ok() {
        undo.forget();
    } else if let Err(left) = undo.run().await {
        tracing::error!(pod = %spec.id, left, "a pod's failed start left something behind");
    }
    result
}

async fn phases(
    node: &Node,
    spec: &PodSpec,
    key: &LinkKey,
    stages: &Stages,
    undo: &mut Undo,
) -> Result<Up, PodError> {
    let _place = node.admission.enter().await;
    let limit = node.config.vm.boot_timeout / ATTEMPTS;
    let prepared = stages.run(Stage::Netns, Prepared::new(node, spec, undo)).await?;
    let booted = stages.run(Stage::VmmSpawn, prepared.boot(key, undo)).await?;
    let machine = booted.machine.clone();
    let up = async {
        let greeted = stages.run(Stage::Boot, booted.greet(key)).await?;
        stages.run(Stage::AgentReady, greeted.configure()).await
    };
    tokio::select! {
        up = up => match up {
            Err(PodError::Guest(GuestError::Greeting { source: LinkError::Io(error), pod })) => {
                // The link breaks a moment before its machine is gone, whose end tells why.
                match tokio::time::timeout(LAST_MOMENT, machine.exited()).await {
                    Ok(exit) => Err(machine_ended(spec, exit)),
                    Err(_) => Err(GuestError::Greeting { pod, source: LinkError::Io(error) }.into()),
                }
            }
            up => up,
        },
        exit = machine.exited() => Err(machine_ended(spec, exit)),
        () = tokio::time::sleep(limit) => {
            Err(PodError::NotReady { pod: spec.id.clone(), limit, console: machine.last_lines().await.join(" | ") })
        }
    }
}

/// The host holds what the machine needs.
struct Prepared<'a> {
    node: &'a Node,
    spec: &'a PodSpec,
    run_dir: PathBuf,
}

impl<'a> Prepared<'a> {
    async fn new(node: &'a Node, spec: &'a PodSpec, undo: &mut Undo) -> Result<Self, PodError> {
        let host = |action, path: PathBuf| {
            move |source: io::Error| PodError::Host { pod: spec.id.clone(), action, path, source }
        };
        if let Some(netns) = &spec.netns {
            // Its interfaces stay unused for now; that it is there is all that can be checked.
            nix::sys::stat::fstatat(AT_FDCWD, netns, nix::fcntl::AtFlags::empty())
                .map_err(|errno| host("find network namespace", netns.clone())(errno.into()))?;
        }
        let run_dir = node.run_dir(&spec.id);
        match make_private_dir(&run_dir) {
            // A start that failed before, or a daemon that died, may have left it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                std::fs::remove_dir_all(&run_dir)
                    .and_then(|()| make_private_dir(&run_dir))
                    .map_err(host("clear run directory", run_dir.clone()))?;
            }
            made => made.map_err(host("make run directory", run_dir.clone()))?,
        }
        let dir = run_dir.clone();
        undo.push("remove the run directory", async move { std::fs::remove_dir_all(dir) });
        Ok(Self { node, spec, run_dir })
    }

    async fn boot(self, key: &LinkKey, undo: &mut Undo) -> Result<Booted<'a>, PodError> {
        let Self { node, spec, run_dir } = self;
        let config = &node.config.vm;
        let machine = node
            .vmm
            .boot(&VmSpec {
                pod: spec.id.clone(),
                run_dir,
                vcpus: spec.vcpus,
                memory_mib: spec.memory_mib,
                kernel: config.kernel.clone(),
                initramfs: config.initramfs.clone(),
                boot: BootParams { link_key: key.clone(), log: config.agent_log.clone() },
                disks: Vec::new(),
                console_log_bytes: config.console_log_bytes,
            })
            .await?;
        let doomed = machine.clone();
        undo.push("end the VMM", async move { doomed.kill().await });
        Ok(Booted { node, spec, machine })
    }
}

/// The machine runs.
struct Booted<'a> {
    node: &'a Node,
    spec: &'a PodSpec,
    machine: Arc<dyn Machine>,
}

impl<'a> Booted<'a> {
    async fn greet(self, key: &LinkKey) -> Result<Greeted<'a>, PodError> {
        let Self { node, spec, machine } = self;
        let (agent, ready) = guest::connect(&spec.id, machine.as_ref(), key, &node.config.vm).await?;
        Ok(Greeted { spec, up: Up { live: Live { machine, agent }, ready } })
    }
}

/// The agent answers.
struct Greeted<'a> {
    spec: &'a PodSpec,
    up: Up,
}

impl Greeted<'_> {
    async fn configure(self) -> Result<Up, PodError> {
        let entropy: [u8; ENTROPY] = rand::random();
        let identity = ConfigurePodRequest {
            hostname: self.spec.hostname.clone(),
            realtime_ns: now_ns(),
            entropy: entropy.to_vec(),
            sysctls: self.spec.sysctls.clone().into_iter().collect(),
            ..Default::default()
        };
        self.up.live.agent.configure_pod(identity).await?;
        Ok(self.up)
    }
}

/// A machine's end as an error of its pod.
pub fn machine_ended(spec: &PodSpec, exit: MachineExit) -> PodError {
    PodError::MachineEnded { pod: spec.id.clone(), how: exit.how, last_lines: exit.last_lines.join(" | ") }
}

fn make_private_dir(path: &std::path::Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().mode(0o700).create(path)
}
