//! docs/compatibility.md tells each field of what CRI can ask of a pod, and names cases that show it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use k8s_cri::v1;
use sandboxer_e2e::case::Case;

crate::cases![Vm: every_field_is_told];

/// What can be said of a field. "containerd" means: containerd does it, under any runtime.
const VERDICTS: [&str; 4] = ["honoured", "containerd", "refused", "ignored"];

async fn every_field_is_told(_: Case) -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/compatibility.md");
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
    let messages = messages();
    let sections = rows(&text, |section| messages.iter().any(|(message, _)| *message == section))?;
    let known: BTreeSet<String> =
        crate::entries().iter().map(|entry| crate::case_name(entry).to_owned()).collect();
    for (message, fields) in &messages {
        let rows = sections.get(message).with_context(|| format!("no section {message}"))?;
        let named: BTreeSet<&str> = rows.iter().map(|row| row.field.as_str()).collect();
        let fields: BTreeSet<&str> = fields.iter().map(String::as_str).collect();
        let missing: Vec<_> = fields.difference(&named).collect();
        let unknown: Vec<_> = named.difference(&fields).collect();
        ensure!(
            missing.is_empty() && unknown.is_empty(),
            "{message}: missing {missing:?}, unknown {unknown:?}"
        );
        for row in rows {
            let at = format!("{message}.{}", row.field);
            ensure!(VERDICTS.contains(&row.verdict.as_str()), "{at}: {:?} is no verdict", row.verdict);
            let lost: Vec<_> = row.cases.iter().filter(|case| !known.contains(*case)).collect();
            ensure!(lost.is_empty(), "{at} is shown by {lost:?}, which are no cases");
            let promised = matches!(row.verdict.as_str(), "honoured" | "refused");
            ensure!(!promised || !row.cases.is_empty(), "{at} is {}: which case shows it?", row.verdict);
        }
    }
    Ok(())
}

/// One line of a table.
struct Row {
    field: String,
    verdict: String,
    cases: Vec<String>,
}

/// Returns the tables of `text` below headings of messages, by heading: `| `field` | verdict | how | cases |`.
fn rows(text: &str, is_message: impl Fn(&str) -> bool) -> Result<BTreeMap<&str, Vec<Row>>> {
    let mut sections: BTreeMap<&str, Vec<Row>> = BTreeMap::new();
    let mut section = "";
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading.trim();
        } else if line.starts_with("### ") {
            // It tells of more than a message's fields.
            section = "";
        } else if is_message(section) && line.starts_with("| `") {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            ensure!(cells.len() == 4, "{section}: {line:?} has {} columns", cells.len());
            let ticked = |cell: &str| -> Vec<String> {
                cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
            };
            let row = Row {
                field: cells[0].trim_matches('`').to_owned(),
                verdict: cells[1].to_owned(),
                cases: ticked(cells[3]),
            };
            sections.entry(section).or_default().push(row);
        }
    }
    Ok(sections)
}

/// Returns the messages of a pod's and a container's making, with their fields.
fn messages() -> Vec<(&'static str, Vec<String>)> {
    macro_rules! fields {
        ($($name:literal $message:ident),+ $(,)?) => {
            vec![$(($name, fields_of(&v1::$message::default()))),+]
        };
    }
    fields![
        "PodSandboxConfig" PodSandboxConfig,
        "DNSConfig" DnsConfig,
        "PortMapping" PortMapping,
        "LinuxPodSandboxConfig" LinuxPodSandboxConfig,
        "LinuxSandboxSecurityContext" LinuxSandboxSecurityContext,
        "NamespaceOption" NamespaceOption,
        "ContainerConfig" ContainerConfig,
        "Mount" Mount,
        "Device" Device,
        "LinuxContainerConfig" LinuxContainerConfig,
        "LinuxContainerResources" LinuxContainerResources,
        "LinuxContainerSecurityContext" LinuxContainerSecurityContext,
        "Capability" Capability,
    ]
}

/// Names of a message's fields: its debug form has one a line.
fn fields_of(message: &impl Debug) -> Vec<String> {
    let text = format!("{message:#?}");
    let fields =
        text.lines().filter_map(|line| line.strip_prefix("    ").filter(|line| !line.starts_with(' ')));
    fields.filter_map(|line| line.split_once(": ")).map(|(field, _)| field.to_owned()).collect()
}
