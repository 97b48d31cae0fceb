//! Pods that take a VM that waited: which do, what they see of it, and where such VMs are told.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{Mount, NamespaceMode, PodSandboxConfig};
use sandboxer_e2e::case::{Case, Pod, idle};

use crate::templates::pool_is_filled;

crate::cases![
    VmAlone: a_container_sees_what_it_sees_after_a_boot, a_pod_takes_the_pools_vm_if_it_fits,
        a_pod_without_a_network_takes_the_pools_vm, a_pod_with_its_own_limits_takes_the_pools_vm,
        vms_that_wait_are_told_by_name
];

/// What a container can find out of where it runs, in sections.
const LOOK: &str = r#"
    say() { echo "== $1"; }
    say own; ip -o addr show eth0 | awk '{ print $4 }' | cut -d/ -f1; cat /sys/class/net/eth0/address
    say mounts; cat /proc/mounts
    say pids; echo "this is $$"; ls /proc | grep '^[0-9]*$' | sort -n | head -n 1
    say cgroups; cat /proc/self/cgroup; find /sys/fs/cgroup
    cd /sys/fs/cgroup; grep "" *.max *.weight cgroup.controllers cgroup.type cpuset.* 2>/dev/null
    dmesg >/dev/null 2>&1 && say log && dmesg
    say sysctl; grep -r "" /proc/sys 2>/dev/null
    say environment; env; umask; id; hostname; uname -a; cat /proc/self/limits
    say status; cat /proc/self/status
    say namespaces; for ns in /proc/self/ns/*; do readlink $ns; done
    say devices; ls /dev /sys/block /sys/class/*; cat /proc/partitions /proc/filesystems /proc/modules
    say network; ip addr; ip route; ip -6 route; cat /etc/resolv.conf /etc/hosts /etc/hostname
    cat /proc/net/tcp /proc/net/udp /proc/net/unix | wc -l
    grep "" /sys/class/net/*/* 2>/dev/null
    true"#;

/// Lines in which a pod of the pool may differ from one that booted: section, what the line has, and why.
const MAY_DIFFER: [(&str, &str, &str); 11] = [
    ("devices", " sd", "the pool's has the disk that is written to before the image's"),
    ("devices", " vd", "a slot that was empty at the boot says that it is very large"),
    ("sysctl", "/proc/sys/fs/dentry-state:", "counts what was ever opened"),
    ("sysctl", "/proc/sys/fs/inode-", "counts what was ever opened"),
    ("sysctl", "/proc/sys/fs/file-nr:", "counts what is open at the moment"),
    (
        "sysctl",
        "/proc/sys/fs/nfs/nfs_congestion_kb:",
        "by the pages that were set up when NFS was, which varies by a few",
    ),
    ("sysctl", "/proc/sys/kernel/random/", "each draws its own"),
    ("sysctl", "/proc/sys/kernel/ns_last_pid:", "counts processes, those of this script among them"),
    ("status", "ctxt_switches:", "its own course"),
    ("status", "Vm", "its own course"),
    ("status", "Rss", "its own course"),
];

type Seen = BTreeMap<String, BTreeSet<String>>;

/// Returns the lines of each section, in any order; the pod's own addresses are called so.
async fn seen(pod: &Pod) -> Result<Seen> {
    let mut seen = Seen::new();
    let mut section = "";
    let text = pod.output(LOOK).await?;
    for line in text.lines() {
        match line.strip_prefix("== ") {
            Some(name) => section = name,
            None => _ = seen.entry(section.into()).or_default().insert(line.to_owned()),
        }
    }
    let own = seen.remove("own").context("no addresses")?;
    // Whole words: another address may begin as this one does.
    let anonymous = |line: String| {
        let words = line.split_inclusive([' ', '\t', '/']).map(|word| {
            let bare = word.trim_end_matches([' ', '\t', '/']);
            let bare = bare.strip_prefix("address:").unwrap_or(bare);
            if own.contains(bare) { word.replace(bare, "OWN") } else { word.to_owned() }
        });
        words.collect::<String>()
    };
    let rename = |lines: BTreeSet<String>| lines.into_iter().map(anonymous).collect();
    Ok(seen.into_iter().map(|(section, lines)| (section, rename(lines))).collect())
}

async fn a_container_sees_what_it_sees_after_a_boot(case: Case) -> Result<()> {
    pool_is_filled(&case).await?;
    let pooled = case.pod().await?;
    ensure!(start_path(&case, &pooled)? == "pool");
    let config = case.pod_config();
    let booted = case.pod_of(&case.cri.run_pod(&config, "sandboxer-boot").await?, config);
    ensure!(start_path(&case, &booted)? == "boot");
    let (pooled, booted) = (seen(&pooled).await?, seen(&booted).await?);
    // The kernel's log, which shows what the VM did in the pool, is hidden from containers like this one.
    let names = "cgroups devices environment mounts namespaces network pids status sysctl";
    for seen in [&pooled, &booted] {
        ensure!(seen.keys().map(String::as_str).eq(names.split(' ')), "sections {:?}", seen.keys());
    }
    let mut unlike = Vec::new();
    let mut boot_ids = 0;
    for (section, lines) in &pooled {
        for line in lines.symmetric_difference(&booted[section]) {
            boot_ids += usize::from(line.contains("random/boot_id"));
            let may = |(name, has, _): &(&str, &str, &str)| name == section && line.contains(has);
            if !MAY_DIFFER.iter().any(may) {
                let whose = if lines.contains(line) { "pool" } else { "boot" };
                unlike.push(format!("{section}, after {whose}: {line}"));
            }
        }
    }
    ensure!(boot_ids == 2, "the look doesn't see that two VMs are two");
    ensure!(unlike.is_empty(), "{}", unlike.join("\n"));
    Ok(())
}

async fn a_pod_takes_the_pools_vm_if_it_fits(case: Case) -> Result<()> {
    pool_is_filled(&case).await?;
    let missed = misses(&case)?;
    let plain = case.pod().await?;
    ensure!(start_path(&case, &plain)? == "pool");
    ensure!(misses(&case)? == missed, "a pod that got a VM of the pool counts as one that didn't");

    // The pool has room for the default size alone.
    let other = case
        .pod_with(|config| _ = config.annotations.insert("io.sandboxer.vcpus".into(), "2".into()))
        .await?;
    let by = start_path(&case, &other)?;
    ensure!(by == "template" || by == "boot", "a VM of 2 vCPUs got by {by}");
    ensure!(misses(&case)? == missed + 1, "why it came slower is not counted");
    ensure!(other.output("grep -c ^processor /proc/cpuinfo").await? == "2");

    // A share is the container's, which comes once the pod has its VM: any VM will do.
    pool_is_filled(&case).await?;
    let host = tempfile::tempdir()?;
    std::fs::write(host.path().join("file"), "live")?;
    let sharing = case.pod().await?;
    ensure!(start_path(&case, &sharing)? == "pool");
    let mut config = idle("c");
    config.mounts.push(Mount {
        container_path: "/data".into(),
        host_path: host.path().display().to_string(),
        ..Default::default()
    });
    let container = sharing.start(config).await?;
    ensure!(container.sh("cat /data/file").await? == "live");
    Ok(())
}

/// The guest has no network card then, as after a boot.
async fn a_pod_without_a_network_takes_the_pools_vm(case: Case) -> Result<()> {
    let hosts = |config: &mut PodSandboxConfig| {
        let security = config.linux.get_or_insert_default().security_context.get_or_insert_default();
        security.namespace_options.get_or_insert_default().network = NamespaceMode::Node.into();
    };
    pool_is_filled(&case).await?;
    let missed = misses(&case)?;
    let pooled = case.pod_with(hosts).await?;
    ensure!(start_path(&case, &pooled)? == "pool", "it came by {}", start_path(&case, &pooled)?);
    ensure!(misses(&case)? == missed, "it counts as one that got no VM of the pool");
    let mut config = case.pod_config();
    hosts(&mut config);
    let booted = case.pod_of(&case.cri.run_pod(&config, "sandboxer-boot").await?, config);
    let look = "ls /sys/class/net; ip -o addr; ip route; cat /proc/net/dev | cut -d: -f1";
    let (pooled, booted) = (pooled.output(look).await?, booted.output(look).await?);
    ensure!(pooled.starts_with("lo\n") && !pooled.contains("eth"), "{pooled}");
    ensure!(pooled == booted, "pool:\n{pooled}\nboot:\n{booted}");
    // A pod with a network has its card.
    pool_is_filled(&case).await?;
    let plain = case.pod().await?;
    ensure!(start_path(&case, &plain)? == "pool");
    ensure!(plain.output("ls /sys/class/net | tr '\\n' ' '").await?.trim() == "eth0 lo");
    Ok(())
}

/// Limits of disks and of the network are set when it takes the VM.
async fn a_pod_with_its_own_limits_takes_the_pools_vm(case: Case) -> Result<()> {
    const RATE: u64 = 2 << 20;
    const BURST: u64 = 4 << 20;
    const WRITTEN: u64 = 12 << 20;
    pool_is_filled(&case).await?;
    let pod = case
        .pod_with(|config| {
            let limits = [
                ("disk-bps", RATE.to_string()),
                ("disk-bps-burst", BURST.to_string()),
                ("net-bps-rx", "100Mi".into()),
            ];
            config.annotations.extend(limits.map(|(name, value)| (format!("io.sandboxer.{name}"), value)));
        })
        .await?;
    ensure!(start_path(&case, &pod)? == "pool", "it came by {}", start_path(&case, &pod)?);
    for name in ["first", "second"] {
        let container = pod.start(idle(name)).await?;
        let began = Instant::now();
        container.sh(&format!("dd if=/dev/zero of=/big bs=1M count={} conv=fsync", WRITTEN >> 20)).await?;
        let (took, due) = (began.elapsed(), Duration::from_secs((WRITTEN - BURST) / RATE));
        ensure!(
            took >= due.mul_f64(0.95),
            "{name}: {WRITTEN} bytes took {took:?}, at least {due:?} were due"
        );
    }
    Ok(())
}

/// In the memory report, as the pool's, each by its process.
async fn vms_that_wait_are_told_by_name(case: Case) -> Result<()> {
    let _pod = case.pod().await?;
    pool_is_filled(&case).await?;
    let waiting: Vec<u64> = case.stack.cli_json(&["template", "list"])?["pool"]
        .as_array()
        .context("no pool")?
        .iter()
        .filter_map(|vm| vm["vmm_pid"].as_u64())
        .collect();
    ensure!(!waiting.is_empty());
    let report = case.stack.cli(&["mem-report", "--runtime", "sandboxer"])?;
    for pid in waiting {
        let mut lines = report.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let named =
            |words: &[&str]| words.first() == Some(&"pool") && words.contains(&pid.to_string().as_str());
        ensure!(lines.any(|words| named(&words)), "VM {pid} waits and is not told:\n{report}");
    }
    let report = case.stack.cli_json(&["mem-report", "--runtime", "sandboxer"])?;
    let kib = report["memory"][0]["by_role"]["pool"].as_f64();
    ensure!(kib.is_some_and(|kib| kib > 0.0), "{}", report["memory"]);
    Ok(())
}

/// Returns how a pod got its VM.
fn start_path(case: &Case, pod: &Pod) -> Result<String> {
    let start_path = &case.stack.cli_json(&["inspect", &pod.id])?["start_path"];
    Ok(start_path.as_str().context("no start_path")?.to_owned())
}

/// Returns how many pods could not have a VM of the pool.
fn misses(case: &Case) -> Result<u64> {
    let listed = case.stack.cli_json(&["template", "list"])?;
    let start_paths = listed["start_paths"].as_array().context("no start_paths")?;
    let missed = start_paths
        .iter()
        .filter(|start_path| start_path["start_path"] == "pool" && start_path["reason"] != "");
    Ok(missed.filter_map(|start_path| start_path["pods"].as_u64()).sum())
}
