//! `place`: the NUMA nodes on which pods run and on which their memory is.

use anyhow::{Context, bail};
use sandboxer_protocol::admin::{
    ListPlacesRequest, ListPlacesResponse, MovePodRequest, MovePodResponse, NodeMemory, NumaNode, Place,
};

use crate::{Global, client, client::ClientError, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli place
  sandboxer-cli place 3f2a
  sandboxer-cli place --move 3f2a 1           its CPUs and its memory; prints what it cost
  sandboxer-cli place --json | jq '.places[] | {id, node, memory}'

LOCAL is the part of a pod's memory that is on its node; MEMORY and BY NODE count it with its template, but
without files that the VMM only reads. POLICY says who chose CPUs: numa (the daemon, [placement]), cri
(kubelet's CPU manager), or none (the kernel).";

/// Show on which NUMA node each pod runs and where its memory is, or move a pod
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Pod id, or a unique prefix of it [default: all pods]
    #[arg(value_name = "POD", conflicts_with = "target")]
    pod: Option<String>,
    /// Move this pod to this node
    #[arg(long = "move", num_args = 2, value_names = ["POD", "NODE"])]
    target: Option<Vec<String>>,
}

/// Prints the places, or moves a pod.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let mut daemon = client::connect(&global.socket).await?;
    if let Some([pod, node]) = args.target.as_deref() {
        let node = node.parse().with_context(|| format!("{node:?} is no number of a node"))?;
        let request = MovePodRequest { id: pod.clone(), node };
        let mut answers = client::answer(daemon.move_pod(request).await)?;
        let Some(moved) = answers.message().await.map_err(ClientError::from)? else {
            bail!("the daemon ended before the pod was moved");
        };
        return if global.json { render::print_json(&moved) } else { Ok(render::print(&cost(&moved))?) };
    }
    let request = ListPlacesRequest { id: args.pod.unwrap_or_default() };
    let answer = client::answer(daemon.list_places(request).await)?;
    if global.json { render::print_json(&answer) } else { Ok(render::print(&text(&answer))?) }
}

fn text(answer: &ListPlacesResponse) -> String {
    let nodes = render::table(
        ["NODE", "CPUS", "MEMORY", "AVAILABLE", "VMS", "VCPUS", "PLACED"],
        answer.nodes.iter().map(node_row),
    );
    let placed = match (answer.active, answer.policy.as_str()) {
        (true, _) => "new pods get a node if they fit one",
        (false, "off") => "the kernel places pods",
        (false, _) => "there is only one node for VMs: nothing to choose",
    };
    let policy = format!("Policy {}: {placed}", render::plain(&answer.policy));
    if answer.places.is_empty() {
        return format!("{policy}\n\n{nodes}\n\nno pods");
    }
    let header = ["POD ID", "NAME", "SIZE", "NODE", "CPUS", "MEMORY", "BY NODE", "LOCAL", "POLICY", "WHY"];
    format!("{policy}\n\n{nodes}\n\n{}", render::table(header, answer.places.iter().map(row)))
}

fn node_row(node: &NumaNode) -> Vec<String> {
    vec![
        node.id.to_string(),
        render::plain(&node.cpus),
        render::bytes(node.memory_bytes),
        render::bytes(node.available_bytes),
        node.vms.to_string(),
        node.vcpus.to_string(),
        render::mib(node.placed_mib),
    ]
}

fn row(place: &Place) -> Vec<String> {
    let or = |text: &str, none: &str| if text.is_empty() { none.to_owned() } else { render::plain(text) };
    vec![
        render::short(&place.id),
        render::plain(&place.name),
        format!("{} vCPU, {}", place.vcpus, render::mib(place.memory_mib)),
        place.node.map_or_else(|| "-".to_owned(), |node| node.to_string()),
        or(&place.cpus, "all"),
        render::bytes(total(&place.memory)),
        or(&by_node(&place.memory), "-"),
        local(place).map_or_else(|| "-".to_owned(), |share| format!("{share:.1} %")),
        render::plain(&place.policy),
        or(&place.reason, "-"),
    ]
}

/// Returns one line on a pod's placement, for `inspect`.
pub fn line(place: &Place) -> String {
    let cpus = if place.cpus.is_empty() { "all CPUs".to_owned() } else { format!("CPUs {}", place.cpus) };
    let mems =
        if place.mems.is_empty() { String::new() } else { format!(", memory of nodes {}", place.mems) };
    let node = place.node.map_or_else(|| "no node".to_owned(), |node| format!("node {node}"));
    let share = local(place).map_or_else(String::new, |share| format!(", {share:.1} % of its memory local"));
    let why = if place.reason.is_empty() { String::new() } else { format!(": {}", place.reason) };
    format!("{node}, {cpus}{mems}{share} ({}{why})", place.policy)
}

fn cost(moved: &MovePodResponse) -> String {
    let place = moved.place.clone().unwrap_or_default();
    let from = moved.from.map_or_else(|| "no node".to_owned(), |node| format!("node {node}"));
    let to = place.node.map_or_else(|| "no node".to_owned(), |node| format!("node {node}"));
    let left = match moved.left_bytes {
        0 => String::new(),
        left => format!(
            "; {} stay elsewhere, such as pages that are shared with its template",
            render::bytes(left)
        ),
    };
    format!(
        "moved pod {} from {from} to {to}: {} in {}{left}",
        render::short(&place.id),
        render::bytes(moved.moved_bytes),
        render::duration(moved.took_ns),
    )
}

fn total(memory: &[NodeMemory]) -> u64 {
    memory.iter().map(|entry| entry.bytes).sum()
}

fn by_node(memory: &[NodeMemory]) -> String {
    let node_memory = |entry: &NodeMemory| format!("{}: {}", entry.node, render::bytes(entry.bytes));
    memory.iter().map(node_memory).collect::<Vec<_>>().join(", ")
}

/// Returns the part of a pod's memory that is on its node, percent.
#[expect(clippy::cast_precision_loss, reason = "a share for people")]
fn local(place: &Place) -> Option<f64> {
    let (node, all) = (place.node?, total(&place.memory));
    let here: u64 = place.memory.iter().filter(|entry| entry.node == node).map(|entry| entry.bytes).sum();
    (all > 0).then(|| 100.0 * here as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(node: Option<u32>, memory: &[(u32, u64)]) -> Place {
        let memory = memory.iter().map(|&(node, bytes)| NodeMemory { node, bytes }).collect();
        let (cpus, policy) = node.map_or(("", "none"), |_| ("0-3", "numa"));
        Place { id: "p".into(), node, memory, cpus: cpus.into(), policy: policy.into(), ..Place::default() }
    }

    #[test]
    fn the_local_share_is_that_of_the_pods_node() {
        let placed = place(Some(1), &[(0, 1 << 20), (1, 3 << 20)]);
        assert_eq!(local(&placed), Some(75.0));
        assert_eq!(line(&placed), "node 1, CPUs 0-3, 75.0 % of its memory local (numa)");
        assert_eq!(local(&place(None, &[(0, 1)])), None);
        assert_eq!(local(&place(Some(0), &[])), None);
        let mut none = place(None, &[(0, 1)]);
        none.reason = "it is larger than a node".into();
        assert_eq!(line(&none), "no node, all CPUs (none: it is larger than a node)");
    }

    #[test]
    fn a_move_tells_what_it_cost_and_what_is_left() {
        let mut moved = MovePodResponse {
            from: Some(0),
            place: Some(place(Some(1), &[])),
            moved_bytes: 3 << 20,
            took_ns: 2_000_000,
            ..Default::default()
        };
        assert!(cost(&moved).starts_with("moved pod p from node 0 to node 1: 3"), "{}", cost(&moved));
        assert!(!cost(&moved).contains("stay"), "{}", cost(&moved));
        moved.left_bytes = 1 << 20;
        assert!(cost(&moved).contains("stay elsewhere"), "{}", cost(&moved));
    }

    #[test]
    fn a_host_with_one_node_says_that_there_is_nothing_to_choose() {
        let answer = ListPlacesResponse { policy: "numa".into(), ..Default::default() };
        assert!(text(&answer).starts_with("Policy numa: there is only one node"), "{}", text(&answer));
        let answer = ListPlacesResponse { policy: "off".into(), ..Default::default() };
        assert!(text(&answer).starts_with("Policy off: the kernel places pods"), "{}", text(&answer));
        let answer = ListPlacesResponse { places: vec![place(Some(0), &[(0, 1)])], active: true, ..answer };
        assert!(text(&answer).contains("100.0 %"), "{}", text(&answer));
    }
}
