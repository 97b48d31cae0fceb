//! Carries a guest's file requests to the process that serves them, and the answers back.
//!
//! Neither is trusted with more than its own: of a message only the head is read, there are no more of them
//! than slots, and nothing here waits for another pod. What a daemon loses by its death the agent asks again.
//!
//! What a pod can have lie here is bounded: [`SLOTS`] answers of the server's that wait, [`EXCHANGES`] batches on
//! their way to the agent, and as many of its requests.

use std::{collections::HashMap, io, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use sandboxer_protocol::{
    agent::{ExchangeSharesRequest, ShareMessage},
    share::{FRAME_HEAD, Head, MAX_BATCH, SLOTS, frame_head, read_frame_head},
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

use sandboxer_guest::{Agent, GuestError};

/// How long an answer is waited for before requests are asked for without one. Most come sooner, and then one
/// exchange with the agent carries a request and the answer to the one before.
const ANSWER_SOON: Duration = Duration::from_millis(2);

/// Most calls to the agent under way at once: one that waits for requests, and one with answers, which ends that
/// wait. To a guest that answers neither no more answers go, and nothing of its is carried.
const EXCHANGES: usize = 2;

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
    // The answer that did not fit into the batch before.
    let mut held: Option<ShareMessage> = None;
    loop {
        let may_ask = exchanges.len() < EXCHANGES;
        let ask = async move {
            match ask_at {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let answer = async {
            match held.take() {
                Some(answer) => Some(answer),
                None => answers.recv().await,
            }
        };
        tokio::select! {
            biased;
            answer = answer, if may_ask && server.is_some() => {
                let batch = match answer {
                    Some(first) => {
                        let batch;
                        (batch, held) = batch_of(first, || answers.try_recv().ok());
                        batch.into_iter().filter(|answer| under_way.end(answer)).collect()
                    }
                    None => {
                        tracing::warn!(?agent, "the process that serves the pod's shares is gone");
                        server = None;
                        under_way.fail_all()
                    }
                };
                exchanges.push(exchange(&agent, batch, false));
                ask_at = None;
            }
            () = ask, if may_ask => {
                ask_at = None;
                exchanges.push(exchange(&agent, Vec::new(), false));
            }
            Some(exchanged) = exchanges.next() => {
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

/// As many answers as are handed over at once, and the one that came too many.
fn batch_of(
    first: ShareMessage,
    mut next: impl FnMut() -> Option<ShareMessage>,
) -> (Vec<ShareMessage>, Option<ShareMessage>) {
    let mut room = MAX_BATCH.saturating_sub(first.message.len());
    let mut batch = vec![first];
    while let Some(answer) = next() {
        match room.checked_sub(answer.message.len()) {
            Some(left) => room = left,
            None => return (batch, Some(answer)),
        }
        batch.push(answer);
    }
    (batch, None)
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
            // An agent hands a request out once, and its slot is no other one's before the answer.
            if request.slot as usize >= SLOTS || self.0.insert(request.slot, head).is_some() {
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
    use protobuf::Message;
    use sandboxer_guest::speak_over;
    use sandboxer_protocol::{
        agent::ExchangeSharesResponse,
        share::{AROUND_MESSAGE, MAX_MESSAGE, REQUEST_HEAD, opcode},
    };
    use ttrpc::{
        Response,
        proto::{MESSAGE_HEADER_LENGTH, MESSAGE_TYPE_RESPONSE, MessageHeader},
    };

    use crate::share::relay::*;

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
        under_way.begin(&[request(1, 10)]).unwrap();
        assert!(under_way.begin(&[request(1, 10)]).is_none(), "twice");
        assert!(under_way.begin(&[request(1, 12)]).is_none(), "its slot is taken");
        let cut = ShareMessage { message: vec![1; REQUEST_HEAD - 1], ..Default::default() };
        assert!(under_way.begin(&[cut]).is_none());
    }

    /// The stream of the next call to the agent, and its length.
    async fn call(guest: &mut tokio::io::DuplexStream) -> (u32, usize) {
        let mut head = [0; MESSAGE_HEADER_LENGTH];
        guest.read_exact(&mut head).await.unwrap();
        let head = MessageHeader::from(head);
        let mut call = vec![0; head.length as usize];
        guest.read_exact(&mut call).await.unwrap();
        (head.stream_id, call.len())
    }

    #[tokio::test]
    async fn of_what_a_guest_does_not_take_little_is_kept() {
        let (ours, mut guest) = tokio::io::duplex(64 << 20);
        let agent = speak_over(&"pod".parse().unwrap(), ours, Duration::from_secs(60));
        let (server, serving) = UnixStream::pair().unwrap();
        let _relay = tokio::spawn(run(agent, Some(server)));

        let (stream_id, _) = call(&mut guest).await;
        let requests = (0..SLOTS as u32).map(|slot| request(slot, slot.into())).collect();
        let requests = ExchangeSharesResponse { requests, ..Default::default() };
        let payload = requests.write_to_bytes().unwrap();
        let answer = Response { payload, ..Default::default() }.write_to_bytes().unwrap();
        let length = answer.len() as u32;
        let head = MessageHeader { length, stream_id, type_: MESSAGE_TYPE_RESPONSE, flags: 0 };
        guest.write_all(&[Vec::from(head), answer].concat()).await.unwrap();

        // The server answers each in turn, as long as can be; the guest none of the calls that bring them.
        let (mut asked, mut answers) = serving.into_split();
        tokio::spawn(async move {
            while let Ok(mut answer) = read_answer(&mut asked).await {
                answer.message.resize(MAX_MESSAGE, 0);
                answer.message[..4].copy_from_slice(&(MAX_MESSAGE as u32).to_le_bytes());
                answers.write_all(&frame_head(answer.slot, &answer.message)).await.unwrap();
                answers.write_all(&answer.message).await.unwrap();
            }
        });
        let (mut calls, mut longest) = (0, 0);
        while let Ok((_, length)) = tokio::time::timeout(Duration::from_millis(500), call(&mut guest)).await {
            (calls, longest) = (calls + 1, longest.max(length));
        }
        assert_eq!(calls, EXCHANGES, "the guest has answered none");
        assert!(longest <= MAX_BATCH + SLOTS * AROUND_MESSAGE, "{longest} bytes in one call");
    }
}
