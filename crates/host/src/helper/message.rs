//! The termination message of a container, in the host's file that kubelet reads.

use std::{io, io::Write};

use crate::beneath::{Access, Found};

/// The longest message, bytes: kubelet reads no more. The guest may send more.
const MAX_BYTES: usize = 4096;

/// Writes the end of `message` to an existing file; an empty message leaves it unchanged.
pub fn write(found: &Found, message: &[u8]) -> io::Result<()> {
    if message.is_empty() {
        return Ok(());
    }
    if found.stat().st_nlink != 1 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file has several names"));
    }
    let end = &message[message.len().saturating_sub(MAX_BYTES)..];
    let mut file = found.open(Access::Write)?;
    file.set_len(0)?;
    file.write_all(end)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::beneath::Dir;

    #[test]
    fn the_end_of_a_message_replaces_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let root = Dir::host(dir.path()).unwrap();
        let path = dir.path().join("0a1b");
        let written = |name: &str, message: &[u8]| root.find(name).and_then(|found| write(&found, message));
        assert!(written("0a1b", b"never made").is_err() && !path.exists());
        fs::write(&path, "before").unwrap();
        written("0a1b", b"").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"before");
        written("0a1b", &[vec![b'x'; MAX_BYTES], b"end".to_vec()].concat()).unwrap();
        let text = fs::read(&path).unwrap();
        assert!(text.len() == MAX_BYTES && text.ends_with(b"xend"));
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        assert!(written("link", b"elsewhere").is_err());
        fs::hard_link(&path, dir.path().join("second")).unwrap();
        assert!(written("second", b"elsewhere").is_err());
        assert_eq!(fs::read(&path).unwrap(), text);
    }
}
