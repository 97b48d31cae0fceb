//! Reads the CPU time and frequency of the host. Unknown values are `None`.

use std::fs;
use std::path::Path;

use procfs::{CpuTime, CurrentSI, KernelStats};
use sandboxer_probe::workload::host::{CpuUse, HostUse};

/// Directory of the processors in sysfs.
const PROCESSORS: &str = "/sys/devices/system/cpu";

/// A reading of the host.
#[derive(Debug, Clone)]
pub struct Look {
    cpu: Option<CpuTime>,
    mhz: Option<f64>,
    dirty: Option<u64>,
    throttled: Option<u64>,
}

impl Look {
    /// Reads the host.
    pub fn now() -> Self {
        let mhz = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| mean_mhz(&text));
        Self {
            cpu: KernelStats::current().ok().map(|stats| stats.total),
            mhz,
            dirty: fs::read_to_string("/proc/meminfo").ok().and_then(|text| dirty(&text)),
            throttled: throttled(Path::new(PROCESSORS)),
        }
    }

    /// Returns the host's use since this reading.
    pub fn since(&self) -> HostUse {
        let now = Self::now();
        HostUse {
            cpu: self.cpu.as_ref().zip(now.cpu.as_ref()).map(|(before, after)| cpu_use(before, after)),
            mhz_before: self.mhz,
            mhz_after: now.mhz,
            dirty_before_kib: self.dirty,
            dirty_kib: now.dirty,
            throttled: now.throttled.zip(self.throttled).map(|(now, before)| now.saturating_sub(before)),
            governor: fs::read_to_string(Path::new(PROCESSORS).join("cpu0/cpufreq/scaling_governor"))
                .ok()
                .map(|text| text.trim().to_owned()),
        }
    }
}

/// Returns the difference of two readings.
pub fn cpu_use(before: &CpuTime, after: &CpuTime) -> CpuUse {
    let hertz = procfs::ticks_per_second() as f64;
    let seconds = |time: fn(&CpuTime) -> u64| time(after).saturating_sub(time(before)) as f64 / hertz;
    let maybe =
        |time: fn(&CpuTime) -> Option<u64>| Some(time(after)?.saturating_sub(time(before)?) as f64 / hertz);
    let guest = maybe(|time| Some(time.guest? + time.guest_nice.unwrap_or_default()));
    CpuUse {
        // The kernel includes guest time in user time.
        user_s: (seconds(|time| time.user + time.nice) - guest.unwrap_or_default()).max(0.0),
        system_s: seconds(|time| time.system),
        softirq_s: seconds(|time| time.irq.unwrap_or_default() + time.softirq.unwrap_or_default()),
        guest_s: guest,
        steal_s: maybe(|time| time.steal),
        idle_s: seconds(|time| time.idle + time.iowait.unwrap_or_default()),
    }
}

/// Returns the sum of the processors' throttle counts; `None` if the kernel has none.
fn throttled(processors: &Path) -> Option<u64> {
    let counts = fs::read_dir(processors).ok()?.flatten().filter_map(|processor| {
        let path = processor.path().join("thermal_throttle/core_throttle_count");
        fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()
    });
    counts.reduce(|a, b| a + b)
}

fn mean_mhz(cpuinfo: &str) -> Option<f64> {
    let clocks: Vec<f64> = cpuinfo
        .lines()
        .filter(|line| line.starts_with("cpu MHz"))
        .filter_map(|line| line.split_once(':')?.1.trim().parse().ok())
        .collect();
    (!clocks.is_empty()).then(|| clocks.iter().sum::<f64>() / clocks.len() as f64)
}

fn dirty(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("Dirty:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_seen() {
        let before = Look::now();
        let begun = std::time::Instant::now();
        while begun.elapsed() < std::time::Duration::from_millis(120) {
            std::hint::black_box(begun);
        }
        let cpu = before.since().cpu.unwrap();
        assert!(cpu.user_s + cpu.system_s + cpu.softirq_s >= 0.05, "{cpu:?}");
    }

    #[test]
    fn guests_are_not_counted_twice() {
        let mut before = KernelStats::current().unwrap().total;
        before.guest = Some(0);
        before.guest_nice = Some(0);
        let mut after = before.clone();
        after.user += 300;
        after.guest = Some(200);
        let cpu = cpu_use(&before, &after);
        let hertz = procfs::ticks_per_second() as f64;
        assert_eq!((cpu.user_s * hertz, cpu.guest_s.map(|s| s * hertz)), (100.0, Some(200.0)));
    }

    #[test]
    fn throttling_is_summed_or_unknown() {
        let double = tempfile::tempdir().unwrap();
        assert_eq!(throttled(double.path()), None);
        for (cpu, count) in [("cpu0", "3\n"), ("cpu1", "4\n")] {
            let dir = double.path().join(cpu).join("thermal_throttle");
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("core_throttle_count"), count).unwrap();
        }
        assert_eq!(throttled(double.path()), Some(7));
    }

    #[test]
    fn clocks_are_averaged_and_may_be_unknown() {
        assert_eq!(mean_mhz("cpu MHz\t\t: 2000.0\nx\ncpu MHz\t\t: 3000.0\n"), Some(2500.0));
        assert_eq!(mean_mhz("model name: x\n"), None);
        assert_eq!(dirty("MemFree: 1 kB\nDirty:     12 kB\n"), Some(12));
    }
}
