//! Entries of the quarantine.

use std::path::PathBuf;

use sandboxer_protocol::id::{Id, SandboxId};
use serde::{Deserialize, Serialize};

/// The findings when a record was moved to the quarantine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Time, ns since 1970.
    pub at_ns: u64,
    /// Original path of the record.
    pub path: PathBuf,
    /// The pod, from the file name.
    pub pod: Option<SandboxId>,
    /// Why it is unreadable.
    pub problem: String,
    /// What existed of the pod.
    pub left: Left,
}

/// What exists of a pod without a readable record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Left {
    /// Its run directory; empty if the pod is not known.
    pub run_dir: PathBuf,
    /// Whether the run directory exists.
    pub run_dir_exists: bool,
    /// Processes that were started for it.
    pub processes: Vec<Seen>,
}

/// A process of such a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seen {
    /// Its PID.
    pub pid: u32,
    /// Its name (`comm`).
    pub command: String,
}

/// A record in the quarantine.
#[derive(Debug)]
pub struct Entry {
    /// Its name in requests.
    pub name: Id,
    /// Time of the move, ns since 1970.
    pub at_ns: u64,
    /// Its pod.
    pub pod: Option<SandboxId>,
    /// The record's length.
    pub bytes: u64,
    /// The findings then, unless no report could be written.
    pub report: Option<Report>,
    /// What exists now.
    pub left: Left,
}

/// A list of entries.
#[derive(Debug, Default)]
pub struct Listed {
    /// The oldest entries.
    pub entries: Vec<Entry>,
    /// Number of further entries.
    pub left_off: u64,
    /// Total size of all records, bytes.
    pub bytes: u64,
}
