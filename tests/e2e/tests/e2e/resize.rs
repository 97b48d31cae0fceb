//! A running VM gets memory and vCPUs when the limits of its pod are raised, and gives them back.
//!
//! `SANDBOXER_E2E_RESIZES` has another number of changes at random than 40.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use k8s_cri::v1::LinuxContainerResources;
use nix::unistd::Pid;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sandboxer_e2e::case::{Case, Container, PATIENCE, Pod, idle};
use sandboxer_e2e::eventually;

use crate::faults::{Seen, settled};
use crate::memory::own_mib;

crate::cases![VmAlone: limits_grow_the_vm_and_shrink_it, resizes_at_random];

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

/// How often it gives back memory that was used: that takes longer.
const SHRINKS: usize = 10;

/// Most MiB that a guest of 256 MiB keeps after it had 1024 more: of each four blocks of 128 MiB beyond three times its first memory, its
/// kernel uses one for itself.
const KERNELS: u64 = 128;
/// A guest that has not given back any memory for so long has given back what it can.
const LAST_CHANGE: Duration = Duration::from_secs(5);

/// vCPUs of a pod's VM at its start and the most that it can get here, and the limit that needs these, thousandths of a CPU.
const FEW: u64 = 1;
const MANY: u64 = 4;
const MANY_MILLIS: i64 = 3500;
/// The limit at its start.
const FEW_MILLIS: i64 = 500;

/// What these cases add to the configuration.
const GROWS: &str = "[vm]\nhotplug_memory_mib = 1024\nhotplug_vcpus = 3";

/// Limits of CPU time, thousandths of a CPU.
fn cpus(millis: i64) -> LinuxContainerResources {
    LinuxContainerResources { cpu_quota: millis * 100, cpu_period: 100_000, ..Default::default() }
}

fn both(mib: u64, millis: i64) -> LinuxContainerResources {
    LinuxContainerResources { cpu_quota: millis * 100, cpu_period: 100_000, ..limits(mib) }
}

fn limits(mib: u64) -> LinuxContainerResources {
    LinuxContainerResources {
        memory_limit_in_bytes: (mib << 20).try_into().unwrap_or(i64::MAX),
        ..Default::default()
    }
}

async fn limits_grow_the_vm_and_shrink_it(case: Case) -> Result<()> {
    let configured = Configured::begin(&case)?;
    let mut outcome = Ok(());
    for (handler, start_path) in [("sandboxer-boot", "boot"), ("sandboxer-template", "template")] {
        outcome = outcome.and(follows(&case, handler, start_path).await.context(start_path));
    }
    configured.end(&case)?;
    outcome
}

/// The daemon's configuration before a case changed it.
struct Configured(String);

impl Configured {
    fn begin(case: &Case) -> Result<Self> {
        let path = case.stack.dir().join("sandboxer/config.toml");
        let config = std::fs::read_to_string(&path)?;
        std::fs::write(&path, config.replacen("[vm]", GROWS, 1))?;
        case.stack.kill_worker()?;
        Ok(Self(config))
    }

    fn end(self, case: &Case) -> Result<()> {
        std::fs::write(case.stack.dir().join("sandboxer/config.toml"), self.0)?;
        case.stack.kill_worker()?;
        Ok(())
    }
}

/// Starts a pod with small limits whose VM came by `start_path`.
async fn small_pod(case: &Case, handler: &str, start_path: &str) -> Result<Pod> {
    eventually(&format!("a pod whose VM came by {start_path}"), PATIENCE * 5, || async {
        if start_path == "template" {
            case.stack.cli(&["template", "build", "--vcpus", "1", "--memory", "256"])?;
        }
        let mut config = case.pod_config();
        config.linux.get_or_insert_default().resources = Some(both(SMALL, FEW_MILLIS));
        let id = case.cri.run_pod(&config, handler).await?;
        if case.stack.cli_json(&["inspect", &id])?["start_path"] == start_path {
            return Ok(Some(case.pod_of(&id, config)));
        }
        case.remove(&id).await?;
        Ok(None)
    })
    .await
}

/// Starts a container with small limits.
async fn small_container(pod: &Pod) -> Result<Container> {
    let mut config = idle("c");
    config.linux.get_or_insert_default().resources = Some(both(SMALL, FEW_MILLIS));
    Ok(pod.start(config).await?)
}

async fn follows(case: &Case, handler: &str, start_path: &str) -> Result<()> {
    let pod = small_pod(case, handler, start_path).await?;
    let container = small_container(&pod).await?;
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
    tell(start_path, &format!("{MORE} MiB more"), grew);

    let mut returned = Vec::new();
    for _ in 0..SHRINKS {
        case.cri.update(&container.id, limits(LARGE)).await?;
        let full = uses_and_frees(&container, vmm).await?;
        let began = Instant::now();
        case.cri.update(&container.id, limits(SMALL)).await?;
        eventually("the host has the memory again", PATIENCE, || async {
            Ok((own_mib(vmm)? + RETURNED <= full).then_some(()))
        })
        .await?;
        returned.push(began.elapsed());
        shrinks_to(&container, boot).await?;
    }
    tell(start_path, &format!("{RETURNED} MiB back on the host after a lowered limit"), returned);

    // What is beyond any size is refused as before, and changes nothing.
    let refused = case.cri.update_pod(&pod.id, limits(1 << 20)).await.err().context("1 TiB")?;
    ensure!(refused.message().contains("restart the pod"), "{refused}");
    ensure!(total_mib(&container).await? == boot);
    follow_cpus(case, &pod, &container, start_path).await
}

/// The vCPUs follow too, where the VMM has that.
async fn follow_cpus(case: &Case, pod: &Pod, container: &Container, start_path: &str) -> Result<()> {
    ensure!(vcpus(container).await? == FEW);
    let vmm = case.stack.cli_json(&["inspect", &pod.id])?["vmm"].clone();
    if vmm != "cloud-hypervisor" {
        let refused = case.cri.update_pod(&pod.id, cpus(MANY_MILLIS)).await.err().context("it has more")?;
        ensure!(refused.message().contains("restart the pod"), "{refused}");
        println!("{start_path}: a VM of {vmm} keeps its vCPUs, and its pod is told so");
        return Ok(());
    }
    // A container's limit alone: the limit of all is the sum of theirs.
    case.cri.update(&container.id, cpus(MANY_MILLIS)).await?;
    ensure!(vcpus(container).await? == MANY);
    let size = case.stack.cli_json(&["inspect", &pod.id])?;
    ensure!(size["vcpus"] == MANY && size["boot_vcpus"] == FEW, "{size}");
    case.stack.kill_worker()?;
    eventually("the next daemon knows how many vCPUs there are", PATIENCE, || async {
        Ok((case.stack.cli_json(&["inspect", &pod.id])?["vcpus"] == MANY).then_some(()))
    })
    .await?;
    case.cri.update(&container.id, cpus(FEW_MILLIS)).await?;
    gives_vcpus_up(container).await?;

    let mut grew = Vec::new();
    for _ in 0..TIMES {
        let began = Instant::now();
        case.cri.update_pod(&pod.id, cpus(MANY_MILLIS)).await?;
        grew.push(began.elapsed());
        ensure!(vcpus(container).await? == MANY);
        case.cri.update_pod(&pod.id, cpus(FEW_MILLIS)).await?;
        gives_vcpus_up(container).await?;
    }
    tell(start_path, &format!("{} vCPUs more", MANY - FEW), grew);

    let refused = case.cri.update_pod(&pod.id, cpus(100_000)).await.err().context("100 CPUs")?;
    ensure!(refused.message().contains("restart the pod"), "{refused}");
    ensure!(vcpus(container).await? == FEW);
    Ok(())
}

fn tell(start_path: &str, what: &str, mut took: Vec<Duration>) {
    took.sort();
    let ms = |at: usize| took.get(at).map_or(0.0, Duration::as_secs_f64) * 1000.0;
    // Nearest rank: of 30 times the longest is the p99.
    let rank = |percent: usize| (took.len() * percent).div_ceil(100).saturating_sub(1);
    println!(
        "{start_path}: {what}: p50 {:.1} ms, p99 {:.1} ms, n = {}",
        ms(rank(50)),
        ms(rank(99)),
        took.len()
    );
}

/// Pods get other limits again and again, two at a time. None is lost, and the daemon keeps nothing of it.
async fn resizes_at_random(case: Case) -> Result<()> {
    let count = match std::env::var("SANDBOXER_E2E_RESIZES") {
        Ok(count) => count.parse().context("SANDBOXER_E2E_RESIZES")?,
        Err(_) => 40,
    };
    let configured = Configured::begin(&case)?;
    let outcome = resize_often(&case, count).await;
    configured.end(&case)?;
    outcome
}

async fn resize_often(case: &Case, count: usize) -> Result<()> {
    let mut seen = Seen::begin(case, "changed limits", 1).await?;
    let mut pods = Vec::new();
    for (handler, start_path) in [("sandboxer-boot", "boot"), ("sandboxer-template", "template")] {
        let pod = small_pod(case, handler, start_path).await?;
        let container = small_container(&pod).await?;
        let mib = total_mib(&container).await?;
        pods.push((pod, container, mib));
    }
    // VMs of the pool cost files, too.
    settled(case).await?;
    let (before, worker) = (open_files(case)?, case.stack.worker()?);
    let mut random = StdRng::seed_from_u64(1);
    let mut refused = 0;
    for _ in 0..count / pods.len() {
        let changes = pods.iter().map(|(pod, container, _)| {
            let limits = both(random.random_range(32..1400), random.random_range(100..4600));
            change(case, pod, container, random.random_range(0..2) == 0, limits)
        });
        let done = try_join_all(changes.collect::<Vec<_>>()).await?;
        refused += done.iter().filter(|done| !**done).count();
        seen.times += done.len();
        // A node is ended if it prints nothing for long.
        if seen.times % 100 == 0 {
            println!("{} changes, of which {refused} were refused by name", seen.times);
        }
    }
    seen.check().await?;
    for (pod, container, mib) in &pods {
        case.cri.update(&container.id, both(SMALL, FEW_MILLIS)).await?;
        case.cri.update_pod(&pod.id, both(SMALL, FEW_MILLIS)).await?;
        let remaining = shrinks_to_nearly(container, *mib).await?;
        println!("a guest of {mib} MiB kept {remaining} MiB of what it had got");
        gives_vcpus_up(container).await?;
        ensure!(pod.ready().await?, "pod {} is not ready any more", pod.id);
    }
    ensure!(case.stack.worker()? == worker, "the worker has ended by itself");
    let count = |files: &BTreeMap<String, usize>| files.values().sum::<usize>();
    eventually(&format!("{} open files or fewer", count(&before)), PATIENCE, || async {
        Ok((count(&open_files(case)?) <= count(&before)).then_some(()))
    })
    .await
    .with_context(|| format!("of the worker: {before:?}, and now {:?}", open_files(case)))?;
    println!("{} changes, of which {refused} were refused by name; no pod was lost", seen.times);
    seen.others += pods.len();
    seen.end().await
}

/// Returns how many files of each kind the worker has open.
fn open_files(case: &Case) -> Result<BTreeMap<String, usize>> {
    let mut kinds = BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{}/fd", case.stack.worker()?))? {
        // One may be closed meanwhile.
        let Ok(file) = std::fs::read_link(entry?.path()) else { continue };
        let kind = file.to_string_lossy().replace(|letter: char| letter.is_ascii_digit(), "");
        *kinds.entry(kind).or_default() += 1;
    }
    Ok(kinds)
}

/// Changes limits of a pod, or of its container. Returns whether they were accepted; no other refusal than that of what the VM
/// cannot have is right.
async fn change(
    case: &Case,
    pod: &Pod,
    container: &Container,
    is_of_pod: bool,
    limits: LinuxContainerResources,
) -> Result<bool> {
    let done = match is_of_pod {
        true => case.cri.update_pod(&pod.id, limits).await,
        false => case.cri.update(&container.id, limits).await,
    };
    match done {
        Ok(()) => Ok(true),
        Err(refused) if refused.message().contains("restart the pod") => Ok(false),
        Err(other) => Err(other).context("a change of limits"),
    }
}

/// Returns how many CPUs a container sees.
async fn vcpus(container: &Container) -> Result<u64> {
    Ok(container.sh("nproc").await?.parse()?)
}

async fn gives_vcpus_up(container: &Container) -> Result<()> {
    eventually("a guest with few vCPUs", PATIENCE, || async {
        Ok((vcpus(container).await? == FEW).then_some(()))
    })
    .await
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

/// Waits until a guest has given back all but what its kernel keeps of the memory that it onlined for itself, and until that does not
/// change any more. Returns it.
async fn shrinks_to_nearly(container: &Container, mib: u64) -> Result<u64> {
    let last = AtomicU64::new(u64::MAX);
    eventually(&format!("a guest of {mib} MiB, and at most {KERNELS} more"), PATIENCE, || async {
        let remaining = total_mib(container).await?.saturating_sub(mib);
        let settled = last.swap(remaining, Ordering::Relaxed) == remaining && remaining <= KERNELS;
        tokio::time::sleep(LAST_CHANGE).await;
        Ok(settled.then_some(remaining))
    })
    .await
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
