//! Spans of containerd's requests, within containerd's trace: it sends its span as `traceparent`, by gRPC and ttrpc.

use tonic::{Request, Status, metadata::MetadataMap};
use ttrpc::asynchronous::TtrpcContext;

use crate::{
    events::PodName,
    pod::{DaemonState, PodHandle},
    traces::RequestSpan,
};

const TRACEPARENT: &str = "traceparent";

/// Begins the span of a gRPC request that concerns this sandbox.
pub fn by_grpc<T>(
    node: &DaemonState,
    name: &'static str,
    request: &Request<T>,
    sandbox: &str,
) -> RequestSpan {
    let parent = |metadata: &MetadataMap| metadata.get(TRACEPARENT)?.to_str().ok().map(str::to_owned);
    let mut span = node.traces.request(name, parent(request.metadata()).as_deref());
    if span.is_on() {
        span.attribute("sandboxer.sandbox.id", sandbox);
        if let Ok(pod) = sandbox.parse().map_err(drop).and_then(|id| node.registry.pod(&id).map_err(drop)) {
            of_pod(&mut span, &pod);
        }
    }
    span
}

/// Begins the span of a ttrpc request that concerns this container.
pub fn by_ttrpc(
    node: &DaemonState,
    name: &'static str,
    context: &TtrpcContext,
    container: &str,
) -> RequestSpan {
    let parent = context.metadata.get(TRACEPARENT).and_then(|values| values.first());
    let mut span = node.traces.request(name, parent.map(String::as_str));
    if span.is_on() {
        span.attribute("container.id", container);
        if let Ok(pod) =
            container.parse().map_err(drop).and_then(|id| node.registry.pod_of(&id).map_err(drop))
        {
            of_pod(&mut span, &pod);
        }
    }
    span
}

/// Adds the pod's names.
pub fn of_pod(span: &mut RequestSpan, pod: &PodHandle) {
    let PodName { namespace, name, uid, .. } = pod.name();
    let names = [
        ("sandboxer.sandbox.id", pod.id().as_str()),
        ("k8s.namespace.name", namespace),
        ("k8s.pod.name", name),
        ("k8s.pod.uid", uid),
    ];
    for (key, value) in names {
        if !value.is_empty() {
            span.attribute(key, value);
        }
    }
}

/// Ends the span of a gRPC request with its result.
pub fn grpc_ended<T>(span: RequestSpan, result: &Result<T, Status>) {
    span.end(result.as_ref().err().map_or("", Status::message));
}

/// Ends the span of a ttrpc request with its result.
pub fn ttrpc_ended<T>(span: RequestSpan, result: &ttrpc::Result<T>) {
    if span.is_on() {
        span.end(&result.as_ref().err().map(ToString::to_string).unwrap_or_default());
    }
}
