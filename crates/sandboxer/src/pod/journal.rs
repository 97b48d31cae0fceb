//! The records of pods on disk, so that the daemon may die at any moment.
//!
//! There is one JSON file per pod. It is replaced by a rename, so a reader sees either the old or the new record, never
//! a part. The previous record is kept, in case a disk returns corrupt data:
//!
//! ```text
//! state_dir/pods/<pod>.json     the record
//! state_dir/pods/<pod>.before   the previous record, if there is one
//! state_dir/pods/<pod>.new      while it is written
//! ```
//!
//! A record is written (to the page cache) before its content is reported to any caller. That is enough for the next
//! daemon, and no caller waits for the disk: a record is lost only if the host dies, and then every VM is lost too.
//! [`sync`] writes it to disk right after, for the daemon of the next boot, which reports the ended pods to containerd.

mod sync;

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use sandboxer_base::{
    chain,
    failpoint::{fail, pass},
};
use sandboxer_host::volume::Needed;
use sandboxer_protocol::{
    id::{ContainerId, ExecId, SandboxId},
    link::LinkKey,
};
use sandboxer_vmm::{DiskRecord, VmRecord};
use serde::{Deserialize, Serialize};

use self::sync::Syncer;
use super::{checkpoint::Restored, placer::PlacementRecord, spec::PodSpec};
use crate::{
    error::tolerate,
    pod::container::{Exit, StdioPaths},
    share::ShareRecord,
    state::{PodState, PodStatus},
};

/// Version of the records that this daemon writes.
///
/// After a rollback, the previous release must find its pods, so it has to be able to read a record. A new field is
/// therefore not written while it is empty, and has a default. The previous release does not know
/// [`PodRecord::readable_from`] yet and rejects unknown fields. From this release on, a daemon reads the record of a
/// later version if that field allows it, and ignores unknown fields.
pub const RECORD_VERSION: u32 = 2;
/// The oldest version that this daemon can read.
const OLDEST_VERSION: u32 = 1;

/// File extension of a previous record.
const BEFORE: &str = "before";

/// Maximum size of a record, bytes.
const MAX_RECORD: u64 = 4 << 20;

/// The state that the next daemon needs to adopt a pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PodRecord {
    /// The writer's [`RECORD_VERSION`].
    pub version: u32,
    /// The oldest version whose daemons can read the record, if that is not the record's own version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readable_from: Option<u32>,
    /// The requested pod.
    pub spec: PodSpec,
    /// The pod's state.
    pub status: PodStatus,
    /// Key of the link to the pod's agent.
    pub link_key: LinkKey,
    /// The pod's VM; `None` before the start and after the end.
    #[serde(rename = "machine")]
    pub vm: Option<VmRecord>,
    /// The pod's containers.
    pub containers: Vec<ContainerRecord>,
    /// Volumes that the pod's guest has.
    #[serde(default)]
    pub volumes: Vec<Needed>,
    /// The saved containers with which a restored pod goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<Restored>,
    /// The pod's placement; `None`: not placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementRecord>,
    /// The server process of the pod's live shares, in records of version 1. Since then, it is in the run directory.
    #[serde(default, skip_serializing)]
    pub shares: Option<ShareRecord>,
}

/// A container of a recorded pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// The container's id.
    pub id: ContainerId,
    /// The container's bundle directory.
    pub bundle: PathBuf,
    /// Disks attached for the container.
    pub disks: Vec<DiskRecord>,
    /// Path of the container's termination message on the host.
    #[serde(default)]
    pub message: Option<PathBuf>,
    /// CPUs of the host that the container may use, as a list; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// Memory nodes of the host that the container may use, as a list; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mems: Option<String>,
    /// The container's memory limit, bytes; negative: none. 0: not specified, or unknown to the daemon that wrote the
    /// record.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_limit: i64,
    /// The container's CPU limit, µs in each second; negative or 0: as for memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cpu_limit: i64,
    /// The container's init.
    pub init: ProcessRecord,
    /// The container's execs.
    pub execs: Vec<(ExecId, ProcessRecord)>,
}

fn is_zero(number: &i64) -> bool {
    *number == 0
}

/// A process of a recorded container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// PID in the guest; 0 before the process is created.
    pub pid: u32,
    /// Whether the process was started.
    pub started: bool,
    /// The process's exit, if it has exited.
    pub exit: Option<Exit>,
    /// The process's FIFOs.
    pub stdio: StdioPaths,
}

/// Returns the directory of records in a state directory.
pub fn dir(state_dir: &Path) -> PathBuf {
    state_dir.join("pods")
}

/// Returns the path of the previous version of the record at `path`.
pub fn before(path: &Path) -> PathBuf {
    path.with_extension(BEFORE)
}

/// An error with a record of the journal.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be read or written.
    #[error("cannot {action} journal record {path:?}")]
    Io {
        /// The attempted operation: "read", "write" or "remove".
        action: &'static str,
        /// The path of the record.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not a valid record.
    #[error("journal record {path:?} cannot be understood")]
    Malformed {
        /// The path of the record.
        path: PathBuf,
        /// The parse error.
        source: serde_json::Error,
    },
    /// The record was written by a later daemon.
    #[error(
        "journal record {path:?} has version {found}, this daemon knows {RECORD_VERSION}: start the daemon that wrote it"
    )]
    Version {
        /// The path of the record.
        path: PathBuf,
        /// The version of the record.
        found: u32,
    },
}

impl JournalError {
    /// Returns the path of the record.
    pub fn path(&self) -> &Path {
        match self {
            Self::Io { path, .. } | Self::Malformed { path, .. } | Self::Version { path, .. } => path,
        }
    }
}

/// The directory of all records.
#[derive(Debug, Clone)]
pub struct Journal {
    dir: PathBuf,
    syncer: Arc<Syncer>,
    trouble: Trouble,
}

/// The reason why the last change of a record failed; `None` after a successful change.
#[derive(Debug, Clone, Default)]
struct Trouble(Arc<Mutex<Option<String>>>);

impl Trouble {
    fn note(&self, done: Result<(), JournalError>) -> Result<(), JournalError> {
        let text = done.as_ref().err().map(|error| chain(error));
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = text;
        done
    }
}

impl Journal {
    /// Opens the directory, creating it (mode 0700) if needed; removes half-written files of a writer that died, and
    /// completes an interrupted [`Journal::go_back`]. On a disk that is full or read-only, both stay for the next
    /// daemon.
    pub fn open(state_dir: &Path) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let dir = dir(state_dir);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            let record = path.with_extension("json");
            match path.extension().and_then(|ext| ext.to_str()) {
                Some("new") => tolerate("remove", &path, fs::remove_file(&path)),
                Some(BEFORE) if !record.try_exists()? => {
                    tolerate("put back", &path, fs::rename(&path, record))
                }
                _ => {}
            }
        }
        Ok(Self { syncer: Arc::new(Syncer::new(dir.clone())), dir, trouble: Trouble::default() })
    }

    /// Returns why records cannot be changed now: the disk is full, read-only or broken. `None`: no trouble is known.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the journal of one pod's record.
    pub fn pod(&self, id: &SandboxId) -> PodJournal {
        let path = self.dir.join(format!("{id}.json"));
        PodJournal {
            path,
            newest: Arc::default(),
            syncer: self.syncer.clone(),
            trouble: self.trouble.clone(),
        }
    }

    /// Returns every record, each readable or not.
    pub fn records(&self) -> io::Result<Vec<Result<PodRecord, JournalError>>> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let alone = || !path.with_extension("json").exists();
            match path.extension().and_then(|ext| ext.to_str()) {
                Some("json") => records.push(read(&path)),
                // It could not be put back when the directory was opened.
                Some(BEFORE) if alone() => records.push(read(&path)),
                _ => {}
            }
        }
        Ok(records)
    }

    /// Returns the previous record of a pod whose record cannot be read, to adopt the pod by it. `None` if it is
    /// unreadable too, or if the record is a later daemon's, which is valid. Also `None` if it was written before the
    /// pod was ready: it does not contain the pod's VM, and recovery would undo the pod.
    pub fn instead_of(&self, unreadable: &JournalError) -> Option<PodRecord> {
        if matches!(unreadable, JournalError::Version { .. }) {
            return None;
        }
        let record = read(&before(unreadable.path())).ok()?;
        let was_ready = !matches!(record.status.state, PodState::Created | PodState::Starting);
        was_ready.then_some(record)
    }

    /// Moves the previous record to `path`, which is free.
    pub fn go_back(&self, path: &Path) -> io::Result<()> {
        fs::rename(before(path), path)?;
        File::open(&self.dir)?.sync_all()
    }
}

pub(crate) fn read(path: &Path) -> Result<PodRecord, JournalError> {
    let failed = |source| JournalError::Io { action: "read", path: path.to_owned(), source };
    let length = fs::metadata(path).map_err(failed)?.len();
    if length > MAX_RECORD {
        return Err(failed(io::Error::other(format!("{length} bytes are more than a record has"))));
    }
    parse(&fs::read(path).map_err(failed)?, path)
}

/// Reads a record; `path` names it in errors.
pub(crate) fn parse(text: &[u8], path: &Path) -> Result<PodRecord, JournalError> {
    let malformed = |source| JournalError::Malformed { path: path.to_owned(), source };
    // The version first: a later record may contain fields that this daemon cannot parse.
    #[derive(Deserialize)]
    struct Version {
        version: u32,
        #[serde(default)]
        readable_from: Option<u32>,
    }
    let Version { version: found, readable_from } = serde_json::from_slice(text).map_err(malformed)?;
    let is_readable = readable_from.is_some_and(|from| from <= RECORD_VERSION);
    if found < OLDEST_VERSION || found > RECORD_VERSION && !is_readable {
        return Err(JournalError::Version { path: path.to_owned(), found });
    }
    serde_json::from_slice(text).map_err(malformed)
}

/// The journal of one pod's record. Clones write the same record.
#[derive(Debug, Clone)]
pub struct PodJournal {
    path: PathBuf,
    // Number of the newest record. Held across the write, so that the older of two concurrent writes never lands last;
    // only this pod's writers wait for it.
    newest: Arc<tokio::sync::Mutex<u64>>,
    syncer: Arc<Syncer>,
    trouble: Trouble,
}

impl PodJournal {
    /// Writes `record`, unless a newer one is already on disk; `number` increases with each record.
    pub async fn write(&self, number: u64, record: PodRecord) -> Result<(), JournalError> {
        let mut newest = self.newest.clone().lock_owned().await;
        if number <= *newest {
            return Ok(());
        }
        let path = self.path.clone();
        self.trouble.note(blocking("write", &self.path, move || replace(&path, &record)).await)?;
        *newest = number;
        self.syncer.soon(&self.path);
        Ok(())
    }

    /// Deletes the record; nothing is written after this.
    pub async fn remove(&self) -> Result<(), JournalError> {
        let mut newest = self.newest.clone().lock_owned().await;
        *newest = u64::MAX;
        let path = self.path.clone();
        pass(format_args!("before a record is removed"));
        // The previous record first: alone, it would be used as the pod's record.
        let removal = move || {
            fail(format_args!("a record is removed: {}", path.display()))?;
            remove(&before(&path))?;
            remove(&path)
        };
        let removed = blocking("remove", &self.path, removal).await;
        self.trouble.note(removed)?;
        pass(format_args!("a record is removed"));
        Ok(())
    }
}

async fn blocking(
    action: &'static str,
    path: &Path,
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> Result<(), JournalError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).and_then(|done| done);
    done.map_err(|source| JournalError::Io { action, path: path.to_owned(), source })
}

/// Removes a file that may not exist.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Keeps the record at `path`, if there is one, as the previous record.
fn keep(path: &Path) -> io::Result<()> {
    remove(&before(path))?;
    match fs::hard_link(path, before(path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn replace(path: &Path, record: &PodRecord) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let new = path.with_extension("new");
    pass(format_args!("before a record"));
    let text = serde_json::to_vec(record).map_err(io::Error::other)?;
    let written = (|| {
        fail(format_args!("a record is opened: {}", path.display()))?;
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        fail(format_args!("a record is written: {}", path.display()))?;
        pass(format_args!("a record is written"));
        if let Err(error) =
            fail(format_args!("the previous record is kept: {}", path.display())).and_then(|()| keep(path))
        {
            tracing::warn!(?path, %error, "cannot keep the previous record");
        }
        pass(format_args!("the previous record is kept"));
        fail(format_args!("a record is put in place: {}", path.display()))?;
        fs::rename(&new, path)
    })();
    if written.is_err() {
        // The disk may be full: remove the half-written file.
        let _ = fs::remove_file(&new);
    }
    written?;
    pass(format_args!("a record is in place"));
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
