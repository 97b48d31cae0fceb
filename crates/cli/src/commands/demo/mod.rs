//! `sandboxer-cli demo`: shows in about a minute what a pod in a microVM is and costs, beside runc.

mod cdf;
mod crash;
mod figures;
mod look;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use sandboxer_command::interrupt;
use sandboxer_command::target::Target;
use sandboxer_probe::{measure::Bench, startup};
use sandboxer_protocol::admin::{ListTemplatesRequest, VersionResponse};
use tokio_util::sync::CancellationToken;

use super::report::Look;
use crate::{Global, client, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli demo
  sandboxer-cli demo --serial 20 --output results        more starts, and a page of them
  sandboxer-cli demo --kill-daemon                       on a stack of your own: also kills the daemon

Exit code: 0 if all of it was seen, 1 if not.";

/// Pause in which the daemon refills its pool.
const REFILL: Duration = Duration::from_secs(1);

/// Maximum time until the pool gets its next VM; after that it counts as full.
const NEXT_VM: Duration = Duration::from_secs(5);
/// Maximum time until the pool gets its first VM, whose template is made first.
const FIRST_VM: Duration = Duration::from_secs(60);

/// Start pods in microVMs beside runc: times, memory, a look inside, and what a crash costs
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Runtime handler of the pods; its -template and -boot are shown, too, if containerd has them
    #[arg(long, default_value = "sandboxer")]
    runtime: String,
    /// Runtime handler to compare with; empty for none
    #[arg(long, default_value = "runc")]
    baseline: String,
    /// Starts one after the other, of each handler
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    serial: u32,
    /// Pods started at once; 0 for none
    #[arg(long, default_value_t = 10)]
    group: u32,
    /// Pod counts at which memory is measured
    #[arg(long, value_delimiter = ',', default_value = "1,5,10")]
    sweep: Vec<u32>,
    /// Also kill the daemon's worker and front under running pods, and look for what was lost
    #[arg(long)]
    kill_daemon: bool,
    #[command(flatten)]
    target: Target,
    /// Directory for the results; it must not contain any yet
    #[arg(long)]
    output: Option<PathBuf>,
}

/// State shared by the parts of the demo.
struct Demo<'a> {
    args: &'a Args,
    global: &'a Global,
    bench: &'a Bench,
    cancel: &'a CancellationToken,
}

/// Runs the demo. Removes every pod that it started before it returns.
pub async fn run(args: Args, global: &Global) -> Result<()> {
    let bench = args.target.open(global)?;
    let cancel = interrupt::on_signal().context("cannot listen for Ctrl-C")?;
    startup::check_handlers(&bench.runtime, std::slice::from_ref(&args.runtime)).await?;
    let demo = Demo { args: &args, global, bench: &bench, cancel: &cancel };
    demo.introduce().await?;
    demo.fill_pool().await?;
    demo.look().await?;
    demo.starts().await?;
    demo.memory().await?;
    if args.kill_daemon {
        demo.crash().await?;
    }
    if let Some(dir) = &args.output {
        let page = dir.join("report.html");
        super::report::write(&[dir.join("startup"), dir.join("memory")], &page, &Look::default())?;
        render::print(&format!("\nall of it as a page: {}", page.display()))?;
    }
    heading("next")?;
    Ok(render::print(NEXT)?)
}

const NEXT: &str = "\
make up && source target/stack/env             a stack of your own; then crictl runp -r sandboxer pod.json
sandboxer-cli startup --serial 100             start-up times of any runtime handlers, with intervals and CDFs
sandboxer-cli check --fix-hints                what a node of yours still needs";

impl Demo<'_> {
    /// Prints what runs here, and what makes this host slow.
    async fn introduce(&self) -> Result<()> {
        let version = self.bench.runtime.version().await?;
        render::print(&format!("{} {}, unforked", version.name, version.version))?;
        let Some(daemon) = self.version().await? else { return Ok(()) };
        render::print(&format!("sandboxer {}: {} {}", daemon.version, daemon.vmm, daemon.vmm_version))?;
        if daemon.accelerator != "kvm" {
            render::print(&format!(
                "\nGuests are emulated here ({}). That makes whatever runs in a guest ten times as slow: boots above all.\n\
                 On KVM a pod from the pool takes 0.44 of runc's time, a boot 0.97: docs/figures.md.",
                render::plain(&daemon.accelerator_reason)
            ))?;
        }
        Ok(())
    }

    /// Waits until the pool gets no more VMs, and prints how many it has.
    async fn fill_pool(&self) -> Result<()> {
        if self.bench.trace.is_none() {
            return Ok(());
        }
        let bar = ProgressBar::new_spinner().with_message("filling the pool");
        let (mut waiting, mut grown) = (0, Instant::now());
        while grown.elapsed() < if waiting == 0 { FIRST_VM } else { NEXT_VM } {
            self.check_interrupted()?;
            let mut daemon = client::connect(&self.global.socket).await?;
            let now = daemon.list_templates(ListTemplatesRequest {}).await?.into_inner().pool.len();
            if now > waiting {
                (waiting, grown) = (now, Instant::now());
                bar.set_message(format!("filling the pool: {waiting} VMs"));
            }
            bar.tick();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bar.finish_and_clear();
        Ok(render::print(&format!(
            "{waiting} VMs wait in the pool: copies of a template that was just made"
        ))?)
    }

    /// Returns the daemon's version and processes; `None` if there is no daemon.
    async fn version(&self) -> Result<Option<VersionResponse>> {
        let Some(trace) = &self.bench.trace else { return Ok(None) };
        match trace.version().await {
            Ok(version) => Ok(Some(version)),
            Err(status) => bail!("no daemon answers at {}: {}", trace.socket().display(), status.message()),
        }
    }

    fn check_interrupted(&self) -> Result<()> {
        if self.cancel.is_cancelled() {
            bail!("interrupted");
        }
        Ok(())
    }
}

fn heading(text: &str) -> std::io::Result<()> {
    render::print(&format!("\n── {text}\n"))
}
