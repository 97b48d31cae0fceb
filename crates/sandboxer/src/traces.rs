//! Traces of starts and stops, for OpenTelemetry: one span per request of containerd, and a child span per stage.
//!
//! ```text
//!  containerd ──traceparent──▶ request ─▶ span (server)
//!                                           ├─ span of each stage
//!                                           │    └─ spans of the agent's steps, by the guest's times
//!                                           ▼
//!  request's and stages' ends ──try_send──▶ queue (bounded) ──batch──▶ collector, OTLP by gRPC
//! ```
//!
//! Nothing waits for the collector: a span that finds the queue full is dropped and counted. Without an endpoint, no
//! spans are created.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use opentelemetry_proto::tonic::trace::v1::{Span as WireSpan, Status, span::SpanKind, status::StatusCode};
use sandboxer_base::clock::now_ns;
use sandboxer_config::TracesConfig;
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use self::{
    export::{Exporter, attribute},
    parent::Parent,
};

mod export;
mod parent;

/// Maximum number of spans that wait for the collector, about 500 bytes each; a start has about 20. Further spans are
/// dropped.
const QUEUED: usize = 1024;

tokio::task_local! {
    /// The parent of the spans of this task.
    static CURRENT: SpanContext;
}

/// The traces of this daemon; empty if traces are not configured.
#[derive(Debug, Clone, Default)]
pub struct Traces(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    queue: mpsc::Sender<Item>,
    counts: Arc<Counts>,
    sampling_ratio: f64,
    /// The exporter, until its task takes it.
    exporter: Mutex<Option<Exporter>>,
    closed: CancellationToken,
}

/// Numbers of sent and dropped spans.
#[derive(Debug, Default)]
pub struct Counts {
    /// Number of spans that the collector accepted.
    pub sent: AtomicU64,
    /// Number of dropped spans: the queue was full, or the collector did not accept them in time.
    pub dropped: AtomicU64,
}

/// A span that has ended.
#[derive(Debug)]
struct Item {
    source: Source,
    span: WireSpan,
}

/// The place where a span was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Daemon,
    Agent,
}

impl Traces {
    /// Creates the configured traces. Nothing is sent before [`Self::run`].
    pub fn new(config: Option<&TracesConfig>) -> Self {
        Self(config.map(|config| {
            let (queue, receiver) = mpsc::channel(QUEUED);
            let (counts, closed) = (Arc::<Counts>::default(), CancellationToken::new());
            let exporter = Exporter::new(&config.endpoint, receiver, counts.clone(), closed.clone());
            let exporter = Mutex::new(Some(exporter));
            Arc::new(Shared { queue, counts, sampling_ratio: config.sampling_ratio, exporter, closed })
        }))
    }

    /// Starts the task that sends spans. The task ends after [`Self::close`].
    pub fn run(&self) -> Option<JoinHandle<()>> {
        let shared = self.0.as_ref()?;
        let exporter = shared.exporter.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(tokio::spawn(exporter.run()))
    }

    /// Sends the waiting spans once more, and then nothing.
    pub fn close(&self) {
        if let Some(shared) = &self.0 {
            shared.closed.cancel();
        }
    }

    /// Returns the numbers of sent and dropped spans; `None` if traces are not configured.
    pub fn counts(&self) -> Option<&Counts> {
        self.0.as_ref().map(|shared| &*shared.counts)
    }

    /// Begins the span of a request, as a child of its caller's span. `traceparent` is the caller's, in the W3C's
    /// format.
    pub fn request(&self, name: &'static str, traceparent: Option<&str>) -> RequestSpan {
        let Some(shared) = &self.0 else { return RequestSpan::default() };
        let parent = traceparent.and_then(Parent::parse);
        let trace_id = parent.as_ref().map_or_else(rand::random, |parent| parent.trace_id);
        let sampled = match &parent {
            Some(parent) => parent.sampled,
            None => is_sampled(trace_id, shared.sampling_ratio),
        };
        if !sampled {
            return RequestSpan::default();
        }
        let of_request = Shared::context(shared, trace_id);
        RequestSpan(Some(Request {
            context: of_request,
            parent: parent.map(|parent| parent.span_id),
            name,
            began: Instant::now(),
            attributes: Vec::new(),
        }))
    }
}

/// Returns whether a trace of this ID is sampled: the same on all nodes, by the random part of the ID.
fn is_sampled(trace_id: [u8; 16], ratio: f64) -> bool {
    let [.., a, b, c, d, e, f, g, h] = trace_id;
    let random = u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 11;
    (random as f64) < ratio * (1_u64 << 53) as f64
}

impl Shared {
    fn context(shared: &Arc<Self>, trace_id: [u8; 16]) -> SpanContext {
        SpanContext(Some(Arc::new(Context {
            shared: shared.clone(),
            trace_id,
            span_id: rand::random(),
            clocks: (now_ns(), Instant::now()),
        })))
    }

    fn push(&self, item: Item) {
        if self.queue.try_send(item).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A span that others can be children of; empty if the request is not traced.
#[derive(Debug, Clone, Default)]
pub struct SpanContext(Option<Arc<Context>>);

#[derive(Debug)]
struct Context {
    shared: Arc<Shared>,
    trace_id: [u8; 16],
    span_id: [u8; 8],
    /// Both clocks at the same moment: wall clock, ns since 1970, and monotonic clock.
    clocks: (u64, Instant),
}

/// A step that has ended.
#[derive(Debug)]
pub struct Ended<'a> {
    /// Name of the step.
    pub name: &'a str,
    /// Time at which the step began.
    pub began: Instant,
    /// Duration of the step.
    pub took: Duration,
    /// The error of the step; empty if it succeeded.
    pub failure: &'a str,
}

impl SpanContext {
    /// Returns the context of this task.
    pub fn current() -> Self {
        CURRENT.try_with(Clone::clone).unwrap_or_default()
    }

    /// Runs a future whose [`Self::current`] is this context.
    pub async fn scope<F: Future>(self, future: F) -> F::Output {
        match &self.0 {
            Some(_) => CURRENT.scope(self, future).await,
            None => future.await,
        }
    }

    /// Returns a new child context of this one, for [`Self::end`].
    pub fn child(&self) -> Self {
        let made = |context: &Arc<Context>| {
            let Context { shared, trace_id, clocks, .. } = &**context;
            let (shared, trace_id, clocks) = (shared.clone(), *trace_id, *clocks);
            Arc::new(Context { shared, trace_id, span_id: rand::random(), clocks })
        };
        Self(self.0.as_ref().map(made))
    }

    /// Ends the span of `self`, which is a child of `parent`.
    pub fn end(&self, parent: &Self, ended: &Ended<'_>) {
        if let (Some(context), Some(parent)) = (&self.0, &parent.0) {
            let span = context.span(ended, SpanKind::Internal, Some(parent.span_id));
            context.shared.push(Item { source: Source::Daemon, span });
        }
    }

    /// Adds a step of the guest's agent as a child of this span.
    pub fn agent_step(&self, ended: &Ended<'_>) {
        if let Some(parent) = &self.0 {
            let child = self.child();
            if let Some(context) = &child.0 {
                let span = context.span(ended, SpanKind::Internal, Some(parent.span_id));
                context.shared.push(Item { source: Source::Agent, span });
            }
        }
    }
}

impl Context {
    fn span(&self, ended: &Ended<'_>, kind: SpanKind, parent: Option<[u8; 8]>) -> WireSpan {
        let start = self.wall_ns(ended.began);
        let status = (!ended.failure.is_empty())
            .then(|| Status { message: ended.failure.to_owned(), code: StatusCode::Error.into() });
        WireSpan {
            trace_id: self.trace_id.into(),
            span_id: self.span_id.into(),
            parent_span_id: parent.map(Into::into).unwrap_or_default(),
            name: ended.name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: start,
            end_time_unix_nano: start.saturating_add(nanos(ended.took)),
            status,
            ..Default::default()
        }
    }

    /// Returns the wall-clock time of a moment, ns since 1970. A clock that is set meanwhile does not tear a request
    /// apart.
    fn wall_ns(&self, at: Instant) -> u64 {
        let (wall, monotonic) = self.clocks;
        match at.checked_duration_since(monotonic) {
            Some(later) => wall.saturating_add(nanos(later)),
            None => wall.saturating_sub(nanos(monotonic - at)),
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The span of a running request. If it is dropped before [`Self::end`], the request was cancelled.
#[derive(Debug, Default)]
pub struct RequestSpan(Option<Request>);

#[derive(Debug)]
struct Request {
    context: SpanContext,
    parent: Option<[u8; 8]>,
    name: &'static str,
    began: Instant,
    attributes: Vec<(&'static str, String)>,
}

impl RequestSpan {
    /// Returns whether anything is recorded.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Adds or replaces an attribute.
    pub fn attribute(&mut self, key: &'static str, value: &str) {
        if let Some(request) = &mut self.0 {
            request.attributes.retain(|(other, _)| *other != key);
            request.attributes.push((key, value.to_owned()));
        }
    }

    /// Runs the request's work. The stages that it begins are children of this span.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        let context = self.0.as_ref().map(|request| request.context.clone()).unwrap_or_default();
        context.scope(work).await
    }

    /// Ends the span. `failure` is the error's text; empty if there was none.
    pub fn end(mut self, failure: &str) {
        if let Some(request) = self.0.take() {
            request.end(failure);
        }
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        if let Some(request) = self.0.take() {
            request.end("cancelled");
        }
    }
}

impl Request {
    fn end(self, failure: &str) {
        let Some(context) = &self.context.0 else { return };
        let ended = Ended { name: self.name, began: self.began, took: self.began.elapsed(), failure };
        let mut span = context.span(&ended, SpanKind::Server, self.parent);
        span.attributes = self.attributes.iter().map(|(key, value)| attribute(key, value)).collect();
        context.shared.push(Item { source: Source::Daemon, span });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traces(sampling_ratio: f64) -> Traces {
        Traces::new(Some(&TracesConfig { endpoint: "http://192.0.2.1:4317".into(), sampling_ratio }))
    }

    #[test]
    fn the_caller_decides_whether_its_trace_is_recorded() {
        const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        const NOT_SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
        for (ratio, parent, on) in [
            (0.0, Some(SAMPLED), true),
            (1.0, Some(NOT_SAMPLED), false),
            (1.0, None, true),
            (0.0, None, false),
            (0.0, Some("rubbish"), false),
            (1.0, Some("rubbish"), true),
        ] {
            assert_eq!(traces(ratio).request("r", parent).is_on(), on, "{ratio} {parent:?}");
        }
        assert!(!Traces::new(None).request("r", Some(SAMPLED)).is_on());
    }

    #[test]
    fn a_part_of_the_traces_is_recorded() {
        let traces = traces(0.25);
        let on = (0..4000).filter(|_| traces.request("r", None).is_on()).count();
        // Twelve standard deviations of 27 to each side.
        assert!((672..=1328).contains(&on), "{on}");
    }

    #[test]
    fn spans_that_find_no_place_are_counted() {
        let traces = traces(1.0);
        for _ in 0..QUEUED + 5 {
            traces.request("r", None).end("");
        }
        let counts = traces.counts().unwrap();
        assert_eq!(counts.dropped.load(Ordering::Relaxed), 5);
    }

    #[tokio::test]
    async fn work_without_a_request_has_no_context() {
        assert!(SpanContext::current().0.is_none());
        let request = traces(1.0).request("r", None);
        assert!(request.run(async { SpanContext::current().0.is_some() }).await);
    }
}
