//! The supported versions of Firecracker, and how they differ.
//!
//! | since | what |
//! |---|---|
//! | v1.14 | all virtio devices can be on PCI, so that a VM has 31 of them |
//! | v1.16 | devices can be plugged into a running VM, as a preview; not used: the guest would have to look for them |

use std::{fmt, path::Path};

use crate::version::{VersionError, first_line};

/// Name of the VMM in messages.
const VMM: &str = "Firecracker";
/// The supported major version.
const MAJOR: u32 = 1;
/// The oldest and the newest supported minor version.
pub const KNOWN: std::ops::RangeInclusive<u32> = 14..=16;
/// Maximum number of characters kept of a refusal.
const REASON: usize = 400;

/// A supported version of Firecracker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    text: String,
}

impl Version {
    /// Runs `program --version` and parses the output.
    pub async fn of(program: &Path) -> Result<Self, VersionError> {
        Self::parse(&first_line(program).await?, program.display().to_string())
    }

    /// Parses the version that a running VMM reports: `1.16.1`.
    pub fn of_running(version: &str) -> Result<Self, VersionError> {
        let version: String = version.chars().take(100).collect();
        Self::parse(&format!("{VMM} v{version}"), "the running VMM".into())
    }

    /// Parses `Firecracker v1.16.1`; a suffix may follow the number.
    pub fn parse(line: &str, program: String) -> Result<Self, VersionError> {
        let version = line.trim().strip_prefix(VMM).and_then(|rest| rest.strip_prefix(" v"));
        let mut numbers =
            version.unwrap_or_default().split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
        match (version, numbers.next(), numbers.next()) {
            (Some(version), Some(Ok(MAJOR)), Some(Ok(minor))) if KNOWN.contains(&minor) => {
                Ok(Self { text: version.to_owned() })
            }
            (Some(version), Some(Ok(_)), Some(Ok(_))) => {
                Err(VersionError::Unknown { program, vmm: VMM, found: format!("v{version}"), known: known() })
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

/// Returns the supported versions, for messages.
pub fn known() -> String {
    format!("v{MAJOR}.{} to v{MAJOR}.{}", KNOWN.start(), KNOWN.end())
}

/// Returns the reason of a refusal: one line, bounded.
pub fn reason(answer: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Fault {
        fault_message: String,
    }
    let text = match serde_json::from_slice::<Fault>(answer) {
        Ok(fault) => fault.fault_message,
        Err(_) => String::from_utf8_lossy(answer).into_owned(),
    };
    text.replace('\n', " ").chars().filter(|c| !c.is_control()).take(REASON).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<String, String> {
        Version::parse(line, "fc".into())
            .map(|version| version.to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn known_versions_are_taken_and_others_refused_by_name() {
        for version in ["1.14.0", "1.15.1", "1.16.1", "1.16.0-dev"] {
            assert_eq!(parse(&format!("Firecracker v{version}\n")).unwrap(), version);
        }
        for unknown in ["1.13.2", "1.17.0", "2.15.0", "0.25.0"] {
            let error = parse(&format!("Firecracker v{unknown}")).unwrap_err();
            assert_eq!(error, format!("fc is Firecracker v{unknown}; supported are v1.14 to v1.16"));
        }
        for foreign in
            ["cloud-hypervisor v53.0", "Firecracker", "Firecracker v1", "Firecracker v1.99999999999"]
        {
            assert!(parse(foreign).unwrap_err().contains("is not Firecracker"), "{foreign}");
        }
        Version::of_running("1.16.1").unwrap();
    }

    #[test]
    fn a_refusal_is_one_line() {
        assert_eq!(reason(br#"{"fault_message":"Invalid drive\nid"}"#), "Invalid drive id");
        assert_eq!(reason(b"not JSON"), "not JSON");
        assert_eq!(reason(&[b'x'; 5000]).len(), REASON);
    }
}
