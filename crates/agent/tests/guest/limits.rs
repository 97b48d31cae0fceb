//! Restrictions and resource limits of a container.

use sandboxer_protocol::agent::{
    CreateExecRequest, NextEventsRequest, PauseContainerRequest, PodLimits, ResumeContainerRequest,
    StatsRequest, StatsResponse, UpdateContainerRequest, UpdatePodRequest, event::Kind,
};
use serde_json::{Value, json};

use crate::{container::*, vm::Vm};

fn replaced(mut spec: Value, path: &str, value: Value) -> Value {
    *spec.pointer_mut(path).unwrap() = value;
    spec
}

async fn stats(agent: &sandboxer_protocol::agent::AgentClient, id: &str) -> StatsResponse {
    patiently(agent.stats(ctx(), &StatsRequest { container_id: id.into(), ..Default::default() }))
        .await
        .unwrap()
}

#[tokio::test]
async fn the_spec_confines_its_processes() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let mut spec = spec(shell(
        "id -u; id -G; grep CapEff /proc/self/status; grep Seccomp: /proc/self/status; mkdir /x 2>&1; \
         cat /proc/kcore | wc -c; echo 1 >/proc/sys/kernel/dmesg_restrict || echo read-only; ulimit -n; \
         hostname; umask; pwd; cat /proc/self/oom_score_adj; cat /proc/self/cgroup; trap",
    ));
    spec["process"]["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": 77, "hard": 99}]);
    spec["process"]["oomScoreAdj"] = json!(321);
    spec["process"]["cwd"] = json!("/made/for/me");
    spec["hostname"] = json!("own-name");
    spec["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "uts"}));
    spec["linux"]["seccomp"] = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}],
    });
    let web = run(&agent, &container("web", &spec)).await;
    let expected = "0\n0\nCapEff:\t00000000000420e1\nSeccomp:\t2\nmkdir: can't create directory '/x': Operation not permitted\n\
                    0\nread-only\n77\nown-name\n0022\n/made/for/me\n321\n0::/\n";
    assert_eq!(web.stdout().await, expected, "{}", web.stderr().await);
    end(&agent, "web").await;

    // The filter holds for execs too, whether they may gain privileges or not.
    spec["process"]["args"] = json!(["sleep", "1000"]);
    run(&agent, &container("web", &spec)).await;
    for no_new_privileges in [false, true] {
        let mut process =
            shell("grep CapEff /proc/self/status; grep Seccomp: /proc/self/status; mkdir /x 2>&1");
        process["noNewPrivileges"] = json!(no_new_privileges);
        let exec = exec(&agent, "web", &format!("nnp-{no_new_privileges}"), &process, streams()).await;
        exec.start().await.unwrap();
        let seen = exec.stdout().await;
        let expected = "CapEff:\t00000000000420e1\nSeccomp:\t2\nmkdir: can't create directory '/x': Operation not permitted\n";
        assert_eq!(seen, expected, "{}", exec.stderr().await);
    }
    end(&agent, "web").await;
}

#[tokio::test]
async fn a_pipe_that_nobody_reads_ends_its_writer() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let web = run(
        &agent,
        &container(
            "web",
            &spec(shell("yes | head -1; echo ${PIPESTATUS:-ok}; (yes; echo $? >&2) | head -1")),
        ),
    )
    .await;
    web.stdout().await;
    assert_eq!(web.stderr().await, "141\n", "SIGPIPE has its default meaning");
    end(&agent, "web").await;
}

#[tokio::test]
async fn the_oom_killer_is_reported_as_event_and_exit() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let resources = json!({"memory": {"limit": 24 << 20, "swap": 24 << 20}, "pids": {"limit": 20}, "cpu": {"shares": 512, "quota": 50000, "period": 100_000}});
    let hungry = replaced(
        spec(shell("cat /dev/zero | head -c 100000000 | tail >/dev/null")),
        "/linux/resources",
        resources.clone(),
    );
    // Without a shell: the growing process is the init itself.
    let hungry = replaced(hungry, "/process/args", json!(["sh", "-c", "exec tail -c 100000000 /dev/zero"]));
    patiently(agent.create_container(ctx(), &container("hungry", &hungry))).await.unwrap();
    let measured = stats(&agent, "hungry").await;
    assert_eq!((measured.memory_limit, measured.pids_limit), (24 << 20, 20));
    let process = init(&agent, "hungry");
    process.start().await.unwrap();
    let events = patiently(agent.next_events(ctx(), &NextEventsRequest::new())).await.unwrap().events;
    assert!(
        matches!(events[0].kind.as_ref(), Some(Kind::Oom(oom)) if oom.container_id == "hungry"),
        "{events:?}"
    );
    assert_eq!(events[0].sequence, 1);
    let exit = process.wait().await;
    assert_eq!((exit.code, exit.oom_killed), (137, true));
    assert_eq!(stats(&agent, "hungry").await.oom_kills, 1);
    end(&agent, "hungry").await;

    // One exec of a container is killed; the end of no other process is explained by that.
    let web = replaced(spec(shell("sleep 1000")), "/linux/resources", resources);
    run(&agent, &container("web", &web)).await;
    let ended = async |id: &str, script: &str, signal: Option<i32>| {
        let exec = exec(&agent, "web", id, &shell(script), streams()).await;
        exec.start().await.unwrap();
        if let Some(signal) = signal {
            exec.signal(signal, false).await.unwrap();
        }
        let exit = exec.wait().await;
        (exit.code, exit.oom_killed)
    };
    assert_eq!(ended("before", "exit 3", None).await, (3, false));
    assert_eq!(ended("killed", "exec tail -c 100000000 /dev/zero", None).await, (137, true));
    assert_eq!(ended("after", "exit 0", None).await, (0, false));
    assert_eq!(ended("stopped", "sleep 1000", Some(libc::SIGKILL)).await, (137, false));
    let after = NextEventsRequest { after: 1, ..Default::default() };
    let events = patiently(agent.next_events(ctx(), &after)).await.unwrap().events;
    assert!(events.iter().all(|event| event.sequence == 2), "one kill, one event: {events:?}");
    end(&agent, "web").await;
}

#[tokio::test]
async fn limits_change_processes_stand_still_and_all_are_signalled() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let script = "trap 'echo caught' TERM; (trap 'echo child' TERM; echo up; while :; do usleep 50000; done) & while :; do usleep 50000; done";
    let web = run(&agent, &container("web", &spec(shell(script)))).await;
    let seen = web.until("", "up").await;
    let before = stats(&agent, "web").await;
    assert_eq!(before.memory_limit, u64::MAX);
    assert!(before.pids >= 2 && before.memory_usage > 0 && before.cpu_usage_us > 0, "{before}");
    let resources =
        json!({"memory": {"limit": 64 << 20, "swap": 64 << 20}, "cpu": {"quota": 90_000, "period": 100_000}});
    let update = UpdateContainerRequest {
        container_id: "web".into(),
        resources_json: resources.to_string().into_bytes(),
        ..Default::default()
    };
    patiently(agent.update_container(ctx(), &update)).await.unwrap();
    assert_eq!(stats(&agent, "web").await.memory_limit, 64 << 20);

    let pause = PauseContainerRequest { container_id: "web".into(), ..Default::default() };
    // Execs that are being started when the pause comes: each has been started, or is refused.
    let mut early = Vec::new();
    for n in 0..6 {
        early.push(exec(&agent, "web", &format!("early{n}"), &shell("sleep 1000"), streams()).await);
    }
    let starting = async {
        let started = futures::future::join_all(early.iter().map(Process::start)).await;
        for refused in started.into_iter().filter_map(Result::err) {
            let (code, words) = refusal(Err::<(), _>(refused));
            assert!(code == ttrpc::Code::FAILED_PRECONDITION && words.contains("is paused"), "{words}");
        }
    };
    let (_, paused) = tokio::join!(starting, patiently(agent.pause_container(ctx(), &pause)));
    paused.unwrap();
    let (first, second) = (stats(&agent, "web").await.cpu_usage_us, stats(&agent, "web").await.cpu_usage_us);
    assert_eq!(first, second, "a paused container uses no CPU");
    // An exec would wait in the frozen group, and keep others from theirs.
    let request = CreateExecRequest {
        container_id: "web".into(),
        exec_id: "late".into(),
        process_json: shell("exit").to_string().into_bytes(),
        ..Default::default()
    };
    let (code, words) = refusal(patiently(agent.create_exec(ctx(), &request)).await);
    assert!(code == ttrpc::Code::FAILED_PRECONDITION && words.contains("is paused"), "{words}");
    let resume = ResumeContainerRequest { container_id: "web".into(), ..Default::default() };
    patiently(agent.resume_container(ctx(), &resume)).await.unwrap();

    web.signal(libc::SIGTERM, true).await.unwrap();
    let seen = web.until(&seen, "caught").await;
    web.until(&seen, "child").await;
    web.signal(libc::SIGKILL, true).await.unwrap();
    assert_eq!(web.wait().await.code, 137);
    let guest = stats(&agent, "").await;
    assert!(guest.memory_limit > 128 << 20 && guest.memory_usage < guest.memory_limit, "{guest}");
    delete(&agent, "web").await.unwrap();
}

#[tokio::test]
async fn limits_of_the_pod_are_those_of_all_its_containers_together() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let update = async |cpu_quota_us, cpu_period_us, memory_bytes| {
        let limits = PodLimits { cpu_quota_us, cpu_period_us, memory_bytes, ..Default::default() };
        let request = UpdatePodRequest { limits: Some(limits).into(), ..Default::default() };
        patiently(agent.update_pod(ctx(), &request)).await
    };
    // Without a cgroup namespace it sees every control group.
    let look = spec(shell("cd /sys/fs/cgroup/sandboxer; cat cpu.max memory.max"));
    let look = replaced(look, "/linux/namespaces", json!([{"type": "pid"}, {"type": "mount"}]));
    let limits = [
        ((0, 0, 0), "max 100000\nmax\n"),
        ((50_000, 0, 96 << 20), "50000 100000\n100663296\n"),
        ((0, 0, 64 << 20), "50000 100000\n67108864\n"),
        ((-1, 200_000, -1), "max 200000\nmax\n"),
    ];
    for (n, ((quota, period, memory), expected)) in limits.into_iter().enumerate() {
        update(quota, period, memory).await.unwrap();
        let name = format!("look-{n}");
        let process = run(&agent, &container(&name, &look)).await;
        assert_eq!(process.stdout().await, expected, "{}", process.stderr().await);
        end(&agent, &name).await;
    }
    update(100_000, 100_000, 64 << 20).await.unwrap();
    let (code, words) = refusal(update(9_000_000, 100_000, 0).await);
    assert!(code == ttrpc::Code::FAILED_PRECONDITION && words.contains("90 CPUs"), "{words}");
    let (_, words) = refusal(update(0, 0, 1 << 40).await);
    assert!(words.contains("1048576 MiB of memory") && words.contains("restart the pod"), "{words}");
}
