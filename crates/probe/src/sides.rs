//! Properties of each side of a comparison: what a container of each handler sees, the VMM that runs it, and the
//! handler's own configuration. Handlers are not queried by their own interfaces; only files that they name are read.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::attribution::{self, Known, PodIds, Role};
use crate::manifest::{Facts, digest, not_measured};
use crate::process::{self, Table};
use crate::runtime::Runtime;

/// Prints the kernel's release, the number of processors and the memory in KiB, one per line. Any image with a shell
/// can run it.
const LOOK: &str = "uname -r; nproc; sed -n 's/^MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo";
/// Timeout of the command; a guest may hang.
const LOOK_LIMIT: Duration = Duration::from_secs(10);
/// Maximum size of a configuration file, bytes.
const MAX_CONFIGURATION: u64 = 1 << 20;
/// Keys of a hypervisor's table that determine the VMs' properties.
const HYPERVISOR_KEYS: [&str; 12] = [
    "path",
    "kernel",
    "image",
    "initrd",
    "machine_type",
    "default_vcpus",
    "default_memory",
    "shared_fs",
    "virtio_fs_daemon",
    "disable_vhost_net",
    "enable_template",
    "rootfs_type",
];

/// Returns the resources that a container sees.
pub async fn container_sees(runtime: &Runtime, container: &str) -> Value {
    let look = runtime.exec_sync(container, ["sh", "-c", LOOK], Some(LOOK_LIMIT));
    match tokio::time::timeout(2 * LOOK_LIMIT, look).await {
        Ok(Ok(output)) => seen(&String::from_utf8_lossy(&output.stdout))
            .unwrap_or_else(|| not_measured("its image has no sh with uname, nproc and sed")),
        Ok(Err(error)) => not_measured(sandboxer_base::chain(&error)),
        Err(_) => not_measured(format!("a command in it did not end within {:?}", 2 * LOOK_LIMIT)),
    }
}

fn seen(output: &str) -> Option<Value> {
    let mut lines = output.lines();
    let kernel = lines.next().filter(|line| !line.is_empty())?;
    let processors: u32 = lines.next()?.trim().parse().ok()?;
    let kib: u64 = lines.next()?.trim().parse().ok()?;
    Some(json!({ "kernel": kernel, "processors": processors, "memory_mib": kib >> 10 }))
}

/// Returns the VMM of a pod, by the ties of its processes; `None` if it has none.
pub fn vmm(table: &Table, pod: &PodIds) -> Option<i32> {
    let observers = process::lineage(table, std::process::id() as i32);
    let known = Known { cri: None, resident: BTreeSet::new(), observers };
    let found = attribution::attribute(table, std::slice::from_ref(pod), &known);
    let of_pod = |pid: &i32| table.get(pid).is_some_and(|process| !process.is_kernel_thread);
    let mut vmms = found
        .iter()
        .filter(|(_, tie)| tie.role == Role::Vmm && tie.pod.as_deref() == Some(&*pod.pod))
        .map(|(pid, _)| *pid)
        .filter(of_pod);
    vmms.next()
}

/// Returns the facts of a VMM's program.
pub fn program(vmm: i32) -> Facts {
    // The process's link names the running program even if its file was replaced.
    let link = Path::new("/proc").join(vmm.to_string()).join("exe");
    let name = fs::read_link(&link).map_or_else(
        |error| not_measured(format!("cannot read {}: {error}", link.display())),
        |path| json!(path),
    );
    Facts::from([("vmm_program".into(), name), ("vmm_program_sha256".into(), digest(&link))])
}

/// Returns what the configuration file named by a handler's options says about its VMs, with hashes of the files that
/// it names; `None` if the options name none. An unreadable configuration, or one of another form, becomes a fact with
/// the reason.
pub fn configuration(options: &Value) -> Option<Value> {
    let path = Path::new(options.get("ConfigPath")?.as_str().filter(|path| !path.is_empty())?);
    let configured = read(path).and_then(|text| hypervisors(&text));
    Some(configured.unwrap_or_else(|why| not_measured(format!("{}: {why}", path.display()))))
}

fn read(path: &Path) -> Result<String, String> {
    let size = fs::metadata(path).map_err(|error| error.to_string())?.len();
    if size > MAX_CONFIGURATION {
        return Err(format!("{size} bytes are no configuration"));
    }
    fs::read_to_string(path).map_err(|error| error.to_string())
}

/// Returns the hypervisors of a configuration in Kata's form: its tables `[hypervisor.NAME]`.
fn hypervisors(text: &str) -> Result<Value, String> {
    let value: toml::Table = toml::from_str(text).map_err(|error| error.message().to_owned())?;
    let tables = value
        .get("hypervisor")
        .and_then(toml::Value::as_table)
        .ok_or("it has no table [hypervisor.NAME]: it is of another runtime or version")?;
    let facts = tables.iter().filter_map(|(name, table)| Some((name.clone(), hypervisor(table.as_table()?))));
    Ok(Value::Object(facts.collect()))
}

fn hypervisor(table: &toml::Table) -> Value {
    let mut facts = serde_json::Map::new();
    for key in HYPERVISOR_KEYS {
        let Some(value) = table.get(key) else { continue };
        facts.insert(key.into(), json!(value));
        if let ("path" | "kernel" | "image" | "initrd", Some(file)) =
            (key, value.as_str().filter(|file| !file.is_empty()))
        {
            facts.insert(format!("{key}_sha256"), digest(Path::new(file)));
        }
    }
    Value::Object(facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_containers_look_is_three_lines() {
        let expected = json!({ "kernel": "6.1.192-sandboxer", "processors": 1, "memory_mib": 227 });
        assert_eq!(seen("6.1.192-sandboxer\n1\n233000\n"), Some(expected));
        for none in ["", "6.1\n", "6.1\n1\n", "\n1\n2\n", "sh: nproc: not found\nx\n1\n"] {
            assert_eq!(seen(none), None, "{none:?}");
        }
    }

    #[test]
    fn the_configuration_that_options_name_is_read_and_what_is_wrong_with_it_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("configuration.toml");
        let kernel = dir.path().join("vmlinux");
        fs::write(&kernel, "kernel").unwrap();
        let options = json!({ "ConfigPath": path });
        let facts_of = |text: &str| {
            fs::write(&path, text).unwrap();
            configuration(&options).unwrap()
        };
        let text = format!(
            "[hypervisor.qemu]\npath = \"/nowhere/qemu\"\nkernel = {kernel:?}\ndefault_memory = 256\nsecret = 1\n[runtime]\nx = 1\n"
        );
        let qemu = &facts_of(&text)["qemu"];
        assert_eq!((&qemu["default_memory"], &qemu["secret"]), (&json!(256), &Value::Null));
        assert_eq!(qemu["kernel_sha256"].as_str().map(str::len), Some(64));
        let why = qemu["path_sha256"]["not_measured"].as_str().unwrap();
        assert!(why.contains("/nowhere/qemu"), "{why}");
        for (text, words) in
            [("[runtime]\n", "another runtime or version"), ("[hypervisor", "configuration.toml: ")]
        {
            let why = facts_of(text)["not_measured"].as_str().unwrap().to_owned();
            assert!(why.contains(words) && why.contains("configuration.toml"), "{why}");
        }
        fs::remove_file(&path).unwrap();
        assert!(configuration(&options).unwrap()["not_measured"].as_str().unwrap().contains("No such file"));
        assert_eq!(configuration(&json!({ "BinaryName": "runc" })), None);
        assert_eq!(configuration(&Value::Null), None);
    }
}
