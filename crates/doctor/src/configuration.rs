//! The daemon's configuration, on which other checks depend.

use std::path::Path;

use sandboxer_base::chain;
use sandboxer_config::{Config, ConfigError, DEFAULT_PATH};

use super::verdict::{Check, Fix, Subject};

const CONFIGURATION: Subject =
    Subject { name: "configuration", why: "the daemon does not start with an invalid configuration" };

/// Checks the configuration read from `path`, or from the daemon's default path.
pub fn judge(path: Option<&Path>, read: &Result<Config, ConfigError>) -> Check {
    let file = path.unwrap_or(DEFAULT_PATH.as_ref());
    match read {
        Err(error) => CONFIGURATION.failure(
            format!("{}; the checks below use the defaults", chain(error)),
            Fix::commands(
                "correct the file",
                [format!("sandboxer --check-config --config {}", file.display())],
            ),
        ),
        Ok(_) if path.is_none() && !file.exists() => {
            CONFIGURATION.ok(format!("the defaults; {} does not exist", file.display()))
        }
        Ok(_) => CONFIGURATION.ok(file.display().to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    #[test]
    fn a_broken_configuration_is_told_in_the_daemons_words() {
        let path = Path::new("/etc/my.toml");
        assert_eq!(judge(Some(path), &Ok(Config::default())).seen, "/etc/my.toml");
        let broken = judge(Some(path), &Config::parse("concurent_starts = 1", path));
        assert_eq!(broken.verdict, Verdict::Failure);
        assert!(broken.seen.contains("concurrent_starts"), "{broken}");
        assert_eq!(broken.fix.unwrap().commands, ["sandboxer --check-config --config /etc/my.toml"]);
    }
}
