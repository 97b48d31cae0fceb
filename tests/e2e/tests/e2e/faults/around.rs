//! What is around the worker dies: VMMs, containerd, the whole daemon.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::case::{Case, PATIENCE, idle, shell};
use sandboxer_e2e::eventually;

use super::Seen;

/// Each takes its own pod along, and no other.
pub async fn vmms_killed(case: Case) -> Result<()> {
    let mut seen = Seen::begin(&case, "VMM of another pod killed", 2).await?;
    for _ in 0..3 {
        let known = case.stack.vmms()?;
        let pod = case.pod().await?;
        let container = pod.start(idle("c")).await?;
        let victim = case.stack.vmms()?.into_iter().find(|pid| !known.contains(pid)).context("the VMM")?;
        kill(victim, Signal::SIGKILL)?;
        pod.not_ready().await?;
        container.ended().await?;
        case.cri.stop_pod(&pod.id).await?;
        case.cri.remove_pod(&pod.id).await?;
        seen.times += 1;
        seen.check().await?;
    }
    seen.end().await
}

pub async fn containerd_killed(case: Case) -> Result<()> {
    let mut seen = Seen::begin(&case, "containerd killed", 0).await?;
    kill_containerd(&mut seen, false).await?;
    seen.end().await
}

pub async fn containerd_and_worker_killed(case: Case) -> Result<()> {
    let mut seen = Seen::begin(&case, "containerd and worker killed at once", 0).await?;
    kill_containerd(&mut seen, true).await?;
    seen.end().await
}

/// containerd's own log files are its to continue, so that lines are not counted here.
async fn kill_containerd(seen: &mut Seen<'_>, worker: bool) -> Result<()> {
    let case = seen.case;
    let pod = case.pod().await?;
    let container = pod.start(shell("c", "trap 'exit 7' TERM; while :; do usleep 20000; done")).await?;
    seen.others += 1;
    for _ in 0..3 {
        if worker {
            case.stack.kill_worker()?;
        }
        case.stack.end("containerd", Signal::SIGKILL).await?;
        case.stack.run_up()?;
        eventually("pod ready again", PATIENCE, || async {
            Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
        })
        .await?;
        ensure!(container.sh("echo still here").await? == "still here");
        seen.times += 1;
    }
    case.cri.stop(&container.id, 30).await?;
    ensure!(container.status().await?.exit_code == 7, "{:?}", container.status().await?);
    Ok(())
}

/// Where there is no systemd: containerd declares the containers dead, for its connections are gone; the pods take new ones.
pub async fn keeper_killed(case: Case) -> Result<()> {
    all_killed(&case, "without systemd, keeper killed (pods stay; containerd ends their containers)", false)
        .await
}

pub async fn everything_killed(case: Case) -> Result<()> {
    all_killed(&case, "without systemd, all processes of the daemon killed at once (the same)", true).await
}

async fn all_killed(case: &Case, fault: &str, at_once: bool) -> Result<()> {
    let mut seen = Seen::begin(case, fault, 0).await?;
    for _ in 0..2 {
        let pod = case.pod().await?;
        let container = pod.start(idle("c")).await?;
        let vmms = case.stack.vmms()?;
        if at_once {
            let children = [case.stack.front()?, case.stack.worker()?];
            children.into_iter().try_for_each(|child| kill(child, Signal::SIGKILL))?;
        }
        case.stack.end("sandboxer", Signal::SIGKILL).await?;
        case.stack.run_up()?;
        ensure!(case.stack.vmms()? == vmms, "a VMM was lost");
        eventually("pod ready again", PATIENCE, || async {
            Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
        })
        .await?;
        // As a kubelet does with a container that it is told has ended.
        let status = container.ended().await?;
        ensure!(status.exit_code == 255, "{status:?}");
        case.cri.remove(&container.id).await?;
        ensure!(pod.output("echo here").await? == "here");
        case.remove(&pod.id).await?;
        seen.times += 1;
        seen.others += 1;
    }
    seen.end().await
}
