//! Tables in documents, which runs write between two marks.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

const END: &str = "<!-- to here -->";

/// Replaces the text between the mark `start` and the end mark in a document by what `new` returns for it.
pub fn replace(document: &Path, start: &str, new: impl FnOnce(&str) -> String) -> Result<()> {
    let name = document.display();
    let text = fs::read_to_string(document).with_context(|| format!("cannot read {name}"))?;
    let (before, rest) = text.split_once(start).with_context(|| format!("{name} has no mark {start:?}"))?;
    let (old, after) = rest.split_once(END).with_context(|| format!("{name} has no mark {END:?}"))?;
    fs::write(document, format!("{before}{start}{}{END}{after}", new(old)))
        .with_context(|| format!("cannot write {name}"))
}
