//! What containerd's subscribers hear of tasks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use containerd_client::events::{
    TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOom, TaskPaused, TaskResumed,
    TaskStart,
};
use containerd_client::types::Envelope;
use prost::Message;
use sandboxer_e2e::containerd::Containerd;
use tokio::task::AbortHandle;

/// By process (of a container, or its exec): what happened, in order.
pub type Heard = BTreeMap<String, Vec<String>>;

/// Hears all events, and connects again when containerd has been restarted.
pub struct Events {
    /// By container.
    heard: Arc<Mutex<BTreeMap<String, Heard>>>,
    task: AbortHandle,
}

impl Events {
    /// Subscribes; waits until it has.
    pub async fn hear(containerd: Containerd) -> anyhow::Result<Self> {
        let heard = Arc::new(Mutex::new(BTreeMap::new()));
        let mut stream = containerd.events().await?;
        let to = Arc::clone(&heard);
        let task = tokio::spawn(async move {
            loop {
                while let Ok(Some(envelope)) = stream.message().await {
                    note(&to, &envelope);
                }
                stream = loop {
                    match containerd.events().await {
                        Ok(stream) => break stream,
                        Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                    }
                };
            }
        });
        Ok(Self { heard, task: task.abort_handle() })
    }

    /// Returns what was heard of a container.
    pub fn of_container(&self, container: &str) -> Heard {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).get(container).cloned().unwrap_or_default()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn note(to: &Mutex<BTreeMap<String, Heard>>, envelope: &Envelope) {
    let Some((container, process, what)) = read(envelope) else { return };
    let mut heard = to.lock().unwrap_or_else(PoisonError::into_inner);
    let is_exec = !process.is_empty();
    let all = heard.entry(container).or_default().entry(process).or_default();
    // The worker after one that was killed cannot know whether an exec's exit was heard, and reports it again; containerd takes no
    // notice of the second. A kernel with control groups of version 1 reports a want of memory once more when the group goes.
    let may_repeat = (is_exec && what.starts_with("TaskExit")) || what == "TaskOOM";
    if !(may_repeat && all.contains(&what)) {
        all.push(what);
    }
}

/// Returns container, process and what happened.
fn read(envelope: &Envelope) -> Option<(String, String, String)> {
    let event = envelope.event.as_ref()?;
    let bytes = event.value.as_slice();
    let init = String::new();
    let name = event.type_url.rsplit('.').next()?;
    Some(match name {
        "TaskCreate" => (TaskCreate::decode(bytes).ok()?.container_id, init, "TaskCreate".into()),
        "TaskStart" => (TaskStart::decode(bytes).ok()?.container_id, init, "TaskStart".into()),
        "TaskDelete" => {
            let event = TaskDelete::decode(bytes).ok()?;
            (event.container_id, event.id, format!("TaskDelete {}", event.exit_status))
        }
        "TaskExit" => {
            let event = TaskExit::decode(bytes).ok()?;
            // The id of the init is that of its container.
            let process = if event.id == event.container_id { init } else { event.id };
            (event.container_id, process, format!("TaskExit {}", event.exit_status))
        }
        // When the kernel says so and when the process is gone are two messages: their order is chance.
        "TaskOOM" => (TaskOom::decode(bytes).ok()?.container_id, "out of memory".into(), "TaskOOM".into()),
        "TaskExecAdded" => {
            let event = TaskExecAdded::decode(bytes).ok()?;
            (event.container_id, event.exec_id, "TaskExecAdded".into())
        }
        "TaskExecStarted" => {
            let event = TaskExecStarted::decode(bytes).ok()?;
            (event.container_id, event.exec_id, "TaskExecStarted".into())
        }
        "TaskPaused" => (TaskPaused::decode(bytes).ok()?.container_id, init, "TaskPaused".into()),
        "TaskResumed" => (TaskResumed::decode(bytes).ok()?.container_id, init, "TaskResumed".into()),
        _ => return None,
    })
}
