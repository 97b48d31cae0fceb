//! The daemon's metrics, scraped over TCP, and what stands on them: the chart's dashboard and alerts name only what there is.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod test_node;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::Arc,
};

use fake_agent::FakeAgent;
use sandboxer::{api::metrics, pod::DaemonState};
use sandboxer_config::{StartPath, TracesConfig};
use sandboxer_protocol::stage::Stage;
use sandboxer_vmm_fake::FakeVmm;
use test_node::TestNode;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_util::sync::CancellationToken;

/// A node with everything that has a metric: two NUMA nodes, traces.
fn node() -> TestNode {
    let agent = FakeAgent::default();
    TestNode::with(Arc::new(FakeVmm::new(move |guest| agent.serve(guest))), |config| {
        config.placement.nodes_dir = config.run_dir.with_file_name("node");
        for node in ["0", "1"] {
            let dir = config.placement.nodes_dir.join(format!("node{node}"));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("cpulist"), node).unwrap();
            fs::write(dir.join("meminfo"), "Node N MemTotal: 99999 kB\nNode N MemFree: 9999 kB\n").unwrap();
        }
        let endpoint = "http://127.0.0.1:9".to_owned();
        config.traces = Some(TracesConfig { endpoint, sampling_ratio: 1.0 });
    })
}

async fn scrape(node: &Arc<DaemonState>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, until) = (listener.local_addr().unwrap(), CancellationToken::new());
    let served = tokio::spawn(metrics::serve(listener, node.clone(), until.clone()));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    until.cancel();
    served.await.unwrap().unwrap();
    answer
}

/// Returns the series of a scrape, each with the names of its labels.
fn series(scraped: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in scraped.lines().filter(|line| line.starts_with("sandboxer_")) {
        let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap());
        let labels = rest.split(['{', ',']).filter_map(|pair| Some(pair.split_once("=\"")?.0.to_owned()));
        found.entry(name.to_owned()).or_default().extend(labels);
    }
    found
}

/// A condition on a label: name and values.
type Condition = (String, Vec<String>);

/// Returns the metrics that a text names, each with the conditions on its labels.
fn named(text: &str) -> Vec<(String, Vec<Condition>)> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = vec![];
    for (at, _) in text.match_indices("sandboxer_") {
        if text[..at].ends_with(word) {
            continue;
        }
        let name: String = text[at..].chars().take_while(|c| word(*c)).collect();
        let rest = &text[at + name.len()..];
        let mut labels = vec![];
        if let Some(inner) = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')) {
            for pair in inner.0.split(',') {
                let (label, values) = pair.split_once(['=', '!']).unwrap();
                let values = values.trim_matches(['=', '~', '"']).split('|').map(str::to_owned).collect();
                labels.push((label.trim().to_owned(), values));
            }
        }
        found.push((name, labels));
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dashboard_and_the_alerts_name_only_what_there_is() {
    let test = node();
    // A start that falls back, since there is no pool; and one that fails.
    test.pod("first").start().await.unwrap();
    test.node.start_paths.missed(StartPath::Pool, "empty", None);
    let scraped = scrape(&test.node).await;
    let series = series(&scraped);
    for (name, labels) in [
        ("sandboxer_pods", ""),
        ("sandboxer_starts_total", "path"),
        ("sandboxer_start_fallbacks_total", "path,reason"),
        ("sandboxer_stage_seconds_bucket", "le,outcome,stage"),
        ("sandboxer_numa_vcpus", "node"),
        ("sandboxer_trace_spans_total", "result"),
        ("sandboxer_checkpoints", ""),
        ("sandboxer_checkpoints_bytes", ""),
        ("sandboxer_checkpoint_saves_total", "result"),
        ("sandboxer_checkpoint_restores_total", "result"),
        ("sandboxer_checkpoint_pause_seconds_bucket", "le"),
    ] {
        let seen = series.get(name).unwrap_or_else(|| panic!("{name} is not in {scraped}"));
        assert_eq!(seen.iter().cloned().collect::<Vec<_>>().join(","), labels, "{name}");
    }

    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/helm/sandboxer/files");
    let dashboard: serde_json::Value =
        serde_json::from_slice(&fs::read(chart.join("dashboard.json")).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut texts: Vec<String> = targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    let alerts = fs::read_to_string(chart.join("alerts.yaml")).unwrap();
    texts.push(alerts);
    let stages = Stage::ALL.map(Stage::as_str);
    let mut seen = 0;
    for (name, labels) in texts.iter().flat_map(|text| named(text)) {
        seen += 1;
        let known = series.get(&name).unwrap_or_else(|| panic!("there is no metric {name}"));
        for (label, values) in labels {
            // Prometheus' own.
            if label == "instance" {
                continue;
            }
            assert!(known.contains(&label), "{name} has no label {label}");
            let known: &[&str] = match label.as_str() {
                "stage" => &stages,
                "outcome" => &["ok", "failed", "cancelled"],
                other => panic!("the values of label {other} are not known to this test"),
            };
            for value in values {
                assert!(known.contains(&value.as_str()), "{name} has no {label} {value}");
            }
        }
    }
    assert!(seen > 15, "only {seen} metrics are named");
}
