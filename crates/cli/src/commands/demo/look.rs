//! One pod, seen from inside and from outside.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use sandboxer_probe::{
    attribution::Role,
    document::{Document, terminal},
    ledger::{self, Ledger},
    measure::Bench,
    present,
    runtime::Listed,
    timeline::{self, RUN_LABEL, Recipe},
};

use super::{Demo, heading};
use crate::render;

impl Demo<'_> {
    /// Starts a pod; shows its log, its kernel, its processes and the host's processes that work for it.
    pub(super) async fn look(&self) -> Result<()> {
        let mut recipe = self.args.target.recipe();
        recipe.command =
            ["sh", "-c", "echo \"hello from $(hostname), kernel $(uname -r)\"; exec sleep 86400"]
                .map(str::to_owned)
                .to_vec();
        heading(&format!("one pod, on handler {}", self.args.runtime))?;
        let shown = self.show(&recipe).await;
        let removed = timeline::remove_all(&self.bench.runtime, &recipe.run).await;
        shown?;
        removed?;
        self.check_interrupted()
    }

    async fn show(&self, recipe: &Recipe) -> Result<()> {
        let (bench, name) = (self.bench, "demo");
        let start =
            timeline::start(&bench.runtime, &bench.watch, recipe, &self.args.runtime, name, self.cancel)
                .await;
        if let Err(error) = &start.end {
            bail!("the pod did not start: {error}");
        }
        let Some(container) = start.container_id.as_deref() else { bail!("the pod has no container") };
        let log = std::fs::read_to_string(bench.watch.dir().join(format!("{name}.log")))?;
        let line = log.lines().next().and_then(|line| line.splitn(4, ' ').nth(3)).unwrap_or_default();
        render::print(&format!("its log            {}", render::plain(line)))?;
        let inside = exec(bench, container, "uname -r").await?;
        let outside = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
        render::print(&format!("uname -r           {inside} in the pod, {} on the host", outside.trim()))?;
        let processes = exec(bench, container, "ps -o pid,args").await?;
        let first = processes.lines().nth(1).unwrap_or_default().trim();
        render::print(&format!("ps                 {first}: the only process that it sees beside this ps"))?;

        let mine = |pod: &Listed| pod.labels.get(RUN_LABEL) == Some(&recipe.run);
        let ledger = ledger::take(&bench.runtime, mine, &BTreeSet::new()).await?;
        let processes =
            Document { parts: present::ledger(&self.args.runtime, &ledger), ..Document::default() };
        render::print(&format!("\n{}\n", terminal::render(&processes)))?;
        Ok(render::print(&format!(
            "{} VMM, {} shims, {} pause containers, and one daemon for all pods of the node",
            count(&ledger, Role::Vmm),
            count(&ledger, Role::Shim),
            count(&ledger, Role::Pause)
        ))?)
    }
}

fn count(ledger: &Ledger, role: Role) -> usize {
    ledger.entries.iter().filter(|entry| entry.found.role == role).count()
}

/// Runs a command in a container and returns what it printed.
pub(super) async fn exec(bench: &Bench, container: &str, command: &str) -> Result<String> {
    let output = bench.runtime.exec_sync(container, ["sh", "-c", command], None).await?;
    if output.exit_code != 0 {
        bail!(
            "'{command}' exited with {}: {}",
            output.exit_code,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}
