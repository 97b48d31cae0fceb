//! A session with an agent that breaks while both sides live is opened again, and waiting calls continue.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]
#![allow(dead_code, reason = "other tests use all of the doubles")]

mod fake_agent;
mod test_node;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use fake_agent::FakeAgent;
use sandboxer::{
    pod::{container::Phase, spec::PodSpec},
    state::PodState,
};
use sandboxer_protocol::{IMAGE_VOLUME, agent::ConfigurePodRequest, share::GUEST_DIR};
use sandboxer_vmm_fake::{FakeGuest, FakeVmm};
use test_node::{TestNode, id, phase, reader, with_image_volume};
use tokio::{
    io::{AsyncReadExt, copy_bidirectional},
    net::UnixStream,
    task::AbortHandle,
    time::timeout,
};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The links to all agents; a test can cut them.
#[derive(Clone, Default)]
struct Links(Arc<Mutex<Vec<AbortHandle>>>);

impl Links {
    /// Returns a node whose agents are reached over these links.
    fn node(&self, agent: FakeAgent) -> TestNode {
        let links = self.clone();
        let vmm = FakeVmm::new(move |guest| {
            let (mut near, far) = UnixStream::pair().unwrap();
            let mut stream = guest.stream;
            let carried = tokio::spawn(async move { drop(copy_bidirectional(&mut stream, &mut near).await) });
            links.0.lock().unwrap().push(carried.abort_handle());
            agent.serve(FakeGuest { stream: far, ..guest });
        });
        TestNode::with(Arc::new(vmm), |_| {})
    }

    /// Cuts all links, in the middle of whatever they carry.
    fn cut(&self) {
        self.0.lock().unwrap().drain(..).for_each(|link| link.abort());
    }
}

#[tokio::test]
async fn a_session_that_is_cut_costs_no_line_and_doubles_none() {
    let printed: String = (1..=100_000).map(|n| format!("line {n}\n")).collect();
    let mut agent = FakeAgent::default();
    agent.output = Some(printed.clone().into_bytes().into());
    let links = Links::default();
    let test = links.node(agent);
    let pod = test.pod("web");
    pod.start().await.unwrap();
    let mut new = test.container("c1", "true");
    // The double would print the same there.
    new.stdio.stderr = Default::default();
    let mut stdout = reader(&new.stdio.stdout);
    pod.create_container(new).await.unwrap();
    pod.start_process(id("c1"), None).await.unwrap();

    let mut seen = vec![0; printed.len()];
    for part in seen.chunks_mut(printed.len() / 5) {
        // Output that is not in the FIFO yet arrives through the next session.
        links.cut();
        timeout(PATIENCE, stdout.read_exact(part)).await.expect("the output has ended").unwrap();
    }
    assert!(seen == printed.as_bytes(), "a line is lost, or doubled");
    assert_eq!(pod.status().state, PodState::Ready);

    // The wait for its end continues, and a signal arrives.
    links.cut();
    pod.signal(id("c1"), None, 9, false).await.unwrap();
    let mut view = pod.process(id("c1"), None).await.unwrap();
    let ended = timeout(PATIENCE, view.phase.wait_for(|phase| phase.exit().is_some())).await;
    assert_eq!(ended.expect("its end is not seen").unwrap().exit().unwrap().code, 137);
    assert!(matches!(phase(&pod, "c1").await, Phase::Exited(exit) if exit.reason.is_empty()));
    pod.delete(id("c1"), None).await.unwrap();
    assert_eq!(pod.status().state, PodState::Ready);
    pod.remove().await.unwrap();
}

/// No session is opened to a pod that has ended.
#[tokio::test]
async fn a_pod_whose_session_is_cut_can_be_stopped_at_once() {
    let links = Links::default();
    let test = links.node(FakeAgent::default());
    let pod = test.pod("web");
    pod.start().await.unwrap();
    pod.create_container(test.container("c1", "true")).await.unwrap();
    pod.start_process(id("c1"), None).await.unwrap();
    links.cut();
    timeout(PATIENCE, pod.stop()).await.unwrap().unwrap();
    assert_eq!(pod.status().state, PodState::Stopped);
    timeout(PATIENCE, pod.remove()).await.unwrap().unwrap();
    assert!(test.vmm.running().is_empty());
}

/// Returns what an agent is told of a pod that asks for all that is newer than the oldest agents, and the source of the
/// volume of its container's image.
async fn configuration_of(agent: FakeAgent) -> (ConfigurePodRequest, String) {
    let (identity, specs) = (agent.identity.clone(), agent.specs.clone());
    let test = TestNode::with(Arc::new(FakeVmm::new(move |guest| agent.serve(guest))), |_| {});
    let mut spec = PodSpec::plain("web".parse().unwrap(), 1, 128);
    spec.image_volumes_on_disk = true;
    spec.max_processes = Some(99);
    spec.node_sysctls = [("kernel.shmmax".to_owned(), "1".to_owned())].into();
    let pod = test.pod_of(spec);
    pod.start().await.unwrap();
    pod.create_container(with_image_volume(test.container("c1", "true"), test.dir.path())).await.unwrap();
    let specs = specs.lock().unwrap().clone();
    let mut mounts = specs.iter().flat_map(|spec| spec["mounts"].as_array().unwrap());
    let volume = mounts.find(|mount| mount["destination"] == "/data").unwrap();
    let source = volume["source"].as_str().unwrap().to_owned();
    pod.remove().await.unwrap();
    let identity = identity.lock().unwrap().clone();
    (identity, source)
}

#[tokio::test]
async fn an_agent_of_the_release_before_is_asked_for_nothing_that_it_does_not_know() {
    let (identity, source) = configuration_of(FakeAgent::default()).await;
    assert_eq!((identity.limits.processes, identity.host_sysctls.len()), (99, 1));
    assert!(identity.removes_other_cards);
    assert_eq!(source, IMAGE_VOLUME);

    let (identity, source) = configuration_of(FakeAgent::default().older()).await;
    assert_eq!((identity.limits.processes, identity.host_sysctls.len()), (0, 0));
    assert!(!identity.removes_other_cards);
    assert!(source.starts_with(GUEST_DIR), "{source}");
}
