//! Entries of the quarantine.

use std::path::PathBuf;

use sandboxer_protocol::id::{Id, SandboxId};
use serde::{Deserialize, Serialize};

/// The findings when a record was moved to the quarantine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Time of the report, ns since 1970.
    pub at_ns: u64,
    /// Original path of the record.
    pub path: PathBuf,
    /// The pod, from the file name of the record.
    pub pod: Option<SandboxId>,
    /// The reason why the record is unreadable.
    pub problem: String,
    /// What existed of the pod.
    pub left: Left,
}

/// What exists of a pod without a readable record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Left {
    /// The pod's run directory; empty if the pod is unknown.
    pub run_dir: PathBuf,
    /// Whether the run directory exists.
    pub run_dir_exists: bool,
    /// Processes that were started for the pod.
    pub processes: Vec<Seen>,
}

/// A process of a pod without a readable record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seen {
    /// The PID of the process.
    pub pid: u32,
    /// The name of the process (`comm`).
    pub command: String,
}

/// A record in the quarantine.
#[derive(Debug)]
pub struct Entry {
    /// The entry's name in requests.
    pub name: Id,
    /// Time of the move to the quarantine, ns since 1970.
    pub at_ns: u64,
    /// The entry's pod.
    pub pod: Option<SandboxId>,
    /// Length of the record, bytes.
    pub bytes: u64,
    /// The findings at that time, unless no report could be written.
    pub report: Option<Report>,
    /// What exists of the pod now.
    pub left: Left,
}

/// A list of entries.
#[derive(Debug, Default)]
pub struct Listed {
    /// The oldest entries of the quarantine.
    pub entries: Vec<Entry>,
    /// Number of further entries.
    pub left_off: u64,
    /// Total size of all records, bytes.
    pub bytes: u64,
}
