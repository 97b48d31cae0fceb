//! Commands that judge and merge results, from files alone.

use std::fs;

use sandboxer_probe::{document::markdown, present, results::Results};
use serde_json::{Value, json};

use crate::bench;
use crate::made_up::virtual_run;

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
    let text = bench(&format!("summarise {}", a.display())).ok();
    assert!(text.contains("n 5  failures 1") && text.contains("p50         102 ms"), "{text}");
    let result: Value =
        serde_json::from_str(&bench(&format!("summarise --json {}", a.display())).ok()).unwrap();
    let sd = result["sd_ms"].as_f64().unwrap();
    assert!((sd - (56.0f64 / 3.0).sqrt()).abs() < 1e-9, "{sd}");
    let expected = json!({
        "n": 5, "failures": 1, "min_ms": 100.0, "p50_ms": 102.0, "p90_ms": 110.0, "p95_ms": 110.0,
        "p99_ms": 110.0, "max_ms": 110.0, "mean_ms": 104.0, "sd_ms": sd
    });
    assert_eq!(result, expected);
    let bad = dir.path().join("bad.txt");
    fs::write(&bad, "100\nsoon\n").unwrap();
    let why = bench(&format!("summarise {}", bad.display())).failed(1);
    assert!(why.contains("bad.txt") && why.contains("line 2"), "{why}");
}

#[test]
fn the_gate_fails_by_the_name_of_the_stage_that_grew() {
    let dir = tempfile::tempdir().unwrap();
    for (name, create_ms) in [("before", 15.0), ("same", 15.0), ("slow", 22.0)] {
        virtual_run(&dir.path().join(name), "sandboxer", create_ms);
    }
    let dir = dir.path().display();
    let gate = |run: &str| bench(&format!("gate {dir}/{run} --history {dir}/history.csv"));
    let why = gate("same").failed(1);
    assert!(why.contains("has no recorded result"), "{why}");
    bench(&format!("gate {dir}/before --history {dir}/history.csv --record --commit abc")).ok();
    let text = gate("same").ok();
    assert!(text.contains("abc") && text.contains("+0.0 %"), "{text}");
    let slow = gate("slow");
    assert_eq!(slow.code, Some(1), "{}", slow.out);
    assert!(slow.err.contains("sandboxer: container_create 15.00 → 22.00 (+46.7 %)"), "{}", slow.err);
    assert!(slow.out.contains("container_create"), "the table is printed all the same: {}", slow.out);
    bench(&format!("gate {dir}/slow --history {dir}/history.csv --allow 50")).ok();
}

#[test]
fn published_scores_follow_from_their_means_but_for_three() {
    let text = bench("score --sheet desmet --published").ok();
    assert!(text.contains("40 of 43 published scores follow"), "{text}");
    for line in [
        "Firecracker jitter: 127.3 % of the baseline, published 3, by the rule 2",
        "KVM db-read: 74.7 % of the baseline, published 1, by the rule 2",
        "KVM db-write: 83.9 % of the baseline, published 2, by the rule 3",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let result: Value = serde_json::from_str(&bench("score --sheet desmet --published --json").ok()).unwrap();
    assert_eq!(
        (result["cells"].as_u64(), result["contradictions"].as_array().map(Vec::len)),
        (Some(43), Some(3))
    );
    let why = bench("score --sheet gate --published").failed(1);
    assert!(why.contains("needs a sheet of levels"), "{why}");
}

#[test]
fn a_gate_fails_what_is_not_shown_and_names_a_baseline_that_is_not_there() {
    let dir = times();
    let dir = dir.path().display();
    let why = bench(&format!("score {dir}/a.txt --sheet gate")).failed(1);
    assert!(why.contains("no result has the baseline 'runc': choose --baseline from a"), "{why}");
    // The two did not alternate in one run: there is no ratio, and what was not measured does not pass.
    let judged = bench(&format!("score {dir}/a.txt {dir}/b.txt --sheet gate --baseline a"));
    assert!(
        judged.code == Some(1) && judged.err.contains("the gate does not pass: 1 of 1"),
        "{}",
        judged.err
    );
    assert!(judged.out.contains("not measured"), "{}", judged.out);
    let why = bench(&format!("score {dir}/a.txt --sheet nothing")).failed(1);
    assert!(why.contains("one of gate, sla, desmet"), "{why}");
}

#[test]
fn runs_are_merged_with_the_ratios_of_each() {
    let dir = tempfile::tempdir().unwrap();
    virtual_run(&dir.path().join("one"), "sandboxer", 15.0);
    virtual_run(&dir.path().join("two"), "sandboxer-ch", 144.0);
    let at = dir.path().display();
    bench(&format!("merge {at}/one {at}/two --output {at}/all")).ok();
    let all = Results::load(&[dir.path().join("all")]).unwrap();
    let text = markdown::render(&present::tables(&all));
    assert!(text.contains("### Start-up, virtual ms"), "{text}");
    for row in [
        "| sandboxer | serial | 5 | 0 | 141 | 141 | 141 | 141 | 0.52 (0.52–0.52) |",
        "| sandboxer-ch | serial | 5 | 0 | 270 | 270 | 270 | 270 | 1.00 (1.00–1.00) |",
        "| runc | serial | 10 | 0 | 270 |",
    ] {
        assert!(text.contains(row), "{row}\n{text}");
    }
    let why = bench(&format!("merge {at}/one {at}/all --output {at}/again")).failed(1);
    assert!(why.contains("sandboxer serial") && why.contains("leave one of the two out"), "{why}");
}

#[test]
fn runs_of_two_clocks_are_not_merged() {
    let dir = times();
    virtual_run(&dir.path().join("virtual"), "a", 15.0);
    let dir = dir.path().display();
    let why = bench(&format!("merge {dir}/virtual {dir}/b.txt --output {dir}/all")).failed(1);
    assert!(why.contains("two clocks"), "{why}");
}

#[test]
fn every_command_has_examples_a_man_page_and_a_completion() {
    let help = bench("--help").ok();
    for command in ["workload", "streams", "score", "merge", "gate", "summarise"] {
        assert!(help.contains(&format!("\n  {command} ")), "{command}: {help}");
        assert!(bench(&format!("{command} --help")).ok().contains("\nExamples:\n  "), "{command}");
    }
    let dir = tempfile::tempdir().unwrap();
    bench(&format!("man {}", dir.path().display())).ok();
    let page = |name: &str| fs::read_to_string(dir.path().join("man1").join(name)).unwrap();
    assert!(page("sandboxer-bench.1").contains("EXIT STATUS"));
    assert!(page("sandboxer-bench-workload-list.1").contains("\\-\\-commands"));
    assert!(!dir.path().join("man8").exists());
    for shell in ["bash", "zsh", "fish"] {
        assert!(bench(&format!("completion {shell}")).ok().contains("summarise"), "{shell}");
    }
    assert!(bench("pods").failed(2).contains("--help"));
}

#[test]
fn the_recorded_starts_of_earlier_versions_can_be_compared_with() {
    let history = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/history.csv");
    assert!(sandboxer_bench::gate::read(&history).unwrap().len() > 10);
}
