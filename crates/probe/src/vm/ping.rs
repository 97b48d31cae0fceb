//! The first answered ping of a VM. QEMU connects the guest's network card to a socket of this process, the only other
//! station on that network, which sends echo requests and resolves its own address in Ethernet frames. So the host's
//! network is not involved, and the guest replies as to any ping.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Interval between two requests: the figure is too large by at most this. Each request costs some instructions on the
/// host, for which a boot on one processor would have to wait.
pub const EVERY: Duration = Duration::from_millis(10);
/// Hardware address of the guest.
pub const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];
/// Address that the guest's image gives to its network card.
const GUEST: [u8; 4] = [10, 0, 2, 15];
/// Address of this station, which is the guest's gateway.
const HERE: [u8; 4] = [10, 0, 2, 2];
const HERE_MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x55];
/// Maximum length of a frame, bytes: the guest is not trusted.
const MAX_FRAME: usize = 64 << 10;
const ARP: [u8; 2] = [0x08, 0x06];
const IPV4: [u8; 2] = [0x08, 0x00];
/// Identifier in our requests.
const ID: [u8; 2] = [0x5e, 0xed];
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;

/// State of the guest's answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Answer {
    /// QEMU has not connected.
    #[default]
    NoCard,
    /// Requests are being sent.
    Asked,
    /// The first answer has come, at this time.
    At(Instant),
}

/// Pings a guest until it answers. Dropping it stops the pings.
#[derive(Debug)]
pub struct Pinger {
    path: PathBuf,
    ends: Arc<AtomicBool>,
    answer: watch::Receiver<Answer>,
    thread: Option<JoinHandle<()>>,
}

impl Pinger {
    /// Listens at `path`, to which QEMU will connect the guest's network card (`-netdev stream`).
    pub fn listen(path: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        let (into, answer) = watch::channel(Answer::default());
        let ends = Arc::new(AtomicBool::new(false));
        let thread = {
            let ends = ends.clone();
            // The thread ends with its connection. Without an answer there is no figure.
            std::thread::spawn(move || drop(ping(&listener, &ends, &into)))
        };
        Ok(Self { path: path.to_owned(), ends, answer, thread: Some(thread) })
    }

    /// Waits for the first answer and returns its time; `None` if it does not come within `limit`, or if QEMU has not
    /// connected yet.
    pub async fn answered(&self, limit: Duration) -> Option<Instant> {
        let mut answer = self.answer.clone();
        if *answer.borrow() == Answer::NoCard {
            return None;
        }
        let came = answer.wait_for(|answer| matches!(answer, Answer::At(_)));
        match *tokio::time::timeout(limit, came).await.ok()?.ok()? {
            Answer::At(when) => Some(when),
            _ => None,
        }
    }
}

impl Drop for Pinger {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        // The thread may still wait for QEMU to connect.
        drop(UnixStream::connect(&self.path));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends requests and reads frames until the guest has answered, its card is gone or `ends` is set.
fn ping(listener: &UnixListener, ends: &AtomicBool, answer: &watch::Sender<Answer>) -> io::Result<()> {
    let (mut card, _) = listener.accept()?;
    if ends.load(Ordering::Acquire) {
        return Ok(());
    }
    answer.send_replace(Answer::Asked);
    // A card that does not accept frames yet must not block this thread.
    card.set_write_timeout(Some(EVERY))?;
    let (mut frames, mut buffer, mut next) = (Frames::default(), vec![0; MAX_FRAME], Instant::now());
    let mut sequence: u16 = 0;
    while !ends.load(Ordering::Acquire) {
        let now = Instant::now();
        if now >= next {
            next = now + EVERY;
            sequence = sequence.wrapping_add(1);
            send(&mut card, &echo_request(sequence))?;
        }
        card.set_read_timeout(Some(next.saturating_duration_since(now).max(Duration::from_millis(1))))?;
        let count = match card.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if is_late(&error) => continue,
            Err(error) => return Err(error),
        };
        let now = Instant::now();
        frames.add(&buffer[..count])?;
        while let Some(frame) = frames.next() {
            if is_answer(&frame) {
                answer.send_replace(Answer::At(now));
                return Ok(());
            }
            if let Some(reply) = arp_reply(&frame) {
                send(&mut card, &reply)?;
            }
        }
    }
    Ok(())
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Sends a frame, preceded by its length. Drops a frame for which the card has no space.
fn send(card: &mut UnixStream, frame: &[u8]) -> io::Result<()> {
    let mut bytes = u32::try_from(frame.len()).unwrap_or_default().to_be_bytes().to_vec();
    bytes.extend_from_slice(frame);
    match card.write(&bytes) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(sent) => {
            Err(io::Error::other(format!("the card took {sent} bytes of a frame of {}", bytes.len())))
        }
        Err(error) if is_late(&error) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Splits a stream of bytes into frames.
#[derive(Debug, Default)]
struct Frames {
    rest: Vec<u8>,
}

impl Frames {
    /// Adds bytes. Rejects a frame that is too long.
    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.rest.extend_from_slice(bytes);
        match self.length() {
            Some(length) if length > MAX_FRAME => Err(io::Error::other(format!("a frame of {length} bytes"))),
            _ => Ok(()),
        }
    }

    fn length(&self) -> Option<usize> {
        Some(u32::from_be_bytes(*self.rest.first_chunk()?) as usize)
    }

    /// Returns the next complete frame.
    fn next(&mut self) -> Option<Vec<u8>> {
        let end = 4 + self.length()?.min(MAX_FRAME + 1);
        let frame = self.rest.get(4..end)?.to_vec();
        self.rest.drain(..end);
        Some(frame)
    }
}

/// Returns an echo request to the guest.
fn echo_request(sequence: u16) -> Vec<u8> {
    let mut echo = vec![ECHO_REQUEST, 0, 0, 0];
    echo.extend(ID);
    echo.extend(sequence.to_be_bytes());
    echo.extend([0; 48]);
    let sum = checksum(&echo);
    echo[2..4].copy_from_slice(&sum.to_be_bytes());
    let length = (20 + echo.len()) as u16;
    let mut packet = vec![0x45, 0];
    packet.extend(length.to_be_bytes());
    // Not fragmented; 64 hops; ICMP.
    packet.extend([0, 0, 0x40, 0, 64, 1, 0, 0]);
    packet.extend(HERE);
    packet.extend(GUEST);
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(echo);
    ethernet(GUEST_MAC, IPV4, &packet)
}

/// Returns whether a frame is the reply to one of our requests.
fn is_answer(frame: &[u8]) -> bool {
    let Some(packet) = frame.strip_prefix(&HERE_MAC).and_then(|rest| rest.get(6..)) else { return false };
    let Some(packet) = packet.strip_prefix(&IPV4) else { return false };
    let head = packet.first().map_or(0, |first| usize::from(first & 0x0f) * 4);
    let (from, to) = (packet.get(12..16), packet.get(16..20));
    let Some(echo) = packet.get(head..).filter(|_| packet.get(9) == Some(&1)) else { return false };
    from == Some(&GUEST)
        && to == Some(&HERE)
        && echo.first() == Some(&ECHO_REPLY)
        && echo.get(4..6) == Some(&ID)
}

/// Returns the reply to an ARP request for this station's address.
fn arp_reply(frame: &[u8]) -> Option<Vec<u8>> {
    let request = frame.get(12..)?.strip_prefix(&ARP)?;
    // Ethernet, IPv4, lengths of both addresses; a request.
    let (sender, sender_ip, target) = (request.get(8..14)?, request.get(14..18)?, request.get(24..28)?);
    if request.get(..8)? != [0, 1, 8, 0, 6, 4, 0, 1] || target != HERE {
        return None;
    }
    let mut reply = vec![0, 1, 8, 0, 6, 4, 0, 2];
    reply.extend(HERE_MAC);
    reply.extend(HERE);
    reply.extend(sender);
    reply.extend(sender_ip);
    Some(ethernet(sender.try_into().ok()?, ARP, &reply))
}

fn ethernet(to: [u8; 6], kind: [u8; 2], content: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(14 + content.len());
    frame.extend(to);
    frame.extend(HERE_MAC);
    frame.extend(kind);
    frame.extend(content);
    // The minimum length of a frame from a card.
    frame.resize(frame.len().max(60), 0);
    frame
}

/// Returns the checksum of RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).copied().map_or(0, u32::from));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// A guest's network card: frames preceded by their lengths.
    struct Card {
        stream: UnixStream,
        frames: Frames,
    }

    impl Card {
        fn connect(path: &Path) -> Self {
            let stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            Self { stream, frames: Frames::default() }
        }

        fn receive(&mut self) -> Vec<u8> {
            let mut buffer = [0; 7];
            loop {
                if let Some(frame) = self.frames.next() {
                    return frame;
                }
                let count = self.stream.read(&mut buffer).unwrap();
                self.frames.add(&buffer[..count]).unwrap();
            }
        }

        fn send(&mut self, frame: &[u8]) {
            send(&mut self.stream, frame).unwrap();
        }
    }

    /// Returns a guest's request for the address of this station.
    fn who_has(address: [u8; 4]) -> Vec<u8> {
        let mut request = vec![0, 1, 8, 0, 6, 4, 0, 1];
        request.extend(GUEST_MAC);
        request.extend(GUEST);
        request.extend([0; 6]);
        request.extend(address);
        let mut frame = ethernet([0xff; 6], ARP, &request);
        frame[6..12].copy_from_slice(&GUEST_MAC);
        frame
    }

    /// Returns a guest's reply to a request.
    fn answer_to(request: &[u8]) -> Vec<u8> {
        let mut frame = request.to_vec();
        frame[..6].copy_from_slice(&HERE_MAC);
        frame[6..12].copy_from_slice(&GUEST_MAC);
        frame[26..30].copy_from_slice(&GUEST);
        frame[30..34].copy_from_slice(&HERE);
        frame[34] = ECHO_REPLY;
        frame
    }

    #[tokio::test]
    async fn a_guest_that_asks_for_the_senders_address_and_answers_late_has_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("net");
        let pinger = Pinger::listen(&path).unwrap();
        assert_eq!(pinger.answered(LIMIT).await, None, "no card is connected");
        let guest = std::thread::spawn(move || {
            let mut card = Card::connect(&path);
            let begun = Instant::now();
            // The first three requests are lost: the guest's interface has no address yet.
            for _ in 0..3 {
                card.receive();
            }
            card.send(&who_has(HERE));
            let reply = loop {
                let frame = card.receive();
                if frame[12..14] == ARP {
                    break frame;
                }
            };
            assert_eq!((&reply[..6], &reply[22..32]), (&GUEST_MAC[..], &[&HERE_MAC[..], &HERE].concat()[..]));
            let request = card.receive();
            card.send(&answer_to(&request));
            begun
        });
        let begun = tokio::task::spawn_blocking(|| guest.join().unwrap()).await.unwrap();
        let answered = pinger.answered(LIMIT).await.unwrap();
        assert!(answered.duration_since(begun) >= 2 * EVERY, "{:?}", answered.duration_since(begun));
    }

    #[tokio::test]
    async fn a_card_that_says_nothing_or_garbage_has_no_answer() {
        for garbage in [&b""[..], &[0xff; 64], &[0, 0, 0, 3, 1, 2, 3]] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("net");
            let pinger = Pinger::listen(&path).unwrap();
            let mut card = Card::connect(&path);
            card.stream.write_all(garbage).unwrap();
            card.receive();
            assert_eq!(pinger.answered(Duration::from_millis(50)).await, None);
            drop(pinger);
        }
    }

    #[test]
    fn only_the_guests_answer_to_this_station_counts() {
        let request = echo_request(7);
        let answer = answer_to(&request);
        assert!(is_answer(&answer) && !is_answer(&request));
        // Each byte in turn: kind of frame, protocol, sender, recipient, message and identifier.
        for at in [12, 23, 29, 33, 34, 38] {
            let mut other = answer.clone();
            other[at] ^= 1;
            assert!(!is_answer(&other), "byte {at}");
        }
        assert!((0..answer.len()).all(|length| length > 39 || !is_answer(&answer[..length])));
        assert_eq!(arp_reply(&who_has([10, 0, 2, 3])), None);
        assert!((0..42).all(|length| arp_reply(&who_has(HERE)[..length]).is_none()));
    }

    #[test]
    fn checksums_are_those_of_the_rfc() {
        // RFC 1071's example.
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        let request = echo_request(1);
        assert_eq!((checksum(&request[14..34]), checksum(&request[34..])), (0, 0));
        assert_eq!(request.len(), 14 + 20 + 56);
    }
}
