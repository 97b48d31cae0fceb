//! The protocol version in an agent's file, readable without running the agent.
//!
//! The file contains the text `sandboxer-agent protocol 0000000001`, with ten digits.

use crate::PROTOCOL_VERSION;

const WORDS: &[u8; 25] = b"sandboxer-agent protocol ";
const DIGITS: usize = 10;

/// The mark of an agent of this version.
pub static MARK: [u8; WORDS.len() + DIGITS] = mark(PROTOCOL_VERSION);

const fn mark(version: u32) -> [u8; WORDS.len() + DIGITS] {
    let mut mark = [b'0'; WORDS.len() + DIGITS];
    let mut at = 0;
    while at < WORDS.len() {
        mark[at] = WORDS[at];
        at += 1;
    }
    let (mut rest, mut at) = (version, mark.len());
    while rest > 0 {
        at -= 1;
        mark[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    mark
}

/// Returns the protocol version in an agent's file; `None` without a mark.
pub fn find(agent: &[u8]) -> Option<u32> {
    // Programs that search for the mark contain its text, too, but without digits after it.
    memchr::memmem::find_iter(agent, WORDS).find_map(|at| {
        let digits = agent.get(at + WORDS.len()..)?.get(..DIGITS)?;
        std::str::from_utf8(digits).ok()?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_found_wherever_it_stands() {
        assert_eq!(find(&MARK), Some(PROTOCOL_VERSION));
        for version in [0, 7, 1_234_567_890, u32::MAX] {
            let file = [&b"\x7fELF"[..], WORDS, b" no digits", &mark(version), b"\0rest"].concat();
            assert_eq!(find(&file), Some(version));
        }
    }

    #[test]
    fn what_is_no_whole_mark_is_none() {
        assert_eq!(find(b""), None);
        assert_eq!(find(WORDS), None);
        assert_eq!(find(&MARK[..MARK.len() - 1]), None);
        assert_eq!(find(b"sandboxer-agent protocol 9999999999"), None, "more than 32 bits");
    }
}
