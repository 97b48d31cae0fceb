//! `inspect`: details of one pod.

use std::fmt::Write;

use sandboxer_protocol::admin::{
    Container, InspectPodRequest, Interface, Jail, Limit, Pod, StageTime, Traffic,
};

use super::{PodId, place};
use crate::{Global, client, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli inspect 3f2a
  sandboxer-cli inspect 3f2a --json | jq .stages";

/// Show a pod: its VM, its containers, and how long each stage of their starts took
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    pod: PodId,
}

/// Prints the pod.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let mut daemon = client::connect(&global.socket).await?;
    let request = InspectPodRequest { id: args.pod.id };
    let pod = client::answer(daemon.inspect_pod(request).await)?;
    if global.json {
        return render::print_json(&pod);
    }
    Ok(render::print(&text(&pod)?)?)
}

fn text(pod: &Pod) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let mut line = |name: &str, value: &str| {
        let value = if value.is_empty() { "-".to_owned() } else { render::plain(value) };
        // A reason has several lines; some are the last of the console.
        writeln!(out, "{name:<12}{}", value.trim_end().replace('\n', "\n            "))
    };
    line("Pod", &pod.id)?;
    line("Name", &format!("{}/{}", pod.namespace, pod.name))?;
    line("UID", &pod.uid)?;
    line("State", &pod.state)?;
    if !pod.reason.is_empty() {
        line("Reason", &pod.reason)?;
    }
    line(
        "Created",
        &format!("{} ({} ago)", render::time(pod.created_at_ns), render::age(pod.created_at_ns)),
    )?;
    line("Recovered", if pod.recovered { "yes: started by an earlier daemon" } else { "no" })?;
    line("Size", &size(pod))?;
    line("Start path", &pod.start_path)?;
    if let Some(at) = &pod.place {
        line("Place", &place::line(at))?;
    }
    line("VMM pid", &if pod.vmm_pid == 0 { "-".into() } else { pod.vmm_pid.to_string() })?;
    line("Kernel", &pod.kernel_release)?;
    for interface in &pod.interfaces {
        let Interface { name, mac, mtu, addresses, host_device, received, sent, offloads } = interface;
        line("Interface", &format!("{name}: {}, {mac}, MTU {mtu}, by {host_device}", addresses.join(", ")))?;
        for (way, traffic) in [("received", received), ("sent", sent)] {
            if let Some(traffic) = traffic {
                line("", &format!("{way} {}", carried(traffic)))?;
            }
        }
        if !offloads.is_empty() {
            line("", &format!("offloads {}", offloads.join(", ")))?;
        }
    }
    for (n, sysctl) in pod.sysctls.iter().enumerate() {
        let origin = if sysctl.of_node { " (the node's)" } else { "" };
        line(
            if n == 0 { "Sysctls" } else { "" },
            &format!("{} = {}{origin}", sysctl.name, sysctl.value.replace('\t', " ")),
        )?;
    }
    for (n, limit) in pod.container_limits.iter().enumerate() {
        let Limit { name, soft, hard } = limit;
        line(
            if n == 0 { "Limits" } else { "" },
            &format!("{name} {}, at most {}", bound(*soft), bound(*hard)),
        )?;
    }
    if pod.max_processes > 0 {
        line("Processes", &format!("at most {}", pod.max_processes))?;
    }
    line("Console", &pod.console_log)?;
    for (whose, jail) in [("the VMM", &pod.jail), ("the share server", &pod.shares_jail)] {
        if let Some(jail) = jail {
            write!(out, "\nJail of {whose}, as the kernel reports it\n{}\n", confinement(jail))?;
        }
    }
    if !pod.stages.is_empty() {
        write!(out, "\nStart of the pod\n{}\n", stages(&pod.stages))?;
    }
    for container in &pod.containers {
        section(&mut out, container)?;
    }
    Ok(out.trim_end().to_owned())
}

fn bound(limit: u64) -> String {
    if limit == u64::MAX { "unlimited".to_owned() } else { limit.to_string() }
}

/// Returns the size of a pod's VM, and its size at the start if that was different.
fn size(pod: &Pod) -> String {
    let size = |vcpus: u32, memory_mib: u64| format!("{vcpus} vCPU, {}", render::mib(memory_mib));
    let now = size(pod.vcpus, pod.memory_mib);
    match (pod.boot_vcpus, pod.boot_memory_mib) {
        (vcpus, memory_mib) if (vcpus, memory_mib) == (pod.vcpus, pod.memory_mib) => now,
        // An earlier daemon does not report it.
        (0, _) => now,
        (vcpus, memory_mib) => format!("{now} ({} at its start)", size(vcpus, memory_mib)),
    }
}

fn carried(traffic: &Traffic) -> String {
    let Traffic { bytes, packets, dropped, errors, bytes_per_second, packets_per_second } = traffic;
    format!(
        "{} in {packets} packets, {}/s in {packets_per_second}/s, {dropped} dropped, {errors} errors",
        render::bytes(*bytes),
        render::bytes(*bytes_per_second)
    )
}

fn confinement(jail: &Jail) -> String {
    let listed = |names: &[String]| match names {
        [] => "none".to_owned(),
        names => render::plain(&names.join(", ")),
    };
    let capabilities = |set: u64| if set == 0 { "none".to_owned() } else { format!("{set:016x}") };
    let groups: Vec<String> = jail.groups.iter().map(u32::to_string).collect();
    let mut rows = vec![
        ["  User".to_owned(), format!("{}, group {}, others: {}", jail.uid, jail.gid, listed(&groups))],
        ["  Namespaces of its own".into(), listed(&jail.own_namespaces)],
        ["  Shared with the daemon".into(), listed(&jail.shared_namespaces)],
        [
            "  Capabilities".into(),
            format!(
                "{}, and can get {}",
                capabilities(jail.capabilities),
                capabilities(jail.capability_bounds)
            ),
        ],
        ["  New privileges".into(), if jail.no_new_privileges { "never" } else { "possible" }.into()],
        ["  Seccomp".into(), format!("{}, {} installed", render::plain(&jail.seccomp), jail.seccomp_filters)],
        ["  Root".into(), render::plain(&jail.root)],
        ["  Mounts".into(), format!("{}, {} of them writable", jail.mounts, jail.writable_mounts)],
        ["  Control group".into(), render::plain(&jail.cgroup)],
    ];
    for limit in &jail.limits {
        rows.push([format!("  {}", render::plain(&limit.name)), bound(limit.soft)]);
    }
    render::table(["  WHAT", "IS"], rows)
}

fn section(out: &mut String, container: &Container) -> std::fmt::Result {
    write!(out, "\nContainer {}\n  {}", render::plain(&container.id), process(container))?;
    for disk in &container.disks {
        write!(out, "\n  disk {}", render::plain(disk))?;
    }
    for exec in &container.execs {
        let id = render::plain(&exec.id);
        write!(out, "\n  exec {id}: {}, guest pid {}", render::plain(&exec.state), exec.guest_pid)?;
        if exec.state == "exited" {
            write!(out, ", exit code {}", exec.exit_code)?;
        }
    }
    out.push('\n');
    if !container.stages.is_empty() {
        writeln!(out, "{}", stages(&container.stages))?;
    }
    Ok(())
}

fn process(container: &Container) -> String {
    let state = render::plain(&container.state);
    if container.state != "exited" {
        return format!("{state}, guest pid {}", container.guest_pid);
    }
    let reason = render::plain(&container.reason).trim_end().replace('\n', "\n    ");
    let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    format!("{state} with code {}{because}", container.exit_code)
}

fn stages(stages: &[StageTime]) -> String {
    let row = |step: &StageTime| {
        [
            format!("  {}", render::plain(&step.stage)),
            render::duration(step.begin_ns),
            render::duration(step.duration_ns),
            render::plain(&step.outcome),
        ]
    };
    render::table(["  STAGE", "AT", "TOOK", "OUTCOME"], stages.iter().map(row))
}
