//! Memory over the number of pods: a repeated sweep over pod counts with alternating runtimes. At the largest count,
//! also the CPU time of idle pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::attribution::Role;
use crate::first_byte::LogWatch;
use crate::idle::{Accounts, Windows};
use crate::ledger::{self, Ledger, LedgerError};
use crate::manifest::Facts;
use crate::native::{NATIVE, Process};
use crate::process;
use crate::runtime::{Listed, Runtime};
use crate::startup::vm_of;
use crate::timeline::{self, RUN_LABEL, Recipe};
use crate::trace::{self, Trace};
use crate::vm::process::RunningVm;
use crate::vm::{VM, Vm};

/// Pod counts of the published figures.
pub const FULL_SWEEP: [u32; 6] = [1, 5, 10, 20, 30, 50];
/// Repetitions of a full sweep.
pub const FULL_REPEAT: u32 = 3;
/// Interval between two readings of memory that may still change.
const LOOK: Duration = Duration::from_millis(500);
/// Maximum number of readings; after that the last one is used, with a note.
const LOOKS: usize = 20;
/// Relative difference below which two sums are equal.
const SETTLED: f64 = 0.005;
/// Pods started at once while growing to the next count; this is not measured.
const AT_ONCE: usize = 4;

/// Plan of a sweep.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// Handlers, in the order in which they alternate.
    pub runtimes: Vec<String>,
    /// Pod counts, ascending.
    pub counts: Vec<u32>,
    /// Number of repetitions.
    pub repeat: u32,
    /// Recipe of the pods.
    pub recipe: Recipe,
    /// Configuration of the VMs of the series `vm`.
    pub vm: Option<Vm>,
    /// Windows in which idle pods are measured.
    pub idle: Windows,
}

/// Processes or VMs of a series that has no handler, in place of pods.
enum Own {
    Vm(RunningVm),
    Native(Process),
}

/// A ledger and its place in the sweep.
#[derive(Debug, Clone)]
pub struct Point {
    /// Runtime handler.
    pub runtime: String,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// The ledger taken there.
    pub ledger: Ledger,
    /// PSS of the resident process before this repetition's first pod, KiB; `None` for pods that were already running.
    pub idle_daemon_kib: Option<u64>,
    /// Fall of `MemAvailable` since there was no pod, KiB. Negative if other programs freed memory; `None` for pods
    /// that were already running.
    pub available_fall_kib: Option<i64>,
    /// CPU time of the idle pods in each window, millicores, without the containers' own processes. Only at the largest
    /// count.
    pub idle_cpu_millicores: Vec<f64>,
}

impl Point {
    /// Returns the memory that is freed with the pods, KiB: everything except the VMs in the pool and the memory that
    /// the resident process uses without pods.
    pub fn goes_away_kib(&self) -> Option<u64> {
        let stays = self.idle_daemon_kib? + self.ledger.role(Role::Pool);
        Some(self.ledger.total_kib().saturating_sub(stays))
    }
}

/// Result of a sweep.
#[derive(Debug, Default)]
pub struct Points {
    /// The points, in order of measurement.
    pub points: Vec<Point>,
    /// The VM of one pod of each handler, if a daemon reports it.
    pub vms: BTreeMap<String, Facts>,
    /// The reason for an early end; `None` if the sweep is complete.
    pub partial: Option<String>,
    /// Notes on the sweep.
    pub notes: Vec<String>,
}

/// Measures all points and calls `progress` after each. Ends early when `cancel` is cancelled or a pod cannot be
/// started.
pub async fn sweep(
    runtime: &Runtime,
    watch: &Arc<LogWatch>,
    trace: Option<&Trace>,
    sweep: &Sweep,
    cancel: &CancellationToken,
    progress: &mut (dyn FnMut(&Point) + Send),
) -> Points {
    let mut points = Points::default();
    // By handler: found by their ties while there are pods, measured again without pods.
    let mut residents: BTreeMap<&str, BTreeSet<i32>> = BTreeMap::new();
    // A handler that failed is left out; the others are still measured.
    let mut failed: BTreeMap<&str, String> = BTreeMap::new();
    for repetition in 0..sweep.repeat {
        for handler in &sweep.runtimes {
            if failed.contains_key(handler.as_str()) {
                continue;
            }
            let mut column = Column {
                runtime,
                watch,
                trace,
                sweep,
                handler,
                repetition,
                cancel,
                residents: residents.remove(handler.as_str()).unwrap_or_default(),
                own: Vec::new(),
            };
            let first = points.points.len();
            let mut ended = column.measure(&mut points, progress).await;
            column.own.clear();
            if let Err(error) = timeline::remove_all(runtime, &sweep.recipe.run).await {
                let left =
                    format!("pods with label {RUN_LABEL}={} may still exist: {error}", sweep.recipe.run);
                points.notes.push(left);
                // The remaining pods would be in the next handler's figures.
                let why = ended.err().map_or_else(String::new, |why| format!("{why}; "));
                points.partial = Some(format!("{why}cannot remove pods of {handler}"));
                return points;
            }
            if !cancel.is_cancelled() {
                // This also follows an early end; otherwise the resident process would count as freed.
                let idle = column.idle_again(&mut points.points[first..]).await;
                ended = ended.and(idle);
            }
            residents.insert(handler, column.residents);
            if let Err(why) = ended {
                failed.insert(handler, why);
            }
            if cancel.is_cancelled() {
                points.partial = Some("interrupted".into());
                return points;
            }
        }
    }
    let reasons: Vec<String> = failed.into_values().collect();
    points.partial = (!reasons.is_empty()).then(|| reasons.join("; "));
    points
}

/// Measures one handler once at all counts.
struct Column<'a> {
    runtime: &'a Runtime,
    watch: &'a Arc<LogWatch>,
    trace: Option<&'a Trace>,
    sweep: &'a Sweep,
    handler: &'a str,
    repetition: u32,
    cancel: &'a CancellationToken,
    residents: BTreeSet<i32>,
    own: Vec<Own>,
}

impl Column<'_> {
    /// Measures at all counts. Returns as an error the reason for an early end.
    async fn measure(
        &mut self,
        points: &mut Points,
        progress: &mut (dyn FnMut(&Point) + Send),
    ) -> Result<(), String> {
        let handler = self.handler;
        let idle = self.settled().await?.0;
        let mut running = 0;
        for &count in &self.sweep.counts {
            self.grow(running, count).await?;
            running = count;
            let (ledger, still) = self.settled().await?;
            if self.cancel.is_cancelled() {
                return Err("interrupted".into());
            }
            if !still {
                points.notes.push(format!(
                    "{handler} with {count} pods: memory was still changing when it was measured"
                ));
            }
            if ledger.pods != count as usize {
                return Err(missing_pods(handler, ledger.pods, count));
            }
            self.residents.extend(ledger.residents());
            if let Some(vm) = self.vm(&ledger).await {
                points.vms.insert(handler.to_owned(), vm);
            }
            let largest = Some(&count) == self.sweep.counts.last();
            let point = Point {
                runtime: handler.to_owned(),
                repetition: self.repetition,
                idle_daemon_kib: Some(idle.role(Role::Daemon)),
                available_fall_kib: Some(idle.available_kib as i64 - ledger.available_kib as i64),
                idle_cpu_millicores: if largest { self.idle_cpu(&ledger).await } else { Vec::new() },
                ledger,
            };
            progress(&point);
            points.points.push(point);
        }
        Ok(())
    }

    /// Measures resident processes again after the pods' removal.
    async fn idle_again(&self, points: &mut [Point]) -> Result<(), String> {
        if self.residents.is_empty() || points.iter().all(|point| point.idle_daemon_kib != Some(0)) {
            return Ok(());
        }
        let idle = self.settled().await?.0.role(Role::Daemon);
        points.iter_mut().for_each(|point| point.idle_daemon_kib = Some(idle));
        Ok(())
    }

    /// Starts VMs or processes one after the other, up to this count.
    async fn grow_own(&mut self, to: u32) -> Result<(), String> {
        let recipe = &self.sweep.recipe;
        while self.own.len() < to as usize {
            let index = self.own.len();
            let name = format!("{}-{}-{}-{index}", recipe.run, self.handler, self.repetition);
            let attempt = async {
                let Some(vm) = self.sweep.vm.as_ref().filter(|_| self.handler == VM) else {
                    let process = Process::start(&recipe.command, recipe.timeout).await;
                    return process.map(Own::Native).map_err(|error| sandboxer_base::chain(&error));
                };
                let running = vm.start(&vm_of(recipe, &name)).map_err(|error| error.to_string())?;
                running.first_byte(recipe.timeout).await.map_err(|error| error.to_string())?;
                Ok(Own::Vm(running))
            };
            let started = tokio::select! {
                biased;
                () = self.cancel.cancelled() => return Err("interrupted".into()),
                started = attempt => started,
            };
            let started =
                started.map_err(|error| format!("{} {} of {to}: {error}", self.handler, index + 1))?;
            self.own.push(started);
        }
        Ok(())
    }

    async fn grow(&mut self, from: u32, to: u32) -> Result<(), String> {
        if [VM, NATIVE].contains(&self.handler) {
            return self.grow_own(to).await;
        }
        self.grow_pods(from, to).await
    }

    async fn grow_pods(&self, from: u32, to: u32) -> Result<(), String> {
        use futures::{StreamExt, TryStreamExt, stream};
        let (run, handler) = (&self.sweep.recipe.run, self.handler);
        stream::iter(from..to)
            .map(|index| async move {
                let name = format!("{run}-{handler}-{}-{index}", self.repetition);
                let recipe = &self.sweep.recipe;
                let start =
                    timeline::start(self.runtime, self.watch, recipe, handler, &name, self.cancel).await;
                start.end.map_err(|error| format!("pod {} of {to} on {handler}: {error}", index + 1))
            })
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await
    }

    /// Returns a ledger, and whether its sum was stable at the last reading.
    async fn settled(&self) -> Result<(Ledger, bool), String> {
        let mut tick = tokio::time::interval(LOOK);
        let mut last = self.ledger().await?;
        tick.tick().await;
        for _ in 0..LOOKS {
            tokio::select! {
                () = self.cancel.cancelled() => break,
                _ = tick.tick() => {}
            }
            let next = self.ledger().await?;
            let (before, after) = (last.total_kib() as f64, next.total_kib() as f64);
            last = next;
            if (after - before).abs() <= SETTLED * after {
                return Ok((last, true));
            }
        }
        Ok((last, false))
    }

    /// Returns the facts of one pod's VM: all VMs are alike.
    async fn vm(&self, ledger: &Ledger) -> Option<Facts> {
        let id = ledger.entries.iter().find_map(|entry| entry.found.pod.as_deref())?;
        self.trace?.pod(id).await.ok().as_ref().map(trace::vm)
    }

    /// Measures idle CPU time in each window. Nothing accesses the pods meanwhile.
    async fn idle_cpu(&self, ledger: &Ledger) -> Vec<f64> {
        let windows = self.sweep.idle;
        let overhead_pids = ledger.entries.iter().filter(|entry| entry.found.role != Role::Workload);
        let overhead_pids: BTreeSet<i32> = overhead_pids.map(|entry| entry.pid).collect();
        let Ok(table) = process::table() else { return Vec::new() };
        let accounts = Accounts::new(&table, &overhead_pids);
        let mut readings = Vec::new();
        for _ in 0..windows.in_each(self.sweep.repeat) {
            let (before, begun) = (accounts.read(), Instant::now());
            tokio::select! {
                () = self.cancel.cancelled() => return readings,
                () = tokio::time::sleep(windows.length) => {}
            }
            let used = accounts.read().since(&before);
            readings.push(used.as_secs_f64() / begun.elapsed().as_secs_f64() * 1e3);
        }
        readings
    }

    async fn ledger(&self) -> Result<Ledger, String> {
        if [VM, NATIVE].contains(&self.handler) {
            let own = self.own.iter().map(|own| match own {
                Own::Vm(vm) => (vm.pid(), Role::Vmm),
                Own::Native(process) => (process.pid() as i32, Role::Workload),
            });
            return ledger::take_own(own.collect()).await.map_err(|error| error.to_string());
        }
        let run = &self.sweep.recipe.run;
        let mine = |pod: &Listed| pod.labels.get(RUN_LABEL) == Some(run);
        ledger::take(self.runtime, mine, &self.residents)
            .await
            .map_err(|error: LedgerError| error.to_string())
    }
}

/// Returns an error's text for pods that were started and are gone: a figure of the others would be mistaken for one of
/// all.
fn missing_pods(handler: &str, ready: usize, count: u32) -> String {
    format!(
        "{handler}: only {ready} of {count} pods are still ready. Something else removed or stopped them. A kubelet removes pods that \
         its API server does not know: stop it while you measure (systemctl stop kubelet)"
    )
}

/// A regression line by least squares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// Growth of y per x.
    pub slope: f64,
    /// y at x = 0.
    pub intercept: f64,
    /// Fraction of the variance that the line explains.
    pub r2: f64,
}

/// Returns the regression line; `None` with fewer than two distinct x.
pub fn regression(points: &[(f64, f64)]) -> Option<Line> {
    let count = points.len() as f64;
    let (mean_x, mean_y) =
        (points.iter().map(|p| p.0).sum::<f64>() / count, points.iter().map(|p| p.1).sum::<f64>() / count);
    let sum = |f: &dyn Fn(f64, f64) -> f64| points.iter().map(|p| f(p.0 - mean_x, p.1 - mean_y)).sum::<f64>();
    let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
    if points.len() < 2 || xx <= 0.0 {
        return None;
    }
    let slope = xy / xx;
    let r2 = if yy > 0.0 { xy * xy / (xx * yy) } else { 1.0 };
    Some(Line { slope, intercept: mean_y - slope * mean_x, r2 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let points: Vec<_> =
            FULL_SWEEP.iter().map(|&n| (f64::from(n), 12_000.0 + 150.0 * f64::from(n))).collect();
        let line = regression(&points).unwrap();
        assert!((line.slope - 150.0).abs() < 1e-9 && (line.intercept - 12_000.0).abs() < 1e-6);
        assert!((line.r2 - 1.0).abs() < 1e-12);
        assert_eq!(regression(&[(1.0, 2.0), (1.0, 3.0)]), None);
        assert_eq!(regression(&[]), None);
    }
}
