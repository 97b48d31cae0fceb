//! Requests of the admin service about quarantined records.

use sandboxer_base::chain;
use sandboxer_protocol::{
    admin::{ListQuarantineResponse, Quarantined, QuarantinedProcess, ShowQuarantinedResponse},
    id::SandboxId,
};
use tonic::Status;

use crate::pod::{
    DaemonState,
    quarantine::{Entry, Quarantine, QuarantineError},
};

/// Lists the quarantine.
pub async fn list(node: &DaemonState) -> Result<ListQuarantineResponse, Status> {
    let listed = blocking(node, |quarantine| quarantine.list()).await?;
    Ok(ListQuarantineResponse {
        entries: listed.entries.into_iter().map(message).collect(),
        left_off: listed.left_off,
        bytes: listed.bytes,
    })
}

/// Returns the details of one entry.
pub async fn show(node: &DaemonState, name: String) -> Result<ShowQuarantinedResponse, Status> {
    let (entry, report, record) = blocking(node, move |quarantine| quarantine.show(&name)).await?;
    Ok(ShowQuarantinedResponse { entry: Some(message(entry)), report, record })
}

/// Moves a record back to the journal, for the next daemon.
pub async fn release(node: &DaemonState, name: String) -> Result<Quarantined, Status> {
    blocking(node, move |quarantine| quarantine.release(&name)).await.map(message)
}

/// Kills a quarantined pod and removes its files.
pub async fn destroy(node: &DaemonState, name: String) -> Result<Quarantined, Status> {
    // A record of the same id may have been restored by hand since; then the pod is in use.
    let known = node.registry.pods().iter().map(|pod| pod.id().clone()).collect();
    blocking(node, move |quarantine| quarantine.destroy(&name, &known)).await.map(message)
}

/// Returns the error for requests about an unknown pod whose record is in quarantine and whose VM runs. "Not found"
/// would let the caller start the pod again, and both VMs would write to the same volumes.
pub async fn held(node: &DaemonState, pod: &SandboxId) -> Result<Option<Status>, Status> {
    let of = pod.clone();
    let running = blocking(node, move |quarantine| quarantine.running(&of)).await?;
    Ok(running.map(|(entry, pids)| {
        Status::unavailable(format!(
            "pod {pod} runs as processes {pids:?}, and its record cannot be used: see `sandboxer-cli quarantine show {entry}`, start \
             the sandboxer that wrote it, or stop the pod, which kills these processes"
        ))
    }))
}

/// Kills the VMM of an unknown pod whose record is in quarantine. Returns `false` if there is none.
pub async fn kill(node: &DaemonState, pod: &SandboxId) -> Result<bool, Status> {
    let of = pod.clone();
    blocking(node, move |quarantine| quarantine.kill(&of)).await
}

async fn blocking<T: Send + 'static>(
    node: &DaemonState,
    work: impl FnOnce(Quarantine) -> Result<T, QuarantineError> + Send + 'static,
) -> Result<T, Status> {
    let quarantine = Quarantine::of(&node.config);
    let done = tokio::task::spawn_blocking(move || work(quarantine)).await;
    done.map_err(|panic| Status::internal(panic.to_string()))?.map_err(status)
}

fn status(error: QuarantineError) -> Status {
    let text = chain(&error);
    match error {
        QuarantineError::Name(_) => Status::invalid_argument(text),
        QuarantineError::Unknown(_) => Status::not_found(text),
        QuarantineError::NoPod(_) | QuarantineError::Recorded { .. } | QuarantineError::InUse { .. } => {
            Status::failed_precondition(text)
        }
        QuarantineError::Lingering { .. } | QuarantineError::Path { .. } => Status::internal(text),
    }
}

fn message(entry: Entry) -> Quarantined {
    let (path, problem) = entry
        .report
        .map(|report| (report.path.to_string_lossy().into_owned(), report.problem))
        .unwrap_or_default();
    let processes = entry.left.processes.into_iter();
    Quarantined {
        name: entry.name.to_string(),
        put_aside_at_ns: entry.at_ns,
        pod: entry.pod.map(|pod| pod.to_string()).unwrap_or_default(),
        bytes: entry.bytes,
        path,
        problem,
        run_dir: entry.left.run_dir.to_string_lossy().into_owned(),
        run_dir_exists: entry.left.run_dir_exists,
        processes: processes
            .map(|seen| QuarantinedProcess { pid: seen.pid, command: seen.command })
            .collect(),
    }
}
