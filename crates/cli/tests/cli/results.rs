//! What is made of results: from files alone, with no daemon and no container runtime.

use std::{fs, path::Path};

use sandboxer_probe::workload::definition::Profile;
use sandboxer_probe::workload::store::Store as WorkloadStore;
use serde_json::json;

use crate::admin_double::{Outcome, cli_at};
use crate::made_up::{self, virtual_run};

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
fn a_report_is_one_page_with_its_plots_beside_it() {
    let dir = times();
    let dir = dir.path().display();
    let stdout = cli(&format!("report {dir}/a.txt {dir}/b.txt --output {dir}/page/index.html")).ok();
    assert_eq!(stdout, format!("report: {dir}/page/index.html\n"));
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
    assert!(text.contains("| a | serial | 5 | 1 | 102 | 110 | 110 | 110 |"), "{text}");
    assert!(text.contains("| b | serial | 4 | 0 | 202 |"), "{text}");
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
        let outcome = cli(&format!("report {dir}/newer {dir}/good {dir}/none --baseline kata {more}"));
        assert_eq!(outcome.code, Some(1), "{}", outcome.out);
        for words in
            ["newer/report.json", "newer probe", "none contains no result", "2 of 3 results are missing"]
        {
            assert!(outcome.err.contains(words), "{words}: {}", outcome.err);
        }
        assert!(outcome.out.contains("report: ") || outcome.out.contains("| over kata |"), "{}", outcome.out);
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

#[test]
fn runs_of_two_clocks_are_not_compared() {
    let dir = times();
    let run = dir.path().join("virtual");
    virtual_run(&run, "a", 15.0);
    let dir = dir.path().display();
    let why = cli(&format!("compare {dir}/a.txt {dir}/virtual")).failed(1);
    assert!(why.contains("times of a are ms and those of virtual are virtual ms"), "{why}");
    // Also of a run that was killed before its report was written.
    fs::remove_file(run.join("report.json")).unwrap();
    let why = cli(&format!("compare {dir}/a.txt {dir}/virtual")).failed(1);
    assert!(why.contains("virtual ms"), "{why}");
}

/// Writes a result of workloads, of emulated guests.
fn workload_result(dir: &Path, profile: Profile) {
    let mut result = made_up::result(profile);
    // As of a daemon of ours without KVM, under runc's name.
    let manifest = &mut result.report.manifest;
    manifest.vmm.insert("accelerator".into(), json!("tcg"));
    let ours = [("type".to_owned(), json!("io.containerd.sandboxer.v1"))].into_iter().collect();
    manifest.runtimes.insert("runc".into(), ours);
    let mut store = WorkloadStore::create(dir).unwrap();
    result.runs.iter().for_each(|run| store.row(run).unwrap());
    store.report(&result.report).unwrap();
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
    assert!(page.contains("<h3>latency: ") && page.contains("Start-up, memory and workloads of pods"));
    assert!(
        fs::read_to_string(format!("{dir}/page/plots/quick-workload-cpu.svg")).unwrap().contains("100.0")
    );
    let text = cli(&format!("report --markdown {dir}/quick")).ok();
    assert!(text.contains("| runc | 5 | 0 | 50.0 | 50.0–50.0 |"), "{text}");
    let text = cli(&format!("compare {dir}/quick {dir}/quick")).ok();
    assert!(text.contains("1.00 (1.00–1.00)") && !text.contains("NOT COMPARABLE"), "{text}");
    let text = cli(&format!("compare {dir}/quick {dir}/paper")).ok();
    assert!(text.contains("NOT COMPARABLE") && text.contains("profile: quick | paper"), "{text}");
    let why = cli(&format!("compare {dir}/a.txt {dir}/quick")).failed(1);
    assert!(why.contains("quick is a result of workload and") && why.contains("a.txt is not"), "{why}");
    let why = cli(&format!("report {dir}/page")).failed(1);
    assert!(why.contains("neither"), "{why}");
}
