//! The host's clock source, on which guests' clocks depend.

use super::{
    host::Host,
    verdict::{Check, Fix, Subject},
};

/// Clock sources that are read without a VM exit or a system call.
const FAST: [&str; 3] = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page"];

const CLOCK: Subject =
    Subject { name: "clock", why: "every VMM reads it often; slow sources take microseconds" };

/// The kernel's clock sources.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// The current source.
    pub current: Option<String>,
    /// All available sources, separated by spaces.
    pub available: String,
}

/// Reads the sources.
pub fn read(host: &Host) -> Reading {
    const DIR: &str = "/sys/devices/system/clocksource/clocksource0";
    Reading {
        current: host.text(format!("{DIR}/current_clocksource")).ok(),
        available: host.text(format!("{DIR}/available_clocksource")).unwrap_or_default(),
    }
}

/// Checks the current source.
pub fn judge(reading: &Reading) -> Check {
    let Some(current) = &reading.current else {
        return CLOCK.not_applicable("unknown clock source");
    };
    if FAST.contains(&current.as_str()) {
        return CLOCK.ok(current);
    }
    let seen = format!("{current}, a slow one (available: {})", reading.available);
    let better = FAST.into_iter().find(|fast| reading.available.split_whitespace().any(|name| name == *fast));
    CLOCK.warning(
        seen,
        match better {
            Some(better) => Fix::commands(
                "choose a faster one",
                [format!("echo {better} > /sys/devices/system/clocksource/clocksource0/current_clocksource")],
            ),
            None => Fix::words("see in the kernel's log why the TSC is not used"),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    #[test]
    fn slow_clocks_are_warned_of() {
        for (current, available, verdict, commands) in [
            (Some("tsc"), "tsc kvm-clock", Verdict::Ok, None),
            (Some("kvm-clock"), "kvm-clock", Verdict::Ok, None),
            (Some("hpet"), "tsc hpet", Verdict::Warning, Some(1)),
            (Some("acpi_pm"), "acpi_pm", Verdict::Warning, Some(0)),
            (None, "", Verdict::NotApplicable, None),
        ] {
            let check = judge(&Reading { current: current.map(str::to_owned), available: available.into() });
            assert_eq!(check.verdict, verdict, "{check}");
            assert_eq!(check.fix.map(|fix| fix.commands.len()), commands);
        }
    }
}
