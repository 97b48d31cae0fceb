//! The host's memory: capacity for pods, huge pages, page sharing.

use super::{
    host::{Host, field},
    verdict::{Check, Fix, Subject},
};

/// Memory of a VMM in addition to its guest's, MiB. Ten emulated pods of 256 MiB took 128 MB each, of which their
/// guests used less than half. With KVM there is no translated code, so it is less.
const BESIDE_GUEST_MIB: u64 = 100;

const MEMORY: Subject = Subject { name: "memory", why: "a pod may use all memory of its VM" };
const HUGE_PAGES: Subject =
    Subject { name: "huge pages", why: "pods cannot use memory reserved for huge pages" };
const KSM: Subject =
    Subject { name: "ksm", why: "merged pages let a pod find out the content of another pod's memory" };

/// The kernel's state.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Text of `/proc/meminfo`.
    pub meminfo: String,
    /// Setting of transparent huge pages, such as "always [madvise] never"; `None` if unknown.
    pub transparent: Option<String>,
    /// Setting of page merging (KSM): 0 off, 1 on, 2 off and undone; `None` if unknown.
    pub ksm_run: Option<u64>,
}

/// Reads the state.
pub fn read(host: &Host) -> Reading {
    Reading {
        meminfo: host.text("/proc/meminfo").unwrap_or_default(),
        transparent: host.text("/sys/kernel/mm/transparent_hugepage/enabled").ok(),
        ksm_run: host.number("/sys/kernel/mm/ksm/run"),
    }
}

/// Smallest usable guest, MiB.
const SMALL_GUEST_MIB: u64 = 256;

/// Checks that the memory suffices for `pods` more pods that each use all of their `memory_mib`.
pub fn free(reading: &Reading, pods: u32, memory_mib: u64) -> Check {
    let Some(available) = field(&reading.meminfo, "MemAvailable").map(|kib| kib / 1024) else {
        return MEMORY.warning("free memory is unknown", Fix::words("see /proc/meminfo"));
    };
    let each = memory_mib.saturating_add(BESIDE_GUEST_MIB);
    let fit = available / each;
    let seen =
        format!("{available} MiB available, enough for {fit} pods of {memory_mib} + {BESIDE_GUEST_MIB} MiB");
    let fix = || Fix::words("add memory to the host, reduce vm.default_memory_mib, or run fewer pods");
    match fit {
        // Memory that a guest does not touch is not allocated.
        _ if available < SMALL_GUEST_MIB.min(memory_mib) + BESIDE_GUEST_MIB => MEMORY.failure(seen, fix()),
        fit if fit < u64::from(pods) => MEMORY.warning(format!("{seen}, not for {pods}"), fix()),
        _ => MEMORY.ok(seen),
    }
}

/// Checks huge pages. VMs do not use reserved ones.
pub fn huge_pages(reading: &Reading) -> Check {
    let get = |key| field(&reading.meminfo, key).unwrap_or_default();
    let (total, free, kib) = (get("HugePages_Total"), get("HugePages_Free"), get("Hugepagesize"));
    let setting = reading.transparent.as_deref().and_then(|text| text.split_once('[')?.1.split_once(']'));
    let transparent = setting.map_or("unknown", |(chosen, _)| chosen);
    let seen = format!("transparent: {transparent}; reserved: {total} of {kib} KiB, {free} of them free");
    if free == 0 {
        return HUGE_PAGES.ok(seen);
    }
    HUGE_PAGES.warning(
        format!("{seen}; pods do not use reserved ones"),
        Fix::commands("free them if no other program needs them", ["sysctl vm.nr_hugepages=0"]),
    )
}

/// Checks KSM, which must be off between pods that do not trust each other.
pub fn ksm(reading: &Reading) -> Check {
    match reading.ksm_run {
        None => KSM.not_applicable("not in this kernel"),
        Some(1) => KSM.warning("on", Fix::commands("turn KSM off", ["echo 2 > /sys/kernel/mm/ksm/run"])),
        Some(_) => KSM.ok("off"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    #[test]
    fn memory_must_do_for_the_pods_asked_about() {
        for (available_mib, pods, verdict, fit) in [
            (3560, 10, Verdict::Ok, "for 10 pods"),
            (3559, 10, Verdict::Warning, "for 9 pods"),
            (3559, 9, Verdict::Ok, "for 9 pods"),
            (300, 1, Verdict::Failure, "for 0 pods"),
            (356, 1, Verdict::Ok, "for 1 pods"),
        ] {
            let meminfo = format!("MemFree: 1 kB\nMemAvailable:  {} kB\n", available_mib * 1024);
            let check = free(&Reading { meminfo, ..Reading::default() }, pods, 256);
            assert_eq!(check.verdict, verdict, "{check}");
            assert!(check.seen.contains(fit), "{check}");
        }
        let meminfo = format!("MemAvailable:  {} kB\n", 1000 * 1024);
        let check = free(&Reading { meminfo, ..Reading::default() }, 1, 2048);
        assert_eq!(check.verdict, Verdict::Warning, "it may use less: {check}");
        assert_eq!(free(&Reading::default(), 1, 256).verdict, Verdict::Warning);
    }

    #[test]
    fn reserved_pages_that_nobody_uses_are_lost_to_pods() {
        let page = "Hugepagesize: 2048 kB\n";
        for (total, free, verdict) in [(0, 0, Verdict::Ok), (8, 0, Verdict::Ok), (8, 3, Verdict::Warning)] {
            let reading = Reading {
                meminfo: format!("HugePages_Total: {total}\nHugePages_Free: {free}\n{page}"),
                transparent: Some("always [madvise] never".into()),
                ..Reading::default()
            };
            let check = huge_pages(&reading);
            assert_eq!(check.verdict, verdict, "{check}");
            let seen = format!("transparent: madvise; reserved: {total} of 2048 KiB, {free} of them free");
            assert!(check.seen.starts_with(&seen), "{check}");
        }
        assert!(huge_pages(&Reading::default()).seen.starts_with("transparent: unknown"));
    }

    #[test]
    fn merged_pages_are_warned_of() {
        for (ksm_run, verdict) in [
            (None, Verdict::NotApplicable),
            (Some(0), Verdict::Ok),
            (Some(1), Verdict::Warning),
            (Some(2), Verdict::Ok),
        ] {
            assert_eq!(ksm(&Reading { ksm_run, ..Reading::default() }).verdict, verdict);
        }
    }
}
