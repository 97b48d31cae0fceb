//! Retries, like kubelet's when a peer is unavailable.

use std::time::{Duration, Instant};

use anyhow::Result;
use tonic::{Code, Status};

use crate::case::PATIENCE;

/// Returns whether kubelet would retry: the peer was unavailable.
pub fn nobody_there(error: &Status) -> bool {
    let words =
        ["connection", "EOF", "error reading from server", "not available", "unavailable", "reserved"];
    let message = error.message();
    // A worker without memory says that a resource is: it was there.
    error.code() == Code::Unavailable
        || !message.contains("temporarily unavailable") && words.iter().any(|word| message.contains(word))
}

/// Asks until containerd has seen the container's task. It looks at it first and gives up after 2 s
/// (`io.containerd.timeout.task.state`), within which a busy host may not have replaced a worker that was killed:
/// nothing of what was asked has been done then.
pub async fn once_seen<T, F>(mut ask: impl FnMut() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>> + Send,
{
    let began = Instant::now();
    let unseen = |error: &Status| {
        let words = error.message();
        words.contains("deadline exceeded")
            && ["failed to get task", "failed to load task"].iter().any(|looked| words.contains(looked))
    };
    loop {
        match ask().await {
            Err(error) if unseen(&error) && began.elapsed() < PATIENCE => {}
            answer => return answer,
        }
    }
}

/// Retries until there is an answer. Only for requests that a kubelet retries by itself: starts, stops and removals of pods.
pub async fn insist<T, F>(what: &str, mut ask: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T, Status>> + Send,
{
    let began = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return Ok(answer),
            Err(error) if nobody_there(&error) && began.elapsed() < 5 * PATIENCE => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => return Err(anyhow::Error::from(error).context(what.to_owned())),
        }
    }
}
