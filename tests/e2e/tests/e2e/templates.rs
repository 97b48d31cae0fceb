//! Pods that are copies of one frozen machine, and pods that take a machine that waited.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, stream};
use nix::sys::signal::Signal;
use sandboxer_e2e::case::{Case, PATIENCE, idle};
use sandboxer_e2e::eventually;

crate::cases![
    Vm: nothing_random_is_the_same_in_two_copies, a_handler_may_ask_for_a_boot;
    VmAlone: a_machine_that_waited_is_a_pod_like_others, the_next_daemon_ends_what_waits_and_fills_the_pool_anew
];

/// Pods that start at once while copies are compared.
const AT_ONCE: usize = 4;

/// One line each: what a guest draws by chance, or takes for its own.
const CHANCE: &str = "cat /proc/sys/kernel/random/boot_id /proc/sys/kernel/random/uuid
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo
    head -c 32 /dev/random | od -An -tx1 | tr -d ' \\n'; echo
    grep -F '[stack]' /proc/self/maps | cut -d- -f1
    od -An -tx8 -w16 /proc/self/auxv | awk '$1 == \"0000000000000019\" { print $2 }'";

/// 12 copies by default; SANDBOXER_E2E_COPIES=1000 SANDBOXER_E2E_LIMIT=1800 for the long run.
async fn nothing_random_is_the_same_in_two_copies(case: Case) -> Result<()> {
    let count = match std::env::var("SANDBOXER_E2E_COPIES") {
        Ok(count) => count.parse().context("SANDBOXER_E2E_COPIES")?,
        Err(_) => 12,
    };
    template_is_there(&case).await?;
    let copies: Vec<Result<Vec<String>>> = stream::iter(0..count)
        .map(|n| {
            let case = &case;
            async move {
                let config = case.pod_config();
                let id = case.cri.run_pod(&config, "sandboxer-template").await?;
                let drawn =
                    case.pod_of(&id, config).output(CHANCE).await.with_context(|| format!("copy {n}"))?;
                let way = inspected(case, &id)?["way"].clone();
                ensure!(way == "template", "copy {n} got its machine by {way}");
                case.cri.stop_pod(&id).await?;
                case.cri.remove_pod(&id).await?;
                Ok(drawn.lines().map(str::to_owned).collect())
            }
        })
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    let mut seen = HashMap::new();
    let mut compared = 0;
    for (n, drawn) in copies.into_iter().enumerate() {
        let drawn = drawn?;
        ensure!(drawn.len() == 6, "copy {n} drew {drawn:?}");
        for word in drawn {
            ensure!(word.len() >= 8, "copy {n} drew {word:?}");
            if let Some(other) = seen.insert(word.clone(), n) {
                anyhow::bail!("copies {other} and {n} both drew {word}");
            }
            compared += 1;
        }
    }
    ensure!(compared == 6 * count, "{compared} draws of {count} copies");
    Ok(())
}

async fn a_handler_may_ask_for_a_boot(case: Case) -> Result<()> {
    template_is_there(&case).await?;
    let config = case.pod_config();
    let id = case.cri.run_pod(&config, "sandboxer-boot").await?;
    ensure!(inspected(&case, &id)?["way"] == "boot");
    ensure!(case.pod_of(&id, config).output("hostname").await? == "pod");
    Ok(())
}

async fn a_machine_that_waited_is_a_pod_like_others(case: Case) -> Result<()> {
    pool_is_filled(&case).await?;
    let waiting = case.stack.waiting()?;
    let pod = case.pod().await?;
    ensure!(inspected(&case, &pod.id)?["way"] == "pool");
    let [vmm] = case.stack.vmms()?[..] else { anyhow::bail!("{:?} for one pod", case.stack.vmms()?) };
    ensure!(waiting.contains(&vmm), "VMM {vmm} did not wait");
    // The name is the pod's, the clock the host's, and nothing is left of the rehearsal.
    let container = pod.start(idle("c")).await?;
    ensure!(container.sh("hostname").await? == "pod");
    let drift = container.sh("date +%s").await?.parse::<i64>()? - jiff::Timestamp::now().as_second();
    ensure!(drift.abs() <= 5, "the guest's clock is {drift} s off");
    ensure!(container.sh("ls /sys/fs/cgroup | grep -c pool || true").await? == "0");
    let niceness = std::fs::read_to_string(format!("/proc/{vmm}/stat"))?;
    let niceness = niceness.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(16));
    ensure!(niceness == Some("0"), "the VMM still gives way to others: niceness {niceness:?}");
    case.cri.stop_pod(&pod.id).await?;
    case.cri.remove_pod(&pod.id).await?;
    pool_is_filled(&case).await
}

async fn the_next_daemon_ends_what_waits_and_fills_the_pool_anew(case: Case) -> Result<()> {
    pool_is_filled(&case).await?;
    let pod = case.pod().await?;
    let (taken, waiting) = (case.stack.vmms()?, case.stack.waiting()?);
    case.stack.end("sandboxer", Signal::SIGKILL).await?;
    case.stack.run_up()?;
    eventually("end of what waited", PATIENCE, || async {
        let now = case.stack.waiting()?;
        Ok(waiting.iter().all(|old| !now.contains(old)).then_some(()))
    })
    .await?;
    ensure!(case.stack.vmms()? == taken, "the VMM that a pod had taken did not outlive the daemon");
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    ensure!(pod.output("echo here").await? == "here");
    pool_is_filled(&case).await
}

/// What `sandboxer-cli inspect` says of a pod.
fn inspected(case: &Case, id: &str) -> Result<serde_json::Value> {
    told(case, &["inspect", id])
}

pub fn told(case: &Case, words: &[&str]) -> Result<serde_json::Value> {
    let output = case.stack.command("sandboxer-cli").args(words).arg("--json").output()?;
    ensure!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

async fn template_is_there(case: &Case) -> Result<()> {
    let built = case.stack.command("sandboxer-cli").args(["template", "build"]).output()?;
    ensure!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    Ok(())
}

pub async fn pool_is_filled(case: &Case) -> Result<()> {
    eventually("a machine in the pool", PATIENCE, || async {
        let pool = told(case, &["template", "list"])?;
        Ok(pool["pool"].as_array().is_some_and(|pool| !pool.is_empty()).then_some(()))
    })
    .await
}
