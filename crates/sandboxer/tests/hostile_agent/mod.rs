//! A double of a hostile agent, or of an attacker's program in its place.
//!
//! The agent greets as any agent does and answers every call with an empty message, which means success,
//! until its nature shows.

mod asker;

use std::{io, path::Path};

pub use asker::FILE;
use protobuf::Message;
use sandboxer_protocol::{
    PROTOCOL_VERSION,
    agent::{self as wire, Ready},
    link,
};
use sandboxer_vmm_fake::FakeGuest;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::mpsc,
};
use ttrpc::{
    MessageHeader, Request, Response,
    proto::{MESSAGE_HEADER_LENGTH, MESSAGE_TYPE_DATA, MESSAGE_TYPE_RESPONSE},
};

/// What it does to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nature {
    /// Sends endless garbage in place of a welcome.
    NeverGreets,
    /// Welcomes the daemon in another version of the protocol.
    OtherVersion,
    /// Sends a welcome of maximum length whose release is full of control characters.
    SteersTerminals,
    /// Sends endless answers of maximum length that belong to no call.
    AnswersUnasked,
    /// Answers each call repeatedly.
    AnswersTwice,
    /// Answers a call by a stream of data without end.
    Streams,
    /// Announces an answer of 4 GiB, and sends it.
    AnswersAtLength,
    /// Behaves well until it must kill a process: then it answers no call.
    BreaksOnSignal,
    /// Answers with bytes that are not a message.
    AnswersRubbish,
    /// Answers a call after its time limit.
    AnswersLate,
    /// Answers each call just before its time limit.
    LateAgent,
    /// Creates no container and no volume, and never answers.
    SlowCreate,
    /// Reads nothing and sends nothing.
    NeverReads,
    /// Reads every call but answers none.
    NeverAnswers,
    /// Has endless output, in answers of maximum length.
    FloodsOutput,
    /// Has endless output, a byte at a time.
    TricklesOutput,
    /// Says repeatedly that there is no output yet.
    SpinsOutput,
    /// Has output from offsets that were not requested.
    SkipsOutput,
    /// Lists more processes than there can be.
    ListsForEver,
    /// Knows no process, and does not report that any has ended.
    DeniesContainers,
    /// Has as many file requests in flight as possible, without end.
    FloodsRequests,
    /// The same; each requests the maximum length of an answer.
    AsksHugeReads,
    /// Requests as much, but reads no answer.
    NeverTakesAnswers,
}

impl Nature {
    pub const ALL: [Self; 23] = [
        Self::NeverGreets,
        Self::OtherVersion,
        Self::SteersTerminals,
        Self::AnswersUnasked,
        Self::AnswersTwice,
        Self::Streams,
        Self::AnswersAtLength,
        Self::BreaksOnSignal,
        Self::AnswersRubbish,
        Self::AnswersLate,
        Self::LateAgent,
        Self::SlowCreate,
        Self::NeverReads,
        Self::NeverAnswers,
        Self::FloodsOutput,
        Self::TricklesOutput,
        Self::SpinsOutput,
        Self::SkipsOutput,
        Self::ListsForEver,
        Self::DeniesContainers,
        Self::FloodsRequests,
        Self::AsksHugeReads,
        Self::NeverTakesAnswers,
    ];

    /// Returns whether a VM with such an agent becomes a pod at all.
    pub fn gets_ready(self) -> bool {
        !matches!(self, Self::NeverGreets | Self::OtherVersion)
    }

    /// Returns whether it only matters if the pod has a share.
    pub fn wants_a_share(self) -> bool {
        matches!(self, Self::FloodsRequests | Self::AsksHugeReads | Self::NeverTakesAnswers)
    }
}

/// Kernel name of a guest of [`Nature::SteersTerminals`].
pub const RELEASE: &str = "6.1\x1b]0;root\x07";

/// Longest message of ttrpc.
const MAX_MESSAGE_BYTES: u32 = 4 << 20;

/// Serves one stream of a guest.
pub fn serve(guest: FakeGuest, nature: Nature) {
    tokio::spawn(async move {
        // Whatever ends it, the daemon closed the connection.
        let _ = match nature {
            Nature::NeverGreets => flood(guest.stream, &[0xa5; 16 << 10]).await,
            Nature::OtherVersion => other_version(guest).await,
            _ => greet_and_harm(guest, nature).await,
        };
    });
}

async fn flood(mut to: impl AsyncWrite + Unpin, bytes: &[u8]) -> io::Result<()> {
    loop {
        to.write_all(bytes).await?;
    }
}

async fn other_version(guest: FakeGuest) -> io::Result<()> {
    let mut stream = guest.stream;
    let key = *guest.link_key.borrow().as_bytes();
    let mut hello = [0; 32 + 8 + 4];
    stream.read_exact(&mut hello).await?;
    let other = (PROTOCOL_VERSION + 1).to_be_bytes();
    stream.write_all(&[&key[..], &hello[32..40], &other, &0u16.to_be_bytes()].concat()).await?;
    std::future::pending().await
}

async fn greet_and_harm(guest: FakeGuest, nature: Nature) -> io::Result<()> {
    let key = guest.link_key.subscribe();
    let (sessions, mut accepted) = mpsc::channel(1);
    let release = match nature {
        Nature::SteersTerminals => RELEASE.repeat(300),
        _ => "hostile".to_owned(),
    };
    let ready = || Ready { kernel_release: release.clone(), ..Default::default() };
    let harm = async {
        while let Some(session) = accepted.recv().await {
            // The daemon hung up: that ends a session, not the guest.
            let _ = harm(session, nature, &guest.shares).await;
        }
        Ok(())
    };
    tokio::try_join!(link::serve(guest.stream, key, ready, sessions), harm).map(drop)
}

async fn harm(session: impl AsyncRead + AsyncWrite, nature: Nature, shares: &Path) -> io::Result<()> {
    use Nature::*;
    let (mut from, mut to) = tokio::io::split(session);
    loop {
        let (stream, request) = read_call(&mut from).await?;
        let good = |answer: &[u8]| response(stream, answer);
        if request.method == "ConfigurePod" {
            to.write_all(&good(b"")).await?;
            continue;
        }
        match (nature, request.method.as_str()) {
            (AnswersUnasked, _) => {
                let frame = [
                    head(stream + 1000, MAX_MESSAGE_BYTES, MESSAGE_TYPE_RESPONSE),
                    vec![0; MAX_MESSAGE_BYTES as usize],
                ];
                return flood(&mut to, &frame.concat()).await;
            }
            (AnswersTwice, _) => return flood(&mut to, &good(b"")).await,
            (Streams, _) => {
                let frame = [head(stream, 64 << 10, MESSAGE_TYPE_DATA), vec![0; 64 << 10]].concat();
                return flood(&mut to, &frame).await;
            }
            (AnswersAtLength, _) => {
                to.write_all(&head(stream, u32::MAX, MESSAGE_TYPE_RESPONSE)).await?;
                return flood(&mut to, &[0; 16 << 10]).await;
            }
            (AnswersRubbish, _) => {
                let rubbish = [0xff; 64];
                to.write_all(&head(stream, 64, MESSAGE_TYPE_RESPONSE)).await?;
                to.write_all(&rubbish).await?;
            }
            (BreaksOnSignal, "SignalProcess") => to.write_all(&response(stream + 1000, b"")).await?,
            (AnswersLate, "SignalProcess") => {
                tokio::time::sleep(2 * super::AGENT_TIMEOUT).await;
                to.write_all(&good(b"")).await?;
            }
            (LateAgent, _) => {
                tokio::time::sleep(super::AGENT_TIMEOUT * 4 / 5).await;
                to.write_all(&good(b"")).await?;
            }
            (SlowCreate, "CreateContainer" | "PutVolume") => {}
            (NeverReads, _) => return std::future::pending().await,
            (NeverAnswers, _) | (_, "WaitProcess") | (DeniesContainers, "DeleteContainer") => {}
            (_, "MountShares") => {
                if nature.wants_a_share() {
                    let request = wire::MountSharesRequest::parse_from_bytes(&request.payload)?;
                    asker::ask(shares.to_owned(), request.key, nature);
                }
                let mounted = wire::MountSharesResponse { mounted: true, ..Default::default() };
                to.write_all(&good(&mounted.write_to_bytes()?)).await?;
            }
            (_, "ReadOutput") => {
                let request = wire::ReadOutputRequest::parse_from_bytes(&request.payload)?;
                if let Some(output) = output(nature, request.offset) {
                    to.write_all(&good(&output.write_to_bytes()?)).await?;
                }
            }
            (ListsForEver, "ListContainers" | "ListVolumes" | "ListProcesses") => {
                // Each is an entry of two bytes.
                to.write_all(&good(&[0x0a, 0].repeat(1 << 20))).await?;
            }
            _ => to.write_all(&good(b"")).await?,
        }
    }
}

/// Returns the output from `offset` on; `None`: the call is not answered.
fn output(nature: Nature, offset: u64) -> Option<wire::ReadOutputResponse> {
    let answer = |offset, data: &[u8]| {
        Some(wire::ReadOutputResponse { offset, data: data.to_vec(), ..Default::default() })
    };
    match nature {
        Nature::FloodsOutput => answer(offset, &[b'x'; 64 << 10]),
        Nature::TricklesOutput => answer(offset, b"x"),
        Nature::SpinsOutput => answer(offset, b""),
        Nature::SkipsOutput => answer(u64::MAX - 3, b"xyz!"),
        _ => None,
    }
}

async fn read_call(from: &mut (impl AsyncRead + Unpin)) -> io::Result<(u32, Request)> {
    let mut head = [0; MESSAGE_HEADER_LENGTH];
    from.read_exact(&mut head).await?;
    let head = MessageHeader::from(head);
    let mut request = vec![0; head.length as usize];
    from.read_exact(&mut request).await?;
    Ok((head.stream_id, Request::parse_from_bytes(&request)?))
}

fn response(stream: u32, payload: &[u8]) -> Vec<u8> {
    let response = Response { payload: payload.to_vec(), ..Default::default() };
    let response = response.write_to_bytes().unwrap();
    [head(stream, response.len() as u32, MESSAGE_TYPE_RESPONSE), response].concat()
}

fn head(stream_id: u32, length: u32, type_: u8) -> Vec<u8> {
    MessageHeader { length, stream_id, type_, flags: 0 }.into()
}
