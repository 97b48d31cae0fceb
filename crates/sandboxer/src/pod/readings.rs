//! Statistics of guests, with a time limit.
//!
//! containerd reads the statistics of all containers of a node one after the other: a hung guest would block the
//! statistics of all pods. So no caller waits longer than [`LIMIT`], and for a guest that is known to be late no caller waits at all:
//! the last values are returned.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sandboxer_base::Code;
use sandboxer_protocol::{
    agent::StatsResponse,
    id::{ContainerId, SandboxId},
};
use tokio::time::{Instant, timeout};

use crate::error::PodError;

/// Time limit for a guest. containerd gives a kubelet's request for a whole node a few seconds.
const LIMIT: Duration = Duration::from_millis(800);

/// The last statistics of one guest.
#[derive(Debug)]
pub struct Readings {
    pod: SandboxId,
    /// Counts old answers, of all pods.
    old: Arc<AtomicU64>,
    // A plain lock: held for a lookup, never across an await.
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The last values of each container and of the guest, with their time.
    last: HashMap<Option<ContainerId>, (Instant, StatsResponse)>,
    /// Pending calls to the guest.
    under_way: usize,
    /// The guest did not answer one of them in time.
    late: bool,
}

impl Readings {
    /// Creates an empty cache. `old` counts old answers.
    pub fn new(pod: SandboxId, old: Arc<AtomicU64>) -> Self {
        Self { pod, old, known: Mutex::default() }
    }

    /// Calls `ask` for the statistics of a container or of the guest; returns the last ones if it takes too long.
    pub async fn read(
        self: Arc<Self>,
        of: Option<ContainerId>,
        ask: impl Future<Output = Result<StatsResponse, PodError>> + Send + 'static,
    ) -> Result<StatsResponse, PodError> {
        {
            let mut known = self.known();
            if known.late {
                return self.last(&mut known, &of);
            }
            known.under_way += 1;
        }
        // Continues without a waiter: its end shows that the guest answers again.
        let asking = tokio::spawn({
            let (this, of) = (self.clone(), of.clone());
            async move { this.told(of, ask.await) }
        });
        match timeout(LIMIT, asking).await {
            Ok(Ok(Err(error))) if matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded) => {
                self.last(&mut self.known(), &of).map_err(|_| error)
            }
            Ok(Ok(told)) => told,
            Ok(Err(_)) | Err(_) => {
                let mut known = self.known();
                if known.under_way > 0 && !known.late {
                    known.late = true;
                    tracing::warn!(pod = %self.pod, limit = ?LIMIT, "guest does not report its statistics; returning the last ones");
                }
                self.last(&mut known, &of)
            }
        }
    }

    /// Removes a container.
    pub fn forget(&self, of: &ContainerId) {
        self.known().last.remove(&Some(of.clone()));
    }

    fn told(
        &self,
        of: Option<ContainerId>,
        told: Result<StatsResponse, PodError>,
    ) -> Result<StatsResponse, PodError> {
        let mut known = self.known();
        known.under_way -= 1;
        // After a failure, the next call tries again.
        if known.under_way == 0 || told.is_ok() {
            known.late = false;
        }
        if let Ok(readings) = &told {
            known.last.insert(of, (Instant::now(), readings.clone()));
        }
        told
    }

    fn last(&self, known: &mut Known, of: &Option<ContainerId>) -> Result<StatsResponse, PodError> {
        let no_readings = || PodError::NoReadings { pod: self.pod.clone(), limit: LIMIT };
        let (at, readings) = known.last.get(of).ok_or_else(no_readings)?;
        self.old.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(pod = %self.pod, container = ?of, age = ?at.elapsed(), "old statistics are answered");
        Ok(readings.clone())
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    fn of(container: &str) -> Option<ContainerId> {
        Some(container.parse().unwrap())
    }

    fn readings() -> Arc<Readings> {
        Arc::new(Readings::new("slow".parse().unwrap(), Arc::default()))
    }

    fn using(pids: u64) -> Result<StatsResponse, PodError> {
        Ok(StatsResponse { pids, ..Default::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_does_not_answer_is_waited_for_once_and_its_last_readings_are_told() {
        let readings = readings();
        for container in ["a", "b"] {
            assert_eq!(readings.clone().read(of(container), ready(using(7))).await.unwrap().pids, 7);
        }
        let begin = Instant::now();
        for container in ["a", "b", "a", "b"] {
            assert_eq!(readings.clone().read(of(container), pending()).await.unwrap().pids, 7);
        }
        assert!(begin.elapsed() <= Duration::from_secs(1), "{:?}", begin.elapsed());
        let error = readings.clone().read(of("new"), pending()).await.unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
        assert!(begin.elapsed() <= Duration::from_secs(1), "{:?}", begin.elapsed());
        assert_eq!(readings.old.load(Ordering::Relaxed), 4);
        readings.forget(&"a".parse().unwrap());
        assert!(readings.clone().read(of("a"), pending()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_answers_again_tells_what_is_new() {
        let readings = readings();
        readings.clone().read(None, ready(using(1))).await.unwrap();
        let late = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            using(2)
        };
        assert_eq!(readings.clone().read(None, late).await.unwrap().pids, 1);
        assert_eq!(readings.clone().read(None, ready(using(3))).await.unwrap().pids, 1);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(readings.clone().read(None, ready(using(4))).await.unwrap().pids, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_says_no_is_believed() {
        let readings = readings();
        readings.clone().read(of("a"), ready(using(1))).await.unwrap();
        let gone = ready(Err(PodError::NoContainer("a".parse().unwrap())));
        assert_eq!(readings.clone().read(of("a"), gone).await.unwrap_err().code(), Code::NotFound);
    }
}
