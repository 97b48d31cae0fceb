//! The Debian package on a node of its own: installed, used, upgraded, removed and purged. Only in a node VM, which
//! `scripts/node/package.sh` prepares with systemd, dpkg and containerd; elsewhere the test is counted as ignored.

mod node;
mod trace;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Arguments, Trial};
use node::{Node, Running, apt, run};
use sandboxer_e2e::page::{Page, Visit};
use trace::Trace;

/// Names the packages, separated by colons: the daemon's, a later one of the daemon, and that of measurements.
const PACKAGES: &str = "SANDBOXER_E2E_PACKAGES";
const CONFIG: &str = "/etc/sandboxer/config.toml";
const CONTAINERD_CONFIG: &str = "/etc/containerd/config.toml";
/// The page whose commands install, use and remove it.
const PAGE: &str = "first-hour.md";
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
    let packages: Vec<PathBuf> = packages.split(':').map(PathBuf::from).collect();
    let [first, later, bench] = &packages[..] else { bail!("three packages, separated by colons") };
    let mut node = Node::start().await?;
    let before = Trace::take()?;
    let outcome = used(&mut node, first, later, bench).await;
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

async fn used(node: &mut Node, first: &Path, later: &Path, bench: &Path) -> Result<()> {
    let page = Page::read(PAGE)?;
    let dir = tempfile::tempdir()?;
    let name = first.file_name().context("a package has a name")?;
    std::os::unix::fs::symlink(first, dir.path().join(name))?;
    let mut reader = page.at("node", dir.path())?;
    reader.set("DEBIAN_FRONTEND", "noninteractive");
    let begin = Instant::now();
    installed(node, &mut reader).await?;
    first_pod(node, &mut reader, begin).await?;
    measurements(node, bench).await?;
    let pod = node.first_pod().await?;
    upgraded(node, later, &pod).await?;
    not_taken_over(&pod).await?;
    not_removed(node, &pod).await?;
    removed(node, &mut reader, pod).await?;
    purged(node, &mut reader).await?;
    reader.end()?;
    from_source(node, &page, dir.path()).await?;
    // Processes that have just ended leave the tables a moment later.
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}

/// From nothing to a node that can run pods.
async fn installed(node: &mut Node, reader: &mut Visit<'_>) -> Result<()> {
    node.step("apt install", async || reader.run("install").map(drop)).await?;
    run("systemctl", &["is-enabled", "sandboxer"])?;
    ensure!(!Path::new(DROP_IN).exists(), "the package has changed containerd's configuration");
    run("sandboxer", &["--check-config"])?;
    // Not on the page: measurements of KVM's speed mean nothing here. See docs/decisions/0009-node-vm.md.
    let text = std::fs::read_to_string(CONFIG)?;
    let changed = text.replace("\n# accelerator = \"auto\"\n", "\naccelerator = \"kvm\"\n");
    ensure!(changed != text, "{CONFIG} has no comment of the default accelerator");
    std::fs::write(CONFIG, changed)?;
    node.step("systemctl reload, with a changed configuration", async || {
        run("systemctl", &["reload", "sandboxer"]).map(drop)
    })
    .await?;
    expect_start_error(reader, "no runtime for \"sandboxer\" is configured")?;
    node.step("drop-in for containerd, its restart, and check", async || reader.run("containerd").map(drop))
        .await
}

/// The pod of the page: start, a look, metrics, the commands for a failure, removal.
async fn first_pod(node: &mut Node, reader: &mut Visit<'_>, begin: Instant) -> Result<()> {
    let output = node.step("the page's pod, to its log", async || reader.run("pod")).await?;
    node.note("all from apt install to that log", begin.elapsed());
    // crictl ends a command's output with empty lines of its own.
    let lines: Vec<_> = output.lines().rev().filter(|line| !line.is_empty()).collect();
    let hello = *lines.first().unwrap_or(&"");
    let kernels: Vec<_> = lines.iter().skip(1).take(2).copied().collect();
    ensure!(kernels.len() == 2 && kernels[0] != kernels[1], "one kernel of pod and node: {output}");
    ensure!(hello == format!("hello from Linux {}", kernels[1]), "{output}");
    let seen = node.step("a look at it", async || reader.run("look")).await?;
    ensure!(seen.contains("first") && seen.contains("container_start"), "{seen}");
    let metrics = node.step("metrics, with a reload", async || reader.run("metrics")).await?;
    ensure!(metrics.contains("sandboxer_pods 1"), "{metrics}");
    node.step("removal of the page's pod", async || reader.run("pod removal").map(drop)).await?;
    let listed = reader.shell("crictl pods --quiet")?;
    ensure!(listed.is_empty(), "{listed}");
    reader.run("failed")?;
    run("systemctl", &["stop", "sandboxer"])?;
    expect_start_error(reader, "/run/sandboxer/controller.sock")?;
    run("systemctl", &["start", "sandboxer"])?;
    // What containerd kept of the pod that did not start.
    reader.shell("crictl rmp --all --force").map(drop)
}

/// The package of measurements, which comes and goes without the daemon.
async fn measurements(node: &mut Node, package: &Path) -> Result<()> {
    let worker = node::worker()?;
    node.step("apt install and purge of sandboxer-bench", async || {
        apt(&["install", &package.display().to_string()])?;
        let listed = run("sandboxer-bench", &["workload", "list"])?;
        ensure!(listed.contains("redis"), "{listed}");
        apt(&["purge", "sandboxer-bench"])
    })
    .await?;
    ensure!(!Path::new("/usr/bin/sandboxer-bench").exists(), "sandboxer-bench is still there");
    ensure!(node::worker()? == worker, "the daemon was replaced");
    Ok(())
}

/// What the page's table of errors promises that the start of a pod says.
fn expect_start_error(reader: &Visit<'_>, words: &str) -> Result<()> {
    let refused = reader.shell("CRI_CONFIG_FILE=$PWD/crictl.yaml crictl runp --runtime sandboxer pod.json");
    let error = format!("{:#}", refused.err().context("a pod started on a node that cannot run it")?);
    // Where it is no terminal, crictl escapes quotes.
    ensure!(error.replace('\\', "").contains(words), "{error}");
    Ok(())
}

/// The same without a package, and its removal.
async fn from_source(node: &mut Node, page: &Page, dir: &Path) -> Result<()> {
    let clone = std::fs::read_to_string("/node/ctl/root").context("where the clone is")?;
    let mut reader = page.at("source", dir)?;
    reader.enter(Path::new(&clone));
    node.step("make install", async || reader.run("install").map(drop)).await?;
    run("systemctl", &["is-active", "sandboxer"])?;
    node.step("make uninstall", async || reader.run("remove").map(drop)).await?;
    reader.end()
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
    let output = run("sh", &["-c", "/var/lib/dpkg/info/sandboxer.postinst configure 0.1.0-1 2>&1"])?;
    ensure!(
        output.contains("no_such_key") && output.contains("the earlier build continues to run"),
        "{output}"
    );
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

async fn removed(node: &mut Node, reader: &mut Visit<'_>, pod: Running) -> Result<()> {
    node.step("removal of the pod", async || pod.remove().await).await?;
    node.step("apt remove", async || reader.run("remove").map(drop)).await?;
    for path in ["/usr/bin/sandboxer", "/usr/lib/sandboxer", "/run/sandboxer"] {
        ensure!(!Path::new(path).exists(), "{path} is still there");
    }
    for path in [CONFIG, "/var/lib/sandboxer"] {
        ensure!(Path::new(path).exists(), "{path} is gone, and the package was not purged");
    }
    ensure!(run("systemctl", &["is-active", "sandboxer"]).is_err(), "the daemon still runs");
    Ok(())
}

async fn purged(node: &mut Node, reader: &mut Visit<'_>) -> Result<()> {
    // The node had none.
    std::fs::remove_file(CONTAINERD_CONFIG)?;
    node.step("apt purge, and containerd's restart without the drop-in", async || {
        reader.run("purge").map(drop)
    })
    .await
}
