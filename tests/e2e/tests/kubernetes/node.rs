//! The node that cases run on, and what they ask it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use sandboxer_e2e::cri::Cri;
use sandboxer_e2e::stack::Stack;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// A stack with a kubelet.
pub struct Node {
    stack: Stack,
    runtime: Runtime,
    /// The API without TLS and tokens.
    api: PathBuf,
    netns: PathBuf,
}

impl Node {
    /// Starts it.
    pub fn up() -> Result<Self> {
        let stack = Stack::up_with_kubelet().context("cannot start the node")?;
        let socket = stack.containerd_socket()?;
        let run = socket.parent().context("a socket has a directory")?;
        let (api, netns) = (run.join("api.sock"), run.join("netns"));
        Ok(Self { stack, runtime: Runtime::new()?, api, netns })
    }

    /// Removes it; an error lists what it left on the host.
    pub fn down(self) -> Result<()> {
        self.stack.down()
    }

    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Returns the directory of the containers' logs.
    pub fn logs(&self) -> PathBuf {
        self.stack.dir().join("kubernetes/logs")
    }

    /// Returns the directory from which kubelet reads static pods.
    pub fn static_pods(&self) -> PathBuf {
        self.stack.dir().join("kubernetes/static-pods")
    }

    /// Calls the API. A body of `kind` is sent, if there is one. An error has the API's message.
    pub fn call(&self, method: &str, path: &str, body: Option<(&str, &Value)>) -> Result<Value> {
        let answer = self.call_raw(method, path, body)?;
        let answer: Value = serde_json::from_slice(&answer)
            .with_context(|| format!("{method} {path}: {}", String::from_utf8_lossy(&answer)))?;
        if answer["kind"] == "Status" && answer["status"] == "Failure" {
            bail!("{method} {path}: {}", answer["message"].as_str().unwrap_or_default());
        }
        Ok(answer)
    }

    fn call_raw(&self, method: &str, path: &str, body: Option<(&str, &Value)>) -> Result<Vec<u8>> {
        let mut command = Command::new("curl");
        command.args(["-sS", "--max-time", "90", "-X", method, "--unix-socket"]).arg(&self.api);
        if let Some((kind, body)) = body {
            command.args(["-H", &format!("Content-Type: {kind}"), "-d", &body.to_string()]);
        }
        let output = command.arg(format!("http://localhost{path}")).stdin(Stdio::null()).output()?;
        ensure!(output.status.success(), "{method} {path}: {}", text(&output.stderr));
        Ok(output.stdout)
    }

    /// Returns `kubectl` with arguments.
    pub fn kubectl(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.stack.dir().join("bin/kubectl"));
        command.args(arguments).stdin(Stdio::null());
        command
    }

    /// Returns a program in the node's network namespace.
    pub fn inside(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.netns.display())).arg(program).stdin(Stdio::null());
        command
    }

    /// Binds a pod of the default namespace to the node, as a scheduler does, once the pod is there.
    pub fn place(&self, pod: &str) -> Result<()> {
        let path = format!("/api/v1/namespaces/default/pods/{pod}");
        eventually("a pod to place", Duration::from_secs(60), || Ok(self.call("GET", &path, None).ok()))?;
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": { "name": pod },
            "target": { "apiVersion": "v1", "kind": "Node", "name": "node1" },
        });
        self.call("POST", &format!("{path}/binding"), Some(("application/json", &binding))).map(drop)
    }

    /// Returns kubelet's statistics of a pod, once it has some, and how long the answer took.
    pub fn summary(&self, pod: &str) -> Result<(Option<Value>, Duration)> {
        let began = Instant::now();
        let summary = self.call("GET", "/api/v1/nodes/node1/proxy/stats/summary", None)?;
        let took = began.elapsed();
        let pods = summary["pods"].as_array().context("statistics without pods")?;
        Ok((pods.iter().find(|entry| entry["podRef"]["name"] == pod).cloned(), took))
    }

    /// Ends a part of the node with `signal`, and starts it again.
    pub fn restart(&self, name: &str, signal: Signal) -> Result<()> {
        self.runtime.block_on(self.stack.end(name, signal))?;
        self.stack.run_up()
    }

    /// Returns the VMM of a pod.
    pub fn vmm(&self, pod: &str) -> Result<Pid> {
        let pods = self.stack.cli_json(&["pods"])?;
        let pods = pods.as_array().context("a list of pods")?;
        let ready = pods.iter().find(|entry| entry["name"] == pod && entry["state"] == "ready");
        let pid =
            ready.and_then(|entry| entry["vmm_pid"].as_i64()).with_context(|| format!("no VMM of {pod}"))?;
        Ok(Pid::from_raw(pid.try_into()?))
    }

    /// Makes a checkpoint of a pod, which goes on.
    pub fn save(&self, pod: &str, name: &str) -> Result<()> {
        let pods = self.stack.cli_json(&["pods"])?;
        let ready = |entry: &&Value| entry["name"] == pod && entry["state"] == "ready";
        let found = pods.as_array().into_iter().flatten().find(ready);
        let id = found.and_then(|entry| entry["id"].as_str()).with_context(|| format!("no pod {pod}"))?;
        self.stack.cli_json(&["checkpoint", "create", id, name]).map(drop)
    }

    /// Returns what `sandboxer-cli check` says of one thing.
    pub fn checked(&self, name: &str) -> Result<Value> {
        // Its exit code tells the worst of all checks.
        let output = self.stack.command("sandboxer-cli").args(["check", "--json"]).output()?;
        let report: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("sandboxer-cli check: {}", text(&output.stderr)))?;
        let found = report["checks"].as_array().into_iter().flatten().find(|check| check["name"] == name);
        found.cloned().with_context(|| format!("no check {name:?}"))
    }

    /// Returns when each sandbox of a pod was created, as CRI lists them, ns.
    pub fn sandboxes(&self, uid: &str) -> Result<Vec<i64>> {
        let _inside = self.runtime.enter();
        let cri = Cri::connect(self.stack.containerd_socket()?)?;
        let sandboxes = self.runtime.block_on(cri.pods(("io.kubernetes.pod.uid", uid)))?;
        Ok(sandboxes.iter().map(|sandbox| sandbox.created_at).collect())
    }

    /// Returns Kubernetes' version.
    pub fn version(&self) -> Result<String> {
        let version = self.call("GET", "/version", None)?;
        Ok(version["gitVersion"].as_str().unwrap_or_default().trim_start_matches('v').to_owned())
    }

    /// Returns the name and version of the container runtime, as kubelet has it.
    pub fn containerd_version(&self) -> Result<String> {
        let node = self.call("GET", "/api/v1/nodes/node1", None)?;
        let version = node["status"]["nodeInfo"]["containerRuntimeVersion"].as_str().unwrap_or_default();
        Ok(version.replace("://", " "))
    }

    /// Returns the processes of a pod's control groups, without those of its VMM.
    pub fn processes(&self, uid: &str) -> Result<Vec<Pid>> {
        let mut pids = Vec::new();
        let found = Command::new("find")
            .args(["/sys/fs/cgroup", "-type", "d", "-path", &format!("*pod{uid}*")])
            .output()?;
        for group in text(&found.stdout).lines() {
            let procs = std::fs::read_to_string(Path::new(group).join("cgroup.procs")).unwrap_or_default();
            pids.extend(procs.lines().filter_map(|pid| pid.parse().ok()).map(Pid::from_raw));
        }
        Ok(pids)
    }
}

/// Returns what a program wrote.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_owned()
}

/// Runs a command for at most `limit`.
pub fn run_within(command: &mut Command, limit: Duration) -> Result<Output> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let read = |stream: Option<Box<dyn std::io::Read + Send>>| {
        std::thread::spawn(move || {
            let mut all = Vec::new();
            stream.map(|mut stream| stream.read_to_end(&mut all));
            all
        })
    };
    let out = read(stdout.map(|stream| Box::new(stream) as _));
    let err = read(stderr.map(|stream| Box::new(stream) as _));
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            bail!("{command:?}: not over after {limit:?}");
        }
        pause(Duration::from_millis(20));
    };
    let join = |thread: std::thread::JoinHandle<Vec<u8>>| thread.join().unwrap_or_default();
    Ok(Output { status, stdout: join(out), stderr: join(err) })
}

/// Polls `check` until it returns a value.
pub fn eventually<T>(what: &str, limit: Duration, mut check: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = check()? {
            return Ok(value);
        }
        ensure!(Instant::now() < deadline, "{what}: not within {limit:?}");
        pause(Duration::from_millis(200));
    }
}

/// Lets time pass.
#[allow(
    clippy::disallowed_methods,
    reason = "the API's status is polled, and kubelet's periods have no event"
)]
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}
