//! What is made of results: from files alone, with no daemon and no container runtime.

use std::{fs, path::Path};

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
fn what_cannot_be_compared_is_refused_or_labelled() {
    let dir = times();
    let dir = dir.path().display();
    let why = cli(&format!("compare {dir}/a.txt {dir}/b.txt")).failed(1);
    assert!(why.contains("nothing to compare"), "{why}");
    fs::create_dir(format!("{dir}/other")).unwrap();
    fs::copy(format!("{dir}/b.txt"), format!("{dir}/other/a.txt")).unwrap();
    let text = cli(&format!("compare {dir}/a.txt {dir}/other/a.txt")).ok();
    assert!(text.contains("not taken in turns") && text.contains("quick: true | true"), "{text}");
    fs::create_dir(format!("{dir}/newer")).unwrap();
    fs::write(format!("{dir}/newer/report.json"), r#"{"schema": 2}"#).unwrap();
    let why = cli(&format!("compare {dir}/a.txt {dir}/newer")).failed(1);
    assert!(why.contains("schema 2") && why.contains("newer probe"), "{why}");
}
