//! The daemon's own account of a start: how long each of its stages took, by the names it uses everywhere.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sandboxer_protocol::{
    admin::{InspectPodRequest, Pod, StageTime, VersionRequest, VersionResponse, admin_client::AdminClient},
    stage::Stage,
};
use tonic::transport::Channel;

use crate::{manifest::Facts, runtime::channel};

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

    /// Returns the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns what the daemon says of itself.
    pub async fn version(&self) -> Result<VersionResponse, tonic::Status> {
        Ok(self.client.clone().version(VersionRequest {}).await?.into_inner())
    }

    /// Returns what the daemon says of a pod.
    pub async fn pod(&self, id: &str) -> Result<Pod, tonic::Status> {
        Ok(self.client.clone().inspect_pod(InspectPodRequest { id: id.to_owned() }).await?.into_inner())
    }
}

/// Returns the machine that a pod was given.
pub fn machine(pod: &Pod) -> Facts {
    Facts::from([
        ("vcpus".into(), pod.vcpus.into()),
        ("memory_mib".into(), pod.memory_mib.into()),
        ("guest_kernel".into(), pod.kernel_release.clone().into()),
    ])
}

/// Durations of a pod's stages, ms, those of its containers added.
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
