//! How much a hostile guest delays other pods: `cargo bench --bench hostile`.
//!
//! Ten good pods receive execs at a steady rate, alone and beside one guest of each hostile nature. Agents are the
//! doubles of the daemon's tests, in their own threads. So the figures include the daemon's delay and the doubles' use
//! of the VM's processors. To distinguish the two, there are also harmless neighbours: one that only computes, and a
//! good pod that is started and removed over and over.
//!
//! Then good pods are started, alone and beside ten hostile ones, each of which receives endless requests for
//! containers: a guest that is slow to make a container must not occupy the slots of others.

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on stops where it stands")]
#![allow(dead_code, reason = "the daemon's tests use all of their doubles")]

#[path = "../crates/sandboxer/tests/fake_agent/mod.rs"]
mod fake_agent;
#[path = "../crates/sandboxer/tests/hostile_agent/mod.rs"]
mod hostile_agent;
#[path = "../crates/sandboxer/tests/hung_volume/mod.rs"]
mod hung_volume;
#[path = "../crates/sandboxer/tests/test_node/mod.rs"]
mod test_node;

use std::{
    fs,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use fake_agent::{FakeAgent, OUTPUT};
use futures::future;
use hdrhistogram::Histogram;
use hostile_agent::{FILE, Nature};
use hung_volume::HungVolume;
use sandboxer::pod::PodHandle;
use sandboxer_protocol::id::ExecId;
use sandboxer_vmm_fake::{FakeGuest, FakeVmm};
use test_node::{TestNode, id, reader, with_share};
use tokio::{
    io::AsyncReadExt,
    net::UnixStream,
    runtime::{Builder, Handle, Runtime},
    time::{Instant, MissedTickBehavior, interval_at, sleep, timeout},
};

/// Time within which an agent must respond to a call.
const AGENT_TIMEOUT: Duration = Duration::from_millis(500);
/// Number of good pods.
const GOOD: usize = 10;
/// Interval of the execs in each good pod.
const EVERY: Duration = Duration::from_millis(40);
/// Number of execs in each good pod, alone and then beside each neighbour.
const EXECS: u32 = 100;
/// Number of starts of a good pod, alone and then beside hostile ones.
const STARTS: usize = 30;
/// Number of hostile pods.
const HOSTILE: usize = 10;
/// Pause before a pod that has ended is started again. A kubelet waits longer.
const AGAIN: Duration = Duration::from_millis(100);
/// Number of the daemon's worker threads, as in production.
const WORKERS: usize = 2;

/// What runs beside the good pods.
#[derive(Debug, Clone, Copy)]
enum Neighbour {
    Computes,
    ComesAndGoes,
    /// A pod with two volumes whose servers do not respond requests containers over and over. Needs root.
    HungVolumes,
    Hostile(Nature),
}

fn main() {
    let outside = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let daemon =
        Builder::new_multi_thread().worker_threads(WORKERS).max_blocking_threads(8).enable_all().build();
    daemon.unwrap().block_on(measure(&outside));
    outside.shutdown_background();
}

async fn measure(outside: &Runtime) {
    let place = Place::new(outside.handle().clone());
    let mut good = Vec::new();
    for n in 0..GOOD {
        let pod = place.test.pod(&format!("good{n}"));
        pod.start().await.unwrap();
        place.run(&pod, &format!("good{n}")).await;
        good.push(pod);
    }
    // The first execs include one-time work.
    place.execs(&good).await;

    let n = GOOD as u32 * EXECS;
    println!(
        "an exec of a pod, ms, n = {n} each; its ratio is to the execs right before, without the neighbour"
    );
    println!(
        "{:<24} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "beside", "p50 alone", "p50", "p99 alone", "p99", "ratio"
    );
    let others = [Neighbour::Computes, Neighbour::ComesAndGoes, Neighbour::HungVolumes];
    for neighbour in others.into_iter().chain(Nature::ALL.map(Neighbour::Hostile)) {
        let alone = place.execs(&good).await;
        let beside = place.beside(neighbour, place.execs(&good)).await;
        let ms = |times: &Histogram<u64>, quantile| times.value_at_quantile(quantile) as f64 / 1e3;
        let name = match neighbour {
            Neighbour::Hostile(nature) => format!("{nature:?}"),
            other => format!("({other:?})"),
        };
        println!(
            "{name:<24} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2}",
            ms(&alone, 0.5),
            ms(&beside, 0.5),
            ms(&alone, 0.99),
            ms(&beside, 0.99),
            ms(&beside, 0.99) / ms(&alone, 0.99),
        );
    }
    for pod in good {
        pod.remove().await.unwrap();
    }

    println!("\na start of a pod and its container, ms, n = {STARTS} each; beside {HOSTILE} pods at once");
    println!("{:<24} {:>9} {:>9} {:>9} {:>9}", "beside", "p50 alone", "p50", "p99", "ratio p50");
    for nature in [Nature::LateAgent, Nature::SlowCreate, Nature::NeverAnswers, Nature::NeverReads] {
        let alone = place.starts().await;
        let beside = place.beside_many(nature, place.starts()).await;
        let ms = |times: &Histogram<u64>, quantile| times.value_at_quantile(quantile) as f64 / 1e3;
        println!(
            "{:<24} {:>9.2} {:>9.2} {:>9.2} {:>9.2}",
            format!("{nature:?}"),
            ms(&alone, 0.5),
            ms(&beside, 0.5),
            ms(&beside, 0.99),
            ms(&beside, 0.5) / ms(&alone, 0.5),
        );
    }
}

/// A node with everything outside its daemon: agents, and readers of containers' output.
struct Place {
    test: TestNode,
    outside: Handle,
    /// Nature of the next VMs' agents.
    next: Arc<Mutex<Option<Nature>>>,
}

impl Place {
    fn new(outside: Handle) -> Self {
        let next: Arc<Mutex<Option<Nature>>> = Arc::default();
        let (agent, chosen, threads) = (FakeAgent::default(), next.clone(), outside.clone());
        let vmm = Arc::new(FakeVmm::new(move |guest| {
            let _outside = threads.enter();
            let stream = UnixStream::from_std(guest.stream.into_std().unwrap()).unwrap();
            let guest = FakeGuest { stream, ..guest };
            match *chosen.lock().unwrap() {
                Some(nature) => hostile_agent::serve(guest, nature),
                None => agent.serve(guest),
            }
        }));
        let test = TestNode::with(vmm, |config| {
            config.vm.agent_timeout = AGENT_TIMEOUT;
            config.volumes.timeout = AGENT_TIMEOUT;
        });
        Self { test, outside, next }
    }

    /// Creates and starts a container, and reads its output in the background.
    async fn run(&self, pod: &PodHandle, container: &str) {
        let mut new = self.test.container(container, "true");
        let nature = *self.next.lock().unwrap();
        if nature.is_some_and(Nature::wants_a_share) {
            let dir = self.test.dir.path().join("shared");
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join(FILE), vec![7; 1 << 20]).unwrap();
            new = with_share(new, &dir);
        }
        let stdout = {
            let _outside = self.outside.enter();
            reader(&new.stdio.stdout)
        };
        self.outside.spawn(async move {
            let (mut stdout, mut sink) = (stdout, vec![0; 64 << 10]);
            while stdout.read(&mut sink).await.is_ok_and(|count| count > 0) {}
        });
        // A hostile pod may reject the calls.
        let _ = pod.create_container(new).await;
        let _ = pod.start_process(id(container), None).await;
    }

    /// Returns the times of the execs, µs, from when each was due until it was deleted.
    async fn execs(&self, good: &[PodHandle]) -> Histogram<u64> {
        let begin = Instant::now() + EVERY;
        let pods = good.iter().enumerate().map(|(n, pod)| async move {
            let mut times = Histogram::<u64>::new(3).unwrap();
            let mut due = interval_at(begin + EVERY / GOOD as u32 * n as u32, EVERY);
            due.set_missed_tick_behavior(MissedTickBehavior::Burst);
            for _ in 0..EXECS {
                let due = due.tick().await;
                self.exec(pod, &format!("good{n}")).await;
                times.record(due.elapsed().as_micros() as u64).unwrap();
            }
            times
        });
        let mut all = Histogram::new(3).unwrap();
        for times in future::join_all(pods).await {
            all.add(times).unwrap();
        }
        all
    }

    async fn exec(&self, pod: &PodHandle, container: &str) {
        // The exec has its own FIFOs.
        let stdio = self.test.container(&format!("{container}-exec"), "true").stdio;
        let mut stdout = reader(&stdio.stdout);
        let (of, exec) = (id(container), "exec".parse::<ExecId>().unwrap());
        let process = br#"{"user": {"uid": 0, "gid": 0}, "args": ["true"], "cwd": "/"}"#;
        pod.create_exec(of.clone(), exec.clone(), process.to_vec(), stdio).await.unwrap();
        pod.start_process(of.clone(), Some(exec.clone())).await.unwrap();
        let mut seen = vec![0; OUTPUT.len()];
        stdout.read_exact(&mut seen).await.unwrap();
        let mut view = pod.process(of.clone(), Some(exec.clone())).await.unwrap();
        view.phase.wait_for(|phase| phase.exit().is_some()).await.unwrap();
        pod.delete(of, Some(exec)).await.unwrap();
    }

    /// Returns the times to start good pods with one container each, one after the other, µs.
    async fn starts(&self) -> Histogram<u64> {
        let mut times = Histogram::<u64>::new(3).unwrap();
        for n in 0..STARTS {
            let (pod, container) = (self.test.pod(&format!("start{n}")), format!("start{n}"));
            let new = self.test.container(&container, "true");
            let begin = Instant::now();
            pod.start().await.unwrap();
            pod.create_container(new).await.unwrap();
            pod.start_process(id(&container), None).await.unwrap();
            times.record(begin.elapsed().as_micros() as u64).unwrap();
            pod.remove().await.unwrap();
        }
        times
    }

    /// Does `work` while many hostile pods receive requests for containers, one after the other each.
    async fn beside_many<T>(&self, nature: Nature, work: impl Future<Output = T>) -> T {
        *self.next.lock().unwrap() = Some(nature);
        let mut hostile = Vec::new();
        for n in 0..HOSTILE {
            let pod = self.test.pod(&format!("hostile{n}"));
            pod.start().await.unwrap();
            hostile.push(pod);
        }
        *self.next.lock().unwrap() = None;
        let over = AtomicBool::new(false);
        let ask = |n: usize, pod: PodHandle| {
            let over = &over;
            async move {
                for container in (0..).map(|round| format!("hostile{n}-{round}")) {
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                    let _ = pod.create_container(self.test.container(&container, "true")).await;
                    sleep(AGAIN).await;
                }
            }
        };
        let asked = future::join_all(hostile.iter().cloned().enumerate().map(|(n, pod)| ask(n, pod)));
        let work = async {
            // By now all of them are busy.
            sleep(AGENT_TIMEOUT).await;
            let done = work.await;
            over.store(true, Ordering::Relaxed);
            done
        };
        let (done, _) = tokio::join!(work, asked);
        for pod in hostile {
            pod.remove().await.unwrap();
        }
        done
    }

    /// Does `work` while the neighbour runs.
    async fn beside<T>(&self, neighbour: Neighbour, work: impl Future<Output = T>) -> T {
        let over = AtomicBool::new(false);
        let live = async {
            match neighbour {
                Neighbour::Computes => self.compute(&over).await,
                Neighbour::ComesAndGoes => self.come_and_go(&over).await,
                Neighbour::HungVolumes => self.hang(&over).await,
                Neighbour::Hostile(nature) => {
                    *self.next.lock().unwrap() = Some(nature);
                    self.come_and_go(&over).await;
                    *self.next.lock().unwrap() = None;
                }
            }
        };
        let work = async {
            let done = work.await;
            over.store(true, Ordering::Relaxed);
            done
        };
        tokio::join!(live, work).1
    }

    async fn compute(&self, over: &AtomicBool) {
        let stop = Arc::new(AtomicBool::new(false));
        let asked = stop.clone();
        let computing = thread::spawn(move || while !asked.load(Ordering::Relaxed) {});
        while !over.load(Ordering::Relaxed) {
            sleep(AGAIN).await;
        }
        stop.store(true, Ordering::Relaxed);
        computing.join().unwrap();
    }

    /// Runs a pod that requests two containers at a time, each with a hung volume. The volumes are new each time,
    /// because their paths are known to hang.
    async fn hang(&self, over: &AtomicBool) {
        let pod = self.test.pod("hung");
        pod.start().await.unwrap();
        for n in 0.. {
            let at = ["a", "b"].map(|name| self.test.dir.path().join(format!("volume-{n}{name}")));
            let mount = move || {
                at.map(|at| {
                    fs::create_dir(&at).unwrap();
                    let volume = HungVolume::mount(&at).unwrap();
                    volume.set_silent(true);
                    volume
                })
            };
            let volumes = self.outside.spawn_blocking(mount).await.unwrap();
            let asked = volumes.iter().enumerate().map(|(at, volume)| {
                pod.create_container(with_share(
                    self.test.container(&format!("hung{n}-{at}"), "true"),
                    volume.path(),
                ))
            });
            let answers = future::join_all(asked).await;
            assert!(answers.iter().all(Result::is_err), "a volume that hangs was given");
            self.outside.spawn_blocking(move || drop(volumes)).await.unwrap();
            if over.load(Ordering::Relaxed) {
                break;
            }
        }
        pod.remove().await.unwrap();
    }

    /// Uses a pod until that fails, and then starts it again.
    async fn come_and_go(&self, over: &AtomicBool) {
        for n in 0.. {
            let pod = self.test.pod(&format!("neighbour{n}"));
            let started = timeout(2 * AGENT_TIMEOUT, pod.start()).await.is_ok_and(|started| started.is_ok());
            if started {
                let container = format!("neighbour{n}");
                self.run(&pod, &container).await;
                for _ in 0..3 {
                    let _ = pod.stats(None).await;
                    let _ = pod.pids(id(&container)).await;
                }
                let _ = timeout(4 * AGENT_TIMEOUT, pod.stopped()).await;
            }
            pod.remove().await.unwrap();
            if over.load(Ordering::Relaxed) {
                return;
            }
            sleep(AGAIN).await;
        }
    }
}
