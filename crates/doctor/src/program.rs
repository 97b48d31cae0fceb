//! Versions of programs.

use std::{io, path::Path, process::Stdio};

use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::Command,
};

use super::PATIENCE;

/// Maximum number of bytes read of a program's output.
const MAX_OUTPUT_BYTES: u64 = 4096;
/// Maximum number of characters shown of a program's output.
const SHOWN: usize = 100;

/// The result of running a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The first line on stdout, also of a program that failed.
    Printed(String),
    /// The program does not exist.
    Missing,
    /// The program does not work: its exit status and last output.
    Broken(String),
    /// The program printed nothing within [`PATIENCE`].
    Silent,
}

/// Runs `program` with `argument` for at most [`PATIENCE`], then kills it.
pub(super) async fn ask(program: &Path, argument: &str) -> Answer {
    tokio::time::timeout(PATIENCE, run(program, argument)).await.unwrap_or(Answer::Silent)
}

/// Returns the message for a program that did not end in time.
pub(super) fn too_slow(program: &Path) -> String {
    format!("{program:?} is slow: no version within {PATIENCE:?}")
}

async fn run(program: &Path, argument: &str) -> Answer {
    let spawned = Command::new(program)
        .arg(argument)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Answer::Missing,
        Err(error) => return Answer::Broken(format!("cannot be run: {error}")),
    };
    let (out, err) = tokio::join!(first_line(child.stdout.take()), first_line(child.stderr.take()));
    match child.wait().await {
        Ok(_) if !out.is_empty() => Answer::Printed(out),
        Ok(status) if !err.is_empty() => Answer::Broken(format!("ended with {status}: {err}")),
        Ok(status) => Answer::Broken(format!("ended with {status} without output")),
        Err(error) => Answer::Broken(format!("cannot be awaited: {error}")),
    }
}

/// Reads up to the maximum and closes the pipe.
async fn first_line(pipe: Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // Output before an error counts as well.
        let _ = pipe.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes).await;
    }
    let text = String::from_utf8_lossy(&bytes);
    let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    line.chars().take(SHOWN).collect()
}

/// Returns the first `major.minor` in a text such as `QEMU emulator version 7.2.22 (Debian …)`.
pub fn version(text: &str) -> Option<(u32, u32)> {
    text.split(|c: char| !c.is_ascii_digit() && c != '.').find_map(|word| {
        let mut numbers = word.split('.');
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Returns the result of running a script.
    async fn script(text: &str) -> Answer {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        ask(&path, "--version").await
    }

    #[tokio::test]
    async fn programs_answer_fail_hang_and_talk_without_end() {
        assert_eq!(script("echo; echo program 1.2; echo more").await, Answer::Printed("program 1.2".into()));
        assert_eq!(script("echo program 1.2; exit 1").await, Answer::Printed("program 1.2".into()));
        let broken = |how: &str| Answer::Broken(format!("ended with exit status: {how}"));
        assert_eq!(script("echo no wheels >&2; exit 3").await, broken("3: no wheels"));
        assert_eq!(script("exit 0").await, broken("0 without output"));
        assert_eq!(script("exec sleep 1000").await, Answer::Silent);
        assert_eq!(script("exec yes version 9.1").await, Answer::Printed("version 9.1".into()));
        assert_eq!(ask("/nonexistent/program".as_ref(), "-v").await, Answer::Missing);
        let Answer::Broken(why) = ask("/etc/hostname".as_ref(), "-v").await else { panic!("it ran") };
        assert!(why.starts_with("cannot be run: "), "{why}");
    }

    #[test]
    fn versions_are_found_in_what_programs_say() {
        for (text, found) in [
            ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)", Some((7, 2))),
            ("cloud-hypervisor v44.0", Some((44, 0))),
            ("mkfs.erofs (erofs-utils) 1.8", Some((1, 8))),
            ("v2.4.2", Some((2, 4))),
            ("2.1.0-rc.0", Some((2, 1))),
            ("none at all.", None),
            ("99999999999.1", None),
        ] {
            assert_eq!(version(text), found, "{text}");
        }
    }
}
