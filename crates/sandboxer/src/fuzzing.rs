//! Private functions that the targets in `fuzz/` call; compiled only for them.

#![allow(missing_docs, reason = "each is documented where it is")]

use std::{io::Read, path::Path};

use sandboxer_protocol::id::ContainerId;

pub use crate::{
    api::convert::pod_spec,
    pod::{container::spec::GuestSpec, journal::PodRecord},
};
use crate::{
    checkpoint::archive,
    error::PodError,
    pod::{container::NewContainer, journal::JournalError, spec::PodSpec},
    template::TemplateError,
};

pub fn guest_spec(pod: &PodSpec, container: &ContainerId, text: &[u8]) -> Result<GuestSpec, PodError> {
    let new = NewContainer {
        id: container.clone(),
        bundle: Default::default(),
        mounts: Vec::new(),
        root: None,
        stdio: Default::default(),
        beside: Vec::new(),
    };
    crate::pod::container::spec::parse(pod, &new, text)
}

pub fn record(text: &[u8]) -> Result<PodRecord, JournalError> {
    crate::pod::journal::parse(text, Path::new("record.json"))
}

pub fn template(text: &[u8], dir: &Path) -> Result<Vec<String>, TemplateError> {
    crate::template::image::parse(text, dir).map(|manifest| manifest.files.into_keys().collect())
}

/// Reads an archive with the manifest `text` and these pages. Returns the names of its files, with their lengths and those that the
/// manifest says.
pub fn archive(text: &[u8], pages: &[u8]) -> Result<Vec<(String, [u64; 2])>, String> {
    use sha2::{Digest, Sha256};
    let sha256 = sandboxer_base::digest::hex(&Sha256::digest(text));
    let mut manifest = format!("{{\"format\":1,\"sha256\":\"{sha256}\"}}\n").into_bytes();
    manifest.extend(text);
    let length = u32::try_from(manifest.len()).unwrap_or_default().to_be_bytes();
    let head = [b"sandboxer checkpoint\n\0\0\0\x01".as_slice(), &length, &manifest].concat();
    let mut from = head.as_slice().chain(pages);
    let manifest = archive::head(&mut from)?;
    let mut files = Vec::new();
    for (name, expected) in &manifest.files {
        let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC);
        let file = std::fs::File::from(file.map_err(|error| error.to_string())?);
        archive::copy(&mut from, &file, expected).map_err(|error| error.to_string())?;
        let length = file.metadata().map_err(|error| error.to_string())?.len();
        files.push((name.clone(), [length, expected.bytes]));
    }
    Ok(files)
}
