//! What makes a pod a microVM: its own kernel and VM, and no process per pod but the VMM.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{LinuxContainerResources, NamespaceMode, NamespaceOption, UserNamespace};
use nix::unistd::Pid;
use sandboxer_e2e::case::{Case, PATIENCE, idle, security, shell};
use sandboxer_e2e::eventually;

crate::cases![
    Vm: own_kernel, vm_by_annotation, vm_by_limits, counted_in_the_named_cgroup,
    memory_is_counted_from_the_first_page_on,
        limits_of_the_pod, limits_beyond_the_vm, held_to_the_cpus_of_its_containers, host_namespaces_are_refused, annotation_that_makes_no_sense, host_network_is_refused_or_said;
    VmAlone: one_vmm_and_nothing_else
];

async fn own_kernel(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let inside = pod.output("uname -r").await?;
    let outside = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(inside != outside.trim() && !inside.is_empty(), "inside {inside}, outside {outside}");
    let interfaces = pod.output("ls /sys/class/net").await?;
    ensure!(interfaces.split_whitespace().eq(["eth0", "lo"]), "{interfaces}");
    Ok(())
}

async fn vm_by_annotation(case: Case) -> Result<()> {
    let pod = case
        .pod_with(|config| {
            config.annotations.insert("io.sandboxer.vcpus".into(), "2".into());
            config.annotations.insert("io.sandboxer.memory".into(), "384Mi".into());
        })
        .await?;
    let out =
        pod.output("grep -c ^processor /proc/cpuinfo; awk '/^MemTotal/ { print $2 }' /proc/meminfo").await?;
    let (cpus, kib) = out.split_once('\n').context("two lines")?;
    ensure!(cpus == "2", "{cpus} vCPUs");
    // The kernel keeps some of it for itself before it counts.
    let mib = kib.parse::<u64>()? >> 10;
    ensure!((300..=384).contains(&mib), "{mib} MiB of 384");
    Ok(())
}

/// A guest has a kernel of its own: none of the host's namespaces is to be had, nor one by another's process.
async fn host_namespaces_are_refused(case: Case) -> Result<()> {
    let node = NamespaceMode::Node.into();
    let asks = [
        ("PID", NamespaceOption { pid: node, ..Default::default() }),
        ("IPC", NamespaceOption { ipc: node, ..Default::default() }),
    ];
    for (kind, ask) in asks {
        let refused = case.pod_with(|config| {
            let linux = config.linux.get_or_insert_default();
            linux.security_context.get_or_insert_default().namespace_options = Some(ask);
        });
        let refused =
            refused.await.err().with_context(|| format!("the host's {kind} namespace was given"))?;
        ensure!(refused.message().contains(&format!("host's {kind} namespace")), "{refused}");
    }
    let pod = case.pod().await?;
    let target = pod.start(idle("target")).await?;
    pod.start(idle("other")).await?;
    let mut debugger = shell("debugger", "true");
    let options = NamespaceOption {
        pid: NamespaceMode::Target.into(),
        target_id: target.id.clone(),
        ..Default::default()
    };
    security(&mut debugger).namespace_options = Some(options);
    let refused = pod.start(debugger).await.err().context("a container's processes were given to another")?;
    ensure!(refused.message().contains("shareProcessNamespace"), "{refused}");
    let userns = UserNamespace { mode: NamespaceMode::Pod.into(), ..Default::default() };
    let refused = case.pod_with(|config| {
        let linux = config.linux.get_or_insert_default();
        let options =
            linux.security_context.get_or_insert_default().namespace_options.get_or_insert_default();
        options.userns_options = Some(userns);
    });
    ensure!(refused.await.is_err(), "a user namespace was given");
    Ok(())
}

/// What the pod's containers may use together, and not less than every pod gets.
async fn vm_by_limits(case: Case) -> Result<()> {
    const LIMIT_MIB: i64 = 450;
    let pod = case
        .pod_with(|config| {
            config.linux.get_or_insert_default().resources = Some(LinuxContainerResources {
                cpu_quota: 150_000,
                cpu_period: 100_000,
                memory_limit_in_bytes: LIMIT_MIB << 20,
                ..Default::default()
            });
        })
        .await?;
    // A process of that size lives: the guest keeps what it needs beside it.
    let script = format!(
        "grep -c ^processor /proc/cpuinfo; dd if=/dev/zero of=/dev/null bs={}M count=1 2>/dev/null && echo fits",
        LIMIT_MIB - 10
    );
    let mut config = shell("all", &script);
    config.linux.get_or_insert_default().resources =
        Some(LinuxContainerResources { memory_limit_in_bytes: LIMIT_MIB << 20, ..Default::default() });
    let out = pod.run(config).await?.success()?;
    let cpus = std::thread::available_parallelism()?.get().min(2);
    ensure!(out == format!("{cpus}\nfits"), "{out}");
    Ok(())
}

/// What the pod's containers may use together, from its start on and as UpdatePodSandboxResources changes it.
async fn limits_of_the_pod(case: Case) -> Result<()> {
    let memory =
        |mib: i64| LinuxContainerResources { memory_limit_in_bytes: mib << 20, ..Default::default() };
    let pod =
        case.pod_with(|config| config.linux.get_or_insert_default().resources = Some(memory(48))).await?;
    // None of them has a limit of its own.
    let container = pod.start(idle("c")).await?;
    let fits = |mib: i64| {
        let script = format!("dd if=/dev/zero of=/dev/null bs={mib}M count=1 2>/dev/null");
        let container = &container;
        async move { container.sh(&script).await.is_ok() }
    };
    ensure!(fits(16).await && !fits(64).await, "the limit at the start");
    case.cri.update_pod(&pod.id, memory(128)).await?;
    ensure!(fits(64).await && !fits(160).await, "the raised limit");
    case.cri.update_pod(&pod.id, memory(32)).await?;
    ensure!(fits(8).await && !fits(64).await, "the lowered limit");
    let cpu = LinuxContainerResources { cpu_quota: 50_000, cpu_period: 100_000, ..Default::default() };
    case.cri.update_pod(&pod.id, cpu).await?;
    ensure!(!fits(64).await, "a limit of CPU changed that of memory");
    let script = "dd if=/dev/zero of=/dev/shm/file bs=1M count=12 2>/dev/null; echo held; sleep 1000";
    let holder = pod.start(shell("holder", script)).await?;
    holder.logged("held").await?;
    let refused = case.cri.update_pod(&pod.id, memory(8)).await.err().context("less than is held")?;
    ensure!(refused.message().contains("8 MiB is less than"), "{refused}");
    ensure!(holder.sh("echo alive").await? == "alive", "what was refused ended a container");
    Ok(())
}

/// A VM keeps its size: larger limits are rejected, for a pod and for a container.
async fn limits_beyond_the_vm(case: Case) -> Result<()> {
    let limits = |memory_mib: i64, cpus: i64| LinuxContainerResources {
        memory_limit_in_bytes: memory_mib << 20,
        cpu_quota: cpus * 100_000,
        cpu_period: 100_000,
        ..Default::default()
    };
    let pod =
        case.pod_with(|config| config.linux.get_or_insert_default().resources = Some(limits(64, 1))).await?;
    let mut config = idle("c");
    config.linux.get_or_insert_default().resources = Some(limits(64, 1));
    let container = pod.start(config).await?;
    for (resources, says) in [(limits(64, 64), "64 CPUs"), (limits(1 << 20, 1), "1048576 MiB")] {
        let of_pod = case.cri.update_pod(&pod.id, resources.clone()).await.err().context("of the pod")?;
        let of_container =
            case.cri.update(&container.id, resources).await.err().context("of the container")?;
        for refused in [of_pod.message(), of_container.message()] {
            ensure!(refused.contains(says) && refused.contains("restart the pod"), "{refused}");
        }
    }
    ensure!(container.sh("cat /sys/fs/cgroup/memory.max").await? == (64 << 20).to_string());
    // As kubelet does when it restarts a container after a resize that was refused.
    for (name, resources, says) in
        [("cpus", limits(64, 64), "64 CPUs"), ("memory", limits(1 << 20, 1), "1048576 MiB")]
    {
        let mut config = idle(name);
        config.linux.get_or_insert_default().resources = Some(resources);
        let refused = pod.start(config).await.err().context("of a new container")?;
        let refused = format!("{refused:#}");
        ensure!(refused.contains(says) && refused.contains("restart the pod"), "{refused}");
    }
    Ok(())
}

/// The VMM is in the pod's own group below the parent, in each hierarchy; the group goes with the pod.
async fn counted_in_the_named_cgroup(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let groups = case.vmm_cgroups(&pod.id).await?;
    let memory = groups.lines().find(|line| line.contains(":memory:") || line.starts_with("0::"));
    let group = format!("/sandboxer-{}", pod.id);
    ensure!(memory.is_some_and(|line| line.ends_with(&group)), "its memory is counted elsewhere: {groups}");
    case.clean_up().await?;
    let left = case.stack.cgroups(&format!("sandboxer-{}", pod.id))?;
    ensure!(left.is_empty(), "{left:?} are left");
    Ok(())
}

/// A VMM is born in its pod's group: a move would leave what it has taken before where it was counted. One of the pool's was
/// counted in the pool's group.
async fn memory_is_counted_from_the_first_page_on(case: Case) -> Result<()> {
    const LEAST: u64 = 16 << 20;
    for handler in ["sandboxer-boot", "sandboxer-template"] {
        let config = case.pod_config();
        let pod = case.cri.run_pod(&config, handler).await?;
        let bytes = memory_of(&case, &format!("/sandboxer-{pod}"))?;
        ensure!(bytes >= LEAST, "{handler}: only {bytes} bytes are counted in the pod's group");
    }
    eventually("a VM of the pool, counted in the pool's group", PATIENCE, || async {
        // Another case's pod may take it at any moment.
        let is_in_group = |vmm: &Pid| {
            let groups = std::fs::read_to_string(format!("/proc/{vmm}/cgroup"));
            groups.is_ok_and(|groups| groups.lines().any(|line| line.contains("-idle/")))
        };
        Ok(case.stack.waiting()?.iter().any(is_in_group).then_some(()))
    })
    .await?;
    let bytes = memory_of(&case, "-idle")?;
    ensure!(bytes >= LEAST, "only {bytes} bytes are counted in the pool's group");
    Ok(())
}

/// Returns what is counted in the control group whose path is the stack's with this end, bytes.
fn memory_of(case: &Case, end: &str) -> Result<u64> {
    let parent = case.stack.env("SANDBOXER_CGROUP_PARENT")?;
    let below = PathBuf::from(format!("{}{end}", parent.trim_start_matches('/')));
    let files = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].into_iter().flat_map(|root| {
        ["memory.usage_in_bytes", "memory.current"].map(|file| Path::new(root).join(&below).join(file))
    });
    let text = files.map(std::fs::read_to_string).find_map(Result::ok);
    Ok(text.with_context(|| format!("no memory is counted in {}", below.display()))?.trim().parse()?)
}

/// The VMM runs where the containers may; in the guest they have all vCPUs.
async fn held_to_the_cpus_of_its_containers(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = idle("c");
    config.linux.get_or_insert_default().resources =
        Some(LinuxContainerResources { cpuset_cpus: "0".into(), ..Default::default() });
    pod.start(config).await?;
    let vmm = case.vmm_of(&pod.id).await?;
    eventually("the VMM on CPU 0", PATIENCE, || async {
        for thread in std::fs::read_dir(format!("/proc/{vmm}/task"))? {
            let status = std::fs::read_to_string(thread?.path().join("status"))?;
            if !status.contains("\nCpus_allowed_list:\t0\n") {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })
    .await
}

async fn annotation_that_makes_no_sense(case: Case) -> Result<()> {
    for (key, value) in [
        ("io.sandboxer.vcpus", "many"),
        ("io.sandboxer.vcpus", "0"),
        ("io.sandboxer.memory", "-1Gi"),
        ("io.sandboxer.memory", "1Mi"),
        ("io.sandboxer.disk-bps", "0"),
        ("io.sandboxer.disk-iops", "9"),
        ("io.sandboxer.disk-bps-burst", "1Gi"),
        ("io.sandboxer.net-bps-rx", "0"),
        ("io.sandboxer.net-bps-tx-burst", "1Gi"),
        ("kubernetes.io/ingress-bandwidth", "1k"),
        ("io.sandboxer.egress", "example.org"),
    ] {
        let refused = case.pod_with(|config| drop(config.annotations.insert(key.into(), value.into()))).await;
        let error = refused.err().with_context(|| format!("{key}={value} was accepted"))?;
        ensure!(error.message().contains(key) && error.message().contains(value), "{key}={value}: {error}");
    }
    Ok(())
}

/// A VM can't be in the host's network: a pod that asks for it is refused by name or has its loopback alone.
async fn host_network_is_refused_or_said(case: Case) -> Result<()> {
    let pod = case
        .pod_with(|config| {
            let linux = config.linux.get_or_insert_default();
            linux
                .security_context
                .get_or_insert_default()
                .namespace_options
                .get_or_insert_default()
                .network = k8s_cri::v1::NamespaceMode::Node.into();
        })
        .await;
    match pod {
        Err(error) => ensure!(error.message().to_lowercase().contains("network"), "{error}"),
        Ok(pod) => {
            let interfaces = pod.output("ls /sys/class/net").await?;
            ensure!(interfaces == "lo", "{interfaces}");
        }
    }
    Ok(())
}

/// Three pods with two containers each: three VMMs, no shim, no pause, nothing that was not there before.
async fn one_vmm_and_nothing_else(case: Case) -> Result<()> {
    let before = case.stack.processes("")?;
    for _ in 0..3 {
        let pod = case.pod().await?;
        pod.start(idle("first")).await?;
        pod.start(idle("second")).await?;
    }
    let vmms = case.stack.vmms()?;
    ensure!(vmms.len() == 3, "{} VMMs for three pods", vmms.len());
    ensure!(case.stack.processes("containerd-shim")?.is_empty(), "a shim is left running");
    ensure!(case.stack.processes("pause")?.is_empty(), "a pause process runs");
    // After helper processes have ended by themselves. VMs that wait in the pool come and
    // go meanwhile.
    let others = || {
        let mut others = case.stack.processes("")?;
        let waiting = case.stack.waiting()?;
        others.retain(|pid| !before.contains(pid) && !vmms.contains(pid) && !waiting.contains(pid));
        Ok::<_, anyhow::Error>(others)
    };
    let settled =
        eventually("no process but the VMMs", PATIENCE, || async { Ok(others()?.is_empty().then_some(())) });
    settled.await.with_context(|| format!("{:?}", others()))?;
    case.clean_up().await?;
    let vmms = case.stack.vmms()?.len();
    ensure!(vmms == 0, "{vmms} VMMs are left after every pod was removed");
    Ok(())
}
