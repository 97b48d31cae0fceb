//! Private functions that the targets in `fuzz/` call; compiled only for them.

#![allow(missing_docs, reason = "each is documented where it is")]

use std::path::Path;

use sandboxer_protocol::id::ContainerId;

pub use crate::{
    api::convert::pod_spec,
    pod::{container::spec::GuestSpec, journal::PodRecord},
};
use crate::{
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
