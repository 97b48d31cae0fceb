//! Pods and containers of a test case; all are removed afterwards.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::future::join_all;
use k8s_cri::v1::{
    ContainerConfig, ContainerMetadata, ContainerState, ContainerStatus, ImageSpec, LinuxContainerConfig,
    LinuxContainerSecurityContext, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, PodSandbox, PodSandboxConfig, PodSandboxMetadata,
};
use nix::unistd::Pid;

use crate::cri::{Answer, Cri};
use crate::eventually;
use crate::insist::{insist, nobody_there, once_seen};
use crate::stack::Stack;

/// Image that every stack has.
pub const BUSYBOX: &str = "docker.io/library/busybox:latest";

/// Timeout of a step: long, because several guests share two cores without KVM.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Returns whether the clock counts instructions: then a time is not made longer by other work of the host.
pub fn in_virtual_time() -> bool {
    std::env::var("SANDBOXER_CLOCK").is_ok_and(|clock| clock == "virtual")
}

/// Label of a case's pods.
const LABEL: &str = "e2e.case";

static SERIAL: AtomicU32 = AtomicU32::new(0);

/// One case on one runtime handler.
#[derive(Clone)]
pub struct Case {
    /// The stack that all cases share.
    pub stack: Arc<Stack>,
    /// containerd's CRI.
    pub cri: Cri,
    /// `sandboxer` or `runc`.
    pub handler: &'static str,
    /// Unique in the run; a label of the case's pods.
    pub name: String,
}

impl Case {
    /// Returns whether pods are microVMs here.
    pub fn in_vm(&self) -> bool {
        self.handler == "sandboxer"
    }

    /// Returns a pod's configuration as a kubelet would send it, hostname `pod`.
    pub fn pod_config(&self) -> PodSandboxConfig {
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{serial}", self.name);
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                // The same for all pods of the case, as for the sandboxes of one pod that is restarted: its volumes are theirs.
                uid: format!("uid-{}", self.name),
                name: name.clone(),
                namespace: "e2e".into(),
                attempt: 0,
            }),
            hostname: "pod".into(),
            log_directory: self.stack.dir().join("pod-logs").join(name).display().to_string(),
            labels: [(LABEL.to_owned(), self.name.clone())].into(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: self.stack.env("SANDBOXER_CGROUP_PARENT").unwrap_or_default().to_owned(),
                security_context: Some(LinuxSandboxSecurityContext {
                    namespace_options: Some(own_processes()),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    /// Returns a pod that is ready.
    pub async fn pod(&self) -> Result<Pod> {
        Ok(self.pod_with(|_| ()).await?)
    }

    /// Returns a pod with its configuration changed by `adjust`, or the runtime's error.
    pub async fn pod_with(&self, adjust: impl FnOnce(&mut PodSandboxConfig)) -> Answer<Pod> {
        let mut config = self.pod_config();
        adjust(&mut config);
        let id = self.cri.run_pod(&config, self.handler).await?;
        Ok(Pod { id, config, cri: self.cri.clone() })
    }

    /// Returns a pod that was run with `config`.
    pub fn pod_of(&self, id: &str, config: PodSandboxConfig) -> Pod {
        Pod { id: id.to_owned(), config, cri: self.cri.clone() }
    }

    /// Waits until a VMM is in the control group of a pod; returns the VMM's groups.
    pub async fn vmm_cgroups(&self, pod: &str) -> Result<String> {
        let vmm = self.vmm_of(pod).await?;
        Ok(std::fs::read_to_string(format!("/proc/{vmm}/cgroup"))?)
    }

    /// Waits until a VMM is in the control group of a pod, and returns it.
    pub async fn vmm_of(&self, pod: &str) -> Result<Pid> {
        let parent = self.stack.env("SANDBOXER_CGROUP_PARENT").context("the stack's parent")?;
        let group = format!("{parent}/sandboxer-{pod}");
        eventually(&format!("a VMM in {group}"), PATIENCE, || async {
            let is_in_group = |vmm: &Pid| {
                let groups = std::fs::read_to_string(format!("/proc/{vmm}/cgroup"));
                groups.is_ok_and(|groups| groups.contains(&group))
            };
            Ok(self.stack.vmms()?.into_iter().find(is_in_group))
        })
        .await
    }

    /// Removes every pod of this case, whatever state it is in.
    pub async fn clean_up(&self) -> Result<()> {
        let pods = self.pods().await?;
        let removals = pods.iter().map(|pod| self.remove(&pod.id));
        join_all(removals).await.into_iter().collect()
    }

    /// Lists the pods of this case that CRI knows.
    pub async fn pods(&self) -> Result<Vec<PodSandbox>> {
        Ok(self.cri.pods((LABEL, &self.name)).await?)
    }

    /// Stops and removes a pod as kubelet does. Retries: containerd notices the end of a container with a closed connection
    /// a second or more later, and refuses both until then. After a worker's end it reconnects within 3 s.
    pub async fn remove(&self, pod: &str) -> Result<()> {
        eventually(&format!("removal of pod {pod}"), PATIENCE, || async {
            let mut answer = self.cri.stop_pod(pod).await;
            if answer.is_ok() {
                answer = self.cri.remove_pod(pod).await;
            }
            match answer {
                Ok(()) => Ok(Some(())),
                Err(error) if UNNOTICED.iter().any(|words| error.message().contains(words)) => Ok(None),
                Err(error) if nobody_there(&error) => Ok(None),
                Err(error) => Err(error).with_context(|| format!("cannot remove pod {pod}")),
            }
        })
        .await
    }
}

/// containerd's error until it notices a container's end.
const UNNOTICED: [&str; 2] = ["container is still running", "ttrpc: closed"];

/// A pod of a case.
#[derive(Clone)]
pub struct Pod {
    /// The sandbox id.
    pub id: String,
    /// The configuration of the pod.
    pub config: PodSandboxConfig,
    cri: Cri,
}

/// Returns kubelet's default namespaces, without shareProcessNamespace; CRI's zero value shares PIDs.
fn own_processes() -> NamespaceOption {
    NamespaceOption { pid: NamespaceMode::Container.into(), ..Default::default() }
}

/// Returns a container's configuration: busybox running `script` in its shell.
pub fn shell(name: &str, script: &str) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
        // As kubelet sends it; CRI-O insists on both.
        image: Some(ImageSpec {
            image: BUSYBOX.into(),
            user_specified_image: BUSYBOX.into(),
            ..Default::default()
        }),
        command: vec!["sh".into(), "-c".into(), script.into()],
        log_path: format!("{name}.log"),
        linux: Some(LinuxContainerConfig {
            security_context: Some(LinuxContainerSecurityContext {
                namespace_options: Some(own_processes()),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Returns a container that waits, and ends at once on SIGTERM.
pub fn idle(name: &str) -> ContainerConfig {
    shell(name, "trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done")
}

/// Returns the security context that [`shell`] put there.
pub fn security(config: &mut ContainerConfig) -> &mut LinuxContainerSecurityContext {
    config.linux.get_or_insert_default().security_context.get_or_insert_default()
}

/// Permits privileged containers in a pod.
pub fn privileged(config: &mut PodSandboxConfig) {
    config.linux.get_or_insert_default().security_context.get_or_insert_default().privileged = true;
}

impl Pod {
    /// Creates a container.
    pub async fn create(&self, config: ContainerConfig) -> Answer<Container> {
        let log = PathBuf::from(&self.config.log_directory).join(&config.log_path);
        let id = self.cri.create(&self.id, config, &self.config).await?;
        Ok(Container { id, log, cri: self.cri.clone() })
    }

    /// Returns a container of the pod that was created with `config`.
    pub fn container(&self, id: &str, config: &ContainerConfig) -> Container {
        let log = PathBuf::from(&self.config.log_directory).join(&config.log_path);
        Container { id: id.to_owned(), log, cri: self.cri.clone() }
    }

    /// Creates a container and starts it.
    pub async fn start(&self, config: ContainerConfig) -> Answer<Container> {
        let container = self.create(config).await?;
        self.cri.start(&container.id).await?;
        Ok(container)
    }

    /// Same as [`Pod::start`]. Retries the creation: containerd first queries the pod, which is a call to
    /// the controller, and those fail while there is none.
    pub async fn start_at_last(&self, mut config: ContainerConfig) -> Result<Container> {
        loop {
            let container = insist("create a container", || self.create(config.clone())).await?;
            let metadata = config.metadata.get_or_insert_default();
            match self.cri.start(&container.id).await {
                // Three workers died under it, one after the other: a kubelet removes it then and makes another one.
                Err(error) if error.message().contains("workers of sandboxer") && metadata.attempt < 20 => {
                    metadata.attempt += 1;
                    // Each attempt has a log of its own, as a kubelet's has.
                    config.log_path = format!("{}.{}", config.log_path, metadata.attempt);
                    self.cri.remove(&container.id).await.context("remove a container that did not start")?;
                }
                started => return started.map(|()| container).context("start a container"),
            }
        }
    }

    /// Runs a container to its end.
    pub async fn run(&self, config: ContainerConfig) -> Result<Ended> {
        let container = self.start(config).await?;
        let status = container.ended().await?;
        Ok(Ended { logs: container.logs()?, status })
    }

    /// Runs `script` in a new container and returns its output; an error if it failed.
    pub async fn output(&self, script: &str) -> Result<String> {
        self.run(shell(&format!("c{}", SERIAL.fetch_add(1, Ordering::Relaxed)), script)).await?.success()
    }

    /// Returns whether it is ready. Retries: containerd reconnects within 3 s after a worker's end.
    pub async fn ready(&self) -> Result<bool> {
        insist("the pod's status", || self.cri.pod_ready(&self.id)).await
    }

    /// Waits until the pod is not ready.
    pub async fn not_ready(&self) -> Result<()> {
        eventually(&format!("pod {} to be NotReady", self.id), PATIENCE, || async {
            Ok((!self.cri.pod_ready(&self.id).await?).then_some(()))
        })
        .await
    }
}

/// A container of a case.
#[derive(Clone)]
pub struct Container {
    /// The container id.
    pub id: String,
    log: PathBuf,
    cri: Cri,
}

impl Container {
    /// Returns its CRI status.
    pub async fn status(&self) -> Answer<ContainerStatus> {
        Ok(self.cri.status(&self.id).await?.0)
    }

    /// Waits for its end and returns its status.
    pub async fn ended(&self) -> Result<ContainerStatus> {
        eventually(&format!("end of container {}", self.id), PATIENCE, || async {
            let status = self.status().await?;
            Ok((status.state() == ContainerState::ContainerExited).then_some(status))
        })
        .await
    }

    /// Runs `script` in its shell by ExecSync and returns its stdout; an error if it failed.
    pub async fn sh(&self, script: &str) -> Result<String> {
        let command = ["sh", "-c", script];
        let answer = once_seen(|| self.cri.exec_sync(&self.id, &command, None)).await?;
        let stderr = String::from_utf8_lossy(&answer.stderr);
        ensure!(answer.exit_code == 0, "'{script}' exited with {}: {stderr}", answer.exit_code);
        Ok(String::from_utf8(answer.stdout)?.trim_end().to_owned())
    }

    /// Returns its log so far.
    pub fn logs(&self) -> Result<Logs> {
        let text = std::fs::read_to_string(&self.log)
            .with_context(|| format!("cannot read the log {}", self.log.display()))?;
        Ok(Logs::parse(&text))
    }

    /// Renames its log, like a log rotation.
    pub fn move_log_away(&self, suffix: &str) -> Result<Moved> {
        let to = self.log.with_extension(suffix);
        std::fs::rename(&self.log, &to)?;
        Ok(Moved(to))
    }

    /// Waits until it has logged `needle` on stdout.
    pub async fn logged(&self, needle: &str) -> Result<()> {
        eventually(&format!("'{needle}' in the log of container {}", self.id), PATIENCE, || async {
            Ok(self.logs().is_ok_and(|logs| logs.stdout.contains(needle)).then_some(()))
        })
        .await
    }
}

/// A renamed log; the container may still write to it for a moment.
pub struct Moved(PathBuf);

impl Moved {
    /// Returns its stdout so far.
    pub fn stdout(&self) -> Result<String> {
        Ok(Logs::parse(&std::fs::read_to_string(&self.0)?).stdout)
    }
}

/// A CRI log, with its two streams.
#[derive(Debug, Default)]
pub struct Logs {
    /// What was written to stdout.
    pub stdout: String,
    /// What was written to stderr.
    pub stderr: String,
    /// Lines of the log file, partial ones included.
    pub lines: usize,
}

impl Logs {
    /// Parses the CRI log format: `time stream P|F text`, P for a part of a line.
    fn parse(text: &str) -> Self {
        let mut logs = Self::default();
        for line in text.lines() {
            let mut words = line.splitn(4, ' ');
            let (_time, stream, tag) = (words.next(), words.next(), words.next());
            let stream = if stream == Some("stderr") { &mut logs.stderr } else { &mut logs.stdout };
            stream.push_str(words.next().unwrap_or_default());
            if tag == Some("F") {
                stream.push('\n');
            }
            logs.lines += 1;
        }
        logs
    }
}

/// A container that has ended.
#[derive(Debug)]
pub struct Ended {
    /// The last status of the container.
    pub status: ContainerStatus,
    /// All of its log.
    pub logs: Logs,
}

impl Ended {
    /// Returns its output, if it exited with 0.
    pub fn success(self) -> Result<String> {
        ensure!(
            self.status.exit_code == 0,
            "exited with {} ({} {}): {}{}",
            self.status.exit_code,
            self.status.reason,
            self.status.message,
            self.logs.stdout,
            self.logs.stderr
        );
        Ok(self.logs.stdout.trim_end().to_owned())
    }
}
