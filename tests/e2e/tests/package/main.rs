//! The Debian package on a node of its own: installed, used, upgraded, removed and purged. Only in a node VM, which
//! `scripts/node/package.sh` prepares with systemd, dpkg and containerd; elsewhere the test is counted as ignored.

mod node;
mod trace;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Arguments, Trial};
use node::{Node, Running, apt, run};
use trace::Trace;

/// Names the two packages, of which the second is the later one, separated by a colon.
const PACKAGES: &str = "SANDBOXER_E2E_PACKAGES";
const CONFIG: &str = "/etc/sandboxer/config.toml";
const CONTAINERD_CONFIG: &str = "/etc/containerd/config.toml";
const DROP_IN: &str = "/etc/containerd/conf.d/sandboxer.toml";

fn main() -> ExitCode {
    let is_node = std::env::var_os(PACKAGES).is_some() && Path::new("/node/ctl").exists();
    let trial = Trial::test("package::is_installed_used_upgraded_removed_and_purged", || {
        let runtime = tokio::runtime::Runtime::new()?;
        runtime.block_on(story()).map_err(|error| format!("{error:#}").into())
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial.with_ignored_flag(!is_node)]).exit_code()
}

async fn story() -> Result<()> {
    let packages = std::env::var(PACKAGES)?;
    let (first, later) = packages.split_once(':').context("two packages, separated by a colon")?;
    let (first, later) = (PathBuf::from(first), PathBuf::from(later));
    let mut node = Node::start().await?;
    let before = Trace::take()?;
    let outcome = used(&mut node, &first, &later).await;
    node.print_times();
    if outcome.is_err() {
        let log = run(
            "journalctl",
            &["--no-pager", "-n", "60", "-p", "warning", "-u", "sandboxer", "-u", "containerd"],
        );
        eprintln!("{}", log.unwrap_or_default());
    }
    outcome?;
    let left = Trace::take()?.beyond(&before);
    ensure!(left.is_empty(), "the purge has left or changed:\n{}", left.join("\n"));
    Ok(())
}

async fn used(node: &mut Node, first: &Path, later: &Path) -> Result<()> {
    let pod = installed(node, first).await?;
    upgraded(node, later, &pod).await?;
    not_taken_over(&pod).await?;
    not_removed(node, &pod).await?;
    removed(node, pod).await?;
    purged(node).await
}

/// From nothing to a pod, by the steps of README.Debian.
async fn installed(node: &mut Node, package: &Path) -> Result<Running> {
    let begin = std::time::Instant::now();
    node.step("apt install", async || apt(&["install", &package.display().to_string()])).await?;
    run("systemctl", &["is-active", "sandboxer"])?;
    run("systemctl", &["is-enabled", "sandboxer"])?;
    ensure!(!Path::new(DROP_IN).exists(), "the package has changed containerd's configuration");
    run("sandboxer", &["--check-config"])?;
    // Measurements of KVM's speed mean nothing here: docs/decisions/0009-node-vm.md.
    let text = std::fs::read_to_string(CONFIG)?;
    let changed = text.replace("\n# accelerator = \"auto\"\n", "\naccelerator = \"kvm\"\n");
    ensure!(changed != text, "{CONFIG} has no comment of the default accelerator");
    std::fs::write(CONFIG, changed)?;
    node.step("systemctl reload, with a changed configuration", async || {
        run("systemctl", &["reload", "sandboxer"]).map(drop)
    })
    .await?;
    node.step("drop-in for containerd, and its restart", async || {
        std::fs::write(CONTAINERD_CONFIG, run("containerd", &["config", "default"])?)?;
        std::fs::copy("/usr/share/sandboxer/containerd.toml", DROP_IN)?;
        run("systemctl", &["restart", "containerd"]).map(drop)
    })
    .await?;
    let pod = node.first_pod().await?;
    node.note("all from apt install to the first line of a container", begin.elapsed());
    Ok(pod)
}

async fn upgraded(node: &mut Node, package: &Path, pod: &Running) -> Result<()> {
    let worker = node::worker()?;
    let edited = std::fs::read_to_string(CONFIG)?;
    node.step("apt install of a later version, with a pod", async || {
        apt(&["install", &package.display().to_string()])
    })
    .await?;
    let version = run("dpkg-query", &["-W", "-f=${Version}", "sandboxer"])?;
    ensure!(package.display().to_string().contains(&format!("_{version}_")), "{version} is installed");
    ensure!(node::worker()? != worker, "the earlier worker is still there");
    ensure!(std::fs::read_to_string(CONFIG)? == edited, "the upgrade has changed {CONFIG}");
    pod.goes_on().await.context("after the upgrade")
}

/// A configuration that the installed build refuses: the earlier one continues, and apt's output says what to do.
async fn not_taken_over(pod: &Running) -> Result<()> {
    let (worker, good) = (node::worker()?, std::fs::read_to_string(CONFIG)?);
    std::fs::write(CONFIG, format!("no_such_key = 1\n{good}"))?;
    // As dpkg calls it after unpacking a later version.
    let said = run("sh", &["-c", "/var/lib/dpkg/info/sandboxer.postinst configure 0.1.0-1 2>&1"])?;
    ensure!(said.contains("no_such_key") && said.contains("the earlier build continues to run"), "{said}");
    ensure!(node::worker()? == worker, "the worker was replaced");
    pod.goes_on().await.context("with a configuration that is refused")?;
    std::fs::write(CONFIG, good)?;
    run("systemctl", &["reload", "sandboxer"])?;
    ensure!(node::worker()? != worker, "the reload changed nothing");
    pod.goes_on().await.context("with the good configuration")
}

/// After a removal nobody could stop the pod's VM. It is refused with a daemon, and without one.
async fn not_removed(node: &mut Node, pod: &Running) -> Result<()> {
    let refused = || {
        let refused = apt(&["remove", "sandboxer"]).err().context("the package was removed under a pod")?;
        Ok::<_, anyhow::Error>(format!("{refused:#}"))
    };
    node.step("apt remove with a pod: refused", async || {
        let words = refused()?;
        ensure!(words.contains("not removed: pods run") && words.contains(&pod.id), "{words}");
        Ok(())
    })
    .await?;
    pod.goes_on().await.context("after a removal that was refused")?;
    run("systemctl", &["stop", "sandboxer"])?;
    node.step("apt remove with a VM and no daemon: refused", async || {
        let words = refused()?;
        ensure!(words.contains("not removed: the daemon does not answer, and VMs run"), "{words}");
        Ok(())
    })
    .await?;
    // The package that stays starts its daemon.
    run("systemctl", &["is-active", "sandboxer"]).map(drop)
}

async fn removed(node: &mut Node, pod: Running) -> Result<()> {
    node.step("removal of the pod", async || pod.remove().await).await?;
    node.step("apt remove", async || apt(&["remove", "sandboxer"])).await?;
    for gone in ["/usr/bin/sandboxer", "/usr/lib/sandboxer", "/run/sandboxer"] {
        ensure!(!Path::new(gone).exists(), "{gone} is still there");
    }
    for kept in [CONFIG, "/var/lib/sandboxer"] {
        ensure!(Path::new(kept).exists(), "{kept} is gone, and the package was not purged");
    }
    ensure!(run("systemctl", &["is-active", "sandboxer"]).is_err(), "the daemon still runs");
    Ok(())
}

async fn purged(node: &mut Node) -> Result<()> {
    node.step("apt purge", async || apt(&["purge", "sandboxer"])).await?;
    std::fs::remove_file(DROP_IN)?;
    std::fs::remove_file(CONTAINERD_CONFIG)?;
    node.step("containerd's restart without the drop-in", async || {
        run("systemctl", &["restart", "containerd"]).map(drop)
    })
    .await?;
    // Processes that have just ended leave the tables a moment later.
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}
