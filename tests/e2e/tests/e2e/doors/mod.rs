//! Doors to the daemon beside CRI: the programs that people use without Kubernetes. Each case does what their own documentation
//! does, and most run on runc, too.

pub mod crio;
pub mod ctr;
pub mod docker;

use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::unistd::Pid;
use sandboxer_e2e::case::Case;
use sandboxer_e2e::eventually;
use tokio::process::Command;

/// A command may boot an emulated guest, beside others.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a program came to.
#[derive(Debug)]
pub struct Ended {
    /// The exit code; `None`: ended by a signal.
    pub code: Option<i32>,
    /// What it wrote to stdout, without the last end of line.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
}

impl Ended {
    /// Returns stdout if it exited with 0, else an error with everything.
    pub fn success(self) -> Result<String> {
        anyhow::ensure!(self.code == Some(0), "{self:?}");
        Ok(self.stdout)
    }

    /// Returns stderr if it failed, else an error.
    pub fn failure(self) -> Result<String> {
        anyhow::ensure!(self.code != Some(0), "it did not fail: {self:?}");
        Ok(self.stderr)
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).trim_end().to_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Runs a program to its end, with `input` as its stdin.
pub async fn run(mut command: Command, input: &str) -> Result<Ended> {
    use tokio::io::AsyncWriteExt;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
    let stdin = child.stdin.take();
    let fed = async {
        if let Some(mut stdin) = stdin {
            // It may have ended already.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
    };
    let ((), output) = tokio::time::timeout(PATIENCE, async { tokio::join!(fed, child.wait_with_output()) })
        .await
        .with_context(|| format!("{command:?} did not end"))?;
    Ok(output?.into())
}

/// Returns the VMM of the case's container, once the one in which a template was made is gone.
async fn only_vmm(case: &Case) -> Result<Vec<Pid>> {
    eventually("one VMM", PATIENCE, || async {
        let vmms = case.stack.vmms()?;
        Ok((vmms.len() == 1).then_some(vmms))
    })
    .await
}
