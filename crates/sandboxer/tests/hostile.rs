//! A hostile guest cannot harm its node: it loses at most its own pod; the daemon's memory stays small, and
//! other pods' requests are answered meanwhile.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod hostile_agent;
mod test_node;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use fake_agent::{FakeAgent, OUTPUT};
use futures::FutureExt;
use hostile_agent::{FILE, Nature};
use sandboxer::{
    error::PodError,
    pod::{
        PodHandle,
        container::{KILLED, Phase},
        recover,
    },
    share,
    state::PodState,
};
use sandboxer_base::Code;
use sandboxer_vmm_fake::FakeVmm;
use test_node::{TestNode, id, phase, reader, with_share};
use tokio::io::AsyncReadExt;

/// How long an agent may take to answer a call; the tests wait this long repeatedly.
const AGENT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a guest may take to get ready: long enough to discard 64 MiB of garbage.
const BOOT_TIMEOUT: Duration = Duration::from_secs(60);
/// Pods beside the hostile one.
const GOOD: usize = 10;
/// How much the daemon may grow because of one hostile guest, KiB. Measured together with the double, in which
/// the longest frame of 4 MiB exists twice.
const GROWTH_KIB: u64 = 16 << 10;

/// Most memory of the process that serves a hostile guest's files, KiB.
const SERVER_KIB: u64 = 24 << 10;

/// A node whose next VM has an agent of the given nature; later agents are well-behaved.
struct HostileNode {
    test: TestNode,
    next: Arc<Mutex<Option<Nature>>>,
}

impl HostileNode {
    fn new() -> Self {
        let next: Arc<Mutex<Option<Nature>>> = Arc::default();
        let (agent, chosen) = (FakeAgent::default(), next.clone());
        let vmm = Arc::new(FakeVmm::new(move |guest| match *chosen.lock().unwrap() {
            Some(nature) => hostile_agent::serve(guest, nature),
            None => agent.serve(guest),
        }));
        let test = TestNode::with(vmm, |config| {
            config.vm.boot_timeout = BOOT_TIMEOUT;
            config.vm.agent_timeout = AGENT_TIMEOUT;
        });
        Self { test, next }
    }

    /// Starts a pod whose agent has this nature. Returns the pod and the result of its start.
    async fn start(&self, nature: Nature) -> (PodHandle, Result<(), PodError>) {
        *self.next.lock().unwrap() = Some(nature);
        let pod = self.test.pod("hostile");
        let started = pod.start().await;
        *self.next.lock().unwrap() = None;
        (pod, started)
    }
}

/// Returns this process's peak memory since [`forget_peak`], KiB.
fn peak_kib() -> u64 {
    peak_of("self")
}

/// Returns the peak memory of process `pid` since its start, KiB.
fn peak_of(pid: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Resets the peak to the current value.
fn forget_peak() -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    peak_kib()
}

/// Makes all requests to a good pod, from a container's start to its end.
async fn use_pod(test: &TestNode, pod: &PodHandle, container: &str) {
    let new = test.container(container, "true");
    let mut stdout = reader(&new.stdio.stdout);
    pod.create_container(new).await.unwrap();
    pod.start_process(id(container), None).await.unwrap();
    let mut seen = vec![0; OUTPUT.len()];
    stdout.read_exact(&mut seen).await.unwrap();
    assert_eq!(seen, OUTPUT);
    pod.signal(id(container), None, 15, false).await.unwrap();
    let mut view = pod.process(id(container), None).await.unwrap();
    view.phase.wait_for(|phase| phase.exit().is_some()).await.unwrap();
    pod.delete(id(container), None).await.unwrap();
}

/// Makes the requests of a container's life to a hostile pod; errors are ignored.
async fn provoke(test: &TestNode, pod: &PodHandle, nature: Nature) {
    let mut new = test.container("victim", "true");
    if nature.wants_a_share() {
        let dir = test.dir.path().join("shared");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(FILE), vec![7; 1 << 20]).unwrap();
        new = with_share(new, &dir);
    }
    let stdout = reader(&new.stdio.stdout);
    let created = pod.create_container(new).await;
    assert!(created.is_ok() || !nature.wants_a_share(), "{nature:?}: {created:?}");
    let _ = pod.start_process(id("victim"), None).await;
    let reading = tokio::spawn(async move {
        let mut stdout = stdout;
        let mut sink = vec![0; 64 << 10];
        while stdout.read(&mut sink).await.is_ok_and(|count| count > 0) {}
    });
    for _ in 0..3 {
        let _ = pod.signal(id("victim"), None, 15, false).await;
        let _ = pod.pids(id("victim")).await;
        let _ = pod.stats(None).await;
    }
    if nature.wants_a_share() {
        // As long as the natures above take.
        tokio::time::sleep(2 * AGENT_TIMEOUT).await;
    }
    reading.abort();
}

// One after the other: the memory is that of the whole process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_guest_does_the_daemon_stays_small_and_other_pods_are_served() {
    let node = HostileNode::new();
    let mut good = Vec::new();
    for n in 0..GOOD {
        let pod = node.test.pod(&format!("good{n}"));
        pod.start().await.unwrap();
        good.push(pod);
    }
    for nature in Nature::ALL {
        let before = forget_peak();
        let (hostile, started) = node.start(nature).await;
        match &started {
            Ok(()) => assert!(nature.gets_ready(), "{nature:?} got ready"),
            Err(error) => {
                assert!(!nature.gets_ready(), "{nature:?}: {error}");
                assert!(!hostile.stopped().await.unwrap().reason.is_empty(), "{nature:?}");
            }
        }
        assert!(!hostile.status().kernel_release.contains(char::is_control), "{nature:?}");

        let provoked = provoke(&node.test, &hostile, nature);
        let served = futures::future::join_all(good.iter().enumerate().map(|(n, pod)| {
            let (test, name) = (&node.test, format!("c{n}-{nature:?}"));
            async move { use_pod(test, pod, &name).await }
        }));
        tokio::join!(provoked, served);
        let growth = peak_kib().saturating_sub(before);
        assert!(growth <= GROWTH_KIB, "{nature:?}: the daemon grew by {growth} KiB");
        if nature.wants_a_share() {
            // Its server's memory stays small, too.
            let server = share::server_of(&node.test.node.run_dir(hostile.id())).expect("it serves on");
            let peak = peak_of(&server.to_string());
            assert!(peak <= SERVER_KIB, "{nature:?}: what serves its files grew to {peak} KiB");
        }

        // At most its own pod is lost: the others are unchanged, and it can be stopped and removed like any pod.
        for pod in &good {
            assert_eq!(pod.status().state, PodState::Ready, "{nature:?}");
        }
        hostile.stop().await.unwrap();
        hostile.remove().await.unwrap();
        assert_eq!(node.test.vmm.running().len(), GOOD, "{nature:?} left a VM");
    }
    for pod in good {
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn a_guest_of_another_version_is_told_and_given_up() {
    let node = HostileNode::new();
    let (_, started) = node.start(Nature::OtherVersion).await;
    let error = started.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
}

#[tokio::test]
async fn a_guest_that_breaks_its_session_loses_its_pod() {
    let natures = [
        (Nature::AnswersTwice, "which has none pending"),
        (Nature::AnswersUnasked, "which has none pending"),
        (Nature::Streams, "only responses are allowed"),
        (Nature::AnswersAtLength, "a response of 4294967295 bytes"),
    ];
    for (nature, deed) in natures {
        let node = HostileNode::new();
        let (pod, started) = node.start(nature).await;
        started.unwrap();
        // The call may be answered before there are too many answers.
        let _ = pod.stats(None).await;
        let stopped = tokio::time::timeout(BOOT_TIMEOUT, pod.stopped()).await.unwrap().unwrap();
        assert!(stopped.reason.contains("hostile") && stopped.reason.contains(deed), "{}", stopped.reason);
        assert_eq!((stopped.exit_status, stopped.vmm_pid), (KILLED, 0), "{nature:?}");
        assert!(node.test.vmm.running().is_empty(), "{nature:?} left a VM");
        let error = pod.stats(None).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{nature:?}: {error}");
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn containers_of_a_guest_that_breaks_its_session_have_been_killed() {
    let node = HostileNode::new();
    let (pod, started) = node.start(Nature::BreaksOnSignal).await;
    started.unwrap();
    let new = node.test.container("c1", "true");
    let mut stderr = reader(&new.stdio.stderr);
    pod.create_container(new).await.unwrap();
    pod.start_process(id("c1"), None).await.unwrap();
    let mut view = pod.process(id("c1"), None).await.unwrap();

    pod.signal(id("c1"), None, 15, false).await.unwrap_err();
    let phase = view.phase.wait_for(|phase| phase.exit().is_some()).await.unwrap().clone();
    let reason = pod.stopped().await.unwrap().reason;
    assert_eq!(phase.exit().map(|exit| (exit.code, &exit.reason)), Some((KILLED, &reason)));
    let mut written = String::new();
    stderr.read_to_string(&mut written).await.unwrap();
    assert_eq!(written, format!("sandboxer: {reason}\n"));
    pod.delete(id("c1"), None).await.unwrap();
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn a_guest_that_does_not_end_what_is_killed_loses_its_pod() {
    let natures = [
        (Nature::AnswersLate, "did not respond to signal_process"),
        (Nature::SpinsOutput, "did not kill container c1"),
    ];
    for (nature, deed) in natures {
        let node = HostileNode::new();
        let (pod, started) = node.start(nature).await;
        started.unwrap();
        let new = node.test.container("c1", "true");
        let _stdout = reader(&new.stdio.stdout);
        pod.create_container(new).await.unwrap();
        pod.start_process(id("c1"), None).await.unwrap();

        pod.signal(id("c1"), None, 9, false).await.unwrap();
        let stopped = tokio::time::timeout(BOOT_TIMEOUT, pod.stopped()).await.unwrap().unwrap();
        assert!(stopped.reason.contains(deed), "{nature:?}: {}", stopped.reason);
        assert!(matches!(phase(&pod, "c1").await, Phase::Exited(exit) if exit.code == KILLED), "{nature:?}");
        assert!(node.test.vmm.running().is_empty(), "{nature:?} left a VM");
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn a_session_that_ends_by_itself_ends_no_pod() {
    let node = HostileNode::new();
    let pod = node.test.pod("good");
    pod.start().await.unwrap();
    // The next daemon's session replaces this one's, and this one reconnects: they alternate again and again.
    let next = node.test.restarted();
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let _ = pod.stats(None).await;
    assert_eq!(pod.status().state, PodState::Ready);
    assert_eq!(next.registry.pod(pod.id()).unwrap().status().state, PodState::Ready);
    next.registry.pod(pod.id()).unwrap().remove().await.unwrap();
}

#[tokio::test]
async fn an_answer_that_comes_late_is_nobodys() {
    let node = HostileNode::new();
    let (pod, started) = node.start(Nature::AnswersLate).await;
    started.unwrap();
    let new = node.test.container("c1", "true");
    let _stdout = reader(&new.stdio.stdout);
    pod.create_container(new).await.unwrap();
    pod.start_process(id("c1"), None).await.unwrap();
    let error = pod.signal(id("c1"), None, 15, false).await.unwrap_err();
    // A kubelet counts a probe as failed by this code alone.
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    // The agent answers one call after the other: when this one has its answer, the late one has arrived.
    let came = async { while pod.stats(None).await.is_err() {} };
    tokio::time::timeout(BOOT_TIMEOUT, came).await.expect("its session is over");
    assert_eq!(pod.status().state, PodState::Ready);
    pod.remove().await.unwrap();
}

/// Whatever the agent tells the next daemon, if anything: no container that may still run is reported as
/// ended.
#[tokio::test]
async fn an_agent_that_answers_the_next_daemon_late_wrongly_or_not_at_all_leaves_no_ghost() {
    for nature in Nature::ALL {
        // These agents have lost a container as soon as they must remove it, as any agent may.
        let removes = [
            Nature::SteersTerminals,
            Nature::BreaksOnSignal,
            Nature::AnswersLate,
            Nature::LateAgent,
            Nature::SlowCreate,
            Nature::FloodsOutput,
            Nature::TricklesOutput,
            Nature::SpinsOutput,
            Nature::SkipsOutput,
            Nature::FloodsRequests,
            Nature::AsksHugeReads,
            Nature::NeverTakesAnswers,
        ];
        let node = HostileNode::new();
        let pod = node.test.pod("hostile");
        pod.start().await.unwrap();
        let new = node.test.container("c1", "sleep");
        let _stdout = reader(&new.stdio.stdout);
        pod.create_container(new).await.unwrap();
        pod.start_process(id("c1"), None).await.unwrap();

        *node.next.lock().unwrap() = Some(nature);
        let next = node.test.killed([pod]);
        recover::recover(&next, recover::Records::read(&next).unwrap()).await;
        let pod = next.registry.pod(&id("hostile")).unwrap();
        let is_said_to_have_ended = matches!(phase(&pod, "c1").await, Phase::Exited(_));
        if removes.contains(&nature) {
            assert!(is_said_to_have_ended, "{nature:?}");
        } else {
            let runs = !node.test.vmm.running().is_empty();
            assert_ne!(is_said_to_have_ended, runs, "{nature:?}: runs: {runs}");
            let state = pod.status().state;
            assert_eq!(state, if runs { PodState::Unknown } else { PodState::Stopped }, "{nature:?}");
            let mut view = pod.process(id("c1"), None).await.unwrap();
            let ended = view.phase.wait_for(|phase| phase.exit().is_some()).now_or_never();
            assert_eq!(ended.is_some(), !runs, "{nature:?}: a wait for it is over");
        }
        // Well-behaved again, the pod works as before, and can be removed.
        *node.next.lock().unwrap() = None;
        if nature == Nature::NeverAnswers {
            tokio::time::timeout(BOOT_TIMEOUT, pod.resolved()).await.expect("nobody asks it again");
            assert_eq!(pod.status().state, PodState::Ready);
            assert_eq!(phase(&pod, "c1").await, Phase::Running);
        }
        pod.remove().await.unwrap();
        assert!(node.test.vmm.running().is_empty(), "{nature:?} left a VM");
    }
}

#[tokio::test]
async fn the_next_daemon_takes_no_list_without_end() {
    let node = HostileNode::new();
    let (hostile, started) = node.start(Nature::ListsForEver).await;
    started.unwrap();
    let new = node.test.container("c1", "true");
    let _stdout = reader(&new.stdio.stdout);
    hostile.create_container(new).await.unwrap();
    hostile.start_process(id("c1"), None).await.unwrap();

    *node.next.lock().unwrap() = Some(Nature::ListsForEver);
    let pod_id = hostile.id().clone();
    let next = node.test.killed([hostile]);
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let taken_up = next.registry.pod(&pod_id).unwrap();
    assert!(matches!(phase(&taken_up, "c1").await, Phase::Exited(_)), "nobody told that it runs");
    taken_up.remove().await.unwrap();
}
