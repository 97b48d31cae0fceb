//! `pods`: the list of pods.

use sandboxer_protocol::admin::{ListPodsRequest, Pod};

use crate::{Global, client, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli pods
  sandboxer-cli pods --quiet | xargs -n1 sandboxer-cli inspect
  sandboxer-cli pods --json | jq -r '.[] | select(.state == \"ready\") | .vmm_pid'

START is the time from the request to the agent's ready message. CONTAINERS is the number of running
containers and of all.";

/// List pods, oldest first
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, visible_alias = "ps")]
pub struct Args {
    /// List only pods of this Kubernetes namespace
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// List only pods in this state
    #[arg(short, long, value_parser = ["created", "starting", "ready", "stopping", "stopped", "unknown"])]
    state: Option<String>,
    /// Print only the pods' full ids
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
}

impl Args {
    fn wants(&self, pod: &Pod) -> bool {
        self.namespace.as_ref().is_none_or(|namespace| *namespace == pod.namespace)
            && self.state.as_ref().is_none_or(|state| *state == pod.state)
    }
}

/// Prints the list.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let mut daemon = client::connect(&global.socket).await?;
    let answer = client::answer(daemon.list_pods(ListPodsRequest {}).await)?;
    if !answer.records_problem.is_empty() {
        let problem = render::plain(&answer.records_problem);
        eprintln!(
            "sandboxer-cli: pods run, but what changes is not recorded ({problem}): see 'sandboxer-cli check'"
        );
    }
    let mut pods = answer.pods;
    pods.retain(|pod| args.wants(pod));
    if global.json {
        return render::print_json(&pods);
    }
    if args.quiet {
        for pod in &pods {
            render::print(&render::plain(&pod.id))?;
        }
        return Ok(());
    }
    let header =
        ["POD ID", "NAME", "NAMESPACE", "STATE", "AGE", "START", "VCPUS", "MEMORY", "CONTAINERS", "VMM PID"];
    Ok(render::print(&render::table(header, pods.iter().map(row)))?)
}

fn row(pod: &Pod) -> Vec<String> {
    let running = pod.containers.iter().filter(|container| container.state == "running").count();
    vec![
        render::short(&pod.id),
        render::plain(&pod.name),
        render::plain(&pod.namespace),
        render::plain(&pod.state),
        render::age(pod.created_at_ns),
        start(pod),
        pod.vcpus.to_string(),
        render::mib(pod.memory_mib),
        format!("{running}/{}", pod.containers.len()),
        if pod.vmm_pid == 0 { "-".into() } else { pod.vmm_pid.to_string() },
    ]
}

/// Returns the duration of the whole start; `-` until it is over, or if it failed.
fn start(pod: &Pod) -> String {
    let is_started = pod.stages.iter().all(|step| step.outcome == "ok") && pod.state != "starting";
    match pod.stages.iter().map(|step| step.begin_ns + step.duration_ns).max() {
        Some(end) if is_started => render::duration(end),
        _ => "-".into(),
    }
}
