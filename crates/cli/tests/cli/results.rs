//! What is made of results: from files alone, with no daemon and no container runtime.

use std::{fs, path::Path};

use sandboxer_probe::{
    clock::Clock,
    manifest::Manifest,
    measure::recipe,
    options::Network,
    report::Report,
    sample::{Mode, Sample},
    store::Store,
    workload::{
        definition::{self, Profile},
        plan::Plan,
        power::Meter,
        report::Report as WorkloadReport,
        run::Run,
        store::Store as WorkloadStore,
    },
};
use sandboxer_protocol::stage::Stage;
use serde_json::{Value, json};

use crate::admin_double::{Outcome, cli_at};

fn cli(line: &str) -> Outcome {
    cli_at(Path::new("/nowhere/admin.sock"), line)
}

/// Files of times that other tools took.
fn times() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.txt"), "# ms\n100\n104\n102\nfailed\n110\n").unwrap();
    fs::write(dir.path().join("b.txt"), "200\n204\n202\n210\n").unwrap();
    dir
}

#[test]
fn summarise_is_the_same_in_words_and_in_json() {
    let dir = times();
    let a = dir.path().join("a.txt");
    let text = cli(&format!("summarise {}", a.display())).ok();
    assert!(text.contains("n 5  failures 1") && text.contains("p50         102 ms"), "{text}");
    let told: Value = serde_json::from_str(&cli(&format!("summarise --json {}", a.display())).ok()).unwrap();
    let sd = told["sd_ms"].as_f64().unwrap();
    assert!((sd - (56.0f64 / 3.0).sqrt()).abs() < 1e-9, "{sd}");
    let expected = json!({
        "n": 5, "failures": 1, "min_ms": 100.0, "p50_ms": 102.0, "p90_ms": 110.0, "p95_ms": 110.0,
        "p99_ms": 110.0, "max_ms": 110.0, "mean_ms": 104.0, "sd_ms": sd
    });
    assert_eq!(told, expected);
    let bad = dir.path().join("bad.txt");
    fs::write(&bad, "100\nsoon\n").unwrap();
    let why = cli(&format!("summarise {}", bad.display())).failed(1);
    assert!(why.contains("bad.txt") && why.contains("line 2"), "{why}");
}

#[test]
fn a_report_is_one_page_with_its_plots_beside_it() {
    let dir = times();
    let dir = dir.path().display();
    let said = cli(&format!("report {dir}/a.txt {dir}/b.txt --output {dir}/page/index.html")).ok();
    assert_eq!(said, format!("report: {dir}/page/index.html\n"));
    let page = fs::read_to_string(format!("{dir}/page/index.html")).unwrap();
    assert!(page.contains("1 of 5 starts failed") && page.contains("other hardware"));
    let svg = fs::read_to_string(format!("{dir}/page/plots/b-startup-serial.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("b, n = 4, p50 202 ms"));
    let png = fs::read(format!("{dir}/page/plots/b-startup-serial.png")).unwrap();
    assert!(png.starts_with(b"\x89PNG"));
    let why = cli(&format!("report {dir}/page")).failed(1);
    assert!(why.contains("neither report.json nor samples.csv"), "{why}");
}

#[test]
fn markdown_has_published_figures_marked() {
    let dir = times();
    let dir = dir.path().display();
    let text = cli(&format!("report --markdown {dir}/a.txt {dir}/b.txt")).ok();
    assert!(text.contains("| a, one after the other | 5 | 1 | 102 | 110 | 110 | 110 |"), "{text}");
    assert!(text.contains("| b, one after the other | 4 | 0 | 202 |"), "{text}");
    for system in ["Kuasar", "Kata"] {
        let row = text.lines().find(|line| line.contains(system)).unwrap();
        assert!(row.contains("other hardware"), "{row}");
    }
}

#[test]
fn a_result_that_cannot_be_used_is_named_and_the_others_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    virtual_run(&dir.path().join("good"), "kata", 150.0);
    fs::create_dir(dir.path().join("newer")).unwrap();
    fs::write(dir.path().join("newer/report.json"), r#"{"schema": 2}"#).unwrap();
    let dir = dir.path().display();
    for more in ["--markdown", &format!("--output {dir}/page.html")] {
        let said = cli(&format!("report {dir}/newer {dir}/good {dir}/none --baseline kata {more}"));
        assert_eq!(said.code, Some(1), "{}", said.out);
        for words in
            ["newer/report.json", "newer probe", "none contains no result", "2 of 3 results are missing"]
        {
            assert!(said.err.contains(words), "{words}: {}", said.err);
        }
        assert!(
            said.out.contains("report: ") || said.out.contains("| over kata (95 % interval) |"),
            "{}",
            said.out
        );
    }
    let page = fs::read_to_string(format!("{dir}/page.html")).unwrap();
    assert!(page.contains("runc over kata, serial: medians") && page.contains("times faster"), "{page}");
    assert!(!page.contains("Kuasar published"), "published times are not virtual ones");
    cli(&format!("report {dir}/good --published --output {dir}/page.html")).ok();
    assert!(fs::read_to_string(format!("{dir}/page.html")).unwrap().contains("Kuasar published"));
    let why = cli(&format!("report {dir}/good --baseline gvisor")).failed(1);
    assert!(why.contains("good has no starts of the baseline 'gvisor'; it has kata, runc"), "{why}");
    let why = cli("startup --runtime a --baseline b").failed(1);
    assert!(why.contains("--runtime b") || why.contains("is containerd running"), "{why}");
}

#[test]
fn what_cannot_be_compared_is_refused_or_labelled() {
    let dir = times();
    let dir = dir.path().display();
    let why = cli(&format!("compare {dir}/a.txt {dir}/b.txt")).failed(1);
    assert!(why.contains("nothing to compare"), "{why}");
    fs::create_dir(format!("{dir}/other")).unwrap();
    fs::copy(format!("{dir}/b.txt"), format!("{dir}/other/a.txt")).unwrap();
    let text = cli(&format!("compare {dir}/a.txt {dir}/other/a.txt")).ok();
    assert!(text.contains("did not alternate") && text.contains("quick: true | true"), "{text}");
    fs::create_dir(format!("{dir}/newer")).unwrap();
    fs::write(format!("{dir}/newer/report.json"), r#"{"schema": 2}"#).unwrap();
    let why = cli(&format!("compare {dir}/a.txt {dir}/newer")).failed(1);
    assert!(why.contains("schema 2") && why.contains("newer probe"), "{why}");
}

/// Writes a run in virtual time: five starts of a handler, with this time for container_create, and five of runc.
fn virtual_run(dir: &Path, handler: &str, create_ms: f64) {
    let start = |runtime: &str, ms: f64, stages: &[(Stage, f64)], round: u32| Sample {
        runtime: runtime.into(),
        mode: Mode::Serial,
        round,
        index: 0,
        warm_up: false,
        released_ms: 0.0,
        pod_ms: None,
        created_ms: None,
        started_ms: None,
        first_byte_ms: Some(ms),
        outcome: sandboxer_probe::sample::Outcome::Ok,
        failed_at: String::new(),
        error: String::new(),
        stages: stages.iter().copied().collect(),
        kvm_exits: None,
        first_ping_ms: None,
    };
    let stages = [(Stage::AgentReady, 6.0), (Stage::ContainerCreate, create_ms)];
    let samples: Vec<Sample> = (0..5)
        .flat_map(|round| {
            [start(handler, 126.0 + create_ms, &stages, round), start("runc", 270.0, &[], round)]
        })
        .collect();
    let mut report = Report { clock: Clock::Virtual, ..Report::new(Manifest::default()) };
    report.manifest.vmm.insert("vmm".into(), json!("qemu"));
    report.add_startup(&[handler.to_owned(), "runc".to_owned()], &samples, &[]);
    let mut store = Store::create(dir).unwrap();
    store.clock = report.clock;
    samples.iter().for_each(|sample| store.sample(sample).unwrap());
    store.report(&report, &samples).unwrap();
}

#[test]
fn the_gate_fails_by_the_name_of_the_stage_that_grew() {
    let dir = tempfile::tempdir().unwrap();
    for (name, create_ms) in [("before", 15.0), ("same", 15.0), ("slow", 22.0)] {
        virtual_run(&dir.path().join(name), "sandboxer", create_ms);
    }
    let dir = dir.path().display();
    let gate = |run: &str| cli(&format!("gate {dir}/{run} --history {dir}/history.csv"));
    let why = gate("same").failed(1);
    assert!(why.contains("has no recorded result"), "{why}");
    cli(&format!("gate {dir}/before --history {dir}/history.csv --record --commit abc")).ok();
    let text = gate("same").ok();
    assert!(text.contains("abc") && text.contains("+0.0 %"), "{text}");
    let slow = gate("slow");
    assert_eq!(slow.code, Some(1), "{}", slow.out);
    assert!(slow.err.contains("sandboxer: container_create 15.00 → 22.00 (+46.7 %)"), "{}", slow.err);
    assert!(slow.out.contains("container_create"), "the table is printed all the same: {}", slow.out);
    cli(&format!("gate {dir}/slow --history {dir}/history.csv --allow 50")).ok();
}

#[test]
fn runs_of_two_clocks_are_neither_compared_nor_merged() {
    let dir = times();
    let run = dir.path().join("virtual");
    virtual_run(&run, "a", 15.0);
    let dir = dir.path().display();
    let why = cli(&format!("compare {dir}/a.txt {dir}/virtual")).failed(1);
    assert!(why.contains("times of a are ms and those of virtual are virtual ms"), "{why}");
    let why = cli(&format!("merge {dir}/virtual {dir}/b.txt --output {dir}/all")).failed(1);
    assert!(why.contains("two clocks"), "{why}");
    // Also of a run that was killed before its report was written.
    fs::remove_file(run.join("report.json")).unwrap();
    let why = cli(&format!("compare {dir}/a.txt {dir}/virtual")).failed(1);
    assert!(why.contains("virtual ms"), "{why}");
}

#[test]
fn runs_are_merged_with_the_ratios_of_each() {
    let dir = tempfile::tempdir().unwrap();
    virtual_run(&dir.path().join("one"), "sandboxer", 15.0);
    virtual_run(&dir.path().join("two"), "sandboxer-ch", 144.0);
    let dir = dir.path().display();
    cli(&format!("merge {dir}/one {dir}/two --output {dir}/all")).ok();
    let text = cli(&format!("report --markdown {dir}/all")).ok();
    assert!(text.contains("| start-up, virtual ms |"), "{text}");
    for row in [
        "| sandboxer, one after the other | 5 | 0 | 141 | 141 | 141 | 141 | 0.52 (0.52–0.52) |",
        "| sandboxer-ch, one after the other | 5 | 0 | 270 | 270 | 270 | 270 | 1.00 (1.00–1.00) |",
        "| runc, one after the other | 10 | 0 | 270 |",
    ] {
        assert!(text.contains(row), "{row}\n{text}");
    }
    let why = cli(&format!("merge {dir}/one {dir}/all --output {dir}/again")).failed(1);
    assert!(why.contains("sandboxer serial") && why.contains("leave one of the two out"), "{why}");
}

#[test]
fn published_scores_follow_from_their_means_but_for_three() {
    let text = cli("score --sheet desmet --published").ok();
    assert!(text.contains("40 of 43 published scores follow"), "{text}");
    for line in [
        "Firecracker jitter: 127.3 % of the baseline, published 3, by the rule 2",
        "KVM db-read: 74.7 % of the baseline, published 1, by the rule 2",
        "KVM db-write: 83.9 % of the baseline, published 2, by the rule 3",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let told: Value = serde_json::from_str(&cli("score --sheet desmet --published --json").ok()).unwrap();
    assert_eq!(
        (told["cells"].as_u64(), told["contradictions"].as_array().map(Vec::len)),
        (Some(43), Some(3))
    );
    let why = cli("score --sheet gate --published").failed(1);
    assert!(why.contains("needs a sheet of levels"), "{why}");
}

#[test]
fn a_gate_fails_what_is_not_shown_and_names_a_baseline_that_is_not_there() {
    let dir = times();
    let dir = dir.path().display();
    let why = cli(&format!("score {dir}/a.txt --sheet gate")).failed(1);
    assert!(why.contains("no result has the baseline 'runc': choose --baseline from a"), "{why}");
    // The two did not alternate in one run: there is no ratio, and what was not measured does not pass.
    let judged = cli(&format!("score {dir}/a.txt {dir}/b.txt --sheet gate --baseline a"));
    assert!(
        judged.code == Some(1) && judged.err.contains("the gate does not pass: 1 of 1"),
        "{}",
        judged.err
    );
    assert!(judged.out.contains("not measured"), "{}", judged.out);
    let why = cli(&format!("score {dir}/a.txt --sheet nothing")).failed(1);
    assert!(why.contains("one of gate, sla, desmet"), "{why}");
}

/// Writes a result of one probe on one runtime, five runs, without a container.
fn workload_result(dir: &Path, profile: Profile) {
    let plan = Plan {
        runtimes: vec!["runc".into()],
        native: None,
        vm: None,
        client_runtime: "runc".into(),
        probes: definition::all().into_iter().filter(|probe| probe.name == "scheduler").collect(),
        profile,
        repeat: 5,
        warm_up: 0,
        cpus: 1,
        memory: 512 << 20,
        volumes: std::env::temp_dir(),
        recipe: recipe("image", Network::Pod, std::time::Duration::from_secs(60)),
        build_image: "build".into(),
        meter: Meter::None("a test".into()),
        trusted: Vec::new(),
    };
    let run = |round: u32| Run {
        runtime: "runc".into(),
        probe: "scheduler".into(),
        case: String::new(),
        round,
        warm_up: false,
        begun_s: 0.0,
        took_s: 1.0,
        outcome: sandboxer_probe::sample::Outcome::Ok,
        failed_at: String::new(),
        error: String::new(),
        commands: Default::default(),
        threads: None,
        figures: [("time_s".to_owned(), 2.0)].into(),
        facts: None,
        host: Default::default(),
        cpu: None,
        power: Default::default(),
    };
    let runs: Vec<Run> = (0..5).map(run).collect();
    // As of a daemon of ours without KVM, under runc's name.
    let mut manifest = Manifest::default();
    manifest.vmm.insert("accelerator".into(), json!("tcg"));
    let ours = [("type".to_owned(), json!("io.containerd.sandboxer.v1"))].into_iter().collect();
    manifest.runtimes.insert("runc".into(), ours);
    let report = WorkloadReport::of(&plan, manifest, Clock::Wall, Default::default(), &runs);
    let mut store = WorkloadStore::create(dir).unwrap();
    for run in &runs {
        store.run(run, &Default::default()).unwrap();
    }
    store.report(&report).unwrap();
}

#[test]
fn workloads_are_on_the_page_in_tables_and_compared() {
    let dir = times();
    workload_result(&dir.path().join("quick"), Profile::Quick);
    workload_result(&dir.path().join("paper"), Profile::Paper);
    let dir = dir.path().display();
    cli(&format!("report {dir}/quick {dir}/a.txt --output {dir}/page/index.html")).ok();
    let page = fs::read_to_string(format!("{dir}/page/index.html")).unwrap();
    assert!(page.contains("emulated guests</span>"), "an emulated figure looks like another");
    assert!(page.contains("<h3>scheduler: ") && page.contains("Start-up, memory and workloads of pods"));
    assert!(
        fs::read_to_string(format!("{dir}/page/plots/quick-workload-scheduler.svg"))
            .unwrap()
            .contains("2.000")
    );
    let text = cli(&format!("report --markdown {dir}/quick")).ok();
    assert!(text.contains("| runc | 5 | 0 | 2.000 | 2.000–2.000 |"), "{text}");
    let text = cli(&format!("compare {dir}/quick {dir}/quick")).ok();
    assert!(text.contains("1.00 (1.00–1.00)") && !text.contains("NOT COMPARABLE"), "{text}");
    let text = cli(&format!("compare {dir}/quick {dir}/paper")).ok();
    assert!(text.contains("NOT COMPARABLE") && text.contains("profile: quick | paper"), "{text}");
    let why = cli(&format!("compare {dir}/a.txt {dir}/quick")).failed(1);
    assert!(why.contains("quick is a result of workload and") && why.contains("a.txt is not"), "{why}");
    let why = cli(&format!("report {dir}/page")).failed(1);
    assert!(why.contains("neither"), "{why}");
}
