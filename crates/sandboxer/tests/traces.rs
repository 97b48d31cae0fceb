//! Traces: what a collector receives of a pod's and a container's start, with a double of the collector, and with doubles of VMM
//! and agent. And a collector that hangs, or is gone: pods do not notice.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod test_node;

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use containerd_shim_protos::{
    api::{CreateTaskRequest, DeleteRequest, KillRequest, Mount, StartRequest},
    shim_async::Task,
};
use fake_agent::FakeAgent;
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value::Value,
    trace::v1::{Span, span::SpanKind, status::StatusCode},
};
use sandboxer::api::{sandbox::SandboxService, task::TaskService};
use sandboxer_config::TracesConfig;
use sandboxer_protocol::controller::{
    ControllerShutdownRequest, ControllerStartRequest, ControllerStopRequest, controller_server::Controller,
};
use sandboxer_vmm_fake::FakeVmm;
use test_node::{TestNode, reader};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, transport::Server};
use ttrpc::asynchronous::TtrpcContext;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

/// A double of an OpenTelemetry collector.
#[derive(Debug, Clone, Default)]
struct CollectorDouble(Arc<Mutex<Vec<(String, Span)>>>);

#[tonic::async_trait]
impl TraceService for CollectorDouble {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource_spans in request.into_inner().resource_spans {
            let resource = resource_spans.resource.unwrap();
            let service = resource.attributes.iter().find(|a| a.key == "service.name").unwrap();
            let Some(Value::StringValue(service)) = service.value.as_ref().and_then(|v| v.value.clone())
            else {
                return Err(Status::invalid_argument("the service has no name"));
            };
            let spans = resource_spans.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.0.lock().unwrap().extend(spans.map(|span| (service.clone(), span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl CollectorDouble {
    async fn serve(&self, listener: TcpListener) {
        let server = Server::builder().add_service(TraceServiceServer::new(self.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    }

    /// Returns the spans once a request of this name has ended.
    async fn spans(&self, until: &str) -> Vec<(String, Span)> {
        for _ in 0..300 {
            let spans = self.0.lock().unwrap().clone();
            if spans.iter().any(|(_, span)| span.name.ends_with(until)) {
                return spans;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("no span {until} within 30 s: {:?}", self.0.lock().unwrap());
    }
}

fn node(collector: SocketAddr, sampling_ratio: f64) -> TestNode {
    let agent = FakeAgent::default();
    let test = TestNode::with(Arc::new(FakeVmm::new(move |guest| agent.serve(guest))), |config| {
        config.traces = Some(TracesConfig { endpoint: format!("http://{collector}"), sampling_ratio });
    });
    test.node.traces.run();
    test
}

fn controller(test: &TestNode) -> SandboxService {
    fs::create_dir_all(&test.node.config.run_dir).unwrap();
    SandboxService::new(test.node.clone(), "ttrpc+unix:///task.sock".into(), CancellationToken::new())
        .unwrap()
}

/// Returns a request as containerd sends it in a trace.
fn traced<T>(message: T, flags: &str) -> Request<T> {
    let mut request = Request::new(message);
    let parent = format!("00-{TRACE}-{CALLER}-{flags}");
    request.metadata_mut().insert("traceparent", parent.parse().unwrap());
    request
}

fn task_context() -> TtrpcContext {
    TtrpcContext {
        mh: Default::default(),
        metadata: HashMap::from([("traceparent".to_owned(), vec![format!("00-{TRACE}-{CALLER}-01")])]),
        timeout_nano: 0,
        connection_data: Default::default(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the names of all spans with that of their parent, and checks that all are of one trace and within their parents.
fn tree(spans: &[(String, Span)]) -> Vec<String> {
    let by_id: BTreeMap<_, _> = spans.iter().map(|(_, span)| (span.span_id.clone(), span)).collect();
    assert_eq!(by_id.len(), spans.len(), "each has an ID of its own");
    let mut found: Vec<_> = spans
        .iter()
        .map(|(service, span)| {
            assert_eq!(hex(&span.trace_id), TRACE);
            assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
            let name = |span: &Span| span.name.rsplit('/').next().unwrap().to_owned();
            let parent = match by_id.get(&span.parent_span_id) {
                Some(parent) => {
                    let within = parent.start_time_unix_nano <= span.start_time_unix_nano
                        && span.end_time_unix_nano <= parent.end_time_unix_nano;
                    assert!(within, "{} is not within {}", span.name, parent.name);
                    name(parent)
                }
                None => {
                    assert_eq!(hex(&span.parent_span_id), CALLER);
                    assert_eq!(span.kind(), SpanKind::Server);
                    "caller".to_owned()
                }
            };
            format!("{parent} > {} ({service})", name(span))
        })
        .collect();
    found.sort();
    found
}

fn attribute(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|attribute| attribute.value.clone()?.value) {
        Some(Value::StringValue(text)) => text,
        other => panic!("{key} of {}: {other:?}", span.name),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_shows_a_pod_from_start_to_end() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let collector = CollectorDouble::default();
    let test = node(listener.local_addr().unwrap(), 0.0);
    collector.serve(listener).await;
    let controller = Arc::new(controller(&test));
    let tasks = TaskService::new(test.node.clone(), controller.clone());
    let pod = test.pod("p");
    let sandbox_id = || "p".to_owned();

    let start = ControllerStartRequest { sandbox_id: sandbox_id(), ..Default::default() };
    controller.start(traced(start, "01")).await.unwrap();
    let new = test.container("c", "/bin/true");
    fs::write(new.bundle.join("sandbox"), "p").unwrap();
    let text = |path: &std::path::Path| path.to_string_lossy().into_owned();
    let _readers = [reader(&new.stdio.stdout), reader(&new.stdio.stderr)];
    let create = CreateTaskRequest {
        id: "c".into(),
        bundle: text(&new.bundle),
        stdout: text(&new.stdio.stdout),
        stderr: text(&new.stdio.stderr),
        rootfs: new
            .mounts
            .iter()
            .map(|mount| Mount {
                type_: mount.fstype.clone(),
                source: mount.source.clone(),
                options: mount.options.clone(),
                ..Default::default()
            })
            .collect(),
        ..Default::default()
    };
    tasks.create(&task_context(), create).await.unwrap();
    let id = || "c".to_owned();
    tasks.start(&task_context(), StartRequest { id: id(), ..Default::default() }).await.unwrap();
    let kill = KillRequest { id: id(), signal: 9, ..Default::default() };
    tasks.kill(&task_context(), kill).await.unwrap();
    // It may not have ended yet: a failed request has a span, too.
    let _ = tasks.delete(&task_context(), DeleteRequest { id: id(), ..Default::default() }).await;
    let stop = ControllerStopRequest { sandbox_id: sandbox_id(), ..Default::default() };
    controller.stop(traced(stop, "01")).await.unwrap();
    drop(pod);
    let shutdown = ControllerShutdownRequest { sandbox_id: sandbox_id(), ..Default::default() };
    controller.shutdown(traced(shutdown, "01")).await.unwrap();

    let spans = collector.spans("Controller/Shutdown").await;
    let expected = [
        "Create > container_create (sandboxer)",
        "Create > disks (sandboxer)",
        "Create > queue (sandboxer)",
        "Create > rootfs (sandboxer)",
        "Start > agent_ready (sandboxer)",
        "Start > boot (sandboxer)",
        "Start > container_start (sandboxer)",
        "Start > netns (sandboxer)",
        "Start > network (sandboxer)",
        "Start > queue (sandboxer)",
        "Start > vmm_spawn (sandboxer)",
        "caller > Create (sandboxer)",
        "caller > Delete (sandboxer)",
        "caller > Kill (sandboxer)",
        "caller > Shutdown (sandboxer)",
        "caller > Start (sandboxer)",
        "caller > Start (sandboxer)",
        "caller > Stop (sandboxer)",
        "container_create > create (sandboxer-agent)",
        "container_create > find_disks (sandboxer-agent)",
    ];
    assert_eq!(tree(&spans), expected);
    let span = |name: &str| &spans.iter().find(|(_, span)| span.name == name).unwrap().1;
    let created = span("containerd.task.v3.Task/Create");
    assert_eq!(
        (attribute(created, "container.id"), attribute(created, "sandboxer.sandbox.id")),
        (id(), sandbox_id())
    );
    assert_eq!(span("boot").status, None);
    let counts = test.node.traces.counts().unwrap();
    assert_eq!(counts.dropped.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_start_is_shown_and_one_that_is_not_sampled_is_not() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let collector = CollectorDouble::default();
    let test = node(listener.local_addr().unwrap(), 0.0);
    collector.serve(listener).await;
    let controller = controller(&test);
    test.pod("quiet");
    let start = |id: &str| ControllerStartRequest { sandbox_id: id.into(), ..Default::default() };
    controller.start(traced(start("quiet"), "00")).await.unwrap();
    controller.start(traced(start("missing"), "01")).await.unwrap_err();
    let spans = collector.spans("Controller/Start").await;
    assert_eq!(tree(&spans), ["caller > Start (sandboxer)"]);
    let status = spans[0].1.status.clone().unwrap();
    assert_eq!(status.code(), StatusCode::Error);
    assert!(status.message.contains("missing"), "{status:?}");
    assert_eq!(attribute(&spans[0].1, "sandboxer.sandbox.id"), "missing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_hangs_costs_spans_and_nothing_else() {
    // It accepts, and never answers.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let test = node(listener.local_addr().unwrap(), 1.0);
    let controller = controller(&test);
    for id in ["a", "b", "c"] {
        test.pod(id);
        let start = ControllerStartRequest { sandbox_id: id.into(), ..Default::default() };
        controller.start(Request::new(start)).await.unwrap();
    }
    let counts = test.node.traces.counts().unwrap();
    for _ in 0..300 {
        if counts.dropped.load(Ordering::Relaxed) >= 3 {
            assert_eq!(counts.sent.load(Ordering::Relaxed), 0);
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("nothing is counted as dropped: {counts:?}");
}

/// Waits until something is counted, for a minute at most.
async fn until_counted(count: &AtomicU64) {
    let any = async {
        while count.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), any).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_comes_back_receives_what_happens_from_then_on() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let test = node(address, 1.0);
    let counts = test.node.traces.counts().unwrap();
    test.node.traces.request("gone", None).end("");
    until_counted(&counts.dropped).await;
    let collector = CollectorDouble::default();
    collector.serve(TcpListener::bind(address).await.unwrap()).await;
    test.node.traces.request("back", None).end("");
    let spans = collector.spans("back").await;
    assert_eq!(spans.len(), 1);
    // The collector has them before its answer is read.
    until_counted(&counts.sent).await;
    assert_eq!(counts.sent.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_ends_sends_what_waits() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let agent = FakeAgent::default();
    let address = listener.local_addr().unwrap();
    let test = TestNode::with(Arc::new(FakeVmm::new(move |guest| agent.serve(guest))), |config| {
        config.traces = Some(TracesConfig { endpoint: format!("http://{address}"), sampling_ratio: 1.0 });
    });
    let collector = CollectorDouble::default();
    collector.serve(listener).await;
    let sending = test.node.traces.run().unwrap();
    for _ in 0..600 {
        test.node.traces.request("last", None).end("");
    }
    test.node.traces.close();
    sending.await.unwrap();
    assert_eq!(collector.0.lock().unwrap().len(), 600);
}
