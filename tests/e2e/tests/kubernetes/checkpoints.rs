//! Copies of a saved pod, as a Deployment makes them. On runc the Deployment's pods begin anew; all else is the same.
//!
//! `SANDBOXER_E2E_COPIES` is their number (3).

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::cases;
use crate::node::{eventually, text};
use crate::pods::{PATIENCE, Pod, Run, container, container_status, end_of, merged};

cases![deployment_of_copies];

const COPIES: u32 = 3;
/// Numbers that the source has printed before it is saved.
const WARM: u64 = 20;

/// Counts in memory, prints, and serves what it counted. Ends by TERM with code 7.
const COUNTER: &str = "mkdir -p /tmp/www; httpd -p 8080 -h /tmp/www; n=0; trap 'exit 7' TERM; \
                       while :; do n=$((n+1)); echo $n; echo $n >/tmp/www/n; sleep 0.2 & wait $!; done";

fn counter() -> Value {
    let probes = json!({
        "readinessProbe": { "httpGet": { "path": "/n", "port": 8080 }, "periodSeconds": 1 },
        "livenessProbe": { "exec": { "command": ["test", "-s", "/tmp/www/n"] }, "periodSeconds": 2, "timeoutSeconds": 10 },
    });
    merged(container("c", COUNTER), probes)
}

fn printed(pod: &Pod<'_>) -> Result<Vec<u64>> {
    let log = pod.logs("c", &[])?;
    log.lines().map(|line| line.parse().with_context(|| format!("{line:?} is no number"))).collect()
}

/// Returns the first number of each pod's log; waits until it has counted on from there.
fn counted(pod: &Pod<'_>) -> Result<u64> {
    let all = eventually("a log", PATIENCE, || Ok(printed(pod).ok().filter(|all| all.len() > 5)))?;
    ensure!(all.windows(2).all(|pair| pair[1] == pair[0] + 1), "{}: {all:?} has a gap", pod.name);
    Ok(all[0])
}

fn deployment_of_copies(run: &Run<'_>) -> Result<()> {
    let count = std::env::var("SANDBOXER_E2E_COPIES").map_or(Ok(COPIES), |text| text.parse())?;
    let source = run.ready_pod("source", counter())?;
    let warm = eventually("a warm source", PATIENCE, || {
        Ok(printed(&source)?.last().copied().filter(|last| *last >= WARM))
    })?;
    let mut annotations = json!({});
    if run.in_vm() {
        run.node.save(&source.name, "warm")?;
        annotations = json!({ "io.sandboxer.restore-from": "warm" });
    }
    let copies = run.deployment("copies", count, &annotations, json!({ "containers": [counter()] }))?;

    run.see("copies that are Ready", copies.len(), count);
    let mut addresses = BTreeSet::new();
    for pod in copies.iter().chain([&source]) {
        let status = pod.get()?["status"].clone();
        addresses.insert(status["podIP"].as_str().unwrap_or_default().to_owned());
        run.see(
            &format!("restarts of {}", short(run, pod)),
            &container_status(&status, "c")["restartCount"],
            0,
        );
    }
    run.see("addresses of their own", addresses.len(), count + 1);
    let is_own = |pod: &Pod<'_>| Ok::<_, anyhow::Error>(pod.exec("c", "hostname")? == pod.name);
    run.see(
        "hostnames of their own",
        copies.iter().map(is_own).collect::<Result<Vec<_>>>()?.iter().all(|own| *own),
        true,
    );
    for pod in &copies {
        let first = counted(pod)?;
        ensure!(!run.in_vm() || first > warm, "{} begins at {first}, and the source was at {warm}", pod.name);
        let status = pod.get()?["status"].clone();
        let fetch = format!("http://{}:8080/n", status["podIP"].as_str().unwrap_or_default());
        let served = run.node.inside("curl").args(["-sS", "--max-time", "20", &fetch]).output()?;
        run.see("serves at its address", text(&served.stdout).parse::<u64>().is_ok_and(|n| n >= first), true);
    }
    // What one of them writes is its own.
    let one = copies.first().context("a copy")?;
    one.exec("c", "echo mine >/tmp/mine")?;
    let others: Vec<_> = copies.iter().skip(1).chain([&source]).collect();
    let has = |pod: &&&Pod<'_>| pod.exec("c", "cat /tmp/mine").is_ok();
    run.see("pods that have what another wrote", others.iter().filter(has).count(), 0);
    let output = one.kubectl("exec", &["-c", "c", "--", "sh", "-c", "exit 5"])?;
    run.see("code of an exec", output.status.code().unwrap_or(-1), 5);

    // The end of a restored process is kubelet's, and what follows begins anew.
    one.exec("c", "kill 1")?;
    let ended = one.wait("its end", |status| {
        let last = &container_status(status, "c")["lastState"];
        last.get("terminated").map(|_| end_of(last))
    })?;
    run.see("end of a copy's container", ended, "Error/7");
    one.ready()?;
    run.see("first number of the next container", counted(one)?, 1);
    run.see("restarts of the source", &container_status(&source.get()?["status"], "c")["restartCount"], 0);
    counted(&source).map(drop)
}

/// Returns what is a pod's on both classes.
fn short(run: &Run<'_>, pod: &Pod<'_>) -> &'static str {
    if pod.name == run.name("source") { "the source" } else { "a copy" }
}
