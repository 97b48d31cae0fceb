//! Whether a daemon with 2,000 pods is as fast as one with ten: `cargo bench -p sandboxer --bench scale`.
//!
//! VMs are doubles of the VMM, and guests are agent doubles in their own threads, so that the daemon's work can be
//! measured apart from theirs. Pods are started by the calls that the gRPC and ttrpc services make. containerd is left
//! out, because its database would be measured, too. The image's disk exists, as on any node that has run the image
//! before. At each count of running pods, each with a container, the bench measures:
//!
//! - the start of one more pod with a container, one after the other (µs);
//! - the CPU time of the daemon's threads while it receives no requests (% of one processor);
//! - the memory of the whole process for each further pod (KiB), including 64 KiB of buffers in each guest's double;
//!
//! and at the largest count, the time until a new daemon has recovered all pods of a killed one (ms).

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on stops where it stands")]
#![allow(dead_code, reason = "the daemon's tests use all of their doubles")]

#[path = "../crates/sandboxer/tests/fake_agent/mod.rs"]
mod fake_agent;
#[path = "../crates/sandboxer/tests/test_node/mod.rs"]
mod test_node;

use std::{
    collections::HashMap,
    ffi::OsString,
    fs,
    os::fd::AsFd,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use fake_agent::FakeAgent;
use futures::{StreamExt, stream};
use hdrhistogram::Histogram;
use nix::{
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::{SysconfVar, sysconf},
};
use sandboxer::pod::{
    PodHandle,
    recover::{self, Records},
};
use sandboxer_config::Config;
use sandboxer_host::{helper, rootfs::Mount};
use sandboxer_vmm_fake::{FakeGuest, FakeVmm};
use test_node::{TestNode, id, reader};
use tokio::{
    io::AsyncReadExt,
    net::UnixStream,
    runtime::{Builder, Handle},
    time::sleep,
};
use tracing_subscriber::{
    Layer as _, filter::Targets, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

/// Numbers of pods that run while the starts are measured.
const COUNTS: [usize; 4] = [10, 100, 1000, 2000];
/// Number of starts at each count.
const STARTS: usize = 200;
/// Number of pods that are started at the same time.
const AT_ONCE: usize = 8;
/// Pause in which the work of the last calls ends.
const REST: Duration = Duration::from_secs(2);
/// Duration for which an idle daemon is watched: longer than the interval of its slowest timer.
const IDLE: Duration = Duration::from_secs(20);
/// Number of the daemon's worker threads, as in production.
const WORKERS: usize = 2;
/// Name of the daemon's threads in this bench.
const DAEMON: &str = "daemon";
/// Maximum number of descriptors of a pod and its doubles.
const DESCRIPTORS: u64 = 12;

fn main() {
    // The daemon's helpers are processes of its own program, which is this bench here.
    if std::env::args().any(|argument| argument.strip_prefix("--") == Some(helper::OPTION)) {
        let stream = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        return helper::serve(stream.into()).unwrap();
    }
    let own = Targets::new().with_target("sandboxer", tracing::Level::ERROR);
    tracing_subscriber::registry().with(fmt::layer().with_writer(std::io::stderr).with_filter(own)).init();
    allow_descriptors();
    let doubles =
        Builder::new_multi_thread().worker_threads(2).thread_name("doubles").enable_all().build().unwrap();
    let daemon = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(8)
        .thread_name(DAEMON)
        .enable_all()
        .build()
        .unwrap();
    // A task, because `block_on` would wait in a thread of another name.
    let handle = doubles.handle().clone();
    daemon.block_on(async { tokio::spawn(measure(handle)).await.unwrap() });
    doubles.shutdown_background();
}

fn allow_descriptors() {
    let needed = COUNTS[COUNTS.len() - 1] as u64 * DESCRIPTORS;
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    assert!(most >= needed, "{needed} open files are needed, the limit is {most}: raise it (ulimit -Hn)");
    setrlimit(Resource::RLIMIT_NOFILE, needed, most).unwrap();
}

async fn measure(doubles: Handle) {
    let place = Place::new(doubles);
    println!("{STARTS} starts at each count, one after the other; idle for {} s", IDLE.as_secs());
    println!(
        "{:>6} {:>10} {:>10} {:>10} {:>14} {:>14}",
        "pods", "p50 µs", "p99 µs", "÷ first", "idle, % CPU", "KiB a pod"
    );
    // The first starts include one-time work.
    place.starts().await;
    let (empty, mut pods, mut first) = (rss_kib(), Vec::new(), None);
    for count in COUNTS {
        pods.extend(place.grow(pods.len()..count).await);
        let times = place.starts().await;
        let p50 = times.value_at_quantile(0.5);
        println!(
            "{count:>6} {p50:>10} {:>10} {:>10.2} {:>14.2} {:>14.1}",
            times.value_at_quantile(0.99),
            p50 as f64 / *first.get_or_insert(p50) as f64,
            idle_percent().await,
            (rss_kib() - empty) as f64 / count as f64,
        );
    }

    let count = pods.len();
    let next = place.test.killed(pods);
    // A killed daemon's tasks end at once, but those of dropped pods only soon after: until then they would take their
    // guests' streams again.
    sleep(REST).await;
    let begin = Instant::now();
    let recovered = recover::recover(&next, Records::read(&next).unwrap()).await;
    println!("\n{count} pods after a kill of the daemon: {} ms; {recovered:?}", begin.elapsed().as_millis());
    // A pod that has not responded in time is tried again later.
    assert_eq!((recovered.alive + recovered.unknown) as usize, count, "pods were lost");
}

/// A node, and the threads of guests and of readers of output.
struct Place {
    test: TestNode,
    doubles: Handle,
}

impl Place {
    fn new(doubles: Handle) -> Self {
        let (agents, threads) = (Mutex::new(HashMap::<_, FakeAgent>::new()), doubles.clone());
        let vmm = Arc::new(FakeVmm::new(move |guest| {
            let _doubles = threads.enter();
            let stream = UnixStream::from_std(guest.stream.into_std().unwrap()).unwrap();
            // The guest's containers last as long as its VM, which the path identifies.
            let agent = agents.lock().unwrap().entry(guest.shares.clone()).or_default().clone();
            agent.serve(FakeGuest { stream, ..guest });
        }));
        let own_program = |config: &mut Config| config.helper_program = Some("/proc/self/exe".into());
        Self { test: TestNode::with(vmm, own_program), doubles }
    }

    /// Starts pods with one container each, several at a time.
    async fn grow(&self, numbers: std::ops::Range<usize>) -> Vec<PodHandle> {
        stream::iter(numbers)
            .map(|n| async move {
                let name = format!("pod{n}");
                let pod = self.test.pod(&name);
                self.run(&pod, &name).await;
                pod
            })
            .buffer_unordered(AT_ONCE)
            .collect()
            .await
    }

    /// Starts the pod and its container, and reads the container's output.
    async fn run(&self, pod: &PodHandle, container: &str) {
        let mut new = self.test.container(container, "sleep");
        new.mounts = self.snapshot(container);
        let mut stdout = {
            let _doubles = self.doubles.enter();
            reader(&new.stdio.stdout)
        };
        self.doubles.spawn(async move {
            let mut sink = vec![0; 256];
            while stdout.read(&mut sink).await.is_ok_and(|count| count > 0) {}
        });
        pod.start().await.unwrap();
        pod.create_container(new).await.unwrap();
        pod.start_process(id(container), None).await.unwrap();
    }

    /// Returns a snapshot on the image's layers, as containerd's snapshotter makes one; the layers' disk is made once
    /// for all pods.
    fn snapshot(&self, container: &str) -> Vec<Mount> {
        let dir = self.test.dir.path();
        let own = |name: &str| {
            let path = dir.join("snapshots").join(container).join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        let (upper, work) = (own("upper"), own("work"));
        let options = [("lowerdir", &dir.join("rootfs")), ("upperdir", &upper), ("workdir", &work)];
        vec![Mount {
            fstype: "overlay".into(),
            source: "overlay".into(),
            options: options.map(|(name, path)| format!("{name}={}", path.display())).into(),
        }]
    }

    /// Returns the times to start a pod with a container, one after the other, each removed before the next (µs).
    async fn starts(&self) -> Histogram<u64> {
        let mut times = Histogram::<u64>::new(3).unwrap();
        for n in 0..STARTS {
            let name = format!("start{n}");
            let pod = self.test.pod(&name);
            let begin = Instant::now();
            self.run(&pod, &name).await;
            times.record(begin.elapsed().as_micros() as u64).unwrap();
            pod.remove().await.unwrap();
        }
        times
    }
}

/// Returns the CPU time of the daemon's threads without requests, in % of one processor.
async fn idle_percent() -> f64 {
    // The work that the last starts left behind is not idle work.
    sleep(REST).await;
    let (begin, before) = (Instant::now(), daemon_ticks());
    sleep(IDLE).await;
    let per_second = sysconf(SysconfVar::CLK_TCK).unwrap().unwrap() as f64;
    // A thread that ended meanwhile was idle: it ends after some seconds without work.
    let used: u64 =
        daemon_ticks().iter().map(|(thread, ticks)| ticks - before.get(thread).unwrap_or(&0)).sum();
    used as f64 / per_second / begin.elapsed().as_secs_f64() * 100.0
}

/// Returns the clock ticks of the threads with the daemon's name, by thread.
fn daemon_ticks() -> HashMap<OsString, u64> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    // A thread may end while the threads are read.
    let of = |task: fs::DirEntry| {
        Some((task.file_name(), ticks(&fs::read_to_string(task.path().join("stat")).ok()?)?))
    };
    tasks.filter_map(|task| of(task.ok()?)).collect()
}

/// Returns the user and system time from one `/proc/PID/task/TID/stat`, if the name is the daemon's.
fn ticks(stat: &str) -> Option<u64> {
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    // utime and stime are the 14th and 15th field of the line, the name is the second.
    let mut times = rest.split_whitespace().skip(11);
    let (user, system) = (times.next()?.parse::<u64>().ok()?, times.next()?.parse::<u64>().ok()?);
    (name == DAEMON).then_some(user + system)
}

/// Returns the resident memory of this process, KiB.
fn rss_kib() -> i64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
