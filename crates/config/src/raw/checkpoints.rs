//! The table `[checkpoints]`: what saved pods may take, and who may use them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{ConfigError, bounds::Bounds};
use crate::CheckpointsConfig;

/// Maximum age, hours: ten years.
const MAX_HOURS: u64 = 87_600;

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawCheckpoints {
    max_mib: Option<u64>,
    max_age_hours: Option<u64>,
    share_from: Option<Vec<String>>,
}

impl RawCheckpoints {
    pub fn resolve(
        self,
        default: CheckpointsConfig,
        bounds: &Bounds<'_>,
    ) -> Result<CheckpointsConfig, ConfigError> {
        let hours = self.max_age_hours.unwrap_or(0);
        let fine = hours <= MAX_HOURS;
        bounds.check("checkpoints.max_age_hours", hours.to_string(), "hours, 0 to 87600", fine)?;
        let share_from = self.share_from.unwrap_or(default.share_from);
        let fine = share_from.iter().all(|namespace| is_namespace(namespace));
        bounds.check(
            "checkpoints.share_from",
            format!("{share_from:?}"),
            "a list of names of namespaces of Kubernetes",
            fine,
        )?;
        Ok(CheckpointsConfig {
            most_bytes: bounds.size("checkpoints.max_mib", self.max_mib, 1 << 20, default.most_bytes)?,
            max_age: (hours > 0).then(|| Duration::from_secs(hours * 3600)),
            share_from,
        })
    }
}

/// Returns whether `text` is a label in DNS, as the name of a namespace is.
fn is_namespace(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}
