//! The VM that a double pretends to run: which call is possible when, with which fields, and what it does.
//!
//! ```text
//!             InstanceStart            Paused
//!   not started ──────────▶ running ◀─────────▶ paused ◀─── load ─── not started
//!                                     Resumed
//! ```

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Condvar, Mutex, mpsc},
};

use sandboxer_host::network::tap;
use serde_json::{Value, json};

use super::guest;

/// The fields of each call, which a real one would refuse if another were among them or one were missing.
const FIELDS: [(&str, &[&str]); 14] = [
    ("PUT machine-config", &["mem_size_mib", "vcpu_count"]),
    ("PUT boot-source", &["boot_args", "initrd_path", "kernel_image_path"]),
    ("PUT drives", &["cache_type", "drive_id", "is_read_only", "is_root_device", "path_on_host"]),
    ("PATCH drives", &["drive_id", "path_on_host"]),
    ("PUT vsock", &["guest_cid", "uds_path"]),
    ("PUT entropy", &[]),
    ("PUT balloon", &["amount_mib", "deflate_on_oom", "free_page_reporting"]),
    ("PUT hotplug", &["block_size_mib", "slot_size_mib", "total_size_mib"]),
    ("PATCH hotplug", &["requested_size_mib"]),
    ("PUT network-interfaces", &["guest_mac", "host_dev_name", "iface_id"]),
    ("PUT actions", &["action_type"]),
    ("PATCH vm", &["state"]),
    ("PUT snapshot", &["mem_file_path", "snapshot_path"]),
    ("PUT snapshot/load", &["mem_backend", "network_overrides", "snapshot_path"]),
];

#[derive(Default)]
struct State {
    running: Option<bool>,
    booted: Option<Value>,
    memory_mib: u64,
    hotplug: Option<Hotplug>,
    drives: Vec<Drive>,
    vsock: Option<PathBuf>,
    taps: BTreeMap<String, (String, OwnedFd)>,
}

/// Memory that the guest can get, MiB; it has what was requested.
#[derive(Clone, Copy)]
struct Hotplug {
    total: u64,
    requested: u64,
}

/// A drive with its open file.
pub struct Drive {
    id: String,
    path: PathBuf,
    pub read_only: bool,
    pub file: File,
}

pub struct Vm {
    state: Mutex<State>,
    changed: Condvar,
    end: mpsc::Sender<ExitCode>,
}

type Answer = Result<Option<Value>, String>;

impl Vm {
    pub fn new(end: mpsc::Sender<ExitCode>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), changed: Condvar::new(), end })
    }

    /// Ends the VMM, as a guest's reset does.
    pub fn reset(&self) {
        let _ = self.end.send(ExitCode::SUCCESS);
    }

    /// Waits until the guest's disks, of which the first is the index, are as expected.
    pub fn wait_for_drives<T>(&self, mut wanted: impl FnMut(&[Drive]) -> Option<T>) -> T {
        let mut state = self.state.lock().unwrap();
        loop {
            if let Some(found) = wanted(&state.drives) {
                return found;
            }
            state = self.changed.wait(state).unwrap();
        }
    }

    /// Returns the memory that the guest has, MiB.
    pub fn memory_mib(&self) -> u64 {
        let state = self.state.lock().unwrap();
        state.memory_mib + state.hotplug.map_or(0, |hotplug| hotplug.requested)
    }

    pub fn answer(self: &Arc<Self>, method: &str, path: &str, body: &Value) -> Answer {
        let names: Vec<&str> = path.trim_matches('/').split('/').collect();
        let mut state = self.state.lock().unwrap();
        if (method, path) == ("GET", "/") {
            let name = match state.running {
                None => "Not started",
                Some(true) => "Running",
                Some(false) => "Paused",
            };
            return Ok(Some(
                json!({ "id": "a", "app_name": "Firecracker", "state": name, "vmm_version": super::USUAL }),
            ));
        }
        if (method, path) == ("GET", "/hotplug/memory") {
            let Hotplug { total, requested } = state.hotplug.ok_or("no memory hotplug device")?;
            return Ok(Some(json!({
                "total_size_mib": total, "slot_size_mib": 128, "block_size_mib": 2,
                "plugged_size_mib": requested, "requested_size_mib": requested,
            })));
        }
        check_fields(method, &names, body)?;
        let number = |name: &str| body[name].as_u64().ok_or(format!("{name} is no number"));
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        let is_new = state.running.is_none();
        match (method, &names[..], is_new) {
            ("PUT", ["entropy" | "balloon"], true) => {}
            ("PUT", ["machine-config"], true) => state.memory_mib = number("mem_size_mib")?,
            ("PUT", ["hotplug", "memory"], true) => {
                let total = number("total_size_mib")?;
                if total == 0 || total % number("slot_size_mib")? != 0 {
                    return Err("Total size must be a multiple of slot size".to_owned());
                }
                state.hotplug = Some(Hotplug { total, requested: 0 });
            }
            ("PATCH", ["hotplug", "memory"], false) => {
                let requested = number("requested_size_mib")?;
                let hotplug = state.hotplug.as_mut().ok_or("no memory hotplug device")?;
                if requested > hotplug.total || requested % 2 != 0 {
                    return Err(format!("Size {requested} is invalid"));
                }
                hotplug.requested = requested;
            }
            ("PUT", ["boot-source"], true) => {
                for name in ["kernel_image_path", "initrd_path"] {
                    File::open(text(name)).map_err(|error| format!("{name}: {error}"))?;
                }
                state.booted = Some(body.clone());
            }
            ("PUT", ["drives", id], true) => {
                let read_only = body["is_read_only"].as_bool().ok_or("is_read_only")?;
                let drive = Drive::open(id, &text("path_on_host"), read_only)?;
                state.drives.push(drive);
            }
            ("PATCH", ["drives", id], false) => {
                let drive = state.drives.iter_mut().find(|drive| drive.id == *id).ok_or("no such drive")?;
                *drive = Drive::open(id, &text("path_on_host"), drive.read_only)?;
                self.changed.notify_all();
            }
            ("PUT", ["vsock"], true) => state.vsock = Some(text("uds_path").into()),
            ("PUT", ["network-interfaces", id], true) => {
                let tap = open_tap(&text("host_dev_name"))?;
                state.taps.insert((*id).to_owned(), (text("host_dev_name"), tap));
            }
            ("PUT", ["actions"], true) if text("action_type") == "InstanceStart" => {
                state.booted.as_ref().ok_or("no kernel")?;
                state.running = Some(true);
                guest::start(state.vsock.as_ref().ok_or("no vsock")?, self.clone())
                    .map_err(|e| e.to_string())?;
            }
            // The real one goes on, and then sends nothing to the vsock of its guest.
            ("PATCH", ["vm"], false) if text("state") == "Resumed" && state.running == Some(true) => {
                return Err("the VM runs".to_owned());
            }
            ("PATCH", ["vm"], false) => {
                state.running = Some(text("state") == "Resumed");
            }
            ("PUT", ["snapshot", "create"], false) => {
                create(&state, &text("snapshot_path"), &text("mem_file_path"))?
            }
            ("PUT", ["snapshot", "load"], true) => {
                load(&mut state, body).map_err(|error| format!("Load snapshot error: {error}"))?;
                guest::start(state.vsock.as_ref().ok_or("no vsock")?, self.clone())
                    .map_err(|e| e.to_string())?;
            }
            _ => return Err(format!("{method} {path} is not possible in this state")),
        }
        Ok(None)
    }
}

impl Drive {
    fn open(id: &str, path: &str, read_only: bool) -> Result<Self, String> {
        let file = File::options().read(true).write(!read_only).open(path);
        let file = file.map_err(|error| format!("{path}: {error}"))?;
        Ok(Self { id: id.to_owned(), path: path.into(), read_only, file })
    }
}

fn open_tap(name: &str) -> Result<OwnedFd, String> {
    let exists = Path::new("/proc/self/net/dev_snmp6").join(name).exists();
    let name = CString::new(name).map_err(|error| error.to_string())?;
    match exists {
        true => tap::open(&name).map_err(|error| format!("tap {name:?}: {error}")),
        false => Err(format!("no tap {name:?}")),
    }
}

fn check_fields(method: &str, names: &[&str], body: &Value) -> Result<(), String> {
    let call = match names {
        ["snapshot", "load"] => "snapshot/load",
        _ => names[0],
    };
    let (_, due) = FIELDS
        .iter()
        .find(|(name, _)| *name == format!("{method} {call}"))
        .ok_or_else(|| format!("Invalid request method and/or path: {method} {call}"))?;
    let given = body.as_object().into_iter().flat_map(|body| body.keys().map(String::as_str));
    // Optional.
    let given: Vec<&str> = given.filter(|name| *name != "rate_limiter" || call != "drives").collect();
    // A map of serde_json is sorted.
    if given == *due { Ok(()) } else { Err(format!("the fields are {given:?} in place of {due:?}")) }
}

fn create(state: &State, snapshot: &str, memory: &str) -> Result<(), String> {
    if state.running != Some(false) {
        return Err("Cannot create a snapshot of a running VM".to_owned());
    }
    let drives: Vec<_> =
        state.drives.iter().map(|drive| json!([drive.id, drive.path, drive.read_only])).collect();
    let nics: Vec<_> = state.taps.keys().collect();
    let hotplug = state.hotplug.map(|hotplug| [hotplug.total, hotplug.requested]);
    let content = json!({
        "drives": drives, "vsock": state.vsock, "nics": nics, "memory": state.memory_mib, "hotplug": hotplug,
    });
    fs::write(snapshot, content.to_string()).map_err(|error| error.to_string())?;
    fs::write(memory, [vec![1; 4096], vec![0; 1 << 20]].concat()).map_err(|error| error.to_string())
}

fn load(state: &mut State, body: &Value) -> Result<(), String> {
    let content =
        fs::read(body["snapshot_path"].as_str().ok_or("no path")?).map_err(|error| error.to_string())?;
    let content: Value = serde_json::from_slice(&content).map_err(|error| error.to_string())?;
    let backend = &body["mem_backend"];
    if backend["backend_type"] != "File" {
        return Err("no file".to_owned());
    }
    let memory = fs::metadata(backend["backend_path"].as_str().unwrap_or_default());
    if memory.map_err(|error| error.to_string())?.len() == 0 {
        return Err("memory has no content".to_owned());
    }
    for drive in content["drives"].as_array().ok_or("no drives")? {
        let text = |at: usize| drive[at].as_str().unwrap_or_default();
        state.drives.push(Drive::open(text(0), text(1), drive[2].as_bool().unwrap_or_default())?);
    }
    for nic in content["nics"].as_array().ok_or("no interfaces")? {
        let overrides = body["network_overrides"].as_array().ok_or("no overrides")?;
        let of_nic = overrides.iter().find(|one| one["iface_id"] == *nic).ok_or("no such tap")?;
        let name = of_nic["host_dev_name"].as_str().unwrap_or_default().to_owned();
        let tap = open_tap(&name)?;
        state.taps.insert(nic.as_str().unwrap_or_default().to_owned(), (name, tap));
    }
    state.memory_mib = content["memory"].as_u64().ok_or("no memory")?;
    let hotplug = |at: usize| content["hotplug"][at].as_u64();
    state.hotplug = hotplug(0).zip(hotplug(1)).map(|(total, requested)| Hotplug { total, requested });
    state.vsock = content["vsock"].as_str().map(PathBuf::from);
    state.running = Some(false);
    Ok(())
}
