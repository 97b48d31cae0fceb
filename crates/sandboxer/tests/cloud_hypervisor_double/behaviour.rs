//! How a double differs from the real VMM. The settings are beside its program, since a VMM receives nothing
//! else; and in its guest's initramfs, since a jail contains nothing else.

use std::{collections::BTreeMap, fs, path::Path};

use serde::{Deserialize, Serialize};

/// The file, which is the initramfs of [`Pod::halting_spec`](crate::test_guest::Pod::halting_spec).
const FILE: &str = "nothing";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Behaviour {
    /// The version of the double, as in "v53.0".
    pub version: String,
    /// The fault of a call.
    pub faults: BTreeMap<String, Fault>,
    /// A call's status in place of the described one.
    pub statuses: BTreeMap<String, u16>,
    /// A field of a type, and its name in this double.
    pub renamed: Option<(String, String, String)>,
}

/// The fault of a call.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Fault {
    /// The VMM exits with this status, after this output.
    Exits(u8, String),
    /// Never an answer.
    Silent,
    /// The connection is closed.
    Closes,
    /// The response is nothing but these bytes.
    Says(String),
    /// A body of this many bytes.
    Huge(usize),
    /// This body, with the described status.
    Body(String),
    /// This status, with this text.
    Refuses(u16, String),
}

impl Behaviour {
    /// Returns a refusal in the version's format.
    pub fn for_version(version: &str) -> Self {
        Self { version: version.into(), faults: BTreeMap::new(), statuses: BTreeMap::new(), renamed: None }
    }

    pub fn with_fault(mut self, call: &str, fault: Fault) -> Self {
        self.faults.insert(call.into(), fault);
        self
    }

    pub fn with_status(mut self, call: &str, status: u16) -> Self {
        self.statuses.insert(call.into(), status);
        self
    }

    pub fn with_renamed(mut self, kind: &str, field: &str, to: &str) -> Self {
        self.renamed = Some((kind.into(), field.into(), to.into()));
        self
    }

    /// Returns the major version.
    pub fn major(&self) -> u32 {
        self.version.trim_start_matches('v').split('.').next().unwrap().parse().unwrap()
    }

    pub fn store(&self, dir: &Path) {
        fs::write(dir.join(FILE), serde_json::to_string(self).unwrap()).unwrap();
    }

    /// Reads the settings; in the jail of another pod's VM there are none.
    pub fn load(dir: &Path) -> Self {
        match fs::read(dir.join(FILE)) {
            Ok(text) => serde_json::from_slice(&text).unwrap(),
            Err(_) => Self::for_version("v53.0"),
        }
    }
}
