//! Prometheus metrics on a TCP listener, if one is configured: `GET /metrics`.

use std::{
    convert::Infallible,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use http_body_util::Full;
use hyper::{Method, Request, Response, StatusCode, body::Bytes, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet, text::encode},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry, Unit},
};
use sandboxer_config::StartPath;
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::{
        Checkpoints,
        counts::{PAUSES_MS, Pauses},
    },
    pod::{
        DaemonState,
        placer::{Load, Placer},
        stage_times::StageSummary,
    },
};

/// Upper bounds of the buckets, µs: from a cached rootfs to the time limit of a boot.
const BUCKETS_US: [u64; 14] = [
    100, 500, 1_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    10_000_000, 60_000_000,
];
/// Maximum number of connections served at once; others wait.
const CONNECTIONS: usize = 8;
/// Time limit for the head of a request.
const HEAD_LIMIT: Duration = Duration::from_secs(5);

/// Serves metrics until `shutdown`. An error of a client ends only its connection.
pub async fn serve(
    listener: TcpListener,
    node: Arc<DaemonState>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let mut registry = Registry::with_prefix("sandboxer");
    registry.register_collector(Box::new(Scrape(node)));
    let registry = Arc::new(registry);
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return Ok(()) };
        let stream = tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            accepted = listener.accept() => accepted?.0,
        };
        let registry = registry.clone();
        tokio::spawn(async move {
            let answer = service_fn(|request| {
                let response = answer(&registry, &request);
                async { Ok::<_, Infallible>(response) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_LIMIT)
                .serve_connection(TokioIo::new(stream), answer);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "metrics connection ended");
            }
            drop(place);
        });
    }
}

fn answer<B>(registry: &Registry, request: &Request<B>) -> Response<Full<Bytes>> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => (StatusCode::OK, text(registry)),
        (_, "/metrics") => (StatusCode::METHOD_NOT_ALLOWED, "only GET\n".into()),
        _ => (StatusCode::NOT_FOUND, "there is only /metrics\n".into()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let kind =
        hyper::header::HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, kind);
    response
}

/// Returns all metrics as text.
fn text(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = encode(&mut text, registry);
    text
}

/// A collector that reads the daemon's counters at each scrape.
#[derive(Debug)]
struct Scrape(Arc<DaemonState>);

impl Collector for Scrape {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let Self(node) = self;
        let paths = node.start_paths.counts();
        gauge(&mut to, "pods", "Pods that this daemon knows", node.registry.pods().len())?;
        gauge(&mut to, "pool_vms", "VMs that wait for pods", node.pool.list().len())?;
        let trouble = usize::from(node.journal.trouble().is_some());
        gauge(
            &mut to,
            "records_unwritable",
            "1: the last change of a pod's record failed (state_dir)",
            trouble,
        )?;
        nodes(&mut to, &node.placer)?;
        let starts = StartPath::ALL.map(|path| (path, paths.taken.get(&path).copied().unwrap_or(0)));
        counters(
            &mut to,
            "starts",
            "Pods by how they got their VM",
            starts.map(|(path, pods)| ([("path", path.as_str())], pods)),
        )?;
        counters(
            &mut to,
            "start_fallbacks",
            "Start paths that a pod could not take, by reason",
            paths
                .missed
                .iter()
                .map(|((path, reason), pods)| ([("path", path.as_str()), ("reason", *reason)], *pods)),
        )?;
        let stale = ConstCounter::new(node.old_readings.load(Ordering::Relaxed));
        let help =
            "Requests for statistics answered with earlier ones, because the guest did not answer in time";
        stale.encode(to.encode_descriptor("stale_stats", help, None, stale.metric_type())?)?;
        if let Some(counts) = node.traces.counts() {
            let result = |result, count: &AtomicU64| ([("result", result)], count.load(Ordering::Relaxed));
            let counts = [result("sent", &counts.sent), result("dropped", &counts.dropped)];
            counters(
                &mut to,
                "trace_spans",
                "Spans of traces: the collector has them, or they were dropped",
                counts,
            )?;
        }
        checkpoints(&mut to, &node.checkpoints)?;
        stages(&mut to, &node.stage_times.summaries())
    }
}

fn checkpoints(to: &mut DescriptorEncoder<'_>, of: &Checkpoints) -> fmt::Result {
    let (count, bytes) = of.size();
    gauge(to, "checkpoints", "Saved pods on disk", count)?;
    let bytes = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
    let help = "Size of all saved pods on disk";
    let family = to.encode_descriptor("checkpoints", help, Some(&Unit::Bytes), bytes.metric_type())?;
    bytes.encode(family)?;
    for (name, help, results) in [
        ("checkpoint_saves", "Running pods that were to be saved", &of.counts.saves),
        ("checkpoint_restores", "Pods that were to go on from a checkpoint", &of.counts.restores),
    ] {
        let named = results.named().map(|(result, count)| ([("result", result)], count));
        counters(to, name, help, named)?;
    }
    let Pauses { counts, sum } = of.counts.pauses();
    let ends = PAUSES_MS.iter().map(|&ms| ms as f64 / 1e3).chain([f64::INFINITY]);
    let buckets: Vec<_> = ends.zip(counts).collect();
    let help = "Time for which a pod was paused to be saved";
    to.encode_descriptor("checkpoint_pause", help, Some(&Unit::Seconds), MetricType::Histogram)?
        .encode_histogram::<NoLabelSet>(sum.as_secs_f64(), counts.iter().sum(), &buckets, None)
}

fn gauge(to: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: usize) -> fmt::Result {
    let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
    gauge.encode(to.encode_descriptor(name, help, None, gauge.metric_type())?)
}

/// Writes the resources placed on each NUMA node, if pods are placed.
fn nodes(to: &mut DescriptorEncoder<'_>, placer: &Placer) -> fmt::Result {
    if !placer.is_active() {
        return Ok(());
    }
    let loads: Vec<_> =
        placer.topology().nodes().iter().map(|node| (node.id, placer.load(node.id))).collect();
    let of_vms: (&str, &str, fn(&Load) -> u32) =
        ("numa_vms", "VMs that are placed on a NUMA node, with those of the pool", |load| load.vms);
    let of_vcpus: (&str, &str, fn(&Load) -> u32) = ("numa_vcpus", "vCPUs of these VMs", |load| load.vcpus);
    for (name, help, value) in [of_vms, of_vcpus] {
        let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (node, load) in &loads {
            let labels = [("node", node.to_string())];
            ConstGauge::new(i64::from(value(load))).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

/// Writes a counter for each set of labels.
fn counters<const LABELS: usize>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    counts: impl IntoIterator<Item = ([(&'static str, &'static str); LABELS], u64)>,
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, count) in counts {
        ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn stages(to: &mut DescriptorEncoder<'_>, summaries: &[StageSummary]) -> fmt::Result {
    let help = "Time that a stage of a start took";
    let mut family = to.encode_descriptor("stage", help, Some(&Unit::Seconds), MetricType::Histogram)?;
    for summary in summaries {
        let labels = [("stage", summary.stage.as_str()), ("outcome", summary.outcome.as_str())];
        let mut below = 0;
        let mut buckets: Vec<(f64, u64)> = BUCKETS_US
            .iter()
            .map(|&end| {
                let up_to = summary.count_up_to(end);
                (end as f64 / 1e6, up_to.saturating_sub(std::mem::replace(&mut below, up_to)))
            })
            .collect();
        buckets.push((f64::INFINITY, summary.count().saturating_sub(below)));
        family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
            summary.sum_ns as f64 / 1e9,
            summary.count(),
            &buckets,
            None,
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use sandboxer_config::{Config, PlacementConfig};
    use sandboxer_process::cgroup::Hierarchies;
    use sandboxer_vmm::Shape;

    use super::*;

    #[derive(Debug)]
    struct Nodes(Arc<Placer>);

    impl Collector for Nodes {
        fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
            nodes(&mut to, &self.0)
        }
    }

    #[test]
    fn what_is_placed_is_counted_by_node() {
        let dir = tempfile::tempdir().unwrap();
        let placer = || {
            let config = PlacementConfig { nodes_dir: dir.path().into(), ..Config::default().placement };
            Arc::new(Placer::new(&config, &Hierarchies::default(), ""))
        };
        let seen = |placer: &Arc<Placer>| {
            let mut registry = Registry::with_prefix("sandboxer");
            registry.register_collector(Box::new(Nodes(placer.clone())));
            text(&registry)
        };
        assert_eq!(seen(&placer()), "# EOF\n", "there is nothing to place");
        for node in ["0", "1"] {
            let of = dir.path().join(format!("node{node}"));
            fs::create_dir(&of).unwrap();
            fs::write(of.join("cpulist"), node).unwrap();
            fs::write(of.join("meminfo"), "Node N MemTotal: 99999 kB\nNode N MemFree: 9999 kB\n").unwrap();
        }
        let placer = placer();
        let _seat = placer.seat_on(1, Shape { vcpus: 1, memory_mib: 1, nics: 1 }).unwrap();
        let text = seen(&placer);
        for line in [r#"numa_vms{node="0"} 0"#, r#"numa_vms{node="1"} 1"#, r#"numa_vcpus{node="1"} 1"#] {
            assert!(text.contains(&format!("sandboxer_{line}\n")), "{line}: {text}");
        }
    }
}
