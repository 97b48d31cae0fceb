//! What programs have beside the same containerd under runc: limits, sysctls, mounts, volumes of images, devices, and what the kernel
//! of a distribution offers.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{Capability, ContainerConfig, Device, Int64Value, LinuxContainerResources, Mount};
use sandboxer_e2e::case::{Case, PATIENCE, idle, privileged, security, shell};
use sandboxer_e2e::eventually;
use tonic::Code;

crate::cases![
    Any: limits_of_resources, unprivileged_ports_and_pings, sysctls_of_the_node, execs_in_a_divided_group,
        targets_through_links, volumes_of_an_image, processes_of_a_pod, updates_at_the_edges, tun_device;
    Vm: volumes_of_an_image_shared, no_memory_at_all, loop_devices, packet_filters, links_and_queues, file_systems,
        programs_of_32_bits
];

/// Limits of a process, soft and hard, by the kernel's names.
fn limits(text: &str) -> BTreeMap<String, String> {
    let names =
        ["Max open files", "Max processes", "Max locked memory", "Max core file size", "Max stack size"];
    let limit = |name: &&str| {
        let line = text.lines().find_map(|line| line.strip_prefix(*name))?;
        let words: Vec<_> = line.split_whitespace().take(2).collect();
        Some(((*name).to_owned(), words.join(" ")))
    };
    names.iter().filter_map(limit).collect()
}

/// A container without limits of its own has those of containerd, and so have its execs.
async fn limits_of_resources(case: Case) -> Result<()> {
    let containerd = fs::read_to_string(format!("/proc/{}/limits", case.stack.pid("containerd")?))?;
    let container = case.pod().await?.start(shell("c", "cat /proc/self/limits; sleep 1000")).await?;
    container.logged("Max realtime timeout").await?;
    let expected = limits(&containerd);
    for (who, text) in
        [("init", container.logs()?.stdout), ("exec", container.sh("cat /proc/self/limits").await?)]
    {
        ensure!(limits(&text) == expected, "{who} has {:?}, containerd {expected:?}", limits(&text));
    }
    let opened = container.sh("ulimit -n $(ulimit -H -n) && ulimit -n").await?;
    ensure!(expected["Max open files"].ends_with(&format!(" {opened}")), "{opened}");
    Ok(())
}

/// A user without capabilities may listen on port 80 and ping: containerd's defaults of a pod's sysctls.
async fn unprivileged_ports_and_pings(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell(
        "c",
        "cat /proc/sys/net/ipv4/ip_unprivileged_port_start; tr '\\t' ' ' </proc/sys/net/ipv4/ping_group_range; \
         httpd -p 127.0.0.1:80 -h /tmp && echo listens",
    );
    let context = security(&mut config);
    context.run_as_user = Some(Int64Value { value: 1000 });
    context.capabilities = Some(Capability { drop_capabilities: vec!["ALL".into()], ..Default::default() });
    let output = pod.run(config).await?.success()?;
    ensure!(output == "0\n0 2147483647\nlistens", "{output}");
    let other = case
        .pod_with(|config| {
            let sysctls = &mut config.linux.get_or_insert_default().sysctls;
            sysctls.insert("net.ipv4.ip_unprivileged_port_start".into(), "81".into());
        })
        .await?;
    let output = other.output("cat /proc/sys/net/ipv4/ip_unprivileged_port_start").await?;
    ensure!(output == "81", "a pod's own value: {output}");
    Ok(())
}

/// Sysctls without a namespace are the node's.
async fn sysctls_of_the_node(case: Case) -> Result<()> {
    const NAMES: [&str; 6] = [
        "vm/max_map_count",
        "fs/inotify/max_user_watches",
        "fs/inotify/max_user_instances",
        "fs/nr_open",
        "fs/aio-max-nr",
        "kernel/threads-max",
    ];
    let pod = case.pod().await?;
    let output = pod.output(&format!("cd /proc/sys; cat {}", NAMES.join(" "))).await?;
    for (name, value) in NAMES.iter().zip(output.lines()) {
        let expected = fs::read_to_string(Path::new("/proc/sys").join(name))?;
        ensure!(value == expected.trim(), "{name} is {value}, the node's {expected}");
    }
    // A newer kernel has another in each PID namespace.
    let pid_max =
        Command::new("unshare").args(["-fp", "--mount-proc", "cat", "/proc/sys/kernel/pid_max"]).output()?;
    let (expected, value) =
        (String::from_utf8(pid_max.stdout)?, pod.output("cat /proc/sys/kernel/pid_max").await?);
    ensure!(
        value.trim() == expected.trim(),
        "kernel.pid_max is {value}, in a namespace of the node {expected}"
    );
    if case.in_vm() {
        let inspected = case.stack.cli(&["inspect", &pod.id])?;
        ensure!(
            inspected.contains("vm.max_map_count = ") && inspected.contains("(the node's)"),
            "{inspected}"
        );
    }
    Ok(())
}

/// systemd and managers of containers move the processes of their group into one below, and hand controllers on. Then no process can
/// enter the container's own group.
async fn execs_in_a_divided_group(case: Case) -> Result<()> {
    let script = "cd /sys/fs/cgroup; if [ -e cgroup.controllers ]; then mkdir init; \
                  for p in $(cat cgroup.procs); do echo $p >init/cgroup.procs; done; \
                  echo +memory >cgroup.subtree_control || exit 1; fi; echo divided; exec sleep 1000";
    let mut config = shell("c", script);
    security(&mut config).privileged = true;
    let container = case.pod_with(privileged).await?.start(config).await?;
    container.logged("divided").await?;
    for _ in 0..2 {
        let group = container.sh("cat /proc/self/cgroup").await?;
        ensure!(!case.in_vm() || group.ends_with("/init"), "{group}");
    }
    Ok(())
}

/// Makes an image of busybox with what `change` does to its tree, and with `volumes`; imports it as `name`.
pub async fn image(
    case: &Case,
    name: &str,
    change: impl FnOnce(&Path) -> Result<()>,
    volumes: &[&str],
) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (root, archive) = (dir.path().join("root"), dir.path().join("image.tar"));
    for path in ["bin", "etc", "proc", "sys", "dev", "tmp"] {
        fs::create_dir_all(root.join(path))?;
    }
    let busybox = Command::new("sh").args(["-c", "command -v busybox"]).output()?;
    fs::copy(String::from_utf8(busybox.stdout)?.trim(), root.join("bin/busybox"))?;
    for applet in
        ["sh", "cat", "ls", "stat", "sleep", "mount", "mkdir", "echo", "readlink", "df", "kill", "touch"]
    {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    change(&root)?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/oci-image.sh");
    let mut make = Command::new(script);
    make.args(["tree", name]).arg(&archive).arg(&root).args(volumes).stdin(Stdio::null());
    let made = tokio::task::spawn_blocking(move || make.output()).await??;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut import = case.stack.command("ctr");
    import.args(["images", "import"]).arg(&archive);
    let imported = tokio::task::spawn_blocking(move || import.output()).await??;
    ensure!(imported.status.success(), "{}", String::from_utf8_lossy(&imported.stderr));
    Ok(())
}

pub fn of_image(mut config: ContainerConfig, name: &str) -> ContainerConfig {
    config.image.get_or_insert_default().image = name.into();
    config
}

fn mount(config: &mut ContainerConfig, at: &str, source: &Path) {
    config.mounts.push(Mount {
        container_path: at.into(),
        host_path: source.display().to_string(),
        ..Default::default()
    });
}

/// A mount's target through a symlink that leads to nothing yet is made inside the container; also in a volume, and also for a file.
async fn targets_through_links(case: Case) -> Result<()> {
    const NAME: &str = "docker.io/library/parity-links:latest";
    let links = |root: &Path| -> Result<()> {
        symlink("../run/resolve/stub.conf", root.join("etc/resolv.conf"))?;
        symlink("/srv/data", root.join("data"))?;
        Ok(symlink("../../../../up", root.join("tmp/up"))?)
    };
    image(&case, NAME, links, &[]).await?;
    let host = tempfile::tempdir()?;
    let (volume, other) = (host.path().join("volume"), host.path().join("other"));
    fs::create_dir(&volume)?;
    fs::create_dir(&other)?;
    fs::write(other.join("file"), "content")?;
    symlink("deeper/end", volume.join("in"))?;
    let mut config = of_image(
        shell(
            "c",
            "cat /data/file /srv/data/file /up/file /volume/in/file /volume/deeper/end/file; readlink /data; ls /run/resolve",
        ),
        NAME,
    );
    for (at, source) in [("/data", &other), ("/tmp/up", &other), ("/volume", &volume), ("/volume/in", &other)]
    {
        mount(&mut config, at, source);
    }
    let pod = case
        .pod_with(|config| {
            config.dns_config =
                Some(k8s_cri::v1::DnsConfig { servers: vec!["192.0.2.53".into()], ..Default::default() });
        })
        .await?;
    let output = pod.run(config).await?.success()?;
    ensure!(output == format!("{}/srv/data\nstub.conf", "content".repeat(5)), "{output}");
    Ok(())
}

/// Makes the image of a database: a volume with content, an empty one, and one that the image does not have.
pub async fn with_volumes(case: &Case) -> Result<&'static str> {
    const NAME: &str = "docker.io/library/parity-volumes:latest";
    let content = |root: &Path| -> Result<()> {
        fs::create_dir_all(root.join("var/lib/db/base"))?;
        fs::create_dir_all(root.join("cache"))?;
        fs::write(root.join("var/lib/db/base/file"), "of the image\n")?;
        symlink("base/file", root.join("var/lib/db/link"))?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o750);
        Ok(fs::set_permissions(root.join("var/lib/db"), mode)?)
    };
    image(case, NAME, content, &["/var/lib/db", "/cache", "/not/there"]).await?;
    Ok(NAME)
}

/// A volume of an image has the image's content, belongs to one container, and is one on which an overlay can write.
async fn volumes_of_an_image(case: Case) -> Result<()> {
    let name = with_volumes(&case).await?;
    let pod = case.pod_with(privileged).await?;
    let script = "stat -c '%a %u' /var/lib/db; cat /var/lib/db/link; ls /cache /not/there; \
                  echo changed >/var/lib/db/base/file; touch /not/there/mine; \
                  mkdir -p /cache/u /cache/w /m && mount -t overlay -o lowerdir=/bin,upperdir=/cache/u,workdir=/cache/w none /m \
                  && touch /m/new && ls /cache/u";
    for (container, read_only) in [("one", false), ("two", false)] {
        let mut config = of_image(shell(container, script), name);
        security(&mut config).privileged = true;
        security(&mut config).readonly_rootfs = read_only;
        let output = pod.run(config).await?.success()?;
        ensure!(output == "750 0\nof the image\n/cache:\n\n/not/there:\nnew", "{container}: {output}");
    }
    // A volume can be written to, whatever the root is.
    let mut config = of_image(shell("three", "echo x >/cache/x && cat /cache/x; touch /etc/x 2>&1"), name);
    security(&mut config).readonly_rootfs = true;
    let ended = pod.run(config).await?;
    ensure!(ended.logs.stdout.starts_with("x\n") && ended.logs.stdout.contains("Read-only"), "{ended:?}");
    if case.in_vm() {
        let container = pod.start(of_image(shell("four", "sleep 1000"), name)).await?;
        let on = container.sh("df /var/lib/db | cat").await?;
        ensure!(!on.contains("sandboxer"), "a volume is a live share: {on}");
    }
    Ok(())
}

/// By annotation it is a directory of the node.
async fn volumes_of_an_image_shared(case: Case) -> Result<()> {
    let name = with_volumes(&case).await?;
    let pod = case
        .pod_with(|config| {
            drop(config.annotations.insert("io.sandboxer.image-volumes".into(), "share".into()))
        })
        .await?;
    let container = pod.start(of_image(shell("c", "echo x >/cache/here; sleep 1000"), name)).await?;
    let (_, info) = case.cri.status(&container.id).await?;
    let info: serde_json::Value = serde_json::from_str(&info)?;
    let mounts = info["runtimeSpec"]["mounts"].as_array().context("mounts")?;
    let cache = mounts.iter().find(|mount| mount["destination"] == "/cache").context("no volume")?;
    let source = PathBuf::from(cache["source"].as_str().context("a source")?);
    eventually("the container's file on the node", PATIENCE, || async {
        Ok(source.join("here").exists().then_some(()))
    })
    .await?;
    let refused = case
        .pod_with(|config| drop(config.annotations.insert("io.sandboxer.image-volumes".into(), "x".into())))
        .await;
    let refused = refused.err().context("an annotation that makes no sense was taken")?;
    ensure!(refused.message().contains("io.sandboxer.image-volumes"), "{refused}");
    Ok(())
}

/// kubelet limits the processes of a pod by the pod's control group.
async fn processes_of_a_pod(case: Case) -> Result<()> {
    let parent = format!("{}/few", case.stack.env("SANDBOXER_CGROUP_PARENT")?);
    let roots = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"];
    let made: Vec<PathBuf> = roots
        .iter()
        .map(|root| PathBuf::from(format!("{root}{parent}")))
        .filter(|dir| dir.parent().is_some_and(|above| above.join("pids.max").exists()))
        .collect();
    let Some(dir) = made.first() else { anyhow::bail!("no controller of processes for {parent}") };
    fs::create_dir_all(dir)?;
    fs::write(dir.join("pids.max"), "60")?;
    let result = async {
        let pod = case
            .pod_with(|config| config.linux.get_or_insert_default().cgroup_parent.clone_from(&parent))
            .await?;
        let script =
            "n=0; while [ $n -lt 100 ]; do sleep 1000 & n=$((n + 1)); done; ls -d /proc/[0-9]* | wc -l";
        let container = pod.start(shell("c", &format!("({script}) 2>&1; sleep 1000"))).await?;
        container.logged("fork").await.context("100 processes were made where 60 are allowed")?;
        case.clean_up().await
    };
    let result = result.await;
    eventually("removal of the pod's group", PATIENCE, || async {
        Ok((!dir.exists() || fs::remove_dir(dir).is_ok()).then_some(()))
    })
    .await?;
    result
}

/// Values at and beyond the edges are refused, or mean the same as to the node's kernel.
async fn updates_at_the_edges(case: Case) -> Result<()> {
    let container = case.pod().await?.start(idle("c")).await?;
    let resources = |change: fn(&mut LinuxContainerResources)| {
        let mut resources = LinuxContainerResources::default();
        change(&mut resources);
        resources
    };
    // With control groups v2, runc has a weight beyond the edges count as the edge; with v1 the kernel does, and runc says it is an error.
    let takes_weights = case.in_vm() || Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let updates: [(&str, bool, LinuxContainerResources); 17] = [
        ("CPUs that do not exist", false, resources(|new| new.cpuset_cpus = "0-4000".into())),
        ("no list of CPUs", false, resources(|new| new.cpuset_cpus = "none".into())),
        ("a list from high to low", false, resources(|new| new.cpuset_cpus = "1-0".into())),
        ("memory nodes that do not exist", false, resources(|new| new.cpuset_mems = "900".into())),
        ("a CPU that exists", true, resources(|new| new.cpuset_cpus = "0".into())),
        ("the least weight", true, resources(|new| new.cpu_shares = 2)),
        ("the highest weight", true, resources(|new| new.cpu_shares = 262_144)),
        ("a weight of 1", takes_weights, resources(|new| new.cpu_shares = 1)),
        ("a weight of 10^9", takes_weights, resources(|new| new.cpu_shares = 1_000_000_000)),
        ("the shortest period", true, resources(|new| (new.cpu_period, new.cpu_quota) = (1000, 1000))),
        (
            "the longest period",
            true,
            resources(|new| (new.cpu_period, new.cpu_quota) = (1_000_000, 1_000_000)),
        ),
        ("no quota", true, resources(|new| new.cpu_quota = -1)),
        ("a period of 1 µs", false, resources(|new| (new.cpu_period, new.cpu_quota) = (1, 1000))),
        ("a period of an hour", false, resources(|new| new.cpu_period = 3_600_000_000)),
        ("a quota of 1 µs", false, resources(|new| new.cpu_quota = 1)),
        ("memory of less than none", false, resources(|new| new.memory_limit_in_bytes = -5)),
        (
            "swap of less than memory",
            false,
            resources(|new| {
                (new.memory_limit_in_bytes, new.memory_swap_limit_in_bytes) = (64 << 20, 32 << 20);
            }),
        ),
    ];
    for (what, is_taken, resources) in updates {
        let answer = case.cri.update(&container.id, resources).await;
        ensure!(answer.is_ok() == is_taken, "{what}: {answer:?}");
        if let Err(status) = answer
            && case.in_vm()
        {
            // The caller's fault, in words that name it; runc's shim has no code for it.
            let is_callers = matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition);
            ensure!(is_callers, "{what}: {status:?}");
            ensure!(
                what != "a quota of 1 µs" || status.message().contains("a CPU quota of 1 µs"),
                "{status:?}"
            );
        }
        let weight = match what {
            "the least weight" | "a weight of 1" => "1",
            "the highest weight" | "a weight of 10^9" => "10000",
            _ => continue,
        };
        if case.in_vm() {
            let seen = container.sh("cat /sys/fs/cgroup/cpu.weight").await?;
            ensure!(seen == weight, "{what}: {seen}");
        }
    }
    ensure!(container.sh("echo alive").await? == "alive");
    Ok(())
}

/// A limit of one byte kills the container, as under the node's kernel, or is refused: it is not taken without effect.
async fn no_memory_at_all(case: Case) -> Result<()> {
    let container = case.pod().await?.start(idle("c")).await?;
    let one = LinuxContainerResources { memory_limit_in_bytes: 1, ..Default::default() };
    if case.cri.update(&container.id, one).await.is_ok() {
        let status = container.ended().await?;
        ensure!(status.exit_code == 137, "{status:?}");
    }
    Ok(())
}

/// A device that every kernel has is the container's, by name or as a mount.
async fn tun_device(case: Case) -> Result<()> {
    let script = "tunctl -t t0 && ip link show t0 | grep -c t0:";
    let pod = case.pod().await?;
    let admin = |name: &str| {
        let mut config = shell(name, script);
        security(&mut config).capabilities =
            Some(Capability { add_capabilities: vec!["NET_ADMIN".into()], ..Default::default() });
        config
    };
    let mut named = admin("named");
    named.devices.push(Device {
        container_path: "/dev/net/tun".into(),
        host_path: "/dev/net/tun".into(),
        permissions: "rwm".into(),
    });
    let mut mounted = admin("mounted");
    mount(&mut mounted, "/dev/net/tun", Path::new("/dev/net/tun"));
    for config in [named, mounted] {
        let output = pod.run(config).await?.success()?;
        ensure!(output.ends_with('1'), "{output}");
        // The link stays, since the device is persistent.
        let mut remove = admin("remove");
        remove.metadata.get_or_insert_default().attempt =
            SERIAL.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        remove.command = ["sh", "-c", "ip link del t0"].map(str::to_owned).into();
        pod.run(remove).await?.success()?;
    }
    Ok(())
}

static SERIAL: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);

/// Runs `script` in a privileged container.
async fn run_privileged(case: &Case, script: &str) -> Result<String> {
    let mut config = shell("c", script);
    security(&mut config).privileged = true;
    case.pod_with(privileged).await?.run(config).await?.success()
}

async fn loop_devices(case: Case) -> Result<()> {
    let script = "dd if=/dev/zero of=/tmp/a bs=1M count=4 2>/dev/null; mke2fs -F /tmp/a >/dev/null 2>&1; mkdir /a; \
                  mount -o loop /tmp/a /a && touch /a/x && umount /a && losetup /dev/loop5 /tmp/a && losetup -d /dev/loop5 && echo fine";
    let output = run_privileged(&case, script).await?;
    ensure!(output == "fine", "{output}");
    Ok(())
}

/// What iptables needs of the kernel.
async fn packet_filters(case: Case) -> Result<()> {
    const TARGETS: &str = "REJECT LOG CT TPROXY TCPMSS CONNMARK MARK NFLOG NFQUEUE NETMAP MASQUERADE REDIRECT DNAT SNAT TRACE CLASSIFY";
    const MATCHES: &str = "limit hashlimit statistic socket physdev connmark connlimit conntrack state set recent string u32 \
                           owner addrtype multiport comment length mac time tcpmss iprange pkttype quota bpf";
    let script = "cat /proc/net/ip_tables_targets /proc/net/ip_tables_matches; echo; zcat /proc/config.gz";
    let output = run_privileged(&case, script).await?;
    let has = |name: &str| output.lines().any(|line| line == name);
    let missing: Vec<_> =
        TARGETS.split_whitespace().chain(MATCHES.split_whitespace()).filter(|name| !has(name)).collect();
    ensure!(missing.is_empty(), "the guest's kernel lacks {missing:?}");
    for option in
        ["NFT_LIMIT", "NFT_LOG", "NFT_TPROXY", "NFT_SOCKET", "NFT_FIB_INET", "NFT_NUMGEN", "NFT_QUOTA"]
    {
        ensure!(has(&format!("CONFIG_{option}=y")), "the guest's kernel lacks {option}");
    }
    Ok(())
}

async fn links_and_queues(case: Case) -> Result<()> {
    let script = "set -e; ls /sys/class/net | grep -v lo; \
                  for kind in dummy ifb bridge wireguard; do ip link add x type $kind; ip link del x; done; \
                  ip link add link eth0 name v type vlan id 7; ip link add link eth0 name m type macvlan; \
                  ip link add y type dummy; for queue in HTB NETEM FQ_CODEL INGRESS; do zcat /proc/config.gz | grep -q CONFIG_NET_SCH_$queue=y; done; \
                  ip rule add fwmark 1 lookup 100; echo fine";
    let output = run_privileged(&case, script).await?;
    ensure!(output == "eth0\nfine", "{output}");
    Ok(())
}

async fn file_systems(case: Case) -> Result<()> {
    let output = run_privileged(
        &case,
        "cat /proc/filesystems; mount -t binfmt_misc none /proc/sys/fs/binfmt_misc && echo fine",
    )
    .await?;
    for name in ["nfs", "nfs4", "iso9660", "vfat", "squashfs", "fuse", "overlay", "autofs", "fine"] {
        ensure!(
            output.lines().any(|line| line.split_whitespace().last() == Some(name)),
            "no {name}: {output}"
        );
    }
    Ok(())
}

/// Images of 32-bit programs run beside others: the smallest program that ends with 42.
async fn programs_of_32_bits(case: Case) -> Result<()> {
    // ELF header, one segment, and: mov $1,%eax; mov $42,%ebx; int $0x80.
    let program = "7f454c46010101000000000000000000020003000100000054800408340000000000000000000000340020000100000000000000\
                   0100000000000000008004080080040860000000600000000500000000100000b801000000bb2a000000cd80";
    let bytes: String =
        program.as_bytes().chunks(2).map(|pair| format!("\\x{}", String::from_utf8_lossy(pair))).collect();
    let script = format!("printf '{bytes}' >/tmp/p; chmod +x /tmp/p; /tmp/p; echo $?");
    let output = case.pod().await?.output(&script).await?;
    ensure!(output == "42", "{output}");
    Ok(())
}
