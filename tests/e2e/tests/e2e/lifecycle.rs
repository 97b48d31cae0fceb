//! The life of pods and containers, once more and once more again.

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::ContainerState;
use sandboxer_e2e::case::{Case, PATIENCE, idle, shell};
use sandboxer_e2e::containerd::{Containerd, Stdio};
use sandboxer_e2e::eventually;

crate::cases![
    Any: everything_twice_in_a_row, stop_and_remove_twice, the_same_request_twice, stop_asks_before_it_kills,
    killed_before_its_start, containers_of_a_pod_share_its_network, remove_takes_what_runs, statistics
];

/// Two containers in one pod, through every verb, then all of it again.
async fn everything_twice_in_a_row(case: Case) -> Result<()> {
    for round in 1..=2 {
        let pod = case.pod().await?;
        let (status, info) = case.cri.pod_status(&pod.id).await?;
        ensure!(status.metadata == pod.config.metadata && status.labels == pod.config.labels, "{status:?}");
        ensure!(status.runtime_handler == case.handler && status.created_at > 0, "{status:?}");
        serde_json::from_str::<serde_json::Value>(&info)?;

        let first = pod.create(idle("first")).await?;
        ensure!(first.status().await?.state() == ContainerState::ContainerCreated);
        case.cri.start(&first.id).await?;
        let second = pod
            .start(shell("second", "echo hello from round; trap 'exit 0' TERM; sleep 1000 & wait"))
            .await?;
        second.logged("hello from round").await?;

        let (status, info) = case.cri.status(&first.id).await?;
        ensure!(status.state() == ContainerState::ContainerRunning, "{status:?}");
        let info: serde_json::Value = serde_json::from_str(&info)?;
        ensure!(info["pid"].as_u64().is_some_and(|pid| pid > 0), "inspect tells no pid: {info}");
        ensure!(first.sh("hostname").await? == "pod");
        let mut ids = case.cri.containers(&pod.id).await?;
        ids.sort();
        let mut expected = vec![first.id.clone(), second.id.clone()];
        expected.sort();
        ensure!(ids == expected, "round {round}: {ids:?}");

        for container in [&first, &second] {
            case.cri.stop(&container.id, 10).await?;
            let status = container.status().await?;
            ensure!(status.state() == ContainerState::ContainerExited && status.exit_code == 0, "{status:?}");
            case.cri.remove(&container.id).await?;
        }
        ensure!(case.cri.containers(&pod.id).await?.is_empty());
        // A name that was removed is free again.
        pod.start(shell("first", "true")).await?.ended().await?;
        case.cri.stop_pod(&pod.id).await?;
        ensure!(!case.cri.pod_ready(&pod.id).await?, "round {round}: ready after it was stopped");
        case.cri.remove_pod(&pod.id).await?;
        ensure!(
            case.cri.pod_status(&pod.id).await.is_err(),
            "round {round}: still there after it was removed"
        );
    }
    Ok(())
}

async fn stop_and_remove_twice(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    for _ in 0..2 {
        case.cri.stop(&container.id, 5).await?;
    }
    for _ in 0..2 {
        case.cri.remove(&container.id).await?;
    }
    for _ in 0..2 {
        case.cri.stop_pod(&pod.id).await?;
    }
    for _ in 0..2 {
        case.cri.remove_pod(&pod.id).await?;
    }
    // What never was is as good as gone.
    case.cri.stop_pod("never-was").await?;
    case.cri.remove_pod("never-was").await?;
    case.cri.remove("never-was").await?;
    Ok(())
}

async fn the_same_request_twice(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let again = case.cri.run_pod(&pod.config, case.handler).await;
    let error = again.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(error.contains("reserved"), "a second pod of the same name: {error}");
    let container = pod.start(idle("c")).await?;
    ensure!(case.cri.start(&container.id).await.is_err(), "a running container was started again");
    let error = pod.create(idle("c")).await.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(error.contains("reserved"), "a second container of the same name: {error}");
    ensure!(container.sh("echo fine").await? == "fine");
    Ok(())
}

async fn stop_asks_before_it_kills(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let polite = pod
        .start(shell("polite", "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.1; done"))
        .await?;
    polite.logged("up").await?;
    case.cri.stop(&polite.id, 20).await?;
    ensure!(polite.status().await?.exit_code == 7, "{:?}", polite.status().await?);
    ensure!(polite.logs()?.stdout == "up\nbye\n", "{:?}", polite.logs()?);
    let deaf = pod.start(shell("deaf", "trap '' TERM; echo up; while :; do sleep 0.1; done")).await?;
    deaf.logged("up").await?;
    case.cri.stop(&deaf.id, 1).await?;
    ensure!(deaf.status().await?.exit_code == 137, "{:?}", deaf.status().await?);
    Ok(())
}

async fn containers_of_a_pod_share_its_network(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    pod.start(shell("listens", "nc -ll -p 8080 -e echo through the loopback")).await?;
    let asks = pod.start(idle("asks")).await?;
    let heard = eventually("answer through the pod's loopback", PATIENCE, || async {
        Ok(asks.sh("nc -w 5 127.0.0.1 8080").await.ok().filter(|answer| !answer.is_empty()))
    })
    .await?;
    ensure!(heard == "through the loopback", "{heard}");
    Ok(())
}

/// StopPodSandbox of a pod with running containers, RemovePodSandbox right after.
async fn remove_takes_what_runs(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let running = pod.start(idle("running")).await?;
    let created = pod.create(idle("created")).await?;
    case.cri.stop_pod(&pod.id).await?;
    ensure!(running.status().await?.state() == ContainerState::ContainerExited);
    case.cri.remove_pod(&pod.id).await?;
    for container in [running, created] {
        ensure!(container.status().await.is_err(), "container {} outlived its pod", container.id);
    }
    Ok(())
}

async fn statistics(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container =
        pod.start(shell("c", "x=$(head -c 4000000 /dev/zero | tr '\\0' y); while :; do :; done")).await?;
    let read = || async {
        let stats = case.cri.stats(&container.id).await?;
        let cpu = stats.cpu.and_then(|cpu| cpu.usage_core_nano_seconds).map_or(0, |value| value.value);
        let memory = stats.memory.and_then(|memory| memory.working_set_bytes).map_or(0, |value| value.value);
        Ok::<_, anyhow::Error>((cpu, memory))
    };
    let first = eventually("statistics of a busy container", PATIENCE, || async {
        let (cpu, memory) = read().await?;
        Ok((cpu > 0 && memory > 4_000_000).then_some(cpu))
    })
    .await?;
    eventually("growth of the cpu time", PATIENCE, || async { Ok((read().await?.0 > first).then_some(())) })
        .await?;
    eventually("statistics of the pod", PATIENCE, || async {
        let (memory, cpu) = case.cri.pod_stats(&pod.id).await?;
        Ok((memory > Some(0) && cpu > Some(0)).then_some(()))
    })
    .await
}

/// What containerd does if anything fails between the creation of a container's task and its start.
async fn killed_before_its_start(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let sibling = pod.start(idle("sibling")).await?;
    let container = pod.create(idle("c")).await?;
    let containerd = Containerd::of_stack(&case.stack)?;
    let record = containerd.container(&container.id).await?;
    let parent = containerd.parent(&record.snapshotter, &record.snapshot_key).await?;
    let key = format!("{}-task", container.id);
    let mounts = containerd.prepare(&record.snapshotter, &key, &parent).await?;
    containerd.create_task(&container.id, mounts, Stdio::default(), case.in_vm(), None).await?;
    let (client, id) = (containerd.clone(), container.id.clone());
    let waiting = tokio::spawn(async move { client.wait(&id, "").await });
    containerd.kill(&container.id, "", 9, true).await?;
    let code = tokio::time::timeout(PATIENCE, waiting).await.context("its exit is not reported")???;
    ensure!(code == 137, "it exited with {code}");
    let code = containerd.delete(&container.id, "").await?;
    ensure!(code == 137, "it was deleted after {code}");
    ensure!(sibling.sh("echo here").await? == "here");
    containerd.remove_snapshot(&record.snapshotter, &key).await?;
    case.cri.remove(&container.id).await?;
    Ok(())
}
