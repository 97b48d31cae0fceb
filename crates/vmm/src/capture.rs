//! The output of a VMM or a guest, in a file of bounded size.
//!
//! Both may be hostile. However much they print, at most two halves of the bound stay on disk (the older half in
//! `NAME.1`), and lines shown to people contain no control characters. After a burst, reading is paced so that it
//! takes little of the daemon's time, and unread output blocks the writer.

use std::{
    future::poll_fn,
    io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Poll, ready},
    time::Duration,
};

use tokio::{
    fs::{self, File, OpenOptions},
    io::{AsyncRead, AsyncReadExt, AsyncSeekExt, AsyncWriteExt, ReadBuf},
    task::AbortHandle,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use sandboxer_process::socket;

/// Bytes per read.
const CHUNK: usize = 16 << 10;
/// Bytes that are read without pacing: more than a kernel prints while it boots.
const BURST: i64 = 512 << 10;
/// Bytes read per second once the burst is used up.
const RATE: i64 = 64 << 10;
/// Bytes that a read counts for at least, however small it is: each costs a read and a write.
const PIECE: usize = 512;
/// Bytes at a file's end that [`Capture::last_lines`] reads.
const TAIL: u64 = 4 << 10;
/// Maximum number of characters shown of one line.
const LINE: usize = 240;
/// The first words that a kernel prints when it panics.
const PANIC: &str = "Kernel panic";
/// How long the last output of an ended process may take from pipe to file.
const DRAIN: Duration = Duration::from_secs(1);

/// A file that is named relative to a directory, which may be moved.
#[derive(Debug, Clone)]
struct Target {
    dir: Arc<std::fs::File>,
    name: &'static str,
}

impl Target {
    fn path(&self) -> PathBuf {
        socket::within(&self.dir, self.name)
    }

    /// Returns the path of the older half of the file.
    fn older(&self) -> PathBuf {
        socket::within(&self.dir, &format!("{}.1", self.name))
    }
}

/// A file that a task writes from a stream. The task ends with the stream or when this is dropped, because the daemon
/// that adopts the VM must find the stream free.
#[derive(Debug)]
pub struct Capture {
    target: Target,
    task: AbortHandle,
    /// Whether the writing process has ended, so that the rest is read without pacing.
    ended: CancellationToken,
    finished: CancellationToken,
}

impl Capture {
    /// Appends `from` to `name` in `dir` and keeps at most `bytes` bytes.
    pub fn start<R>(from: R, dir: Arc<std::fs::File>, name: &'static str, bytes: u64) -> Self
    where
        R: AsyncRead + Send + Unpin + 'static,
    {
        let (ended, finished) = (CancellationToken::new(), CancellationToken::new());
        let (pace, done) = (Pace::new(ended.clone()), finished.clone());
        let target = Target { dir, name };
        let copied_to = target.clone();
        let task = tokio::spawn(async move {
            if let Err(error) = copy(from, &copied_to, bytes / 2, pace).await {
                let path = std::fs::read_link(socket::within(&copied_to.dir, "."));
                tracing::warn!(name, ?path, %error, "stopped capturing output");
            }
            done.cancel();
        })
        .abort_handle();
        Self { target, task, ended, finished }
    }

    /// Waits, for a second at most, until all output of an ended process is in the file.
    pub async fn drained(&self) {
        self.ended.cancel();
        // On a timeout, a child process that still lives has the output open.
        let _ = tokio::time::timeout(DRAIN, self.finished.cancelled()).await;
    }

    /// Returns the last `count` non-empty lines, fit to be shown. A kernel panic always comes first, because the trace
    /// after it may be longer than `count` lines.
    pub async fn last_lines(&self, count: usize) -> Vec<String> {
        let mut bytes = Vec::new();
        for path in [self.target.older(), self.target.path()] {
            // A missing file is fine.
            let _ = read_tail(&path, &mut bytes).await;
        }
        let text = String::from_utf8_lossy(&bytes);
        let mut lines: Vec<_> = text.lines().map(printable).filter(|line| !line.is_empty()).collect();
        let mut last = lines.split_off(lines.len().saturating_sub(count));
        if let Some(panic) = lines.into_iter().rev().find(|line| line.contains(PANIC))
            && let Some(first) = last.first_mut()
        {
            *first = panic;
        }
        last
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A budget of bytes that may be read now.
#[derive(Debug)]
struct Pace {
    /// Bytes left; negative after a read that was larger than the budget.
    left: i64,
    since: Instant,
    ended: CancellationToken,
}

impl Pace {
    fn new(ended: CancellationToken) -> Self {
        Self { left: BURST, since: Instant::now(), ended }
    }

    /// Waits until the next read is allowed.
    async fn wait(&mut self) {
        if self.left > 0 {
            return;
        }
        let missing = Duration::from_micros((1 - self.left).unsigned_abs() * 1_000_000 / RATE.unsigned_abs());
        tokio::select! {
            () = tokio::time::sleep_until(self.since + missing) => {}
            () = self.ended.cancelled() => {}
        }
    }

    /// Charges a read of `bytes` bytes to the budget.
    fn count(&mut self, bytes: usize) {
        let now = Instant::now();
        let earned = now.duration_since(self.since).as_micros().saturating_mul(RATE.unsigned_abs().into());
        let earned = i64::try_from(earned / 1_000_000).unwrap_or(BURST);
        let charged = i64::try_from(bytes.max(PIECE)).unwrap_or(BURST);
        self.left = self.left.saturating_add(earned).min(BURST) - charged;
        self.since = now;
    }
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    target: &Target,
    half: u64,
    mut pace: Pace,
) -> io::Result<()> {
    let mut file = Box::pin(append(&target.path())).await?;
    let mut length = Box::pin(file.metadata()).await?.len();
    loop {
        pace.wait().await;
        let chunk = match read(&mut from).await {
            Ok(chunk) if chunk.is_empty() => return file.flush().await,
            Ok(chunk) => chunk,
            // The other end was the socket of a killed process.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return file.flush().await,
            Err(error) => return Err(error),
        };
        length += chunk.len() as u64;
        pace.count(chunk.len());
        // Boxed: waiting for output takes much longer than writing it.
        Box::pin(write(&mut file, chunk)).await?;
        if length >= half {
            file = Box::pin(rotate(target)).await?;
            length = 0;
        }
    }
}

async fn write(file: &mut File, chunk: Vec<u8>) -> io::Result<()> {
    file.write_all(&chunk).await?;
    file.flush().await
}

async fn rotate(target: &Target) -> io::Result<File> {
    fs::rename(target.path(), target.older()).await?;
    append(&target.path()).await
}

/// Waits for the next bytes; empty at the end. No buffer is kept while it waits: most guests are silent most of the
/// time.
async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    poll_fn(|cx| {
        let mut chunk = [0; CHUNK];
        let mut chunk = ReadBuf::new(&mut chunk);
        ready!(Pin::new(&mut *from).poll_read(cx, &mut chunk))?;
        Poll::Ready(Ok(chunk.filled().to_vec()))
    })
    .await
}

async fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path).await
}

async fn read_tail(path: &Path, into: &mut Vec<u8>) -> io::Result<()> {
    let mut file = File::open(path).await?;
    let length = file.metadata().await?.len();
    file.seek(io::SeekFrom::Start(length.saturating_sub(TAIL))).await?;
    file.take(TAIL).read_to_end(into).await?;
    Ok(())
}

/// Returns the line without colours, cursor movements and other control characters, cut to [`LINE`] characters.
fn printable(line: &str) -> String {
    let mut shown = String::new();
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        if shown.len() >= LINE {
            shown.push('…');
            break;
        }
        match character {
            // An escape sequence ends with a letter.
            '\x1b' if characters.peek() == Some(&'[') => {
                characters.find(char::is_ascii_alphabetic);
            }
            '\t' => shown.push(' '),
            control if control.is_control() => {}
            other => shown.push(other),
        }
    }
    shown.truncate(shown.trim_end().len());
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_endless_printer_fills_its_bound_and_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let handle = Arc::new(socket::open(dir.path()).unwrap());
        let words: Vec<u8> = (0..100_000).flat_map(|n| format!("line {n}\n").into_bytes()).collect();
        let capture = Capture::start(std::io::Cursor::new(words), handle, "console.log", 200_000);
        capture.drained().await;
        let length = |name| dir.path().join(name).metadata().unwrap().len();
        let stored = length("console.log.1") + length("console.log");
        assert!(stored <= 200_000 + 2 * CHUNK as u64, "{stored} bytes kept");
        assert_eq!(capture.last_lines(2).await, ["line 99998", "line 99999"]);
    }

    /// A source that prints forever, so many bytes at a time, and counts its reads.
    struct Endless(usize, Arc<std::sync::atomic::AtomicUsize>);

    impl AsyncRead for Endless {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
            into: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            into.put_slice(&vec![b'x'; self.0.min(into.remaining())]);
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_prints_for_ever_takes_little_of_the_daemon() {
        for size in [1, CHUNK] {
            let dir = tempfile::tempdir().unwrap();
            let handle = Arc::new(socket::open(dir.path()).unwrap());
            let reads = Arc::<std::sync::atomic::AtomicUsize>::default();
            let capture = Capture::start(Endless(size, reads.clone()), handle, "console.log", 1 << 30);
            tokio::time::sleep(Duration::from_secs(30)).await;
            let reads = reads.load(std::sync::atomic::Ordering::Relaxed);
            let written = dir.path().join("console.log").metadata().unwrap().len();
            let most = u64::try_from(BURST + 30 * RATE).unwrap();
            assert!(written <= most + 2 * CHUNK as u64, "{written} bytes written");
            assert!(reads as u64 <= most / PIECE.max(size) as u64 + 2, "{reads} reads of {size} bytes");
            // Reading is slow, but does not stop.
            assert!(reads as u64 >= most / PIECE.max(size) as u64 / 2, "{reads} reads of {size} bytes");
            drop(capture);
        }
    }

    #[tokio::test]
    async fn lines_just_before_a_rotation_are_still_shown() {
        let dir = tempfile::tempdir().unwrap();
        let handle = Arc::new(socket::open(dir.path()).unwrap());
        let first = Capture::start(&b"Kernel panic - not syncing\n"[..], handle.clone(), "console.log", 20);
        first.drained().await;
        let next = Capture::start(&b"after\n"[..], handle, "console.log", 20);
        next.drained().await;
        assert_eq!(next.last_lines(5).await, ["Kernel panic - not syncing", "after"]);
    }

    #[tokio::test]
    async fn a_panic_is_shown_however_long_its_trace() {
        let dir = tempfile::tempdir().unwrap();
        let handle = Arc::new(socket::open(dir.path()).unwrap());
        let trace = "early\n[ 1.0] Kernel panic - not syncing\nCPU: 0\nCall Trace:\n ? a\n ? b\n";
        let capture = Capture::start(trace.as_bytes(), handle, "console.log", 20_000);
        capture.drained().await;
        assert_eq!(capture.last_lines(3).await, ["[ 1.0] Kernel panic - not syncing", " ? a", " ? b"]);
        assert_eq!(capture.last_lines(5).await.len(), 5);
        assert_eq!(capture.last_lines(6).await[0], "early");
    }

    #[test]
    fn what_a_guest_prints_cannot_steer_a_terminal() {
        assert_eq!(printable("\x1b[31mred\x1b[0m\x07 \x1b]0;title\t!\r"), "red ]0;title !");
        assert!(printable(&"x".repeat(10_000)).len() < 300);
    }
}
