//! Frames from the guest: kind, length of the content (4 bytes, big endian), content. `bench-helper guest` writes them.

use std::time::Instant;

use crate::log::Printed;

/// Maximum size of a frame's content, bytes: the guest is not trusted.
const MAX_FRAME: usize = 64 << 10;
/// Maximum output, bytes, on stdout and on stderr each, as for containers.
const MAX_OUTPUT: usize = 8 << 20;
/// Number of bytes before a frame's content.
const HEAD: usize = 5;

/// Why the guest's bytes are rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    /// The kind of a frame is unknown.
    #[error("it sent a frame of the unknown kind {0:#04x}")]
    Kind(u8),
    /// A frame is too long.
    #[error("it sent a frame of {0} bytes")]
    Length(usize),
    /// The exit code has the wrong size.
    #[error("it sent an exit code of {0} bytes")]
    Code(usize),
    /// The order of the frames is wrong.
    #[error("it sent a frame before the first or after the last one")]
    Order,
    /// The output is too large.
    #[error("it printed more than {} MiB", MAX_OUTPUT >> 20)]
    TooLong,
}

/// What the guest has sent so far.
#[derive(Debug, Clone, Default)]
pub struct Output {
    /// When the guest's unit began.
    pub begun: Option<Instant>,
    /// When the first output came.
    pub first_byte: Option<Instant>,
    /// Exit code of the command, and when it came.
    pub exit: Option<(i32, Instant)>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// Bytes of an incomplete frame.
    rest: Vec<u8>,
}

impl Output {
    /// Adds bytes that came at `now`.
    pub fn add(&mut self, bytes: &[u8], now: Instant) -> Result<(), PortError> {
        self.rest.extend_from_slice(bytes);
        let pending = std::mem::take(&mut self.rest);
        let mut left = &pending[..];
        while let [kind, a, b, c, d, after @ ..] = left {
            let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
            if !matches!(kind, b'b' | b'o' | b'e' | b'x') {
                return Err(PortError::Kind(*kind));
            }
            if length > MAX_FRAME {
                return Err(PortError::Length(length));
            }
            let Some((content, next)) = after.split_at_checked(length) else { break };
            self.frame(*kind, content, now)?;
            left = next;
        }
        debug_assert!(left.len() < HEAD + MAX_FRAME);
        self.rest = left.to_vec();
        Ok(())
    }

    fn frame(&mut self, kind: u8, content: &[u8], now: Instant) -> Result<(), PortError> {
        if self.begun.is_some() == (kind == b'b') || self.exit.is_some() {
            return Err(PortError::Order);
        }
        match kind {
            b'b' => self.begun = Some(now),
            b'x' => {
                let code = content.try_into().map_err(|_| PortError::Code(content.len()))?;
                self.exit = Some((i32::from_be_bytes(code), now));
            }
            _ => {
                let into = if kind == b'o' { &mut self.stdout } else { &mut self.stderr };
                if into.len() + content.len() > MAX_OUTPUT {
                    return Err(PortError::TooLong);
                }
                into.extend_from_slice(content);
                if kind == b'o' && !content.is_empty() {
                    self.first_byte.get_or_insert(now);
                }
            }
        }
        Ok(())
    }

    /// Returns the command's output.
    pub fn printed(&self) -> Printed {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Printed { stdout: text(&self.stdout), stderr: text(&self.stderr) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, content: &[u8]) -> Vec<u8> {
        [&[kind][..], &u32::try_from(content.len()).unwrap().to_be_bytes(), content].concat()
    }

    fn whole() -> Vec<u8> {
        [
            frame(b'b', b""),
            frame(b'e', b"facts\n"),
            frame(b'o', b"out"),
            frame(b'o', b"put"),
            frame(b'x', &[0, 0, 0, 7]),
        ]
        .concat()
    }

    fn parse(bytes: &[u8]) -> Result<Output, PortError> {
        let mut output = Output::default();
        output.add(bytes, Instant::now()).map(|()| output)
    }

    #[test]
    fn output_and_exit_code_are_read() {
        let output = parse(&whole()).unwrap();
        assert_eq!(output.printed(), Printed { stdout: "output".into(), stderr: "facts\n".into() });
        assert_eq!(output.exit.unwrap().0, 7);
        assert!(output.begun.is_some() && output.first_byte.is_some());
    }

    #[test]
    fn half_of_it_has_no_exit_code() {
        let bytes = whole();
        for end in 0..bytes.len() {
            assert!(parse(&bytes[..end]).unwrap().exit.is_none());
        }
    }

    #[test]
    fn garbage_is_refused() {
        let begun = frame(b'b', b"");
        let after = |bytes: &[u8]| parse(&[&begun, bytes].concat()).unwrap_err();
        assert_eq!(parse(b"Linux version 6.1").unwrap_err(), PortError::Kind(b'L'));
        assert_eq!(after(&[b'o', 255, 255, 255, 255]), PortError::Length(u32::MAX as usize));
        assert_eq!(after(&frame(b'x', b"0")), PortError::Code(1));
        assert_eq!(after(&begun), PortError::Order);
        assert_eq!(parse(&frame(b'o', b"early")).unwrap_err(), PortError::Order);
        assert_eq!(parse(&[whole(), frame(b'o', b"late")].concat()).unwrap_err(), PortError::Order);
    }

    #[test]
    fn too_much_output_is_refused() {
        let mut output = parse(&frame(b'b', b"")).unwrap();
        let large = frame(b'e', &vec![b'x'; MAX_FRAME]);
        let refused = (0..=MAX_OUTPUT / MAX_FRAME).find_map(|_| output.add(&large, Instant::now()).err());
        assert_eq!(refused, Some(PortError::TooLong));
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_give_the_same(sizes in proptest::collection::vec(1_usize..9, 60)) {
            let (bytes, mut output, mut at) = (whole(), Output::default(), 0);
            for size in sizes {
                let end = (at + size).min(bytes.len());
                output.add(&bytes[at..end], Instant::now()).unwrap();
                at = end;
            }
            prop_assert_eq!(output.printed(), parse(&bytes).unwrap().printed());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
