//! What is shown of results, for all renderers: a page with everything, short tables, and texts of single results.

mod memory;
mod published;
mod startup;
mod workload;

use crate::clock::Clock;
use crate::document::{Document, Part, Table};
use crate::figures::{Palette, figures};
use crate::manifest::{Facts, Manifest, shown};
use crate::report::Report;
use crate::results::Results;
use crate::store::Loaded;
use crate::warnings::warnings;

const ABOUT_STARTS: &str = "Times are from a pod's start request to its container's first byte on stdout, on the monotonic \
     clock. Percentiles are nearest-rank. Failures are counted; percentiles do not include them. Figures that were not measured \
     are marked.";

/// Returns everything about all results, with one section per result.
pub fn page(results: &Results, palette: &Palette) -> Document {
    let Results { startups, workloads } = results;
    let title = match (&startups[..], &workloads[..]) {
        (_, []) => "Start-up and memory of pods",
        ([], _) => "Workloads in pods",
        _ => "Start-up, memory and workloads of pods",
    };
    let mut parts = Vec::new();
    if !startups.is_empty() {
        parts.push(Part::Text(ABOUT_STARTS.into()));
    }
    startups.iter().for_each(|result| parts.extend(section(result, palette)));
    workloads.iter().for_each(|result| parts.extend(workload::section(result, palette)));
    if !startups.is_empty() {
        parts.extend(published::section(published::all()));
    }
    Document { title: title.into(), parts }
}

/// Returns the main figures of all results in as few tables as possible, beside published figures.
pub fn tables(results: &Results) -> Document {
    let mut parts: Vec<Part> = Vec::new();
    let mut conditions: Vec<String> = Vec::new();
    for result in &results.startups {
        let line = conditions_of(result);
        if !conditions.contains(&line) {
            conditions.push(line);
        }
    }
    parts.extend(conditions.into_iter().map(Part::Text));
    let reports: Vec<&Report> = results.startups.iter().map(|result| &result.report).collect();
    // No table mixes times of two clocks.
    for clock in Clock::ALL {
        let of_clock: Vec<&Report> = reports.iter().copied().filter(|report| report.clock == clock).collect();
        parts.extend(startup::parts(clock, &of_clock));
    }
    parts.extend(memory::parts(&reports));
    parts.extend(remarks(reports.iter().copied()));
    parts.extend(published::section(published::comparable(&reports)));
    results.workloads.iter().for_each(|result| parts.extend(workload::short(result)));
    Document { title: String::new(), parts }
}

/// Returns a result of start-up.
pub fn startup(report: &Report) -> Document {
    let mut parts = startup::parts(report.clock, &[report]);
    parts.extend(startup::stages(report));
    of_run(parts, report)
}

/// Returns a result of memory, with what `more` shows of it.
pub fn memory(report: &Report, more: Vec<Part>) -> Document {
    let mut parts = memory::parts(&[report]);
    parts.extend(more);
    of_run(parts, report)
}

pub use memory::ledger;
pub use workload::result as workload;

fn of_run(mut parts: Vec<Part>, report: &Report) -> Document {
    parts.extend(report.partial_reason.as_ref().map(|why| Part::Text(format!("partial: {why}"))));
    parts.extend(report.quick.then(|| Part::Text("quick: fewer starts or counts than a full run".into())));
    parts.extend(remarks([report]));
    Document { title: String::new(), parts }
}

fn section(result: &Loaded, palette: &Palette) -> Vec<Part> {
    let report = &result.report;
    let badges = [
        (report.clock == Clock::Virtual, "virtual time"),
        (report.partial, "partial"),
        (report.quick, "quick"),
    ];
    let mut parts = heading(&result.name, badges.into(), &report.manifest);
    let (of_memory, of_starts) =
        figures(result, palette).into_iter().partition(|figure| figure.name.starts_with("memory"));
    parts.push(Part::Plots(of_starts));
    parts.extend(startup::parts(report.clock, &[report]));
    parts.push(Part::Plots(of_memory));
    parts.extend(memory::parts(&[report]));
    let found = warnings(report, &result.samples);
    if !found.is_empty() {
        parts.push(Part::heading("Warnings"));
    }
    // Warnings of several series with the same advice show it once.
    parts.extend(found.chunk_by(|a, b| a.advice == b.advice).map(|alike| Part::Warning {
        seen: alike.iter().map(|warning| warning.seen.clone()).collect(),
        advice: alike[0].advice,
    }));
    parts.extend(remarks([report]));
    parts.extend(conditions(&report.manifest));
    parts
}

/// Returns the heading of a result, and when it was measured.
fn heading(name: &str, badges: Vec<(bool, &'static str)>, manifest: &Manifest) -> Vec<Part> {
    let badges = badges.into_iter().filter(|(applies, _)| *applies).map(|(_, badge)| badge).collect();
    let mut parts = vec![Part::Heading { level: 2, text: name.to_owned(), badges }];
    if !manifest.at.is_empty() {
        parts.push(Part::Text(format!("{} · probe {}", manifest.at, manifest.probe)));
    }
    parts
}

/// Returns notes, and what was not measured; nothing without either.
fn remarks<'a>(reports: impl IntoIterator<Item = &'a Report>) -> Vec<Part> {
    let mut lines: Vec<String> = Vec::new();
    for report in reports {
        let absent = report.absent();
        let absent =
            absent.iter().map(|(why, what)| format!("not measured, because {why}: {}", what.join(", ")));
        lines.extend(report.notes.iter().cloned().chain(absent));
    }
    listed("Notes", lines)
}

/// Returns a list with a heading; nothing without lines.
fn listed(heading: &str, lines: Vec<String>) -> Vec<Part> {
    if lines.is_empty() { Vec::new() } else { vec![Part::heading(heading), Part::List(lines)] }
}

/// Returns all conditions of a run.
fn conditions(manifest: &Manifest) -> Option<Part> {
    let mut table = Table::new(2, ["what", "is"]).with_prose();
    let mut add = |group: &str, facts: &Facts| {
        for (name, fact) in facts {
            table.row([format!("{group}: {}", name.replace('_', " ")), shown(fact)]);
        }
    };
    add("host", &manifest.host);
    add("CRI", &manifest.cri);
    manifest.runtimes.iter().for_each(|(name, facts)| add(name, facts));
    add("VMM", &manifest.vmm);
    add("pod", &manifest.pod);
    add("plan", &manifest.plan);
    let parts = vec![Part::Table(table.clone())];
    (!table.is_empty()).then(|| Part::Fold { title: "Conditions".into(), open: true, parts })
}

/// Returns one line with the main conditions of a run.
fn conditions_of(result: &Loaded) -> String {
    let manifest = &result.report.manifest;
    let fact = |facts: &Facts, name: &str| facts.get(name).map(shown);
    let mut parts = Vec::new();
    let mut part =
        |name: &str, value: Option<String>| parts.extend(value.map(|value| format!("{name}{value}")));
    part("", fact(&manifest.host, "cpu"));
    part("CPUs: ", fact(&manifest.host, "cpus"));
    let memory = manifest.host.get("memory_kib").and_then(serde_json::Value::as_f64);
    part("memory: ", memory.map(|kib| format!("{:.1} GiB", kib / f64::from(1 << 20))));
    part("Linux ", fact(&manifest.host, "kernel"));
    let vmm = ["vmm", "vmm_version", "accelerator"].map(|name| fact(&manifest.vmm, name).unwrap_or_default());
    part("VMM of sandboxer's pods: ", Some(vmm.join(" ")).filter(|text| !text.trim().is_empty()));
    for (handler, facts) in &manifest.runtimes {
        if let (Some(vcpus), Some(memory)) = (fact(facts, "vcpus"), fact(facts, "memory_mib")) {
            part("", Some(format!("{handler}: {vcpus} vCPU and {memory} MiB a pod")));
        }
    }
    for (handler, facts) in &manifest.runtimes {
        let sees = |name: &str| facts.get("container_sees").and_then(|sees| sees.get(name)).map(shown);
        if let (Some(program), Some(kernel), Some(processors), Some(memory)) =
            (fact(facts, "vmm_program"), sees("kernel"), sees("processors"), sees("memory_mib"))
        {
            let what = format!(
                "{handler}: {program}; its containers see {processors} CPU, {memory} MiB, Linux {kernel}"
            );
            part("", Some(what));
        }
    }
    let cri = ["name", "version"].map(|name| fact(&manifest.cri, name).unwrap_or_default());
    part("", Some(cri.join(" ")).filter(|text| !text.trim().is_empty()));
    part("", fact(&manifest.pod, "image"));
    part("network: ", fact(&manifest.pod, "network_asked_for"));
    part("load per CPU before: ", manifest.load_per_cpu().map(|load| format!("{load:.2}")));
    part("", Some(manifest.at.clone()).filter(|at| !at.is_empty()));
    part("", (result.report.clock == Clock::Virtual).then(|| "virtual time".into()));
    part("", result.report.partial.then(|| "partial".into()));
    part("", result.report.quick.then(|| "quick run".into()));
    format!("{}: {}.", result.name, parts.join("; "))
}

#[cfg(test)]
mod tests;
