//! Stages of a start, as the daemon reports them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sandboxer_protocol::{
    admin::{
        Checkpoint, CreateCheckpointRequest, InspectPodRequest, Pod, RemoveCheckpointRequest, StageTime,
        VersionRequest, VersionResponse, admin_client::AdminClient,
    },
    stage::Stage,
};
use tonic::transport::Channel;

use crate::{manifest::Facts, runtime::channel};

/// A client of the daemon's admin socket.
#[derive(Debug, Clone)]
pub struct Trace {
    socket: PathBuf,
    client: AdminClient<Channel>,
}

impl Trace {
    /// Creates a client of the daemon at `socket`; it connects at the first call.
    pub fn connect(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), client: AdminClient::new(channel(socket.to_owned())) }
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the daemon's version information.
    pub async fn version(&self) -> Result<VersionResponse, tonic::Status> {
        Ok(self.client.clone().version(VersionRequest {}).await?.into_inner())
    }

    /// Returns the daemon's information on a pod.
    pub async fn pod(&self, id: &str) -> Result<Pod, tonic::Status> {
        Ok(self.client.clone().inspect_pod(InspectPodRequest { id: id.to_owned() }).await?.into_inner())
    }

    /// Saves a pod, which goes on.
    pub async fn create_checkpoint(&self, pod: &str, name: &str) -> Result<Checkpoint, tonic::Status> {
        let request = CreateCheckpointRequest { pod: pod.to_owned(), name: name.to_owned(), stop: false };
        let mut answers = self.client.clone().create_checkpoint(request).await?.into_inner();
        let answer = answers.message().await?;
        answer.ok_or_else(|| tonic::Status::internal("the daemon answered nothing"))
    }

    /// Removes a checkpoint.
    pub async fn remove_checkpoint(&self, namespace: &str, name: &str) -> Result<(), tonic::Status> {
        let request = RemoveCheckpointRequest { namespace: namespace.to_owned(), name: name.to_owned() };
        self.client.clone().remove_checkpoint(request).await.map(drop)
    }
}

/// Returns the properties of a pod's VM.
pub fn vm(pod: &Pod) -> Facts {
    Facts::from([
        ("vcpus".into(), pod.vcpus.into()),
        ("memory_mib".into(), pod.memory_mib.into()),
        ("guest_kernel".into(), pod.kernel_release.clone().into()),
    ])
}

/// Returns the durations of a pod's stages, ms; sums the stages of its containers.
pub fn stages(pod: &Pod) -> BTreeMap<Stage, f64> {
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
