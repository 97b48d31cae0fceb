//! Identity, limits and power-off of the guest as a whole.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Component, Path, PathBuf},
    time::Duration,
};

use nix::{
    mount::{MsFlags, mount},
    sys::reboot::{RebootMode, reboot},
    unistd::{sethostname, sync},
};

use sandboxer_protocol::{agent as wire, boot::RESET_ENDS};

use crate::{
    cgroup::Cgroup,
    clock,
    failure::{Failure, internal},
    limits::{GuestSize, Limits},
    log, network, scratch,
    shares::Shares,
    timekeeper,
};

/// The size of `/dev/shm` if the host specifies none: the usual default, bytes.
const DEFAULT_SHM: u64 = 64 << 20;

/// How long killed containers may delay the power-off.
const LAST_GRACE: Duration = Duration::from_secs(2);

/// A guest's identity.
#[derive(Debug)]
pub struct Identity {
    /// The host name; empty: unchanged.
    pub hostname: String,
    /// The time, ns since 1970; 0: unchanged.
    pub realtime_ns: u64,
    /// Randomness that is mixed into the kernel's entropy pool and credited to it; then the generator is reseeded.
    pub entropy: Vec<u8>,
    /// The size of `/dev/shm`; 0 means 64 MiB.
    pub shm_bytes: u64,
    /// The pod's sysctls, with names as in sysctl(8).
    pub sysctls: HashMap<String, String>,
    /// The host's sysctls. Those that the guest lacks or its kernel rejects are skipped.
    pub host_sysctls: HashMap<String, String>,
    /// All network interfaces of the guest.
    pub interfaces: Vec<wire::Interface>,
    /// Whether network cards without one of these interfaces are removed.
    pub removes_other_cards: bool,
    /// The limits of all its containers together.
    pub limits: Limits,
}

/// Applies the guest's identity.
pub async fn configure(identity: &Identity) -> Result<(), Failure> {
    // First, for all later users of randomness.
    if !identity.entropy.is_empty() {
        reseed(&identity.entropy).map_err(internal("cannot reseed the random number generator"))?;
    }
    if !identity.hostname.is_empty() {
        sethostname(&identity.hostname)
            .map_err(internal(format!("cannot set the hostname to {:?}", identity.hostname)))?;
    }
    if identity.realtime_ns > 0 {
        clock::set_realtime(identity.realtime_ns).map_err(internal("cannot set the clock"))?;
        // The host's time is already old when it arrives.
        timekeeper::set_by_device().map_err(internal("cannot set the clock from the VMM's clock device"))?;
    }
    let shm = if identity.shm_bytes == 0 { DEFAULT_SHM } else { identity.shm_bytes };
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(None::<&str>, "/dev/shm", None::<&str>, flags, Some(format!("size={shm}").as_str()))
        .map_err(internal(format!("cannot resize /dev/shm to {shm} bytes")))?;
    network::configure(&identity.interfaces, identity.removes_other_cards).await?;
    for (name, value) in &identity.host_sysctls {
        if let Err(failure) = set_sysctl(name, value) {
            log::print(&format!("the host's {failure}"));
        }
    }
    // Some sysctls belong to an interface.
    for (name, value) in &identity.sysctls {
        set_sysctl(name, value)?;
    }
    identity.limits.apply_to_all()
}

/// Changes the limits of all the pod's containers together.
pub fn update(limits: &Limits) -> Result<(), Failure> {
    limits.check(&Cgroup::of_all(), GuestSize::this())?;
    limits.apply_to_all()
}

nix::ioctl_write_ptr!(credit_entropy, b'R', 0x01, libc::c_int);
nix::ioctl_none!(reseed_crng, b'R', 0x07);

/// Mixes the host's randomness into the kernel's generator, credits it and makes the generator use it at once.
///
/// A processor without RDRAND needs the credit: until the kernel has counted 256 bits, it refuses to reseed (ENODATA),
/// and readers of randomness block. The host is trusted with that, as with everything in the guest.
fn reseed(entropy: &[u8]) -> io::Result<()> {
    let mut random = OpenOptions::new().write(true).open("/dev/urandom")?;
    random.write_all(entropy)?;
    let bits = libc::c_int::try_from(entropy.len().saturating_mul(8)).unwrap_or(libc::c_int::MAX);
    let random = std::os::fd::AsRawFd::as_raw_fd(&random);
    // SAFETY: RNDADDTOENTCNT reads one int, which outlives the call.
    unsafe { credit_entropy(random, &raw const bits) }?;
    // SAFETY: RNDRESEEDCRNG takes no argument.
    unsafe { reseed_crng(random) }?;
    Ok(())
}

fn set_sysctl(name: &str, value: &str) -> Result<(), Failure> {
    let path = sysctl_path(name).ok_or_else(|| Failure::invalid(format!("invalid sysctl name {name:?}")))?;
    // The file is not created if it is missing: it is not a sysctl.
    let written =
        OpenOptions::new().write(true).open(path).and_then(|mut file: File| file.write_all(value.as_bytes()));
    written.map_err(|error| Failure::invalid(format!("sysctl {name}={value}: {error}")))
}

/// Converts a sysctl's name to its path. Names are written with dots or with slashes. In a name with dots, a slash
/// stands for a dot within a part.
fn sysctl_path(name: &str) -> Option<PathBuf> {
    let relative = match name.find(['.', '/']) {
        Some(at) if name[at..].starts_with('/') => name.to_owned(),
        _ => name
            .chars()
            .map(|c| match c {
                '.' => '/',
                '/' => '.',
                c => c,
            })
            .collect(),
    };
    let path = Path::new(&relative);
    let plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    (plain && !relative.is_empty()).then(|| Path::new("/proc/sys").join(path))
}

/// Returns the kernel's release, as `uname -r` does.
pub fn kernel_release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// Kills every container, syncs the disks and powers the guest off.
pub async fn power_off(shares: &Shares) -> Failure {
    let all = Cgroup::of_all();
    if all.kill().is_ok() {
        all.wait_empty(LAST_GRACE).await;
    }
    shares.end().await;
    // The host discards these disks: writing them out would only take time.
    scratch::shut_down(scratch::all());
    power_off_now()
}

/// Syncs the disks and powers the guest off.
pub fn power_off_now() -> Failure {
    sync();
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let how = match cmdline.split_ascii_whitespace().any(|word| RESET_ENDS.contains(&word)) {
        true => RebootMode::RB_AUTOBOOT,
        false => RebootMode::RB_POWER_OFF,
    };
    match reboot(how) {
        Ok(never) => match never {},
        Err(error) => internal("cannot power off")(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysctl_names_become_paths_and_stay_below_proc_sys() {
        assert_eq!(sysctl_path("net.ipv4.ip_forward"), Some("/proc/sys/net/ipv4/ip_forward".into()));
        assert_eq!(sysctl_path("net/ipv4/conf/eth0.1/x"), Some("/proc/sys/net/ipv4/conf/eth0.1/x".into()));
        assert_eq!(sysctl_path("net.ipv4.conf.eth0/1.x"), Some("/proc/sys/net/ipv4/conf/eth0.1/x".into()));
        for bad in ["", "/etc/passwd", "../x", "a/../../x", "kernel...x"] {
            let path = sysctl_path(bad);
            assert!(
                path.as_ref().is_none_or(
                    |path| path.starts_with("/proc/sys") && !path.to_string_lossy().contains("..")
                ),
                "{bad}: {path:?}"
            );
        }
    }
}
