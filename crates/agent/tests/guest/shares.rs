//! The host's files in a guest, served by the program that serves them on a node.
//!
//! The test stands between them as the daemon does, and can lose what a dying daemon loses.

use std::{
    fs,
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use sandboxer_protocol::{
    agent::{AgentClient, CreateContainerRequest, ExchangeSharesRequest, MountSharesRequest, ShareMessage},
    share::{FRAME_HEAD, GUEST_DIR, frame_head, read_frame_head},
};
use sandboxer_share::attach::{Access, Source, attach};
use serde_json::json;
use tempfile::TempDir;
use tokio::{sync::Notify, task::JoinHandle};

use crate::{pod::container::*, vm::Vm};

/// A server with one share, which is `dir/host`.
struct Server {
    dir: TempDir,
    pidfd: std::os::fd::OwnedFd,
}

impl Server {
    fn start() -> Self {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/release/sandboxer-share");
        assert!(program.exists(), "{} is missing: run `make build`", program.display());
        let dir = tempfile::tempdir().unwrap();
        for name in ["run", "host"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let mut command = Command::new(program);
        command.arg(listener.as_raw_fd().to_string()).arg(dir.path().join("run")).arg("4096");
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
        attach(server.pidfd.as_fd(), "0", source).unwrap();
        server
    }

    fn host(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.dir.path().join("socket")).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
        let ended = rustix::process::WaitIdOptions::EXITED;
        let _ = rustix::process::waitid(rustix::process::WaitId::PidFd(self.pidfd.as_fd()), ended);
    }
}

/// Carries requests and answers until it is aborted. `lose`: how many answers it keeps to itself first.
fn relay(agent: AgentClient, server: UnixStream, lose: usize) -> JoinHandle<()> {
    telling_relay(agent, server, lose, Arc::default())
}

/// The same; `lost` is notified with each answer that is kept.
fn telling_relay(
    agent: AgentClient,
    mut server: UnixStream,
    mut lose: usize,
    lost: Arc<Notify>,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let (mut answers, mut resume) = (Vec::new(), true);
        loop {
            let exchange = ExchangeSharesRequest {
                answers: std::mem::take(&mut answers),
                resume: std::mem::take(&mut resume),
                ..Default::default()
            };
            let Ok(exchanged) = agent.exchange_shares(ctx(), &exchange).await else { return };
            for request in &exchanged.requests {
                server.write_all(&frame_head(request.slot, &request.message)).unwrap();
                server.write_all(&request.message).unwrap();
            }
            for _ in &exchanged.requests {
                let mut head = [0; FRAME_HEAD];
                server.read_exact(&mut head).unwrap();
                let (slot, length) = read_frame_head(head).unwrap();
                let mut message = vec![0; length];
                server.read_exact(&mut message).unwrap();
                if lose > 0 {
                    lose -= 1;
                    lost.notify_one();
                } else {
                    answers.push(ShareMessage { slot, message, ..Default::default() });
                }
            }
        }
    })
}

/// A container that finds the share at `/host`.
fn sharing(id: &str, script: &str, option: &str) -> CreateContainerRequest {
    let mut spec = spec(shell(script));
    spec["mounts"].as_array_mut().unwrap().push(json!({
        "destination": "/host", "type": "bind", "source": format!("{GUEST_DIR}/0"), "options": ["rbind", option],
    }));
    container(id, &spec)
}

async fn output(agent: &AgentClient, request: &CreateContainerRequest) -> String {
    let process = run(agent, request).await;
    let (said, complained) = (process.stdout().await, process.stderr().await);
    assert_eq!(process.wait().await.code, 0, "{said}{complained}");
    end(agent, &request.container_id).await;
    said
}

#[tokio::test]
async fn files_of_the_host_are_the_guests_and_the_other_way_round() {
    let (vm, server) = (Vm::boot(), Server::start());
    let (agent, _) = vm.session().await;
    for _ in 0..2 {
        agent.mount_shares(ctx(), &MountSharesRequest::new()).await.unwrap();
    }
    let carried = relay(agent.clone(), server.connect(), 0);
    fs::write(server.host().join("from-host"), "hello guest\n").unwrap();
    fs::copy("/bin/busybox", server.host().join("busybox")).unwrap();
    let script =
        "set -e; cd /host; cat from-host; echo hello host >to-host; chmod 644 to-host; chown 7:8 to-host
        mkdir dir; mv to-host dir/moved; ln -s /etc/layer link; cat link; rm from-host
        ./busybox echo it runs; dd if=/dev/urandom of=big bs=1M count=3; sha256sum big
        exec 3>open; echo first >&3; rm open; echo second >&3; ls";
    let said = output(&agent, &sharing("writer", script, "rw")).await;
    let (words, sum) =
        (said.clone(), said.lines().find_map(|line| line.strip_suffix("  big")).unwrap().to_owned());
    assert!(words.starts_with("hello guest\nlower\nit runs\n"), "{words}");
    assert!(words.ends_with("big\nbusybox\ndir\nlink\n"), "{words}");
    let moved = server.host().join("dir/moved");
    assert_eq!(fs::read_to_string(&moved).unwrap(), "hello host\n");
    assert_eq!(fs::metadata(&moved).unwrap().permissions().mode() & 0o7777, 0o644);
    let on_host = Command::new("sha256sum").arg(server.host().join("big")).output().unwrap().stdout;
    assert!(String::from_utf8(on_host).unwrap().starts_with(&sum));

    let script = "cat /host/dir/moved; echo x >/host/new || echo refused; cat /host/link";
    let said = output(&agent, &sharing("reader", script, "ro")).await;
    assert_eq!(said, "hello host\nrefused\nlower\n", "a link leads where the container says");
    assert!(!server.host().join("new").exists());
    carried.abort();
}

#[tokio::test]
async fn what_a_daemon_lost_is_asked_again_and_done_once() {
    let (vm, server) = (Vm::boot(), Server::start());
    let (agent, _) = vm.session().await;
    agent.mount_shares(ctx(), &MountSharesRequest::new()).await.unwrap();
    let script = "set -e; cd /host; for i in 1 2 3 4 5 6 7 8; do mkdir d$i; echo $i >>log; done; cat log; ls";
    let carried = relay(agent.clone(), server.connect(), 0);
    let writer = run(&agent, &sharing("writer", script, "rw")).await;
    carried.abort();
    let _ = carried.await;
    // The port has one host at a time.
    drop((agent, writer));
    for lost in 1..=4 {
        let (agent, _) = vm.session().await;
        let kept = Arc::new(Notify::new());
        let losing = telling_relay(agent, server.connect(), lost, kept.clone());
        // The server has done what was asked, and nobody has told the guest, which asks for nothing else before.
        tokio::time::timeout(Duration::from_secs(60), kept.notified())
            .await
            .expect("nothing was asked again");
        losing.abort();
        let _ = losing.await;
    }
    let (agent, _) = vm.session().await;
    let carried = relay(agent.clone(), server.connect(), 0);
    let writer = init(&agent, "writer");
    assert_eq!(writer.stdout().await, "1\n2\n3\n4\n5\n6\n7\n8\nd1\nd2\nd3\nd4\nd5\nd6\nd7\nd8\nlog\n");
    assert_eq!(writer.wait().await.code, 0, "{}", writer.stderr().await);
    assert_eq!(fs::read_dir(server.host()).unwrap().count(), 9);
    carried.abort();
}

#[tokio::test]
async fn a_guest_with_requests_that_nobody_answers_powers_off() {
    let (mut vm, server) = (Vm::boot(), Server::start());
    let (agent, _) = vm.session().await;
    agent.mount_shares(ctx(), &MountSharesRequest::new()).await.unwrap();
    let carried = relay(agent.clone(), server.connect(), 0);
    let waiting =
        run(&agent, &sharing("waiting", "echo up; while :; do echo x >>/host/log; done", "rw")).await;
    waiting.until("", "up\n").await;
    carried.abort();
    let _ = carried.await;
    let _ = agent.power_off(ctx(), &Default::default()).await;
    vm.ends().await;
}
