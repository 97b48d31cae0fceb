//! Pages of made-up results.

use super::*;
use crate::manifest::Manifest;
use crate::sample::{Mode, Outcome, Sample};

fn result(runtime: &str, count: u32) -> Loaded {
    let sample = |round: u32| Sample {
        runtime: runtime.into(),
        mode: Mode::Serial,
        round,
        index: 0,
        warm_up: false,
        released_ms: f64::from(round) * 200.0,
        pod_ms: Some(80.0),
        created_ms: Some(90.0),
        started_ms: Some(120.0),
        first_byte_ms: Some(100.0 + f64::from(round * 7919 % 1000) / 10.0),
        outcome: if round % 100 == 99 { Outcome::Failed } else { Outcome::Ok },
        failed_at: if round % 100 == 99 { "RunPodSandbox".into() } else { String::new() },
        error: String::new(),
        stages: Default::default(),
        kvm_exits: None,
        first_ping_ms: None,
    };
    let samples: Vec<Sample> = (0..count).map(sample).collect();
    let mut report = Report::new(Manifest::default());
    report.add_startup(&[runtime.to_owned()], &samples, &[]);
    Loaded { name: "a run".into(), report, samples }
}

#[test]
fn a_large_result_is_a_small_page_that_asks_for_nothing() {
    let page = page(&[result("sandboxer", 10_000)], &[]);
    assert!(page.len() < 3 << 20, "{} bytes", page.len());
    for word in ["<script", "http://", "https://", "@import", "url("] {
        let found = page.replace("http://www.w3.org/2000/svg", "").contains(word);
        assert!(!found, "the page refers to something outside: {word}");
    }
    assert!(page.contains("100 of 10000 starts failed (100 at RunPodSandbox)"));
}

#[test]
fn virtual_time_is_said_on_every_table_and_plot_and_no_published_time_stands_beside_it() {
    let mut run = result("sandboxer", 50);
    run.report.clock = Clock::Virtual;
    let text = page(&[run.clone()], &[]);
    assert!(text.contains("Start-up, virtual ms</h3>") && text.contains(">virtual time</span>"), "{text}");
    assert!(text.contains("Times are virtual"), "{text}");
    let figures = figures(&run, &Palette::of([&run], &[]));
    assert!(!figures.is_empty());
    for figure in figures {
        let drawn = svg(&figure.scene);
        assert!(drawn.contains("virtual ms") && !drawn.contains("published"), "{drawn}");
    }
}

#[test]
fn a_runtimes_name_is_never_markup() {
    assert!(!page(&[result("<img src=x>", 3)], &[]).contains("<img"));
}
