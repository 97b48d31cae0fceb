//! VMs that wait for pods: restored, rehearsed, standing still.
//!
//! ```text
//!  fill: too few? ─▶ make: restore ─▶ greet ─▶ rehearse ─▶ pause ─▶ Warm ─▶ claim ─▶ a pod
//!                                                                    │
//!  trim: too many? ended? of an old template? memory short? ─▶ end ◀─┘
//! ```
//!
//! Both look at each claim, and every [`PERIOD`]; neither waits for the other. One VM is made at a time,
//! whenever nobody waits for a pod; where pods start without a pause, one after each [`PERIOD`] all the same. Its
//! processes give way to all others. It is no pod's: no record names it, and the next daemon ends what this one
//! leaves.

mod demand;
mod make;
mod memory;
mod program;
mod rehearsal;

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use sandboxer_base::chain;
use sandboxer_config::PoolConfig;
use sandboxer_guest::Agent;
use sandboxer_host::network::PooledTap;
use sandboxer_protocol::agent::Ready;
use sandboxer_vmm::{DiskSpec, Vm};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    pod::DaemonState,
    template::{Missing, Shape, TemplateKey, Templates},
};
use demand::{Demand, Wanted, share_out};
pub use make::end;
pub use memory::Meminfo;
pub use rehearsal::Rehearsal;

/// How often is looked whether the pool should be larger or smaller, and how long pods that start can keep it from
/// growing by one.
const PERIOD: Duration = Duration::from_secs(5);
/// So long nobody has to have waited for a pod before a VM is made: longer than what passes between two calls of one start.
const LULL: Duration = Duration::from_millis(100);
/// How long after a failure the next VM of that size is tried.
const RETRY: Duration = Duration::from_secs(30);

/// A VM that waits for a pod. Its guest stands still.
#[derive(Debug)]
pub struct Warm {
    /// The VM.
    pub vm: Arc<dyn Vm>,
    /// A session with its agent.
    pub agent: Agent,
    /// The agent's first words.
    pub ready: Ready,
    /// What is behind its network interfaces.
    pub taps: Vec<PooledTap>,
    /// A scratch disk that it has mounted.
    pub spare: Option<DiskSpec>,
    template: TemplateKey,
}

/// The VMs that wait.
#[derive(Debug)]
pub struct Pool {
    config: PoolConfig,
    /// The size of which there are always [`PoolConfig::min`].
    usual: Shape,
    meminfo: Meminfo,
    // A plain lock: held for a push or a pop, never across an await.
    state: Mutex<State>,
    /// Told of each claim, and of VMs that were too many or of no use.
    taken: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    waiting: BTreeMap<Shape, VecDeque<Warm>>,
    demand: BTreeMap<Shape, Demand>,
}

/// A VM that waits, for people.
#[derive(Debug)]
pub struct WarmView {
    /// Its size.
    pub shape: Shape,
    /// Process of its VMM.
    pub pid: u32,
}

impl Pool {
    /// Returns a pool without VMs.
    pub fn new(config: PoolConfig, usual: Shape, meminfo: Meminfo) -> Arc<Self> {
        Arc::new(Self { config, usual, meminfo, state: Mutex::default(), taken: watch::Sender::default() })
    }

    /// Takes a VM of this size, if one waits that is a copy of what its template is now. The error
    /// says why there is none.
    pub fn claim(&self, shape: Shape, templates: &Arc<Templates>) -> Result<Warm, &'static str> {
        if self.config.max == 0 {
            return Err("off");
        }
        let template = templates.get(shape);
        let mut state = self.lock();
        state.demand.entry(shape).or_default().add(Instant::now());
        self.taken.send_replace(());
        let template = template.map_err(Missing::as_str)?;
        let waiting = state.waiting.get_mut(&shape).ok_or("empty")?;
        let fresh = waiting.iter().position(|warm| warm.template == template.key).ok_or("empty")?;
        waiting.remove(fresh).ok_or("empty")
    }

    /// Returns the VMs that wait.
    pub fn list(&self) -> Vec<WarmView> {
        let view = |shape, warm: &Warm| WarmView { shape, pid: warm.vm.record().pid };
        let state = self.lock();
        state.waiting.iter().flat_map(|(&shape, all)| all.iter().map(move |warm| view(shape, warm))).collect()
    }

    /// Keeps the pool at its size until `shutdown`; what was being made by then is undone when it answers.
    pub async fn keep_filled(&self, node: &Arc<DaemonState>, shutdown: &CancellationToken) {
        if self.config.max == 0 {
            return;
        }
        let rehearsal = match Rehearsal::new(&node.config.state_dir) {
            Ok(rehearsal) => rehearsal,
            Err(error) => return tracing::error!(%error, "no pool: its rehearsal cannot be prepared"),
        };
        tokio::join!(self.keep_trimmed(node, shutdown), self.fill(node, &rehearsal, shutdown));
    }

    async fn keep_trimmed(&self, node: &DaemonState, shutdown: &CancellationToken) {
        let mut taken = self.taken.subscribe();
        while !shutdown.is_cancelled() {
            self.trim(node).await;
            shutdown.run_until_cancelled(timeout(PERIOD, taken.changed())).await;
        }
    }

    async fn fill(&self, node: &Arc<DaemonState>, rehearsal: &Rehearsal, shutdown: &CancellationToken) {
        let mut taken = self.taken.subscribe();
        // Sizes of which the last could not be made, and when.
        let mut failed: BTreeMap<Shape, Instant> = BTreeMap::new();
        while !shutdown.is_cancelled() {
            if shutdown.run_until_cancelled(timeout(PERIOD, node.admission.quiet(LULL))).await.is_none() {
                return;
            }
            let may = |shape: &Shape| failed.get(shape).is_none_or(|at| at.elapsed() >= RETRY);
            let Some(shape) = self.lacking(may) else {
                shutdown.run_until_cancelled(timeout(PERIOD, taken.changed())).await;
                continue;
            };
            match make::warm(node, rehearsal, shape, shutdown).await {
                Ok(warm) => {
                    failed.remove(&shape);
                    self.lock().waiting.entry(shape).or_default().push_back(warm);
                }
                Err(_) if shutdown.is_cancelled() => return,
                Err(error) => {
                    if failed.insert(shape, Instant::now()).is_none() {
                        let error = chain(&error);
                        tracing::warn!(%shape, error, "no VM for the pool; tried again, told once");
                    }
                }
            }
        }
    }

    /// Returns the size that lacks most VMs, of those that may be made and that there is memory for.
    fn lacking(&self, may: impl Fn(&Shape) -> bool) -> Option<Shape> {
        let spare = self.meminfo.spare()?;
        let mut state = self.lock();
        let targets = self.targets(&mut state);
        let there = |shape| state.waiting.get(shape).map_or(0, VecDeque::len);
        // Those of another size that are too many have not been ended yet.
        if state.waiting.keys().map(there).sum::<usize>() >= self.config.max {
            return None;
        }
        let short = targets.iter().filter(|&(shape, &target)| there(shape) < target);
        let fits = short.filter(|(shape, _)| may(shape) && shape.memory_mib << 20 <= spare);
        fits.max_by_key(|&(shape, target)| target - there(shape)).map(|(&shape, _)| shape)
    }

    /// Returns how many VMs of each size should wait; none of sizes that are not named.
    fn targets(&self, state: &mut State) -> BTreeMap<Shape, usize> {
        let now = Instant::now();
        state.demand.entry(self.usual).or_default();
        state.demand.retain(|&shape, demand| demand.recent(now) > 0 || shape == self.usual);
        let wanted = state.demand.iter_mut().map(|(&shape, demand)| {
            let least = if shape == self.usual { self.config.min } else { 0 };
            (shape, Wanted { least, recent: demand.recent(now) })
        });
        share_out(self.config.max, &wanted.collect())
    }

    /// Ends the VMs that are too many, whose templates have changed or that have ended; and, as long as memory
    /// is short, one after the other, the largest first.
    async fn trim(&self, node: &DaemonState) {
        // Files are looked at before the lock is taken: a claim waits for it.
        let shapes: Vec<Shape> = self.lock().waiting.keys().copied().collect();
        let key = |&shape: &Shape| Some((shape, node.templates.get(shape).ok()?.key.clone()));
        let current: BTreeMap<Shape, TemplateKey> = shapes.iter().filter_map(key).collect();
        let surplus = self.surplus(&current);
        if !surplus.is_empty() {
            self.taken.send_replace(());
        }
        for warm in surplus {
            end(warm.vm.as_ref()).await;
        }
        while self.meminfo.spare().is_none() {
            let Some(warm) = self.largest() else { break };
            let pid = warm.vm.record().pid;
            tracing::info!(pid, "memory is short: the pool has one VM less");
            end(warm.vm.as_ref()).await;
        }
    }

    /// Takes out the VMs that are too many, that are of other templates than the `current` ones, or ended.
    fn surplus(&self, current: &BTreeMap<Shape, TemplateKey>) -> Vec<Warm> {
        let mut state = self.lock();
        let targets = self.targets(&mut state);
        let mut surplus = Vec::new();
        for (shape, vms) in &mut state.waiting {
            let target = targets.get(shape).copied().unwrap_or(0);
            let stale = |warm: &Warm| current.get(shape).is_some_and(|key| *key != warm.template);
            let ended = |warm: &Warm| warm.vm.exited().now_or_never().is_some();
            let (good, bad) = vms.drain(..).partition::<VecDeque<_>, _>(|warm| !stale(warm) && !ended(warm));
            *vms = good;
            surplus.extend(bad);
            surplus.extend(vms.drain(target.min(vms.len())..));
        }
        state.waiting.retain(|_, vms| !vms.is_empty());
        surplus
    }

    /// Takes out one of the VMs that have most memory.
    fn largest(&self) -> Option<Warm> {
        let mut state = self.lock();
        let waiting = state.waiting.iter_mut().filter(|(_, vms)| !vms.is_empty());
        waiting.max_by_key(|(shape, _)| shape.memory_mib)?.1.pop_back()
    }

    /// Ends every VM that waits.
    pub async fn drain(&self) {
        let all: Vec<Warm> = mem::take(&mut self.lock().waiting).into_values().flatten().collect();
        futures::future::join_all(all.iter().map(|warm| end(warm.vm.as_ref()))).await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns where VMs that wait keep their sockets, below the run directory.
pub fn run_dir(node: &DaemonState) -> PathBuf {
    dir(&node.config.run_dir)
}

/// Returns the same, of the daemon whose run directory this is.
pub fn dir(run_dir: &Path) -> PathBuf {
    run_dir.join("pool")
}
