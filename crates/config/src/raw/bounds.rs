//! Checks of single values.

use std::{path::PathBuf, time::Duration};

use super::{ConfigError, Seconds};

/// Checks values against their bounds.
pub struct Bounds<'a> {
    /// A function that makes the error from a key, its value and the accepted values.
    pub value_error: &'a dyn Fn(&'static str, String, &'static str) -> ConfigError,
}

impl Bounds<'_> {
    /// Returns an error unless `fine`.
    pub fn check(
        &self,
        key: &'static str,
        found: String,
        takes: &'static str,
        fine: bool,
    ) -> Result<(), ConfigError> {
        if fine { Ok(()) } else { Err((self.value_error)(key, found, takes)) }
    }

    /// Returns the path if it is absolute.
    pub fn absolute(
        &self,
        key: &'static str,
        value: Option<PathBuf>,
        default: PathBuf,
    ) -> Result<PathBuf, ConfigError> {
        let value = value.unwrap_or(default);
        self.check(key, format!("{value:?}"), "an absolute path", value.is_absolute()).map(|()| value)
    }

    /// Returns the program if it is an absolute path, or a plain name to look up in PATH.
    pub fn program(&self, key: &'static str, value: PathBuf) -> Result<PathBuf, ConfigError> {
        let fine = value.is_absolute() || value.components().count() == 1;
        self.check(key, format!("{value:?}"), "an absolute path or a plain name", fine).map(|()| value)
    }

    /// Returns the duration if it is at most a day.
    pub fn seconds(
        &self,
        key: &'static str,
        value: Option<Seconds>,
        default: Duration,
    ) -> Result<Duration, ConfigError> {
        let Some(Seconds(seconds)) = value else { return Ok(default) };
        let fine = (0.001..=86_400.0).contains(&seconds);
        self.check(key, seconds.to_string(), "seconds, from 0.001 to 86400", fine)?;
        Ok(Duration::from_secs_f64(seconds))
    }

    /// Returns the number if it is at least 1.
    pub fn count(
        &self,
        key: &'static str,
        value: Option<usize>,
        default: usize,
    ) -> Result<usize, ConfigError> {
        let value = value.unwrap_or(default);
        self.check(key, value.to_string(), "a whole number of at least 1", value > 0).map(|()| value)
    }

    /// Returns the size in bytes if it is at least one `unit`.
    pub fn size(
        &self,
        key: &'static str,
        value: Option<u64>,
        unit: u64,
        default: u64,
    ) -> Result<u64, ConfigError> {
        let Some(value) = value else { return Ok(default) };
        self.check(key, value.to_string(), "a whole number of at least 1", value > 0)?;
        Ok(value.saturating_mul(unit))
    }

    /// Returns the size of a disk of `mib` MiB, bytes.
    pub fn disk(&self, key: &'static str, mib: u64, takes: &'static str) -> Result<u64, ConfigError> {
        let fine = (16..=16 << 20).contains(&mib);
        self.check(key, mib.to_string(), takes, fine).map(|()| mib << 20)
    }
}
