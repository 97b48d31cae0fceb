//! The amounts of data that a process has written.

/// Write counters of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Number of bytes sent to storage.
    pub stored: u64,
    /// Number of bytes of all write calls, including those to the process's own threads.
    pub called: u64,
}

impl Written {
    /// Number of bytes below which writes count as idle activity.
    const IDLE: u64 = 1 << 20;

    /// Returns whether data was written since `before`. Writes to file systems in memory only count as calls.
    pub fn data_since(self, before: Self) -> bool {
        self.stored > before.stored || self.called.saturating_sub(before.called) >= Self::IDLE
    }
}

/// Returns the write counters of process `pid`, or `None` if unknown.
pub fn written(pid: u32) -> Option<Written> {
    let io = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?.io().ok()?;
    Some(Written { stored: io.write_bytes, called: io.wchar })
}
