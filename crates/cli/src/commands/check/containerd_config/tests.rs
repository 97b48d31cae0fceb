use super::*;

fn settings(version: (u32, u32)) -> Settings {
    Settings {
        version,
        controller: "/run/sandboxer/controller.sock".into(),
        config: None,
        restrict_oom_score_adj: false,
    }
}

fn merge(text: &str) -> Result<String, MergeError> {
    settings((2, 4)).merge(text, Path::new("/etc/c.toml"))
}

const OWN: &str = r#"# This node's own.
version = 3
root = "/data/containerd" # a disk of its own

[plugins]
  # Mirrors.
  [plugins."io.containerd.cri.v1.images"]
    snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.runtime"]
    enable_selinux = true
    [plugins."io.containerd.cri.v1.runtime".containerd]
      default_runtime_name = "runc" # as ever
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"

# The end.
"#;

fn parsed(text: &str) -> toml_edit::Table {
    text.parse::<DocumentMut>().unwrap().as_table().clone()
}

/// Returns our runtime handler in a configuration.
fn ours(text: &str) -> toml_edit::Table {
    let document = parsed(text);
    document["plugins"][CRI_OF_2]["containerd"]["runtimes"][HANDLER].as_table().unwrap().clone()
}

#[test]
fn the_snippet_is_what_the_running_containerd_knows() {
    for (version, imports, pause_key, pause_note) in [
        ((2, 0), "only if its config.toml has", false, false),
        ((2, 1), "only if its config.toml has", false, false),
        ((2, 2), "`containerd config default` has", false, false),
        ((2, 3), "`containerd config default` has", false, true),
        ((2, 4), "`containerd config default` has", true, false),
        ((2, 5), "`containerd config default` has", true, false),
    ] {
        let text = settings(version).snippet();
        assert!(text.contains(imports), "{text}");
        assert!(text.contains(&format!("containerd {}.{}", version.0, version.1)), "{text}");
        assert_eq!(ours(&text).contains_key("disable_pause_image_pull"), pause_key, "{text}");
        assert_eq!(text.contains("pulls its pause image"), pause_note, "{text}");
        assert!(!text.contains("restrict_oom_score_adj"), "{text}");
        let restricted = Settings { restrict_oom_score_adj: true, ..settings(version) }.snippet();
        assert!(parsed(&restricted)["plugins"][CRI_OF_2]["restrict_oom_score_adj"].as_bool().unwrap());
    }
}

/// The installed files are for containerd 2.4 and the daemon's default run_dir.
#[test]
fn the_snippet_says_what_the_installed_file_says() {
    let strip = |text: &str| toml_edit::de::from_str::<serde_json::Value>(text).unwrap();
    let installed = include_str!("../../../../../../vmm-configs/containerd/sandboxer.toml");
    assert_eq!(strip(&settings((2, 4)).snippet()), strip(installed));
}

#[test]
fn what_is_there_stays_comments_and_order_too() {
    let merged = merge(OWN).unwrap();
    let mut lines = merged.lines();
    for line in OWN.lines() {
        assert!(lines.any(|merged| merged == line), "{line:?} is gone or elsewhere in\n{merged}");
    }
    assert_eq!(ours(&merged)["sandboxer"].as_str(), Some("sandboxer"));
    assert_eq!(
        parsed(&merged)["proxy_plugins"][HANDLER]["address"].as_str(),
        Some("/run/sandboxer/controller.sock")
    );
    // The diff has only additions.
    let diff = diff(Path::new("/etc/c.toml"), OWN, &merged);
    assert!(!diff.lines().skip(2).any(|line| line.starts_with('-')), "{diff}");
    assert!(diff.starts_with("--- /etc/c.toml\n+++ /etc/c.toml (merged)\n"), "{diff}");
}

#[test]
fn merging_twice_is_merging_once() {
    for text in [OWN, "version = 3\n", "version = 4\nimports = []\n", &settings((2, 4)).snippet()] {
        let once = merge(text).unwrap();
        assert_eq!(merge(&once).unwrap(), once);
    }
    // Merging the printed or the installed settings into themselves changes nothing.
    let snippet = settings((2, 4)).snippet();
    assert_eq!(merge(&snippet).unwrap(), snippet);
    let installed = include_str!("../../../../../../vmm-configs/containerd/sandboxer.toml");
    assert_eq!(merge(installed).unwrap(), installed);
}

#[test]
fn old_values_are_corrected_where_they_stand() {
    let stale = settings((2, 4))
        .snippet()
        .replace("\"/run/sandboxer/controller.sock\"", "\"/old.sock\" # moved soon")
        .replace("\"overlayfs\"", "\"erofs\"");
    let merged = merge(&stale).unwrap();
    assert!(merged.contains("address = \"/run/sandboxer/controller.sock\" # moved soon"), "{merged}");
    assert_eq!(ours(&merged)["snapshotter"].as_str(), Some("erofs"), "a snapshotter is the node's choice");
}

#[test]
fn tables_may_be_written_inline() {
    let inline = "version = 3\nproxy_plugins = { other = { type = \"snapshot\", address = \"/s\" } }\n";
    let merged = merge(inline).unwrap();
    let proxies = parsed(&merged);
    let proxies = proxies["proxy_plugins"].as_table_like().unwrap();
    assert_eq!(proxies.len(), 2, "{merged}");
    assert_eq!(merge(&merged).unwrap(), merged);
}

#[test]
fn what_cannot_be_merged_into_is_refused_by_name() {
    for (text, says) in [
        ("version = 3\n[plugins\n", "\"/etc/c.toml\" is not valid TOML"),
        ("version = 3\n[plugins\n", "line 2"),
        ("version = 2\n", "has version 2"),
        ("", "has version none"),
        ("version = 5\n", "has version 5"),
        ("version = \"3\"\n", "has version \"3\""),
        ("version = 3\nplugins = 1\n", "\"plugins\" in \"/etc/c.toml\" is not a table"),
        ("version = 3\n[plugins]\n\"io.containerd.cri.v1.runtime\" = []\n", "cri.v1.runtime\" in"),
    ] {
        let error = merge(text).unwrap_err().to_string();
        assert!(error.contains(says), "{text:?}: {error}");
    }
}

#[test]
fn a_file_is_replaced_with_its_mode_and_through_links() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let (file, link) = (dir.path().join("real.toml"), dir.path().join("config.toml"));
    fs::write(&file, "old").unwrap();
    fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    replace(&link, "new").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "new");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing else is left there");
}

#[test]
fn an_old_containerd_gets_the_launcher() {
    for (version, snapshotter) in [((1, 6), None), ((1, 7), Some("overlayfs"))] {
        let own = Settings { config: Some("/srv/sandboxer.toml".into()), ..settings(version) };
        let text = own.snippet();
        assert!(text.contains("Merge it into /etc/containerd/config.toml itself"), "{text}");
        let document = parsed(&text);
        assert_eq!(document["version"].as_integer(), Some(2));
        assert!(!document.contains_key("proxy_plugins"), "{text}");
        let runtime = &document["plugins"][CRI_OF_1]["containerd"]["runtimes"][HANDLER];
        assert_eq!(runtime["runtime_type"].as_str(), Some(RUNTIME_TYPE));
        assert_eq!(runtime.get("snapshotter").and_then(Item::as_str), snapshotter);
        assert_eq!(runtime["options"]["ConfigPath"].as_str(), Some("/srv/sandboxer.toml"));
        assert_eq!(own.merge(&text, Path::new("/etc/c.toml")).unwrap(), text);
        let plain = settings(version).snippet();
        assert!(!plain.contains("ConfigPath"), "the launcher's default: {plain}");
        let restricted = Settings { restrict_oom_score_adj: true, ..settings(version) }.snippet();
        assert!(parsed(&restricted)["plugins"][CRI_OF_1]["restrict_oom_score_adj"].as_bool().unwrap());
        let error = own.merge("version = 3\n", Path::new("/etc/c.toml")).unwrap_err().to_string();
        assert!(error.contains("has version 3, the settings are for 2:"), "{error}");
    }
}
