//! What containerd's other users learn from its event bus: for now that the OOM killer struck, which CRI turns
//! into the reason `OOMKilled`. All else it learns by waiting on pods and tasks.

use std::path::{Path, PathBuf};

use containerd_shim_protos::{
    api::ForwardRequest,
    events::task::TaskOOM,
    protobuf::{
        Message, MessageField,
        well_known_types::{any::Any, timestamp::Timestamp},
    },
    shim::event::Envelope,
    shim_async::{Client, EventsClient},
    topics::TASK_OOM_EVENT_TOPIC,
};
use tokio::sync::broadcast::{Receiver, error::RecvError};
use ttrpc::context;

use crate::events::{Event, Kind};

/// containerd's namespace for what CRI makes.
const NAMESPACE: &str = "k8s.io";

/// How long containerd may take for one event, ns.
const LIMIT: i64 = 5_000_000_000;

/// Tells containerd, at its ttrpc socket, what comes in at `events`; ends with the daemon.
///
/// Nothing waits for it: an event that containerd does not take is logged and gone, as it would be had containerd
/// not run.
pub async fn publish(socket: PathBuf, mut events: Receiver<Event>) {
    // Connected at the first event, and anew after one that failed: containerd may have been restarted.
    let mut connection = None;
    loop {
        let event = match events.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(lost)) => {
                tracing::warn!(lost, "events came faster than containerd took them");
                continue;
            }
            Err(RecvError::Closed) => return,
        };
        let Some(envelope) = envelope(&event) else { continue };
        for attempt in [1, 2] {
            match forward(&mut connection, &socket, envelope.clone()).await {
                Ok(()) => break,
                // The first may have met the connection to a containerd that is gone.
                Err(error) => {
                    connection = None;
                    if attempt == 2 {
                        tracing::warn!(pod = %event.pod, %error, ?socket, "containerd did not take an event");
                    }
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
    client.forward(context::with_timeout(LIMIT), &request).await?;
    *connection = Some(client);
    Ok(())
}

/// Returns the event as containerd packs it; none for what it learns otherwise.
fn envelope(event: &Event) -> Option<Envelope> {
    let container = match event.kind {
        Kind::ContainerOutOfMemory => event.container.as_ref()?,
        _ => return None,
    };
    let message = TaskOOM { container_id: container.to_string(), ..Default::default() };
    let value = message.write_to_bytes().ok()?;
    Some(Envelope {
        timestamp: MessageField::some(Timestamp {
            seconds: i64::try_from(event.at_ns / 1_000_000_000).ok()?,
            nanos: i32::try_from(event.at_ns % 1_000_000_000).ok()?,
            ..Default::default()
        }),
        namespace: NAMESPACE.to_owned(),
        topic: TASK_OOM_EVENT_TOPIC.to_owned(),
        event: MessageField::some(Any {
            type_url: "containerd.events.TaskOOM".to_owned(),
            value,
            ..Default::default()
        }),
        ..Default::default()
    })
}
