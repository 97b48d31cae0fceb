//! Batches syncs of records: all records that were written during one sync are synced by the next.
//!
//! A pod and its container are recorded four times during a start. The system calls of a record take 0.17 ms without
//! waiting for the disk and 0.46 ms with two syncs (medians of 200, on a virtual disk that acknowledges
//! early).

use std::{
    collections::BTreeSet,
    fs::File,
    io, mem,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// Records that may not be on the disk yet.
#[derive(Debug)]
pub struct Syncer {
    dir: PathBuf,
    // A plain lock: held briefly, never across a sync.
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    records: BTreeSet<PathBuf>,
    /// Whether a thread is syncing them until none are left.
    at_work: bool,
}

impl Syncer {
    /// Creates a syncer for records in `dir`.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, waiting: Mutex::default() }
    }

    /// Queues the record at `path` for a sync by the thread that syncs all records.
    pub fn soon(self: &Arc<Self>, path: &Path) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.records.insert(path.to_owned());
        if !mem::replace(&mut waiting.at_work, true) {
            let this = self.clone();
            tokio::task::spawn_blocking(move || while this.sync_some() {});
        }
    }

    /// Syncs the queued records; returns `false` if there were none.
    fn sync_some(&self) -> bool {
        let records = {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.at_work = !waiting.records.is_empty();
            mem::take(&mut waiting.records)
        };
        for path in &records {
            match File::open(path).and_then(|record| record.sync_data()) {
                // The pod has been removed since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => tracing::error!(?path, %error, "cannot sync a journal record"),
                Ok(()) => {}
            }
        }
        if !records.is_empty()
            && let Err(error) = File::open(&self.dir).and_then(|dir| dir.sync_all())
        {
            tracing::error!(path = ?self.dir, %error, "cannot sync the journal's directory");
        }
        !records.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_meanwhile_goes_at_once_and_what_is_gone_is_no_reason_to_stop() {
        let dir = tempfile::tempdir().unwrap();
        let syncer = Arc::new(Syncer::new(dir.path().to_owned()));
        let waiting = || syncer.waiting.lock().unwrap();
        // As if the disk were slow: no other thread takes the records.
        waiting().at_work = true;
        for name in ["a", "gone", "a"] {
            syncer.soon(&dir.path().join(name));
        }
        std::fs::write(dir.path().join("a"), "x").unwrap();
        assert_eq!(waiting().records.len(), 2);
        assert!(syncer.sync_some());
        assert!(waiting().records.is_empty() && waiting().at_work);
        assert!(!syncer.sync_some());
        assert!(!waiting().at_work, "nobody would take the next one");
    }
}
