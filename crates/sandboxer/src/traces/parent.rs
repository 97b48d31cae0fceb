//! The span of a caller: `traceparent` in the format of W3C Trace Context.

/// The span of a caller.
#[derive(Debug, PartialEq, Eq)]
pub struct Parent {
    /// ID of the trace that the span belongs to.
    pub trace_id: [u8; 16],
    /// ID of the span.
    pub span_id: [u8; 8],
    /// Whether the caller records the span.
    pub sampled: bool,
}

impl Parent {
    /// Parses `VERSION-TRACE-SPAN-FLAGS`, all hex. A later version may have more fields. `None`: the caller has no
    /// trace.
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split('-');
        let [version] = hex(fields.next()?)?;
        let trace_id: [u8; 16] = hex(fields.next()?)?;
        let span_id: [u8; 8] = hex(fields.next()?)?;
        let [flags] = hex(fields.next()?)?;
        let complete = version != 0 || fields.next().is_none();
        let fine = version != 0xff && complete && trace_id != [0; 16] && span_id != [0; 8];
        fine.then_some(Self { trace_id, span_id, sampled: flags & 1 == 1 })
    }
}

fn hex<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * BYTES || !digits.iter().all(|d| d.is_ascii_digit() || (b'a'..=b'f').contains(d)) {
        return None;
    }
    let mut bytes = [0; BYTES];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_read_or_ignored() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let parent = Parent::parse(good).unwrap();
        assert_eq!((parent.trace_id[0], parent.span_id[7], parent.sampled), (0x0a, 0x31, true));
        assert!(Parent::parse(&format!("cc{}-more", &good[2..])).unwrap().sampled);
        for bad in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-ää7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
        ] {
            assert_eq!(Parent::parse(bad), None, "{bad}");
        }
    }
}
