//! Saves a running pod, and knows which containers of a restored pod go on.
//!
//! ```text
//!  containers freeze ─▶ VM paused: memory, devices, written disks ─▶ VM goes on ─▶ containers thaw ─▶ checksums, name
//! ```
//!
//! The pod goes on whatever happens: the next worker finds a note at the front and lets it.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

use sandboxer_base::{
    Code, chain,
    clock::now_ns,
    failpoint::{fail, pass, reach},
};
use sandboxer_host::{
    rootfs::copy_data,
    volume::{Content, Needed},
};
use sandboxer_protocol::{
    VOLUMES_DIR,
    id::{ContainerId, Id},
    link::LinkKey,
    newer,
};
use sandboxer_vmm::{Destination, DiskRecord, SavedDisk as OpenDisk, Vm};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    checkpoint::{self, Draft, Identity, Manifest, SavedContainer, SavedDisk, VolumeKind, disk_file},
    containerd,
    error::PodError,
    front,
    pod::{
        container::{
            NewContainer,
            spec::{self, GuestSpec},
        },
        daemon_state::DaemonState,
        running_vm::RunningVm,
        spec::PodSpec,
    },
    template::{Kind, Shape},
};

/// Kind of the front's note that a pod is being saved: its containers, which are frozen.
pub const SAVING: &str = "saving";

/// The request to save a pod, as its task has checked it.
#[derive(Debug)]
pub struct Plan {
    /// The checkpoint's directory.
    pub draft: Draft,
    /// The kind of the pod's VM.
    pub kind: Kind,
    /// Key of the link to the pod's agent.
    pub link_key: LinkKey,
    /// The pod's containers, which all run.
    pub containers: Vec<SavedContainer>,
    /// The scratch disk that no container uses.
    pub spare: Option<DiskRecord>,
    /// The pod's volumes.
    pub volumes: Vec<Needed>,
    /// Whether the pod ends when it is saved.
    pub stop: bool,
}

/// What a pod's task knows of the containers that a restored pod goes on with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// The checkpoint, for messages: namespace and name.
    pub checkpoint: [String; 2],
    /// The containers that were saved.
    pub containers: Vec<SavedContainer>,
    /// Names of those that the pod's containers have become.
    pub adopted: Vec<String>,
    /// The volumes that were saved.
    pub volumes: BTreeMap<Id, VolumeKind>,
    /// The saved volumes that the pod's volumes have become: their ids here, and in the guest.
    pub renamed: BTreeMap<Id, Id>,
}

/// What a saved container has become.
#[derive(Debug)]
pub struct Adopted {
    /// Name of the container.
    pub name: String,
    /// As [`Restored::renamed`].
    pub renamed: BTreeMap<Id, Id>,
}

impl Restored {
    /// Returns the saved container that goes on as the one of this identity; `None`: that has gone on before, so this
    /// is another attempt, which begins anew.
    pub fn find(&self, identity: &Identity) -> Result<Option<&SavedContainer>, PodError> {
        let Some(saved) = self.containers.iter().find(|saved| saved.identity.name == identity.name) else {
            let names: Vec<_> = self.containers.iter().map(|saved| saved.identity.name.as_str()).collect();
            let reason = format!("it has no container {:?}: it has {}", identity.name, names.join(", "));
            return Err(self.refused(reason));
        };
        if self.adopted.contains(&identity.name) {
            return Ok(None);
        }
        match saved.identity.difference(identity) {
            Some(how) => Err(self.refused(format!("container {:?} is another one: {how}", identity.name))),
            None => Ok(Some(saved)),
        }
    }

    /// Checks that a container has the saved one's image, where that does not follow from its identity: by the layers.
    pub async fn check_layers(
        &self,
        node: &DaemonState,
        pod: &PodSpec,
        new: &NewContainer,
        (saved, identity): (&SavedContainer, &Identity),
    ) -> Result<(), PodError> {
        if saved.identity.digest.is_some() && identity.digest.is_some() {
            return Ok(());
        }
        let images: Vec<&Path> =
            saved.disks.iter().filter(|disk| disk.read_only).map(|disk| disk.path.as_path()).collect();
        if node.rootfs.is_made_of(&pod.id, &new.id, &new.mounts, &images).await? {
            return Ok(());
        }
        let Identity { name, image, .. } = identity;
        let reason = format!(
            "container {name:?}: cannot tell that its image {image} is the saved one: its layers are not those on this \
             node, and containerd did not tell its digest, now or when it was saved: set containerd.ttrpc"
        );
        Err(self.refused(reason))
    }

    /// Makes a container's specification name the saved volumes instead of those that the pod has for them.
    pub fn rename(&self, guest_spec: &mut GuestSpec) -> Result<(), PodError> {
        rename(&self.renamed, guest_spec)
            .map_err(|error| self.refused(format!("cannot change a mount: {error}")))
    }

    /// Finds for each volume of a container the saved one that is mounted at the same place.
    pub fn renamed_by(
        &self,
        saved: &SavedContainer,
        guest_spec: &GuestSpec,
    ) -> Result<BTreeMap<Id, Id>, PodError> {
        let (now, mut renamed) = (mounted(&guest_spec.json), BTreeMap::new());
        let name = &saved.identity.name;
        if let Some(at) = saved
            .volumes
            .keys()
            .chain(now.keys())
            .find(|&at| !saved.volumes.contains_key(at) || !now.contains_key(at))
        {
            let had = if now.contains_key(at) { "has a volume at" } else { "lacks its volume at" };
            return Err(self.refused(format!("container {name:?} {had} {at:?}, unlike when it was saved")));
        }
        for (at, source) in &now {
            let pair = parts(source).zip(saved.volumes.get(at).and_then(|was| parts(was)));
            let Some(((id, path), (was, was_at))) = pair else { continue };
            let kind = guest_spec
                .needed
                .iter()
                .find(|needed| needed.id == id)
                .and_then(|needed| kind(&needed.content));
            let same = kind.is_some() && kind == self.volumes.get(&was).copied() && path == was_at;
            if !same || renamed.insert(id, was.clone()).is_some_and(|other| other != was) {
                let reason =
                    format!("container {name:?} has another volume at {at:?} than when it was saved");
                return Err(self.refused(reason));
            }
        }
        Ok(renamed)
    }

    /// Returns whether the guest has this container for one that has not been created yet.
    pub fn holds(&self, id: &str) -> bool {
        let waits = |saved: &&SavedContainer| !self.adopted.contains(&saved.identity.name);
        self.containers.iter().filter(waits).any(|saved| saved.id.as_str() == id)
    }

    /// Returns the error that a container does not fit the checkpoint.
    pub fn refused(&self, reason: String) -> PodError {
        let [namespace, name] = &self.checkpoint;
        checkpoint::refused(namespace, name, Code::FailedPrecondition, reason)
    }
}

/// Reads by what a container of a pod is recognised.
pub async fn identify(
    node: &DaemonState,
    pod: &PodSpec,
    container: &ContainerId,
    bundle: &Path,
) -> Result<Identity, PodError> {
    let mut identity = spec::identity(container, bundle)?;
    if let Some(socket) = containerd::socket(pod.bundle.as_deref(), node.config.containerd_ttrpc.as_deref()) {
        match containerd::image(&socket, container).await {
            Ok(digest) => identity.digest = Some(digest),
            Err(error) => {
                tracing::warn!(pod = %pod.id, %container, error, "cannot learn the digest of a container's image");
            }
        }
    }
    Ok(identity)
}

/// Returns the kind of a volume that can be saved.
pub fn kind(content: &Content) -> Option<VolumeKind> {
    match content {
        Content::Files { .. } => Some(VolumeKind::Files),
        Content::Memory { .. } => Some(VolumeKind::Memory),
        Content::Disk { .. } => Some(VolumeKind::Disk),
        Content::Device { .. } => None,
    }
}

/// Returns the guest's paths of the volumes in a container's specification, by where they are mounted.
pub fn mounted(json: &[u8]) -> BTreeMap<String, String> {
    let spec: Value = serde_json::from_slice(json).unwrap_or_default();
    let mounts = spec.get("mounts").and_then(Value::as_array).into_iter().flatten();
    let text = |mount: &Value, name: &str| Some(mount.get(name)?.as_str()?.to_owned());
    let mounts = mounts.filter_map(|mount| text(mount, "destination").zip(text(mount, "source")));
    mounts.filter(|(_, source)| parts(source).is_some()).collect()
}

/// Splits the guest's path of a volume into the volume's id and the path in it.
fn parts(source: &str) -> Option<(Id, PathBuf)> {
    let mut below = Path::new(source).strip_prefix(VOLUMES_DIR).ok()?.components();
    let id = below.next()?.as_os_str().to_str()?.parse().ok()?;
    Some((id, below.as_path().to_owned()))
}

/// Makes a container's specification name other volumes.
pub fn rename(renamed: &BTreeMap<Id, Id>, guest_spec: &mut GuestSpec) -> serde_json::Result<()> {
    if renamed.is_empty() {
        return Ok(());
    }
    let mut spec: Value = serde_json::from_slice(&guest_spec.json)?;
    for mount in spec.get_mut("mounts").and_then(Value::as_array_mut).into_iter().flatten() {
        let found = mount.get("source").and_then(Value::as_str).and_then(parts);
        if let Some((id, path)) = found
            && let Some(other) = renamed.get(&id)
        {
            let source = Path::new(VOLUMES_DIR).join(other);
            let source = if path.as_os_str().is_empty() { source } else { source.join(path) };
            mount["source"] = source.to_string_lossy().into();
        }
    }
    guest_spec.json = serde_json::to_vec(&spec)?;
    for needed in &mut guest_spec.needed {
        if let Some(other) = renamed.get(&needed.id) {
            needed.id = other.clone();
        }
    }
    Ok(())
}

/// Saves the pod. Returns the checkpoint, or why there is none; and whether the pod goes on. A pod that is to end stays
/// frozen from its saving on.
pub async fn save(
    node: &DaemonState,
    spec: &PodSpec,
    live: &RunningVm,
    plan: Plan,
) -> (Result<Manifest, PodError>, Result<(), PodError>) {
    let ids: Vec<ContainerId> = plan.containers.iter().map(|container| container.id.clone()).collect();
    let note = front::key(SAVING, &spec.id, None);
    let kept = match node.front.keep(&note, &ids, &[]) {
        Ok(kept) => kept,
        Err(source) => {
            let error = PodError::Front { pod: spec.id.clone(), what: note.into(), source };
            return (Err(error), Ok(()));
        }
    };
    let saved = save_frozen(node, spec, live, &plan, &ids).await;
    let (draft, stop) = (plan.draft, plan.stop);
    let goes_on = async || {
        let goes_on = go_on(live, &ids).await;
        if goes_on.is_ok() {
            kept.release();
        }
        goes_on
    };
    let captured = match saved {
        Ok(captured) => captured,
        Err(error) => return (Err(error), goes_on().await),
    };
    if !stop {
        let goes_on = goes_on().await;
        reach(format_args!("a saved pod goes on"), &draft.dir).await;
        return (finish(spec, draft, captured).await, goes_on);
    }
    let target = draft.target.clone();
    match finish(spec, draft, captured).await {
        // Its containers stay frozen while the guest powers off. The note is forgotten when the pod has stopped.
        Ok(manifest) => {
            reach(format_args!("a saved pod is about to end"), &target).await;
            (Ok(manifest), live.vm.resume().await.map_err(PodError::from))
        }
        Err(error) => (Err(error), goes_on().await),
    }
}

/// Completes the checkpoint.
async fn finish(
    spec: &PodSpec,
    draft: Draft,
    Captured { mut manifest, images, began }: Captured,
) -> Result<Manifest, PodError> {
    manifest.paused_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let finishing = tokio::task::spawn_blocking(move || {
        images.iter().try_for_each(|image| keep_image(image, &draft.dir)).map_err(|error| {
            let reason = format!("cannot keep an image in {}: {error}", draft.dir.display());
            checkpoint::refused(draft.namespace.as_str(), draft.name.as_str(), Code::Internal, reason)
        })?;
        pass(format_args!("a checkpoint has its images"));
        draft.finish(manifest)
    });
    finishing.await.unwrap_or_else(|panic| {
        Err(PodError::Failed { subject: format!("pod {}", spec.id), reason: panic.to_string() })
    })
}

/// A pod whose memory, devices and written disks are saved.
struct Captured {
    manifest: Manifest,
    /// The disks that nobody writes.
    images: Vec<OpenDisk>,
    /// When the pause began.
    began: Instant,
}

/// Freezes the containers and saves the VM, which stays paused.
async fn save_frozen(
    node: &DaemonState,
    spec: &PodSpec,
    live: &RunningVm,
    plan: &Plan,
    ids: &[ContainerId],
) -> Result<Captured, PodError> {
    let inputs = node.templates.inputs(plan.kind).await.map_err(|error| PodError::Failed {
        subject: format!("pod {}", spec.id),
        reason: format!("cannot tell what its VM depends on: {}", chain(&error)),
    })?;
    let began = Instant::now();
    for id in ids {
        live.agent.pause_container(id).await?;
    }
    reach(format_args!("the containers of a pod that is saved are frozen"), &plan.draft.dir).await;
    let made_at_ns = now_ns();
    let volumes = plan.volumes.iter().filter_map(|needed| match &needed.content {
        Content::Disk { dir } => {
            Some(DiskRecord { serial: needed.id.to_string(), path: dir.clone(), read_only: false })
        }
        _ => None,
    });
    let disks = plan.containers.iter().flat_map(|container| &container.disks).chain(&plan.spare).cloned();
    let disks: Vec<DiskRecord> = disks.chain(volumes).collect();
    let to = Destination { dir: plan.draft.dir.clone(), memory_mib: plan.kind.shape.memory_mib };
    let open = live.vm.checkpoint(&to, &disks).await?;
    reach(format_args!("the VM of a pod is saved"), &plan.draft.dir).await;
    let recorded = open
        .iter()
        .map(|disk| SavedDisk { serial: disk.record.serial.clone(), read_only: disk.record.read_only });
    let disks = recorded.collect();
    let (images, written): (Vec<_>, Vec<_>) = open.into_iter().partition(|disk| disk.record.read_only);
    let dir = plan.draft.dir.clone();
    let copied = tokio::task::spawn_blocking(move || {
        written.iter().try_for_each(|disk| copy(disk, &dir)).map_err(|source| (dir, source))
    });
    let copied = copied.await.unwrap_or_else(|panic| Err((plan.draft.dir.clone(), io::Error::other(panic))));
    copied.map_err(|(path, source)| PodError::Path {
        pod: spec.id.clone(),
        action: "copy its disks to",
        path,
        source,
    })?;
    reach(format_args!("the disks of a pod are saved"), &plan.draft.dir).await;
    let manifest = Manifest {
        name: plan.draft.name.clone(),
        namespace: plan.draft.namespace.clone(),
        pod: spec.id.clone(),
        pod_name: spec.name.clone(),
        made_at_ns,
        paused_ns: 0,
        inputs,
        link_key: plan.link_key.clone(),
        shared_pids: spec.shared_pids,
        disks,
        has_spare: plan.spare.is_some(),
        containers: plan.containers.clone(),
        volumes: plan
            .volumes
            .iter()
            .filter_map(|needed| Some((needed.id.clone(), kind(&needed.content)?)))
            .collect(),
        files: Default::default(),
    };
    Ok(Captured { manifest, images, began })
}

/// Lets a pod that was being saved go on.
pub async fn go_on(live: &RunningVm, containers: &[ContainerId]) -> Result<(), PodError> {
    live.vm.resume().await?;
    for container in containers {
        match live.agent.resume_container(container).await {
            // The container has ended.
            Err(error) if matches!(error.code(), Code::NotFound | Code::FailedPrecondition) => {}
            resumed => resumed?,
        }
    }
    Ok(())
}

/// Lets the VM of a pod go on that an earlier worker was saving when it died. Returns the containers that are frozen.
pub async fn resume_saved(
    node: &DaemonState,
    spec: &PodSpec,
    vm: &dyn Vm,
) -> Result<Option<Vec<ContainerId>>, PodError> {
    let frozen: Option<Vec<ContainerId>> = node.front.peek(&front::key(SAVING, &spec.id, None));
    if frozen.is_some() {
        tracing::info!(pod = %spec.id, "an earlier worker died while it saved the pod; the pod goes on");
        vm.resume().await?;
    }
    Ok(frozen)
}

fn copy(disk: &OpenDisk, dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let path = dir.join(disk_file(&disk.record.serial));
    fail(format_args!("a disk is saved: {}", path.display()))?;
    let to = fs::File::options().write(true).create_new(true).mode(0o600).open(path)?;
    copy_data(&disk.file, &to)
}

/// Keeps the file of an image, by a further name if it is still the file at its path: a cache may remove it.
fn keep_image(disk: &OpenDisk, dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let path = dir.join(disk_file(&disk.record.serial));
    fail(format_args!("an image is kept: {}", path.display()))?;
    let open = disk.file.metadata()?;
    if fs::hard_link(&disk.record.path, &path).is_ok() {
        let linked = fs::metadata(&path)?;
        if (linked.dev(), linked.ino()) == (open.dev(), open.ino()) {
            return Ok(());
        }
        fs::remove_file(&path)?;
    }
    copy(disk, dir)
}

/// Returns why a pod cannot be restored from a checkpoint of `manifest`; `None`: it can.
pub fn misfit(manifest: &Manifest, spec: &PodSpec, shape: Shape) -> Option<String> {
    let was = manifest.shape();
    if was != shape {
        return Some(format!(
            "it was made of a pod with {was} and {} network interfaces, and this pod has {shape} and {}: give it the \
             same requests and limits",
            was.nics, shape.nics
        ));
    }
    if spec.huge_pages {
        return Some(
            "the memory of copies is not in huge pages: leave io.sandboxer.huge-pages out".to_owned(),
        );
    }
    (manifest.shared_pids != spec.shared_pids)
        .then(|| "its containers did not see each other's processes, or now would not".to_owned())
}

/// Returns why a pod's agent cannot be saved.
pub fn is_too_old(live: &RunningVm) -> bool {
    !live.agent.knows(&newer::ADOPTION)
}
