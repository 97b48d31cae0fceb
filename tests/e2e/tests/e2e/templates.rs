//! Pods that are copies of one frozen VM, and pods that take a VM that waited.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, stream};
use k8s_cri::v1::PodSandboxConfig;
use nix::sys::signal::Signal;
use sandboxer_e2e::case::{Case, PATIENCE, idle};
use sandboxer_e2e::eventually;

crate::cases![
    Vm: nothing_random_is_the_same_in_two_copies, a_handler_may_ask_for_a_boot;
    VmAlone: a_vm_that_waited_is_a_pod_like_others, the_next_daemon_ends_what_waits_and_fills_the_pool_anew,
        a_damaged_template_is_named_made_anew_and_can_be_removed
];

/// Pods that start at once while copies are compared.
const AT_ONCE: usize = 4;

/// Lines that [`CHANCE`] prints.
const DRAWS: usize = 6;
/// One line each: what a guest draws by chance, or takes for its own.
const CHANCE: &str = "cat /proc/sys/kernel/random/boot_id /proc/sys/kernel/random/uuid
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo
    head -c 32 /dev/random | od -An -tx1 | tr -d ' \\n'; echo
    grep -F '[stack]' /proc/self/maps | cut -d- -f1
    od -An -tx8 -w16 /proc/self/auxv | awk '$1 == \"0000000000000019\" { print $2 }'";

/// Of each kind 6 copies by default, made for the pod or made to wait; SANDBOXER_E2E_COPIES=500
/// SANDBOXER_E2E_LIMIT=3600 for the long run.
async fn nothing_random_is_the_same_in_two_copies(case: Case) -> Result<()> {
    let count = match std::env::var("SANDBOXER_E2E_COPIES") {
        Ok(count) => count.parse().context("SANDBOXER_E2E_COPIES")?,
        Err(_) => 6,
    };
    template_is_there(&case).await?;
    let mut seen = HashMap::new();
    for (handler, start_path) in [("sandboxer-template", "template"), ("sandboxer", "pool")] {
        let copies: Vec<Result<Vec<String>>> = stream::iter(0..count)
            .map(|_| drawn(&case, handler, start_path))
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        for (n, drawn) in copies.into_iter().enumerate() {
            let copy = format!("copy {n} by {start_path}");
            let drawn = drawn.with_context(|| copy.clone())?;
            ensure!(drawn.len() == DRAWS, "{copy} drew {drawn:?}");
            for word in drawn {
                ensure!(word.len() >= 8, "{copy} drew {word:?}");
                if let Some(other) = seen.insert(word.clone(), copy.clone()) {
                    anyhow::bail!("{other} and {copy} both drew {word}");
                }
            }
        }
    }
    ensure!(seen.len() == 2 * DRAWS * count, "{} draws of {} copies", seen.len(), 2 * count);
    Ok(())
}

/// Returns the random draws of a pod that started on this path, possibly after retries: another pod may take
/// the VM that waited.
async fn drawn(case: &Case, handler: &str, start_path: &str) -> Result<Vec<String>> {
    eventually(&format!("a pod whose VM came by {start_path}"), PATIENCE * 10, || async {
        if start_path == "pool" {
            pool_is_filled(case).await?;
        }
        let config = case.pod_config();
        let id = case.cri.run_pod(&config, handler).await?;
        let came = inspected(case, &id)?["start_path"].clone();
        let drawn =
            if came == start_path { Some(case.pod_of(&id, config).output(CHANCE).await?) } else { None };
        case.cri.stop_pod(&id).await?;
        case.cri.remove_pod(&id).await?;
        Ok(drawn.map(|drawn| drawn.lines().map(str::to_owned).collect()))
    })
    .await
}

async fn a_damaged_template_is_named_made_anew_and_can_be_removed(case: Case) -> Result<()> {
    // A size that no other pod requests: work on its template is for this pod.
    let sized = || async {
        let adjust = |config: &mut PodSandboxConfig| {
            config.annotations.insert("io.sandboxer.memory".into(), "320".into());
        };
        let pod = case.pod_with(adjust).await?;
        anyhow::Ok((inspected(&case, &pod.id)?["start_path"].clone(), pod))
    };
    let built = case.stack.cli_json(&["template", "build", "--memory", "320"])?;
    let key = built[0]["key"].as_str().with_context(|| format!("no key in {built}"))?.to_owned();
    ensure!(listed(&case, &key)?.is_some_and(|template| template["in_use"] == true), "it is not in use");
    ensure!(case.stack.cli_json(&["template", "verify", &key])?[0]["problem"] == "");
    let (start_path, copy) = sized().await?;
    ensure!(start_path != "boot", "the template was not used");

    let memory = case.stack.daemon_dirs()[1].join("templates").join(&key).join("memory");
    let file = File::options().read(true).write(true).open(&memory)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, 20 << 20)?;
    file.write_all_at(&[byte[0] ^ 1], 20 << 20)?;
    let verified = case.stack.command("sandboxer-cli").args(["template", "verify"]).output()?;
    let output =
        format!("{}{}", String::from_utf8_lossy(&verified.stdout), String::from_utf8_lossy(&verified.stderr));
    ensure!(verified.status.code() == Some(1), "{:?}: {output}", verified.status);
    ensure!(output.contains("memory\" is damaged: checksum mismatch"), "{output}");
    // What pods are copies of was read before.
    ensure!(sized().await?.0 != "boot");

    let worker = case.stack.kill_worker()?;
    eventually("the next worker", PATIENCE, || async {
        Ok(case.stack.worker().ok().filter(|now| *now != worker))
    })
    .await?;
    ensure!(sized().await?.0 == "boot", "a pod is a copy of what is damaged");
    eventually("a template in its place", PATIENCE, || async {
        Ok(listed(&case, &key)?.filter(|template| template["in_use"] == true))
    })
    .await?;
    ensure!(case.stack.cli_json(&["template", "verify", &key])?[0]["problem"] == "");
    ensure!(sized().await?.0 != "boot");

    case.stack.cli_json(&["template", "rm", &key])?;
    ensure!(listed(&case, &key)?.is_none(), "it is listed still");
    ensure!(!memory.exists(), "its files are there still");
    ensure!(copy.output("echo here").await? == "here", "its copy is gone");
    let again = case.stack.command("sandboxer-cli").args(["template", "rm", &key]).output()?;
    ensure!(!again.status.success(), "it was removed twice");
    Ok(())
}

/// Returns what `sandboxer-cli template list` says of the template of this name.
fn listed(case: &Case, key: &str) -> Result<Option<serde_json::Value>> {
    let list = case.stack.cli_json(&["template", "list"])?;
    let templates = list["templates"].as_array().with_context(|| format!("no templates in {list}"))?;
    Ok(templates.iter().find(|template| template["key"] == key).cloned())
}

async fn a_handler_may_ask_for_a_boot(case: Case) -> Result<()> {
    template_is_there(&case).await?;
    let config = case.pod_config();
    let id = case.cri.run_pod(&config, "sandboxer-boot").await?;
    ensure!(inspected(&case, &id)?["start_path"] == "boot");
    ensure!(case.pod_of(&id, config).output("hostname").await? == "pod");
    Ok(())
}

async fn a_vm_that_waited_is_a_pod_like_others(case: Case) -> Result<()> {
    pool_is_filled(&case).await?;
    let waiting = case.stack.waiting()?;
    let pod = case.pod().await?;
    ensure!(inspected(&case, &pod.id)?["start_path"] == "pool");
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

/// Returns what `sandboxer-cli inspect` says of a pod.
fn inspected(case: &Case, id: &str) -> Result<serde_json::Value> {
    case.stack.cli_json(&["inspect", id])
}

pub async fn template_is_there(case: &Case) -> Result<()> {
    case.stack.cli(&["template", "build"]).map(drop)
}

pub async fn pool_is_filled(case: &Case) -> Result<()> {
    eventually("a VM in the pool", PATIENCE, || async {
        let pool = case.stack.cli_json(&["template", "list"])?;
        Ok(pool["pool"].as_array().is_some_and(|pool| !pool.is_empty()).then_some(()))
    })
    .await
}
