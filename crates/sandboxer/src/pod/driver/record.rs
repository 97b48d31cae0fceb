//! State that outlives this worker: the pod's record in the journal, and notes at the front.

use std::{future::Future, time::Duration};

use futures::FutureExt;
use sandboxer_base::chain;
use sandboxer_front::control::NEEDS;
use sandboxer_protocol::{
    SPOKEN,
    id::{ContainerId, ExecId},
};
use serde::Serialize;

use super::{CLOSED, Driver, answer, done::Done};
use crate::{
    error::PodError,
    front,
    pod::{
        container::EXEC,
        journal::{JournalError, PodRecord, RECORD_VERSION},
        request::Reply,
    },
};

/// Delay before a record that could not be written is retried; it doubles each time.
const FIRST_REWRITE: Duration = Duration::from_secs(1);
/// Maximum delay before such a retry.
const MAX_REWRITE: Duration = Duration::from_secs(30);

impl Driver {
    /// Stores a note about a process at the front.
    pub(super) fn note(
        &self,
        kind: &str,
        id: &ContainerId,
        exec: Option<&ExecId>,
        note: &impl Serialize,
    ) -> Result<(), PodError> {
        let key = front::key(kind, id, exec);
        self.node.front.keep(&key, note, &[]).map(drop).map_err(|source| PodError::Front {
            pod: self.spec.id.clone(),
            what: format!("note {key}").into(),
            source,
        })
    }

    /// Tells the front which protocols the pod's agent may speak: a build without them must not take over.
    pub(super) fn need_its_agent(&self) {
        if let Err(error) = self.note(NEEDS, &self.spec.id, None, &(SPOKEN.start(), SPOKEN.end())) {
            let error = chain(&error);
            tracing::warn!(pod = %self.spec.id, error, "a reload by a signal is not checked for this pod");
        }
    }

    /// Removes the notes about a process from the front and, for a container's init, the notes about its execs.
    pub(super) fn forget_process(&self, id: &ContainerId, exec: Option<&ExecId>, execs: &[ExecId]) {
        for exec in std::iter::once(exec).chain(execs.iter().map(Some)) {
            for kind in [EXEC, CLOSED] {
                self.node.front.forget(&front::key(kind, id, exec));
            }
        }
    }

    /// Writes the current state of the pod to the journal.
    pub(super) fn next_record(&mut self) -> impl Future<Output = Result<(), JournalError>> + Send + 'static {
        self.records += 1;
        let record = PodRecord {
            version: RECORD_VERSION,
            readable_from: None,
            spec: self.spec.clone(),
            status: self.status.borrow().recorded(),
            link_key: self.link_key.clone(),
            vm: self.state.vm_record(),
            containers: self.containers.iter().map(|(id, container)| container.record(id)).collect(),
            volumes: self.volumes.record(),
            restored: self.restored.clone(),
            placement: self.state.place().and_then(|place| place.placement.record()),
            shares: None,
        };
        let (journal, number) = (self.journal.clone(), self.records);
        async move { journal.write(number, record).await }
    }

    /// Writes the current state of the pod to the journal; retries if that fails.
    pub(super) fn save(&mut self) {
        let written = self.next_record();
        self.work.spawn(written.map(Done::Written));
    }

    /// Sends the result after the change is in the journal. If the write fails, the result is still true, and the write
    /// is retried.
    pub(super) fn save_then<T: Send + 'static>(&mut self, reply: Reply<T>, result: Result<T, PodError>) {
        let written = self.next_record();
        self.work.spawn(written.map(move |written| {
            answer(reply, result);
            Done::Written(written)
        }));
    }

    pub(super) fn written(&mut self, written: Result<(), JournalError>) {
        let Err(error) = written else {
            if self.unwritten.take().is_some() {
                tracing::info!(pod = %self.spec.id, "the pod's record is written again");
            }
            return;
        };
        if self.unwritten.is_some() {
            return;
        }
        tracing::error!(pod = %self.spec.id, error = chain(&error), "cannot write the pod's record: it is out of date until that works");
        self.rewrite_after(FIRST_REWRITE);
    }

    /// Writes the record after a pause, unless another has been written by then.
    fn rewrite_after(&mut self, pause: Duration) {
        self.unwritten = Some(pause);
        self.work.spawn(tokio::time::sleep(pause).map(move |()| Done::Rewrite(pause)));
    }

    pub(super) fn rewrite(&mut self, pause: Duration) {
        if self.unwritten == Some(pause) {
            self.rewrite_after((2 * pause).min(MAX_REWRITE));
            self.save();
        }
    }
}
