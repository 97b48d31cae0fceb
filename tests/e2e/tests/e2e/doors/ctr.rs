//! `ctr run`, and what else ctr does with a task: containers that no pod of CRI has.

use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::case::{BUSYBOX, Case};
use sandboxer_e2e::eventually;
use sandboxer_e2e::page::Page;
use sandboxer_e2e::stack::Victim;
use tokio::process::Command;

use super::{Ended, PATIENCE, only_vmm, run};

crate::cases![
    Any: runs_to_its_end, lives_detached, has_a_terminal, shares_a_directory, has_the_network_of_a_namespace,
        asks_the_name_server_of_its_namespace, shares_the_root_that_its_caller_has, refuses_what_is_gone;
    Vm: does_what_the_page_says, has_its_size, refuses_what_a_guest_cannot_share, publishes_its_events;
    VmAlone: outlives_worker_and_front, outlives_containerd, is_removed_when_its_vmm_dies
];

/// Prints that it runs, and exits with 7 on SIGTERM.
const WAITS: &str = "trap 'exit 7' TERM; echo ready; while :; do sleep 1000 & wait $!; done";

/// The containers of the cases.
const CONTAINERS: [&str; 3] = ["c", "second", "late"];

/// ctr in a namespace of containerd of its own.
struct Ctr {
    case: Case,
    namespace: String,
    /// Part of the ids of its containers.
    number: u32,
    /// Where runc puts containers: below the stack's own group.
    cgroup: String,
    dir: tempfile::TempDir,
    is_closed: bool,
}

/// Removes everything of the namespace of a case that failed.
impl Drop for Ctr {
    fn drop(&mut self) {
        const SCRIPT: &str = "for id in $(ctr containers ls -q); do ctr tasks delete -f $id; ctr containers delete $id; done; \
                              ctr images rm --sync $(ctr images ls -q); ctr namespaces rm $CONTAINERD_NAMESPACE";
        if self.is_closed {
            return;
        }
        let bin = self.case.stack.dir().join("bin");
        let mut command = std::process::Command::new("timeout");
        command.args(["60", "sh", "-c", SCRIPT]).env("CONTAINERD_NAMESPACE", &self.namespace);
        command.env("CONTAINERD_ADDRESS", self.case.stack.env("CONTAINERD_ADDRESS").unwrap_or_default());
        command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default()));
        if let Err(error) = command.output() {
            eprintln!("cannot remove what is left in {}: {error}", self.namespace);
        }
    }
}

impl Ctr {
    async fn new(case: &Case) -> Result<Self> {
        let namespace = format!("door-{}", case.name);
        let cgroup = format!("{}/{namespace}", case.stack.env("SANDBOXER_CGROUP_PARENT")?);
        let (number, dir) = (rand::random(), tempfile::tempdir()?);
        let ctr = Self { case: case.clone(), namespace, number, cgroup, dir, is_closed: false };
        let image = case.stack.dir().join("images/busybox.tar");
        ctr.ok(&["images", "import", &image.to_string_lossy()]).await?;
        Ok(ctr)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::from(self.case.stack.command("ctr"));
        command.args(["-n", &self.namespace]).args(args.iter().map(|word| self.id(word)));
        command
    }

    /// Returns the id of one of the case's containers; any other word as it is. The daemon knows containers by their ids alone, and
    /// cases run beside each other.
    fn id(&self, word: &str) -> String {
        match CONTAINERS.contains(&word) {
            true => format!("{word}-{}", self.number),
            false => word.to_owned(),
        }
    }

    async fn ended(&self, args: &[&str], input: &str) -> Result<Ended> {
        let mut ended = run(self.command(args), input).await?;
        // containerd's, at each call: of the host's cgroups.
        ended.stderr =
            ended.stderr.split_inclusive('\n').filter(|line| !line.contains("DEPRECATION")).collect();
        Ok(ended)
    }

    async fn ok(&self, args: &[&str]) -> Result<String> {
        self.ended(args, "").await?.success().with_context(|| format!("ctr {args:?}"))
    }

    /// Returns the arguments of `ctr run` up to the image, with `options` between.
    fn run_args<'a>(&'a self, options: &[&'a str], config: &'a str) -> Vec<&'a str> {
        let mut args = vec!["run", "--cgroup", &self.cgroup];
        match self.case.in_vm() {
            true => args.extend(["--runtime", "io.containerd.sandboxer.v1", "--runtime-config-path", config]),
            false => args.extend(["--runtime", "io.containerd.runc.v2"]),
        }
        args.extend(options);
        args.push(BUSYBOX);
        args
    }

    fn config(&self) -> Result<String> {
        Ok(self.case.stack.env("SANDBOXER_CONFIG")?.to_owned())
    }

    /// Runs `script` in a new container to its end.
    async fn run(&self, options: &[&str], script: &str, input: &str) -> Result<Ended> {
        let config = self.config()?;
        let options: Vec<_> = ["--rm"].iter().chain(options).copied().collect();
        let mut args = self.run_args(&options, &config);
        args.extend(["c", "sh", "-c", script]);
        self.ended(&args, input).await
    }

    /// Starts a container `id` that waits, and goes on.
    async fn detached(&self, id: &str, options: &[&str]) -> Result<()> {
        let config = self.config()?;
        let options: Vec<_> = ["-d", "--null-io"].iter().chain(options).copied().collect();
        let mut args = self.run_args(&options, &config);
        args.extend([id, "sh", "-c", WAITS]);
        self.ok(&args).await.map(drop)
    }

    async fn exec(&self, id: &str, script: &str) -> Result<Ended> {
        self.ended(&["tasks", "exec", "--exec-id", &exec_id(), id, "sh", "-c", script], "").await
    }

    async fn sh(&self, id: &str, script: &str) -> Result<String> {
        self.exec(id, script).await?.success()
    }

    /// Returns what `ctr tasks ls` says of a task: its pid and status.
    async fn task(&self, id: &str) -> Result<Option<(i32, String)>> {
        let listed = self.ok(&["tasks", "ls"]).await?;
        let line = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let task = line.into_iter().find(|words| words.first() == Some(&self.id(id).as_str()));
        task.map(|words| Ok((words[1].parse()?, words[2].to_owned()))).transpose()
    }

    async fn until(&self, id: &str, status: &str) -> Result<()> {
        eventually(&format!("task {id} to be {status}"), PATIENCE, || async {
            Ok(self.task(id).await?.filter(|(_, is)| is == status).map(drop))
        })
        .await
    }

    /// Ends a task as a user does. Returns its exit code.
    async fn end(&self, id: &str) -> Result<i32> {
        self.ok(&["tasks", "kill", "-s", "SIGTERM", id]).await?;
        self.until(id, "STOPPED").await?;
        self.deleted(id).await
    }

    /// Deletes a stopped task. Returns its exit code.
    async fn deleted(&self, id: &str) -> Result<i32> {
        let deleted = self.ended(&["tasks", "delete", id], "").await?;
        ensure!(deleted.code == Some(0), "{deleted:?}");
        self.ok(&["containers", "delete", id]).await?;
        // It tells the code only if it is another one than 0.
        let code = deleted.stderr.rsplit("non-zero exit code ").next().filter(|rest| *rest != deleted.stderr);
        let digits = |rest: &str| rest.chars().take_while(char::is_ascii_digit).collect::<String>();
        code.map_or(Ok(0), |rest| digits(rest).parse().with_context(|| format!("no code in {deleted:?}")))
    }

    /// Removes everything of this namespace.
    async fn close(mut self) -> Result<()> {
        let left = self.ok(&["containers", "ls", "-q"]).await?;
        for id in left.lines() {
            // It may have ended by itself.
            let _ = self.ended(&["tasks", "delete", "-f", id], "").await?;
            self.ok(&["containers", "delete", id]).await?;
        }
        let images = self.ok(&["images", "ls", "-q"]).await?;
        for image in images.lines() {
            self.ok(&["images", "rm", "--sync", image]).await?;
        }
        eventually("the namespace to be empty", PATIENCE, || async {
            Ok(self.ended(&["namespaces", "rm", &self.namespace], "").await?.success().ok())
        })
        .await?;
        self.is_closed = true;
        ensure!(left.is_empty(), "left by the case: {left}");
        Ok(())
    }
}

fn exec_id() -> String {
    format!("e{}", rand::random::<u32>())
}

async fn runs_to_its_end(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let ended = ctr.run(&[], "head -c 10; echo to stderr >&2; exit 3", "from stdin").await?;
    ensure!(
        (ended.code, ended.stdout.as_str(), ended.stderr.as_str()) == (Some(3), "from stdin", "to stderr\n"),
        "{ended:?}"
    );
    let ended = ctr
        .run(
            &["--env", "WHO=me", "--cwd", "/tmp", "--user", "1000"],
            "echo $WHO $PWD $(id -u); ls /sys/class/net",
            "",
        )
        .await?;
    ensure!(ended.stdout == "me /tmp 1000\nlo", "{ended:?}");
    ctr.close().await
}

async fn lives_detached(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    ctr.detached("c", &["--hostname", "door"]).await?;
    ensure!(ctr.task("c").await?.is_some_and(|(pid, status)| pid > 1 && status == "RUNNING"));
    let ended = ctr.exec("c", "hostname; echo wrong >&2; exit 5").await?;
    ensure!(
        (ended.code, ended.stdout.as_str(), ended.stderr.as_str()) == (Some(5), "door", "wrong\n"),
        "{ended:?}"
    );
    let execs = ["tasks", "exec", "--exec-id", &exec_id(), "c", "wc", "-c"];
    ensure!(ctr.ended(&execs, &"x".repeat(70_000)).await?.success()?.trim() == "70000");
    ctr.sh("c", "echo kept >/kept").await?;

    ctr.ok(&["tasks", "pause", "c"]).await?;
    ctr.until("c", "PAUSED").await?;
    ctr.ok(&["tasks", "resume", "c"]).await?;
    ctr.until("c", "RUNNING").await?;
    ensure!(ctr.sh("c", "cat /kept").await? == "kept");

    let metrics = ctr.ok(&["tasks", "metrics", "--format", "json", "c"]).await?;
    let metrics: serde_json::Value = serde_json::from_str(&metrics)?;
    let used = [&metrics["memory"]["usage"]["usage"], &metrics["memory"]["usage"]];
    ensure!(used.iter().any(|used| used.as_u64().is_some_and(|used| used > 0)), "{metrics}");
    ctr.ok(&["tasks", "ps", "c"]).await?;
    if case.in_vm() {
        let refused = ctr.ended(&["tasks", "checkpoint", "c"], "").await?.failure()?;
        ensure!(refused.contains("not available in a microVM pod"), "{refused}");
        let vmms = case.stack.vmms()?;
        ensure!(ctr.task("c").await?.is_some_and(|(pid, _)| vmms.iter().any(|vmm| vmm.as_raw() == pid)));
    }
    ensure!(ctr.end("c").await? == 7, "its exit code is lost");
    ctr.close().await
}

async fn has_a_terminal(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let config = ctr.config()?;
    let mut args = ctr.run_args(&["--rm", "-t"], &config);
    args.extend(["c", "sh"]);
    // A terminal of script's, in which ctr runs as in a user's.
    let program = case.stack.dir().join("bin/ctr");
    let mut line = format!("stty rows 41 cols 97; exec {} -n {}", program.display(), ctr.namespace);
    args.iter().for_each(|word| line += &format!(" '{}'", ctr.id(word)));
    let mut command = Command::new("script");
    command
        .args(["-qec", &line, "/dev/null"])
        .env("CONTAINERD_ADDRESS", case.stack.env("CONTAINERD_ADDRESS")?);
    // The size arrives after the start.
    let typed = "for i in 1 2 3 4 5 6 7 8 9; do [ \"$(stty size)\" = '41 97' ] && break; sleep 1; done; stty size; tty; exit 4\n";
    let ended = run(command, typed).await?;
    ensure!(ended.code == Some(4), "{ended:?}");
    ensure!(ended.stdout.contains("41 97\r") && ended.stdout.contains("/dev/pts/"), "{ended:?}");
    ctr.close().await
}

async fn shares_a_directory(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let dir = ctr.dir.path().join("data");
    fs::create_dir(&dir)?;
    fs::write(dir.join("before"), "host")?;
    let option =
        |at: &str, mode: &str| format!("type=bind,src={},dst={at},options=rbind:{mode}", dir.display());
    let (rw, ro) = (option("/rw", "rw"), option("/ro", "ro"));
    ctr.detached("c", &["--mount", &rw, "--mount", &ro]).await?;
    ensure!(ctr.sh("c", "cat /ro/before; echo guest >/rw/made").await? == "host");
    ensure!(fs::read_to_string(dir.join("made"))? == "guest\n");
    fs::write(dir.join("later"), "live")?;
    ensure!(ctr.sh("c", "cat /rw/later").await? == "live");
    let refused = ctr.exec("c", "echo x >/ro/made").await?.failure()?;
    ensure!(refused.contains("Read-only file system"), "{refused}");
    ctr.end("c").await?;
    ctr.close().await
}

/// A network namespace with an interface `eth0`, whose other end is in another one.
struct Namespaces(PathBuf);

/// The addresses of the two ends.
const ENDS: [&str; 2] = ["192.0.2.65", "192.0.2.66"];

impl Namespaces {
    fn new(dir: &Path) -> Result<Self> {
        let this = Self(dir.to_owned());
        let [of_container, peer] = [this.of_container(), this.peer()].map(|path| path.display().to_string());
        this.script(&format!(
            "touch {of_container} {peer}
             unshare --net={of_container} ip link set lo up
             unshare --net={peer} ip link set lo up
             nsenter --net={peer} ip link add eth1 type veth peer name eth0 netns {of_container}
             nsenter --net={peer} sh -c 'ip addr add {}/24 dev eth1; ip link set eth1 up'
             nsenter --net={of_container} sh -c 'ip addr add {}/24 dev eth0; ip link set eth0 up'",
            ENDS[1], ENDS[0]
        ))?;
        Ok(this)
    }

    fn of_container(&self) -> PathBuf {
        self.0.join("netns")
    }

    fn peer(&self) -> PathBuf {
        self.0.join("peer")
    }

    fn script(&self, text: &str) -> Result<()> {
        let output = std::process::Command::new("sh").args(["-ec", text]).output()?;
        ensure!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for path in [self.of_container(), self.peer()] {
            let _ = nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

async fn has_the_network_of_a_namespace(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let namespaces = Namespaces::new(ctr.dir.path())?;
    let at = format!("network:{}", namespaces.of_container().display());
    ctr.detached("c", &["--with-ns", &at]).await?;
    let output =
        ctr.sh("c", "ip -4 -o addr show eth0; ping -c 1 -W 20 192.0.2.66 >/dev/null && echo reached").await?;
    ensure!(output.contains(&format!("{}/24", ENDS[0])) && output.ends_with("reached"), "{output}");
    ctr.sh("c", "echo served >/tmp/page; busybox httpd -h /tmp -p 80").await?;
    let mut fetch = Command::new("nsenter");
    fetch.arg(format!("--net={}", namespaces.peer().display())).args([
        "busybox",
        "wget",
        "-q",
        "-O",
        "-",
        &format!("http://{}/page", ENDS[0]),
    ]);
    ensure!(run(fetch, "").await?.success()? == "served");
    if case.in_vm() {
        let config = ctr.config()?;
        let mut args = ctr.run_args(&["--rm", "--with-ns", &at], &config);
        args.extend(["second", "true"]);
        let refused = ctr.ended(&args, "").await?.failure()?;
        ensure!(refused.contains("is that of container or pod c"), "{refused}");
        ensure!(ctr.sh("c", "ping -c 1 -W 20 192.0.2.66 >/dev/null && echo reached").await? == "reached");
    }
    ctr.end("c").await?;
    ctr.close().await
}

/// A name server at an address of the loopback in a network namespace: it knows one name.
struct NameServer(Arc<AtomicBool>);

/// The address of docker's own name server.
const NAME_SERVER: &str = "127.0.0.11";

impl NameServer {
    /// Answers queries for an address with the second of [`ENDS`].
    fn start(namespace: &Path) -> Result<Self> {
        let namespace = fs::File::open(namespace)?;
        let (ends, listening) = (Arc::new(AtomicBool::new(false)), std::sync::mpsc::channel());
        let ended = ends.clone();
        std::thread::spawn(move || {
            let listen = || -> Result<UdpSocket> {
                setns(&namespace, CloneFlags::CLONE_NEWNET)?;
                let socket = UdpSocket::bind((NAME_SERVER, 53))?;
                socket.set_read_timeout(Some(Duration::from_millis(200)))?;
                Ok(socket)
            };
            let socket = listen();
            let _ = listening.0.send(socket.as_ref().map(drop).map_err(|error| format!("{error:#}")));
            let (Ok(socket), mut query) = (socket, [0; 512]) else { return };
            while !ended.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut query) else { continue };
                let _ = socket.send_to(&Self::answer(&query[..length]), from);
            }
        });
        listening.1.recv()?.map_err(anyhow::Error::msg)?;
        Ok(Self(ends))
    }

    fn answer(query: &[u8]) -> Vec<u8> {
        // Up to the end of the question: its name, type and class.
        let name = query[12..].iter().position(|byte| *byte == 0).unwrap_or_default();
        let question = &query[12..12 + name + 5];
        let is_for_address = question[name + 1..name + 3] == [0, 1];
        let mut answer =
            [&query[..2], &[0x81, 0x80, 0, 1, 0, u8::from(is_for_address), 0, 0, 0, 0], question].concat();
        if is_for_address {
            let address: std::net::Ipv4Addr = ENDS[1].parse().unwrap_or(std::net::Ipv4Addr::UNSPECIFIED);
            answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
            answer.extend(address.octets());
        }
        answer
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

async fn asks_the_name_server_of_its_namespace(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let namespaces = Namespaces::new(ctr.dir.path())?;
    let _server = NameServer::start(&namespaces.of_container())?;
    let file = ctr.dir.path().join("resolv.conf");
    fs::write(&file, format!("nameserver {NAME_SERVER}\n"))?;
    let at = format!("network:{}", namespaces.of_container().display());
    let mount = format!("type=bind,src={},dst=/etc/resolv.conf,options=rbind:ro", file.display());
    ctr.detached("c", &["--with-ns", &at, "--mount", &mount]).await?;
    let output = ctr.sh("c", "nslookup shop; ping -c 1 -W 20 shop >/dev/null && echo reached").await?;
    ensure!(output.contains(ENDS[1]) && output.ends_with("reached"), "{output}");
    ctr.end("c").await?;
    ctr.close().await
}

async fn shares_the_root_that_its_caller_has(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let root = ctr.dir.path().join("root");
    for dir in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
        fs::create_dir_all(root.join(dir))?;
    }
    fs::copy("/bin/busybox", root.join("bin/busybox"))?;
    for applet in ["sh", "cat", "sleep", "stat"] {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet))?;
    }
    fs::write(root.join("before"), "host\n")?;
    let (config, path) = (ctr.config()?, root.to_string_lossy().into_owned());
    for (id, says) in [("c", "host\n0"), ("second", "guest\n1000")] {
        let mut args = ctr.run_args(&["-d", "--null-io", "--env", "PATH=/bin", "--rootfs"], &config);
        args.pop();
        args.extend([path.as_str(), id, "sh", "-c", WAITS]);
        ctr.ok(&args).await?;
        let result = ctr.sh(id, "cat /before && stat -c %u /before && echo guest >/made && cat /later").await;
        // What the host writes later is there, too.
        ensure!(result.is_err(), "nobody has written it: {result:?}");
        fs::write(root.join("later"), "later\n")?;
        ensure!(
            ctr.sh(id, "cat /later; echo guest >/made; cat /before; stat -c %u /before").await?
                == format!("later\n{says}")
        );
        ensure!(fs::read_to_string(root.join("made"))? == "guest\n");
        fs::remove_file(root.join("later"))?;
        fs::rename(root.join("made"), root.join("before"))?;
        std::os::unix::fs::chown(root.join("before"), Some(1000), None)?;
        ctr.end(id).await?;
    }
    ctr.close().await
}

async fn refuses_what_is_gone(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let refused = ctr.run(&["--with-ns", "network:/run/netns/is-gone"], "true", "").await?.failure()?;
    ensure!(refused.contains("/run/netns/is-gone"), "{refused}");
    let refused = ctr
        .run(&["--mount", "type=bind,src=/is/gone,dst=/x,options=rbind:rw"], "true", "")
        .await?
        .failure()?;
    ensure!(refused.contains("/is/gone"), "{refused}");
    let config = ctr.config()?;
    let mut args = ctr.run_args(&["--rm"], &config);
    args.extend(["c", "/no/such/program"]);
    let refused = ctr.ended(&args, "").await?.failure()?;
    ensure!(refused.contains("/no/such/program"), "{refused}");
    ctr.close().await
}

/// The block of docs/first-hour.md, with a ctr that finds the stack's containerd, and the stack's daemon in its configuration.
async fn does_what_the_page_says(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let bin = ctr.dir.path().join("bin");
    fs::create_dir(&bin)?;
    let text = format!(
        "#!/bin/sh\n[ \"$1\" != run ] || {{ shift; set -- run --runtime-config-path {} \"$@\"; }}\nexec {} -a {} -n {} \"$@\"\n",
        ctr.config()?,
        case.stack.dir().join("bin/ctr").display(),
        case.stack.env("CONTAINERD_ADDRESS")?,
        ctr.namespace
    );
    fs::write(bin.join("ctr"), text)?;
    fs::set_permissions(bin.join("ctr"), fs::Permissions::from_mode(0o755))?;
    let path = format!("{}:{}", bin.display(), std::env::var("PATH")?);
    let dir = ctr.dir.path().to_owned();
    let read = move || -> Result<String> {
        let page = Page::read("first-hour.md")?;
        let mut reader = page.at("doors", &dir)?;
        reader.set("PATH", path);
        reader.run("ctr")
    };
    let output = tokio::task::spawn_blocking(read).await??;
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(
        output.lines().next().is_some_and(|guest| !guest.is_empty() && guest != kernel.trim()),
        "{output}"
    );
    ctr.close().await
}

async fn has_its_size(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let own = std::thread::available_parallelism()?.get().min(2);
    let output = ctr
        .run(
            &["--cpus", "2", "--memory-limit", "402653184"],
            "nproc; awk '/MemTotal/ { print $2 }' /proc/meminfo",
            "",
        )
        .await?
        .success()?;
    let numbers: Vec<u64> = output.lines().map(str::parse).collect::<Result<_, _>>()?;
    let [cpus, total_kib] = numbers[..] else { anyhow::bail!("{numbers:?}") };
    ensure!(cpus == own as u64, "{cpus} CPUs");
    ensure!((350 << 10..700 << 10).contains(&total_kib), "the guest has {total_kib} KiB");
    ctr.close().await
}

async fn refuses_what_a_guest_cannot_share(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    for (options, says) in [
        (&["--net-host"][..], "the host's network (--network=host, --net-host) is not available"),
        (&["--with-ns", "network:/proc/self/ns/net"], "is the host's"),
        (&["--with-ns", "pid:/proc/1/ns/pid"], "another container's PID namespace"),
        (&["--with-ns", "ipc:/proc/1/ns/ipc"], "another container's IPC namespace"),
    ] {
        let refused = ctr.run(options, "true", "").await?.failure()?;
        ensure!(refused.contains(says) && refused.contains("container c"), "{options:?}: {refused}");
    }
    ensure!(
        case.stack.pod_resources()?.iter().all(|resource| !resource.contains("netns")),
        "{:?}",
        case.stack.pod_resources()?
    );
    ctr.close().await
}

async fn publishes_its_events(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    let file = ctr.dir.path().join("events");
    let mut events = ctr.command(&["events"]);
    let mut listening = events.stdout(fs::File::create(&file)?).kill_on_drop(true).spawn()?;
    // It says nothing when it listens, so it is asked until it has heard one.
    let topics = ["/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete"];
    eventually("the events of a task", 2 * PATIENCE, || async {
        ctr.run(&[], "exit 9", "").await?;
        let heard = fs::read_to_string(&file)?;
        let of_task =
            |topic: &str| heard.lines().any(|line| line.contains(&format!(" {} {topic} ", ctr.namespace)));
        Ok(topics.iter().all(|topic| of_task(topic)).then_some(()))
    })
    .await?;
    listening.kill().await?;
    ctr.close().await
}

/// Returns whether these VMMs run. A template may be built beside them.
fn still_there(case: &Case, vmms: &[nix::unistd::Pid]) -> Result<bool> {
    let now = case.stack.vmms()?;
    Ok(vmms.iter().all(|vmm| now.contains(vmm)))
}

async fn outlives_worker_and_front(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    ctr.detached("c", &[]).await?;
    let vmms = only_vmm(&case).await?;
    ensure!(case.stack.processes("containerd-shim")?.is_empty(), "{vmms:?}");
    for round in 0..3 {
        case.stack.kill(Victim::in_turn(round))?;
        ensure!(ctr.sh("c", "echo here").await? == "here", "round {round}");
        ensure!(still_there(&case, &vmms)?, "round {round}: the VMM is another one");
        ensure!(ctr.task("c").await?.is_some_and(|(_, status)| status == "RUNNING"), "round {round}");
    }
    // A start is repeated to the next worker.
    for millis in [100, 600, 1500] {
        let config = ctr.config()?;
        let mut args = ctr.run_args(&["--rm"], &config);
        args.extend(["late", "sh", "-c", "echo started"]);
        let started = ctr.ended(&args, "");
        let killed = async {
            tokio::time::sleep(std::time::Duration::from_millis(millis)).await;
            case.stack.kill_worker()
        };
        let (started, killed) = tokio::join!(started, killed);
        killed?;
        ensure!(started?.success()? == "started", "after {millis} ms");
    }
    ensure!(ctr.end("c").await? == 7, "its exit code is lost");
    ctr.close().await
}

async fn outlives_containerd(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    ctr.detached("c", &[]).await?;
    let vmms = only_vmm(&case).await?;
    case.stack.end("containerd", Signal::SIGKILL).await?;
    case.stack.run_up()?;
    ctr.until("c", "RUNNING").await?;
    ensure!(ctr.sh("c", "echo here").await? == "here" && still_there(&case, &vmms)?);
    ensure!(ctr.end("c").await? == 7, "its exit code is lost");
    ctr.close().await
}

async fn is_removed_when_its_vmm_dies(case: Case) -> Result<()> {
    let ctr = Ctr::new(&case).await?;
    ctr.detached("c", &[]).await?;
    let vmms = only_vmm(&case).await?;
    kill(vmms[0], Signal::SIGKILL)?;
    ctr.until("c", "STOPPED").await?;
    ensure!(ctr.deleted("c").await? == 137);
    ctr.close().await
}
