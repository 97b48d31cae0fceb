//! Memory by role, growth per pod, and ledgers.

use crate::attribution::Role;
use crate::document::{Part, Table, mb, or_none};
use crate::ledger::Ledger;
use crate::report::Report;

const SUMS: &str = "Management: resident process and shims, as in published figures. Freed with pods: everything, but only the \
     growth of the resident process. The CRI runtime itself is not included.";

/// Returns the memory of all results, its growth per pod, and the processor time of idle pods; nothing without memory.
pub fn parts(reports: &[&Report]) -> Vec<Part> {
    let table = table(reports);
    if table.is_empty() {
        return Vec::new();
    }
    let mut parts =
        vec![Part::heading("Memory, PSS in MB (1024 KiB)"), Part::Table(table), Part::Text(SUMS.into())];
    let growth = growth(reports);
    if !growth.is_empty() {
        parts.extend([Part::heading("Growth per pod, KiB (least squares)"), Part::Table(growth)]);
    }
    let rows = reports.iter().flat_map(|report| &report.memory);
    let idle = rows.filter_map(|row| Some((row, row.shown_idle_cpu()?))).map(|(row, each)| {
        format!(
            "{}: {} idle pods use {each} millicores each, without their containers",
            row.runtime, row.pods
        )
    });
    parts.push(Part::List(idle.collect()));
    parts
}

fn table(reports: &[&Report]) -> Table {
    let rows = || reports.iter().flat_map(|report| &report.memory);
    let used = |role: &Role| rows().any(|row| row.by_role.contains_key(role));
    let roles: Vec<Role> = Role::ALL.into_iter().filter(used).collect();
    let names: Vec<&str> = roles.iter().map(|role| role.as_str()).collect();
    let sums = ["management", "total", "freed with pods", "MemAvailable fell"];
    let columns = [&["runtime", "pods", "each VMM"], &names[..], &sums].concat();
    let details = [&names[..], &["MemAvailable fell"]].concat();
    let mut table = Table::new(1, columns).with_details(&details);
    for row in rows() {
        let of_roles = roles.iter().map(|role| row.by_role.get(role).copied());
        let sums = [
            Some(row.management_pss_kib),
            Some(row.total_pss_kib),
            row.goes_away_kib,
            row.available_fall_kib,
        ];
        let figures = std::iter::once(row.each_vmm_kib()).chain(of_roles).chain(sums);
        table.row(
            [row.runtime.clone(), row.pods.to_string()]
                .into_iter()
                .chain(figures.map(|kib| or_none(kib, mb))),
        );
    }
    table
}

fn growth(reports: &[&Report]) -> Table {
    let names = [
        "runtime",
        "total",
        "without workloads",
        "management",
        "resident process",
        "fall of MemAvailable",
        "r²",
    ];
    let mut table = Table::new(1, names);
    for (runtime, marginal) in reports.iter().flat_map(|report| &report.marginal_kib_per_pod) {
        let figures =
            [marginal.total, marginal.overhead, marginal.management, marginal.daemon, marginal.available]
                .map(|kib| format!("{kib:.0}"));
        table.row(std::iter::once(runtime.clone()).chain(figures).chain([format!("{:.3}", marginal.r2)]));
    }
    table
}

/// Returns the processes of running pods, and how each was attributed.
pub fn ledger(handler: &str, ledger: &Ledger) -> Vec<Part> {
    let mut table = Table::new(4, ["role", "pod", "process", "found by", "pid", "PSS MB"]);
    for entry in &ledger.entries {
        let pod = entry.found.pod.as_deref().map_or("–", |pod| pod.get(..13).unwrap_or(pod));
        for (role, kib) in &entry.pss_kib {
            table.row([
                role.as_str(),
                pod,
                &entry.name,
                &entry.found.tie,
                &entry.pid.to_string(),
                &mb(*kib as f64),
            ]);
        }
    }
    let cri = ledger.cri_kib.map_or_else(|| "not measured".into(), |kib| format!("{} MB", mb(kib as f64)));
    let title = format!("Processes of {handler}; the CRI runtime itself ({cri}) is not included");
    vec![Part::heading(title), Part::Table(table)]
}
