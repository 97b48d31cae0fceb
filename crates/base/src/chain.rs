//! Formats an error with its causes.

use std::{error::Error, fmt::Write};

/// Returns an error and its causes on one line. Omits a cause that its parent already contains.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.ends_with(&words) {
            // Writing to a String cannot fail.
            let _ = write!(text, ": {words}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::chain;

    /// An error that says what was attempted; with `quotes`, it also quotes its source.
    #[derive(Debug)]
    struct Attempt {
        quotes: bool,
        source: io::Error,
    }

    impl std::fmt::Display for Attempt {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            match self.quotes {
                true => write!(f, "cannot read \"a\": {}", self.source),
                false => f.write_str("cannot read \"a\""),
            }
        }
    }

    impl std::error::Error for Attempt {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.source)
        }
    }

    #[test]
    fn each_cause_is_named_once() {
        for quotes in [false, true] {
            let error = Attempt { quotes, source: io::Error::other("disk on fire") };
            assert_eq!(chain(&error), "cannot read \"a\": disk on fire");
        }
    }
}
