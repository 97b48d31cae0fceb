//! What a container sees of itself: the same under any runtime.

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{
    Capability, Int64Value, KeyValue, LinuxContainerResources, NamespaceMode, NamespaceOption,
    SecurityProfile, security_profile::ProfileType,
};
use sandboxer_e2e::case::{Case, PATIENCE, idle, security, shell};

crate::cases![
    Any: exit_codes, command_environment_and_directory, user_and_groups, user_by_name, capabilities, seccomp,
    no_new_privileges, masked_and_read_only_paths, read_only_rootfs, rootfs_is_private_and_whole,
    shared_memory, hostname_and_resolver, namespaces, shared_process_namespace, processes_of_another, limits, limits_change, out_of_memory,
    oom_score, sysctls, device_rules, terminal;
    Vm: privileged_is_all_of_the_guest
];

async fn exit_codes(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    for (name, script, code, reason) in [("ok", "exit 0", 0, "Completed"), ("three", "exit 3", 3, "Error")] {
        let status = pod.run(shell(name, script)).await?.status;
        ensure!((status.exit_code, status.reason.as_str()) == (code, reason), "{script}: {status:?}");
        ensure!(
            status.finished_at >= status.created_at && status.started_at >= status.created_at,
            "{script}: times: {status:?}"
        );
    }
    Ok(())
}

async fn command_environment_and_directory(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell("c", r#"pwd; echo "$GREETING|$0|$1|$EMPTY|${PATH%%:*}"; env | wc -l"#);
    config.args = vec!["zero".into(), "two words".into()];
    config.working_dir = "/var/spool".into();
    let set = |key: &str, value: &str| KeyValue { key: key.into(), value: value.into() };
    config.envs = vec![set("GREETING", "grüß \"dich\"\tda=ja"), set("EMPTY", "")];
    let out = pod.run(config).await?.success()?;
    let mut lines = out.lines();
    ensure!(lines.next() == Some("/var/spool"), "{out}");
    ensure!(lines.next() == Some("grüß \"dich\"\tda=ja|zero|two words||/usr/local/sbin"), "{out}");
    let mut config = shell("tmpfs", "pwd; echo here >file; cat /dev/new/file");
    config.working_dir = "/dev/new".into();
    let out = pod.run(config).await?.success()?;
    ensure!(out == "/dev/new\nhere", "a directory that is missing in a tmpfs: {out}");
    Ok(())
}

async fn user_and_groups(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config =
        shell("c", "id -u; id -g; id -G; touch /tmp/mine && stat -c %u:%g /tmp/mine; touch /etc/no 2>&1");
    let context = security(&mut config);
    context.run_as_user = Some(Int64Value { value: 1234 });
    context.run_as_group = Some(Int64Value { value: 5678 });
    context.supplemental_groups = vec![7, 8];
    let ended = pod.run(config).await?;
    let out = ended.logs.stdout;
    ensure!(out.starts_with("1234\n5678\n5678 7 8\n1234:5678\n"), "{out}");
    ensure!(out.contains("Permission denied") && ended.status.exit_code != 0, "{out}");
    Ok(())
}

async fn user_by_name(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell("c", "id -u; id -g; echo $HOME");
    security(&mut config).run_as_username = "www-data".into();
    let out = pod.run(config).await?.success()?;
    ensure!(out.starts_with("33\n33\n"), "{out}");
    Ok(())
}

async fn capabilities(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let read = "grep -E 'Cap(Eff|Bnd)' /proc/self/status | cut -f2";
    let mut none = shell("none", read);
    security(&mut none).capabilities =
        Some(Capability { drop_capabilities: vec!["ALL".into()], ..Default::default() });
    let out = pod.run(none).await?.success()?;
    ensure!(out == "0000000000000000\n0000000000000000", "after drop ALL: {out}");

    let mut one = shell("one", read);
    security(&mut one).capabilities = Some(Capability {
        drop_capabilities: vec!["ALL".into()],
        add_capabilities: vec!["NET_ADMIN".into()],
        ..Default::default()
    });
    let out = pod.run(one).await?.success()?;
    // NET_ADMIN is bit 12.
    ensure!(out == "0000000000001000\n0000000000001000", "with NET_ADMIN alone: {out}");

    let default = pod.run(shell("default", read)).await?.success()?;
    // containerd's default fourteen, the set Docker made common.
    ensure!(default == "00000000a80425fb\n00000000a80425fb", "by default: {default}");
    Ok(())
}

async fn seccomp(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let script = "grep ^Seccomp: /proc/self/status | cut -f2; unshare -U true 2>&1; echo $?";
    let mut filtered = shell("filtered", script);
    security(&mut filtered).seccomp =
        Some(SecurityProfile { profile_type: ProfileType::RuntimeDefault.into(), ..Default::default() });
    let out = pod.run(filtered).await?.success()?;
    ensure!(out.starts_with("2\n") && out.contains("not permitted") && out.ends_with('1'), "filtered: {out}");
    let mut open = shell("open", script);
    security(&mut open).seccomp =
        Some(SecurityProfile { profile_type: ProfileType::Unconfined.into(), ..Default::default() });
    let out = pod.run(open).await?.success()?;
    ensure!(out.starts_with("0\n"), "unconfined: {out}");
    Ok(())
}

async fn no_new_privileges(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let script = "grep NoNewPrivs /proc/self/status | cut -f2";
    let mut config = shell("set", script);
    security(&mut config).no_new_privs = true;
    let set = pod.run(config).await?.success()?;
    let unset = pod.run(shell("unset", script)).await?.success()?;
    ensure!((set.as_str(), unset.as_str()) == ("1", "0"), "set: {set}, unset: {unset}");
    Ok(())
}

async fn masked_and_read_only_paths(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell(
        "c",
        "wc -c </proc/timer_list; ls /proc/scsi 2>/dev/null | wc -l; ls /sys/firmware | wc -l; \
         echo 1 >/proc/sys/kernel/panic; echo $?",
    );
    let context = security(&mut config);
    context.masked_paths = ["/proc/timer_list", "/proc/scsi", "/sys/firmware"].map(String::from).into();
    context.readonly_paths = ["/proc/sys"].map(String::from).into();
    let ended = pod.run(config).await?;
    ensure!(ended.logs.stdout == "0\n0\n0\n1\n", "{:?}", ended.logs);
    ensure!(ended.logs.stderr.contains("Read-only"), "{:?}", ended.logs);
    Ok(())
}

async fn read_only_rootfs(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let script = "touch /file 2>&1; echo $?; touch /dev/shm/file && echo shm; (echo x >>/etc/hosts) 2>&1 || echo hosts";
    let mut config = shell("c", script);
    security(&mut config).readonly_rootfs = true;
    let out = pod.run(config).await?.success()?;
    ensure!(out.contains("Read-only file system") && out.contains("\n1\n"), "{out}");
    ensure!(out.contains("\nshm\n") && out.ends_with("\nhosts"), "{out}");
    Ok(())
}

async fn rootfs_is_private_and_whole(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let whole = "stat -c '%a %u:%g' /tmp /root /bin/busybox; readlink /bin/sh; wc -l </etc/passwd; rm /bin/awk; \
                 echo more >>/etc/passwd; mkdir /new; ls -d /new";
    let expected = "1777 0:0\n700 0:0\n755 0:0\n/bin/busybox\n5\n/new";
    // The second container of the same image sees nothing of what the first one changed.
    for name in ["first", "second"] {
        let out = pod.run(shell(name, whole)).await?.success()?;
        ensure!(out == expected, "{name}: {out}");
    }
    Ok(())
}

async fn shared_memory(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let writer = pod.start(idle("writer")).await?;
    let size = writer.sh("df -k /dev/shm | tail -1 | awk '{ print $2 }'; stat -c %a /dev/shm").await?;
    ensure!(size == "65536\n1777", "/dev/shm: {size}");
    writer.sh("echo shared >/dev/shm/note").await?;
    let read = pod.output("cat /dev/shm/note").await?;
    ensure!(read == "shared", "a pod's containers share /dev/shm: {read}");
    Ok(())
}

async fn hostname_and_resolver(case: Case) -> Result<()> {
    let pod = case
        .pod_with(|config| {
            config.hostname = "name-of-pod".into();
            config.dns_config = Some(k8s_cri::v1::DnsConfig {
                servers: vec!["192.0.2.53".into()],
                searches: vec!["example.test".into()],
                options: vec!["ndots:3".into()],
            });
        })
        .await?;
    let out =
        pod.output("hostname; cat /etc/hostname /etc/resolv.conf; grep -c localhost /etc/hosts").await?;
    ensure!(out.starts_with("name-of-pod\nname-of-pod\n"), "{out}");
    for line in ["nameserver 192.0.2.53", "search example.test", "options ndots:3"] {
        ensure!(out.contains(line), "no '{line}' in: {out}");
    }
    Ok(())
}

async fn namespaces(case: Case) -> Result<()> {
    let separate = case.pod().await?;
    separate.start(idle("other")).await?;
    let seen = separate.output("ps -o args | grep -c '^[s]leep 1000'; echo pid $$").await;
    // grep counts none and fails, the shell goes on.
    let seen = seen?;
    ensure!(seen == "0\npid 1", "a container sees only its own processes: {seen}");
    Ok(())
}

/// shareProcessNamespace: each container sees the other, and none is PID 1; processes that its init leaves end with it.
/// As `kubectl debug --target` asks: the debugger sees what runs in the container it is for.
async fn processes_of_another(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let target = pod.start(shell("target", "sleep 4321")).await?;
    let mut debugger = shell("debugger", "ps -o args | grep '^[s]leep'");
    security(&mut debugger).namespace_options = Some(NamespaceOption {
        pid: NamespaceMode::Target.into(),
        target_id: target.id.clone(),
        ..Default::default()
    });
    let seen = pod.run(debugger).await?.logs.stdout;
    ensure!(seen == "sleep 4321\n", "{seen}");
    ensure!(target.sh("ps -o args | grep -c '^[s]leep'").await? == "1", "the debugger took its target along");
    Ok(())
}

async fn shared_process_namespace(case: Case) -> Result<()> {
    let shared = case
        .pod_with(|config| {
            let linux = config.linux.get_or_insert_default();
            linux.security_context.get_or_insert_default().namespace_options =
                Some(NamespaceOption { pid: NamespaceMode::Pod.into(), ..Default::default() });
        })
        .await?;
    let in_pod = |mut config: k8s_cri::v1::ContainerConfig| {
        security(&mut config).namespace_options =
            Some(NamespaceOption { pid: NamespaceMode::Pod.into(), ..Default::default() });
        config
    };
    shared.start(in_pod(idle("other"))).await?;
    let script = "ps -o args | grep -c '^[s]leep 1000'; [ $$ -gt 1 ] && echo not first; sleep 2000 &";
    let seen = shared.run(in_pod(shell("looks", script))).await?.success()?;
    ensure!(seen == "1\nnot first", "shareProcessNamespace: {seen}");
    let left = "! ps -o args | grep -q '^[s]leep 2000'";
    shared.run(in_pod(shell("looks again", left))).await?.success()?;
    let mut deaf = in_pod(shell("deaf", "sleep 3000"));
    deaf.command = vec!["sleep".into(), "3000".into()];
    let deaf = shared.start(deaf).await?;
    case.cri.stop(&deaf.id, 60).await?;
    let code = deaf.ended().await?.exit_code;
    ensure!(code == 143, "a program without a handler ends with SIGTERM: {code}");
    Ok(())
}

async fn limits(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell(
        "c",
        "cd /sys/fs/cgroup; cat memory.max 2>/dev/null || cat memory/memory.limit_in_bytes; \
         cat cpu.max 2>/dev/null || echo $(cat cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us)",
    );
    config.linux.get_or_insert_default().resources = Some(LinuxContainerResources {
        memory_limit_in_bytes: 48 << 20,
        cpu_quota: 50_000,
        cpu_period: 100_000,
        cpu_shares: 512,
        ..Default::default()
    });
    let out = pod.run(config).await?.success()?;
    ensure!(out == format!("{}\n50000 100000", 48 << 20), "{out}");
    Ok(())
}

/// UpdateContainerResources, while it runs.
async fn limits_change(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let limits = |memory_mib: i64, cpu_quota| LinuxContainerResources {
        memory_limit_in_bytes: memory_mib << 20,
        cpu_quota,
        cpu_period: 100_000,
        cpu_shares: 512,
        ..Default::default()
    };
    let read = "cd /sys/fs/cgroup; cat memory.max 2>/dev/null || cat memory/memory.limit_in_bytes; \
                cat cpu.max 2>/dev/null || echo $(cat cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us)";
    for (memory_mib, cpu_quota) in [(64, 40_000), (32, 20_000), (96, 80_000)] {
        case.cri.update(&container.id, limits(memory_mib, cpu_quota)).await?;
        let out = container.sh(read).await?;
        ensure!(out == format!("{}\n{cpu_quota} 100000", memory_mib << 20), "{out}");
    }
    let refused = case.cri.update(&container.id, limits(64, 1)).await;
    ensure!(refused.is_err(), "a quota of 1 µs was accepted");
    ensure!(container.sh("echo alive").await? == "alive", "a refused update ended the container");
    Ok(())
}

async fn oom_score(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell("c", "cat /proc/self/oom_score_adj");
    config.linux.get_or_insert_default().resources =
        Some(LinuxContainerResources { oom_score_adj: 900, ..Default::default() });
    let out = pod.run(config).await?.success()?;
    ensure!(out == "900", "{out}");
    Ok(())
}

async fn sysctls(case: Case) -> Result<()> {
    let pod_with_sysctl = |name: &'static str, value: &'static str| {
        case.pod_with(move |config| {
            let linux = config.linux.get_or_insert_default();
            linux.sysctls.insert(name.into(), value.into());
        })
    };
    let pod = pod_with_sysctl("kernel.shm_rmid_forced", "1").await?;
    ensure!(pod.output("cat /proc/sys/kernel/shm_rmid_forced").await? == "1", "it was not set");
    // It prints less while it boots.
    let printed = pod.output("cut -f1 /proc/sys/kernel/printk").await?;
    ensure!(printed == "4", "errors of the guest's kernel are not on its console: level {printed}");
    let refused = pod_with_sysctl("net.ipv4.no_such_thing", "1")
        .await
        .err()
        .context("a sysctl that is none was accepted")?;
    ensure!(refused.message().contains("no_such_thing"), "{refused}");
    Ok(())
}

/// Every capability, device and file of the guest; of the host, nothing.
async fn privileged_is_all_of_the_guest(case: Case) -> Result<()> {
    let pod = case
        .pod_with(|config| {
            let linux = config.linux.get_or_insert_default();
            linux.security_context.get_or_insert_default().privileged = true;
        })
        .await?;
    let script = "grep CapEff /proc/self/status | cut -f2; mkdir /m; mount -t tmpfs none /m && echo mounted; \
                  [ -e /dev/kmsg ] && echo devices; ls /dev | grep -c ^loop-control; mount | grep -c ' /sys .*[(,]rw'";
    let mut config = shell("c", script);
    security(&mut config).privileged = true;
    let out = pod.run(config).await?.logs.stdout;
    let mut lines = out.lines();
    let capabilities = lines.next().context("capabilities")?;
    ensure!(u64::from_str_radix(capabilities, 16)?.count_ones() >= 40, "{capabilities}");
    ensure!(lines.eq(["mounted", "devices", "1", "1"]), "{out}");
    Ok(())
}

/// A container that may make device nodes uses none but its own by them; a privileged one uses all.
async fn device_rules(case: Case) -> Result<()> {
    let privileged = |config: &mut k8s_cri::v1::PodSandboxConfig| {
        let linux = config.linux.get_or_insert_default();
        linux.security_context.get_or_insert_default().privileged = true;
    };
    let pod = case.pod_with(privileged).await?;
    // Of a disk: in a guest, that of a root file system.
    let script = "set -- $(awk '$3 > 1000 { print $1, $2; exit }' /proc/partitions); mknod /tmp/disk b $1 $2 && echo made; \
                  dd if=/tmp/disk of=/dev/null bs=512 count=1 2>&1 | grep -o 'Operation not permitted\\|1+0 records in'; \
                  mknod /tmp/null c 1 3 && echo x >/tmp/null && echo x >/dev/null && echo null; \
                  head -c 4 /dev/urandom | wc -c; (exec 3<>/dev/ptmx) && echo terminals";
    let refused = pod.run(shell("c", script)).await?.logs.stdout;
    ensure!(refused == "made\nOperation not permitted\nnull\n4\nterminals\n", "{refused}");
    // An exec is held to the same.
    let container = pod.start(idle("execs")).await?;
    let exec = "set -- $(awk '$3 > 1000 { print $1, $2; exit }' /proc/partitions); mknod /tmp/disk b $1 $2; \
                dd if=/tmp/disk count=1 2>&1 | grep -o 'Operation not permitted'";
    ensure!(container.sh(exec).await? == "Operation not permitted");
    // Hosts differ in what they let even root have of their devices.
    if case.in_vm() {
        let memory = "mknod /tmp/mem c 1 1; dd if=/tmp/mem count=1 2>&1 | grep -o 'Operation not permitted'";
        ensure!(container.sh(memory).await? == "Operation not permitted");
        let mut config = shell("all", script);
        security(&mut config).privileged = true;
        let allowed = pod.run(config).await?.logs.stdout;
        ensure!(allowed == "made\n1+0 records in\nnull\n4\nterminals\n", "{allowed}");
    }
    Ok(())
}

async fn out_of_memory(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let other = pod.start(idle("other")).await?;
    // tail keeps the one endless line it reads.
    let mut config = shell("eats", "tail /dev/zero");
    config.linux.get_or_insert_default().resources =
        Some(LinuxContainerResources { memory_limit_in_bytes: 24 << 20, ..Default::default() });
    let eats = pod.start(config).await?;
    let status = eats.ended().await?;
    ensure!(status.exit_code == 137, "{status:?}");
    // The reason arrives separately from the exit, maybe a moment later.
    sandboxer_e2e::eventually("reason OOMKilled", PATIENCE, || async {
        Ok((eats.status().await?.reason == "OOMKilled").then_some(()))
    })
    .await?;
    ensure!(other.sh("echo alive").await? == "alive", "the other container was hit too");
    Ok(())
}

async fn terminal(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell("c", "tty; test -t 1 && echo terminal; echo to stderr >&2");
    config.tty = true;
    let ended = pod.run(config).await?;
    let out = ended.logs.stdout.replace('\r', "");
    // A terminal has one output: stderr arrives there too.
    ensure!(
        out == "/dev/pts/0\nterminal\nto stderr\n" || out == "/dev/console\nterminal\nto stderr\n",
        "{out:?}"
    );
    ensure!(ended.logs.stderr.is_empty(), "{:?}", ended.logs);
    Ok(())
}
