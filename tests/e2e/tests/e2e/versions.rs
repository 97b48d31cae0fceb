//! Which cases mean nothing beside which containerd, and why; and the table of what ran beside which, which a run writes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use sandboxer_e2e::{document, stack::Stack};

/// First version with sandbox controllers of other processes; older ones run the launcher for each pod.
const HAS_CONTROLLERS: (u32, u32) = (2, 0);

/// Why pods end with the daemon on the launcher's route.
const ENDS_WITH_THE_DAEMON: &str = "without a sandbox controller, containerd takes the end of its connection to the \
                                    daemon's main process for the end of the pod, too";

/// Cases, the first containerd beside which they mean something, and what an older one lacks.
const NEEDS: &[(&str, (u32, u32), &str)] = &[
    ("daemon::killed_and_started_again", HAS_CONTROLLERS, ENDS_WITH_THE_DAEMON),
    ("daemon::ended_politely_and_started_again", HAS_CONTROLLERS, ENDS_WITH_THE_DAEMON),
    ("daemon::vmm_that_does_not_work", HAS_CONTROLLERS, ENDS_WITH_THE_DAEMON),
    ("daemon::record_that_is_not_understood", HAS_CONTROLLERS, ENDS_WITH_THE_DAEMON),
    ("sandbox::limits_of_the_pod", (2, 3), "CRI has no UpdatePodSandboxResources, or does not implement it"),
    (
        "resize::limits_grow_the_vm_and_shrink_it",
        (2, 3),
        "CRI has no UpdatePodSandboxResources, or does not implement it",
    ),
    (
        "sandbox::limits_beyond_the_vm",
        (2, 3),
        "CRI has no UpdatePodSandboxResources, or does not implement it",
    ),
    (
        "lifecycle::stop_and_remove_twice",
        (1, 7),
        "CRI answers a stop of a pod that does not exist with an error",
    ),
    ("snapshotters::native_has_one_of_its_own", (1, 7), "a runtime handler has no snapshotter of its own"),
    ("snapshotters::blockfile_comes_as_it_is", (1, 7), "there is no snapshotter of this name"),
    (
        "snapshotters::erofs_comes_as_it_is",
        (2, 3),
        "its erofs snapshotter has no writable layers of a given size",
    ),
    (
        "parity::unprivileged_ports_and_pings",
        HAS_CONTROLLERS,
        "by default it keeps the kernel's sysctls of ports and pings",
    ),
    ("shares::read_only_as_deep_as_asked", HAS_CONTROLLERS, "CRI has no recursively read-only mounts"),
];

/// The stack's containerd.
#[derive(Debug, Clone)]
pub struct Containerd {
    /// As it tells: `2.4.2`.
    pub version: String,
    number: (u32, u32),
}

impl Containerd {
    /// Asks the stack's program.
    pub fn query(stack: &Stack) -> Result<Self> {
        let output = stack.command("containerd").arg("--version").output()?;
        let text = String::from_utf8(output.stdout)?;
        // containerd github.com/containerd/containerd/v2 v2.4.2 revision
        let version = text.split_whitespace().nth(2).context("containerd --version tells none")?;
        let version = version.trim_start_matches('v').to_owned();
        let mut numbers = version.split('.').map(str::parse);
        let number = match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
            _ => anyhow::bail!("cannot understand containerd's version {version:?}"),
        };
        Ok(Self { version, number })
    }

    /// Returns how it reaches the daemon.
    pub fn route(&self) -> &'static str {
        if self.number < HAS_CONTROLLERS { "launcher" } else { "sandbox controller" }
    }

    /// Returns why a case means nothing beside it.
    pub fn lacks(&self, case: &str) -> Option<&'static str> {
        let (_, _, why) = NEEDS.iter().find(|(name, since, _)| *name == case && self.number < *since)?;
        Some(why)
    }
}

/// Checks that [`NEEDS`] names cases that exist.
pub fn check(known: &[&str]) -> Result<()> {
    let lost: Vec<_> = NEEDS.iter().map(|(name, ..)| *name).filter(|name| !known.contains(name)).collect();
    anyhow::ensure!(lost.is_empty(), "these cases do not exist: {lost:?}");
    Ok(())
}

/// What a run came to.
#[derive(Debug)]
pub struct Outcome<'a> {
    /// Beside what.
    pub containerd: &'a Containerd,
    /// Number of cases that passed.
    pub passed: usize,
    /// Cases that failed.
    pub failed: Vec<&'a str>,
    /// Cases that mean nothing there.
    pub not_applicable: Vec<&'a str>,
}

/// Mark before the table in a document.
const MARK: &str = "<!-- made by the runs -->\n";
const HEAD: &str = "| containerd | route | passed | failed | not applicable |\n|---|---|--:|---|---|\n";

/// Writes the run's line into the table in a document; the lines of other versions stay.
pub fn put_into(document: &Path, outcome: &Outcome<'_>) -> Result<()> {
    document::replace(document, MARK, |old| table(old, outcome))
}

/// Returns the table with this run's line in the place of an earlier one for the same version.
fn table(old: &str, outcome: &Outcome<'_>) -> String {
    let mut lines: BTreeMap<Vec<u32>, String> = old
        .lines()
        .filter_map(|line| Some((key(line.split('|').nth(1)?.trim())?, format!("{line}\n"))))
        .collect();
    let version = &outcome.containerd.version;
    if let Some(key) = key(version) {
        lines.insert(key, line(outcome));
    }
    let mut table = HEAD.to_owned();
    lines.into_values().for_each(|line| table += &line);
    table += "\n| not applicable before | case | why |\n|---|---|---|\n";
    for (case, (major, minor), why) in NEEDS {
        let _ = writeln!(table, "| {major}.{minor} | `{case}` | {why} |");
    }
    table
}

fn line(outcome: &Outcome<'_>) -> String {
    let names = |cases: &[&str]| match cases {
        [] => "0".to_owned(),
        cases => format!("{}: `{}`", cases.len(), cases.join("`, `")),
    };
    format!(
        "| {} | {} | {} | {} | {} |\n",
        outcome.containerd.version,
        outcome.containerd.route(),
        outcome.passed,
        names(&outcome.failed),
        outcome.not_applicable.len(),
    )
}

/// Returns the numbers of a version; `None` for other text.
fn key(version: &str) -> Option<Vec<u32>> {
    version
        .split('.')
        .map(|number| number.parse().ok())
        .collect::<Option<Vec<_>>>()
        .filter(|key| key.len() == 3)
}
