//! Kills the daemon under running pods, and counts what they lost.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sandboxer_probe::document::Table;
use sandboxer_probe::timeline::{self, Recipe};
use sandboxer_protocol::admin::VersionResponse;

use super::{Demo, heading, look};
use crate::{client, render};

/// Number of pods that run meanwhile.
const PODS: usize = 3;
/// Each container counts up, ten lines a second.
const COUNT: &str = "i=0; while :; do i=$((i + 1)); echo $i; sleep 0.1; done";
/// Maximum time until the daemon is back.
const BACK: Duration = Duration::from_secs(30);
/// Time for which pods run between two kills.
const BETWEEN: Duration = Duration::from_secs(1);

impl Demo<'_> {
    /// Kills the worker, then the front, each with SIGKILL, and checks that logs, containers and execs continue.
    pub(super) async fn crash(&self) -> Result<()> {
        heading(&format!("kill -9 of the daemon's worker, then of its front, under {PODS} pods that count"))?;
        let mut recipe = self.args.target.recipe();
        recipe.command = ["sh", "-c", COUNT].map(str::to_owned).to_vec();
        let survived = self.kill_under(&recipe).await;
        let removed = timeline::remove_all(&self.bench.runtime, &recipe.run).await;
        survived?;
        removed?;
        self.check_interrupted()
    }

    async fn kill_under(&self, recipe: &Recipe) -> Result<()> {
        let bench = self.bench;
        let mut pods = Vec::new();
        for number in 1..=PODS {
            let name = format!("counter-{number}");
            let start =
                timeline::start(&bench.runtime, &bench.watch, recipe, &self.args.runtime, &name, self.cancel)
                    .await;
            start.end.with_context(|| format!("pod {name} did not start"))?;
            pods.push((name, start.container_id.context("the pod has no container")?));
        }

        let mut rows =
            Table::new(1, ["killed", "pid", "another answers after, s", "pods", "lines of log", "lost"]);
        for what in ["worker", "front"] {
            let before =
                self.version().await?.context("there is no daemon to kill: --kill-daemon needs one")?;
            let pid = if what == "worker" { before.worker_pid } else { before.front_pid };
            let killed = Instant::now();
            let target = i32::try_from(pid).context("the daemon's process id")?;
            kill(Pid::from_raw(target), Signal::SIGKILL)
                .with_context(|| format!("cannot kill the {what}, process {pid}"))?;
            self.another(&before, what).await?;
            let back = killed.elapsed();
            tokio::time::sleep(BETWEEN).await;

            let (mut lines, mut lost, mut alive) = (0, 0, 0);
            for (name, container) in &pods {
                let log = std::fs::read_to_string(bench.watch.dir().join(format!("{name}.log")))?;
                let numbers = numbers(&log);
                lines += numbers.len();
                lost += numbers.last().copied().unwrap_or_default().abs_diff(numbers.len());
                alive += usize::from(look::exec(bench, container, "true").await.is_ok());
            }
            let pods = format!("{alive} of {PODS} run");
            let back = format!("{:.2}", back.as_secs_f64());
            rows.row([what.to_owned(), pid.to_string(), back, pods, lines.to_string(), lost.to_string()]);
            if lost > 0 || alive < PODS {
                render::print(&format!("{rows}"))?;
                bail!(
                    "the death of the {what} was noticed: {lost} lines lost, {alive} of {PODS} containers answer"
                );
            }
        }
        Ok(render::print(&format!("{rows}"))?)
    }

    /// Waits for another process in place of the killed one.
    async fn another(&self, before: &VersionResponse, what: &str) -> Result<()> {
        let until = Instant::now() + BACK;
        let pid_of = |version: &VersionResponse| match what {
            "worker" => version.worker_pid,
            _ => version.front_pid,
        };
        while Instant::now() < until {
            self.check_interrupted()?;
            if let Ok(version) = client::version(&self.global.socket).await
                && pid_of(&version) != pid_of(before)
            {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("no other {what} answers after {} s: see the daemon's log", BACK.as_secs())
    }
}

/// Returns the numbers in a CRI log (`time stream tag text`). The last line may be incomplete.
fn numbers(log: &str) -> Vec<usize> {
    let whole = log.rfind('\n').map_or("", |end| &log[..end]);
    whole.lines().filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_written_line_is_not_counted() {
        assert_eq!(numbers("t stdout F 1\nt stdout F 2\nt stdout F 3"), [1, 2]);
        assert_eq!(numbers(""), [] as [usize; 0]);
    }
}
