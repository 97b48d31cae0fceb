//! Writes to stdout: text, JSON, and text of others without control characters.

use std::io::{self, Write};

use serde::Serialize;

/// Writes text and a newline to stdout.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Writes indented JSON to stdout.
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    Ok(print(&serde_json::to_string_pretty(value)?)?)
}

/// Returns text with control characters made visible: messages contain a guest's console output.
pub fn plain(text: &str) -> String {
    let mut filter = Plain::default();
    let mut out = filter.filter(text.as_bytes());
    out.append(&mut filter.finish());
    String::from_utf8_lossy(&out).into_owned()
}

/// Makes the control characters of a byte stream visible, except tabs and newlines. They show as `^[`, the second set
/// (U+0080–U+009F) as `M-^[`.
#[derive(Debug, Default)]
pub struct Plain {
    /// Whether the last byte was the first of a control character of the second set.
    after_c2: bool,
}

impl Plain {
    /// Returns `bytes` with control characters made visible.
    pub fn filter(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            if std::mem::take(&mut self.after_c2) {
                if let 0x80..=0x9f = byte {
                    out.extend([b'M', b'-', b'^', byte - 0x40]);
                    continue;
                }
                out.push(0xc2);
            }
            match byte {
                0xc2 => self.after_c2 = true,
                b'\t' | b'\n' | b'\r' => out.push(byte),
                0..0x20 | 0x7f => out.extend([b'^', byte ^ 0x40]),
                _ => out.push(byte),
            }
        }
        out
    }

    /// Returns the bytes that were held back at the end of the stream.
    pub fn finish(&mut self) -> Vec<u8> {
        if std::mem::take(&mut self.after_c2) { vec![0xc2] } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown_instead() {
        assert_eq!(plain("a\x1b[2Jb\x07\x7f"), "a^[[2Jb^G^?");
        assert_eq!(plain("tab\tline\r\nend"), "tab\tline\r\nend");
        assert_eq!(plain("\u{9b}2J ä £ €"), "M-^[2J ä £ €");
        assert_eq!(plain("Â"), "Â");
    }

    #[test]
    fn a_character_cut_by_the_end_of_a_chunk_is_still_recognised() {
        let mut filter = Plain::default();
        assert_eq!(filter.filter(b"x\xc2"), b"x");
        assert_eq!(filter.filter(b"\x9b"), b"M-^[");
        assert_eq!(filter.filter(b"\xc2"), b"");
        assert_eq!(filter.filter(b"\xa3"), "£".as_bytes());
        assert_eq!(filter.filter(b"\xc2"), b"");
        assert_eq!(filter.finish(), b"\xc2");
    }
}
