//! Directories and files of the host that containers have live.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{ContainerConfig, Mount, MountPropagation};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::case::{Case, Container, PATIENCE, idle, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::stream::Session;
use tempfile::TempDir;

crate::cases![
    Any: live_both_ways, read_only_stays_as_it_is, read_only_as_deep_as_asked,
        single_file, owners_and_modes, renamed_and_removed_while_open,
        large_file, copied_to_the_log, many_small_files, link_leads_nowhere_else, program_is_run, two_containers_have_it_in_common,
        what_is_not_there, unmounted_after_it_was_read, a_thousand_mounts, files_of_the_kernel,
        what_programs_do_to_files, directory_of_another_user, a_hundred_thousand_files;
    Vm: copied_from_the_input;
    VmAlone: one_process_for_a_pod_and_none_without_shares, a_server_that_ends_takes_the_shares_and_not_the_pod,
        killed_during_io, read_on_while_the_worker_is_dead
];

/// `config` with `source` at `/data`.
fn with_data(mut config: ContainerConfig, source: &Path, readonly: bool) -> ContainerConfig {
    config.mounts.push(Mount {
        container_path: "/data".into(),
        host_path: source.display().to_string(),
        readonly,
        ..Default::default()
    });
    config
}

fn host() -> Result<TempDir> {
    let dir = tempfile::tempdir()?;
    // A container's user is not always root.
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777))?;
    Ok(dir)
}

/// sha256sum of a file of the host.
fn sum(path: &Path) -> Result<String> {
    let output = Command::new("sha256sum").arg(path).output()?.stdout;
    Ok(String::from_utf8(output)?.split(' ').next().unwrap_or_default().to_owned())
}

async fn live_both_ways(case: Case) -> Result<()> {
    let host = host()?;
    std::fs::write(host.path().join("early"), "from the host")?;
    let container = case.pod().await?.start(with_data(idle("c"), host.path(), false)).await?;
    ensure!(container.sh("cat /data/early").await? == "from the host");
    container.sh("echo from inside >/data/new; mkdir /data/dir").await?;
    ensure!(std::fs::read_to_string(host.path().join("new"))? == "from inside\n");
    std::fs::write(host.path().join("dir/late"), "later")?;
    ensure!(container.sh("cat /data/dir/late").await? == "later");
    for content in ["a", "changed", "once more, and longer"] {
        std::fs::write(host.path().join("early"), content)?;
        eventually(&format!("{content:?} in the container"), PATIENCE, || async {
            Ok((container.sh("cat /data/early").await? == content).then_some(()))
        })
        .await?;
    }
    std::fs::remove_file(host.path().join("early"))?;
    eventually("end of a removed file", PATIENCE, || async {
        Ok(container.sh("test ! -e /data/early").await.ok())
    })
    .await?;
    Ok(())
}

async fn read_only_stays_as_it_is(case: Case) -> Result<()> {
    let host = host()?;
    std::fs::write(host.path().join("file"), "content")?;
    let container = case.pod().await?.start(with_data(idle("c"), host.path(), true)).await?;
    ensure!(container.sh("cat /data/file").await? == "content");
    for script in
        ["echo x >/data/new", "echo x >>/data/file", "rm /data/file", "chmod 777 /data/file", "mkdir /data/d"]
    {
        let refused = container.sh(script).await.err().with_context(|| format!("'{script}' was possible"))?;
        ensure!(format!("{refused:#}").contains("Read-only file system"), "{refused:#}");
    }
    ensure!(std::fs::read_to_string(host.path().join("file"))? == "content");
    ensure!(std::fs::read_dir(host.path())?.count() == 1);
    Ok(())
}

/// A read-only volume is that, and what the host mounted below it only if it is asked for.
async fn read_only_as_deep_as_asked(case: Case) -> Result<()> {
    let host = host()?;
    let below = host.path().join("below");
    std::fs::create_dir(&below)?;
    nix::mount::mount(Some("tmpfs"), &below, Some("tmpfs"), nix::mount::MsFlags::empty(), None::<&str>)?;
    let tried = async {
        let pod = case.pod().await?;
        let script = "touch /data/a 2>&1; touch /data/below/b 2>&1 && echo written below";
        let plain = pod.run(with_data(shell("plain", script), host.path(), true)).await?.logs.stdout;
        let mut deep = with_data(shell("deep", script), host.path(), true);
        deep.mounts[0].recursive_read_only = true;
        let deep = pod.run(deep).await?.logs.stdout;
        Ok::<_, anyhow::Error>((plain, deep))
    };
    let tried = tried.await;
    nix::mount::umount2(&below, nix::mount::MntFlags::MNT_DETACH)?;
    let (plain, deep) = tried?;
    ensure!(plain.matches("Read-only").count() == 1 && plain.contains("written below"), "{plain}");
    ensure!(deep.matches("Read-only").count() == 2 && !deep.contains("written below"), "{deep}");
    Ok(())
}

async fn single_file(case: Case) -> Result<()> {
    let host = host()?;
    let file = host.path().join("file");
    std::fs::write(&file, "content")?;
    std::fs::write(host.path().join("neighbour"), "secret")?;
    let container = case.pod().await?.start(with_data(idle("c"), &file, false)).await?;
    ensure!(container.sh("cat /data; echo more >>/data").await? == "content");
    ensure!(std::fs::read_to_string(&file)? == "contentmore\n");
    Ok(())
}

async fn owners_and_modes(case: Case) -> Result<()> {
    let host = host()?;
    std::fs::write(host.path().join("mine"), "private")?;
    std::fs::set_permissions(host.path().join("mine"), std::fs::Permissions::from_mode(0o600))?;
    let container = case.pod().await?.start(with_data(idle("c"), host.path(), false)).await?;
    container.sh("cd /data; echo x >given; chown 1234:5678 given; chmod 2750 given; chmod 600 mine").await?;
    let given = std::fs::metadata(host.path().join("given"))?;
    ensure!((given.uid(), given.gid(), given.mode() & 0o7777) == (1234, 5678, 0o2750), "{given:?}");
    ensure!(container.sh("stat -c '%u:%g %a' /data/given").await? == "1234:5678 2750");

    let mut config = with_data(
        shell("u", "id -u; cat /data/mine || echo refused; echo x >/data/theirs"),
        host.path(),
        false,
    );
    let security = sandboxer_e2e::case::security(&mut config);
    security.run_as_user = Some(k8s_cri::v1::Int64Value { value: 4321 });
    let output = case.pod().await?.run(config).await?.success()?;
    ensure!(output == "4321\nrefused", "{output}");
    ensure!(std::fs::metadata(host.path().join("theirs"))?.uid() == 4321);
    Ok(())
}

async fn renamed_and_removed_while_open(case: Case) -> Result<()> {
    let host = host()?;
    let script = "cd /data; exec 3<>open; echo one >&3; mv open moved; echo two >&3; cat moved; rm moved
        echo three >&3; ls | wc -l; cat <&3; echo end; echo a >a; echo b >b; mv a b; cat b; ls";
    let output = case.pod().await?.run(with_data(shell("c", script), host.path(), false)).await?.success()?;
    ensure!(output == "one\ntwo\n0\nend\na\nb", "{output}");
    Ok(())
}

async fn large_file(case: Case) -> Result<()> {
    let host = host()?;
    let expected = random(&host.path().join("large"), 64)?;
    let container = case.pod().await?.start(with_data(idle("c"), host.path(), false)).await?;
    let seen = container.sh("cp /data/large /data/copy && sha256sum </data/copy").await?;
    ensure!(seen.starts_with(&expected), "{seen}");
    ensure!(sum(&host.path().join("copy"))? == expected);
    Ok(())
}

/// Writes a file of this many MiB at `path`; returns its sha256sum.
fn random(path: &Path, mib: u32) -> Result<String> {
    let (count, to) = (format!("count={mib}"), format!("of={}", path.display()));
    let made = Command::new("dd").args(["if=/dev/urandom", "bs=1M", "status=none", &count, &to]).status()?;
    ensure!(made.success(), "{made}");
    sum(path)
}

/// `cat` has the kernel copy from the share into the pipe of its output, which is locked meanwhile.
async fn copied_to_the_log(case: Case) -> Result<()> {
    let host = host()?;
    let lines: String = (0..60_000).map(|n| format!("line {n}\n")).collect();
    std::fs::write(host.path().join("lines"), &lines)?;
    let pod = case.pod().await?;
    let ended = pod.run(with_data(shell("c", "echo begins; cat /data/lines"), host.path(), false)).await?;
    ensure!(ended.status.exit_code == 0, "{:?}", ended.status);
    ensure!(ended.logs.stdout == format!("begins\n{lines}"), "{} bytes", ended.logs.stdout.len());
    let container = pod.start(with_data(idle("other"), host.path(), false)).await?;
    ensure!(container.sh("cat /data/lines").await? == lines.trim_end());
    Ok(())
}

/// Copies bytes from its input to its output within the kernel: `src/splice.c`, static. Built with the tests, as nodes have no compiler.
const SPLICE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/splice"));

/// Not with runc: behind containerd 2.4.2 such a program sees its input end after the first bytes.
async fn copied_from_the_input(case: Case) -> Result<()> {
    let host = host()?;
    let program = host.path().join("splice");
    std::fs::write(&program, SPLICE)?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let container = case.pod().await?.start(with_data(idle("c"), host.path(), false)).await?;
    let lines: String = (0..30_000).map(|n| format!("line {n}\n")).collect();
    let script = format!("exec /data/splice {} >/data/copy", lines.len());
    let url = case.cri.exec(&container.id, &["sh", "-c", &script], false).await?;
    let mut session = Session::open(&url).await?;
    session.write(&lines).await?;
    let (_, stderr, result) = session.end(PATIENCE).await?;
    ensure!(result.contains("Success"), "{result} {stderr}");
    ensure!(std::fs::read_to_string(host.path().join("copy"))? == lines);
    Ok(())
}

async fn many_small_files(case: Case) -> Result<()> {
    let host = host()?;
    let container = case.pod().await?.start(with_data(idle("c"), host.path(), false)).await?;
    let made = "cd /data; for i in $(seq 300); do echo $i >$i; done; ls | wc -l; cat * | sort -n | tail -1";
    ensure!(container.sh(made).await? == "300\n300");
    ensure!(std::fs::read_dir(host.path())?.count() == 300);
    ensure!(container.sh("rm /data/*; ls /data").await?.is_empty());
    ensure!(std::fs::read_dir(host.path())?.count() == 0);
    Ok(())
}

async fn link_leads_nowhere_else(case: Case) -> Result<()> {
    let (host, outside) = (host()?, host()?);
    std::fs::write(outside.path().join("secret"), "secret of the host")?;
    symlink(outside.path(), host.path().join("dir"))?;
    symlink(outside.path().join("secret"), host.path().join("file"))?;
    symlink("/etc/hostname", host.path().join("own"))?;
    let container = case.pod().await?.start(with_data(idle("c"), host.path(), false)).await?;
    for path in ["dir/secret", "file", "../secret"] {
        ensure!(container.sh(&format!("cat /data/{path}")).await.is_err(), "{path} was read");
    }
    ensure!(container.sh("echo x >/data/file").await.is_err(), "a link was written through");
    ensure!(std::fs::read_to_string(outside.path().join("secret"))? == "secret of the host");
    ensure!(container.sh("cat /data/own").await? == "pod", "a link leads where the container has it lead");
    Ok(())
}

async fn program_is_run(case: Case) -> Result<()> {
    let host = host()?;
    std::fs::copy("/bin/busybox", host.path().join("busybox")).context("busybox-static is installed")?;
    let container = case.pod().await?.start(with_data(idle("c"), host.path(), true)).await?;
    ensure!(container.sh("/data/busybox echo it runs").await? == "it runs");
    Ok(())
}

async fn two_containers_have_it_in_common(case: Case) -> Result<()> {
    let (first, second) = (host()?, host()?);
    let pod = case.pod().await?;
    let a = pod.start(with_data(idle("a"), first.path(), false)).await?;
    let b = pod.start(with_data(idle("b"), first.path(), false)).await?;
    let c = pod.start(with_data(idle("c"), second.path(), false)).await?;
    a.sh("echo hello >/data/file").await?;
    ensure!(b.sh("cat /data/file").await? == "hello");
    ensure!(c.sh("ls /data").await?.is_empty(), "another directory has the file, too");
    // A lock is seen across containers of a pod.
    a.sh("flock -x /data/file sleep 1000 >/dev/null 2>&1 & sleep 0.1").await?;
    eventually("lock of the other container", PATIENCE, || async {
        Ok(b.sh("flock -n -x /data/file true").await.is_err().then_some(()))
    })
    .await?;
    Ok(())
}

async fn what_is_not_there(case: Case) -> Result<()> {
    let host = host()?;
    let pod = case.pod().await?;
    let missing = host.path().join("missing");
    // A kubelet expects this: CRI creates a directory.
    let made = pod.start(with_data(idle("c"), &missing, false)).await?;
    made.sh("echo x >/data/file").await?;
    ensure!(missing.join("file").exists());
    Ok(())
}

/// A directory of the host with a file system of its own, in which later mounts appear in containers, too.
struct Volume(TempDir);

impl Volume {
    fn new() -> Result<Self> {
        let volume = Self(host()?);
        tmpfs(volume.0.path())?;
        mount(None::<&str>, volume.0.path(), None::<&str>, MsFlags::MS_SHARED, None::<&str>)?;
        Ok(volume)
    }

    fn below(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Mounts a file system with a file at `name`.
    fn fill(&self, name: &str) -> Result<()> {
        std::fs::create_dir_all(self.below(name))?;
        tmpfs(&self.below(name))?;
        Ok(std::fs::write(self.below(name).join("file"), format!("{name}\n"))?)
    }

    /// A container that follows its mounts.
    async fn container(&self, case: &Case) -> Result<Container> {
        let mut config = with_data(idle("c"), self.0.path(), false);
        config.mounts[0].propagation = MountPropagation::PropagationHostToContainer.into();
        Ok(case.pod().await?.start(config).await?)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // With everything below it.
        let _ = umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

fn tmpfs(at: &Path) -> Result<()> {
    mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), Some("mode=0777"))
        .with_context(|| format!("mount a tmpfs on {at:?}"))
}

/// A node agent with kubelet's directory must not keep the host from unmounting other pods' volumes.
async fn unmounted_after_it_was_read(case: Case) -> Result<()> {
    let volume = Volume::new()?;
    let container = volume.container(&case).await?;
    for round in 0..5 {
        volume.fill("below")?;
        // A guest may look at what was there for another moment.
        eventually(&format!("mount {round} in the container"), PATIENCE, || async {
            let seen = container.sh("ls /data/below; cat /data/below/file").await.ok();
            Ok(seen.filter(|seen| seen == "file\nbelow"))
        })
        .await?;
        // The guest closes its files when it has time to.
        eventually(&format!("unmount {round} of what was read"), PATIENCE, || async {
            Ok(umount2(&volume.below("below"), MntFlags::empty()).ok())
        })
        .await?;
        eventually(&format!("end of mount {round} in the container"), PATIENCE, || async {
            Ok(container.sh("ls /data/below").await.ok().filter(String::is_empty))
        })
        .await?;
    }
    Ok(())
}

/// Mounts come and go below a volume while the pod reads all that there are.
async fn a_thousand_mounts(case: Case) -> Result<()> {
    const MOUNTS: usize = 1000;
    let volume = Volume::new()?;
    let container = volume.container(&case).await?;
    container.sh("while :; do cat /data/*/file; sleep 1; done >/dev/null 2>&1 &").await?;
    let all_are_read = async |count: usize| {
        eventually(&format!("{count} mounts"), PATIENCE, || async {
            let read = container.sh("cat /data/*/file 2>/dev/null | wc -l").await?;
            Ok((read == count.to_string()).then_some(()))
        })
        .await
    };
    (0..MOUNTS).try_for_each(|n| volume.fill(&format!("m{n}")))?;
    all_are_read(MOUNTS).await?;
    for n in 0..MOUNTS {
        let mount = volume.below(&format!("m{n}"));
        eventually(&format!("unmount of {}", mount.display()), PATIENCE, || async {
            Ok(umount2(&mount, MntFlags::empty()).ok())
        })
        .await?;
        std::fs::remove_dir(&mount)?;
    }
    all_are_read(0).await?;
    (MOUNTS..MOUNTS + 30).try_for_each(|n| volume.fill(&format!("m{n}")))?;
    all_are_read(30).await
}

/// Files of the kernel, whose size is 0, or a page.
async fn files_of_the_kernel(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    for (source, file) in [("/proc", "sys/kernel/ostype"), ("/sys/kernel", "profiling")] {
        let name = file.rsplit('/').next().unwrap_or(file);
        let container = pod.start(with_data(idle(name), Path::new(source), true)).await?;
        let expected = std::fs::read_to_string(Path::new(source).join(file))?;
        let seen = container.sh(&format!("cat /data/{file}")).await?;
        ensure!(!seen.is_empty() && seen == expected.trim_end(), "{source}/{file}: {seen:?}");
    }
    Ok(())
}

/// Direct I/O, holes, mapped memory, locks, and a file that is removed while it is open: `src/files.c`, static.
const FILES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/files"));

async fn what_programs_do_to_files(case: Case) -> Result<()> {
    let host = host()?;
    let program = host.path().join("files");
    std::fs::write(&program, FILES)?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let container = case.pod().await?.start(with_data(idle("c"), host.path(), false)).await?;
    let output = container.sh("/data/files /data/file").await?;
    ensure!(output.lines().count() == 13 && output.lines().all(|line| line.ends_with(" ok")), "{output}");
    Ok(())
}

/// The ACL of the directory gives a user what its mode does not.
async fn directory_of_another_user(case: Case) -> Result<()> {
    let host = host()?;
    let private = host.path().join("private");
    std::fs::create_dir(&private)?;
    std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o700))?;
    // A user without a group has group 0.
    std::os::unix::fs::chown(&private, None, Some(5555))?;
    let entries =
        [(1_u16, 7_u16, u32::MAX), (2, 7, 4321), (4, 0, u32::MAX), (16, 7, u32::MAX), (32, 0, u32::MAX)];
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        acl.extend([&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat());
    }
    rustix::fs::setxattr(&private, "system.posix_acl_access", &acl, rustix::fs::XattrFlags::empty())?;
    let pod = case.pod().await?;
    for (user, expected) in [(4321, "4321\nx"), (4322, "4322\nrefused")] {
        let script = "id -u; cd /data/private 2>/dev/null && echo x >file && cat file || echo refused";
        let mut config = with_data(shell(&format!("u{user}"), script), host.path(), false);
        sandboxer_e2e::case::security(&mut config).run_as_user =
            Some(k8s_cri::v1::Int64Value { value: user });
        let output = pod.run(config).await?.success()?;
        ensure!(output == expected, "{output}");
    }
    Ok(())
}

/// However few files the host lets a process open.
async fn a_hundred_thousand_files(case: Case) -> Result<()> {
    let host = host()?;
    for directory in 0..100 {
        let directory = host.path().join(directory.to_string());
        std::fs::create_dir(&directory)?;
        (0..1000).try_for_each(|n| std::fs::write(directory.join(n.to_string()), ""))?;
    }
    std::fs::write(host.path().join("0/0"), "the first")?;
    let pod = case.pod().await?;
    let container = pod.start(with_data(idle("c"), host.path(), false)).await?;
    for server in case.stack.processes("sandboxer-share")? {
        let groups = std::fs::read_to_string(format!("/proc/{server}/cgroup")).unwrap_or_default();
        if groups.lines().any(|line| line.ends_with(&format!("/sandboxer-{}", pod.id))) {
            let few = rustix::process::Rlimit { current: Some(512), maximum: Some(512) };
            let server = rustix::process::Pid::from_raw(server.as_raw());
            rustix::process::prlimit(server, rustix::process::Resource::Nofile, few)?;
        }
    }
    // With the directories. Attributes are looked up of each file in twenty of them.
    let script = "ls -R /data | grep -c '^[0-9][0-9]*$'; ls -lR /data/? /data/1? | grep -c ^-; cat /data/0/0; echo x >/data/99/new";
    let seen = container.sh(script).await?;
    ensure!(seen == "100100\n20000\nthe first", "{seen}");
    ensure!(host.path().join("99/new").exists());
    Ok(())
}

async fn one_process_for_a_pod_and_none_without_shares(case: Case) -> Result<()> {
    let servers = || case.stack.processes("sandboxer-share");
    let before = servers()?;
    let (first, second) = (host()?, host()?);
    let pod = case.pod().await?;
    pod.start(idle("plain")).await?;
    ensure!(servers()? == before, "a pod without shares has a process for them");
    pod.start(with_data(idle("a"), first.path(), false)).await?;
    pod.start(with_data(idle("b"), second.path(), true)).await?;
    let mut of_pod = servers()?;
    of_pod.retain(|pid| !before.contains(pid));
    ensure!(of_pod.len() == 1, "{of_pod:?}");
    let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", of_pod[0]))?;
    let is_in_group = groups.lines().any(|line| line.ends_with(&format!("/sandboxer-{}", pod.id)));
    ensure!(is_in_group, "it is not counted with its pod: {groups}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    ensure!(!mounts.contains(&first.path().display().to_string()), "the host has a mount more");
    case.cri.stop_pod(&pod.id).await?;
    ensure!(!servers()?.contains(&of_pod[0]), "it outlived its pod");
    case.cri.remove_pod(&pod.id).await?;
    Ok(())
}

async fn a_server_that_ends_takes_the_shares_and_not_the_pod(case: Case) -> Result<()> {
    let before = case.stack.processes("sandboxer-share")?;
    let host = host()?;
    let pod = case.pod().await?;
    let container = pod.start(with_data(idle("c"), host.path(), false)).await?;
    container.sh("echo x >/data/file").await?;
    let mut servers = case.stack.processes("sandboxer-share")?;
    servers.retain(|pid| !before.contains(pid));
    for server in servers {
        kill(server, Signal::SIGKILL)?;
    }
    let error = eventually("an error of the share", PATIENCE, || async {
        Ok(container.sh("ls /data; echo x >/data/new").await.err())
    })
    .await?;
    ensure!(format!("{error:#}").contains("Input/output error"), "{error:#}");
    ensure!(container.sh("echo fine").await? == "fine");
    ensure!(pod.output("echo fine").await? == "fine");
    let refused = pod.start(with_data(idle("d"), host.path(), false)).await.err().context("it was taken")?;
    ensure!(refused.message().contains("has ended"), "{refused}");
    Ok(())
}

async fn killed_during_io(case: Case) -> Result<()> {
    let host = host()?;
    let log = host.path().join("log");
    let pod = case.pod().await?;
    // containerd declares the container dead with the daemon, since its connection doesn't redial; another one
    // goes on where that one was ended.
    let script = "i=$(ls /data | grep -c d); while :; do
        i=$((i+1)); echo $i >>/data/log; mkdir /data/d$i || exit 1; done";
    pod.start(with_data(shell("c0", script), host.path(), false)).await?;
    let servers = case.stack.processes("sandboxer-share")?;
    ensure!(servers.len() == 1, "{servers:?}");
    let lines = || std::fs::read_to_string(&log).unwrap_or_default().lines().count();
    for round in 1..=3 {
        let before = lines();
        eventually("some lines", PATIENCE, || async { Ok((lines() > before + 5).then_some(())) }).await?;
        case.stack.end("sandboxer", Signal::SIGKILL).await?;
        case.stack.run_up()?;
        eventually("pod ready again", PATIENCE, || async {
            Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
        })
        .await?;
        eventually("end of the container", PATIENCE, || async {
            let at = lines();
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok((lines() == at).then_some(()))
        })
        .await?;
        // Ended between its two steps, a container leaves a line without a directory.
        let made = std::fs::read_dir(host.path())?.count() - 1;
        ensure!(lines() - made <= 1, "{} lines, {made} directories", lines());
        if lines() > made {
            std::fs::create_dir(host.path().join(format!("d{}", made + 1)))?;
        }
        pod.start(with_data(shell(&format!("c{round}"), script), host.path(), false)).await?;
    }
    ensure!(
        case.stack.processes("sandboxer-share")? == servers,
        "the shares' server did not outlive the daemon"
    );
    let written = std::fs::read_to_string(&log)?;
    let numbers: Vec<usize> = written.lines().map(str::parse).collect::<Result<_, _>>()?;
    ensure!(numbers == (1..=numbers.len()).collect::<Vec<_>>(), "lines are lost or doubled: {numbers:?}");
    case.cri.stop_pod(&pod.id).await?;
    ensure!(case.stack.processes("sandboxer-share")?.is_empty(), "it outlived its pod");
    Ok(())
}

/// Reads of shares do not pass the daemon. While the front is stopped, no next worker starts.
async fn read_on_while_the_worker_is_dead(case: Case) -> Result<()> {
    let host = host()?;
    let expected = random(&host.path().join("large"), 16)?;
    // The contents are requested again on each open.
    let script = "while sleep 0.1; do sha256sum </data/large >>/data/sums; done";
    let pod = case.pod().await?;
    let container = pod.start(with_data(shell("c", script), host.path(), false)).await?;
    let sums = || std::fs::read_to_string(host.path().join("sums")).unwrap_or_default();
    let more_than = async |count: usize| {
        eventually("sums of the file", PATIENCE, || async {
            Ok((sums().lines().count() > count).then_some(()))
        })
        .await
    };
    more_than(1).await?;
    let (front, worker) = (case.stack.front()?, case.stack.worker()?);
    kill(front, Signal::SIGSTOP)?;
    let without = async {
        kill(worker, Signal::SIGKILL)?;
        eventually("end of the worker", PATIENCE, || async {
            // Nobody has taken note of it: it is a zombie.
            let stat = std::fs::read_to_string(format!("/proc/{worker}/stat")).unwrap_or_default();
            Ok((stat.is_empty() || stat.contains(") Z ")).then_some(()))
        })
        .await?;
        // One may have been in progress.
        more_than(sums().lines().count() + 2).await
    };
    let without = without.await;
    kill(front, Signal::SIGCONT)?;
    without?;
    ensure!(container.sh("sha256sum </data/large").await?.starts_with(&expected));
    ensure!(case.stack.worker()? != worker, "the worker was not killed");
    ensure!(sums().lines().all(|sum| sum.starts_with(&expected)), "{expected}, and seen: {}", sums());
    Ok(())
}
