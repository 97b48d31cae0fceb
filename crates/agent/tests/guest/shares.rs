//! The host's files in a guest, served by the real server, as on a node.

use std::{
    fs,
    os::{
        fd::{AsFd, AsRawFd},
        unix::{fs::PermissionsExt, net::UnixListener, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Signal, pidfd_send_signal};
use sandboxer_protocol::{
    agent::{AgentClient, CreateContainerRequest, MountSharesRequest},
    share::{DISK_SERIAL, GUEST_DIR},
};
use sandboxer_share::attach::{Access, Source, put, take};
use serde_json::json;
use tempfile::TempDir;
use tokio::time::timeout;

use crate::{
    container::*,
    vm::{PATIENCE, Vm},
};

/// A server with one share: `dir/host`.
struct Server {
    dir: TempDir,
    pidfd: std::os::fd::OwnedFd,
}

impl Server {
    fn start() -> Self {
        let profile = std::env::var("SANDBOXER_PROFILE").unwrap_or("release".to_owned());
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
        let program = target.join(profile).join("sandboxer-share");
        assert!(program.exists(), "{} is missing: run `make build`", program.display());
        let dir = tempfile::tempdir().unwrap();
        for name in ["run", "host"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let mut command = Command::new(program);
        command.arg(listener.as_raw_fd().to_string()).arg(dir.path().join("run")).args(["4096", "disk"]);
        // SAFETY: between fork and exec one system call is made.
        unsafe {
            command.pre_exec(move || Ok(rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty())?))
        };
        let words = command.stdin(Stdio::null()).output().unwrap().stdout;
        let pid = String::from_utf8(words).unwrap().trim().parse().expect("its process id");
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let server = Self { dir, pidfd };
        let host = server.host();
        let source = Source { path: &host, access: Access::ReadWrite, follows_mounts: false };
        let found = fs::File::open(&host).unwrap();
        put(server.pidfd.as_fd(), "0", &take(found.as_fd(), source).unwrap()).unwrap();
        server
    }

    fn host(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let ended = rustix::process::WaitIdOptions::EXITED;
        let _ = rustix::process::waitid(rustix::process::WaitId::PidFd(self.pidfd.as_fd()), ended);
    }
}

/// Boots a guest with mounted shares.
async fn guest(server: &Server) -> (Vm, AgentClient) {
    let vm = Vm::boot_with_shares(&server.dir.path().join("socket"));
    let (agent, _) = vm.session().await;
    let ask = MountSharesRequest { ask: true, ..Default::default() };
    assert!(!agent.mount_shares(ctx(), &ask).await.unwrap().mounted);
    let request = MountSharesRequest { disk: DISK_SERIAL.into(), ..Default::default() };
    // Idempotent.
    for request in [&request, &request, &ask] {
        assert!(agent.mount_shares(ctx(), request).await.unwrap().mounted);
    }
    (vm, agent)
}

/// Returns a container with the share at `/host`.
fn sharing(id: &str, script: &str, option: &str) -> CreateContainerRequest {
    let mut spec = spec(shell(script));
    spec["mounts"].as_array_mut().unwrap().push(json!({
        "destination": "/host", "type": "bind", "source": format!("{GUEST_DIR}/0"), "options": ["rbind", option],
    }));
    container(id, &spec)
}

async fn output(agent: &AgentClient, request: &CreateContainerRequest) -> String {
    let process = run(agent, request).await;
    let (stdout, stderr) = (process.stdout().await, process.stderr().await);
    assert_eq!(process.wait().await.code, 0, "{stdout}{stderr}");
    end(agent, &request.container_id).await;
    stdout
}

#[tokio::test]
async fn files_of_the_host_are_the_guests_and_the_other_way_round() {
    let server = Server::start();
    let (_vm, agent) = guest(&server).await;
    fs::write(server.host().join("from-host"), "hello guest\n").unwrap();
    fs::copy("/bin/busybox", server.host().join("busybox")).unwrap();
    let script =
        "set -e; cd /host; cat from-host; echo hello host >to-host; chmod 644 to-host; chown 7:8 to-host
        mkdir dir; mv to-host dir/moved; ln -s /etc/layer link; cat link; rm from-host
        ./busybox echo it runs; dd if=/dev/urandom of=big bs=1M count=3; sha256sum big
        exec 3>open; echo first >&3; rm open; echo second >&3; ls";
    let stdout = output(&agent, &sharing("writer", script, "rw")).await;
    let (words, sum) =
        (stdout.clone(), stdout.lines().find_map(|line| line.strip_suffix("  big")).unwrap().to_owned());
    assert!(words.starts_with("hello guest\nlower\nit runs\n"), "{words}");
    assert!(words.ends_with("big\nbusybox\ndir\nlink\n"), "{words}");
    let moved = server.host().join("dir/moved");
    assert_eq!(fs::read_to_string(&moved).unwrap(), "hello host\n");
    assert_eq!(fs::metadata(&moved).unwrap().permissions().mode() & 0o7777, 0o644);
    let on_host = Command::new("sha256sum").arg(server.host().join("big")).output().unwrap().stdout;
    assert!(String::from_utf8(on_host).unwrap().starts_with(&sum));

    let script = "cat /host/dir/moved; echo x >/host/new || echo refused; cat /host/link";
    let stdout = output(&agent, &sharing("reader", script, "ro")).await;
    assert_eq!(stdout, "hello host\nrefused\nlower\n", "a link leads where the container says");
    assert!(!server.host().join("new").exists());
}

#[tokio::test]
async fn files_are_read_and_written_while_no_daemon_is_there() {
    let server = Server::start();
    let (vm, agent) = guest(&server).await;
    let script = "cd /host; until test -e go; do sleep 0.1; done; echo written >late; cat go; echo up";
    let process = run(&agent, &sharing("worker", script, "rw")).await;
    drop((agent, process));
    // No session exists that could forward anything.
    fs::write(server.host().join("go"), "went on\n").unwrap();
    let began = Instant::now();
    while fs::read(server.host().join("late")).unwrap_or_default() != b"written\n" {
        assert!(began.elapsed() < PATIENCE, "nothing is written; console:\n{}", vm.console());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (agent, _) = vm.session().await;
    let process = init(&agent, "worker");
    assert_eq!(process.stdout().await, "went on\nup\n");
    assert_eq!(process.wait().await.code, 0, "{}", process.stderr().await);
}

#[tokio::test]
async fn a_server_that_dies_is_an_error_and_no_more() {
    let server = Server::start();
    let (_vm, agent) = guest(&server).await;
    fs::write(server.host().join("file"), "x").unwrap();
    let script = "cat /host/file; echo; read go; cat /host/file /host/other || echo lost; echo fine";
    let process = run(&agent, &sharing("c", script, "rw")).await;
    let seen = process.until("", "x\n").await;
    server.kill();
    process.write(0, b"go\n", true).await.unwrap();
    let stdout = process.until(&seen, "fine\n").await;
    assert!(stdout.ends_with("lost\nfine\n"), "{stdout}");
    let stderr = process.stderr().await;
    assert!(stderr.contains("I/O error") || stderr.contains("Input/output error"), "{stderr}");
}

/// A lease, which blocks every open for writing, for as long as the system's `fs.lease-break-time`.
struct Lease(fs::File);

impl Lease {
    fn take(path: &Path) -> Self {
        let file = fs::File::open(path).unwrap();
        // SAFETY: both calls take only numbers. The kernel signals a broken lease with a signal that is
        // ignored.
        let taken = unsafe {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK)
        };
        assert_eq!(taken, 0, "{}", std::io::Error::last_os_error());
        Self(file)
    }

    /// Returns whether an open is blocked.
    fn holds_somebody_up(&self) -> bool {
        // SAFETY: the call takes only numbers.
        unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_GETLEASE) == libc::F_UNLCK }
    }
}

#[tokio::test]
async fn a_guest_with_a_request_that_hangs_is_asked_and_powers_off() {
    let longest = fs::read_to_string("/proc/sys/fs/lease-break-time").unwrap();
    let longest = Duration::from_secs(longest.trim().parse().unwrap());
    let server = Server::start();
    let (mut vm, agent) = guest(&server).await;
    let log = server.host().join("log");
    fs::write(&log, "").unwrap();
    let lease = Lease::take(&log);
    let waiting = run(&agent, &sharing("waiting", "echo up; echo x >>/host/log", "rw")).await;
    waiting.until("", "up\n").await;
    while !lease.holds_somebody_up() {
        tokio::task::yield_now().await;
    }
    let began = Instant::now();
    // The agent's own thread waits for none of them, and QEMU only until it receives "later".
    let processes = timeout(PATIENCE, agent.list_containers(ctx(), &Default::default())).await;
    processes.expect("the agent waits for the server").unwrap();
    let _ = timeout(PATIENCE, agent.power_off(ctx(), &Default::default())).await.expect("it is still on");
    vm.ends().await;
    assert!(began.elapsed() < longest, "{:?}: it waited for the file", began.elapsed());
}
