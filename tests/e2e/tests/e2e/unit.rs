//! The unit as it is installed, under a systemd: only where that is process 1, which `scripts/node/systemd.sh` sees to.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sandboxer_e2e::bystander::Bystander;
use sandboxer_e2e::case::{Case, PATIENCE};
use sandboxer_e2e::eventually;
use sandboxer_e2e::insist::insist;

use crate::faults::streams::Streams;
use crate::faults::worker::kills_at_random;

crate::cases![Systemd: reloads_crashes_upgrades_and_restarts, any_of_our_processes_killed, killed_at_random];

const UNIT: &str = "sandboxer.service";
const DROP_IN: &str = "/etc/systemd/system/sandboxer.service.d";
const PROGRAMS: [&str; 4] = ["sandboxer", "sandboxer-front", "sandboxer-cli", "sandboxer-share"];

/// The service, in the place of the stack's own daemon for as long as this is there.
struct Service<'a> {
    case: &'a Case,
    built: PathBuf,
}

impl<'a> Service<'a> {
    async fn start(case: &'a Case) -> Result<Self> {
        let daemon = fs::canonicalize(case.stack.dir().join("bin/sandboxer"))?;
        let built = daemon.parent().context("where the programs are")?.to_owned();
        for program in PROGRAMS {
            install(&built.join(program), &Path::new("/usr/bin").join(program))?;
        }
        let clone = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        fs::create_dir_all("/etc/sandboxer")?;
        fs::copy(case.stack.dir().join("sandboxer/config.toml"), "/etc/sandboxer/config.toml")?;
        fs::copy(
            clone.join("vmm-configs/systemd").join(UNIT),
            Path::new("/usr/lib/systemd/system").join(UNIT),
        )?;
        // The stack's configuration has its own run_dir.
        fs::create_dir_all(DROP_IN)?;
        let socket = case.stack.variable("SANDBOXER_SOCKET").context("the stack names no socket")?;
        let text = format!("[Service]\nEnvironment=SANDBOXER_SOCKET={socket}\n");
        fs::write(Path::new(DROP_IN).join("socket.conf"), text)?;
        case.stack.end("sandboxer", Signal::SIGTERM).await?;
        systemctl(&["daemon-reload"])?;
        systemctl(&["start", UNIT])?;
        let service = Self { case, built };
        service.answers().await?;
        Ok(service)
    }

    /// The main process, which systemd has for the service: the front.
    fn main(&self) -> Result<Pid> {
        let main: i32 = systemctl(&["show", "-P", "MainPID", UNIT])?.trim().parse()?;
        ensure!(main > 0, "the service has no main process now");
        Ok(Pid::from_raw(main))
    }

    /// Process of the worker behind it; waits until that answers.
    fn worker(&self) -> Result<Pid> {
        let version = self.case.stack.cli_json(&["version"])?;
        let pid =
            |name: &str| version["daemon"][name].as_i64().with_context(|| format!("no {name} in {version}"));
        ensure!(pid("keeper_pid")? == 0, "systemd is the keeper: {version}");
        let main = self.main()?;
        ensure!(pid("front_pid")? == i64::from(main.as_raw()), "the main process is {main}: {version}");
        Ok(Pid::from_raw(pid("worker_pid")?.try_into()?))
    }

    /// Returns all processes of the daemon: those that run its programs.
    fn ours(&self) -> Result<Vec<Pid>> {
        let mut ours = Vec::new();
        for process in fs::read_dir("/proc")? {
            let process = process?;
            let Some(pid) = process.file_name().to_str().and_then(|pid| pid.parse().ok()) else { continue };
            let program = fs::read_link(process.path().join("exe")).unwrap_or_default();
            let program = program.to_string_lossy();
            let program = program.trim_end_matches(" (deleted)");
            if ["/usr/bin/sandboxer", "/usr/bin/sandboxer-front"].contains(&program) {
                ours.push(Pid::from_raw(pid));
            }
        }
        ensure!(ours.len() >= 2, "there are no front and worker now");
        Ok(ours)
    }

    /// Kills the worker, the front, both, or all processes of the daemon, in turns.
    fn kill(&self, round: usize) -> Result<()> {
        let (main, worker) = (self.main()?, self.worker()?);
        let victims = match round % 5 {
            0 => vec![worker],
            1 => vec![main],
            2 => vec![main, worker],
            3 => vec![worker, main],
            _ => self.ours()?,
        };
        for victim in victims {
            // The worker ends with its front.
            let _ = kill(victim, Signal::SIGKILL);
        }
        Ok(())
    }

    /// Waits until containerd can start a pod with it, and removes that.
    async fn answers(&self) -> Result<()> {
        let config = self.case.pod_config();
        let pod = insist("reach the service", || self.case.cri.run_pod(&config, self.case.handler)).await?;
        self.case.remove(&pod).await
    }

    /// Waits for another worker than this one.
    async fn replaced(&self, worker: Pid) -> Result<Pid> {
        eventually("another worker", PATIENCE, || async {
            Ok(self.worker().ok().filter(|now| *now != worker))
        })
        .await
    }

    async fn end(self) -> Result<()> {
        systemctl(&["stop", UNIT])?;
        // The unit keeps it for pods; there are none.
        fs::remove_dir_all("/run/sandboxer")?;
        fs::remove_dir_all(DROP_IN)?;
        self.case.stack.run_up()?;
        self.answers().await
    }
}

async fn reloads_crashes_upgrades_and_restarts(case: Case) -> Result<()> {
    with_service(&case, async |service: &Service<'_>| story(&case, service).await).await
}

async fn with_service(case: &Case, test: impl AsyncFnOnce(&Service<'_>) -> Result<()>) -> Result<()> {
    let service = Service::start(case).await?;
    let outcome = test(&service).await;
    if outcome.is_err() {
        eprintln!("{}", run("journalctl", &["--no-pager", "-n", "40", "-u", UNIT]).unwrap_or_default());
    }
    service.end().await?;
    outcome
}

/// In each of all ways: the worker, the front, both in either order, and all. Streams are open, and containers count aloud.
async fn any_of_our_processes_killed(case: Case) -> Result<()> {
    with_service(&case, async |service: &Service<'_>| {
        let bystander = Bystander::start(&case, 20_000).await?;
        let pod = case.pod().await?;
        let mut streams = Streams::open(&case, &pod).await?;
        let vmms = case.stack.vmms()?;
        for round in 0..5 {
            let worker = service.worker()?;
            service.kill(round)?;
            let killed = || format!("after kill {round}");
            service.replaced(worker).await.with_context(killed)?;
            bystander.check().await.with_context(killed)?;
            streams.check().await.with_context(killed)?;
            ensure!(case.stack.vmms()? == vmms, "a VMM was lost {}", killed());
        }
        service.answers().await?;
        bystander.end(&case).await?;
        streams.end().await?;
        case.remove(&pod.id).await
    })
    .await
}

async fn killed_at_random(case: Case) -> Result<()> {
    const FAULT: &str = "under systemd, worker, front, both or all processes of the daemon killed at random";
    with_service(&case, async |service: &Service<'_>| {
        kills_at_random(&case, FAULT, |round| service.kill(round)).await
    })
    .await
}

async fn story(case: &Case, service: &Service<'_>) -> Result<()> {
    let main = service.main()?;
    check_capabilities(main)?;
    let bystander = Bystander::start(case, 20_000).await?;

    // Both are reloaded, and a worker of another build: no container notices.
    let mut worker = service.worker()?;
    systemctl(&["reload", UNIT])?;
    worker = service.replaced(worker).await?;
    bystander.check().await.context("after a reload")?;
    let other = another_build(&service.built.join("sandboxer"), &case.stack.dir().join("another-build"))?;
    install(&other, Path::new("/usr/bin/sandboxer"))?;
    systemctl(&["reload", UNIT])?;
    worker = service.replaced(worker).await?;
    let length = fs::metadata(format!("/proc/{worker}/exe"))?.len();
    ensure!(length == fs::metadata(&other)?.len(), "the worker is still the one that was replaced");
    bystander.check().await.context("after an upgrade")?;
    // A front that refuses its place: systemd hears of it, and all continues.
    install(Path::new("/bin/false"), Path::new("/usr/bin/sandboxer-front"))?;
    ensure!(systemctl(&["reload", UNIT]).is_err(), "a reload that changed nothing has succeeded");
    install(&service.built.join("sandboxer-front"), Path::new("/usr/bin/sandboxer-front"))?;
    bystander.check().await.context("after a reload that failed")?;
    ensure!(service.main()? == main, "the main process was replaced");

    // A restart, by systemd's own means, with the store.
    worker = service.worker()?;
    systemctl(&["restart", UNIT])?;
    service.replaced(worker).await?;
    bystander.check().await.context("after a restart")?;

    // Programs that do not start for a while, longer than systemd tries by default: it goes on to try.
    install(Path::new("/bin/false"), Path::new("/usr/bin/sandboxer"))?;
    kill(service.main()?, Signal::SIGKILL)?;
    eventually("ten failed starts", PATIENCE, || async {
        let restarts = systemctl(&["show", "-P", "NRestarts", UNIT])?;
        Ok((restarts.trim().parse::<u32>()? >= 10).then_some(()))
    })
    .await?;
    install(&service.built.join("sandboxer"), Path::new("/usr/bin/sandboxer"))?;
    service.replaced(worker).await.context("after programs that do not start")?;
    bystander.check().await.context("after programs that do not start")?;
    bystander.end(case).await?;

    // A stop closes containerd's connections: containers end for it, and pods go on.
    let pod = case.pod().await?;
    let vmms = case.stack.vmms()?;
    systemctl(&["stop", UNIT])?;
    ensure!(case.stack.vmms()? == vmms, "a VMM ended with the service");
    systemctl(&["start", UNIT])?;
    service.answers().await.context("after a stop and a start")?;
    ensure!(case.stack.vmms()? == vmms, "a VMM was lost");
    ensure!(pod.ready().await?, "the pod is not ready");
    Ok(())
}

/// The unit's bound is what the process can ever have.
fn check_capabilities(main: Pid) -> Result<()> {
    let words = systemctl(&["show", "-P", "CapabilityBoundingSet", UNIT])?.split_whitespace().count();
    let status = fs::read_to_string(format!("/proc/{main}/status"))?;
    let bound = status.lines().find_map(|line| line.strip_prefix("CapBnd:")).context("no CapBnd")?;
    let bound = u64::from_str_radix(bound.trim(), 16)?;
    ensure!(bound.count_ones() as usize == words, "{bound:x} are not the unit's {words} capabilities");
    Ok(())
}

/// Makes a program that does the same and is told from `program` by its length. The daemon with failpoints would do, but a node need
/// not have it.
fn another_build(program: &Path, at: &Path) -> Result<PathBuf> {
    fs::copy(program, at)
        .with_context(|| format!("cannot copy {} to {}", program.display(), at.display()))?;
    let length = fs::metadata(at)?.len();
    fs::File::options().write(true).open(at)?.set_len(length + 1)?;
    Ok(at.to_owned())
}

/// As a package's installation does it: the file that runs stays whole.
fn install(program: &Path, at: &Path) -> Result<()> {
    let new = at.with_extension("new");
    fs::copy(program, &new).with_context(|| format!("cannot install {}", at.display()))?;
    Ok(fs::rename(&new, at)?)
}

fn systemctl(arguments: &[&str]) -> Result<String> {
    run("systemctl", arguments)
}

fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output().with_context(|| program.to_owned())?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), words.trim());
    Ok(String::from_utf8(output.stdout)?)
}
