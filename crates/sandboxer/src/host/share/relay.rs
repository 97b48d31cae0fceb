//! Carries a guest's file requests to the process that serves them, and the answers back.
//!
//! Neither is trusted with more than its own: of a message only the head is read, there are no more of them
//! than slots, and nothing here waits for another pod. What a daemon loses by its death the agent asks again.

use std::{collections::HashMap, io, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use sandboxer_protocol::{
    agent::{ExchangeSharesRequest, ShareMessage},
    share::{FRAME_HEAD, Head, SLOTS, frame_head, read_frame_head},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep_until},
};

use crate::guest::{Agent, GuestError};

/// How long an answer is waited for before requests are asked for without one. Most come sooner, and then one
/// exchange with the agent carries a request and the answer to the one before.
const ANSWER_SOON: Duration = Duration::from_millis(2);

/// Most calls to the agent under way at once. A later one ends the wait of those before, so there are more than a
/// few only while a guest answers none.
const EXCHANGES: usize = 4 * SLOTS;

/// Carries until the agent is gone. Without a `server`, and from its end on, the guest gets errors.
pub async fn run(agent: Agent, server: Option<UnixStream>) {
    let (answered, mut answers) = mpsc::channel(SLOTS);
    let mut reading = JoinSet::new();
    let mut server = server.map(|stream| {
        let (incoming, outgoing) = stream.into_split();
        reading.spawn(read_answers(incoming, answered));
        outgoing
    });
    let mut under_way = UnderWay::default();
    let mut exchanges = FuturesUnordered::new();
    exchanges.push(exchange(&agent, Vec::new(), true));
    let mut ask_at = None;
    loop {
        let ask = async move {
            match ask_at {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            answer = answers.recv(), if server.is_some() => {
                let mut batch = Vec::new();
                match answer {
                    Some(first) => {
                        batch.push(first);
                        while let Ok(next) = answers.try_recv() {
                            batch.push(next);
                        }
                        batch.retain(|answer| under_way.end(answer));
                    }
                    None => {
                        tracing::warn!(?agent, "the process that serves the pod's shares is gone");
                        server = None;
                        batch = under_way.fail_all();
                    }
                }
                exchanges.push(exchange(&agent, batch, false));
                ask_at = None;
            }
            () = ask => {
                ask_at = None;
                exchanges.push(exchange(&agent, Vec::new(), false));
            }
            Some(exchanged) = exchanges.next() => {
                if exchanges.len() > EXCHANGES {
                    return tracing::warn!(?agent, "the guest takes answers and gives none; its shares end");
                }
                let requests = match exchanged {
                    Ok(requests) => requests,
                    Err(error) => return tracing::debug!(?agent, %error, "shares are carried no more"),
                };
                let Some(()) = under_way.begin(&requests) else {
                    return tracing::warn!(?agent, "the guest sent what no kernel asks; it gets no answer");
                };
                if let Some(outgoing) = &mut server
                    && let Err(error) = forward(outgoing, &requests).await
                {
                    // Its end of the other direction follows, and with it errors for all under way.
                    tracing::debug!(?agent, %error, "requests are not taken");
                }
                if server.is_none() && !requests.is_empty() {
                    exchanges.push(exchange(&agent, under_way.fail_all(), false));
                } else if exchanges.is_empty() {
                    ask_at = Some(Instant::now() + ANSWER_SOON);
                }
            }
        }
    }
}

async fn exchange(
    agent: &Agent,
    answers: Vec<ShareMessage>,
    resume: bool,
) -> Result<Vec<ShareMessage>, GuestError> {
    agent.exchange_shares(ExchangeSharesRequest { answers, resume, ..Default::default() }).await
}

async fn forward(server: &mut OwnedWriteHalf, requests: &[ShareMessage]) -> io::Result<()> {
    for request in requests {
        server.write_all(&frame_head(request.slot, &request.message)).await?;
        server.write_all(&request.message).await?;
    }
    Ok(())
}

/// Reads answers until there are no more.
async fn read_answers(mut server: OwnedReadHalf, answered: mpsc::Sender<ShareMessage>) {
    loop {
        let answer = match read_answer(&mut server).await {
            Ok(answer) => answer,
            Err(error) => return tracing::debug!(%error, "no more answers"),
        };
        if answered.send(answer).await.is_err() {
            return;
        }
    }
}

async fn read_answer(server: &mut OwnedReadHalf) -> io::Result<ShareMessage> {
    let mut head = [0; FRAME_HEAD];
    server.read_exact(&mut head).await?;
    let (slot, length) = read_frame_head(head).ok_or(io::ErrorKind::InvalidData)?;
    let mut message = vec![0; length];
    server.read_exact(&mut message).await?;
    Ok(ShareMessage { slot, message, ..Default::default() })
}

/// Heads of the requests that have no answer yet, by slot.
#[derive(Default)]
struct UnderWay(HashMap<u32, Head>);

impl UnderWay {
    /// Notes requests; `None` if they can't be any.
    fn begin(&mut self, requests: &[ShareMessage]) -> Option<()> {
        for request in requests {
            let head = Head::of(&request.message)?;
            let known = self.0.insert(request.slot, head);
            // Of one that is under way the slot can't be another's.
            if request.slot as usize >= SLOTS || known.is_some_and(|known| known != head) {
                return None;
            }
        }
        Some(())
    }

    /// Whether `answer` is one that was waited for.
    fn end(&mut self, answer: &ShareMessage) -> bool {
        match self.0.get(&answer.slot) {
            Some(head) if head.is_answered_by(&answer.message) => self.0.remove(&answer.slot).is_some(),
            _ => false,
        }
    }

    /// Answers all of them: none could be carried out.
    fn fail_all(&mut self) -> Vec<ShareMessage> {
        let failed = |(slot, head): (u32, Head)| ShareMessage {
            slot,
            message: head.failed(libc::EIO),
            ..Default::default()
        };
        self.0.drain().map(failed).collect()
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_protocol::share::{REQUEST_HEAD, opcode};

    use super::*;

    fn request(slot: u32, unique: u64) -> ShareMessage {
        let mut message = vec![0; REQUEST_HEAD];
        message[..4].copy_from_slice(&(REQUEST_HEAD as u32).to_le_bytes());
        message[4..8].copy_from_slice(&opcode::LOOKUP.to_le_bytes());
        message[8..16].copy_from_slice(&unique.to_le_bytes());
        ShareMessage { slot, message, ..Default::default() }
    }

    #[test]
    fn what_is_under_way_fails_once_when_nobody_serves_it() {
        let mut under_way = UnderWay::default();
        under_way.begin(&[request(0, 10), request(5, 12)]).unwrap();
        let answer = |slot, unique| ShareMessage {
            slot,
            message: Head { opcode: opcode::LOOKUP, unique }.failed(2),
            ..Default::default()
        };
        assert!(!under_way.end(&answer(5, 10)), "another slot's");
        assert!(under_way.end(&answer(0, 10)));
        assert!(!under_way.end(&answer(0, 10)), "twice");
        let failed = under_way.fail_all();
        assert_eq!(failed.iter().map(|message| message.slot).collect::<Vec<_>>(), [5]);
        assert!(under_way.fail_all().is_empty());
    }

    #[test]
    fn what_no_kernel_asks_is_told() {
        let mut under_way = UnderWay::default();
        assert!(under_way.begin(&[request(SLOTS as u32, 10)]).is_none());
        under_way.begin(&[request(1, 10), request(1, 10)]).unwrap();
        assert!(under_way.begin(&[request(1, 12)]).is_none(), "its slot is taken");
        let cut = ShareMessage { message: vec![1; REQUEST_HEAD - 1], ..Default::default() };
        assert!(under_way.begin(&[cut]).is_none());
    }
}
