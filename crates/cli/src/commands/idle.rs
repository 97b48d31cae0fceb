//! `idle`: checks whether the daemon can be removed.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use sandboxer_process::strays::{self, Stray};
use sandboxer_protocol::admin::{ListPodsRequest, ListQuarantineRequest, Pod, Quarantined};

use crate::{Global, client, client::ClientError, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli idle && systemctl stop sandboxer && sandboxer-cli idle --end

Processes that the daemon started are told by their environment, below the directory of its socket.

Exit codes: 0 nothing of a pod is left, 1 something is, or nobody can say, 2 wrong usage.";

/// Maximum time for a killed process to end.
const END: Duration = Duration::from_secs(10);
/// States in which a pod has no VM.
const WITHOUT_VM: [&str; 2] = ["created", "stopped"];

/// Check that no pod has a VM: no pod, no record in quarantine, no process
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// After the daemon has stopped: kill the VMs that waited for a pod
    #[arg(long)]
    end: bool,
}

/// Returns an error that lists everything that is left.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let run_dir = global.socket.parent().unwrap_or(Path::new("/"));
    let (mut left, answers) = match client::connect(&global.socket).await {
        Ok(mut daemon) => {
            let pods = client::answer(daemon.list_pods(ListPodsRequest {}).await)?.pods;
            let aside = client::answer(daemon.list_quarantine(ListQuarantineRequest {}).await)?;
            let mut left: Vec<String> = pods.iter().filter_map(of_pod).collect();
            left.extend(aside.entries.iter().map(of_quarantined));
            (left, true)
        }
        Err(ClientError::NoDaemon { .. }) => (Vec::new(), false),
        Err(error) => return Err(error).context("cannot say whether pods run"),
    };
    if args.end && answers {
        bail!("the daemon answers, and needs the VMs that wait for a pod: stop it before");
    }
    // Read after the daemon's response: a process that started since belongs to no pod in the response.
    let (spare, of_pods): (Vec<Stray>, Vec<Stray>) =
        strays::below(run_dir).context("cannot read /proc")?.into_iter().partition(|it| it.is_spare(run_dir));
    left.extend(of_pods.iter().map(|process| format!("process {} ({})", process.pid, process.command())));
    if !left.is_empty() {
        let left = left.join("\n  ");
        match answers {
            true => bail!(
                "pods run, and without the daemon nothing could stop them. Drain the node, or end them with \
                 'crictl rmp --force ID'; see 'sandboxer-cli quarantine' for records in quarantine:\n  {left}"
            ),
            false => bail!(
                "the daemon does not answer, and VMs run. Start it (systemctl start sandboxer) and end the pods, or \
                 kill these processes:\n  {left}"
            ),
        }
    }
    if args.end {
        end(spare)?;
    }
    Ok(())
}

/// Kills these VMs and waits for their end.
fn end(spare: Vec<Stray>) -> anyhow::Result<()> {
    for process in &spare {
        process.end().with_context(|| format!("cannot kill process {}", process.pid))?;
    }
    let deadline = Instant::now() + END;
    for process in &spare {
        if !process.wait(deadline).with_context(|| format!("cannot wait for process {}", process.pid))? {
            bail!("process {} was killed {} s ago and still exists", process.pid, END.as_secs());
        }
    }
    Ok(())
}

fn of_pod(pod: &Pod) -> Option<String> {
    let busy = !WITHOUT_VM.contains(&pod.state.as_str());
    let name = || render::plain(&format!("{}/{}", pod.namespace, pod.name));
    busy.then(|| format!("pod {} ({}) is {}", render::plain(&pod.id), name(), render::plain(&pod.state)))
}

fn of_quarantined(entry: &Quarantined) -> String {
    format!("record {} is in quarantine", render::plain(&entry.name))
}
