//! Greetings over streams that a test controls.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::PROTOCOL_VERSION;

fn ready() -> Ready {
    Ready { agent_version: "test".into(), ..Ready::default() }
}

/// Returns a guest whose service answers each session's bytes with the same bytes.
fn echoing_guest(key: &LinkKey) -> DuplexStream {
    let (host, port) = tokio::io::duplex(1 << 20);
    let (sessions, mut accepted) = mpsc::channel(1);
    let key = watch::Sender::new(key.clone()).subscribe();
    tokio::spawn(async move { serve(port, key, ready, sessions).await });
    tokio::spawn(async move {
        while let Some(session) = accepted.recv().await {
            tokio::spawn(async move {
                let (mut read, mut write) = tokio::io::split(session);
                tokio::io::copy(&mut read, &mut write).await
            });
        }
    });
    host
}

async fn echo(host: &mut DuplexStream, words: &[u8]) {
    host.write_all(words).await.unwrap();
    let mut heard = vec![0; words.len()];
    host.read_exact(&mut heard).await.unwrap();
    assert_eq!(heard, words);
}

#[tokio::test]
async fn a_session_carries_bytes_both_ways() {
    let key = LinkKey::random();
    let mut host = echoing_guest(&key);
    assert_eq!(greet(&mut host, &key).await.unwrap().0.agent_version, "test");
    echo(&mut host, b"hello").await;
}

#[tokio::test]
async fn a_frame_that_ends_like_a_greeting_begins_is_delivered_at_once() {
    let key = LinkKey::random();
    let mut host = echoing_guest(&key);
    greet(&mut host, &key).await.unwrap();
    for length in 1..LinkKey::LEN {
        let frame = [b"frame", &key.0[..length]].concat();
        let echoed = tokio::time::timeout(Duration::from_secs(20), echo(&mut host, &frame));
        echoed.await.unwrap_or_else(|_| panic!("{length} bytes of the key are held back"));
    }
}

#[tokio::test]
async fn a_new_session_starts_after_half_a_frame_and_unread_answers() {
    let key = LinkKey::random();
    let mut host = echoing_guest(&key);
    greet(&mut host, &key).await.unwrap();
    // Responses to these are unread in the stream when the next daemon connects, and the last bytes look like the
    // beginning of a greeting.
    host.write_all(&vec![7; 300_000]).await.unwrap();
    host.write_all(&key.0[..20]).await.unwrap();
    for _ in 0..3 {
        greet(&mut host, &key).await.unwrap();
        echo(&mut host, b"clean again").await;
    }
}

#[tokio::test]
async fn a_key_that_changes_ends_no_session_and_counts_for_the_next() {
    let (old, new) = (LinkKey::random(), LinkKey::random());
    let (mut host, port) = tokio::io::duplex(1 << 20);
    let (sessions, mut accepted) = mpsc::channel(1);
    let keys = watch::Sender::new(old.clone());
    let guest_key = keys.subscribe();
    tokio::spawn(async move { serve(port, guest_key, ready, sessions).await });
    greet(&mut host, &old).await.unwrap();
    let mut session = accepted.recv().await.unwrap();

    keys.send_replace(new.clone());
    // The old key no longer starts a greeting: an open session treats it as payload.
    host.write_all(&old.0).await.unwrap();
    let mut payload = [0; LinkKey::LEN];
    session.read_exact(&mut payload).await.unwrap();
    assert_eq!(payload, old.0);
    greet(&mut host, &new).await.unwrap();
    accepted.recv().await.unwrap();
}

#[tokio::test]
async fn another_version_is_refused_by_both_with_both_numbers() {
    let key = LinkKey::random();
    let (mut host, port) = tokio::io::duplex(4096);
    let (sessions, mut accepted) = mpsc::channel(1);
    let guest_key = watch::Sender::new(key.clone()).subscribe();
    let guest = tokio::spawn(async move { serve(port, guest_key, ready, sessions).await });
    let hello = [&key.0[..], &[1; NONCE_LEN], &99_u32.to_be_bytes()].concat();
    host.write_all(&hello).await.unwrap();
    let mut mark = [0; LinkKey::LEN + NONCE_LEN + VERSION_LEN];
    host.read_exact(&mut mark).await.unwrap();
    let length = usize::from(host.read_u16().await.unwrap());
    let mut payload = vec![0; length];
    host.read_exact(&mut payload).await.unwrap();
    let refusal = Ready::parse_from_bytes(&payload).unwrap().refusal;
    assert!(
        refusal.contains(&format!("protocol {PROTOCOL_VERSION},")) && refusal.contains("speaks 99"),
        "{refusal}"
    );
    assert!(accepted.try_recv().is_err(), "a refused host got a session");
    guest.abort();

    let (mut host, mut port) = tokio::io::duplex(4096);
    let newer = tokio::spawn(async move {
        let mut hello = [0; LinkKey::LEN + NONCE_LEN + VERSION_LEN];
        port.read_exact(&mut hello).await.unwrap();
        hello[LinkKey::LEN + NONCE_LEN..].copy_from_slice(&77_u32.to_be_bytes());
        port.write_all(&hello).await.unwrap();
        port.write_all(&0_u16.to_be_bytes()).await.unwrap();
        port
    });
    let error = greet(&mut host, &key).await.unwrap_err();
    assert!(matches!(error, LinkError::Version { host: PROTOCOL_VERSION, guest: 77 }), "{error}");
    drop(newer);
}

/// Returns the result of a greeting between peers that speak these versions, and whether it led to a session.
async fn greeted(host: RangeInclusive<u32>, guest: RangeInclusive<u32>) -> (Result<u32, LinkError>, bool) {
    let key = LinkKey::random();
    let (mut stream, port) = tokio::io::duplex(4096);
    let (sessions, mut accepted) = mpsc::channel(1);
    let guest_key = watch::Sender::new(key.clone()).subscribe();
    let guest = tokio::spawn(async move { serve_in(port, guest_key, ready, sessions, guest).await });
    let greeting = greet_in(&mut stream, &key, host).await;
    guest.abort();
    (greeting.map(|(_, version)| version), accepted.try_recv().is_ok())
}

#[tokio::test]
async fn either_end_may_be_a_release_older() {
    for (host, guest) in [(6..=7, 6..=6), (6..=7, 5..=6), (6..=6, 6..=7), (5..=6, 6..=7), (6..=7, 6..=7)] {
        let (greeting, has_session) = greeted(host.clone(), guest.clone()).await;
        let newest = host.end().min(guest.end());
        assert!(
            greeting.as_ref().is_ok_and(|version| version == newest) && has_session,
            "{host:?} and {guest:?}: {greeting:?}"
        );
    }
    for (host, guest) in [(7..=8, 5..=6), (5..=6, 7..=8)] {
        let (greeting, has_session) = greeted(host.clone(), guest.clone()).await;
        let newest = (*host.end(), *guest.end());
        let result = greeting.as_ref().map(drop);
        assert!(
            matches!(result, Err(LinkError::Version { host, guest }) if (*host, *guest) == newest),
            "{result:?}"
        );
        assert!(!has_session, "{host:?} and {guest:?} have a session");
    }
}

#[tokio::test]
async fn a_welcome_that_announces_too_much_is_refused_unread() {
    let key = LinkKey::random();
    let (mut host, mut port) = tokio::io::duplex(4096);
    tokio::spawn(async move {
        let mut hello = [0; LinkKey::LEN + NONCE_LEN + VERSION_LEN];
        port.read_exact(&mut hello).await.unwrap();
        port.write_all(&hello).await.unwrap();
        port.write_all(&u16::MAX.to_be_bytes()).await.unwrap();
        std::future::pending::<()>().await
    });
    assert!(matches!(greet(&mut host, &key).await, Err(LinkError::Malformed(_))));
}

proptest! {
    #[test]
    fn a_mark_is_found_however_the_stream_is_cut(
        before in proptest::collection::vec(0_u8..4, 0..200),
        after in proptest::collection::vec(any::<u8>(), 0..50),
        cuts in proptest::collection::vec(1_usize..20, 1..60),
    ) {
        // The mark repeats itself, so that partial matches overlap.
        let mark = [0, 1, 0, 1, 0, 2];
        prop_assume!(Finder::new(&mark).find(&before).is_none());
        let joined = [&before[..], &mark].concat();
        prop_assume!(Finder::new(&mark).find(&joined) == Some(before.len()));
        let stream = [&before[..], &mark, &after].concat();
        let mut scanner = Scanner::new(&mark);
        let (mut seen, mut rest, mut cuts) = (Vec::new(), &stream[..], cuts.into_iter().cycle());
        while !scanner.found() {
            let (piece, later) = rest.split_at(cuts.next().unwrap().min(rest.len()));
            prop_assert!(!piece.is_empty(), "the mark was missed");
            scanner.buffer.extend_from_slice(piece);
            rest = later;
            seen.extend(scanner.take_before());
            let read = stream.len() - rest.len();
            prop_assert!(scanner.found() || seen == stream[..read], "bytes wait for more to come");
        }
        // The bytes before the mark may be followed by a beginning of it, never by all of it.
        let beginning = seen.strip_prefix(&before[..]);
        prop_assert!(beginning.is_some_and(|part| part.len() < mark.len() && mark.starts_with(part)));
        prop_assert_eq!([&scanner.buffer[..], rest].concat(), after);
    }
}
