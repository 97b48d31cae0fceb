//! Execs in a container.

use sandboxer_protocol::agent::{DeleteExecRequest, ListProcessesRequest};
use serde_json::json;
use ttrpc::Code;

use crate::{container::*, vm::Vm};

#[tokio::test]
async fn an_exec_joins_the_container_as_the_user_it_names() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let web = container("web", &spec(shell("echo init >/tmp/who; sleep 1000")));
    patiently(agent.create_container(ctx(), &web)).await.unwrap();
    let before = shell("test ! -e /tmp/who; echo $?; exit 3");
    let early = exec(&agent, "web", "early", &before, streams()).await;
    early.start().await.unwrap();
    assert_eq!((early.stdout().await.as_str(), early.wait().await.code), ("0\n", 3), "before its start, too");
    init(&agent, "web").start().await.unwrap();

    let mut process = shell(
        "cat /tmp/who; id -u; id -G; pwd; echo $GREETING $HOME; cat /proc/1/comm; grep Cap /proc/self/status",
    );
    process["user"] = json!({"uid": 1000, "gid": 1000, "additionalGids": [1000, 7]});
    process["cwd"] = json!("/tmp");
    let joined = exec(&agent, "web", "joined", &process, streams()).await;
    joined.start().await.unwrap();
    let seen = joined.stdout().await;
    assert!(
        seen.starts_with("init\n1000\n1000 7\n/tmp\nhello /tmp\nsh\n")
            || seen.starts_with("init\n1000\n1000 7\n/tmp\nhello /tmp\nsleep\n"),
        "{seen}{}",
        joined.stderr().await
    );
    assert!(seen.contains("CapEff:\t0000000000000000"), "a user other than root has no capabilities: {seen}");
    assert_eq!(joined.wait().await.code, 0);
    assert!(joined.start().await.is_ok(), "a repeated start answers the same");

    let killed = exec(&agent, "web", "killed", &shell("sleep 1000"), streams()).await;
    killed.start().await.unwrap();
    killed.signal(libc::SIGRTMIN() + 3, false).await.unwrap();
    assert_eq!(
        killed.wait().await.code,
        128 + (libc::SIGRTMIN() + 3).unsigned_abs(),
        "also by a real-time signal"
    );

    let delete =
        DeleteExecRequest { container_id: "web".into(), exec_id: "killed".into(), ..Default::default() };
    for _ in 0..2 {
        patiently(agent.delete_exec(ctx(), &delete)).await.unwrap();
    }
    let (code, _) = refusal(killed.start().await);
    assert_eq!(code, Code::NOT_FOUND);
    end(&agent, "web").await;
}

#[tokio::test]
async fn what_cannot_run_says_why_and_is_over() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    run(&agent, &container("web", &spec(shell("sleep 1000")))).await;
    let mut lost = shell("exit");
    lost["cwd"] = json!("/no/such/dir");
    let mut winged = shell("exit");
    winged["capabilities"]["bounding"] = json!(["CAP_FLY"]);
    let cases = [
        ("missing", command(&["nosuch"]), r#"exec: "nosuch": executable file not found in $PATH"#),
        ("rubbish", command(&["rubbish"]), r#"exec: "/bin/rubbish": exec format error"#),
        ("file", command(&["/etc/passwd"]), r#"exec: "/etc/passwd": permission denied"#),
        ("cwd", lost, "/no/such/dir"),
        ("cap", winged, r#"unknown capability "CAP_FLY""#),
    ];
    for (id, process, why) in cases {
        let exec = exec(&agent, "web", id, &process, streams()).await;
        let (_, words) = refusal(exec.start().await);
        assert!(words.contains(why), "{id}: {words}");
        assert_eq!(exec.wait().await.code, 255, "whoever waits is told");
        assert_eq!(exec.stdout().await, "");
    }
    let (code, _) = refusal(init(&agent, "nosuch").start().await);
    assert_eq!(code, Code::NOT_FOUND);
    end(&agent, "web").await;
}

#[tokio::test]
async fn a_hundred_at_once_all_run_and_all_go() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    run(&agent, &container("web", &spec(shell("sleep 1000")))).await;
    let mut running = tokio::task::JoinSet::new();
    for n in 0..100_u32 {
        let exec = exec(
            &agent,
            "web",
            &format!("e{n}"),
            &shell(&format!("read x; echo $x {n}; exit {n}")),
            streams(),
        )
        .await;
        running.spawn(async move {
            exec.start().await.unwrap();
            exec.write(0, b"got\n", true).await.unwrap();
            assert_eq!(exec.stdout().await, format!("got {n}\n"));
            assert_eq!(exec.wait().await.code, n);
        });
    }
    while let Some(done) = running.join_next().await {
        done.unwrap();
    }
    let request = ListProcessesRequest { container_id: "web".into(), ..Default::default() };
    let pids = patiently(agent.list_processes(ctx(), &request)).await.unwrap().pids;
    assert_eq!(pids.len(), 1, "only the init is left: {pids:?}");
    end(&agent, "web").await;
}
