//! The quarantine: unreadable records. Each may belong to a pod, so none is deleted without a request.
//!
//! ```text
//! state_dir/quarantine/<ns since 1970>-<pod>.json     the record as it was
//! state_dir/quarantine/<ns since 1970>-<pod>.before   its previous record, unless the pod was adopted by that
//! state_dir/quarantine/<ns since 1970>-<pod>.report   the findings, JSON
//! ```
//!
//! The part before the dot is the entry's name. `-<pod>` is missing if the record's file name is not a pod ID.

mod entry;

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, ErrorKind, Read},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::mount::{MntFlags, umount2};
use procfs::process::Process;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use sandboxer_base::{chain, clock::now_ns};
use sandboxer_config::Config;
use sandboxer_process::strays::{self, Stray};
use sandboxer_protocol::id::{Id, InvalidId, SandboxId};

use super::journal::{self, JournalError};
use crate::pod::pool;
pub use entry::{Entry, Left, Listed, Report, Seen};

/// Name of the quarantine's directory in the state directory.
pub const DIR: &str = "quarantine";

/// Maximum number of entries in a list.
const MAX_LISTED: usize = 500;
/// Maximum length of the part of a record that is shown, bytes.
const MAX_SHOWN: u64 = 64 << 10;
/// Maximum size of a report, bytes.
const MAX_REPORT: u64 = 64 << 10;
/// Maximum length of the reason, characters: it may quote the record.
const MAX_PROBLEM: usize = 2 << 10;
/// Text of a report for a pod that was adopted by its previous record.
const TAKEN_UP: &str = "its pod is taken up as of the record before: a container or an exec that was made since is \
                        undone, one that was removed since has ended";
/// Time limit for killed processes to exit.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// An error with an entry of the quarantine.
#[derive(Debug, thiserror::Error)]
pub enum QuarantineError {
    /// The entry's name is invalid.
    #[error("the name of an entry is invalid")]
    Name(#[from] InvalidId),
    /// The entry does not exist.
    #[error("nothing in quarantine is called {0}: `list` tells the names, which are to be given whole")]
    Unknown(Id),
    /// The entry has no pod ID, so no daemon would look for its record in the journal.
    #[error(
        "entry {0} is no pod's by its name: move its record by hand, from where `show` tells to where it belongs"
    )]
    NoPod(Id),
    /// Another record of the pod is in use.
    #[error(
        "there is a journal record of pod {pod} already, {path:?}: remove the pod, or destroy entry {entry}"
    )]
    Recorded {
        /// The entry to release.
        entry: Id,
        /// The pod of the entry.
        pod: SandboxId,
        /// The path of the other record.
        path: PathBuf,
    },
    /// The pod is still in use.
    #[error("pod {pod} of entry {entry} is one of this daemon's: remove the pod first")]
    InUse {
        /// The entry to destroy.
        entry: Id,
        /// The pod of the entry.
        pod: SandboxId,
    },
    /// The pod's processes were killed but did not exit.
    #[error(
        "processes {pids:?} of pod {pod} were killed and are not gone after {GONE_WITHIN:?}: the pod stays in quarantine"
    )]
    Lingering {
        /// The pod's id.
        pod: SandboxId,
        /// The PIDs of the remaining processes.
        pids: Vec<u32>,
    },
    /// A system call failed.
    #[error("cannot {action} {path:?} of quarantined entry {entry}")]
    Path {
        /// The name of the entry.
        entry: String,
        /// The attempted operation, such as "remove run directory".
        action: &'static str,
        /// The path that the operation concerned.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The directory of all entries. All methods block.
#[derive(Debug, Clone)]
pub struct Quarantine {
    dir: PathBuf,
    journal: PathBuf,
    pods: PathBuf,
    pool: PathBuf,
}

impl Quarantine {
    /// Returns the quarantine of a daemon.
    pub fn of(config: &Config) -> Self {
        Self {
            dir: config.state_dir.join(DIR),
            journal: journal::dir(&config.state_dir),
            pods: config.run_dir.join("pods"),
            pool: pool::dir(&config.run_dir),
        }
    }

    /// Moves a record to the quarantine, with a report. The VMM of its pod, if any, keeps running. The previous record
    /// is moved too, unless the pod is adopted by it (`taken_up`).
    pub fn put_aside(&self, error: &JournalError, taken_up: bool) -> io::Result<()> {
        let path = error.path();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let pod: Option<SandboxId> = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok());
        let (name, at_ns) = self.unused_name(pod.as_ref())?;
        let record = self.record(&name);
        let then = if taken_up { TAKEN_UP } else { "its VMM, if any, is left alone" };
        tracing::error!(error = chain(error), kept = ?record, "moved an unreadable record to the quarantine; {then}");
        if !taken_up {
            // First: alone, it would be the pod's record for the next daemon.
            rename_if_there(&journal::before(path), &journal::before(&record))?;
        }
        fs::rename(path, &record)?;
        // The report may be lost, but not the record.
        let reported = (|| {
            let left = self.left(pod.as_ref(), &strays::all()?);
            let mut problem: String = chain(error).chars().take(MAX_PROBLEM).collect();
            if taken_up {
                problem = format!("{problem}; {TAKEN_UP}");
            }
            let report = Report { at_ns, path: path.to_owned(), pod, problem, left };
            let mut file =
                File::options().write(true).create_new(true).mode(0o600).open(self.report_path(&name))?;
            serde_json::to_writer_pretty(&mut file, &report).map_err(io::Error::other)
        })();
        if let Err(error) = reported {
            tracing::error!(%error, kept = ?record, "cannot write the report of a quarantined record");
        }
        File::open(&self.dir)?.sync_all()
    }

    /// Returns the entries, oldest first, up to the maximum of a list.
    pub fn list(&self) -> Result<Listed, QuarantineError> {
        let mut listed = Listed::default();
        let mut names = self.names().map_err(self.host("", "read", &self.dir))?;
        names.sort();
        let strays = strays::all().map_err(self.host("", "read", Path::new("/proc")))?;
        for (index, name) in names.iter().enumerate() {
            // An entry that is released or destroyed meanwhile is not an error.
            let Ok(meta) = fs::symlink_metadata(self.record(name)) else { continue };
            listed.bytes += meta.len();
            if index < MAX_LISTED {
                listed.entries.push(self.entry(name, meta.len(), &strays));
            } else {
                listed.left_off += 1;
            }
        }
        Ok(listed)
    }

    /// Returns an entry, its report, and the beginning of its record.
    pub fn show(&self, name: &str) -> Result<(Entry, String, String), QuarantineError> {
        let (entry, _) = self.find(name)?;
        let (record, report) = (self.record(&entry.name), self.report_path(&entry.name));
        let text = start_of(&record, MAX_SHOWN).map_err(self.host(name, "read record", &record))?;
        let report = start_of(&report, MAX_REPORT).unwrap_or_default();
        Ok((entry, report, text))
    }

    /// Moves a record back to the journal, for the next daemon.
    pub fn release(&self, name: &str) -> Result<Entry, QuarantineError> {
        let (entry, _) = self.find(name)?;
        let Some(pod) = entry.pod.clone() else { return Err(QuarantineError::NoPod(entry.name)) };
        let (from, to) = (self.record(&entry.name), self.journal.join(format!("{pod}.json")));
        match renameat_with(CWD, &from, CWD, &to, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST) => {
                return Err(QuarantineError::Recorded { entry: entry.name, pod, path: to });
            }
            Err(errno) => return Err(self.host(name, "put back record", &to)(errno.into())),
        }
        let (from_before, before) = (journal::before(&from), journal::before(&to));
        rename_if_there(&from_before, &before).map_err(self.host(
            name,
            "put back the record before",
            &before,
        ))?;
        for dir in [&self.journal, &self.dir] {
            let synced = File::open(dir).and_then(|dir| dir.sync_all());
            synced.map_err(self.host(name, "sync", dir))?;
        }
        self.remove(name, "remove report", &self.report_path(&entry.name))?;
        tracing::info!(%pod, entry = name, "released a record from the quarantine; the next daemon adopts its pod");
        Ok(entry)
    }

    /// Ends an entry's pod and removes its processes, then the run directory, then the record. Returns the entry's last
    /// state. Rejected for pods in `known`, which are the daemon's.
    pub fn destroy(&self, name: &str, known: &HashSet<SandboxId>) -> Result<Entry, QuarantineError> {
        let (entry, strays) = self.find(name)?;
        if let Some(pod) = &entry.pod {
            if known.contains(pod) {
                return Err(QuarantineError::InUse { entry: entry.name, pod: pod.clone() });
            }
            self.end(name, pod, &strays)?;
            let run_dir = &entry.left.run_dir;
            unmount_below(run_dir).map_err(self.host(name, "unmount what is below", run_dir))?;
            match fs::remove_dir_all(run_dir) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(self.host(name, "remove run directory", run_dir)(error));
                }
                _ => {}
            }
        }
        // The record last: as long as it exists, the request can be repeated.
        self.remove(name, "remove report", &self.report_path(&entry.name))?;
        let record = self.record(&entry.name);
        self.remove(name, "remove the record before", &journal::before(&record))?;
        self.remove(name, "remove record", &record)?;
        tracing::info!(entry = name, "destroyed an unreadable record and the remains of its pod");
        Ok(entry)
    }

    /// Returns the processes of a quarantined pod, and its entry; `None` if there is no entry or no process.
    pub fn running(&self, pod: &SandboxId) -> Result<Option<(Id, Vec<u32>)>, QuarantineError> {
        let found = self.running_strays(pod)?;
        Ok(found.map(|(name, strays)| (name, strays.iter().map(|stray| stray.pid).collect())))
    }

    /// Kills the processes of an entry's pod, and waits for their exit; the record stays. Returns `false` if there was
    /// no process.
    pub fn kill(&self, pod: &SandboxId) -> Result<bool, QuarantineError> {
        let Some((name, strays)) = self.running_strays(pod)? else { return Ok(false) };
        self.end(name.as_str(), pod, &strays)?;
        Ok(true)
    }

    fn running_strays(&self, pod: &SandboxId) -> Result<Option<(Id, Vec<Stray>)>, QuarantineError> {
        let names = self.names().map_err(self.host("", "read", &self.dir))?;
        let name = names.into_iter().find(|name| parts(name).1.as_ref() == Some(pod));
        // Or the record could not be moved.
        let stuck = || is_unreadable(&self.journal.join(format!("{pod}.json"))).then(|| pod.clone());
        let Some(name) = name.or_else(stuck) else { return Ok(None) };
        let run_dir = self.pods.join(pod);
        let mut strays = strays::all().map_err(self.host("", "read", Path::new("/proc")))?;
        strays.retain(|stray| stray.is_of(&run_dir, &self.pool));
        Ok((!strays.is_empty()).then_some((name, strays)))
    }

    /// Returns the pods whose records are unreadable and still in the journal.
    fn stuck(&self) -> Vec<SandboxId> {
        let entries = fs::read_dir(&self.journal).into_iter().flatten().flatten();
        let unreadable = |entry: fs::DirEntry| {
            let pod = entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok()?;
            is_unreadable(&entry.path()).then_some(pod)
        };
        entries.filter_map(unreadable).collect()
    }

    /// Returns the processes of all entries' pods.
    pub fn pids(&self) -> io::Result<Vec<u32>> {
        Ok(self.processes()?.into_iter().map(|(_, stray)| stray.pid).collect())
    }

    /// Returns the pods of entries that have processes.
    pub fn running_pods(&self) -> io::Result<HashSet<SandboxId>> {
        Ok(self.processes()?.into_iter().map(|(pod, _)| pod).collect())
    }

    fn processes(&self) -> io::Result<Vec<(SandboxId, Stray)>> {
        let mut pods: Vec<_> = self.names()?.iter().filter_map(|name| parts(name).1).collect();
        pods.extend(self.stuck());
        let strays = if pods.is_empty() { Vec::new() } else { strays::all()? };
        let pod_of = |stray: &Stray| pods.iter().find(|pod| stray.is_of(&self.pods.join(pod), &self.pool));
        Ok(strays.into_iter().filter_map(|stray| Some((pod_of(&stray)?.clone(), stray))).collect())
    }

    fn end(&self, name: &str, pod: &SandboxId, strays: &[Stray]) -> Result<(), QuarantineError> {
        let run_dir = self.pods.join(pod);
        let theirs: Vec<_> = strays.iter().filter(|stray| stray.is_of(&run_dir, &self.pool)).collect();
        for stray in &theirs {
            tracing::warn!(%pod, pid = stray.pid, "killing a process of a quarantined pod");
            stray.end().map_err(self.host(name, "end the processes of", &run_dir))?;
        }
        let deadline = Instant::now() + GONE_WITHIN;
        let mut pids = Vec::new();
        for stray in theirs {
            if !stray.wait(deadline).map_err(self.host(name, "wait for the processes of", &run_dir))? {
                pids.push(stray.pid);
            }
        }
        if pids.is_empty() { Ok(()) } else { Err(QuarantineError::Lingering { pod: pod.clone(), pids }) }
    }

    /// Returns the entry with this full name, and all processes that may belong to its pod.
    fn find(&self, name: &str) -> Result<(Entry, Vec<Stray>), QuarantineError> {
        let id: Id = name.parse()?;
        let meta = match fs::symlink_metadata(self.record(&id)) {
            Ok(meta) if meta.is_file() => meta,
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(self.host(name, "look at record", &self.record(&id))(error));
            }
            _ => return Err(QuarantineError::Unknown(id)),
        };
        let strays = strays::all().map_err(self.host(name, "read", Path::new("/proc")))?;
        Ok((self.entry(&id, meta.len(), &strays), strays))
    }

    fn entry(&self, name: &Id, bytes: u64, strays: &[Stray]) -> Entry {
        let (at_ns, pod) = parts(name);
        let report = start_of(&self.report_path(name), MAX_REPORT).ok();
        let report = report.and_then(|text| serde_json::from_str(&text).ok());
        Entry { name: name.clone(), at_ns, left: self.left(pod.as_ref(), strays), pod, bytes, report }
    }

    fn left(&self, pod: Option<&SandboxId>, strays: &[Stray]) -> Left {
        let Some(run_dir) = pod.map(|pod| self.pods.join(pod)) else { return Left::default() };
        let theirs = strays.iter().filter(|stray| stray.is_of(&run_dir, &self.pool));
        let processes = theirs.map(|stray| Seen { pid: stray.pid, command: stray.command() }).collect();
        Left { run_dir_exists: run_dir.exists(), run_dir, processes }
    }

    fn names(&self) -> io::Result<Vec<Id>> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let name = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok();
        Ok(entries.flatten().filter_map(name).collect())
    }

    /// Returns a unique name for a pod's record, and the time in the name.
    fn unused_name(&self, pod: Option<&SandboxId>) -> io::Result<(Id, u64)> {
        let mut at_ns = now_ns();
        loop {
            let named = pod.and_then(|pod| format!("{at_ns}-{pod}").parse::<Id>().ok());
            // Without the pod ID if both together are too long.
            let name = named.map_or_else(|| at_ns.to_string().parse().map_err(io::Error::other), Ok)?;
            if !self.record(&name).try_exists()? {
                return Ok((name, at_ns));
            }
            at_ns += 1;
        }
    }

    fn record(&self, name: &Id) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }

    fn report_path(&self, name: &Id) -> PathBuf {
        self.dir.join(format!("{name}.report"))
    }

    fn remove(&self, name: &str, action: &'static str, path: &Path) -> Result<(), QuarantineError> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.host(name, action, path)(error)),
            _ => Ok(()),
        }
    }

    fn host(
        &self,
        entry: &str,
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(io::Error) -> QuarantineError + use<> {
        let (entry, path) = (entry.to_owned(), path.to_owned());
        move |source| QuarantineError::Path { entry, action, path, source }
    }
}

/// Returns whether there is an unreadable record at `path`.
fn is_unreadable(path: &Path) -> bool {
    path.exists() && journal::read(path).is_err()
}

fn rename_if_there(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the time and the pod in an entry's name.
fn parts(name: &Id) -> (u64, Option<SandboxId>) {
    let (at, pod) = name.as_str().split_once('-').unwrap_or((name.as_str(), ""));
    (at.parse().unwrap_or(0), pod.parse().ok())
}

/// Returns the first bytes of a file, with invalid UTF-8 replaced.
fn start_of(path: &Path, most: u64) -> io::Result<String> {
    let mut start = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut start)?;
    Ok(String::from_utf8_lossy(&start).into_owned())
}

/// Detaches all mounts below a run directory, so that its removal deletes nothing else.
fn unmount_below(run_dir: &Path) -> io::Result<()> {
    let table = Process::myself().and_then(|myself| myself.mountinfo());
    let mounts = table.map_err(io::Error::other)?.0;
    // The last mount is on top.
    for mount in mounts.iter().rev().filter(|mount| mount.mount_point.starts_with(run_dir)) {
        umount2(&mount.mount_point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
