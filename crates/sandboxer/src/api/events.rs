//! Events for containerd's event bus, as a shim publishes them.
//!
//! CRI reads only the OOM event, which it turns into the reason `OOMKilled`. It learns everything else by waiting on
//! pods and tasks. The other events are for other subscribers (`ctr events`).

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use containerd_shim_protos::{
    api::ForwardRequest,
    events::task::{
        TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOOM, TaskPaused, TaskResumed,
        TaskStart,
    },
    protobuf::{self, MessageField, well_known_types::any::Any},
    shim::event::Envelope,
    shim_async::{Client, EventsClient},
    topics::{
        TASK_CREATE_EVENT_TOPIC, TASK_DELETE_EVENT_TOPIC, TASK_EXEC_ADDED_EVENT_TOPIC,
        TASK_EXEC_STARTED_EVENT_TOPIC, TASK_EXIT_EVENT_TOPIC, TASK_OOM_EVENT_TOPIC, TASK_PAUSED_EVENT_TOPIC,
        TASK_RESUMED_EVENT_TOPIC, TASK_START_EVENT_TOPIC,
    },
};
use sandboxer_protocol::id::SandboxId;
use tokio::sync::{
    broadcast::{Receiver, error::RecvError},
    mpsc,
};
use ttrpc::context;

use super::convert::ttrpc_time;
use crate::events::{Event, Kind};

/// containerd's namespace for objects of CRI.
const NAMESPACE: &str = "k8s.io";

/// Time limit for one event.
const LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of events that wait for a containerd that hangs. An exit's event is sent once.
const QUEUED: usize = 16 << 10;

/// Forwards `events` to containerd at its ttrpc socket; ends with the daemon.
///
/// Nothing waits for it: an event that containerd does not accept is logged and dropped, as if containerd were not
/// running.
pub async fn publish(socket: PathBuf, events: Receiver<Event>) {
    let (queue, queued) = mpsc::channel(QUEUED);
    tokio::join!(collect(events, queue), send(socket, queued));
}

/// Queues events for containerd as fast as they arrive.
async fn collect(mut events: Receiver<Event>, queue: mpsc::Sender<(SandboxId, Envelope)>) {
    loop {
        let event = match events.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(lost)) => {
                tracing::warn!(lost, "dropped events for containerd");
                continue;
            }
            Err(RecvError::Closed) => return,
        };
        if event.name.of_cri_o {
            continue;
        }
        for (topic, message) in task_events(&event) {
            if queue.try_send((event.pod.clone(), envelope(&event, topic, message))).is_err() {
                tracing::warn!(pod = %event.pod, topic, "dropped an event: containerd takes none");
            }
        }
    }
}

async fn send(socket: PathBuf, mut queued: mpsc::Receiver<(SandboxId, Envelope)>) {
    // Connects at the first event, and again after a failure: containerd may have been restarted.
    let mut connection = None;
    while let Some((pod, envelope)) = queued.recv().await {
        publish_one(&mut connection, &socket, &pod, envelope).await;
    }
}

/// Forwards one event. Retries once, unless containerd accepts the connection and does not respond.
async fn publish_one(
    connection: &mut Option<EventsClient>,
    socket: &Path,
    pod: &SandboxId,
    envelope: Envelope,
) {
    let began = Instant::now();
    for attempt in [1, 2] {
        match forward(connection, socket, envelope.clone()).await {
            Ok(()) => break,
            // The first attempt may have used a connection to a containerd that has exited.
            Err(error) => {
                *connection = None;
                if attempt == 2 || began.elapsed() >= LIMIT {
                    tracing::warn!(%pod, %error, ?socket, "cannot forward an event to containerd");
                    break;
                }
            }
        }
    }
}

async fn forward(
    connection: &mut Option<EventsClient>,
    socket: &Path,
    envelope: Envelope,
) -> Result<(), ttrpc::Error> {
    let client = match connection.take() {
        Some(client) => client,
        None => EventsClient::new(Client::connect(&format!("unix://{}", socket.display())).await?),
    };
    let request = ForwardRequest { envelope: MessageField::some(envelope), ..Default::default() };
    client.forward(context::with_duration(LIMIT), &request).await?;
    *connection = Some(client);
    Ok(())
}

/// Returns the event as containerd packs it.
fn envelope(event: &Event, topic: &str, (type_url, value): Message) -> Envelope {
    Envelope {
        timestamp: ttrpc_time(event.at_ns),
        namespace: if event.name.alone { event.name.namespace.clone() } else { NAMESPACE.to_owned() },
        topic: topic.to_owned(),
        event: MessageField::some(Any { type_url: type_url.to_owned(), value, ..Default::default() }),
        ..Default::default()
    }
}

/// A message's type URL and bytes.
type Message = (&'static str, Vec<u8>);

/// Returns the events of a task that a shim would publish, by topic.
fn task_events(event: &Event) -> Vec<(&'static str, Message)> {
    let Some(task) = &event.task else { return Vec::new() };
    let container_id = event.container.as_ref().unwrap_or(&event.pod).to_string();
    let (exit_status, exited_at) = task.exit.unwrap_or_default();
    let exec_id = task.exec.as_ref().map(ToString::to_string).unwrap_or_default();
    let create = || {
        let bundle = task.bundle.to_string_lossy().into_owned();
        let message =
            TaskCreate { container_id: container_id.clone(), bundle, pid: task.pid, ..Default::default() };
        (TASK_CREATE_EVENT_TOPIC, packed("containerd.events.TaskCreate", &message))
    };
    let start = || {
        let message = TaskStart { container_id: container_id.clone(), pid: task.pid, ..Default::default() };
        (TASK_START_EVENT_TOPIC, packed("containerd.events.TaskStart", &message))
    };
    let exit = || {
        // The id of the init is its container's id.
        let id = if exec_id.is_empty() { container_id.clone() } else { exec_id.clone() };
        let message = TaskExit {
            container_id: container_id.clone(),
            id,
            pid: task.pid,
            exit_status,
            exited_at: ttrpc_time(exited_at),
            ..Default::default()
        };
        (TASK_EXIT_EVENT_TOPIC, packed("containerd.events.TaskExit", &message))
    };
    let delete = || {
        let message = TaskDelete {
            container_id: container_id.clone(),
            pid: task.pid,
            exit_status,
            exited_at: ttrpc_time(exited_at),
            ..Default::default()
        };
        (TASK_DELETE_EVENT_TOPIC, packed("containerd.events.TaskDelete", &message))
    };
    let exec_added = || {
        let message = TaskExecAdded {
            container_id: container_id.clone(),
            exec_id: exec_id.clone(),
            ..Default::default()
        };
        (TASK_EXEC_ADDED_EVENT_TOPIC, packed("containerd.events.TaskExecAdded", &message))
    };
    let exec_started = || {
        let message = TaskExecStarted {
            container_id: container_id.clone(),
            exec_id: exec_id.clone(),
            pid: task.pid,
            ..Default::default()
        };
        (TASK_EXEC_STARTED_EVENT_TOPIC, packed("containerd.events.TaskExecStarted", &message))
    };
    let out_of_memory = || {
        let message = TaskOOM { container_id: container_id.clone(), ..Default::default() };
        (TASK_OOM_EVENT_TOPIC, packed("containerd.events.TaskOOM", &message))
    };
    let paused = || {
        let message = TaskPaused { container_id: container_id.clone(), ..Default::default() };
        (TASK_PAUSED_EVENT_TOPIC, packed("containerd.events.TaskPaused", &message))
    };
    let resumed = || {
        let message = TaskResumed { container_id: container_id.clone(), ..Default::default() };
        (TASK_RESUMED_EVENT_TOPIC, packed("containerd.events.TaskResumed", &message))
    };
    match event.kind {
        // A sandbox container is created and started at once.
        Kind::PodReady => vec![create(), start()],
        Kind::ContainerCreated => vec![create()],
        Kind::ContainerStarted => vec![start()],
        Kind::ContainerPaused => vec![paused()],
        Kind::ContainerResumed => vec![resumed()],
        Kind::ExecCreated => vec![exec_added()],
        Kind::ExecStarted => vec![exec_started()],
        Kind::PodStopped | Kind::ContainerExited | Kind::ExecExited => vec![exit()],
        Kind::PodRemoved | Kind::ContainerDeleted => vec![delete()],
        Kind::ContainerOutOfMemory => vec![out_of_memory()],
        Kind::PodCreated | Kind::PodStarting | Kind::PodRecovered | Kind::PodSaved => Vec::new(),
    }
}

fn packed(name: &'static str, message: &impl protobuf::Message) -> Message {
    // The lengths fit, so this cannot fail.
    (name, message.write_to_bytes().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use containerd_shim_protos::protobuf::Message as _;

    use super::*;
    use crate::events::{PodName, TaskDetail};

    fn event(kind: Kind, container: Option<&str>, task: Option<TaskDetail>) -> Event {
        Event {
            at_ns: 1_500_000_000,
            pod: "p".parse().unwrap(),
            name: Arc::default(),
            container: container.map(|id| id.parse().unwrap()),
            kind,
            detail: String::new(),
            task,
        }
    }

    fn topics(event: &Event) -> Vec<&'static str> {
        task_events(event).into_iter().map(|(topic, _)| topic).collect()
    }

    #[test]
    fn a_pod_is_a_task_only_for_a_containerd_that_has_a_sandbox_container() {
        let task = TaskDetail { pid: 7, bundle: "/b".into(), ..Default::default() };
        assert_eq!(topics(&event(Kind::PodReady, None, None)), [] as [&str; 0]);
        let ready = event(Kind::PodReady, None, Some(task.clone()));
        assert_eq!(topics(&ready), ["/tasks/create", "/tasks/start"]);
        let (_, (name, bytes)) = task_events(&ready).remove(0);
        let created = TaskCreate::parse_from_bytes(&bytes).unwrap();
        assert_eq!(name, "containerd.events.TaskCreate");
        assert_eq!((created.container_id.as_str(), created.bundle.as_str(), created.pid), ("p", "/b", 7));
        assert_eq!(topics(&event(Kind::PodStopped, None, Some(task.clone()))), ["/tasks/exit"]);
        assert_eq!(topics(&event(Kind::PodRemoved, None, Some(task))), ["/tasks/delete"]);
    }

    #[test]
    fn what_happens_to_a_container_is_told_as_a_shim_tells_it() {
        let of_exec = TaskDetail { exec: Some("e".parse().unwrap()), ..Default::default() };
        for (kind, topic) in [
            (Kind::ContainerPaused, "/tasks/paused"),
            (Kind::ContainerResumed, "/tasks/resumed"),
            (Kind::ExecCreated, "/tasks/exec-added"),
            (Kind::ExecStarted, "/tasks/exec-started"),
        ] {
            assert_eq!(topics(&event(kind, Some("c"), Some(of_exec.clone()))), [topic]);
        }
        let (_, (_, bytes)) = task_events(&event(Kind::ExecCreated, Some("c"), Some(of_exec))).remove(0);
        let added = TaskExecAdded::parse_from_bytes(&bytes).unwrap();
        assert_eq!((added.container_id.as_str(), added.exec_id.as_str()), ("c", "e"));
    }

    #[test]
    fn events_go_to_the_namespace_of_the_container() {
        let of = |name: PodName| {
            let event = Event { name: Arc::new(name), ..event(Kind::ContainerPaused, Some("c"), None) };
            envelope(&event, "/tasks/paused", ("x", Vec::new())).namespace
        };
        assert_eq!(
            of(PodName { namespace: "web".into(), ..PodName::default() }),
            "k8s.io",
            "Kubernetes' own"
        );
        assert_eq!(of(PodName { namespace: "moby".into(), alone: true, ..PodName::default() }), "moby");
    }

    #[test]
    fn an_exit_says_of_which_process_it_is() {
        let exit = |exec: Option<&str>| {
            let task = TaskDetail {
                exec: exec.map(|id| id.parse().unwrap()),
                pid: 7,
                exit: Some((3, 2_000_000_001)),
                ..Default::default()
            };
            let kind = if exec.is_none() { Kind::ContainerExited } else { Kind::ExecExited };
            let (topic, (_, bytes)) = task_events(&event(kind, Some("c"), Some(task))).remove(0);
            assert_eq!(topic, "/tasks/exit");
            TaskExit::parse_from_bytes(&bytes).unwrap()
        };
        let init = exit(None);
        assert_eq!((init.container_id.as_str(), init.id.as_str()), ("c", "c"));
        assert_eq!((init.exit_status, init.exited_at.seconds, init.exited_at.nanos), (3, 2, 1));
        assert_eq!(exit(Some("e")).id, "e");
    }
}
