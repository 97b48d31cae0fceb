//! Sizes in annotations.

/// Minimum and maximum size of a disk that a pod requests, bytes: the limits of the file system.
const SPACE: std::ops::RangeInclusive<u64> = 1 << 20..=16 << 40;

/// Parses `512Mi`, `1Gi` or a plain number of bytes; units are powers of 1024.
pub fn bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes() {
        [.., b'K', b'i'] => (&text[..text.len() - 2], 10),
        [.., b'M', b'i'] => (&text[..text.len() - 2], 20),
        [.., b'G', b'i'] => (&text[..text.len() - 2], 30),
        [.., b'T', b'i'] => (&text[..text.len() - 2], 40),
        _ => (text, 0),
    };
    let plain = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    digits.parse::<u64>().ok().filter(|_| plain)?.checked_mul(1 << shift)
}

/// Parses the size in annotation `name`; the error says why it is invalid.
pub fn space(name: &str, text: &str) -> Result<u64, String> {
    bytes(text).filter(|bytes| SPACE.contains(bytes)).ok_or_else(|| {
        format!("annotation {name} is {text:?}, it takes 1Mi to 16Ti (a number of bytes, or with Ki, Mi, Gi or Ti)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024_and_what_is_no_size_is_none() {
        assert_eq!(bytes("4096"), Some(4096));
        assert_eq!(bytes("2Ki"), Some(2048));
        assert_eq!(bytes("1Ti"), Some(1 << 40));
        for bad in ["", "Mi", "+1", "-1", "1.5Gi", "1G", "99999999999Ti", "1 Mi"] {
            assert_eq!(bytes(bad), None, "{bad:?}");
        }
        assert_eq!(space("a", "1Mi"), Ok(1 << 20));
        for bad in ["1", "17Ti", "much"] {
            let words = space("io.sandboxer.x", bad).unwrap_err();
            assert!(words.contains("io.sandboxer.x") && words.contains(bad), "{words}");
        }
    }
}
