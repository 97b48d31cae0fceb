//! The version of QEMU.

use std::{path::Path, process::Stdio, time::Duration};

/// Longest wait for `--version`.
const LIMIT: Duration = Duration::from_secs(5);

/// Returns the version that QEMU reports. If QEMU cannot be run, that is no error here: each boot will report it.
pub async fn version(program: &Path) -> String {
    let output = tokio::process::Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .output();
    match tokio::time::timeout(LIMIT, output).await {
        Ok(Ok(output)) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let line = text.lines().next().unwrap_or_default();
            line.trim_start_matches("QEMU emulator version ").chars().take(100).collect()
        }
        Ok(Err(error)) => format!("unknown: {error}"),
        Err(_) => format!("unknown: no answer within {LIMIT:?}"),
    }
}
