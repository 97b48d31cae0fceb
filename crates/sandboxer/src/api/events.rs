//! Events for containerd's event bus. The only one for now: the OOM killer struck, which CRI turns into the reason
//! `OOMKilled`. containerd learns all else by waiting on pods and tasks.

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

/// containerd's namespace for objects of CRI.
const NAMESPACE: &str = "k8s.io";

/// Time limit for one event, ns.
const LIMIT: i64 = 5_000_000_000;

/// Forwards `events` to containerd at its ttrpc socket; ends with the daemon.
///
/// Nothing waits for it: an event that containerd does not accept is logged and dropped, as if containerd did not
/// run.
pub async fn publish(socket: PathBuf, mut events: Receiver<Event>) {
    // Connected at the first event, and again after a failure: containerd may have been restarted.
    let mut connection = None;
    loop {
        let event = match events.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(lost)) => {
                tracing::warn!(lost, "dropped events: containerd is too slow");
                continue;
            }
            Err(RecvError::Closed) => return,
        };
        let Some(envelope) = envelope(&event) else { continue };
        for attempt in [1, 2] {
            match forward(&mut connection, &socket, envelope.clone()).await {
                Ok(()) => break,
                // The first attempt may have used a connection to a containerd that is gone.
                Err(error) => {
                    connection = None;
                    if attempt == 2 {
                        tracing::warn!(pod = %event.pod, %error, ?socket, "cannot forward an event to containerd");
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

/// Returns the event as containerd packs it; `None` for events that it learns otherwise.
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
