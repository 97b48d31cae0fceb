//! A container's output from its CRI log: `TIME STREAM TAG TEXT`. Tag P marks a part of a line, F its end.

use std::io::{self, Read};
use std::path::Path;

/// Maximum size of a log, bytes: guests are not trusted.
const LONGEST: u64 = 8 << 20;
/// Maximum number of characters of output in an error.
const SHOWN: usize = 300;

/// Output of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Printed {
    /// Text that was written to stdout.
    pub stdout: String,
    /// Text that was written to stderr.
    pub stderr: String,
}

/// Reads a log. Returns an error if it is too long, because figures from a part of it would be wrong.
pub fn read(path: &Path) -> io::Result<Printed> {
    Ok(Printed::parse(&bounded(path)?))
}

/// Reads a file of output, with the same maximum size as a log.
pub fn bounded(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it printed more than {} MiB", LONGEST >> 20),
        ));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Printed {
    /// Parses a log. Ignores invalid lines.
    pub fn parse(log: &str) -> Self {
        let mut printed = Self::default();
        for line in log.lines() {
            let mut words = line.splitn(4, ' ');
            let (Some(_), Some(stream), Some(tag)) = (words.next(), words.next(), words.next()) else {
                continue;
            };
            let into = match stream {
                "stdout" => &mut printed.stdout,
                "stderr" => &mut printed.stderr,
                _ => continue,
            };
            into.push_str(words.next().unwrap_or_default());
            if !tag.starts_with('P') {
                into.push('\n');
            }
        }
        printed
    }

    /// Returns the last line of output for an error: from stderr, or else from stdout.
    pub fn last_words(&self) -> String {
        let last = |text: &str| {
            text.lines()
                .rev()
                .find(|line| !line.trim().is_empty() && !line.starts_with("{\"bench_facts\""))
                .map(plain)
        };
        last(&self.stderr).or_else(|| last(&self.stdout)).unwrap_or_else(|| "it printed nothing".into())
    }
}

/// Returns a text as one short line, without control characters.
pub fn plain(text: &str) -> String {
    let words = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join(" ").chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
2026-01-01T00:00:00.000000001Z stderr F {\"bench_facts\":{}}
2026-01-01T00:00:00.000000002Z stdout P one \n\
2026-01-01T00:00:00.000000003Z stdout F line
2026-01-01T00:00:00.000000004Z stdout F 
2026-01-01T00:00:00.000000005Z stdout F next
garbage
";

    #[test]
    fn parts_of_a_line_are_joined_and_streams_kept_apart() {
        let printed = Printed::parse(LOG);
        assert_eq!(printed.stdout, "one line\n\nnext\n");
        assert_eq!(printed.stderr, "{\"bench_facts\":{}}\n");
    }

    #[test]
    fn last_words_are_one_plain_line() {
        assert_eq!(Printed::parse(LOG).last_words(), "next");
        let failed = Printed { stderr: "a\n\u{1b}[31mFATAL:\tno\u{7} disk\n\n".into(), ..Printed::default() };
        assert_eq!(failed.last_words(), "[31mFATAL: no disk");
        assert_eq!(Printed::default().last_words(), "it printed nothing");
        assert_eq!(plain(&"x".repeat(10_000)).len(), SHOWN);
    }

    #[test]
    fn a_log_that_is_too_long_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::File::create(&path).unwrap().set_len(LONGEST + 1).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("8 MiB"));
        assert!(read(&dir.path().join("none")).is_err());
    }
}
