//! The devices of the VM: added and removed while it runs.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    thread,
};

use serde_json::{Value, json};

use super::{Refusal, State, Vm, disks, refused};

/// A disk of the VM.
pub struct Disk {
    pub serial: String,
    pub read_only: bool,
    /// Read when it was opened, like a real disk, whose path is not needed afterwards.
    pub first_line: String,
    /// Open as long as the VM has the disk.
    _file: File,
}

impl Vm {
    pub(super) fn add_disk(&self, body: &Value) -> Result<Value, Refusal> {
        let mut state = self.running()?;
        let (id, disk) = open(body)?;
        let added = added(&mut state, &id)?;
        disks(state.config.as_mut().unwrap()).push(body.clone());
        state.disks.insert(id, disk);
        self.changed.notify_all();
        Ok(added)
    }

    pub(super) fn add_net(&self, body: &Value, passed: usize) -> Result<Value, Refusal> {
        let mut state = self.running()?;
        if let Some(mac) = body["mac"].as_str() {
            let bytes: Vec<_> = mac.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect();
            if bytes.len() != 6 || bytes.iter().any(Result::is_err) {
                return Err((400, format!("parsing of {mac} into a MAC address failed")));
            }
        }
        if body["num_queues"].as_u64().unwrap_or(2) != 2 * passed as u64 {
            return refused("The number of taps is not half the number of queues");
        }
        let added = added(&mut state, body["id"].as_str().unwrap_or("_net1"))?;
        let nics = &mut state.config.as_mut().unwrap()["net"];
        if nics.is_null() {
            *nics = json!([]);
        }
        nics.as_array_mut().unwrap().push(body.clone());
        Ok(added)
    }

    pub(super) fn remove(&self, body: &Value) -> Result<Value, Refusal> {
        let id = body["id"].as_str().unwrap_or_default().to_owned();
        let mut state = self.running()?;
        if !state.devices.contains(&id) || !state.leaving.insert(id.clone()) {
            return refused(&format!("Failed to find device corresponding to the given identifier: {id}"));
        }
        // The guest needs time.
        let vm = self.share();
        thread::spawn(move || vm.release(&id));
        Ok(Value::Null)
    }

    fn release(&self, id: &str) {
        let mut state = self.lock();
        state.devices.remove(id);
        state.leaving.remove(id);
        state.disks.remove(id);
        disks(state.config.as_mut().unwrap()).retain(|disk| disk["id"] != id);
        self.changed.notify_all();
        self.tell("vm", "device-removed", json!({ "id": id, "bdf": "0000:00:05.0" }));
    }
}

/// Opens a disk. Returns its name and content.
pub(super) fn open(disk: &Value) -> Result<(String, Disk), Refusal> {
    let Some(path) = disk["path"].as_str() else {
        return refused("No disk path was specified");
    };
    let file = File::open(path).map_err(|error| (500, format!("Cannot open disk path {path}: {error}")))?;
    let mut first_line = String::new();
    BufReader::new(&file).read_line(&mut first_line).map_err(|error| (500, error.to_string()))?;
    let text = |name: &str| disk[name].as_str().unwrap_or_default().to_owned();
    Ok((
        text("id"),
        Disk {
            serial: text("serial"),
            read_only: disk["readonly"] == true,
            first_line: first_line.trim_end().to_owned(),
            _file: file,
        },
    ))
}

pub(super) fn added(state: &mut State, id: &str) -> Result<Value, Refusal> {
    if !state.devices.insert(id.to_owned()) {
        return refused(&format!("Identifier {id} is not unique"));
    }
    Ok(json!({ "id": id, "bdf": format!("0000:00:{:02x}.0", state.devices.len()) }))
}
