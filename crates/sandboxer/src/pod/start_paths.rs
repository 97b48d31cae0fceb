//! Counts the start paths of pods and the reasons for fallbacks.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_config::StartPath;
use sandboxer_vmm::VmmError;
use tokio::time::Instant;

use crate::error::PodError;

/// Minimum time between two log lines about a recurring reason.
const QUIET: Duration = Duration::from_secs(600);

const FALLBACK: &str = "falling back to a slower start path; repeats are only counted";

/// Counters of start paths since the daemon's start.
#[derive(Debug, Default)]
pub struct StartPaths {
    // A plain lock: held for a count or a copy, never across an await.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    counts: Counts,
    /// The last reason for a fallback from each path.
    last: BTreeMap<StartPath, &'static str>,
    /// Time of the last log line about a reason.
    logged_at: BTreeMap<(StartPath, &'static str), Instant>,
}

/// The number of pods and fallbacks by start path.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Number of pods by start path.
    pub taken: BTreeMap<StartPath, u64>,
    /// Number of fallbacks by path and reason.
    pub missed: BTreeMap<(StartPath, &'static str), u64>,
}

impl StartPaths {
    /// Counts a pod that started on this path.
    pub fn taken(&self, start_path: StartPath) {
        *self.lock().counts.taken.entry(start_path).or_default() += 1;
    }

    /// Counts a fallback from this path; `error` is set if something failed. Logs it if the reason differs from the
    /// last one, at most once per interval.
    pub fn missed(&self, start_path: StartPath, reason: &'static str, error: Option<&PodError>) {
        let mut state = self.lock();
        *state.counts.missed.entry((start_path, reason)).or_default() += 1;
        let is_new = state.last.insert(start_path, reason) != Some(reason);
        if !is_new || state.logged_at.get(&(start_path, reason)).is_some_and(|at| at.elapsed() < QUIET) {
            return;
        }
        state.logged_at.insert((start_path, reason), Instant::now());
        drop(state);
        match error.map(|error| chain(error)) {
            None => tracing::info!(%start_path, reason, "{FALLBACK}"),
            Some(error) => tracing::warn!(%start_path, reason, error, "{FALLBACK}"),
        }
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        self.lock().counts.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the reason for a fallback as a metrics label.
pub fn reason(start_path: StartPath, error: &PodError) -> &'static str {
    match (error, start_path) {
        (PodError::NotReady { .. } | PodError::Vmm(VmmError::Hung { .. }), _) => "silent",
        (PodError::VmEnded { .. }, _) => "ended",
        (PodError::Vmm(_), StartPath::Pool) => "claim-failed",
        (PodError::Vmm(_), StartPath::Template) => "restore-failed",
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

    /// Returns the log lines of `work`.
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
    async fn a_reason_is_always_counted_and_logged_when_it_has_changed() {
        let start_paths = StartPaths::default();
        let error = PodError::Cancelled("pod".parse().unwrap());
        let often = |reason, error| {
            let text = logged(|| (0..3).for_each(|_| start_paths.missed(StartPath::Template, reason, error)));
            text.lines().filter(|line| line.contains(&format!("reason=\"{reason}\""))).count()
        };
        assert_eq!((often("stale", None), often("stale", None)), (1, 0));
        assert_eq!((often("failed", Some(&error)), often("failed", Some(&error))), (1, 0));
        assert_eq!((often("stale", None), often("failed", Some(&error))), (0, 0), "they come and go");
        tokio::time::advance(QUIET).await;
        assert_eq!((often("failed", Some(&error)), often("stale", None)), (0, 1));
        assert_eq!(start_paths.counts().missed.values().sum::<u64>(), 24);
        assert!(
            logged(|| start_paths.missed(StartPath::Pool, "failed", Some(&error)))
                .contains("start of pod pod was cancelled")
        );
    }
}
