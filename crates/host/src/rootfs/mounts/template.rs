//! Templates of containerd's mount manager, which refer to mounts before the last.

use std::path::PathBuf;

use super::{Lower, WantedWritable};
use crate::rootfs::FsType;

/// An input of templates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Input {
    Image { path: PathBuf, fstype: FsType },
    Scratch { path: PathBuf, size: u64 },
}

/// The mounts before the last, and whether each is used.
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) all: Vec<Input>,
    pub(super) used: Vec<bool>,
}

impl Inputs {
    /// Returns the layers that a list of templates names; `None` if it has no template.
    pub(super) fn images(&mut self, list: &str) -> Result<Option<Vec<Lower>>, String> {
        if !list.contains("{{") {
            return Ok(None);
        }
        let mut layers = Vec::new();
        for part in list.split(':') {
            let (indices, rest) = template(part)?;
            if !rest.is_empty() {
                return Err(format!("names {part:?}: a directory inside of another mount is not supported"));
            }
            for index in indices {
                match self.get(index)? {
                    Input::Image { path, fstype } => layers.push(Lower::Image { path, fstype }),
                    Input::Scratch { .. } => {
                        return Err(format!("has mount {index} as a layer, which is writable"));
                    }
                }
            }
        }
        Ok(Some(layers))
    }

    /// Returns the writable file that a template names; `None` if there is no template.
    pub(super) fn scratch(&mut self, path: &str) -> Result<Option<WantedWritable>, String> {
        if !path.contains("{{") {
            return Ok(None);
        }
        let (indices, rest) = template(path)?;
        match (&indices[..], rest) {
            ([index], "/upper") => match self.get(*index)? {
                Input::Scratch { path, size } => Ok(Some(WantedWritable::Scratch { path, size })),
                Input::Image { .. } => Err(format!("would write to mount {index}, which is read-only")),
            },
            _ => Err(format!("has {path:?} as its upper directory, which is not supported")),
        }
    }

    fn get(&mut self, index: usize) -> Result<Input, String> {
        let input = self.all.get(index).cloned();
        let input = input.ok_or_else(|| format!("refers to mount {index}, of {}", self.all.len()))?;
        self.used[index] = true;
        Ok(input)
    }
}

/// Parses `{{ mount 2 }}` or `{{ overlay 1 3 }}`; returns the indices, and the text after it.
fn template(text: &str) -> Result<(Vec<usize>, &str), String> {
    let bad = || format!("has template {text:?}, which is not supported");
    let (inner, rest) = text.strip_prefix("{{").and_then(|text| text.split_once("}}")).ok_or_else(bad)?;
    let words: Vec<&str> = inner.split_ascii_whitespace().collect();
    let number = |word: &str| word.parse::<usize>().ok().filter(|&number| number < 1024).ok_or_else(bad);
    let indices = match words[..] {
        ["mount", index] => vec![number(index)?],
        ["overlay", first, last] => match (number(first)?, number(last)?) {
            (first, last) if first <= last => (first..=last).collect(),
            (first, last) => (last..=first).rev().collect(),
        },
        _ => return Err(bad()),
    };
    Ok((indices, rest))
}
