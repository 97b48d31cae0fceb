//! What a checkpoint holds: the file `checkpoint.json`.
//!
//! The file's first line has the version of the format and the SHA-256 of the rest, which is the manifest. So a later daemon's
//! checkpoint is refused by its version, whatever else has changed.

use std::{collections::BTreeMap, path::Path};

use sandboxer_base::digest::hex;
use sandboxer_protocol::{
    id::{ContainerId, Id, SandboxId},
    link::LinkKey,
};
use sandboxer_vmm::{DiskRecord, MEMORY, Shape};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::template::{Inputs, pages::Checksum};

/// Version of the format of checkpoints.
pub const FORMAT: u32 = 1;
/// Names of the files that VMMs write beside the memory.
const OF_VMMS: [&str; 3] = ["state", "state.json", "config.json"];
/// Maximum size of one of them in an archive, bytes.
const MAX_STATE: u64 = 256 << 20;
/// Maximum size of a disk in an archive, bytes: that of a configured one.
const MAX_DISK: u64 = 16 << 40;

/// The manifest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The checkpoint's name.
    pub name: Id,
    /// Namespace of the pod, the only one in which the checkpoint can be restored.
    pub namespace: Id,
    /// The pod's sandbox id.
    pub pod: SandboxId,
    /// The pod's name in Kubernetes.
    pub pod_name: String,
    /// Time at which the pod was paused, ns since 1970.
    pub made_at_ns: u64,
    /// How long the pod was paused, ns.
    pub paused_ns: u64,
    /// What the VM depends on.
    pub inputs: Inputs,
    /// Key of the link to the agent, until a copy gets its own.
    pub link_key: LinkKey,
    /// Whether the containers share a PID namespace.
    pub shared_pids: bool,
    /// The VM's disks, in the order in which a copy begins with them.
    pub disks: Vec<SavedDisk>,
    /// Whether no container uses the scratch disk that the guest had from the beginning.
    pub has_spare: bool,
    /// The pod's containers.
    pub containers: Vec<SavedContainer>,
    /// The pod's volumes.
    pub volumes: BTreeMap<Id, VolumeKind>,
    /// Checksums of the other files, by name.
    pub files: BTreeMap<String, Checksum>,
}

/// Where a volume's content is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeKind {
    /// Files of the host, of which a copy of the pod gets those of its own.
    Files,
    /// The guest's memory.
    Memory,
    /// A disk.
    Disk,
}

/// A disk of a saved VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedDisk {
    /// Name by which the guest finds the disk.
    pub serial: String,
    /// Whether the guest cannot write to the disk.
    pub read_only: bool,
}

/// Returns the name of the file with a disk's content.
pub fn disk_file(serial: &str) -> String {
    format!("disk-{serial}")
}

/// A container of a saved pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedContainer {
    /// The container's id in the saved guest.
    pub id: ContainerId,
    /// By what a container of a new pod is recognised as this one.
    pub identity: Identity,
    /// Whether the process has stdin, stdout and stderr, and whether they are a terminal.
    pub stdio: [bool; 4],
    /// The container's disks.
    pub disks: Vec<DiskRecord>,
    /// The guest's paths of the volumes that the container has, by where they are mounted in it.
    pub volumes: BTreeMap<String, String>,
}

/// What a container is to its author: what a container of a new pod must have in common with the saved one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The container's name in its pod.
    pub name: String,
    /// The image's name.
    pub image: String,
    /// The image's digest, if containerd told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Command and arguments.
    pub args: Vec<String>,
    /// Working directory.
    pub cwd: String,
    /// User and group.
    pub user: [u32; 2],
}

impl Identity {
    /// Returns in words how `other` differs from this container; `None`: it does not.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let Self { name: _, image, digest, args, cwd, user } = self;
        let differs =
            |what: &str, is: String, was: String| Some(format!("its {what} is {is}, and was {was}"));
        match (digest, &other.digest) {
            (Some(was), Some(is)) if was != is => {
                return differs(&format!("image {}", other.image), is.clone(), was.clone());
            }
            // An image may have several names.
            (Some(_), Some(_)) => {}
            _ if *image != other.image => return differs("image", other.image.clone(), image.clone()),
            _ => {}
        }
        if *args != other.args {
            return differs("command", format!("{:?}", other.args), format!("{args:?}"));
        }
        if *cwd != other.cwd {
            return differs("working directory", other.cwd.clone(), cwd.clone());
        }
        if *user != other.user {
            return differs("user", format!("{:?}", other.user), format!("{user:?}"));
        }
        None
    }
}

impl Manifest {
    /// Returns the size of the VM.
    pub fn shape(&self) -> Shape {
        self.inputs.shape
    }

    /// Returns the bytes that the checkpoint's own files take.
    pub fn stored_bytes(&self) -> u64 {
        self.files.values().map(|file| file.stored).sum()
    }

    /// Returns why a VM of `now` cannot go on where the saved one was; `None`: it can.
    pub fn misfit(&self, now: &Inputs) -> Option<String> {
        let then = &self.inputs;
        let vmms = [(&then.vmm.vmm, &now.vmm.vmm), (&then.vmm.version, &now.vmm.version)];
        let differs = |what: &str, then: &str, now: &str| {
            Some(format!("it was made with {what} {then}, and here is {now}"))
        };
        if then.shape != now.shape {
            return differs("a VM of", &then.shape.to_string(), &now.shape.to_string());
        }
        if let Some((then, now)) = vmms.into_iter().find(|(then, now)| then != now) {
            return differs("VMM", then, now);
        }
        if then.vmm.accelerator != now.vmm.accelerator {
            return differs("accelerator", &then.vmm.accelerator, &now.vmm.accelerator);
        }
        let hashes = [
            ("another build of the VMM", &then.program, &now.program),
            ("another guest kernel", &then.kernel, &now.kernel),
        ];
        if let Some((what, ..)) = hashes.into_iter().find(|(_, then, now)| then != now) {
            return Some(format!("it was made with {what}"));
        }
        (then.cpu != now.cpu).then(|| "it was made on another processor".to_owned())
    }

    /// Returns the text of the manifest's file.
    pub fn to_text(&self) -> serde_json::Result<Vec<u8>> {
        let manifest = serde_json::to_vec(self)?;
        let header = Header { format: FORMAT, sha256: hex(&Sha256::digest(&manifest)) };
        let mut text = serde_json::to_vec(&header)?;
        text.push(b'\n');
        text.extend(manifest);
        Ok(text)
    }

    /// Parses the text of the manifest of the checkpoint in `dir`, or returns what is wrong with it.
    pub fn parse(text: &[u8], dir: &Path) -> Result<Self, String> {
        let manifest = Self::parse_foreign(text)?;
        let named = dir.file_name().is_some_and(|name| name == manifest.name.as_str())
            && dir.parent().and_then(Path::file_name).is_some_and(|of| of == manifest.namespace.as_str());
        match named {
            true => Ok(manifest),
            false => Err(format!("its manifest is that of {}/{}", manifest.namespace, manifest.name)),
        }
    }

    /// Parses the text of the manifest of a checkpoint that is elsewhere, or returns what is wrong with it.
    pub fn parse_foreign(text: &[u8]) -> Result<Self, String> {
        let line = text.iter().position(|&byte| byte == b'\n').unwrap_or(text.len());
        let header: Header = serde_json::from_slice(&text[..line])
            .map_err(|error| format!("its manifest is damaged: {error}"))?;
        if header.format != FORMAT {
            return Err(format!("its format is {}, this daemon knows {FORMAT}", header.format));
        }
        let rest = text.get(line + 1..).unwrap_or_default();
        if hex(&Sha256::digest(rest)) != header.sha256 {
            return Err("its manifest is damaged: checksum mismatch".to_owned());
        }
        let manifest: Self =
            serde_json::from_slice(rest).map_err(|error| format!("its manifest is damaged: {error}"))?;
        if let Some(name) = manifest.files.keys().find(|name| name.parse::<Id>().is_err()) {
            return Err(format!("its manifest has the file name {name:?}, which is not allowed"));
        }
        Ok(manifest)
    }

    /// Returns what no checkpoint of this program has; `None`: there is nothing. An archive may be anybody's.
    pub fn oddity(&self) -> Option<String> {
        let disks: Vec<String> = self.disks.iter().map(|disk| disk_file(&disk.serial)).collect();
        let mut expected = disks.iter().map(String::as_str).chain([MEMORY]);
        if let Some(missing) = expected.find(|name| !self.files.contains_key(*name)) {
            return Some(format!("it has no file {missing:?}"));
        }
        // Their paths on this host follow from the serial numbers.
        let of_containers = self.containers.iter().flat_map(|container| &container.disks);
        let is_known = |serial: &str| self.disks.iter().any(|disk| disk.serial == serial);
        if let Some(unknown) = of_containers.map(|disk| &disk.serial).find(|serial| !is_known(serial)) {
            return Some(format!("a container has a disk {unknown:?}, which is not among the VM's"));
        }
        self.files.iter().find_map(|(name, Checksum { bytes, stored, .. })| {
            let most = match name.as_str() {
                MEMORY => self.shape().memory_mib.saturating_mul(1 << 20),
                name if OF_VMMS.contains(&name) => MAX_STATE,
                _ if disks.contains(name) => MAX_DISK,
                _ => return Some(format!("it has a file {name:?}, which is not known")),
            };
            let fits = *bytes <= most && stored <= bytes;
            (!fits).then(|| format!("its file {name:?} has {bytes} bytes, at most {most} are expected"))
        })
    }

    /// Makes the manifest that of a copy of the checkpoint under another name.
    pub fn move_to(&mut self, namespace: &Id, name: &Id, dir: &Path) {
        (self.namespace, self.name) = (namespace.clone(), name.clone());
        for disk in self.containers.iter_mut().flat_map(|container| &mut container.disks) {
            disk.path = dir.join(disk_file(&disk.serial));
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: u32,
    /// SHA-256 of the manifest's text.
    sha256: String,
}
