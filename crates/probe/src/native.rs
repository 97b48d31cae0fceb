//! The series `native` of start-up and memory: the containers' command as a plain process of this host.

use std::io::{self, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// Name of the series, in place of a handler's name.
pub const NATIVE: &str = "native";

/// Why a command has no time.
#[derive(Debug, thiserror::Error)]
pub enum NativeError {
    /// The command cannot be executed on this host.
    #[error("cannot execute '{program}' on this host")]
    Spawn {
        /// Name of the program.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// The command printed nothing before it ended.
    #[error("the command ended without output")]
    NoOutput,
    /// The command printed nothing in time.
    #[error("the command printed nothing within {0:?}")]
    Timeout(Duration),
}

/// A process of this host. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// Time from just before the fork to the first byte on stdout.
    pub first_byte: Duration,
}

impl Process {
    /// Executes a command and waits for its first byte.
    pub async fn start(command: &[String], limit: Duration) -> Result<Self, NativeError> {
        let program = command.first().cloned().unwrap_or_default();
        let mut execute = Command::new(&program);
        execute
            .args(command.iter().skip(1))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let begun = Instant::now();
        let child = execute.spawn().map_err(|source| NativeError::Spawn { program, source })?;
        let mut process = Self { child, first_byte: Duration::ZERO };
        let output = process.child.stdout.take();
        let (into, first_byte) = oneshot::channel();
        // A separate thread sees the byte at once, and keeps the pipe open. It ends with the process.
        std::thread::spawn(move || {
            let Some(mut output) = output else { return };
            let read = output.read(&mut [0]).unwrap_or_default();
            let _ = into.send((read > 0).then(Instant::now));
            let _ = io::copy(&mut output, &mut io::sink());
        });
        match tokio::time::timeout(limit, first_byte).await {
            Ok(Ok(Some(at))) => process.first_byte = at.duration_since(begun),
            Ok(_) => return Err(NativeError::NoOutput),
            Err(_) => return Err(NativeError::Timeout(limit)),
        }
        Ok(process)
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Vec<String> {
        ["sh", "-c", script].map(str::to_owned).to_vec()
    }

    #[tokio::test]
    async fn a_command_has_the_time_until_its_first_byte_and_does_not_outlive_it() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let command = shell(&format!("echo $$ >{}; sleep 0.05; echo started; exec sleep 60", pid.display()));
        let process = Process::start(&command, LIMIT).await.unwrap();
        assert!(process.first_byte >= Duration::from_millis(50), "{process:?}");
        let pid = std::fs::read_to_string(pid).unwrap();
        assert_eq!(process.pid().to_string(), pid.trim());
        let runs = || std::path::Path::new("/proc").join(pid.trim()).exists();
        assert!(runs());
        drop(process);
        assert!(!runs());
    }

    #[tokio::test]
    async fn a_command_without_output_has_no_time() {
        assert!(matches!(Process::start(&shell("exit 3"), LIMIT).await, Err(NativeError::NoOutput)));
        let short = Duration::from_millis(50);
        assert!(matches!(Process::start(&shell("exec sleep 60"), short).await, Err(NativeError::Timeout(_))));
        let missing = Process::start(&["/no/such/program".to_owned()], LIMIT).await.unwrap_err().to_string();
        assert!(missing.contains("/no/such/program"), "{missing}");
    }
}
