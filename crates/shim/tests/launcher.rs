//! The launcher as containerd runs it: the real program, its output and its exit code.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

use std::{
    os::unix::net::UnixListener,
    path::Path,
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use async_trait::async_trait;
use containerd_shim_protos::{
    api::{DeleteRequest, DeleteResponse, Empty, KillRequest, WaitRequest, WaitResponse},
    shim_async::{Task, create_task},
    ttrpc::{self, asynchronous::TtrpcContext},
    types::introspection::RuntimeInfo,
};
use protobuf::{Message, well_known_types::timestamp::Timestamp};

fn launcher(bundle: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_containerd-shim-sandboxer-v1"))
        .args(args)
        .current_dir(bundle)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn delete(bundle: &Path) -> (DeleteResponse, Output) {
    let path = bundle.display().to_string();
    let args = ["-namespace", "k8s.io", "-address", "/nowhere.sock", "-publish-binary", "/bin/containerd"];
    let output =
        launcher(bundle, &[&args[..], &["-id", "c1", "-bundle", &path, "-debug", "delete"]].concat());
    (DeleteResponse::parse_from_bytes(&output.stdout).unwrap(), output)
}

/// Asserts success, without output that containerd would log as a warning.
#[track_caller]
fn assert_clean(output: &Output) {
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}

#[track_caller]
fn assert_killed_just_now(response: &DeleteResponse) {
    assert_eq!(response.exit_status, 137);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let at = u64::try_from(response.exited_at.seconds).unwrap();
    assert!(now - at <= 60, "exited at {at}, now {now}");
}

/// Creates a bundle with `socket` as the address of its container's task service.
fn bundle(dir: &Path, socket: &Path) {
    let bootstrap = format!(r#"{{"version":3,"address":"unix://{}","protocol":"ttrpc"}}"#, socket.display());
    std::fs::write(dir.join("bootstrap.json"), bootstrap).unwrap();
}

#[test]
fn info_claims_the_mounts_that_become_disks() {
    let dir = tempfile::tempdir().unwrap();
    let output = launcher(dir.path(), &["-info"]);
    assert_clean(&output);
    let info = RuntimeInfo::parse_from_bytes(&output.stdout).unwrap();
    assert_eq!(info.name, "io.containerd.sandboxer.v1");
    assert_eq!(info.version.version, env!("CARGO_PKG_VERSION"));
    let claimed = &info.annotations["containerd.io/runtime-allow-mounts"];
    assert_eq!(claimed, "erofs,ext4,mkfs/*,format/*,mkdir/*");
}

#[test]
fn delete_without_a_daemon_says_killed_as_often_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    // Never connected; a dead daemon's socket; an invalid file.
    let socket = dir.path().join("task.sock");
    drop(UnixListener::bind(&socket).unwrap());
    let states: [&dyn Fn(); 3] = [&|| (), &|| bundle(dir.path(), &socket), &|| {
        std::fs::write(dir.path().join("bootstrap.json"), "{\"address\":").unwrap();
    }];
    for prepare in states {
        prepare();
        for _ in 0..2 {
            let (response, output) = delete(dir.path());
            assert_clean(&output);
            assert_killed_just_now(&response);
        }
    }
}

#[test]
fn delete_does_not_wait_for_a_daemon_that_says_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("task.sock");
    let _silent = UnixListener::bind(&socket).unwrap();
    bundle(dir.path(), &socket);
    let begin = Instant::now();
    let (response, output) = delete(dir.path());
    assert_clean(&output);
    assert_killed_just_now(&response);
    // Not a speed requirement: after five seconds containerd kills the launcher and reports 255.
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

/// A test double of the daemon: one container, which runs until it is killed.
#[derive(Debug, Default)]
struct OneContainer {
    is_missing: bool,
    requests: Mutex<Vec<String>>,
}

impl OneContainer {
    fn hear(&self, what: String, context: &TtrpcContext) -> ttrpc::Result<()> {
        let namespace = context.metadata.get("containerd-namespace-ttrpc").cloned().unwrap_or_default();
        self.requests.lock().unwrap().push(format!("{what} in {namespace:?}"));
        match self.is_missing {
            true => {
                Err(ttrpc::Error::RpcStatus(ttrpc::get_status(ttrpc::Code::NOT_FOUND, "no container c1")))
            }
            false => Ok(()),
        }
    }
}

#[async_trait]
impl Task for OneContainer {
    async fn kill(&self, context: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        let what = format!("kill {} by {}, all: {}", request.id, request.signal, request.all);
        self.hear(what, context).map(|()| Empty::new())
    }

    async fn wait(&self, context: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        self.hear(format!("wait {}", request.id), context).map(|()| WaitResponse::new())
    }

    async fn delete(&self, context: &TtrpcContext, request: DeleteRequest) -> ttrpc::Result<DeleteResponse> {
        self.hear(format!("delete {}", request.id), context)?;
        let exited_at = Some(Timestamp { seconds: 1_700_000_000, ..Default::default() }).into();
        Ok(DeleteResponse { pid: 42, exit_status: 7, exited_at, ..Default::default() })
    }
}

/// Runs `delete` against `service`; returns the launcher's response, and the requests that the daemon
/// received.
fn delete_with(service: OneContainer) -> (DeleteResponse, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("task.sock");
    bundle(dir.path(), &socket);
    delete_at(dir.path(), &socket, service)
}

/// The same in a bundle that exists.
fn delete_at(dir: &Path, socket: &Path, service: OneContainer) -> (DeleteResponse, Vec<String>) {
    let service = Arc::new(service);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _server = runtime.block_on(async {
        let mut server = ttrpc::asynchronous::Server::new()
            .bind(&format!("unix://{}", socket.display()))
            .unwrap()
            .register_service(create_task(service.clone()));
        server.start().await.unwrap();
        server
    });
    let (response, output) = delete(dir);
    assert_clean(&output);
    let requests = service.requests.lock().unwrap().clone();
    (response, requests)
}

#[test]
fn delete_ends_a_container_that_containerd_has_lost_and_tells_how_it_ended() {
    let (response, requests) = delete_with(OneContainer::default());
    assert_eq!(
        requests,
        ["kill c1 by 9, all: true in [\"k8s.io\"]", "wait c1 in [\"k8s.io\"]", "delete c1 in [\"k8s.io\"]"]
    );
    assert_eq!((response.pid, response.exit_status, response.exited_at.seconds), (42, 7, 1_700_000_000));
}

#[test]
fn delete_of_a_container_that_is_gone_is_no_error() {
    let (response, requests) = delete_with(OneContainer { is_missing: true, ..Default::default() });
    assert_eq!(requests, ["kill c1 by 9, all: true in [\"k8s.io\"]", "delete c1 in [\"k8s.io\"]"]);
    assert_killed_just_now(&response);
}

/// Options as a containerd packs them that does not know the runtime: `Any` of `runtimeoptions.v1.Options`, field 2.
fn options(config: &Path) -> Vec<u8> {
    let path = config.display().to_string();
    let field = |number: u8, bytes: &[u8]| {
        let length = u8::try_from(bytes.len()).unwrap();
        assert!(length < 128, "a longer one has a longer length");
        [&[number << 3 | 2, length], bytes].concat()
    };
    [field(1, b"runtimeoptions.v1.Options"), field(2, &field(2, path.as_bytes()))].concat()
}

/// Runs `start` as containerd does; `max_version` is its MAX_SHIM_VERSION.
fn start(bundle: &Path, stdin: &[u8], max_version: Option<&str>) -> Output {
    let input = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(input.path(), stdin).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_containerd-shim-sandboxer-v1"));
    command
        .args(["-namespace", "k8s.io", "-address", "/run/c.sock", "-publish-binary", "/bin/containerd"])
        .args(["-id", "c1", "-debug", "start"])
        .current_dir(bundle)
        .env("TTRPC_ADDRESS", "/run/c.sock.ttrpc")
        .env("GOMAXPROCS", "2")
        .env_remove("MAX_SHIM_VERSION")
        .stdin(input.reopen().unwrap());
    if let Some(version) = max_version {
        command.env("MAX_SHIM_VERSION", version);
    }
    command.output().unwrap()
}

#[test]
fn start_hands_over_to_the_daemon_and_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("task.sock");
    let _daemon = UnixListener::bind(&socket).unwrap();
    let config = dir.path().join("config.toml");
    std::fs::write(&config, format!("run_dir = {:?}\n", dir.path())).unwrap();
    let bundle = dir.path().join("bundle");
    std::fs::create_dir(&bundle).unwrap();
    let address = format!("unix://{}", socket.display());
    for (max_version, expected) in [
        (None, address.clone()),
        (Some("2"), format!(r#"{{"address":"{address}","protocol":"ttrpc","version":2}}"#)),
    ] {
        let output = start(&bundle, &options(&config), max_version);
        assert_clean(&output);
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
        assert_eq!(std::fs::read_to_string(bundle.join("address")).unwrap(), address);
    }
}

#[test]
fn start_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.toml");
    std::fs::write(&config, format!("run_dir = {:?}\n", dir.path())).unwrap();
    let output = start(dir.path(), &options(&config), Some("2"));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty(), "{:?}", output.stdout);
    assert!(error.contains("systemctl start sandboxer") && error.contains("task.sock"), "{error}");
}

#[test]
fn delete_finds_the_daemon_by_what_start_has_written() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("task.sock");
    std::fs::write(dir.path().join("address"), format!("unix://{}\n", socket.display())).unwrap();
    let (response, requests) = delete_at(dir.path(), &socket, OneContainer::default());
    assert_eq!(requests.len(), 3, "{requests:?}");
    assert_eq!((response.pid, response.exit_status), (42, 7));
}

#[test]
fn wrong_usage_has_an_exit_code_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    for args in [&[][..], &["destroy"], &["-colour", "red", "delete"]] {
        let output = launcher(dir.path(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}
