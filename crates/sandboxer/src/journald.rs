//! Writes the log to journald with the fields of each event, so that `journalctl SANDBOXER_POD=ID` finds all lines of a
//! pod.
//!
//! The message is the text that would be written to standard error: readers would miss fields that only `journalctl -o
//! verbose` shows. Format: <https://systemd.io/JOURNAL_NATIVE_PROTOCOL>.

use std::{
    fmt::{self, Write as _},
    io::{self, Write as _},
    os::{linux::fs::MetadataExt, unix::net::UnixDatagram},
    path::Path,
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{Layer, layer::Context};

/// Path of journald's socket.
const SOCKET: &str = "/run/systemd/journal/socket";
/// Maximum length of a value, bytes; longer ones are cut. A datagram has at most about 200 KiB, an event fewer than ten
/// values.
const MOST: usize = 16 << 10;

/// Sends events to journald.
#[derive(Debug)]
pub struct Journald(UnixDatagram);

impl Journald {
    /// Returns the layer if this process's standard error is a stream of journald, as systemd indicates by
    /// `JOURNAL_STREAM`, and journald's socket exists.
    pub fn of_stderr() -> Option<Self> {
        let stream = std::env::var("JOURNAL_STREAM").ok()?;
        let own = std::fs::metadata("/proc/self/fd/2").ok()?;
        (stream == format!("{}:{}", own.st_dev(), own.st_ino()))
            .then(|| Self::connect(SOCKET.as_ref()).ok())?
    }

    /// Connects to the socket at `path`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        // A journald that hangs loses lines; it does not hang the daemon.
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }
}

impl<S: Subscriber> Layer<S> for Journald {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut entry = Entry::new(event.metadata());
        event.record(&mut entry);
        match self.0.send(&entry.finish()) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                // journald was restarted with another socket. The stream may still be read.
                let _ = writeln!(io::stderr(), "{}", entry.message);
            }
            _ => {}
        }
    }
}

/// An entry of the journal.
struct Entry {
    fields: Vec<u8>,
    message: String,
    /// The text that follows the message.
    details: String,
}

impl Entry {
    fn new(metadata: &Metadata<'_>) -> Self {
        let mut entry = Self { fields: Vec::new(), message: String::new(), details: String::new() };
        entry.add("PRIORITY", priority(*metadata.level()));
        entry.add("SYSLOG_IDENTIFIER", "sandboxer");
        entry.add("SANDBOXER_TARGET", metadata.target());
        entry
    }

    /// Adds a field. The name is one of ours: upper case, digits and underscores.
    fn add(&mut self, name: &str, value: &str) {
        let value = cut(value);
        self.fields.extend(name.bytes());
        // With its length, the value may contain any bytes, including the line feed that separates fields.
        self.fields.push(b'\n');
        self.fields.extend((value.len() as u64).to_le_bytes());
        self.fields.extend(value.bytes());
        self.fields.push(b'\n');
    }

    fn finish(&mut self) -> Vec<u8> {
        let details = std::mem::take(&mut self.details);
        self.message.push_str(&details);
        let message = std::mem::take(&mut self.message);
        self.add("MESSAGE", &message);
        self.message = message;
        std::mem::take(&mut self.fields)
    }
}

impl Visit for Entry {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            return self.message.push_str(value);
        }
        // An unknown name of a pod is not a field.
        if value.is_empty() {
            return;
        }
        let name: String =
            field.name().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        self.add(&format!("SANDBOXER_{}", name.to_ascii_uppercase()), value);
        let _ = write!(self.details, " {}={value:?}", field.name());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

/// Returns the level's number in syslog.
fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        Level::DEBUG | Level::TRACE => "7",
    }
}

/// Returns the first [`MOST`] bytes of a text at most.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(MOST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// Receives from a double of journald: a socket that only receives.
    fn received(socket: &UnixDatagram) -> BTreeMap<String, String> {
        let mut buffer = vec![0; 1 << 20];
        let length = socket.recv(&mut buffer).unwrap();
        let mut rest = &buffer[..length];
        let mut fields = BTreeMap::new();
        while !rest.is_empty() {
            let end = rest.iter().position(|&byte| byte == b'\n').unwrap();
            let name = String::from_utf8(rest[..end].to_vec()).unwrap();
            let (size, value) = rest[end + 1..].split_at(8);
            let size = u64::from_le_bytes(size.try_into().unwrap()) as usize;
            fields.insert(name, String::from_utf8(value[..size].to_vec()).unwrap());
            assert_eq!(value[size], b'\n');
            rest = &value[size + 1..];
        }
        fields
    }

    #[test]
    fn an_event_has_the_fields_of_its_pod() {
        let dir = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(dir.path().join("socket")).unwrap();
        let layer = Journald::connect(&dir.path().join("socket")).unwrap();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let text = "two\nSANDBOXER_POD=forged";
            tracing::warn!(pod = %"5a1de5", namespace = "web", uid = "", reason = text, count = 3, "pod failed");
            tracing::info!(detail = "x".repeat(1 << 20), "long");
        });
        let fields = received(&socket);
        for (name, value) in [
            (
                "MESSAGE",
                r#"pod failed pod="5a1de5" namespace="web" reason="two\nSANDBOXER_POD=forged" count="3""#,
            ),
            ("PRIORITY", "4"),
            ("SYSLOG_IDENTIFIER", "sandboxer"),
            ("SANDBOXER_POD", "5a1de5"),
            ("SANDBOXER_NAMESPACE", "web"),
            ("SANDBOXER_REASON", "two\nSANDBOXER_POD=forged"),
            ("SANDBOXER_COUNT", "3"),
        ] {
            assert_eq!(fields.get(name).map(String::as_str), Some(value), "{name}: {fields:?}");
        }
        assert!(!fields.contains_key("SANDBOXER_UID"));
        assert_eq!(received(&socket)["SANDBOXER_DETAIL"].len(), MOST);
    }

    #[test]
    fn a_journald_that_does_not_read_does_not_hold_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let _socket = UnixDatagram::bind(dir.path().join("socket")).unwrap();
        let layer = Journald::connect(&dir.path().join("socket")).unwrap();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            // Far more than a socket holds.
            for _ in 0..10_000 {
                tracing::info!("nobody reads this");
            }
        });
    }
}
