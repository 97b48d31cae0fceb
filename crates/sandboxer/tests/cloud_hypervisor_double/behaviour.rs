//! How a double differs from the VMM that it stands for. Kept beside its program, for a VMM is told nothing
//! else; in the file that is its guest's initramfs, for a jail has nothing else in it.

use std::{collections::BTreeMap, fs, path::Path};

use serde::{Deserialize, Serialize};

/// The file, which is the initramfs of [`Pod::halting_spec`](crate::test_guest::Pod::halting_spec).
const FILE: &str = "nothing";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Behaviour {
    /// Its version, as in "v53.0".
    pub version: String,
    /// What goes wrong with which call.
    pub faults: BTreeMap<String, Fault>,
    /// A call's status where another one is described.
    pub statuses: BTreeMap<String, u16>,
    /// A field of a type, and what it is called here.
    pub renamed: Option<(String, String, String)>,
}

/// What goes wrong with a call.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Fault {
    /// The VMM exits with this status, after these words.
    Exits(u8, String),
    /// No answer, ever.
    Silent,
    /// The connection is closed.
    Closes,
    /// These bytes are the whole answer.
    Says(String),
    /// A body of so many bytes.
    Huge(usize),
    /// This body, with the described status.
    Body(String),
    /// This status, with these words.
    Refuses(u16, String),
}

impl Behaviour {
    /// As the version would.
    pub fn of(version: &str) -> Self {
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

    pub fn with_renamed(mut self, of: &str, field: &str, to: &str) -> Self {
        self.renamed = Some((of.into(), field.into(), to.into()));
        self
    }

    /// First number of the version.
    pub fn major(&self) -> u32 {
        self.version.trim_start_matches('v').split('.').next().unwrap().parse().unwrap()
    }

    pub fn store(&self, dir: &Path) {
        fs::write(dir.join(FILE), serde_json::to_string(self).unwrap()).unwrap();
    }

    /// In the jail of another pod's VM there is none to see.
    pub fn load(dir: &Path) -> Self {
        match fs::read(dir.join(FILE)) {
            Ok(text) => serde_json::from_slice(&text).unwrap(),
            Err(_) => Self::of("v53.0"),
        }
    }
}
