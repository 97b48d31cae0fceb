use std::{fs, os::unix::fs::symlink};

use oci_spec::runtime::MountBuilder;

use super::*;

fn bind(at: &str, source: &Path, options: &[&str]) -> Result<Volume, VolumeError> {
    let mount = MountBuilder::default()
        .destination(at)
        .typ("bind")
        .source(source)
        .options(options.iter().map(|&option| option.to_owned()).collect::<Vec<_>>())
        .build()
        .unwrap();
    classify(&mount)
}

/// Returns a kubelet's tree for one pod.
fn pod() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let pod = dir.path().join("pods/u");
    for path in [
        "volumes/kubernetes.io~configmap/settings/..1",
        "volumes/kubernetes.io~empty-dir/cache/part",
        "volumes/kubernetes.io~csi/claim/mount",
        "containers/web",
    ] {
        fs::create_dir_all(pod.join(path)).unwrap();
    }
    fs::write(pod.join("volumes/kubernetes.io~configmap/settings/..1/key"), "value").unwrap();
    symlink("..1", pod.join("volumes/kubernetes.io~configmap/settings/..data")).unwrap();
    fs::write(pod.join("containers/web/0a1b2c3d"), "").unwrap();
    fs::write(pod.join("etc-hosts"), "").unwrap();
    (dir, pod)
}

#[test]
fn a_kubelets_volumes_are_told_apart() {
    let (_dir, pod) = pod();
    let kind =
        |at: &str, source: &str| bind(at, &pod.join(source), &["rbind", "rprivate", "rw"]).unwrap().kind;
    let root = pod.join("volumes/kubernetes.io~empty-dir/cache");
    let empty = |sub_path: &str| {
        Kind::EmptyDir(EmptyDir { root: root.clone(), sub_path: sub_path.into(), medium: Medium::Disk })
    };
    assert_eq!(kind("/etc/x", "volumes/kubernetes.io~configmap/settings"), Kind::Projected);
    assert_eq!(kind("/etc/x", "volumes/kubernetes.io~configmap/settings/..data/key"), Kind::ProjectedPart);
    assert_eq!(kind("/cache", "volumes/kubernetes.io~empty-dir/cache"), empty(""));
    assert_eq!(kind("/cache", "volumes/kubernetes.io~empty-dir/cache/part"), empty("part"));
    assert_eq!(kind("/data", "volumes/kubernetes.io~csi/claim/mount"), Kind::Live);
    assert_eq!(kind("/dev/termination-log", "containers/web/0a1b2c3d"), Kind::TerminationMessage);
    assert_eq!(kind("/etc/hosts", "etc-hosts"), Kind::File);
    assert_eq!(kind("/other", "etc-hosts"), Kind::Live, "a file that the host may change");
    assert_eq!(kind("/srv", "."), Kind::Live);
}

#[test]
fn options_of_the_mount_are_kept_and_propagation_is_the_hosts_affair() {
    let (_dir, pod) = pod();
    let volume = |options: &[&str]| bind("/x", &pod, options);
    let plain = volume(&["rbind", "rprivate", "ro", "nosuid", "noexec"]).unwrap();
    assert_eq!(plain.options, ["rbind", "ro", "nosuid", "noexec"]);
    assert!(plain.read_only && !plain.follows_host_mounts);
    let slave = volume(&["rbind", "rslave", "rw"]).unwrap();
    assert!(!slave.read_only && slave.follows_host_mounts);
    assert!(volume(&["rbind", "rro"]).unwrap().read_only);
    let text = volume(&["rbind", "rshared"]).unwrap_err().to_string();
    assert!(
        text.contains("volume /x: mount propagation rshared is not available in a microVM pod"),
        "{text}"
    );
    let text = volume(&["rbind", "idmap"]).unwrap_err().to_string();
    assert!(text.contains(r#"mount option "idmap""#), "{text}");
}

#[test]
fn what_is_neither_file_nor_directory_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let text = bind("/run/pipe", &pipe, &["rbind"]).unwrap_err().to_string();
    assert!(text.contains("/run/pipe") && text.contains("socket or pipe"), "{text}");
    let text = bind("/dev/x", Path::new("/dev/null"), &["rbind"]).unwrap_err().to_string();
    assert!(text.contains("/dev/null") && text.contains("request it as a device"), "{text}");
    let text = bind("/y", &dir.path().join("missing"), &["rbind"]).unwrap_err().to_string();
    assert!(text.contains("/y") && text.contains("missing"), "{text}");
}
