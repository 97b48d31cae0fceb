//! The volumes of one pod in its guest. Each is created once, by the first container that needs it, and stays for the
//! lifetime of the VM.
//!
//! ```text
//! (nothing) ──provide──▶ made ──the host's files change──▶ made, with other files
//! ```

use std::{
    collections::{BTreeMap, HashSet},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future;
use protobuf::Message;
use sandboxer_base::chain;
use sandboxer_host::{
    helper::{Helpers, TreeRead},
    volume::{Change, Content, Needed, VolumeError, VolumeStore, Watch},
};
use sandboxer_protocol::{
    agent::{self as wire, put_volume_request::Content as WireContent},
    id::Id,
};
use sandboxer_vmm::{DiskFile, DiskLimits, DiskSpec};
use sha2::{Digest, Sha256};
use tokio_util::task::AbortOnDropHandle;

use super::spare::Spare;
use crate::{error::PodError, pod::running_vm::RunningVm, share::Shares};

/// Delay before changed files are sent again after a failure.
const AGAIN: Duration = Duration::from_secs(10);

/// The volumes of a pod.
#[derive(Debug)]
pub struct Volumes {
    store: Arc<VolumeStore>,
    /// The live shares of the guest.
    pub shares: Shares,
    /// A scratch disk that no container uses yet.
    pub spare: Spare,
    /// Whether the name of the first container's image is still free.
    is_first_image_free: AtomicBool,
    /// Size of new disks, if the pod requested one.
    disk_bytes: Option<u64>,
    /// Volumes that an earlier daemon may have left half-created.
    earlier: Option<Earlier>,
    // Held for a lookup, never across an await.
    all: Mutex<BTreeMap<Id, Arc<Volume>>>,
}

/// Volumes that the guest has from an earlier daemon.
#[derive(Debug)]
struct Earlier {
    /// Volumes that the agent knows.
    made: HashSet<String>,
}

#[derive(Debug)]
struct Volume {
    needed: Needed,
    /// Whether the guest has the volume.
    is_made: AtomicBool,
    // Held across awaits on purpose: containers that start at the same time wait for the one that creates it.
    files: tokio::sync::Mutex<Files>,
}

/// Keeps a volume of files up to date in the guest.
#[derive(Debug, Default)]
struct Files {
    /// Hash of the files that were sent last.
    sent: Option<[u8; 32]>,
    /// Stamp of the files' directory at that time, if it is conclusive.
    stamp: Option<u64>,
    /// The task that sends the files again on changes. Held for its drop.
    follower: Option<AbortOnDropHandle<()>>,
}

impl Volume {
    fn new(needed: Needed, is_made: bool) -> Arc<Self> {
        Arc::new(Self { needed, is_made: AtomicBool::new(is_made), files: tokio::sync::Mutex::default() })
    }
}

impl Volumes {
    /// Creates an empty set of volumes.
    pub fn new(store: Arc<VolumeStore>, shares: Shares, disk_bytes: Option<u64>) -> Self {
        Self {
            store,
            shares,
            spare: Spare::default(),
            is_first_image_free: true.into(),
            disk_bytes,
            earlier: None,
            all: Mutex::default(),
        }
    }

    /// Returns the volumes of an earlier daemon; the agent knows `made`. See [`Volumes::go_on`].
    pub fn found(
        store: Arc<VolumeStore>,
        shares: Shares,
        disk_bytes: Option<u64>,
        recorded: Vec<Needed>,
        made: Vec<String>,
    ) -> Self {
        let made: HashSet<String> = made.into_iter().collect();
        let all = recorded.into_iter().map(|needed| {
            // The agent does not know block devices.
            let is_made =
                made.contains(needed.id.as_str()) || matches!(needed.content, Content::Device { .. });
            (needed.id.clone(), Volume::new(needed, is_made))
        });
        let (all, earlier) = (Mutex::new(all.collect()), Some(Earlier { made }));
        // An earlier scratch disk is dropped, and the first container may have existed.
        let (spare, is_first_image_free) = (Spare::default(), false.into());
        Self { all, store, shares, spare, is_first_image_free, disk_bytes, earlier }
    }

    /// Returns whether a container may name its image [`sandboxer_vmm::FIRST_IMAGE`]: the first caller may.
    pub fn take_first_image(&self) -> bool {
        self.is_first_image_free.swap(false, Ordering::Relaxed)
    }

    /// Resumes updates of an earlier daemon's volumes.
    pub async fn go_on(&self, live: &RunningVm) {
        let volumes: Vec<_> = self.volumes().values().cloned().collect();
        for volume in volumes {
            if !matches!(volume.needed.content, Content::Files { follow: true, .. }) {
                continue;
            }
            if let Err(error) = self.make(live, &volume).await {
                let id = &volume.needed.id;
                tracing::warn!(volume = %id, error = chain(&error), "cannot update a volume any more");
            }
        }
    }

    /// Returns the records of the volumes for the journal.
    pub fn record(&self) -> Vec<Needed> {
        let all = self.volumes();
        let made = all.values().filter(|volume| volume.is_made.load(Ordering::Acquire));
        made.map(|volume| volume.needed.clone()).collect()
    }

    /// Provides all volumes that a container needs, in parallel. Created volumes stay even if others fail: they belong
    /// to the pod.
    pub async fn provide(&self, live: &RunningVm, needed: &[Needed]) -> Result<(), PodError> {
        let volumes: Vec<_> = needed.iter().map(|needed| self.find(needed)).collect();
        let made = future::join_all(volumes.iter().map(|volume| self.make(live, volume))).await;
        made.into_iter().collect()
    }

    /// Provides volumes that a restored guest has. Their content in memory and on disks goes on; files are those of this
    /// pod's host paths.
    pub async fn go_on_with(&self, live: &RunningVm, needed: &[Needed]) -> Result<(), PodError> {
        for needed in needed {
            let is_made = !matches!(needed.content, Content::Files { .. });
            self.volumes().entry(needed.id.clone()).or_insert_with(|| Volume::new(needed.clone(), is_made));
        }
        self.provide(live, needed).await
    }

    fn volumes(&self) -> std::sync::MutexGuard<'_, BTreeMap<Id, Arc<Volume>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, needed: &Needed) -> Arc<Volume> {
        self.volumes().entry(needed.id.clone()).or_insert_with(|| Volume::new(needed.clone(), false)).clone()
    }

    async fn make(&self, live: &RunningVm, volume: &Arc<Volume>) -> Result<(), PodError> {
        let Needed { id, content } = &volume.needed;
        let helpers = self.shares.helpers();
        let mut files = volume.files.lock().await;
        let is_made = volume.is_made.load(Ordering::Acquire) || self.was_made(id);
        match content {
            Content::Files { dir, follow } => {
                if *follow && files.follower.is_none() {
                    // Before the first reading, so that no change is missed.
                    let watch = self.store.watch(helpers, self.shares.pod(), dir).await?;
                    let (helpers, volume) = (helpers.clone(), Arc::downgrade(volume));
                    let follower = follow_changes(helpers, live.clone(), volume, watch);
                    files.follower = Some(AbortOnDropHandle::new(tokio::spawn(follower)));
                }
                send(helpers, live, id, dir, &mut files, Change::Seen).await?;
            }
            _ if is_made => {}
            Content::Memory { dir, bytes } => {
                let memory = wire::TmpfsUpper { size_bytes: *bytes, ..Default::default() };
                put(helpers, live, id, dir, WireContent::Memory(memory)).await?;
            }
            Content::Disk { dir } => {
                let file = self.store.disk(helpers, self.shares.pod(), dir, self.disk_bytes).await?;
                self.attach(live, id, file, false).await?;
                let (serial, fstype) = (id.to_string(), "ext4".to_owned());
                let disk = wire::Disk { serial, fstype, read_only: false, ..Default::default() };
                let mounted = put(helpers, live, id, dir, WireContent::Disk(disk)).await;
                if mounted.is_err()
                    && let Err(error) = live.vm.detach_disk(id.as_str()).await
                {
                    tracing::error!(volume = %id, error = chain(&error), "cannot detach a volume's disk");
                }
                mounted?;
            }
            Content::Device { path, read_only } => {
                // Opened by a helper: a device may hang, and only its own pod may wait for it.
                let device = helpers.device(self.shares.pod(), path, *read_only).await;
                self.attach(live, id, device.map_err(VolumeError::from)?, *read_only).await?;
            }
        }
        volume.is_made.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns whether an earlier daemon created the volume without recording it.
    fn was_made(&self, id: &Id) -> bool {
        self.earlier.as_ref().is_some_and(|earlier| earlier.made.contains(id.as_str()))
    }

    async fn attach(
        &self,
        live: &RunningVm,
        id: &Id,
        file: DiskFile,
        read_only: bool,
    ) -> Result<(), PodError> {
        let disk = DiskSpec { serial: id.to_string(), file, read_only, limits: DiskLimits::default() };
        if self.earlier.is_some() {
            // It may exist half-created, from a start that an earlier daemon did not finish.
            live.vm.detach_disk(&disk.serial).await?;
        }
        Ok(live.attach_disk(&disk).await?)
    }
}

/// Reads a volume's files and sends them, unless they were sent already or are gone: kubelet has begun to remove the
/// pod, and the last files stay in the guest. After a change that may have been missed, the files are not read if their
/// directory is unchanged.
async fn send(
    helpers: &Helpers,
    live: &RunningVm,
    id: &Id,
    dir: &Path,
    files: &mut Files,
    after: Change,
) -> Result<(), PodError> {
    let pod = live.vm.record().pod;
    let known = files.stamp.filter(|_| after == Change::Lost);
    let (tree, stamp) = match helpers.read_tree(&pod, dir, known).await.map_err(VolumeError::from)? {
        TreeRead::Gone | TreeRead::Same => return Ok(()),
        TreeRead::Tree { tree, stamp } => (tree, stamp),
    };
    let encoded = tree.write_to_bytes().map_err(VolumeError::Encode)?;
    let hash = Sha256::digest(&encoded).into();
    if files.sent != Some(hash) {
        put(helpers, live, id, dir, WireContent::Tree(tree)).await?;
        files.sent = Some(hash);
    }
    files.stamp = stamp;
    Ok(())
}

async fn put(
    helpers: &Helpers,
    live: &RunningVm,
    id: &Id,
    dir: &Path,
    content: WireContent,
) -> Result<(), PodError> {
    let owner = helpers.owner(&live.vm.record().pod, dir).await.map_err(VolumeError::from)?;
    let request = wire::PutVolumeRequest {
        volume_id: id.to_string(),
        owner: Some(owner).into(),
        content: Some(content),
        ..Default::default()
    };
    Ok(live.agent.put_volume(request).await?)
}

/// Sends a volume's files whenever they change, until they are gone.
async fn follow_changes(helpers: Helpers, live: RunningVm, volume: Weak<Volume>, mut watch: Watch) {
    loop {
        let change = watch.changed().await;
        while let Err(error) = refresh(&helpers, &live, &volume, change).await {
            tracing::warn!(error = chain(&error), "cannot update a volume in the guest");
            tokio::time::sleep(AGAIN).await;
        }
    }
}

async fn refresh(
    helpers: &Helpers,
    live: &RunningVm,
    volume: &Weak<Volume>,
    change: Change,
) -> Result<(), PodError> {
    let Some(volume) = volume.upgrade() else { return Ok(()) };
    let Content::Files { dir, .. } = &volume.needed.content else { return Ok(()) };
    send(helpers, live, &volume.needed.id, dir, &mut *volume.files.lock().await, change).await
}
