//! How often a guest is asked anew that has hardly anything to say.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Answers shorter than this, bytes, are small: to fetch one costs more than to copy it.
const SMALL: usize = 4 << 10;
/// So many small answers are taken as fast as they come: a command's output, a person at a terminal.
const BURST: u32 = 256;
/// Beyond these, one in so long. What a program prints meanwhile comes with it.
const EACH: Duration = Duration::from_millis(1);

/// Keeps a stream that is read piece by piece from keeping the daemon busy with the smallest of pieces.
///
/// A bucket of [`BURST`] drops that fills by one in each [`EACH`]: kept as the moment at which it will be full.
#[derive(Debug)]
pub struct Pace {
    full_at: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Self { full_at: Instant::now() }
    }
}

impl Pace {
    /// Waits, if it has to, after an answer of `bytes`.
    pub async fn keep(&mut self, bytes: usize) {
        if bytes >= SMALL {
            return;
        }
        self.full_at = self.full_at.max(Instant::now()) + EACH;
        sleep_until(self.full_at - EACH * BURST).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_free_and_a_flood_is_not() {
        let (begin, mut pace) = (Instant::now(), Pace::default());
        for _ in 0..BURST {
            pace.keep(1).await;
        }
        assert_eq!(begin.elapsed(), Duration::ZERO);
        for _ in 0..100 {
            pace.keep(1).await;
        }
        assert!(begin.elapsed() >= EACH * 100, "{:?}", begin.elapsed());
        let (begin, mut pace) = (Instant::now(), Pace::default());
        for _ in 0..10_000 {
            pace.keep(64 << 10).await;
        }
        assert_eq!(begin.elapsed(), Duration::ZERO);
    }
}
