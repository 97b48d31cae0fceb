//! What the test does on the node: commands, a containerd, a pod, and the time that each step took.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{
    ContainerState, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig, PodSandboxMetadata,
};
use sandboxer_e2e::case::{PATIENCE, shell};
use sandboxer_e2e::cri::Cri;
use sandboxer_e2e::eventually;
use sandboxer_e2e::insist::insist;

const SOCKET: &str = "/run/containerd/containerd.sock";
const LOGS: &str = "/tmp/pod-logs";

/// Runs a program to its end and returns its output; an error with its words if it failed.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {stdout}\n{}", arguments.join(" "), stderr.trim());
    Ok(stdout)
}

/// Runs apt-get, which asks nothing.
pub fn apt(arguments: &[&str]) -> Result<()> {
    run("apt-get", &[&["-y", "-q"], arguments].concat()).map(|output| println!("{output}"))
}

/// Returns the pid of the daemon's worker.
pub fn worker() -> Result<i64> {
    let version: serde_json::Value = serde_json::from_str(&run("sandboxer-cli", &["version", "--json"])?)?;
    version["daemon"]["worker_pid"].as_i64().context("no worker_pid")
}

/// The node, with a containerd that runs.
pub struct Node {
    cri: Cri,
    times: Vec<(String, Duration)>,
}

impl Node {
    /// Starts containerd and gives it an image.
    pub async fn start() -> Result<Self> {
        run("systemctl", &["start", "containerd"])?;
        let image = format!("{}/images/busybox.tar", std::env::var("SANDBOXER_CACHE")?);
        run("ctr", &["-n", "k8s.io", "images", "import", &image])?;
        Ok(Self { cri: Cri::connect(SOCKET.into())?, times: Vec::new() })
    }

    /// Runs a step and keeps its time.
    pub async fn step<T>(&mut self, name: &str, step: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
        println!("== {name}");
        let begin = Instant::now();
        let outcome = step().await.with_context(|| name.to_owned());
        self.note(name, begin.elapsed());
        outcome
    }

    /// Keeps a time for [`Node::print_times`].
    pub fn note(&mut self, name: &str, took: Duration) {
        self.times.push((name.to_owned(), took));
    }

    /// Prints what each step took.
    pub fn print_times(&self) {
        println!("\n{:>7}  step (an emulated node: hardware is 10 to 50 times faster)", "s");
        for (name, took) in &self.times {
            println!("{:7.1}  {name}", took.as_secs_f64());
        }
    }

    /// Starts a pod with a container that counts, and waits for its first line.
    pub async fn first_pod(&mut self) -> Result<Running> {
        let (cri, config) = (self.cri.clone(), pod_config());
        let id = self
            .step("the first pod", async || insist("run a pod", || cri.run_pod(&config, "sandboxer")).await)
            .await?;
        let script = "trap 'exit 0' TERM; n=0; while :; do echo line $n; n=$((n+1)); sleep 1; done";
        let container = self
            .step("its container, to its first line", async || {
                let container = cri.create(&id, shell("counts", script), &config).await?;
                cri.start(&container).await?;
                eventually("a line in the container's log", PATIENCE, || async {
                    Ok(lines().ok().filter(|lines| *lines > 0))
                })
                .await?;
                Ok(container)
            })
            .await?;
        let started_at = cri.status(&container).await?.0.started_at;
        Ok(Running { id, container, started_at, cri })
    }
}

fn pod_config() -> PodSandboxConfig {
    let processes = NamespaceOption { pid: NamespaceMode::Container.into(), ..Default::default() };
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            uid: "uid-first".into(),
            name: "first".into(),
            namespace: "e2e".into(),
            attempt: 0,
        }),
        hostname: "pod".into(),
        log_directory: LOGS.into(),
        annotations: [("io.sandboxer.vcpus", "1"), ("io.sandboxer.memory", "256Mi")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: "/kubepods".into(),
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(processes),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Returns how many lines the container has logged, each once and in order.
fn lines() -> Result<usize> {
    let text = std::fs::read_to_string(format!("{LOGS}/counts.log"))?;
    for (n, line) in text.lines().enumerate() {
        ensure!(line.ends_with(&format!(" line {n}")), "line {n} of the log is {line:?}");
    }
    Ok(text.lines().count())
}

/// A pod whose container counts.
pub struct Running {
    /// The sandbox id.
    pub id: String,
    container: String,
    started_at: i64,
    cri: Cri,
}

impl Running {
    /// Checks that it is the same container, that it goes on counting, and that it accepts an exec.
    pub async fn goes_on(&self) -> Result<()> {
        let answer = insist("exec", || self.cri.exec_sync(&self.container, &["echo", "here"], None)).await?;
        ensure!(answer.exit_code == 0 && answer.stdout == b"here\n", "{answer:?}");
        let status = insist("status", || self.cri.status(&self.container)).await?.0;
        ensure!(status.state() == ContainerState::ContainerRunning, "{status:?}");
        ensure!(status.started_at == self.started_at, "another container runs: {status:?}");
        ensure!(insist("pod status", || self.cri.pod_ready(&self.id)).await?, "the pod is not ready");
        let before = lines()?;
        eventually("another line in the container's log", PATIENCE, || async {
            Ok((lines()? > before).then_some(()))
        })
        .await
    }

    /// Stops the pod and removes it.
    pub async fn remove(self) -> Result<()> {
        insist("stop the pod", || self.cri.stop_pod(&self.id)).await?;
        insist("remove the pod", || self.cri.remove_pod(&self.id)).await
    }
}
