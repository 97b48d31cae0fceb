//! What all pods of this node share.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicU64},
};

use sandboxer_config::Config;
use sandboxer_host::{network::TapPool, rootfs::RootfsStore, volume::VolumeStore};
use sandboxer_process::cgroup::{Cgroup, Hierarchies};
use sandboxer_protocol::id::SandboxId;
use sandboxer_vmm::Vmms;

use super::{
    admission::Admission, journal::Journal, placer::Placer, pool::Pool, registry::Registry,
    rehearsal::Rehearsal, stage_times::StageTimes, start_paths::StartPaths,
};
use crate::{checkpoint::Checkpoints, events::Events, front::Front, template::Templates, traces::Traces};

/// State that all pods of this node share.
#[derive(Debug)]
pub struct DaemonState {
    /// The configuration.
    pub config: Config,
    /// The VMMs that can create VMs.
    pub vmms: Vmms,
    /// The store that builds disks from snapshots.
    pub rootfs: Arc<RootfsStore>,
    /// The hierarchies in which pods' cgroups are created.
    pub cgroups: Hierarchies,
    /// The cgroup of VMs without a pod and without a NUMA node; it exists.
    pub idle_cgroup: Option<Cgroup>,
    /// The placer that chooses NUMA nodes for VMs.
    pub placer: Arc<Placer>,
    /// The store that creates volumes.
    pub volumes: Arc<VolumeStore>,
    /// The journal that records pods on disk.
    pub journal: Journal,
    /// The registry that finds pods.
    pub registry: Registry,
    /// The checkpoints that pods are restored from.
    pub checkpoints: Arc<Checkpoints>,
    /// The templates that pods are copied from.
    pub templates: Arc<Templates>,
    /// The rehearsal that prepares guests without a pod.
    pub rehearsal: Arc<Rehearsal>,
    /// The pool of VMs that are ready for pods.
    pub pool: Arc<Pool>,
    /// The pool that holds the taps of VMs without a pod.
    pub tap_pool: Arc<TapPool>,
    /// The counters of start paths.
    pub start_paths: StartPaths,
    /// The gates that bound concurrent starts.
    pub admission: Admission,
    /// The channel that publishes events.
    pub events: Events,
    /// The front, which outlives this process.
    pub front: Arc<Front>,
    /// Histograms of the stages of all starts.
    pub stage_times: Arc<StageTimes>,
    /// Number of statistics calls that returned old values.
    pub old_readings: Arc<AtomicU64>,
    /// The recorder of containerd's requests.
    pub traces: Traces,
}

impl DaemonState {
    /// Returns a pod's directory for sockets and logs.
    pub fn run_dir(&self, pod: &SandboxId) -> PathBuf {
        self.config.run_dir.join("pods").join(pod)
    }
}
