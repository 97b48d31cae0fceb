//! Rate limit of small reads from a guest.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// The length below which a response is small, bytes: requesting such a response costs more than copying it.
const SMALL: usize = 4 << 10;
/// The number of small responses that are not delayed: a command's output, a user at a terminal.
const BURST: u32 = 256;
/// The interval of further small responses. Output of a program in the interval is read together.
const EACH: Duration = Duration::from_millis(1);

/// A limit of the rate of small reads of a stream, which would keep the daemon busy.
///
/// A token bucket of size [`BURST`] that gets a token in each [`EACH`]. It is stored as the time at which it will be
/// full.
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
    /// Waits, if necessary, after a response of `bytes`.
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
