//! Helpers to make a daemon's requests.

use sandboxer_protocol::agent::{
    AgentClient, CreateContainerRequest, CreateExecRequest, DeleteContainerRequest, Disk, Exit, File,
    OutputStream, ReadOutputRequest, Rootfs, SignalProcessRequest, StartProcessRequest, Stdio, TmpfsUpper,
    WaitProcessRequest, WriteInputRequest, rootfs::Writable,
};
use serde_json::{Value, json};
use tokio::time::timeout;
use ttrpc::{Code, context::Context};

use crate::vm::{BUSYBOX, PATIENCE};

/// Without a deadline on the wire: the tests have their own.
pub fn ctx() -> Context {
    Context::default()
}

/// Returns a disk with file system `fstype`.
pub fn disk(serial: &str, fstype: &str, read_only: bool) -> Disk {
    Disk { serial: serial.into(), fstype: fstype.into(), read_only, ..Default::default() }
}

/// Returns the OCI process that runs `script` in a shell.
pub fn shell(script: &str) -> Value {
    command(&["sh", "-c", script])
}

/// Returns the OCI process that runs `args`.
pub fn command(args: &[&str]) -> Value {
    let caps = json!(["CAP_CHOWN", "CAP_KILL", "CAP_SETUID", "CAP_SETGID", "CAP_NET_RAW", "CAP_SYS_CHROOT"]);
    json!({
        "args": args, "cwd": "/", "env": ["PATH=/usr/bin:/bin", "GREETING=hello"], "user": {"uid": 0, "gid": 0},
        "noNewPrivileges": false,
        "capabilities": {"bounding": caps, "effective": caps, "permitted": caps},
    })
}

/// Returns a spec like containerd's for CRI, as converted by the daemon.
pub fn spec(process: Value) -> Value {
    let mount = |destination: &str, fstype: &str, options: Value| json!({"destination": destination, "type": fstype, "source": fstype, "options": options});
    json!({
        "ociVersion": "1.1.0",
        "process": process,
        "root": {"path": "rootfs"},
        "mounts": [
            mount("/proc", "proc", json!(["nosuid", "noexec", "nodev"])),
            mount("/dev", "tmpfs", json!(["nosuid", "strictatime", "mode=755", "size=65536k"])),
            mount("/dev/pts", "devpts", json!(["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"])),
            mount("/sys", "sysfs", json!(["nosuid", "noexec", "nodev", "ro"])),
            mount("/sys/fs/cgroup", "cgroup", json!(["nosuid", "noexec", "nodev", "relatime", "ro"])),
        ],
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "cgroup"}],
            "resources": {"devices": [{"allow": false, "access": "rwm"}]},
            "maskedPaths": ["/proc/kcore", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/sys"],
        },
    })
}

/// Returns all three streams, without a terminal.
pub fn streams() -> Stdio {
    Stdio { stdin: true, stdout: true, stderr: true, ..Default::default() }
}

/// Returns a terminal.
pub fn terminal() -> Stdio {
    Stdio { stdin: true, stdout: true, terminal: true, ..Default::default() }
}

/// Returns a container from the busybox disk with a writable layer in memory.
pub fn container(id: &str, spec: &Value) -> CreateContainerRequest {
    let writable = Writable::Tmpfs(TmpfsUpper { size_bytes: 16 << 20, ..Default::default() });
    let rootfs =
        Rootfs { lower: vec![disk(BUSYBOX, "erofs", true)], writable: Some(writable), ..Default::default() };
    CreateContainerRequest {
        container_id: id.into(),
        spec_json: spec.to_string().into_bytes(),
        rootfs: Some(rootfs).into(),
        stdio: Some(streams()).into(),
        ..Default::default()
    }
}

/// Returns a file for a container.
pub fn file(path: &str, content: &str, read_only: bool) -> File {
    File { path: path.into(), content: content.into(), mode: 0o644, read_only, ..Default::default() }
}

/// A process, as named by the daemon.
#[derive(Clone)]
pub struct Process {
    pub agent: AgentClient,
    pub container: String,
    pub exec: String,
}

/// Returns the init of container `id`.
pub fn init(agent: &AgentClient, id: &str) -> Process {
    Process { agent: agent.clone(), container: id.into(), exec: String::new() }
}

impl Process {
    pub async fn start(&self) -> Result<u32, ttrpc::Error> {
        let request = StartProcessRequest {
            container_id: self.container.clone(),
            exec_id: self.exec.clone(),
            ..Default::default()
        };
        Ok(patiently(self.agent.start_process(ctx(), &request)).await?.pid)
    }

    pub async fn wait(&self) -> Exit {
        let request = WaitProcessRequest {
            container_id: self.container.clone(),
            exec_id: self.exec.clone(),
            ..Default::default()
        };
        patiently(self.agent.wait_process(ctx(), &request)).await.unwrap().exit.unwrap()
    }

    pub async fn signal(&self, signal: i32, all: bool) -> Result<(), ttrpc::Error> {
        let request = SignalProcessRequest {
            container_id: self.container.clone(),
            exec_id: self.exec.clone(),
            signal: signal.unsigned_abs(),
            all,
            ..Default::default()
        };
        patiently(self.agent.signal_process(ctx(), &request)).await.map(drop)
    }

    /// Reads output once; returns its bytes, and whether they are the last.
    pub async fn read(
        &self,
        stream: OutputStream,
        offset: u64,
        max: u32,
    ) -> Result<(Vec<u8>, bool), ttrpc::Error> {
        let request = ReadOutputRequest {
            container_id: self.container.clone(),
            exec_id: self.exec.clone(),
            stream: stream.into(),
            offset,
            max_bytes: max,
            ..Default::default()
        };
        let Ok(answer) = timeout(PATIENCE, self.agent.read_output(ctx(), &request)).await else {
            let known = patiently(self.agent.list_containers(ctx(), &Default::default())).await;
            panic!("no output of {}/{} from {offset} on; {known:?}", self.container, self.exec);
        };
        let answer = answer?;
        assert_eq!(answer.offset, offset);
        Ok((answer.data, answer.end))
    }

    /// Reads a stream up to its end.
    pub async fn all_of(&self, stream: OutputStream) -> String {
        let mut all = Vec::new();
        loop {
            let (data, end) = self.read(stream, all.len() as u64, 0).await.unwrap();
            all.extend(data);
            if end {
                return String::from_utf8_lossy(&all).into_owned();
            }
        }
    }

    pub async fn stdout(&self) -> String {
        self.all_of(OutputStream::STDOUT).await
    }

    pub async fn stderr(&self) -> String {
        self.all_of(OutputStream::STDERR).await
    }

    /// Reads standard output after `seen` until all of it contains `text`; returns all.
    pub async fn until(&self, seen: &str, text: &str) -> String {
        let mut all = seen.to_owned();
        while !all.contains(text) {
            let (data, end) = self.read(OutputStream::STDOUT, all.len() as u64, 0).await.unwrap();
            all += std::str::from_utf8(&data).unwrap();
            assert!(!end || all.contains(text), "{text:?} never came: {all}");
        }
        all
    }

    pub async fn write(&self, offset: u64, data: &[u8], end: bool) -> Result<u64, ttrpc::Error> {
        let request = WriteInputRequest {
            container_id: self.container.clone(),
            exec_id: self.exec.clone(),
            offset,
            data: data.into(),
            end,
            ..Default::default()
        };
        Ok(patiently(self.agent.write_input(ctx(), &request)).await?.taken)
    }
}

/// Creates and starts a container.
pub async fn run(agent: &AgentClient, request: &CreateContainerRequest) -> Process {
    patiently(agent.create_container(ctx(), request)).await.unwrap();
    let process = init(agent, &request.container_id);
    process.start().await.unwrap();
    process
}

/// Registers an exec.
pub async fn exec(agent: &AgentClient, container: &str, id: &str, process: &Value, stdio: Stdio) -> Process {
    let request = CreateExecRequest {
        container_id: container.into(),
        exec_id: id.into(),
        process_json: process.to_string().into_bytes(),
        stdio: Some(stdio).into(),
        ..Default::default()
    };
    patiently(agent.create_exec(ctx(), &request)).await.unwrap();
    Process { agent: agent.clone(), container: container.into(), exec: id.into() }
}

/// Removes a container.
pub async fn delete(agent: &AgentClient, id: &str) -> Result<(), ttrpc::Error> {
    let request = DeleteContainerRequest { container_id: id.into(), ..Default::default() };
    patiently(agent.delete_container(ctx(), &request)).await.map(drop)
}

/// Kills and removes a container.
pub async fn end(agent: &AgentClient, id: &str) {
    let _ = init(agent, id).signal(libc::SIGKILL, true).await;
    init(agent, id).wait().await;
    delete(agent, id).await.unwrap();
}

/// Returns the code and message of an error.
pub fn refusal<T: std::fmt::Debug>(result: Result<T, ttrpc::Error>) -> (Code, String) {
    match result.unwrap_err() {
        ttrpc::Error::RpcStatus(status) => (status.code.enum_value().unwrap(), status.message),
        other => panic!("not an answer of the agent: {other}"),
    }
}

/// Waits for `work` with a timeout.
pub async fn patiently<T>(work: impl Future<Output = T>) -> T {
    timeout(PATIENCE, work).await.expect("agent answers")
}
