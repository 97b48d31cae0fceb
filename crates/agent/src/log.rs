//! The agent's log: lines on the console and, in a worker, the causes of its failure.
//!
//! libcontainer drops the sources of many errors between its processes, but logs each error where it occurs. So a
//! worker and the processes it forks send their `error` events to the agent through a pipe, and the agent quotes the
//! first (innermost) one.

use std::{
    fmt::Write as _,
    io::Write as _,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::atomic::{AtomicI32, Ordering},
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span,
    subscriber::Interest,
};
use tracing_subscriber::filter::Targets;

/// The default filter. libcontainer's errors are quoted in failures; on a slow serial console they would only cost
/// time.
const DEFAULT_FILTER: &str = "warn,libcontainer=off,libcgroups=off";

/// The longest line, bytes.
const MAX_LINE: usize = 2048;

/// The pipe to which a worker reports causes; -1 in the agent itself.
static CAUSES: AtomicI32 = AtomicI32::new(-1);

/// The prefix of an error that libcontainer logged, in the pipe of causes.
pub const LOGGED: char = 'L';
/// The prefix of the complete reason why the payload cannot be executed, in the pipe of causes.
pub const PAYLOAD: char = 'P';

/// Starts logging to the console. `filter` has the syntax of `RUST_LOG`; an invalid one is replaced by the default,
/// with a warning.
pub fn start(filter: Option<&str>) {
    let (targets, invalid) = match filter.map(str::parse::<Targets>) {
        Some(Ok(targets)) => (targets, None),
        Some(Err(error)) => (default_targets(), Some(error)),
        None => (default_targets(), None),
    };
    let _ = tracing::subscriber::set_global_default(Console { targets });
    if let Some(error) = invalid {
        tracing::warn!("invalid log filter in sandboxer.log ({error}); using {DEFAULT_FILTER}");
    }
}

fn default_targets() -> Targets {
    DEFAULT_FILTER.parse().unwrap_or_else(|_| Targets::new().with_default(Level::WARN))
}

/// Marks this process as a worker: errors also go to `pipe`.
pub fn into_worker(pipe: RawFd) {
    CAUSES.store(pipe, Ordering::Relaxed);
}

/// Returns whether this process is a worker or a descendant of one.
pub fn is_worker() -> bool {
    CAUSES.load(Ordering::Relaxed) >= 0
}

/// Sends one cause to the agent; drops what does not fit in the pipe.
pub fn cause(kind: char, text: &str) {
    let fd = CAUSES.load(Ordering::Relaxed);
    if fd < 0 {
        return;
    }
    let mut line: String = text.chars().map(|c| if c == '\n' { ' ' } else { c }).take(MAX_LINE).collect();
    line.insert(0, kind);
    line.push('\n');
    // SAFETY: a worker keeps this descriptor open until it executes another program or exits, and nothing
    // here closes it.
    let pipe = unsafe { BorrowedFd::borrow_raw(fd) };
    let _ = nix::unistd::write(pipe, line.as_bytes());
}

/// Prints a line on the console regardless of the filter.
pub fn print(text: &str) {
    let _ = writeln!(std::io::stderr(), "sandboxer-agent: {text}");
}

struct Console {
    targets: Targets,
}

impl Console {
    fn prints(&self, metadata: &Metadata<'_>) -> bool {
        self.targets.would_enable(metadata.target(), metadata.level())
    }
}

impl Subscriber for Console {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match (self.prints(metadata), *metadata.level()) {
            (true, _) => Interest::always(),
            // Decided at each event, since it depends on the process.
            (false, Level::ERROR) => Interest::sometimes(),
            (false, _) => Interest::never(),
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        // Errors must always pass: a worker reports them.
        None
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.prints(metadata) || (*metadata.level() == Level::ERROR && is_worker())
    }

    // Spans are not shown: the console is read only to find failures.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let metadata = event.metadata();
        let text = format!("{}{}", line.message, line.fields);
        if *metadata.level() == Level::ERROR && is_worker() {
            cause(LOGGED, &text);
        }
        if self.prints(metadata) {
            print(&format!("{} {}: {text}", metadata.level(), metadata.target()));
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.message, "{value:?}");
        } else {
            let _ = write!(self.fields, " {}={value:?}", field.name());
        }
    }
}

/// Returns the descriptor's number, for [`into_worker`].
pub fn number(pipe: &impl AsRawFd) -> RawFd {
    pipe.as_raw_fd()
}
