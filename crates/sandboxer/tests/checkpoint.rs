//! Checkpoints of running pods, and pods that go on from them, with doubles for the VMM and the agent; the files are
//! real.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]

#[path = "checkpoint/cri.rs"]
mod cri;
mod fake_agent;
mod front_double;
mod test_node;

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use fake_agent::FakeAgent;
use front_double::FrontDouble;
use nix::errno::Errno;
use sandboxer::{
    checkpoint::{Checkpoints, Manifest, archive},
    error::PodError,
    front::Front,
    pod::{
        PodHandle,
        container::{NewContainer, Phase},
        recover::{self, Records},
        spec::PodSpec,
    },
    state::PodState,
};
use sandboxer_base::{
    Code,
    clock::now_ns,
    failpoint::{hold, inject},
};
use sandboxer_config::{CheckpointsConfig, Config};
use sandboxer_host::rootfs::Mount;
use sandboxer_protocol::{
    containers::{
        Container, GetContainerRequest, GetContainerResponse,
        containers_server::{Containers, ContainersServer},
    },
    cri::runtime_service_server::RuntimeServiceServer,
};
use sandboxer_vmm_fake::{FakeVmm, Fault};
use test_node::{TestNode, id, phase};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

const NAMESPACE: &str = "shop";

/// Digest of the image that the double of containerd names for a container.
const IMAGE: &str = "sha256:aa";

/// A double of containerd, which knows the images of containers: [`IMAGE`], unless there is another one here.
#[derive(Clone, Default)]
struct FakeContainerd {
    images: Arc<Mutex<HashMap<&'static str, &'static str>>>,
    cri: cri::FakeCri,
}

impl FakeContainerd {
    /// Answers at the socket of the containerd with this ttrpc socket.
    fn serve(&self, ttrpc: &Path) {
        fs::create_dir_all(ttrpc.parent().unwrap()).unwrap();
        let listener = UnixListener::bind(ttrpc.with_extension("")).unwrap();
        let server = Server::builder().add_service(ContainersServer::new(self.clone()));
        let server = server.add_service(RuntimeServiceServer::new(self.cri.clone()));
        tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    }
}

#[tonic::async_trait]
impl Containers for FakeContainerd {
    async fn get(
        &self,
        request: tonic::Request<GetContainerRequest>,
    ) -> Result<tonic::Response<GetContainerResponse>, tonic::Status> {
        assert_eq!(request.metadata().get("containerd-namespace").unwrap(), "k8s.io");
        let id = request.into_inner().id;
        let image = self.images.lock().unwrap().get(id.as_str()).copied().unwrap_or(IMAGE);
        let kept =
            serde_json::json!({"Version": "v1", "Metadata": {"ID": id, "ImageRef": image}}).to_string();
        let any = prost_types::Any { type_url: "github.com/containerd/cri".into(), value: kept.into_bytes() };
        let extensions = [("io.cri-containerd.container.metadata".to_owned(), any)].into();
        Ok(tonic::Response::new(GetContainerResponse { container: Some(Container { id, extensions }) }))
    }
}

/// Returns a node, and the agent of all its guests.
fn node() -> (TestNode, FakeAgent) {
    configured(|_| ())
}

fn configured(change: impl FnOnce(&mut CheckpointsConfig)) -> (TestNode, FakeAgent) {
    behind(change, Front::none)
}

fn behind(
    change: impl FnOnce(&mut CheckpointsConfig),
    fronts: impl Fn() -> Arc<Front> + Send + Sync + 'static,
) -> (TestNode, FakeAgent) {
    beside(Some(&FakeContainerd::default()), change, fronts)
}

/// As [`behind`], beside this containerd.
fn beside(
    containerd: Option<&FakeContainerd>,
    change: impl FnOnce(&mut CheckpointsConfig),
    fronts: impl Fn() -> Arc<Front> + Send + Sync + 'static,
) -> (TestNode, FakeAgent) {
    let agent = FakeAgent::default();
    let guests = agent.clone();
    let vmm = Arc::new(FakeVmm::new(move |guest| guests.serve(guest)));
    let configured = |config: &mut Config| {
        config.templates.enabled = false;
        // What a VM depends on is hashed. The state directory does not exist yet.
        let guest = config.state_dir.with_file_name("guest");
        fs::write(&guest, "a kernel").unwrap();
        (config.vm.kernel, config.vm.initramfs) = (guest.clone(), guest);
        if let Some(containerd) = containerd {
            let ttrpc = config.state_dir.with_file_name("containerd").join("grpc.sock.ttrpc");
            containerd.serve(&ttrpc);
            config.containerd_ttrpc = Some(ttrpc);
        }
        change(&mut config.checkpoints);
    };
    (TestNode::behind(vmm, configured, fronts), agent)
}

fn spec(name: &str, from: Option<&str>) -> PodSpec {
    PodSpec {
        namespace: NAMESPACE.to_owned(),
        restore_from: from.map(|name| name.parse().unwrap()),
        ..PodSpec::plain(name.parse().unwrap(), 1, 128)
    }
}

/// Returns a container as containerd's CRI describes it.
fn named(test: &TestNode, id: &str, name: &str, program: &str) -> NewContainer {
    let new = test.container(id, program);
    let path = new.bundle.join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    spec["annotations"] = serde_json::json!({
        "io.kubernetes.cri.container-name": name,
        "io.kubernetes.cri.image-name": "registry/counter:1",
    });
    fs::write(&path, spec.to_string()).unwrap();
    new
}

/// Returns a pod with two containers that run.
async fn running(test: &TestNode) -> PodHandle {
    let pod = test.pod_of(spec("source", None));
    pod.start().await.unwrap();
    for (container, name) in [("c1", "counter"), ("c2", "beside")] {
        pod.create_container(named(test, container, name, "count")).await.unwrap();
        pod.start_process(id(container), None).await.unwrap();
    }
    pod
}

fn dir(test: &TestNode, name: &str) -> PathBuf {
    test.dir.path().join("state/checkpoints").join(NAMESPACE).join(name)
}

fn refused<T: std::fmt::Debug>(result: Result<T, PodError>, code: Code, says: &str) {
    let error = result.unwrap_err();
    assert!(error.to_string().contains(says), "{says:?} is not in {error}");
    assert_eq!(error.code(), code, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_goes_on_in_two_copies_whose_containers_wait_for_their_start() {
    let (test, agent) = node();
    let source = running(&test).await;
    let manifest = source.checkpoint("warm".into()).await.unwrap();
    assert_eq!(manifest.containers.len(), 2);
    assert!(agent.frozen.lock().unwrap().is_empty(), "the source's containers stay frozen");
    assert_eq!(phase(&source, "c1").await, Phase::Running);
    for path in [dir(&test, "warm"), dir(&test, "warm").join("checkpoint.json")] {
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "others can open {}", path.display());
    }
    refused(source.checkpoint("warm".into()).await, Code::AlreadyExists, "there is one of this name");

    for copy in ["one", "two"] {
        let pod = test.pod_of(spec(copy, Some("warm")));
        pod.start().await.unwrap();
        for (n, name) in ["counter", "beside"].into_iter().enumerate() {
            let container = format!("{copy}-{n}");
            pod.create_container(named(&test, &container, name, "count")).await.unwrap();
            assert_eq!(phase(&pod, &container).await, Phase::Created);
            pod.start_process(id(&container), None).await.unwrap();
            assert_eq!(phase(&pod, &container).await, Phase::Running);
        }
        // A container that ended is made again like any other.
        pod.signal(id(&format!("{copy}-0")), None, 9, false).await.unwrap();
        pod.create_container(named(&test, &format!("{copy}-again"), "counter", "count")).await.unwrap();
    }
    let adopted: Vec<_> = agent.adoptions.lock().unwrap().iter().map(|(_, of)| of.clone()).collect();
    assert_eq!(adopted, ["c1", "c2", "c1", "c2"]);
    let keys: std::collections::HashSet<_> = test
        .node
        .journal
        .records()
        .unwrap()
        .into_iter()
        .map(|record| record.unwrap().link_key.to_hex())
        .collect();
    assert_eq!(keys.len(), 3, "copies have a key in common");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_by_name_and_leaves_nothing() {
    let (test, _) = node();
    let source = running(&test).await;
    source.checkpoint("warm".into()).await.unwrap();
    let other = |change: fn(&mut PodSpec)| {
        let mut spec = spec("copy", Some("warm"));
        change(&mut spec);
        spec
    };
    for (code, says, spec) in [
        (Code::NotFound, "checkpoint shop/cold: there is none", spec("copy", Some("cold"))),
        (Code::NotFound, "checkpoint bank/warm: there is none", other(|spec| spec.namespace = "bank".into())),
        (Code::FailedPrecondition, "1 vCPU, 128 MiB", other(|spec| spec.memory_mib = 256)),
        (Code::FailedPrecondition, "each other's processes", other(|spec| spec.shared_pids = true)),
    ] {
        let pod = test.pod_of(spec);
        refused(pod.start().await, code, says);
        assert_eq!(pod.stopped().await.unwrap().state, PodState::Stopped);
        pod.remove().await.unwrap();
        assert_eq!(test.vmm.running().len(), 1, "{says}: a VM is left");
    }
    test.vmm.upgrade("9");
    let pod = test.pod_of(spec("copy", Some("warm")));
    refused(pod.start().await, Code::FailedPrecondition, "it was made with VMM 0, and here is 9");
    pod.remove().await.unwrap();
    test.vmm.upgrade("0");

    let pod = test.pod_of(spec("copy", Some("warm")));
    pod.start().await.unwrap();
    for (says, name, program) in [
        ("it has no container \"third\": it has counter, beside", "third", "count"),
        (
            "container \"counter\" is another one: its command is [\"sleep\"], and was [\"count\"]",
            "counter",
            "sleep",
        ),
    ] {
        let created = pod.create_container(named(&test, "wrong", name, program)).await;
        refused(created, Code::FailedPrecondition, says);
        refused(pod.process(id("wrong"), None).await, Code::NotFound, "wrong");
    }
    pod.create_container(named(&test, "right", "counter", "count")).await.unwrap();
    refused(pod.checkpoint("next".into()).await, Code::FailedPrecondition, "not all of the checkpoint");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_another_one_under_the_same_name_is_refused() {
    let containerd = FakeContainerd::default();
    let (test, _) = beside(Some(&containerd), |_| (), Front::none);
    let source = running(&test).await;
    source.checkpoint("warm".into()).await.unwrap();
    containerd.images.lock().unwrap().insert("pulled-again", "sha256:bb");
    let pod = test.pod_of(spec("copy", Some("warm")));
    pod.start().await.unwrap();
    refused(
        pod.create_container(named(&test, "pulled-again", "counter", "count")).await,
        Code::FailedPrecondition,
        "container \"counter\" is another one: its image registry/counter:1 is sha256:bb, and was sha256:aa",
    );
    pod.create_container(named(&test, "as-before", "counter", "count")).await.unwrap();
}

/// Gives a container the image that is in this directory, as the snapshotter overlayfs does.
fn of_layer(mut new: NewContainer, layer: &Path) -> NewContainer {
    fs::create_dir_all(layer).unwrap();
    fs::write(layer.join("file"), "content").unwrap();
    new.mounts = vec![Mount {
        fstype: "overlay".into(),
        source: "overlay".into(),
        options: vec![format!("lowerdir={}", layer.display())],
    }];
    new
}

#[tokio::test(flavor = "multi_thread")]
async fn without_containerds_word_an_image_is_known_by_its_layers() {
    let (test, _) = beside(None, |_| (), Front::none);
    let layers = test.dir.path().join("layers");
    let source = test.pod_of(spec("source", None));
    source.start().await.unwrap();
    let new = of_layer(named(&test, "c1", "counter", "count"), &layers.join("1"));
    source.create_container(new).await.unwrap();
    source.start_process(id("c1"), None).await.unwrap();
    source.checkpoint("warm".into()).await.unwrap();
    let pod = test.pod_of(spec("copy", Some("warm")));
    pod.start().await.unwrap();
    let other = of_layer(named(&test, "d1", "counter", "count"), &layers.join("2"));
    refused(
        pod.create_container(other).await,
        Code::FailedPrecondition,
        "cannot tell that its image registry/counter:1 is the saved one: its layers are not those",
    );
    // A directory says nothing of the image.
    let other = named(&test, "d2", "counter", "count");
    refused(pod.create_container(other).await, Code::FailedPrecondition, "set containerd.ttrpc");
    let mut same = named(&test, "d3", "counter", "count");
    same.mounts = vec![Mount {
        fstype: "overlay".into(),
        source: "overlay".into(),
        options: vec![format!("lowerdir={}", layers.join("1").display())],
    }];
    pod.create_container(same).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_was_changed_is_refused_and_can_be_removed() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 4] = [
        ("memory is damaged: checksum mismatch", |dir| flip_bit(&dir.join("memory"))),
        ("state is damaged: checksum mismatch", |dir| flip_bit(&dir.join("state"))),
        ("its manifest is damaged", |dir| flip_bit(&dir.join("checkpoint.json"))),
        ("its format is 2, this daemon knows 1", |dir| {
            let path = dir.join("checkpoint.json");
            let text = fs::read_to_string(&path).unwrap();
            fs::write(path, text.replacen("\"format\":1", "\"format\":2", 1)).unwrap();
        }),
    ];
    let (test, _) = node();
    let source = running(&test).await;
    for (says, damage) in damages {
        source.checkpoint("warm".into()).await.unwrap();
        // It is in memory now, and checked again nevertheless.
        drop(test.node.checkpoints.load(NAMESPACE, "warm").await.unwrap());
        damage(&dir(&test, "warm"));
        let pod = test.pod_of(spec("copy", Some("warm")));
        refused(pod.start().await, Code::FailedPrecondition, says);
        pod.remove().await.unwrap();
        let problem = test.node.checkpoints.verify(NAMESPACE, "warm").unwrap().manifest.unwrap_err();
        assert!(problem.contains(says), "{problem}");
        test.node.checkpoints.remove(NAMESPACE, "warm").unwrap();
        assert!(test.node.checkpoints.list().unwrap().is_empty());
    }
    refused(test.node.checkpoints.remove(NAMESPACE, "warm"), Code::NotFound, "there is none");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_be_saved_goes_on_and_leaves_no_file() {
    let (test, agent) = node();
    test.vmm.inject(Fault::FailsToSave);
    let source = running(&test).await;
    refused(source.checkpoint("warm".into()).await, Code::Internal, "injected refusal");
    assert!(agent.frozen.lock().unwrap().is_empty(), "its containers stay frozen");
    assert_eq!(fs::read_dir(dir(&test, "warm").parent().unwrap()).unwrap().count(), 0);
    for bad in ["", "../x", ".hidden"] {
        refused(source.checkpoint(bad.into()).await, Code::InvalidArgument, "identifier");
    }
    source.signal(id("c2"), None, 9, false).await.unwrap();
    let mut view = source.process(id("c2"), None).await.unwrap();
    view.phase.wait_for(|phase| phase.exit().is_some()).await.unwrap();
    refused(source.checkpoint("warm".into()).await, Code::FailedPrecondition, "container c2 is exited");
    source.stop().await.unwrap();
    refused(source.checkpoint("warm".into()).await, Code::FailedPrecondition, "stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_saved_last_ends_without_running_again_and_goes_on_if_it_was_not_saved() {
    let (test, agent) = node();
    let source = running(&test).await;
    let at = test.dir.path().to_str().unwrap();
    {
        let _full = inject("a checkpoint is written", at, Errno::ENOSPC as i32, 1);
        refused(source.checkpoint_last("warm".into()).await, Code::Internal, "No space left on device");
    }
    assert!(agent.frozen.lock().unwrap().is_empty(), "its containers stay frozen");
    assert_eq!(phase(&source, "c1").await, Phase::Running);
    source.checkpoint("first".into()).await.unwrap();

    source.checkpoint_last("warm".into()).await.unwrap();
    assert_eq!(source.stopped().await.unwrap().state, PodState::Stopped);
    assert_eq!(agent.frozen.lock().unwrap().len(), 2, "its containers went on after they were saved");
    assert!(test.vmm.running().is_empty());
    test.node.checkpoints.verify(NAMESPACE, "warm").unwrap().manifest.unwrap();
    source.remove().await.unwrap();
    let pod = test.pod_of(spec("copy", Some("warm")));
    pod.start().await.unwrap();
    pod.create_container(named(&test, "d1", "counter", "count")).await.unwrap();
}

fn exported(test: &TestNode, name: &str) -> Vec<u8> {
    let mut archive = Vec::new();
    let held = test.node.checkpoints.hold(NAMESPACE, name).unwrap();
    refused(test.node.checkpoints.remove(NAMESPACE, name), Code::FailedPrecondition, "restored or exported");
    archive::export(&held, &mut archive).unwrap();
    archive
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exported_checkpoint_goes_on_at_another_node_and_under_another_name() {
    let (test, _) = node();
    let source = running(&test).await;
    source.checkpoint("warm".into()).await.unwrap();
    let archive = exported(&test, "warm");
    let (other, _) = node();
    let all = &other.node.checkpoints;
    let made = archive::import(all, None, Some(id("cold")), &*archive).unwrap();
    assert_eq!((made.namespace.as_str(), made.name.as_str()), (NAMESPACE, "cold"));
    archive::import(all, Some(id("bank")), None, &*archive).unwrap();
    refused(
        archive::import(all, Some(id("bank")), None, &*archive),
        Code::AlreadyExists,
        "checkpoint bank/warm: there is one of this name",
    );
    for (namespace, name) in [(NAMESPACE, "cold"), ("bank", "warm")] {
        let manifest = all.verify(namespace, name).unwrap().manifest.unwrap();
        let source = test.node.checkpoints.view(NAMESPACE, "warm").unwrap().manifest.unwrap();
        assert_eq!(manifest.files, source.files);
        let at = other.dir.path().join("state/checkpoints").join(namespace).join(name);
        let disks = manifest.containers.iter().flat_map(|container| &container.disks);
        assert!(disks.clone().count() > 0 && disks.into_iter().all(|disk| disk.path.starts_with(&at)));
        for file in fs::read_dir(&at).unwrap() {
            assert_eq!(file.unwrap().metadata().unwrap().permissions().mode() & 0o077, 0);
        }
    }
    let pod = other.pod_of(spec("copy", Some("cold")));
    pod.start().await.unwrap();
    pod.remove().await.unwrap();
    other.vmm.upgrade("9");
    let pod = other.pod_of(spec("copy", Some("cold")));
    refused(pod.start().await, Code::FailedPrecondition, "it was made with VMM 0, and here is 9");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_is_damaged_or_made_up_is_refused_and_leaves_nothing() {
    let (test, _) = node();
    let source = running(&test).await;
    let manifest = *source.checkpoint("warm".into()).await.unwrap();
    let whole = exported(&test, "warm");
    let (other, _) = node();
    let refuse = |archive: &[u8], code, says: &str| {
        let all = &other.node.checkpoints;
        refused(archive::import(all, None, None, archive), code, says);
        assert!(all.list().unwrap().is_empty(), "{says}");
        let left = fs::read_dir(dir(&other, "warm").parent().unwrap()).map_or(0, Iterator::count);
        assert_eq!(left, 0, "{says}");
    };
    for at in (0..whole.len()).step_by(whole.len() / 50).chain(whole.len() - 9..whole.len()) {
        refuse(&whole[..at], Code::InvalidArgument, "it is cut off");
    }
    refuse(&[whole.as_slice(), b"x"].concat(), Code::InvalidArgument, "there is something after its end");
    refuse(b"\x7fELF, and then some more of it", Code::InvalidArgument, "does not begin like");
    let flipped = |at: usize| {
        let mut archive = whole.clone();
        archive[at] ^= 1;
        archive
    };
    refuse(&flipped(24), Code::InvalidArgument, "its format is 0, this daemon knows 1");
    refuse(&flipped(25), Code::InvalidArgument, "at most 4194304 are read");
    refuse(&flipped(200), Code::InvalidArgument, "its manifest is damaged");
    // The last byte of the last page.
    refuse(&flipped(whole.len() - 9), Code::InvalidArgument, "is damaged: checksum mismatch");

    type Change = fn(&mut Manifest);
    let changes: [(&str, Change); 7] = [
        ("has a file \"authorized_keys\", which is not known", |manifest| {
            let file = manifest.files["memory"].clone();
            manifest.files.insert("authorized_keys".into(), file);
        }),
        ("has the file name \"../../../etc/passwd\"", |manifest| {
            let file = manifest.files["memory"].clone();
            manifest.files.insert("../../../etc/passwd".into(), file);
        }),
        ("has no file \"memory\"", |manifest| drop(manifest.files.remove("memory"))),
        ("has no file \"disk-", |manifest| manifest.files.retain(|name, _| !name.starts_with("disk-"))),
        ("a container has a disk \"x/../../../passwd\", which is not among the VM's", |manifest| {
            let mut disk = manifest.containers.iter().find_map(|one| one.disks.first()).unwrap().clone();
            disk.serial = "x/../../../passwd".into();
            manifest.containers[0].disks.push(disk);
        }),
        ("at most 134217728 are expected", |manifest| {
            manifest.files.get_mut("memory").unwrap().bytes = 1 << 40;
        }),
        ("more pages than expected", |manifest| manifest.files.get_mut("memory").unwrap().stored = 1),
    ];
    for (says, change) in changes {
        let mut made_up = manifest.clone();
        change(&mut made_up);
        let text = made_up.to_text().unwrap();
        let length = u32::from_be_bytes(whole[25..29].try_into().unwrap()) as usize;
        let lengths = (text.len() as u32).to_be_bytes();
        let archive = [&whole[..25], &lengths, &text, &whole[29 + length..]].concat();
        refuse(&archive, Code::InvalidArgument, says);
    }
    let _full = inject("a file of an archive is written", other.dir.path().to_str().unwrap(), 28, 1);
    refuse(&whole, Code::Internal, "No space left on device");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_room_is_refused_before_the_pause_and_names_what_can_be_removed() {
    // The memory that the VM is taken to have touched is that of this process.
    let (test, agent) = configured(|config| config.most_bytes = 1 << 20);
    let source = running(&test).await;
    refused(
        source.checkpoint("warm".into()).await,
        Code::FailedPrecondition,
        "0 of at most 1 MiB (checkpoints.max_mib) are taken: raise checkpoints.max_mib",
    );
    assert!(agent.ever_frozen.lock().unwrap().is_empty(), "it was paused");
    assert_eq!(test.node.checkpoints.size(), (0, 0));

    // What it takes in the end counts.
    let (test, _) = configured(|config| config.most_bytes = 1 << 30);
    let source = running(&test).await;
    let manifest = source.checkpoint("warm".into()).await.unwrap();
    let one = manifest.stored_bytes();
    assert_eq!(test.node.checkpoints.size(), (1, one));
    let archive = exported(&test, "warm");
    let (small, _) = configured(|config| config.most_bytes = one * 2);
    let all = &small.node.checkpoints;
    for name in ["a", "b"] {
        archive::import(all, None, Some(id(name)), &*archive).unwrap();
    }
    let refuse = |all: &Arc<Checkpoints>| {
        let refusal = archive::import(all, None, Some(id("c")), &*archive);
        refused(refusal, Code::FailedPrecondition, "remove checkpoints, the oldest are shop/a (");
    };
    refuse(all);
    // The next daemon counts them, too.
    refuse(&small.restarted().checkpoints);
    all.remove(NAMESPACE, "a").unwrap();
    archive::import(all, None, Some(id("c")), &*archive).unwrap();
    assert_eq!(all.size(), (2, one * 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_checkpoint_is_removed_unless_it_is_being_restored() {
    const HOUR: u64 = 3_600_000_000_000;
    let (test, _) = configured(|config| config.max_age = Some(Duration::from_secs(3600)));
    let source = running(&test).await;
    source.checkpoint("old".into()).await.unwrap();
    source.checkpoint("used".into()).await.unwrap();
    let all = &test.node.checkpoints;
    let names = |all: &Checkpoints| -> Vec<String> {
        all.list().unwrap().into_iter().map(|view| view.name).collect()
    };
    let now = now_ns();
    all.remove_aged(now + HOUR / 2);
    assert_eq!(names(all), ["old", "used"]);
    let held = all.load(NAMESPACE, "used").await.unwrap();
    all.remove_aged(now + 2 * HOUR);
    assert_eq!(names(all), ["used"]);
    drop(held);
    let later = test.restarted();
    later.checkpoints.remove_aged(now + HOUR / 2);
    assert_eq!(names(&later.checkpoints), ["used"]);
    later.checkpoints.remove_aged(now + 2 * HOUR);
    assert!(names(&later.checkpoints).is_empty());
    assert_eq!(later.checkpoints.size(), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_namespace_goes_on_only_where_that_is_configured_and_each_init_gets_its_signal() {
    let (test, agent) = configured(|config| config.share_from = vec![NAMESPACE.to_owned()]);
    let source = running(&test).await;
    source.checkpoint("warm".into()).await.unwrap();
    let other = |id: &str, from: &str| PodSpec {
        namespace: "bank".into(),
        restore_namespace: Some(from.parse().unwrap()),
        restore_signal: Some(10),
        ..spec(id, Some("warm"))
    };
    let pod = test.pod_of(other("secret", "vault"));
    refused(pod.start().await, Code::FailedPrecondition, "checkpoints.share_from has no \"vault\"");
    let pod = test.pod_of(PodSpec { restore_namespace: None, ..other("own", "bank") });
    refused(pod.start().await, Code::NotFound, "checkpoint bank/warm: there is none");
    let pod = test.pod_of(other("copy", NAMESPACE));
    pod.start().await.unwrap();
    pod.create_container(named(&test, "d1", "counter", "count")).await.unwrap();
    pod.create_container(named(&test, "d2", "beside", "count")).await.unwrap();
    assert_eq!(*agent.restore_signals.lock().unwrap(), [10, 10]);
    let counts = &test.node.checkpoints.counts;
    assert_eq!(counts.saves.named(), [("ok", 1), ("failed", 0)]);
    assert_eq!(counts.restores.named(), [("ok", 1), ("failed", 2)]);
    assert_eq!(counts.pauses().counts.iter().sum::<u64>(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_daemon_adopts_what_waits_and_removes_what_is_unfinished() {
    let (test, agent) = node();
    let source = running(&test).await;
    source.checkpoint("warm".into()).await.unwrap();
    fs::create_dir(dir(&test, ".half")).unwrap();
    let pod = test.pod_of(spec("copy", Some("warm")));
    pod.start().await.unwrap();
    pod.create_container(named(&test, "d1", "counter", "count")).await.unwrap();

    // The guests of the double share one agent, in which the next daemon would find the source's containers.
    source.remove().await.unwrap();
    let later = test.killed([pod]);
    assert!(!dir(&test, ".half").exists());
    assert_eq!(recover::recover(&later, Records::read(&later).unwrap()).await.alive, 1);
    let pod = later.registry.pod(&id("copy")).unwrap();
    assert_eq!(phase(&pod, "d1").await, Phase::Created);
    pod.start_process(id("d1"), None).await.unwrap();
    pod.create_container(named(&test, "d2", "beside", "count")).await.unwrap();
    let last = agent.adoptions.lock().unwrap().last().cloned();
    assert_eq!(last, Some(("d2".to_owned(), "c2".to_owned())));
}

/// Waits until work is held where it was to be.
async fn reached(held: &sandboxer_base::failpoint::Injection) {
    let waiting = async {
        while !held.is_used_up() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("it does not come by that point");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_while_it_saves_leaves_a_running_pod_and_whole_checkpoints() {
    for (point, last, saved) in [
        ("the containers of a pod that is saved are frozen", false, false),
        ("the VM of a pod is saved", false, false),
        ("the disks of a pod are saved", true, false),
        ("a saved pod goes on", false, false),
        ("a saved pod is about to end", true, true),
    ] {
        let front = FrontDouble::default();
        let fronts = front.clone();
        let (test, agent) = behind(|_| (), move || fronts.next());
        let source = running(&test).await;
        source.checkpoint("first".into()).await.unwrap();
        let held = hold(point, test.dir.path().to_str().unwrap());
        let saving = tokio::spawn({
            let source = source.clone();
            async move {
                match last {
                    true => source.checkpoint_last("warm".into()).await,
                    false => source.checkpoint("warm".into()).await,
                }
            }
        });
        reached(&held).await;
        drop(held);
        saving.abort();
        let _ = saving.await;
        let later = test.killed([source]);
        assert_eq!(recover::recover(&later, Records::read(&later).unwrap()).await.alive, 1, "{point}");
        let pod = later.registry.pod(&id("source")).unwrap();
        assert_eq!(pod.status().state, PodState::Ready, "{point}");
        for container in ["c1", "c2"] {
            assert_eq!(phase(&pod, container).await, Phase::Running, "{point}");
        }
        assert!(agent.frozen.lock().unwrap().is_empty(), "{point}: its containers stay frozen");
        assert!(!front.keys().iter().any(|key| key.starts_with("saving")), "{point}: {:?}", front.keys());
        let all = &later.checkpoints;
        let names: Vec<_> = all.list().unwrap().into_iter().map(|view| view.name).collect();
        assert_eq!(names, if saved { &["first", "warm"][..] } else { &["first"] }, "{point}");
        for name in names {
            all.verify(NAMESPACE, &name).unwrap().manifest.unwrap();
        }
        let left = fs::read_dir(dir(&test, "first").parent().unwrap()).unwrap();
        assert_eq!(left.count(), if saved { 2 } else { 1 }, "{point}: something half-made is left");
        pod.checkpoint("again".into()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_while_it_restores_leaves_the_copy_or_nothing() {
    for point in ["a saved container is about to be adopted", "a saved container is adopted"] {
        let front = FrontDouble::default();
        let fronts = front.clone();
        let (test, agent) = behind(|_| (), move || fronts.next());
        let source = running(&test).await;
        source.checkpoint("warm".into()).await.unwrap();
        let copy = test.pod_of(spec("copy", Some("warm")));
        copy.start().await.unwrap();
        // The guests of the double share one agent, in which the next daemon would find the source's containers.
        source.remove().await.unwrap();
        let held = hold(point, test.dir.path().to_str().unwrap());
        let creating = tokio::spawn({
            let (copy, new) = (copy.clone(), named(&test, "d1", "counter", "count"));
            async move { copy.create_container(new).await }
        });
        reached(&held).await;
        drop(held);
        creating.abort();
        let _ = creating.await;
        let later = test.killed([copy]);
        assert_eq!(recover::recover(&later, Records::read(&later).unwrap()).await.alive, 1, "{point}");
        assert!(!front.keys().iter().any(|key| key.starts_with("intent")), "{point}: {:?}", front.keys());
        assert!(!agent.containers().contains(&"d1".to_owned()), "{point}");
        // The manager asks again, with another id, and the saved container is that one.
        let pod = later.registry.pod(&id("copy")).unwrap();
        pod.create_container(named(&test, "d2", "counter", "count")).await.unwrap();
        let last = agent.adoptions.lock().unwrap().last().cloned();
        assert_eq!(last, Some(("d2".to_owned(), "c1".to_owned())), "{point}");
        pod.start_process(id("d2"), None).await.unwrap();
        later.checkpoints.verify(NAMESPACE, "warm").unwrap().manifest.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_at_any_write_costs_the_checkpoint_and_not_the_pod() {
    let (test, agent) = node();
    let source = running(&test).await;
    let at = test.dir.path().to_str().unwrap();
    for point in [
        "a checkpoint begins",
        "a fake VM is saved",
        "a disk is saved",
        "an image is kept",
        "a saved file is synced",
        "a checkpoint is written",
        "a checkpoint gets its name",
    ] {
        for last in [false, true] {
            let full = inject(point, at, Errno::ENOSPC as i32, 1);
            let saved = match last {
                true => source.checkpoint_last("warm".into()).await,
                false => source.checkpoint("warm".into()).await,
            };
            let error = sandboxer_base::chain(&saved.unwrap_err());
            assert!(full.is_used_up(), "{point}");
            assert!(error.contains("No space left on device"), "{point}: {error}");
            assert!(agent.frozen.lock().unwrap().is_empty(), "{point}: its containers stay frozen");
            assert_eq!(phase(&source, "c1").await, Phase::Running, "{point}");
            let left = fs::read_dir(dir(&test, "warm").parent().unwrap()).map_or(0, Iterator::count);
            assert_eq!((left, test.node.checkpoints.size()), (0, (0, 0)), "{point}");
        }
    }
    source.checkpoint("warm".into()).await.unwrap();
}

fn flip_bit(path: &Path) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let at = file.metadata().unwrap().len() - 1;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}
