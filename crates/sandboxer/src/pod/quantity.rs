//! Parsers for sizes in annotations.

/// Minimum and maximum size of a disk that a pod requests, bytes: the limits of the file system.
const SPACE: std::ops::RangeInclusive<u64> = 1 << 20..=16 << 40;

/// Parses a size such as `512Mi`, `1Gi` or a plain number of bytes; units are powers of 1024.
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

/// Parses a quantity in Kubernetes' notation, rounded down: `10M`, `1.5Gi`, `1e6`.
pub fn kubernetes(text: &str) -> Option<u64> {
    let at = text.find(|letter: char| letter != '.' && !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, suffix) = text.split_at(at);
    let scale: u128 = match suffix {
        "" => 1,
        "k" => 1000,
        "M" => 1000_u128.pow(2),
        "G" => 1000_u128.pow(3),
        "T" => 1000_u128.pow(4),
        "P" => 1000_u128.pow(5),
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "Pi" => 1 << 50,
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?;
            let exponent = exponent.strip_prefix('+').unwrap_or(exponent);
            10_u128.checked_pow(exponent.parse().ok().filter(|exponent| *exponent <= MOST_DIGITS)?)?
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let decimals = u32::try_from(fraction.len()).ok().filter(|decimals| *decimals <= MOST_DIGITS)?;
    let digits = format!("{whole}{fraction}").parse::<u64>().ok()?;
    u64::try_from(u128::from(digits).checked_mul(scale)? / 10_u128.pow(decimals)).ok()
}

/// Maximum number of decimal places, and maximum exponent.
const MOST_DIGITS: u32 = 18;

/// Parses the size in annotation `name`; the error describes why it is invalid.
pub fn space(name: &str, text: &str) -> Result<u64, String> {
    bytes(text).filter(|bytes| SPACE.contains(bytes)).ok_or_else(|| {
        format!("annotation {name} is {text:?}, it takes 1Mi to 16Ti (a number of bytes, or with Ki, Mi, Gi or Ti)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubernetes_quantities_are_decimal_binary_or_with_an_exponent() {
        for (text, expected) in [
            ("1000000", 1_000_000),
            ("10M", 10_000_000),
            ("1.5Gi", 3 << 29),
            ("0.5k", 500),
            ("2e6", 2_000_000),
            ("1E+3", 1000),
            ("1P", 1_000_000_000_000_000),
            (".5M", 500_000),
        ] {
            assert_eq!(kubernetes(text), Some(expected), "{text}");
        }
        for bad in
            ["", "M", ".", "-1M", "1m", "1 M", "1.2.3M", "1e-3", "1e19", "99999999999999999999", "20000P00"]
        {
            assert_eq!(kubernetes(bad), None, "{bad:?}");
        }
        assert_eq!(kubernetes("99999999Pi"), None, "it does not fit");
    }

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
