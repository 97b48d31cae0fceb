//! The VM that a double pretends to run: which call is possible when, and what it does.
//!
//! ```text
//!            create            boot              pause
//!   nothing ───────▶ created ───────▶ running ◀───────▶ paused ◀─── restore ── nothing
//!      ▲      delete    ▲   shutdown   │          resume    │
//!      └────────────────┴─────◀────────┴────────────────────┘
//! ```

mod devices;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Condvar, Mutex, MutexGuard, Weak, mpsc},
    thread::{self, JoinHandle},
};

use serde_json::{Value, json};

pub use self::devices::Disk;
use self::devices::open;
use super::{
    behaviour::Behaviour,
    description::Description,
    guest,
    http::{Answer, Request},
};

/// Bytes that a guest plugs and unplugs at once.
const BLOCK: u64 = 2 << 20;

#[derive(Default)]
struct State {
    /// As created, with what has been added since.
    config: Option<Value>,
    running: Option<bool>,
    devices: BTreeSet<String>,
    /// The disks that the guest was requested to release.
    leaving: BTreeSet<String>,
    disks: BTreeMap<String, Disk>,
    /// What the guest remembers: the only content of its memory.
    word: String,
    /// Threads that do nothing until they are dropped.
    vcpus: Vec<Vcpu>,
}

/// The VM, or none.
pub struct Vm {
    pub behaviour: Behaviour,
    description: Description,
    state: Mutex<State>,
    changed: Condvar,
    events: Mutex<File>,
    end: mpsc::Sender<ExitCode>,
    me: Weak<Vm>,
}

/// A call that is not possible: its status, and why.
type Refusal = (u16, String);

impl Vm {
    pub fn new(behaviour: Behaviour, events: File, end: mpsc::Sender<ExitCode>) -> Arc<Self> {
        let mut description = Description::published();
        if let Some((kind, field, to)) = &behaviour.renamed {
            description.rename(kind, field, to);
        }
        let vm = Arc::new_cyclic(|me| Self {
            behaviour,
            description,
            state: Mutex::default(),
            changed: Condvar::new(),
            events: Mutex::new(events),
            end,
            me: me.clone(),
        });
        vm.tell("vmm", "starting", Value::Null);
        vm
    }

    /// Ends the VMM.
    pub fn exit(&self, status: u8) {
        let _ = self.end.send(ExitCode::from(status));
    }

    /// Powers the guest off.
    pub fn power_off(&self) {
        self.tell("vm", "shutdown", Value::Null);
        self.exit(0);
    }

    /// Resets the guest. The real VMM would boot it again.
    pub fn reset(&self) {
        self.tell("vm", "rebooting", Value::Null);
    }

    /// Waits until the guest's disks are as expected.
    pub fn wait_for_disks<T>(&self, mut wanted: impl FnMut(&BTreeMap<String, Disk>) -> Option<T>) -> T {
        let mut state = self.lock();
        loop {
            if let Some(found) = wanted(&state.disks) {
                return found;
            }
            state = self.changed.wait(state).unwrap();
        }
    }

    /// Duplicates this, for a thread.
    fn share(&self) -> Arc<Self> {
        self.me.upgrade().unwrap()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn tell(&self, source: &str, event: &str, properties: Value) {
        let event = json!({
            "timestamp": { "secs": 0, "nanos": 1 }, "source": source, "event": event, "properties": properties,
        });
        // There may be no reader.
        let _ = write!(self.events.lock().unwrap(), "{event:#}\n\n");
    }

    /// Returns a refusal in the format of this version.
    pub fn refusal(&self, status: u16, why: &str) -> Answer {
        let body = match self.behaviour.major() {
            53.. => json!(["Error from API", why]),
            _ => json!(why),
        };
        Answer { status, body: Some(body) }
    }

    /// Answers a request, which must match the description.
    pub fn answer(&self, call: &str, request: &Request) -> Answer {
        let Some(described) = self.description.call(call) else {
            return self.refusal(404, "Not Found");
        };
        if request.method != described.method {
            return self.refusal(400, "Bad Request");
        }
        let body = match (&described.body, request.body.is_empty()) {
            (None, true) => Value::Null,
            (None, false) | (Some(_), true) => return self.refusal(400, "Bad Request"),
            (Some(kind), false) => {
                let body = serde_json::from_slice(&request.body).map_err(|error| error.to_string());
                match body.and_then(|body| self.description.check(kind, &body).map(|()| body)) {
                    Ok(body) => body,
                    Err(why) => return self.refusal(400, &format!("Failed to deserialize JSON: {why}")),
                }
            }
        };
        let answer = match self.perform(call, &body, request.passed.len()) {
            Ok(answer) => answer,
            Err((status, why)) => return self.refusal(status, &why),
        };
        let fine = described.statuses.iter().copied().find(|status| match answer {
            Value::Null => *status == 204,
            _ => *status == 200,
        });
        let mut status = fine.expect("a status is described for what happened");
        if call == "vmm.shutdown" {
            // A status other than the described one.
            status = 200;
        }
        if let Some(kind) = &described.answer
            && !answer.is_null()
        {
            self.description
                .check(kind, &renamed(&self.behaviour, kind, &answer))
                .expect("answers are as described");
        }
        let status = self.behaviour.statuses.get(call).copied().unwrap_or(status);
        let answer = match &described.answer {
            Some(kind) => renamed(&self.behaviour, kind, &answer),
            None => answer,
        };
        Answer { status, body: Some(answer).filter(|answer| !answer.is_null()) }
    }

    fn perform(&self, call: &str, body: &Value, passed: usize) -> Result<Value, Refusal> {
        match call {
            "vmm.ping" => Ok(json!({
                "build_version": self.behaviour.version,
                "version": format!("{}.0", self.behaviour.version.trim_start_matches('v')),
                "pid": std::process::id(),
                "features": ["kvm"],
            })),
            "vmm.shutdown" => self.delete(),
            "vm.info" => self.info(),
            "vm.create" => self.create(body),
            "vm.delete" => self.delete(),
            "vm.boot" => self.boot(),
            "vm.shutdown" => self.shutdown(),
            "vm.pause" => self.let_run(false),
            "vm.resume" => self.let_run(true),
            "vm.resize" => self.resize(body),
            "vm.resize-zone" => self.resize_zone(body),
            "vm.snapshot" => self.snapshot(body),
            "vm.restore" => self.restore(body, passed),
            "vm.add-disk" => self.add_disk(body),
            "vm.add-net" => self.add_net(body, passed),
            "vm.remove-device" => self.remove(body),
            other => panic!("{other} is described and not done"),
        }
    }

    /// Returns the state of a VM that has booted.
    fn running(&self) -> Result<MutexGuard<'_, State>, Refusal> {
        let state = self.created()?;
        match state.running {
            Some(_) => Ok(state),
            None => Err((405, "VM is not running".into())),
        }
    }

    fn created(&self) -> Result<MutexGuard<'_, State>, Refusal> {
        let state = self.lock();
        let missing = match self.behaviour.major() {
            53.. => 404,
            _ => 500,
        };
        match state.config {
            Some(_) => Ok(state),
            None => Err((missing, "VM is not created".into())),
        }
    }

    fn create(&self, config: &Value) -> Result<Value, Refusal> {
        let mut state = self.lock();
        if state.config.is_some() {
            return refused("VM is already created");
        }
        let vcpus = |name: &str| config["cpus"][name].as_u64().unwrap_or(1);
        if vcpus("boot_vcpus") > vcpus("max_vcpus") {
            return refused("Max CPUs lower than boot");
        }
        if !zones(config).is_empty() && config["memory"]["size"] != 0 {
            return refused("Memory size and zones");
        }
        let grows = |zone: &Value| zone["hotplug_size"].is_u64();
        if zones(config).iter().any(grows) && config["memory"]["hotplug_method"] != "VirtioMem" {
            return refused("Invalid to set ACPI hotplug method for memory zones");
        }
        if config["serial"]["mode"] == "Tty" && config["console"]["mode"] == "Tty" {
            return refused("Two consoles on one terminal");
        }
        state.config = Some(config.clone());
        Ok(Value::Null)
    }

    fn boot(&self) -> Result<Value, Refusal> {
        self.tell("vm", "booting", Value::Null);
        let mut state = self.created()?;
        if state.running.is_some() {
            return refused("VM is already created");
        }
        let config = state.config.clone().unwrap();
        for file in ["kernel", "initramfs"] {
            if let Some(path) = config["payload"][file].as_str() {
                File::open(path).map_err(|error| (500, format!("Cannot open {file} {path}: {error}")))?;
            }
        }
        self.run(&mut state, true)?;
        self.tell("vm", "booted", Value::Null);
        Ok(Value::Null)
    }

    /// Starts the guest.
    fn run(&self, state: &mut State, running: bool) -> Result<(), Refusal> {
        for zone in zones(state.config.as_ref().unwrap()) {
            let Some(path) = zone["file"].as_str() else { continue };
            // Older versions open it for writing, whether they write or not.
            let file = File::options().read(true).write(true).open(path);
            let length = file.and_then(|file| file.metadata()).map(|meta| meta.len());
            if length.map_err(|error| (500, error.to_string()))? < zone["size"].as_u64().unwrap() {
                return refused("The file of a memory zone is too short");
            }
        }
        for disk in disks(state.config.as_mut().unwrap()).clone() {
            let (id, disk) = open(&disk)?;
            state.devices.insert(id.clone());
            state.disks.insert(id, disk);
        }
        if let Some(socket) = state.config.as_ref().unwrap()["vsock"]["socket"].as_str() {
            state.devices.insert("_vsock0".into());
            guest::start(Path::new(socket), self.share()).map_err(|error| (500, error.to_string()))?;
        }
        state.running = Some(running);
        run_vcpus(state);
        Ok(())
    }

    fn shutdown(&self) -> Result<Value, Refusal> {
        let mut state = self.running()?;
        if let Some(socket) = state.config.as_ref().unwrap()["vsock"]["socket"].as_str() {
            fs::remove_file(socket).map_err(|error| (500, error.to_string()))?;
        }
        *state = State { config: state.config.take(), ..State::default() };
        self.tell("vm", "shutdown", Value::Null);
        Ok(Value::Null)
    }

    fn delete(&self) -> Result<Value, Refusal> {
        if self.running().is_ok() {
            self.shutdown()?;
        }
        *self.lock() = State::default();
        Ok(Value::Null)
    }

    fn let_run(&self, run: bool) -> Result<Value, Refusal> {
        let mut state = self.running()?;
        if state.running == Some(run) {
            return refused("Invalid transition");
        }
        state.running = Some(run);
        Ok(Value::Null)
    }

    fn info(&self) -> Result<Value, Refusal> {
        let state = self.created()?;
        let nodes = state.devices.iter().map(|id| (id.clone(), json!({ "id": id }))).collect();
        let mut info = json!({
            "config": state.config,
            "state": match state.running {
                None => "Created",
                Some(true) => "Running",
                Some(false) => "Paused",
            },
            "memory_actual_size": memory_bytes(state.config.as_ref().unwrap()),
        });
        if state.running.is_some() {
            info["device_tree"] = Value::Object(nodes);
        }
        Ok(info)
    }

    fn resize(&self, wanted: &Value) -> Result<Value, Refusal> {
        let mut state = self.created()?;
        let Some(desired) = wanted["desired_vcpus"].as_u64() else { return Ok(Value::Null) };
        let cpus = &mut state.config.as_mut().unwrap()["cpus"];
        if desired > cpus["max_vcpus"].as_u64().unwrap() {
            return refused("Requested vCPUs exceed maximum");
        }
        // The guest follows at once.
        cpus["boot_vcpus"] = desired.into();
        run_vcpus(&mut state);
        Ok(Value::Null)
    }

    /// Returns the vCPUs that the guest has.
    pub fn vcpus(&self) -> usize {
        self.lock().vcpus.len()
    }

    fn resize_zone(&self, wanted: &Value) -> Result<Value, Refusal> {
        let mut state = self.running()?;
        let zones = state.config.as_mut().unwrap()["memory"]["zones"].as_array_mut();
        let zone = zones.into_iter().flatten().find(|zone| zone["id"] == wanted["id"]);
        let Some(zone) = zone else { return refused("Could not find the memory zone") };
        let bytes = |zone: &Value, name: &str| zone[name].as_u64().unwrap_or_default();
        let Some(growth) = bytes(wanted, "desired_ram").checked_sub(bytes(zone, "size")) else {
            return refused("Below the size at boot");
        };
        if growth > bytes(zone, "hotplug_size") || growth % BLOCK != 0 {
            return refused("Above the region's size, or not aligned");
        }
        if growth == bytes(zone, "hotplugged_size") {
            return refused("new size and requested_size are identical");
        }
        // The guest follows at once.
        zone["hotplugged_size"] = growth.into();
        Ok(Value::Null)
    }

    /// Returns the memory that the guest has, MiB.
    pub fn memory_mib(&self) -> u64 {
        memory_bytes(self.lock().config.as_ref().unwrap()) >> 20
    }

    pub fn remember(&self, word: &str) {
        self.lock().word = word.to_owned();
    }

    pub fn recall(&self) -> String {
        self.lock().word.clone()
    }

    fn snapshot(&self, body: &Value) -> Result<Value, Refusal> {
        let state = self.running()?;
        if state.running == Some(true) {
            return refused("Trying to snapshot while VM is running");
        }
        let dir = directory(&body["destination_url"])?;
        let mut config = state.config.clone().unwrap();
        let in_files = |zone: &Value| zone["file"].is_string() && zone["shared"] == true;
        let in_ranges = zones(&config).is_empty() || !zones(&config).iter().all(in_files);
        let (ranges, mappings) = layout(&config);
        let of_memory = json!({
            "memory_ranges": { "data": if in_ranges { ranges } else { Vec::new() } },
            "guest_ram_mappings": mappings,
        });
        let of_memory = json!({ "snapshots": {}, "snapshot_data": { "state": of_memory.to_string() } });
        let of_vm = json!({ "snapshots": { "memory-manager": of_memory }, "snapshot_data": null });
        for nic in config.get_mut("net").and_then(Value::as_array_mut).into_iter().flatten() {
            nic["fds"] = json!([77]);
        }
        let create = |name: &str, content: &str| {
            let file = File::options().write(true).create_new(true).open(dir.join(name));
            file.and_then(|mut file| file.write_all(content.as_bytes()).map(|()| file))
                .map_err(|error| (500, error.to_string()))
        };
        create("config.json", &config.to_string())?;
        create("state.json", &of_vm.to_string())?;
        if in_ranges {
            let memory = create("memory-ranges", &format!("{}\n", state.word))?;
            memory.set_len(memory_bytes(&config)).map_err(|error| (500, error.to_string()))?;
        }
        Ok(Value::Null)
    }

    fn restore(&self, body: &Value, passed: usize) -> Result<Value, Refusal> {
        let mut state = self.lock();
        if state.config.is_some() {
            return Err((404, "VM is already created".into()));
        }
        let dir = directory(&body["source_url"])?;
        let parse = |text: &[u8]| -> Result<Value, Refusal> {
            serde_json::from_slice(text).map_err(|error| (500, error.to_string()))
        };
        let read = |file| parse(&fs::read(dir.join(file)).map_err(|error| (500, error.to_string()))?);
        let (mut config, frozen) = (read("config.json")?, read("state.json")?);
        let of_memory = &frozen["snapshots"]["memory-manager"]["snapshot_data"]["state"];
        let of_memory = parse(of_memory.as_str().unwrap_or_default().as_bytes())?;
        if of_memory["memory_ranges"]["data"] != json!([]) {
            File::open(dir.join("memory-ranges")).map_err(|error| (500, error.to_string()))?;
        }
        let nics = config.get_mut("net").and_then(Value::as_array_mut);
        let nics: Vec<_> =
            nics.into_iter().flatten().map(|nic| (nic["id"].clone(), nic["fds"].take())).collect();
        let given = body["net_fds"].as_array().map(Vec::as_slice).unwrap_or_default();
        let fits = |((id, fds), given): (&(Value, Value), &Value)| {
            *id == given["id"] && given["num_fds"] == fds.as_array().map_or(0, Vec::len)
        };
        if given.len() != nics.len() || passed != nics.len() || !nics.iter().zip(given).all(fits) {
            return refused("The snapshot has other network cards");
        }
        for nic in config.get_mut("net").and_then(Value::as_array_mut).into_iter().flatten() {
            nic.as_object_mut().unwrap().remove("fds");
        }
        let mappings = of_memory["guest_ram_mappings"].as_array().map(Vec::as_slice).unwrap_or_default();
        let of_zones = zones(&config);
        if mappings.iter().any(|mapping| of_zones.iter().all(|zone| zone["id"] != mapping["zone_id"])) {
            return refused("Memory of an unknown zone");
        }
        if let Some(path) = of_zones.first().and_then(|zone| zone["file"].as_str()) {
            let file = File::open(path).map_err(|error| (500, error.to_string()))?;
            let at = mappings.first().and_then(|mapping| mapping["file_offset"].as_u64()).unwrap_or_default();
            let mut start = [0; 64];
            let read = file.read_at(&mut start, at).map_err(|error| (500, error.to_string()))?;
            let line = start[..read].split(|&byte| byte == b'\n' || byte == 0).next().unwrap_or_default();
            state.word = String::from_utf8_lossy(line).into_owned();
        }
        state.config = Some(config);
        self.run(&mut state, false)?;
        Ok(Value::Null)
    }
}

/// Returns the parts of a VM's memory as the VMM writes them, and where they are.
fn layout(config: &Value) -> (Vec<Value>, Vec<Value>) {
    let (mut ranges, mut mappings) = (Vec::new(), Vec::new());
    let of_memory = json!([{ "id": "mem0", "size": config["memory"]["size"] }]);
    let zones = match zones(config) {
        [] => of_memory.as_array().unwrap(),
        zones => zones,
    };
    for zone in zones {
        let mapping = |gpa: u64, size: &Value, virtio_mem: bool| json!({ "slot": 0, "gpa": gpa, "size": size, "zone_id": zone["id"], "virtio_mem": virtio_mem, "file_offset": 0 });
        if zone["hotplug_size"].is_u64() {
            mappings.push(mapping(1 << 40, &zone["hotplug_size"], true));
        }
        if let Some(plugged @ 1..) = zone["hotplugged_size"].as_u64() {
            ranges.push(json!({ "gpa": 1_u64 << 40, "length": plugged }));
        }
        mappings.insert(0, mapping(0, &zone["size"], false));
        ranges.push(json!({ "gpa": 0, "length": zone["size"] }));
    }
    (ranges, mappings)
}

fn refused<T>(why: &str) -> Result<T, Refusal> {
    Err((500, why.to_owned()))
}

/// Returns the memory that a guest has, bytes.
fn memory_bytes(config: &Value) -> u64 {
    let bytes = |object: &Value, name: &str| object[name].as_u64().unwrap_or_default();
    let zones = zones(config).iter().map(|zone| bytes(zone, "size") + bytes(zone, "hotplugged_size"));
    bytes(&config["memory"], "size") + zones.sum::<u64>()
}

/// Returns the parts of the memory.
fn zones(config: &Value) -> &[Value] {
    config["memory"]["zones"].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Returns the descriptions of all disks.
fn disks(config: &mut Value) -> &mut Vec<Value> {
    let disks = &mut config["disks"];
    if disks.is_null() {
        *disks = json!([]);
    }
    disks.as_array_mut().unwrap()
}

fn directory(url: &Value) -> Result<PathBuf, Refusal> {
    let path = url.as_str().and_then(|url| url.strip_prefix("file://"));
    let path = path.map(PathBuf::from).filter(|path| path.is_dir());
    path.ok_or_else(|| (500, format!("{url} is no directory")))
}

/// Returns `answer`, with its outermost field renamed as in this double.
fn renamed(behaviour: &Behaviour, kind: &str, answer: &Value) -> Value {
    let mut answer = answer.clone();
    if let Some((renamed_kind, field, to)) = &behaviour.renamed
        && renamed_kind == kind
        && let Some(value) = answer.as_object_mut().and_then(|fields| fields.remove(field))
    {
        answer[to] = value;
    }
    answer
}

/// A thread that ends when this is dropped.
struct Vcpu(Option<(mpsc::Sender<()>, JoinHandle<()>)>);

impl Vcpu {
    fn start(number: usize) -> Self {
        let (life, end) = mpsc::channel();
        let (begun, named) = mpsc::channel();
        let run = move || {
            begun.send(()).unwrap();
            let _ = end.recv();
        };
        let thread = thread::Builder::new().name(format!("vcpu{number}")).spawn(run).unwrap();
        // Threads are counted by their names, which they give themselves.
        named.recv().unwrap();
        Self(Some((life, thread)))
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        if let Some((life, thread)) = self.0.take() {
            drop(life);
            thread.join().unwrap();
        }
    }
}

/// Starts and ends threads until there is one for each vCPU.
fn run_vcpus(state: &mut State) {
    let count = state.config.as_ref().unwrap()["cpus"]["boot_vcpus"].as_u64().unwrap() as usize;
    state.vcpus.truncate(count);
    while state.vcpus.len() < count {
        state.vcpus.push(Vcpu::start(state.vcpus.len()));
    }
}
