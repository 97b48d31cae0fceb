//! Times and memory, measured as `startup` and `mem-report` do.

use std::time::Duration;

use anyhow::{Result, bail};
use sandboxer_command::progress;
use sandboxer_probe::{
    document::{Table, mb, ms},
    idle::Windows,
    memory::Sweep,
    ratio::Ratio,
    report::Report,
    sample::{Mode, Outcome, Sample},
    startup::Plan,
    store::Store,
    summary::Summary,
};

use super::{Demo, REFILL, cdf, heading};
use crate::render;

impl Demo<'_> {
    /// Starts pods one after the other on each start path, alternating with the baseline, then a group at once.
    pub(super) async fn starts(&self) -> Result<()> {
        let paths = self.start_paths().await?;
        heading(&format!(
            "{} starts of each, one after the other, and {} at once",
            self.args.serial, self.args.group
        ))?;
        let serial = Plan { group: 0, rounds: 0, ..self.plan(paths.clone()) };
        let mut store =
            self.args.output.as_ref().map(|dir| Store::create(&dir.join("startup"))).transpose()?;
        let mut samples = self.measure(&serial, store.as_mut()).await?;
        if self.args.group > 1 {
            let ends = self.ends(vec![self.args.runtime.clone()]);
            let group = Plan { serial: 0, warm_up: 0, rounds: 1, group: self.args.group, ..self.plan(ends) };
            samples.extend(self.measure(&group, None).await?);
        }
        render::print(&format!("{}", self.table(&paths, &samples)))?;
        let curves: Vec<(&str, Vec<f64>)> =
            paths.iter().map(|path| (path.as_str(), times(&samples, path, Mode::Serial))).collect();
        Ok(render::print(&format!(
            "\nshare of the starts that took at most this long\n\n{}",
            cdf::draw(&curves)
        ))?)
    }

    /// Measures memory at some counts of idle pods.
    pub(super) async fn memory(&self) -> Result<()> {
        heading("memory of idle pods: PSS, each page counted once")?;
        let runtimes = self.ends(vec![self.args.runtime.clone()]);
        let (counts, recipe) = (self.args.sweep.clone(), self.args.target.recipe());
        // Shorter windows than the default, because a demo is short.
        let idle = Windows { length: Duration::from_secs(5), count: 1 };
        let sweep = Sweep { runtimes, counts, repeat: 1, recipe, vm: None, idle };
        let mut store =
            self.args.output.as_ref().map(|dir| Store::create(&dir.join("memory"))).transpose()?;
        let (report, _) = self.bench.memory(&sweep, store.as_mut(), self.cancel, &mut |_| ()).await?;
        let mut rows = Table::new(1, ["handler", "pods", "management MB", "everything MB"]);
        for row in &report.memory {
            let (management, total) = (mb(row.management_pss_kib), mb(row.total_pss_kib));
            rows.row([row.runtime.clone(), row.pods.to_string(), management, total]);
        }
        render::print(&format!("{rows}"))?;
        for (runtime, each) in &report.marginal_kib_per_pod {
            render::print(&format!(
                "{runtime}: each further pod costs {} MB, {:.2} MB of it management",
                mb(each.total),
                each.management / 1024.0
            ))?;
        }
        complete(&report)
    }

    async fn measure(&self, plan: &Plan, store: Option<&mut Store>) -> Result<Vec<Sample>> {
        let bar = progress::steps(plan.pods());
        let mut progress = |_: &Sample| bar.inc(1);
        let (report, samples) = self.bench.startup(plan, store, self.cancel, &mut progress).await?;
        bar.finish_and_clear();
        complete(&report)?;
        if let Some(failed) = samples.iter().find(|sample| sample.outcome == Outcome::Failed) {
            bail!("a pod of {} did not start: {}: {}", failed.runtime, failed.failed_at, failed.error);
        }
        Ok(samples)
    }

    fn plan(&self, runtimes: Vec<String>) -> Plan {
        Plan {
            runtimes,
            serial: self.args.serial,
            group: 0,
            rounds: 0,
            sustained: 0,
            warm_up: 1,
            pause: REFILL,
            recipe: self.args.target.recipe(),
            bare_boot: None,
            vm: None,
            baseline: None,
        }
    }

    /// Returns the handlers of the start paths that containerd has, and the baseline.
    async fn start_paths(&self) -> Result<Vec<String>> {
        let (known, _) = self.bench.runtime.describe().await?;
        let slower = ["template", "boot"].map(|path| format!("{}-{path}", self.args.runtime));
        let slower = slower.into_iter().filter(|path| known.contains(path));
        Ok(self.ends([self.args.runtime.clone()].into_iter().chain(slower).collect()))
    }

    /// Appends the baseline, if there is one.
    fn ends(&self, mut runtimes: Vec<String>) -> Vec<String> {
        runtimes.extend(Some(self.args.baseline.clone()).filter(|name| !name.is_empty()));
        runtimes
    }

    fn table(&self, paths: &[String], samples: &[Sample]) -> Table {
        let unit = self.bench.clock.ms();
        let over = format!("÷ {}", self.args.baseline);
        let mut rows = Table::new(1, ["handler", "at once", "n", &format!("median, {unit}"), "range", &over]);
        for mode in [Mode::Serial, Mode::Parallel] {
            for path in paths {
                let times = times(samples, path, mode);
                let summary = Summary::new(&times, 0);
                if times.is_empty() {
                    continue;
                }
                let baseline = self::times(samples, &self.args.baseline, mode);
                let ratio = Ratio::of_few(&times, &baseline).filter(|_| *path != self.args.baseline);
                rows.row([
                    path.clone(),
                    if mode == Mode::Serial { "1".to_owned() } else { times.len().to_string() },
                    times.len().to_string(),
                    ms(summary.p50_ms),
                    format!("{}–{}", ms(summary.min_ms), ms(summary.max_ms)),
                    ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{:.2}", ratio.p50)),
                ]);
            }
        }
        rows
    }
}

/// Returns the times to the first byte of a handler's starts, without warm-up.
fn times(samples: &[Sample], runtime: &str, mode: Mode) -> Vec<f64> {
    let measured = samples.iter().filter(|sample| !sample.warm_up && sample.mode == mode);
    measured.filter(|sample| sample.runtime == runtime).filter_map(|sample| sample.first_byte_ms).collect()
}

fn complete(report: &Report) -> Result<()> {
    match &report.partial_reason {
        Some(why) => bail!("the run is partial: {why}"),
        None => Ok(()),
    }
}
