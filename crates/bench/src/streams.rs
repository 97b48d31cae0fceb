//! Costs of a container's streams: of running a command in it, and of the text that it logs.
//!
//! ```text
//!  exec   ExecSync of `true` in a running container, by the probe's clock
//!  log    a container writes text to its stdout:   begin ─▶ text ─▶ end
//!                     log     from the first line to the last one, by the runtime's stamps in the CRI log
//!                     write   the same, by the container's own clock
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use sandboxer_probe::clock::Clock;
use sandboxer_probe::first_byte::LogWatch;
use sandboxer_probe::options::ContainerOptions;
use sandboxer_probe::ratio::Ratio;
use sandboxer_probe::runtime::Runtime;
use sandboxer_probe::startup::{self, PlanError};
use sandboxer_probe::summary::Summary;
use sandboxer_probe::timeline::{self, Recipe, Start};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

/// Handler with which the others are compared.
const REFERENCE: &str = "runc";
/// Interval between two checks of a log's end. The times are the stamps in the log, so a check is not part of them.
const LOOK: Duration = Duration::from_millis(100);
/// Number of bytes at the end of a log that contain its last line.
const TAIL: u64 = 128;
/// Directory of the logs, within the pods' log directory. It is not watched: an event per line would cost more than the
/// line.
const LOGS: &str = "streams";
/// First word of the first and of the last line. The second word is the container's clock, in seconds.
const BEGIN: &str = "begin";
const END: &str = "end";

/// Plan of a measurement.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Handlers, in the order in which they alternate.
    pub runtimes: Vec<String>,
    /// Number of execs per handler.
    pub execs: u32,
    /// Number of logs per handler.
    pub logs: u32,
    /// Size of a log's text, bytes.
    pub bytes: u64,
    /// Length of a line of the text, including its newline, bytes; at least 2.
    pub line: u64,
    /// Recipe of the pods, one per handler.
    pub recipe: Recipe,
}

impl Plan {
    /// Returns the number of lines in a log's text.
    fn lines(&self) -> u64 {
        (self.bytes / self.line).max(1)
    }

    /// Returns the command of a container that logs. It holds the text in memory before it prints the first line.
    fn command(&self) -> Vec<String> {
        let (lines, width) = (self.lines(), self.line - 1);
        let script = format!(
            "yes \"$(printf %{width}s '' | tr ' ' x)\" | head -n {lines} >/dev/shm/text\n\
             read now rest </proc/uptime; echo {BEGIN} $now\n\
             cat /dev/shm/text\n\
             read now rest </proc/uptime; echo {END} $now\n\
             rm /dev/shm/text"
        );
        vec!["sh".into(), "-c".into(), script]
    }
}

/// Times of one handler, ms.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Runtime handler.
    pub runtime: String,
    /// Times of execs, in order.
    pub exec_ms: Vec<f64>,
    /// Times of logs, by the stamps in them.
    pub log_ms: Vec<f64>,
    /// Times of the same logs, by the container's clock (hundredths of a second).
    pub write_ms: Vec<f64>,
    /// Reasons for failed execs.
    pub exec_failures: Vec<String>,
    /// Reasons for failed logs.
    pub log_failures: Vec<String>,
}

/// Result of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Clock of the times.
    pub clock: Clock,
    /// Size of a log's text, bytes.
    pub bytes: u64,
    /// Length of a line, bytes.
    pub line: u64,
    /// One series per handler.
    pub series: Vec<Series>,
    /// Time of an exec divided by runc's, by handler.
    pub exec_over_runc: BTreeMap<String, Ratio>,
    /// Rate of a log divided by runc's, by handler.
    pub rate_over_runc: BTreeMap<String, Ratio>,
    /// The reason for an early end; `None` if the measurement is complete.
    pub partial: Option<String>,
}

impl Report {
    /// Returns the number of failed measurements.
    pub fn failures(&self) -> usize {
        self.series.iter().map(|series| series.exec_failures.len() + series.log_failures.len()).sum()
    }

    fn compare(&mut self) {
        let Some(base) = self.series.iter().find(|series| series.runtime == REFERENCE).cloned() else {
            return;
        };
        for series in self.series.iter().filter(|series| series.runtime != REFERENCE) {
            let name = &series.runtime;
            self.exec_over_runc
                .extend(Ratio::estimate(&series.exec_ms, &base.exec_ms).map(|ratio| (name.clone(), ratio)));
            // The texts are equal, so the ratio of the rates is the inverse ratio of the times.
            self.rate_over_runc
                .extend(Ratio::estimate(&base.log_ms, &series.log_ms).map(|ratio| (name.clone(), ratio)));
        }
    }
}

impl Series {
    /// Returns the summary of the execs' times.
    pub fn exec(&self) -> Summary {
        Summary::new(&self.exec_ms, self.exec_failures.len())
    }

    /// Returns the summary of the logs' times.
    pub fn log(&self) -> Summary {
        Summary::new(&self.log_ms, self.log_failures.len())
    }

    /// Returns the summary of the logs' times by the container's clock.
    pub fn write(&self) -> Summary {
        Summary::new(&self.write_ms, self.log_failures.len())
    }
}

/// Environment of a measurement.
pub struct Context<'a> {
    /// The CRI runtime.
    pub runtime: &'a Runtime,
    /// The watch on the pods' logs.
    pub watch: &'a LogWatch,
    /// Clock of the times.
    pub clock: Clock,
    /// Token that ends the measurement early.
    pub cancel: &'a CancellationToken,
}

/// Measures, and removes the measurement's pods. A pod that cannot be started makes the result partial.
pub async fn run(
    context: &Context<'_>,
    plan: &Plan,
    progress: &mut dyn FnMut(&str),
) -> Result<Report, PlanError> {
    check(context.runtime, plan).await?;
    let series = |runtime: &String| Series { runtime: runtime.clone(), ..Series::default() };
    let mut report = Report {
        clock: context.clock,
        bytes: plan.lines() * plan.line,
        line: plan.line,
        series: plan.runtimes.iter().map(series).collect(),
        ..Report::default()
    };
    let measured = tokio::select! {
        biased;
        () = context.cancel.cancelled() => Err("interrupted".into()),
        measured = measure(context, plan, &mut report, progress) => measured,
    };
    report.partial = measured.err();
    if let Err(error) = timeline::remove_all(context.runtime, &plan.recipe.run).await {
        report.partial.get_or_insert_with(|| format!("cannot remove the pods: {error}"));
    }
    report.compare();
    Ok(report)
}

async fn check(runtime: &Runtime, plan: &Plan) -> Result<(), PlanError> {
    if plan.runtimes.is_empty() {
        return Err(PlanError::Empty("name at least one runtime handler"));
    }
    if plan.execs == 0 && plan.logs == 0 {
        return Err(PlanError::Empty("request execs or logs"));
    }
    runtime.version().await?;
    startup::check_handlers(runtime, &plan.runtimes).await?;
    match runtime.image(&plan.recipe.image).await? {
        Some(_) => Ok(()),
        None => Err(PlanError::NoImage(plan.recipe.image.clone())),
    }
}

async fn measure(
    context: &Context<'_>,
    plan: &Plan,
    report: &mut Report,
    progress: &mut dyn FnMut(&str),
) -> Result<(), String> {
    let logs = context.watch.dir().join(LOGS);
    std::fs::create_dir_all(&logs).map_err(|error| format!("cannot create {}: {error}", logs.display()))?;
    let mut pods = Vec::new();
    for (index, handler) in plan.runtimes.iter().enumerate() {
        let name = format!("{}-{index}", plan.recipe.run);
        let pod =
            timeline::start(context.runtime, context.watch, &plan.recipe, handler, &name, context.cancel)
                .await;
        if let Err(error) = &pod.end {
            return Err(format!("cannot start a pod on {handler}: {error}"));
        }
        // The first exec of a pod includes one-time work.
        let _ = exec(context, plan, &pod).await;
        pods.push((name, pod));
    }
    for _ in 0..plan.execs {
        for (series, (_, pod)) in report.series.iter_mut().zip(&pods) {
            match exec(context, plan, pod).await {
                Ok(ms) => series.exec_ms.push(ms),
                Err(why) => series.exec_failures.push(why),
            }
            progress(&series.runtime);
        }
    }
    for round in 0..plan.logs {
        for (series, (name, pod)) in report.series.iter_mut().zip(&pods) {
            match log(context, plan, &series.runtime, name, pod, round).await {
                Ok(times) => {
                    series.log_ms.push(times.log_ms);
                    series.write_ms.push(times.write_ms);
                }
                Err(why) => series.log_failures.push(why),
            }
            progress(&series.runtime);
        }
    }
    Ok(())
}

/// Runs `true` in the pod's container; returns the time of the call, ms.
async fn exec(context: &Context<'_>, plan: &Plan, pod: &Start) -> Result<f64, String> {
    let container = pod.container_id.as_deref().ok_or("the pod has no container")?;
    let begun = Instant::now();
    let ended = context.runtime.exec_sync(container, ["true"], Some(plan.recipe.timeout)).await;
    let ms = begun.elapsed().as_secs_f64() * 1e3;
    match ended {
        Ok(ended) if ended.exit_code == 0 => Ok(ms),
        Ok(ended) => Err(format!("`true` exited with code {}", ended.exit_code)),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs a container in the pod that logs a text; removes the container and its log.
async fn log(
    context: &Context<'_>,
    plan: &Plan,
    handler: &str,
    name: &str,
    pod: &Start,
    round: u32,
) -> Result<Times, String> {
    let pod_id = pod.pod_id.as_deref().ok_or("the pod has no id")?;
    let options = plan.recipe.pod(name, handler, context.watch.dir().to_owned());
    let mut container = ContainerOptions::new(format!("log-{round}"), &plan.recipe.image, plan.command());
    container.log_path = format!("{LOGS}/{name}-{round}.log");
    let path = context.watch.dir().join(&container.log_path);
    let id = context
        .runtime
        .create_container(pod_id, &options, &container)
        .await
        .map_err(|error| error.to_string())?;
    let logged = async {
        context.runtime.start_container(&id).await.map_err(|error| error.to_string())?;
        match tokio::time::timeout(plan.recipe.timeout, complete(&path)).await {
            Ok(()) => {}
            Err(_) => {
                return Err(format!("the last line was not in the log after {:?}", plan.recipe.timeout));
            }
        }
        let text = std::fs::read_to_string(&path).map_err(|error| error.to_string())?;
        times(&text, plan.lines(), plan.line)
    };
    let logged = logged.await;
    let removed = context.runtime.remove_container(&id).await;
    let _ = std::fs::remove_file(&path);
    let times = logged?;
    removed.map_err(|error| error.to_string())?;
    Ok(times)
}

/// Waits until a log has its last line.
async fn complete(path: &Path) {
    while !ends(path).unwrap_or(false) {
        tokio::time::sleep(LOOK).await;
    }
}

fn ends(path: &Path) -> std::io::Result<bool> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = std::fs::File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    let tail = String::from_utf8_lossy(&tail);
    let last = tail.trim_end_matches('\n').rsplit('\n').next().unwrap_or_default();
    Ok(tail.ends_with('\n') && last.split(' ').nth(3) == Some(END))
}

/// Times of one log, ms.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Times {
    log_ms: f64,
    write_ms: f64,
}

/// Returns the times in a CRI log (`time stream tag text`) of a text with `lines` lines of `width` bytes. Returns an
/// error if a line is missing, repeated or changed.
fn times(log: &str, lines: u64, width: u64) -> Result<Times, String> {
    let (mut begin, mut end, mut seen) = (None, None, 0u64);
    for line in log.lines() {
        let Some((stamp, text)) = parts(line) else { return Err(shown("no line of a log", line)) };
        match text.split_once(' ') {
            Some((BEGIN, clock)) if begin.is_none() => begin = Some((stamp, clock)),
            Some((END, clock)) if end.is_none() => end = Some((stamp, clock)),
            _ if text.len() as u64 + 1 == width && text.bytes().all(|byte| byte == b'x') => seen += 1,
            _ => return Err(shown("not what the container wrote", text)),
        }
    }
    if seen != lines {
        return Err(format!("the log has {seen} lines of the container's {lines}"));
    }
    let ((begin, began), (end, ended)) = begin.zip(end).ok_or("the log has no begin or no end")?;
    let stamp = |text: &str| text.parse::<Timestamp>().map_err(|error| error.to_string());
    let clock = |text: &str| text.parse::<f64>().map_err(|_| shown("no time", text));
    let log = stamp(end)?.duration_since(stamp(begin)?);
    Ok(Times { log_ms: log.as_secs_f64() * 1e3, write_ms: (clock(ended)? - clock(began)?) * 1e3 })
}

/// Returns the timestamp and the text of a whole line on stdout.
fn parts(line: &str) -> Option<(&str, &str)> {
    let (stamp, rest) = line.split_once(' ')?;
    Some((stamp, rest.strip_prefix("stdout F ")?))
}

fn shown(what: &str, text: &str) -> String {
    let text: String = text.chars().take(80).collect();
    format!("{what}: {text:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(lines: &[&str]) -> String {
        let line =
            |(second, text): (usize, &&str)| format!("2026-01-02T03:04:{second:02}.5Z stdout F {text}\n");
        lines.iter().enumerate().map(line).collect()
    }

    #[test]
    fn times_are_those_of_the_first_and_the_last_line() {
        let times = times(&log(&["begin 7.25", "xxx", "xxx", "end 9.50"]), 2, 4).unwrap();
        assert_eq!(times, Times { log_ms: 3000.0, write_ms: 2250.0 });
    }

    #[test]
    fn a_log_that_is_not_what_was_written_gives_no_time() {
        for (lines, why) in [
            (&["begin 1.0", "xxx", "end 2.0"][..], "has 1 lines of the container's 2"),
            (&["begin 1.0", "xxx", "xxx", "xxx", "end 2.0"], "has 3 lines"),
            (&["begin 1.0", "xxx", "xx", "end 2.0"], "not what the container wrote"),
            (&["begin 1.0", "xxx", "xyx", "end 2.0"], "not what the container wrote"),
            (&["xxx", "xxx", "end 2.0"], "no begin"),
            (&["begin 1.0", "begin 1.0", "xxx", "end 2.0"], "not what the container wrote"),
        ] {
            let error = times(&log(lines), 2, 4).unwrap_err();
            assert!(error.contains(why), "{lines:?}: {error}");
        }
        let part = log(&["begin 1.0", "xxx", "xxx", "end 2.0"]).replacen("stdout F xxx", "stdout P xxx", 1);
        assert!(times(&part, 2, 4).unwrap_err().contains("no line of a log"));
    }

    #[test]
    fn a_log_ends_with_its_last_line_and_not_with_a_part_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let whole = log(&["begin 1.0", &"x".repeat(1000), "end 2.0"]);
        for (text, is_end) in [
            (&*whole, true),
            (whole.trim_end(), false),
            (&*log(&["begin 1.0", &"x".repeat(1000)]), false),
            ("", false),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(ends(&path).unwrap(), is_end, "{text:?}");
        }
    }

    #[test]
    fn ratios_are_of_times_for_execs_and_of_rates_for_logs() {
        let series = |runtime: &str, exec: f64, log: f64| Series {
            runtime: runtime.into(),
            exec_ms: vec![exec; 3],
            log_ms: vec![log; 3],
            ..Series::default()
        };
        let series = vec![series("runc", 10.0, 100.0), series("vm", 15.0, 400.0)];
        let mut report = Report { series, ..Report::default() };
        report.compare();
        assert_eq!(report.exec_over_runc["vm"].p50, 1.5);
        assert_eq!(report.rate_over_runc["vm"].p50, 0.25);
        assert!(!report.rate_over_runc.contains_key("runc"));
    }
}
