//! Statistics of guests, with a time limit, and without waking a guest that has not run.
//!
//! containerd requests them every second for each container. A response costs an idle guest more processor time than
//! anything else that it does. So the last values are returned while the VMM has used less than [`Quiet`] of processor
//! time since they were read; the time for responses does not count.
//!
//! containerd reads the statistics of all containers of a node one after the other, so a hung guest would block the
//! statistics of all pods. Therefore no caller waits longer than [`LIMIT`], and for a guest that is known to be late no
//! caller waits at all: the last values are returned.

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

/// Processor time of a VMM up to which its guest counts as idle: statistics do not change. An idle guest uses some for
/// its timers, and after each response.
#[derive(Debug, Clone, Copy)]
pub struct Quiet(Duration);

impl Quiet {
    /// Returns the threshold for guests on an accelerator, "kvm" or "tcg". An emulated guest needs a multiple of the
    /// time for everything.
    pub fn on(accelerator: &str) -> Self {
        Self(Duration::from_millis(if accelerator == "tcg" { 25 } else { 5 }))
    }
}

/// Processor time of a VMM so far; `None`: unknown.
pub type CpuTime = Option<Duration>;

/// The last statistics of one guest.
#[derive(Debug)]
pub struct Readings {
    pod: SandboxId,
    quiet: Quiet,
    /// Counter of old values returned, of all pods.
    old: Arc<AtomicU64>,
    // A plain lock: held for a lookup, never across an await.
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The last values of each container and of the guest. Boxed: a map of two has space for four.
    last: HashMap<Option<ContainerId>, Box<Reading>>,
    /// The part of the VMM's processor time that was spent on responses.
    answering: Duration,
    /// Number of pending calls to the guest.
    under_way: usize,
    /// Whether the guest did not respond to a pending call in time.
    late: bool,
    /// Number of removals of values: a response to a call from before the last removal is not kept.
    forgotten: u64,
}

#[derive(Debug)]
struct Reading {
    at: Instant,
    /// The VMM's processor time, without the time for responses.
    ran: CpuTime,
    values: StatsResponse,
}

impl Known {
    /// Returns the last values if the guest has not run since.
    fn current(
        &self,
        container: &Option<ContainerId>,
        cpu_time: CpuTime,
        Quiet(quiet): Quiet,
    ) -> Option<StatsResponse> {
        let reading = self.last.get(container)?;
        let ran = self.ran(cpu_time)?.saturating_sub(reading.ran?);
        (ran < quiet).then(|| reading.values.clone())
    }

    /// Returns a VMM's processor time without the time for responses.
    fn ran(&self, cpu_time: CpuTime) -> CpuTime {
        cpu_time.map(|all| all.saturating_sub(self.answering))
    }
}

impl Readings {
    /// Creates an empty cache. `old` counts old values returned.
    pub fn new(pod: SandboxId, quiet: Quiet, old: Arc<AtomicU64>) -> Self {
        Self { pod, quiet, old, known: Mutex::default() }
    }

    /// Calls `ask` for the statistics of a container or of the guest; returns the last ones if it takes too long, or if
    /// the guest has not run since. `cpu_time` returns the VMM's processor time.
    pub async fn read(
        self: Arc<Self>,
        container: Option<ContainerId>,
        cpu_time: impl Fn() -> CpuTime + Send + 'static,
        ask: impl Future<Output = Result<StatsResponse, PodError>> + Send + 'static,
    ) -> Result<StatsResponse, PodError> {
        let before = cpu_time();
        let (alone, forgotten) = {
            let mut known = self.known();
            if let Some(current) = known.current(&container, before, self.quiet) {
                return Ok(current);
            }
            if known.late {
                return self.last(&mut known, &container);
            }
            known.under_way += 1;
            (known.under_way == 1, known.forgotten)
        };
        // Continues without a waiter: its end shows that the guest responds again.
        let asking = tokio::spawn({
            let (this, container) = (self.clone(), container.clone());
            async move {
                let answer = ask.await;
                let now = cpu_time();
                // Of several concurrent responses, only the time of the first is counted.
                let spent = now.zip(before).filter(|_| alone).map(|(now, before)| now.saturating_sub(before));
                this.record(container, answer, now, spent.unwrap_or_default(), forgotten)
            }
        });
        match timeout(LIMIT, asking).await {
            Ok(Ok(Err(error))) if matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded) => {
                self.last(&mut self.known(), &container).map_err(|_| error)
            }
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) | Err(_) => {
                let mut known = self.known();
                if known.under_way > 0 && !known.late {
                    known.late = true;
                    tracing::warn!(pod = %self.pod, limit = ?LIMIT, "guest does not report its statistics; returning the last ones");
                }
                self.last(&mut known, &container)
            }
        }
    }

    /// Removes the values of a container, or of the guest, so that the next caller gets current ones.
    pub fn forget(&self, container: Option<&ContainerId>) {
        let mut known = self.known();
        known.last.remove(&container.cloned());
        known.forgotten += 1;
    }

    fn record(
        &self,
        container: Option<ContainerId>,
        answer: Result<StatsResponse, PodError>,
        cpu_time: CpuTime,
        spent: Duration,
        forgotten: u64,
    ) -> Result<StatsResponse, PodError> {
        let mut known = self.known();
        known.answering += spent;
        known.under_way -= 1;
        // After a failure, the next call tries again.
        if known.under_way == 0 || answer.is_ok() {
            known.late = false;
        }
        if let Ok(values) = &answer
            && known.forgotten == forgotten
        {
            let ran = known.ran(cpu_time);
            let reading = Reading { at: Instant::now(), ran, values: values.clone() };
            known.last.insert(container, Box::new(reading));
        }
        answer
    }

    fn last(&self, known: &mut Known, container: &Option<ContainerId>) -> Result<StatsResponse, PodError> {
        let no_readings = || PodError::NoReadings { pod: self.pod.clone(), limit: LIMIT };
        let Reading { at, values, .. } = &**known.last.get(container).ok_or_else(no_readings)?;
        self.old.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(pod = %self.pod, ?container, age = ?at.elapsed(), "old statistics are answered");
        Ok(values.clone())
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    fn id(container: &str) -> Option<ContainerId> {
        Some(container.parse().unwrap())
    }

    fn readings() -> Arc<Readings> {
        Arc::new(Readings::new("slow".parse().unwrap(), Quiet::on("kvm"), Arc::default()))
    }

    fn using(pids: u64) -> Result<StatsResponse, PodError> {
        Ok(StatsResponse { pids, ..Default::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_does_not_answer_is_waited_for_once_and_its_last_readings_are_told() {
        let readings = readings();
        for container in ["a", "b"] {
            assert_eq!(readings.clone().read(id(container), unknown, ready(using(7))).await.unwrap().pids, 7);
        }
        let begin = Instant::now();
        for container in ["a", "b", "a", "b"] {
            assert_eq!(readings.clone().read(id(container), unknown, pending()).await.unwrap().pids, 7);
        }
        assert!(begin.elapsed() <= Duration::from_secs(1), "{:?}", begin.elapsed());
        let error = readings.clone().read(id("new"), unknown, pending()).await.unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
        assert!(begin.elapsed() <= Duration::from_secs(1), "{:?}", begin.elapsed());
        assert_eq!(readings.old.load(Ordering::Relaxed), 4);
        readings.forget(id("a").as_ref());
        assert!(readings.clone().read(id("a"), unknown, pending()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_answers_again_tells_what_is_new() {
        let readings = readings();
        readings.clone().read(None, unknown, ready(using(1))).await.unwrap();
        let late = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            using(2)
        };
        assert_eq!(readings.clone().read(None, unknown, late).await.unwrap().pids, 1);
        assert_eq!(readings.clone().read(None, unknown, ready(using(3))).await.unwrap().pids, 1);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(readings.clone().read(None, unknown, ready(using(4))).await.unwrap().pids, 4);
    }

    /// Returns no time, like a kernel that does not report a process's time.
    fn unknown() -> CpuTime {
        None
    }

    #[tokio::test]
    async fn a_guest_that_has_not_run_is_not_asked_again() {
        let readings = readings();
        let clock = Arc::new(AtomicU64::new(100));
        let cpu_time = || {
            let clock = clock.clone();
            move || Some(Duration::from_millis(clock.load(Ordering::Relaxed)))
        };
        // Each response costs the guest 7 ms.
        let says = |pids| {
            let clock = clock.clone();
            async move {
                clock.fetch_add(7, Ordering::Relaxed);
                using(pids)
            }
        };
        let read = async |container: &str, pids| {
            readings.clone().read(id(container), cpu_time(), says(pids)).await.unwrap().pids
        };
        assert_eq!((read("a", 1).await, read("b", 2).await), (1, 2));
        for _ in 0..3 {
            clock.fetch_add(1, Ordering::Relaxed);
            assert_eq!(
                (read("a", 3).await, read("b", 4).await),
                (1, 2),
                "it was asked, or its answers counted"
            );
        }
        clock.fetch_add(2, Ordering::Relaxed);
        assert_eq!((read("a", 5).await, read("b", 6).await), (5, 6), "it ran for 5 ms");
        readings.forget(id("a").as_ref());
        assert_eq!((read("a", 7).await, read("b", 8).await), (7, 6), "one was forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_says_no_is_believed() {
        let readings = readings();
        readings.clone().read(id("a"), unknown, ready(using(1))).await.unwrap();
        let removed = ready(Err(PodError::NoContainer("a".parse().unwrap())));
        assert_eq!(
            readings.clone().read(id("a"), unknown, removed).await.unwrap_err().code(),
            Code::NotFound
        );
    }
}
