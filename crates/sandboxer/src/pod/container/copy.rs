//! Copies between a process in the guest and its FIFOs.
//!
//! Output is pulled from the agent by offset. A request for the next byte acknowledges all bytes before it, so no byte
//! is acknowledged before it is in the FIFO. Input is pushed by offset. At most one message per stream is buffered. The
//! next worker can read the progress of each stream: see [`spool`](super::spool).

use std::{io, pin::Pin, time::Duration};

use sandboxer_base::chain;
use sandboxer_guest::{Agent, GuestError, Pace};
use sandboxer_protocol::agent::{OutputStream, ReadOutputRequest, ReadOutputResponse, WriteInputRequest};

use super::{
    io::{StdinCloser, Subject},
    spool::{Inlet, Outlet},
};

/// Maximum bytes per call to the agent.
const CHUNK: usize = 64 << 10;
/// Time limit for containerd to read the rest of an output before the output ends. When one stream ends, containerd
/// detaches clients from the other as well, and unread output is lost.
const READ_WITHIN: Duration = Duration::from_millis(100);

/// A reason why a copy ended early.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The VM or the container has ended, which other code reports.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// Reading from or writing to the FIFO failed.
    #[error("cannot move bytes through the FIFO")]
    Fifo(#[from] io::Error),
    /// The guest returned output other than the requested bytes: its length and offset.
    #[error("agent sent {0} bytes from offset {1}, which is not what was asked for")]
    Misled(usize, u64),
}

/// Runs a copy, and logs the reason if it ended early.
pub async fn logged<C: Future<Output = Result<(), CopyError>>>(subject: Subject, copy: Pin<Box<C>>) {
    match copy.await {
        Ok(()) => {}
        Err(CopyError::Guest(error)) => {
            tracing::debug!(container = %subject.container, %error, "a stream ends");
        }
        Err(error) => tracing::warn!(container = %subject.container, error = chain(&error), "a stream ends"),
    }
}

/// Copies an output until its end. `lost`: whether an earlier worker had copied an unknown part.
pub async fn copy_output(
    agent: Agent,
    subject: Subject,
    stream: OutputStream,
    mut outlet: Outlet,
    lost: bool,
) -> Result<(), CopyError> {
    let mut request = ReadOutputRequest {
        container_id: subject.container.to_string(),
        exec_id: subject.exec.as_ref().map(ToString::to_string).unwrap_or_default(),
        stream: stream.into(),
        offset: outlet.delivered()?,
        max_bytes: CHUNK as u32,
        resume: lost,
        ..Default::default()
    };
    let mut pace = Pace::default();
    loop {
        let answer = agent.read_output(request.clone()).await?;
        if !is_due(&request, &answer) {
            return Err(CopyError::Misled(answer.data.len(), answer.offset));
        }
        if request.resume {
            outlet.begin_at(answer.offset)?;
        }
        outlet.deliver(answer.offset, &answer.data).await?;
        if answer.end {
            outlet.read_within(READ_WITHIN).await;
            return Ok(());
        }
        request.offset = answer.offset + answer.data.len() as u64;
        request.resume = false;
        pace.keep(answer.data.len()).await;
    }
}

/// Returns whether a guest's response is valid: it starts at the requested offset, is not longer than requested, and is
/// not empty, because the call waits for bytes.
fn is_due(request: &ReadOutputRequest, answer: &ReadOutputResponse) -> bool {
    let length = answer.data.len();
    (request.resume || answer.offset == request.offset)
        && i64::try_from(answer.offset).is_ok()
        && length <= CHUNK
        && (length > 0 || answer.end)
}

/// Copies the input until its end, or until `closer` is notified. `resume`: whether an earlier worker had begun;
/// `lost`: whether it had also taken an unknown part from the FIFO. A terminal is hung up only when `closer` is notified: containerd's own
/// end closes the FIFO, too.
pub async fn copy_input(
    agent: Agent,
    subject: Subject,
    mut inlet: Inlet,
    (closer, has_terminal): (StdinCloser, bool),
    resume: bool,
    lost: bool,
) -> Result<(), CopyError> {
    let message = |offset: u64, data: Vec<u8>, end: bool| WriteInputRequest {
        container_id: subject.container.to_string(),
        exec_id: subject.exec.as_ref().map(ToString::to_string).unwrap_or_default(),
        offset,
        data,
        end,
        ..Default::default()
    };
    // An empty write at the beginning: the response contains the progress of an earlier worker.
    let mut offset = if resume { agent.write_input(message(0, Vec::new(), false)).await? } else { 0 };
    if i64::try_from(offset).is_err() {
        return Err(CopyError::Misled(0, offset));
    }
    if lost {
        inlet.begin_at(offset)?;
    }
    let mut ending = false;
    loop {
        let chunk = inlet.read(offset, CHUNK)?;
        if !chunk.is_empty() {
            let count = chunk.len() as u64;
            agent.write_input(message(offset, chunk, false)).await?;
            offset += count;
            inlet.passed(offset)?;
        } else if ending {
            // Bytes written before the close are in the FIFO already. The kernel knows that; tokio may not have
            // received the readiness yet.
            if inlet.take_now(CHUNK)? == 0 {
                agent.write_input(message(offset, Vec::new(), true)).await?;
                return Ok(());
            }
        } else {
            tokio::select! {
                biased;
                () = closer.closed() => ending = true,
                taken = inlet.take(CHUNK) => {
                    ending = taken? == 0;
                    if ending && has_terminal {
                        closer.closed().await;
                    }
                }
            }
        }
    }
}
