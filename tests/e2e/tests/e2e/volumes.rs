//! Volumes as a kubelet has them, devices, and room to write.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{ContainerConfig, Device, Int64Value, Mount, MountPropagation, PodSandboxConfig};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::case::{Case, Container, PATIENCE, idle, privileged, security, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::kubelet::Kubelet;

use crate::hung_volume::HungVolume;

crate::cases![
    Any: files_are_kept_up_to_date, a_sub_path_of_files_stays, empty_dirs_are_shared, empty_dirs_in_memory_are_bounded,
    a_sub_path_of_an_empty_dir, no_sub_path_leads_out_of_an_empty_dir, an_empty_dir_is_one_whatever_its_parts_are_called,
    shared_memory_of_another_size, termination_message, block_devices;
    Vm: a_disk_is_made_through_no_link, empty_dirs_on_disk_are_bounded, what_is_deleted_from_an_empty_dir_is_the_hosts_again, the_root_file_system_is_bounded, sizes_that_make_no_sense,
    what_a_guest_cannot_have_is_refused_by_name;
    VmAlone: volumes_outlive_the_daemon, a_stop_loses_no_data, volumes_that_hang_cost_their_pod_alone
];

/// Adds a mount of a directory of the host.
pub fn mounted(mut config: ContainerConfig, at: &str, host: &Path, read_only: bool) -> ContainerConfig {
    config.mounts.push(Mount {
        container_path: at.into(),
        host_path: host.display().to_string(),
        readonly: read_only,
        ..Default::default()
    });
    config
}

/// Waits until `script` prints `wanted` in the container.
async fn prints(container: &Container, script: &str, wanted: &str) -> Result<()> {
    eventually(&format!("'{wanted}' of '{script}'"), PATIENCE, || async {
        Ok((container.sh(script).await? == wanted).then_some(()))
    })
    .await
}

/// Helper processes of the daemon that are there, whether they hang or wait for work.
fn helpers() -> Result<usize> {
    let mut count = 0;
    for process in fs::read_dir("/proc")?.flatten() {
        let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        count += usize::from(name.trim_end() == "sandboxer-path");
    }
    Ok(count)
}

/// Servers that answer containerd and then the daemon no more: what asks for their volumes fails in time and by name,
/// and no other pod waits.
async fn volumes_that_hang_cost_their_pod_alone(case: Case) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut hung = Vec::new();
    for name in ["one", "two"] {
        let at = dir.path().join(name);
        fs::create_dir(&at)?;
        hung.push(HungVolume::mount(&at)?);
    }
    let good = case.pod().await?;
    let counts = good.start(shell("counts", "n=0; while :; do echo $n; n=$((n+1)); sleep 0.1; done")).await?;
    let bad = case.pod().await?;
    hung.iter().for_each(|volume| volume.set_silent(true));

    let starts = hung.iter().enumerate().map(|(n, volume)| {
        let (bad, config) = (bad.clone(), mounted(idle(&format!("c{n}")), "/data", volume.path(), false));
        async move { bad.start(config).await.err().map(|error| error.message().to_owned()) }
    });
    let starts = tokio::spawn(futures::future::join_all(starts.collect::<Vec<_>>()));
    let reached = || hung.iter().all(|volume| volume.left_waiting() > 0);
    eventually("both volumes to hang", PATIENCE, || async { Ok(reached().then_some(())) }).await?;
    let lines = counts.logs()?.lines;
    let mut execs = 0;
    while !starts.is_finished() {
        ensure!(counts.sh("echo here").await? == "here");
        case.cri.pods(("e2e.case", &case.name)).await?;
        execs += 1;
    }
    ensure!(execs > 2, "other pods waited: {execs} execs in all the time");
    ensure!(counts.logs()?.lines > lines, "another pod's log stood still");
    for (answer, volume) in starts.await?.into_iter().zip(&hung) {
        let text = answer.context("a volume that hangs was given")?;
        let path = volume.path().display().to_string();
        ensure!(text.contains("the server of this volume does not answer") && text.contains(&path), "{text}");
    }
    let again = bad.start(mounted(idle("again"), "/data", hung[0].path(), false)).await.err();
    let again = again.context("a volume that hangs was given")?;
    ensure!(again.message().contains("does not answer"), "{again}");
    ensure!(hung[0].left_waiting() == 1, "a path that is known to hang was tried again");
    let fine = bad.start(idle("fine")).await?;
    ensure!(fine.sh("echo here").await? == "here", "the pod itself goes on");
    case.remove(&bad.id).await?;
    drop(hung);
    eventually("end of the helpers", PATIENCE, || async { Ok((helpers()? == 0).then_some(())) }).await
}

async fn files_are_kept_up_to_date(case: Case) -> Result<()> {
    let kubelet = Kubelet::new(&case)?;
    let settings = kubelet.files("configmap", "settings", &[("color", "red"), ("old", "x")])?;
    let token = kubelet.files("projected", "kube-api-access-x", &[("token", "t1")])?;
    let pod = case.pod().await?;
    let config = mounted(mounted(idle("c"), "/etc/settings", &settings, true), "/run/token", &token, true);
    let c = pod.start(config).await?;
    let read = "cd /etc/settings; cat color; echo; ls; cat /run/token/token";
    ensure!(c.sh(read).await? == "red\ncolor\nold\nt1", "{}", c.sh(read).await?);
    let write = c.sh("touch /etc/settings/mine 2>&1; true").await?;
    ensure!(write.contains("Read-only"), "{write}");

    kubelet.replace(&settings, &[("color", "green"), ("new", "y")])?;
    kubelet.replace(&token, &[("token", "t2")])?;
    prints(&c, read, "green\ncolor\nnew\nt2").await?;
    kubelet.replace(&settings, &[("color", "blue")])?;
    prints(&c, read, "blue\ncolor\nt2").await
}

async fn a_sub_path_of_files_stays(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let settings = kubelet.files("configmap", "settings", &[("color", "red")])?;
    let color = kubelet.sub_path(&settings, "color")?;
    let pod = case.pod().await?;
    let config = mounted(mounted(idle("c"), "/etc/color", &color, true), "/etc/settings", &settings, true);
    let c = pod.start(config).await?;
    kubelet.replace(&settings, &[("color", "green")])?;
    prints(&c, "cat /etc/settings/color", "green").await?;
    ensure!(c.sh("cat /etc/color").await? == "red");
    Ok(())
}

async fn empty_dirs_are_shared(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let (disk, memory) = (kubelet.empty_dir("disk")?, kubelet.memory("memory", "4m")?);
    let pod = case.pod().await?;
    let both = |config| mounted(mounted(config, "/disk", &disk, false), "/memory", &memory, false);
    let writes =
        "stat -c %a /disk /memory; ls -A /disk /memory; echo one >/disk/note; echo two >/memory/note";
    let output = pod.run(both(shell("writes", writes))).await?.success()?;
    ensure!(output == "777\n777\n/disk:\n\n/memory:", "{output}");
    // Of two that are made at the same time neither is first.
    let (one, other) =
        futures::future::join(pod.start(both(idle("one"))), pod.start(both(idle("other")))).await;
    let (one, other) = (one?, other?);
    ensure!(one.sh("cat /disk/note /memory/note").await? == "one\ntwo");
    one.sh("echo three >/disk/more; mkdir /memory/d").await?;
    ensure!(other.sh("cat /disk/more; ls -d /memory/d").await? == "three\n/memory/d");
    let read_only =
        pod.run(mounted(shell("ro", "cat /disk/note; touch /disk/x 2>&1"), "/disk", &disk, true)).await?;
    ensure!(
        read_only.logs.stdout.starts_with("one\n") && read_only.logs.stdout.contains("Read-only"),
        "{:?}",
        read_only.logs
    );
    Ok(())
}

async fn empty_dirs_in_memory_are_bounded(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let memory = kubelet.memory("memory", "4m")?;
    let fills = "dd if=/dev/zero of=/memory/big bs=64k 2>&1 | grep -o 'No space left on device'; \
                 df -k /memory | tail -1 | awk '{ print $2 }'; stat -c %s /memory/big";
    let output =
        case.pod().await?.run(mounted(shell("c", fills), "/memory", &memory, false)).await?.success()?;
    ensure!(output == format!("No space left on device\n4096\n{}", 4 << 20), "{output}");
    Ok(())
}

async fn a_sub_path_of_an_empty_dir(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let (disk, memory) = (kubelet.empty_dir("disk")?, kubelet.memory("memory", "4m")?);
    let parts = [kubelet.sub_path(&disk, "a/b")?, kubelet.sub_path(&memory, "m")?];
    let pod = case.pod().await?;
    let config = mounted(shell("parts", "echo of b >/b/note; echo of m >/m/note"), "/b", &parts[0], false);
    pod.run(mounted(config, "/m", &parts[1], false)).await?.success()?;
    let config = shell("wholes", "cat /disk/a/b/note /memory/m/note");
    let config = mounted(mounted(config, "/disk", &disk, false), "/memory", &memory, false);
    let output = pod.run(config).await?.success()?;
    ensure!(output == "of b\nof m", "{output}");
    Ok(())
}

/// A file system with one file, which is root's alone.
fn foreign_disk(at: &Path, dir: &Path) -> Result<()> {
    let root = dir.join("root");
    fs::create_dir_all(&root)?;
    fs::write(root.join("shadow"), SECRET)?;
    let made = Command::new("mkfs.ext4").args(["-q", "-F", "-d"]).arg(&root).arg(at).status()?;
    ensure!(made.success(), "mkfs.ext4: {made}");
    Ok(())
}

const SECRET: &str = "a secret of the host";

/// A pod's author chooses subPaths, and its processes make links: neither gets the pod a file or a device of the host as its disk.
/// Allowed by the strictest of Kubernetes' profiles.
async fn no_sub_path_leads_out_of_an_empty_dir(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let host = tempfile::tempdir()?;
    let file = host.path().join("victim.ext4");
    fs::File::create(&file)?.set_len(16 << 20)?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
    let mut targets = vec![file];
    match kubelet.block_device(16 << 20) {
        // It may not be opened everywhere, not even by root.
        Ok((device, _)) if fs::File::open(&device).is_ok() => targets.push(device),
        _ => println!("without a block device of the host"),
    }
    for (number, target) in targets.iter().enumerate() {
        foreign_disk(target, host.path())?;
        let before = fs::read(target)?;
        let cache = kubelet.empty_dir(&format!("cache-{number}"))?;
        // Any size but the default one.
        let sized = |config: &mut PodSandboxConfig| {
            drop(config.annotations.insert("io.sandboxer.emptydir-size".into(), "64Mi".into()));
        };
        let pod = case.pod_with(sized).await?;
        let user = |mut config: ContainerConfig| {
            security(&mut config).run_as_user = Some(Int64Value { value: 1000 });
            config
        };
        let (inner, part) = ("u/volumes/kubernetes.io~empty-dir/v", kubelet.sub_path(&cache, "pods")?);
        fs::set_permissions(&part, fs::Permissions::from_mode(0o777))?;
        let plants =
            format!("d=/c/{inner}; mkdir -p $d && ln -s {} $d/.sandboxer.ext4 && id -u", target.display());
        let output = pod.run(user(mounted(shell("init", &plants), "/c", &part, false))).await?.success()?;
        ensure!(output == "1000", "{output}");

        let part = kubelet.sub_path(&cache, &format!("pods/{inner}"))?;
        let reads = "ls -A /m; cat /m/shadow 2>/dev/null; echo written-by-the-pod >/m/pwned; sync";
        let read = pod.run(mounted(shell("main", reads), "/m", &part, false)).await;
        let output = read.map(|ended| ended.logs.stdout).unwrap_or_default();
        ensure!(
            !output.contains(SECRET) && !output.contains("shadow"),
            "it reads the host's {target:?}: {output}"
        );
        case.remove(&pod.id).await?;
        ensure!(fs::read(target)? == before, "it writes to the host's {target:?}");
        ensure!(
            output.trim_end() == ".sandboxer.ext4",
            "the link is a file of the emptyDir like others: {output}"
        );
    }
    Ok(())
}

/// Also if the names are those of kubelet's directories.
async fn an_empty_dir_is_one_whatever_its_parts_are_called(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let pod = case.pod().await?;
    for (number, (container, part)) in
        [("c", "pods/logs"), ("pods", "volumes"), ("pods", ".")].iter().enumerate()
    {
        let work = kubelet.empty_dir(&format!("work-{number}"))?;
        let bound = kubelet.sub_path_of(container, &work, part)?;
        let name = format!("writes-{number}");
        pod.run(mounted(shell(&name, "echo of a part >/part/note"), "/part", &bound, false))
            .await?
            .success()?;
        let (name, reads) = (format!("reads-{number}"), format!("cat /work/{part}/note"));
        let output = pod.run(mounted(shell(&name, &reads), "/work", &work, false)).await?.success()?;
        ensure!(output == "of a part", "{container}, {part}: {output}");
    }
    let pods = kubelet.empty_dir("pods")?;
    pod.run(mounted(shell("one", "echo of a volume >/v/note"), "/v", &pods, false)).await?.success()?;
    if case.in_vm() {
        let left: Vec<_> = fs::read_dir(&pods)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
        ensure!(left == [".sandboxer.ext4"], "an emptyDir of this name is shared live: {left:?}");
    }
    Ok(())
}

/// Names that the daemon's helpers could use for a file that is not complete yet lead to files of the host.
async fn a_disk_is_made_through_no_link(case: Case) -> Result<()> {
    const HELPERS: std::ops::Range<u32> = 0..6000;
    let kubelet = Kubelet::new(&case)?;
    let (disk, host) = (kubelet.empty_dir("disk")?, tempfile::tempdir()?);
    let victim = host.path().join("victim");
    fs::write(&victim, SECRET)?;
    let pod = case
        .pod_with(|config| {
            drop(config.annotations.insert("io.sandboxer.emptydir-size".into(), "32Mi".into()))
        })
        .await?;
    let last: u32 = fs::read_to_string("/proc/sys/kernel/ns_last_pid")?.trim().parse()?;
    for number in HELPERS {
        let name = format!(".sandboxer.ext4.unfinished-{}", last.saturating_sub(500) + number);
        std::os::unix::fs::symlink(&victim, disk.join(name))?;
    }
    let ran = pod.run(mounted(shell("c", "echo fits >/d/note; cat /d/note"), "/d", &disk, false)).await;
    let is_whole = fs::read_to_string(&victim).is_ok_and(|text| text == SECRET);
    ensure!(is_whole, "a file of the host was overwritten: {} bytes", fs::metadata(&victim)?.len());
    let output = ran?.success()?;
    ensure!(output == "fits", "{output}");
    ensure!(fs::symlink_metadata(disk.join(".sandboxer.ext4"))?.is_file(), "the disk is a link");
    Ok(())
}

/// The usual method for more shared memory: an emptyDir in memory at /dev/shm.
async fn shared_memory_of_another_size(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let memory = kubelet.memory("shm", "3m")?;
    let size = "df -k /dev/shm | tail -1 | awk '{ print $2 }'";
    let output =
        case.pod().await?.run(mounted(shell("c", size), "/dev/shm", &memory, false)).await?.success()?;
    ensure!(output == "3072", "{output}");
    Ok(())
}

async fn termination_message(case: Case) -> Result<()> {
    let kubelet = Kubelet::new(&case)?;
    let log = kubelet.termination_log()?;
    let pod = case.pod().await?;
    let says = "echo why it ended >/dev/termination-log; exit 3";
    let ended = pod.run(mounted(shell("c", says), "/dev/termination-log", &log, false)).await?;
    ensure!(ended.status.exit_code == 3, "{:?}", ended.status);
    let output = fs::read_to_string(&log)?;
    ensure!(output == "why it ended\n", "{output:?}");
    Ok(())
}

async fn block_devices(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let [(first, file), (second, _)] = [kubelet.block_device(4 << 20)?, kubelet.block_device(2 << 20)?];
    fs::write(&file, [b"from the host\n".to_vec(), vec![0; (4 << 20) - 14]].concat())?;
    let device = |host: &Path, at: &str, permissions: &str| Device {
        container_path: at.into(),
        host_path: host.display().to_string(),
        permissions: permissions.into(),
    };
    let script = "for at in /dev/xvda /dev/xvdb; do test -b $at && wc -c <$at; done; head -n 1 /dev/xvda; \
                  printf 'from inside' | dd of=/dev/xvda bs=512 seek=2 conv=notrunc,fsync 2>/dev/null && echo written; \
                  printf x | dd of=/dev/xvdb bs=512 conv=notrunc 2>/dev/null || echo refused; head -c 3 /dev/xvdb | od -An -tx1";
    let mut config = shell("c", script);
    config.devices = vec![device(&first, "/dev/xvda", "rwm"), device(&second, "/dev/xvdb", "r")];
    let pod = case.pod().await?;
    let ended = pod.run(config.clone()).await?;
    let output = ended.logs.stdout;
    ensure!(
        output == "4194304\n2097152\nfrom the host\nwritten\nrefused\n 00 00 00\n",
        "{output}{}",
        ended.logs.stderr
    );
    let file = fs::read(&file)?;
    ensure!(&file[1024..1035] == b"from inside", "{:?}", &file[1024..1035]);
    // A further container of the pod has them, too.
    config.command =
        shell("d", "test -b /dev/xvda && dd if=/dev/xvda bs=512 skip=2 count=1 2>/dev/null | head -c 11")
            .command;
    config.metadata.get_or_insert_default().name = "d".into();
    config.log_path = "d.log".into();
    let output = pod.run(config).await?.success()?;
    ensure!(output == "from inside", "{output}");
    Ok(())
}

async fn empty_dirs_on_disk_are_bounded(case: Case) -> Result<()> {
    let kubelet = Kubelet::new(&case)?;
    let (disk, other) = (kubelet.empty_dir("disk")?, kubelet.empty_dir("other")?);
    let pod = case
        .pod_with(|config| {
            drop(config.annotations.insert("io.sandboxer.emptydir-size".into(), "32Mi".into()))
        })
        .await?;
    let fills = "dd if=/dev/zero of=/disk/big bs=64k 2>&1 | grep -o 'No space left on device'; \
                 test $(stat -c %s /disk/big) -gt 20000000 && echo much; echo fits >/other/note && cat /other/note";
    let config = mounted(mounted(shell("c", fills), "/disk", &disk, false), "/other", &other, false);
    let output = pod.run(config).await?.success()?;
    ensure!(output == "No space left on device\nmuch\nfits", "{output}");
    // It is kubelet's from there on, as all that a pod leaves in an emptyDir.
    let lengths: Vec<_> =
        fs::read_dir(&disk)?.map(|entry| Ok(entry?.metadata()?.len())).collect::<Result<_>>()?;
    ensure!(lengths == [32 << 20], "{lengths:?}");
    case.clean_up().await?;
    let next = case.pod().await?;
    let output = next.run(mounted(shell("c", "ls /disk"), "/disk", &disk, false)).await?.success()?;
    ensure!(output == "big", "what is in an emptyDir outlives the pod's VM: {output}");
    Ok(())
}

async fn what_is_deleted_from_an_empty_dir_is_the_hosts_again(case: Case) -> Result<()> {
    let kubelet = Kubelet::new(&case)?;
    let disk = kubelet.empty_dir("disk")?;
    let pod = case.pod().await?;
    let container = pod.start(mounted(idle("c"), "/disk", &disk, false)).await?;
    let vmm = case.vmm_of(&pod.id).await?;
    if fs::read_to_string(format!("/proc/{vmm}/comm"))?.starts_with("firecracker") {
        println!("skipped: disks of Firecracker have no discard, see decision 0020");
        return Ok(());
    }
    let image = fs::read_dir(&disk)?.next().context("the emptyDir has no disk")??.path();
    let disk_bytes = || Ok::<_, anyhow::Error>(fs::metadata(&image)?.blocks() * 512);
    container.sh("dd if=/dev/zero of=/disk/big bs=1M count=64 2>/dev/null; sync").await?;
    let full = disk_bytes()?;
    ensure!(full >= 64 << 20, "{full} bytes");
    container.sh("rm /disk/big; sync").await?;
    eventually("room on the host", PATIENCE, || async {
        Ok((disk_bytes()? < full - (60 << 20)).then_some(()))
    })
    .await
}

async fn the_root_file_system_is_bounded(case: Case) -> Result<()> {
    let pod = case
        .pod_with(|config| drop(config.annotations.insert("io.sandboxer.rootfs-size".into(), "8Mi".into())))
        .await?;
    let fills = "dd if=/dev/zero of=/big bs=64k 2>&1 | grep -o 'No space left on device'; stat -c %s /big";
    let output = pod.output(fills).await?;
    let (words, size) = output.split_once('\n').context("two lines")?;
    ensure!(words == "No space left on device" && size.parse::<u64>()? <= 8 << 20, "{output}");
    ensure!(pod.output("echo room >/small; cat /small").await? == "room", "each container has its own");
    Ok(())
}

async fn sizes_that_make_no_sense(case: Case) -> Result<()> {
    for key in ["io.sandboxer.rootfs-size", "io.sandboxer.emptydir-size"] {
        let refused =
            case.pod_with(|config| drop(config.annotations.insert(key.into(), "plenty".into()))).await;
        let error = refused.err().with_context(|| format!("{key}=plenty was accepted"))?;
        ensure!(error.message().contains(key) && error.message().contains("plenty"), "{key}: {error}");
    }
    Ok(())
}

async fn what_a_guest_cannot_have_is_refused_by_name(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let (disk, memory) = (kubelet.empty_dir("disk")?, kubelet.memory("memory", "4m")?);
    let pod = case.pod().await?;
    let mut config = mounted(idle("shared"), "/shared", &memory, false);
    config.mounts[0].propagation = MountPropagation::PropagationBidirectional.into();
    let error = refusal(&pod, config).await?;
    let says = "volume /shared: mount propagation rshared is not available in a microVM pod";
    ensure!(error.contains(says), "{error}");
    let mut config = idle("device");
    config.devices = vec![Device {
        container_path: "/dev/console-of-host".into(),
        host_path: "/dev/console".into(),
        permissions: "rw".into(),
    }];
    let error = refusal(&pod, config).await?;
    ensure!(
        error.contains("/dev/console-of-host") && error.contains("not available in a microVM pod"),
        "{error}"
    );
    let error = refusal(&pod, mounted(idle("devices"), "/dev", &disk, false)).await?;
    ensure!(error.contains("a volume cannot be all of /dev"), "{error}");
    // No attempt disturbs the next one.
    let output =
        pod.run(mounted(shell("fine", "echo fine >/d/x; cat /d/x"), "/d", &disk, false)).await?.success()?;
    ensure!(output == "fine", "{output}");
    Ok(())
}

/// Returns why a container can't be created or started.
async fn refusal(pod: &sandboxer_e2e::case::Pod, config: ContainerConfig) -> Result<String> {
    let name = config.metadata.clone().unwrap_or_default().name;
    match pod.start(config).await {
        Ok(_) => anyhow::bail!("container {name} runs"),
        Err(error) => Ok(error.message().to_owned()),
    }
}

async fn volumes_outlive_the_daemon(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let settings = kubelet.files("configmap", "settings", &[("color", "red")])?;
    let (disk, memory) = (kubelet.empty_dir("disk")?, kubelet.memory("memory", "4m")?);
    let pod = case.pod().await?;
    let all = |config| {
        let config = mounted(mounted(config, "/disk", &disk, false), "/memory", &memory, false);
        mounted(config, "/settings", &settings, true)
    };
    let before = pod.start(all(idle("before"))).await?;
    before.sh("echo one >/disk/note; echo two >/memory/note").await?;
    case.stack.end("sandboxer", Signal::SIGKILL).await?;
    kubelet.replace(&settings, &[("color", "green")])?;
    case.stack.run_up()?;
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    // containerd has given the container up with the daemon; the pod has what was written all the same.
    let after = pod.start(all(idle("after"))).await?;
    let read = "cat /disk/note /memory/note /settings/color";
    ensure!(after.sh(read).await? == "one\ntwo\ngreen", "{}", after.sh(read).await?);
    kubelet.replace(&settings, &[("color", "blue")])?;
    prints(&after, read, "one\ntwo\nblue").await
}

/// A pod's writes are in its guest's memory when it is stopped, and a slow disk takes longer to store them than
/// a power-off: here the VMM stands still meanwhile.
async fn a_stop_loses_no_data(case: Case) -> Result<()> {
    let mut kubelet = Kubelet::new(&case)?;
    let disk = kubelet.empty_dir("disk")?;
    let (device, _) = kubelet.block_device(64 << 20)?;
    run("mkfs.ext4", &["-q".as_ref(), device.as_ref()])?;
    let known = case.stack.vmms()?;
    let pod = case.pod_with(privileged).await?;
    let mut config = mounted(idle("c"), "/disk", &disk, false);
    config.devices = vec![Device {
        container_path: "/dev/xvda".into(),
        host_path: device.display().to_string(),
        permissions: "rwm".into(),
    }];
    security(&mut config).privileged = true;
    let container = pod.start(config).await?;
    let writes = "mkdir /block && mount -t ext4 /dev/xvda /block && for at in /disk /block; do \
                  dd if=/dev/urandom of=$at/big bs=64k count=128 2>/dev/null; sha256sum <$at/big; done";
    let written = container.sh(writes).await?;
    case.cri.stop(&container.id, 5).await?;

    let vmm = case.stack.vmms()?.into_iter().find(|pid| !known.contains(pid)).context("the pod's VMM")?;
    kill(vmm, Signal::SIGSTOP)?;
    let stopping = tokio::spawn({
        let (case, pod) = (case.clone(), pod.id.clone());
        async move { case.cri.stop_pod(&pod).await }
    });
    tokio::time::sleep(Duration::from_secs(4)).await;
    // It may have been killed for taking so long.
    let _ = kill(vmm, Signal::SIGCONT);
    stopping.await??;

    let image = fs::read_dir(&disk)?.next().context("the emptyDir has no disk")??.path();
    let mut found = String::new();
    for (source, options) in [(image, "loop"), (device, "rw")] {
        found += &run("bash", &["-c".as_ref(), CHECKSUM.as_ref(), source.as_ref(), options.as_ref()])?;
    }
    ensure!(found.trim() == written, "written: {written}, on the host: {found}");
    Ok(())
}

/// The sum of the file `big` on a disk ($0), which is mounted with options ($1) for that.
const CHECKSUM: &str = "set -e; at=$(mktemp -d); mount -t ext4 -o \"$1\" \"$0\" \"$at\"; \
                        trap 'umount \"$at\"; rmdir \"$at\"' EXIT; sha256sum <\"$at/big\"";

fn run(program: &str, arguments: &[&std::ffi::OsStr]) -> Result<String> {
    let output = std::process::Command::new(program).args(arguments).output()?;
    ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}
