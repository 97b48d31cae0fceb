//! How pods got their machines, and why not in a faster way.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_config::Way;
use tokio::time::Instant;

use crate::{error::PodError, vmm::VmmError};

/// How long a reason is not told again that comes and goes.
const TOLD: Duration = Duration::from_secs(600);

/// Counts since the daemon's start.
#[derive(Debug, Default)]
pub struct Ways {
    // A plain lock: held for a count or a copy, never across an await.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    counts: Counts,
    /// Why each way was last not taken.
    last: BTreeMap<Way, &'static str>,
    /// When a reason was last told.
    told: BTreeMap<(Way, &'static str), Instant>,
}

/// What was counted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Pods by the way in which they got their machine.
    pub taken: BTreeMap<Way, u64>,
    /// Ways that could not be taken, by the reason.
    pub missed: BTreeMap<(Way, &'static str), u64>,
}

impl Ways {
    /// A pod got its machine so.
    pub fn taken(&self, way: Way) {
        *self.lock().counts.taken.entry(way).or_default() += 1;
    }

    /// A pod could not get its machine so, for `error` if something failed. Counted always; told when it is another
    /// reason than that of the pod before, and not for a while then.
    pub fn missed(&self, way: Way, reason: &'static str, error: Option<&PodError>) {
        let mut state = self.lock();
        *state.counts.missed.entry((way, reason)).or_default() += 1;
        let is_new = state.last.insert(way, reason) != Some(reason);
        if !is_new || state.told.get(&(way, reason)).is_some_and(|told| told.elapsed() < TOLD) {
            return;
        }
        state.told.insert((way, reason), Instant::now());
        drop(state);
        match error.map(|error| chain(error)) {
            None => {
                tracing::info!(%way, reason, "a pod could not start in this way; told once, counted always")
            }
            Some(error) => {
                tracing::warn!(%way, reason, error, "a pod could not start in this way; told once, counted always");
            }
        }
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        self.lock().counts.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a way failed, in one of few words.
pub fn reason(way: Way, error: &PodError) -> &'static str {
    match (error, way) {
        (PodError::NotReady { .. } | PodError::Vmm(VmmError::Hung { .. }), _) => "silent",
        (PodError::MachineEnded { .. }, _) => "ended",
        (PodError::Vmm(_), Way::Pool) => "claim-failed",
        (PodError::Vmm(_), Way::Template) => "restore-failed",
        _ => "failed",
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use super::*;

    /// What is logged while `work` is done.
    fn logged(work: impl FnOnce()) -> String {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(Lines::maker(&lines)).finish();
        tracing::subscriber::with_default(subscriber, work);
        String::from_utf8(lines.lock().unwrap().clone()).unwrap()
    }

    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Lines {
        fn maker(lines: &Arc<Mutex<Vec<u8>>>) -> impl Fn() -> Self + use<> {
            let lines = lines.clone();
            move || Self(lines.clone())
        }
    }

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reason_is_counted_always_and_told_once_and_again_when_it_has_changed() {
        let ways = Ways::default();
        let error = PodError::Cancelled("pod".parse().unwrap());
        let often = |reason, error| {
            let text = logged(|| (0..3).for_each(|_| ways.missed(Way::Template, reason, error)));
            text.lines().filter(|line| line.contains(&format!("reason=\"{reason}\""))).count()
        };
        assert_eq!((often("stale", None), often("stale", None)), (1, 0));
        assert_eq!((often("failed", Some(&error)), often("failed", Some(&error))), (1, 0));
        assert_eq!((often("stale", None), often("failed", Some(&error))), (0, 0), "they come and go");
        tokio::time::advance(TOLD).await;
        assert_eq!((often("failed", Some(&error)), often("stale", None)), (0, 1));
        assert_eq!(ways.counts().missed.values().sum::<u64>(), 24);
        assert!(
            logged(|| ways.missed(Way::Pool, "failed", Some(&error)))
                .contains("start of pod pod was cancelled")
        );
    }
}
