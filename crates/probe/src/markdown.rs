//! Results as Markdown tables, for a README with generated figures.

use std::fmt::Write;

use crate::anchors::{self, Anchor, Figure, Kind};
use crate::clock::Clock;
use crate::manifest::{Facts, shown};
use crate::ratio::Ratio;
use crate::report::{REFERENCE, Report};
use crate::sample::Mode;
use crate::store::Loaded;
use crate::summary::Summary;

pub use workload::workloads;

mod workload;

/// Returns the conditions, start-up and memory of all results, beside comparable published figures.
pub fn tables(results: &[Loaded]) -> String {
    let mut out = String::new();
    for result in results {
        let line = conditions(result);
        if !out.contains(&line) {
            let _ = writeln!(out, "{line}\n");
        }
    }
    let reports: Vec<&Report> = results.iter().map(|result| &result.report).collect();
    // No table mixes times of two clocks.
    for clock in Clock::ALL {
        let of_clock: Vec<&Report> = reports.iter().copied().filter(|report| report.clock == clock).collect();
        startup(&mut out, clock, &of_clock);
    }
    memory(&mut out, &reports);
    out.trim_end().to_owned() + "\n"
}

/// Returns one line with the conditions and properties of the run.
fn conditions(result: &Loaded) -> String {
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
    part("", result.report.partial.then(|| "**partial**".into()));
    part("", result.report.quick.then(|| "quick run".into()));
    format!("{}: {}.", cell(&result.name), cell(&parts.join("; ")))
}

fn startup(out: &mut String, clock: Clock, reports: &[&Report]) {
    if reports.iter().all(|report| report.series.is_empty()) {
        return;
    }
    let mut bases: Vec<&str> = reports.iter().flat_map(|report| report.bases()).collect();
    bases.sort_by_key(|base| (*base != REFERENCE, *base));
    bases.dedup();
    let over: String = bases.iter().map(|base| format!(" over {} (95 % interval) |", cell(base))).collect();
    let _ = writeln!(
        out,
        "| start-up, {} | n | failed | p50 | p90 | p99 | max |{over} KVM exits a pod |\n\
         |---|--:|--:|--:|--:|--:|--:|{}--:|",
        clock.ms(),
        "--:|".repeat(bases.len())
    );
    let none = || vec!["–".to_owned(); bases.len()];
    let mut batches = false;
    for report in reports {
        for series in &report.series {
            let name = cell(&series.runtime);
            let over = |groups| -> Vec<String> {
                let mode = if groups { Mode::Parallel } else { series.mode };
                let over = |base: &&str| report.over(&series.runtime, base, mode, groups);
                bases.iter().map(|base| over(base).map_or_else(|| "–".into(), Ratio::short)).collect()
            };
            let what = match series.mode {
                Mode::Parallel => format!("{name}, each of {} at once", series.group),
                Mode::Serial => format!("{name}, one after the other"),
                Mode::Sustained => format!("{name}, one after the other without pauses"),
            };
            row(out, &what, &series.summary, over(false), &series.shown_exits());
            if let Some(whole) = series.whole_groups() {
                batches = true;
                row(out, &format!("{name}, {} at once, whole group", series.group), &whole, over(true), "–");
            }
        }
        if let Some(bare) = &report.bare_boot {
            row(
                out,
                &format!("the VM of {} alone, to its agent's ready message", cell(&bare.like)),
                &bare.summary,
                none(),
                "–",
            );
        }
    }
    published(out, clock, batches, &none().join(" | "));
    out.push('\n');
    reports.iter().for_each(|report| startup_notes(out, report));
    out.push('\n');
}

/// Adds rows of published start-up times, which are wall times; times of whole groups only `if batches`.
fn published(out: &mut String, clock: Clock, batches: bool, over: &str) {
    for anchor in anchors::all().into_iter().filter(|_| clock == Clock::Wall) {
        let what = match &anchor.figure {
            Figure::StartUp { mode, .. } if mode == "serial" => "one after the other".to_owned(),
            Figure::StartUp { mode, group, .. } if mode == "parallel-batch" && batches => {
                format!("{group} at once, whole group")
            }
            _ => continue,
        };
        // Only figures with raw data; this table has no single numbers from papers.
        let Figure::StartUp { n: Some(n), is: Kind::Median, ms: p50_ms, p99_ms, .. } = anchor.figure else {
            continue;
        };
        let p99 = p99_ms.map_or_else(|| "–".into(), |ms| format!("{ms:.0}"));
        let _ = writeln!(
            out,
            "| {} | {n} | – | {p50_ms:.0} | – | {p99} | – | {over} | – |",
            elsewhere(&anchor, &what)
        );
    }
}

/// Adds the ratios of one report's starts, and what was not measured.
fn startup_notes(out: &mut String, report: &Report) {
    for ratio in report.told_ratios() {
        let _ = writeln!(out, "- {}", cell(&ratio.to_string()));
    }
    if let Some((bare, over)) = report.bare_boot.as_ref().and_then(|bare| Some((bare, bare.over?))) {
        let _ = writeln!(out, "- {} over its VM alone: medians {over}", cell(&bare.like));
    }
    for (series, rate) in report.series.iter().filter_map(|series| Some((series, series.rate?))) {
        let _ = writeln!(out, "- {} without pauses: {rate}", cell(&series.runtime));
    }
    for ping in report.series.iter().filter_map(|series| series.first_ping(report.clock)) {
        let _ = writeln!(out, "- {}", cell(&ping));
    }
    for (why, what) in report.absent() {
        let of: Vec<&str> = what.iter().filter_map(|name| name.strip_suffix(".kvm_exits")).collect();
        if !of.is_empty() {
            let of = of.join(", ").replace("series.", "");
            let _ = writeln!(out, "- KVM exits not measured, because {}: {}", cell(why), cell(&of));
        }
    }
    if let Some(share) = report.overhead.as_ref().and_then(|overhead| overhead.per_pod_ms) {
        let _ = writeln!(out, "- the probe itself: at most {share:.2} ms per pod");
    }
}

fn row(out: &mut String, name: &str, summary: &Summary, over: Vec<String>, exits: &str) {
    let over = over.join(" | ");
    let ms = |time: Option<f64>| time.map_or_else(|| "–".into(), |ms| format!("{ms:.0}"));
    let figures = [summary.p50_ms, summary.p90_ms, summary.p99_ms, summary.max_ms].map(ms).join(" | ");
    let _ = writeln!(out, "| {name} | {} | {} | {figures} | {over} | {exits} |", summary.n, summary.failures);
}

fn memory(out: &mut String, reports: &[&Report]) {
    if reports.iter().all(|report| report.memory.is_empty()) {
        return;
    }
    out.push_str("| PSS, MB (1024 KiB) | pods | management | each VMM | total | freed with the pods |\n");
    out.push_str("|---|--:|--:|--:|--:|--:|\n");
    let mb = |kib: f64| format!("{:.1}", kib / 1024.0);
    for row in reports.iter().flat_map(|report| &report.memory) {
        let (management, total) = (mb(row.management_pss_kib), mb(row.total_pss_kib));
        let gone = row.goes_away_kib.map_or_else(|| "–".into(), mb);
        let (name, each) = (cell(&row.runtime), row.each_vmm_kib().map_or_else(|| "–".into(), mb));
        let _ = writeln!(out, "| {name} | {} | {management} | {each} | {total} | {gone} |", row.pods);
    }
    for anchor in anchors::all() {
        let Figure::Memory { pods, definition, pss_mb } = &anchor.figure else { continue };
        if definition == "management" {
            let _ =
                writeln!(out, "| {} | {pods} | {pss_mb:.0} | – | – | – |", elsewhere(&anchor, "management"));
        }
    }
    out.push('\n');
    for report in reports {
        for (runtime, marginal) in &report.marginal_kib_per_pod {
            let _ = writeln!(
                out,
                "- {}: each pod adds {:.0} KiB in total, {:.0} of it management",
                cell(runtime),
                marginal.total,
                marginal.management
            );
        }
        for (row, each) in report.memory.iter().filter_map(|row| Some((row, row.shown_idle_cpu()?))) {
            let name = cell(&row.runtime);
            let _ = writeln!(out, "- {name}: {} idle pods use {each} millicores each", row.pods);
        }
    }
}

fn elsewhere(anchor: &Anchor, what: &str) -> String {
    format!("*{}, {what}; published, other hardware*", cell(&anchor.name()))
}

/// Escapes a text for a table cell.
fn cell(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '|' | '\\' | '`' | '*' | '_' | '<' | '[' => escaped.extend(['\\', character]),
            other if other.is_control() => escaped.push(' '),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Manifest;
    use crate::sample::{Mode, Outcome, Sample};

    fn result(runtime: &str, modes: &[Mode]) -> Loaded {
        let sample = |mode: Mode, index: u32| Sample {
            runtime: runtime.into(),
            mode,
            round: 0,
            index: if mode == Mode::Parallel { index } else { 0 },
            warm_up: false,
            released_ms: 0.0,
            pod_ms: None,
            created_ms: None,
            started_ms: None,
            first_byte_ms: Some(100.0 + f64::from(index)),
            outcome: if index == 9 { Outcome::Failed } else { Outcome::Ok },
            failed_at: String::new(),
            error: String::new(),
            stages: Default::default(),
            kvm_exits: None,
            first_ping_ms: None,
        };
        let samples: Vec<Sample> = modes
            .iter()
            .flat_map(|&mode| (0..10).map(move |index| (mode, index)))
            .map(|(m, i)| sample(m, i))
            .collect();
        let mut manifest = Manifest::default();
        manifest.host.insert("cpus".into(), serde_json::json!(2));
        let mut report = Report::new(manifest);
        report.add_startup(&[runtime.to_owned()], &samples, &[]);
        Loaded { name: "a_run".into(), report, samples }
    }

    #[test]
    fn figures_stand_beside_published_ones_that_are_marked() {
        let text = tables(&[result("own", &[Mode::Serial, Mode::Parallel])]);
        assert!(text.starts_with("a\\_run: CPUs: 2; quick run.\n"), "{text}");
        assert!(
            text.contains(
                "\n| own, one after the other | 10 | 1 | 104 | 108 | 108 | 108 | – | not measured |\n"
            ),
            "{text}"
        );
        assert!(text.contains("\n| own, each of 10 at once | 10 | 1 |"), "{text}");
        let published: Vec<&str> =
            text.lines().filter(|line| line.contains("Kuasar") || line.contains("Kata")).collect();
        assert!(
            published.len() == 2 && published.iter().all(|line| line.contains("other hardware")),
            "{published:?}"
        );
        // No memory was measured, so there is neither a table of it nor a published row.
        assert!(!text.contains("PSS"), "{text}");
    }

    #[test]
    fn times_of_two_clocks_stand_in_two_tables_and_published_ones_only_in_the_walls() {
        let mut in_node = result("in-node", &[Mode::Serial]);
        in_node.report.clock = Clock::Virtual;
        let text = tables(&[in_node.clone(), result("of-host", &[Mode::Serial])]);
        let (wall, virtual_time) = text.split_once("| start-up, virtual ms |").unwrap();
        assert!(
            wall.contains("| start-up, ms |") && wall.contains("of-host, one") && !wall.contains("node, one")
        );
        assert!(
            virtual_time.contains("node, one") && !virtual_time.contains("of-host, one"),
            "{virtual_time}"
        );
        assert!(wall.contains("virtual time; quick run.\n"), "{wall}");
        let text = tables(&[in_node]);
        assert!(!text.contains("published") && !text.contains("start-up, ms"), "{text}");
    }

    #[test]
    fn ratios_to_runc_and_exits_stand_in_the_row() {
        let mut of = result("own", &[Mode::Serial]);
        let other = result("runc", &[Mode::Serial]);
        of.samples.iter_mut().for_each(|sample| sample.kvm_exits = Some(700));
        of.samples.extend(other.samples);
        let mut report = Report::new(Manifest::default());
        report.add_startup(&["own".to_owned(), "runc".to_owned()], &of.samples, &[]);
        let text = tables(&[Loaded { report, ..of }]);
        assert!(text.contains("| 108 | 1.00 (0.96–1.04) | 700 |\n"), "{text}");
        assert!(
            text.contains("- KVM exits not measured, because no row has KVM exits: runc.serial\n"),
            "{text}"
        );
    }

    #[test]
    fn a_baseline_has_a_column_of_its_own_and_says_how_many_times_faster() {
        let mut of = result("own", &[Mode::Serial]);
        for (name, times) in [("kata", 11.0), ("runc", 2.0)] {
            of.samples.extend(result(name, &[Mode::Serial]).samples.into_iter().map(|sample| Sample {
                first_byte_ms: sample.first_byte_ms.map(|ms| ms * times),
                outcome: Outcome::Ok,
                ..sample
            }));
        }
        of.samples.iter_mut().for_each(|sample| sample.outcome = Outcome::Ok);
        let runtimes = ["own", "kata", "runc"].map(str::to_owned);
        let mut report = Report { baseline: Some("kata".into()), ..Report::new(Manifest::default()) };
        report.add_startup(&runtimes, &of.samples, &[]);
        let text = tables(&[Loaded { report: report.clone(), ..of.clone() }]);
        assert!(text.contains("| over runc (95 % interval) | over kata (95 % interval) |"), "{text}");
        assert!(text.contains("| 0.50 (0.48–0.52) | 0.091 (0.087–0.094) |"), "{text}");
        assert!(text.contains("- own over kata, serial: medians 0.091 × (95 % CI 0.0"), "{text}");
        assert!(text.contains(", 11.0 times faster ("), "{text}");
        // A result that was measured without a baseline yields the same ratios.
        let mut later = Report::new(Manifest::default());
        later.add_startup(&runtimes, &of.samples, &[]);
        later.set_baseline("r", "kata", &of.samples).unwrap();
        let of_pair = |report: &Report| report.over("runc", "kata", Mode::Serial, false).copied();
        assert!(of_pair(&report).is_some() && of_pair(&report) == of_pair(&later));
        let why = later.set_baseline("r", "gvisor", &of.samples).unwrap_err().to_string();
        assert!(why.contains("'gvisor'; it has own, kata, runc"), "{why}");
        // There is no verdict if starts failed.
        of.samples[0].outcome = Outcome::Failed;
        let mut failed = Report::new(Manifest::default());
        failed.add_startup(&runtimes, &of.samples, &[]);
        let text = tables(&[Loaded { report: failed, ..of }]);
        assert!(text.contains("no verdict, because starts failed: 1 of own, 0 of kata"), "{text}");
    }

    #[test]
    fn first_pings_of_vms_are_below_the_table_of_starts() {
        let mut of = result("vm", &[Mode::Serial]);
        let pings = |of: &Loaded| {
            let mut report = Report::new(Manifest::default());
            report.add_startup(&["vm".to_owned()], &of.samples, &[]);
            report
        };
        assert!(pings(&of).not_measured.contains_key("series.vm.first_ping"));
        of.samples.iter_mut().zip(9000..).for_each(|(sample, ms)| sample.first_ping_ms = Some(f64::from(ms)));
        let report = pings(&of);
        // The tenth start failed.
        let ping = "vm: the first ping was answered after 9004 ms (median of 9; 9000 to 9008)";
        assert!(report.notes.iter().any(|note| note == ping), "{:?}", report.notes);
        assert!(tables(&[Loaded { report, ..of }]).contains(&format!("- {ping}\n")));
    }

    #[test]
    fn every_row_has_as_many_cells_as_its_heading() {
        let text = tables(&[result("a|b", &[Mode::Serial])]);
        let cells = |line: &str| line.replace("\\|", "").matches('|').count();
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert!(rows.len() > 3 && rows.iter().all(|line| cells(line) == cells(rows[0])), "{text}");
    }
}
