//! The privileges of root that the daemon keeps. It drops the rest at its start, for itself and for all programs that
//! it executes: an attacker who takes over the daemon later cannot get them back.
//!
//! The same table is in docs/security.md for people and in `vmm-configs/systemd/sandboxer.service` for systemd.

use caps::{CapSet, Capability, CapsHashSet, errors::CapsError};

use Capability::{
    CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_NET_ADMIN,
    CAP_SETFCAP, CAP_SETGID, CAP_SETPCAP, CAP_SETUID, CAP_SYS_ADMIN, CAP_SYS_CHROOT, CAP_SYS_NICE,
    CAP_SYS_PTRACE,
};

/// Capabilities that are kept, and the reasons.
pub const KEPT: [(Capability, &str); 15] = [
    (CAP_SYS_ADMIN, "namespaces and roots of jails, mounts of snapshots, control groups"),
    (CAP_NET_ADMIN, "taps, and what leads from a pod's interfaces to them"),
    (
        CAP_SYS_CHROOT,
        "enters a mount namespace, to hand a share to the process that serves it, or a disk to a VMM",
    ),
    (CAP_SETUID, "gives each VMM a user of its own"),
    (CAP_SETGID, "and a group"),
    (CAP_SETPCAP, "takes the capabilities below from jails for good"),
    (CAP_CHOWN, "gives files of a VM to its VMM's user"),
    (CAP_FOWNER, "sets modes and times of files that are a VMM user's, and access control lists of disks"),
    (CAP_DAC_OVERRIDE, "makes disks of files and directories of any owner"),
    (CAP_DAC_READ_SEARCH, "reads such files, and directories"),
    (CAP_KILL, "ends VMMs, which are other users' processes"),
    (
        CAP_SYS_PTRACE,
        "recognises a VMM that an earlier daemon left, by its environment and its files; reads on which nodes a VMM's memory is, and moves it",
    ),
    (CAP_SYS_NICE, "makes a VM that waited as urgent as others"),
    (
        CAP_FSETID,
        "for what serves a share: a file keeps its set-user-id bit when its owner's guest writes it",
    ),
    (CAP_SETFCAP, "likewise: a file's own capabilities"),
];

/// The error if privileges cannot be dropped.
#[derive(Debug, thiserror::Error)]
#[error("cannot drop capability {capability}: start the daemon as root, with CAP_SETPCAP")]
pub struct PrivilegeError {
    capability: String,
    source: CapsError,
}

/// Drops all capabilities that are not [`KEPT`]. Must run before the process has other threads: each has its own sets.
pub fn drop_unneeded() -> Result<(), PrivilegeError> {
    let needed: CapsHashSet = KEPT.iter().map(|(capability, _)| *capability).collect();
    let failed = |capability: String| move |source| PrivilegeError { capability, source };
    let all = || failed("sets".to_owned());
    for capability in caps::read(None, CapSet::Bounding).map_err(all())?.difference(&needed) {
        caps::drop(None, CapSet::Bounding, *capability).map_err(failed(capability.to_string()))?;
    }
    // So programs of other users inherit none.
    caps::clear(None, CapSet::Inheritable).map_err(all())?;
    for set in [CapSet::Effective, CapSet::Permitted] {
        let current = caps::read(None, set).map_err(all())?;
        caps::set(None, set, &current.intersection(&needed).copied().collect()).map_err(all())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs in its own thread: capability sets belong to threads.
    #[test]
    fn what_is_not_kept_is_gone_and_stays_gone() {
        let sets = std::thread::spawn(|| {
            let before = caps::read(None, CapSet::Permitted).unwrap();
            drop_unneeded().unwrap();
            drop_unneeded().unwrap();
            let sets = [CapSet::Bounding, CapSet::Permitted, CapSet::Effective, CapSet::Inheritable];
            (before, sets.map(|set| caps::read(None, set).unwrap()))
        });
        let (before, [bounding, permitted, effective, inheritable]) = sets.join().unwrap();
        let needed: CapsHashSet = KEPT.iter().map(|(capability, _)| *capability).collect();
        assert!(bounding.is_subset(&needed), "{bounding:?}");
        assert_eq!(permitted, before.intersection(&needed).copied().collect());
        assert_eq!(effective, permitted);
        assert!(inheritable.is_empty());
    }

    #[test]
    fn people_and_systemd_are_told_the_same() {
        let documented = include_str!("../../../docs/security.md");
        let unit = include_str!("../../../vmm-configs/systemd/sandboxer.service");
        let bounds = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
        let mut named: Vec<_> = bounds.split(' ').collect();
        for (capability, why) in KEPT {
            let name = capability.to_string();
            assert!(documented.contains(&format!("| `{name}` | {why} |")), "{name}");
            assert!(named.contains(&name.as_str()), "{name} is not in the unit");
            named.retain(|other| *other != name);
        }
        assert!(named.is_empty(), "{named:?} are kept by systemd alone");
    }
}
