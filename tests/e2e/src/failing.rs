//! The build of the daemon that fails, or dies, where a test wants it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use crate::case::Case;
use crate::insist::insist;
use crate::stack::Stack;

/// The daemon of the build with failure points in the place of the stack's own, for as long as this is there.
pub struct Failing<'a> {
    case: &'a Case,
    points: PathBuf,
    /// Points that a worker came by before there was a pod: some of them only the first one does.
    pub of_start: Vec<String>,
}

fn points(stack: &Stack) -> PathBuf {
    stack.dir().join("failpoints")
}

/// Makes workers of `stack` from the next one on die or fail at these points, one each.
pub fn arm(stack: &Stack, at: &[String]) -> Result<()> {
    Ok(fs::write(points(stack).join("armed"), at.join("\n") + "\n")?)
}

impl<'a> Failing<'a> {
    /// Replaces the daemon. Its sessions with guests have so many `streams`, if it matters.
    pub async fn start(case: &'a Case, streams: Option<u32>) -> Result<Self> {
        let (programs, points) = (case.stack.dir().join("failing-bin"), points(&case.stack));
        for dir in [&programs, &points] {
            // Cases have no order: another one may have left its points and its clock.
            let _ = fs::remove_dir_all(dir);
            fs::create_dir_all(dir)?;
        }
        fs::write(points.join("armed"), "")?;
        if let Some(streams) = streams {
            fs::write(points.join("streams"), streams.to_string())?;
        }
        let built = fs::canonicalize(case.stack.dir().join("bin/sandboxer"))?;
        let built = built.parent().context("where the programs are")?;
        let failing = built.join("sandboxer-failing");
        ensure!(failing.exists(), "{} is not there: run `make build-failing`", failing.display());
        for name in [
            "sandboxer",
            "sandboxer-front",
            "sandboxer-cli",
            "sandboxer-share",
            "containerd-shim-sandboxer-v1",
        ] {
            let from = if name == "sandboxer" { &failing } else { &built.join(name) };
            symlink(from, programs.join(name))?;
        }
        case.stack.end("sandboxer", Signal::SIGTERM).await?;
        case.stack.run_up_with(&[("SANDBOXER_BIN_DIR", &programs), ("SANDBOXER_FAILPOINTS", &points)])?;
        let mut failing = Self { case, points, of_start: Vec::new() };
        failing.of_start = failing.lines("passed")?;
        reached(case).await?;
        Ok(failing)
    }

    /// Returns the lines of a file of the failure points.
    pub fn lines(&self, file: &str) -> Result<Vec<String>> {
        let text = fs::read_to_string(self.points.join(file)).unwrap_or_default();
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// Sets the worker's wall clock this many seconds ahead.
    pub fn set_clock(&self, ahead: i64) -> Result<()> {
        let new = self.points.join("clock.new");
        fs::write(&new, ahead.to_string())?;
        // Whole at once: it is read at any time.
        Ok(fs::rename(new, self.points.join("clock"))?)
    }

    /// Puts the stack's own daemon in its place.
    pub async fn end(self) -> Result<()> {
        self.case.stack.end("sandboxer", Signal::SIGTERM).await?;
        self.case.stack.run_up()?;
        reached(self.case).await
    }
}

/// Waits until containerd reaches the daemon. It connects to a new one with a back-off of at most 3 s.
pub async fn reached(case: &Case) -> Result<()> {
    let config = case.pod_config();
    let pod = insist("reach the daemon", || case.cri.run_pod(&config, case.handler)).await?;
    insist("stop the pod that reached it", || case.cri.stop_pod(&pod)).await?;
    insist("remove the pod that reached it", || case.cri.remove_pod(&pod)).await
}
