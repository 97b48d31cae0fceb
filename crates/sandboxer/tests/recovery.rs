//! Recovery of pods whose VMMs do not answer the next daemon, or cannot be killed: it reports nothing that is not true.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod test_node;

use std::{
    fs,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use fake_agent::FakeAgent;
use futures::FutureExt;
use sandboxer::{
    api::sandbox::SandboxService,
    pod::{
        DaemonState, PodHandle,
        container::Phase,
        recover::{self, Recovered},
    },
    state::PodState,
};
use sandboxer_base::Code;
use sandboxer_protocol::controller::{
    ControllerStatusRequest, ControllerStopRequest, ControllerWaitRequest, controller_server::Controller,
};
use sandboxer_vmm_fake::{Ailment, FakeVmm};
use test_node::{TestNode, id, phase, reader};
use tokio_util::sync::CancellationToken;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

fn node(agent: FakeAgent) -> TestNode {
    let vmm = Arc::new(FakeVmm::new(move |guest| agent.serve(guest)));
    TestNode::with(vmm, |config| config.vm.agent_timeout = Duration::from_millis(500))
}

/// Runs a pod with a container under a daemon that is then killed; its VMM has an ailment since. Returns the next
/// daemon's node, what it recovered, and the pod.
async fn recovered(test: &TestNode, ailment: Ailment) -> (Arc<DaemonState>, Recovered, PodHandle) {
    let pod = test.pod("web");
    pod.start().await.unwrap();
    let new = test.container("c1", "sleep");
    let _stdout = reader(&new.stdio.stdout);
    pod.create_container(new).await.unwrap();
    pod.start_process(id("c1"), None).await.unwrap();
    test.vmm.ail(pod.id(), ailment);
    let next = test.killed([pod]);
    let recovered = recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let pod = next.registry.pod(&id("web")).unwrap();
    (next, recovered, pod)
}

/// Asserts that no caller receives an end.
async fn has_not_ended(test: &TestNode, pod: &PodHandle) {
    assert_eq!(test.vmm.running().len(), 1, "its VMM has ended");
    assert_ne!(pod.status().state, PodState::Stopped);
    assert!(pod.stopped().now_or_never().is_none(), "a wait for the pod is over");
    let mut view = pod.process(id("c1"), None).await.unwrap();
    assert_eq!(*view.phase.borrow(), Phase::Running);
    assert!(view.phase.wait_for(|phase| phase.exit().is_some()).now_or_never().is_none());
}

#[tokio::test]
async fn a_pod_whose_vmm_is_silent_is_unknown_until_that_answers() {
    let test = node(FakeAgent::default());
    let (next, recovered, pod) = recovered(&test, Ailment::Silent).await;
    assert_eq!(recovered, Recovered { unknown: 1, ..Default::default() });
    has_not_ended(&test, &pod).await;
    assert_eq!(pod.status().state, PodState::Unknown);
    for refused in [
        pod.start().await,
        pod.create_container(test.container("c2", "sleep")).await,
        pod.signal(id("c1"), None, 15, false).await,
        pod.delete(id("c1"), None).await.map(drop),
    ] {
        let error = refused.unwrap_err();
        // In one case it is the process that must not run.
        assert!(matches!(error.code(), Code::Unavailable | Code::FailedPrecondition), "{error}");
    }
    // An earlier release must be able to read the record, too.
    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(test.dir.path().join("state/pods/web.json")).unwrap()).unwrap();
    assert_eq!(record["status"]["state"], "ready");

    test.vmm.ail(pod.id(), Ailment::None);
    tokio::time::timeout(LONG, pod.resolved()).await.expect("it is not asked again");
    assert_eq!((pod.status().state, pod.status().recovered), (PodState::Ready, true));
    assert_eq!(pod.status().reason, "");
    assert_eq!(phase(&pod, "c1").await, Phase::Running);
    let mut view = pod.process(id("c1"), None).await.unwrap();
    pod.signal(id("c1"), None, 15, false).await.unwrap();
    let ended = view.phase.wait_for(|phase| phase.exit().is_some()).await.unwrap().clone();
    assert_eq!(ended.exit().unwrap().code, 143);
    pod.remove().await.unwrap();
    assert!(next.journal.records().unwrap().is_empty());
}

#[tokio::test]
async fn an_unknown_pod_ends_with_its_vmm_and_tells_why() {
    let test = node(FakeAgent::default());
    let (_next, _, pod) = recovered(&test, Ailment::Silent).await;
    assert!(test.vmm.crash(pod.id()));
    let status = tokio::time::timeout(LONG, pod.stopped()).await.expect("its end is not seen").unwrap();
    assert!(status.reason.contains("its VMM was killed by signal 11"), "{status:?}");
    assert!(matches!(phase(&pod, "c1").await, Phase::Exited(exit) if exit.code == 137));
    pod.remove().await.unwrap();
}

#[tokio::test]
async fn to_stop_an_unknown_pod_or_to_kill_its_container_ends_its_vmm_first() {
    for by_container in [false, true] {
        let test = node(FakeAgent::default());
        let (_next, _, pod) = recovered(&test, Ailment::Silent).await;
        let running = async {
            let stopped = pod.stopped().await.unwrap();
            (stopped, test.vmm.running().len())
        };
        let request = async {
            match by_container {
                // As containerd does before it stops a pod.
                true => pod.signal(id("c1"), None, 9, true).await.unwrap(),
                false => pod.stop().await.unwrap(),
            }
        };
        let ((_, running), ()) =
            tokio::time::timeout(LONG, async { tokio::join!(running, request) }).await.unwrap();
        assert_eq!(running, 0, "told stopped, and its VMM runs");
        assert!(matches!(phase(&pod, "c1").await, Phase::Exited(_)));
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn a_pod_is_not_told_stopped_before_its_vmm_has_ended() {
    for restarted in [false, true] {
        let agent = FakeAgent::default();
        agent.lingers.store(true, Ordering::Relaxed);
        let test = node(agent);
        let (_next, _, pod) =
            recovered(&test, if restarted { Ailment::Undying } else { Ailment::None }).await;
        test.vmm.ail(pod.id(), Ailment::Undying);
        let error = pod.stop().await.unwrap_err();
        assert!(error.to_string().contains("SIGKILL"), "{error}");
        has_not_ended(&test, &pod).await;
        let error = pod.remove().await.unwrap_err();
        assert!(error.to_string().contains("SIGKILL"), "{error}");
        has_not_ended(&test, &pod).await;
        assert!(test.vmm.crash(pod.id()));
        tokio::time::timeout(LONG, pod.stopped()).await.expect("its end is not seen").unwrap();
        pod.remove().await.unwrap();
    }
}

#[tokio::test]
async fn a_start_that_was_not_finished_is_forgotten_when_its_vmm_has_ended() {
    let test = node(FakeAgent::default());
    let pod = test.pod("web");
    pod.start().await.unwrap();
    let record = test.dir.path().join("state/pods/web.json");
    let next = test.killed([pod]);
    let mut fields: serde_json::Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    fields["status"]["state"] = "starting".into();
    fs::write(&record, fields.to_string()).unwrap();
    test.vmm.ail(&id("web"), Ailment::Undying);
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let pod = next.registry.pod(&id("web")).unwrap();
    assert_eq!(pod.status().state, PodState::Stopping);
    assert!(record.exists());

    assert!(test.vmm.crash(pod.id()));
    let removed = async {
        while next.registry.pod(&id("web")).is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, removed).await.expect("it stays");
    assert!(!record.exists());
}

#[tokio::test]
async fn containerd_keeps_what_it_knows_of_an_unknown_pod_and_is_told_to_stop_it_in_the_end() {
    let test = node(FakeAgent::default());
    let (next, _, pod) = recovered(&test, Ailment::Silent).await;
    let service = SandboxService::new(next.clone(), "nowhere".into(), CancellationToken::new()).unwrap();
    let status = || async {
        let request = ControllerStatusRequest { sandbox_id: "web".into(), ..Default::default() };
        service.status(tonic::Request::new(request)).await.map(|answer| answer.into_inner().state)
    };
    let error = status().await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::Unavailable, "{error}");
    assert!(error.message().contains("did not answer the greeting"), "{error}");

    tokio::time::pause();
    while !pod.status().overdue {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    tokio::time::resume();
    assert_eq!(status().await.unwrap(), "SANDBOX_NOTREADY");
    has_not_ended(&test, &pod).await;
    pod.remove().await.unwrap();
}

/// As after a rollback from a release whose records this one cannot read.
#[tokio::test]
async fn a_pod_with_a_later_record_is_not_started_anew_before_its_vmm_has_ended() {
    let test = node(FakeAgent::default());
    let (record, run_dir) = (test.dir.path().join("state/pods/web.json"), test.node.run_dir(&id("web")));
    fs::write(&record, r#"{"version":99,"something":"new"}"#).unwrap();
    let mut vmm = std::process::Command::new("sleep");
    let mut vmm = vmm.arg("600").env("SANDBOXER_RUN_DIR", run_dir).spawn().unwrap();
    let next = test.restarted();
    let recovered = recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    assert_eq!(recovered, Recovered { quarantined: 1, ..Default::default() });

    let service = SandboxService::new(next.clone(), "nowhere".into(), CancellationToken::new()).unwrap();
    let sandbox_id = || "web".to_owned();
    let status = || async {
        let request = ControllerStatusRequest { sandbox_id: sandbox_id(), ..Default::default() };
        service.status(tonic::Request::new(request)).await.unwrap_err()
    };
    let wait = ControllerWaitRequest { sandbox_id: sandbox_id(), ..Default::default() };
    let wait_error = service.wait(tonic::Request::new(wait)).await.unwrap_err();
    for error in [status().await, wait_error] {
        // It is not "not found".
        assert_eq!(error.code(), tonic::Code::Unavailable, "{error}");
        assert!(error.message().contains(&vmm.id().to_string()), "{error}");
    }
    assert!(vmm.try_wait().unwrap().is_none(), "it was ended unasked");

    let stop = ControllerStopRequest { sandbox_id: sandbox_id(), ..Default::default() };
    service.stop(tonic::Request::new(stop)).await.unwrap();
    assert!(vmm.try_wait().unwrap().is_some(), "told stopped, and its VMM runs");
    assert_eq!(status().await.code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn a_stop_waits_while_the_guest_writes_its_data_and_no_longer() {
    let agent = FakeAgent::default();
    agent.lingers.store(true, Ordering::Relaxed);
    let test = node(agent);
    // Until it has written all; for ever; and nothing at all.
    for (writes_for, at_least, at_most) in [(20, 20, 21), (1000, 59, 61), (0, 0, 1)] {
        let pod = test.pod("web");
        pod.start().await.unwrap();
        tokio::time::pause();
        let begun = tokio::time::Instant::now();
        let stopping = tokio::spawn({
            let pod = pod.clone();
            async move { pod.stop().await }
        });
        while !stopping.is_finished() {
            if begun.elapsed() < Duration::from_secs(writes_for) {
                test.vmm.write(pod.id(), 4096);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let took = begun.elapsed();
        tokio::time::resume();
        stopping.await.unwrap().unwrap();
        let (at_least, at_most) = (Duration::from_secs(at_least), Duration::from_secs(at_most));
        assert!(at_least <= took && took <= at_most, "writing for {writes_for} s: {took:?}");
        assert_eq!(pod.status().state, PodState::Stopped);
        pod.remove().await.unwrap();
    }
}
