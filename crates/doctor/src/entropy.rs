//! Entropy, which each guest gets from the host when it starts.

use rustix::rand::{GetRandomFlags, getrandom};

use super::{
    host::Host,
    verdict::{Check, Fix, Subject},
};

const ENTROPY: Subject = Subject {
    name: "entropy",
    why: "each guest gets its first randomness from the host; without it, starts wait",
};

/// The state of the kernel's random number generator.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// Whether the generator is seeded.
    pub seeded: bool,
    /// Number of bits in the pool; `None` if unknown.
    pub bits: Option<u64>,
}

/// Reads the state without waiting for the generator.
pub fn read(host: &Host) -> Reading {
    let seeded = getrandom(&mut [0_u8; 1], GetRandomFlags::NONBLOCK).is_ok();
    Reading { seeded, bits: host.number("/proc/sys/kernel/random/entropy_avail") }
}

/// Checks the state.
pub fn judge(reading: &Reading) -> Check {
    let bits = reading.bits.map_or_else(|| "unknown".to_owned(), |bits| bits.to_string());
    match reading.seeded {
        true => ENTROPY.ok(format!("seeded, {bits} bits in the pool")),
        false => ENTROPY.warning(
            format!("not seeded yet, {bits} bits in the pool"),
            Fix::commands(
                "add an entropy source such as virtio-rng, or install an entropy daemon",
                ["apt-get install jitterentropy-rngd"],
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    #[test]
    fn a_generator_without_a_seed_is_warned_of() {
        assert_eq!(judge(&Reading { seeded: true, bits: Some(256) }).verdict, Verdict::Ok);
        assert_eq!(judge(&Reading { seeded: false, bits: None }).verdict, Verdict::Warning);
    }

    #[test]
    fn the_machine_of_a_test_has_been_up_for_long_enough() {
        assert!(read(&Host::default()).seeded);
    }
}
