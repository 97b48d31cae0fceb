//! How large a machine a pod gets: as its annotations say, else by its containers' limits, else as configured.

use std::collections::HashMap;

use k8s_cri::v1::LinuxContainerResources;
use sandboxer_protocol::{controller::ControllerUpdateRequest, id::SandboxId};

use crate::{config::VmConfig, error::PodError, pod::spec::Limits, vmm::Shape};

/// Annotation that asks for a number of vCPUs.
const VCPUS: &str = "io.sandboxer.vcpus";
/// Annotation that asks for memory: MiB, or a number with Ki, Mi or Gi.
const MEMORY: &str = "io.sandboxer.memory";

/// Smallest memory a guest boots in, MiB.
const LEAST_MEMORY_MIB: u64 = 64;

/// What a guest keeps of its memory, so that a container may use its limit up to the last byte: so many MiB, and of
/// the rest one part in so many, for the kernel's notes and reserves. Measured by `MemAvailable` beside an idle
/// container, once each: of 256, 512, 1024 and 4096 MiB it keeps 49, 55, 101 and 261.
const GUEST_OVERHEAD_MIB: u64 = 48;
const GUEST_SHARE: u64 = 16;

/// Up to here sizes by limits are powers of two, beyond multiples of it, MiB: pods of different limits are copies
/// of one template. Memory that a guest doesn't touch costs its host nothing.
const ROUND_MIB: u64 = 4096;

/// The machine for a pod with these `annotations`, whose containers have these `limits` together.
///
/// An annotation is a demand, and one that can't be had is an error. Limits are bounds: beyond the largest
/// machine, or the host's `cpus`, they don't bind, and that is what the pod gets.
pub fn shape(
    annotations: &HashMap<String, String>,
    limits: &LinuxContainerResources,
    config: &VmConfig,
    cpus: u32,
) -> Result<Shape, String> {
    let vcpus = match annotations.get(VCPUS) {
        Some(text) => asked_vcpus(text, config.max_vcpus)?,
        None => {
            limited_vcpus(limits).map_or(config.default_vcpus, |count| count.min(cpus).min(config.max_vcpus))
        }
    };
    let memory_mib = match annotations.get(MEMORY) {
        Some(text) => asked_memory_mib(text, config.max_memory_mib)?,
        None => limited_memory_mib(limits, config.default_memory_mib)
            .map_or(config.default_memory_mib, |mib| mib.min(config.max_memory_mib)),
    };
    Ok(Shape { vcpus, memory_mib, nics: 1 })
}

/// What the containers may use together, as CRI says it.
pub fn limits(said: &LinuxContainerResources) -> Limits {
    Limits {
        cpu_quota_us: said.cpu_quota,
        cpu_period_us: u64::try_from(said.cpu_period).unwrap_or_default(),
        memory_bytes: said.memory_limit_in_bytes,
    }
}

/// The same as containerd tells of UpdatePodSandboxResources, in an extension of the sandbox; none, if it tells of
/// something else.
pub fn updated_limits(
    pod: &SandboxId,
    request: &ControllerUpdateRequest,
) -> Result<Option<Limits>, PodError> {
    let told = request.sandbox.as_ref().and_then(|sandbox| sandbox.extensions.get(UPDATED));
    let Some(told) = told else { return Ok(None) };
    let updated: Updated = serde_json::from_slice(&told.value).map_err(|error| PodError::Invalid {
        subject: format!("pod {pod}"),
        reason: format!("its updated resources can't be read: {error}"),
    })?;
    Ok(updated.resources.map(|Resources { cpu_quota, cpu_period, memory_limit_in_bytes }| {
        limits(&LinuxContainerResources {
            cpu_quota,
            cpu_period,
            memory_limit_in_bytes,
            ..Default::default()
        })
    }))
}

/// Name of that extension.
const UPDATED: &str = "updated-resources";

/// What is read of it: CRI's message as Go writes it in JSON, without what is 0.
#[derive(Debug, serde::Deserialize)]
struct Updated {
    #[serde(rename = "Resources")]
    resources: Option<Resources>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
struct Resources {
    cpu_period: i64,
    cpu_quota: i64,
    memory_limit_in_bytes: i64,
}

fn asked_vcpus(text: &str, most: u32) -> Result<u32, String> {
    match text.parse() {
        Ok(count) if (1..=most).contains(&count) => Ok(count),
        _ => Err(format!("annotation {VCPUS} is {text:?}, it takes a whole number from 1 to {most}")),
    }
}

fn asked_memory_mib(text: &str, most: u64) -> Result<u64, String> {
    let (digits, kib_per_unit) = match text.as_bytes() {
        [.., b'K', b'i'] => (&text[..text.len() - 2], 1),
        [.., b'M', b'i'] => (&text[..text.len() - 2], 1 << 10),
        [.., b'G', b'i'] => (&text[..text.len() - 2], 1 << 20),
        _ => (text, 1 << 10),
    };
    let mib = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(kib_per_unit)).map(|kib| kib >> 10);
    match mib {
        Some(mib) if (LEAST_MEMORY_MIB..=most).contains(&mib) => Ok(mib),
        _ => Err(format!(
            "annotation {MEMORY} is {text:?}, it takes {LEAST_MEMORY_MIB}Mi to {most}Mi \
             (a number of MiB, or with Ki, Mi or Gi)"
        )),
    }
}

/// As many as the containers may use at once, none without a limit.
fn limited_vcpus(limits: &LinuxContainerResources) -> Option<u32> {
    let quota = u64::try_from(limits.cpu_quota).ok().filter(|quota| *quota > 0)?;
    let period = u64::try_from(limits.cpu_period).ok().filter(|period| *period > 0)?;
    Some(u32::try_from(quota.div_ceil(period)).unwrap_or(u32::MAX))
}

/// What the containers may use and what the guest needs beside it, in sizes that pods share; never less than
/// `default`. None without a limit.
fn limited_memory_mib(limits: &LinuxContainerResources, default: u64) -> Option<u64> {
    let bytes = u64::try_from(limits.memory_limit_in_bytes).ok().filter(|bytes| *bytes > 0)?;
    let limit = bytes.div_ceil(1 << 20);
    let mib = limit + limit / GUEST_SHARE + GUEST_OVERHEAD_MIB;
    let rounded = if mib <= ROUND_MIB { mib.next_power_of_two() } else { mib.next_multiple_of(ROUND_MIB) };
    Some(rounded.max(default))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const CPUS: u32 = 8;

    fn annotated(name: &str, value: &str) -> Result<Shape, String> {
        let annotations = [(name.to_owned(), value.to_owned())].into();
        shape(&annotations, &LinuxContainerResources::default(), &Config::default().vm, CPUS)
    }

    fn limited(cpu_quota: i64, memory_mib: i64) -> Shape {
        let limits = LinuxContainerResources {
            cpu_quota,
            cpu_period: 100_000,
            memory_limit_in_bytes: memory_mib << 20,
            ..Default::default()
        };
        shape(&HashMap::new(), &limits, &Config::default().vm, CPUS).unwrap()
    }

    #[test]
    fn annotations_are_taken_as_they_are_or_refused() {
        assert_eq!(annotated(MEMORY, "1Gi").unwrap().memory_mib, 1024);
        assert_eq!(annotated(MEMORY, "512").unwrap().memory_mib, 512);
        assert_eq!(annotated(VCPUS, "2").unwrap().vcpus, 2);
        for bad in ["", "-1", "1", "lots", "99999999999Gi", "1.5Gi"] {
            let text = annotated(MEMORY, bad).unwrap_err();
            assert!(text.contains(MEMORY), "{bad:?}: {text}");
        }
        for bad in ["0", "1.5", "4096"] {
            assert!(annotated(VCPUS, bad).unwrap_err().contains(VCPUS), "{bad:?}");
        }
    }

    #[test]
    fn limits_make_room_for_themselves_in_sizes_that_pods_share() {
        let config = Config::default().vm;
        let default = Shape { vcpus: config.default_vcpus, memory_mib: config.default_memory_mib, nics: 1 };
        assert_eq!(limited(0, 0), default);
        assert_eq!(limited(-1, -1), default, "no limit");
        assert_eq!(limited(50_000, 64), default, "the smallest is the default");
        assert_eq!(limited(150_000, 256), Shape { vcpus: 2, memory_mib: 512, nics: 1 });
        assert_eq!(limited(100_000, 3000), Shape { vcpus: 1, memory_mib: 4096, nics: 1 });
        assert_eq!(limited(100_000, 4090).memory_mib, 8192.min(config.max_memory_mib));
        let most = Shape { vcpus: CPUS, memory_mib: config.max_memory_mib, nics: 1 };
        assert_eq!(limited(i64::MAX, i64::MAX >> 21), most, "a limit is no demand");
    }

    #[test]
    fn updated_limits_are_read_as_containerd_writes_them() {
        let told = |name: &str, value: &str| {
            let mut request = ControllerUpdateRequest::default();
            let value = prost_types::Any { type_url: String::new(), value: value.into() };
            request.sandbox.get_or_insert_default().extensions.insert(name.into(), value);
            updated_limits(&"p".parse().unwrap(), &request)
        };
        let json = r#"{"Overhead":null,"Resources":{"cpu_period":100000,"cpu_quota":150000,"cpu_shares":2,
            "memory_limit_in_bytes":67108864}}"#;
        let limits = Limits { cpu_quota_us: 150_000, cpu_period_us: 100_000, memory_bytes: 64 << 20 };
        assert_eq!(told(UPDATED, json).unwrap(), Some(limits));
        assert_eq!(told(UPDATED, r#"{"Overhead":{},"Resources":null}"#).unwrap(), None);
        assert_eq!(told("metadata", json).unwrap(), None);
        let error = told(UPDATED, "much").unwrap_err().to_string();
        assert!(error.contains("pod p") && error.contains("updated resources"), "{error}");
    }

    #[test]
    fn an_annotation_goes_before_a_limit() {
        let annotations = [(MEMORY.to_owned(), "1Gi".to_owned())].into();
        let limits = LinuxContainerResources { memory_limit_in_bytes: 4 << 30, ..Default::default() };
        assert_eq!(shape(&annotations, &limits, &Config::default().vm, CPUS).unwrap().memory_mib, 1024);
    }
}
