//! The version that a VMM's program reports.

use std::{io, path::Path, process::Stdio, time::Duration};

use tokio::{io::AsyncReadExt, process::Command};

/// Time limit of `--version`.
const LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of bytes read of the output.
const ANSWER: u64 = 4096;

/// The reason why a program cannot be used as a VMM.
#[derive(Debug, thiserror::Error)]
pub enum VersionError {
    /// The program cannot be run.
    #[error("cannot run {program}")]
    Run {
        /// The program, as configured.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// The program did not end in time.
    #[error("{program} --version did not end within {LIMIT:?}")]
    Hung {
        /// The program, as configured.
        program: String,
    },
    /// The program is not the expected VMM.
    #[error("{program} is not {vmm}: its --version prints {output:?}")]
    Foreign {
        /// The program, as configured.
        program: String,
        /// Name of the VMM.
        vmm: &'static str,
        /// First line of the program's output, cut.
        output: String,
    },
    /// The VMM is too old or too new.
    #[error("{program} is {vmm} {found}; supported are {known}")]
    Unknown {
        /// The program, as configured.
        program: String,
        /// Name of the VMM.
        vmm: &'static str,
        /// Version that the VMM reports.
        found: String,
        /// The supported versions.
        known: String,
    },
}

/// Runs `program --version`. Returns the first line of the output, cut.
pub async fn first_line(program: &Path) -> Result<String, VersionError> {
    let name = || program.display().to_string();
    match tokio::time::timeout(LIMIT, asked(program)).await {
        Ok(Ok(line)) => Ok(line),
        Ok(Err(source)) => Err(VersionError::Run { program: name(), source }),
        Err(_) => Err(VersionError::Hung { program: name() }),
    }
}

async fn asked(program: &Path) -> io::Result<String> {
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(ANSWER).read_to_end(&mut output).await?;
    }
    let output = String::from_utf8_lossy(&output);
    Ok(output.lines().next().unwrap_or_default().chars().take(100).collect())
}
