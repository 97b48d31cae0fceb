//! Boots a pod's VM alone and measures the time to its agent's ready message.
//!
//! The arguments are read from the command line of a pod's own VMM; the sockets are new. There is no daemon, no disk
//! content and no container: the rest of a start over CRI is the runtime's time.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::io::FdFlags;
use sandboxer_protocol::{
    boot::{BootParams, InvalidBootParams},
    link::{self, LinkError, LinkKey},
};
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::process::{ChildStderr, Command};

/// Name of the character device that links to the agent.
const AGENT: &str = "agent";

/// Maximum bytes of a VMM's output in an error.
const MAX_OUTPUT_BYTES: u64 = 1024;

const NO_LINE: &str =
    "it has no kernel command line, like every copy of a template: use a handler whose pods boot";

/// Why a bare boot failed.
#[derive(Debug, thiserror::Error)]
pub enum BareBootError {
    /// The VMM's command line cannot be read.
    #[error("cannot read the command line of VMM {pid}")]
    Look {
        /// The VMM's process id.
        pid: i32,
        /// The system's error.
        source: io::Error,
    },
    /// The VMM cannot be started alone.
    #[error("VMM {pid} cannot be started alone: {reason}")]
    Unknown {
        /// The VMM's process id.
        pid: i32,
        /// The missing argument.
        reason: &'static str,
    },
    /// The kernel's command line has no usable boot parameters.
    #[error("VMM {pid} cannot be started alone")]
    NoKey {
        /// The VMM's process id.
        pid: i32,
        /// What is wrong with the boot parameters.
        source: InvalidBootParams,
    },
    /// A step on the host failed.
    #[error("cannot {action} for a bare boot")]
    Host {
        /// The attempted step.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The agent sent no ready message.
    #[error("no ready message of the agent in a bare boot{output}")]
    Link {
        /// The VMM's output after a colon, or empty.
        output: String,
        /// The link's error.
        source: LinkError,
    },
    /// The agent's ready message came too late.
    #[error("no ready message of the agent in a bare boot within {0:?}")]
    Timeout(Duration),
}

/// A VM to boot alone.
#[derive(Debug, Clone)]
pub struct BareBoot {
    program: PathBuf,
    arguments: Vec<OsString>,
    key: LinkKey,
}

impl BareBoot {
    /// Reads the VM of the VMM process `pid` from its command line.
    pub fn like(pid: i32) -> Result<Self, BareBootError> {
        let look = |source| BareBootError::Look { pid, source };
        let program = fs::read_link(format!("/proc/{pid}/exe")).map_err(look)?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).map_err(look)?;
        let words = line.split(|&byte| byte == 0).filter(|word| !word.is_empty());
        let arguments: Vec<OsString> = words.skip(1).map(|word| OsString::from_vec(word.to_vec())).collect();
        Self::new(pid, program, arguments)
    }

    fn new(pid: i32, program: PathBuf, arguments: Vec<OsString>) -> Result<Self, BareBootError> {
        let append = arguments.iter().skip_while(|word| *word != "-append").nth(1);
        let append = append.ok_or(BareBootError::Unknown { pid, reason: NO_LINE })?;
        let key = BootParams::parse(&append.to_string_lossy())
            .map_err(|source| BareBootError::NoKey { pid, source })?
            .link_key;
        if !arguments.iter().any(|word| socket(word).is_some_and(|(id, _)| id == AGENT)) {
            return Err(BareBootError::Unknown { pid, reason: "it has no agent socket" });
        }
        let arguments = without_files(arguments).into_iter().map(alone).collect();
        Ok(Self { program, arguments, key })
    }

    /// Boots once, and returns the time from the process's start to the agent's ready message. Kills the VM afterwards.
    pub async fn run(&self, limit: Duration) -> Result<Duration, BareBootError> {
        let host = |action| move |source| BareBootError::Host { action, source };
        let dir = tempfile::Builder::new()
            .prefix("sandboxer-bare-")
            .tempdir()
            .map_err(host("create a directory"))?;
        // The sockets exist before the VM, so nothing has to wait for them.
        let mut listeners = Vec::new();
        let mut arguments = self.arguments.clone();
        for word in &mut arguments {
            let Some((id, number)) = socket(word) else { continue };
            let listener = UnixListener::bind(dir.path().join(id)).map_err(host("create a socket"))?;
            rustix::io::fcntl_setfd(&listener, FdFlags::empty())
                .map_err(|error| host("pass on a socket")(error.into()))?;
            let text = word.to_string_lossy();
            let replaced = text.replace(&format!("fd={number}"), &format!("fd={}", listener.as_raw_fd()));
            listeners.push(listener);
            *word = replaced.into();
        }
        let begun = Instant::now();
        let mut vmm = Command::new(&self.program)
            .args(&arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(host("start a VMM"))?;
        let ready = async {
            let mut stream =
                UnixStream::connect(dir.path().join(AGENT)).await.map_err(host("connect to the agent"))?;
            // Drop only now: if the VMM exits at once, the connection is closed instead of refused.
            drop(listeners);
            let greeted = link::greet(&mut stream, &self.key).await;
            Ok(greeted.map(|_| begun.elapsed()))
        };
        let outcome = tokio::time::timeout(limit, ready).await.unwrap_or(Err(BareBootError::Timeout(limit)));
        vmm.kill().await.map_err(host("kill a VMM"))?;
        match outcome? {
            Ok(took) => Ok(took),
            Err(source) => Err(BareBootError::Link { output: first_output(vmm.stderr.take()).await, source }),
        }
    }
}

/// Returns the arguments without `-add-fd fd=NUMBER,set=SET`, which name disk files that the other process inherited.
fn without_files(arguments: Vec<OsString>) -> Vec<OsString> {
    let mut others = Vec::with_capacity(arguments.len());
    let mut words = arguments.into_iter();
    while let Some(word) = words.next() {
        if word == "-add-fd" {
            words.next();
        } else {
            others.push(word);
        }
    }
    others
}

/// Returns an argument changed for a lone VM: its memory is a new file, its disks are empty, and its network interfaces
/// are not connected.
fn alone(word: OsString) -> OsString {
    let Some(text) = word.to_str() else { return word };
    if let Some(empty) = empty_disk(text) {
        return empty.into();
    }
    let without = |fields: &[&str]| {
        let parts = text.split(',').filter(|part| !fields.iter().any(|field| part.starts_with(field)));
        parts.collect::<Vec<_>>().join(",")
    };
    match text.split(',').next() {
        Some("memory-backend-file") => {
            without(&["mem-path="]).replacen("memory-backend-file", "memory-backend-memfd", 1).into()
        }
        Some("tap") => format!("{},hubid=0", without(&["fd=", "vhost"]).replacen("tap", "hubport", 1)).into(),
        _ => word,
    }
}

/// Returns an empty image to replace one whose file the other process inherited.
fn empty_disk(text: &str) -> Option<String> {
    /// Larger than any disk.
    const BYTES: u64 = 64 << 40;
    let node: serde_json::Value = serde_json::from_str(text).ok()?;
    node["filename"].as_str()?.strip_prefix("/dev/fdset/")?;
    let (name, read_only) = (&node["node-name"], node["read-only"] == true);
    let driver = "null-co";
    Some(json!({"driver": driver, "node-name": name, "read-only": read_only, "size": BYTES, "read-zeroes": true}).to_string())
}

/// Returns the first output of a VMM that has ended, for an error.
async fn first_output(stderr: Option<ChildStderr>) -> String {
    let mut words = String::new();
    if let Some(stderr) = stderr {
        let _ = stderr.take(MAX_OUTPUT_BYTES).read_to_string(&mut words).await;
    }
    match words.trim() {
        "" => String::new(),
        words => format!(": {}", words.replace('\n', " | ")),
    }
}

/// Returns the id and number of an inherited socket: `socket,id=ID,fd=NUMBER,…`.
fn socket(word: &OsString) -> Option<(String, u32)> {
    let text = std::str::from_utf8(word.as_bytes()).ok()?.strip_prefix("socket,")?;
    let field = |name: &str| text.split(',').find_map(|part| part.strip_prefix(name));
    Some((field("id=")?.to_owned(), field("fd=")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split('|').map(OsString::from).collect()
    }

    #[test]
    fn a_vmm_without_an_agent_is_not_imitated() {
        let key = LinkKey::random().to_hex();
        let whole = format!("-append|quiet sandboxer.link={key}|-chardev|socket,id=agent,fd=9,server=on");
        assert!(BareBoot::new(1, "/bin/true".into(), words(&whole)).is_ok());
        for part in ["-m|256M", "-append|quiet", &format!("-append|sandboxer.link={key}")] {
            assert!(BareBoot::new(1, "/bin/true".into(), words(part)).is_err(), "{part}");
        }
    }

    #[test]
    fn what_belongs_to_another_process_is_not_asked_for() {
        let memory = "memory-backend-file,id=memory0,size=256M,mem-path=/proc/self/fd/865,share=on";
        assert_eq!(alone(memory.into()), "memory-backend-memfd,id=memory0,size=256M,share=on");
        for tap in ["tap,id=tap0,fd=869", "tap,id=tap0,fd=869,vhost=on,vhostfd=870"] {
            assert_eq!(alone(tap.into()), "hubport,id=tap0,hubid=0");
        }
        assert_eq!(without_files(words("-S|-add-fd|fd=29,set=9|-m|1M")), words("-S|-m|1M"));
        let disk = alone(r#"{"driver":"file","node-name":"f9","filename":"/dev/fdset/9"}"#.into());
        let disk: serde_json::Value = serde_json::from_slice(disk.as_bytes()).unwrap();
        assert_eq!((&disk["driver"], &disk["node-name"]), (&json!("null-co"), &json!("f9")));
        let slot = r#"{"driver":"raw","node-name":"t9","file":"f9"}"#;
        assert_eq!(alone(slot.into()), slot);
        assert_eq!(
            alone("virtio-net-device,id=nic0,netdev=tap0".into()),
            "virtio-net-device,id=nic0,netdev=tap0"
        );
    }

    #[tokio::test]
    async fn a_vmm_that_exits_at_once_gives_no_time_and_its_output_is_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("vmm");
        fs::write(&program, "#!/bin/sh\necho no such card >&2\n").unwrap();
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let key = LinkKey::random().to_hex();
        let line = format!("-append|sandboxer.link={key}|-chardev|socket,id=agent,fd=9,server=on");
        let boot = BareBoot::new(1, program, words(&line)).unwrap();
        let error = boot.run(Duration::from_secs(20)).await.unwrap_err();
        assert!(error.to_string().ends_with(": no such card"), "{error}");
    }
}
