//! Images of any content, also of what no tool would put into one, as OCI archives.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// The program that prints what it sees of a tree: `src/look.c`, static.
pub const LOOK: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/look"));

/// A field of a tar header has so many bytes; longer names are not made.
const LONGEST: usize = 100;

/// What an entry of a layer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Dir,
    /// A file, with its content.
    File(Vec<u8>),
    /// A symbolic link.
    Symlink(String),
    /// Another name of a file.
    Link(String),
    /// A FIFO.
    Fifo,
    /// A character device.
    Char(u32, u32),
    /// A block device.
    Block(u32, u32),
    /// What was there in lower layers is not.
    Whiteout,
    /// What was in this directory in lower layers is not.
    Opaque,
}

/// One entry of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Without a slash in front.
    pub path: String,
    /// What it is.
    pub kind: Kind,
    /// With the bits above 0777.
    pub mode: u32,
    /// User and group.
    pub owner: (u64, u64),
    /// Extended attributes.
    pub attributes: Vec<(&'static str, Vec<u8>)>,
}

impl Entry {
    /// Returns an entry of root's.
    pub fn new(path: &str, kind: Kind, mode: u32) -> Self {
        Self { path: path.to_owned(), kind, mode, owner: (0, 0), attributes: Vec::new() }
    }
}

fn layer(entries: &[Entry]) -> Result<Vec<u8>> {
    let mut archive = Builder::new(Vec::new());
    for entry in entries {
        let attributes: Vec<_> = entry
            .attributes
            .iter()
            .map(|(name, value)| (format!("SCHILY.xattr.{name}"), value.as_slice()))
            .collect();
        if !attributes.is_empty() {
            archive.append_pax_extensions(attributes.iter().map(|(name, value)| (name.as_str(), *value)))?;
        }
        let mut header = Header::new_ustar();
        header.set_mode(entry.mode);
        header.set_uid(entry.owner.0);
        header.set_gid(entry.owner.1);
        header.set_mtime(1_700_000_000);
        header.set_size(0);
        let (dir, name) = entry.path.rsplit_once('/').unwrap_or(("", &entry.path));
        let slash = if dir.is_empty() { "" } else { "/" };
        let mut content: &[u8] = &[];
        let mut target = "";
        let mut path = entry.path.clone();
        let kind = match &entry.kind {
            Kind::Dir => EntryType::Directory,
            Kind::File(bytes) => {
                content = bytes;
                header.set_size(bytes.len() as u64);
                EntryType::Regular
            }
            Kind::Symlink(to) => {
                target = to;
                EntryType::Symlink
            }
            Kind::Link(to) => {
                target = to;
                EntryType::Link
            }
            Kind::Fifo => EntryType::Fifo,
            Kind::Char(major, minor) => {
                header.set_device_major(*major)?;
                header.set_device_minor(*minor)?;
                EntryType::Char
            }
            Kind::Block(major, minor) => {
                header.set_device_major(*major)?;
                header.set_device_minor(*minor)?;
                EntryType::Block
            }
            Kind::Whiteout => {
                path = format!("{dir}{slash}.wh.{name}");
                EntryType::Regular
            }
            Kind::Opaque => {
                path = format!("{}/.wh..wh..opq", entry.path);
                EntryType::Regular
            }
        };
        header.set_entry_type(kind);
        // As they are: the crate would refuse or change some.
        ensure!(
            path.len() <= LONGEST && target.len() <= LONGEST,
            "a name too long for a test: {path}, {target}"
        );
        let fields = header.as_old_mut();
        fields.name[..path.len()].copy_from_slice(path.as_bytes());
        fields.linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        archive.append(&header, content)?;
    }
    Ok(archive.into_inner()?)
}

/// Returns an image as an archive that containerd imports. `config` is the part of its configuration that describes a container.
pub fn archive(name: &str, layers: &[Vec<Entry>], config: &Value) -> Result<Vec<u8>> {
    let layers = layers.iter().map(|entries| layer(entries)).collect::<Result<Vec<_>>>()?;
    let mut blobs = BTreeMap::new();
    let mut blob = |bytes: Vec<u8>, kind: &str| {
        let digest = hex(&bytes);
        let size = bytes.len();
        blobs.insert(digest.clone(), bytes);
        json!({ "mediaType": format!("application/vnd.oci.image.{kind}"), "digest": format!("sha256:{digest}"), "size": size })
    };
    let ids: Vec<_> = layers.iter().map(|layer| format!("sha256:{}", hex(layer))).collect();
    let config = json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": config,
        "rootfs": { "type": "layers", "diff_ids": ids },
    });
    let config = blob(serde_json::to_vec(&config)?, "config.v1+json");
    let layers: Vec<_> = layers.into_iter().map(|layer| blob(layer, "layer.v1.tar")).collect();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": layers,
    });
    let mut top = blob(serde_json::to_vec(&manifest)?, "manifest.v1+json");
    top["annotations"] = json!({ "io.containerd.image.name": name });
    let mut archive = Builder::new(Vec::new());
    let mut add = |path: &str, bytes: &[u8]| {
        let mut header = Header::new_ustar();
        header.set_mode(0o644);
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, path, bytes)
    };
    add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    add("index.json", &serde_json::to_vec(&json!({ "schemaVersion": 2, "manifests": [top] }))?)?;
    for (digest, bytes) in &blobs {
        add(&format!("blobs/sha256/{digest}"), bytes)?;
    }
    Ok(archive.into_inner()?)
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
