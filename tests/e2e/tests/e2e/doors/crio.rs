//! Pods of CRI-O with sandboxer as a runtime of the type `vm`, beside the same with CRI-O's own runc.
//!
//! `make test-crio` builds CRI-O and crictl, and names their directories in `SANDBOXER_E2E_CRIO`. Each case has a CRI-O of its own
//! beside the stack's containerd, with everything of it in one directory of the stack, and the stack's pod network. It speaks CRI, so
//! cases of other files run on it, too; `SANDBOXER_E2E_CRIO_ONLY=exec_` runs those alone whose names contain that.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use k8s_cri::v1::{ContainerState, LinuxContainerResources, NamespaceMode};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sandboxer_e2e::case::{BUSYBOX, Case, idle, shell};
use sandboxer_e2e::cri::Cri;
use sandboxer_e2e::eventually;
use sandboxer_e2e::page::Page;
use sandboxer_e2e::stack::Victim;
use tokio::process::Command;

use super::{Ended, PATIENCE, only_vmm, run};
use crate::{Entry, On, case_name};

crate::cases![
    Any: runs_a_pod, keeps_much_output, has_two_containers, takes_orders_of_crictl, lifecycle_as_with_containerd, streams_as_with_containerd,
        containers_as_with_containerd;
    Vm: has_no_process_but_the_vmm, has_its_size, joins_no_other_pod, refuses_namespaces_of_the_host, does_what_the_page_says;
    VmAlone: outlives_worker_and_front, outlives_crio, has_ended_when_its_vmm_dies
];

/// The variable with the directories of the programs, as in PATH.
const PROGRAMS: &str = "SANDBOXER_E2E_CRIO";
/// Image that CRI-O wants for every pod; the stack's.
const PAUSE: &str = "registry.k8s.io/pause:3.10.2";
/// How long CRI-O may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// Cases of other files that mean the same here.
const LIFECYCLE: &[&str] = &[
    "stop_and_remove_twice",
    "stop_asks_before_it_kills",
    "containers_of_a_pod_share_its_network",
    "remove_takes_what_runs",
];
const STREAMS: &[&str] = &[
    "logs_keep_streams_apart",
    "exec_sync",
    "exec_binary",
    "exec_many_at_once",
    "exec_with_stdin",
    "exec_with_terminal",
];
const CONTAINERS: &[&str] = &[
    "exit_codes",
    "command_environment_and_directory",
    "user_and_groups",
    "user_by_name",
    "no_new_privileges",
    "read_only_rootfs",
    "shared_memory",
    "limits",
    "limits_change",
    "out_of_memory",
    "terminal",
];

/// Returns whether CRI-O was built for this run.
pub fn is_there() -> bool {
    std::env::var_os(PROGRAMS).is_some()
}

/// CRI-O, with a case that speaks to it.
struct CriO {
    /// The case, whose CRI is CRI-O's.
    case: Case,
    dir: tempfile::TempDir,
    daemon: Option<Child>,
}

impl Drop for CriO {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            eprintln!("the end of {}:\n{}", self.path("log").display(), self.log_tail());
            let mut abandon = std::process::Command::new("timeout");
            abandon.args(["60", "crictl", "--config"]).arg(self.path("crictl.yaml"));
            abandon.args(["--timeout", "10s", "--runtime-endpoint"]);
            abandon.arg(format!("unix://{}", self.path("sock").display())).args(["rmp", "--all", "--force"]);
            abandon.env("PATH", format!("{}:/usr/bin:/bin", std::env::var(PROGRAMS).unwrap_or_default()));
            if let Err(error) = abandon.output() {
                eprintln!("cannot remove what is left: {error}");
            }
            let _ = daemon.kill().and_then(|()| daemon.wait());
        }
        // Of pods that are left, and of the storage.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let own = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        let own: Vec<_> = own.filter(|at| Path::new(at).starts_with(self.dir.path())).collect();
        for at in own.into_iter().rev() {
            let _ = umount2(at, MntFlags::MNT_DETACH);
        }
    }
}

impl CriO {
    async fn start(case: &Case) -> Result<Self> {
        // In the stack's, which is removed with all mounts and processes of a run that was killed.
        let dir = tempfile::Builder::new().prefix("crio-").tempdir_in(case.stack.dir())?;
        let mut crio = Self { case: case.clone(), dir, daemon: None };
        for name in ["ns", "conf.d", "policies", "cdi"] {
            fs::create_dir(crio.path(name))?;
        }
        fs::write(crio.path("policy.json"), r#"{"default": [{"type": "insecureAcceptAnything"}]}"#)?;
        fs::write(crio.path("crio.conf"), crio.config()?)?;
        fs::write(crio.path("crictl.yaml"), "")?;
        if case.in_vm() {
            let printed = case.stack.command("sandboxer-cli").args(["check", "--crio-config"]).output()?;
            ensure!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
            // As it is printed, but for two paths of a package.
            let mut printed = String::from_utf8(printed.stdout)?;
            let launcher = case.stack.dir().join("bin/containerd-shim-sandboxer-v2");
            for (key, path) in [("runtime_path", launcher), ("runtime_root", crio.path("fifos"))] {
                let line = printed.lines().find(|line| line.starts_with(key)).unwrap_or_default().to_owned();
                ensure!(
                    line.ends_with("\"/usr/bin/containerd-shim-sandboxer-v2\"")
                        || line.ends_with("\"/run/crio/sandboxer\""),
                    "{printed}"
                );
                printed = printed.replace(&line, &format!("{key} = {:?}", path.display().to_string()));
            }
            fs::write(crio.path("conf.d/50-sandboxer.conf"), printed)?;
        }
        for (archive, name) in [("busybox", BUSYBOX), ("pause", PAUSE)] {
            crio.import(&case.stack.dir().join(format!("images/{archive}.tar")), name).await?;
        }
        crio.start_daemon().await?;
        crio.case.cri = Cri::connect(crio.path("sock"))?;
        Ok(crio)
    }

    /// Returns the configuration without our runtime: its paths, and runc.
    fn config(&self) -> Result<String> {
        let at = |name: &str| format!("{:?}", self.path(name).display().to_string());
        let program = |name: &str| self.program(name).map(|path| format!("{:?}", path.display().to_string()));
        let stack = |name: &str| format!("{:?}", self.case.stack.dir().join(name).display().to_string());
        Ok(format!(
            "[crio]\nroot = {}\nrunroot = {}\nlog_dir = {}\nversion_file = {}\nversion_file_persist = {}\n\
             clean_shutdown_file = {}\nstorage_driver = \"overlay\"\n\
             [crio.api]\nlisten = {}\n\
             [crio.runtime]\ncgroup_manager = \"cgroupfs\"\nconmon_cgroup = \"pod\"\nnamespaces_dir = {}\npinns_path = {}\n\
             container_exits_dir = {}\ncontainer_attach_socket_dir = {}\nhooks_dir = []\ncdi_spec_dirs = [{}]\n\
             irqbalance_config_file = \"\"\nirqbalance_config_restore_file = \"disable\"\ndefault_runtime = \"runc\"\n\
             [crio.runtime.runtimes.runc]\nruntime_path = {}\nruntime_root = {}\nmonitor_path = {}\nmonitor_cgroup = \"pod\"\n\
             [crio.image]\npause_image = {PAUSE:?}\nsignature_policy = {}\nsignature_policy_dir = {}\n\
             [crio.network]\nnetwork_dir = {}\nplugin_dirs = [{}]\n\
             [crio.metrics]\nenable_metrics = false\n\
             [crio.nri]\nenable_nri = false\n",
            at("root"),
            at("runroot"),
            at("logs"),
            at("version"),
            at("version-kept"),
            at("clean"),
            at("sock"),
            at("ns"),
            program("pinns")?,
            at("exits"),
            at("attach"),
            at("cdi"),
            stack("bin/runc"),
            at("runc"),
            program("conmon")?,
            at("policy.json"),
            at("policies"),
            stack("cni/net.d"),
            stack("cni/bin"),
        ))
    }

    async fn import(&self, archive: &Path, name: &str) -> Result<()> {
        let mut copy = Command::new(self.program("copyimg")?);
        copy.arg("--root").arg(self.path("root")).arg("--runroot").arg(self.path("runroot"));
        copy.args(["--storage-driver", "overlay", "--image-name", name]);
        copy.arg("--signature-policy").arg(self.path("policy.json"));
        copy.arg("--import-from").arg(format!("oci-archive:{}", archive.display()));
        run(copy, "").await?.success().with_context(|| format!("cannot give CRI-O {name}")).map(drop)
    }

    async fn start_daemon(&mut self) -> Result<()> {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("log"))?;
        let mut daemon = std::process::Command::new(self.program("crio")?);
        daemon
            .arg("--config")
            .arg(self.path("crio.conf"))
            .arg("--config-dir")
            .arg(self.path("conf.d"))
            .env("SANDBOXER_CONFIG", self.case.stack.env("SANDBOXER_CONFIG").unwrap_or_default())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.daemon = Some(daemon.spawn().context("cannot run CRI-O")?);
        let pid = self.daemon.as_ref().map(Child::id).unwrap_or_default();
        eventually("CRI-O", PATIENCE, || async {
            // What has ended is a zombie, without a program.
            ensure!(
                fs::read_link(format!("/proc/{pid}/exe")).is_ok(),
                "CRI-O has ended:\n{}",
                self.log_tail()
            );
            let Ok(cri) = Cri::connect(self.path("sock")) else { return Ok(None) };
            Ok(cri.has_image(BUSYBOX).await.ok())
        })
        .await
        .map(drop)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the path of a program that was built for this run.
    fn program(&self, name: &str) -> Result<PathBuf> {
        let dirs = std::env::var_os(PROGRAMS).unwrap_or_default();
        let found = std::env::split_paths(&dirs).map(|dir| dir.join(name)).find(|path| path.exists());
        found.with_context(|| format!("no {name} in {PROGRAMS}"))
    }

    async fn crictl(&self, args: &[&str]) -> Result<Ended> {
        let mut command = Command::new(self.program("crictl")?);
        let endpoint = format!("unix://{}", self.path("sock").display());
        command.args(["--timeout", "120s", "--runtime-endpoint", &endpoint, "--image-endpoint", &endpoint]);
        // Not the host's.
        command.arg("--config").arg(self.path("crictl.yaml")).args(args);
        run(command, "").await
    }

    /// Ends CRI-O, as a service manager does.
    async fn end(&mut self) -> Result<()> {
        let mut daemon = self.daemon.take().context("CRI-O does not run")?;
        let terminated = kill(Pid::from_raw(daemon.id().try_into()?), Signal::SIGTERM);
        let deadline = Instant::now() + ENDS_WITHIN;
        while daemon.try_wait()?.is_none() {
            if Instant::now() > deadline {
                self.daemon = Some(daemon);
                bail!("CRI-O does not end");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        terminated.context("cannot end CRI-O")
    }

    fn log_tail(&self) -> String {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().filter(|line| !line.contains("level=info")).collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// Removes the pods of the case, and ends CRI-O, of which nothing may be left.
    async fn close(self) -> Result<()> {
        self.close_after(0).await
    }

    /// Does the same, after CRI-O was restarted beneath as many pods: then it forgets the FIFOs of their infra containers.
    async fn close_after(mut self, restarts: usize) -> Result<()> {
        self.case.clean_up().await?;
        self.end().await?;
        let fifos = self.path("fifos/crio/fifo/io");
        let left = fs::read_dir(&fifos).map(Iterator::count).unwrap_or_default();
        ensure!(left <= restarts, "{left} directories are left in {}", fifos.display());
        Ok(())
    }
}

/// Runs cases of another file on CRI-O, and tells all that fail.
async fn as_with_containerd(case: &Case, entries: Vec<Entry>, names: &[&str]) -> Result<()> {
    let crio = CriO::start(case).await?;
    let only = std::env::var("SANDBOXER_E2E_CRIO_ONLY").unwrap_or_default();
    let mut failed = Vec::new();
    for name in names.iter().filter(|name| name.contains(&only)) {
        let found = entries.iter().find(|entry| case_name(entry).ends_with(&format!("::{name}")));
        let entry = found.filter(|entry| entry.on == On::Any).with_context(|| format!("no case {name}"))?;
        let own =
            Case { name: format!("{}-{}", crio.case.name, name.replace('_', "-")), ..crio.case.clone() };
        let outcome = (entry.run)(own.clone()).await;
        let cleaned = own.clean_up().await;
        if let Err(error) = outcome.and(cleaned) {
            failed.push(format!("{name}: {error:#}"));
        }
    }
    ensure!(failed.is_empty(), "{}\n{}", failed.join("\n"), crio.log_tail());
    crio.close().await
}

async fn lifecycle_as_with_containerd(case: Case) -> Result<()> {
    as_with_containerd(&case, crate::lifecycle::cases(), LIFECYCLE).await
}

async fn streams_as_with_containerd(case: Case) -> Result<()> {
    as_with_containerd(&case, crate::streams::cases(), STREAMS).await
}

async fn containers_as_with_containerd(case: Case) -> Result<()> {
    as_with_containerd(&case, crate::container::cases(), CONTAINERS).await
}

async fn runs_a_pod(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let case = &crio.case;
    let pod = case.pod().await?;
    let (status, _) = case.cri.pod_status(&pod.id).await?;
    ensure!(status.metadata == pod.config.metadata, "{status:?}");
    let container = pod
        .start(shell(
            "c",
            "echo out; echo err >&2; trap 'exit 7' TERM; while :; do sleep 1000 & wait $!; done",
        ))
        .await?;
    container.logged("out").await?;
    ensure!(container.sh("hostname; echo kept >/file; cat /file").await? == "pod\nkept");
    case.cri.stop(&container.id, 30).await?;
    let ended = container.ended().await?;
    ensure!(ended.exit_code == 7, "{ended:?}");
    let logs = container.logs()?;
    ensure!((logs.stdout.as_str(), logs.stderr.as_str()) == ("out\n", "err\n"), "{logs:?}");
    case.cri.remove(&container.id).await?;
    let said = pod.output("cat /file 2>&1 || echo gone").await?;
    ensure!(said.ends_with("gone"), "{said}");
    case.remove(&pod.id).await?;
    crio.close().await
}

/// For a runtime of the type `vm`, CRI-O itself writes the log, and may tell of an exit before it has read the last output.
async fn keeps_much_output(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let pod = crio.case.pod().await?;
    let container = pod.start(shell("c", "yes 0123456789abcde | head -n 65536; echo last")).await?;
    ensure!(container.ended().await?.exit_code == 0);
    eventually("all of the log", PATIENCE, || async {
        let logs = container.logs()?.stdout;
        Ok((logs.ends_with("last\n") && logs.lines().count() == 65_537).then_some(()))
    })
    .await?;
    crio.close().await
}

async fn has_two_containers(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let pod = crio.case.pod().await?;
    let server = pod.start(shell("server", "echo bread >/page; exec httpd -f -p 8080 -h /")).await?;
    let client = pod.start(idle("client")).await?;
    eventually("the other container's server", PATIENCE, || async {
        Ok(client.sh("wget -q -O - http://127.0.0.1:8080/page").await.ok().filter(|page| page == "bread"))
    })
    .await?;
    server.sh("echo shared >/dev/shm/x").await?;
    ensure!(client.sh("cat /dev/shm/x; ls /page 2>/dev/null; echo $?").await? == "shared\n1");
    crio.case.cri.stop(&server.id, 0).await?;
    ensure!(client.sh("echo alive").await? == "alive");
    // The address is the one that CNI gave.
    let (status, _) = crio.case.cri.pod_status(&pod.id).await?;
    let ip = status.network.context("no network")?.ip;
    let has = client.sh("ip addr show eth0").await?;
    ensure!(!ip.is_empty() && has.contains(&ip), "{ip} is not in {has}");
    crio.close().await
}

/// The verbs of crictl, as in the first hour.
async fn takes_orders_of_crictl(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let [pod, container] = ["pod.json", "container.json"].map(|name| crio.path(name).display().to_string());
    let config = crio.case.pod_config();
    let json = |text: serde_json::Value| text.to_string();
    // kubelet's default. With CRI's, CRI-O's runc has a pause program.
    let security = serde_json::json!({"namespace_options": {"pid": 1}});
    let cgroup = crio.case.stack.env("SANDBOXER_CGROUP_PARENT")?;
    let metadata = config.metadata.context("metadata")?;
    fs::write(
        &pod,
        json(serde_json::json!({
            "metadata": {"name": metadata.name, "namespace": "e2e", "uid": metadata.uid, "attempt": 0},
            "labels": config.labels, "log_directory": crio.path("pod-logs"),
            "linux": {"cgroup_parent": cgroup, "security_context": security},
        })),
    )?;
    fs::write(
        &container,
        json(serde_json::json!({
            "metadata": {"name": "c"}, "image": {"image": BUSYBOX}, "log_path": "c.log",
            "command": ["sh", "-c", "echo hello; exec sleep 3600"],
            "linux": {"resources": {"memory_limit_in_bytes": 64 << 20}, "security_context": security},
        })),
    )?;
    let said =
        async |args: &[&str]| crio.crictl(args).await?.success().with_context(|| format!("crictl {args:?}"));
    let pod_id = said(&["runp", "--runtime", crio.case.handler, &pod]).await?;
    let id = said(&["create", &pod_id, &container, &pod]).await?;
    said(&["start", &id]).await?;
    eventually("the log", PATIENCE, || async { Ok((said(&["logs", &id]).await? == "hello").then_some(())) })
        .await?;
    ensure!(said(&["exec", "--sync", &id, "echo", "synced"]).await? == "synced");
    ensure!(said(&["exec", &id, "echo", "streamed"]).await? == "streamed");
    said(&["update", "--memory", &(96 << 20).to_string(), &id]).await?;
    let stats = said(&["stats", "-o", "json", &id]).await?;
    ensure!(stats.contains(&id) && stats.contains("workingSetBytes"), "{stats}");
    said(&["stop", &id]).await?;
    said(&["rm", &id]).await?;
    said(&["stopp", &pod_id]).await?;
    said(&["rmp", &pod_id]).await?;
    crio.close().await
}

async fn has_no_process_but_the_vmm(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let pod = crio.case.pod().await?;
    let container = pod.start(idle("c")).await?;
    crio.case.vmm_of(&pod.id).await?;
    let seen = container.sh("ls -d /proc/[0-9]*; cat /proc/1/comm").await?;
    ensure!(!seen.contains("pause"), "{seen}");
    for name in ["conmon", "containerd-shim"] {
        let found = crio.case.stack.processes(name)?;
        ensure!(found.is_empty(), "{name}: {found:?}");
    }
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(container.sh("uname -r").await? != kernel.trim());
    crio.close().await
}

async fn has_its_size(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let pod = crio
        .case
        .pod_with(|config| {
            config.annotations.insert("io.sandboxer.memory".into(), "320Mi".into());
            config.linux.get_or_insert_default().resources = Some(LinuxContainerResources {
                cpu_quota: 100_000,
                cpu_period: 100_000,
                ..Default::default()
            });
        })
        .await?;
    let said = pod.output("nproc; awk '/MemTotal/ { print $2 }' /proc/meminfo").await?;
    let said: Vec<u64> = said.lines().map(str::parse).collect::<Result<_, _>>()?;
    let [cpus, total_kib] = said[..] else { bail!("{said:?}") };
    ensure!(cpus == 1 && (280 << 10..324 << 10).contains(&total_kib), "{cpus} CPUs, {total_kib} KiB");
    crio.close().await
}

/// A pod's author cannot make one of its containers another pod's by CRI-O's annotations.
async fn joins_no_other_pod(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let victim = crio.case.pod().await?;
    let pod = crio
        .case
        .pod_with(|config| {
            config.annotations.insert("io.kubernetes.cri.sandbox-id".into(), victim.id.clone());
        })
        .await?;
    ensure!(pod.output("echo own").await? == "own");
    let mut config = idle("c");
    config.annotations.insert("io.kubernetes.cri-o.SandboxID".into(), victim.id.clone());
    let error = pod.start(config).await.err().context("it joined another pod")?;
    ensure!(error.message().contains("another UTS namespace"), "{error}");
    let refused = crio
        .case
        .pod_with(|config| {
            config.annotations.insert("io.kubernetes.cri-o.ContainerType".into(), "container".into());
            config.annotations.insert("io.kubernetes.cri-o.SandboxID".into(), victim.id.clone());
        })
        .await;
    ensure!(refused.is_err(), "a pod became a container of another");
    crio.close().await
}

async fn refuses_namespaces_of_the_host(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let with = async |pid: NamespaceMode, ipc: NamespaceMode| {
        let pod = crio.case.pod_with(|config| {
            let linux = config.linux.get_or_insert_default();
            let options =
                linux.security_context.get_or_insert_default().namespace_options.get_or_insert_default();
            (options.pid, options.ipc) = (pid.into(), ipc.into());
        });
        pod.await.err().map(|error| error.message().to_owned()).context("it was accepted")
    };
    let said = with(NamespaceMode::Node, NamespaceMode::Pod).await?;
    ensure!(said.contains("the host's PID namespace"), "{said}");
    let said = with(NamespaceMode::Container, NamespaceMode::Node).await?;
    ensure!(said.contains("the host's IPC namespace"), "{said}");
    // Of the host's network it has nothing.
    let pod = crio
        .case
        .pod_with(|config| {
            let linux = config.linux.get_or_insert_default();
            let options =
                linux.security_context.get_or_insert_default().namespace_options.get_or_insert_default();
            options.network = NamespaceMode::Node.into();
        })
        .await?;
    ensure!(pod.output("ls /sys/class/net").await? == "lo");
    crio.close().await
}

/// The block of docs/first-hour.md.
async fn does_what_the_page_says(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let (dir, endpoint) = (crio.path("page"), format!("unix://{}", crio.path("sock").display()));
    fs::create_dir(&dir)?;
    let cgroup = crio.case.stack.env("SANDBOXER_CGROUP_PARENT")?;
    let programs = std::env::var(PROGRAMS).unwrap_or_default();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap_or_default());
    let cgroup = cgroup.to_owned();
    let read = move || -> Result<String> {
        let page = Page::read("first-hour.md")?;
        let mut reader = page.at("crio", &dir)?;
        reader.set("PATH", path);
        // In this stack's control group, and of this CRI-O.
        let pod = dir.join("pod.json");
        let text = fs::read_to_string(&pod)?
            .replace("\"linux\": {}", &format!("\"linux\": {{\"cgroup_parent\": {cgroup:?}}}"));
        fs::write(&pod, text)?;
        let yaml = format!("runtime-endpoint: {endpoint}\nimage-endpoint: {endpoint}\ntimeout: 120\n");
        fs::write(dir.join("crictl.yaml"), yaml)?;
        let said = reader.run("run")?;
        reader.end()?;
        Ok(said)
    };
    let said = tokio::task::spawn_blocking(read).await??;
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(said.lines().next().is_some_and(|guest| !guest.is_empty() && guest != kernel.trim()), "{said}");
    crio.close().await
}

async fn outlives_worker_and_front(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let pod = crio.case.pod().await?;
    let container = pod
        .start(shell("c", "trap 'echo here' USR1; echo ready; while :; do sleep 1000 & wait $!; done"))
        .await?;
    container.logged("ready").await?;
    let vmms = only_vmm(&crio.case).await?;
    for round in 0..3 {
        crio.case.stack.kill(Victim::in_turn(round))?;
        ensure!(container.sh("kill -USR1 1; echo there").await? == "there", "round {round}");
        ensure!(crio.case.stack.vmms()? == vmms, "round {round}: the VMM is another one");
        ensure!(pod.ready().await?, "round {round}");
    }
    eventually("the log of all rounds", PATIENCE, || async {
        Ok((container.logs()?.stdout == "ready\nhere\nhere\nhere\n").then_some(()))
    })
    .await?;
    crio.close().await
}

async fn outlives_crio(case: Case) -> Result<()> {
    let mut crio = CriO::start(&case).await?;
    let pod = crio.case.pod().await?;
    let container = pod
        .start(shell(
            "c",
            "trap 'exit 7' TERM; trap 'echo here' USR1; echo ready; while :; do sleep 1000 & wait $!; done",
        ))
        .await?;
    container.logged("ready").await?;
    let vmms = only_vmm(&crio.case).await?;
    crio.end().await?;
    crio.start_daemon().await?;
    ensure!(container.sh("kill -USR1 1; echo there").await? == "there");
    ensure!(crio.case.stack.vmms()? == vmms && pod.ready().await?);
    container.logged("here").await?;
    crio.case.cri.stop(&container.id, 30).await?;
    ensure!(container.ended().await?.exit_code == 7);
    crio.close_after(1).await
}

async fn has_ended_when_its_vmm_dies(case: Case) -> Result<()> {
    let crio = CriO::start(&case).await?;
    let pod = crio.case.pod().await?;
    let container = pod.start(idle("c")).await?;
    kill(only_vmm(&crio.case).await?[0], Signal::SIGKILL)?;
    let ended = container.ended().await?;
    ensure!(ended.exit_code == 137 && ended.state() == ContainerState::ContainerExited, "{ended:?}");
    pod.not_ready().await?;
    crio.close().await
}
