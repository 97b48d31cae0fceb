//! The table `[placement]`.

use sandboxer_base::Cpus;
use serde::{Deserialize, Serialize};

use super::{ConfigError, bounds::Bounds};
use crate::{PlacementConfig, PlacementPolicy, PoolConfig};

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawPlacement {
    policy: Option<PlacementPolicy>,
    reserved_cpus: Option<String>,
    huge_pages: Option<bool>,
}

impl RawPlacement {
    /// Checks the values and sets defaults.
    pub fn resolve(
        self,
        default: PlacementConfig,
        pool: &PoolConfig,
        bounds: &Bounds<'_>,
    ) -> Result<PlacementConfig, ConfigError> {
        // An empty list reserves no CPUs.
        let list = self.reserved_cpus.filter(|list| !list.trim().is_empty());
        let reserved_cpus = list.as_deref().and_then(Cpus::parse);
        let fine = list.is_some() == reserved_cpus.is_some();
        let found = format!("{:?}", list.unwrap_or_default());
        bounds.check("placement.reserved_cpus", found, "a list of CPUs such as \"0-1,8\"", fine)?;
        let huge_pages = self.huge_pages.unwrap_or(default.huge_pages);
        let takes = "false while there is a pool (pool.max): its VMs are not in huge pages";
        bounds.check("placement.huge_pages", "true".to_owned(), takes, !huge_pages || pool.max == 0)?;
        Ok(PlacementConfig {
            policy: self.policy.unwrap_or(default.policy),
            reserved_cpus,
            huge_pages,
            ..default
        })
    }
}
