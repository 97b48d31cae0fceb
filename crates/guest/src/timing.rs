//! The offset of a guest's clock: the guest read it between two points in time of the host.

use std::time::Duration;

use sandboxer_protocol::agent::{SyncClockRequest, SyncClockResponse};

/// A reading of a guest's clocks, and the time of the request.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// CLOCK_REALTIME of the host at the request, ns.
    pub requested_ns: u64,
    /// Time from the request to the response.
    pub took: Duration,
    /// CLOCK_BOOTTIME of the guest, ns.
    pub boottime_ns: u64,
    /// CLOCK_REALTIME of the guest, ns.
    pub realtime_ns: u64,
}

impl Reading {
    /// Creates a reading from a response.
    pub fn from_response(requested_ns: u64, took: Duration, response: &SyncClockResponse) -> Self {
        Self { requested_ns, took, boottime_ns: response.boottime_ns, realtime_ns: response.realtime_ns }
    }

    /// Returns the time of the host's clock at which the guest read its own: the middle of the request, with an error
    /// of half its duration.
    fn host_ns(&self) -> u64 {
        self.requested_ns.saturating_add(self.error_ns())
    }

    fn error_ns(&self) -> u64 {
        u64::try_from(self.took.as_nanos() / 2).unwrap_or(u64::MAX)
    }

    /// Returns the correction for the guest; `None` if its clock may be right within the error.
    pub fn correction(&self) -> Option<SyncClockRequest> {
        let off = self.host_ns().abs_diff(self.realtime_ns);
        (off > self.error_ns()).then(|| SyncClockRequest {
            at_boottime_ns: self.boottime_ns,
            realtime_ns: self.host_ns(),
            ..Default::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(took_ms: u64, guest_ms: u64) -> Reading {
        let took = Duration::from_millis(took_ms);
        Reading { requested_ns: 1_000_000_000, took, boottime_ns: 7, realtime_ns: guest_ms * 1_000_000 }
    }

    #[test]
    fn a_guest_is_told_the_middle_of_the_time_that_its_answer_took() {
        let correction = reading(10, 900).correction().unwrap();
        assert_eq!((correction.at_boottime_ns, correction.realtime_ns), (7, 1_005_000_000));
        let correction = reading(10, 2000).correction().unwrap();
        assert_eq!(correction.realtime_ns, 1_005_000_000);
    }

    #[test]
    fn a_clock_that_may_be_right_is_left_alone() {
        for guest_ms in [1000, 1003, 1010] {
            assert!(reading(10, guest_ms).correction().is_none(), "{guest_ms}");
        }
        for guest_ms in [999, 1011] {
            assert!(reading(10, guest_ms).correction().is_some(), "{guest_ms}");
        }
    }
}
