//! Results as tables for a terminal.

use comfy_table::Table;
pub use sandboxer_command::tables::{ms, table};
use sandboxer_probe::{
    attribution::Role,
    ledger::Ledger,
    ratio::Ratio,
    report::{Memory, Report},
    sample::Mode,
    summary::Summary,
};

/// Formats KiB as MB; 1 MB is 1024 KiB here.
pub fn mb(kib: f64) -> String {
    format!("{:.1}", kib / 1024.0)
}

/// Returns start-up times: one line per runtime and mode, then ratios and the probe's own cost.
pub fn startup(report: &Report) -> String {
    let bases = report.bases();
    let columns: Vec<String> = bases.iter().map(|base| format!("over {base}")).collect();
    let mut heading =
        vec!["runtime", "mode", "n", "failed", "min", "p50", "p90", "p95", "p99", "max", "mean", "sd"];
    heading.extend(columns.iter().map(String::as_str));
    heading.push("KVM exits");
    let mut rows = table(&heading, 2);
    for series in &report.series {
        let mut row = vec![series.runtime.clone(), series.how()];
        let over = |mode, groups| {
            let over = move |base: &&str| report.over(&series.runtime, base, mode, groups);
            bases.iter().map(move |base| over(base).map_or_else(|| "–".into(), Ratio::short))
        };
        row.extend(figures(&series.summary));
        row.extend(over(series.mode, false));
        row.push(series.shown_exits());
        rows.add_row(row);
        if let Some(whole) = series.whole_groups() {
            let mut row = vec![series.runtime.clone(), format!("batch of {}", series.group)];
            row.extend(figures(&whole));
            row.extend(over(Mode::Parallel, true));
            rows.add_row(row);
        }
    }
    if let Some(bare) = &report.bare_boot {
        let mut row = vec!["bare boot".to_owned(), "serial".to_owned()];
        row.extend(figures(&bare.summary));
        rows.add_row(row);
    }
    let unit = report.clock.ms();
    let mut text = format!(
        "start-up, {unit} from the start request to the container's first byte on stdout\n\n{rows}\n"
    );
    for ratio in report.told_ratios() {
        text += &format!("\n{ratio}");
    }
    for (series, rate) in report.series.iter().filter_map(|series| Some((series, series.rate?))) {
        text += &format!("\n{} without pauses: {rate}", series.runtime);
    }
    if let Some((bare, over)) = report.bare_boot.as_ref().and_then(|bare| Some((bare, bare.over?))) {
        text += &format!("\n{} over the bare boot of its VM to the agent's ready message: {over}", bare.like);
    }
    if let Some(overhead) = &report.overhead {
        text += &format!(
            "\nthe probe itself takes at most {} ms per pod (empty call {}, mark {})",
            ms(overhead.per_pod_ms),
            ms(overhead.empty_call_ms),
            ms(overhead.mark_ms)
        );
    }
    for series in report.series.iter().filter(|series| !series.stages.is_empty()) {
        text += &format!("\n\nstages of {} {}, {unit}\n\n{}", series.runtime, series.mode, stages(series));
    }
    text + "\n"
}

fn stages(series: &sandboxer_probe::report::Series) -> Table {
    let mut rows = table(&["stage", "n", "p50", "p90", "p99", "max"], 1);
    let rest = series.unexplained.as_ref().map(|summary| ("unexplained".to_owned(), summary));
    for (name, summary) in
        series.stages.iter().map(|(stage, summary)| (stage.to_string(), summary)).chain(rest)
    {
        rows.add_row([
            name,
            summary.n.to_string(),
            ms(summary.p50_ms),
            ms(summary.p90_ms),
            ms(summary.p99_ms),
            ms(summary.max_ms),
        ]);
    }
    rows
}

/// Returns the number of attempts, the failures and all figures of a summary.
pub fn figures(summary: &Summary) -> Vec<String> {
    let counts = [summary.n.to_string(), summary.failures.to_string()];
    counts.into_iter().chain(summary.figures().map(|(_, value)| ms(value))).collect()
}

/// Returns memory: one line per runtime and pod count, then growth per pod.
pub fn memory(report: &Report) -> String {
    let roles: Vec<Role> = Role::ALL
        .into_iter()
        .filter(|role| report.memory.iter().any(|row| row.by_role.contains_key(role)))
        .collect();
    let mut heading = vec!["runtime", "pods", "each VMM"];
    heading.extend(roles.iter().map(|role| role.as_str()));
    heading.extend(["management", "total", "freed with pods", "MemAvailable fell"]);
    let mut rows = table(&heading, 1);
    for row in &report.memory {
        rows.add_row(memory_row(row, &roles));
    }
    let mut text = format!("memory, PSS in MB (1024 KiB), means of the repetitions\n\n{rows}\n");
    for (runtime, marginal) in &report.marginal_kib_per_pod {
        text += &format!(
            "\n{runtime}: each pod adds {:.0} KiB in total (r² {:.3}), {:.0} of it management (resident process {:.0}); \
             MemAvailable falls by {:.0}",
            marginal.total, marginal.r2, marginal.management, marginal.daemon, marginal.available
        );
    }
    for row in &report.memory {
        if let Some(each) = row.shown_idle_cpu() {
            text += &format!(
                "\n{}: {} idle pods use {each} millicores each, without their containers",
                row.runtime, row.pods
            );
        }
    }
    text + "\n"
}

fn memory_row(row: &Memory, roles: &[Role]) -> Vec<String> {
    let each = row.each_vmm_kib().map_or_else(|| "–".into(), mb);
    let mut cells = vec![row.runtime.clone(), row.pods.to_string(), each];
    cells.extend(roles.iter().map(|role| row.by_role.get(role).map_or_else(|| "–".into(), |kib| mb(*kib))));
    let sums =
        [Some(row.management_pss_kib), Some(row.total_pss_kib), row.goes_away_kib, row.available_fall_kib];
    cells.extend(sums.map(|sum| sum.map_or_else(|| "–".into(), mb)));
    cells
}

/// Returns the processes of running pods, and how each was attributed.
pub fn ledger(handler: &str, ledger: &Ledger) -> String {
    let mut rows = table(&["role", "pod", "process", "found by", "pid", "PSS MB"], 4);
    for entry in &ledger.entries {
        let pod = entry.found.pod.as_deref().map_or("–", |pod| pod.get(..13).unwrap_or(pod));
        for (role, kib) in &entry.pss_kib {
            let cells =
                [role.as_str(), pod, &entry.name, &entry.found.tie, &entry.pid.to_string(), &mb(*kib as f64)];
            rows.add_row(cells);
        }
    }
    let cri = ledger.cri_kib.map_or_else(|| "not measured".into(), |kib| format!("{} MB", mb(kib as f64)));
    format!("processes of {handler}; the CRI runtime itself ({cri}) is not included\n\n{rows}\n")
}

/// Returns remarks: the reason for a partial run, notes, and what was not measured.
pub fn remarks(report: &Report) -> String {
    let mut text = String::new();
    if let Some(why) = &report.partial_reason {
        text += &format!("\npartial: {why}");
    }
    if report.quick {
        text += "\nquick: fewer starts or counts than a full run";
    }
    for note in &report.notes {
        text += &format!("\nnote: {note}");
    }
    for (why, what) in report.absent() {
        text += &format!("\nnot measured, because {why}: {}", what.join(", "));
    }
    text.trim_start().to_owned()
}
