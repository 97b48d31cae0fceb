//! Metrics as Prometheus reads them, on a TCP listener if one is configured: `GET /metrics`.

use std::{
    convert::Infallible,
    fmt::Write,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use http_body_util::Full;
use hyper::{Method, Request, Response, StatusCode, body::Bytes, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use sandboxer_config::Way;
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;

use crate::pod::Node;

/// Upper ends of the buckets, µs: from a cached rootfs to a boot that is given up.
const BUCKETS: [u64; 14] = [
    100, 500, 1_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    10_000_000, 60_000_000,
];
/// Connections that are served at once; the others wait.
const CONNECTIONS: usize = 8;
/// For a request's head to arrive.
const HEAD_LIMIT: Duration = Duration::from_secs(5);

/// Serves until `shutdown`. What a client does wrong ends its connection and nothing else.
pub async fn serve(
    listener: TcpListener,
    node: Arc<Node>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return Ok(()) };
        let stream = tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            accepted = listener.accept() => accepted?.0,
        };
        let node = node.clone();
        tokio::spawn(async move {
            let answer = service_fn(|request| {
                let response = answer(&node, &request);
                async { Ok::<_, Infallible>(response) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_LIMIT)
                .serve_connection(TokioIo::new(stream), answer);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a metrics connection ended");
            }
            drop(place);
        });
    }
}

fn answer<B>(node: &Node, request: &Request<B>) -> Response<Full<Bytes>> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => (StatusCode::OK, text(node)),
        (_, "/metrics") => (StatusCode::METHOD_NOT_ALLOWED, "only GET\n".into()),
        _ => (StatusCode::NOT_FOUND, "there is only /metrics\n".into()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, kind);
    response
}

/// All metrics.
fn text(node: &Node) -> String {
    let mut out =
        String::from("# HELP sandboxer_pods Pods that this daemon knows.\n# TYPE sandboxer_pods gauge\n");
    // Writing to a String cannot fail.
    let _ = writeln!(out, "sandboxer_pods {}", node.registry.pods().len());
    let counts = node.ways.counts();
    out += "# HELP sandboxer_starts_total Pods by how they got their machine.\n\
            # TYPE sandboxer_starts_total counter\n";
    for way in Way::ALL {
        let pods = counts.taken.get(&way).copied().unwrap_or(0);
        let _ = writeln!(out, "sandboxer_starts_total{{way=\"{way}\"}} {pods}");
    }
    out += "# HELP sandboxer_starts_missed_total Ways that a pod could not take, by the reason.\n\
            # TYPE sandboxer_starts_missed_total counter\n";
    for ((way, reason), pods) in &counts.missed {
        let _ = writeln!(out, "sandboxer_starts_missed_total{{way=\"{way}\",reason=\"{reason}\"}} {pods}");
    }
    out += "# HELP sandboxer_pool_machines Machines that wait for pods.\n\
            # TYPE sandboxer_pool_machines gauge\n";
    let _ = writeln!(out, "sandboxer_pool_machines {}", node.pool.list().len());
    out += "# HELP sandboxer_stale_statistics_total Requests for statistics answered with earlier ones, since the guest did not answer.\n\
            # TYPE sandboxer_stale_statistics_total counter\n";
    let _ = writeln!(out, "sandboxer_stale_statistics_total {}", node.old_readings.load(Ordering::Relaxed));
    out += "# HELP sandboxer_stage_seconds Time that a stage of a start took.\n\
            # TYPE sandboxer_stage_seconds histogram\n";
    for summary in node.stage_times.summaries() {
        let labels = format!("stage=\"{}\",outcome=\"{}\"", summary.stage, summary.outcome.as_str());
        for bucket in BUCKETS {
            let count = summary.count_up_to(bucket);
            let _ = writeln!(
                out,
                "sandboxer_stage_seconds_bucket{{{labels},le=\"{}\"}} {count}",
                bucket as f64 / 1e6
            );
        }
        let _ = writeln!(out, "sandboxer_stage_seconds_bucket{{{labels},le=\"+Inf\"}} {}", summary.count());
        let _ = writeln!(out, "sandboxer_stage_seconds_sum{{{labels}}} {}", summary.sum_ns as f64 / 1e9);
        let _ = writeln!(out, "sandboxer_stage_seconds_count{{{labels}}} {}", summary.count());
    }
    out
}
