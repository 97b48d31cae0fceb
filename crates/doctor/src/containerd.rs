//! containerd, and whether its requests for sandboxes reach this daemon.

use std::path::Path;

use super::{
    cri::{HANDLER, Reading, Route, Told},
    program,
    verdict::{Check, Fix, Subject},
};

/// The runtime type that the configuration of [`HANDLER`] must have.
pub const RUNTIME_TYPE: &str = "io.containerd.sandboxer.v1";
/// First version with external sandboxers.
pub const OLDEST: (u32, u32) = (2, 0);
/// The tested version.
pub const SEEN: (u32, u32) = (2, 4);

const CONTAINERD: Subject = Subject { name: "containerd", why: "containerd starts and stops the pods" };
const ROUTE: Subject = Subject {
    name: "handler",
    why: "containerd sends pods of the handler \"sandboxer\" here only if it is configured so",
};

/// Checks that it answers, and that its version works.
pub fn containerd(reading: &Reading) -> Check {
    let endpoint = &reading.endpoint;
    let told = match &reading.told {
        Ok(told) => told,
        Err(why) => {
            let fix = Fix::commands(
                "start containerd as root, or set its socket with --endpoint",
                ["systemctl start containerd"],
            );
            return CONTAINERD.failure(format!("{endpoint}: {why}"), fix);
        }
    };
    let seen = format!("{} {} at {endpoint}", told.name, told.version);
    if told.name != "containerd" {
        return CONTAINERD.failure(seen, Fix::words("use containerd 2.4 as the node's CRI runtime"));
    }
    let upgrade = || Fix::words("install containerd 2.4");
    match program::version(&told.version) {
        Some(version) if version < OLDEST => {
            CONTAINERD.failure(format!("{seen}, has no external sandboxers"), upgrade())
        }
        Some(version) if version < SEEN => CONTAINERD.warning(format!("{seen}, not tested"), upgrade()),
        Some(SEEN) => CONTAINERD.ok(seen),
        Some(_) => CONTAINERD.warning(
            format!("{seen}, newer than the tested version"),
            Fix::words("install containerd 2.4, or test whether pods run"),
        ),
        None => CONTAINERD.warning(format!("{seen}, unknown version"), upgrade()),
    }
}

/// Checks that the handler leads to the daemon with the controller socket `socket`.
pub fn handler(reading: &Reading, route: Option<&Route>, socket: &Path) -> Check {
    let Some(told) = reading.told() else { return ROUTE.not_applicable("no containerd answers") };
    let configure = || {
        Fix::commands(
            "add the output of `sandboxer-cli check --containerd-config` to containerd's configuration and restart it",
            [
                // Without this file containerd reads no other one either.
                "test -e /etc/containerd/config.toml || containerd config default > /etc/containerd/config.toml",
                "sandboxer-cli check --containerd-config > /etc/containerd/conf.d/sandboxer.toml",
                "systemctl restart containerd",
            ],
        )
    };
    let route = match configured(told, route, socket) {
        Ok(route) => route,
        Err(seen) => return ROUTE.failure(seen, configure()),
    };
    match &route.routed {
        Ok(()) => ROUTE.ok(format!("{HANDLER} leads to the daemon at {}", socket.display())),
        Err(why) => ROUTE.failure(
            format!("containerd's request to the daemon at {} failed: {why}", socket.display()),
            Fix::commands("start the daemon", ["systemctl start sandboxer"]),
        ),
    }
}

/// Returns the route, or what is wrong in containerd's configuration.
fn configured<'a>(told: &Told, route: Option<&'a Route>, socket: &Path) -> Result<&'a Route, String> {
    let none = || format!("containerd has no runtime handler {HANDLER:?}");
    let (handler, route) = told.handler().zip(route).ok_or_else(none)?;
    let text = |key: &str| handler.get(key).and_then(|value| value.as_str()).unwrap_or_default();
    if text("runtimeType") != RUNTIME_TYPE {
        return Err(format!("its runtime_type is {:?}, not {RUNTIME_TYPE:?}", text("runtimeType")));
    }
    let sandboxer = text("sandboxer");
    let controller = match &route.controller {
        Ok(Some(controller)) => controller,
        Ok(None) => {
            return Err(format!("its sandboxer {sandboxer:?} is no proxy plugin of containerd"));
        }
        Err(why) => return Err(format!("cannot list containerd's plugins: {why}")),
    };
    if let Some(error) = &controller.error {
        return Err(format!("containerd's proxy plugin {sandboxer:?} did not start: {error}"));
    }
    let address = controller.address.as_deref().unwrap_or_default();
    if Path::new(address.strip_prefix("unix://").unwrap_or(address)) != socket {
        return Err(format!(
            "containerd's proxy plugin {sandboxer:?} is at {address:?}, the daemon at {socket:?}"
        ));
    }
    Ok(route)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::cri::Controller, *};
    use crate::Verdict;

    const SOCKET: &str = "/run/sandboxer/controller.sock";

    fn sound() -> Told {
        let handler = json!({ "runtimeType": RUNTIME_TYPE, "sandboxer": "sandboxer" });
        Told {
            name: "containerd".into(),
            version: "v2.4.2".into(),
            pid: None,
            config: json!({ "containerd": { "runtimes": { "sandboxer": handler } } }),
            network: Ok(()),
        }
    }

    fn leads_to(address: &str, error: Option<&str>, routed: Result<(), String>) -> Route {
        let controller = Controller { address: Some(address.into()), error: error.map(str::to_owned) };
        Route { controller: Ok(Some(controller)), routed }
    }

    fn reading(told: Result<Told, String>) -> Reading {
        Reading { endpoint: "unix:///c.sock".into(), told }
    }

    #[test]
    fn versions_are_told_apart() {
        for (name, version, verdict) in [
            ("containerd", "v2.4.2", Verdict::Ok),
            ("containerd", "2.4.0-rc.1", Verdict::Ok),
            ("containerd", "v2.0.9", Verdict::Warning),
            ("containerd", "v2.3.4", Verdict::Warning),
            ("containerd", "v2.5.0", Verdict::Warning),
            ("containerd", "v1.7.34", Verdict::Failure),
            ("containerd", "1.6.20~ds1", Verdict::Failure),
            ("containerd", "main", Verdict::Warning),
            ("cri-o", "1.33.0", Verdict::Failure),
        ] {
            let told = Told { name: name.into(), version: version.into(), ..sound() };
            assert_eq!(containerd(&reading(Ok(told))).verdict, verdict, "{name} {version}");
        }
        let silent = containerd(&reading(Err("no answer within 5s".into())));
        assert_eq!(silent.verdict, Verdict::Failure);
        assert_eq!(silent.seen, "unix:///c.sock: no answer within 5s");
    }

    #[test]
    fn each_way_to_lead_elsewhere_is_named() {
        let right = || leads_to(SOCKET, None, Ok(()));
        let (mut bare, mut foreign) = (sound(), sound());
        bare.config = json!({});
        foreign.config["containerd"]["runtimes"]["sandboxer"]["runtimeType"] = json!("x");
        for (told, route, verdict, seen) in [
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
            let check = handler(&reading(Ok(told)), Some(&route), Path::new(SOCKET));
            assert_eq!(check.verdict, verdict, "{check}");
            assert!(check.seen.contains(seen), "{seen}: {check}");
        }
        let none = handler(&reading(Err("gone".into())), None, Path::new(SOCKET));
        assert_eq!(none.verdict, Verdict::NotApplicable);
        let unknown = handler(&reading(Ok(sound())), None, Path::new(SOCKET));
        assert_eq!(unknown.verdict, Verdict::Failure);
    }
}
