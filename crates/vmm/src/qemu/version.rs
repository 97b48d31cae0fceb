//! The version of QEMU.

use std::{path::Path, process::Stdio, time::Duration};

/// Time limit of `--version`.
const LIMIT: Duration = Duration::from_secs(5);

/// The information that QEMU reports about itself.
#[derive(Debug)]
pub struct Version {
    /// The version, for messages.
    pub text: String,
    /// Whether QEMU has a filter of system calls (`-sandbox`), because it was built with libseccomp.
    pub filter: bool,
}

/// Returns what QEMU reports. A QEMU that cannot be run is no error here: each boot will report it.
pub async fn read(program: &Path) -> Version {
    let (text, with_filter) =
        tokio::join!(run(program, &["--version"]), run(program, &["-sandbox", "off", "--version"]));
    // A QEMU that does not respond may have a filter. It is requested, and a start fails with a message if it is
    // missing.
    let filter = !matches!(with_filter, Ok(None));
    let text = match text {
        Ok(Some(said)) => {
            let line = said.lines().next().unwrap_or_default();
            line.trim_start_matches("QEMU emulator version ").chars().take(100).collect()
        }
        Ok(None) => "unknown: it exited with an error".to_owned(),
        Err(why) => format!("unknown: {why}"),
    };
    Version { text, filter }
}

/// Returns the output of a run that succeeded, `None` for a run that failed, or the reason why the program did not
/// run.
async fn run(program: &Path, arguments: &[&str]) -> Result<Option<String>, String> {
    let output = tokio::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .output();
    match tokio::time::timeout(LIMIT, output).await {
        Ok(Ok(output)) => {
            Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {LIMIT:?}")),
    }
}
