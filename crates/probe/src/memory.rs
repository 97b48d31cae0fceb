//! Memory over the number of pods: a repeated sweep over pod counts with alternating runtimes; at the largest
//! count also the CPU time of idle pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::attribution::Role;
use crate::first_byte::LogWatch;
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

/// The sweep of published figures.
pub const FULL_SWEEP: [u32; 6] = [1, 5, 10, 20, 30, 50];
/// Repetitions of a full sweep.
pub const FULL_REPEAT: u32 = 3;
/// Interval between two readings of memory that may still change.
const LOOK: Duration = Duration::from_millis(500);
/// Maximum readings; then the last one is used, with a note.
const LOOKS: usize = 20;
/// Relative difference below which two sums are equal.
const SETTLED: f64 = 0.005;
/// Measuring time for idle pods: one clock tick of a process is 2 millicores then.
const IDLE: Duration = Duration::from_secs(5);
/// Pods started at once while growing to the next count; not measured.
const AT_ONCE: usize = 4;

/// Plan of a sweep.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// Handlers, in the order in which they alternate.
    pub runtimes: Vec<String>,
    /// Pod counts, ascending.
    pub counts: Vec<u32>,
    /// Repetitions.
    pub repeat: u32,
    /// Recipe of the pods.
    pub recipe: Recipe,
    /// How VMs of the series `vm` are run.
    pub vm: Option<Vm>,
}

/// What a series other than a handler has in place of pods.
enum Own {
    Vm(RunningVm),
    Native(Process),
}

/// A ledger and its place in the sweep.
#[derive(Debug, Clone)]
pub struct Point {
    /// Handler.
    pub runtime: String,
    /// Repetition, from 0.
    pub repetition: u32,
    /// The ledger.
    pub ledger: Ledger,
    /// The resident process' PSS without any pod, KiB, before the first pod of this repetition; `None` of pods
    /// that were already running.
    pub idle_daemon_kib: Option<u64>,
    /// Fall of `MemAvailable` since there was no pod, KiB. Negative if other programs freed memory; `None`
    /// for pods that were already running.
    pub available_fall_kib: Option<i64>,
    /// CPU time of the idle pods, millicores, without the containers' own processes. Only at the
    /// largest count.
    pub idle_cpu_millicores: Option<f64>,
}

impl Point {
    /// Returns the memory that is freed with the pods, KiB: everything except the resident process as it is without
    /// pods, and the VMs in the pool.
    pub fn goes_away_kib(&self) -> Option<u64> {
        let stays = self.idle_daemon_kib? + self.ledger.role(Role::Pool);
        Some(self.ledger.total_kib().saturating_sub(stays))
    }
}

/// Result of a sweep.
#[derive(Debug, Default)]
pub struct Points {
    /// In order of measurement.
    pub points: Vec<Point>,
    /// By handler: the VM of one of its pods, if a daemon reports it.
    pub vms: BTreeMap<String, Facts>,
    /// Why it ended early, if it did.
    pub partial: Option<String>,
    /// Notes.
    pub notes: Vec<String>,
}

/// Measures. Calls `progress` for each point when its pods were measured; ends early when `cancel` is cancelled or a pod cannot be started.
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
    for repetition in 0..sweep.repeat {
        for handler in &sweep.runtimes {
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
                ended = Err("cannot remove pods".into());
            } else {
                // Also after an early end: otherwise the resident process would count as freed.
                let idle = column.idle_again(&mut points.points[first..]).await;
                ended = ended.and(idle);
            }
            residents.insert(handler, column.residents);
            if let Err(why) = ended {
                points.partial = Some(why);
                return points;
            }
        }
    }
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
    /// Returns as an error why it ended early.
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
                return Err(gone(handler, ledger.pods, count));
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
                idle_cpu_millicores: if largest { self.idle_cpu(&ledger).await } else { None },
                ledger,
            };
            progress(&point);
            points.points.push(point);
        }
        Ok(())
    }

    /// Measures resident processes without pods, after the pods are removed.
    async fn idle_again(&self, points: &mut [Point]) -> Result<(), String> {
        if self.residents.is_empty() || points.iter().all(|point| point.idle_daemon_kib != Some(0)) {
            return Ok(());
        }
        let idle = self.settled().await?.0.role(Role::Daemon);
        points.iter_mut().for_each(|point| point.idle_daemon_kib = Some(idle));
        Ok(())
    }

    /// Starts VMs or processes up to this count, one after the other.
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

    /// Returns a ledger with a stable sum; false if it still changed at the last reading.
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

    /// Returns the VM of any pod: all are alike.
    async fn vm(&self, ledger: &Ledger) -> Option<Facts> {
        let id = ledger.entries.iter().find_map(|entry| entry.found.pod.as_deref())?;
        self.trace?.pod(id).await.ok().as_ref().map(trace::vm)
    }

    /// Measures idle CPU time. Nothing accesses the pods meanwhile.
    async fn idle_cpu(&self, ledger: &Ledger) -> Option<f64> {
        let counted = ledger.entries.iter().filter(|entry| entry.found.role != Role::Workload);
        let before: Vec<(i32, Duration)> =
            counted.filter_map(|entry| Some((entry.pid, process::cpu_time(entry.pid)?))).collect();
        let begun = Instant::now();
        tokio::select! {
            () = self.cancel.cancelled() => return None,
            () = tokio::time::sleep(IDLE) => {}
        }
        let used: Duration =
            before.into_iter().filter_map(|(pid, before)| process::cpu_time(pid)?.checked_sub(before)).sum();
        Some(used.as_secs_f64() / begun.elapsed().as_secs_f64() * 1e3)
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

/// Says that pods that were started are not there any more: a figure of the others would be taken for one of all.
fn gone(handler: &str, ready: usize, count: u32) -> String {
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

/// Returns the line; `None` with fewer than two distinct x.
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
