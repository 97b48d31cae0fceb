//! The table `[containers]`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ConfigError, bounds::Bounds};
use crate::{ContainersConfig, RLIMITS};

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawContainers {
    rlimits: Option<BTreeMap<String, [i64; 2]>>,
    sysctls: Option<BTreeMap<String, String>>,
    node_sysctls: Option<Vec<String>>,
}

impl RawContainers {
    /// Checks the values and sets defaults.
    pub fn resolve(
        self,
        default: ContainersConfig,
        bounds: &Bounds<'_>,
    ) -> Result<ContainersConfig, ConfigError> {
        let rlimits = match self.rlimits {
            Some(limits) => {
                limits.into_iter().map(|limit| rlimit(limit, bounds)).collect::<Result<_, _>>()?
            }
            None => default.rlimits,
        };
        let sysctls = self.sysctls.unwrap_or(default.sysctls);
        for name in sysctls.keys() {
            sysctl("containers.sysctls", name, bounds)?;
        }
        let node_sysctls = self.node_sysctls.unwrap_or(default.node_sysctls);
        for name in &node_sysctls {
            sysctl("containers.node_sysctls", name, bounds)?;
        }
        Ok(ContainersConfig { rlimits, sysctls, node_sysctls })
    }
}

/// Checks a limit. Returns it with its name in OCI.
fn rlimit(
    (name, [soft, hard]): (String, [i64; 2]),
    bounds: &Bounds<'_>,
) -> Result<(String, [u64; 2]), ConfigError> {
    const KEY: &str = "containers.rlimits";
    let takes = "a limit of setrlimit(2) such as nofile = [1024, 524288], soft and hard; -1: none";
    let number = |number: i64| if number == -1 { Some(u64::MAX) } else { u64::try_from(number).ok() };
    let oci_name = format!("RLIMIT_{}", name.to_uppercase());
    let known = RLIMITS.contains(&oci_name.as_str());
    match (number(soft), number(hard)) {
        (Some(low), Some(high)) if known && low <= high => Ok((oci_name, [low, high])),
        _ => Err((bounds.value_error)(KEY, format!("{name} = [{soft}, {hard}]"), takes)),
    }
}

fn sysctl(key: &'static str, name: &str, bounds: &Bounds<'_>) -> Result<(), ConfigError> {
    let plain =
        |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    let fine = name.split(['.', '/']).all(plain);
    bounds.check(key, format!("{name:?}"), "names of sysctls such as \"vm.max_map_count\"", fine)
}
