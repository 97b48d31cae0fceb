//! Memory that a container has freed comes back to the host while its pod runs.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use sandboxer_e2e::case::{Case, PATIENCE, shell};
use sandboxer_e2e::eventually;

use crate::templates::{pool_is_filled, template_is_there};

crate::cases![
    Vm: comes_back_from_a_vm_that_booted, comes_back_from_a_copy_of_a_template, comes_back_from_a_vm_that_waited
];

/// MiB that the container uses.
const USED: u64 = 100;
/// MiB of these that the host gets back.
const RETURNED: u64 = 90;
/// Uses that memory until `dd` is killed: it has read all of it and cannot write it.
const USES: &str =
    "mkfifo /go; exec 4<>/go; dd if=/dev/zero bs=104857600 count=1 >&4; echo freed; sleep 1000000";

async fn comes_back_from_a_vm_that_booted(case: Case) -> Result<()> {
    comes_back(&case, "sandboxer-boot", "boot").await
}

async fn comes_back_from_a_copy_of_a_template(case: Case) -> Result<()> {
    comes_back(&case, "sandboxer-template", "template").await
}

async fn comes_back_from_a_vm_that_waited(case: Case) -> Result<()> {
    comes_back(&case, "sandboxer", "pool").await
}

/// Runs a pod whose VM came by `start_path`: another pod may take the VM that waited.
async fn comes_back(case: &Case, handler: &str, start_path: &str) -> Result<()> {
    if start_path != "boot" {
        template_is_there(case).await?;
    }
    let pod = eventually(&format!("a pod whose VM came by {start_path}"), PATIENCE * 10, || async {
        if start_path == "pool" {
            pool_is_filled(case).await?;
        }
        let config = case.pod_config();
        let id = case.cri.run_pod(&config, handler).await?;
        if case.stack.cli_json(&["inspect", &id])?["start_path"] == start_path {
            return Ok(Some(case.pod_of(&id, config)));
        }
        case.remove(&id).await?;
        Ok(None)
    })
    .await?;
    let vmm = case.vmm_of(&pod.id).await?;
    let is_cloud_hypervisor = fs::read_to_string(format!("/proc/{vmm}/comm"))?.starts_with("cloud-hyperv");
    if is_cloud_hypervisor && start_path != "boot" {
        println!("{start_path}: skipped: copies on Cloud Hypervisor keep their memory, see decision 0024");
        return Ok(());
    }
    let container = pod.start(shell("c", USES)).await?;
    eventually("the container uses its memory", PATIENCE, || async {
        let used: u64 = container.sh("cat /sys/fs/cgroup/memory.current").await?.parse()?;
        Ok((used >= USED << 20).then_some(()))
    })
    .await?;
    let full = own_mib(vmm)?;
    ensure!(full > USED, "the container uses {USED} MiB, and its VMM has {full}");
    let freed = Instant::now();
    container.sh("killall dd").await?;
    container.logged("freed").await?;
    let left = eventually(&format!("{RETURNED} of {full} MiB back on the host"), PATIENCE, || async {
        let now = own_mib(vmm)?;
        Ok((now + RETURNED <= full).then_some(now))
    })
    .await?;
    println!("{start_path}: from {full} to {left} MiB in {:.1} s", freed.elapsed().as_secs_f64());
    ensure!(container.sh("echo goes on").await? == "goes on");
    Ok(())
}

/// Returns the memory of a VMM that no other process has, in MiB.
pub fn own_mib(vmm: Pid) -> Result<u64> {
    let rollup = fs::read_to_string(format!("/proc/{vmm}/smaps_rollup"))?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).context("no Anonymous")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? >> 10)
}
