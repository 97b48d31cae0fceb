//! The supported versions of the VMMs: how a program is asked, what it prints, and which versions are taken.
//!
//! Differences between versions:
//!
//! | VMM | since | what |
//! |---|---|---|
//! | Cloud Hypervisor | v51 | disks have an image type; with a detected one, v52 loses raw disks' writes of sector 0 |
//! | | v52 | a tap may be of another network namespace; before, no pod with a network ran |
//! | | v53 | a refusal is a JSON array of causes, before plain text; no VM is status 404, before 500 |
//! | Firecracker | v1.14 | all virtio devices can be on PCI, so that a VM has 31 of them |
//! | | v1.16 | devices can be plugged, as a preview; not used: the guest would have to look for them |
//! | QEMU | 7.2 | the oldest tested version; an older one is only warned of, by `sandboxer-cli check` |

use std::{fmt, io, path::Path, process::Stdio, time::Duration};

use tokio::{io::AsyncReadExt, process::Command};

/// Time limit of `--version`.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of bytes read of the output.
const MAX_OUTPUT: u64 = 4096;
/// Maximum number of characters kept of a line.
const MAX_LINE: usize = 100;

/// The supported versions of one VMM.
#[derive(Debug)]
pub struct Supported {
    /// Name of the VMM in messages.
    pub vmm: &'static str,
    /// The output of `--version` up to the version.
    prefix: &'static str,
    /// The text before a version in messages.
    mark: &'static str,
    /// First numbers of the oldest supported version.
    oldest: &'static [u32],
    /// First numbers of the newest supported version; `None`: there is no limit.
    newest: Option<&'static [u32]>,
}

/// Cloud Hypervisor prints `cloud-hypervisor v53.0`, and reports `53.0.0` when it runs.
pub const CLOUD_HYPERVISOR: Supported = Supported {
    vmm: "Cloud Hypervisor",
    prefix: "cloud-hypervisor v",
    mark: "v",
    oldest: &[52],
    newest: Some(&[53]),
};

/// Firecracker prints `Firecracker v1.16.1`, and reports `1.16.1` when it runs.
pub const FIRECRACKER: Supported = Supported {
    vmm: "Firecracker",
    prefix: "Firecracker v",
    mark: "v",
    oldest: &[1, 14],
    newest: Some(&[1, 16]),
};

/// QEMU prints `QEMU emulator version 7.2.22 (Debian …)`.
pub const QEMU: Supported =
    Supported { vmm: "QEMU", prefix: "QEMU emulator version ", mark: "", oldest: &[7, 2], newest: None };

impl Supported {
    /// Runs `program --version`. Returns the version that it prints.
    pub async fn read(&self, program: &Path) -> Result<String, VersionError> {
        self.parse(&first_line(program).await?, program.display().to_string())
    }

    /// Checks the version that a running VMM reports.
    pub fn check_running(&self, version: &str) -> Result<String, VersionError> {
        let version: String = version.chars().take(MAX_LINE).collect();
        self.parse(&format!("{}{version}", self.prefix), "the running VMM".into())
    }

    /// Returns the version in a line of `program`'s output; a suffix may follow the numbers.
    pub fn parse(&self, line: &str, program: String) -> Result<String, VersionError> {
        let foreign = || VersionError::Foreign {
            program: program.clone(),
            vmm: self.vmm,
            output: line.chars().take(MAX_LINE).collect(),
        };
        let version = line.trim().strip_prefix(self.prefix).ok_or_else(foreign)?;
        let numbers: Result<Vec<u32>, _> =
            version.split(|c: char| !c.is_ascii_digit()).take(self.oldest.len()).map(str::parse).collect();
        let numbers = numbers.ok().filter(|numbers| numbers.len() == self.oldest.len());
        let numbers = numbers.ok_or_else(foreign)?;
        let is_supported =
            numbers[..] >= *self.oldest && self.newest.is_none_or(|newest| numbers[..] <= *newest);
        if is_supported {
            return Ok(version.to_owned());
        }
        Err(VersionError::Unsupported {
            program,
            vmm: self.vmm,
            mark: self.mark,
            version: version.to_owned(),
            supported: self.to_string(),
        })
    }
}

/// Writes the range of versions, as in "v52 to v53".
impl fmt::Display for Supported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |numbers: &[u32]| {
            let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
            format!("{}{}", self.mark, numbers.join("."))
        };
        match self.newest {
            Some(newest) => write!(f, "{} to {}", text(self.oldest), text(newest)),
            None => write!(f, "{} or later", text(self.oldest)),
        }
    }
}

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
    #[error("{program} is {vmm} {mark}{version}; supported are {supported}")]
    Unsupported {
        /// The program, as configured.
        program: String,
        /// Name of the VMM.
        vmm: &'static str,
        /// The text before a version.
        mark: &'static str,
        /// Version that the VMM reports.
        version: String,
        /// The range of supported versions.
        supported: String,
    },
}

/// Runs `program --version`. Returns the first line of the output, cut.
async fn first_line(program: &Path) -> Result<String, VersionError> {
    let name = || program.display().to_string();
    match tokio::time::timeout(LIMIT, run(program)).await {
        Ok(Ok(line)) => Ok(line),
        Ok(Err(source)) => Err(VersionError::Run { program: name(), source }),
        Err(_) => Err(VersionError::Hung { program: name() }),
    }
}

async fn run(program: &Path) -> io::Result<String> {
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(MAX_OUTPUT).read_to_end(&mut output).await?;
    }
    let output = String::from_utf8_lossy(&output);
    Ok(output.lines().next().unwrap_or_default().chars().take(MAX_LINE).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// VMM, line of output, and the version or the end of the error.
    const LINES: [(&Supported, &str, Result<&str, &str>); 20] = [
        (&CLOUD_HYPERVISOR, "cloud-hypervisor v53.0", Ok("53.0")),
        (&CLOUD_HYPERVISOR, "cloud-hypervisor v52.0-12-gdeadbee-dirty", Ok("52.0-12-gdeadbee-dirty")),
        // With these versions, no pod with a network starts.
        (
            &CLOUD_HYPERVISOR,
            "cloud-hypervisor v51.2",
            Err("Cloud Hypervisor v51.2; supported are v52 to v53"),
        ),
        (&CLOUD_HYPERVISOR, "cloud-hypervisor v54.1.2", Err("v54.1.2; supported are v52 to v53")),
        (&CLOUD_HYPERVISOR, "QEMU emulator version 7.2", Err("prints \"QEMU emulator version 7.2\"")),
        (&CLOUD_HYPERVISOR, "cloud-hypervisor v99999999999999.0", Err("v99999999999999.0\"")),
        (&FIRECRACKER, "Firecracker v1.14.0\n", Ok("1.14.0")),
        (&FIRECRACKER, "Firecracker v1.15.1", Ok("1.15.1")),
        (&FIRECRACKER, "Firecracker v1.16.1", Ok("1.16.1")),
        (&FIRECRACKER, "Firecracker v1.16.0-dev", Ok("1.16.0-dev")),
        (&FIRECRACKER, "Firecracker v1.13.2", Err("Firecracker v1.13.2; supported are v1.14 to v1.16")),
        (&FIRECRACKER, "Firecracker v1.17.0", Err("v1.17.0; supported are v1.14 to v1.16")),
        (&FIRECRACKER, "Firecracker v2.15.0", Err("v2.15.0; supported are v1.14 to v1.16")),
        (&FIRECRACKER, "Firecracker v0.25.0", Err("v0.25.0; supported are v1.14 to v1.16")),
        (&FIRECRACKER, "cloud-hypervisor v53.0", Err("prints \"cloud-hypervisor v53.0\"")),
        (&FIRECRACKER, "Firecracker v1", Err("prints \"Firecracker v1\"")),
        (&FIRECRACKER, "Firecracker v1.99999999999", Err("prints \"Firecracker v1.99999999999\"")),
        (&QEMU, "QEMU emulator version 7.2.22 (Debian 1:7.2)", Ok("7.2.22 (Debian 1:7.2)")),
        (&QEMU, "QEMU emulator version 5.2.0", Err("p is QEMU 5.2.0; supported are 7.2 or later")),
        (&QEMU, "hello", Err("p is not QEMU: its --version prints \"hello\"")),
    ];

    #[test]
    fn supported_versions_are_taken_and_others_refused_by_name() {
        for (vmm, line, expected) in LINES {
            let parsed = vmm.parse(line, "p".into()).map_err(|error| error.to_string());
            match (&parsed, expected) {
                (Ok(version), Ok(expected)) => assert_eq!(version, expected),
                (Err(error), Err(end)) => assert!(error.ends_with(end), "{error}"),
                _ => panic!("{line}: {parsed:?}"),
            }
        }
        assert_eq!(CLOUD_HYPERVISOR.check_running("53.0.0").unwrap(), "53.0.0");
        let error = FIRECRACKER.check_running("1.17.0").unwrap_err().to_string();
        assert!(error.starts_with("the running VMM is Firecracker v1.17.0;"), "{error}");
    }

    #[tokio::test]
    async fn a_program_that_is_missing_or_another_is_named() {
        let missing = CLOUD_HYPERVISOR.read(Path::new("/nonexistent/ch")).await.unwrap_err();
        assert!(missing.to_string().starts_with("cannot run /nonexistent/ch"), "{missing}");
        let other = FIRECRACKER.read(Path::new("/bin/true")).await.unwrap_err();
        assert!(matches!(other, VersionError::Foreign { .. }), "{other}");
    }
}
