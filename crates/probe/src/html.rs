//! A self-contained HTML page: plots, tables, warnings, conditions and published figures.

use std::fmt::Write;

use crate::anchors::{self, Figure as Published};
use crate::attribution::Role;
use crate::clock::Clock;
use crate::figures::{Figure, Palette, figures};
use crate::manifest::{Facts, Manifest, shown};
use crate::plot::{STYLE, escape, svg};
use crate::ratio::Ratio;
use crate::report::{Report, Series};
use crate::sample::Mode;
use crate::store::Loaded;
use crate::summary::Summary;
use crate::warnings::warnings;
use crate::workload::store::Loaded as Workload;

mod workload;

const LAYOUT: &str = "\
*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:76rem;background:var(--paper);color:var(--ink);\
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.6rem;margin:.5rem 0}h2{font-size:1.3rem;margin:2rem 0 .5rem;\
border-top:1px solid var(--grid);padding-top:1rem}h3{font-size:1.05rem;margin:1.5rem 0 .5rem}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1.5rem}\
figure{margin:0;break-inside:avoid}figure svg{width:100%;max-width:34rem;height:auto;display:block}\
figcaption{color:var(--muted);font-size:.88rem}.wide{overflow-x:auto}\
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}\
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}\
th:first-child,td:first-child,.l{text-align:left}th{vertical-align:bottom}\
.wrap td{white-space:normal;overflow-wrap:anywhere;vertical-align:top}.wrap td:first-child{min-width:9rem}\
.badge{display:inline-block;border:1px solid var(--s1);color:var(--s1);border-radius:1rem;padding:0 .6rem;\
font-size:.85rem;margin-left:.4rem}.warn{border-left:4px solid var(--s1);padding:.1rem .8rem;margin:.6rem 0}\
.warn p{margin:.2rem 0}li,p,figcaption{overflow-wrap:anywhere}ul{padding-left:1.2rem}.muted{color:var(--muted)}summary{cursor:pointer;font-weight:600}\
@media screen{.wide th:first-child,.wide td:first-child{position:sticky;left:0;background:var(--paper)}}\
@media screen and (max-width:40rem){.wrap,.wrap tbody{display:block}.wrap thead{display:none}\
.wrap tr{display:block;padding:.4rem 0;border-bottom:1px solid var(--grid)}\
.wrap td{display:block;border:0;padding:0}.wrap td:first-child{position:static;font-weight:600}\
.wrap td:empty{display:none}.wrap td[data-of]::before{content:attr(data-of) \": \";color:var(--muted)}}\
@media print{body{max-width:none;padding:0;font-size:10pt}h2,h2+p,h3{break-after:avoid}tr,.warn,li{break-inside:avoid}\
.plots{grid-template-columns:1fr 1fr;gap:1rem}.wide{overflow:visible}table{font-size:8pt}\
th,td{padding:.15rem .3rem;white-space:normal}}";

/// Returns the page, with one section per result.
pub fn page(results: &[Loaded], workloads: &[Workload]) -> String {
    page_with(results, workloads, &Palette::of(results, workloads))
}

/// Returns the page, drawn with `palette`.
pub fn page_with(results: &[Loaded], workloads: &[Workload], palette: &Palette) -> String {
    let heading = match (results, workloads) {
        (_, []) => "Start-up and memory of pods",
        ([], _) => "Workloads in pods",
        _ => "Start-up, memory and workloads of pods",
    };
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>{heading}</title>\
         <style>{STYLE}{LAYOUT}</style></head><body><h1>{heading}</h1>"
    );
    if !results.is_empty() {
        out.push_str(ABOUT_STARTS);
        results.iter().for_each(|result| section(&mut out, result, palette));
    }
    workloads.iter().for_each(|result| workload::section(&mut out, result, palette));
    if !results.is_empty() {
        published(&mut out);
    }
    out + "</body></html>\n"
}

const ABOUT_STARTS: &str = "<p class=\"muted\">Times are from a pod's start request to its container's first byte on stdout, on the \
         monotonic clock. Percentiles are nearest-rank. Failures are counted; percentiles do not include them. Figures \
         that were not measured are marked.</p>";

fn badge(flag: bool, text: &str) -> String {
    if flag { format!("<span class=\"badge\">{text}</span>") } else { String::new() }
}

fn section(out: &mut String, result: &Loaded, palette: &Palette) {
    let report = &result.report;
    let _ = write!(
        out,
        "<h2>{}{}{}{}</h2>",
        escape(&result.name),
        badge(report.clock == Clock::Virtual, "virtual time"),
        badge(report.partial, "partial"),
        badge(report.quick, "quick")
    );
    taken(out, &report.manifest);
    let all = figures(result, palette);
    plots(out, all.iter().filter(|figure| !figure.name.starts_with("memory")));
    startup(out, report);
    plots(out, all.iter().filter(|figure| figure.name.starts_with("memory")));
    memory(out, report);
    let found = warnings(report, &result.samples);
    if !found.is_empty() {
        let _ = write!(out, "<h3>Warnings</h3>");
    }
    // Warnings of several series with the same advice show it once.
    for alike in found.chunk_by(|a, b| a.advice == b.advice) {
        let seen: Vec<String> = alike.iter().map(|warning| escape(&warning.seen)).collect();
        let _ = write!(
            out,
            "<div class=\"warn\"><p><strong>{}</strong></p><p>{}</p></div>",
            seen.join("<br>"),
            escape(alike[0].advice)
        );
    }
    remarks(out, report);
    conditions(out, &report.manifest);
}

fn taken(out: &mut String, manifest: &Manifest) {
    if !manifest.at.is_empty() {
        let (at, probe) = (escape(&manifest.at), escape(&manifest.probe));
        let _ = write!(out, "<p class=\"muted\">{at} · probe {probe}</p>");
    }
}

fn plots<'a>(out: &mut String, figures: impl Iterator<Item = &'a Figure>) {
    let _ = write!(out, "<div class=\"plots\">");
    for figure in figures {
        let _ = write!(
            out,
            "<figure>{}<figcaption>{}</figcaption></figure>",
            svg(&figure.scene),
            escape(&figure.caption)
        );
    }
    let _ = write!(out, "</div>");
}

/// Writes a table whose first `texts` columns are text. Class "wrap" is for long texts.
fn table(out: &mut String, heading: &[&str], rows: &[Vec<String>], texts: usize, class: &str) {
    let stacks = class == "wrap" && heading.len() > 2;
    let cell = |tag: &str, index: usize, text: &str| {
        let class = if index < texts { " class=\"l\"" } else { "" };
        // On narrow screens a row's cells are stacked, each with its heading.
        let of = if stacks && tag == "td" && index > 0 {
            format!(" data-of=\"{}\"", escape(heading[index]))
        } else {
            String::new()
        };
        format!("<{tag}{class}{of}>{}</{tag}>", escape(text))
    };
    let line = |tag: &str, cells: &mut dyn Iterator<Item = &str>| -> String {
        let cells: String = cells.enumerate().map(|(index, text)| cell(tag, index, text)).collect();
        format!("<tr>{cells}</tr>")
    };
    let _ = write!(out, "<div class=\"wide\"><table class=\"{class}\"><thead>");
    out.push_str(&line("th", &mut heading.iter().copied()));
    out.push_str("</thead><tbody>");
    for row in rows {
        out.push_str(&line("td", &mut row.iter().map(String::as_str)));
    }
    out.push_str("</tbody></table></div>");
}

fn ms(time: Option<f64>) -> String {
    time.map_or_else(
        || "–".into(),
        |time| if time < 100.0 { format!("{time:.1}") } else { format!("{time:.0}") },
    )
}

fn figures_of(summary: &Summary) -> Vec<String> {
    let counts = [summary.n.to_string(), summary.failures.to_string()];
    counts.into_iter().chain(summary.figures().map(|(_, value)| ms(value))).collect()
}

fn startup(out: &mut String, report: &Report) {
    if report.series.is_empty() {
        return;
    }
    let mut rows = Vec::new();
    let bases = report.bases();
    let mut row = |name: &str, what: String, summary: &Summary, over: Vec<String>, exits: String| {
        rows.push([vec![name.to_owned(), what], figures_of(summary), over, vec![exits]].concat());
    };
    let over = |series: &Series, mode: Mode, groups: bool| -> Vec<String> {
        let over = |base: &&str| report.over(&series.runtime, base, mode, groups);
        bases.iter().map(|base| over(base).map_or_else(|| "–".into(), Ratio::short)).collect()
    };
    for series in &report.series {
        let ratios = over(series, series.mode, false);
        row(&series.runtime, series.how(), &series.summary, ratios, series.shown_exits());
        if let Some(whole) = series.whole_groups() {
            let ratios = over(series, Mode::Parallel, true);
            row(&series.runtime, format!("whole groups of {}", series.group), &whole, ratios, "–".into());
        }
    }
    if let Some(bare) = &report.bare_boot {
        let none = vec!["–".into(); bases.len()];
        row("bare boot", "the same VM alone".into(), &bare.summary, none, "–".into());
    }
    let _ = write!(out, "<h3>Start-up, {}</h3>", report.clock.ms());
    let over: Vec<String> = bases.iter().map(|base| format!("over {base}")).collect();
    let mut heading =
        vec!["runtime", "mode", "n", "failed", "min", "p50", "p90", "p95", "p99", "max", "mean", "sd"];
    heading.extend(over.iter().map(String::as_str));
    heading.push("KVM exits a pod");
    table(out, &heading, &rows, 2, "");
    startup_notes(out, report);
}

/// Adds the ratios of starts, and the probe's own cost per start.
fn startup_notes(out: &mut String, report: &Report) {
    out.push_str("<ul>");
    for ratio in report.told_ratios() {
        let _ = write!(out, "<li>{}</li>", escape(&ratio.to_string()));
    }
    if let Some((bare, over)) = report.bare_boot.as_ref().and_then(|bare| Some((bare, bare.over?))) {
        let _ = write!(out, "<li>{} over a bare boot of its VM: medians {over}</li>", escape(&bare.like));
    }
    if let Some(overhead) = &report.overhead {
        let share = |ms: Option<f64>| ms.map_or_else(|| "–".into(), |ms| format!("{ms:.2}"));
        let _ = write!(
            out,
            "<li>The probe itself takes at most {} ms per pod (an empty call {} ms, detecting a first byte {} ms).</li>",
            share(overhead.per_pod_ms),
            share(overhead.empty_call_ms),
            share(overhead.mark_ms)
        );
    }
    for (series, rate) in report.series.iter().filter_map(|series| Some((series, series.rate?))) {
        let _ = write!(out, "<li>{} without pauses: {rate}.</li>", escape(&series.runtime));
    }
    for series in report.series.iter().filter(|series| !series.release_spread_ms.is_empty()) {
        let spread = series.release_spread_ms.iter().copied().fold(0.0, f64::max);
        let _ = write!(
            out,
            "<li>{}: the pods of a group were started within {spread:.2} ms at most.</li>",
            escape(&series.runtime)
        );
    }
    out.push_str("</ul>");
}

fn memory(out: &mut String, report: &Report) {
    if report.memory.is_empty() {
        return;
    }
    let mb = |kib: f64| format!("{:.1}", kib / 1024.0);
    let used = |role: &Role| report.memory.iter().any(|row| row.by_role.contains_key(role));
    let roles: Vec<Role> = Role::ALL.into_iter().filter(used).collect();
    let mut heading = vec!["runtime", "pods", "each VMM"];
    heading.extend(roles.iter().map(|role| role.as_str()));
    heading.extend(["management", "total", "freed with pods", "MemAvailable fell"]);
    let rows: Vec<Vec<String>> = report
        .memory
        .iter()
        .map(|row| {
            let each = row.each_vmm_kib().map_or_else(|| "–".into(), mb);
            let mut cells = vec![row.runtime.clone(), row.pods.to_string(), each];
            cells.extend(
                roles.iter().map(|role| row.by_role.get(role).map_or_else(|| "–".into(), |kib| mb(*kib))),
            );
            let sums = [
                Some(row.management_pss_kib),
                Some(row.total_pss_kib),
                row.goes_away_kib,
                row.available_fall_kib,
            ];
            cells.extend(sums.map(|sum| sum.map_or_else(|| "–".into(), mb)));
            cells
        })
        .collect();
    out.push_str("<h3>Memory, PSS in MB (1024 KiB)</h3>");
    table(out, &heading, &rows, 1, "");
    out.push_str(
        "<p class=\"muted\">Management: resident process and shims, as in published figures. Freed with pods: \
         everything, but only the growth of the resident process. The CRI runtime itself is not included.</p>",
    );
    if !report.marginal_kib_per_pod.is_empty() {
        growth(out, report);
    }
}

/// Adds the memory that each further pod takes.
fn growth(out: &mut String, report: &Report) {
    let kib = |kib: f64| format!("{kib:.0}");
    let rows: Vec<Vec<String>> = report
        .marginal_kib_per_pod
        .iter()
        .map(|(runtime, marginal)| {
            vec![
                runtime.clone(),
                kib(marginal.total),
                kib(marginal.overhead),
                kib(marginal.management),
                kib(marginal.daemon),
                kib(marginal.available),
                format!("{:.3}", marginal.r2),
            ]
        })
        .collect();
    out.push_str("<h3>Growth per pod, KiB (least squares)</h3>");
    let heading = [
        "runtime",
        "total",
        "without workloads",
        "management",
        "resident process",
        "fall of MemAvailable",
        "r²",
    ];
    table(out, &heading, &rows, 1, "");
    let idle = report.memory.iter().filter_map(|row| Some((row, row.shown_idle_cpu()?)));
    let idle: String = idle
        .map(|(row, each)| {
            format!(
                "<li>{}: {} idle pods use {each} millicores each, without their containers.</li>",
                escape(&row.runtime),
                row.pods
            )
        })
        .collect();
    let _ = write!(out, "<ul>{idle}</ul>");
}

fn remarks(out: &mut String, report: &Report) {
    if report.notes.is_empty() && report.not_measured.is_empty() {
        return;
    }
    out.push_str("<h3>Notes</h3><ul>");
    for note in &report.notes {
        let _ = write!(out, "<li>{}</li>", escape(note));
    }
    for (why, what) in report.absent() {
        let _ = write!(out, "<li>not measured, because {}: {}</li>", escape(why), escape(&what.join(", ")));
    }
    out.push_str("</ul>");
}

fn conditions(out: &mut String, manifest: &Manifest) {
    let mut rows = Vec::new();
    let mut add = |group: &str, facts: &Facts| {
        rows.extend(
            facts
                .iter()
                .map(|(name, fact)| vec![format!("{group}: {}", name.replace('_', " ")), shown(fact)]),
        );
    };
    add("host", &manifest.host);
    add("CRI", &manifest.cri);
    manifest.runtimes.iter().for_each(|(name, facts)| add(name, facts));
    add("VMM", &manifest.vmm);
    add("pod", &manifest.pod);
    add("plan", &manifest.plan);
    if rows.is_empty() {
        return;
    }
    out.push_str("<details open><summary>Conditions</summary>");
    table(out, &["what", "is"], &rows, 2, "wrap");
    out.push_str("</details>");
}

fn published(out: &mut String) {
    let rows: Vec<Vec<String>> = anchors::all()
        .into_iter()
        .map(|anchor| {
            let (what, figure) = match &anchor.figure {
                Published::StartUp { measures, n, is, ms, p95_ms, p99_ms, .. } => {
                    let n = n.map_or_else(|| "n not stated".into(), |n| format!("n = {n}"));
                    let more = [("p95", p95_ms), ("p99", p99_ms)];
                    let more: String = more
                        .iter()
                        .filter_map(|(name, value)| Some(format!(", {name} {:.0}", value.as_ref()?)))
                        .collect();
                    (measures.clone(), format!("{} {ms:.0}{more} ms, {n}", is.as_str()))
                }
                Published::Memory { pods, definition, pss_mb } => {
                    (format!("memory, {definition}, pods: {pods}"), format!("{pss_mb:.0} MB"))
                }
            };
            vec![anchor.name(), what, figure, anchor.hardware, anchor.note, anchor.source]
        })
        .collect();
    out.push_str(
        "<h2>Published figures</h2><p class=\"muted\">Measured on other hardware, by other methods: for orientation only. No \
         ratios to them are shown.</p>",
    );
    table(out, &["system", "what", "figure", "on", "note", "source"], &rows, 6, "wrap");
}

#[cfg(test)]
mod tests;
