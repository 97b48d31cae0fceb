//! The worker dies, at any point, or is replaced; or its world is not what it was.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::case::{Case, PATIENCE, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::failing::{Failing, arm, reached};
use sandboxer_e2e::kubelet::Kubelet;
use sandboxer_e2e::stack::Victim;

use super::streams::{Streams, some_moment};
use super::{Seen, life};

/// Returns a number that the environment may make larger, for long runs.
pub fn count(variable: &str, usual: usize) -> Result<usize> {
    match std::env::var(variable) {
        Ok(number) => number.parse().with_context(|| variable.to_owned()),
        Err(_) => Ok(usual),
    }
}

pub async fn killed_at_every_point(case: Case) -> Result<()> {
    let failing = Failing::start(&case, None).await?;
    let outcome = at_every_point(&case, &failing).await;
    failing.end().await?;
    outcome
}

async fn at_every_point(case: &Case, failing: &Failing<'_>) -> Result<()> {
    let kubelet = Kubelet::new(case)?;
    // The second starts with a VM that the first one's claim has had replaced.
    life(case, &kubelet).await.context("with no fault")?;
    life(case, &kubelet).await.context("with no fault")?;
    let (points, most_lives) = match Story::recorded()? {
        Some(points) => (points, MAX_LIVES_OF_A_REPLAY),
        None => (points_of_a_life(failing)?, 1),
    };
    let (story, mut recorded, mut lives) = (Story::begin()?, 0, 0);

    let mut seen = Seen::begin(case, "worker killed at each point of a pod's life", 1).await?;
    // The worker that takes the last line, which is no point, shows that its predecessor died at the last point.
    let armed: Vec<String> = points.iter().cloned().chain(["no point".to_owned()]).collect();
    arm(&case.stack, &armed)?;
    case.stack.kill_worker()?;
    let mut before = armed.len();
    loop {
        life(case, &kubelet).await.with_context(|| {
            let left = failing.lines("armed").unwrap_or_default().len();
            format!("killed at {:?}", armed.get(armed.len() - left - 1))
        })?;
        seen.others += 1;
        let left = failing.lines("armed")?.len();
        seen.times = armed.len() - left - 1;
        seen.check().await?;
        // The worker that lives now has taken a line, too, and has not died at it yet.
        let died = recorded.max(armed.len() - left - 1);
        points[recorded..died].iter().try_for_each(|point| story.tell(Story::KILLED, point))?;
        recorded = died;
        if left == 0 {
            break;
        }
        lives = if left == before { lives + 1 } else { 0 };
        if lives == most_lives {
            // This point belongs to another course of events, such as a full pool: go on to the next.
            story.tell(Story::NOT_REACHED, &points[died])?;
            println!("not reached: {:?}", points[died]);
            (recorded, lives) = (recorded + 1, 0);
            seen.times -= 1;
            case.stack.kill_worker()?;
        }
        before = left;
    }
    seen.end().await
}

/// Returns the points that workers came by since there was a pod, or each Nth of them.
fn points_of_a_life(failing: &Failing<'_>) -> Result<Vec<String>> {
    let mut points = failing.lines("passed")?;
    points.retain(|point| !failing.of_start.contains(point));
    ensure!(points.len() > 80, "only {} points: {points:?}", points.len());
    let every = count("SANDBOXER_E2E_EVERY_NTH_POINT", 1)?.max(1);
    Ok(points.into_iter().step_by(every).collect())
}

/// Tasks of one life run side by side, and one life may not come by a point that another came by, such as those of a new VM of the
/// pool. A replay waits for so many lives.
const MAX_LIVES_OF_A_REPLAY: usize = 10;

/// What became of each point, in its order, in the file that `SANDBOXER_E2E_STORY` names: so that it can be replayed, and compared.
struct Story(Option<PathBuf>);

impl Story {
    const KILLED: &str = "killed at";
    const NOT_REACHED: &str = "not reached";

    /// Returns the points at which workers died in an earlier run, in their order: `SANDBOXER_E2E_REPLAY` names its story.
    fn recorded() -> Result<Option<Vec<String>>> {
        let Some(file) = std::env::var_os("SANDBOXER_E2E_REPLAY") else { return Ok(None) };
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let killed = |line: &str| Some(line.strip_prefix(Self::KILLED)?.trim_start().to_owned());
        let points: Vec<_> = text.lines().filter_map(killed).collect();
        ensure!(!points.is_empty(), "{} names no point", file.display());
        Ok(Some(points))
    }

    fn begin() -> Result<Self> {
        let file = std::env::var_os("SANDBOXER_E2E_STORY").map(PathBuf::from);
        file.iter().try_for_each(|file| fs::write(file, ""))?;
        Ok(Self(file))
    }

    fn tell(&self, what: &str, point: &str) -> Result<()> {
        use std::io::Write;
        let Some(file) = &self.0 else { return Ok(()) };
        let mut file = fs::OpenOptions::new().append(true).open(file)?;
        Ok(writeln!(file, "{what} {point}")?)
    }
}

/// So many kills there are at most while a pod lives.
const KILLS_IN_A_LIFE: usize = 4;

/// Worker, front, or both.
pub async fn killed_at_random(case: Case) -> Result<()> {
    let kill = |round| case.stack.kill(Victim::in_turn(round)).map(drop);
    kills_at_random(&case, "worker, front or both killed at random", kill).await
}

/// Kills something, again and again, while a pod lives, others count aloud, and streams are open.
pub async fn kills_at_random(case: &Case, fault: &str, kill: impl Fn(usize) -> Result<()>) -> Result<()> {
    let kills = count("SANDBOXER_E2E_RANDOM_KILLS", 12)?;
    let kubelet = Kubelet::new(case)?;
    let pods = count("SANDBOXER_E2E_RANDOM_PODS", 2)?;
    let mut seen = Seen::begin(case, fault, pods).await?;
    let pod = case.pod().await?;
    let mut streams = Streams::open(case, &pod).await?;
    while seen.times < kills {
        let killed = AtomicUsize::new(0);
        let killer = async {
            // No more than these in one life: on a slow host no pod's start would get through for ever.
            for round in 0..KILLS_IN_A_LIFE.min(kills - seen.times) {
                some_moment().await;
                // The one before may not be ready yet.
                killed.fetch_add(usize::from(kill(seen.times + round).is_ok()), Ordering::Relaxed);
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            lived = life(case, &kubelet) => lived.with_context(|| format!("after {} kills", seen.times))?,
            () = killer => {}
        }
        seen.others += 1;
        seen.times += killed.into_inner();
        seen.check().await?;
        streams.check().await.with_context(|| format!("after {} kills", seen.times))?;
    }
    seen.lines += streams.end().await?;
    case.remove(&pod.id).await?;
    seen.others += 1;
    seen.end().await
}

/// The kernel gives the worker no more memory: it aborts, and the next one goes on.
pub async fn memory_runs_out(case: Case) -> Result<()> {
    let kubelet = Kubelet::new(&case)?;
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
            // It may fail in part, with an error, because it has no memory.
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

/// Offsets of the daemon's clock, one after the other, s.
const CLOCKS: [i64; 3] = [-3600, 86_400, 0];

pub async fn clock_jumps(case: Case) -> Result<()> {
    let failing = Failing::start(&case, None).await?;
    let outcome = with_jumping_clock(&case, &failing).await;
    failing.end().await?;
    outcome
}

async fn with_jumping_clock(case: &Case, failing: &Failing<'_>) -> Result<()> {
    let kubelet = Kubelet::new(case)?;
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
        // To the minute: guests' clocks are their own, and those of an emulated VM are none too good.
        ensure!((began - 60..=clock() + 60).contains(&guest), "the guest says {guest}, the daemon {began}");
        seen.check().await?;

        case.stack.kill_worker()?;
        life(case, &kubelet).await.with_context(|| format!("taken up with the clock {ahead} s ahead"))?;
        seen.check().await?;
        // Its guest keeps its clock, but the exit is reported in the daemon's time.
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
pub async fn upgraded_under_pods(case: Case) -> Result<()> {
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
    refused_by_its_front(&case, &programs).await?;
    seen.check().await.context("after a build that was refused")?;
    seen.end().await?;
    case.stack.end("sandboxer", Signal::SIGTERM).await?;
    case.stack.run_up()?;
    reached(&case).await
}

/// A build that does not speak with the agents of pods, and a signal in the place of `sandboxer-cli reload`, which
/// would refuse it.
async fn refused_by_its_front(case: &Case, programs: &Path) -> Result<()> {
    let (worker, front) = (case.stack.worker()?, case.stack.front()?);
    fs::rename(programs.join("sandboxer"), programs.join("speaks"))?;
    let script = "#!/bin/sh\n[ \"$1\" != --protocols ] || exec echo 99 99\nexec \"${0%/*}/speaks\" \"$@\"\n";
    fs::write(programs.join("sandboxer.new"), script)?;
    fs::set_permissions(programs.join("sandboxer.new"), fs::Permissions::from_mode(0o755))?;
    fs::rename(programs.join("sandboxer.new"), programs.join("sandboxer"))?;
    kill(case.stack.pid("sandboxer")?, Signal::SIGHUP)?;
    let log = case.stack.dir().join("sandboxer/log");
    eventually("the front's refusal", PATIENCE, || async {
        let text = fs::read_to_string(&log)?;
        let refused = "nothing is reloaded: the installed build speaks protocol 99 with agents";
        Ok(text.contains(refused).then_some(()))
    })
    .await?;
    ensure!(case.stack.worker()? == worker && case.stack.front()? == front, "something was replaced");
    fs::rename(programs.join("speaks"), programs.join("sandboxer"))?;
    Ok(())
}
