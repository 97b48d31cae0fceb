//! Warm VMs that wait for pods: restored, rehearsed, paused.
//!
//! ```text
//!  fill: too few? ─▶ make: restore ─▶ greet ─▶ rehearse ─▶ pause ─▶ Warm ─▶ claim ─▶ a pod
//!                                                                    │
//!  trim: too many? ended? of an old template? memory short? ─▶ end ◀─┘
//! ```
//!
//! Both run after each claim, and every [`PERIOD`]; neither waits for the other. VMs are created one at a time, while
//! no pod is starting. If pods start without a pause, one is still created after each [`PERIOD`]. The VM's processes
//! have low priority. It belongs to no pod: no record names it, and the next daemon kills what this one leaves.

mod demand;
mod make;
mod memory;

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
use sandboxer_vmm::{DiskRecord, Vm};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    pod::{daemon_state::DaemonState, placer::Seat},
    template::{Kind, Missing, Shape, TemplateKey, Templates},
};
use demand::{Demand, Wanted, share_out};
pub use make::end;
pub use memory::Meminfo;

/// Interval between checks of the pool's size, and the maximum time for which starting pods can delay a new VM.
const PERIOD: Duration = Duration::from_secs(5);
/// Time without a starting pod before a VM is created: longer than the gap between two calls of one start.
const LULL: Duration = Duration::from_millis(100);
/// Time after a failure before a VM of that size is created again.
const RETRY: Duration = Duration::from_secs(30);

/// A VM that waits for a pod. Its guest is paused.
#[derive(Debug)]
pub struct Warm {
    /// The VM.
    pub vm: Arc<dyn Vm>,
    /// A session with the VM's agent.
    pub agent: Agent,
    /// The agent's ready message.
    pub ready: Ready,
    /// The taps of the VM's network interfaces.
    pub taps: Vec<PooledTap>,
    /// A scratch disk that the guest has mounted.
    pub spare: Option<DiskRecord>,
    /// The VM's place on a NUMA node; `None`: not placed.
    pub seat: Option<Seat>,
    template: TemplateKey,
}

/// The pool of waiting VMs.
#[derive(Debug)]
pub struct Pool {
    config: PoolConfig,
    /// The kind of VMs of which the pool keeps [`PoolConfig::min`].
    usual: Kind,
    meminfo: Meminfo,
    // A plain lock: held for a push or a pop, never across an await.
    state: Mutex<State>,
    /// Notified of each claim, and of VMs that were surplus or unusable.
    taken: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    waiting: BTreeMap<Kind, VecDeque<Warm>>,
    demand: BTreeMap<Kind, Demand>,
}

/// A waiting VM, for people.
#[derive(Debug)]
pub struct WarmView {
    /// Name of the VM's VMM.
    pub vmm: String,
    /// The VM's size.
    pub shape: Shape,
    /// PID of the VM's VMM.
    pub pid: u32,
    /// The VM's NUMA node, if it is placed.
    pub node: Option<u32>,
}

impl Pool {
    /// Creates an empty pool.
    pub fn new(config: PoolConfig, usual: impl Into<Kind>, meminfo: Meminfo) -> Arc<Self> {
        let usual = usual.into();
        Arc::new(Self { config, usual, meminfo, state: Mutex::default(), taken: watch::Sender::default() })
    }

    /// Takes a waiting VM of this kind that is a copy of the current template, if possible one on the NUMA node
    /// `prefers`. The error is the reason why there is none.
    ///
    /// A pod without a network takes one with a network card, which its guest gives up: VMs without one would need a
    /// template, and memory, of their own.
    pub fn claim(
        &self,
        kind: impl Into<Kind>,
        prefers: Option<u32>,
        templates: &Arc<Templates>,
    ) -> Result<Warm, &'static str> {
        let mut kind: Kind = kind.into();
        if kind == self.usual.with_nics(0) {
            kind = self.usual;
        }
        if self.config.max == 0 {
            return Err("off");
        }
        let template = templates.get(kind);
        let mut state = self.lock();
        state.demand.entry(kind).or_default().add(Instant::now());
        self.taken.send_replace(());
        let template = template.map_err(Missing::as_str)?;
        let waiting = state.waiting.get_mut(&kind).ok_or_else(|| self.lack(kind))?;
        let fresh = waiting.iter().enumerate().filter(|(_, warm)| warm.template == template.key);
        // The oldest VM on the preferred node, else the oldest.
        let elsewhere = |warm: &Warm| warm.seat.as_ref().map(Seat::node) != prefers;
        let (at, _) = fresh.min_by_key(|(_, warm)| elsewhere(warm)).ok_or_else(|| self.lack(kind))?;
        waiting.remove(at).ok_or_else(|| self.lack(kind))
    }

    /// Returns why no VM of this kind waits: the property that distinguishes it from the usual kind. Other kinds have
    /// fewer VMs or none; with `min = max` always none.
    fn lack(&self, kind: Kind) -> &'static str {
        let (shape, usual) = (kind.shape, self.usual.shape);
        if kind.vmm != self.usual.vmm {
            "other-vmm"
        } else if (shape.vcpus, shape.memory_mib) != (usual.vcpus, usual.memory_mib) {
            "other-size"
        } else if shape.nics != usual.nics {
            "interfaces"
        } else {
            "empty"
        }
    }

    /// Lists the waiting VMs.
    pub fn list(&self) -> Vec<WarmView> {
        let view = |kind: Kind, warm: &Warm| {
            let record = warm.vm.record();
            WarmView {
                vmm: record.vmm,
                shape: kind.shape,
                pid: record.pid,
                node: warm.seat.as_ref().map(Seat::node),
            }
        };
        let state = self.lock();
        state.waiting.iter().flat_map(|(&kind, all)| all.iter().map(move |warm| view(kind, warm))).collect()
    }

    /// Keeps the pool at its size until `shutdown`. On return, an unfinished VM has been undone.
    pub async fn keep_filled(&self, node: &Arc<DaemonState>, shutdown: &CancellationToken) {
        if self.config.max == 0 {
            return;
        }
        tokio::join!(self.keep_trimmed(node, shutdown), self.fill(node, shutdown));
    }

    async fn keep_trimmed(&self, node: &DaemonState, shutdown: &CancellationToken) {
        let mut taken = self.taken.subscribe();
        while !shutdown.is_cancelled() {
            self.trim(node).await;
            shutdown.run_until_cancelled(timeout(PERIOD, taken.changed())).await;
        }
    }

    async fn fill(&self, node: &Arc<DaemonState>, shutdown: &CancellationToken) {
        let mut taken = self.taken.subscribe();
        // Kinds whose last VM failed, and the time of the failure.
        let mut failed: BTreeMap<Kind, Instant> = BTreeMap::new();
        while !shutdown.is_cancelled() {
            if shutdown.run_until_cancelled(timeout(PERIOD, node.admission.quiet(LULL))).await.is_none() {
                return;
            }
            let may = |kind: &Kind| failed.get(kind).is_none_or(|at| at.elapsed() >= RETRY);
            let Some(kind) = self.lacking(may) else {
                shutdown.run_until_cancelled(timeout(PERIOD, taken.changed())).await;
                continue;
            };
            match make::warm(node, kind, shutdown).await {
                Ok(warm) => {
                    failed.remove(&kind);
                    self.lock().waiting.entry(kind).or_default().push_back(warm);
                }
                Err(_) if shutdown.is_cancelled() => return,
                Err(error) => {
                    if failed.insert(kind, Instant::now()).is_none() {
                        let (error, shape) = (chain(&error), kind.shape);
                        let vmm = node.vmms.get(kind.vmm).info().name;
                        tracing::warn!(%shape, vmm, error, "cannot make a VM for the pool; retrying, logged once");
                    }
                }
            }
        }
    }

    /// Returns the kind furthest below its target that `may` be created and fits in free memory.
    fn lacking(&self, may: impl Fn(&Kind) -> bool) -> Option<Kind> {
        let spare = self.meminfo.spare()?;
        let mut state = self.lock();
        let targets = self.targets(&mut state);
        let there = |kind| state.waiting.get(kind).map_or(0, VecDeque::len);
        // Surplus VMs of another size have not been killed yet.
        if state.waiting.keys().map(there).sum::<usize>() >= self.config.max {
            return None;
        }
        let short = targets.iter().filter(|&(kind, &target)| there(kind) < target);
        let fits = short.filter(|(kind, _)| may(kind) && kind.shape.memory_mib << 20 <= spare);
        fits.max_by_key(|&(kind, target)| target - there(kind)).map(|(&kind, _)| kind)
    }

    /// Returns the number of VMs of each size that should wait; none of unlisted sizes.
    fn targets(&self, state: &mut State) -> BTreeMap<Kind, usize> {
        let now = Instant::now();
        state.demand.entry(self.usual).or_default();
        state.demand.retain(|&kind, demand| demand.recent(now) > 0 || kind == self.usual);
        let wanted = state.demand.iter_mut().map(|(&kind, demand)| {
            let least = if kind == self.usual { self.config.min } else { 0 };
            (kind, Wanted { least, recent: demand.recent(now) })
        });
        share_out(self.config.max, &wanted.collect())
    }

    /// Kills VMs that are surplus, have exited or are copies of an old template. While memory is short, also kills one
    /// after the other, the largest first.
    async fn trim(&self, node: &DaemonState) {
        // Files are checked before the lock is taken: claims wait for it.
        let kinds: Vec<Kind> = self.lock().waiting.keys().copied().collect();
        let key = |&kind: &Kind| Some((kind, node.templates.get(kind).ok()?.key.clone()));
        let current: BTreeMap<Kind, TemplateKey> = kinds.iter().filter_map(key).collect();
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
            tracing::info!(pid, "removed a VM from the pool: memory is short");
            end(warm.vm.as_ref()).await;
        }
    }

    /// Takes out the VMs that are surplus, have exited, or are not copies of a `current` template.
    fn surplus(&self, current: &BTreeMap<Kind, TemplateKey>) -> Vec<Warm> {
        let mut state = self.lock();
        let targets = self.targets(&mut state);
        let mut surplus = Vec::new();
        for (kind, vms) in &mut state.waiting {
            let target = targets.get(kind).copied().unwrap_or(0);
            let stale = |warm: &Warm| current.get(kind).is_some_and(|key| *key != warm.template);
            let ended = |warm: &Warm| warm.vm.exited().now_or_never().is_some();
            let (good, bad) = vms.drain(..).partition::<VecDeque<_>, _>(|warm| !stale(warm) && !ended(warm));
            *vms = good;
            surplus.extend(bad);
            surplus.extend(vms.drain(target.min(vms.len())..));
        }
        state.waiting.retain(|_, vms| !vms.is_empty());
        surplus
    }

    /// Takes out one of the VMs with the most memory.
    fn largest(&self) -> Option<Warm> {
        let mut state = self.lock();
        let waiting = state.waiting.iter_mut().filter(|(_, vms)| !vms.is_empty());
        waiting.max_by_key(|(kind, _)| kind.shape.memory_mib)?.1.pop_back()
    }

    /// Kills all waiting VMs.
    pub async fn drain(&self) {
        let all: Vec<Warm> = mem::take(&mut self.lock().waiting).into_values().flatten().collect();
        futures::future::join_all(all.iter().map(|warm| end(warm.vm.as_ref()))).await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the directory for sockets of waiting VMs, below the run directory.
pub fn run_dir(node: &DaemonState) -> PathBuf {
    dir(&node.config.run_dir)
}

/// Returns the directory for sockets of waiting VMs of the daemon with this run directory.
pub fn dir(run_dir: &Path) -> PathBuf {
    run_dir.join(sandboxer_process::strays::POOL)
}
