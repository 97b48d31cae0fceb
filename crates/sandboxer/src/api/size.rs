//! The size of a pod's VM: from its annotations, else from its containers' limits, else from the configuration.

use std::collections::HashMap;

use k8s_cri::v1::LinuxContainerResources;
use sandboxer_config::VmConfig;
use sandboxer_process::cgroup::Unlimited;
use sandboxer_protocol::{controller::ControllerUpdateRequest, id::SandboxId};
use sandboxer_vmm::Shape;

use crate::{
    error::PodError,
    pod::{memory, spec::Limits},
};

/// Annotation with the number of vCPUs.
const VCPUS: &str = "io.sandboxer.vcpus";
/// Annotation with the memory: MiB, or a number with Ki, Mi or Gi.
const MEMORY: &str = "io.sandboxer.memory";

/// Minimum memory in which a guest boots, MiB.
const MIN_MEMORY_MIB: u64 = 64;

/// Minimum memory of the VM of a pod with limits, MiB. Pods with small limits share its template, and their limits can
/// be raised within it.
const SMALLEST_LIMITED_MIB: u64 = 256;

/// Number of sizes between a power of two and the next. Few sizes let pods of different limits share a template, and a
/// VM is at most an eighth larger than needed. The VMM keeps all memory that a guest ever touched, so a larger VM could
/// exceed the pod's limit and overhead.
const SIZES_PER_DOUBLING: u64 = 8;

/// CPU shares of a whole CPU in CRI.
const SHARES_PER_CPU: u64 = 1024;

/// Returns the VM shape for a pod with these `annotations`, whose containers have these `limits` together.
///
/// An annotation is a requirement: an error is returned if it cannot be met. Limits are bounds: beyond the largest VM,
/// or the host's `cpus`, the pod gets that maximum. A pod without a limit gets the default, and as many vCPUs as it
/// requests.
pub fn shape(
    annotations: &HashMap<String, String>,
    limits: &LinuxContainerResources,
    config: &VmConfig,
    cpus: u32,
) -> Result<Shape, String> {
    let vcpus = match annotations.get(VCPUS) {
        Some(text) => asked_vcpus(text, config.max_vcpus)?,
        None => {
            let requested = requested_vcpus(limits).min(cpus);
            let most = limited_vcpus(limits).map_or(config.default_vcpus, |count| count.min(cpus));
            most.max(requested).min(config.max_vcpus)
        }
    };
    let memory_mib = match annotations.get(MEMORY) {
        Some(text) => rounded(asked_memory_mib(text, config.max_memory_mib)?).min(config.max_memory_mib),
        None => {
            limited_memory_mib(limits).map_or(config.default_memory_mib, |mib| mib.min(config.max_memory_mib))
        }
    };
    Ok(Shape { vcpus, memory_mib, nics: 1 })
}

/// Returns the total limits of the containers, as CRI passes them.
pub fn limits(resources: &LinuxContainerResources) -> Limits {
    Limits {
        cpu_quota_us: resources.cpu_quota,
        cpu_period_us: u64::try_from(resources.cpu_period).unwrap_or_default(),
        memory_bytes: resources.memory_limit_in_bytes,
    }
}

/// Returns the limits in UpdatePodSandboxResources, which containerd passes in an extension of the sandbox; `None` if
/// the request updates something else.
pub fn updated_limits(
    pod: &SandboxId,
    request: &ControllerUpdateRequest,
) -> Result<Option<Limits>, PodError> {
    let extension = request.sandbox.as_ref().and_then(|sandbox| sandbox.extensions.get(UPDATED));
    let Some(extension) = extension else { return Ok(None) };
    let updated: Updated = serde_json::from_slice(&extension.value).map_err(|error| PodError::Invalid {
        subject: format!("pod {pod}"),
        reason: format!("cannot read its updated resources: {error}"),
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

/// Name of the extension with updated limits.
const UPDATED: &str = "updated-resources";

/// The part of the extension that is read: CRI's message as Go writes it in JSON, without fields that are 0.
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
        _ => Err(format!("annotation {VCPUS} is {text:?}: it takes a whole number from 1 to {most}")),
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
        Some(mib) if (MIN_MEMORY_MIB..=most).contains(&mib) => Ok(mib),
        _ => Err(format!(
            "annotation {MEMORY} is {text:?}: it takes {MIN_MEMORY_MIB}Mi to {most}Mi \
             (a number of MiB, or with Ki, Mi or Gi)"
        )),
    }
}

/// Returns the number of vCPUs that the containers may use at once; `None` without a limit.
fn limited_vcpus(limits: &LinuxContainerResources) -> Option<u32> {
    let quota = u64::try_from(limits.cpu_quota).ok().filter(|quota| *quota > 0)?;
    let period = u64::try_from(limits.cpu_period).ok().filter(|period| *period > 0)?;
    Some(u32::try_from(quota.div_ceil(period)).unwrap_or(u32::MAX))
}

/// Returns the number of vCPUs that the containers request together.
fn requested_vcpus(limits: &LinuxContainerResources) -> u32 {
    let shares = u64::try_from(limits.cpu_shares).unwrap_or_default();
    u32::try_from(shares.div_ceil(SHARES_PER_CPU)).unwrap_or(u32::MAX)
}

/// Returns the memory that the containers may use plus what the guest needs, MiB, rounded up to a shared size; `None`
/// without a limit.
fn limited_memory_mib(limits: &LinuxContainerResources) -> Option<u64> {
    let bytes = u64::try_from(limits.memory_limit_in_bytes).ok().filter(|bytes| *bytes > 0)?;
    Some(rounded(memory::with_guest_mib(bytes).max(SMALLEST_LIMITED_MIB)))
}

/// Rounds up to the next size, MiB.
fn rounded(mib: u64) -> u64 {
    let power = 1 << mib.max(1).ilog2();
    mib.checked_next_multiple_of((power / SIZES_PER_DOUBLING).max(1)).unwrap_or(mib)
}

/// Removes from `limits` each limit that some container of the pod does not have: kubelet adds up only existing limits.
pub fn without(limits: LinuxContainerResources, unlimited: Unlimited) -> LinuxContainerResources {
    LinuxContainerResources {
        cpu_quota: if unlimited.cpu { 0 } else { limits.cpu_quota },
        memory_limit_in_bytes: if unlimited.memory { 0 } else { limits.memory_limit_in_bytes },
        ..limits
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_config::Config;

    use super::*;

    const CPUS: u32 = 8;

    /// Returns the configuration of a node of 8 CPUs and 1 TiB.
    fn config() -> VmConfig {
        let node = Config::default().vm;
        VmConfig {
            default_vcpus: 2,
            default_memory_mib: 2048,
            max_vcpus: CPUS,
            max_memory_mib: 1 << 20,
            ..node
        }
    }

    fn annotated(name: &str, value: &str) -> Result<Shape, String> {
        let annotations = [(name.to_owned(), value.to_owned())].into();
        shape(&annotations, &LinuxContainerResources::default(), &config(), CPUS)
    }

    fn limited(cpu_quota: i64, memory_mib: i64) -> Shape {
        let limits = LinuxContainerResources {
            cpu_quota,
            cpu_period: 100_000,
            memory_limit_in_bytes: memory_mib << 20,
            ..Default::default()
        };
        shape(&HashMap::new(), &limits, &config(), CPUS).unwrap()
    }

    #[test]
    fn annotations_are_taken_as_they_are_or_refused() {
        assert_eq!(annotated(MEMORY, "1Gi").unwrap().memory_mib, 1024);
        assert_eq!(annotated(MEMORY, "512").unwrap().memory_mib, 512);
        assert_eq!(annotated(MEMORY, "513").unwrap().memory_mib, 576, "a size that others may have, too");
        assert_eq!(annotated(MEMORY, "1023").unwrap().memory_mib, 1024);
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
        let config = config();
        let default = Shape { vcpus: config.default_vcpus, memory_mib: config.default_memory_mib, nics: 1 };
        assert_eq!(limited(0, 0), default);
        assert_eq!(limited(-1, -1), default, "no limit");
        assert_eq!(limited(50_000, 64), Shape { vcpus: 1, memory_mib: 256, nics: 1 }, "the smallest");
        assert_eq!(limited(150_000, 256), Shape { vcpus: 2, memory_mib: 320, nics: 1 });
        assert_eq!(limited(100_000, 600).memory_mib, 704, "not 1024");
        assert_eq!(limited(100_000, 3000), Shape { vcpus: 1, memory_mib: 3328, nics: 1 });
        assert_eq!(limited(100_000, 4090).memory_mib, 4608);
        let most = Shape { vcpus: CPUS, memory_mib: config.max_memory_mib, nics: 1 };
        assert_eq!(limited(i64::MAX, i64::MAX >> 21), most, "a limit is no demand");
    }

    #[test]
    fn no_size_is_larger_than_needed_by_more_than_an_eighth() {
        for mib in 64..20_000 {
            let size = rounded(mib);
            assert!(size >= mib && size - mib <= mib / 8, "{mib}: {size}");
            assert_eq!(rounded(size), size);
        }
        assert_eq!(rounded(u64::MAX), u64::MAX);
    }

    #[test]
    fn requests_count_beside_limits() {
        let with = |cpu_shares, cpu_quota| {
            let limits =
                LinuxContainerResources { cpu_shares, cpu_quota, cpu_period: 100_000, ..Default::default() };
            shape(&HashMap::new(), &limits, &config(), CPUS).unwrap().vcpus
        };
        assert_eq!(with(2, 0), config().default_vcpus, "no request, no limit");
        assert_eq!(with(3 << 10, 0), 3, "a request alone");
        assert_eq!(with((3 << 10) + 1, 0), 4);
        assert_eq!(with(2 << 10, 250_000), 3, "the larger of both");
        assert_eq!(with(512, 50_000), 1, "a limit goes before the default");
        assert_eq!(with(i64::MAX, 0), CPUS);
    }

    #[test]
    fn one_container_without_a_limit_makes_its_pod_one_without() {
        let limits = LinuxContainerResources {
            cpu_quota: 50_000,
            cpu_period: 100_000,
            cpu_shares: 512,
            memory_limit_in_bytes: 4 << 30,
            ..Default::default()
        };
        let left = without(limits.clone(), Unlimited { cpu: false, memory: true });
        assert_eq!((left.cpu_quota, left.memory_limit_in_bytes, left.cpu_shares), (50_000, 0, 512));
        let left = without(limits.clone(), Unlimited { cpu: true, memory: true });
        let all = shape(&HashMap::new(), &left, &config(), CPUS).unwrap();
        assert_eq!(all, limited(0, 0));
        assert_eq!(without(limits.clone(), Unlimited::default()), limits);
    }

    #[test]
    fn updated_limits_are_read_as_containerd_writes_them() {
        let updated = |name: &str, value: &str| {
            let mut request = ControllerUpdateRequest::default();
            let value = prost_types::Any { type_url: String::new(), value: value.into() };
            request.sandbox.get_or_insert_default().extensions.insert(name.into(), value);
            updated_limits(&"p".parse().unwrap(), &request)
        };
        let json = r#"{"Overhead":null,"Resources":{"cpu_period":100000,"cpu_quota":150000,"cpu_shares":2,
            "memory_limit_in_bytes":67108864}}"#;
        let limits = Limits { cpu_quota_us: 150_000, cpu_period_us: 100_000, memory_bytes: 64 << 20 };
        assert_eq!(updated(UPDATED, json).unwrap(), Some(limits));
        assert_eq!(updated(UPDATED, r#"{"Overhead":{},"Resources":null}"#).unwrap(), None);
        assert_eq!(updated("metadata", json).unwrap(), None);
        let error = updated(UPDATED, "much").unwrap_err().to_string();
        assert!(error.contains("pod p") && error.contains("updated resources"), "{error}");
    }

    #[test]
    fn an_annotation_goes_before_a_limit() {
        let annotations = [(MEMORY.to_owned(), "1Gi".to_owned())].into();
        let limits = LinuxContainerResources { memory_limit_in_bytes: 4 << 30, ..Default::default() };
        assert_eq!(shape(&annotations, &limits, &config(), CPUS).unwrap().memory_mib, 1024);
    }
}
