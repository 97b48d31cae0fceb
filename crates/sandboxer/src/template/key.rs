//! The inputs of a template, and the name derived from them.

use std::{
    collections::HashMap,
    fmt,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use sandboxer_base::digest::{self, hex};
use sandboxer_vmm::{DiskLimits, TemplateInputs, VmSpec, Vmm};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{ScratchDisks, Shape, image::FORMAT};

/// Name of a template: the hash of its [`Inputs`], hex.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TemplateKey(String);

impl TemplateKey {
    /// Parses the output of `Display`.
    pub fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (text.len() == 32 && text.bytes().all(is_digit)).then(|| Self(text.to_owned()))
    }
}

impl fmt::Display for TemplateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<Path> for TemplateKey {
    fn as_ref(&self) -> &Path {
        self.0.as_ref()
    }
}

/// The inputs that a template depends on. A VM restored with other inputs would fail, or silently misbehave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inputs {
    /// Format version of the template's files.
    pub format: u32,
    /// Shape of the VM.
    pub shape: Shape,
    /// Inputs of the VMM.
    pub vmm: TemplateInputs,
    /// SHA-256 of the VMM's program.
    pub program: String,
    /// SHA-256 of the guest's kernel.
    pub kernel: String,
    /// SHA-256 of the guest's initramfs.
    pub initramfs: String,
    /// The scratch disk that the guest has mounted.
    pub scratch: Option<ScratchInput>,
    /// The host's CPU: model, microcode and features, as in `/proc/cpuinfo`.
    pub cpu: Vec<String>,
}

/// The properties of its guest's scratch disk that a template depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScratchInput {
    /// UUID of the file system that the guest has mounted, hex.
    pub uuid: String,
    /// Limits of the disk.
    pub limits: DiskLimits,
}

impl Inputs {
    /// Returns the template's name.
    pub fn key(&self) -> TemplateKey {
        let mut hash = Sha256::new();
        // A struct of plain values: its JSON never fails and is always the same.
        hash.update(serde_json::to_vec(self).unwrap_or_default());
        TemplateKey(hex(&hash.finalize()[..16]))
    }
}

/// The inputs of a template, and the state of the files when they were hashed.
#[derive(Debug, Clone)]
pub struct InputDigest {
    /// The inputs.
    pub inputs: Inputs,
    /// The program and the guest's files, as they were hashed.
    stamps: Vec<(PathBuf, Stamp)>,
}

impl InputDigest {
    /// Returns whether nothing has changed since, judging by file metadata. The host's CPU is not checked again: it
    /// changes with a reboot, or if microcode is loaded into a running kernel; the daemon must be restarted after that.
    pub fn is_current(&self, vmm: &dyn Vmm, spec: &VmSpec) -> bool {
        let now = |path: &Path| File::open(path).and_then(|file| Stamp::of(&file));
        vmm.template_inputs(spec) == self.inputs.vmm
            && self.stamps.iter().all(|(path, then)| now(path).is_ok_and(|now| now == *then))
    }
}

/// Collects inputs; a file that has not changed is not read again.
#[derive(Debug, Default)]
pub struct InputHasher {
    // A plain lock: held for a look-up or an insertion, not while a file is read.
    hashes: Mutex<HashMap<PathBuf, (Stamp, String)>>,
}

impl InputHasher {
    /// Returns the current inputs of a template of `spec`. Blocks while files are read.
    pub fn survey(
        &self,
        vmm: &dyn Vmm,
        spec: &VmSpec,
        scratch: Option<ScratchDisks>,
    ) -> Result<InputDigest, (PathBuf, io::Error)> {
        let of_vmm = vmm.template_inputs(spec);
        let cpuinfo = Path::new("/proc/cpuinfo");
        let mut stamps = Vec::new();
        let mut hash = |path: &Path| {
            let (stamp, hash) = self.hash(path)?;
            stamps.push((path.to_owned(), stamp));
            Ok(hash)
        };
        let inputs = Inputs {
            format: FORMAT,
            shape: spec.shape(),
            program: hash(&of_vmm.program)?,
            kernel: hash(&spec.kernel)?,
            initramfs: hash(&spec.initramfs)?,
            cpu: cpu(&fs::read_to_string(cpuinfo).map_err(|error| (cpuinfo.to_owned(), error))?),
            scratch: scratch
                .as_ref()
                .map(|disks| ScratchInput { uuid: disks.empty.uuid.clone(), limits: disks.limits }),
            vmm: of_vmm,
        };
        if let Some(ScratchDisks { empty, .. }) = scratch {
            let stamp = File::open(&empty.path).and_then(|file| Stamp::of(&file));
            stamps.push((empty.path.clone(), stamp.map_err(|error| (empty.path, error))?));
        }
        Ok(InputDigest { inputs, stamps })
    }

    fn hash(&self, path: &Path) -> Result<(Stamp, String), (PathBuf, io::Error)> {
        let failed = |error| (path.to_owned(), error);
        let hashes = || self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut file = File::open(path).map_err(failed)?;
        let stamp = Stamp::of(&file).map_err(failed)?;
        if let Some((known, hash)) = hashes().get(path)
            && *known == stamp
        {
            return Ok((stamp, hash.clone()));
        }
        let hash = digest::sha256(&mut file).map_err(failed)?;
        hashes().insert(path.to_owned(), (stamp, hash.clone()));
        Ok((stamp, hash))
    }
}

/// Metadata that changes when a file is replaced or written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp([u64; 5]);

impl Stamp {
    /// Returns the stamp of an open file.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        let ns = |seconds: i64, ns: i64| (seconds * 1_000_000_000 + ns).cast_unsigned();
        Ok(Self([
            meta.dev(),
            meta.ino(),
            meta.len(),
            ns(meta.mtime(), meta.mtime_nsec()),
            ns(meta.ctime(), meta.ctime_nsec()),
        ]))
    }
}

/// Returns the part of `/proc/cpuinfo` that a guest can see: the first CPU's model, microcode and features.
fn cpu(info: &str) -> Vec<String> {
    let first = info.split("\n\n").next().unwrap_or_default();
    let wanted = ["vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags"];
    let relevant = |line: &&str| line.split(':').next().is_some_and(|name| wanted.contains(&name.trim()));
    first.lines().filter(relevant).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_rate_of_a_processor_is_no_input_and_its_features_are() {
        let info = |mhz: &str, flags: &str| {
            format!(
                "processor\t: 0\nmodel name\t: X\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
            )
        };
        assert_eq!(cpu(&info("2000", "fpu")), cpu(&info("2001", "fpu")));
        assert_ne!(cpu(&info("2000", "fpu")), cpu(&info("2000", "fpu avx")));
    }

    #[test]
    fn a_file_replaced_by_one_of_the_same_length_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vmm");
        let surveyor = InputHasher::default();
        fs::write(&path, "one").unwrap();
        let first = surveyor.hash(&path).unwrap();
        assert_eq!(surveyor.hash(&path).unwrap(), first);
        fs::write(dir.path().join("new"), "two").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        assert_ne!(surveyor.hash(&path).unwrap(), first);
    }
}
