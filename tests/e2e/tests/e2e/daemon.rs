//! The daemon may end at any moment; the pods don't mind.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use sandboxer_e2e::case::{Case, PATIENCE, idle};
use sandboxer_e2e::eventually;

use crate::templates::pool_is_filled;

crate::cases![
    VmAlone: killed_and_started_again, ended_politely_and_started_again, killed_while_a_pod_starts,
    containerd_started_again, vmm_that_does_not_work, record_that_is_not_understood
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
    ensure!(case.stack.vmms()? == vmms, "the VMM was lost by the daemon's start");
    // containerd connects again with a back-off of at most 3 s.
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    // containerd has declared the containers dead, since their connections don't redial; the pod takes new ones.
    let output = pod.output("echo here").await.context("a new container in the re-adopted pod")?;
    ensure!(output == "here", "{output}");
    let next = case.pod().await.context("a new pod after the restart")?;
    ensure!(next.output("echo new").await? == "new");
    case.remove(&pod.id).await?;
    case.clean_up().await?;
    ensure!(case.stack.vmms()?.is_empty(), "VMMs are left after every pod was removed");
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
        // The moment of the kill varies: early, half-way, late.
        tokio::time::interval_at(tokio::time::Instant::now() + Duration::from_millis(millis), PATIENCE)
            .tick()
            .await;
        case.stack.end("sandboxer", Signal::SIGKILL).await?;
        case.stack.run_up()?;
        // Either answer will do; what counts is that none is left half-started.
        let _ = tokio::time::timeout(PATIENCE, start).await.context("RunPodSandbox was never answered")??;
        reached_again(&case).await?;
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
    ensure!(case.stack.vmms()? == vmms, "the VMM was lost by containerd's restart");
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    ensure!(container.sh("echo still here").await? == "still here");
    case.cri.stop(&container.id, 10).await?;
    ensure!(container.status().await?.exit_code == 0, "{:?}", container.status().await?);
    case.cri.stop_pod(&pod.id).await?;
    Ok(case.cri.remove_pod(&pod.id).await?)
}

/// A VMM program that is missing, one that ends at once, one that says nothing for ever.
async fn vmm_that_does_not_work(case: Case) -> Result<()> {
    let other = case.pod().await?;
    let path = case.stack.dir().join("sandboxer/config.toml");
    let sound = std::fs::read_to_string(&path)?;
    let outcome = with_broken_vmms(&case, &path, &sound).await;
    std::fs::write(&path, &sound)?;
    reload(&case).await?;
    outcome?;
    ensure!(other.ready().await?, "a pod from before was hit");
    ensure!(other.output("echo fine").await? == "fine");
    ensure!(case.pod().await?.output("echo new").await? == "new");
    Ok(())
}

async fn with_broken_vmms(case: &Case, path: &Path, sound: &str) -> Result<()> {
    let programs = tempfile::tempdir()?;
    let script = |name: &str, text: &str| -> Result<String> {
        let file = programs.path().join(name);
        std::fs::write(&file, text)?;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755))?;
        Ok(file.display().to_string())
    };
    let broken = [
        (programs.path().join("not-there").display().to_string(), "not-there"),
        (script("ends", "#!/bin/sh\necho this machine has no wheels >&2\nexit 3\n")?, "no wheels"),
        (script("hangs", "#!/bin/sh\nexec sleep 1000\n")?, "did not answer the boot within"),
    ];
    for (program, named) in broken {
        // In TOML a table's keys end where the next table begins.
        let vm = format!("[vm]\nqemu = \"{program}\"");
        let impatient = sound
            .replace("boot_timeout = 120", "boot_timeout = 2")
            .replace("accelerator = \"auto\"", "accelerator = \"tcg\"");
        std::fs::write(path, impatient.replacen("[vm]", &vm, 1))?;
        let error = match reload(case).await {
            // A daemon that looks at its VMM first may refuse to start; then that is the error.
            Err(error) => format!("{error:#}"),
            Ok(()) => {
                let refused = case.pod_with(|_| ()).await;
                refused.err().with_context(|| format!("a pod started on {program}"))?.message().to_owned()
            }
        };
        ensure!(error.contains(named), "the error does not name the cause, {named}: {error}");
        let left: Vec<_> = case.stack.processes("sleep")?;
        ensure!(left.is_empty(), "{program} still runs");
    }
    Ok(())
}

/// A pod with an unreadable record runs on, is adopted by a daemon that can read it, and is removed on request.
async fn record_that_is_not_understood(case: Case) -> Result<()> {
    // Of the pool: its process was told of another directory than the pod's.
    pool_is_filled(&case).await?;
    let waiting = case.stack.waiting()?;
    let pod = case.pod().await?;
    let vmms = case.stack.vmms()?;
    ensure!(vmms.len() == 1 && waiting.contains(&vmms[0]), "{vmms:?} of {waiting:?}");
    let [run, state] = case.stack.daemon_dirs();
    let (record, run_dir) =
        (state.join("pods").join(&pod.id).with_extension("json"), run.join("pods").join(&pod.id));
    let before = record.with_extension("before");

    // A disk lost what it was given, once: the record before is there.
    pod.start(idle("c")).await?;
    case.stack.end("sandboxer", Signal::SIGTERM).await?;
    let newest = std::fs::read(&record)?;
    std::fs::write(&record, &newest[..newest.len() / 2])?;
    case.stack.run_up()?;
    let taken_up = case.stack.cli_json(&["inspect", &pod.id])?;
    ensure!(taken_up["state"] == "ready" && taken_up["vmm_pid"] == vmms[0].as_raw(), "{taken_up}");
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    ensure!(pod.output("echo here").await? == "here");
    let entry = only_quarantined(&case)?;
    ensure!(entry["problem"].as_str().is_some_and(|problem| problem.contains("taken up")), "{entry}");
    let name = entry["name"].as_str().context("no name")?;
    let refused = case.stack.cli_json(&["quarantine", "destroy", "--yes", name]);
    ensure!(
        refused.is_err() && case.stack.vmms()? == vmms,
        "a pod that is ready was destroyed as a leftover"
    );
    std::fs::remove_dir_all(state.join("quarantine"))?;

    // As after a later daemon was replaced by this one.
    case.stack.end("sandboxer", Signal::SIGTERM).await?;
    let sound = std::fs::read_to_string(&record)?;
    let mut later: serde_json::Value = serde_json::from_str(&sound)?;
    later["version"] = 99.into();
    std::fs::write(&record, later.to_string())?;
    case.stack.run_up()?;
    let entry = only_quarantined(&case)?;
    ensure!(entry["pod"] == pod.id.as_str() && entry["run_dir_exists"] == true, "{entry}");
    ensure!(entry["problem"].as_str().is_some_and(|problem| problem.contains("version 99")), "{entry}");
    ensure!(entry["processes"][0]["pid"] == vmms[0].as_raw(), "{entry}");
    ensure!(case.stack.vmms()? == vmms, "the VMM was ended");
    let name = entry["name"].as_str().context("no name")?;
    case.stack.cli_json(&["quarantine", "release", name])?;
    // This one is then the daemon that wrote it.
    case.stack.end("sandboxer", Signal::SIGTERM).await?;
    let back: serde_json::Value = serde_json::from_slice(&std::fs::read(&record)?)?;
    ensure!(back == later, "another record was put back: {back}");
    std::fs::write(&record, &sound)?;
    case.stack.run_up()?;
    // containerd may take it for stopped by now, having met a daemon that didn't know it.
    let released = case.stack.cli_json(&["inspect", &pod.id])?;
    ensure!(released["state"] == "ready" && released["vmm_pid"] == vmms[0].as_raw(), "{released}");

    // A disk lost what it was given, twice.
    case.stack.end("sandboxer", Signal::SIGTERM).await?;
    std::fs::write(&record, &sound[..sound.len() / 2])?;
    std::fs::write(&before, "{")?;
    case.stack.run_up()?;
    let entry = only_quarantined(&case)?;
    let name = entry["name"].as_str().context("no name")?;
    let refused = case.stack.cli_json(&["quarantine", "destroy", "--yes", &name[..name.len() - 1]]);
    ensure!(refused.is_err() && run_dir.exists(), "a prefix was enough");
    case.stack.cli_json(&["quarantine", "destroy", "--yes", name])?;
    ensure!(!case.stack.vmms()?.contains(&vmms[0]), "the VMM of a destroyed entry lives");
    ensure!(!run_dir.exists() && !record.exists(), "files of a destroyed entry are left");
    ensure!(!before.exists(), "the record before that of a destroyed entry is left");
    let left = case.stack.cli_json(&["quarantine", "list"])?;
    ensure!(left["entries"] == serde_json::json!([]), "{left}");
    reached_again(&case).await?;
    // containerd still knows the pod, and can forget it.
    case.clean_up().await
}

fn only_quarantined(case: &Case) -> Result<serde_json::Value> {
    let listed = case.stack.cli_json(&["quarantine", "list"])?;
    match listed["entries"].as_array().map(Vec::as_slice) {
        Some([entry]) => Ok(entry.clone()),
        _ => anyhow::bail!("not one entry: {listed}"),
    }
}

/// Restarts the daemon and waits until containerd has found it again.
async fn reload(case: &Case) -> Result<()> {
    // It may not run: the configuration before was a bad one.
    let _ = case.stack.end("sandboxer", Signal::SIGTERM).await;
    case.stack.run_up()?;
    reached_again(case).await
}

/// containerd connects again with a back-off of at most 3 s.
async fn reached_again(case: &Case) -> Result<()> {
    eventually("daemon to be reached again", PATIENCE, || async {
        match case.cri.run_pod(&case.pod_config(), case.handler).await {
            Err(error) if error.message().contains("connection") => Ok(None),
            _ => Ok(Some(())),
        }
    })
    .await
}
