//! The lifecycle of a pod as its task runs it, with doubles for the VMM and the agent.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod test_node;

use std::{collections::HashSet, fs, sync::Arc, time::Duration};

use fake_agent::{FakeAgent, HANGS, OUTPUT};
use futures::FutureExt;
use sandboxer::{
    events::Kind,
    pod::{
        admission::Work,
        container::Phase,
        quarantine::Quarantine,
        recover::{self, Recovered},
        starts::Starts,
    },
    state::PodState,
};
use sandboxer_base::Code;
use sandboxer_protocol::stage::Stage;
use sandboxer_vmm_fake::{FakeVmm, Fault};
use test_node::{TestNode, id, phase, reader};
use tokio::io::AsyncReadExt;

/// Returns a node whose agents are well-behaved.
fn node() -> TestNode {
    with_boot_timeout(Duration::from_secs(60))
}

fn with_boot_timeout(limit: Duration) -> TestNode {
    let agent = FakeAgent::default();
    let vmm = Arc::new(FakeVmm::new(move |guest| agent.serve(guest)));
    TestNode::with(vmm, |config| config.vm.boot_timeout = limit)
}

#[tokio::test]
async fn a_guests_clock_that_is_wrong_is_set_by_the_hosts() {
    let agent = FakeAgent::default();
    let (behind, guest) = (agent.behind_ns.clone(), agent.clone());
    let test = TestNode::with(Arc::new(FakeVmm::new(move |stream| guest.serve(stream))), |_| {});
    let pod = test.pod("web");
    pod.start().await.unwrap();
    for wrong_ns in [3_600_000_000_000, -3_600_000_000_000, 5_000_000_000] {
        *behind.lock().unwrap() = wrong_ns;
        assert!(pod.sync_clock().await.unwrap(), "it is to be asked again");
        // An upper bound: the time until the answer.
        let left = behind.lock().unwrap().abs();
        assert!(left < 1_000_000_000, "{wrong_ns}: {left} ns are left");
    }
    pod.stop().await.unwrap();
}

#[tokio::test]
async fn a_guest_with_a_clock_of_its_vmms_is_left_alone() {
    let agent = FakeAgent::default().with_a_clock();
    let behind = agent.behind_ns.clone();
    *behind.lock().unwrap() = 5_000_000_000;
    let test = TestNode::with(Arc::new(FakeVmm::new(move |stream| agent.serve(stream))), |_| {});
    let pod = test.pod("web");
    pod.start().await.unwrap();
    assert!(!pod.sync_clock().await.unwrap(), "it need not be asked again");
    assert_eq!(*behind.lock().unwrap(), 5_000_000_000);
    pod.stop().await.unwrap();
}

#[tokio::test]
async fn a_container_runs_prints_and_ends_and_the_pod_goes_without_a_trace() {
    let test = node();
    let pod = test.pod("web");
    pod.start().await.unwrap();
    pod.start().await.unwrap();
    assert_eq!(pod.status().kernel_release, "fake");

    let new = test.container("c1", "true");
    let mut stdout = reader(&new.stdio.stdout);
    pod.create_container(new).await.unwrap();
    assert_eq!(phase(&pod, "c1").await, Phase::Created);
    pod.start_process(id("c1"), None).await.unwrap();
    let mut seen = vec![0; OUTPUT.len()];
    stdout.read_exact(&mut seen).await.unwrap();
    assert_eq!(seen, OUTPUT);

    let running = pod.delete(id("c1"), None).await.unwrap_err();
    assert_eq!(running.code(), Code::FailedPrecondition, "{running}");
    pod.signal(id("c1"), None, 15, false).await.unwrap();
    let mut view = pod.process(id("c1"), None).await.unwrap();
    let ended = view.phase.wait_for(|phase| phase.exit().is_some()).await.unwrap().clone();
    assert_eq!(ended.exit().unwrap().code, 143);
    let again = pod.signal(id("c1"), None, 15, false).await.unwrap_err();
    assert_eq!(again.code(), Code::NotFound, "{again}");
    assert_eq!(pod.delete(id("c1"), None).await.unwrap().code, 143);

    let stages: Vec<_> = pod.inspect().await.unwrap().steps.iter().map(|step| step.stage).collect();
    use Stage::{AgentReady, Boot, Netns, Network, Queue, VmmSpawn};
    assert_eq!(stages, [Netns, Network, Queue, VmmSpawn, Boot, AgentReady]);
    pod.stop().await.unwrap();
    pod.stop().await.unwrap();
    assert_eq!((pod.status().state, pod.status().reason.as_str()), (PodState::Stopped, ""));
    pod.remove().await.unwrap();
    assert!(test.node.registry.pods().is_empty());
    assert!(!test.node.run_dir(pod.id()).exists());
    assert!(test.node.journal.records().unwrap().is_empty());
    assert!(test.vmm.running().is_empty());
}

#[tokio::test]
async fn a_stop_wins_over_a_start_that_would_take_for_ever() {
    for fault in [Fault::NeverReady, Fault::Hangs] {
        let test = node();
        test.vmm.inject(fault);
        let pod = test.pod("slow");
        let starting = tokio::spawn({
            let pod = pod.clone();
            async move { pod.start().await }
        });
        while pod.status().state != PodState::Starting {
            tokio::task::yield_now().await;
        }
        pod.stop().await.unwrap();
        let error = starting.await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::Cancelled, "{error}");
        assert_eq!(pod.status().state, PodState::Stopped);
        assert!(!test.node.run_dir(pod.id()).exists(), "{fault:?} left its run directory");
        assert!(test.vmm.running().is_empty(), "{fault:?} left its VMM");
        let late = pod.start().await.unwrap_err();
        assert_eq!(late.code(), Code::FailedPrecondition, "{late}");
    }
}

/// Hung calls hang for as long as this runs: no time has to pass before the good one's turn.
#[tokio::test]
async fn guests_that_make_no_container_keep_no_place_from_others() {
    const HOSTILE: usize = 10;
    let agent = FakeAgent::default();
    let mut hanging = agent.hanging.subscribe();
    let vmm = Arc::new(FakeVmm::new(move |guest| agent.serve(guest)));
    let test = TestNode::with(vmm, |config| {
        config.concurrent_containers = 2;
        config.vm.agent_timeout = Duration::from_secs(3600);
    });
    for n in 0..HOSTILE {
        let pod = test.pod(&format!("hostile{n}"));
        pod.start().await.unwrap();
        let new = test.container(&format!("{HANGS}{n}"), "true");
        tokio::spawn(async move { pod.create_container(new).await });
    }
    let good = test.pod("good");
    good.start().await.unwrap();
    let (all, made) = (hanging.wait_for(|hanging| *hanging == HOSTILE), test.container("c1", "true"));
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("some wait for a place").unwrap();
    tokio::time::timeout(Duration::from_secs(60), good.create_container(made)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_container_that_waits_for_its_turn_gives_up_when_its_pod_is_stopped_or_ends() {
    let test = node();
    let mut places = Vec::new();
    while let Some(Some(place)) = test.node.admission.enter(Work::Container).now_or_never() {
        places.push(place);
    }
    for ends in [false, true] {
        let pod = test.pod(if ends { "ends" } else { "stopped" });
        pod.start().await.unwrap();
        let mut making = std::pin::pin!(pod.create_container(test.container("c1", "true")));
        assert!(making.as_mut().now_or_never().is_none(), "there was a place left");
        pod.inspect().await.unwrap();
        if ends {
            assert!(test.vmm.crash(pod.id()))
        } else {
            pod.stop().await.unwrap()
        }
        let error =
            tokio::time::timeout(Duration::from_secs(30), making).await.expect("it waits on").unwrap_err();
        assert_eq!(error.code(), Code::Cancelled, "{error}");
        pod.remove().await.unwrap();
    }
    drop(places);
}

#[tokio::test]
async fn a_guest_that_never_gets_ready_is_given_up_for_a_new_one_once() {
    let test = with_boot_timeout(Duration::from_secs(2));
    test.vmm.inject(Fault::NeverReady);
    let pod = test.pod("slow");
    let starting = tokio::spawn({
        let pod = pod.clone();
        async move { pod.start().await }
    });
    while test.vmm.running().is_empty() {
        tokio::task::yield_now().await;
    }
    test.vmm.inject(Fault::None);
    starting.await.unwrap().unwrap();
    let boots = pod.inspect().await.unwrap().steps;
    let boots: Vec<_> = boots.iter().filter(|step| step.stage == Stage::Boot).collect();
    assert_eq!(boots.len(), 2, "{boots:?}");
    assert_eq!(test.vmm.running().len(), 1);

    test.vmm.inject(Fault::NeverReady);
    let never = test.pod("never");
    let error = never.start().await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    assert_eq!(test.vmm.running().len(), 1);
    assert!(!test.node.run_dir(never.id()).exists());
}

#[tokio::test]
async fn a_vmm_that_dies_stops_its_pod_and_every_container_learns_why() {
    let test = node();
    let (pod, other) = (test.pod("doomed"), test.pod("other"));
    pod.start().await.unwrap();
    other.start().await.unwrap();
    let new = test.container("c1", "sleep");
    let mut stderr = reader(&new.stdio.stderr);
    pod.create_container(new).await.unwrap();
    pod.start_process(id("c1"), None).await.unwrap();

    assert!(test.vmm.crash(pod.id()));
    let status = pod.stopped().await.unwrap();
    assert!(status.reason.contains("signal 11") && status.reason.contains("injected crash"), "{status:?}");
    let Phase::Exited(exit) = phase(&pod, "c1").await else { panic!("c1 has not ended") };
    assert_eq!(exit.code, 137);
    assert!(exit.reason.contains("injected crash"), "{exit:?}");
    let mut words = Vec::new();
    stderr.read_to_end(&mut words).await.unwrap();
    assert!(String::from_utf8_lossy(&words).ends_with("injected crash\n"));

    assert_eq!(other.status().state, PodState::Ready);
    pod.delete(id("c1"), None).await.unwrap();
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn a_start_that_fails_says_why_and_leaves_nothing() {
    let test = node();
    test.vmm.inject(Fault::FailsToBoot);
    let pod = test.pod("bad");
    let error = pod.start().await.unwrap_err().to_string();
    assert!(error.contains("injected failure") && error.contains("bad"), "{error}");
    assert!(!test.node.run_dir(pod.id()).exists());
    assert!(pod.status().reason.contains("injected failure"));
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn all_who_wait_for_a_start_that_fails_hear_why() {
    let test = node();
    test.vmm.inject(Fault::FailsToBoot);
    let pod = test.pod("bad");
    let waiting = futures::future::join_all((0..3).map(|_| pod.start())).await;
    for result in waiting {
        let error = result.unwrap_err();
        assert_eq!(error.code(), Code::Internal, "{error}");
        assert!(error.to_string().contains("injected failure"), "{error}");
    }
}

#[tokio::test]
async fn a_container_that_can_not_be_made_leaves_its_id_free_and_no_disk() {
    let test = node();
    let pod = test.pod("web");
    pod.start().await.unwrap();
    test.node.registry.insert_container(&id("c1"), pod.id()).unwrap();
    let error = pod.create_container(test.container("c1", "nosuch")).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    let found = test.node.registry.pod_of(&id("c1"));
    assert_eq!(found.unwrap_err().code(), Code::NotFound, "the id is still taken");
    pod.create_container(test.container("c1", "true")).await.unwrap();
    let twice = pod.create_container(test.container("c1", "true")).await.unwrap_err();
    assert_eq!(twice.code(), Code::AlreadyExists, "{twice}");
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn the_next_daemon_finds_pods_alive_their_containers_running_and_what_died_dead() {
    let test = node();
    let (alive, dead) = (test.pod("alive"), test.pod("dead"));
    for pod in [&alive, &dead] {
        pod.start().await.unwrap();
    }
    let new = test.container("c1", "sleep");
    let stdout = reader(&new.stdio.stdout);
    alive.create_container(new).await.unwrap();
    alive.start_process(id("c1"), None).await.unwrap();

    let next = test.killed([alive, dead]);
    assert!(test.vmm.crash(&id("dead")));
    let recovered = recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    assert_eq!(recovered, Recovered { alive: 1, stopped: 1, ..Default::default() });
    let (alive, dead) = (next.registry.pod(&id("alive")).unwrap(), next.registry.pod(&id("dead")).unwrap());
    assert_eq!((alive.status().state, alive.status().recovered), (PodState::Ready, true));
    assert_eq!(dead.status().state, PodState::Stopped);
    assert!(!dead.status().reason.is_empty());

    assert_eq!(phase(&alive, "c1").await, Phase::Running);
    let mut view = next.registry.pod_of(&id("c1")).unwrap().process(id("c1"), None).await.unwrap();
    alive.signal(id("c1"), None, 9, false).await.unwrap();
    let ended = view.phase.wait_for(|phase| phase.exit().is_some()).await.unwrap().clone();
    assert_eq!(ended.exit().unwrap().code, 137);
    drop(stdout);
    alive.remove().await.unwrap();
    dead.remove().await.unwrap();
    assert!(next.journal.records().unwrap().is_empty());
}

#[tokio::test]
async fn the_next_daemon_ends_containers_that_containerd_has_forgotten_and_only_those() {
    let test = node();
    let pod = test.pod("web");
    pod.start().await.unwrap();
    let mut readers = Vec::new();
    for name in ["kept", "forgotten"] {
        let new = test.container(name, "sleep");
        readers.push(reader(&new.stdio.stdout));
        pod.create_container(new).await.unwrap();
        pod.start_process(id(name), None).await.unwrap();
    }
    let pod_id = pod.id().clone();
    let next = test.killed([pod]);
    // As containerd does with a container whose connection is lost.
    fs::remove_dir_all(test.dir.path().join("bundles/forgotten")).unwrap();
    let mut events = next.events.listen();
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;

    let deleted = async {
        loop {
            let event = events.recv().await.unwrap();
            if event.kind == Kind::ContainerDeleted {
                return event.container.unwrap();
            }
        }
    };
    let deleted = tokio::time::timeout(Duration::from_secs(20), deleted).await.expect("nothing was ended");
    assert_eq!(deleted, id("forgotten"));
    assert!(next.registry.pod_of(&id("forgotten")).is_err());
    let pod = next.registry.pod(&pod_id).unwrap();
    assert_eq!(phase(&pod, "kept").await, Phase::Running);
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn a_pod_whose_start_was_never_answered_goes_with_its_network_and_no_other() {
    let test = node();
    let netns = test.dir.path().join("netns");
    fs::write(&netns, "").unwrap();
    let starts = Starts::of(test.node.clone()).unwrap();
    let mut pods = Vec::new();
    for name in ["forgotten", "of-the-host", "known", "with-network"] {
        let pod = test.pod(name);
        // As left by a daemon that dies before it answers.
        fs::write(test.dir.path().join("run/starts").join(name), "").unwrap();
        pod.start().await.unwrap();
        pods.push(pod);
        if name == "of-the-host" {
            continue;
        }
        // Created without one, since there is nothing to connect here.
        let record = test.dir.path().join(format!("state/pods/{name}.json"));
        let mut fields: serde_json::Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
        let path = if name == "with-network" { &netns } else { &test.dir.path().join("taken-away") };
        fields["spec"]["netns"] = path.to_str().unwrap().into();
        fs::write(&record, fields.to_string()).unwrap();
    }
    // The earlier daemon would reconnect its sessions.
    drop(starts);
    let next = test.killed(pods);
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let starts = Starts::of(next.clone()).unwrap();
    starts.shown(&"known".parse().unwrap());

    let mut events = next.events.listen();
    tokio::task::yield_now().await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(30)).await;
    tokio::time::resume();
    let mut removed = HashSet::new();
    let all = async {
        while removed.len() < 2 {
            let event = events.recv().await.unwrap();
            if event.kind == Kind::PodRemoved {
                removed.insert(event.pod.to_string());
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), all).await.expect("too few were removed");
    assert_eq!(removed, ["forgotten", "of-the-host"].map(String::from).into());
    assert_eq!(next.registry.pods().len(), 2);
    assert_eq!(test.vmm.running().len(), 2);
    for pod in next.registry.pods() {
        pod.remove().await.unwrap();
    }
}

/// containerd cancels its call when the answer is on its way.
#[tokio::test]
async fn a_pod_whose_answer_was_lost_goes_and_one_that_is_known_stays() {
    let test = node();
    let starts = Starts::of(test.node.clone()).unwrap();
    starts.created(test.pod("never-started"));
    for name in ["lost", "known"] {
        let pod = test.pod(name);
        starts.created(pod.clone());
        let noted = starts.begins(&pod).unwrap();
        pod.start().await.unwrap();
        noted.answered();
    }
    starts.shown(&"known".parse().unwrap());
    let mut events = test.node.events.listen();
    tokio::task::yield_now().await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(30)).await;
    tokio::time::resume();
    let removed = async {
        for _ in ["lost", "never-started"] {
            while events.recv().await.unwrap().kind != Kind::PodRemoved {}
        }
    };
    tokio::time::timeout(Duration::from_secs(20), removed).await.expect("a pod is still there");
    let left: Vec<_> = test.node.registry.pods().iter().map(|pod| pod.id().to_string()).collect();
    assert_eq!(left, ["known"]);
    assert_eq!(fs::read_dir(test.dir.path().join("run/starts")).unwrap().count(), 0, "a note is left");
    test.node.registry.pods()[0].remove().await.unwrap();
}

/// containerd cancels its call while the pod starts.
#[tokio::test]
async fn a_pod_whose_start_was_cancelled_goes_with_its_note() {
    let test = node();
    let starts = Starts::of(test.node.clone()).unwrap();
    let pod = test.pod("cancelled");
    let mut events = test.node.events.listen();
    drop(starts.begins(&pod).unwrap());
    let removed = async { while events.recv().await.unwrap().kind != Kind::PodRemoved {} };
    tokio::time::timeout(Duration::from_secs(20), removed).await.expect("the pod is still there");
    assert_eq!(fs::read_dir(test.dir.path().join("run/starts")).unwrap().count(), 0, "a note is left");
}

#[tokio::test]
async fn a_pod_whose_record_is_torn_is_taken_up_by_the_one_before_and_its_guest() {
    let test = node();
    let pod = test.pod("web");
    pod.start().await.unwrap();
    let (older, younger) = (test.container("older", "sleep"), test.container("younger", "sleep"));
    let _readers = [reader(&older.stdio.stdout), reader(&younger.stdio.stdout)];
    pod.create_container(older).await.unwrap();
    pod.start_process(id("older"), None).await.unwrap();
    pod.create_container(younger).await.unwrap();
    let record = test.dir.path().join("state/pods/web.json");
    let whole = fs::read(&record).unwrap();
    fs::write(&record, &whole[..whole.len() / 2]).unwrap();

    let next = test.killed([pod]);
    let recovered = recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    assert_eq!(recovered, Recovered { alive: 1, ..Default::default() });
    let pod = next.registry.pod(&id("web")).unwrap();
    assert_eq!(phase(&pod, "older").await, Phase::Running);
    assert!(next.registry.pod_of(&id("younger")).is_err(), "it is on no record");
    // The failure is reported, and the id can be used again.
    let aside = Quarantine::of(&next.config).list().unwrap().entries;
    let problem = &aside[0].report.as_ref().unwrap().problem;
    assert!(problem.contains("taken up as of the record before"), "{problem}");
    let again = test.container("younger", "sleep");
    let _reader = reader(&again.stdio.stdout);
    pod.create_container(again).await.unwrap();
    assert_eq!(phase(&pod, "younger").await, Phase::Created);
    pod.remove().await.unwrap();
    assert_eq!(fs::read_dir(record.parent().unwrap()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_record_nobody_understands_is_put_aside_not_deleted() {
    let test = node();
    let torn = test.dir.path().join("state/pods/torn.json");
    fs::write(&torn, "{\"version\":1,").unwrap();
    let recovered = recover::recover(&test.node, recover::Records::read(&test.node).unwrap()).await;
    assert_eq!(recovered.quarantined, 1);
    assert!(!torn.exists());
    let left: Vec<_> = fs::read_dir(test.dir.path().join("state/quarantine")).unwrap().collect();
    // The record, and its status.
    assert_eq!(left.len(), 2, "{left:?}");
}
