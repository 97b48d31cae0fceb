//! The daemon may end at any moment; the pods don't mind.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use sandboxer_e2e::case::{Case, PATIENCE, idle};
use sandboxer_e2e::eventually;

crate::cases![
    VmAlone: killed_and_started_again, ended_politely_and_started_again, killed_while_a_pod_starts,
    containerd_started_again
];

/// Ends the daemon, starts it again: the same VMM, the pod ready, removable; new pods work.
async fn restart(case: &Case, signal: Signal) -> Result<()> {
    let pod = case.pod().await?;
    pod.start(idle("c")).await?;
    let vmms = case.stack.vmms()?;
    ensure!(vmms.len() == 1, "{vmms:?}");
    case.stack.end("sandboxer", signal).await?;
    ensure!(case.stack.vmms()? == vmms, "the VMM did not outlive the daemon");
    case.stack.run_up()?;
    ensure!(
        case.stack.vmms()? == vmms,
        "the VMM was lost by the daemon's start"
    );
    // containerd connects again with a back-off of at most 3 s.
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    // containerd has declared the containers dead, since their connections don't redial; the pod takes new ones.
    let said = pod
        .output("echo here")
        .await
        .context("a new container in the re-adopted pod")?;
    ensure!(said == "here", "{said}");
    let next = case.pod().await.context("a new pod after the restart")?;
    ensure!(next.output("echo new").await? == "new");
    case.cri.stop_pod(&pod.id).await?;
    case.cri.remove_pod(&pod.id).await?;
    case.clean_up().await?;
    ensure!(
        case.stack.vmms()?.is_empty(),
        "VMMs are left after every pod was removed"
    );
    Ok(())
}

async fn killed_and_started_again(case: Case) -> Result<()> {
    restart(&case, Signal::SIGKILL).await
}

async fn ended_politely_and_started_again(case: Case) -> Result<()> {
    restart(&case, Signal::SIGTERM).await
}

async fn killed_while_a_pod_starts(case: Case) -> Result<()> {
    for millis in [50, 300, 700] {
        let config = case.pod_config();
        let start = {
            let case = case.clone();
            tokio::spawn(async move { case.cri.run_pod(&config, case.handler).await })
        };
        // The moment of the kill is the point: early, half way, late.
        tokio::time::interval_at(
            tokio::time::Instant::now() + Duration::from_millis(millis),
            PATIENCE,
        )
        .tick()
        .await;
        case.stack.end("sandboxer", Signal::SIGKILL).await?;
        case.stack.run_up()?;
        // Either answer will do; what counts is that none is left half-started.
        let _ = tokio::time::timeout(PATIENCE, start)
            .await
            .context("RunPodSandbox was never answered")??;
        case.clean_up().await?;
        eventually("end of the half-started VMM", PATIENCE, || async {
            Ok(case.stack.vmms()?.is_empty().then_some(()))
        })
        .await?;
    }
    ensure!(case.pod().await?.output("echo fine").await? == "fine");
    Ok(())
}

async fn containerd_started_again(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let vmms = case.stack.vmms()?;
    case.stack.end("containerd", Signal::SIGKILL).await?;
    case.stack.run_up()?;
    ensure!(
        case.stack.vmms()? == vmms,
        "the VMM was lost by containerd's restart"
    );
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    ensure!(container.sh("echo still here").await? == "still here");
    case.cri.stop(&container.id, 10).await?;
    ensure!(
        container.status().await?.exit_code == 0,
        "{:?}",
        container.status().await?
    );
    case.cri.stop_pod(&pod.id).await?;
    Ok(case.cri.remove_pod(&pod.id).await?)
}
