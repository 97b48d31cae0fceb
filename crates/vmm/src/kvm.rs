//! Tests whether KVM is usable, by running guest code on it.
//!
//! A `/dev/kvm` that opens and creates VMs may still be unusable. Inside a VM without nested virtualization it may
//! interpret each privileged guest instruction, and fail on some that every Linux guest executes. So a small guest
//! runs from real mode to long mode, through instructions of an ordinary kernel, and its speed is compared with
//! [`MIN_EXITS_PER_SECOND`].

use std::{
    ffi::{CStr, CString},
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use kvm_ioctls::Kvm;

#[cfg_attr(target_arch = "x86_64", path = "kvm/x86_64.rs")]
#[cfg_attr(not(target_arch = "x86_64"), path = "kvm/unmeasured.rs")]
mod guest;

/// Guest instructions per second below which KVM is used only if the configuration names it. An interpreting KVM was
/// measured at 0.2 to 1 million of these. On hardware, eight of them should take a few hundred cycles, which makes
/// tens of millions per second (an estimate: no such host was available).
pub const MIN_EXITS_PER_SECOND: f64 = 5e6;

/// The reason why KVM is not usable.
#[derive(Debug, thiserror::Error)]
pub enum KvmUnusable {
    /// The device cannot be opened: no permission, no module or no device.
    #[error("cannot open {path:?}")]
    Open {
        /// Path of the device.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Only root can open the device.
    #[error(
        "{path:?} has mode {mode:03o} and group {group}: no group but root's may open it, and VMMs run as users of \
         their own"
    )]
    Closed {
        /// Path of the device.
        path: PathBuf,
        /// Permissions of the device, as in its mode.
        mode: u32,
        /// Number of the device's group.
        group: u32,
    },
    /// The device opens, but KVM creates no VM.
    #[error("KVM cannot {action}")]
    Setup {
        /// The action that failed.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// KVM cannot run a guest.
    #[error(
        "KVM ran {:.1} million guest instructions per second and then gave up on one that every \
         Linux guest needs ({exit})", rate / 1e6
    )]
    Fault {
        /// Instructions per second until then.
        rate: f64,
        /// How the guest exited.
        exit: String,
    },
    /// No guest exists to measure KVM with on this processor.
    #[cfg(not(target_arch = "x86_64"))]
    #[error("KVM is not measured on {}: it is used only if it is configured by name", std::env::consts::ARCH)]
    Unmeasured,
    /// KVM works but is slow: usable if the configuration names it. The cause is unknown: KVM may interpret, or be
    /// emulated itself.
    #[error(
        "KVM runs {:.1} million guest instructions per second, under {:.0} million: too slow for \"auto\"",
        rate / 1e6, MIN_EXITS_PER_SECOND / 1e6
    )]
    Slow {
        /// Measured instructions per second.
        rate: f64,
    },
}

/// Runs a guest. Returns the instructions per second if KVM is usable. Blocks for 5 to 150 ms.
pub fn measure(device: &Path) -> Result<f64, KvmUnusable> {
    let kvm = open(device)?;
    let rate = guest::measure(&kvm)?;
    opens_in_a_jail(device).map(|()| rate)
}

/// Checks that a jailed VMM, which is a member of the device's group, can open the device.
fn opens_in_a_jail(device: &Path) -> Result<(), KvmUnusable> {
    let meta = fs::metadata(device).map_err(|source| KvmUnusable::Open { path: device.into(), source })?;
    let mode = meta.mode() & 0o777;
    let others = mode & 0o006 == 0o006;
    let group = meta.gid() != 0 && mode & 0o060 == 0o060;
    match others || group {
        true => Ok(()),
        false => Err(KvmUnusable::Closed { path: device.into(), mode, group: meta.gid() }),
    }
}

fn open(device: &Path) -> Result<Kvm, KvmUnusable> {
    let failed = |source| KvmUnusable::Open { path: device.into(), source };
    let path = CString::new(device.as_os_str().as_bytes()).map_err(|error| failed(error.into()))?;
    Kvm::new_with_path::<&CStr>(&path).map_err(|error| failed(error.into()))
}

/// Attempts at a call that signals interrupt.
const ATTEMPTS: usize = 100;

/// Repeats a call that a signal interrupted, as QEMU does: the kernel leaves the creation of a VM when one is pending.
fn uninterrupted<T>(mut call: impl FnMut() -> Result<T, kvm_ioctls::Error>) -> Result<T, kvm_ioctls::Error> {
    for _ in 1..ATTEMPTS {
        match call() {
            Err(error) if error.errno() == libc::EINTR => {}
            done => return done,
        }
    }
    call()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_interrupted_call_is_repeated_but_not_for_ever() {
        let interrupted = || Err::<u32, _>(kvm_ioctls::Error::new(libc::EINTR));
        let mut calls = 0;
        let done = uninterrupted(|| {
            calls += 1;
            if calls < 3 { interrupted() } else { Ok(calls) }
        });
        assert_eq!(done.unwrap(), 3);
        assert_eq!(uninterrupted(interrupted).unwrap_err().errno(), libc::EINTR);
    }

    #[test]
    fn a_device_that_is_no_kvm_is_named() {
        let error = measure(Path::new("/nonexistent/kvm")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/kvm"), "{error}");
        assert!(matches!(measure(Path::new("/dev/null")), Err(KvmUnusable::Setup { .. })));
    }

    #[test]
    fn a_device_that_is_roots_alone_is_closed_to_jails() {
        let device = tempfile::NamedTempFile::new().unwrap();
        for (group, mode, opens) in [
            (0, 0o600, false),
            (0, 0o660, false),
            (4321, 0o600, false),
            (4321, 0o640, false),
            (4321, 0o660, true),
            (0, 0o666, true),
        ] {
            std::os::unix::fs::chown(device.path(), None, Some(group)).unwrap();
            fs::set_permissions(device.path(), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(opens_in_a_jail(device.path()).is_ok(), opens, "{mode:o} of group {group}");
        }
        let error = KvmUnusable::Closed { path: "/dev/kvm".into(), mode: 0o600, group: 0 };
        assert!(error.to_string().starts_with("\"/dev/kvm\" has mode 600 and group 0"), "{error}");
    }

    /// The verdict must rest on a measurement, usable or not.
    #[test]
    fn a_kvm_that_opens_is_judged_by_what_its_guest_did() {
        match measure(Path::new("/dev/kvm")) {
            Ok(rate) => assert!(rate >= MIN_EXITS_PER_SECOND, "{rate}"),
            Err(KvmUnusable::Slow { rate }) => assert!(rate > 0.0 && rate < MIN_EXITS_PER_SECOND, "{rate}"),
            Err(KvmUnusable::Fault { rate, exit }) => {
                assert!(rate > 0.0, "the loop of plain instructions ended in {exit}");
            }
            Err(KvmUnusable::Closed { mode, .. }) => assert_eq!(mode & 0o006, 0),
            Err(KvmUnusable::Open { .. }) => assert!(Kvm::new().is_err(), "/dev/kvm opens after all"),
            Err(error @ KvmUnusable::Setup { .. }) => panic!("{error}"),
        }
    }
}
