//! The daemon's own account of a start: how long each of its stages took, by the names it uses everywhere.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sandboxer_protocol::admin::admin_client::AdminClient;
use sandboxer_protocol::admin::{InspectPodRequest, Pod, StageTime, VersionRequest, VersionResponse};
use sandboxer_protocol::stage::Stage;
use tonic::transport::Channel;

use crate::runtime::channel;

/// A daemon's admin socket.
#[derive(Debug, Clone)]
pub struct Trace {
    socket: PathBuf,
    client: AdminClient<Channel>,
}

impl Trace {
    /// Speaks to the daemon at this socket, from the first call on.
    pub fn connect(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), client: AdminClient::new(channel(socket.to_owned())) }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// What the daemon says of itself.
    pub async fn version(&self) -> Result<VersionResponse, tonic::Status> {
        Ok(self.client.clone().version(VersionRequest {}).await?.into_inner())
    }

    /// What the daemon says of a pod.
    pub async fn pod(&self, id: &str) -> Result<Pod, tonic::Status> {
        Ok(self.client.clone().inspect_pod(InspectPodRequest { id: id.to_owned() }).await?.into_inner())
    }

    /// Durations of a pod's stages, ms, those of its containers added. Empty for a pod of another runtime.
    pub async fn stages(&self, id: &str) -> BTreeMap<Stage, f64> {
        self.pod(id).await.map(|pod| stages(&pod)).unwrap_or_default()
    }
}

fn stages(pod: &Pod) -> BTreeMap<Stage, f64> {
    let mut sums = BTreeMap::new();
    for time in pod.stages.iter().chain(pod.containers.iter().flat_map(|container| &container.stages)) {
        if let Some(stage) = known(time) {
            *sums.entry(stage).or_default() += time.duration_ns as f64 / 1e6;
        }
    }
    sums
}

fn known(time: &StageTime) -> Option<Stage> {
    Stage::ALL.into_iter().find(|stage| stage.as_str() == time.stage)
}
