//! The output of a VMM or a guest, in a file of bounded size.
//!
//! Both may be hostile: however much they print, two halves of the bound stay on disk (the older one in `NAME.1`),
//! and lines shown to people have no control characters.

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
};
use tokio_util::sync::CancellationToken;

use sandboxer_process::socket;

/// Bytes read at once.
const CHUNK: usize = 1 << 10;
/// Bytes at a file's end that [`Capture::last_lines`] reads.
const TAIL: u64 = 4 << 10;
/// Characters shown of one line.
const LINE: usize = 240;
/// What a kernel prints first when it ends.
const PANIC: &str = "Kernel panic";
/// How long the last output of an ended process may take from pipe to file.
const DRAIN: Duration = Duration::from_secs(1);

/// A file by name in a directory that may be moved.
#[derive(Debug, Clone)]
struct Target {
    dir: Arc<std::fs::File>,
    name: &'static str,
}

impl Target {
    fn path(&self) -> PathBuf {
        socket::within(&self.dir, self.name)
    }

    /// Returns the path of the older half.
    fn older(&self) -> PathBuf {
        socket::within(&self.dir, &format!("{}.1", self.name))
    }
}

/// A file written from a stream by a task. The task ends with the stream or when this is dropped: the daemon that
/// adopts the VM must find the stream free.
#[derive(Debug)]
pub struct Capture {
    target: Target,
    task: AbortHandle,
    finished: CancellationToken,
}

impl Capture {
    /// Copies `from` to `name` in `dir`, after what is there already; keeps at most `bytes`.
    pub fn start<R>(from: R, dir: Arc<std::fs::File>, name: &'static str, bytes: u64) -> Self
    where
        R: AsyncRead + Send + Unpin + 'static,
    {
        let finished = CancellationToken::new();
        let done = finished.clone();
        let target = Target { dir, name };
        let copied_to = target.clone();
        let task = tokio::spawn(async move {
            if let Err(error) = copy(from, &copied_to, bytes / 2).await {
                let path = std::fs::read_link(socket::within(&copied_to.dir, "."));
                tracing::warn!(name, ?path, %error, "stopped capturing output");
            }
            done.cancel();
        })
        .abort_handle();
        Self { target, task, finished }
    }

    /// Waits, for a second at most, until all output of an ended process is in the file.
    pub async fn drained(&self) {
        // Timed out: a child process that still lives has the output open.
        let _ = tokio::time::timeout(DRAIN, self.finished.cancelled()).await;
    }

    /// Returns the last `count` lines that are not empty, fit to be shown. A kernel's panic is the first of them: the trace that follows
    /// it may be longer.
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

async fn copy(mut from: impl AsyncRead + Unpin, target: &Target, half: u64) -> io::Result<()> {
    let mut file = Box::pin(append(&target.path())).await?;
    let mut length = Box::pin(file.metadata()).await?.len();
    loop {
        let chunk = match read(&mut from).await {
            Ok(chunk) if chunk.is_empty() => return file.flush().await,
            Ok(chunk) => chunk,
            // A socket whose other end was killed.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return file.flush().await,
            Err(error) => return Err(error),
        };
        length += chunk.len() as u64;
        // Boxed: waiting for output takes longer than writing it.
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

/// Waits for the next bytes; none at the end. There is no buffer while it waits: most guests are silent most of the time.
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

/// Returns a line without colours, cursor movements and other control characters, cut to [`LINE`].
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
        let kept = length("console.log.1") + length("console.log");
        assert!(kept <= 200_000 + 2 * CHUNK as u64, "{kept} bytes kept");
        assert_eq!(capture.last_lines(2).await, ["line 99998", "line 99999"]);
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
