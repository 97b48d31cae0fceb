//! Faults, and what became of the pods: each case adds its line to the ledger.
//!
//! In each, bystanders count aloud all the while: they stay ready, take execs, and no line of their logs is lost
//! or doubled.

mod around;
mod disk;
pub mod streams;
pub mod worker;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{ContainerConfig, Mount};
use sandboxer_e2e::bystander::{Bystander, probed};
use sandboxer_e2e::case::{Case, PATIENCE, idle, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::insist::{insist, once_seen};
use sandboxer_e2e::kubelet::Kubelet;
use sandboxer_e2e::ledger::{self, Line};

use around::{
    containerd_and_worker_killed, containerd_killed, everything_killed, keeper_killed, vmms_killed,
};
use disk::{disk_full, disk_read_only};
use worker::{clock_jumps, killed_at_every_point, killed_at_random, memory_runs_out, upgraded_under_pods};

crate::cases![
    VmAlone: killed_at_every_point, killed_at_random, memory_runs_out, clock_jumps, upgraded_under_pods, vmms_killed,
    containerd_killed, containerd_and_worker_killed, keeper_killed, everything_killed, disk_full, disk_read_only
];

/// What a case has seen so far.
pub struct Seen<'a> {
    case: &'a Case,
    fault: &'a str,
    /// So often by now.
    pub times: usize,
    bystanders: Vec<Bystander>,
    /// Pods that the case itself ended, or that were in the making.
    pub others: usize,
    /// Lines of logs, each there once.
    lines: usize,
}

impl<'a> Seen<'a> {
    /// Starts `bystanders`.
    pub async fn begin(case: &'a Case, fault: &'a str, bystanders: usize) -> Result<Self> {
        let mut all = Vec::new();
        for _ in 0..bystanders {
            all.push(Bystander::start(case, 20_000).await?);
        }
        Ok(Self { case, fault, times: 0, bystanders: all, others: 0, lines: 0 })
    }

    /// The bystanders have not noticed.
    pub async fn check(&self) -> Result<()> {
        for (n, bystander) in self.bystanders.iter().enumerate() {
            bystander
                .check()
                .await
                .with_context(|| format!("bystander {n} after {} times: {}", self.times, self.fault))?;
        }
        Ok(())
    }

    /// Ends the bystanders, removes all pods, and notes what was seen.
    pub async fn end(mut self) -> Result<()> {
        self.end_pods().await?;
        self.close().await
    }

    /// Ends the bystanders and removes all pods.
    pub async fn end_pods(&mut self) -> Result<()> {
        for bystander in std::mem::take(&mut self.bystanders) {
            self.lines += bystander.end(self.case).await?;
            self.others += 1;
        }
        self.case.clean_up().await
    }

    /// Looks what is left, and notes what was seen.
    pub async fn close(self) -> Result<()> {
        let left = self.case.stack.left().await?;
        ensure!(left.is_empty(), "left: {}", left.join(", "));
        ledger::note(Line {
            fault: self.fault.to_owned(),
            times: self.times,
            pods: self.others,
            lost: 0,
            lines: self.lines,
            lines_lost: 0,
            left: left.len(),
            // `sandboxer-faults-the-case`.
            case: self.case.name.replace('-', "_").replacen('_', "::", 2),
            day: jiff::Timestamp::now().strftime("%F").to_string(),
        });
        Ok(())
    }
}

/// Waits until the pool is as full as it gets, so that what the daemon holds can be compared.
pub async fn settled(case: &Case) -> Result<()> {
    // On a busy host without KVM, a template and its copies take longer than what others wait for.
    eventually("the pool to be full", PATIENCE * 4, || async {
        Ok((case.stack.waiting()?.len() >= 2).then_some(()))
    })
    .await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}

/// A pod's whole life, with all that pods have. What a kubelet would not ask twice, it asks once.
pub async fn life(case: &Case, kubelet: &Kubelet) -> Result<()> {
    let settings = kubelet.files("configmap", "settings", &[("color", "red")])?;
    let scratch = kubelet.empty_dir("scratch")?;
    let host = case.stack.dir().join("hostpath");
    fs::create_dir_all(&host)?;
    fs::write(host.join("file"), "of the host")?;

    let mut config = case.pod_config();
    config.metadata.get_or_insert_default().uid = kubelet.uid();
    let pod = insist("start a pod", || case.cri.run_pod(&config, case.handler)).await?;
    let pod = case.pod_of(&pod, config);
    let mounted = [("/settings", &settings), ("/scratch", &scratch), ("/host", &host)];
    // Its input is none, so it ends by itself.
    let container = pod.start_at_last(with_mounts(shell("c", "echo begins; cat; exit 5"), &mounted)).await?;
    let waits = pod.start_at_last(with_mounts(idle("waits"), &mounted)).await?;
    let read = probed(&waits, "cat /settings/color /host/file; echo x > /scratch/x; cat /scratch/x").await?;
    ensure!(read == "redof the hostx", "{read}");
    case.vmm_cgroups(&pod.id).await?;
    let ended = container.ended().await?;
    ensure!(ended.exit_code == 5, "{ended:?}");
    ensure!(container.logs()?.stdout == "begins\n", "{:?}", container.logs()?);
    once_seen(|| case.cri.stop(&waits.id, 30)).await.context("stop a container")?;
    ensure!(waits.status().await?.exit_code == 0, "{:?}", waits.status().await?);
    case.cri.remove(&waits.id).await.context("remove a container")?;
    insist("stop the pod", || case.cri.stop_pod(&pod.id)).await?;
    insist("remove the pod", || case.cri.remove_pod(&pod.id)).await
}

fn with_mounts(mut config: ContainerConfig, mounts: &[(&str, &PathBuf)]) -> ContainerConfig {
    for (at, host) in mounts {
        config.mounts.push(Mount {
            container_path: (*at).to_owned(),
            host_path: host.display().to_string(),
            ..Default::default()
        });
    }
    config
}
