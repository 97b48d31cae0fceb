//! SHA-256 as text.

use std::io::{self, Read};

use sha2::{Digest, Sha256};

/// Returns bytes as lower-case hex digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the SHA-256 of a reader's content, hex.
pub fn sha256(from: &mut impl Read) -> io::Result<String> {
    let (mut hash, mut chunk) = (Sha256::new(), vec![0; 256 << 10]);
    loop {
        match from.read(&mut chunk) {
            Ok(0) => return Ok(hex(&hash.finalize())),
            Ok(count) => hash.update(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
