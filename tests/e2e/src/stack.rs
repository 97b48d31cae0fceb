//! A separate stack, started and stopped by `scripts/stack.sh`, like `make up`, or with a Kubernetes node by
//! `scripts/kubernetes.sh`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::eventually;

/// Returns whether a VMM is in the pool, or becomes a template. Its environment has its first directory, which is
/// renamed when a pod claims it.
fn is_of_no_pod(pid: Pid) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let dir = environment
        .split(|byte| *byte == 0)
        .find_map(|variable| std::str::from_utf8(variable).ok()?.strip_prefix("SANDBOXER_RUN_DIR="));
    dir.map(Path::new)
        .is_some_and(|dir| !dir.parent().is_some_and(|dir| dir.ends_with("pods")) && dir.exists())
}

/// Directories of test runs; the pid tells whether the run is active.
const PREFIX: &str = "sandboxer-e2e-";

/// Timeout for the release of a removed pod's resources: the kernel finishes asynchronously.
const GONE_WITHIN: Duration = Duration::from_secs(30);

/// A running containerd, with the daemon unless started without.
pub struct Stack {
    dir: PathBuf,
    before: tempfile::NamedTempFile,
    env: HashMap<String, String>,
    /// What starts and removes it.
    script: &'static str,
    daemon: bool,
    down: bool,
}

/// What a test kills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// The worker.
    Worker,
    /// The front, and its worker with it.
    Front,
    /// Both in one instant.
    Both,
}

impl Victim {
    /// Returns each of them in turn.
    pub fn in_turn(round: usize) -> Self {
        [Self::Worker, Self::Front, Self::Both][round % 3]
    }
}

impl Stack {
    /// Starts a stack in a directory of this process. Removes stacks of killed runs first.
    pub fn up(daemon: bool) -> Result<Self> {
        Self::up_by("stack.sh", daemon)
    }

    /// Starts a stack with a Kubernetes node on it, by `scripts/kubernetes.sh`.
    pub fn up_with_kubelet() -> Result<Self> {
        Self::up_by("kubernetes.sh", true)
    }

    fn up_by(script_name: &'static str, daemon: bool) -> Result<Self> {
        ensure!(
            nix::unistd::geteuid().is_root(),
            "the end-to-end tests need root: they mount and make namespaces"
        );
        sweep()?;
        let dir = std::env::temp_dir().join(format!("{PREFIX}{}", std::process::id()));
        let before = tempfile::NamedTempFile::new()?;
        script("leftovers.sh", &["record".as_ref(), dir.as_ref(), before.path()])?;
        let mut stack = Self { dir, before, env: HashMap::new(), script: script_name, daemon, down: false };
        stack.start()?;
        Ok(stack)
    }

    /// Starts the stopped parts of the stack.
    pub fn start(&mut self) -> Result<()> {
        self.run_up()?;
        let env = fs::read_to_string(self.dir.join("env"))?;
        self.env = env
            .lines()
            .filter_map(|line| line.strip_prefix("export ")?.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        Ok(())
    }

    /// Same as [`Stack::start`], for a stack that was up before: changes only processes.
    pub fn run_up(&self) -> Result<()> {
        self.run_up_with(&[])
    }

    /// Same as [`Stack::run_up`], with `variables` in what it starts.
    pub fn run_up_with(&self, variables: &[(&str, &Path)]) -> Result<()> {
        let mut args = vec![Path::new("up"), &self.dir];
        if !self.daemon {
            args.push(Path::new("--no-daemon"));
        }
        script_with(self.script, &args, variables).map(drop)
    }

    /// Returns the resources of pods in the running stack; none after every pod is removed.
    pub fn pod_resources(&self) -> Result<Vec<String>> {
        let mut resources = Vec::new();
        for pid in self.vmms()? {
            resources.push(format!("VMM {pid}"));
        }
        for name in ["sandboxer-share", "containerd-shim"] {
            resources.extend(self.processes(name)?.iter().map(|pid| format!("{name} {pid}")));
        }
        for dir in self.daemon_dirs().map(|dir| dir.join("pods")) {
            for entry in fs::read_dir(&dir).into_iter().flatten() {
                resources.push(entry?.path().display().to_string());
            }
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let pods = [self.dir.join("sandboxer"), self.dir.join("containerd/state")];
        for mount in mounts.lines().filter_map(|line| line.split(' ').nth(4)) {
            if pods.iter().any(|dir| Path::new(mount).starts_with(dir)) {
                resources.push(format!("mount {mount}"));
            }
        }
        Ok(resources)
    }

    /// Returns the resources of removed pods, once there are none or they stay.
    pub async fn left(&self) -> Result<Vec<String>> {
        let began = Instant::now();
        loop {
            let resources = self.pod_resources()?;
            if resources.is_empty() || began.elapsed() > GONE_WITHIN {
                return Ok(resources);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Stops the stack; an error lists leaks on the host.
    pub fn down(mut self) -> Result<()> {
        self.down = true;
        self.take_down()
    }

    /// Removes the stack and starts an empty one in the same directory.
    pub fn renew(&self) -> Result<()> {
        if self.is_kept() {
            bail!("it is kept as it is, as SANDBOXER_E2E_KEEP asks");
        }
        let down = self.take_down();
        self.run_up()?;
        down
    }

    /// Returns whether the stack is kept after the run.
    fn is_kept(&self) -> bool {
        std::env::var_os("SANDBOXER_E2E_KEEP").is_some()
    }

    fn take_down(&self) -> Result<()> {
        if self.is_kept() {
            eprintln!(
                "kept, as SANDBOXER_E2E_KEEP asks: {0}; end it with scripts/{1} down {0}",
                self.dir.display(),
                self.script
            );
            return Ok(());
        }
        script(self.script, &["down".as_ref(), self.dir.as_ref()])?;
        script("leftovers.sh", &["check".as_ref(), self.dir.as_ref(), self.before.path()]).map(drop)
    }

    /// Returns the stack's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns a variable of the stack's `env` file.
    pub fn env(&self, name: &str) -> Result<&str> {
        self.env.get(name).map(String::as_str).ok_or_else(|| anyhow!("no {name} in the stack's env file"))
    }

    /// Returns the socket of containerd.
    pub fn containerd_socket(&self) -> Result<PathBuf> {
        self.env("CONTAINERD_ADDRESS").map(PathBuf::from)
    }

    /// Returns the daemon's run and state directories.
    pub fn daemon_dirs(&self) -> [PathBuf; 2] {
        [self.dir.join("sandboxer/run"), self.dir.join("sandboxer/state")]
    }

    /// Returns the recorded pid of `containerd` or `sandboxer`.
    pub fn pid(&self, name: &str) -> Result<Pid> {
        let path = self.dir.join("pids").join(name);
        let record = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let pid = record.split_whitespace().next().context("empty pid record")?;
        Ok(Pid::from_raw(pid.parse()?))
    }

    /// Sends `signal` to `containerd` or `sandboxer` and waits until the process is gone.
    pub async fn end(&self, name: &str, signal: Signal) -> Result<()> {
        let pid = self.pid(name)?;
        kill(pid, signal).with_context(|| format!("cannot send {signal} to {name}"))?;
        let process = PathBuf::from(format!("/proc/{pid}/exe"));
        eventually(&format!("end of {name}"), Duration::from_secs(20), || async {
            Ok((!process.exists() || fs::read_link(&process).is_err()).then_some(()))
        })
        .await
    }

    /// Runs `sandboxer-cli` and returns its output.
    pub fn cli(&self, words: &[&str]) -> Result<String> {
        let output = self.command("sandboxer-cli").args(words).output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "sandboxer-cli {}: {}", words.join(" "), stderr.trim());
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs `sandboxer-cli --json` and returns its output.
    pub fn cli_json(&self, words: &[&str]) -> Result<serde_json::Value> {
        Ok(serde_json::from_str(&self.cli(&[words, &["--json"]].concat())?)?)
    }

    /// Returns the process behind the daemon's front; waits until it answers.
    pub fn worker(&self) -> Result<Pid> {
        let version = self.cli_json(&["version"])?;
        let pid = |name: &str| {
            let pid = version["daemon"][name].as_i64().and_then(|pid| i32::try_from(pid).ok());
            pid.map(Pid::from_raw).with_context(|| format!("no {name} in {version}"))
        };
        let keeper = self.pid("sandboxer")?;
        ensure!(pid("keeper_pid")? == keeper, "the keeper is another process than {keeper}: {version}");
        let worker = pid("worker_pid")?;
        // Another one may be there by now, but each was what it is called.
        for (name, process, parent) in
            [("front", pid("front_pid")?, keeper), ("worker", worker, pid("front_pid")?)]
        {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            let ppid = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1)?.parse().ok());
            ensure!(
                ppid.is_none_or(|ppid: i32| ppid == parent.as_raw() || ppid == 1),
                "{process} is not the {name}: {version}"
            );
        }
        Ok(worker)
    }

    /// Returns the front: the child of the daemon's main process, which keeps its descriptors.
    pub fn front(&self) -> Result<Pid> {
        let keeper = self.pid("sandboxer")?;
        let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children"))?;
        let front = children.split_whitespace().next().context("the keeper has no front now")?;
        Ok(Pid::from_raw(front.parse()?))
    }

    /// Kills a part of the daemon. Returns the worker's pid before: that one ends in any case.
    pub fn kill(&self, victim: Victim) -> Result<Pid> {
        // The worker answers through a front that is alive: one that was killed a moment ago is still listed before.
        let worker = self.worker()?;
        let front = self.front()?;
        if victim != Victim::Front {
            kill(worker, Signal::SIGKILL).context("cannot kill the worker")?;
        }
        if victim != Victim::Worker {
            kill(front, Signal::SIGKILL).context("cannot kill the front")?;
        }
        Ok(worker)
    }

    /// Kills the worker and returns its pid. The front starts the next one.
    pub fn kill_worker(&self) -> Result<Pid> {
        let worker = self.worker()?;
        kill(worker, Signal::SIGKILL).context("cannot kill the worker")?;
        Ok(worker)
    }

    /// Returns a variable of the stack's environment.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.env.get(name).map(String::as_str)
    }

    /// Returns the stack's own `name` (ctr, sandboxer-cli …), in its environment.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.dir.join("bin").join(name));
        command.stdin(Stdio::null());
        for (key, value) in self.env.iter().filter(|(key, _)| *key != "PATH") {
            command.env(key, value);
        }
        command
    }

    /// Returns the live VMMs of this stack's pods.
    pub fn vmms(&self) -> Result<Vec<Pid>> {
        let (_, of_pods) = self.all_vmms()?;
        Ok(of_pods)
    }

    /// Returns the VMMs in this stack's pool.
    pub fn waiting(&self) -> Result<Vec<Pid>> {
        let (waiting, _) = self.all_vmms()?;
        Ok(waiting)
    }

    /// Returns all VMMs of this stack: those in the pool, and those of pods.
    fn all_vmms(&self) -> Result<(Vec<Pid>, Vec<Pid>)> {
        let mut vmms = self.processes("qemu-system")?;
        vmms.extend(self.processes("cloud-hypervisor")?);
        vmms.extend(self.processes("firecracker")?);
        Ok(vmms.into_iter().partition(|&pid| is_of_no_pod(pid)))
    }

    /// Returns the control groups named `name`, in every hierarchy.
    pub fn cgroups(&self, name: &str) -> Result<Vec<PathBuf>> {
        let found = Command::new("find").args(["/sys/fs/cgroup", "-type", "d", "-name", name]).output()?;
        ensure!(found.status.success(), "find: {}", String::from_utf8_lossy(&found.stderr));
        Ok(String::from_utf8(found.stdout)?.lines().map(PathBuf::from).collect())
    }

    /// Returns this stack's processes whose command line begins with `…/<name>`.
    pub fn processes(&self, name: &str) -> Result<Vec<Pid>> {
        let owned = Command::new("bash")
            .arg("-c")
            .arg(". \"$0\"; stack_names \"$1\"; owned_pids")
            .arg(scripts().join("lib.sh"))
            .arg(&self.dir)
            .output()?;
        ensure!(owned.status.success(), "owned_pids: {}", String::from_utf8_lossy(&owned.stderr));
        let mut pids = Vec::new();
        for pid in String::from_utf8(owned.stdout)?.lines() {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let argv0 = command.split(|byte| *byte == 0).next().unwrap_or_default();
            let argv0 = String::from_utf8_lossy(argv0);
            if argv0.rsplit('/').next().is_some_and(|base| base.starts_with(name)) {
                pids.push(Pid::from_raw(pid.parse()?));
            }
        }
        Ok(pids)
    }

    /// Returns the last lines of both logs, for a failed case's message.
    pub fn log_tails(&self, lines: usize) -> String {
        let mut text = String::new();
        for name in ["containerd", "sandboxer"] {
            let path = self.dir.join(name).join("log");
            let Ok(log) = fs::read_to_string(&path) else {
                continue;
            };
            // containerd tells a lot of each call that went well.
            let tail: Vec<_> =
                log.lines().rev().filter(|line| !line.contains("level=info")).take(lines).collect();
            text += &format!("--- end of {}\n", path.display());
            for line in tail.iter().rev() {
                text += &format!("{}\n", line.chars().take(600).collect::<String>());
            }
        }
        text
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if !self.down
            && let Err(error) = self.take_down()
        {
            eprintln!("stack {}: {error:#}", self.dir.display());
        }
    }
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts")
}

fn script(name: &str, args: &[&Path]) -> Result<String> {
    script_with(name, args, &[])
}

fn script_with(name: &str, args: &[&Path], variables: &[(&str, &Path)]) -> Result<String> {
    let mut command = Command::new(scripts().join(name));
    // A small pool: cases that run at once leave it no time to be filled, and those that count need few.
    command.args(args).env("POOL", "2").envs(variables.iter().copied()).stdin(Stdio::null());
    let output = command.output()?;
    if !output.status.success() {
        bail!("scripts/{name}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Removes the stacks of test runs that have ended.
fn sweep() -> Result<()> {
    for entry in fs::read_dir(std::env::temp_dir())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(pid) = name.strip_prefix(PREFIX) else {
            continue;
        };
        if !Path::new("/proc").join(pid).exists() && path.join(".stack").exists() {
            let by = if path.join("kubernetes").exists() { "kubernetes.sh" } else { "stack.sh" };
            script(by, &["down".as_ref(), path.as_ref()])?;
        }
    }
    Ok(())
}
