//! What containers write to their root file systems: on a disk of the host that goes with them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{ContainerConfig, LinuxContainerResources};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use sandboxer_e2e::case::{self, Case, PATIENCE, idle, security, shell};
use sandboxer_e2e::eventually;

crate::cases![
    Vm: more_than_its_memory, each_container_begins_anew, what_is_deleted_is_the_hosts_again,
    a_root_that_is_read_only_has_no_disk, a_disk_too_many, no_faster_than_its_limit;
    VmAlone: written_on_after_the_workers_death, a_full_disk_costs_no_other_pod
];

const MIB: u64 = 1 << 20;

/// Returns the scratch disks that a VMM has open, once or twice, by the room that each takes on the host. None of them has a name.
fn disks_of(vmm: Pid) -> Result<Vec<u64>> {
    let mut sizes = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{vmm}/fd"))? {
        let path = entry?.path();
        let target = fs::read_link(&path).unwrap_or_default().display().to_string();
        if target.contains("/rootfs/scratch/") {
            ensure!(target.ends_with(" (deleted)"), "{target} has a name");
            let file = fs::metadata(&path)?;
            sizes.insert((file.dev(), file.ino()), file.blocks() * 512);
        }
    }
    Ok(sizes.into_values().collect())
}

fn disk_bytes(vmm: Pid) -> Result<u64> {
    Ok(disks_of(vmm)?.iter().sum())
}

fn limited(mut config: ContainerConfig, memory_bytes: u64) -> Result<ContainerConfig> {
    config.linux.get_or_insert_default().resources = Some(LinuxContainerResources {
        memory_limit_in_bytes: memory_bytes.try_into()?,
        ..Default::default()
    });
    Ok(config)
}

/// In memory it would be killed for it.
async fn more_than_its_memory(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(limited(idle("c"), 128 * MIB)?).await?;
    let vmm = case.vmm_of(&pod.id).await?;
    // In pieces: each exec has a time limit of its own.
    // One MiB of rubbish again and again: cheap to make for a guest that is emulated.
    let writes = "dd if=/dev/urandom of=/seed bs=64k count=16 2>/dev/null; for n in $(seq 300); do cat /seed; done >/big; \
                  sha256sum </seed";
    let seed = container.sh(writes).await?;
    let reads = "for n in 0 60 120 180 240 299; do dd if=/big bs=1M skip=$n count=1 2>/dev/null | sha256sum; done | sort -u; \
                 stat -c %s /big; cat /sys/fs/cgroup/memory.max; df -k / | tail -1 | awk '{ print $2 }'";
    let output = container.sh(reads).await?;
    let [sums, length, limit, size] = output.lines().collect::<Vec<_>>()[..] else {
        anyhow::bail!("{output}")
    };
    ensure!(sums == seed, "{output}: not what was written, {seed}");
    ensure!(length == (300 * MIB).to_string() && limit == (128 * MIB).to_string(), "{output}");
    ensure!(size.parse::<u64>()? * 1024 > 9 << 30, "the disk has {size} KiB");
    ensure!(
        disk_bytes(vmm)? >= 170 * MIB,
        "what the limit has no room for is on the host: {:?}",
        disks_of(vmm)?
    );

    case.cri.stop(&container.id, 5).await?;
    case.cri.remove(&container.id).await?;
    ensure!(disk_bytes(vmm)? < MIB, "what it wrote takes room still: {:?}", disks_of(vmm)?);
    ensure!(pod.output("echo goes on").await? == "goes on");
    Ok(())
}

/// Never faster, whatever else the host does: the burst at once, the rest at the rate.
async fn no_faster_than_its_limit(case: Case) -> Result<()> {
    const RATE: u64 = 4 * MIB;
    const BURST: u64 = 8 * MIB;
    const WRITTEN: u64 = 32 * MIB;
    let pod = case
        .pod_with(|config| {
            config.annotations.insert("io.sandboxer.disk-bps".into(), RATE.to_string());
            config.annotations.insert("io.sandboxer.disk-bps-burst".into(), BURST.to_string());
        })
        .await?;
    let container = pod.start(idle("c")).await?;
    let began = Instant::now();
    container.sh(&format!("dd if=/dev/zero of=/big bs=1M count={} conv=fsync", WRITTEN / MIB)).await?;
    let (took, due) = (began.elapsed(), Duration::from_secs((WRITTEN - BURST) / RATE));
    println!("{WRITTEN} bytes took {took:.1?}, {due:?} by burst and rate");
    ensure!(took >= due.mul_f64(0.95), "{WRITTEN} bytes took {took:?}, at least {due:?} were due");
    // Other work of the host takes no virtual time.
    let late = case::in_virtual_time() && took > due.mul_f64(1.05);
    ensure!(!late, "{WRITTEN} bytes took {took:?}, {due:?} were due");
    Ok(())
}

async fn each_container_begins_anew(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let begins =
        "ls /mine /bin/vi 2>/dev/null; rm /bin/vi; echo mine >/mine; cat /mine; ls /bin/vi 2>/dev/null";
    for attempt in 0..3 {
        // The first has the disk that was there before it; those at the same time and after it have their own.
        let beside = pod.start(idle(&format!("beside{attempt}"))).await?;
        let output = pod.run(shell(&format!("c{attempt}"), begins)).await?.logs.stdout;
        ensure!(output == "/bin/vi\nmine\n", "attempt {attempt}: {output}");
        ensure!(
            beside.sh("ls -d /etc; ls /mine 2>/dev/null; true").await? == "/etc",
            "they have one in common"
        );
    }
    Ok(())
}

async fn what_is_deleted_is_the_hosts_again(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let vmm = case.vmm_of(&pod.id).await?;
    container.sh("dd if=/dev/zero of=/big bs=1M count=64 2>/dev/null; sync").await?;
    let full = disk_bytes(vmm)?;
    ensure!(full >= 64 * MIB, "{full} bytes");
    container.sh("rm /big; sync").await?;
    eventually("room on the host", PATIENCE, || async { Ok((disk_bytes(vmm)? < 8 * MIB).then_some(())) })
        .await
}

async fn a_root_that_is_read_only_has_no_disk(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    pod.start(idle("takes-the-spare-one")).await?;
    let vmm = case.vmm_of(&pod.id).await?;
    let before = disks_of(vmm)?.len();
    let mut config = shell("c", "touch /x 2>&1; sleep 1000");
    security(&mut config).readonly_rootfs = true;
    let container = pod.start(config).await?;
    container.logged("Read-only").await?;
    ensure!(disks_of(vmm)?.len() == before, "it has a disk to write to");
    pod.start(idle("can-write")).await?;
    ensure!(disks_of(vmm)?.len() == before + 1, "{:?}", disks_of(vmm)?);
    Ok(())
}

/// Firecracker has a bound. The container beyond it is refused by name and leaves nothing; all others go on.
async fn a_disk_too_many(case: Case) -> Result<()> {
    const MOST: usize = 8;
    let pod = case.pod().await?;
    let vmm = case.vmm_of(&pod.id).await?;
    let is_bounded = fs::read_to_string(format!("/proc/{vmm}/comm"))?.trim() == "firecracker";
    let mut containers = Vec::new();
    for n in 0..MOST {
        containers.push(pod.start(idle(&format!("c{n}"))).await?);
    }
    let before = disks_of(vmm)?.len();
    let next = pod.start(idle("one-more")).await;
    if is_bounded {
        let error = next.err().context("a disk too many was attached")?;
        ensure!(error.message().contains("8 writable disks, the most that a VM of Firecracker"), "{error}");
        ensure!(disks_of(vmm)?.len() == before, "it left a disk: {:?}", disks_of(vmm)?);
        let last = containers.pop().context("no container")?;
        case.cri.stop(&last.id, 0).await?;
        case.cri.remove(&last.id).await?;
        containers.push(pod.start(idle("in-its-place")).await?);
    } else {
        containers.push(next?);
    }
    for container in &containers {
        ensure!(container.sh("echo mine >/mine; cat /mine").await? == "mine");
    }
    Ok(())
}

/// Neither the file of a container's disk nor its room on the host depends on a worker.
async fn written_on_after_the_workers_death(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let vmm = case.vmm_of(&pod.id).await?;
    container.sh("dd if=/dev/zero of=/before bs=1M count=16 2>/dev/null; sync").await?;
    case.stack.kill_worker()?;
    container.sh("dd if=/dev/zero of=/after bs=1M count=16 2>/dev/null; sync; cmp /before /after").await?;
    ensure!(disk_bytes(vmm)? >= 32 * MIB, "{:?}", disks_of(vmm)?);
    let second = pod.start(idle("second")).await?;
    second.sh("test ! -e /before").await?;
    case.cri.stop(&container.id, 5).await?;
    case.cri.remove(&container.id).await?;
    ensure!(disk_bytes(vmm)? < MIB, "{:?}", disks_of(vmm)?);
    // Made once, copied for each.
    let scratch = case.stack.daemon_dirs()[1].join("rootfs/scratch");
    let names = || -> Result<Vec<String>> {
        let names =
            fs::read_dir(&scratch)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    };
    // One that is being made for the pool has a name for a moment.
    eventually("no name of a disk", PATIENCE, || async {
        Ok(names()?.iter().all(|name| name.starts_with("empty-")).then_some(()))
    })
    .await
}

async fn a_full_disk_costs_no_other_pod(case: Case) -> Result<()> {
    let scratch = case.stack.daemon_dirs()[1].join("rootfs/scratch");
    case.stack.end("sandboxer", Signal::SIGTERM).await?;
    mount(Some("tmpfs"), &scratch, Some("tmpfs"), MsFlags::empty(), Some("size=48m,mode=0700"))?;
    case.stack.run_up()?;
    let outcome = full_disk(&case).await;
    case.clean_up().await?;
    case.stack.end("sandboxer", Signal::SIGTERM).await?;
    umount2(&scratch, MntFlags::MNT_DETACH)?;
    case.stack.run_up()?;
    outcome
}

async fn full_disk(case: &Case) -> Result<()> {
    let (greedy, other) = (case.pod().await?, case.pod().await?);
    let counts =
        other.start(shell("counts", "n=0; while :; do echo $n; n=$((n+1)); sleep 0.1; done")).await?;
    let greedy_one = greedy.start(idle("greedy")).await?;
    let fills = "dd if=/dev/zero of=/big bs=1M count=100 conv=fsync 2>&1 || true; echo lives";
    let output = greedy_one.sh(fills).await?;
    ensure!(output.contains("No space left") || output.contains("Input/output error"), "{output}");
    ensure!(output.ends_with("lives"), "{output}");
    let lines = counts.logs()?.lines;
    ensure!(counts.sh("ls /bin >/dev/null; echo here").await? == "here");
    eventually("another pod's log", PATIENCE, || async { Ok((counts.logs()?.lines > lines).then_some(())) })
        .await?;
    let refused = case.pod().await?.start(idle("too-late")).await;
    if let Err(error) = refused {
        let text = error.message();
        ensure!(text.contains("free space below state_dir") && text.contains("No space left"), "{text}");
    }
    case.remove(&greedy.id).await.context("a pod whose disk is full")?;
    counts.sh("dd if=/dev/zero of=/big bs=1M count=20 conv=fsync 2>/dev/null && echo room").await?;
    Ok(())
}
