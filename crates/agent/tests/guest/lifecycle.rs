//! A container's life, and what must be left of it.

use sandboxer_protocol::PROTOCOL_VERSION;

use crate::{container::*, vm::Vm};

#[tokio::test]
async fn a_container_runs_and_leaves_nothing_behind() {
    let vm = Vm::boot();
    let (agent, ready) = vm.session().await;
    assert_eq!(ready.agent_version, env!("CARGO_PKG_VERSION"));
    assert!(ready.init_ns > 0 && ready.ready_ns >= ready.init_ns, "{ready:?}");
    eprintln!(
        "protocol {PROTOCOL_VERSION}: init {} ms, ready {} ms",
        ready.init_ns / 1_000_000,
        ready.ready_ns / 1_000_000
    );

    for round in ["first", "second", "third"] {
        let began = std::time::Instant::now();
        let web = container("web", &spec(shell("echo $GREETING from $0; echo oops >&2; exit 7")));
        patiently(agent.create_container(ctx(), &web)).await.unwrap();
        let created = began.elapsed();
        init(&agent, "web").start().await.unwrap();
        let started = began.elapsed();
        let process = init(&agent, "web");
        assert_eq!(process.stdout().await, "hello from sh\n");
        let output = began.elapsed();
        assert_eq!(process.stderr().await, "oops\n");
        assert_eq!(process.wait().await.code, 7);
        delete(&agent, "web").await.unwrap();
        eprintln!(
            "{round}: created {created:?} started {started:?} output {output:?} deleted {:?}",
            began.elapsed()
        );
    }
}
