//! What the kernel says of the processes that pods depend on, read from outside.

use std::fs;

use anyhow::{Context, Result, ensure};
use sandboxer_e2e::case::{Case, idle};
use serde_json::Value;

crate::cases![
    Vm: the_jail_is_shown_as_the_kernel_has_it, the_daemon_keeps_the_capabilities_that_are_told
];

/// What stands behind `field:` in a process's status.
fn status(pid: u64, field: &str) -> Result<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    Ok(line.with_context(|| format!("no {field} of process {pid}"))?.trim().to_owned())
}

fn namespace(pid: u64, kind: &str) -> Result<String> {
    Ok(fs::read_link(format!("/proc/{pid}/ns/{kind}"))?.to_string_lossy().into_owned())
}

async fn the_jail_is_shown_as_the_kernel_has_it(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    pod.start(idle("c")).await?;
    let shown = case.stack.command("sandboxer-cli").args(["--json", "inspect", &pod.id]).output()?;
    ensure!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
    let shown: Value = serde_json::from_slice(&shown.stdout)?;
    let vmm = shown["vmm_pid"].as_u64().context("no vmm_pid")?;
    let jail = &shown["jail"];
    let daemon = u64::try_from(case.stack.pid("sandboxer")?.as_raw())?;

    for (key, field) in [("uid", "Uid"), ("gid", "Gid")] {
        let ids = status(vmm, field)?;
        let effective = ids.split_whitespace().nth(1).context("no effective id")?;
        ensure!(jail[key] == effective.parse::<u64>()?, "{key}: {jail} and {ids}");
    }
    for kind in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        let own = namespace(vmm, kind)? != namespace(daemon, kind)?;
        let list = jail[if own { "own_namespaces" } else { "shared_namespaces" }].as_array();
        ensure!(list.is_some_and(|list| list.contains(&kind.into())), "{kind}: own is {own}, {jail}");
    }
    let bounds = u64::from_str_radix(&status(vmm, "CapBnd")?, 16)?;
    ensure!(jail["capability_bounds"] == bounds && bounds == 0, "{jail}");
    ensure!(jail["capabilities"] == 0 && status(vmm, "CapEff")? == "0000000000000000", "{jail}");
    ensure!(jail["no_new_privileges"] == true && status(vmm, "NoNewPrivs")? == "1", "{jail}");
    ensure!(jail["seccomp"] == "filter" && status(vmm, "Seccomp")? == "2", "{jail}");
    let mounts = fs::read_to_string(format!("/proc/{vmm}/mountinfo"))?;
    ensure!(jail["mounts"] == mounts.lines().count(), "{jail}");

    let people = case.stack.command("sandboxer-cli").args(["inspect", &pod.id]).output()?;
    let people = String::from_utf8(people.stdout)?;
    ensure!(people.contains("Jail of its VMM") && people.contains("none, and can get none"), "{people}");
    Ok(())
}

/// docs/security.md tells them; the kernel has the last word.
async fn the_daemon_keeps_the_capabilities_that_are_told(case: Case) -> Result<()> {
    // The front, and the worker behind it.
    let daemon = [case.stack.pid("sandboxer")?, case.stack.worker()?];
    let text = include_str!("../../../../docs/security.md");
    let mut told = 0;
    for name in text.lines().filter_map(|line| line.strip_prefix("| `CAP_")?.split('`').next()) {
        let capability: caps::Capability = format!("CAP_{name}").parse()?;
        told |= capability.bitmask();
    }
    let ours = u64::from_str_radix(&status(std::process::id().into(), "CapBnd")?, 16)?;
    for process in daemon {
        let process = u64::try_from(process.as_raw())?;
        for set in ["CapEff", "CapPrm", "CapBnd"] {
            let kept = u64::from_str_radix(&status(process, set)?, 16)?;
            // What this machine doesn't give to anyone, it can't keep.
            ensure!(kept == told & ours, "{set} is {kept:x}, {:x} are told and to be had", told & ours);
        }
        ensure!(status(process, "CapInh")? == "0000000000000000");
    }
    Ok(())
}
