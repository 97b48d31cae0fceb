//! Resource limits of containers, checked against the size of their VM.

use std::{fs, io, ops::RangeInclusive};

use libcontainer::oci_spec::runtime::LinuxResources;
use sandboxer_protocol::agent::PodLimits;

use crate::{
    cgroup::Cgroup,
    failure::{Failure, internal},
    stats,
};

/// The period of a CPU quota without one, µs: the kernel's default.
const PERIOD_US: u64 = 100_000;
/// The periods that the kernel takes, µs.
const PERIODS_US: RangeInclusive<u64> = 1_000..=1_000_000;
/// The least quota that the kernel takes, µs.
const LEAST_QUOTA_US: u64 = 1_000;

/// The limits of a container, or of all containers; `None` means not specified.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    cpu: Option<Cpu>,
    memory: Option<Bytes>,
    processes: Option<Processes>,
}

/// CPU time per period; without a quota, unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cpu {
    quota_us: Option<u64>,
    period_us: u64,
}

/// A number of bytes; `None` means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bytes(Option<u64>);

/// A number of processes and threads; `None` means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Processes(Option<u64>);

/// The size of a guest.
#[derive(Debug, Clone, Copy)]
pub struct GuestSize {
    cpus: u64,
    memory: u64,
}

impl GuestSize {
    /// Returns the size of this guest.
    pub fn this() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
        Self { cpus, memory: stats::of_guest().memory_limit }
    }
}

/// Converts a number of CRI and OCI: 0 means not specified, a negative number means unlimited.
fn specified(number: i64) -> Option<Option<u64>> {
    (number != 0).then(|| u64::try_from(number).ok())
}

impl Limits {
    /// Returns the limits of a pod. Rejects those that the kernel does not take.
    pub fn of_pod(limits: &PodLimits) -> Result<Self, Failure> {
        let quota = specified(limits.cpu_quota_us);
        Ok(Self {
            cpu: quota.map(|quota_us| Cpu::new(quota_us, limits.cpu_period_us)).transpose()?,
            memory: specified(limits.memory_bytes).map(Bytes),
            processes: specified(limits.processes).map(Processes),
        })
    }

    /// Returns the limits in OCI's resources. Rejects those that the kernel does not take.
    pub fn of_container(resources: &LinuxResources) -> Result<Self, Failure> {
        let cpu = resources.cpu().as_ref();
        let quota = cpu.and_then(|cpu| cpu.quota()).and_then(specified);
        let cpu_limit = Cpu::new(quota.flatten(), cpu.and_then(|cpu| cpu.period()).unwrap_or_default())?;
        let memory = resources.memory().and_then(|memory| memory.limit()).and_then(specified);
        // The runtime limits the container's processes.
        Ok(Self { cpu: quota.map(|_| cpu_limit), memory: memory.map(Bytes), processes: None })
    }

    /// Rejects limits of `group` that exceed the VM's current size and were raised. A limit that already exceeds it may
    /// stay or be lowered; a group without a limit gets none beyond the size.
    pub fn check(&self, group: &Cgroup, guest: GuestSize) -> Result<(), Failure> {
        self.check_with(guest, |limit, has| limit.is_none_or(|limit| has > limit), group)
    }

    /// Rejects limits of a new container that exceed both the VM's size and those of its pod, which are in group `all`:
    /// the pod was created with lower ones. A pod that was created with such a limit, or with none, got the VM that the
    /// node can give it.
    pub fn check_new(&self, all: &Cgroup, guest: GuestSize) -> Result<(), Failure> {
        self.check_with(guest, |limit, has| limit.is_some_and(|limit| has > limit), all)
    }

    /// Rejects a limit beyond the VM's size if `is_raised` holds for the group's limit (`None`: no limit) and the new
    /// one.
    fn check_with(
        &self,
        guest: GuestSize,
        is_raised: impl Fn(Option<f64>, f64) -> bool,
        group: &Cgroup,
    ) -> Result<(), Failure> {
        if let Some(Bytes(Some(bytes))) = self.memory
            && bytes > guest.memory
            && group.read("memory.max").is_ok_and(|now| is_raised(now.trim().parse().ok(), bytes as f64))
        {
            let (requested, available) = (bytes >> 20, guest.memory >> 20);
            return Err(too_much(&format!("{requested} MiB of memory"), &format!("{available} MiB")));
        }
        if let Some(requested @ Cpu { quota_us: Some(_), .. }) = self.cpu
            && requested.cpus() > guest.cpus as f64
            && group.read("cpu.max").is_ok_and(|now| {
                let now = Cpu::parse(&now).map(Cpu::cpus).filter(|cpus| cpus.is_finite());
                is_raised(now, requested.cpus())
            })
        {
            return Err(too_much(&format!("{} CPUs", requested.cpus()), &guest.cpus.to_string()));
        }
        Ok(())
    }

    /// Sets the limits of all containers together. Rejects a memory limit below their usage: the kernel would kill
    /// them.
    pub fn apply_to_all(&self) -> Result<(), Failure> {
        let group = Cgroup::of_all();
        if let Some(Bytes(Some(bytes))) = self.memory {
            let used = unreclaimable(&group).map_err(internal("cannot read what the containers use"))?;
            if bytes < used {
                let (requested, used) = (bytes >> 20, used >> 20);
                let message = format!(
                    "a limit of {requested} MiB is less than the {used} MiB that the pod's containers use"
                );
                return Err(Failure::precondition(message));
            }
        }
        for (file, value) in self.files() {
            let failed = internal(format!("cannot set {file} of all containers to {value:?}"));
            fs::write(group.file(file), value).map_err(failed)?;
        }
        Ok(())
    }

    /// Returns the names of a control group's files, and their new contents.
    fn files(&self) -> Vec<(&'static str, String)> {
        let text = |limit: Option<u64>| limit.map_or("max".to_owned(), |limit| limit.to_string());
        let cpu = self.cpu.map(|cpu| ("cpu.max", format!("{} {}", text(cpu.quota_us), cpu.period_us)));
        let memory = self.memory.map(|Bytes(bytes)| ("memory.max", text(bytes)));
        let processes = self.processes.map(|Processes(most)| ("pids.max", text(most)));
        cpu.into_iter().chain(memory).chain(processes).collect()
    }
}

impl Cpu {
    /// Returns a quota per period, 0 for the kernel's default period. Rejects what the kernel does not take.
    fn new(quota_us: Option<u64>, period_us: u64) -> Result<Self, Failure> {
        let period_us = if period_us == 0 { PERIOD_US } else { period_us };
        if !PERIODS_US.contains(&period_us) {
            let (least, most) = (PERIODS_US.start(), PERIODS_US.end());
            return Err(Failure::invalid(format!(
                "a CPU period of {period_us} µs: the kernel takes {least} to {most} µs"
            )));
        }
        if let Some(quota_us) = quota_us
            && quota_us < LEAST_QUOTA_US
        {
            return Err(Failure::invalid(format!(
                "a CPU quota of {quota_us} µs: the kernel takes {LEAST_QUOTA_US} µs or more"
            )));
        }
        Ok(Self { quota_us, period_us })
    }

    /// Parses the format of `cpu.max`.
    fn parse(text: &str) -> Option<Self> {
        let (quota, period) = text.trim().split_once(' ')?;
        Some(Self { quota_us: quota.parse().ok(), period_us: period.parse().ok()? })
    }

    /// Returns the number of CPUs.
    fn cpus(self) -> f64 {
        // The conversion is exact enough: no quota has 2^52 µs.
        self.quota_us.map_or(f64::INFINITY, |quota| quota as f64 / self.period_us.max(1) as f64)
    }
}

/// Returns the memory that the kernel cannot reclaim from a group, bytes.
fn unreclaimable(group: &Cgroup) -> io::Result<u64> {
    let current = group.read("memory.current")?.trim().parse().map_err(io::Error::other)?;
    let file = |key| group.keyed("memory.stat", key).unwrap_or(0);
    Ok(u64::saturating_sub(current, file("active_file") + file("inactive_file")))
}

fn too_much(requested: &str, available: &str) -> Failure {
    Failure::precondition(format!(
        "a limit of {requested} is more than the {available} of the pod's VM, which cannot have more now: \
         restart the pod with limits of that size"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Kind;

    const GUEST: GuestSize = GuestSize { cpus: 2, memory: 512 << 20 };

    fn of_pod(cpu_quota_us: i64, cpu_period_us: u64, memory_bytes: i64) -> Limits {
        Limits::of_pod(&PodLimits { cpu_quota_us, cpu_period_us, memory_bytes, ..Default::default() })
            .unwrap()
    }

    /// Returns a control group with these limits.
    fn group(dir: &tempfile::TempDir, cpu: &str, memory: &str) -> Cgroup {
        fs::write(dir.path().join("cpu.max"), cpu).unwrap();
        fs::write(dir.path().join("memory.max"), memory).unwrap();
        Cgroup::at(dir.path().to_owned())
    }

    #[test]
    fn nothing_is_said_by_zero_and_no_limit_by_less() {
        assert_eq!(of_pod(0, 50_000, 0).files(), []);
        let files = of_pod(-1, 0, -1).files();
        assert_eq!(files, [("cpu.max", "max 100000".to_owned()), ("memory.max", "max".to_owned())]);
        let few = Limits::of_pod(&PodLimits { processes: 100, ..Default::default() }).unwrap();
        assert_eq!(few.files(), [("pids.max", "100".to_owned())]);
        let files = of_pod(150_000, 50_000, 64 << 20).files();
        assert_eq!(files, [("cpu.max", "150000 50000".to_owned()), ("memory.max", "67108864".to_owned())]);
        let oci =
            serde_json::json!({"cpu": {"quota": 150_000, "period": 50_000}, "memory": {"limit": 64 << 20}});
        let oci: LinuxResources = serde_json::from_value(oci).unwrap();
        assert_eq!(Limits::of_container(&oci), Ok(of_pod(150_000, 50_000, 64 << 20)));
    }

    #[test]
    fn what_the_kernel_does_not_take_is_the_callers_fault() {
        let parse = |cpu: serde_json::Value| {
            let resources: LinuxResources =
                serde_json::from_value(serde_json::json!({ "cpu": cpu })).unwrap();
            Limits::of_container(&resources)
        };
        let refused = [
            (serde_json::json!({"quota": 1}), "a CPU quota of 1 µs"),
            (serde_json::json!({"quota": 999, "period": 1000}), "a CPU quota of 999 µs"),
            (serde_json::json!({"period": 999}), "a CPU period of 999 µs"),
            (serde_json::json!({"quota": -1, "period": 1_000_001}), "a CPU period of 1000001 µs"),
        ];
        for (cpu, words) in refused {
            let failure = parse(cpu).unwrap_err();
            assert!(failure.kind == Kind::InvalidArgument && failure.message.starts_with(words), "{failure}");
        }
        parse(serde_json::json!({"quota": 1000, "period": 1_000_000})).unwrap();
        parse(serde_json::json!({"quota": -1, "period": 0})).unwrap();
        let pod = PodLimits { cpu_quota_us: 1, ..Default::default() };
        assert_eq!(Limits::of_pod(&pod).unwrap_err().kind, Kind::InvalidArgument);
    }

    #[test]
    fn what_the_guest_does_not_have_is_refused_with_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let group = group(&dir, "100000 100000\n", "268435456\n");
        of_pod(200_000, 100_000, 512 << 20).check(&group, GUEST).unwrap();
        of_pod(-1, 0, -1).check(&group, GUEST).unwrap();
        let memory = of_pod(0, 0, 513 << 20).check(&group, GUEST).unwrap_err().message;
        assert!(
            memory.contains("513 MiB of memory") && memory.contains("512 MiB of the pod's VM"),
            "{memory}"
        );
        let cpus = of_pod(150_000, 50_000, 0).check(&group, GUEST).unwrap_err().message;
        assert!(cpus.contains("3 CPUs") && cpus.contains("the 2 of"), "{cpus}");
    }

    #[test]
    fn what_was_beyond_the_guest_before_may_stay_or_come_down() {
        let dir = tempfile::tempdir().unwrap();
        let wide = group(&dir, "400000 100000\n", "4294967296\n");
        of_pod(400_000, 100_000, 4 << 30).check(&wide, GUEST).unwrap();
        of_pod(300_000, 100_000, 1 << 30).check(&wide, GUEST).unwrap();
        assert!(of_pod(500_000, 100_000, 0).check(&wide, GUEST).is_err());
    }

    #[test]
    fn a_group_without_a_limit_gets_none_beyond_the_guest() {
        let dir = tempfile::tempdir().unwrap();
        let unlimited = group(&dir, "max 100000\n", "max\n");
        assert!(of_pod(0, 0, 4 << 30).check(&unlimited, GUEST).is_err());
        assert!(of_pod(500_000, 100_000, 0).check(&unlimited, GUEST).is_err());
        of_pod(200_000, 100_000, 512 << 20).check(&unlimited, GUEST).unwrap();
    }

    #[test]
    fn a_new_container_has_no_more_than_the_guest_or_what_its_pod_was_made_with() {
        let dir = tempfile::tempdir().unwrap();
        let pod = group(&dir, "100000 100000\n", "268435456\n");
        assert!(of_pod(0, 0, 513 << 20).check_new(&pod, GUEST).is_err());
        assert!(of_pod(300_000, 100_000, 0).check_new(&pod, GUEST).is_err());
        // The limit exceeds the pod's alone: the pod's own limit holds.
        of_pod(200_000, 100_000, 512 << 20).check_new(&pod, GUEST).unwrap();
        let wide = group(&dir, "400000 100000\n", "4294967296\n");
        of_pod(400_000, 100_000, 4 << 30).check_new(&wide, GUEST).unwrap();
        let unlimited = group(&dir, "max 100000\n", "max\n");
        of_pod(500_000, 100_000, 4 << 30).check_new(&unlimited, GUEST).unwrap();
    }
}
