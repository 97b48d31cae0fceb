//! Checks resources of a container that its guest does not see or have, as the node's kernel and runc would: an
//! impossible value is an error, also in an update.

use std::fs;

use oci_spec::runtime::LinuxResources;
use sandboxer_base::Cpus;
use sandboxer_protocol::id::ContainerId;

use super::spec::invalid;
use crate::error::PodError;

/// Files in which the kernel lists the node's online CPUs and memory nodes.
const CPUS: &str = "/sys/devices/system/cpu/online";
const NODES: &str = "/sys/devices/system/node/has_memory";

/// Checks the resources of an update, as containerd passes them.
pub fn check_json(container: &ContainerId, resources: &[u8]) -> Result<(), PodError> {
    if resources.is_empty() {
        return Ok(());
    }
    let parsed: LinuxResources = serde_json::from_slice(resources)
        .map_err(|error| invalid(container, format!("its resources cannot be understood: {error}")))?;
    check(container, &parsed)
}

/// Checks the resources of a container.
pub fn check(container: &ContainerId, resources: &LinuxResources) -> Result<(), PodError> {
    let refused = |reason: String| invalid(container, reason);
    if let Some(cpu) = resources.cpu() {
        within(cpu.cpus().as_deref(), CPUS, "CPUs").map_err(refused)?;
        within(cpu.mems().as_deref(), NODES, "memory nodes").map_err(refused)?;
    }
    if let Some(memory) = resources.memory() {
        memory_fits(memory.limit(), memory.swap()).map_err(refused)?;
    }
    Ok(())
}

/// Checks that a list of CPUs or memory nodes is valid, and that the node has all of them.
fn within(list: Option<&str>, file: &str, what: &str) -> Result<(), String> {
    let Some(list) = list.filter(|list| !list.is_empty()) else { return Ok(()) };
    let requested = Cpus::parse(list).ok_or_else(|| format!("{list:?} is no list of {what}"))?;
    // A kernel without NUMA has no list of memory nodes.
    let text = fs::read_to_string(file).unwrap_or_else(|_| "0".to_owned());
    match Cpus::parse(&text) {
        Some(there) if !requested.is_within(&there) => {
            Err(format!("{list:?} names {what} that the node does not have: it has {there}"))
        }
        _ => Ok(()),
    }
}

/// Checks a limit of memory, and a limit of memory and swap together, although a guest has no swap. -1: no limit; 0:
/// not specified.
fn memory_fits(limit: Option<i64>, with_swap: Option<i64>) -> Result<(), String> {
    for (what, bytes) in [("memory", limit), ("memory and swap", with_swap)] {
        if let Some(bytes @ ..-1) = bytes {
            return Err(format!("a limit of {bytes} bytes of {what} is neither a size nor -1, for none"));
        }
    }
    match (limit.unwrap_or(0), with_swap.unwrap_or(0)) {
        (memory @ 1.., both @ 1..) if both < memory => Err(format!(
            "a limit of {both} bytes of memory and swap is less than that of memory alone, {memory}"
        )),
        _ => Ok(()),
    }
}

/// The CPUs and memory nodes in a container's resource update, as lists; `None`: unchanged.
#[derive(Debug, Default)]
pub struct HostCpus {
    /// The CPUs.
    pub cpus: Option<String>,
    /// The memory nodes.
    pub mems: Option<String>,
}

impl HostCpus {
    /// Extracts the host's CPUs and memory nodes from an update. Also returns the rest, for the guest.
    pub fn take(resources: Vec<u8>) -> (Self, Vec<u8>) {
        let Ok(mut update) = serde_json::from_slice::<serde_json::Value>(&resources) else {
            return (Self::default(), resources);
        };
        let Some(cpu) = update.get_mut("cpu").and_then(serde_json::Value::as_object_mut) else {
            return (Self::default(), resources);
        };
        let [cpus, mems] = ["cpus", "mems"].map(|name| {
            let list = cpu.remove(name)?;
            list.as_str().filter(|list| !list.is_empty()).map(str::to_owned)
        });
        (Self { cpus, mems }, update.to_string().into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(resources: serde_json::Value) -> Option<String> {
        let checked = check_json(&"c".parse().unwrap(), resources.to_string().as_bytes());
        checked.err().map(|error| error.to_string())
    }

    #[test]
    fn sets_of_what_the_node_does_not_have_are_refused_with_what_it_has() {
        let error = says(serde_json::json!({"cpu": {"cpus": "0,8000"}})).unwrap();
        assert!(
            error.contains("container c") && error.contains("CPUs that the node does not have"),
            "{error}"
        );
        let error = says(serde_json::json!({"cpu": {"mems": "0-1023"}})).unwrap();
        assert!(error.contains("memory nodes that the node does not have"), "{error}");
        for bad in ["x", "3-1", "99999", "-1"] {
            let error = says(serde_json::json!({"cpu": {"cpus": bad}})).unwrap();
            assert!(error.contains("is no list of CPUs"), "{error}");
        }
        assert_eq!(
            says(serde_json::json!({"cpu": {"cpus": "0", "mems": "0", "shares": 1_000_000_000}})),
            None
        );
        assert_eq!(says(serde_json::json!({"cpu": {"cpus": "", "mems": ""}})), None);
    }

    #[test]
    fn memory_that_cannot_be_is_refused() {
        let refusal =
            |limit: i64, swap: i64| says(serde_json::json!({"memory": {"limit": limit, "swap": swap}}));
        assert!(refusal(-2, 0).unwrap().contains("-2 bytes of memory"));
        assert!(refusal(0, -2).unwrap().contains("of memory and swap"));
        assert!(refusal(2048, 1024).unwrap().contains("less than that of memory alone"));
        for (limit, swap) in [(1, 0), (-1, -1), (1024, 1024), (1024, -1), (0, 0)] {
            assert_eq!(refusal(limit, swap), None);
        }
        assert!(says(serde_json::json!({"memory": 5})).unwrap().contains("cannot be understood"));
    }
}
