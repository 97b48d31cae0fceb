//! A guest keeps the agent with which it was started, also when the daemon is replaced by another build: pods of the
//! release before.
//!
//! `scripts/agent-before.sh` builds the agent of that release, and make names it in `SANDBOXER_E2E_AGENT_BEFORE`.
//! Without it, in a clone without that history, these cases are passed over, and counted.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::bystander::Bystander;
use sandboxer_e2e::case::{Case, PATIENCE, idle, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::insist::once_seen;

use crate::faults::streams::Streams;
use crate::parity::{of_image, with_volumes};

crate::cases![AgentBefore: the_one_of_the_release_before_is_served];

/// Returns the agent of the release before.
pub fn before() -> Option<OsString> {
    std::env::var_os("SANDBOXER_E2E_AGENT_BEFORE").filter(|path| !path.is_empty())
}

/// Packs the agent into an initramfs in the stack's directory.
fn initramfs_before(case: &Case) -> Result<PathBuf> {
    let agent = before().context("SANDBOXER_E2E_AGENT_BEFORE names no agent")?;
    let dir = case.stack.dir().join("guest-before");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/guest-image.sh");
    let output = Command::new(script).arg("--out").arg(&dir).arg("initramfs").arg(agent).output()?;
    ensure!(output.status.success(), "guest-image.sh: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(dir.join("initramfs.cpio"))
}

/// Reloads the daemon, and checks that its guests have this initramfs from now on.
async fn reload(case: &Case, config: &str, initramfs: &Path) -> Result<()> {
    let before = case.stack.worker()?;
    fs::write(case.stack.dir().join("sandboxer/config.toml"), config)?;
    kill(case.stack.pid("sandboxer")?, Signal::SIGHUP)?;
    eventually("another worker", PATIENCE, || async {
        Ok(case.stack.worker().ok().filter(|worker| *worker != before))
    })
    .await?;
    let version = case.stack.cli_json(&["version"])?;
    ensure!(version["daemon"]["initramfs"] == *initramfs.to_string_lossy(), "{version}");
    Ok(())
}

async fn the_one_of_the_release_before_is_served(case: Case) -> Result<()> {
    let sound = fs::read_to_string(case.stack.dir().join("sandboxer/config.toml"))?;
    let line = sound.lines().find(|line| line.starts_with("initramfs = ")).context("no initramfs")?;
    let ours = PathBuf::from(line.trim_start_matches("initramfs = ").trim_matches('"'));
    let theirs = initramfs_before(&case)?;
    ensure!(fs::read(&ours)? != fs::read(&theirs)?, "{} is the agent of today", theirs.display());

    let changed = sound.replace(line, &format!("initramfs = {theirs:?}"));
    reload(&case, &changed, &theirs).await?;
    // Started from the initramfs, not from a copy of a template of ours.
    let older = Case { handler: "sandboxer-boot", ..case.clone() };
    let outcome = upgraded_beneath(&case, &older, || reload(&case, &sound, &ours)).await;
    if outcome.is_err() {
        let _ = reload(&case, &sound, &ours).await;
    }
    outcome
}

/// A pod with the older agent, under a daemon of today before and after `upgrade`, from which on guests have today's
/// agent.
async fn upgraded_beneath<F: Future<Output = Result<()>>>(
    case: &Case,
    older: &Case,
    upgrade: impl FnOnce() -> F,
) -> Result<()> {
    let bystander = Bystander::start(older, 20_000).await.context("a pod with the older agent")?;
    let pod = older.pod().await?;
    let mut streams = Streams::open(older, &pod).await.context("streams of the older agent")?;
    streams.check().await?;
    ensure!(pod.output("echo before; uname -s").await? == "before\nLinux");
    let vmms = case.stack.vmms()?;

    upgrade().await?;
    for vmm in &vmms {
        ensure!(case.stack.vmms()?.contains(vmm), "VMM {vmm} was lost");
    }
    bystander.check().await.context("the older agent's pod, after the upgrade")?;
    streams.check().await.context("the older agent's streams, after the upgrade")?;
    let container = pod.start(idle("after")).await.context("a new container of the older agent")?;
    ensure!(container.sh("echo exec").await? == "exec");
    let ended = pod.run(shell("ends", "echo out; echo err >&2; exit 5")).await?;
    ensure!(
        ended.status.exit_code == 5 && ended.logs.stdout == "out\n" && ended.logs.stderr == "err\n",
        "{ended:?}"
    );
    // It does not know volumes of images on the container's disk, which today's daemon would ask for.
    let name = with_volumes(case).await?;
    let written = "cat /var/lib/db/link && echo x >/cache/here && df /var/lib/db | grep -c sandboxer; exit 6";
    let ended = pod.run(of_image(shell("volumes", written), name)).await.context("an image's volume")?;
    ensure!(ended.status.exit_code == 6 && ended.logs.stdout == "of the image\n1\n", "{ended:?}");
    let stats = case.cri.stats(&container.id).await.context("statistics of the older agent")?;
    ensure!(
        stats.memory.is_some_and(|memory| memory.working_set_bytes.is_some()),
        "no memory in the statistics"
    );
    once_seen(|| case.cri.stop(&container.id, 30)).await?;
    ensure!(container.status().await?.exit_code == 0, "{:?}", container.status().await?);

    // Beside them, guests have today's agent.
    ensure!(case.pod().await?.output("echo today").await? == "today");
    bystander.end(older).await?;
    streams.end().await?;
    case.clean_up().await
}
