//! Parameters on the guest kernel's command line.
//!
//! Parameters look like `sandboxer.link=<64 hex digits>`. Everything else on the command line belongs to the kernel and
//! is ignored here.

use std::fmt;

use crate::link::LinkKey;

/// The name of the virtio-serial port of the agent's link.
pub const AGENT_PORT: &str = "org.sandboxer.agent";

/// The vsock port on which the agent listens if the guest has a vsock. Once the agent listens, it connects to the same
/// port of its host and disconnects.
pub const AGENT_VSOCK_PORT: u32 = 1024;

/// The words on the kernel command line of every VM.
///
/// A panic resets the VM. In a guest with few CPUs, expedited RCU grace periods are short; mounts and control groups
/// wait for many of them. A VM that waited in the pool was stopped, not stalled: without the word about stalls,
/// Firecracker's guests print a stack at each claim.
///
/// The kernel keeps the data of each processor in units. By default a unit has 2 MiB, and each unit after the first has
/// a table of 4 MiB of the owners of its objects, filled with zeroes. The first container needs a second unit. Units of
/// pages have a tenth of that.
///
/// Until the agent runs, the kernel prints only messages worse than errors. On QEMU it prints an error in each boot:
/// that it found no PCI, although it must not look for it. Each of these 51 characters is an exit, 80 µs in all.
pub const KERNEL_WORDS: &str = "console=ttyS0 quiet loglevel=3 panic=-1 random.trust_cpu=on rcupdate.rcu_expedited=1 \
     rcupdate.rcu_cpu_stall_suppress=1 percpu_alloc=page";

/// The words on the kernel command line of a VM that cannot be powered off, but ends when it resets itself: through the
/// keyboard controller, and without ACPI.
pub const RESET_ENDS: [&str; 2] = ["reboot=k", "acpi=off"];

/// The variable that is set in the agent's environment if its VM is to be frozen as a template. The kernel copies it
/// from its command line, as it does with each word `NAME=VALUE` that it does not know and that has no dot.
pub const TEMPLATE: &str = "SANDBOXER_TEMPLATE";

/// Returns the initial Ethernet address of network device `nic` of a VM, by which the agent identifies it.
/// The address is locally administered; the guest replaces it with the pod's.
pub const fn first_mac(nic: u8) -> [u8; 6] {
    [0x02, b's', b'b', b'x', 0, nic]
}

/// The parameters that the daemon gives the agent at boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootParams {
    /// The key of the link.
    pub link_key: LinkKey,
    /// The filter of the agent's log on the console, as in `RUST_LOG`.
    pub log: Option<String>,
    /// Whether the VM is to be frozen as a template: see [`TEMPLATE`].
    pub template: bool,
}

/// Why a command line has no valid [`BootParams`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBootParams {
    /// The command line has no key.
    #[error("kernel command line has no sandboxer.link=…")]
    NoLinkKey,
    /// The key is malformed.
    #[error("kernel command line: sandboxer.link is not {} hex digits", 2 * LinkKey::LEN)]
    BadLinkKey,
}

impl BootParams {
    /// Parses the parameters in `/proc/cmdline`'s content.
    pub fn parse(cmdline: &str) -> Result<Self, InvalidBootParams> {
        let value_of = |name: &str| {
            cmdline.split_ascii_whitespace().rev().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let key = value_of("sandboxer.link").ok_or(InvalidBootParams::NoLinkKey)?;
        Ok(Self {
            link_key: LinkKey::from_hex(key).ok_or(InvalidBootParams::BadLinkKey)?,
            log: value_of("sandboxer.log").map(str::to_owned),
            template: value_of(TEMPLATE).is_some(),
        })
    }
}

/// Formats the parameters as words of a kernel command line.
impl fmt::Display for BootParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sandboxer.link={}", self.link_key.to_hex())?;
        if let Some(log) = &self.log {
            write!(f, " sandboxer.log={log}")?;
        }
        if self.template {
            write!(f, " {TEMPLATE}=1")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_survive_the_command_line() {
        for template in [false, true] {
            let params = BootParams { link_key: LinkKey::random(), log: Some("info".into()), template };
            let cmdline = format!("console=ttyS0 quiet {params} panic=-1\n");
            assert_eq!(BootParams::parse(&cmdline), Ok(params));
        }
    }

    #[test]
    fn a_missing_or_short_key_is_named() {
        assert_eq!(BootParams::parse("quiet"), Err(InvalidBootParams::NoLinkKey));
        assert_eq!(BootParams::parse("sandboxer.link=abcd"), Err(InvalidBootParams::BadLinkKey));
    }
}
