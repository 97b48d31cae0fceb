//! Start-up as a cluster sees it, measured on a double of an API server: it answers a few requests as one would, starts nothing, and
//! gives pods the stamps that the test says.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use sandboxer_probe::kubernetes::client::{ApiError, Client};
use sandboxer_probe::kubernetes::kubeconfig::Access;
use sandboxer_probe::kubernetes::startup::{Plan, Row, StartupError, measure};
use sandboxer_probe::sample::Outcome;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::{ServerConfig, crypto};
use tokio_util::sync::CancellationToken;

/// What the double knows.
#[derive(Default)]
struct Truth {
    pods: BTreeMap<String, Value>,
    created: Vec<String>,
    most: usize,
    token: Option<String>,
}

/// A double of an API server. Pods of the class `slow` are Ready after 3 s, `broken` never, others after 1 s, all by its stamps.
struct DoubleApiServer {
    url: String,
    truth: Arc<Mutex<Truth>>,
    authority: Option<Vec<u8>>,
    serving: tokio::task::JoinHandle<()>,
}

impl Drop for DoubleApiServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl DoubleApiServer {
    async fn serve(token: Option<&str>) -> Self {
        Self::on(token, None).await
    }

    async fn serve_tls(token: Option<&str>) -> Self {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        let authority = made.cert.pem().into_bytes();
        let mut double = Self::on(token, Some(TlsAcceptor::from(Arc::new(config)))).await;
        double.authority = Some(authority);
        double.url = double.url.replace("http:", "https:");
        double
    }

    async fn on(token: Option<&str>, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let truth = Arc::new(Mutex::new(Truth { token: token.map(str::to_owned), ..Truth::default() }));
        let shared = truth.clone();
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (shared, tls) = (shared.clone(), tls.clone());
                tokio::spawn(async move {
                    let service = service_fn(move |request| answer(shared.clone(), request));
                    let http = hyper::server::conn::http1::Builder::new();
                    match tls {
                        None => drop(http.serve_connection(TokioIo::new(stream), service).await),
                        Some(tls) => {
                            let Ok(stream) = tls.accept(stream).await else { return };
                            drop(http.serve_connection(TokioIo::new(stream), service).await);
                        }
                    }
                });
            }
        });
        Self { url, truth, authority: None, serving }
    }

    fn access(&self, token: Option<&str>) -> Access {
        Access {
            server: self.url.clone(),
            server_name: None,
            authority: self.authority.clone(),
            certificate: None,
            token: token.map(str::to_owned),
            namespace: "bench".into(),
        }
    }

    fn client(&self) -> Client {
        Client::new(&self.access(None)).unwrap()
    }
}

async fn answer(
    truth: Arc<Mutex<Truth>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let sent = parts.headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
    let mut truth = truth.lock().unwrap();
    let wanted = truth.token.as_ref().map(|token| format!("Bearer {token}"));
    let (status, value) = if wanted.is_some() && sent != wanted {
        (StatusCode::UNAUTHORIZED, json!({"kind": "Status", "message": "Unauthorized"}))
    } else {
        let body = serde_json::from_slice(&body).unwrap_or_default();
        route(&mut truth, &parts.method, parts.uri.path(), parts.uri.query().unwrap_or_default(), body)
    };
    let mut response = Response::new(Full::new(Bytes::from(value.to_string())));
    *response.status_mut() = status;
    Ok(response)
}

fn route(truth: &mut Truth, method: &Method, path: &str, query: &str, body: Value) -> (StatusCode, Value) {
    let none = || (StatusCode::NOT_FOUND, json!({"kind": "Status", "message": format!("{path} not found")}));
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    match (method.as_str(), &parts[..]) {
        ("GET", ["version"]) => (StatusCode::OK, json!({"gitVersion": "v1.99.0-double"})),
        ("GET", ["apis", "node.k8s.io", "v1", "runtimeclasses", class]) => {
            if ["fast", "slow", "broken"].contains(class) { (StatusCode::OK, json!({})) } else { none() }
        }
        ("POST", ["api", "v1", "namespaces", "bench", "pods"]) => {
            let name = body["metadata"]["name"].as_str().unwrap().to_owned();
            truth.created.push(body["spec"]["runtimeClassName"].as_str().unwrap_or_default().to_owned());
            truth.pods.insert(name, pending(body.clone()));
            truth.most = truth.most.max(truth.pods.len());
            (StatusCode::CREATED, pending(body))
        }
        ("GET", ["api", "v1", "namespaces", "bench", "pods", name]) => match truth.pods.get_mut(*name) {
            Some(pod) => {
                *pod = settled(pod.clone());
                (StatusCode::OK, pod.clone())
            }
            None => none(),
        },
        ("DELETE", ["api", "v1", "namespaces", "bench", "pods", name]) => match truth.pods.remove(*name) {
            Some(pod) => (StatusCode::OK, pod),
            None => none(),
        },
        ("DELETE", ["api", "v1", "namespaces", "bench", "pods"]) => {
            assert!(query.starts_with("labelSelector=io.sandboxer.probe.run%3D"), "{query}");
            truth.pods.clear();
            (StatusCode::OK, json!({}))
        }
        ("GET", ["api", "v1", "namespaces", "bench", "events"]) => {
            assert_eq!(query, "fieldSelector=involvedObject.uid%3Du-1");
            (StatusCode::OK, events())
        }
        _ => none(),
    }
}

fn pending(mut pod: Value) -> Value {
    pod["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
    pod["metadata"]["uid"] = json!("u-1");
    pod["status"] =
        json!({"phase": "Pending", "conditions": [{"type": "Ready", "status": "False", "reason": "x"}]});
    pod
}

fn settled(mut pod: Value) -> Value {
    let class = pod["spec"]["runtimeClassName"].as_str().unwrap_or_default().to_owned();
    if class == "broken" {
        pod["status"]["containerStatuses"] =
            json!([{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]);
        return pod;
    }
    let at = |s: u32| json!(format!("2026-01-01T00:00:0{s}Z"));
    let ready = if class == "slow" { 3 } else { 1 };
    let condition = |kind: &str, s: u32| json!({"type": kind, "status": "True", "lastTransitionTime": at(s)});
    pod["spec"]["nodeName"] = json!("node-1");
    pod["status"] = json!({
        "phase": "Running",
        "conditions": [condition("PodScheduled", 0), condition("Initialized", 0), condition("ContainersReady", ready), condition("Ready", ready)],
        "containerStatuses": [{"state": {"running": {"startedAt": at(ready)}}}],
    });
    pod
}

fn events() -> Value {
    json!({"items": [
        {"reason": "Scheduled", "eventTime": "2026-01-01T00:00:00.250000Z", "lastTimestamp": null},
        {"reason": "Started", "eventTime": null, "lastTimestamp": "2026-01-01T00:00:01Z"},
    ]})
}

fn plan(classes: &[&str], count: u32) -> Plan {
    Plan {
        classes: classes.iter().map(|&class| class.to_owned()).collect(),
        count,
        warm_up: 1,
        namespace: "bench".into(),
        run: "run".into(),
        image: "image".into(),
        command: vec!["sleep".into()],
        node: None,
        timeout: Duration::from_secs(20),
    }
}

#[tokio::test]
async fn classes_alternate_and_times_are_the_clusters_own() {
    let double = DoubleApiServer::serve(None).await;
    let never = CancellationToken::new();
    let report = measure(&double.client(), &plan(&["fast", "slow"], 2), &never, &mut |_| ()).await.unwrap();
    let truth = double.truth.lock().unwrap();
    assert_eq!(truth.created, ["fast", "slow"].repeat(3));
    assert!(truth.pods.is_empty() && truth.most == 1, "{} at once", truth.most);
    let (fast, slow) = (&report.classes["fast"], &report.classes["slow"]);
    assert_eq!((fast.n, fast.failures, fast.mean_s, fast.p50_s), (2, 0, Some(1.0), Some(1.0)));
    assert_eq!((slow.mean_s, slow.pods_by_s[&3]), (Some(3.0), 2));
    assert_eq!((fast.events_mean_s["Scheduled"], fast.events_mean_s["Started"]), (0.25, 1.0));
    assert_eq!(slow.conditions_mean_s["ContainersReady"], 3.0);
    assert_eq!((&*report.cluster, report.resolution_s), ("v1.99.0-double", 1.0));
    assert!(report.notes.iter().any(|note| note.contains("whole seconds")));
    assert!(report.notes.iter().any(|note| note.contains("fewer than 30")));
    assert_eq!((report.rows.len(), &*report.rows[0].node), (6, "node-1"));
}

#[tokio::test]
async fn a_pod_that_does_not_start_is_a_failure_with_its_reason_and_no_time() {
    let double = DoubleApiServer::serve(None).await;
    let never = CancellationToken::new();
    let report = measure(&double.client(), &plan(&["broken", "fast"], 1), &never, &mut |_| ()).await.unwrap();
    let broken = &report.classes["broken"];
    assert_eq!((broken.n, broken.failures, broken.mean_s), (1, 1, None));
    let failed: Vec<&Row> = report.rows.iter().filter(|row| row.outcome() == Outcome::Failed).collect();
    assert!(failed.iter().all(|row| row.error.contains("ImagePullBackOff: no such image")), "{failed:?}");
    assert_eq!(report.classes["fast"].mean_s, Some(1.0));
    assert!(double.truth.lock().unwrap().pods.is_empty());
}

#[tokio::test]
async fn an_interruption_keeps_what_was_measured_and_leaves_no_pod() {
    let double = DoubleApiServer::serve(None).await;
    let (cancel, mut seen) = (CancellationToken::new(), 0);
    let stop = cancel.clone();
    let mut progress = |_: &Row| {
        seen += 1;
        if seen == 2 {
            stop.cancel();
        }
    };
    let report = measure(&double.client(), &plan(&["fast"], 50), &cancel, &mut progress).await.unwrap();
    assert!(report.partial && report.classes["fast"].n == 1, "{report:?}");
    assert!(double.truth.lock().unwrap().pods.is_empty());
}

#[tokio::test]
async fn a_class_or_a_server_that_is_missing_is_named_before_anything_starts() {
    let double = DoubleApiServer::serve(None).await;
    let never = CancellationToken::new();
    let error = measure(&double.client(), &plan(&["gone"], 1), &never, &mut |_| ()).await.unwrap_err();
    assert!(matches!(&error, StartupError::NoClass(name) if name == "gone"), "{error}");
    assert!(double.truth.lock().unwrap().created.is_empty());
    let access = Access { server: "http://127.0.0.1:1".into(), ..double.access(None) };
    let error = Client::new(&access).unwrap().call(Method::GET, "/version", None).await.unwrap_err();
    assert!(error.to_string().contains("no answer from http://127.0.0.1:1"), "{error}");
}

#[tokio::test]
async fn the_servers_certificate_and_the_users_token_are_checked() {
    let double = DoubleApiServer::serve_tls(Some("secret")).await;
    let version =
        async |access: &Access| Client::new(access).unwrap().call(Method::GET, "/version", None).await;
    assert_eq!(version(&double.access(Some("secret"))).await.unwrap()["gitVersion"], "v1.99.0-double");
    let refused = version(&double.access(Some("wrong"))).await.unwrap_err();
    assert!(matches!(&refused, ApiError::Refused { status: StatusCode::UNAUTHORIZED, .. }), "{refused}");
    // Another server's certificate.
    let other = DoubleApiServer::serve_tls(None).await;
    let mut access = double.access(Some("secret"));
    access.authority = other.authority.clone();
    let error = version(&access).await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    access.authority = None;
    assert!(Client::new(&access).is_err());
}
