//! A checkpoint as one stream of bytes, for another node.
//!
//! ```text
//!  MAGIC  version  length of the manifest  the file checkpoint.json
//!  of each file of the manifest, in the order of their names:  (offset  page)…  END
//! ```
//!
//! Numbers are big-endian. Pages are in the order of their offsets, and empty ones are left out. Whoever reads an archive knows all
//! lengths from the manifest before the first page. Names in it are compared and never followed. Compression is its carrier's.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    sync::Arc,
};

use sandboxer_base::{Code, failpoint::fail};
use sandboxer_protocol::id::Id;

use super::{
    Checkpoints, InUse, Manifest, refused,
    store::{MAX_MANIFEST, manifest_text},
};
use crate::{
    error::PodError,
    template::pages::{self, Checksum, PAGE},
};

const MAGIC: &[u8] = b"sandboxer checkpoint\n";
/// Version of the format of archives.
const VERSION: u32 = 1;
/// In place of an offset: there is no further page.
const END: u64 = u64::MAX;

/// Writes a checkpoint. What is damaged is noticed, at the latest before the end. Blocks.
pub fn export(of: &InUse, to: &mut impl Write) -> io::Result<()> {
    let text = manifest_text(&of.dir).map_err(io::Error::other)?;
    let manifest = Manifest::parse(&text, &of.dir).map_err(io::Error::other)?;
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    to.write_all(MAGIC)?;
    to.write_all(&VERSION.to_be_bytes())?;
    to.write_all(&length.to_be_bytes())?;
    to.write_all(&text)?;
    for (name, written) in &manifest.files {
        let found = pages::read(&File::open(of.dir.join(name))?, |page, offset| {
            to.write_all(&offset.to_be_bytes())?;
            to.write_all(page)
        })?;
        if found != *written {
            return Err(io::Error::other(format!("its file {name:?} is damaged: checksum mismatch")));
        }
        to.write_all(&END.to_be_bytes())?;
    }
    to.flush()
}

/// Makes a checkpoint of an archive, under the names in it unless there are others. Whatever fails leaves nothing.
/// Blocks.
pub fn import(
    all: &Arc<Checkpoints>,
    namespace: Option<Id>,
    name: Option<Id>,
    mut from: impl Read,
) -> Result<Manifest, PodError> {
    let mut manifest = head(&mut from).map_err(|reason| invalid(&reason))?;
    let namespace = namespace.unwrap_or_else(|| manifest.namespace.clone());
    let name = name.unwrap_or_else(|| manifest.name.clone());
    let mut draft = all.draft(namespace.as_str(), name.as_str(), manifest.stored_bytes())?;
    for (file, expected) in &manifest.files {
        let path = draft.dir.join(file);
        let copied = fail(format_args!("a file of an archive is written: {}", path.display()))
            .and_then(|()| File::options().write(true).create_new(true).mode(0o600).open(&path))
            .and_then(|to| copy(&mut from, &to, expected));
        copied.map_err(|error| {
            let reason = format!("cannot take its file {file:?} from the archive: {}", cut_off(&error));
            let is_data = matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData);
            let code = if is_data { Code::InvalidArgument } else { Code::Internal };
            refused(namespace.as_str(), name.as_str(), code, reason)
        })?;
    }
    if from.read(&mut [0]).map_err(|error| invalid(&cut_off(&error)))? > 0 {
        return Err(invalid("there is something after its end"));
    }
    draft.expected = Some(manifest.files.clone());
    manifest.move_to(&namespace, &name, &draft.target);
    draft.finish(manifest)
}

/// Reads all before the first page, or returns what is wrong with it.
pub(crate) fn head(from: &mut impl Read) -> Result<Manifest, String> {
    let mut magic = [0; MAGIC.len()];
    from.read_exact(&mut magic).map_err(|error| cut_off(&error))?;
    if magic != MAGIC {
        return Err("it does not begin like an exported checkpoint".to_owned());
    }
    let mut number = || {
        let mut bytes = [0; 4];
        from.read_exact(&mut bytes).map_err(|error| cut_off(&error))?;
        Ok::<_, String>(u32::from_be_bytes(bytes))
    };
    let (version, length) = (number()?, number()?);
    if version != VERSION {
        return Err(format!("its format is {version}, this daemon knows {VERSION}"));
    }
    if u64::from(length) > MAX_MANIFEST {
        return Err(format!("its manifest has {length} bytes, at most {MAX_MANIFEST} are read"));
    }
    let mut text = vec![0; length as usize];
    from.read_exact(&mut text).map_err(|error| cut_off(&error))?;
    let manifest = Manifest::parse_foreign(&text)?;
    manifest.oddity().map_or(Ok(manifest), Err)
}

/// Writes one file of the archive.
pub(crate) fn copy(from: &mut impl Read, file: &File, expected: &Checksum) -> io::Result<()> {
    let malformed = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    file.set_len(expected.bytes)?;
    let (mut next, mut left, mut page) = (0, expected.stored, [0; PAGE]);
    loop {
        let mut offset = [0; 8];
        from.read_exact(&mut offset)?;
        let offset = u64::from_be_bytes(offset);
        if offset == END {
            break;
        }
        if offset < next || offset % PAGE as u64 != 0 || offset >= expected.bytes {
            return Err(malformed("a page has no place in it"));
        }
        let length = usize::try_from(expected.bytes - offset).map_or(PAGE, |rest| rest.min(PAGE));
        left = left.checked_sub(length as u64).ok_or_else(|| malformed("it has more pages than expected"))?;
        from.read_exact(&mut page[..length])?;
        file.write_all_at(&page[..length], offset)?;
        next = offset + PAGE as u64;
    }
    Ok(())
}

fn invalid(reason: &str) -> PodError {
    PodError::Invalid { subject: "the archive".to_owned(), reason: reason.to_owned() }
}

fn cut_off(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "it is cut off".to_owned(),
        _ => error.to_string(),
    }
}
