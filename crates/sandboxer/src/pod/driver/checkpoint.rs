//! The request to save the pod.

use std::{fs, path::PathBuf, time::Duration};

use sandboxer_base::{Code, chain};
use sandboxer_config::StartPath;
use sandboxer_host::volume::Content;
use sandboxer_protocol::{id::ContainerId, newer};
use sandboxer_vmm::DiskRecord;

use super::{Driver, answer, done::Done, state::State};
use crate::{
    checkpoint::{self, Manifest, SavedContainer},
    error::PodError,
    events::Kind,
    pod::{
        checkpoint::{self as saving, Plan, Restored},
        container::{NewContainer, Phase, StdioPaths, spec},
        daemon_state::DaemonState,
        request::Reply,
        running_vm::RunningVm,
        spec::PodSpec,
    },
    template::Kind as VmKind,
};

/// A container of the pod, as its task knows it.
struct Running {
    id: ContainerId,
    bundle: PathBuf,
    stdio: [bool; 4],
    disks: Vec<DiskRecord>,
}

/// Reads by what a container is recognised, and which volumes it has.
async fn look(
    node: &DaemonState,
    pod: &PodSpec,
    live: &RunningVm,
    restored: Option<&Restored>,
    Running { id, bundle, stdio, disks }: Running,
) -> Result<SavedContainer, PodError> {
    let identity = saving::identify(node, pod, &id, &bundle).await?;
    // A pod without CRI, whose root may be its caller's, is not saved.
    let (mounts, root, beside) = (Vec::new(), None, Vec::new());
    let new = NewContainer { id, bundle, mounts, root, stdio: StdioPaths::default(), beside };
    let on_disk = pod.image_volumes_on_disk && live.agent.knows(&newer::IMAGE_VOLUMES);
    let mut guest_spec = spec::read(pod, &new, &node.volumes.helpers, on_disk).await?;
    if let Some(restored) = restored {
        restored.rename(&mut guest_spec)?;
    }
    Ok(SavedContainer { id: new.id, identity, stdio, disks, volumes: saving::mounted(&guest_spec.json) })
}

/// Returns about how many bytes a checkpoint takes: the memory that the VM has touched, and images. What was written to disks
/// is known only once it is copied.
fn estimate(live: &RunningVm, memory_mib: u64, containers: &[Running]) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{}/statm", live.vm.record().pid)).unwrap_or_default();
    let pages = statm.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    let touched = pages.map_or(u64::MAX, |pages| pages.saturating_mul(4096));
    let images = containers.iter().flat_map(|container| &container.disks).filter(|disk| disk.read_only);
    let images: u64 = images.filter_map(|disk| Some(fs::metadata(&disk.path).ok()?.len())).sum();
    touched.min(memory_mib << 20).saturating_add(images)
}

impl Driver {
    pub(super) fn on_checkpoint(&mut self, name: String, stop: bool, reply: Reply<Box<Manifest>>) {
        let (live, containers) = match self.savable(&name) {
            Ok(savable) => savable,
            Err(error) => return answer(reply, Err(error)),
        };
        let about = estimate(&live, self.spec.memory_mib, &containers);
        let draft = match self.node.checkpoints.draft(&self.spec.namespace, &name, about) {
            Ok(draft) => draft,
            Err(error) => return answer(reply, Err(error)),
        };
        self.is_being_saved = true;
        let kind = VmKind { vmm: self.node.vmms.key(self.spec.vmm).unwrap_or_default(), shape: self.shape() };
        let (node, pod, link_key) = (self.node.clone(), self.spec.clone(), self.link_key.clone());
        // It stays the pod's.
        let spare = self.volumes.spare.take();
        self.volumes.spare.put(spare.clone());
        let (volumes, restored) = (self.volumes.record(), self.restored.clone());
        self.work.spawn(async move {
            let mut saved = Vec::new();
            let looked = async {
                for container in containers {
                    saved.push(look(&node, &pod, &live, restored.as_ref(), container).await?);
                }
                Ok(())
            };
            let (result, goes_on) = match looked.await {
                Ok(()) => {
                    let plan = Plan { draft, kind, link_key, containers: saved, spare, volumes, stop };
                    saving::save(&node, &pod, &live, plan).await
                }
                Err(error) => (Err(error), Ok(())),
            };
            Done::Saved { result: Box::new(result), goes_on, stop, reply }
        });
    }

    /// Returns what is to be saved, or why the pod cannot be saved now.
    fn savable(&self, name: &str) -> Result<(RunningVm, Vec<Running>), PodError> {
        let refused = |code, reason: String| {
            Err(checkpoint::refused(
                &self.spec.namespace,
                name,
                code,
                format!("pod {}: {reason}", self.spec.id),
            ))
        };
        let State::Ready { pod, .. } = &self.state else {
            return Err(self.wrong_state("make a checkpoint"));
        };
        self.not_being_saved("make a checkpoint")?;
        if !self.being_made.is_empty() || !self.execs_being_made.is_empty() {
            return refused(
                Code::FailedPrecondition,
                "a container or an exec is being created: try again".to_owned(),
            );
        }
        if self.spec.alone
            || self.spec.huge_pages
            || self.shape() != self.spec.shape(self.shape().nics.into())
        {
            let what =
                "a container without a pod, memory in huge pages and a size that was changed cannot be saved";
            return refused(Code::Unimplemented, what.to_owned());
        }
        let status = self.status.borrow().clone();
        if status.interfaces.is_empty() && status.start_path == Some(StartPath::Pool) {
            let what = "pods without a network of their own cannot be saved: their VM may have an interface that waited";
            return refused(Code::Unimplemented, what.to_owned());
        }
        if saving::is_too_old(&pod.live) {
            let what = "its agent is of an earlier version, which cannot be saved: start the pod anew";
            return refused(Code::FailedPrecondition, what.to_owned());
        }
        let volumes = self.volumes.record();
        let device = volumes.iter().find_map(|needed| match &needed.content {
            Content::Device { path, .. } => Some(path),
            _ => None,
        });
        if let Some(path) = device {
            let what = format!("pods with block devices cannot be saved, and it has {}", path.display());
            return refused(Code::Unimplemented, what);
        }
        if crate::share::server_of(&self.node.run_dir(&self.spec.id)).is_some() {
            let what = "pods with live shares of the host cannot be saved";
            return refused(Code::Unimplemented, what.to_owned());
        }
        let waiting =
            self.restored.as_ref().is_some_and(|restored| restored.containers.len() > restored.adopted.len());
        if self.containers.is_empty() || waiting {
            let what = "it has no containers, or not all of the checkpoint from which it was restored";
            return refused(Code::FailedPrecondition, what.to_owned());
        }
        let mut running = Vec::new();
        for (id, container) in &self.containers {
            let phase = container.init.phase.borrow().clone();
            let state = if container.is_paused() { "paused" } else { phase.as_str() };
            if phase != Phase::Running || container.is_paused() {
                let what = format!(
                    "container {id} is {state}: all containers must run, and those that ended be removed"
                );
                return refused(Code::FailedPrecondition, what);
            }
            let stdio = &container.init.stdio;
            let has = |path: &PathBuf| !path.as_os_str().is_empty();
            let stdio = [has(&stdio.stdin), has(&stdio.stdout), has(&stdio.stderr), stdio.terminal];
            let (bundle, disks) = (container.bundle.clone(), container.disks.clone());
            running.push(Running { id: id.clone(), bundle, stdio, disks });
        }
        running.sort_by(|a, b| a.id.cmp(&b.id));
        Ok((pod.live.clone(), running))
    }

    /// Returns an error if the pod is being saved.
    pub(super) fn not_being_saved(&self, action: &'static str) -> Result<(), PodError> {
        match self.is_being_saved {
            true => {
                let (subject, state) = (format!("pod {}", self.spec.id), "being saved".to_owned());
                Err(PodError::State { action, subject, state })
            }
            false => Ok(()),
        }
    }

    pub(super) fn saved(
        &mut self,
        result: Result<Manifest, PodError>,
        goes_on: Result<(), PodError>,
        stop: bool,
        reply: Reply<Box<Manifest>>,
    ) {
        let ends = stop && result.is_ok();
        // Until it has ended, nothing in it changes.
        self.is_being_saved = ends;
        let counts = &self.node.checkpoints.counts;
        counts.saves.add(result.is_ok());
        match &result {
            Ok(manifest) => {
                counts.paused(Duration::from_nanos(manifest.paused_ns));
                let detail = format!("{}, paused for {} ms", manifest.name, manifest.paused_ns / 1_000_000);
                self.node.events.pod(&self.spec.id, Kind::PodSaved, detail);
            }
            Err(error) => {
                tracing::warn!(pod = %self.spec.id, error = chain(error), "the pod was not saved");
            }
        }
        if ends {
            self.stop();
        }
        answer(reply, result.map(Box::new));
        if let Err(error) = goes_on {
            self.guest_lost(error);
        }
    }
}
