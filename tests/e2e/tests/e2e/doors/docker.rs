//! `docker run` with sandboxer as its runtime, by docker's own daemon and command line, beside the same on runc.
//!
//! `make test-docker` builds both, and names their directories in `SANDBOXER_E2E_DOCKER`. Each case has a daemon of docker of its own
//! beside the stack's containerd. It has a network namespace and a `/run` of its own, so that bridges, packet filter and files of the
//! host are not touched.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sandboxer_e2e::case::{BUSYBOX, Case};
use sandboxer_e2e::eventually;
use sandboxer_e2e::page::Page;
use sandboxer_e2e::stack::Victim;
use serde_json::{Value, json};
use tokio::process::Command;

use super::{Ended, PATIENCE, only_vmm, run};

crate::cases![
    Any: runs_to_its_end, lives_detached, keeps_its_files_over_a_restart, has_a_terminal, has_directories_and_volumes, copies_files,
        publishes_a_port, finds_others_by_name, is_restarted_on_failure, has_an_init, is_limited, tells_what_it_uses, may_all_if_privileged,
        tells_what_cannot_be_started;
    Vm: does_what_the_page_says, has_its_size, refuses_what_a_guest_cannot_share;
    VmAlone: outlives_worker_and_front, outlives_dockerd, has_ended_when_its_vmm_dies
];

/// The variable with the directories of docker's programs, as in PATH.
const PROGRAMS: &str = "SANDBOXER_E2E_DOCKER";
/// The runtime's name in docker's configuration.
const RUNTIME: &str = "sandboxer";
/// How long docker's daemon may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// Prints that it runs, and that it is here on SIGUSR1, and exits with 7 on SIGTERM.
const WAITS: &str =
    "trap 'exit 7' TERM; trap 'echo here' USR1; echo ready; while :; do sleep 1000 & wait $!; done";

/// Makes what docker's daemon is in: a directory whose mounts containerd and the host see, and a network namespace.
const PREPARE: &str = "mkdir root exec
    for dir in root exec; do mount --bind $dir $dir; mount --make-shared $dir; done
    touch netns
    unshare --net=netns ip link set lo up";

/// Runs docker's daemon with the words after it, in namespaces of its own. Its plugins, the lock of iptables and others have fixed
/// paths in `/run`, of which it sees the stack's directory alone. `/sys` tells of the interfaces of whoever has mounted it.
const DAEMON: &str = r#"for at in / /run /sys; do if mountpoint -q $at; then mount --make-private $at; fi; done
    exec 8<"$STACK_RUN"
    mount -t tmpfs -o mode=0755 tmpfs /run
    mkdir "$STACK_RUN"
    mount --no-canonicalize --bind /proc/self/fd/8 "$STACK_RUN"
    exec 8<&-
    mkdir /run/cgroup
    mount --rbind /sys/fs/cgroup /run/cgroup
    mount -t sysfs sysfs /sys
    mount --move /run/cgroup /sys/fs/cgroup
    exec dockerd "$@""#;

/// Removes everything of a namespace of containerd whose case has failed.
const ABANDON: &str = "for id in $(ctr containers ls -q); do ctr tasks delete -f $id; ctr containers delete $id; done; \
                       ctr images rm --sync $(ctr images ls -q)";

/// Returns whether docker was built for this run.
pub fn is_there() -> bool {
    std::env::var_os(PROGRAMS).is_some()
}

/// Docker's daemon and command line.
struct Docker {
    case: Case,
    /// The namespace of docker's containers in containerd.
    namespace: String,
    dir: tempfile::TempDir,
    daemon: Option<Child>,
}

impl Drop for Docker {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            eprintln!("the end of {}:\n{}", self.path("log").display(), self.log_tail());
            let _ = daemon.kill().and_then(|()| daemon.wait());
            let mut abandon = std::process::Command::new("timeout");
            abandon.args(["60", "sh", "-c", ABANDON]).env("CONTAINERD_NAMESPACE", &self.namespace);
            abandon.env("CONTAINERD_ADDRESS", self.case.stack.env("CONTAINERD_ADDRESS").unwrap_or_default());
            abandon.env("PATH", self.programs());
            if let Err(error) = abandon.output() {
                eprintln!("cannot remove what is left in {}: {error}", self.namespace);
            }
        }
        for path in ["root", "exec", "netns"].map(|name| self.path(name)) {
            let _ = umount2(&path, MntFlags::MNT_DETACH);
        }
    }
}

impl Docker {
    async fn start(case: &Case) -> Result<Self> {
        let namespace = format!("door-{}", case.name);
        // In the stack's, which is removed with all mounts and processes of a run that was killed.
        let dir = tempfile::Builder::new().prefix("docker-").tempdir_in(case.stack.dir())?;
        let mut docker = Self { case: case.clone(), namespace, dir, daemon: None };
        let mut prepare = std::process::Command::new("sh");
        let prepared = prepare.args(["-ec", PREPARE]).current_dir(docker.dir.path()).output()?;
        ensure!(prepared.status.success(), "{}", String::from_utf8_lossy(&prepared.stderr));
        fs::write(docker.path("daemon.json"), docker.config()?.to_string())?;
        let image = case.stack.dir().join("images/busybox.tar");
        docker.ctr(&["images", "import", &image.to_string_lossy()]).await?.success()?;
        docker.start_daemon().await?;
        Ok(docker)
    }

    /// Returns docker's configuration: what our command prints for it.
    fn config(&self) -> Result<Value> {
        let mut config = json!({});
        if self.case.in_vm() {
            config = serde_json::from_str(&self.case.stack.cli(&["check", "--docker-config"])?)?;
        }
        // The default of a new installation.
        config["features"] = json!({"containerd-snapshotter": true});
        config["live-restore"] = json!(true);
        Ok(config)
    }

    async fn start_daemon(&mut self) -> Result<()> {
        let containerd = self.case.stack.env("CONTAINERD_ADDRESS")?;
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("log"))?;
        let at = |name: &str| self.path(name).display().to_string();
        let cgroup = format!("{}/{}", self.case.stack.env("SANDBOXER_CGROUP_PARENT")?, self.namespace);
        let mut daemon = std::process::Command::new("nsenter");
        daemon
            .arg(format!("--net={}", at("netns")))
            .args(["unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", DAEMON, "dockerd"])
            .args([
                "--config-file",
                &at("daemon.json"),
                "--data-root",
                &at("root"),
                "--exec-root",
                &at("exec"),
            ])
            .args(["--pidfile", &at("pid"), "--host", &format!("unix://{}", at("socket"))])
            .args(["--containerd", containerd, "--containerd-namespace", &self.namespace])
            .args(["--containerd-plugins-namespace", &format!("{}-plugins", self.namespace)])
            .args(["--cgroup-parent", &cgroup])
            .env("STACK_RUN", Path::new(containerd).parent().context("the stack's run directory")?)
            .env("PATH", self.programs())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.daemon = Some(daemon.spawn().context("cannot run docker's daemon")?);
        let pid = self.daemon.as_ref().map(Child::id).unwrap_or_default();
        eventually("docker's daemon", PATIENCE, || async {
            // What has ended is a zombie, without a program.
            ensure!(fs::read_link(format!("/proc/{pid}/exe")).is_ok(), "docker's daemon has ended");
            Ok(self.ended(&["version"], "").await?.success().ok())
        })
        .await
        .map(drop)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns PATH with docker's programs and the stack's.
    fn programs(&self) -> String {
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        format!("{}:{}:{}", variable(PROGRAMS), self.case.stack.dir().join("bin").display(), variable("PATH"))
    }

    fn env(&self) -> [(&'static str, String); 3] {
        [
            ("DOCKER_HOST", format!("unix://{}", self.path("socket").display())),
            ("DOCKER_CONFIG", self.path("client").display().to_string()),
            ("PATH", self.programs()),
        ]
    }

    async fn ended(&self, args: &[&str], input: &str) -> Result<Ended> {
        let mut command = Command::new("env");
        command.arg("docker").args(args).envs(self.env());
        let mut ended = run(command, input).await?;
        // About the host's kernel.
        ended.stderr =
            ended.stderr.split_inclusive('\n').filter(|line| !line.starts_with("WARNING: ")).collect();
        Ok(ended)
    }

    async fn ok(&self, args: &[&str]) -> Result<String> {
        self.ended(args, "").await?.success().with_context(|| format!("docker {args:?}"))
    }

    async fn ctr(&self, args: &[&str]) -> Result<Ended> {
        let mut command = Command::from(self.case.stack.command("ctr"));
        command.args(["-n", &self.namespace]).args(args);
        run(command, "").await
    }

    /// Runs a command in the network namespace of docker's daemon.
    async fn beside_it(&self, args: &[&str]) -> Result<Ended> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path("netns").display())).args(args);
        run(command, "").await
    }

    fn runtime(&self) -> &'static str {
        if self.case.in_vm() { RUNTIME } else { "runc" }
    }

    /// Runs `script` in a new container to its end.
    async fn run(&self, options: &[&str], script: &str, input: &str) -> Result<Ended> {
        let before = ["run", "--rm", "-i", "--runtime", self.runtime()];
        let args: Vec<_> =
            before.iter().chain(options).chain(&[BUSYBOX, "sh", "-c", script]).copied().collect();
        self.ended(&args, input).await
    }

    /// Starts a container that runs `script`, and goes on.
    async fn detached(&self, name: &str, options: &[&str], script: &str) -> Result<()> {
        let before = ["run", "-d", "--runtime", self.runtime(), "--name", name];
        let args: Vec<_> =
            before.iter().chain(options).chain(&[BUSYBOX, "sh", "-c", script]).copied().collect();
        self.ok(&args).await.map(drop)
    }

    async fn exec(&self, name: &str, script: &str) -> Result<Ended> {
        self.ended(&["exec", name, "sh", "-c", script], "").await
    }

    async fn sh(&self, name: &str, script: &str) -> Result<String> {
        self.exec(name, script).await?.success()
    }

    async fn inspect(&self, name: &str, format: &str) -> Result<String> {
        self.ok(&["inspect", "--format", format, name]).await
    }

    /// Waits until what docker tells of a container is `expected`.
    async fn until(&self, name: &str, format: &str, expected: &str) -> Result<()> {
        eventually(&format!("{format} of {name} to be {expected:?}"), PATIENCE, || async {
            Ok((self.inspect(name, format).await? == expected).then_some(()))
        })
        .await
    }

    async fn until_logged(&self, name: &str, expected: &str) -> Result<()> {
        eventually(&format!("the log of {name} to be {expected:?}"), PATIENCE, || async {
            Ok((self.ok(&["logs", name]).await? == expected).then_some(()))
        })
        .await
    }

    /// Stops a container as a user does, and removes it. Returns its exit code.
    async fn end_of(&self, name: &str) -> Result<String> {
        self.ok(&["stop", "--timeout", "60", name]).await?;
        let code = self.inspect(name, "{{.State.Status}} {{.State.ExitCode}}").await?;
        self.ok(&["rm", name]).await?;
        Ok(code)
    }

    /// Ends docker's daemon, as a service manager does.
    async fn end(&mut self) -> Result<()> {
        let mut daemon = self.daemon.take().context("docker's daemon does not run")?;
        let terminated = kill(Pid::from_raw(daemon.id().try_into()?), Signal::SIGTERM);
        let deadline = Instant::now() + ENDS_WITHIN;
        while daemon.try_wait()?.is_none() {
            if Instant::now() > deadline {
                self.daemon = Some(daemon);
                anyhow::bail!("docker's daemon does not end");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        terminated.context("cannot end docker's daemon")
    }

    fn log_tail(&self) -> String {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().filter(|line| !line.contains("level=info")).collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Ends docker, of whose containers none may be left.
    async fn close(mut self) -> Result<()> {
        // With --rm they go a moment after their command.
        eventually("no container to be left", PATIENCE, || async {
            Ok(self.ok(&["ps", "-aq"]).await?.is_empty().then_some(()))
        })
        .await?;
        self.end().await?;
        let images = self.ctr(&["images", "ls", "-q"]).await?.success()?;
        for image in images.lines() {
            self.ctr(&["images", "rm", "--sync", image]).await?.success()?;
        }
        Ok(())
    }
}

async fn runs_to_its_end(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    let ended = docker.run(&[], "head -c 10; echo to stderr >&2; exit 3", "from stdin").await?;
    ensure!(
        (ended.code, ended.stdout.as_str(), ended.stderr.as_str()) == (Some(3), "from stdin", "to stderr\n"),
        "{ended:?}"
    );
    let ended = docker
        .run(
            &["-e", "WHO=me", "-w", "/tmp", "-u", "1000", "-h", "door", "--read-only"],
            "echo $WHO $PWD $(id -u) $(hostname); touch /x 2>&1",
            "",
        )
        .await?;
    let (first, second) = ended.stdout.split_once('\n').with_context(|| format!("{ended:?}"))?;
    ensure!(first == "me /tmp 1000 door" && second.contains("Read-only file system"), "{ended:?}");
    ensure!(docker.run(&["--network", "none"], "ls /sys/class/net", "").await?.stdout == "lo");
    let kernel = docker.run(&[], "uname -r", "").await?.success()?;
    let own = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!((kernel == own.trim()) != case.in_vm(), "the kernel is {kernel}");
    docker.close().await
}

async fn lives_detached(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &["-h", "door"], WAITS).await?;
    docker.until_logged("one", "ready").await?;
    let ended = docker.exec("one", "hostname; echo wrong >&2; exit 5").await?;
    ensure!(
        (ended.code, ended.stdout.as_str(), ended.stderr.as_str()) == (Some(5), "door", "wrong\n"),
        "{ended:?}"
    );
    let ended = docker.ended(&["exec", "-i", "one", "wc", "-c"], &"x".repeat(70_000)).await?;
    ensure!(ended.success()?.trim() == "70000");
    docker.ok(&["exec", "-d", "one", "sh", "-c", "echo later >/later"]).await?;
    eventually("a detached exec", PATIENCE, || async {
        Ok((docker.exec("one", "cat /later").await?.stdout == "later").then_some(()))
    })
    .await?;
    docker.ok(&["pause", "one"]).await?;
    ensure!(docker.inspect("one", "{{.State.Status}}").await? == "paused");
    docker.ok(&["unpause", "one"]).await?;
    ensure!(docker.inspect("one", "{{.State.Status}}").await? == "running");
    if case.in_vm() {
        let vmms: Vec<_> = case.stack.vmms()?.iter().map(Pid::to_string).collect();
        let pid = docker.inspect("one", "{{.State.Pid}}").await?;
        ensure!(vmms.contains(&pid), "{pid} is none of {vmms:?}");
    }
    ensure!(docker.end_of("one").await? == "exited 7");
    docker.close().await
}

async fn keeps_its_files_over_a_restart(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &[], WAITS).await?;
    docker
        .sh("one", "echo kept >/kept; mkdir -p /etc/own; echo 1000 >/etc/own/id; chown 1000 /etc/own/id")
        .await?;
    docker.ok(&["restart", "--timeout", "60", "one"]).await?;
    ensure!(docker.sh("one", "cat /kept; stat -c %u /etc/own/id").await? == "kept\n1000");
    docker.ok(&["stop", "--timeout", "60", "one"]).await?;
    docker.ok(&["start", "one"]).await?;
    ensure!(docker.sh("one", "cat /kept").await? == "kept");
    docker.until_logged("one", "ready\nready\nready").await?;
    docker.ok(&["kill", "one"]).await?;
    docker.until("one", "{{.State.Status}} {{.State.ExitCode}}", "exited 137").await?;
    docker.ok(&["rm", "one"]).await?;
    docker.close().await
}

async fn has_a_terminal(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &[], WAITS).await?;
    let new = format!("run -it --rm --runtime {} {BUSYBOX} sh", docker.runtime());
    for args in [new.as_str(), "exec -it one sh"] {
        // A terminal of script's, in which docker runs as in a user's.
        let mut command = Command::new("script");
        let line = format!("stty rows 41 cols 97; exec docker {args}");
        command.args(["-qec", &line, "/dev/null"]).envs(docker.env());
        // The size arrives after the start.
        let typed = "for i in 1 2 3 4 5 6 7 8 9; do [ \"$(stty size)\" = '41 97' ] && break; sleep 1; done; stty size; tty; exit 4\n";
        let ended = run(command, typed).await?;
        ensure!(ended.code == Some(4), "{args}: {ended:?}");
        ensure!(ended.stdout.contains("41 97\r") && ended.stdout.contains("/dev/"), "{args}: {ended:?}");
    }
    docker.end_of("one").await?;
    docker.close().await
}

async fn has_directories_and_volumes(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    let data = docker.path("data");
    fs::create_dir(&data)?;
    fs::write(data.join("before"), "host")?;
    let at = |path: &str| format!("{}:{path}", data.display());
    let (rw, ro, file) = (at("/rw"), at("/ro:ro"), format!("{}/before:/file", data.display()));
    let options = ["-v", &rw, "-v", &ro, "-v", &file, "-v", "named:/named", "--tmpfs", "/scratch:size=1m"];
    docker.detached("one", &options, WAITS).await?;
    let output =
        docker.sh("one", "cat /ro/before /file; echo guest >/rw/made; echo kept >/named/file").await?;
    ensure!(output == "hosthost", "{output}");
    ensure!(fs::read_to_string(data.join("made"))? == "guest\n");
    fs::write(data.join("later"), "live")?;
    ensure!(docker.sh("one", "cat /rw/later").await? == "live");
    let refused = docker.exec("one", "echo x >/ro/made").await?.failure()?;
    ensure!(refused.contains("Read-only file system"), "{refused}");
    ensure!(docker.sh("one", "df -k /scratch | tail -n 1 | awk '{ print $1, $2 }'").await? == "tmpfs 1024");
    docker.end_of("one").await?;
    // The volume is there without its container, and has what the image had there.
    ensure!(docker.run(&["-v", "named:/n"], "cat /n/file", "").await?.success()? == "kept");
    ensure!(docker.run(&["-v", "copied:/etc"], "grep -c ^root: /etc/passwd", "").await?.success()? == "1");
    docker.ok(&["volume", "rm", "named", "copied"]).await?;
    docker.close().await
}

async fn copies_files(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &[], WAITS).await?;
    let (sent, back) = (docker.path("sent").display().to_string(), docker.path("back").display().to_string());
    fs::write(&sent, "from the host\n")?;
    docker.ok(&["cp", &sent, "one:/tmp/there"]).await?;
    ensure!(docker.sh("one", "cat /tmp/there; echo made in it >/made").await? == "from the host");
    docker.ok(&["cp", "one:/made", &back]).await?;
    ensure!(fs::read_to_string(&back)? == "made in it\n");
    let changed = docker.ok(&["diff", "one"]).await?;
    ensure!(changed.lines().any(|line| line == "A /made"), "{changed}");
    docker.ok(&["commit", "one", "kept:1"]).await?;
    docker.ok(&["stop", "--timeout", "60", "one"]).await?;
    docker.ok(&["cp", "one:/made", &back]).await?;
    docker.ok(&["rm", "one"]).await?;
    let output = docker
        .ok(&["run", "--rm", "--runtime", docker.runtime(), "kept:1", "cat", "/made", "/tmp/there"])
        .await?;
    ensure!(output == "made in it\nfrom the host", "{output}");
    docker.ok(&["rmi", "kept:1"]).await?;
    docker.close().await
}

async fn publishes_a_port(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &["-p", "8080:80"], WAITS).await?;
    docker.sh("one", "echo served >/tmp/page; httpd -h /tmp -p 80").await?;
    let bridge = docker.inspect("one", "{{range .NetworkSettings.Networks}}{{.Gateway}}{{end}}").await?;
    // By docker's proxy, and by the packet filter.
    for host in ["127.0.0.1", &bridge] {
        let url = format!("http://{host}:8080/page");
        let got = docker.beside_it(&["busybox", "wget", "-q", "-O", "-", &url]).await?;
        ensure!(got.stdout == "served", "{url}: {got:?}");
    }
    let pinged = format!("ping -c 1 -W 20 {bridge} >/dev/null && echo reached");
    ensure!(docker.sh("one", &pinged).await? == "reached");
    docker.end_of("one").await?;
    docker.close().await
}

async fn finds_others_by_name(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.ok(&["network", "create", "street"]).await?;
    docker.detached("shop", &["--network", "street"], WAITS).await?;
    docker.detached("one", &["--network", "street"], WAITS).await?;
    docker.sh("shop", "echo bread >/tmp/page; httpd -h /tmp -p 80").await?;
    let address = docker.inspect("shop", "{{.NetworkSettings.Networks.street.IPAddress}}").await?;
    let output = docker.sh("one", "nslookup shop; wget -q -O - http://shop/page").await?;
    ensure!(output.contains(&address) && output.ends_with("bread"), "{output}");
    ensure!(docker.sh("shop", "ping -c 1 -W 20 one >/dev/null && echo reached").await? == "reached");
    for name in ["shop", "one"] {
        docker.end_of(name).await?;
    }
    docker.ok(&["network", "rm", "street"]).await?;
    docker.close().await
}

async fn is_restarted_on_failure(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &["--restart", "on-failure:2"], "echo run; exit 9").await?;
    docker.until("one", "{{.RestartCount}} {{.State.Status}} {{.State.ExitCode}}", "2 exited 9").await?;
    docker.until_logged("one", "run\nrun\nrun").await?;
    docker.ok(&["rm", "one"]).await?;
    docker.close().await
}

async fn has_an_init(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    let ended = docker.run(&["--init"], "cat /proc/1/comm; exit 6", "").await?;
    ensure!((ended.code, ended.stdout.as_str()) == (Some(6), "docker-init"), "{ended:?}");
    docker.close().await
}

async fn is_limited(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    // tail keeps the one endless line it reads.
    docker.detached("one", &["--memory", "32m"], "tail /dev/zero").await?;
    docker.until("one", "{{.State.Status}} {{.State.ExitCode}}", "exited 137").await?;
    docker.until("one", "{{.State.OOMKilled}}", "true").await?;
    docker.ok(&["rm", "one"]).await?;
    let ended = docker.run(&["--ulimit", "nofile=321:654"], "ulimit -n; ulimit -Hn", "").await?;
    ensure!(ended.stdout == "321\n654", "{ended:?}");
    docker.close().await
}

async fn tells_what_it_uses(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &["--memory", "256m"], WAITS).await?;
    let used = docker.ok(&["stats", "--no-stream", "--format", "{{.MemUsage}}|{{.PIDs}}", "one"]).await?;
    let (memory, processes) = used.split_once('|').with_context(|| used.clone())?;
    ensure!(memory.ends_with("/ 256MiB") && !memory.starts_with("0B"), "{used}");
    ensure!(processes.parse::<u32>().is_ok_and(|count| (1..10).contains(&count)), "{used}");
    // On the host it is the VMM.
    let listed = docker.ok(&["top", "one"]).await?;
    let pid = docker.inspect("one", "{{.State.Pid}}").await?;
    ensure!(listed.lines().count() > 1 && listed.contains(&pid), "{pid} is not in {listed}");
    docker.end_of("one").await?;
    docker.close().await
}

async fn may_all_if_privileged(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    let script = "mkdir /mnt; mount -t tmpfs tmpfs /mnt && echo mounted";
    let output = docker.run(&["--privileged"], script, "").await?.success()?;
    ensure!(output == "mounted", "{output}");
    let refused = docker.run(&[], script, "").await?.failure()?;
    ensure!(refused.contains("denied") || refused.contains("not permitted"), "{refused}");
    docker.close().await
}

async fn tells_what_cannot_be_started(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    let run = ["run", "--rm", "--runtime", docker.runtime(), BUSYBOX];
    for (program, code) in [("/no/such/program", 127), ("/etc/passwd", 126)] {
        let args: Vec<_> = run.iter().chain(&[program]).copied().collect();
        let ended = docker.ended(&args, "").await?;
        ensure!(ended.code == Some(code) && ended.stderr.contains(program), "{program}: {ended:?}");
    }
    docker.detached("one", &[], WAITS).await?;
    let ended = docker.ended(&["exec", "one", "/no/such/program"], "").await?;
    let output = format!("{}{}", ended.stdout, ended.stderr);
    ensure!(ended.code == Some(127) && output.contains("/no/such/program"), "{ended:?}");
    docker.end_of("one").await?;
    docker.close().await
}

/// The block of docs/first-hour.md. Its wget is in the network namespace of docker's daemon.
async fn does_what_the_page_says(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    let bin = docker.path("bin");
    fs::create_dir(&bin)?;
    let text =
        format!("#!/bin/sh\nexec nsenter --net={} busybox wget \"$@\"\n", docker.path("netns").display());
    fs::write(bin.join("wget"), text)?;
    fs::set_permissions(bin.join("wget"), fs::Permissions::from_mode(0o755))?;
    let (env, dir) = (docker.env(), docker.path("page"));
    fs::create_dir(&dir)?;
    let read = move || -> Result<String> {
        let page = Page::read("first-hour.md")?;
        let mut reader = page.at("docker", &dir)?;
        for (name, value) in env {
            let value = if name == "PATH" { format!("{}:{value}", bin.display()) } else { value };
            reader.set(name, value);
        }
        let output = reader.run("run")?;
        reader.end()?;
        Ok(output)
    };
    let output = tokio::task::spawn_blocking(read).await??;
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(
        output.lines().next().is_some_and(|guest| !guest.is_empty() && guest != kernel.trim()),
        "{output}"
    );
    docker.close().await
}

async fn has_its_size(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    let own = std::thread::available_parallelism()?.get().min(2);
    let script = "nproc; awk '/MemTotal/ { print $2 }' /proc/meminfo";
    let output =
        docker.run(&["--cpus", &own.to_string(), "--memory", "384m"], script, "").await?.success()?;
    let numbers: Vec<u64> = output.lines().map(str::parse).collect::<Result<_, _>>()?;
    let [cpus, total_kib] = numbers[..] else { anyhow::bail!("{numbers:?}") };
    ensure!(cpus == own as u64, "{cpus} CPUs");
    ensure!((350 << 10..700 << 10).contains(&total_kib), "the guest has {total_kib} KiB");
    docker.close().await
}

async fn refuses_what_a_guest_cannot_share(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &[], WAITS).await?;
    let node = docker.path("node").display().to_string();
    let mut mknod = Command::new("mknod");
    mknod.arg(&node).args(["c", "4", "64"]);
    run(mknod, "").await?.success()?;
    let device = format!("--device={node}:/dev/mine");
    let device = device.as_str();
    for (options, says) in [
        (&["--pid=host"][..], "the host's PID namespace (--pid=host)"),
        (&["--ipc=host"], "the host's IPC namespace (--ipc=host)"),
        (&["--uts=host"], "the host's UTS namespace (--uts=host)"),
        (&["--network=host"], "the host's network (--network=host, --net-host)"),
        (&["--network=container:one"], "that of container or pod"),
        (&["--pid=container:one"], "another container's PID namespace (--pid=container:…)"),
        (&[device], "device /dev/mine (C 4:64)"),
        (&["--privileged", device], "device /dev/mine (C 4:64)"),
    ] {
        let refused = docker.run(options, "true", "").await?.failure()?;
        ensure!(refused.contains(says) && refused.contains("not available"), "{options:?}: {refused}");
    }
    docker.end_of("one").await?;
    docker.close().await
}

async fn outlives_worker_and_front(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &["-p", "8080:80"], WAITS).await?;
    docker.sh("one", "echo served >/tmp/page; httpd -h /tmp -p 80").await?;
    let vmms = only_vmm(&case).await?;
    ensure!(case.stack.processes("containerd-shim")?.is_empty(), "{vmms:?}");
    for round in 0..3 {
        case.stack.kill(Victim::in_turn(round))?;
        ensure!(docker.sh("one", "kill -USR1 1; echo here").await? == "here", "round {round}");
        ensure!(case.stack.vmms()? == vmms, "round {round}: the VMM is another one");
        let url = "http://127.0.0.1:8080/page";
        let got = docker.beside_it(&["busybox", "wget", "-q", "-O", "-", url]).await?;
        ensure!(got.stdout == "served", "round {round}: {got:?}");
    }
    docker.until_logged("one", "ready\nhere\nhere\nhere").await?;
    // A start is repeated to the next worker.
    for millis in [100, 600, 1500] {
        let started = docker.run(&[], "echo started", "");
        let killed = async {
            tokio::time::sleep(Duration::from_millis(millis)).await;
            case.stack.kill_worker()
        };
        let (started, killed) = tokio::join!(started, killed);
        killed?;
        ensure!(started?.success()? == "started", "after {millis} ms");
    }
    ensure!(docker.end_of("one").await? == "exited 7");
    docker.close().await
}

/// Docker's daemon keeps containers over its own restarts if its configuration says `live-restore`.
async fn outlives_dockerd(case: Case) -> Result<()> {
    let mut docker = Docker::start(&case).await?;
    docker.detached("one", &[], WAITS).await?;
    let vmms = only_vmm(&case).await?;
    docker.end().await?;
    docker.start_daemon().await?;
    ensure!(docker.sh("one", "kill -USR1 1; echo here").await? == "here");
    ensure!(case.stack.vmms()? == vmms);
    docker.until_logged("one", "ready\nhere").await?;
    ensure!(docker.end_of("one").await? == "exited 7");
    docker.close().await
}

async fn has_ended_when_its_vmm_dies(case: Case) -> Result<()> {
    let docker = Docker::start(&case).await?;
    docker.detached("one", &[], WAITS).await?;
    kill(only_vmm(&case).await?[0], Signal::SIGKILL)?;
    docker.until("one", "{{.State.Status}} {{.State.ExitCode}}", "exited 137").await?;
    docker.ok(&["start", "one"]).await?;
    ensure!(docker.sh("one", "echo again").await? == "again");
    ensure!(docker.end_of("one").await? == "exited 7");
    docker.close().await
}
