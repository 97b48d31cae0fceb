//! The termination message of a container, in the host's file that kubelet reads.

use std::{fs::OpenOptions, io, io::Write, os::unix::fs::OpenOptionsExt, path::Path};

/// Longest message, bytes: kubelet reads no more. The guest may send more.
const MAX_BYTES: usize = 4096;

/// Writes the end of `message` to the existing file at `path`; an empty message leaves it unchanged.
pub fn write(path: &Path, message: &[u8]) -> io::Result<()> {
    if message.is_empty() {
        return Ok(());
    }
    let end = &message[message.len().saturating_sub(MAX_BYTES)..];
    let mut file =
        OpenOptions::new().write(true).truncate(true).custom_flags(nix::libc::O_NOFOLLOW).open(path)?;
    file.write_all(end)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::helper::message::*;

    #[test]
    fn the_end_of_a_message_replaces_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0a1b");
        assert!(write(&path, b"never made").is_err() && !path.exists());
        fs::write(&path, "before").unwrap();
        write(&path, b"").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"before");
        write(&path, &[vec![b'x'; MAX_BYTES], b"end".to_vec()].concat()).unwrap();
        let written = fs::read(&path).unwrap();
        assert!(written.len() == MAX_BYTES && written.ends_with(b"xend"));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(write(&link, b"elsewhere").is_err());
    }
}
