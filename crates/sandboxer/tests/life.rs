//! Every request has an answer that is true, and every exit is reported: also that of a container that was never started, whose output
//! nobody reads, or whose record cannot be written.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]
#![allow(dead_code, reason = "other tests use all of the doubles")]

mod fake_agent;
mod test_node;

use std::{
    fs,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use fake_agent::{FakeAgent, HANGS, LATE, OUTPUT};
use futures::FutureExt;
use nix::{errno::Errno, sys::stat::Mode, unistd::mkfifo};
use sandboxer::{
    error::PodError,
    events::{Event, Kind},
    pod::{
        PodHandle,
        container::{Exit, KILLED, Phase},
        recover::{self, Recovered},
        starts::Starts,
    },
    state::PodState,
};
use sandboxer_base::{Code, failpoint::inject};
use sandboxer_vmm_fake::FakeVmm;
use test_node::{TestNode, id, phase, reader};
use tokio::{io::AsyncReadExt, sync::broadcast::Receiver, time::timeout};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);
/// Errors of a host that is short of something, or whose disk fails.
const ERRORS: [Errno; 4] = [Errno::ENOSPC, Errno::EIO, Errno::EMFILE, Errno::EROFS];

fn node(agent: &FakeAgent) -> TestNode {
    let agent = agent.clone();
    let vmm = Arc::new(FakeVmm::new(move |guest| agent.serve(guest)));
    TestNode::with(vmm, |config| config.vm.agent_timeout = Duration::from_millis(500))
}

/// Returns a started pod with a running container.
async fn running(test: &TestNode, name: &str) -> PodHandle {
    let pod = test.pod("web");
    pod.start().await.unwrap();
    make(test, &pod, name).await.unwrap();
    pod.start_process(id(name), None).await.unwrap();
    pod
}

/// Creates a container, as the task service does.
async fn make(test: &TestNode, pod: &PodHandle, name: &str) -> Result<(), PodError> {
    let mut new = test.container(name, "sleep");
    (new.stdio.stdout, new.stdio.stderr) = Default::default();
    test.node.registry.insert_container(&id(name), pod.id()).unwrap();
    pod.create_container(new).await
}

async fn exit(pod: &PodHandle, container: &str) -> Exit {
    let mut view = pod.process(id(container), None).await.unwrap();
    let ended = timeout(LONG, view.phase.wait_for(|phase| phase.exit().is_some())).await;
    ended.expect("its exit is not reported").unwrap().exit().unwrap().clone()
}

async fn until(events: &mut Receiver<Event>, kind: Kind) -> Event {
    let found = async {
        loop {
            let event = events.recv().await.unwrap();
            if event.kind == kind {
                return event;
            }
        }
    };
    timeout(LONG, found).await.unwrap_or_else(|_| panic!("no event {}", kind.as_str()))
}

#[tokio::test]
async fn a_created_container_that_is_killed_has_exited_and_its_pod_lives_on() {
    for signal in [9, 15] {
        let test = node(&FakeAgent::default());
        let pod = running(&test, "sibling").await;
        make(&test, &pod, "c1").await.unwrap();
        let mut events = test.node.events.listen();
        pod.signal(id("c1"), None, signal, true).await.unwrap();
        assert_eq!(exit(&pod, "c1").await.code, 128 + signal);
        assert_eq!(until(&mut events, Kind::ContainerExited).await.container, Some(id("c1")));
        let error = pod.start_process(id("c1"), None).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        // Longer than a guest may take to kill: 6 times the agent's timeout.
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(pod.status().state, PodState::Ready);
        assert_eq!(phase(&pod, "sibling").await, Phase::Running);
        assert_eq!(pod.delete(id("c1"), None).await.unwrap().code, 128 + signal);
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn the_next_daemon_waits_for_a_created_container_too() {
    for killed_meanwhile in [false, true] {
        let agent = FakeAgent::default();
        let test = node(&agent);
        let pod = running(&test, "sibling").await;
        make(&test, &pod, "c1").await.unwrap();
        let next = test.killed([pod]);
        if killed_meanwhile {
            agent.kill("c1");
        }
        recover::recover(&next, recover::Records::read(&next).unwrap()).await;
        let pod = next.registry.pod(&id("web")).unwrap();
        if !killed_meanwhile {
            assert_eq!(phase(&pod, "c1").await, Phase::Created);
            pod.signal(id("c1"), None, 9, false).await.unwrap();
        }
        assert_eq!(exit(&pod, "c1").await.code, KILLED);
        assert_eq!(phase(&pod, "sibling").await, Phase::Running);
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn an_exit_waits_for_nobody_who_reads_and_the_output_for_whoever_does() {
    let printed: Vec<u8> = (0..1 << 20).map(|n: u32| n as u8).collect();
    for is_read in [false, true] {
        let mut agent = FakeAgent::default();
        agent.output = Some(printed.clone().into());
        let test = node(&agent);
        let pod = running(&test, "sibling").await;
        let mut new = test.container("c1", "true");
        new.stdio.stderr = Default::default();
        let mut stdout = reader(&new.stdio.stdout);
        pod.create_container(new).await.unwrap();
        pod.start_process(id("c1"), None).await.unwrap();
        // It has crashed; a client of its output has stopped.
        agent.kill("c1");
        assert_eq!(exit(&pod, "c1").await.code, KILLED);
        let late = pod.signal(id("c1"), None, 9, false).await.unwrap_err();
        assert_eq!(late.code(), Code::NotFound, "{late}");
        let mut seen = Vec::new();
        if is_read {
            timeout(LONG, stdout.read_to_end(&mut seen)).await.expect("it has no end").unwrap();
            assert!(seen == printed, "{} bytes", seen.len());
        }
        let deleted = timeout(LONG, pod.delete(id("c1"), None)).await.expect("nobody reads, and it waits");
        assert_eq!(deleted.unwrap().code, KILLED);
        // What did not pass is lost, and the stream has an end.
        timeout(LONG, stdout.read_to_end(&mut seen)).await.expect("it has no end").unwrap();
        assert!(printed.starts_with(&seen));
        assert_eq!((pod.status().state, phase(&pod, "sibling").await), (PodState::Ready, Phase::Running));
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn the_next_daemon_has_the_output_of_what_was_started_behind_its_back() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "sibling").await;
    let mut new = test.container("c1", "true");
    new.stdio.stderr = Default::default();
    let mut stdout = reader(&new.stdio.stdout);
    test.node.registry.insert_container(&id("c1"), pod.id()).unwrap();
    pod.create_container(new).await.unwrap();
    let next = test.killed([pod]);
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let pod = next.registry.pod(&id("web")).unwrap();
    assert_eq!(phase(&pod, "c1").await, Phase::Created);
    // The start that the daemon before had sent arrives now; the program prints, and exits.
    agent.kill("c1");
    assert_eq!(exit(&pod, "c1").await.code, KILLED);
    let mut seen = Vec::new();
    timeout(LONG, stdout.read_to_end(&mut seen)).await.expect("it has no end").unwrap();
    assert_eq!(String::from_utf8_lossy(&seen), String::from_utf8_lossy(OUTPUT));
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn the_next_daemon_does_not_know_an_exec_that_was_deleted_after_the_last_record() {
    let test = node(&FakeAgent::default());
    let pod = running(&test, "c1").await;
    let process = serde_json::json!({"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}}).to_string();
    let exec = |name| (id("c1"), id(name), process.clone().into_bytes(), Default::default());
    for name in ["e1", "e2"] {
        let (of, exec, process, stdio) = exec(name);
        pod.create_exec(of, exec, process, stdio).await.unwrap();
    }
    // Its record has both.
    make(&test, &pod, "c2").await.unwrap();
    pod.delete(id("c1"), Some(id("e1"))).await.unwrap();
    let next = test.killed([pod]);
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let pod = next.registry.pod(&id("web")).unwrap();
    let gone = pod.process(id("c1"), Some(id("e1"))).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound, "{gone}");
    assert_eq!(*pod.process(id("c1"), Some(id("e2"))).await.unwrap().phase.borrow(), Phase::Created);
    let (of, exec, process, stdio) = exec("e1");
    pod.create_exec(of, exec, process, stdio).await.unwrap();
    pod.remove().await.unwrap();
}

/// Returns a container as the pod's record has it.
fn recorded(test: &TestNode, container: &str) -> Option<serde_json::Value> {
    let record = fs::read(test.dir.path().join("state/pods/web.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    record["containers"].as_array().unwrap().iter().find(|one| one["id"] == container).cloned()
}

#[tokio::test]
async fn a_container_whose_record_cannot_be_written_is_none_and_a_started_one_is_written_later() {
    let points = ["a record is opened", "a record is written", "a record is put in place"];
    for (error, point) in ERRORS.into_iter().flat_map(|error| points.map(|point| (error, point))) {
        let agent = FakeAgent::default();
        let test = node(&agent);
        let part = test.dir.path().to_str().unwrap().to_owned();
        let pod = running(&test, "sibling").await;
        let disks = test.vmm.disks(pod.id());
        let failing = inject(point, &part, error as i32, 1);
        let refused = make(&test, &pod, "c1").await.unwrap_err();
        assert_eq!(refused.code(), Code::Internal, "{refused}");
        assert!(failing.is_used_up(), "{point}");
        assert_eq!(pod.process(id("c1"), None).await.unwrap_err().code(), Code::NotFound);
        assert_eq!((agent.containers(), test.vmm.disks(pod.id())), (vec!["sibling".to_owned()], disks));
        make(&test, &pod, "c1").await.expect("its id is not free");

        // A program that runs cannot be undone.
        let failing = inject(point, &part, error as i32, 1);
        pod.start_process(id("c1"), None).await.unwrap();
        assert!(failing.is_used_up(), "{point}");
        let written = async {
            while recorded(&test, "c1").is_none_or(|container| container["init"]["started"] != true) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(LONG, written).await.expect("the record stays out of date");
        let next = test.killed([pod]);
        recover::recover(&next, recover::Records::read(&next).unwrap()).await;
        let pod = next.registry.pod(&id("web")).unwrap();
        for name in ["sibling", "c1"] {
            assert_eq!(phase(&pod, name).await, Phase::Running, "{point}: {error}");
        }
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn a_running_container_on_no_record_is_killed_before_its_disks_go() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "sibling").await;
    let disks = test.vmm.disks(pod.id());
    let record = test.dir.path().join("state/pods/web.json");
    let before = fs::read(&record).unwrap();
    make(&test, &pod, "lost").await.unwrap();
    pod.start_process(id("lost"), None).await.unwrap();
    assert_ne!(test.vmm.disks(pod.id()), disks);
    let next = test.killed([pod]);
    fs::write(&record, before).unwrap();
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let pod = next.registry.pod(&id("web")).unwrap();
    assert_eq!((agent.containers(), test.vmm.disks(pod.id())), (vec!["sibling".to_owned()], disks));
    assert_eq!(phase(&pod, "sibling").await, Phase::Running);
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn a_guest_that_does_not_remove_a_container_keeps_its_disks() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "c1").await;
    let disks = test.vmm.disks(pod.id());
    pod.signal(id("c1"), None, 9, false).await.unwrap();
    exit(&pod, "c1").await;
    agent.keeps_containers.store(true, Ordering::Relaxed);
    pod.delete(id("c1"), None).await.unwrap_err();
    assert_eq!(test.vmm.disks(pod.id()), disks, "it may use them");
    agent.keeps_containers.store(false, Ordering::Relaxed);
    pod.delete(id("c1"), None).await.unwrap();
    assert!(test.vmm.disks(pod.id()).len() < disks.len());
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn a_creation_whose_caller_has_gone_is_undone_and_a_deletion_waits_for_that() {
    for is_deleted in [false, true] {
        let agent = FakeAgent::default();
        let vmm = agent.clone();
        let test = TestNode::with(Arc::new(FakeVmm::new(move |guest| vmm.serve(guest))), |_| {});
        let pod = running(&test, "sibling").await;
        let disks = test.vmm.disks(pod.id());
        let late = format!("{LATE}-1");
        {
            let mut creating = std::pin::pin!(make(&test, &pod, &late));
            assert!(creating.as_mut().now_or_never().is_none());
            let mut hanging = agent.hanging.subscribe();
            let is_hanging = hanging.wait_for(|hanging| *hanging == 1);
            timeout(LONG, is_hanging).await.expect("the guest is not asked").unwrap();
        }
        let mut deleting = std::pin::pin!(pod.delete(id(&late), None));
        if is_deleted {
            assert!(deleting.as_mut().now_or_never().is_none());
            pod.inspect().await.unwrap();
        }
        agent.goes_on.send_replace(true);
        if is_deleted {
            let exit = timeout(LONG, deleting).await.expect("it is not answered").unwrap();
            assert_eq!(exit.code, KILLED);
        }
        let removed = async {
            while test.node.registry.pod_of(&id(&late)).is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, removed).await.expect("nobody has it, and it stays");
        assert_eq!((agent.containers(), test.vmm.disks(pod.id())), (vec!["sibling".to_owned()], disks));
        assert_eq!(pod.delete(id(&late), None).await.unwrap_err().code(), Code::NotFound);
        make(&test, &pod, &late).await.expect("its id is not free");
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn a_pod_is_removed_after_what_is_being_made_in_it_is_undone() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "sibling").await;
    let name = format!("{HANGS}-1");
    let mut hanging = agent.hanging.subscribe();
    let removed = async {
        hanging.wait_for(|hanging| *hanging == 1).await.unwrap();
        pod.remove().await
    };
    let (created, removed) =
        timeout(LONG, async { tokio::join!(make(&test, &pod, &name), removed) }).await.unwrap();
    removed.unwrap();
    let error = created.unwrap_err();
    assert!(!matches!(error, PodError::Gone(_)), "it was dropped half-way: {error}");
}

#[tokio::test]
async fn a_pod_whose_record_stays_is_not_removed() {
    for error in ERRORS {
        let test = node(&FakeAgent::default());
        let pod = running(&test, "c1").await;
        let failing = inject("a record is removed", test.dir.path().to_str().unwrap(), error as i32, 1);
        let failure = pod.remove().await.unwrap_err();
        assert!(failing.is_used_up() && failure.to_string().contains("web"), "{failure}");
        assert!(test.node.registry.pod(pod.id()).is_ok());
        pod.remove().await.unwrap();
        assert!(test.node.registry.pod(pod.id()).is_err());
        assert!(test.node.journal.records().unwrap().is_empty());
    }
}

#[tokio::test]
async fn limits_are_answered_after_they_are_recorded_and_refused_ones_change_nothing() {
    let test = node(&FakeAgent::default());
    let pod = running(&test, "c1").await;
    let update = |json: &str| pod.update(id("c1"), json.as_bytes().to_vec());
    let failing = inject("a record is opened", test.dir.path().to_str().unwrap(), Errno::ENOSPC as i32, 1);
    update(r#"{"cpu":{"shares":512}}"#).await.unwrap_err();
    assert!(failing.is_used_up());
    update(r#"{"memory":{"limit":67108864}}"#).await.unwrap();
    assert_eq!(recorded(&test, "c1").unwrap()["memory_limit"], 64 << 20);
    update(r#"{"cpu":{"cpus":"0"},"memory":{"limit":1099511627776}}"#).await.unwrap_err();
    update(r#"{"cpu":{"shares":512}}"#).await.unwrap();
    let container = recorded(&test, "c1").unwrap();
    assert_eq!((container.get("cpus"), &container["memory_limit"]), (None, &serde_json::json!(64 << 20)));
    update(r#"{"cpu":{"cpus":"0"}}"#).await.unwrap();
    assert_eq!(recorded(&test, "c1").unwrap()["cpus"], "0");
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn each_time_the_oom_killer_was_there_is_reported_once() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "c1").await;
    let mut events = test.node.events.listen();
    for _ in 0..2 {
        agent.oom_kills.send_modify(|kills| kills.extend(["c1".to_owned(), "unknown".to_owned()]));
        assert_eq!(until(&mut events, Kind::ContainerOutOfMemory).await.container, Some(id("c1")));
    }
    // An exec that ends well has not run out of memory, whatever was before.
    let process = serde_json::json!({"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}});
    let process = process.to_string().into_bytes();
    pod.create_exec(id("c1"), id("e1"), process, Default::default()).await.unwrap();
    pod.start_process(id("c1"), Some(id("e1"))).await.unwrap();
    until(&mut events, Kind::ExecExited).await;
    pod.signal(id("c1"), None, 9, false).await.unwrap();
    let mut kinds = Vec::new();
    while kinds.last() != Some(&Kind::ContainerExited) {
        kinds.push(timeout(LONG, events.recv()).await.unwrap().unwrap().kind);
    }
    assert_eq!(kinds, [Kind::ContainerExited]);
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn an_exec_that_the_front_does_not_note_or_of_a_paused_container_is_none() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "unnoted").await;
    let process = serde_json::json!({"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}});
    let exec = || {
        let process = process.to_string().into_bytes();
        pod.create_exec(id("unnoted"), id("e1"), process, Default::default())
    };
    for error in ERRORS {
        let _failing = inject("the front keeps a note", "exec unnoted e1", error as i32, 1);
        let failure = exec().await.unwrap_err();
        assert_eq!(failure.code(), Code::Internal, "{failure}");
        assert_eq!(agent.execs(), [] as [String; 0], "the guest has it");
    }
    pod.set_paused(id("unnoted"), true).await.unwrap();
    assert_eq!(exec().await.unwrap_err().code(), Code::FailedPrecondition);
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn what_is_deleted_before_its_start_answers_as_with_runc_and_its_end_is_reported() {
    let test = node(&FakeAgent::default());
    let pod = running(&test, "sibling").await;
    make(&test, &pod, "c1").await.unwrap();
    let mut events = test.node.events.listen();
    let process = serde_json::json!({"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}});
    let process = process.to_string().into_bytes();
    pod.create_exec(id("sibling"), id("e1"), process, Default::default()).await.unwrap();
    for (container, exec) in [("sibling", Some(id("e1"))), ("c1", None)] {
        let deleted = pod.delete(id(container), exec).await.unwrap();
        assert_eq!((deleted.code, deleted.at_ns), (0, 0), "{container}");
    }
    let mut seen = Vec::new();
    while seen.last().is_none_or(|(kind, _)| *kind != Kind::ContainerDeleted) {
        let event = timeout(LONG, events.recv()).await.unwrap().unwrap();
        seen.push((event.kind, event.task.and_then(|task| task.exit).map(|(code, _)| code)));
    }
    let expected =
        [(Kind::ExecCreated, None), (Kind::ContainerExited, Some(KILLED)), (Kind::ContainerDeleted, Some(0))];
    assert_eq!(seen, expected);
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn a_pause_is_reported_and_the_exit_of_its_container_ends_it() {
    let test = node(&FakeAgent::default());
    let pod = running(&test, "c1").await;
    let mut events = test.node.events.listen();
    pod.set_paused(id("c1"), true).await.unwrap();
    assert_eq!(until(&mut events, Kind::ContainerPaused).await.container, Some(id("c1")));
    assert!(pod.process(id("c1"), None).await.unwrap().paused);
    // A frozen process can be killed, and nothing is paused then.
    pod.signal(id("c1"), None, 9, false).await.unwrap();
    exit(&pod, "c1").await;
    assert!(!pod.process(id("c1"), None).await.unwrap().paused);
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn what_the_state_of_a_container_does_not_allow_is_answered_as_with_runc() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "c1").await;
    let mut events = test.node.events.listen();
    for paused in [true, false] {
        let unchanged = pod.set_paused(id("c1"), !paused).await.unwrap_err();
        assert_eq!(unchanged.code(), Code::FailedPrecondition, "{unchanged}");
        pod.set_paused(id("c1"), paused).await.unwrap();
    }
    let process = serde_json::json!({"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}});
    let exec = || {
        let process = process.to_string().into_bytes();
        pod.create_exec(id("c1"), id("e1"), process, Default::default())
    };
    exec().await.unwrap();
    for without_terminal in [None, Some(id("e1"))] {
        pod.resize(id("c1"), without_terminal, 80, 24).await.unwrap();
    }
    pod.signal(id("c1"), None, 9, false).await.unwrap();
    until(&mut events, Kind::ContainerExited).await;
    assert_eq!(exec().await.unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(pod.pids(id("c1")).await.unwrap().len(), 1, "a restarted containerd would forget the exit");
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn the_input_of_a_terminal_ends_by_a_request_and_not_with_its_writer() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "sibling").await;
    let mut new = test.container("c1", "sh");
    (new.stdio.stderr, new.stdio.terminal) = (Default::default(), true);
    new.stdio.stdin = new.bundle.join("stdin");
    mkfifo(&new.stdio.stdin, Mode::S_IRWXU).unwrap();
    let writer = fs::OpenOptions::new().read(true).write(true).open(&new.stdio.stdin).unwrap();
    pod.create_container(new).await.unwrap();
    pod.start_process(id("c1"), None).await.unwrap();
    drop(writer);
    let mut ended = agent.ended_inputs.subscribe();
    let early = timeout(Duration::from_millis(300), ended.wait_for(|ended| !ended.is_empty())).await;
    assert!(early.is_err(), "containerd's end would hang it up");
    drop(early);
    pod.close_stdin(id("c1"), None).await.unwrap();
    let ended = ended.wait_for(|ended| ended.iter().any(|name| name == "c1"));
    timeout(LONG, ended).await.expect("the terminal is not hung up").unwrap();
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn an_input_that_is_closed_before_the_start_ends() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "sibling").await;
    let mut new = test.container("c1", "cat");
    new.stdio.stdin = new.bundle.join("stdin");
    mkfifo(&new.stdio.stdin, Mode::S_IRWXU).unwrap();
    let _writer = fs::OpenOptions::new().read(true).write(true).open(&new.stdio.stdin).unwrap();
    pod.create_container(new).await.unwrap();
    pod.close_stdin(id("c1"), None).await.unwrap();
    pod.start_process(id("c1"), None).await.unwrap();
    let mut ended = agent.ended_inputs.subscribe();
    let ended = ended.wait_for(|ended| ended.iter().any(|name| name == "c1"));
    timeout(LONG, ended).await.expect("the program waits for more").unwrap();
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn the_next_daemon_goes_on_with_an_ordered_stop() {
    let agent = FakeAgent::default();
    let test = node(&agent);
    let pod = running(&test, "c1").await;
    let record = test.dir.path().join("state/pods/web.json");
    let next = test.killed([pod]);
    let mut fields: serde_json::Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    fields["status"]["state"] = "stopping".into();
    fs::write(&record, fields.to_string()).unwrap();
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let pod = next.registry.pod(&id("web")).unwrap();
    timeout(LONG, pod.stop()).await.expect("it is not stopped").unwrap();
    assert_eq!(agent.power_offs.load(Ordering::Relaxed), 1, "its data were not written out");
    assert_eq!(exit(&pod, "c1").await.code, KILLED);
    assert!(test.vmm.running().is_empty());
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn many_pods_are_adopted() {
    const PODS: u32 = 80;
    let test = node(&FakeAgent::default());
    let mut pods = Vec::new();
    for n in 0..PODS {
        let pod = test.pod(&format!("p{n}"));
        pod.start().await.unwrap();
        pods.push(pod);
    }
    let next = test.killed(pods);
    let recovered = recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    assert_eq!(recovered, Recovered { alive: PODS, ..Default::default() });
    for pod in next.registry.pods() {
        pod.remove().await.unwrap();
    }
}

/// A namespace that nobody removes keeps no VM, once containerd has shown that it is there and does not know the pod.
#[tokio::test]
async fn a_pod_that_containerd_never_asks_for_goes_although_its_network_stays() {
    let test = node(&FakeAgent::default());
    let starts = Starts::of(test.node.clone()).unwrap();
    let pod = test.pod("left");
    // As left by a daemon that dies before it answers.
    fs::write(test.dir.path().join("run/starts/left"), "").unwrap();
    pod.start().await.unwrap();
    let (netns, record) = (test.dir.path().join("netns"), test.dir.path().join("state/pods/left.json"));
    fs::write(&netns, "").unwrap();
    let mut fields: serde_json::Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    fields["spec"]["netns"] = netns.to_str().unwrap().into();
    fs::write(&record, fields.to_string()).unwrap();
    drop(starts);
    let next = test.killed([pod]);
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let starts = Starts::of(next.clone()).unwrap();

    tokio::time::pause();
    // Without a word of containerd it stays.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(next.registry.pod(&id("left")).is_ok());
    let mut rounds = 0;
    while next.registry.pod(&id("left")).is_ok() {
        starts.shown(&id("other"));
        tokio::time::sleep(Duration::from_secs(20)).await;
        rounds += 1;
        assert!(rounds < 100, "it stays for ever");
    }
    assert!(rounds > 25, "{rounds}: containerd may just have come back");
    tokio::time::resume();
    assert!(test.vmm.running().is_empty());
}
