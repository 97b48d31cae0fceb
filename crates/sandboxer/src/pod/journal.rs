//! What is on disk of a pod, so that the daemon may die at any instant.
//!
//! One JSON file a pod, replaced whole: written beside, renamed over. A reader sees the
//! old record or the new one, never half of either. The old one keeps a name of its own, for the day on which a disk
//! gives back something else than it was given:
//!
//! ```text
//! state_dir/pods/<pod>.json     the record
//! state_dir/pods/<pod>.before   the one before it, if there was one
//! state_dir/pods/<pod>.new      while it is written
//! ```
//!
//! A record is in the kernel's hands before anybody is told of what it says, which is enough for the next daemon, and
//! nobody waits for the disk: what ends before the disk has a record is the host, and with it every VM. The disk
//! gets it right after, by [`sync`], for the daemon of the next boot, which tells containerd what has ended.

mod sync;

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_base::failpoint::pass;
use sandboxer_host::volume::Needed;
use sandboxer_protocol::{
    id::{ContainerId, ExecId, SandboxId},
    link::LinkKey,
};
use sandboxer_vmm::{DiskSpec, VmRecord};
use serde::{Deserialize, Serialize};

use self::sync::Syncer;
use super::{
    spec::PodSpec,
    state::{PodState, PodStatus},
};
use crate::{
    pod::container::{Exit, StdioPaths},
    share::ShareRecord,
};

/// Version of the records this daemon writes.
///
/// Who rolls a release back must find his pods: a record is for the daemon of the release before, too. So a new field is
/// not written while it has nothing to say, and has a default for who doesn't find it. The release before doesn't know
/// [`PodRecord::readable_from`] yet and refuses what it doesn't know; from this one on a daemon reads the record of a later
/// version that says that it can, and passes over what it doesn't know.
pub const RECORD_VERSION: u32 = 2;
/// The oldest version that is still understood.
const OLDEST_VERSION: u32 = 1;

/// What the record before another is called instead of `json`.
const BEFORE: &str = "before";

/// Largest record that is read back, bytes.
const MAX_RECORD: u64 = 4 << 20;

/// All that the next daemon needs to take a pod up.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PodRecord {
    /// [`RECORD_VERSION`] of the writer.
    pub version: u32,
    /// The oldest version whose daemons read it right, where that is not its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readable_from: Option<u32>,
    /// The pod as asked for.
    pub spec: PodSpec,
    /// Where it stood.
    pub status: PodStatus,
    /// Key of the link to its agent.
    pub link_key: LinkKey,
    /// Its VM; none before there is one and after it ended.
    #[serde(rename = "machine")]
    pub vm: Option<VmRecord>,
    /// Its containers.
    pub containers: Vec<ContainerRecord>,
    /// Volumes that its guest has.
    #[serde(default)]
    pub volumes: Vec<Needed>,
    /// The process that serves its live shares, in records of version 1. The run directory tells it since.
    #[serde(default, skip_serializing)]
    pub shares: Option<ShareRecord>,
}

/// A container of a recorded pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// Its id.
    pub id: ContainerId,
    /// Its bundle directory.
    pub bundle: PathBuf,
    /// Disks plugged in for it.
    pub disks: Vec<DiskSpec>,
    /// The host's file for its termination message.
    #[serde(default)]
    pub message: Option<PathBuf>,
    /// CPUs of the host that it may use, a list; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// Its init.
    pub init: ProcessRecord,
    /// Its execs.
    pub execs: Vec<(ExecId, ProcessRecord)>,
}

/// A process of a recorded container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Guest pid; 0 before it was created.
    pub pid: u32,
    /// It was let go.
    pub started: bool,
    /// How it ended, if it has.
    pub exit: Option<Exit>,
    /// Where its output goes.
    pub stdio: StdioPaths,
}

/// Where a state directory has its records.
pub fn dir(state_dir: &Path) -> PathBuf {
    state_dir.join("pods")
}

/// Where the record before the one at `path` is.
pub fn before(path: &Path) -> PathBuf {
    path.with_extension(BEFORE)
}

/// Why a record can't be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file can't be read or written.
    #[error("cannot {action} journal record {path:?}")]
    Io {
        /// "read", "write", "remove".
        action: &'static str,
        /// The record.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file holds no record.
    #[error("journal record {path:?} cannot be understood")]
    Malformed {
        /// The record.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A later daemon wrote it.
    #[error(
        "journal record {path:?} has version {found}, this daemon knows {RECORD_VERSION}: start the daemon that wrote it"
    )]
    Version {
        /// The record.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
}

impl JournalError {
    /// The record.
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
}

impl Journal {
    /// Opens the directory, making it (mode 0700) if it isn't there; removes what a writer that
    /// died left half-written, and ends what one that died had begun in [`Journal::go_back`].
    pub fn open(state_dir: &Path) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let dir = dir(state_dir);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            let record = path.with_extension("json");
            match path.extension().and_then(|ext| ext.to_str()) {
                Some("new") => fs::remove_file(path)?,
                Some(BEFORE) if !record.try_exists()? => fs::rename(path, record)?,
                _ => {}
            }
        }
        Ok(Self { syncer: Arc::new(Syncer::new(dir.clone())), dir })
    }

    /// The record of one pod.
    pub fn pod(&self, id: &SandboxId) -> PodJournal {
        let path = self.dir.join(format!("{id}.json"));
        PodJournal { path, newest: Arc::default(), syncer: self.syncer.clone() }
    }

    /// Every record there is, each readable or not.
    pub fn records(&self) -> io::Result<Vec<Result<PodRecord, JournalError>>> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|ext| ext == "json") {
                records.push(read(&path));
            }
        }
        Ok(records)
    }

    /// What a pod can be taken up by whose record can't be read: the one before it. None if that isn't better, or the
    /// record is a later daemon's, which is whole. None if it is from before the pod was ready: it doesn't tell which
    /// VM is the pod's, and by it the pod would be undone.
    pub fn instead_of(&self, unreadable: &JournalError) -> Option<PodRecord> {
        if matches!(unreadable, JournalError::Version { .. }) {
            return None;
        }
        let record = read(&before(unreadable.path())).ok()?;
        let was_ready = !matches!(record.status.state, PodState::Created | PodState::Starting);
        was_ready.then_some(record)
    }

    /// Puts the record before the one at `path` in its place, which is free.
    pub fn go_back(&self, path: &Path) -> io::Result<()> {
        fs::rename(before(path), path)?;
        File::open(&self.dir)?.sync_all()
    }
}

fn read(path: &Path) -> Result<PodRecord, JournalError> {
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
    // The version first: a later record may hold what this daemon can't parse.
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

/// The record of one pod. Clones write the same one.
#[derive(Debug, Clone)]
pub struct PodJournal {
    path: PathBuf,
    // Number of the newest record in place. Held across the write, so that of two writes under way
    // the older never lands last; only this pod's writers wait for it.
    newest: Arc<tokio::sync::Mutex<u64>>,
    syncer: Arc<Syncer>,
}

impl PodJournal {
    /// Puts `record` in place unless a newer one is there; `number` rises with each record.
    pub async fn write(&self, number: u64, record: PodRecord) -> Result<(), JournalError> {
        let mut newest = self.newest.clone().lock_owned().await;
        if number <= *newest {
            return Ok(());
        }
        let path = self.path.clone();
        blocking("write", &self.path, move || replace(&path, &record)).await?;
        *newest = number;
        self.syncer.soon(&self.path);
        Ok(())
    }

    /// Takes the record off the disk; nothing is written after that.
    pub async fn remove(&self) -> Result<(), JournalError> {
        let mut newest = self.newest.clone().lock_owned().await;
        *newest = u64::MAX;
        let path = self.path.clone();
        pass(format_args!("before a record is removed"));
        // The one before it first: alone, it would be taken for the pod's record.
        blocking("remove", &self.path, move || remove(&before(&path)).and_then(|()| remove(&path))).await?;
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

/// Removes a file that may not be there.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Keeps the record at `path`, if there is one, as the one before the next.
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
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        pass(format_args!("a record is written"));
        if let Err(error) = keep(path) {
            tracing::warn!(?path, %error, "the record before the next one is not kept");
        }
        pass(format_args!("the record before is kept"));
        fs::rename(&new, path)
    })();
    if written.is_err() {
        // The disk may be full: what was half-written must not keep it so.
        let _ = fs::remove_file(&new);
    }
    written?;
    pass(format_args!("a record is in place"));
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn record(id: &str) -> PodRecord {
        PodRecord {
            version: RECORD_VERSION,
            readable_from: None,
            spec: PodSpec::plain(id.parse().unwrap(), 1, 128),
            status: PodStatus::created(1),
            link_key: LinkKey::random(),
            vm: None,
            containers: Vec::new(),
            volumes: Vec::new(),
            shares: None,
        }
    }

    #[tokio::test]
    async fn an_older_record_never_lands_over_a_newer_one_nor_after_removal() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let pod = journal.pod(&"a".parse().unwrap());
        let mut newer = record("a");
        newer.spec.name = "newer".into();
        pod.write(2, newer).await.unwrap();
        pod.write(1, record("a")).await.unwrap();
        let found = journal.records().unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].as_ref().unwrap().spec.name, "newer");
        pod.remove().await.unwrap();
        pod.write(3, record("a")).await.unwrap();
        assert!(journal.records().unwrap().is_empty());
    }

    #[tokio::test]
    async fn the_record_before_is_there_for_a_torn_one_and_goes_with_the_pod() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let (pod, path) = (journal.pod(&"a".parse().unwrap()), dir.path().join("pods/a.json"));
        let as_of = |number: u32, state| {
            let mut record = record("a");
            (record.spec.vcpus, record.status.state) = (number, state);
            record
        };
        let tear = |path: &Path| {
            let whole = fs::read(path).unwrap();
            fs::write(path, &whole[..whole.len() / 2]).unwrap();
        };
        let found = || journal.records().unwrap().remove(0);

        pod.write(1, as_of(1, PodState::Starting)).await.unwrap();
        assert!(!before(&path).exists());
        pod.write(2, as_of(2, PodState::Ready)).await.unwrap();
        tear(&path);
        assert!(journal.instead_of(&found().unwrap_err()).is_none(), "it wasn't ready then");

        pod.write(3, as_of(3, PodState::Ready)).await.unwrap();
        pod.write(4, as_of(4, PodState::Ready)).await.unwrap();
        tear(&path);
        let torn = found().unwrap_err();
        assert_eq!(journal.instead_of(&torn).unwrap().spec.vcpus, 3);
        // A later daemon's is whole, and not to be gone back behind.
        let later = JournalError::Version { path: path.clone(), found: 99 };
        assert!(journal.instead_of(&later).is_none());
        // Died after the torn one was put aside, or not.
        fs::remove_file(&path).unwrap();
        Journal::open(dir.path()).unwrap();
        assert_eq!(found().unwrap().spec.vcpus, 3);
        assert!(!before(&path).exists());

        pod.write(5, as_of(5, PodState::Ready)).await.unwrap();
        tear(&path);
        tear(&before(&path));
        assert!(journal.instead_of(&found().unwrap_err()).is_none());
        pod.write(6, as_of(6, PodState::Ready)).await.unwrap();
        pod.remove().await.unwrap();
        assert_eq!(fs::read_dir(dir.path().join("pods")).unwrap().count(), 0);
    }

    /// As on a file system without links: what can't be kept keeps nothing from being written.
    #[tokio::test]
    async fn a_record_is_written_whose_predecessor_cannot_be_kept() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let (pod, path) = (journal.pod(&"a".parse().unwrap()), dir.path().join("pods/a.json"));
        pod.write(1, record("a")).await.unwrap();
        fs::create_dir(before(&path)).unwrap();
        keep(&path).unwrap_err();
        let mut next = record("a");
        next.spec.name = "next".into();
        pod.write(2, next).await.unwrap();
        assert_eq!(journal.records().unwrap().remove(0).unwrap().spec.name, "next");
        let unreadable =
            JournalError::Io { action: "read", path: path.clone(), source: io::ErrorKind::Other.into() };
        assert!(journal.instead_of(&unreadable).is_none());
        assert!(!path.with_extension("new").exists(), "half a record is left");
    }

    #[test]
    fn a_record_of_version_1_is_understood_with_the_process_of_its_shares() {
        let mut old = serde_json::to_value(record("old")).unwrap();
        old["version"] = 1.into();
        old["shares"] = serde_json::json!({ "pid": 7, "start_time": 9 });
        for later in ["host_ports", "limits"] {
            assert!(old["spec"].as_object_mut().unwrap().remove(later).is_some());
        }
        let text = serde_json::to_vec(&old).unwrap();
        let read = parse(&text, Path::new("old.json")).unwrap();
        assert_eq!(read.shares, Some(ShareRecord { pid: 7, start_time: 9, transport: None, key: None }));
        // What is written is of this version, and says no more than that.
        let written = serde_json::to_value(&PodRecord { version: RECORD_VERSION, ..read }).unwrap();
        assert!(written.get("shares").is_none());
    }

    /// Written by the release before. Whoever changes it has to do with those who roll this release back.
    const OF_THE_RELEASE_BEFORE: &str = include_str!("journal/record-2.json");

    #[test]
    fn a_record_is_for_the_release_before_too() {
        let read = parse(OF_THE_RELEASE_BEFORE.as_bytes(), Path::new("web.json")).unwrap();
        assert_eq!((read.containers.len(), read.volumes.len()), (1, 4));
        // That release refuses fields that it doesn't know: none is written for what it knew of.
        let written = serde_json::to_value(PodRecord { version: RECORD_VERSION, ..read }).unwrap();
        let before: serde_json::Value = serde_json::from_str(OF_THE_RELEASE_BEFORE).unwrap();
        assert_eq!(written, before);
    }

    #[test]
    fn a_later_record_is_read_if_it_says_that_it_can_be() {
        let mut later: serde_json::Value = serde_json::from_str(OF_THE_RELEASE_BEFORE).unwrap();
        later["version"] = (RECORD_VERSION + 1).into();
        for at in ["", "/spec", "/status", "/machine", "/containers/0", "/containers/0/init", "/volumes/0"] {
            later.pointer_mut(at).unwrap()["new"] = "of a later release".into();
        }
        let read = |record: &serde_json::Value| parse(record.to_string().as_bytes(), Path::new("web.json"));
        let refused = read(&later).unwrap_err();
        assert!(matches!(refused, JournalError::Version { found: 3, .. }), "{refused}");
        later["readable_from"] = (RECORD_VERSION + 1).into();
        let refused = read(&later).unwrap_err();
        assert!(matches!(refused, JournalError::Version { found: 3, .. }), "{refused}");
        later["readable_from"] = RECORD_VERSION.into();
        let read = read(&later).unwrap();
        assert_eq!((read.vm.unwrap().pid, read.containers.len(), read.volumes.len()), (4711, 1, 4));
    }

    #[test]
    fn torn_foreign_and_newer_records_are_told_apart_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let pods = dir.path().join("pods");
        let whole = serde_json::to_string(&record("torn")).unwrap();
        fs::write(pods.join("torn.json"), &whole[..whole.len() / 2]).unwrap();
        fs::write(pods.join("later.json"), r#"{"version":99,"something":"new"}"#).unwrap();
        fs::write(pods.join("half.new"), "x").unwrap();
        let mut errors: Vec<_> =
            journal.records().unwrap().into_iter().map(|r| r.unwrap_err().to_string()).collect();
        errors.sort();
        assert_eq!(errors.len(), 2, "{errors:?}");
        assert!(errors[0].contains("later.json") && errors[0].contains("version 99"), "{errors:?}");
        assert!(errors[1].contains("torn.json"), "{errors:?}");
        Journal::open(dir.path()).unwrap();
        let mut left: Vec<_> = fs::read_dir(&pods).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["later.json", "torn.json"]);
    }
}
