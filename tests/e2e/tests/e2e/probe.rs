//! The probe against independent observers of the same pods: containerd's own clock, and a few lines of shell.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::ContainerState;
use sandboxer_e2e::case::{BUSYBOX, Case, PATIENCE};
use sandboxer_probe::measure::{self, Bench};
use sandboxer_probe::memory::{self, Sweep};
use sandboxer_probe::options::Network;
use sandboxer_probe::runtime::Listed;
use sandboxer_probe::summary::median;
use sandboxer_probe::timeline::{self, RUN_LABEL, Recipe};
use sandboxer_probe::{ledger, overhead};
use tokio_util::sync::CancellationToken;

crate::cases![
    Any: times_agree_with_containerds_clock, memory_agrees_with_a_shell, a_sweep_whose_pods_are_removed_has_no_figure;
    Vm: a_pods_vm_boots_alone
];

fn bench(case: &Case) -> Result<(Bench, Recipe)> {
    let endpoint = case.stack.env("CONTAINER_RUNTIME_ENDPOINT")?;
    let mut recipe = measure::recipe(BUSYBOX, Network::Pod, PATIENCE);
    recipe.cgroup_parent = case.stack.env("SANDBOXER_CGROUP_PARENT")?.to_owned();
    Ok((Bench::open(endpoint, None)?, recipe))
}

/// containerd stamps each line of a log when it reads it, by the wall clock; the probe stamps the same line
/// when it stands in the file, by the monotonic one.
async fn times_agree_with_containerds_clock(case: Case) -> Result<()> {
    let (bench, recipe) = bench(&case)?;
    let own = overhead::measure(&bench.runtime, &bench.watch).await.per_pod_ms.context("no overhead")?;
    let never = CancellationToken::new();
    let mut excess = Vec::new();
    for round in 0..5 {
        let name = format!("{}-{round}", recipe.run);
        let released = SystemTime::now();
        let start = timeline::start(&bench.runtime, &bench.watch, &recipe, case.handler, &name, &never).await;
        let log = std::fs::read_to_string(bench.watch.dir().join(format!("{name}.log")));
        timeline::remove(&bench.runtime, &bench.watch, &recipe, &name, start.pod_id.as_deref()).await?;
        start.end?;
        let stamp: jiff::Timestamp = log?.split(' ').next().context("an empty log")?.parse()?;
        let by_containerd = SystemTime::from(stamp).duration_since(released)?;
        let by_probe = start.stamps.first_byte.context("no first byte")?;
        excess.push((by_probe.as_secs_f64() - by_containerd.as_secs_f64()) * 1e3);
    }
    // The line is written after it was stamped, so the probe cannot be earlier; 5 ms are for containerd's own
    // way from the stamp to the write on two busy cores.
    let middle = median(&excess).context("no times")?;
    ensure!(
        excess.iter().all(|ms| *ms > -1.0) && middle <= own + 5.0,
        "the probe is {middle:.2} ms later than containerd's clock, its stated share is {own:.2} ms: {excess:?}"
    );
    Ok(())
}

/// The processes that name a pod, and their PSS, by `grep` and `awk`.
async fn memory_agrees_with_a_shell(case: Case) -> Result<()> {
    let (bench, recipe) = bench(&case)?;
    let never = CancellationToken::new();
    let start =
        timeline::start(&bench.runtime, &bench.watch, &recipe, case.handler, &recipe.run, &never).await;
    let compared = async {
        start.end?;
        let pod = start.pod_id.context("no pod")?;
        let mine = |listed: &Listed| listed.labels.get(RUN_LABEL) == Some(&recipe.run);
        let mut last = String::new();
        // Memory moves while a container settles: the two looks have to fall together once.
        for _ in 0..5 {
            let ledger = ledger::take(&bench.runtime, mine, &BTreeSet::new()).await?;
            let of_pod: BTreeSet<i32> =
                ledger.entries.iter().filter(|e| e.found.pod.is_some()).map(|e| e.pid).collect();
            // A thread of the kernel that works for the pod has no memory.
            let with_memory: BTreeSet<i32> = ledger
                .entries
                .iter()
                .filter(|e| e.found.pod.is_some() && !e.pss_kib.is_empty())
                .map(|e| e.pid)
                .collect();
            let named = shell(&format!("grep -l -a -s -e {pod} /proc/[0-9]*/cmdline | cut -d/ -f3"))?;
            let named: BTreeSet<i32> = named.lines().filter_map(|pid| pid.parse().ok()).collect();
            let alive: Vec<&i32> = named.iter().filter(|pid| is_not_a_tool(**pid)).collect();
            ensure!(
                alive.iter().all(|pid| of_pod.contains(pid)),
                "a shell finds {alive:?} by the pod's id, the ledger has {of_pod:?}"
            );
            let files: String = with_memory.iter().map(|pid| format!(" /proc/{pid}/smaps_rollup")).collect();
            let sum: u64 = shell(&format!("awk '/^Pss:/ {{ sum += $2 }} END {{ print sum }}'{files}"))?
                .trim()
                .parse()?;
            let by_ledger: u64 = ledger
                .entries
                .iter()
                .filter(|entry| entry.found.pod.is_some())
                .flat_map(|entry| entry.pss_kib.values())
                .sum();
            last = format!("{by_ledger} KiB by the ledger, {sum} KiB by a shell");
            if by_ledger.abs_diff(sum) * 50 <= sum {
                return Ok(());
            }
        }
        anyhow::bail!(last)
    };
    let outcome = compared.await;
    tokio::time::timeout(Duration::from_secs(60), timeline::remove_all(&bench.runtime, &recipe.run))
        .await??;
    outcome
}

/// As `sandboxer-cli startup --bare-boot` does, with the command line of a pod's VMM. Only QEMU has all of a VM there.
async fn a_pods_vm_boots_alone(case: Case) -> Result<()> {
    let (_, recipe) = bench(&case)?;
    let admin = PathBuf::from(case.stack.env("SANDBOXER_SOCKET")?);
    let bench = Bench::open(case.stack.env("CONTAINER_RUNTIME_ENDPOINT")?, Some(&admin))?;
    let vm = bench.bare_boot(&format!("{}-boot", case.handler), &recipe).await;
    let pod = case.pod().await?;
    let vmm = case.vmm_of(&pod.id).await?;
    if std::fs::read_to_string(format!("/proc/{vmm}/comm"))?.starts_with("qemu") {
        vm?.run(PATIENCE).await?;
    } else {
        let error = vm.err().context("a VM without a command line was read")?.to_string();
        ensure!(error.contains("cannot be started alone"), "{error}");
    }
    Ok(())
}

/// Returns the shell that looks has the pod's id in its own command line.
fn is_not_a_tool(pid: i32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    !["sh", "grep", "cut", ""].contains(&name.trim())
}

fn shell(script: &str) -> Result<String> {
    Ok(String::from_utf8(Command::new("sh").args(["-c", script]).output()?.stdout)?)
}

/// As beside a kubelet, which removes pods that it does not know.
async fn a_sweep_whose_pods_are_removed_has_no_figure(case: Case) -> Result<()> {
    let (bench, recipe) = bench(&case)?;
    let run = recipe.run.clone();
    let idle = sandboxer_probe::idle::Windows { length: std::time::Duration::from_secs(5), count: 1 };
    let sweep = Sweep {
        runtimes: vec![case.handler.to_owned()],
        counts: vec![1, 2],
        repeat: 1,
        recipe,
        vm: None,
        idle,
    };
    let (never, mut progress) = (CancellationToken::new(), |_: &memory::Point| {});
    let measured = memory::sweep(&bench.runtime, &bench.watch, None, &sweep, &never, &mut progress);
    let remove = async {
        loop {
            for pod in case.cri.pods((RUN_LABEL, &run)).await? {
                for container in case.cri.containers(&pod.id).await? {
                    // Not before it runs and has printed: a start that fails is another error.
                    if case.cri.status(&container).await?.0.state() == ContainerState::ContainerRunning {
                        tokio::time::sleep(Duration::from_millis(200)).await;
                        case.cri.remove_pod(&pod.id).await?;
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let points = tokio::select! {
        points = measured => points,
        failed = remove => return failed,
    };
    let why = points.partial.context("a sweep without pods is whole")?;
    ensure!(points.points.is_empty() && why.contains(case.handler), "{why}: {:?}", points.points);
    Ok(())
}
