//! What the kernel says of the processes that pods depend on, read from outside.

use std::fs;

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::Mount;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sandboxer_e2e::{
    case::{Case, PATIENCE, Pod, idle},
    eventually,
};
use serde_json::Value;

crate::cases![
    Vm: the_jail_is_shown_as_the_kernel_has_it, the_jail_of_what_serves_shares_is_shown,
        the_daemon_keeps_the_capabilities_that_are_told
];

/// Returns what stands behind `field:` in a process's status.
fn status(pid: u64, field: &str) -> Result<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    Ok(line.with_context(|| format!("no {field} of process {pid}"))?.trim().to_owned())
}

fn namespace(pid: u64, kind: &str) -> Result<String> {
    Ok(fs::read_link(format!("/proc/{pid}/ns/{kind}"))?.to_string_lossy().into_owned())
}

/// Returns what `inspect` tells of a pod.
pub fn inspected(case: &Case, pod: &Pod) -> Result<Value> {
    case.stack.cli_json(&["inspect", &pod.id])
}

/// Whether `jail` is what the kernel tells of `pid`.
fn agrees(case: &Case, jail: &Value, pid: u64) -> Result<()> {
    let daemon = u64::try_from(case.stack.pid("sandboxer")?.as_raw())?;
    for (key, field) in [("uid", "Uid"), ("gid", "Gid")] {
        let ids = status(pid, field)?;
        let effective = ids.split_whitespace().nth(1).context("no effective id")?;
        ensure!(jail[key] == effective.parse::<u64>()?, "{key}: {jail} and {ids}");
    }
    for kind in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        let own = namespace(pid, kind)? != namespace(daemon, kind)?;
        let list = jail[if own { "own_namespaces" } else { "shared_namespaces" }].as_array();
        ensure!(list.is_some_and(|list| list.contains(&kind.into())), "{kind}: own is {own}, {jail}");
    }
    for (key, field) in [("capability_bounds", "CapBnd"), ("capabilities", "CapEff")] {
        ensure!(jail[key] == u64::from_str_radix(&status(pid, field)?, 16)?, "{key}: {jail}");
    }
    ensure!(jail["no_new_privileges"] == true && status(pid, "NoNewPrivs")? == "1", "{jail}");
    ensure!(jail["seccomp"] == "filter" && status(pid, "Seccomp")? == "2", "{jail}");
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    ensure!(jail["mounts"] == mounts.lines().count(), "{jail}");
    Ok(())
}

async fn the_jail_is_shown_as_the_kernel_has_it(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    pod.start(idle("c")).await?;
    let shown = inspected(&case, &pod)?;
    let jail = &shown["jail"];
    agrees(&case, jail, shown["vmm_pid"].as_u64().context("no vmm_pid")?)?;
    ensure!(jail["capability_bounds"] == 0 && jail["capabilities"] == 0, "{jail}");

    let people = case.stack.cli(&["inspect", &pod.id])?;
    ensure!(people.contains("Jail of the VMM") && people.contains("none, and can get none"), "{people}");
    Ok(())
}

async fn the_jail_of_what_serves_shares_is_shown(case: Case) -> Result<()> {
    let host = tempfile::tempdir()?;
    let pod = case.pod().await?;
    pod.start(idle("plain")).await?;
    let shown = inspected(&case, &pod)?;
    ensure!(shown["shares_jail"].is_null(), "a pod without shares: {shown}");
    let mut sharing = idle("sharing");
    sharing.mounts.push(Mount {
        container_path: "/data".into(),
        host_path: host.path().display().to_string(),
        ..Default::default()
    });
    pod.start(sharing).await?;
    let shown = inspected(&case, &pod)?;
    let jail = &shown["shares_jail"];
    let pid = jail["pid"].as_u64().context("no process serves shares")?;
    ensure!(fs::read_to_string(format!("/proc/{pid}/comm"))?.trim() == "sandboxer-share", "{jail}");
    agrees(&case, jail, pid)?;
    // It acts as the owner of each file.
    ensure!(jail["shared_namespaces"] == serde_json::json!(["user"]), "{jail}");

    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL)?;
    eventually("the jail is gone with its process", PATIENCE, || async {
        Ok(inspected(&case, &pod)?["shares_jail"].is_null().then_some(()))
    })
    .await
}

/// docs/security.md tells them; the kernel has the last word.
async fn the_daemon_keeps_the_capabilities_that_are_told(case: Case) -> Result<()> {
    // The keeper, the front, and the worker behind it.
    let daemon = [case.stack.pid("sandboxer")?, case.stack.front()?, case.stack.worker()?];
    let text = include_str!("../../../../docs/security.md");
    let mut documented = 0;
    for name in text.lines().filter_map(|line| line.strip_prefix("| `CAP_")?.split('`').next()) {
        let capability: caps::Capability = format!("CAP_{name}").parse()?;
        documented |= capability.bitmask();
    }
    let ours = u64::from_str_radix(&status(std::process::id().into(), "CapBnd")?, 16)?;
    for process in daemon {
        let process = u64::try_from(process.as_raw())?;
        for set in ["CapEff", "CapPrm", "CapBnd"] {
            let actual = u64::from_str_radix(&status(process, set)?, 16)?;
            // What this host doesn't give to anyone, it can't keep.
            ensure!(
                actual == documented & ours,
                "{set} is {actual:x}, {:x} are told and to be had",
                documented & ours
            );
        }
        ensure!(status(process, "CapInh")? == "0000000000000000");
    }
    Ok(())
}
