//! Sends ended spans to the collector, in batches.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{ExportTraceServiceRequest, trace_service_client::TraceServiceClient},
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
    resource::v1::Resource,
    trace::v1::{ResourceSpans, ScopeSpans},
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use super::{Counts, Item, Source};

/// Maximum number of spans in a batch.
const BATCH: usize = 256;
/// Maximum time that a batch waits for more spans.
const GATHERED_WITHIN: Duration = Duration::from_secs(1);
/// Time limits for a connection, and for a batch.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the last batches of a worker that exits.
const LAST_TIMEOUT: Duration = Duration::from_secs(1);

/// Sends spans until the queue is closed.
#[derive(Debug)]
pub struct Exporter {
    endpoint: String,
    queue: mpsc::Receiver<Item>,
    counts: Arc<Counts>,
    closed: CancellationToken,
}

impl Exporter {
    /// Creates the exporter of a queue.
    pub fn new(
        endpoint: &str,
        queue: mpsc::Receiver<Item>,
        counts: Arc<Counts>,
        closed: CancellationToken,
    ) -> Self {
        Self { endpoint: endpoint.to_owned(), queue, counts, closed }
    }

    /// Sends batches of spans. A batch that the collector does not accept in time is dropped: the next ones are newer.
    pub async fn run(mut self) {
        let endpoint = match Endpoint::from_shared(self.endpoint.clone()) {
            Ok(endpoint) => endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(SEND_TIMEOUT),
            Err(error) => return tracing::error!(endpoint = self.endpoint, %error, "cannot send traces"),
        };
        // Nothing connects before the first span.
        let mut client = TraceServiceClient::new(endpoint.connect_lazy());
        let mut failing = false;
        while let Some(batch) = self.gather().await {
            let spans = batch.len() as u64;
            // The channel's own limit does not apply while it connects.
            let limit = if self.closed.is_cancelled() { LAST_TIMEOUT } else { SEND_TIMEOUT };
            let sent = tokio::time::timeout(limit, send(&mut client, batch)).await;
            let result = sent.unwrap_or_else(|_| Err("it does not answer in time".to_owned()));
            let rejected = match &result {
                Ok(rejected) => *rejected,
                Err(_) => spans,
            };
            self.counts.dropped.fetch_add(rejected, Ordering::Relaxed);
            self.counts.sent.fetch_add(spans.saturating_sub(rejected), Ordering::Relaxed);
            match &result {
                Err(reason) if !failing => tracing::warn!(
                    collector = self.endpoint,
                    reason,
                    "traces are dropped: the collector does not take them; repeats are only counted"
                ),
                Ok(_) if failing => tracing::info!(collector = self.endpoint, "traces are sent again"),
                _ => {}
            }
            failing = result.is_err();
        }
    }

    /// Returns the next batch, once it is full or its time is over; `None` if there is none and there will be none.
    async fn gather(&mut self) -> Option<Vec<Item>> {
        let mut batch = Vec::new();
        let waits = async {
            self.queue.recv_many(&mut batch, BATCH).await;
            let more = async {
                while let free @ 1.. = BATCH - batch.len()
                    && self.queue.recv_many(&mut batch, free).await > 0
                {}
            };
            let _ = tokio::time::timeout(GATHERED_WITHIN, more).await;
        };
        if self.closed.run_until_cancelled(waits).await.is_none() {
            while batch.len() < BATCH
                && let Ok(item) = self.queue.try_recv()
            {
                batch.push(item);
            }
        }
        (!batch.is_empty()).then_some(batch)
    }
}

/// Sends a batch. Returns the number of its spans that the collector rejected, or the reason why it accepted none.
async fn send(client: &mut TraceServiceClient<Channel>, batch: Vec<Item>) -> Result<u64, String> {
    let (daemon, agent): (Vec<_>, Vec<_>) = batch.into_iter().partition(|item| item.source == Source::Daemon);
    let resource_spans = [("sandboxer", daemon), ("sandboxer-agent", agent)]
        .into_iter()
        .filter(|(_, items)| !items.is_empty())
        .map(|(service, items)| of_service(service, items))
        .collect();
    match client.export(ExportTraceServiceRequest { resource_spans }).await {
        Ok(answer) => {
            let rejected = answer.into_inner().partial_success.map_or(0, |partial| partial.rejected_spans);
            Ok(u64::try_from(rejected).unwrap_or(0))
        }
        Err(status) => Err(format!("{}: {}", status.code(), status.message())),
    }
}

fn of_service(name: &str, items: Vec<Item>) -> ResourceSpans {
    let host = rustix::system::uname();
    let attributes = vec![
        attribute("service.name", name),
        attribute("service.version", env!("CARGO_PKG_VERSION")),
        attribute("host.name", &host.nodename().to_string_lossy()),
    ];
    let scope = InstrumentationScope { name: "sandboxer".to_owned(), ..Default::default() };
    ResourceSpans {
        resource: Some(Resource { attributes, ..Default::default() }),
        scope_spans: vec![ScopeSpans {
            scope: Some(scope),
            spans: items.into_iter().map(|item| item.span).collect(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

/// Returns an attribute with a text as its value.
pub fn attribute(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(any_value::Value::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value), ..Default::default() }
}
