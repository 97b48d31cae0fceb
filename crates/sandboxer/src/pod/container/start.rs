//! Creates containers, starts processes, and waits for their exit.
//!
//! None of this changes the pod's state: the pod's task starts the work and takes the results.

use std::{
    mem,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future;
use sandboxer_base::{
    chain,
    clock::{now_ns, plausible},
    failpoint::reach,
};
use sandboxer_guest::GuestError;
use sandboxer_host::{
    helper::Helpers,
    rootfs::{Layer, Lease, RootfsPlan, RootfsStore, Scratch, Writable},
    volume::Needed,
};
use sandboxer_protocol::{
    agent::{self as wire, CreateContainerRequest, CreateContainerResponse},
    id::{ContainerId, ExecId, SandboxId},
    stage::Stage,
};
use sandboxer_vmm::{DiskLimits, DiskRecord, DiskSpec, FIRST_IMAGE};
use serde::{Deserialize, Serialize};
use tokio::sync::SemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::{
    Exit, KILLED, NewContainer, StdioPaths,
    io::{Io, Subject},
    spec::{self, GuestSpec},
};
use crate::{
    checkpoint::SavedContainer,
    error::PodError,
    front::{EntryHandle, Front},
    pod::{
        checkpoint::{self, Adopted, Restored},
        limits::ContainerLimits,
        running_vm::RunningVm,
        spare,
        spec::PodSpec,
        stages::Stages,
        undo::Undo,
        volumes::Volumes,
    },
    traces::{Ended, SpanContext},
};

/// A created container, which waits for its start.
#[derive(Debug)]
pub struct Created {
    /// PID of the container's init in the guest.
    pub pid: u32,
    /// The streams of the container's init.
    pub io: Io,
    /// Disks attached for the container.
    pub disks: Vec<DiskRecord>,
    /// Leases that prevent the eviction of the disks' images.
    pub leases: Vec<Lease>,
    /// Path of the container's termination message on the host.
    pub message: Option<PathBuf>,
    /// CPUs of the host that the container may use, as a list; `None`: all.
    pub cpus: Option<String>,
    /// Memory nodes of the host that the container may use, as a list; `None`: all.
    pub mems: Option<String>,
    /// The container's limits.
    pub limits: ContainerLimits,
    /// The intent that the front stores until the container is recorded.
    pub intent: EntryHandle,
    /// The saved container that goes on as this one.
    pub adopted: Option<Adopted>,
}

/// The intent to create a container, for the next worker if this one dies half-way.
#[derive(Debug, Serialize, Deserialize)]
pub struct Intent {
    /// The container's pod.
    pub pod: SandboxId,
    /// Serial numbers of the disks that may be attached for the container.
    pub disks: Vec<String>,
    /// The saved container that may go on as this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<ContainerId>,
}

/// Kind of the front's entries that hold an [`Intent`].
pub const INTENT: &str = "intent";

/// Host-side resources for containers of a pod.
#[derive(Debug)]
pub struct CreateContext<'a> {
    /// The front, which stores what the next worker needs.
    pub front: &'a Arc<Front>,
    /// The store of snapshots' disk images.
    pub rootfs: &'a Arc<RootfsStore>,
    /// The pod's volumes.
    pub volumes: &'a Volumes,
    /// The record of the container's stages.
    pub stages: &'a Stages,
    /// The container's admission permit, held while its disks are built.
    pub place: Option<SemaphorePermit<'a>>,
    /// Cancelled when the container is no longer wanted: its pod is stopped, or its deletion was requested.
    pub cancel: &'a CancellationToken,
}

/// Creates a container with the spec `guest_spec`, see [`spec::read`], up to the point where its init waits. A failure
/// leaves nothing behind.
pub async fn create(
    pod: &PodSpec,
    live: &RunningVm,
    means: CreateContext<'_>,
    new: &NewContainer,
    guest_spec: GuestSpec,
) -> Result<Created, PodError> {
    let mut undo = Undo::default();
    let created = try_create(pod, live, means, new, guest_spec, &mut undo).await;
    if created.is_ok() {
        undo.forget();
    } else if let Err(left) = undo.run().await {
        tracing::error!(pod = %pod.id, container = %new.id, left, "cannot undo a container's failed start completely");
    }
    created
}

async fn try_create(
    pod: &PodSpec,
    live: &RunningVm,
    CreateContext { front, rootfs, volumes, stages, place, cancel }: CreateContext<'_>,
    new: &NewContainer,
    guest_spec: GuestSpec,
    undo: &mut Undo,
) -> Result<Created, PodError> {
    let cancelled = || PodError::Cancelled(pod.id.clone());
    let not_cancelled = || if cancel.is_cancelled() { Err(cancelled()) } else { Ok(()) };
    let subject = Subject { container: new.id.clone(), exec: None };
    let io = Io::open(front, &pod.id, &subject, &new.stdio)?;
    if let Some(handle) = io.front_handle() {
        undo.push("let go of its streams", async move { released(handle) });
    }

    let prepared = stages.run(Stage::Rootfs, async {
        if guest_spec.root.is_some() {
            return Ok(None);
        }
        let planned = rootfs.prepare(&pod.id, &new.id, &new.mounts);
        let mut plan = cancel.run_until_cancelled(planned).await.ok_or_else(cancelled)??;
        if let Some(image) = plan.lower.first_mut()
            && volumes.take_first_image()
        {
            FIRST_IMAGE.clone_into(&mut image.disk.serial);
        }
        let scratch = provide_scratch(pod, rootfs, volumes, new, &guest_spec, &mut plan).await?;
        // The rest depends on this guest's speed, so the permit is released: other pods must not wait for it.
        drop(place);
        Ok::<_, PodError>(Some((plan, scratch)))
    });
    let shared = async {
        match guest_spec.shares.as_slice() {
            [] => Ok(()),
            shares => {
                let given = volumes.shares.give(live.vm.as_ref(), &live.agent, shares);
                stages.run(Stage::Shares, given).await
            }
        }
    };
    // Await both, as below.
    let (prepared, shared) = future::join(prepared, shared).await;
    let prepared = prepared?;
    shared?;
    let (mut leases, mut made) = (Vec::new(), None);
    let (rootfs, disks, opened) = match prepared {
        Some((mut plan, scratch)) => {
            leases = mem::take(&mut plan.leases);
            made = scratch;
            rootfs_message(plan, guest_spec.rootfs_bytes)
        }
        None => (shared_root(guest_spec.root.as_deref()), Vec::new(), Vec::new()),
    };

    let intent = note(front, pod, &subject, &disks, None)?;
    let (guest, id, serials, noted) = (live.clone(), new.id.clone(), serials(&disks), intent.clone());
    undo.push("remove it from its guest", async move {
        // The next worker finds the intent and undoes what is left there.
        delete(&guest, &id, &serials).await.map(|()| noted.release())
    });
    not_cancelled()?;

    stages.run(Stage::Disks, attach(live, &opened, volumes, &guest_spec.needed)).await?;
    // The VMM has the files open, so they can be closed here and unlinked.
    drop((made, opened));

    let pid = stages
        .run(Stage::ContainerCreate, async {
            not_cancelled()?;
            let began = Instant::now();
            let created = live
                .agent
                .create_container(CreateContainerRequest {
                    container_id: new.id.to_string(),
                    spec_json: guest_spec.json,
                    rootfs: Some(rootfs).into(),
                    stdio: Some(stdio_message(&new.stdio)).into(),
                    files: guest_spec.files,
                    processes: guest_spec.processes,
                    block_devices: guest_spec.devices,
                    ..Default::default()
                })
                .await?;
            record_agent(began, &created);
            Ok::<_, PodError>(created.pid)
        })
        .await?;
    Ok(Created {
        pid,
        io,
        disks,
        leases,
        message: guest_spec.message,
        cpus: guest_spec.cpus,
        mems: guest_spec.mems,
        limits: guest_spec.limits,
        intent,
        adopted: None,
    })
}

/// Makes a saved container of a restored pod go on as the container `new`, once that is started.
///
/// The saved one has its files, its mounts and its processes; of the new one it gets the streams, the limits, and the
/// content of the pod's own files.
pub async fn adopt(
    pod: &PodSpec,
    live: &RunningVm,
    (front, volumes): (&Arc<Front>, &Volumes),
    new: &NewContainer,
    mut guest_spec: GuestSpec,
    (restored, saved): (&Restored, &SavedContainer),
) -> Result<Created, PodError> {
    let name = &saved.identity.name;
    if !guest_spec.devices.is_empty() || !guest_spec.shares.is_empty() {
        let reason = format!("container {name:?} has devices or live shares, and had none when it was saved");
        return Err(restored.refused(reason));
    }
    let renamed = restored.renamed_by(saved, &guest_spec)?;
    checkpoint::rename(&renamed, &mut guest_spec)
        .map_err(|error| restored.refused(format!("cannot change a mount of container {name:?}: {error}")))?;
    let wire::Stdio { stdin, stdout, stderr, terminal, .. } = stdio_message(&new.stdio);
    let [had_stdin, had_stdout, had_stderr, had_terminal] = saved.stdio;
    if [stdin, stdout, terminal] != [had_stdin, had_stdout, had_terminal]
        || (!terminal && stderr != had_stderr)
    {
        let reason = format!(
            "container {name:?} has other streams than when it was saved: stdin and tty must be the same"
        );
        return Err(restored.refused(reason));
    }
    let resources = serde_json::from_slice(&guest_spec.json).ok().and_then(|spec: serde_json::Value| {
        let mut resources = spec.get("linux")?.get("resources")?.as_object()?.clone();
        // Which devices it may use was set when it was created.
        resources.remove("devices");
        serde_json::to_vec(&resources).ok()
    });
    let subject = Subject { container: new.id.clone(), exec: None };
    let io = Io::open(front, &pod.id, &subject, &new.stdio)?;
    let adopting = async {
        // Its disks are not among them: they are the VM's from its start.
        let intent = note(front, pod, &subject, &[], Some(&saved.id))?;
        let adopted = async {
            volumes.go_on_with(live, &guest_spec.needed).await?;
            if let Some(resources) = resources {
                live.agent.update_container(&saved.id, resources).await?;
            }
            let request = wire::AdoptContainerRequest {
                container_id: new.id.to_string(),
                of: saved.id.to_string(),
                files: guest_spec.files,
                signal: pod.restore_signal.unwrap_or_default(),
                ..Default::default()
            };
            reach(format_args!("a saved container is about to be adopted"), &new.bundle).await;
            let pid = live.agent.adopt_container(request).await?;
            reach(format_args!("a saved container is adopted"), &new.bundle).await;
            Ok::<_, PodError>(pid)
        };
        match adopted.await {
            Ok(pid) => Ok((pid, intent)),
            Err(error) => {
                intent.release();
                Err(error)
            }
        }
    };
    match adopting.await {
        Ok((pid, intent)) => Ok(Created {
            pid,
            io,
            disks: saved.disks.clone(),
            leases: Vec::new(),
            message: guest_spec.message,
            cpus: guest_spec.cpus,
            mems: guest_spec.mems,
            limits: guest_spec.limits,
            intent,
            adopted: Some(Adopted { name: name.clone(), renamed }),
        }),
        Err(error) => {
            io.let_go();
            Err(error)
        }
    }
}

/// Adds the agent's steps to the trace, if there is one. The time that a message takes each way is unknown; half of the
/// rest is assumed.
fn record_agent(began: Instant, created: &CreateContainerResponse) {
    let took = began.elapsed();
    let bounded = |ns: u64, most: Duration| Duration::from_nanos(ns).min(most);
    let disks = bounded(created.disks_ns, took);
    let runtime = bounded(created.runtime_ns, took - disks);
    let began = began + (took - disks - runtime) / 2;
    let stage = SpanContext::current();
    stage.agent_step(&Ended { name: "find_disks", began, took: disks, failure: "" });
    stage.agent_step(&Ended { name: "create", began: began + disks, took: runtime, failure: "" });
}

/// Stores at the front the serial numbers of the disks that the container is about to get.
fn note(
    front: &Arc<Front>,
    pod: &PodSpec,
    subject: &Subject,
    disks: &[DiskRecord],
    saved: Option<&ContainerId>,
) -> Result<EntryHandle, PodError> {
    let intent = Intent { pod: pod.id.clone(), disks: serials(disks), saved: saved.cloned() };
    front.keep(&subject.key(INTENT), &intent, &[]).map_err(|source| PodError::Front {
        pod: pod.id.clone(),
        what: subject.key(INTENT).into(),
        source,
    })
}

/// Attaches the disks of a container that are not attached yet, and its volumes' disks.
async fn attach(
    live: &RunningVm,
    new: &[DiskSpec],
    volumes: &Volumes,
    needed: &[Needed],
) -> Result<(), PodError> {
    let rootfs = future::try_join_all(new.iter().map(|disk| live.attach_disk(disk)));
    // Await both: volumes belong to the pod, and none of them may be left half-created.
    let (rootfs, volumes) = future::join(rootfs, volumes.provide(live, needed)).await;
    rootfs.map_err(PodError::from).and(volumes)
}

/// Provides a disk for the container's writes, if its snapshot has none: the guest's spare disk, or a new one, whose
/// file is returned. A read-only root file system needs none.
async fn provide_scratch(
    pod: &PodSpec,
    rootfs: &RootfsStore,
    volumes: &Volumes,
    new: &NewContainer,
    guest_spec: &GuestSpec,
    plan: &mut RootfsPlan,
) -> Result<Option<Scratch>, PodError> {
    if !matches!(plan.writable, Writable::Tmpfs { .. }) || guest_spec.is_read_only {
        return Ok(None);
    }
    let requested_bytes = guest_spec.rootfs_bytes;
    let spare = if requested_bytes.is_none() { volumes.spare.take() } else { None };
    if let Some(spare) = spare {
        plan.writable = Writable::Spare(spare);
        return Ok(None);
    }
    let scratch = rootfs.scratch(&pod.id, &new.id, requested_bytes).await?;
    if let Some(scratch) = &scratch {
        let (serial, file) = (plan.next_serial.clone(), scratch.file());
        plan.writable =
            Writable::Scratch(DiskSpec { serial, file, read_only: false, limits: DiskLimits::default() });
    }
    Ok(scratch)
}

fn released(handle: EntryHandle) -> Result<(), std::convert::Infallible> {
    handle.release();
    Ok(())
}

/// Removes what [`create`] created from the guest: the container, and then its disks, by serial number. Disks of a
/// container that could not be removed stay, because it may use them.
pub async fn delete(live: &RunningVm, container: &ContainerId, disks: &[String]) -> Result<(), PodError> {
    live.agent.delete_container(container).await?;
    let unplugged = future::join_all(disks.iter().map(|serial| live.vm.detach_disk(serial))).await;
    unplugged.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(())
}

/// Returns the disks' serial numbers.
pub fn serials(disks: &[DiskRecord]) -> Vec<String> {
    disks.iter().map(|disk| disk.serial.clone()).collect()
}

/// Starts a created process. Returns its PID in the guest.
pub async fn release(live: &RunningVm, subject: &Subject) -> Result<u32, PodError> {
    Ok(live.agent.start_process(&subject.container, subject.exec.as_ref()).await?)
}

/// Registers an exec; [`release`] starts it.
pub async fn create_exec(
    pod: &SandboxId,
    live: &RunningVm,
    front: &Arc<Front>,
    container: &ContainerId,
    exec: &ExecId,
    process: &[u8],
    stdio: &StdioPaths,
) -> Result<Io, PodError> {
    let process_json = spec::exec(container, process)?;
    let subject = Subject { container: container.clone(), exec: Some(exec.clone()) };
    let io = Io::open(front, pod, &subject, stdio)?;
    let registered = live
        .agent
        .create_exec(wire::CreateExecRequest {
            container_id: container.to_string(),
            exec_id: exec.to_string(),
            process_json,
            stdio: Some(stdio_message(stdio)).into(),
            ..Default::default()
        })
        .await;
    match registered {
        Ok(()) => Ok(io),
        Err(error) => {
            io.let_go();
            Err(error.into())
        }
    }
}

/// Exit reason if the guest's OOM killer killed a process in the container.
pub const OUT_OF_MEMORY: &str = "killed for using too much memory";

/// Waits for a process's exit; writes its termination message to the host's file, if it has one.
///
/// The process existed at `since`, ns since 1970, or later. Never returns if the guest does not respond: the VM's exit
/// is noticed elsewhere.
pub async fn follow(
    live: &RunningVm,
    subject: &Subject,
    since: u64,
    message: Option<PathBuf>,
    helpers: &Helpers,
) -> Exit {
    match live.agent.wait_process(&subject.container, subject.exec.as_ref()).await {
        Ok(exit) => {
            if let Some(path) = message {
                let pod = live.vm.record().pod;
                // Boxed: this waits for as long as the process runs.
                if let Err(error) = Box::pin(helpers.write_message(&pod, &path, exit.message)).await {
                    tracing::warn!(container = %subject.container, ?path, error = chain(&error), "cannot write the termination message");
                }
            }
            // An earlier agent reports this for each exit after the OOM killer was active.
            let out_of_memory = exit.oom_killed && exit.code == KILLED;
            let reason = if out_of_memory { OUT_OF_MEMORY } else { "" };
            Exit { code: exit.code, at_ns: plausible(exit.at_ns, since), reason: reason.to_owned() }
        }
        // A process that the agent no longer knows has exited unnoticed.
        Err(error) if error.code() == sandboxer_base::Code::NotFound => {
            Exit { code: KILLED, at_ns: now_ns(), reason: "its end was not seen".to_owned() }
        }
        Err(error @ GuestError::Refused { .. }) => {
            let reason = chain(&error);
            tracing::error!(container = %subject.container, reason, "cannot wait for the end of a process; reporting it as killed");
            Exit { code: KILLED, at_ns: now_ns(), reason }
        }
        // The session has ended for good: the end of the VM is the process's.
        Err(error) => {
            tracing::debug!(container = %subject.container, %error, "a process's end cannot be waited for");
            future::pending().await
        }
    }
}

fn stdio_message(paths: &StdioPaths) -> wire::Stdio {
    wire::Stdio {
        stdin: !paths.stdin.as_os_str().is_empty(),
        stdout: !paths.stdout.as_os_str().is_empty(),
        stderr: !paths.stderr.as_os_str().is_empty() && !paths.terminal,
        terminal: paths.terminal,
        ..Default::default()
    }
}

/// Returns the root file system that is the share at this path in the guest.
fn shared_root(share: Option<&Path>) -> wire::Rootfs {
    let mut rootfs = wire::Rootfs::new();
    rootfs.set_share(share.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default());
    rootfs
}

/// Converts the plan for the agent, with `bytes` of writable memory if requested. Also returns all disks of the plan,
/// and the disks that the guest does not have yet.
fn rootfs_message(plan: RootfsPlan, bytes: Option<u64>) -> (wire::Rootfs, Vec<DiskRecord>, Vec<DiskSpec>) {
    let mut rootfs = wire::Rootfs::new();
    let (mut disks, mut new) = (Vec::new(), Vec::new());
    let mut message = |layer: Layer| {
        let Layer { disk, fstype } = layer;
        let (serial, fstype) = (disk.serial.clone(), fstype.to_string());
        let message = wire::Disk { serial, fstype, read_only: disk.read_only, ..Default::default() };
        disks.push(disk.record());
        new.push(disk);
        message
    };
    rootfs.lower = plan.lower.into_iter().map(&mut message).collect();
    match plan.writable {
        Writable::Overlay(layer) => rootfs.set_overlay(message(layer)),
        Writable::Whole(layer) => rootfs.set_whole(message(layer)),
        Writable::Tmpfs { bytes: usual } => {
            let size_bytes = bytes.unwrap_or(usual);
            rootfs.set_tmpfs(wire::TmpfsUpper { size_bytes, ..Default::default() });
        }
        Writable::Scratch(disk) => {
            rootfs.set_overlay(spare::message(&disk.serial));
            disks.push(disk.record());
            new.push(disk);
        }
        Writable::Spare(disk) => {
            rootfs.set_overlay(spare::message(&disk.serial));
            disks.push(disk);
        }
    }
    (rootfs, disks, new)
}
