//! The processor time of a process.

use std::time::Duration;

use nix::{time::clock_getcpuclockid, unistd::Pid};

/// Returns the processor time of all threads of process `pid`, or `None` if unknown. Makes two system calls and opens
/// no file.
pub fn cpu_time(pid: u32) -> Option<Duration> {
    // 0 would mean the caller.
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0)?;
    clock_getcpuclockid(Pid::from_raw(pid)).and_then(|clock| clock.now()).ok().map(Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_process_grows_as_it_runs() {
        let own = || cpu_time(std::process::id()).unwrap();
        let before = own();
        while own() < before + Duration::from_millis(2) {}
        assert_eq!(cpu_time(0), None);
        assert_eq!(cpu_time(u32::MAX), None);
    }
}
