//! The pods' network: the CNI configuration and its plugins.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{
    cri::RuntimeStatus,
    host::Host,
    verdict::{Check, Fix, Subject},
};

/// The default directory of containerd.
const CONF_DIR: &str = "/etc/cni/net.d";
const BIN_DIRS: [&str; 2] = ["/opt/cni/bin", "/usr/lib/cni"];
/// Maximum number of configurations read.
const MAX_FILES: usize = 64;

const CNI: Subject = Subject { name: "cni", why: "containerd needs it to start pods without hostNetwork" };

/// The network as configured.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Directory of configurations.
    pub conf_dir: PathBuf,
    /// Directories of plugins.
    pub bin_dirs: Vec<PathBuf>,
    /// The first configuration, which containerd uses: the file name, and the plugins or what is wrong with the file.
    pub network: Option<(String, Result<Vec<String>, String>)>,
    /// Plugins of that configuration that are missing.
    pub missing: Vec<String>,
    /// containerd's error about the network, if any.
    pub refused: Option<String>,
}

/// Reads the directories that containerd reads.
pub fn read(host: &Host, runtime: Option<&RuntimeStatus>) -> Reading {
    let config = runtime.and_then(|runtime| runtime.config.get("cni"));
    let text = |key: &str| config?.get(key)?.as_str().filter(|text| !text.is_empty()).map(PathBuf::from);
    let list = config.and_then(|config| config.get("binDirs")?.as_array());
    let mut bin_dirs: Vec<PathBuf> =
        list.into_iter().flatten().filter_map(|dir| dir.as_str().map(PathBuf::from)).collect();
    // containerd 2.0 has only one directory.
    bin_dirs.extend(text("binDir"));
    if bin_dirs.is_empty() {
        bin_dirs = BIN_DIRS.map(PathBuf::from).to_vec();
    }
    let conf_dir = text("confDir").unwrap_or_else(|| CONF_DIR.into());
    let network = first_network(host, &conf_dir);
    let plugins = network.iter().flat_map(|(_, plugins)| plugins.iter().flatten());
    let there = |name: &str| bin_dirs.iter().any(|dir| host.program(&dir.join(name), "".as_ref()).is_some());
    let missing = plugins.filter(|name| !there(name)).cloned().collect();
    Reading {
        missing,
        network,
        bin_dirs,
        conf_dir,
        refused: runtime.and_then(|runtime| runtime.network.clone().err()),
    }
}

fn first_network(host: &Host, dir: &Path) -> Option<(String, Result<Vec<String>, String>)> {
    let names = host.names(dir).into_iter().take(MAX_FILES);
    let name = names.into_iter().find(|name| {
        [".conf", ".conflist", ".json"].iter().any(|end| name.ends_with(end))
            && fs::metadata(host.path(dir.join(name))).is_ok_and(|it| it.is_file())
    })?;
    let text = host.text(dir.join(&name)).map_err(|error| error.to_string());
    let plugins = text.and_then(|text| {
        let parsed: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        plugins(&parsed).ok_or_else(|| "it names no plugins".to_owned())
    });
    Some((name, plugins))
}

/// Returns the types of all plugins, including IPAM. A `.conflist` has several plugins, a `.conf` is one.
fn plugins(config: &Value) -> Option<Vec<String>> {
    let single = std::slice::from_ref(config);
    let list = config.get("plugins").map_or(Some(single), |list| list.as_array().map(Vec::as_slice))?;
    let mut names = Vec::new();
    for plugin in list {
        names.push(plugin.get("type")?.as_str()?.to_owned());
        names.extend(plugin.get("ipam").and_then(|ipam| Some(ipam.get("type")?.as_str()?.to_owned())));
    }
    Some(names)
}

/// Checks the network. Pods with hostNetwork start in any case, so nothing here is a failure.
pub fn judge(reading: &Reading) -> Check {
    let dir = &reading.conf_dir;
    let (file, plugins) = match &reading.network {
        None => {
            return CNI.warning(
                format!("no network is configured in {dir:?}"),
                Fix::words("install the cluster's network add-on, or create a CNI configuration there"),
            );
        }
        Some((file, Err(why))) => {
            let seen = format!("{:?} cannot be used: {why}", dir.join(file));
            return CNI.warning(seen, Fix::words("correct or remove the file"));
        }
        Some((file, Ok(plugins))) => (file, plugins),
    };
    if !reading.missing.is_empty() {
        let names = reading.missing.join(", ");
        return CNI.warning(
            format!("{file} names {names}, not found in {:?}", reading.bin_dirs),
            Fix::commands("install the plugins", ["apt-get install containernetworking-plugins"]),
        );
    }
    match &reading.refused {
        Some(why) => {
            CNI.warning(format!("containerd has no network: {why}"), Fix::words("see containerd's log"))
        }
        None => CNI.ok(format!("{file}: {}", plugins.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::Verdict;

    const BRIDGE: &str = r#"{ "plugins": [{ "type": "bridge", "ipam": { "type": "host-local" } }] }"#;

    fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        }
        let host = Host::below(root.path());
        (root, host)
    }

    #[test]
    fn configurations_and_their_plugins_are_found() {
        let plugins = [("opt/cni/bin/bridge", ""), ("usr/lib/cni/host-local", "")];
        let with_plugins = |file: (&'static str, &'static str)| [vec![file], plugins.to_vec()].concat();
        for (files, verdict, seen) in [
            (vec![], Verdict::Warning, "no network is configured in \"/etc/cni/net.d\""),
            (with_plugins(("etc/cni/net.d/readme", BRIDGE)), Verdict::Warning, "no network is configured"),
            (
                with_plugins(("etc/cni/net.d/a.conflist", BRIDGE)),
                Verdict::Ok,
                "a.conflist: bridge, host-local",
            ),
            (
                with_plugins(("etc/cni/net.d/a.conf", r#"{ "type": "bridge" }"#)),
                Verdict::Ok,
                "a.conf: bridge",
            ),
            (
                with_plugins(("etc/cni/net.d/a.conf", r#"{ "type": "ptp" }"#)),
                Verdict::Warning,
                "a.conf names ptp, not",
            ),
            (with_plugins(("etc/cni/net.d/a.conf", "{")), Verdict::Warning, "cannot be used: EOF"),
            (with_plugins(("etc/cni/net.d/a.conf", "[]")), Verdict::Warning, "it names no plugins"),
            (
                with_plugins(("etc/cni/net.d/a.conf", r#"{ "plugins": 1 }"#)),
                Verdict::Warning,
                "it names no plugins",
            ),
        ] {
            let (_root, host) = host(&files);
            let check = judge(&read(&host, None));
            assert_eq!(check.verdict, verdict, "{check}");
            assert!(check.seen.contains(seen), "{seen}: {check}");
        }
    }

    #[test]
    fn containerd_says_where_and_whether() {
        let (_root, host) = host(&[("net/a.conf", r#"{ "type": "bridge" }"#), ("bin/bridge", "")]);
        let mut runtime = RuntimeStatus {
            name: "containerd".into(),
            version: "v2.4.2".into(),
            pid: None,
            config: serde_json::json!({ "cni": { "binDirs": ["/bin"], "confDir": "/net" } }),
            network: Ok(()),
        };
        assert_eq!(judge(&read(&host, Some(&runtime))).seen, "a.conf: bridge");
        runtime.config = serde_json::json!({ "cni": { "binDir": "/bin", "confDir": "/net" } });
        assert_eq!(judge(&read(&host, Some(&runtime))).seen, "a.conf: bridge");
        runtime.network = Err("not yet".into());
        let check = judge(&read(&host, Some(&runtime)));
        assert_eq!((check.verdict, &*check.seen), (Verdict::Warning, "containerd has no network: not yet"));
    }
}
