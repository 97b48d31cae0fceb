//! The greeting, from both sides. A host takes any rubbish for what it is; a guest finds a greeting after any.
#![no_main]

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use futures::{FutureExt, executor::block_on};
use libfuzzer_sys::fuzz_target;
use sandboxer_protocol::{
    agent::Ready,
    link::{self, LinkKey},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{mpsc, watch},
};

const KEY: [u8; LinkKey::LEN] = *b"a key that no input will contain";
/// Key and nonce: what a welcome begins with.
const MARK: usize = LinkKey::LEN + 8;

/// A guest that says `before`, the mark it was greeted with, and `after`; at most `piece` bytes at once.
struct Guest<'a> {
    heard: Vec<u8>,
    before: &'a [u8],
    after: &'a [u8],
    said: usize,
    piece: usize,
}

impl AsyncRead for Guest<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mark = &self.heard[..MARK.min(self.heard.len())];
        let all = [self.before, mark, self.after].concat();
        let rest = &all[self.said..];
        let count = rest.len().min(self.piece).min(buf.remaining());
        buf.put_slice(&rest[..count]);
        self.said += count;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Guest<'_> {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.heard.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fuzz_target!(|input: (Vec<u8>, Vec<u8>, u8)| {
    let (before, after, piece) = input;
    let key = LinkKey::from_bytes(KEY);
    let piece = usize::from(piece).max(1);
    let mut guest = Guest { heard: Vec::new(), before: &before, after: &after, said: 0, piece };
    // Its end comes after the input's.
    let _ = link::greet(&mut guest, &key).now_or_never().expect("the stream never makes it wait");

    block_on(async {
        let (host, port) = tokio::io::duplex(before.len() + 4096);
        let (sessions, mut accepted) = mpsc::channel(1);
        let (_, changes) = watch::channel(key.clone());
        let ready = || Ready { kernel_release: "fuzzed".into(), ..Default::default() };
        let serve = link::serve(port, changes, ready, sessions);
        let greet = async {
            let mut host = host;
            tokio::io::AsyncWriteExt::write_all(&mut host, &before).await.expect("there is room");
            let (ready, _) = link::greet(&mut host, &key).await.expect("a greeting is found after any rubbish");
            assert_eq!(ready.kernel_release, "fuzzed");
            accepted.recv().await.expect("a session was opened");
        };
        futures::pin_mut!(serve, greet);
        futures::future::select(serve, greet).await;
    });
});
