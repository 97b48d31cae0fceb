//! Parses the mounts of a snapshot into the disks they need. Accesses no file.
//!
//! The last mount is the root file system; those before it are inputs of its templates (`{{ mount 0 }}`,
//! `{{ overlay 1 3 }}`), as in containerd's mount manager.

mod template;

use std::path::{Component, Path, PathBuf};

use self::template::{Input, Inputs};
use super::{FsType, Mount};

/// Prefixes for containerd's mount manager, which fills in templates or creates directories.
const TRANSFORMS: [&str; 2] = ["format/", "mkdir/"];
/// Options of an overlay that do not change what is read through it.
const WITHOUT_EFFECT: [&str; 12] = [
    "ro",
    "rw",
    "index",
    "volatile",
    "nfs_export",
    "uuid",
    "xino",
    "fsync",
    "noatime",
    "relatime",
    "nodiratime",
    "workdir",
];
/// Options of an overlay that change how its layers are read.
const OF_THE_VIEW: [&str; 2] = ["redirect_dir", "metacopy"];

/// The disks that a snapshot needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Read-only layers, uppermost first.
    pub lower: Vec<Lower>,
    /// The writable part.
    pub writable: WantedWritable,
}

/// A read-only layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lower {
    /// A file system image or device, used as it is.
    Image {
        /// File or device.
        path: PathBuf,
        /// The file system on it.
        fstype: FsType,
    },
    /// Committed layers, which never change: their merged view becomes one image that containers share.
    Chain(Chain),
    /// A snapshot's own directory, above its parents, with overlay's whiteouts; mostly empty.
    Upper(PathBuf),
    /// A directory with a whole root file system, for this container only.
    Directory(PathBuf),
}

/// Layers that overlayfs merges.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Chain {
    /// The layers, uppermost first; at least one.
    pub dirs: Vec<PathBuf>,
    /// Mount options that change the merged view.
    pub options: Vec<String>,
}

/// The writable part of a root file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WantedWritable {
    /// Guest memory.
    Memory,
    /// A file with an ext4 file system, created with this size if it does not exist.
    Scratch {
        /// The file.
        path: PathBuf,
        /// The size of the file system, bytes.
        size: u64,
    },
    /// The disk with the whole root file system.
    Whole {
        /// File or device.
        path: PathBuf,
    },
}

/// A mount that cannot become a disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("mount {index} of type {fstype:?} {reason}")]
pub struct Refusal {
    /// The index of the mount, from 0.
    pub index: usize,
    /// The type of the mount.
    pub fstype: String,
    /// The reason, and what to do.
    pub reason: String,
}

/// Parses a snapshot's mounts.
pub fn read(mounts: &[Mount]) -> Result<Wanted, Refusal> {
    let Some((root, before)) = mounts.split_last() else {
        return Err(Refusal {
            index: 0,
            fstype: String::new(),
            reason: "is missing: containerd passed no mounts, so there is no snapshot to boot from".into(),
        });
    };
    let mut inputs = Inputs { all: Vec::new(), used: vec![false; before.len()] };
    for (index, mount) in before.iter().enumerate() {
        inputs.all.push(input(mount).map_err(|reason| refusal(index, mount, reason))?);
    }
    let wanted = read_root(root, &mut inputs).map_err(|reason| refusal(before.len(), root, reason))?;
    match inputs.used.iter().position(|used| !used) {
        Some(index) => Err(refusal(index, &before[index], "is referred to by no other mount".into())),
        None => Ok(wanted),
    }
}

fn refusal(index: usize, mount: &Mount, reason: String) -> Refusal {
    Refusal { index, fstype: mount.fstype.clone(), reason }
}

fn unsupported() -> String {
    "is not supported: use one of the snapshotters overlayfs, native, erofs, blockfile, devmapper (with ext4)"
        .into()
}

/// Parses a mount before the last.
fn input(mount: &Mount) -> Result<Input, String> {
    match mount.fstype.as_str() {
        "erofs" | "ext4" => image(mount).map(|(path, fstype)| Input::Image { path, fstype }),
        "mkfs/ext4" => scratch(mount),
        _ => Err(unsupported()),
    }
}

fn read_root(mount: &Mount, inputs: &mut Inputs) -> Result<Wanted, String> {
    let memory = WantedWritable::Memory;
    match plain_type(&mount.fstype) {
        "overlay" => overlay(mount, inputs),
        "bind" => {
            refuse_id_maps(mount)?;
            let lower = match inputs.images(&mount.source)? {
                Some(images) => images,
                None => vec![Lower::Directory(absolute(&mount.source)?)],
            };
            Ok(Wanted { lower, writable: memory })
        }
        "erofs" | "ext4" => {
            let (path, fstype) = image(mount)?;
            if fstype == FsType::Erofs || mount.options.iter().any(|option| option == "ro") {
                Ok(Wanted { lower: vec![Lower::Image { path, fstype }], writable: memory })
            } else {
                Ok(Wanted { lower: Vec::new(), writable: WantedWritable::Whole { path } })
            }
        }
        _ => Err(unsupported()),
    }
}

fn plain_type(mut fstype: &str) -> &str {
    while let Some(rest) = TRANSFORMS.iter().find_map(|prefix| fstype.strip_prefix(prefix)) {
        fstype = rest;
    }
    fstype
}

fn overlay(mount: &Mount, inputs: &mut Inputs) -> Result<Wanted, String> {
    refuse_id_maps(mount)?;
    let (mut lower, mut upper, mut writable) = (None, None, WantedWritable::Memory);
    let mut view = Vec::new();
    for option in &mount.options {
        let (key, value) = option.split_once('=').unwrap_or((option, ""));
        match key {
            "lowerdir" => lower = Some(value),
            "upperdir" => match inputs.scratch(value)? {
                Some(scratch) => writable = scratch,
                None => upper = Some(Lower::Upper(absolute(&unescaped(value))?)),
            },
            _ if OF_THE_VIEW.contains(&key) => view.push(option.clone()),
            _ if WITHOUT_EFFECT.contains(&key) || key.starts_with("X-containerd.mkdir.") => {}
            _ => return Err(format!("has option {option:?}, which is not supported: leave it out")),
        }
    }
    let lower = lower.ok_or("has no lowerdir: there is nothing to boot from")?;
    let mut layers = Vec::from_iter(upper);
    match inputs.images(lower)? {
        Some(images) => layers.extend(images),
        None => {
            let dirs = split_unescaped(lower).iter().map(|dir| absolute(dir)).collect::<Result<_, _>>()?;
            layers.push(Lower::Chain(Chain { dirs, options: view }));
        }
    }
    Ok(Wanted { lower: layers, writable })
}

fn refuse_id_maps(mount: &Mount) -> Result<(), String> {
    match mount.options.iter().any(|option| option.starts_with("uidmap=") || option.starts_with("gidmap=")) {
        true => {
            Err("has mapped user ids, which are not supported: give the pod the host's (hostUsers: true); \
                     its VM keeps it apart already"
                .into())
        }
        false => Ok(()),
    }
}

/// Returns the path of an image and its file system.
fn image(mount: &Mount) -> Result<(PathBuf, FsType), String> {
    for option in &mount.options {
        if option.starts_with("device=") {
            return Err("has its data in other files (device=…), which is not supported: turn off merged \
                        metadata in the erofs snapshotter (max_unmerged_layers = 0)"
                .into());
        }
        if option.starts_with("X-containerd.dmverity") {
            return Err(
                "asks for dm-verity, which is not supported: turn it off in the erofs snapshotter".into()
            );
        }
    }
    let fstype = if mount.fstype == "erofs" { FsType::Erofs } else { FsType::Ext4 };
    Ok((absolute(&mount.source)?, fstype))
}

/// Parses a writable file that is created at its first use.
fn scratch(mount: &Mount) -> Result<Input, String> {
    let mut size = None;
    for option in &mount.options {
        match option.strip_prefix("X-containerd.mkfs.").and_then(|option| option.split_once('=')) {
            Some(("size", value)) => {
                size = Some(bytes(value).ok_or_else(|| format!("has no usable size {value:?}"))?);
            }
            Some(("fs", "ext4")) | None => {}
            Some((key, value)) => return Err(format!("asks for {key}={value}, which is not supported")),
        }
    }
    let size = size.ok_or("has no X-containerd.mkfs.size")?;
    Ok(Input::Scratch { path: absolute(&mount.source)?, size })
}

/// Parses a size such as `64MiB`, `1g` or `1048576`; units are powers of 1024.
fn bytes(text: &str) -> Option<u64> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().trim_end_matches('b').trim_end_matches('i') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|&size| size > 0)
}

fn absolute(path: &str) -> Result<PathBuf, String> {
    let plain = Path::new(path);
    let climbs = plain.components().any(|part| part == Component::ParentDir);
    if plain.is_absolute() && !climbs && !path.contains("{{") {
        Ok(plain.to_owned())
    } else {
        Err(format!("names {path:?}, which is not an absolute path"))
    }
}

/// Splits a list at colons; as in overlayfs, a backslash escapes a colon in a path.
fn split_unescaped(list: &str) -> Vec<String> {
    let (mut parts, mut part, mut chars) = (Vec::new(), String::new(), list.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => part.extend(chars.next()),
            ':' => parts.push(std::mem::take(&mut part)),
            _ => part.push(c),
        }
    }
    parts.push(part);
    parts
}

fn unescaped(path: &str) -> String {
    split_unescaped(path).join(":")
}

#[cfg(test)]
mod tests;
