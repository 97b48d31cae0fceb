//! The host's hierarchies of control groups of version 1. A privileged container beside runc can mount one that the host does not have,
//! and it outlives the container if there is a group in it: then runc has that controller for every other container of the host, too.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// Longest time in which the kernel releases a hierarchy that nobody uses any more.
const RELEASED_WITHIN: Duration = Duration::from_secs(20);

/// Removes all groups of the hierarchy that is named by its controllers, in a mount namespace that ends with it: the kernel releases
/// a hierarchy without a mount and without groups.
const REMOVE: &str =
    r#"mount -t cgroup -o "$1" none "$2" && find "$2" -mindepth 1 -depth -type d -exec rmdir {} +"#;

/// The hierarchies that a host has, by the names of their controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchies(BTreeSet<String>);

impl Hierarchies {
    /// Returns those that there are now.
    pub fn now() -> Result<Self> {
        let text = fs::read_to_string("/proc/self/cgroup")
            .context("cannot read the hierarchies of control groups")?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        // The one without a name is of version 2.
        let names = text.lines().filter_map(|line| line.split(':').nth(1)).filter(|name| !name.is_empty());
        Self(names.map(str::to_owned).collect())
    }

    /// Removes those that are there and are not of these; returns their names.
    pub fn restore(&self) -> Result<Vec<String>> {
        let more: Vec<_> = Self::now()?.0.difference(&self.0).cloned().collect();
        for name in &more {
            remove(name).with_context(|| format!("cannot remove the hierarchy {name} of control groups"))?;
        }
        let began = Instant::now();
        loop {
            let now = Self::now()?;
            if now == *self {
                return Ok(more);
            }
            ensure!(
                began.elapsed() < RELEASED_WITHIN,
                "the host's hierarchies of control groups are {:?} and were {:?}: unmount what is more, or the next runs of runc have it",
                now.0,
                self.0
            );
            #[expect(
                clippy::disallowed_methods,
                reason = "no event tells that the kernel has let go of a hierarchy"
            )]
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn remove(name: &str) -> Result<()> {
    let at = tempfile::tempdir()?;
    let options = if name.starts_with("name=") { format!("none,{name}") } else { name.to_owned() };
    let mut command = Command::new("unshare");
    let output = command.args(["--mount", "sh", "-c", REMOVE, "sh", &options]).arg(at.path()).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
