//! containerd, and whether its sandbox requests reach this daemon.

use std::path::Path;

use sandboxer_base::{chain, sockets};
use sandboxer_config::{Config, DEFAULT_PATH};

use super::{
    cri::{HANDLER, Reading, Route, RuntimeStatus},
    program,
    verdict::{Check, Fix, Subject},
};

/// The runtime type that the configuration of [`HANDLER`] must have.
pub const RUNTIME_TYPE: &str = "io.containerd.sandboxer.v1";
/// The oldest version that works.
pub const OLDEST: (u32, u32) = (1, 6);
/// The first version with sandbox controllers of other processes. Older versions run the launcher for each pod.
pub const HAS_CONTROLLERS: (u32, u32) = (2, 0);
/// The newest tested version.
pub const SEEN: (u32, u32) = (2, 4);
/// All tested versions.
const TESTED: [(u32, u32); 7] = [(1, 6), (1, 7), (2, 0), (2, 1), (2, 2), (2, 3), SEEN];

/// The plugin that has the settings of containerd's CRI service since 2.0.
pub const CRI_OF_2: &str = "io.containerd.cri.v1.runtime";
/// The plugin that has the settings of containerd's CRI service in 1.6 and 1.7.
pub const CRI_OF_1: &str = "io.containerd.grpc.v1.cri";

const CONTAINERD: Subject = Subject { name: "containerd", why: "containerd starts and stops the pods" };
const ROUTE: Subject = Subject {
    name: "handler",
    why: "containerd sends pods of the handler \"sandboxer\" here only if it is configured so",
};

/// Checks that containerd responds and that its version works.
pub fn containerd(reading: &Reading) -> Check {
    let endpoint = &reading.endpoint;
    let runtime = match &reading.runtime {
        Ok(runtime) => runtime,
        Err(why) => {
            return CONTAINERD.failure(format!("{endpoint}: {why}"), without_answer(why));
        }
    };
    let seen = format!("{} {} at {endpoint}", runtime.name, runtime.version);
    if runtime.name != "containerd" {
        return CONTAINERD.failure(seen, Fix::words("use containerd 2.4 as the node's CRI runtime"));
    }
    let upgrade = || Fix::words("install containerd 2.4");
    match program::version(&runtime.version) {
        Some(version) if TESTED.contains(&version) => match version < HAS_CONTROLLERS {
            true => CONTAINERD
                .ok(format!("{seen}; it has no sandbox controllers and runs the launcher for each pod")),
            false => CONTAINERD.ok(seen),
        },
        Some(version) if version < OLDEST => CONTAINERD.failure(
            format!("{seen}, older than {}.{}, the oldest version that works", OLDEST.0, OLDEST.1),
            upgrade(),
        ),
        Some(version) if version < SEEN => CONTAINERD.warning(format!("{seen}, not tested"), upgrade()),
        Some(_) => CONTAINERD.warning(
            format!("{seen}, newer than the tested versions"),
            Fix::words("install containerd 2.4, or test whether pods run"),
        ),
        None => CONTAINERD.warning(format!("{seen}, unknown version"), upgrade()),
    }
}

/// Returns the fix if there is no response or if it is not CRI's.
fn without_answer(why: &str) -> Fix {
    // gRPC's error from a containerd that runs without CRI.
    if why.contains("unknown service runtime.v1") {
        return Fix::commands(
            "containerd runs without its CRI plugin: its log says why. containerd 2.3.0 needs mkfs.erofs 1.7 for it, or \
             unpack_config in its configuration; later versions do not",
            ["journalctl -u containerd | grep -E 'cri|transfer|erofs'"],
        );
    }
    Fix::commands(
        "start containerd as root, or set its socket with --endpoint",
        ["systemctl start containerd"],
    )
}

/// The daemon, as its configuration describes it.
#[derive(Debug, Clone, Copy)]
pub struct Daemon<'a> {
    /// Path of the daemon's sandbox controller socket.
    pub socket: &'a Path,
    /// Path of the daemon's configuration file; `None`: the default.
    pub config: Option<&'a Path>,
}

/// An error in containerd's configuration, and the lines that it lacks.
struct Misconfigured {
    seen: String,
    lines: Vec<String>,
}

/// Checks that the handler leads to `daemon`.
pub fn handler(reading: &Reading, route: Option<&Route>, daemon: Daemon<'_>) -> Check {
    let Some(runtime) = reading.runtime() else { return ROUTE.not_applicable("no containerd answers") };
    let found = match program::version(&runtime.version).is_some_and(|version| version < HAS_CONTROLLERS) {
        true => launched(runtime, route, daemon),
        false => controlled(runtime, route, daemon),
    };
    let route = match found {
        Ok(route) => route,
        Err(wrong) => return ROUTE.failure(wrong.seen, configure(runtime, &wrong.lines)),
    };
    let socket = daemon.socket.display();
    match &route.routed {
        Ok(()) => ROUTE.ok(format!("{HANDLER} leads to the daemon at {socket}")),
        Err(why) => ROUTE.failure(
            format!("the request to the daemon at {socket} failed: {why}"),
            Fix::commands("start the daemon", ["systemctl start sandboxer"]),
        ),
    }
}

/// Returns the fix that adds `lines` to the configuration of this containerd.
fn configure(runtime: &RuntimeStatus, lines: &[String]) -> Fix {
    let lines = lines.join("\n    ");
    if program::version(&runtime.version).is_some_and(|version| version < HAS_CONTROLLERS) {
        // These versions take a plugin's whole table from an imported file and drop the rest of the table.
        return Fix::commands(
            format!(
                "add to containerd's config.toml itself, not to an imported file, and restart containerd:\n    {lines}"
            ),
            [
                "sandboxer-cli check --containerd-config --apply /etc/containerd/config.toml --write",
                "systemctl restart containerd",
            ],
        );
    }
    Fix::commands(
        format!("add to containerd's configuration, and restart it:\n    {lines}"),
        [
            // Without this file containerd reads no other one either.
            "test -e /etc/containerd/config.toml || containerd config default > /etc/containerd/config.toml",
            "sandboxer-cli check --containerd-config > /etc/containerd/conf.d/sandboxer.toml",
            "systemctl restart containerd",
        ],
    )
}

/// Returns the lines of the handler's table, with these keys.
fn handler_lines(cri: &str, keys: &[(&str, &str)]) -> Vec<String> {
    let table = format!("[plugins.{cri:?}.containerd.runtimes.{HANDLER}]");
    let keys = keys.iter().map(|(key, value)| format!("{key} = {value:?}"));
    std::iter::once(table).chain(keys).collect()
}

fn text<'a>(handler: &'a serde_json::Value, key: &str) -> &'a str {
    handler.get(key).and_then(|value| value.as_str()).unwrap_or_default()
}

/// Returns the route of a containerd with sandbox controllers, or an error in its configuration.
fn controlled<'a>(
    runtime: &RuntimeStatus,
    route: Option<&'a Route>,
    Daemon { socket, .. }: Daemon<'_>,
) -> Result<&'a Route, Misconfigured> {
    let proxy = || {
        let table = format!("[proxy_plugins.{HANDLER}]");
        vec![table, "type = \"sandbox\"".to_owned(), format!("address = {socket:?}")]
    };
    let wrong = |seen: String, lines| Misconfigured { seen, lines };
    let Some((handler, route)) = runtime.handler().zip(route) else {
        let keys = [("runtime_type", RUNTIME_TYPE), ("sandboxer", HANDLER)];
        let lines = [proxy(), handler_lines(CRI_OF_2, &keys)].concat();
        return Err(wrong(format!("containerd has no runtime handler {HANDLER:?}"), lines));
    };
    let found = text(handler, "runtimeType");
    if found != RUNTIME_TYPE {
        let lines = handler_lines(CRI_OF_2, &[("runtime_type", RUNTIME_TYPE)]);
        return Err(wrong(format!("its runtime_type is {found:?}, not {RUNTIME_TYPE:?}"), lines));
    }
    let sandboxer = text(handler, "sandboxer");
    if sandboxer.is_empty() || sandboxer == OWN_SANDBOXER {
        let lines = [proxy(), handler_lines(CRI_OF_2, &[("sandboxer", HANDLER)])].concat();
        let seen =
            format!("its sandboxer is {sandboxer:?}: containerd makes a pause container for every pod");
        return Err(wrong(seen, lines));
    }
    let controller = match &route.controller {
        Ok(Some(controller)) => controller,
        Ok(None) => {
            return Err(wrong(
                format!("its sandboxer {sandboxer:?} is no proxy plugin of containerd"),
                proxy(),
            ));
        }
        Err(why) => return Err(wrong(format!("cannot list containerd's plugins: {why}"), proxy())),
    };
    if let Some(error) = &controller.error {
        return Err(wrong(
            format!("containerd's proxy plugin {sandboxer:?} did not start: {error}"),
            proxy(),
        ));
    }
    let address = controller.address.as_deref().unwrap_or_default();
    if Path::new(address.strip_prefix("unix://").unwrap_or(address)) != socket {
        let seen =
            format!("containerd's proxy plugin {sandboxer:?} is at {address:?}, the daemon at {socket:?}");
        return Err(wrong(seen, proxy()));
    }
    Ok(route)
}

/// The sandbox controller of containerd itself.
pub(super) const OWN_SANDBOXER: &str = "podsandbox";

/// Returns the route of a containerd without sandbox controllers, or an error in its configuration: the launcher must
/// find this daemon's configuration.
fn launched<'a>(
    runtime: &RuntimeStatus,
    route: Option<&'a Route>,
    Daemon { socket, config }: Daemon<'_>,
) -> Result<&'a Route, Misconfigured> {
    let options = || {
        let path = config.map(|path| {
            let table = format!("[plugins.{CRI_OF_1:?}.containerd.runtimes.{HANDLER}.options]");
            vec![table, format!("ConfigPath = {path:?}")]
        });
        path.unwrap_or_default()
    };
    let wrong = |seen: String, lines| Misconfigured { seen, lines };
    let runtime_type = || handler_lines(CRI_OF_1, &[("runtime_type", RUNTIME_TYPE)]);
    let Some((handler, route)) = runtime.handler().zip(route) else {
        let lines = [runtime_type(), options()].concat();
        return Err(wrong(format!("containerd has no runtime handler {HANDLER:?}"), lines));
    };
    let found = text(handler, "runtimeType");
    if found != RUNTIME_TYPE {
        return Err(wrong(format!("its runtime_type is {found:?}, not {RUNTIME_TYPE:?}"), runtime_type()));
    }
    let named =
        handler.get("options").map(|options| text(options, "ConfigPath")).filter(|path| !path.is_empty());
    let read = Config::load_or_default(named.map(Path::new));
    let file = named.unwrap_or(DEFAULT_PATH);
    match read {
        Ok(read) if read.run_dir.join(sockets::CONTROLLER) == socket => Ok(route),
        Ok(read) => {
            let seen = format!(
                "its launcher reads {file}, whose run_dir is {:?}; the daemon is at {socket:?}",
                read.run_dir
            );
            Err(wrong(seen, options()))
        }
        Err(error) => {
            Err(wrong(format!("its launcher reads {file}, which is not valid: {}", chain(&error)), options()))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::cri::Controller, *};
    use crate::Verdict;

    const SOCKET: &str = "/run/sandboxer/controller.sock";

    fn sound() -> RuntimeStatus {
        let handler = json!({ "runtimeType": RUNTIME_TYPE, "sandboxer": "sandboxer" });
        RuntimeStatus {
            name: "containerd".into(),
            version: "v2.4.2".into(),
            pid: None,
            config: json!({ "containerd": { "runtimes": { "sandboxer": handler } } }),
            network: Ok(()),
        }
    }

    fn daemon() -> Daemon<'static> {
        Daemon { socket: Path::new(SOCKET), config: None }
    }

    fn leads_to(address: &str, error: Option<&str>, routed: Result<(), String>) -> Route {
        let controller = Controller { address: Some(address.into()), error: error.map(str::to_owned) };
        Route { controller: Ok(Some(controller)), routed }
    }

    fn reading(runtime: Result<RuntimeStatus, String>) -> Reading {
        Reading { endpoint: "unix:///c.sock".into(), runtime }
    }

    #[test]
    fn versions_are_told_apart() {
        for (name, version, verdict) in [
            ("containerd", "v2.4.2", Verdict::Ok),
            ("containerd", "2.4.0-rc.1", Verdict::Ok),
            ("containerd", "v2.0.9", Verdict::Ok),
            ("containerd", "v2.3.4", Verdict::Ok),
            ("containerd", "v2.5.0", Verdict::Warning),
            ("containerd", "v1.7.34", Verdict::Ok),
            ("containerd", "1.6.20~ds1", Verdict::Ok),
            ("containerd", "v1.5.18", Verdict::Failure),
            ("containerd", "v1.9.0", Verdict::Warning),
            ("containerd", "main", Verdict::Warning),
            ("cri-o", "1.33.0", Verdict::Failure),
        ] {
            let runtime = RuntimeStatus { name: name.into(), version: version.into(), ..sound() };
            assert_eq!(containerd(&reading(Ok(runtime))).verdict, verdict, "{name} {version}");
        }
        let silent = containerd(&reading(Err("no answer within 5s".into())));
        assert_eq!(silent.verdict, Verdict::Failure);
        assert_eq!(silent.seen, "unix:///c.sock: no answer within 5s");
        let without = containerd(&reading(Err("unknown service runtime.v1.RuntimeService".into())));
        assert!(without.fix.unwrap().what.contains("without its CRI plugin"));
    }

    #[test]
    fn each_way_to_lead_elsewhere_is_named() {
        let right = || leads_to(SOCKET, None, Ok(()));
        let (mut bare, mut foreign) = (sound(), sound());
        bare.config = json!({});
        foreign.config["containerd"]["runtimes"]["sandboxer"]["runtimeType"] = json!("x");
        for (runtime, route, verdict, seen) in [
            (sound(), right(), Verdict::Ok, "leads to the daemon at /run/sandboxer/controller.sock"),
            (
                sound(),
                leads_to(&format!("unix://{SOCKET}"), None, Ok(())),
                Verdict::Ok,
                "leads to the daemon",
            ),
            (bare, right(), Verdict::Failure, "no runtime handler \"sandboxer\""),
            (foreign, right(), Verdict::Failure, "runtime_type is \"x\""),
            (sound(), Route { controller: Ok(None), ..right() }, Verdict::Failure, "is no proxy plugin"),
            (sound(), Route { controller: Err("silence".into()), ..right() }, Verdict::Failure, "silence"),
            (
                sound(),
                leads_to(SOCKET, Some("no wheels"), Ok(())),
                Verdict::Failure,
                "did not start: no wheels",
            ),
            (
                sound(),
                leads_to("/other.sock", None, Ok(())),
                Verdict::Failure,
                "is at \"/other.sock\", the daemon at \"/run/sandboxer/controller.sock\"",
            ),
            (sound(), leads_to(SOCKET, None, Err("refused".into())), Verdict::Failure, "refused"),
        ] {
            let check = handler(&reading(Ok(runtime)), Some(&route), daemon());
            assert_eq!(check.verdict, verdict, "{check}");
            assert!(check.seen.contains(seen), "{seen}: {check}");
        }
        let none = handler(&reading(Err("gone".into())), None, daemon());
        assert_eq!(none.verdict, Verdict::NotApplicable);
        let unknown = handler(&reading(Ok(sound())), None, daemon());
        assert_eq!(unknown.verdict, Verdict::Failure);
    }

    #[test]
    fn a_half_configured_containerd_is_told_the_lines_that_it_lacks() {
        let mut half = sound();
        half.config["containerd"]["runtimes"]["sandboxer"]["sandboxer"] = json!("");
        let check = handler(&reading(Ok(half)), Some(&leads_to(SOCKET, None, Ok(()))), daemon());
        assert_eq!(check.verdict, Verdict::Failure);
        assert!(check.seen.contains("a pause container for every pod"), "{check}");
        let lines = check.fix.unwrap().what;
        for line in [
            "[proxy_plugins.sandboxer]\n",
            "type = \"sandbox\"\n",
            "address = \"/run/sandboxer/controller.sock\"\n",
            "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.sandboxer]\n",
            "sandboxer = \"sandboxer\"",
        ] {
            assert!(lines.contains(line), "{line:?} is not in {lines}");
        }
    }

    #[test]
    fn an_old_containerd_needs_a_handler_whose_launcher_finds_this_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let (config, run_dir) = (dir.path().join("config.toml"), dir.path().join("run"));
        std::fs::write(&config, format!("run_dir = {run_dir:?}\n")).unwrap();
        let socket = run_dir.join("controller.sock");
        let daemon = Daemon { socket: &socket, config: Some(&config) };
        let old = |handler: serde_json::Value| RuntimeStatus {
            version: "1.6.20~ds1".into(),
            config: json!({ "containerd": { "runtimes": { "sandboxer": handler } } }),
            ..sound()
        };
        let answers = Route { controller: Ok(None), routed: Ok(()) };
        let check =
            |runtime: RuntimeStatus, route: &Route| handler(&reading(Ok(runtime)), Some(route), daemon);

        let right = json!({ "runtimeType": RUNTIME_TYPE, "options": { "ConfigPath": config } });
        assert_eq!(check(old(right.clone()), &answers).verdict, Verdict::Ok);
        let silent = Route { routed: Err("refused".into()), ..answers.clone() };
        assert!(check(old(right), &silent).seen.contains("refused"));

        for (handler, seen, line) in [
            (json!(null), "its runtime_type is \"\"", "runtime_type = \"io.containerd.sandboxer.v1\""),
            (
                json!({ "runtimeType": RUNTIME_TYPE }),
                "its launcher reads /etc/sandboxer/config.toml",
                "ConfigPath = ",
            ),
        ] {
            let check = check(old(handler), &answers);
            assert_eq!(check.verdict, Verdict::Failure, "{check}");
            assert!(check.seen.contains(seen), "{seen}: {check}");
            let fix = check.fix.unwrap();
            assert!(
                fix.what.contains(line) && fix.what.contains("\"io.containerd.grpc.v1.cri\""),
                "{}",
                fix.what
            );
            assert!(fix.what.contains("not to an imported file"), "{}", fix.what);
            assert!(fix.commands[0].contains("--apply /etc/containerd/config.toml"), "{:?}", fix.commands);
        }
        let mut none = old(json!({}));
        none.config = json!({});
        assert!(check(none, &answers).seen.contains("no runtime handler"));
    }
}
