//! How memory grows with the number of pods: a sweep over pod counts, repeated, runtimes alternating. At its
//! largest count, what idle pods use of the CPU.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::attribution::Role;
use crate::first_byte::LogWatch;
use crate::ledger::{self, Ledger, LedgerError};
use crate::manifest::Facts;
use crate::process;
use crate::runtime::{Listed, Runtime};
use crate::timeline::{self, RUN_LABEL, Recipe};
use crate::trace::{self, Trace};

/// The sweep that published figures have.
pub const FULL_SWEEP: [u32; 6] = [1, 5, 10, 20, 30, 50];
/// Repetitions of a full sweep.
pub const FULL_REPEAT: u32 = 3;
/// Between two looks at memory that may still change.
const LOOK: Duration = Duration::from_millis(500);
/// Most looks; then it is taken as it is, and said.
const LOOKS: usize = 20;
/// Two sums that differ by less than this part are the same.
const SETTLED: f64 = 0.005;
/// Over which the CPU time of idle pods is taken: a clock tick of one process is 2 thousandths of a CPU then.
const IDLE: Duration = Duration::from_secs(5);
/// Pods that are started at once while growing to the next count; not a measurement of anything.
const AT_ONCE: usize = 4;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// Handlers, in the order in which they alternate.
    pub runtimes: Vec<String>,
    /// Pod counts, ascending.
    pub counts: Vec<u32>,
    /// How often all of it is done.
    pub repeat: u32,
    /// What each pod is.
    pub recipe: Recipe,
}

/// A ledger and where it stands in the sweep.
#[derive(Debug, Clone)]
pub struct Point {
    /// Handler.
    pub runtime: String,
    /// Repetition, from 0.
    pub repetition: u32,
    /// The ledger of this many pods.
    pub ledger: Ledger,
    /// The resident process' PSS without any pod, KiB, before the first pod of this repetition; `None` of pods
    /// that ran already.
    pub idle_daemon_kib: Option<u64>,
    /// By how much `MemAvailable` fell since there was no pod, KiB. Negative when others gave some back; `None`
    /// of pods that ran already.
    pub available_fall_kib: Option<i64>,
    /// What the idle pods use of the CPU, thousandths of one, the containers' own processes left out. Of the
    /// largest count only.
    pub idle_cpu_millicores: Option<f64>,
}

impl Point {
    /// Returns what goes away when the pods go away, KiB: everything but the resident process as it is without pods,
    /// and the machines that wait for others.
    pub fn goes_away_kib(&self) -> Option<u64> {
        let stays = self.idle_daemon_kib? + self.ledger.role(Role::Pool);
        Some(self.ledger.total_kib().saturating_sub(stays))
    }
}

/// What came out of a sweep.
#[derive(Debug, Default)]
pub struct Points {
    /// In the order in which they were taken.
    pub points: Vec<Point>,
    /// By handler: the machine of one of its pods, where a daemon tells it.
    pub machines: BTreeMap<String, Facts>,
    /// Why it ended before its time, if it did.
    pub partial: Option<String>,
    /// What a reader must know.
    pub notes: Vec<String>,
}

/// Measures. `progress` is told each point; it ends early when `cancel` is cancelled or a pod can't be started.
pub async fn sweep(
    runtime: &Runtime,
    watch: &Arc<LogWatch>,
    trace: Option<&Trace>,
    sweep: &Sweep,
    cancel: &CancellationToken,
    progress: &mut (dyn FnMut(&Point) + Send),
) -> Points {
    let mut points = Points::default();
    // By handler: found by its ties when there are pods, looked at again when there are none.
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
            };
            let first = points.points.len();
            let mut ended = column.measure(&mut points).await;
            if let Err(error) = timeline::remove_all(runtime, &sweep.recipe.run).await {
                let left = format!("pods labelled {RUN_LABEL}={} may be left: {error}", sweep.recipe.run);
                points.notes.push(left);
                ended = Err("pods could not be removed".into());
            } else {
                // Also of a sweep that ended early: without it the resident process would count as gone.
                let idle = column.idle_again(&mut points.points[first..]).await;
                ended = ended.and(idle);
            }
            points.points[first..].iter().for_each(&mut *progress);
            residents.insert(handler, column.residents);
            if let Err(why) = ended {
                points.partial = Some(why);
                return points;
            }
        }
    }
    points
}

/// One handler, once through all counts.
struct Column<'a> {
    runtime: &'a Runtime,
    watch: &'a Arc<LogWatch>,
    trace: Option<&'a Trace>,
    sweep: &'a Sweep,
    handler: &'a str,
    repetition: u32,
    cancel: &'a CancellationToken,
    residents: BTreeSet<i32>,
}

impl Column<'_> {
    /// Runs all rounds. Err: why it ended early.
    async fn measure(&mut self, points: &mut Points) -> Result<(), String> {
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
                points
                    .notes
                    .push(format!("{handler} with {count} pods: memory still changed when it was taken"));
            }
            if ledger.pods != count as usize {
                points.notes.push(format!("{handler}: {} of {count} pods were ready", ledger.pods));
            }
            self.residents.extend(ledger.residents());
            if let Some(machine) = self.machine(&ledger).await {
                points.machines.insert(handler.to_owned(), machine);
            }
            let largest = Some(&count) == self.sweep.counts.last();
            points.points.push(Point {
                runtime: handler.to_owned(),
                repetition: self.repetition,
                idle_daemon_kib: Some(idle.role(Role::Daemon)),
                available_fall_kib: Some(idle.available_kib as i64 - ledger.available_kib as i64),
                idle_cpu_millicores: if largest { self.idle_cpu(&ledger).await } else { None },
                ledger,
            });
        }
        Ok(())
    }

    /// Measures without pods a resident process that was first seen with pods.
    async fn idle_again(&self, points: &mut [Point]) -> Result<(), String> {
        if self.residents.is_empty() || points.iter().all(|point| point.idle_daemon_kib != Some(0)) {
            return Ok(());
        }
        let idle = self.settled().await?.0.role(Role::Daemon);
        points.iter_mut().for_each(|point| point.idle_daemon_kib = Some(idle));
        Ok(())
    }

    async fn grow(&self, from: u32, to: u32) -> Result<(), String> {
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

    /// Returns a ledger whose sum no longer changes; false if it still did at the last look.
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

    /// Returns the facts of any of the pods: they are all made alike.
    async fn machine(&self, ledger: &Ledger) -> Option<Facts> {
        let id = ledger.entries.iter().find_map(|entry| entry.found.pod.as_deref())?;
        self.trace?.pod(id).await.ok().as_ref().map(trace::machine)
    }

    /// Measures idle CPU use. No process calls the pods meanwhile, including this one.
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
        let run = &self.sweep.recipe.run;
        let mine = |pod: &Listed| pod.labels.get(RUN_LABEL) == Some(run);
        ledger::take(self.runtime, mine, &self.residents)
            .await
            .map_err(|error: LedgerError| error.to_string())
    }
}

/// A straight line through points, by least squares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// Growth of y per x.
    pub slope: f64,
    /// y at x = 0.
    pub intercept: f64,
    /// Part of the variance that the line explains.
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
