//! Which versions of Cloud Hypervisor are known, and all in which they differ.
//!
//! | since | what |
//! |---|---|
//! | v51 | a disk says its image type; one that doesn't is looked at, and since v52 a raw one loses writes to its first sector |
//! | v52 | a tap that is passed may belong to another network namespace than the VMM's: before, it was looked up by its name, and no pod with a network could start |
//! | v53 | a refusal is a JSON array of causes, before it was plain text; what isn't created is status 404, before 500 |

use std::{fmt, io, path::Path, process::Stdio, time::Duration};

use tokio::{io::AsyncReadExt, process::Command};

/// The oldest and the newest major version that are known.
pub const KNOWN: std::ops::RangeInclusive<u32> = 52..=53;

/// Longest wait for `--version`.
const LIMIT: Duration = Duration::from_secs(5);
/// Most bytes read of its answer.
const ANSWER: u64 = 4096;
/// Characters kept of a refusal.
const REASON: usize = 400;

/// A version that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    text: String,
}

/// Why a program can't be used as Cloud Hypervisor.
#[derive(Debug, thiserror::Error)]
pub enum VersionError {
    /// It can't be run.
    #[error("{program} cannot be run: {source}")]
    Run {
        /// As configured.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// It didn't answer.
    #[error("{program} --version did not end within {LIMIT:?}")]
    Hung {
        /// As configured.
        program: String,
    },
    /// It is something else.
    #[error("{program} is no Cloud Hypervisor: its --version says {said:?}")]
    Foreign {
        /// As configured.
        program: String,
        /// Its first line, cut.
        said: String,
    },
    /// Too old or too new.
    #[error("{program} is Cloud Hypervisor {found}, and v{} to v{} are known here", KNOWN.start(), KNOWN.end())]
    Unknown {
        /// As configured.
        program: String,
        /// As it says.
        found: String,
    },
}

impl Version {
    /// Asks `program`.
    pub async fn of(program: &Path) -> Result<Self, VersionError> {
        let name = program.display().to_string();
        match tokio::time::timeout(LIMIT, first_line(program)).await {
            Ok(Ok(line)) => Self::parse(&line, name),
            Ok(Err(source)) => Err(VersionError::Run { program: name, source }),
            Err(_) => Err(VersionError::Hung { program: name }),
        }
    }

    /// Returns that of a VMM that runs, as it tells itself: `53.0.0`.
    pub fn of_running(told: &str) -> Result<Self, VersionError> {
        let told: String = told.chars().take(100).collect();
        Self::parse(&format!("cloud-hypervisor v{told}"), "the running VMM".into())
    }

    /// Reads `cloud-hypervisor v53.0`, where more may follow the number.
    pub fn parse(line: &str, program: String) -> Result<Self, VersionError> {
        let version = line.strip_prefix("cloud-hypervisor v");
        let major = version.and_then(|version| {
            version.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok()
        });
        match (version, major) {
            (Some(version), Some(major)) if KNOWN.contains(&major) => {
                Ok(Self { text: version.trim().to_owned() })
            }
            (Some(version), Some(_)) => {
                Err(VersionError::Unknown { program, found: format!("v{}", version.trim()) })
            }
            _ => Err(VersionError::Foreign { program, said: line.to_owned() }),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

async fn first_line(program: &Path) -> io::Result<String> {
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let mut said = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(ANSWER).read_to_end(&mut said).await?;
    }
    let said = String::from_utf8_lossy(&said);
    Ok(said.lines().next().unwrap_or_default().chars().take(100).collect())
}

/// Returns why a call was refused, out of the answer of any version: one line, cut to a bearable length.
pub fn reason(answer: &[u8]) -> String {
    let text = match serde_json::from_slice::<Vec<String>>(answer) {
        // From the outermost cause, which says no more than the call, to the innermost.
        Ok(causes) => causes.join(": "),
        Err(_) => String::from_utf8_lossy(answer).into_owned(),
    };
    text.lines().next().unwrap_or_default().chars().filter(|c| !c.is_control()).take(REASON).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn parse(line: &str) -> Result<Version, String> {
        Version::parse(line, "ch".into()).map_err(|error| error.to_string())
    }

    #[test]
    fn known_versions_are_taken_and_others_refused_by_name() {
        assert_eq!(parse("cloud-hypervisor v53.0").unwrap().to_string(), "53.0");
        let built = parse("cloud-hypervisor v52.0-12-gdeadbee-dirty").unwrap();
        assert_eq!(built.to_string(), "52.0-12-gdeadbee-dirty");
        // In these no pod with a network starts.
        let old = parse("cloud-hypervisor v51.2").unwrap_err();
        assert_eq!(old, "ch is Cloud Hypervisor v51.2, and v52 to v53 are known here");
        assert!(parse("cloud-hypervisor v54.1.2").unwrap_err().contains("v54.1.2"));
        assert!(parse("QEMU emulator version 7.2").unwrap_err().contains("is no Cloud Hypervisor"));
        assert!(parse("cloud-hypervisor v99999999999999.0").unwrap_err().contains("is no Cloud Hypervisor"));
    }

    #[tokio::test]
    async fn a_program_that_is_none_is_named() {
        let missing = Version::of(Path::new("/nonexistent/ch")).await.unwrap_err();
        assert!(missing.to_string().starts_with("/nonexistent/ch cannot be run: "), "{missing}");
        let other = Version::of(Path::new("/bin/true")).await.unwrap_err();
        assert!(matches!(other, VersionError::Foreign { .. }), "{other}");
    }

    #[test]
    fn a_refusal_of_any_version_is_one_line() {
        assert_eq!(
            reason(br#"["Error from API","The VM could not boot"]"#),
            "Error from API: The VM could not boot"
        );
        assert_eq!(reason(b"VM is not created\nmore"), "VM is not created");
        assert_eq!(reason(&[b'x'; 5000]).len(), REASON);
    }
}
