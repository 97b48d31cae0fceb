//! Costs of checkpoints: of saving a pod, and of the starts of copies, beside cold starts of the same program.
//!
//! ```text
//!  program  fills memory, prints, waits; prints again when a signal tells it that it goes on
//!  cold     a start:                        RunPodSandbox ─▶ … ─▶ first byte, when the memory is filled
//!  save     CreateCheckpoint of the daemon; and for how much of it the pod is paused
//!  restore  a start from the checkpoint:    RunPodSandbox ─▶ … ─▶ first byte, by the program that goes on
//!  copies   several such starts at once, each from the common beginning
//! ```
//!
//! runc has only cold starts; all others are divided by them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use sandboxer_probe::clock::Clock;
use sandboxer_probe::first_byte::LogWatch;
use sandboxer_probe::ratio::Ratio;
use sandboxer_probe::runtime::Runtime;
use sandboxer_probe::startup::{self, PlanError};
use sandboxer_probe::summary::Summary;
use sandboxer_probe::timeline::{self, Recipe, Start};
use sandboxer_probe::trace::Trace;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Handler with which the others are compared.
const REFERENCE: &str = "runc";
/// Namespace of the probe's pods, so of their checkpoints.
const NAMESPACE: &str = "sandboxer-probe";
/// Memory of a VM beyond what its program fills, MiB.
const BESIDE_MIB: u64 = 192;
/// Annotations of pods.
const MEMORY: &str = "io.sandboxer.memory";
const RESTORE_FROM: &str = "io.sandboxer.restore-from";
const RESTORE_SIGNAL: &str = "io.sandboxer.restore-signal";

/// Plan of a measurement.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Handlers, in the order in which they alternate.
    pub runtimes: Vec<String>,
    /// Amounts of memory that the program fills, MiB.
    pub mib: Vec<u64>,
    /// Number of rounds. Each has one start of each kind.
    pub rounds: u32,
    /// Number of copies that start at once; 0: none.
    pub copies: u32,
    /// Recipe of the pods, without a command.
    pub recipe: Recipe,
}

impl Plan {
    /// Returns the recipe of pods whose program fills `mib` MiB.
    fn recipe(&self, mib: u64) -> Recipe {
        let mut recipe = Recipe { command: command(mib), ..self.recipe.clone() };
        recipe.annotations.insert(MEMORY.to_owned(), (mib + BESIDE_MIB).to_string());
        recipe
    }
}

/// Returns a command that prints once it has filled memory with what cannot be left out. It holds the memory: the second half of the
/// pipe reads nothing more.
fn command(mib: u64) -> Vec<String> {
    let script = format!(
        "trap 'echo on' USR1\n\
         dd if=/dev/urandom bs={mib}M count=1 iflag=fullblock 2>/dev/null | {{ head -c 1 >/dev/null; echo filled; exec sleep 86400; }} &\n\
         while :; do wait; done"
    );
    vec!["sh".into(), "-c".into(), script]
}

/// Times of one handler and one amount of memory, ms.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Runtime handler.
    pub runtime: String,
    /// Memory that the program fills, MiB.
    pub mib: u64,
    /// Cold starts, in order.
    pub cold_ms: Vec<f64>,
    /// Cold starts at once, by group.
    pub cold_groups_ms: Vec<Vec<f64>>,
    /// Saves of a pod.
    pub save_ms: Vec<f64>,
    /// Pauses of the pod that was saved.
    pub paused_ms: Vec<f64>,
    /// What a checkpoint takes on disk, with the image, bytes.
    pub stored_bytes: u64,
    /// Starts from a checkpoint, one after the other. The first of each checkpoint reads it.
    pub restore_ms: Vec<f64>,
    /// Starts from a checkpoint at once, by group.
    pub copies_ms: Vec<Vec<f64>>,
    /// Reasons for what failed, by what was measured.
    pub failures: Vec<(Kind, String)>,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// One cold start.
    Cold,
    /// Cold starts at once.
    ColdGroup,
    /// A save, and the pause within it.
    Save,
    /// One start from a checkpoint.
    Restore,
    /// Starts from a checkpoint at once.
    Copies,
}

impl Series {
    /// Returns the summary of the times of a kind.
    pub fn summary(&self, kind: Kind) -> Summary {
        let failures = self.failures.iter().filter(|(of, _)| *of == kind).count();
        let times = match kind {
            Kind::Cold => self.cold_ms.clone(),
            Kind::ColdGroup => self.cold_groups_ms.concat(),
            Kind::Save => self.save_ms.clone(),
            Kind::Restore => self.restore_ms.clone(),
            Kind::Copies => self.copies_ms.concat(),
        };
        Summary::new(&times, failures)
    }
}

/// Times of a kind divided by runc's cold starts of the same program: of groups if there were several at once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OverRunc {
    /// Runtime handler.
    pub runtime: String,
    /// Memory that the program fills, MiB.
    pub mib: u64,
    /// Ratios by kind.
    pub ratios: BTreeMap<Kind, Ratio>,
}

/// Result of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Clock of the times.
    pub clock: Clock,
    /// Number of copies that start at once.
    pub copies: u32,
    /// One series per handler and amount of memory.
    pub series: Vec<Series>,
    /// The same, over runc.
    pub over_runc: Vec<OverRunc>,
    /// The reason for an early end; `None` if the measurement is complete.
    pub partial: Option<String>,
}

impl Report {
    /// Returns the number of failed measurements.
    pub fn failures(&self) -> usize {
        self.series.iter().map(|series| series.failures.len()).sum()
    }

    fn compare(&mut self) {
        for series in self.series.iter().filter(|series| series.runtime != REFERENCE) {
            let base = self.series.iter().find(|base| base.runtime == REFERENCE && base.mib == series.mib);
            let Some(base) = base else { continue };
            let one = |times: &[f64]| Ratio::estimate(times, &base.cold_ms);
            let several = |groups: &[Vec<f64>]| Ratio::of_groups(groups, &base.cold_groups_ms);
            let ratios = [
                (Kind::Cold, one(&series.cold_ms)),
                (Kind::ColdGroup, several(&series.cold_groups_ms)),
                (Kind::Save, one(&series.save_ms)),
                (Kind::Restore, one(&series.restore_ms)),
                (Kind::Copies, several(&series.copies_ms)),
            ];
            let ratios = ratios.into_iter().filter_map(|(kind, ratio)| Some((kind, ratio?))).collect();
            self.over_runc.push(OverRunc { runtime: series.runtime.clone(), mib: series.mib, ratios });
        }
    }
}

/// Environment of a measurement.
pub struct Context<'a> {
    /// The CRI runtime.
    pub runtime: &'a Runtime,
    /// The daemon.
    pub daemon: &'a Trace,
    /// The watch on the pods' logs.
    pub watch: &'a Arc<LogWatch>,
    /// Clock of the times.
    pub clock: Clock,
    /// Token that ends the measurement early.
    pub cancel: &'a CancellationToken,
}

/// Measures, and removes the measurement's pods and checkpoints. A pod that cannot be started to be saved makes the result partial.
pub async fn run(
    context: &Context<'_>,
    plan: &Plan,
    progress: &mut dyn FnMut(&str),
) -> Result<Report, PlanError> {
    check(context.runtime, plan).await?;
    let mut report = Report { clock: context.clock, copies: plan.copies, ..Report::default() };
    let all = plan.mib.iter().flat_map(|mib| plan.runtimes.iter().map(move |runtime| (*mib, runtime)));
    report.series =
        all.map(|(mib, runtime)| Series { runtime: runtime.clone(), mib, ..Series::default() }).collect();
    let mut made = Vec::new();
    let mut ended = Ok(());
    for (index, series) in report.series.iter().enumerate() {
        // The first pod of a size includes one-time work, such as that for its template.
        let name = format!("{}-{index}-first", plan.recipe.run);
        let recipe = plan.recipe(series.mib);
        let first = one(context, &recipe, &series.runtime, &name).await;
        if let Err(why) = remove(context, &recipe, &name, first.pod_id.as_deref()).await {
            ended = Err(why);
        }
    }
    'all: for round in 0..plan.rounds {
        for (index, series) in report.series.iter_mut().enumerate() {
            let name = format!("{}-{index}-{round}", plan.recipe.run);
            let measured = tokio::select! {
                biased;
                () = context.cancel.cancelled() => Err("interrupted".to_owned()),
                measured = measure(context, plan, series, &name, &mut made) => measured,
            };
            progress(&series.runtime);
            if measured.is_err() {
                ended = measured;
                break 'all;
            }
        }
    }
    report.partial = ended.err();
    if let Err(error) = timeline::remove_all(context.runtime, &plan.recipe.run).await {
        report.partial.get_or_insert_with(|| format!("cannot remove the pods: {error}"));
    }
    for name in made {
        if let Err(error) = context.daemon.remove_checkpoint(NAMESPACE, &name).await {
            let why = format!("cannot remove the checkpoint {name}: {}", error.message());
            report.partial.get_or_insert(why);
        }
    }
    report.compare();
    Ok(report)
}

async fn check(runtime: &Runtime, plan: &Plan) -> Result<(), PlanError> {
    if plan.runtimes.is_empty() {
        return Err(PlanError::Empty("name at least one runtime handler"));
    }
    if plan.rounds == 0 || plan.mib.is_empty() {
        return Err(PlanError::Empty("request rounds and an amount of memory"));
    }
    runtime.version().await?;
    startup::check_handlers(runtime, &plan.runtimes).await?;
    match runtime.image(&plan.recipe.image).await? {
        Some(_) => Ok(()),
        None => Err(PlanError::NoImage(plan.recipe.image.clone())),
    }
}

/// Measures one round of a series. The names of checkpoints that may be there are noted.
async fn measure(
    context: &Context<'_>,
    plan: &Plan,
    series: &mut Series,
    name: &str,
    made: &mut Vec<String>,
) -> Result<(), String> {
    let cold = plan.recipe(series.mib);
    let source = one(context, &cold, &series.runtime, &format!("{name}-cold")).await;
    let source_ms = ms(&source);
    let pod = source.pod_id.clone();
    match source_ms {
        Ok(ms) => series.cold_ms.push(ms),
        Err(why) => {
            series.failures.push((Kind::Cold, why));
            remove(context, &cold, &format!("{name}-cold"), pod.as_deref()).await?;
            return Ok(());
        }
    }
    if series.runtime != REFERENCE {
        let id = pod.as_deref().ok_or("the pod has no id")?;
        made.push(name.to_owned());
        let begun = Instant::now();
        let saved = context.daemon.create_checkpoint(id, name).await;
        let took = begun.elapsed().as_secs_f64() * 1e3;
        match saved {
            Ok(saved) => {
                series.save_ms.push(took);
                series.paused_ms.push(saved.paused_ns as f64 / 1e6);
                series.stored_bytes = saved.stored_bytes;
            }
            Err(error) => {
                made.pop();
                series.failures.push((Kind::Save, error.message().to_owned()));
                remove(context, &cold, &format!("{name}-cold"), pod.as_deref()).await?;
                return Ok(());
            }
        }
    }
    remove(context, &cold, &format!("{name}-cold"), pod.as_deref()).await?;
    let mut kinds = vec![(Kind::ColdGroup, cold.clone(), plan.copies)];
    if series.runtime != REFERENCE {
        let mut restored = cold;
        restored.annotations.insert(RESTORE_FROM.to_owned(), name.to_owned());
        restored.annotations.insert(RESTORE_SIGNAL.to_owned(), "SIGUSR1".to_owned());
        kinds.push((Kind::Restore, restored.clone(), 1));
        kinds.push((Kind::Copies, restored, plan.copies));
    }
    for (kind, recipe, count) in kinds {
        let (mut times, begun) = (Vec::new(), Instant::now());
        for start in
            together(context, &recipe, &series.runtime, &format!("{name}-{kind:?}").to_lowercase(), count)
                .await
        {
            // From the common beginning.
            let late = start.released.saturating_duration_since(begun).as_secs_f64() * 1e3;
            match ms(&start) {
                Ok(ms) => times.push(ms + if count > 1 { late } else { 0.0 }),
                Err(why) => series.failures.push((kind, why)),
            }
        }
        match kind {
            Kind::Restore => series.restore_ms.extend(times),
            Kind::Copies if !times.is_empty() => series.copies_ms.push(times),
            Kind::ColdGroup if !times.is_empty() => series.cold_groups_ms.push(times),
            _ => {}
        }
        timeline::remove_all(context.runtime, &plan.recipe.run).await.map_err(|error| error.to_string())?;
    }
    Ok(())
}

async fn one(context: &Context<'_>, recipe: &Recipe, handler: &str, name: &str) -> Start {
    timeline::start(context.runtime, context.watch, recipe, handler, name, context.cancel).await
}

/// Starts so many pods at once.
async fn together(
    context: &Context<'_>,
    recipe: &Recipe,
    handler: &str,
    name: &str,
    count: u32,
) -> Vec<Start> {
    let mut starts = JoinSet::new();
    for n in 0..count {
        let (runtime, watch, recipe) = (context.runtime.clone(), context.watch.clone(), recipe.clone());
        let (handler, name, cancel) = (handler.to_owned(), format!("{name}-{n}"), context.cancel.clone());
        starts
            .spawn(async move { timeline::start(&runtime, &watch, &recipe, &handler, &name, &cancel).await });
    }
    starts.join_all().await
}

async fn remove(context: &Context<'_>, recipe: &Recipe, name: &str, pod: Option<&str>) -> Result<(), String> {
    let removed = timeline::remove(context.runtime, context.watch, recipe, name, pod).await;
    removed.map_err(|error| error.to_string())
}

/// Returns the time to the first byte, ms.
fn ms(start: &Start) -> Result<f64, String> {
    match (&start.end, start.stamps.first_byte) {
        (Ok(()), Some(time)) => Ok(time.as_secs_f64() * 1e3),
        (Err(error), _) => Err(error.to_string()),
        (Ok(()), None) => Err("it has printed nothing".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_those_to_runcs_cold_starts_of_the_same_program() {
        let series = |runtime: &str, mib: u64, factor: f64| {
            let times = vec![factor * mib as f64; 3];
            Series {
                runtime: runtime.into(),
                mib,
                cold_ms: times.clone(),
                cold_groups_ms: vec![times.clone(); 3],
                restore_ms: if runtime == REFERENCE { Vec::new() } else { times },
                failures: vec![(Kind::Copies, "refused".into())],
                ..Series::default()
            }
        };
        let all = [("runc", 16, 1.0), ("vm", 16, 2.0), ("vm", 128, 3.0), ("runc", 128, 1.0)];
        let series = all.map(|(runtime, mib, factor)| series(runtime, mib, factor)).into();
        let mut report = Report { series, ..Report::default() };
        report.compare();
        let of: Vec<_> =
            report.over_runc.iter().map(|over| (over.mib, over.ratios[&Kind::Restore].p50)).collect();
        assert_eq!(of, [(16, 2.0), (128, 3.0)]);
        assert!(report.over_runc.iter().all(|over| !over.ratios.contains_key(&Kind::Copies)));
        assert_eq!(report.over_runc[0].ratios[&Kind::ColdGroup].p50, 2.0);
        assert_eq!((report.failures(), report.series[0].summary(Kind::Copies).failures), (4, 1));
    }

    #[test]
    fn the_program_prints_when_its_memory_is_filled_and_again_when_it_is_told_to_go_on() {
        let Ok(mut child) = std::process::Command::new("busybox")
            .args(command(2))
            .stdout(std::process::Stdio::piped())
            .spawn()
        else {
            return println!("not tested: there is no busybox here");
        };
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        assert_eq!(lines.next().unwrap().unwrap(), "filled");
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::USR1).unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "on");
        // What it has started ends with its pod; here it must be ended.
        let of_shell = format!("/proc/{0}/task/{0}/children", child.id());
        let children = std::fs::read_to_string(of_shell).unwrap();
        for pid in
            children.split_whitespace().filter_map(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?))
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
