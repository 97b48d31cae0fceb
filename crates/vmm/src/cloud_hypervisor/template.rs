//! The files of a frozen VM.
//!
//! ```text
//! memory        of the guest; it was in this file from the start
//! config.json   as in `vm.create`, with the VMM's additions
//! state.json    of its CPUs and devices
//! ```
//!
//! The VMM restores a copy from a directory of links to the sealed files, which it inherits. Only the configuration is
//! changed: its memory is another file, mapped privately. A copy shares the pages that it does not write with all
//! others.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::Path,
};

use rustix::fs::{MemfdFlags, memfd_create};
use sandboxer_process::jail::Jail;
use serde_json::Value;

use super::wire;
use crate::{
    Frozen, MEMORY, VmSpec, VmmError,
    jailed::{RESTORE, inherited},
    run_dir::path_error,
};

/// Name of the configuration.
pub const CONFIG: &str = "config.json";
/// Name of the state.
pub const STATE: &str = "state.json";
/// Directory in the jail from which the VMM restores a copy.
pub const DIR: &str = "/template";
/// The only memory zone of a VM that is to be frozen or that can grow.
pub const ZONE: &str = "memory";
/// Maximum size of a configuration, bytes.
pub const MAX_CONFIG: u64 = 1 << 20;
/// Maximum size of a state, bytes.
pub const MAX_STATE: u64 = 16 << 20;

/// Returns the description of the memory of `spec`'s VM.
pub fn memory(spec: &VmSpec) -> wire::Memory {
    let size = spec.memory_mib << 20;
    let hotplug_size = (spec.growth_mib > 0).then_some(spec.growth_mib << 20);
    let hotplug_method = hotplug_size.map(|_| wire::HotplugMethod::VirtioMem);
    let file = spec.memory_file.clone();
    // Huge pages are in a file, too.
    let shared = file.is_some() || spec.huge_pages;
    if !shared && hotplug_size.is_none() {
        return wire::Memory { size, shared: false, hotplug_method, zones: Vec::new() };
    }
    let zone = wire::MemoryZone { id: ZONE, size, shared, file, hotplug_size };
    wire::Memory { size: 0, shared: false, hotplug_method, zones: vec![zone] }
}

/// Returns the files that a VMM must inherit to restore a copy of `frozen`, to which links in `jail` lead; and the names of the
/// network cards that the frozen VM had.
pub fn source(
    spec: &VmSpec,
    frozen: &Frozen,
    jail: &mut Jail,
) -> Result<([OwnedFd; 3], Vec<String>), VmmError> {
    let open = |name| frozen.open(&spec.pod, name);
    let (memory, state, config) = (open(MEMORY)?, open(STATE)?, open(CONFIG)?);
    let malformed = |reason: String| VmmError::Malformed {
        pod: spec.pod.clone(),
        call: RESTORE.to_owned(),
        reason: format!("{}: {reason}", frozen.dir().join(CONFIG).display()),
    };
    let config = read(config.into()).map_err(|error| malformed(error.to_string()))?;
    let config = of_copy(config, spec, memory.as_raw_fd()).map_err(malformed)?;
    let nics = nics(&config);
    let mut link = || -> io::Result<OwnedFd> {
        let mut file = File::from(memfd_create(CONFIG, MemfdFlags::CLOEXEC)?);
        file.write_all(config.to_string().as_bytes())?;
        let dir = DIR.trim_start_matches('/');
        jail.link(&inherited(file.as_raw_fd()), (dir, CONFIG))?;
        jail.link(&inherited(state.as_raw_fd()), (dir, STATE))?;
        Ok(file.into())
    };
    let config = link().map_err(path_error(&spec.pod, "prepare", DIR.into()))?;
    Ok(([memory, state, config], nics))
}

/// Returns the names of the network cards in a configuration.
fn nics(config: &Value) -> Vec<String> {
    let nics = config.get("net").and_then(Value::as_array).into_iter().flatten();
    nics.filter_map(|nic| Some(nic.get("id")?.as_str()?.to_owned())).collect()
}

fn read(config: File) -> io::Result<Value> {
    let mut text = Vec::new();
    config.take(MAX_CONFIG).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Turns the configuration of a frozen VM into the configuration of a copy that maps `memory` privately.
fn of_copy(mut config: Value, spec: &VmSpec, memory: RawFd) -> Result<Value, String> {
    let zones = config.pointer_mut("/memory/zones").and_then(Value::as_array_mut);
    let zone = match zones.map(Vec::as_mut_slice) {
        Some([Value::Object(zone)]) if zone.get("id").is_some_and(|id| id == ZONE) => zone,
        _ => return Err("the VM's memory is not in one file".to_owned()),
    };
    zone.insert("file".to_owned(), path_text(&inherited(memory)));
    zone.insert("shared".to_owned(), false.into());
    // The VMM opens these again but does not use them.
    for (file, path) in [("kernel", &spec.kernel), ("initramfs", &spec.initramfs)] {
        config["payload"][file] = path_text(path);
    }
    // Landlock would need a rule for the copy's memory: see `landlock`.
    config["landlock_enable"] = false.into();
    if let Some(config) = config.as_object_mut() {
        config.remove("landlock_rules");
    }
    Ok(config)
}

fn path_text(path: &Path) -> Value {
    path.to_string_lossy().into()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;
    use crate::spec::tests::spec;

    #[test]
    fn memory_that_can_grow_is_a_zone_with_or_without_a_file() {
        let memory = |memory_file: Option<&str>, growth_mib| {
            let memory_file = memory_file.map(PathBuf::from);
            serde_json::to_value(memory(&VmSpec { memory_file, growth_mib, ..spec() })).unwrap()
        };
        assert_eq!(memory(None, 0), json!({ "size": 1 << 20, "shared": false }));
        let zone = json!({ "id": "memory", "size": 1 << 20, "shared": false, "hotplug_size": 128 << 20 });
        let method = "VirtioMem";
        let expected = json!({ "size": 0, "shared": false, "hotplug_method": method, "zones": [zone] });
        assert_eq!(memory(None, 128), expected);
        let zone = json!({ "id": "memory", "size": 1 << 20, "file": "/m", "shared": true });
        assert_eq!(memory(Some("/m"), 0), json!({ "size": 0, "shared": false, "zones": [zone] }));
        assert_eq!(memory(Some("/m"), 128)["zones"][0]["hotplug_size"], 128 << 20);
    }

    #[test]
    fn memory_in_huge_pages_is_a_shared_zone_whose_file_comes_later() {
        let memory = serde_json::to_value(memory(&VmSpec { huge_pages: true, ..spec() })).unwrap();
        let zone = json!({ "id": "memory", "size": 1 << 20, "shared": true });
        assert_eq!(memory, json!({ "size": 0, "shared": false, "zones": [zone] }));
    }

    #[test]
    fn a_copy_has_its_memory_from_another_file_and_is_otherwise_the_same() {
        let payload = |dir| json!({ "kernel": format!("{dir}/kernel"), "initramfs": format!("{dir}/initramfs"), "cmdline": "c" });
        let zone =
            |file, shared| json!({ "id": "memory", "size": 1, "file": file, "shared": shared, "thp": true });
        let vsock = json!({ "id": "_vsock2" });
        let template = |zones: Value| {
            json!({ "memory": { "size": 0, "zones": zones }, "payload": payload("/old"), "vsock": vsock,
                    "landlock_enable": true, "landlock_rules": [{ "path": "/t", "access": "rw" }] })
        };
        let copy = of_copy(template(json!([zone("/t/memory", true)])), &spec(), 7).unwrap();
        let expected = json!({
            "memory": { "size": 0, "zones": [zone("/proc/self/fd/7", false)] }, "payload": payload("/new"),
            "vsock": vsock, "landlock_enable": false,
        });
        assert_eq!(copy, expected);

        let two = json!([zone("/a", true), zone("/b", true)]);
        for other in [template(two), template(json!([])), template(json!([{ "id": "other" }])), json!([])] {
            of_copy(other, &spec(), 7).unwrap_err();
        }
    }
}
