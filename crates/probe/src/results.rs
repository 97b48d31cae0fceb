//! Results of all kinds, as commands get them by their paths.

use std::path::PathBuf;

use crate::store::{self, Loaded as Startup, StoreError};
use crate::workload::store::{self as workload, Loaded as Workload};

/// Results in the order of their paths, by kind.
#[derive(Debug, Clone, Default)]
pub struct Results {
    /// Results of `workload`.
    pub workloads: Vec<Workload>,
    /// Results of `startup` and `mem-report`.
    pub startups: Vec<Startup>,
}

/// Why a result cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A result of `startup` or `mem-report` cannot be read.
    #[error(transparent)]
    Startup(#[from] StoreError),
    /// A result of `workload` cannot be read.
    #[error(transparent)]
    Workload(#[from] workload::LoadError),
}

impl Results {
    /// Loads directories that `workload`, `startup` or `mem-report` wrote, or text files of times.
    pub fn load(paths: &[PathBuf]) -> Result<Self, LoadError> {
        let mut results = Self::default();
        for path in paths {
            match workload::is_one(path) {
                true => results.workloads.push(workload::load(path)?),
                false => results.startups.push(store::load(path)?),
            }
        }
        Ok(results)
    }

    /// Returns all runtimes, in the order of their first appearance.
    pub fn runtimes(&self) -> Vec<String> {
        let of_workloads =
            self.workloads.iter().flat_map(|result| result.report.series.iter().map(|s| &s.runtime));
        let of_startups =
            self.startups.iter().flat_map(|result| result.report.series.iter().map(|s| &s.runtime));
        let mut names: Vec<String> = Vec::new();
        for name in of_workloads.chain(of_startups) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }
}
