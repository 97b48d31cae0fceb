//! Parts of the node die or hang: what kubelet sees is what it sees of runc's pods.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::stack::Victim;
use serde_json::{Value, json};

use crate::cases;
use crate::node::{eventually, pause};
use crate::pods::{Pod, Run, WAIT, container, container_status, end_of, is_ready, merged};

cases![
    alone: worker_killed,
    front_killed,
    vm_killed,
    containerd_restarted,
    containerd_killed_beside_an_older_sandbox,
    kubelet_restarted,
    hung_pod,
];

/// Two probes and two signals without an answer, of the default `vm.agent_timeout` (10 s) each, and a start.
const RESTARTED_WITHIN: Duration = Duration::from_secs(90);

/// Counts, so that a gap shows.
const COUNT: &str = "i=0; trap 'exit 0' TERM; while :; do i=$((i+1)); echo $i; sleep 0.2; done";

fn restarts(pod: &Pod<'_>) -> Result<Value> {
    Ok(container_status(&pod.get()?["status"], "c")["restartCount"].clone())
}

/// Notes that a pod lives as if nothing had been: with its container, its log and its streams.
fn lives_on(run: &Run<'_>, pod: &Pod<'_>) -> Result<()> {
    let before = pod.logs("c", &[])?.lines().count();
    eventually("further output", Duration::from_secs(30), || {
        Ok((pod.logs("c", &[])?.lines().count() > before + 5).then_some(()))
    })?;
    run.see("restarts", restarts(pod)?, 0);
    run.see("Ready", is_ready(&pod.get()?["status"]), true);
    let log = pod.logs("c", &[])?;
    let gap = log.lines().enumerate().find(|(at, line)| line.parse() != Ok(at + 1));
    run.see("gap in the log", format!("{gap:?}"), "None");
    run.see("exec", pod.exec("c", "echo here")?, "here");
    run.see("killed by kubelet", pod.events(|reason| reason == "Killing")?.len(), 0);
    Ok(())
}

fn worker_killed(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", COUNT))?;
    if run.in_vm() {
        run.node.stack().kill_worker()?;
    }
    pause(Duration::from_secs(3));
    lives_on(run, &pod)?;
    // kubelet asks for every pod each second.
    let pod = run.ready_pod("next", container("c", WAIT))?;
    run.see("next pod", is_ready(&pod.get()?["status"]), true);
    Ok(())
}

/// The front has containerd's connections; the next one takes them over from its keeper.
fn front_killed(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", COUNT))?;
    for victim in [Victim::Front, Victim::Both] {
        if run.in_vm() {
            run.node.stack().kill(victim)?;
        }
        pause(Duration::from_secs(5));
        run.see(&format!("exec after {victim:?}"), pod.exec("c", "echo here")?, "here");
    }
    lives_on(run, &pod)?;
    let next = run.ready_pod("next", container("c", WAIT))?;
    run.see("next pod", next.exec("c", "echo here")?, "here");
    run.see("deleted within 30 s", pod.delete()? < Duration::from_secs(30), true);
    Ok(())
}

/// Kills what the pod is: its VM, or its pause process and with it the sandbox.
fn kill_sandbox(run: &Run<'_>, pod: &Pod<'_>) -> Result<()> {
    if run.in_vm() {
        return Ok(kill(run.node.vmm(&pod.name)?, Signal::SIGKILL)?);
    }
    let pids = run.node.processes(&pod.uid)?;
    let pause = pids.into_iter().find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.starts_with(b"/pause")
    });
    Ok(kill(pause.context("no pause process")?, Signal::SIGKILL)?)
}

fn vm_killed(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", WAIT))?;
    kill_sandbox(run, &pod)?;
    let status = pod.wait("a restart", |status| {
        let restarted = container_status(status, "c")["restartCount"].as_u64() >= Some(1);
        (restarted && is_ready(status)).then(|| status.clone())
    })?;
    run.see("restarts", &container_status(&status, "c")["restartCount"], 1);
    run.see("told", pod.events(|reason| reason == "SandboxChanged")?.len(), 1);
    run.see("exec", pod.exec("c", "echo here")?, "here");
    // Its processes end by KILL in any case: the guest ends with its VM.
    let script = "trap '' TERM; while :; do sleep 1; done";
    let once =
        run.pod("once", json!({ "restartPolicy": "Never", "containers": [container("c", script)] }))?;
    once.ready()?;
    kill_sandbox(run, &once)?;
    run.see("one that is never restarted", once.ended().unwrap_or_default(), "Failed");
    run.see("its end", end_of(&container_status(&once.get()?["status"], "c")["state"]), "Error/137");
    Ok(())
}

fn containerd_restarted(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", COUNT))?;
    run.node.restart("containerd", Signal::SIGTERM)?;
    // kubelet has seen it by now: it asks each second.
    pause(Duration::from_secs(5));
    lives_on(run, &pod)?;
    run.node.restart("containerd", Signal::SIGKILL)?;
    pause(Duration::from_secs(5));
    run.see("restarts after SIGKILL", restarts(&pod)?, 0);
    run.see("exec after SIGKILL", pod.exec("c", "echo here")?, "here");
    Ok(())
}

/// kubelet takes the newest sandbox of a pod for the pod's; an older dead one must stay the older one.
fn containerd_killed_beside_an_older_sandbox(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", WAIT))?;
    kill_sandbox(run, &pod)?;
    pod.wait("a restart", |status| {
        (container_status(status, "c")["restartCount"].as_u64() >= Some(1) && is_ready(status)).then_some(())
    })?;
    let before = restarts(&pod)?;
    run.see("sandboxes", run.node.sandboxes(&pod.uid)?.len(), 2);
    // Said before the restart, of our pods only: containerd itself has those of runc.
    let check = run.node.checked("sandboxes")?;
    let named = check["seen"].as_str().is_some_and(|seen| seen.contains(&pod.name));
    ensure!(named == run.in_vm(), "sandboxer-cli check: {check}");
    run.node.restart("containerd", Signal::SIGKILL)?;
    let since_2020 = |created_at: &i64| *created_at > 1_577_836_800_000_000_000;
    let sandboxes = run.node.sandboxes(&pod.uid)?;
    run.see("sandboxes after the restart", sandboxes.len(), 2);
    run.see("all have the time of their creation", sandboxes.iter().all(since_2020), true);
    pause(Duration::from_secs(15));
    let after = restarts(&pod)?;
    run.see("restarted by containerd's restart", after != before, false);
    run.see("Ready", is_ready(&pod.get()?["status"]), true);
    run.see("other sandboxes", pod.events(|reason| reason == "SandboxChanged")?.len(), 1);
    Ok(())
}

fn kubelet_restarted(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", COUNT))?;
    run.node.restart("kubelet", Signal::SIGKILL)?;
    pause(Duration::from_secs(5));
    // It answers once it has read its pods.
    eventually("kubelet", Duration::from_secs(60), || Ok(pod.exec("c", "true").ok()))?;
    lives_on(run, &pod)
}

/// A guest hangs, or beside it a probe's command: kubelet's probe gets no answer. Other pods must not wait for it.
fn hung_pod(run: &Run<'_>) -> Result<()> {
    let hangs = json!(["sh", "-c", "if [ -e /tmp/hang ]; then exec sleep 1000; fi"]);
    let probe = json!({
        "exec": { "command": hangs }, "periodSeconds": 2, "timeoutSeconds": 1, "failureThreshold": 2,
    });
    let other = run.ready_pod("other", container("c", WAIT))?;
    let probed = merged(container("c", WAIT), json!({ "livenessProbe": probe }));
    let pod = run.ready_pod("", probed)?;
    let stopped = if run.in_vm() {
        let vmm = run.node.vmm(&pod.name)?;
        kill(vmm, Signal::SIGSTOP)?;
        Some(vmm)
    } else {
        pod.exec("c", "touch /tmp/hang")?;
        None
    };
    let began = Instant::now();
    let mut longest = Duration::ZERO;
    let restarted = loop {
        let (_, took) = run.node.summary(&other.name)?;
        longest = longest.max(took);
        if restarts(&pod)?.as_u64() >= Some(1) {
            break Some(began.elapsed());
        }
        if began.elapsed() > RESTARTED_WITHIN {
            break None;
        }
        pause(Duration::from_millis(500));
    };
    eprintln!("{}: restarted after {restarted:?}, statistics of the node took {longest:?} at most", pod.name);
    run.see("restarted by its probe", restarted.is_some(), true);
    run.see("statistics of the node within 3 s", longest < Duration::from_secs(3), true);
    let failed = pod.events(|reason| reason == "Unhealthy")?;
    run.see("told", failed.iter().any(|(_, message)| message.starts_with("Liveness probe failed")), true);
    let took = pod.delete()?;
    run.see("deleted within 30 s", took < Duration::from_secs(30), true);
    if let Some(vmm) = stopped {
        // It was killed, if all went well.
        let _ = kill(vmm, Signal::SIGCONT);
    }
    Ok(())
}
