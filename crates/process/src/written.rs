//! How much a process has written.

/// Write counters of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Bytes sent to storage.
    pub stored: u64,
    /// Bytes of all write calls, also those to its own threads.
    pub called: u64,
}

impl Written {
    /// Bytes below which writes count as idle activity.
    const IDLE: u64 = 1 << 20;

    /// Returns whether data was written since `before`. Writes to file systems in memory only count as calls.
    pub fn data_since(self, before: Self) -> bool {
        self.stored > before.stored || self.called.saturating_sub(before.called) >= Self::IDLE
    }
}

/// Returns the write counters of process `pid`; `None` if unknown.
pub fn written(pid: u32) -> Option<Written> {
    let io = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?.io().ok()?;
    Some(Written { stored: io.write_bytes, called: io.wchar })
}
