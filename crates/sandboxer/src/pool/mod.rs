//! Machines that wait for pods: restored, rehearsed, standing still.
//!
//! ```text
//!  keep_filled ─▶ make: restore ─▶ greet ─▶ rehearse ─▶ pause ─▶ Warm ─▶ claim ─▶ a pod
//!       ▲                                                          │
//!       └── a claim, or the time: too few? too many? stale? ◀──────┘
//! ```
//!
//! A machine is made only while nobody waits for a pod, and its processes give way to all others. It is no
//! pod's: no record names it, and the next daemon ends what this one leaves.

mod demand;
mod make;
mod program;
mod rehearsal;

use std::{
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandboxer_protocol::agent::Ready;
use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    config::PoolConfig,
    error::chain,
    guest::Agent,
    host::network::Parked,
    pod::Node,
    template::{Missing, Shape, TemplateKey, Templates},
    vmm::Machine,
};
use demand::Demand;
pub use make::end;
pub use rehearsal::Rehearsal;

/// How often is looked whether the pool should be smaller.
const PERIOD: Duration = Duration::from_secs(5);
/// How long after a failure the next machine is tried.
const RETRY: Duration = Duration::from_secs(30);
/// Memory that is left to pods, as a part of all there is: with less, the pool gives way.
const RESERVE: u64 = 8;

/// A machine that waits for a pod. Its guest stands still.
#[derive(Debug)]
pub struct Warm {
    /// The machine.
    pub machine: Arc<dyn Machine>,
    /// A session with its agent.
    pub agent: Agent,
    /// The agent's first words.
    pub ready: Ready,
    /// What is behind its network interfaces.
    pub taps: Vec<Parked>,
    template: TemplateKey,
}

/// The machines that wait.
#[derive(Debug)]
pub struct Pool {
    config: PoolConfig,
    /// The size of which there are always [`PoolConfig::min`].
    usual: Shape,
    // A plain lock: held for a push or a pop, never across an await.
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<Shape, VecDeque<Warm>>,
    demand: HashMap<Shape, Demand>,
}

/// A machine that waits, for people.
#[derive(Debug)]
pub struct WarmView {
    /// Its size.
    pub shape: Shape,
    /// Process of its VMM.
    pub pid: u32,
}

impl Pool {
    /// A pool without machines.
    pub fn new(config: PoolConfig, usual: Shape) -> Arc<Self> {
        Arc::new(Self { config, usual, state: Mutex::default(), changed: Notify::new() })
    }

    /// Takes a machine of this size, if one waits that is a copy of what its template is now. The error
    /// says why there is none.
    pub fn claim(&self, shape: Shape, templates: &Arc<Templates>) -> Result<Warm, &'static str> {
        if self.config.max == 0 {
            return Err("off");
        }
        let template = templates.get(shape);
        let mut state = self.lock();
        state.demand.entry(shape).or_default().add(Instant::now());
        self.changed.notify_one();
        let template = template.map_err(Missing::as_str)?;
        let waiting = state.waiting.get_mut(&shape).ok_or("empty")?;
        let fresh = waiting.iter().position(|warm| warm.template == template.key).ok_or("empty")?;
        waiting.remove(fresh).ok_or("empty")
    }

    /// The machines that wait.
    pub fn list(&self) -> Vec<WarmView> {
        let view = |shape, warm: &Warm| WarmView { shape, pid: warm.machine.record().pid };
        let state = self.lock();
        state.waiting.iter().flat_map(|(&shape, all)| all.iter().map(move |warm| view(shape, warm))).collect()
    }

    /// Keeps the pool at its size until `shutdown`; what was being made by then is undone when it answers.
    pub async fn keep_filled(&self, node: &Arc<Node>, shutdown: &CancellationToken) {
        if self.config.max == 0 {
            return;
        }
        let rehearsal = match Rehearsal::new(&node.config.state_dir) {
            Ok(rehearsal) => rehearsal,
            Err(error) => return tracing::error!(%error, "no pool: its rehearsal can't be prepared"),
        };
        while !shutdown.is_cancelled() {
            self.prune(node).await;
            let Some(shape) = self.lacking() else {
                self.wait(PERIOD, shutdown).await;
                continue;
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = node.admission.quiet() => {}
            }
            match make::warm(node, &rehearsal, shape, shutdown).await {
                Ok(warm) => self.lock().waiting.entry(shape).or_default().push_back(warm),
                Err(_) if shutdown.is_cancelled() => return,
                Err(error) => {
                    tracing::warn!(%shape, error = chain(&error), "no machine for the pool");
                    self.wait(RETRY, shutdown).await;
                }
            }
        }
    }

    async fn wait(&self, longest: Duration, shutdown: &CancellationToken) {
        tokio::select! {
            () = shutdown.cancelled() => {}
            _ = tokio::time::timeout(longest, self.changed.notified()) => {}
        }
    }

    /// A size of which there are too few machines, if memory allows for one more.
    fn lacking(&self) -> Option<Shape> {
        let mut state = self.lock();
        let now = Instant::now();
        let waiting: HashMap<Shape, usize> =
            state.waiting.iter().map(|(&shape, all)| (shape, all.len())).collect();
        state.demand.entry(self.usual).or_default();
        state.demand.retain(|&shape, demand| demand.recent(now) > 0 || shape == self.usual);
        let lacking = |(&shape, demand): (&Shape, &mut Demand)| {
            let there = waiting.get(&shape).copied().unwrap_or(0);
            (there < self.target(shape, demand.recent(now))).then_some(shape)
        };
        let shape = state.demand.iter_mut().find_map(lacking)?;
        drop(state);
        has_room(shape.memory_mib << 20).then_some(shape)
    }

    fn target(&self, shape: Shape, recent: usize) -> usize {
        let least = if shape == self.usual { self.config.min } else { 0 };
        demand::target(least, self.config.max, recent)
    }

    /// Ends the machines that are too many, whose templates have changed, that have ended, and, while
    /// memory is short, one after the other.
    async fn prune(&self, node: &Arc<Node>) {
        // Files are looked at before the lock is taken: a claim waits for it.
        let shapes: Vec<Shape> = self.lock().waiting.keys().copied().collect();
        let key = |&shape: &Shape| Some((shape, node.templates.get(shape).ok()?.key.clone()));
        let current: HashMap<Shape, TemplateKey> = shapes.iter().filter_map(key).collect();
        let short = !has_room(0);
        let mut doomed = Vec::new();
        {
            let mut state = self.lock();
            let now = Instant::now();
            let State { waiting, demand } = &mut *state;
            for (&shape, machines) in waiting.iter_mut() {
                let target = self.target(shape, demand.entry(shape).or_default().recent(now));
                let mut kept = VecDeque::new();
                for warm in machines.drain(..) {
                    let stale = current.get(&shape).is_some_and(|key| *key != warm.template);
                    let ended = futures::FutureExt::now_or_never(warm.machine.exited()).is_some();
                    if stale || ended || kept.len() >= target {
                        doomed.push(warm)
                    } else {
                        kept.push_back(warm)
                    }
                }
                *machines = kept;
            }
            if short {
                doomed.extend(waiting.values_mut().find_map(VecDeque::pop_back));
            }
            waiting.retain(|_, machines| !machines.is_empty());
        }
        for warm in doomed {
            end(warm.machine.as_ref()).await;
        }
    }

    /// Ends every machine that waits.
    pub async fn drain(&self) {
        let all: Vec<Warm> = self.lock().waiting.drain().flat_map(|(_, machines)| machines).collect();
        futures::future::join_all(all.iter().map(|warm| end(warm.machine.as_ref()))).await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where machines that wait keep their sockets, below the run directory.
pub fn run_dir(node: &Node) -> PathBuf {
    dir(&node.config.run_dir)
}

/// The same, of the daemon whose run directory this is.
pub fn dir(run_dir: &Path) -> PathBuf {
    run_dir.join("pool")
}

/// Whether `bytes` more leave pods their reserve. A host that doesn't tell has room.
fn has_room(bytes: u64) -> bool {
    let Ok(info) = std::fs::read_to_string("/proc/meminfo") else { return true };
    let kib = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok())
    };
    match (kib("MemAvailable"), kib("MemTotal")) {
        (Some(available), Some(total)) => (available << 10) >= bytes + ((total << 10) / RESERVE),
        _ => true,
    }
}
