//! Checkpoints of running pods, and pods that go on from them, with doubles for the VMM and the agent; the files are
//! real.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod test_node;

use std::{
    fs,
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use fake_agent::FakeAgent;
use nix::errno::Errno;
use sandboxer::{
    error::PodError,
    pod::{
        PodHandle,
        container::{NewContainer, Phase},
        recover::{self, Records},
        spec::PodSpec,
    },
    state::PodState,
};
use sandboxer_base::{Code, failpoint::inject};
use sandboxer_config::Config;
use sandboxer_vmm_fake::{FakeVmm, Fault};
use test_node::{TestNode, id, phase};

const NAMESPACE: &str = "shop";

/// Returns a node, and the agent of all its guests.
fn node() -> (TestNode, FakeAgent) {
    let agent = FakeAgent::default();
    let guests = agent.clone();
    let vmm = Arc::new(FakeVmm::new(move |guest| guests.serve(guest)));
    let configured = |config: &mut Config| {
        config.templates.enabled = false;
        // What a VM depends on is hashed. The state directory does not exist yet.
        let guest = config.state_dir.with_file_name("guest");
        fs::write(&guest, "a kernel").unwrap();
        (config.vm.kernel, config.vm.initramfs) = (guest.clone(), guest);
    };
    (TestNode::with(vmm, configured), agent)
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
async fn a_full_disk_costs_the_checkpoint_and_not_the_pod() {
    let (test, agent) = node();
    let source = running(&test).await;
    let _full = inject("a checkpoint is written", test.dir.path().to_str().unwrap(), Errno::ENOSPC as i32, 1);
    refused(
        source.checkpoint("warm".into()).await,
        Code::Internal,
        "checkpoint.json: No space left on device",
    );
    assert!(agent.frozen.lock().unwrap().is_empty(), "its containers stay frozen");
    assert_eq!(fs::read_dir(dir(&test, "warm").parent().unwrap()).unwrap().count(), 0);
    source.checkpoint("warm".into()).await.unwrap();
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

fn flip_bit(path: &Path) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let at = file.metadata().unwrap().len() - 1;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}
