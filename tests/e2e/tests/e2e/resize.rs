//! A running VM gets memory when the limits of its pod are raised, and gives it back.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::LinuxContainerResources;
use nix::unistd::Pid;
use sandboxer_e2e::case::{Case, Container, PATIENCE, idle};
use sandboxer_e2e::eventually;

use crate::memory::own_mib;
use crate::templates::told;

crate::cases![VmAlone: limits_grow_the_vm_and_shrink_it];

/// The pod's limit at its start, MiB. Its VM has 256.
const SMALL: u64 = 64;
/// The raised limit, MiB: the VM needs 384 more.
const LARGE: u64 = 512;
const MORE: u64 = 384;
/// MiB that the container uses then, and that the host has back when the VM has shrunk.
const USED: u64 = 400;
const RETURNED: u64 = 350;
/// Uses that memory until `dd` is killed: it has read all of it and cannot write it.
const USES: &str = "exec 4<>/go; dd if=/dev/zero bs=419430400 count=1 >&4";
/// How often the VM grows and shrinks, for the figures.
const TIMES: usize = 30;

fn limits(mib: u64) -> LinuxContainerResources {
    LinuxContainerResources {
        memory_limit_in_bytes: (mib << 20).try_into().unwrap_or(i64::MAX),
        ..Default::default()
    }
}

async fn limits_grow_the_vm_and_shrink_it(case: Case) -> Result<()> {
    let path = case.stack.dir().join("sandboxer/config.toml");
    let config = std::fs::read_to_string(&path)?;
    std::fs::write(&path, config.replacen("[vm]", "[vm]\nhotplug_memory_mib = 1024", 1))?;
    case.stack.kill_worker()?;
    let mut outcome = Ok(());
    for (handler, start_path) in [("sandboxer-boot", "boot"), ("sandboxer-template", "template")] {
        outcome = outcome.and(follows(&case, handler, start_path).await.context(start_path));
    }
    std::fs::write(&path, &config)?;
    case.stack.kill_worker()?;
    outcome
}

async fn follows(case: &Case, handler: &str, start_path: &str) -> Result<()> {
    let pod = eventually(&format!("a pod whose VM came by {start_path}"), PATIENCE * 5, || async {
        if start_path == "template" {
            let build = ["template", "build", "--memory", "256"];
            let built = case.stack.command("sandboxer-cli").args(build).output()?;
            ensure!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        }
        let mut config = case.pod_config();
        config.linux.get_or_insert_default().resources = Some(limits(SMALL));
        let id = case.cri.run_pod(&config, handler).await?;
        if told(case, &["inspect", &id])?["start_path"] == start_path {
            return Ok(Some(case.pod_of(&id, config)));
        }
        case.remove(&id).await?;
        Ok(None)
    })
    .await?;
    let mut config = idle("c");
    config.linux.get_or_insert_default().resources = Some(limits(SMALL));
    let container = pod.start(config).await?;
    let (vmm, boot) = (case.vmm_of(&pod.id).await?, total_mib(&container).await?);
    if std::fs::read_to_string(format!("/proc/{vmm}/comm"))?.starts_with("qemu") {
        let refused = case.cri.update(&container.id, limits(LARGE)).await.err().context("QEMU's grew")?;
        ensure!(refused.message().contains("restart the pod"), "{refused}");
        println!("{start_path}: a VM of QEMU keeps its size, and its pod is told so");
        return Ok(());
    }

    // A container's limit alone: the limit of all is the sum of theirs.
    case.cri.update(&container.id, limits(LARGE)).await?;
    let grown = total_mib(&container).await?;
    ensure!(grown == boot + MORE, "the guest had {boot} MiB and has {grown}");
    container.sh("mkfifo /go").await?;
    let before = own_mib(vmm)?;
    let full = uses_and_frees(&container, vmm).await?;
    case.cri.update(&container.id, limits(SMALL)).await?;
    shrinks_to(&container, boot).await?;
    let left = own_mib(vmm)?;
    println!(
        "{start_path}: the VMM had {before} MiB, {full} after its guest used {USED}, {left} when it had shrunk"
    );
    ensure!(full >= before + RETURNED && left + RETURNED <= full, "{before}, {full}, {left} MiB");

    // Also without lowered limits, what a container frees comes back.
    case.cri.update(&container.id, limits(LARGE)).await?;
    let full = uses_and_frees(&container, vmm).await?;
    let freed = Instant::now();
    eventually("freed memory comes back", PATIENCE, || async {
        Ok((own_mib(vmm)? + RETURNED <= full).then_some(()))
    })
    .await?;
    println!(
        "{start_path}: {RETURNED} of {full} MiB came back {:.1} s after they were free",
        freed.elapsed().as_secs_f64()
    );
    case.cri.update(&container.id, limits(SMALL)).await?;
    shrinks_to(&container, boot).await?;

    let mut grew = Vec::new();
    for _ in 0..TIMES {
        let began = Instant::now();
        case.cri.update_pod(&pod.id, limits(LARGE)).await?;
        grew.push(began.elapsed());
        ensure!(total_mib(&container).await? == boot + MORE);
        case.cri.update_pod(&pod.id, limits(SMALL)).await?;
        shrinks_to(&container, boot).await?;
    }
    grew.sort();
    let ms = |at: usize| grew.get(at).map_or(0.0, Duration::as_secs_f64) * 1000.0;
    println!(
        "{start_path}: {MORE} MiB more in {:.1} ms (p50; the longest {:.1} ms, n = {TIMES})",
        ms(TIMES / 2),
        ms(TIMES - 1)
    );

    // What is beyond any size is refused as before, and changes nothing.
    let refused = case.cri.update_pod(&pod.id, limits(1 << 20)).await.err().context("1 TiB")?;
    ensure!(refused.message().contains("restart the pod"), "{refused}");
    ensure!(total_mib(&container).await? == boot);
    Ok(())
}

/// Uses memory and frees it. Returns the most that the VMM had, MiB.
async fn uses_and_frees(container: &Container, vmm: Pid) -> Result<u64> {
    container.sh(&format!("setsid sh -c '{USES}' </dev/null >/dev/null 2>&1 &")).await?;
    eventually("the container uses the memory that it got", PATIENCE, || async {
        Ok((used_mib(container).await? >= USED).then_some(()))
    })
    .await?;
    let full = own_mib(vmm)?;
    container.sh("killall dd").await?;
    // Else its kernel would kill it for a limit below what it uses.
    eventually("the container uses little", PATIENCE, || async {
        Ok((used_mib(container).await? < SMALL / 2).then_some(()))
    })
    .await?;
    Ok(full)
}

/// Returns the memory of the guest, MiB.
async fn total_mib(container: &Container) -> Result<u64> {
    Ok(container.sh("awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo").await?.parse()?)
}

/// Returns the memory that a container uses, MiB.
async fn used_mib(container: &Container) -> Result<u64> {
    Ok(container.sh("cat /sys/fs/cgroup/memory.current").await?.parse::<u64>()? >> 20)
}

async fn shrinks_to(container: &Container, mib: u64) -> Result<()> {
    eventually(&format!("a guest of {mib} MiB"), PATIENCE, || async {
        Ok((total_mib(container).await? == mib).then_some(()))
    })
    .await
}
