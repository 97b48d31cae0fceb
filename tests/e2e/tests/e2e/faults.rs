//! Faults, and what became of the pods: each case adds its line to the ledger.
//!
//! In each, bystanders count aloud all the while: they stay ready, take execs, and no line of their logs is lost
//! or doubled.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_cri::v1::{ContainerConfig, Mount};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::bystander::Bystander;
use sandboxer_e2e::case::{Case, PATIENCE, idle, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::insist::{insist, nobody_there};
use sandboxer_e2e::kubelet::Kubelet;
use sandboxer_e2e::ledger::{self, Line};

crate::cases![
    VmAlone: killed_at_every_point, killed_at_random, memory_runs_out, clock_jumps, upgraded_under_pods, vmms_killed,
    containerd_killed, containerd_and_worker_killed, front_killed, disk_full, disk_read_only
];

/// A number that the environment may make larger, for long runs.
fn count(variable: &str, usual: usize) -> Result<usize> {
    match std::env::var(variable) {
        Ok(asked) => asked.parse().with_context(|| variable.to_owned()),
        Err(_) => Ok(usual),
    }
}

/// What a case has seen so far.
pub struct Seen<'a> {
    case: &'a Case,
    fault: &'a str,
    /// So often by now.
    pub times: usize,
    bystanders: Vec<Bystander>,
    /// Pods that the case itself ended, or that were in the making.
    pub others: usize,
    /// Lines of logs, each there once.
    lines: usize,
}

impl<'a> Seen<'a> {
    /// Starts `bystanders`.
    pub async fn begin(case: &'a Case, fault: &'a str, bystanders: usize) -> Result<Self> {
        let mut all = Vec::new();
        for _ in 0..bystanders {
            all.push(Bystander::start(case, 20_000).await?);
        }
        Ok(Self { case, fault, times: 0, bystanders: all, others: 0, lines: 0 })
    }

    /// The bystanders have not noticed.
    pub async fn check(&self) -> Result<()> {
        for (n, bystander) in self.bystanders.iter().enumerate() {
            bystander
                .check(self.case)
                .await
                .with_context(|| format!("bystander {n} after {} times: {}", self.times, self.fault))?;
        }
        Ok(())
    }

    /// Ends the bystanders, removes all pods, and notes what was seen.
    pub async fn end(mut self) -> Result<()> {
        self.end_pods().await?;
        self.close().await
    }

    /// Ends the bystanders and removes all pods.
    pub async fn end_pods(&mut self) -> Result<()> {
        for bystander in std::mem::take(&mut self.bystanders) {
            self.lines += bystander.end(self.case).await?;
            self.others += 1;
        }
        self.case.clean_up().await
    }

    /// Looks what is left, and notes what was seen.
    pub async fn close(self) -> Result<()> {
        let held = self.case.stack.left().await?;
        ensure!(held.is_empty(), "left: {}", held.join(", "));
        ledger::note(Line {
            fault: self.fault.to_owned(),
            times: self.times,
            pods: self.others,
            lost: 0,
            lines: self.lines,
            lines_lost: 0,
            left: held.len(),
            // `sandboxer-faults-the-case`.
            case: self.case.name.replace('-', "_").replacen('_', "::", 2),
            day: jiff::Timestamp::now().strftime("%F").to_string(),
        });
        Ok(())
    }
}

/// Waits until the pool is as full as it gets, so that what the daemon holds can be compared.
pub async fn settled(case: &Case) -> Result<()> {
    eventually("the pool to be full", PATIENCE, || async {
        Ok((case.stack.waiting()?.len() >= 2).then_some(()))
    })
    .await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}

/// A pod's whole life, with all that pods have. What a kubelet would not ask twice, it asks once.
pub async fn life(case: &Case, kubelet: &Kubelet) -> Result<()> {
    let settings = kubelet.files("configmap", "settings", &[("color", "red")])?;
    let scratch = kubelet.empty_dir("scratch")?;
    let host = case.stack.dir().join("hostpath");
    fs::create_dir_all(&host)?;
    fs::write(host.join("file"), "of the host")?;

    let config = case.pod_config();
    let pod = insist("start a pod", || case.cri.run_pod(&config, case.handler)).await?;
    let pod = case.pod_of(&pod, config);
    let mounted = [("/settings", &settings), ("/scratch", &scratch), ("/host", &host)];
    // Its input is none, so it ends by itself.
    let container = pod.start_at_last(with_mounts(shell("c", "echo begins; cat; exit 5"), &mounted)).await?;
    let waits = pod.start_at_last(with_mounts(idle("waits"), &mounted)).await?;
    let read = waits.sh("cat /settings/color /host/file; echo x > /scratch/x; cat /scratch/x").await?;
    ensure!(read == "redof the hostx", "{read}");
    let ended = container.ended().await?;
    ensure!(ended.exit_code == 5, "{ended:?}");
    ensure!(container.logs()?.stdout == "begins\n", "{:?}", container.logs()?);
    case.cri.stop(&waits.id, 30).await.context("stop a container")?;
    ensure!(waits.status().await?.exit_code == 0, "{:?}", waits.status().await?);
    case.cri.remove(&waits.id).await.context("remove a container")?;
    insist("stop the pod", || case.cri.stop_pod(&pod.id)).await?;
    insist("remove the pod", || case.cri.remove_pod(&pod.id)).await
}

fn with_mounts(mut config: ContainerConfig, mounts: &[(&str, &PathBuf)]) -> ContainerConfig {
    for (at, host) in mounts {
        config.mounts.push(Mount {
            container_path: (*at).to_owned(),
            host_path: host.display().to_string(),
            ..Default::default()
        });
    }
    config
}

// ── the worker ──────────────────────────────────────────────────────────────────────────────────

/// The daemon of the build with failure points in the place of the stack's own, for as long as this is there.
struct Failing<'a> {
    case: &'a Case,
    points: PathBuf,
    /// Points that a worker came by before there was a pod: some of them only the first one does.
    of_start: Vec<String>,
}

impl<'a> Failing<'a> {
    async fn start(case: &'a Case) -> Result<Self> {
        let (programs, points) = (case.stack.dir().join("failing-bin"), case.stack.dir().join("failpoints"));
        for dir in [&programs, &points] {
            fs::create_dir_all(dir)?;
        }
        fs::write(points.join("armed"), "")?;
        let built = fs::canonicalize(case.stack.dir().join("bin/sandboxer"))?;
        let built = built.parent().context("where the programs are")?;
        let failing = built.join("sandboxer-failing");
        ensure!(failing.exists(), "{} is not there: run `make build-failing`", failing.display());
        for name in [
            "sandboxer",
            "sandboxer-front",
            "sandboxer-cli",
            "sandboxer-share",
            "containerd-shim-sandboxer-v1",
        ] {
            let from = if name == "sandboxer" { &failing } else { &built.join(name) };
            let _ = fs::remove_file(programs.join(name));
            symlink(from, programs.join(name))?;
        }
        case.stack.end("sandboxer", Signal::SIGTERM).await?;
        case.stack.run_up_with(&[("SANDBOXER_BIN_DIR", &programs), ("SANDBOXER_FAILPOINTS", &points)])?;
        let mut failing = Self { case, points, of_start: Vec::new() };
        failing.of_start = failing.lines("passed")?;
        reached(case).await?;
        Ok(failing)
    }

    fn lines(&self, file: &str) -> Result<Vec<String>> {
        let text = fs::read_to_string(self.points.join(file)).unwrap_or_default();
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// Workers from the next one on die at these points, one each.
    fn arm(&self, points: &[String]) -> Result<()> {
        Ok(fs::write(self.points.join("armed"), points.join("\n") + "\n")?)
    }

    /// The worker's wall clock is so many seconds ahead from now on.
    fn set_clock(&self, ahead: i64) -> Result<()> {
        let new = self.points.join("clock.new");
        fs::write(&new, ahead.to_string())?;
        // Whole at once: it is read at any time.
        Ok(fs::rename(new, self.points.join("clock"))?)
    }

    pub async fn end(self) -> Result<()> {
        self.case.stack.end("sandboxer", Signal::SIGTERM).await?;
        self.case.stack.run_up()?;
        reached(self.case).await
    }
}

/// containerd connects to a new daemon with a back-off of at most 3 s.
async fn reached(case: &Case) -> Result<()> {
    let config = case.pod_config();
    let pod = insist("reach the daemon", || case.cri.run_pod(&config, case.handler)).await?;
    case.cri.stop_pod(&pod).await?;
    Ok(case.cri.remove_pod(&pod).await?)
}

async fn killed_at_every_point(case: Case) -> Result<()> {
    let failing = Failing::start(&case).await?;
    let outcome = at_every_point(&case, &failing).await;
    failing.end().await?;
    outcome
}

async fn at_every_point(case: &Case, failing: &Failing<'_>) -> Result<()> {
    let kubelet = Kubelet::of(case)?;
    // The second starts with a machine that the first one's claim has had replaced.
    life(case, &kubelet).await.context("with no fault")?;
    life(case, &kubelet).await.context("with no fault")?;
    let mut points = failing.lines("passed")?;
    points.retain(|point| !failing.of_start.contains(point));
    ensure!(points.len() > 80, "only {} points: {points:?}", points.len());

    let mut seen = Seen::begin(case, "worker killed at each point of a pod's life", 1).await?;
    failing.arm(&points)?;
    case.stack.kill_worker()?;
    let mut before = points.len();
    loop {
        life(case, &kubelet).await.with_context(|| {
            let armed = failing.lines("armed").unwrap_or_default();
            format!("killed at {:?}", points.get(points.len() - armed.len() - 1))
        })?;
        seen.others += 1;
        let left = failing.lines("armed")?.len();
        seen.times = points.len() - left;
        seen.check().await?;
        if left == 0 {
            break;
        }
        if left == before {
            // This point was the way of a life that went otherwise, as one with a full pool: on to the next.
            println!("not reached: {:?}", points.get(points.len() - left - 1));
            seen.times -= 1;
            case.stack.kill_worker()?;
        }
        before = left;
    }
    seen.end().await
}

/// So often the worker is killed at most while a pod lives.
const KILLS_IN_A_LIFE: usize = 4;

async fn killed_at_random(case: Case) -> Result<()> {
    let kills = count("SANDBOXER_E2E_RANDOM_KILLS", 10)?;
    let kubelet = Kubelet::of(&case)?;
    let mut seen = Seen::begin(&case, "worker killed at random", 2).await?;
    while seen.times < kills {
        let killed = AtomicUsize::new(0);
        let killer = async {
            // No more than these in one life: on a slow machine no pod's start would get through for ever.
            for _ in 0..KILLS_IN_A_LIFE.min(kills - seen.times) {
                // Longer than a second most of the time, or the front would pause before the next worker.
                tokio::time::sleep(Duration::from_millis(500 + rand::random::<u64>() % 1500)).await;
                // The one before may not be ready yet.
                killed.fetch_add(usize::from(case.stack.kill_worker().is_ok()), Ordering::Relaxed);
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            lived = life(&case, &kubelet) => lived.with_context(|| format!("after {} kills", seen.times))?,
            () = killer => {}
        }
        seen.others += 1;
        seen.times += killed.into_inner();
        seen.check().await?;
    }
    seen.end().await
}

/// The kernel gives the worker no more memory: it aborts, and the next one goes on.
async fn memory_runs_out(case: Case) -> Result<()> {
    let kubelet = Kubelet::of(&case)?;
    let mut seen = Seen::begin(&case, "worker out of memory", 1).await?;
    for _ in 0..3 {
        let worker = case.stack.worker()?;
        let statm = fs::read_to_string(format!("/proc/{worker}/statm"))?;
        let pages: u64 = statm.split(' ').next().context("statm")?.parse()?;
        let limit = (pages * 4096).to_string();
        let limited = std::process::Command::new("prlimit")
            .args(["--pid", &worker.to_string(), &format!("--as={limit}:{limit}")])
            .status()?;
        ensure!(limited.success(), "prlimit: {limited}");
        let mut lives = 0;
        while case.stack.worker().ok() == Some(worker) {
            // It may fail in part, with an error, as whoever has no memory may.
            let _ = life(&case, &kubelet).await;
            lives += 1;
            if lives > 5 {
                break;
            }
        }
        if case.stack.worker()? == worker {
            // It did with what it had; so be it.
            case.stack.kill_worker()?;
        }
        seen.times += 1;
        life(&case, &kubelet).await.context("after a worker without memory")?;
        seen.others += 1;
        seen.check().await?;
    }
    seen.end().await
}

/// Where the daemon's clock is set to, one after the other: so many seconds ahead of what it is.
const CLOCKS: [i64; 3] = [-3600, 86_400, 0];

async fn clock_jumps(case: Case) -> Result<()> {
    let failing = Failing::start(&case).await?;
    let outcome = with_jumping_clock(&case, &failing).await;
    failing.end().await?;
    outcome
}

async fn with_jumping_clock(case: &Case, failing: &Failing<'_>) -> Result<()> {
    let kubelet = Kubelet::of(case)?;
    let mut seen = Seen::begin(case, "wall clock jumps", 1).await?;
    for ahead in CLOCKS {
        let clock = || jiff::Timestamp::now().as_second() + ahead;
        let pod = case.pod().await?;
        let older = pod.start(shell("older", "trap 'exit 7' TERM; while :; do usleep 20000; done")).await?;
        failing.set_clock(ahead)?;
        seen.times += 1;
        life(case, &kubelet).await.with_context(|| format!("with the clock {ahead} s ahead"))?;
        let began = clock();
        let younger = case.pod().await?;
        let guest: i64 = younger.output("date +%s").await?.trim().parse()?;
        // To the minute: guests' clocks are their own, and those of an emulated machine are none too good.
        ensure!((began - 60..=clock() + 60).contains(&guest), "the guest says {guest}, the daemon {began}");
        seen.check().await?;

        case.stack.kill_worker()?;
        life(case, &kubelet).await.with_context(|| format!("taken up with the clock {ahead} s ahead"))?;
        seen.check().await?;
        // Its guest keeps the clock of its start; its end is told by the daemon's all the same.
        case.cri.stop(&older.id, 30).await?;
        let status = older.status().await?;
        ensure!(status.exit_code == 7, "{status:?}");
        ensure!((1..=clock()).contains(&(status.finished_at / 1_000_000_000)), "not over yet: {status:?}");
        for pod in [pod, younger] {
            case.cri.stop_pod(&pod.id).await?;
            case.cri.remove_pod(&pod.id).await?;
        }
        seen.others += 4;
    }
    seen.end().await
}

/// What a package's upgrade does: other programs at the same paths, and SIGHUP.
async fn upgraded_under_pods(case: Case) -> Result<()> {
    let built = fs::canonicalize(case.stack.dir().join("bin/sandboxer"))?;
    let built = built.parent().context("where the programs are")?.to_owned();
    let programs = case.stack.dir().join("upgraded-bin");
    fs::create_dir_all(&programs)?;
    let names =
        ["sandboxer", "sandboxer-front", "sandboxer-cli", "sandboxer-share", "containerd-shim-sandboxer-v1"];
    for name in names {
        fs::copy(built.join(name), programs.join(name))?;
    }
    case.stack.end("sandboxer", Signal::SIGTERM).await?;
    case.stack.run_up_with(&[("SANDBOXER_BIN_DIR", &programs)])?;
    reached(&case).await?;

    let pods = count("SANDBOXER_E2E_UPGRADE_PODS", 4)?;
    let mut seen = Seen::begin(&case, "worker upgraded to another build", pods).await?;
    for build in ["sandboxer-failing", "sandboxer"] {
        let before = case.stack.worker()?;
        // As dpkg does: beside, and renamed over.
        fs::copy(built.join(build), programs.join("sandboxer.new"))?;
        fs::rename(programs.join("sandboxer.new"), programs.join("sandboxer"))?;
        kill(case.stack.pid("sandboxer")?, Signal::SIGHUP)?;
        eventually("another worker", PATIENCE, || async {
            Ok(case.stack.worker().ok().filter(|worker| *worker != before))
        })
        .await?;
        seen.times += 1;
        seen.check().await?;
    }
    seen.end().await?;
    case.stack.end("sandboxer", Signal::SIGTERM).await?;
    case.stack.run_up()?;
    reached(&case).await
}

// ── what is around it ───────────────────────────────────────────────────────────────────────────

/// Each takes its own pod along, and no other.
async fn vmms_killed(case: Case) -> Result<()> {
    let mut seen = Seen::begin(&case, "VMM of another pod killed", 2).await?;
    for _ in 0..3 {
        let known = case.stack.vmms()?;
        let pod = case.pod().await?;
        let container = pod.start(idle("c")).await?;
        let victim = case.stack.vmms()?.into_iter().find(|pid| !known.contains(pid)).context("the VMM")?;
        kill(victim, Signal::SIGKILL)?;
        pod.not_ready().await?;
        container.ended().await?;
        case.cri.stop_pod(&pod.id).await?;
        case.cri.remove_pod(&pod.id).await?;
        seen.times += 1;
        seen.check().await?;
    }
    seen.end().await
}

async fn containerd_killed(case: Case) -> Result<()> {
    let mut seen = Seen::begin(&case, "containerd killed", 0).await?;
    kill_containerd(&mut seen, false).await?;
    seen.end().await
}

async fn containerd_and_worker_killed(case: Case) -> Result<()> {
    let mut seen = Seen::begin(&case, "containerd and worker killed at once", 0).await?;
    kill_containerd(&mut seen, true).await?;
    seen.end().await
}

/// containerd's own log files are its to continue, so that lines are not counted here.
async fn kill_containerd(seen: &mut Seen<'_>, worker: bool) -> Result<()> {
    let case = seen.case;
    let pod = case.pod().await?;
    let container = pod.start(shell("c", "trap 'exit 7' TERM; while :; do usleep 20000; done")).await?;
    seen.others += 1;
    for _ in 0..3 {
        if worker {
            case.stack.kill_worker()?;
        }
        case.stack.end("containerd", Signal::SIGKILL).await?;
        case.stack.run_up()?;
        eventually("pod ready again", PATIENCE, || async {
            Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
        })
        .await?;
        ensure!(container.sh("echo still here").await? == "still here");
        seen.times += 1;
    }
    case.cri.stop(&container.id, 30).await?;
    ensure!(container.status().await?.exit_code == 7, "{:?}", container.status().await?);
    Ok(())
}

/// containerd declares the containers dead, for its connections are gone; the pods take new ones.
async fn front_killed(case: Case) -> Result<()> {
    let mut seen =
        Seen::begin(&case, "front killed (pods stay; containerd ends their containers)", 0).await?;
    for _ in 0..2 {
        let pod = case.pod().await?;
        pod.start(idle("c")).await?;
        let vmms = case.stack.vmms()?;
        case.stack.end("sandboxer", Signal::SIGKILL).await?;
        case.stack.run_up()?;
        ensure!(case.stack.vmms()? == vmms, "a VMM was lost");
        eventually("pod ready again", PATIENCE, || async {
            Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
        })
        .await?;
        ensure!(pod.output("echo here").await? == "here");
        // containerd finds the end of its containers in an attempt of its own, and until then doesn't remove them.
        eventually("pod to be removed", PATIENCE, || async {
            let stopped = case.cri.stop_pod(&pod.id).await;
            let removed = case.cri.remove_pod(&pod.id).await;
            Ok((stopped.is_ok() && removed.is_ok()).then_some(()))
        })
        .await?;
        seen.times += 1;
        seen.others += 1;
    }
    seen.end().await
}

// ── the disk ────────────────────────────────────────────────────────────────────────────────────

/// The daemon's records on a file system of their own, for as long as this is there.
struct OwnDisk<'a> {
    case: &'a Case,
    records: PathBuf,
}

impl<'a> OwnDisk<'a> {
    async fn mount(case: &'a Case) -> Result<Self> {
        let records = case.stack.daemon_dirs()[1].join("pods");
        case.stack.end("sandboxer", Signal::SIGTERM).await?;
        mount(Some("tmpfs"), &records, Some("tmpfs"), MsFlags::empty(), Some("size=256k,mode=0700"))?;
        case.stack.run_up()?;
        reached(case).await?;
        Ok(Self { case, records })
    }

    fn read_only(&self, yes: bool) -> Result<()> {
        let mut flags = MsFlags::MS_REMOUNT;
        flags.set(MsFlags::MS_RDONLY, yes);
        Ok(mount(None::<&str>, &self.records, None::<&str>, flags, None::<&str>)?)
    }

    async fn unmount(self) -> Result<()> {
        self.case.stack.end("sandboxer", Signal::SIGTERM).await?;
        umount2(&self.records, MntFlags::empty())?;
        self.case.stack.run_up()?;
        reached(self.case).await
    }
}

/// No pod starts, the error says why, and those that are there go on, also through a worker's death.
async fn refused_for_the_disk(seen: &mut Seen<'_>, named: &str) -> Result<()> {
    let case = seen.case;
    for killed in [false, true] {
        if killed {
            case.stack.kill_worker()?;
        }
        let refused = loop {
            match case.cri.run_pod(&case.pod_config(), case.handler).await {
                Ok(_) => bail!("a pod was started without a record of it"),
                Err(error) if nobody_there(&error) => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(error) => break error,
            }
        };
        ensure!(refused.message().contains(named), "the error does not name the cause: {refused}");
        seen.times += 1;
        seen.check().await?;
    }
    Ok(())
}

async fn disk_full(case: Case) -> Result<()> {
    let disk = OwnDisk::mount(&case).await?;
    let mut seen = Seen::begin(&case, "disk of the records full", 1).await?;
    let filler = disk.records.join("filler");
    let full = || {
        ensure!(fs::write(&filler, vec![0; 1 << 20]).is_err(), "the disk takes a MiB");
        Ok(())
    };
    let outcome = without_room(&mut seen, "No space left", full, || Ok(fs::remove_file(&filler)?)).await;
    disk.unmount().await?;
    outcome?;
    seen.close().await
}

async fn disk_read_only(case: Case) -> Result<()> {
    let disk = OwnDisk::mount(&case).await?;
    let mut seen = Seen::begin(&case, "disk of the records read-only", 1).await?;
    let outcome =
        without_room(&mut seen, "Read-only", || disk.read_only(true), || disk.read_only(false)).await;
    disk.unmount().await?;
    outcome?;
    seen.close().await
}

/// Has the disk take nothing for a while, and then again.
async fn without_room(
    seen: &mut Seen<'_>,
    named: &str,
    take_nothing: impl FnOnce() -> Result<()>,
    take_again: impl FnOnce() -> Result<()>,
) -> Result<()> {
    take_nothing()?;
    let outcome = refused_for_the_disk(seen, named).await;
    take_again()?;
    outcome?;
    life(seen.case, &Kubelet::of(seen.case)?).await.context("with a disk that takes records again")?;
    seen.end_pods().await
}
