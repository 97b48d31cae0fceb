//! VM exits during a pod's start, from KVM's statistics. To estimate times on other hardware, add the cost of the exits
//! there.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Directory of KVM's statistics: one subdirectory per VM, named after the thread that created the VM.
const STATISTICS: &str = "/sys/kernel/debug/kvm";

/// Exits of each VM at one moment, by the name of the VM's directory.
pub type Counts = BTreeMap<String, u64>;

/// KVM's statistics.
#[derive(Debug, Clone)]
pub struct Exits {
    statistics: PathBuf,
    processes: PathBuf,
}

/// Exits per pod of a series.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitsPerPod {
    /// Number of pods whose exits were read.
    pub n: usize,
    /// Smallest number of exits.
    pub min: u64,
    /// Median number of exits, by nearest rank.
    pub p50: u64,
    /// Largest number of exits.
    pub max: u64,
}

impl ExitsPerPod {
    /// Returns the summary of `counts`; `None` if there are none.
    pub fn from_counts(mut counts: Vec<u64>) -> Option<Self> {
        counts.sort_unstable();
        Some(Self {
            n: counts.len(),
            min: *counts.first()?,
            p50: counts[counts.len().div_ceil(2) - 1],
            max: *counts.last()?,
        })
    }
}

impl Default for Exits {
    fn default() -> Self {
        Self { statistics: STATISTICS.into(), processes: "/proc".into() }
    }
}

impl Exits {
    /// Reads the exits of every VM of this host. Returns as an error why that is impossible.
    pub fn look(&self) -> Result<Counts, String> {
        let names = self.names()?;
        // A VM may end while the directory is read.
        Ok(names.into_iter().filter_map(|name| Some((name.clone(), self.count(&name).ok()?))).collect())
    }

    /// Returns the exits of this process's VM since `before`, or as an error why they are unknown.
    pub fn since(&self, before: &Counts, vmm: i32) -> Result<u64, String> {
        let threads = self.processes.join(vmm.to_string()).join("task");
        let of_vmm =
            |name: &String| name.split_once('-').is_some_and(|(thread, _)| threads.join(thread).exists());
        let name = self
            .names()?
            .into_iter()
            .find(of_vmm)
            .ok_or("the pod's VMM has no VM in KVM: its guest is emulated")?;
        let now = self.count(&name)?;
        // A reused name belongs to a new VM, which started at zero.
        Ok(before.get(&name).and_then(|before| now.checked_sub(*before)).unwrap_or(now))
    }

    fn names(&self) -> Result<Vec<String>, String> {
        let entries = fs::read_dir(&self.statistics).map_err(|error| {
            format!(
                "cannot read KVM's statistics in {}: {error} (as root: mount -t debugfs debugfs /sys/kernel/debug)",
                self.statistics.display()
            )
        })?;
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        Ok(names
            .filter(|name| name.starts_with(|c: char| c.is_ascii_digit()) && name.contains('-'))
            .collect())
    }

    fn count(&self, name: &str) -> Result<u64, String> {
        let path: &Path = &self.statistics.join(name).join("exits");
        let text =
            fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        text.trim().parse().map_err(|_| format!("{} contains no number", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Host(tempfile::TempDir);

    impl Host {
        /// Creates VMs (directory, exits) and threads (process, thread).
        fn new(vms: &[(&str, &str)], threads: &[(i32, i32)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir_all(dir.path().join("kvm")).unwrap();
            for (name, exits) in vms {
                fs::create_dir_all(dir.path().join("kvm").join(name)).unwrap();
                fs::write(dir.path().join("kvm").join(name).join("exits"), exits).unwrap();
            }
            for (process, thread) in threads {
                fs::create_dir_all(dir.path().join(format!("proc/{process}/task/{thread}"))).unwrap();
            }
            Self(dir)
        }

        fn exits(&self) -> Exits {
            Exits { statistics: self.0.path().join("kvm"), processes: self.0.path().join("proc") }
        }
    }

    #[test]
    fn a_pods_exits_are_those_of_its_own_vm_since_the_release() {
        // The VM of 40 was made by its first thread, the VM of 50 by another, as Cloud Hypervisor does.
        let host = Host::new(&[("40-11", "1000\n"), ("52-9", "70\n")], &[(40, 40), (50, 50), (50, 52)]);
        let exits = host.exits();
        let before = exits.look().unwrap();
        fs::write(host.0.path().join("kvm/40-11/exits"), "1234\n").unwrap();
        assert_eq!(exits.since(&before, 40), Ok(234));
        assert_eq!(exits.since(&Counts::new(), 50), Ok(70));
        // A reused name: the count of the earlier VM is not subtracted.
        assert_eq!(exits.since(&Counts::from([("52-9".into(), 5000)]), 50), Ok(70));
    }

    #[test]
    fn what_is_not_known_says_why() {
        let host = Host::new(&[("40-11", "x")], &[(40, 40), (60, 60)]);
        assert!(host.exits().since(&Counts::new(), 60).unwrap_err().contains("emulated"));
        assert!(
            host.exits().since(&Counts::new(), 40).unwrap_err().contains("40-11/exits contains no number")
        );
        let none = Exits { statistics: "/nowhere/kvm".into(), ..host.exits() };
        let why = none.look().unwrap_err();
        assert!(why.contains("/nowhere/kvm") && why.contains("mount -t debugfs"), "{why}");
    }

    #[test]
    fn of_no_counts_there_is_no_figure() {
        assert_eq!(ExitsPerPod::from_counts(Vec::new()), None);
        assert_eq!(
            ExitsPerPod::from_counts(vec![5, 1, 3, 9]),
            Some(ExitsPerPod { n: 4, min: 1, p50: 3, max: 9 })
        );
    }
}
