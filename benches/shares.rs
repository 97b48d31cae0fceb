//! Read rate of a share, compared with a disk of the same guest: `cargo bench --bench shares`. Needs root, and the
//! prerequisites of `make up`.
//!
//! One container alternately reads a file in a host directory and a file on its writable disk. Then it alternately
//! reads its share alone, and at the same time as a second pod's container. Each time the guest's page cache is empty
//! and the host's is not, so that the transport between the two is measured.
//!
//! Besides the clock time, the bench reports the CPU time of the VMM, its guest included, and of the share's server. On
//! a VM that has other work, the CPU time is the reliable figure.
//!
//! `SANDBOXER_BENCH_ROUNDS` (10) and `SANDBOXER_BENCH_MIB` (128) set the number of rounds and the size of the file.

use std::{collections::BTreeSet, fs, path::Path, process::Command, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::Mount;
use nix::unistd::Pid;
use sandboxer_e2e::{
    case::{Case, idle, privileged, security},
    cri::Cri,
    stack::Stack,
    stream::Session,
};
use sandboxer_probe::{ratio::Ratio, summary::median};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Timeout of one line from a guest: emulated guests are slow.
const PATIENCE: Duration = Duration::from_secs(300);
/// Number of reads of the whole file in one sample: CPU time is counted in hundredths of a second.
const READS: usize = 3;
const SHARE: &str = "/data/file";
const DISK: &str = "/file";

fn main() -> Result<()> {
    let setting = |name: &str, default: usize| match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text} is no number")),
        Err(_) => Ok(default),
    };
    let (rounds, mib) = (setting("SANDBOXER_BENCH_ROUNDS", 10)?, setting("SANDBOXER_BENCH_MIB", 128)?);
    let runtime = Runtime::new()?;
    let stack = Arc::new(Stack::up(true)?);
    let cri = runtime.block_on(async { Cri::connect(stack.containerd_socket()?) })?;
    let case = Case { stack: Arc::clone(&stack), cri, handler: "sandboxer", name: "bench-shares".into() };
    let measured = runtime.block_on(measure(&case, rounds, mib));
    let cleaned = runtime.block_on(case.clean_up());
    drop(case);
    let stack = Arc::into_inner(stack).context("the stack is still used")?;
    stack.down()?;
    measured.and(cleaned)
}

async fn measure(case: &Case, rounds: usize, mib: usize) -> Result<()> {
    let mut one = Reader::start(case, mib).await?;
    let (mut disk, mut share) = (Samples::default(), Samples::default());
    // The first reads include one-time work.
    for path in [DISK, SHARE] {
        one.read(path).await?;
    }
    for _ in 0..rounds {
        disk.add(one.read(DISK).await?);
        share.add(one.read(SHARE).await?);
    }
    println!("{mib} MiB {READS} times, by the guest's clock; processor time of VMM and server");
    println!("{:<16} {:>4} {:>9} {:>8} {:>9}", "read", "n", "MiB/s", "cpu s", "server s");
    let whole = (mib * READS) as f64;
    disk.print("disk", whole);
    share.print("share", whole);
    compare("share ÷ disk", &share, &disk, whole, whole);

    let mut other = Reader::start(case, mib).await?;
    other.read(SHARE).await?;
    let (mut alone, mut both) = (Samples::default(), Samples::default());
    for _ in 0..rounds {
        alone.add(one.read(SHARE).await?);
        both.add(read_at_once(&mut one, &mut other).await?);
    }
    println!();
    alone.print("one pod", whole);
    both.print("two at once", 2.0 * whole);
    compare("two at once ÷ one", &both, &alone, 2.0 * whole, whole);
    Ok(())
}

/// Times of one sample.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// Time by the guest's clock, s.
    clock: f64,
    /// CPU time of the VMM and the server, s.
    processor: f64,
    /// CPU time of the server alone, s.
    server: f64,
}

async fn read_at_once(one: &mut Reader, other: &mut Reader) -> Result<Sample> {
    one.empty(SHARE).await?;
    other.empty(SHARE).await?;
    let (one, other) = tokio::try_join!(one.go(), other.go())?;
    Ok(Sample {
        clock: one.clock.max(other.clock),
        processor: one.processor + other.processor,
        server: one.server + other.server,
    })
}

#[derive(Debug, Default)]
struct Samples {
    clock: Vec<f64>,
    processor: Vec<f64>,
    server: Vec<f64>,
}

impl Samples {
    fn add(&mut self, sample: Sample) {
        self.clock.push(sample.clock);
        self.processor.push(sample.processor);
        self.server.push(sample.server);
    }

    /// Returns the rates of samples of `mib` MiB each, MiB/s.
    fn rates(times: &[f64], mib: f64) -> Vec<f64> {
        times.iter().map(|seconds| mib / seconds.max(f64::EPSILON)).collect()
    }

    fn print(&self, name: &str, mib: f64) {
        let p50 = |times: &[f64]| median(times).unwrap_or_default();
        println!(
            "{name:<16} {:>4} {:>9.0} {:>8.2} {:>9.2}",
            self.clock.len(),
            p50(&Self::rates(&self.clock, mib)),
            p50(&self.processor),
            p50(&self.server),
        );
    }
}

/// Prints the ratio of the rates of two series with this many MiB per sample.
fn compare(name: &str, a: &Samples, b: &Samples, mib_of_a: f64, mib_of_b: f64) {
    for (by, of_a, of_b) in
        [("the clock", &a.clock, &b.clock), ("processor time", &a.processor, &b.processor)]
    {
        let ratio = Ratio::estimate(&Samples::rates(of_a, mib_of_a), &Samples::rates(of_b, mib_of_b));
        match ratio {
            Some(ratio) => println!("{name}, MiB a second by {by}: {ratio}"),
            None => println!("{name}, by {by}: nothing was measured"),
        }
    }
}

/// A pod whose container reads files on request.
struct Reader {
    session: Session,
    vmm: Pid,
    server: Pid,
    round: usize,
    // Removed with the reader; the share lives in it.
    _host: TempDir,
}

impl Reader {
    async fn start(case: &Case, mib: usize) -> Result<Self> {
        let host = tempfile::tempdir()?;
        fill(&host.path().join("file"), mib)?;
        let servers = || -> Result<BTreeSet<Pid>> {
            Ok(case.stack.processes("sandboxer-share")?.into_iter().collect())
        };
        let before = servers()?;
        let pod = case.pod_with(privileged).await?;
        let mut config = idle("reader");
        security(&mut config).privileged = true;
        config.mounts.push(Mount {
            container_path: "/data".into(),
            host_path: host.path().display().to_string(),
            readonly: true,
            ..Default::default()
        });
        let container = pod.start(config).await?;
        let server = servers()?.difference(&before).next().copied().context("no process serves the share")?;
        let vmm = case.vmm_of(&pod.id).await?;
        let script = format!(
            "cp {SHARE} {DISK} && sync
            empty() {{ echo 3 >/proc/sys/vm/drop_caches; }}
            while read path round; do
                empty; echo ready $round; read go
                for n in $(seq {READS}); do
                    read from idle </proc/uptime
                    dd if=$path of=/dev/null bs=1M 2>/dev/null
                    read to idle </proc/uptime
                    echo took $from $to; empty
                done
                echo done $round
            done"
        );
        let url = case.cri.exec(&container.id, &["sh", "-c", &script], false).await?;
        let session = Session::open(&url).await?;
        Ok(Self { session, vmm, server, round: 0, _host: host })
    }

    /// Reads the file at `path`, with an empty cache in the guest.
    async fn read(&mut self, path: &str) -> Result<Sample> {
        self.empty(path).await?;
        self.go().await
    }

    /// Prepares the reader for the file at `path`, and empties the guest's cache of it.
    async fn empty(&mut self, path: &str) -> Result<()> {
        self.round += 1;
        self.session.stdout.clear();
        self.session.write(&format!("{path} {}\n", self.round)).await?;
        self.session.until(&format!("ready {}\n", self.round), PATIENCE).await
    }

    /// Starts the prepared read and returns its times.
    async fn go(&mut self) -> Result<Sample> {
        let (vmm, server) = (processor_time(self.vmm)?, processor_time(self.server)?);
        self.session.write("go\n").await?;
        self.session.until(&format!("done {}\n", self.round), PATIENCE).await?;
        let server = processor_time(self.server)? - server;
        let processor = processor_time(self.vmm)? - vmm + server;
        let clock = seconds(&self.session.stdout)?;
        Ok(Sample { clock, processor, server })
    }
}

/// Returns the sum of the reads' times, s. The guest reports times in hundredths of a second.
fn seconds(said: &str) -> Result<f64> {
    let times = said.lines().filter_map(|line| line.strip_prefix("took ")).map(|line| {
        let (from, to) = line.split_once(' ').with_context(|| format!("two times, not {line:?}"))?;
        Ok(to.trim().parse::<f64>()? - from.parse::<f64>()?)
    });
    let times = times.collect::<Result<Vec<f64>>>()?;
    ensure!(times.len() == READS, "{} of {READS} reads: {said}", times.len());
    Ok(times.iter().sum())
}

/// Returns the CPU time of a process with all its threads, s: user and system.
fn processor_time(pid: Pid) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // The fields after the name, which may contain anything: the 12th and 13th from there.
    let (_, fields) = stat.rsplit_once(") ").with_context(|| format!("{path} is cut short"))?;
    let ticks: f64 = fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    let a_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no clock ticks")?;
    Ok(ticks / a_second as f64)
}

/// Writes random bytes, which then are in the host's page cache.
fn fill(path: &Path, mib: usize) -> Result<()> {
    let (count, to) = (format!("count={mib}"), format!("of={}", path.display()));
    let filled =
        Command::new("dd").args(["if=/dev/urandom", "bs=1M", "status=none", &count, &to]).status()?;
    ensure!(filled.success(), "dd: {filled}");
    Ok(())
}
