//! What is known of a record that was put aside.

use std::path::PathBuf;

use sandboxer_protocol::id::{Id, SandboxId};
use serde::{Deserialize, Serialize};

/// What was found when a record was put aside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// When, ns since 1970.
    pub at_ns: u64,
    /// Where the record lay.
    pub path: PathBuf,
    /// Whose it is, by its file's name.
    pub pod: Option<SandboxId>,
    /// Why it could not be understood.
    pub problem: String,
    /// What was there of the pod.
    pub left: Left,
}

/// What is there of a pod that no record tells of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Left {
    /// Its run directory; empty: it is not known whose the record is.
    pub run_dir: PathBuf,
    /// That one is there.
    pub run_dir_exists: bool,
    /// Processes that were started for it.
    pub processes: Vec<Seen>,
}

/// A process as it was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seen {
    /// Its pid then.
    pub pid: u32,
    /// Its program's name as the kernel had it.
    pub command: String,
}

/// A record that was put aside.
#[derive(Debug)]
pub struct Entry {
    /// By which it is asked for.
    pub name: Id,
    /// When it was put aside, ns since 1970.
    pub at_ns: u64,
    /// Whose it is.
    pub pod: Option<SandboxId>,
    /// The record's length.
    pub bytes: u64,
    /// What was found then, unless no report could be written.
    pub report: Option<Report>,
    /// What is there now.
    pub left: Left,
}

/// Some of the entries.
#[derive(Debug, Default)]
pub struct Listed {
    /// The oldest.
    pub entries: Vec<Entry>,
    /// How many more there are.
    pub left_off: u64,
    /// Length of all records.
    pub bytes: u64,
}
