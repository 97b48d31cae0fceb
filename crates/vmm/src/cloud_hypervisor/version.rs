//! The supported versions of Cloud Hypervisor, and how they differ.
//!
//! | since | what |
//! |---|---|
//! | v51 | disks have an image type; VMMs detect a missing one, and since v52 raw disks then lose sector 0's writes |
//! | v52 | a tap may be of another network namespace; before, the VMM looked taps up by name: no pod with network ran |
//! | v53 | a refusal is a JSON array of causes, before plain text; a VM that is not created is status 404, before 500 |

use std::{fmt, path::Path};

pub use crate::version::VersionError;
use crate::version::first_line;

/// The oldest and the newest supported major version.
pub const KNOWN: std::ops::RangeInclusive<u32> = 52..=53;

/// Name of the VMM in messages.
const VMM: &str = "Cloud Hypervisor";
/// Maximum number of characters kept of a refusal.
const REASON: usize = 400;

/// A supported version of Cloud Hypervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    text: String,
}

impl Version {
    /// Runs `program --version` and parses the output.
    pub async fn of(program: &Path) -> Result<Self, VersionError> {
        Self::parse(&first_line(program).await?, program.display().to_string())
    }

    /// Parses the version that a running VMM reports: `53.0.0`.
    pub fn of_running(version: &str) -> Result<Self, VersionError> {
        let version: String = version.chars().take(100).collect();
        Self::parse(&format!("cloud-hypervisor v{version}"), "the running VMM".into())
    }

    /// Parses `cloud-hypervisor v53.0`; more text may follow the number.
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
                let known = format!("v{} to v{}", KNOWN.start(), KNOWN.end());
                Err(VersionError::Unknown { program, vmm: VMM, found: format!("v{}", version.trim()), known })
            }
            _ => Err(VersionError::Foreign { program, vmm: VMM, output: line.to_owned() }),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Returns the reason of a refusal, from the response of any version: one line, bounded.
pub fn reason(answer: &[u8]) -> String {
    let text = match serde_json::from_slice::<Vec<String>>(answer) {
        // From the outermost cause, which only repeats the call, to the innermost.
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
        // With these versions, no pod with a network starts.
        let old = parse("cloud-hypervisor v51.2").unwrap_err();
        assert_eq!(old, "ch is Cloud Hypervisor v51.2; supported are v52 to v53");
        assert!(parse("cloud-hypervisor v54.1.2").unwrap_err().contains("v54.1.2"));
        assert!(parse("QEMU emulator version 7.2").unwrap_err().contains("is not Cloud Hypervisor"));
        assert!(parse("cloud-hypervisor v99999999999999.0").unwrap_err().contains("is not Cloud Hypervisor"));
    }

    #[tokio::test]
    async fn a_program_that_is_none_is_named() {
        let missing = Version::of(Path::new("/nonexistent/ch")).await.unwrap_err();
        assert!(missing.to_string().starts_with("cannot run /nonexistent/ch"), "{missing}");
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
