//! Information that containerd reports about itself over its socket.

use std::path::Path;

use k8s_cri::v1::{StatusRequest, VersionRequest, runtime_service_client::RuntimeServiceClient};
use sandboxer_base::chain;
use sandboxer_protocol::{
    check::{ANSWERED_BY, CHECKED_POD},
    controller::{ControllerStatusRequest, controller_client::ControllerClient},
    introspection::{PluginsRequest, introspection_client::IntrospectionClient},
};
use serde_json::Value;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use super::PATIENCE;

/// Maximum size of a response, bytes.
pub(super) const MAX_ANSWER_BYTES: usize = 4 << 20;
/// containerd's type of sandbox controller plugins.
const CONTROLLER: &str = "io.containerd.sandbox.controller.v1";

/// Runtime handler of sandboxer's pods.
pub const HANDLER: &str = "sandboxer";

/// A CRI endpoint and its response.
#[derive(Debug, Clone)]
pub struct Reading {
    /// The endpoint, as given.
    pub endpoint: String,
    /// The response, or the reason why there is none.
    pub runtime: Result<RuntimeStatus, String>,
}

/// A CRI runtime's description of itself.
#[derive(Debug, Clone)]
pub struct RuntimeStatus {
    /// Name of the runtime: "containerd".
    pub name: String,
    /// Version of the runtime, such as "v2.4.2".
    pub version: String,
    /// ID of the process that listens on the socket, if visible.
    pub pid: Option<u32>,
    /// CRI configuration of the runtime.
    pub config: Value,
    /// Readiness of the network, or the reason why it is not ready.
    pub network: Result<(), String>,
}

/// The route of requests for pods of [`HANDLER`].
#[derive(Debug, Clone)]
pub struct Route {
    /// The sandbox controller plugin, if it exists.
    pub controller: Result<Option<Controller>, String>,
    /// `Ok` if a request reaches our daemon, else the response that came instead.
    pub routed: Result<(), String>,
}

/// A sandbox controller plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// Socket of the controller, if it is a separate process.
    pub address: Option<String>,
    /// The reason why it did not start.
    pub error: Option<String>,
}

impl Reading {
    /// Returns the response, if there is one.
    pub fn runtime(&self) -> Option<&RuntimeStatus> {
        self.runtime.as_ref().ok()
    }
}

impl RuntimeStatus {
    /// Returns containerd's configuration of [`HANDLER`].
    pub fn handler(&self) -> Option<&Value> {
        self.config.get("containerd")?.get("runtimes")?.get(HANDLER)
    }
}

/// Queries the CRI runtime at `endpoint`, a `unix://` address or a path.
pub async fn read(endpoint: &str) -> Reading {
    let runtime = tokio::time::timeout(PATIENCE, ask(socket(endpoint))).await;
    Reading { endpoint: endpoint.to_owned(), runtime: runtime.unwrap_or_else(|_| Err(silent())) }
}

/// Follows a request for a pod of [`HANDLER`]; `None` without a response or without the handler. `socket` is the
/// controller of our daemon, which a containerd without sandbox controllers does not call.
pub async fn route(reading: &Reading, socket: &Path) -> Option<Route> {
    let handler = reading.runtime()?.handler()?;
    let Some(sandboxer) = handler.get("sandboxer").and_then(Value::as_str) else {
        let routed = tokio::time::timeout(PATIENCE, reaches_us(socket, HANDLER)).await;
        return Some(Route { controller: Ok(None), routed: routed.unwrap_or_else(|_| Err(silent())) });
    };
    // Connects with the first request, within its deadline.
    let channel = grpc(self::socket(&reading.endpoint)).ok()?.connect_lazy();
    let (controller, routed) = tokio::join!(
        tokio::time::timeout(PATIENCE, controller(channel.clone(), sandboxer)),
        tokio::time::timeout(PATIENCE, routed(channel, sandboxer)),
    );
    Some(Route {
        controller: controller.unwrap_or_else(|_| Err(silent())),
        routed: routed.unwrap_or_else(|_| Err(silent())),
    })
}

pub(super) fn socket(endpoint: &str) -> &Path {
    Path::new(endpoint.strip_prefix("unix://").unwrap_or(endpoint))
}

pub(super) fn silent() -> String {
    format!("no answer within {PATIENCE:?}: it is slow or hangs")
}

/// Returns the process that listens on a socket, or `None` if no process accepts in time.
pub async fn listener(socket: &Path) -> Option<u32> {
    let stream = tokio::time::timeout(PATIENCE, UnixStream::connect(socket)).await.ok()?.ok()?;
    u32::try_from(stream.peer_cred().ok()?.pid()?).ok().filter(|pid| *pid > 0)
}

pub(super) fn grpc(socket: &Path) -> Result<Endpoint, String> {
    Endpoint::from_shared(format!("unix://{}", socket.display())).map_err(|error| chain(&error))
}

async fn ask(socket: &Path) -> Result<RuntimeStatus, String> {
    // Connects first, because gRPC's error does not distinguish a missing socket from one without a listener.
    UnixStream::connect(socket).await.map_err(|error| error.to_string())?;
    let channel = grpc(socket)?.connect_lazy();
    let mut cri = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
    let words = |status: tonic::Status| status.message().to_owned();
    let version = cri.version(VersionRequest { version: "v1".into() }).await.map_err(words)?.into_inner();
    let status = cri.status(StatusRequest { verbose: true }).await.map_err(words)?.into_inner();
    let config = status.info.get("config").and_then(|text| serde_json::from_str(text).ok());
    let conditions = status.status.unwrap_or_default().conditions;
    let network = match conditions.into_iter().find(|condition| condition.r#type == "NetworkReady") {
        Some(condition) if !condition.status => Err(condition.message),
        _ => Ok(()),
    };
    Ok(RuntimeStatus {
        name: version.runtime_name,
        version: version.runtime_version,
        pid: listener(socket).await,
        config: config.unwrap_or_default(),
        network,
    })
}

async fn controller(channel: Channel, name: &str) -> Result<Option<Controller>, String> {
    let mut client = IntrospectionClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
    let answer = client.plugins(PluginsRequest { filters: Vec::new() }).await;
    let plugins = answer.map_err(|status| status.message().to_owned())?.into_inner().plugins;
    let found = plugins.into_iter().find(|plugin| plugin.r#type == CONTROLLER && plugin.id == name);
    Ok(found.map(|mut plugin| Controller {
        address: plugin.exports.remove("address"),
        error: plugin.init_err.map(|error| error.message),
    }))
}

/// Checks at `socket`, of containerd or of a daemon, that requests for pods of this sandboxer reach our daemon.
pub async fn reaches_us(socket: &Path, sandboxer: &str) -> Result<(), String> {
    routed(grpc(socket)?.connect_lazy(), sandboxer).await
}

/// Requests the status of a pod that cannot exist from containerd's controller: only our daemon identifies itself.
async fn routed(channel: Channel, sandboxer: &str) -> Result<(), String> {
    let request = ControllerStatusRequest {
        sandbox_id: CHECKED_POD.into(),
        sandboxer: sandboxer.into(),
        verbose: true,
    };
    match ControllerClient::new(channel).status(request).await {
        Ok(answer) if answer.get_ref().info.contains_key(ANSWERED_BY) => Ok(()),
        Ok(_) => Err(format!("another controller has a pod {CHECKED_POD}")),
        Err(status) => Err(status.message().to_owned()),
    }
}
