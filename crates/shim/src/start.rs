//! `start`: a containerd without a sandbox controller requests a task server for each container, including a pod's
//! sandbox container. The resident daemon serves all of them, so this program prints the daemon's socket and exits.
//!
//! | containerd | standard input | answer |
//! |---|---|---|
//! | 1.6 | the runtime's options, or nothing | `unix:///path` |
//! | 1.7 to 2.2, by `MAX_SHIM_VERSION` | the same | JSON |
//! | 2.3 and later, by `MAX_SHIM_VERSION` | `BootstrapParams` | JSON |
//! | none: CRI-O, which has no address of its own | nothing | `unix:///path` |

use std::{
    env, fs,
    io::{self, Read},
    os::unix::{fs::OpenOptionsExt, net::UnixStream},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, ensure};
use containerd_shim_protos::bootstrap_api::BootstrapParams;
use protobuf::{
    Message, UnknownValueRef,
    well_known_types::{any::Any, empty::Empty},
};
use serde_json::json;

use crate::{args::Args, bundle};

/// The variable with the path of the daemon's configuration, for callers whose options do not arrive here.
const CONFIG_VARIABLE: &str = "SANDBOXER_CONFIG";
/// The daemon's configuration, unless the runtime's options or that variable name another file.
const CONFIG: &str = "/etc/sandboxer/config.toml";
/// The daemon's default `run_dir`.
const RUN_DIR: &str = "/run/sandboxer";
/// The daemon's task service in that directory.
const TASK_SOCKET: &str = "task.sock";
/// The most bytes of standard input, the limit of containerd's own programs.
const MAX_STDIN: u64 = 10 << 20;
/// The most bytes of a configuration file.
const MAX_CONFIG: u64 = 4 << 20;

/// The type of options for a runtime that containerd does not know, with or without a prefix.
const OPTIONS: &str = "runtimeoptions.v1.Options";
/// The field of these options with the path of a configuration file.
const CONFIG_PATH: u32 = 2;

/// The FIFO in a bundle from which CRI-O reads a shim's log.
const LOG: &str = "log";
/// How often, and at what interval, this program looks for that reader.
const LOG_LOOKS: u32 = 20;
const LOG_INTERVAL: Duration = Duration::from_millis(5);

/// The only version of the task service that all these containerds speak.
const TASK_VERSION: u32 = 2;

/// Hands the container in the bundle `dir` over to the daemon. Returns the response for containerd, in the form for its
/// `MAX_SHIM_VERSION`; `None`: containerd has set none.
pub fn start(args: &Args, dir: &Path, stdin: impl Read, max_version: Option<&str>) -> anyhow::Result<String> {
    let mut input = Vec::new();
    stdin.take(MAX_STDIN).read_to_end(&mut input).context("cannot read the runtime's options from stdin")?;
    let config = match config_path(&input, &args.id) {
        Some(path) => Some((path, "ConfigPath in containerd's options of this runtime")),
        None => env::var_os(CONFIG_VARIABLE)
            .filter(|path| !path.is_empty())
            .map(|path| (path.into(), CONFIG_VARIABLE)),
    };
    let socket = run_dir(config.as_ref().map(|(path, by)| (path.as_path(), *by)))?.join(TASK_SOCKET);
    // containerd's own error would not say which program is missing.
    UnixStream::connect(&socket).with_context(|| {
        format!(
            "cannot start {:?}: sandboxer does not answer at {socket:?}; start it (systemctl start sandboxer)",
            args.id
        )
    })?;
    let address = format!("unix://{}", socket.display());
    bundle::write(dir, &address, &args.address)
        .with_context(|| format!("cannot write to the bundle {dir:?}"))?;
    let is_cri_o = args.address.is_empty();
    if is_cri_o {
        end_log(&dir.join(LOG));
    }
    Ok(match max_version {
        // CRI-O sets a version, as the library does that it uses, and reads no JSON before release 1.35.
        _ if is_cri_o => address,
        None => address,
        Some(_) => json!({ "version": TASK_VERSION, "address": address, "protocol": "ttrpc" }).to_string(),
    })
}

/// Opens and closes the FIFO of a shim's log for writing. CRI-O has a thread that waits for a writer, and would keep it for
/// as long as it runs.
#[expect(clippy::disallowed_methods, reason = "no event tells that a FIFO has a reader")]
fn end_log(path: &Path) {
    for _ in 0..LOG_LOOKS {
        let opened = fs::OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path);
        // Without a reader yet.
        if !opened.is_err_and(|error| error.raw_os_error() == Some(libc::ENXIO)) {
            return;
        }
        thread::sleep(LOG_INTERVAL);
    }
}

/// Returns the configuration file that the runtime's options name.
fn config_path(input: &[u8], id: &str) -> Option<PathBuf> {
    let options = match BootstrapParams::parse_from_bytes(input) {
        // Options have a type in this field, not an ID.
        Ok(params) if params.instance_id == id => {
            let mut extensions = params.extensions.into_iter().filter_map(|entry| entry.value.into_option());
            extensions.find(is_options)?
        }
        _ => Any::parse_from_bytes(input).ok().filter(is_options)?,
    };
    // This message has no fields of its own, so all fields are unknown ones.
    let fields = Empty::parse_from_bytes(&options.value).ok()?;
    match fields.special_fields.unknown_fields().get(CONFIG_PATH)? {
        UnknownValueRef::LengthDelimited(path) if !path.is_empty() => {
            String::from_utf8(path.to_vec()).ok().map(PathBuf::from)
        }
        _ => None,
    }
}

fn is_options(any: &Any) -> bool {
    any.type_url.rsplit('/').next() == Some(OPTIONS)
}

/// Returns `run_dir` of the daemon's configuration. Only that key is read: the daemon checks the others. `named`: the
/// path, and what names it.
fn run_dir(named: Option<(&Path, &str)>) -> anyhow::Result<PathBuf> {
    let path = named.map_or(CONFIG.as_ref(), |(path, _)| path);
    let text = match fs::File::open(path) {
        Ok(file) => {
            let mut text = String::new();
            let read = file.take(MAX_CONFIG).read_to_string(&mut text);
            read.with_context(|| format!("cannot read sandboxer's configuration {path:?}"))?;
            text
        }
        // The file at the default path is optional.
        Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => {
            let by = named.map_or("nothing", |(_, by)| by);
            return Err(error).with_context(|| {
                format!("cannot read sandboxer's configuration {path:?}, which {by} names")
            });
        }
    };
    let table: toml::Table = text.parse().with_context(|| format!("{path:?} is not valid TOML"))?;
    let run_dir = match table.get("run_dir") {
        None => RUN_DIR.into(),
        Some(value) => PathBuf::from(value.as_str().unwrap_or_default()),
    };
    ensure!(run_dir.is_absolute(), "run_dir in {path:?} must be an absolute path");
    Ok(run_dir)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::args::Action;

    const ID: &str = "c1";

    /// A bundle, and a daemon's configuration and socket beside it.
    struct Place {
        dir: tempfile::TempDir,
        _daemon: UnixListener,
    }

    impl Place {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("bundle")).unwrap();
            let daemon = UnixListener::bind(dir.path().join(TASK_SOCKET)).unwrap();
            let config = format!("# ours\nrun_dir = {:?}\nlater = \"x\"\n", dir.path());
            fs::write(dir.path().join("config.toml"), config).unwrap();
            Self { dir, _daemon: daemon }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn start(&self, stdin: &[u8], max_version: Option<&str>) -> anyhow::Result<String> {
            self.start_by("/run/containerd/containerd.sock", stdin, max_version)
        }

        fn start_by(&self, address: &str, stdin: &[u8], max_version: Option<&str>) -> anyhow::Result<String> {
            let args = Args {
                action: Action::Start,
                namespace: "k8s.io".into(),
                id: ID.into(),
                address: address.into(),
                bundle: None,
            };
            start(&args, &self.path("bundle"), stdin, max_version)
        }
    }

    /// Returns options in the form in which containerd packs them.
    fn options(type_url: &str, config: &Path) -> Any {
        let path = config.display().to_string();
        let value = message(&[(1, b"some.type"), (CONFIG_PATH, path.as_bytes())]);
        Any { type_url: type_url.to_owned(), value, ..Default::default() }
    }

    fn message(fields: &[(u32, &[u8])]) -> Vec<u8> {
        let mut message = Empty::new();
        for (number, bytes) in fields {
            let unknown = message.special_fields.mut_unknown_fields();
            unknown.add_length_delimited(*number, bytes.to_vec());
        }
        message.write_to_bytes().unwrap()
    }

    #[test]
    fn each_containerd_gets_the_address_in_its_own_form() {
        let place = Place::new();
        let any = options(OPTIONS, &place.path("config.toml"));
        let address = format!("unix://{}", place.path(TASK_SOCKET).display());
        let plain = any.write_to_bytes().unwrap();
        let (other, ours) = (message(&[(1, b"\x0a\x01x")]), message(&[(1, &plain)]));
        let params = message(&[(1, ID.as_bytes()), (2, b"k8s.io"), (8, &other), (8, &ours)]);
        assert_eq!(place.start(&plain, None).unwrap(), address);
        for stdin in [plain, params] {
            let answer: serde_json::Value =
                serde_json::from_str(&place.start(&stdin, Some("2")).unwrap()).unwrap();
            assert_eq!(answer, json!({ "version": 2, "address": address, "protocol": "ttrpc" }));
        }
        let prefixed = options(&format!("type.googleapis.com/{OPTIONS}"), &place.path("config.toml"));
        assert_eq!(place.start(&prefixed.write_to_bytes().unwrap(), None).unwrap(), address);
    }

    /// CRI-O sends its options to the daemon alone, and makes the FIFO before it runs this program.
    #[test]
    fn cri_o_gets_the_plain_address_and_the_end_of_the_log() {
        let place = Place::new();
        let log = place.path("bundle/log");
        nix::unistd::mkfifo(&log, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let reader = thread::spawn(move || fs::read(log).unwrap());
        let any = options(OPTIONS, &place.path("config.toml")).write_to_bytes().unwrap();
        let address = format!("unix://{}", place.path(TASK_SOCKET).display());
        assert_eq!(place.start_by("", &any, Some("2")).unwrap(), address);
        assert_eq!(reader.join().unwrap(), b"");
        let launched = fs::read(place.path("bundle").join(bundle::LAUNCHED)).unwrap();
        assert_eq!(
            serde_json::from_slice::<serde_json::Value>(&launched).unwrap(),
            json!({ "containerd": "" })
        );
        // Nothing waits where there is no FIFO.
        fs::remove_file(place.path("bundle/log")).unwrap();
        place.start_by("", &any, Some("2")).unwrap();
    }

    #[test]
    fn the_bundle_says_where_the_daemon_is_and_where_containerd_is() {
        let place = Place::new();
        let any = options(OPTIONS, &place.path("config.toml")).write_to_bytes().unwrap();
        let address = place.start(&any, None).unwrap();
        // A second start follows: containerd may try again.
        place.start(&any, None).unwrap();
        assert_eq!(fs::read_to_string(place.path("bundle/address")).unwrap(), address);
        let launched: serde_json::Value =
            serde_json::from_slice(&fs::read(place.path("bundle").join(bundle::LAUNCHED)).unwrap()).unwrap();
        assert_eq!(launched, json!({ "containerd": "/run/containerd/containerd.sock" }));
        assert_eq!(fs::read_dir(place.path("bundle")).unwrap().count(), 2, "nothing else is left there");
    }

    #[test]
    fn what_is_missing_is_named() {
        let place = Place::new();
        let start = |config: &str| {
            let any = options(OPTIONS, &place.path(config)).write_to_bytes().unwrap();
            format!("{:#}", place.start(&any, None).unwrap_err())
        };
        let error = start("nowhere.toml");
        assert!(error.contains("nowhere.toml\"") && error.contains("ConfigPath"), "{error}");
        fs::write(place.path("broken.toml"), "run_dir = \n").unwrap();
        assert!(start("broken.toml").contains("is not valid TOML"));
        fs::write(place.path("relative.toml"), "run_dir = \"run\"\n").unwrap();
        assert!(start("relative.toml").contains("must be an absolute path"));
        fs::write(place.path("empty.toml"), format!("run_dir = {:?}\n", place.path("none"))).unwrap();
        let error = start("empty.toml");
        assert!(error.contains("none/task.sock") && error.contains("systemctl start sandboxer"), "{error}");
    }

    /// This program does not use the daemon's crates, which have these defaults.
    #[test]
    fn defaults_are_the_daemons() {
        assert_eq!(sandboxer_config::Config::default().run_dir, Path::new(RUN_DIR));
        assert_eq!(sandboxer_config::DEFAULT_PATH, CONFIG);
        assert_eq!(sandboxer_base::sockets::TASK, TASK_SOCKET);
    }

    #[test]
    fn options_of_others_are_not_ours() {
        let path = Path::new("/etc/x.toml");
        let any = |type_url: &str| options(type_url, path).write_to_bytes().unwrap();
        assert_eq!(config_path(&any(OPTIONS), ID).as_deref(), Some(path));
        assert_eq!(config_path(&any("containerd.runc.v1.Options"), ID), None);
        assert_eq!(config_path(&[], ID), None);
        assert_eq!(config_path(b"\xff\xff\xff", ID), None);
        assert_eq!(config_path(&options(OPTIONS, Path::new("")).write_to_bytes().unwrap(), ID), None);
    }
}
