//! A pod that faults elsewhere must not affect.

use anyhow::{Result, ensure};

use crate::case::{Case, Container, Pod, shell};
use crate::insist::once_seen;

/// A pod with one container that prints numbers, and exits with 7 on SIGTERM.
pub struct Bystander {
    /// The pod.
    pub pod: Pod,
    /// The container of the bystander.
    pub container: Container,
}

/// The front's error for a request during which three workers ended.
const TAKEN_ALONG: &str = "failed: 3 workers of sandboxer";

/// Attempts of a probe before it counts as failed: kubelet's default.
const ATTEMPTS: u32 = 3;

/// Runs a script in a container as a probe does: retries, because workers that die in quick succession end an exec.
pub async fn probed(container: &Container, script: &str) -> Result<String> {
    let mut attempt = 1;
    loop {
        match container.sh(script).await {
            Err(error) if attempt < ATTEMPTS && format!("{error:#}").contains(TAKEN_ALONG) => attempt += 1,
            result => return result,
        }
    }
}

impl Bystander {
    /// Starts one that prints a number every `pause_us`, µs.
    pub async fn start(case: &Case, pause_us: u32) -> Result<Self> {
        let pod = case.pod().await?;
        let script = format!(
            "trap 'echo end; exit 7' TERM; n=0; while :; do echo line $n; n=$((n+1)); usleep {pause_us}; done"
        );
        let container = pod.start(shell("counts", &script)).await?;
        Ok(Self { pod, container })
    }

    /// Checks that it is ready and accepts an exec.
    pub async fn check(&self) -> Result<()> {
        let output = probed(&self.container, "echo here").await?;
        ensure!(output == "here", "{output}");
        ensure!(self.pod.ready().await?, "the pod is not ready");
        Ok(())
    }

    /// Ends it and checks its exit code, and that every line is in its log once. Returns the number of lines.
    pub async fn end(self, case: &Case) -> Result<usize> {
        once_seen(|| case.cri.stop(&self.container.id, 30)).await?;
        let status = self.container.status().await?;
        ensure!(status.exit_code == 7, "{status:?}");
        let logs = self.container.logs()?.stdout;
        let mut lines: Vec<_> = logs.lines().collect();
        ensure!(lines.pop() == Some("end"), "the log's last line is missing: {:?}", logs.lines().next_back());
        for (n, line) in lines.iter().enumerate() {
            ensure!(*line == format!("line {n}"), "line {n} of the log is {line:?}, of {}", lines.len());
        }
        ensure!(lines.len() > 10, "only {} lines", lines.len());
        Ok(lines.len() + 1)
    }
}
