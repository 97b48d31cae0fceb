//! Pages and tables of made-up results.

use super::*;
use crate::document::{html, markdown, terminal};
use crate::plot::svg;
use crate::sample::{Mode, Outcome, Sample};
use crate::workload::definition::Profile;
use crate::workload::made_up;
use crate::workload::store::Loaded as Workload;

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

fn of_starts(startups: Vec<Loaded>) -> Results {
    Results { startups, ..Results::default() }
}

fn of_workload(result: Workload) -> Results {
    Results { workloads: vec![result], ..Results::default() }
}

fn page_of(results: &Results) -> String {
    html::render(&page(results, &Palette::new(&results.startups, &results.workloads)))
}

fn tables_of(startups: Vec<Loaded>) -> String {
    markdown::render(&tables(&of_starts(startups)))
}

/// Returns a page's or a table's rows, which must have as many cells as their heading.
fn rows(text: &str) -> Vec<&str> {
    let cells = |line: &str| line.replace("\\|", "").matches('|').count();
    for table in text.split("\n\n").filter(|part| part.starts_with('|')) {
        let first = table.lines().next().unwrap();
        assert!(table.lines().all(|line| cells(line) == cells(first)), "{table}");
    }
    text.lines().filter(|line| line.starts_with('|')).collect()
}

#[test]
fn a_large_result_is_a_small_page_that_asks_for_nothing() {
    let mut large = result("sandboxer", &[]);
    let one = result("sandboxer", &[Mode::Serial]).samples.remove(0);
    let start = |round: u32| Sample {
        round,
        first_byte_ms: Some(100.0 + f64::from(round * 7919 % 1000) / 10.0),
        outcome: if round % 100 == 99 { Outcome::Failed } else { Outcome::Ok },
        failed_at: if round % 100 == 99 { "RunPodSandbox".into() } else { String::new() },
        ..one.clone()
    };
    large.samples = (0..10_000).map(start).collect();
    large.report = Report::new(Manifest::default());
    large.report.add_startup(&["sandboxer".to_owned()], &large.samples, &[]);
    let page = page_of(&of_starts(vec![large]));
    assert!(page.len() < 3 << 20, "{} bytes", page.len());
    for word in ["<script", "http://", "https://", "@import", "url("] {
        let found = page.replace("http://www.w3.org/2000/svg", "").contains(word);
        assert!(!found, "the page refers to something outside: {word}");
    }
    assert!(page.contains("100 of 10000 starts failed (100 at RunPodSandbox)"));
}

#[test]
fn virtual_time_is_said_on_every_table_and_plot_and_no_published_time_stands_beside_it() {
    let mut run = result("sandboxer", &[Mode::Serial]);
    run.report.clock = Clock::Virtual;
    let text = page_of(&of_starts(vec![run.clone()]));
    assert!(text.contains("Start-up, virtual ms</h3>") && text.contains(">virtual time</span>"), "{text}");
    assert!(text.contains("Times are virtual"), "{text}");
    let figures = figures(&run, &Palette::new([&run], &[]));
    assert!(!figures.is_empty());
    for figure in figures {
        let drawn = svg(&figure.scene);
        assert!(drawn.contains("virtual ms") && !drawn.contains("published"), "{drawn}");
    }
}

#[test]
fn a_runtimes_name_is_never_markup() {
    assert!(!page_of(&of_starts(vec![result("<img src=x>", &[Mode::Serial])])).contains("<img"));
    assert_eq!(
        rows(&tables_of(vec![result("a|b", &[Mode::Serial])]))
            .iter()
            .filter(|row| row.contains("a\\|b"))
            .count(),
        1
    );
}

#[test]
fn figures_stand_beside_published_ones_that_are_marked() {
    let text = tables_of(vec![result("own", &[Mode::Serial, Mode::Parallel])]);
    assert!(text.starts_with("a\\_run: CPUs: 2; quick run.\n"), "{text}");
    assert!(
        text.contains("\n| own | serial | 10 | 1 | 104 | 108 | 108 | 108 | – | not measured |\n"),
        "{text}"
    );
    assert!(text.contains("\n| own | parallel × 10 | 10 | 1 |"), "{text}");
    let published: Vec<&str> =
        rows(&text).into_iter().filter(|line| line.contains("Kuasar") || line.contains("Kata")).collect();
    assert!(
        published.len() == 2 && published.iter().all(|line| line.contains("other hardware")),
        "{published:?}"
    );
    // No memory was measured, so there is neither a table of it nor a published row.
    assert!(!text.contains("PSS") && !text.contains("memory, management"), "{text}");
}

#[test]
fn times_of_two_clocks_stand_in_two_tables_and_published_ones_only_beside_the_walls() {
    let mut in_node = result("in-node", &[Mode::Serial]);
    in_node.report.clock = Clock::Virtual;
    let text = tables_of(vec![in_node.clone(), result("of-host", &[Mode::Serial])]);
    let (wall, virtual_time) = text.split_once("### Start-up, virtual ms\n").unwrap();
    assert!(
        wall.contains("### Start-up, ms\n") && wall.contains("| of-host |") && !wall.contains("| in-node |")
    );
    assert!(virtual_time.contains("| in-node |") && !virtual_time.contains("| of-host |"), "{virtual_time}");
    assert!(wall.contains("virtual time; quick run.\n"), "{wall}");
    let text = tables_of(vec![in_node]);
    assert!(!text.contains("Published") && !text.contains("Start-up, ms"), "{text}");
}

#[test]
fn ratios_to_runc_and_exits_stand_in_the_row() {
    let mut loaded = result("own", &[Mode::Serial]);
    let other = result("runc", &[Mode::Serial]);
    loaded.samples.iter_mut().for_each(|sample| sample.kvm_exits = Some(700));
    loaded.samples.extend(other.samples);
    let mut report = Report::new(Manifest::default());
    report.add_startup(&["own".to_owned(), "runc".to_owned()], &loaded.samples, &[]);
    let text = tables_of(vec![Loaded { report, ..loaded }]);
    assert!(text.contains("| 108 | 1.00 (0.96–1.04) | 700 |\n"), "{text}");
    assert!(
        text.contains("- not measured, because no row has KVM exits: series.runc.serial.kvm\\_exits"),
        "{text}"
    );
}

#[test]
fn a_baseline_has_a_column_of_its_own_and_says_how_many_times_faster() {
    let mut loaded = result("own", &[Mode::Serial]);
    for (name, times) in [("kata", 11.0), ("runc", 2.0)] {
        loaded.samples.extend(
            result(name, &[Mode::Serial])
                .samples
                .into_iter()
                .map(|sample| Sample { first_byte_ms: sample.first_byte_ms.map(|ms| ms * times), ..sample }),
        );
    }
    loaded.samples.iter_mut().for_each(|sample| sample.outcome = Outcome::Ok);
    let runtimes = ["own", "kata", "runc"].map(str::to_owned);
    let mut report = Report { baseline: Some("kata".into()), ..Report::new(Manifest::default()) };
    report.add_startup(&runtimes, &loaded.samples, &[]);
    let text = tables_of(vec![Loaded { report: report.clone(), ..loaded.clone() }]);
    assert!(text.contains("| over runc | over kata |"), "{text}");
    assert!(text.contains("| 0.50 (0.48–0.52) | 0.091 (0.087–0.094) |"), "{text}");
    assert!(text.contains("- own over kata, serial: medians 0.091 × (95 % CI 0.0"), "{text}");
    assert!(text.contains(", 11.0 times faster ("), "{text}");
    // A result that was measured without a baseline yields the same ratios.
    let mut later = Report::new(Manifest::default());
    later.add_startup(&runtimes, &loaded.samples, &[]);
    later.set_baseline("r", "kata", &loaded.samples).unwrap();
    let of_pair = |report: &Report| report.over("runc", "kata", Mode::Serial, false).copied();
    assert!(of_pair(&report).is_some() && of_pair(&report) == of_pair(&later));
    let why = later.set_baseline("r", "gvisor", &loaded.samples).unwrap_err().to_string();
    assert!(why.contains("'gvisor'; it has own, kata, runc"), "{why}");
    // There is no verdict if starts failed.
    loaded.samples[0].outcome = Outcome::Failed;
    let mut failed = Report::new(Manifest::default());
    failed.add_startup(&runtimes, &loaded.samples, &[]);
    let text = tables_of(vec![Loaded { report: failed, ..loaded }]);
    assert!(text.contains("no verdict, because starts failed: 1 of own, 0 of kata"), "{text}");
}

#[test]
fn first_pings_of_vms_are_notes() {
    let mut loaded = result("vm", &[Mode::Serial]);
    let pings = |loaded: &Loaded| {
        let mut report = Report::new(Manifest::default());
        report.add_startup(&["vm".to_owned()], &loaded.samples, &[]);
        report
    };
    assert!(pings(&loaded).not_measured.contains_key("series.vm.first_ping"));
    loaded.samples.iter_mut().zip(9000..).for_each(|(sample, ms)| sample.first_ping_ms = Some(f64::from(ms)));
    let report = pings(&loaded);
    // The tenth start failed.
    let ping = "vm: the first ping was answered after 9004 ms (median of 9; 9000 to 9008)";
    assert!(report.notes.iter().any(|note| note == ping), "{:?}", report.notes);
    assert!(tables_of(vec![Loaded { report, ..loaded }]).contains(&format!("- {ping}\n")));
}

#[test]
fn a_run_on_a_terminal_has_its_table_and_why_it_is_partial() {
    let mut run = result("own", &[Mode::Serial]);
    run.report.partial_reason = Some("interrupted".into());
    let text = terminal::render(&startup(&run.report));
    assert!(text.starts_with("Start-up, ms\n\nruntime  mode "), "{text}");
    assert!(text.contains("\npartial: interrupted\n") && text.contains("\nquick: fewer starts"), "{text}");
}

#[test]
fn a_probe_has_its_bars_its_latency_and_its_table() {
    let page = page_of(&of_workload(made_up::result(Profile::Quick)));
    for text in ["<h3>cpu: ", ">Latency by percentile<", "latency</text>", ">runc</text>"] {
        assert!(page.contains(text), "no {text}");
    }
    assert!(page.contains("one-thread") && page.contains(">quick</span>"));
    assert!(page.contains("0.50 (0.50–0.50)"), "no ratio");
}

#[test]
fn published_figures_stand_only_beside_the_same_parameters() {
    let [quick, paper] = [Profile::Quick, Profile::Paper].map(made_up::result).map(of_workload);
    let page = page_of(&quick);
    assert!(!page.contains("419.9") && page.contains("this run was shorter"));
    let page = page_of(&paper);
    assert!(page.contains("Docker, published") && page.contains("419.9") && page.contains("other hardware"));
    let [quick, paper] = [quick, paper].map(|results| markdown::render(&tables(&results)));
    assert!(
        quick.contains("| cpu one-thread | events\\_per\\_s | higher | runc | 5 | 0 | 50.0 |"),
        "{quick}"
    );
    assert!(quick.contains("0.50 (0.50–0.50)") && !quick.contains("Published"), "{quick}");
    assert!(
        rows(&paper).iter().any(|row| row.starts_with("| Docker |") && row.contains("| 419.9 events/s |")),
        "{paper}"
    );
}

#[test]
fn virtual_workloads_say_so_and_no_published_figure_stands_beside_them() {
    let mut run = made_up::result(Profile::Paper);
    run.report.clock = Clock::Virtual;
    run.report.evaluate(&run.runtimes(), &run.runs);
    let page = page_of(&of_workload(run));
    assert!(page.contains(">virtual time</span>") && page.contains("times are virtual: one instruction"));
    assert!(!page.contains("419.9") && page.contains("this run&#39;s times are virtual"));
}

#[test]
fn what_was_not_measured_is_named_and_names_are_never_markup() {
    let mut result = made_up::result(Profile::Quick);
    result.report.not_measured.insert("cpu.x".into(), "tool: <script>".into());
    let page = page_of(&of_workload(result));
    assert!(page.contains("not measured: cpu.x: tool: &lt;script&gt;"), "{page}");
}
