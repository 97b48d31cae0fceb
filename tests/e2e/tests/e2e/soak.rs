//! Churn for as long as is asked, with a look at what the daemon keeps of it.
//!
//! A minute by default, half of it with kills; `SANDBOXER_E2E_SOAK` has other seconds.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use nix::unistd::Pid;
use sandboxer_e2e::case::{Case, PATIENCE};
use sandboxer_e2e::eventually;
use sandboxer_e2e::kubelet::Kubelet;

use crate::faults::{Seen, life, settled};

crate::cases![VmAlone: churn];

/// What a process holds.
#[derive(Debug, Clone, Copy)]
struct Holds {
    files: usize,
    pss_kib: u64,
}

impl Holds {
    fn read(pid: Pid) -> Result<Self> {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let pss =
            rollup.lines().find_map(|line| line.strip_prefix("Pss:")).context("no Pss in smaps_rollup")?;
        let pss_kib = pss.trim().trim_end_matches(" kB").parse()?;
        Ok(Self { files: fs::read_dir(format!("/proc/{pid}/fd"))?.count(), pss_kib })
    }
}

/// Returns what a process has open, for people.
fn open_files(pid: Pid) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.display().to_string())).collect();
    names.sort();
    names
}

/// Slope of the points (s, KiB) in KiB a minute, and its standard error, by least squares.
fn slope(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len() as f64;
    let mean = |coordinate: fn(&(f64, f64)) -> f64| points.iter().map(coordinate).sum::<f64>() / n;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let slope = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread;
    let rest: f64 = points.iter().map(|point| (point.1 - y - slope * (point.0 - x)).powi(2)).sum();
    (60.0 * slope, 60.0 * (rest / (n - 2.0) / spread).sqrt())
}

/// Pods come and go, two at a time. Neither the worker's files nor the front's grow, nor the worker's memory; then
/// the same while the worker is killed again and again.
async fn churn(case: Case) -> Result<()> {
    let seconds = match std::env::var("SANDBOXER_E2E_SOAK") {
        Ok(seconds) => seconds.parse().context("SANDBOXER_E2E_SOAK")?,
        Err(_) => 60,
    };
    let half = Duration::from_secs(seconds) / 2;
    let kubelets = [Kubelet::named(&case, "a")?, Kubelet::named(&case, "b")?];
    let two_lives = || try_join_all(kubelets.iter().map(|kubelet| life(&case, kubelet)));
    let mut seen = Seen::begin(&case, "churn", 1).await?;

    // What is made once is made by then.
    two_lives().await?;
    two_lives().await?;
    let (worker, front) = (case.stack.worker()?, case.stack.pid("sandboxer")?);
    settled(&case).await?;
    let (before, front_before) = (Holds::read(worker)?, Holds::read(front)?);
    let (began, mut memory) = (Instant::now(), Vec::new());
    while began.elapsed() < half {
        two_lives().await?;
        seen.others += 2;
        seen.check().await?;
        memory.push((began.elapsed().as_secs_f64(), Holds::read(worker)?.pss_kib as f64));
    }
    settled(&case).await?;
    ensure!(case.stack.worker()? == worker, "the worker has ended by itself");
    // Files that are open for a moment, such as a record during a sync, are not leaks.
    let what = format!("{} open files or fewer", before.files);
    let after = eventually(&what, PATIENCE, || async {
        Ok(Some(Holds::read(worker)?).filter(|now| now.files <= before.files))
    });
    let after = after.await.with_context(|| format!("open are {:?}", open_files(worker)))?;
    // In the first half what has a bound fills up to it: the last 1,024 events take some ninety pods.
    let memory = memory.split_off(memory.len() / 2);
    if memory.len() > 3 {
        let (slope, error) = slope(&memory);
        println!(
            "PSS of the worker: {slope:+.0} ± {error:.0} KiB a minute, {} rounds of two pods",
            memory.len()
        );
    }
    ensure!(after.pss_kib < before.pss_kib + 2048, "PSS went from {before:?} to {after:?}");

    let began = Instant::now();
    while began.elapsed() < half {
        // Past the second after which the front starts the next one without a pause.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        let (killed, lived) = tokio::join!(
            async {
                tokio::time::sleep(Duration::from_millis(rand::random::<u64>() % 1000)).await;
                case.stack.kill_worker()
            },
            two_lives()
        );
        killed?;
        lived?;
        seen.times += 1;
        seen.others += 2;
        seen.check().await?;
    }
    // What the front has for requests that may still be asked again is forgotten by and by.
    let front_after = Holds::read(front)?;
    ensure!(front_after.files <= front_before.files + 8, "the front: {front_before:?}, then {front_after:?}");
    seen.end().await
}
