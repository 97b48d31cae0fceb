//! Lifecycle of a container, and its clean-up.

use std::time::Duration;

use sandboxer_protocol::agent::{
    AdoptContainerRequest, AgentClient, ConfigurePodRequest, Disk, ListContainersRequest,
    PauseContainerRequest, PrepareDiskRequest, ProcessState, Rootfs, StatsRequest, SyncClockRequest,
    TmpfsUpper, rootfs::Writable,
};
use ttrpc::Code;

use crate::{
    container::*,
    vm::{BUSYBOX, PATIENCE, SCRATCH, Vm},
};

#[tokio::test]
async fn a_container_runs_and_leaves_nothing_behind() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    // A second container reads the guest's state from outside the first one.
    let mut watcher =
        spec(shell("read go; mount | grep -c /web; ls /sys/fs/cgroup/sandboxer; ls /sys/block/sd*/holders"));
    watcher["linux"]["namespaces"] = serde_json::json!([{"type": "mount"}]);
    let watcher = run(&agent, &container("watcher", &watcher)).await;

    for _ in 0..2 {
        let web = container("web", &spec(shell("read go; echo $GREETING from $0; echo oops >&2; exit 7")));
        let first = patiently(agent.create_container(ctx(), &web)).await.unwrap().pid;
        let again = patiently(agent.create_container(ctx(), &web)).await.unwrap().pid;
        assert_eq!(first, again, "the same request answers the same");
        let mut other = web.clone();
        other.spec_json = spec(shell("exit 0")).to_string().into_bytes();
        let (code, words) = refusal(patiently(agent.create_container(ctx(), &other)).await);
        assert_eq!(code, Code::ALREADY_EXISTS, "{words}");

        let process = init(&agent, "web");
        process.start().await.unwrap();
        let (code, _) = refusal(delete(&agent, "web").await);
        assert_eq!(code, Code::FAILED_PRECONDITION, "it runs");
        process.write(0, b"go\n", false).await.unwrap();
        assert_eq!(process.stdout().await, "hello from sh\n");
        assert_eq!(process.stderr().await, "oops\n");
        let exit = process.wait().await;
        assert_eq!((exit.code, exit.oom_killed), (7, false));
        assert_eq!(process.start().await.unwrap(), first, "a repeated start answers the same");
        let (code, _) = refusal(process.signal(libc::SIGTERM, false).await);
        assert_eq!(code, Code::NOT_FOUND);
        delete(&agent, "web").await.unwrap();
        delete(&agent, "web").await.unwrap();
    }
    watcher.write(0, b"\n", false).await.unwrap();
    let seen = watcher.stdout().await;
    assert!(seen.starts_with("0\n"), "mounts are left: {seen}");
    assert!(!seen.contains("web"), "a control group is left: {seen}");
    end(&agent, "watcher").await;
}

/// As in a copy of the guest, whose daemon knows the container by another id, and has read none of its output.
#[tokio::test]
async fn a_frozen_container_goes_on_under_another_id_when_it_is_started() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let script = "n=0; while read word; do n=$((n + 1)); echo $n $word; cat /etc/name; done";
    let mut web = container("web", &spec(shell(script)));
    web.files = vec![file("/etc/name", "old\n", false)];
    let process = run(&agent, &web).await;
    process.write(0, b"one\n", false).await.unwrap();
    assert_eq!(process.until("", "old\n").await, "1 one\nold\n");
    let lasting = exec(&agent, "web", "lasting", &shell("sleep 1000"), streams()).await;
    lasting.start().await.unwrap();

    let adopt = AdoptContainerRequest {
        container_id: "copy".into(),
        of: "web".into(),
        files: vec![file("/etc/name", "new\n", false), file("/etc/unknown", "", false)],
        ..Default::default()
    };
    let (code, words) = refusal(patiently(agent.adopt_container(ctx(), &adopt)).await);
    assert!(code == Code::FAILED_PRECONDITION && words.contains("was not frozen"), "{words}");
    let pause = PauseContainerRequest { container_id: "web".into(), ..Default::default() };
    patiently(agent.pause_container(ctx(), &pause)).await.unwrap();
    let pid = patiently(agent.adopt_container(ctx(), &adopt)).await.unwrap().pid;
    assert_eq!(patiently(agent.adopt_container(ctx(), &adopt)).await.unwrap().pid, pid, "again");
    let unknown = AdoptContainerRequest { container_id: "other".into(), ..adopt };
    let (code, _) = refusal(patiently(agent.adopt_container(ctx(), &unknown)).await);
    assert_eq!(code, Code::NOT_FOUND);

    let known =
        patiently(agent.list_containers(ctx(), &ListContainersRequest::new())).await.unwrap().processes;
    let [known] = &known[..] else { panic!("an exec is left, or the container has two ids: {known:?}") };
    assert_eq!((known.container_id.as_str(), known.state), ("copy", ProcessState::CREATED.into()));
    let copy = init(&agent, "copy");
    assert_eq!(copy.start().await.unwrap(), pid);
    copy.write(0, b"two\n", false).await.unwrap();
    assert_eq!(copy.until("", "new\n").await, "2 two\nnew\n");
    let (code, _) = refusal(delete(&agent, "copy").await);
    assert_eq!(code, Code::FAILED_PRECONDITION, "it runs");
    end(&agent, "copy").await;

    // One that is never started is removed like any that waits.
    run(&agent, &container("web", &spec(shell("sleep 1000")))).await;
    patiently(agent.pause_container(ctx(), &pause)).await.unwrap();
    let adopt = AdoptContainerRequest { container_id: "copy".into(), of: "web".into(), ..Default::default() };
    patiently(agent.adopt_container(ctx(), &adopt)).await.unwrap();
    delete(&agent, "copy").await.unwrap();
}

/// A VM that boots for its pod would pay more for the copy than its containers gain.
#[tokio::test]
async fn the_agents_program_is_in_huge_pages_in_a_template_only() {
    for (vm, expected) in [(Vm::boot_as_template(), 4 << 10..=u32::MAX), (Vm::boot(), 0..=0)] {
        let (agent, _) = vm.session().await;
        // Nothing else in a guest maps shared memory with huge pages.
        let script = r"sed -n 's/^ShmemPmdMapped: *\([0-9]*\) kB$/\1/p' /proc/meminfo";
        let looks = run(&agent, &container("looks", &spec(shell(script)))).await;
        let kib: u32 = looks.stdout().await.trim().parse().unwrap();
        assert!(expected.contains(&kib), "{kib} KiB, of a program of nearly 6 MiB");
        end(&agent, "looks").await;
    }
}

/// An idle guest must not wake for its own sake: each wake costs the host processor time.
#[tokio::test]
async fn an_idle_guest_does_not_compact_its_memory() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let script = "cat /proc/sys/vm/compaction_proactiveness";
    let looks = run(&agent, &container("looks", &spec(shell(script)))).await;
    assert_eq!(looks.stdout().await, "0\n");
    end(&agent, "looks").await;
}

#[tokio::test]
async fn a_created_container_can_be_listed_killed_and_deleted_unstarted() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let list = async || {
        let listed = patiently(agent.list_containers(ctx(), &ListContainersRequest::new())).await.unwrap();
        listed
            .processes
            .into_iter()
            .map(|p| (p.container_id, p.state.enum_value().unwrap()))
            .collect::<Vec<_>>()
    };
    patiently(agent.create_container(ctx(), &container("a", &spec(shell("exit"))))).await.unwrap();
    assert_eq!(list().await, [("a".to_owned(), ProcessState::CREATED)]);
    delete(&agent, "a").await.unwrap();
    assert_eq!(list().await, []);

    patiently(agent.create_container(ctx(), &container("b", &spec(shell("exit"))))).await.unwrap();
    init(&agent, "b").signal(libc::SIGKILL, false).await.unwrap();
    assert_eq!(init(&agent, "b").wait().await.code, 128 + 9);
    assert_eq!(list().await, [("b".to_owned(), ProcessState::EXITED)]);
    let (code, words) = refusal(init(&agent, "b").start().await);
    assert_eq!(
        (code, words.contains("exited before it was started")),
        (Code::FAILED_PRECONDITION, true),
        "{words}"
    );
    delete(&agent, "b").await.unwrap();

    // As with runc, whose init is a program in Go: it ends by four signals, and ignores all others.
    let cases = [(libc::SIGTERM, false, 2), (libc::SIGINT, true, 2), (libc::SIGQUIT, false, 2)];
    for (signal, all, code) in cases {
        patiently(agent.create_container(ctx(), &container("c", &spec(shell("exit"))))).await.unwrap();
        let waiting = init(&agent, "c");
        for ignored in [libc::SIGUSR1, libc::SIGWINCH, libc::SIGRTMIN()] {
            waiting.signal(ignored, all).await.unwrap();
        }
        assert_eq!(list().await, [("c".to_owned(), ProcessState::CREATED)]);
        waiting.signal(signal, all).await.unwrap();
        assert_eq!(waiting.wait().await.code, code);
        let (_, words) = refusal(waiting.start().await);
        assert!(words.contains("exited before it was started"), "{words}");
        delete(&agent, "c").await.unwrap();
    }
}

#[tokio::test]
async fn a_guest_is_reseeded_before_it_is_anybodys() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    // A container that may mount replaces the generator in the guest's own /dev by a plain file: it stores
    // what is written, and has no request to reseed.
    let script = "mkdir /d && mount -t devtmpfs dev /d && rm /d/urandom && : >/d/urandom && hostname first && echo ready
        read go; hostname; od -An -v -tx1 /d/urandom | tr -d ' \\n'; rm /d/urandom; mknod /d/urandom c 1 9; echo
        read go; hostname";
    let mut process = shell(script);
    for set in ["bounding", "effective", "permitted"] {
        process["capabilities"][set] = serde_json::json!(["CAP_SYS_ADMIN", "CAP_MKNOD", "CAP_DAC_OVERRIDE"]);
    }
    let mut double = spec(process);
    double["linux"]["resources"]["devices"] = serde_json::json!([{"allow": true, "access": "rwm"}]);
    let double = run(&agent, &container("double", &double)).await;
    let seen = double.until("", "ready\n").await;

    let identity =
        ConfigurePodRequest { hostname: "second".into(), entropy: vec![0xa5; 64], ..Default::default() };
    let (_, words) = refusal(patiently(agent.configure_pod(ctx(), &identity)).await);
    assert!(words.contains("reseed the random number generator: Inappropriate ioctl"), "{words}");
    double.write(0, b"\n", false).await.unwrap();
    let written = format!("first\n{}\n", "a5".repeat(64));
    let seen = double.until(&seen, &format!("ready\n{written}")).await;

    patiently(agent.configure_pod(ctx(), &identity)).await.unwrap();
    double.write(1, b"\n", true).await.unwrap();
    double.until(&seen, &format!("{written}second\n")).await;
    end(&agent, "double").await;
}

#[tokio::test]
async fn a_guest_without_a_random_number_instruction_is_seeded_by_its_host() {
    let vm = Vm::boot_on("max,-rdrand,-rdseed");
    let (agent, _) = vm.session().await;
    let identity = ConfigurePodRequest { entropy: vec![0xa5; 64], ..Default::default() };
    patiently(agent.configure_pod(ctx(), &identity)).await.unwrap();
    // Read like getrandom(2): /dev/random blocks until the generator is seeded.
    let script = "grep -c rdrand /proc/cpuinfo; head -c 8 /dev/random | wc -c";
    let draws = run(&agent, &container("draws", &spec(shell(script)))).await;
    assert_eq!(draws.stdout().await, "0\n8\n");
    end(&agent, "draws").await;
}

/// Returns by how much the guest's clock is behind this host's, ns, and the request that corrects it.
async fn behind(agent: &AgentClient) -> (i64, SyncClockRequest) {
    let mut best: Option<(i64, i64, SyncClockRequest)> = None;
    for _ in 0..8 {
        let now = || i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos()).unwrap();
        let before = now();
        let reading = patiently(agent.sync_clock(ctx(), &SyncClockRequest::new())).await.unwrap();
        let took = now() - before;
        let host = before + took / 2;
        assert!(!reading.kept, "an emulated guest has no clock of its VMM's");
        let correction = SyncClockRequest {
            at_boottime_ns: reading.boottime_ns,
            realtime_ns: host.unsigned_abs(),
            ..Default::default()
        };
        if best.as_ref().is_none_or(|(quickest, ..)| took < *quickest) {
            best = Some((took, host - i64::try_from(reading.realtime_ns).unwrap(), correction));
        }
    }
    let (_, behind, correction) = best.unwrap();
    (behind, correction)
}

#[tokio::test]
async fn a_clock_that_is_wrong_comes_back() {
    const MS: i64 = 1_000_000;
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let mut process = shell("date -s @1000000000 >/dev/null; echo set");
    for set in ["bounding", "effective", "permitted"] {
        process["capabilities"][set] = serde_json::json!(["CAP_SYS_TIME"]);
    }
    let sets = run(&agent, &container("sets", &spec(process))).await;
    assert_eq!(sets.stdout().await, "set\n");
    end(&agent, "sets").await;
    let (far, correction) = behind(&agent).await;
    assert!(far > 86_400_000 * MS, "{far}");
    // However late and however often it is requested.
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        patiently(agent.sync_clock(ctx(), &correction)).await.unwrap();
    }
    let (left, _) = behind(&agent).await;
    assert!(left.abs() < 10 * MS, "{left} ns are left of a step");

    // A small difference is slewed: the clock does not jump.
    let near = SyncClockRequest { realtime_ns: correction.realtime_ns - 1_000_000_000, ..correction.clone() };
    patiently(agent.sync_clock(ctx(), &near)).await.unwrap();
    let near = SyncClockRequest { realtime_ns: correction.realtime_ns - 700_000_000, ..correction.clone() };
    patiently(agent.sync_clock(ctx(), &near)).await.unwrap();
    let (before, _) = behind(&agent).await;
    assert!(before > 900 * MS, "{before}: it jumped");
    let began = std::time::Instant::now();
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (left, _) = behind(&agent).await;
        if left < 900 * MS {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{left} ns are left");
    }
}

#[tokio::test]
async fn the_kernels_log_is_for_containers_that_may_read_it() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let plain = run(&agent, &container("plain", &spec(shell("dmesg 2>&1; echo $?")))).await;
    let seen = plain.stdout().await;
    assert!(seen.contains("Operation not permitted") && seen.ends_with("1\n"), "{seen}");
    end(&agent, "plain").await;

    let mut process = shell("dmesg | grep -c 'Linux version'");
    for set in ["bounding", "effective", "permitted"] {
        process["capabilities"][set] = serde_json::json!(["CAP_SYSLOG"]);
    }
    let privileged = run(&agent, &container("privileged", &spec(process))).await;
    assert_eq!(privileged.stdout().await, "1\n");
    end(&agent, "privileged").await;
}

#[tokio::test]
async fn containers_of_one_pod_share_a_layer_and_the_hostname_but_not_what_they_write() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let identity = ConfigurePodRequest {
        hostname: "pod-7".into(),
        realtime_ns: 1_900_000_000_000_000_000,
        entropy: vec![7; 64],
        shm_bytes: 1 << 20,
        sysctls: [("net.ipv4.ip_unprivileged_port_start".to_owned(), "0".to_owned())].into(),
        ..Default::default()
    };
    for _ in 0..2 {
        patiently(agent.configure_pod(ctx(), &identity)).await.unwrap();
    }
    let script = "hostname; date +%Y; cat /etc/hosts /etc/layer; echo $0 >> /etc/layer; cat /etc/layer; \
                  cat /proc/sys/net/ipv4/ip_unprivileged_port_start; echo x > /etc/hosts || echo kept; stat -c %a /etc/note";
    for name in ["one", "two"] {
        let mut request = container(name, &spec(command(&["sh", "-c", script, name])));
        request.files = vec![file("/etc/hosts", "127.0.0.1 pod-7\n", true), file("/etc/note", "", false)];
        run(&agent, &request).await;
    }
    for name in ["one", "two"] {
        let process = init(&agent, name);
        let expected = format!("pod-7\n2030\n127.0.0.1 pod-7\nlower\nlower\n{name}\n0\nkept\n644\n");
        assert_eq!(process.stdout().await, expected, "{}", process.stderr().await);
        end(&agent, name).await;
    }
    let bad = ConfigurePodRequest {
        sysctls: [("kernel.nosuch".to_owned(), "1".to_owned())].into(),
        ..Default::default()
    };
    let (code, words) = refusal(patiently(agent.configure_pod(ctx(), &bad)).await);
    assert_eq!((code, words.contains("kernel.nosuch=1")), (Code::INVALID_ARGUMENT, true), "{words}");
}

#[tokio::test]
async fn a_writable_disk_keeps_what_was_written_as_overlay_and_as_whole() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let on_scratch = |id: &str, script: &str| {
        let mut request = container(id, &spec(shell(script)));
        let lower = vec![disk(BUSYBOX, "erofs", true)];
        let writable = Some(Writable::Overlay(disk(SCRATCH, "ext4", false)));
        request.rootfs = Some(Rootfs { lower, writable, ..Default::default() }).into();
        request
    };
    for (id, expected) in [("first", "0\n"), ("second", "0\n1\n")] {
        let process =
            run(&agent, &on_scratch(id, "echo $(ls /tmp | wc -l) >>/tmp/count; cat /tmp/count")).await;
        assert_eq!(process.stdout().await, expected, "{}", process.stderr().await);
        end(&agent, id).await;
    }
    let process = run(&agent, &on_scratch("third", "cp /bin/busybox /busybox; sync")).await;
    assert_eq!(process.wait().await.code, 0);
    let request = StatsRequest { container_id: "third".into(), ..Default::default() };
    let stats = patiently(agent.stats(ctx(), &request)).await.unwrap();
    assert!(stats.fs_used > 1 << 20 && stats.fs_used < 64 << 20, "{stats}");
    end(&agent, "third").await;

    // The overlay's upper directory is a plain directory of the disk.
    let mut whole = container("whole", &spec(command(&["/u/busybox", "cat", "/u/tmp/count"])));
    whole.rootfs =
        Some(Rootfs { writable: Some(Writable::Whole(disk(SCRATCH, "ext4", false))), ..Default::default() })
            .into();
    let process = run(&agent, &whole).await;
    assert_eq!(process.stdout().await, "0\n1\n", "{}", process.stderr().await);
    end(&agent, "whole").await;
}

#[tokio::test]
async fn what_goes_with_a_container_is_not_written_out() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let prepare = async |disk: &Disk| {
        let request = PrepareDiskRequest { disk: Some(disk.clone()).into(), ..Default::default() };
        patiently(agent.prepare_disk(ctx(), &request)).await
    };
    let (code, words) = refusal(prepare(&disk(SCRATCH, "ext4", false)).await);
    assert!(code == Code::INVALID_ARGUMENT && words.contains("not a writable scratch disk"), "{words}");
    let scratch = Disk { scratch: true, ..disk(SCRATCH, "ext4", false) };
    for _ in 0..2 {
        prepare(&scratch).await.unwrap();
    }
    let before = vm.written();
    // So little that the guest's kernel does not write it out by itself.
    let script = "dd if=/dev/zero of=/big bs=1M count=6 2>/dev/null; stat -c %s /big";
    let mut request = container("c", &spec(shell(script)));
    let writable = Some(Writable::Overlay(scratch));
    request.rootfs =
        Some(Rootfs { lower: vec![disk(BUSYBOX, "erofs", true)], writable, ..Default::default() }).into();
    let process = run(&agent, &request).await;
    let stdout = process.stdout().await;
    assert!(stdout.ends_with(&format!("{}\n", 6 << 20)), "{stdout}{}", process.stderr().await);
    let request = StatsRequest { container_id: "c".into(), ..Default::default() };
    let stats = patiently(agent.stats(ctx(), &request)).await.unwrap();
    assert!(stats.fs_used > 6 << 20 && stats.fs_used < 46 << 20, "{stats}");
    end(&agent, "c").await;
    let written = vm.written() - before;
    assert!(written < 3 << 20, "{written} bytes were written out to be thrown away");
    assert!(!vm.console().contains("shut down"), "{}", vm.console());
}

#[tokio::test]
async fn the_layer_in_memory_is_bounded() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let mut request =
        container("full", &spec(shell("dd if=/dev/zero of=/big bs=1M count=8; echo status $?")));
    let writable = Some(Writable::Tmpfs(TmpfsUpper { size_bytes: 4 << 20, ..Default::default() }));
    request.rootfs =
        Some(Rootfs { lower: vec![disk(BUSYBOX, "erofs", true)], writable, ..Default::default() }).into();
    let process = run(&agent, &request).await;
    assert_eq!(process.stdout().await, "status 1\n");
    assert!(process.stderr().await.contains("No space left"));
    end(&agent, "full").await;
}
