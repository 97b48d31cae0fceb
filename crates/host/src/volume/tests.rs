mod hostile;

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};
use oci_spec::runtime::MountBuilder;

use super::*;

const UID: &str = "0f6a";

/// A kubelet's root directory, with one pod.
struct Node {
    dir: tempfile::TempDir,
    kubelet: Kubelet,
    parts: AtomicUsize,
    bound: Mutex<Vec<PathBuf>>,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet { root: dir.path().join("kubelet"), uid: UID.into() };
        let node = Self { dir, kubelet, parts: AtomicUsize::new(0), bound: Mutex::default() };
        fs::create_dir_all(node.pod("volumes")).unwrap();
        node
    }

    fn pod(&self, below: impl AsRef<Path>) -> PathBuf {
        self.kubelet.root.join("pods").join(UID).join(below)
    }

    fn made(&self, below: impl AsRef<Path>) -> PathBuf {
        fs::create_dir_all(self.pod(&below)).unwrap();
        self.pod(below)
    }

    /// Binds a part of a volume as kubelet does, in a mount namespace of the test's own.
    fn part(&self, volume: &Path, part: &Path, container: &Path) -> PathBuf {
        let number = self.parts.fetch_add(1, Ordering::Relaxed).to_string();
        let target =
            self.pod("volume-subpaths").join(volume.file_name().unwrap()).join(container).join(number);
        let source = volume.join(part);
        if source.is_dir() {
            fs::create_dir_all(&target).unwrap();
        } else {
            fs::create_dir_all(target.parent().unwrap()).unwrap();
            fs::write(&target, "").unwrap();
        }
        mount(Some(&source), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        self.bound.lock().unwrap().push(target.clone());
        target
    }

    /// Undoes all [`Node::part`]s.
    fn unbind(&self) {
        for target in self.bound.lock().unwrap().drain(..) {
            umount2(&target, MntFlags::MNT_DETACH).unwrap();
        }
    }

    fn look(&self, at: &str, source: &Path, options: &[&str]) -> Result<Looked, VolumeError> {
        let mount = MountBuilder::default()
            .destination(at)
            .typ("bind")
            .source(source)
            .options(options.iter().map(|&option| option.to_owned()).collect::<Vec<_>>())
            .build()
            .unwrap();
        Looked::at(&mount, &self.kubelet)
    }

    fn kind(&self, at: &str, source: &Path) -> Result<Kind, String> {
        let looked = self.look(at, source, &["rbind", "rprivate", "rw"]);
        looked.map(|looked| looked.bound.volume.kind).map_err(|error| error.to_string())
    }
}

/// Runs `test` in a mount namespace of its own.
fn apart(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("these tests need root");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

const EMPTY_DIR: &str = "volumes/kubernetes.io~empty-dir";

#[test]
fn a_kubelets_volumes_are_told_apart() {
    let node = Node::new();
    let settings = node.made("volumes/kubernetes.io~configmap/settings");
    fs::create_dir(settings.join("..1")).unwrap();
    fs::write(settings.join("..1/key"), "value").unwrap();
    symlink("..1", settings.join("..data")).unwrap();
    let cache = node.made(format!("{EMPTY_DIR}/cache/part")).parent().unwrap().to_owned();
    let claim = node.made("volumes/kubernetes.io~csi/claim/mount");
    fs::write(node.made("containers/web").join("0a1b2c3d"), "").unwrap();
    fs::write(node.pod("etc-hosts"), "").unwrap();

    let empty = EmptyDir { root: cache.clone(), sub_path: PathBuf::new(), medium: Medium::Disk };
    assert_eq!(node.kind("/etc/x", &settings), Ok(Kind::Projected));
    assert_eq!(node.kind("/cache", &cache), Ok(Kind::EmptyDir(empty)));
    assert_eq!(node.kind("/data", &claim), Ok(Kind::Live));
    assert_eq!(
        node.kind("/dev/termination-log", &node.pod("containers/web/0a1b2c3d")),
        Ok(Kind::TerminationMessage)
    );
    assert_eq!(node.kind("/etc/hosts", &node.pod("etc-hosts")), Ok(Kind::File));
    assert_eq!(node.kind("/srv", node.dir.path()), Ok(Kind::Live), "it is none of kubelet's");
    let another = node.kubelet.root.join("pods/another").join(EMPTY_DIR).join("v");
    fs::create_dir_all(&another).unwrap();
    assert_eq!(node.kind("/x", &another), Ok(Kind::Live), "what a hostPath leads to");
    for (what, path) in [
        ("a part that is not bound", cache.join("part")),
        ("a file of a version", settings.join("..1/key")),
        ("the pod's directory", node.pod("")),
        ("kubelet's own", node.pod("etc-hosts")),
        ("a directory of a plugin", node.pod(EMPTY_DIR)),
        ("a directory in place of a message", node.made("containers/web/d")),
    ] {
        let text = node.kind("/x", &path).expect_err(what);
        let named = text.contains("/x") && text.contains(path.to_str().unwrap());
        assert!(named && text.contains("subPath"), "{what}: {text}");
    }
    fs::remove_dir(cache.join("part")).unwrap();
    fs::remove_dir(&cache).unwrap();
    symlink(node.dir.path(), &cache).unwrap();
    let text = node.kind("/cache", &cache).unwrap_err();
    assert!(text.contains("cannot find"), "{text}");
}

#[test]
fn a_part_is_of_its_volume_whatever_it_is_called() {
    apart(|| {
        let node = Node::new();
        let cache = node.made(format!("{EMPTY_DIR}/cache"));
        let memory = node.made(format!("{EMPTY_DIR}/pods"));
        mount(Some("tmpfs"), &memory, Some("tmpfs"), MsFlags::empty(), Some("size=4m")).unwrap();
        let inner = format!("pods/{UID}/volumes/kubernetes.io~secret/v");
        for part in ["a/b", "pods", ".", &inner, "pods/u/volumes/kubernetes.io~empty-dir/v", "a b\t\\040"] {
            for (volume, medium) in [(&cache, Medium::Disk), (&memory, Medium::Memory { bytes: 4 << 20 })] {
                fs::create_dir_all(volume.join(part)).unwrap();
                for container in ["web", "pods"] {
                    let bound = node.part(volume, part.as_ref(), container.as_ref());
                    let sub_path = if part == "." { PathBuf::new() } else { part.into() };
                    let empty = EmptyDir { root: volume.clone(), sub_path, medium };
                    assert_eq!(node.kind("/x", &bound), Ok(Kind::EmptyDir(empty)), "{part:?} in {container}");
                }
            }
        }
        let settings = node.made("volumes/kubernetes.io~configmap/settings");
        fs::create_dir(settings.join("..1")).unwrap();
        fs::write(settings.join("..1/key"), "value").unwrap();
        let bound = node.part(&settings, "..1/key".as_ref(), "web".as_ref());
        let looked = node.look("/x", &bound, &["rbind", "ro"]).unwrap();
        assert_eq!((looked.bound.volume.kind, &looked.content[..]), (Kind::ProjectedPart, &b"value"[..]));
        // kubelet has replaced the version since.
        fs::remove_dir_all(settings.join("..1")).unwrap();
        let looked = node.look("/x", &bound, &["rbind", "ro"]).unwrap();
        assert_eq!((looked.bound.volume.kind, &looked.content[..]), (Kind::ProjectedPart, &b"value"[..]));

        let claim = node.made("volumes/kubernetes.io~local-volume/claim/pods");
        let bound = node.part(claim.parent().unwrap(), "pods".as_ref(), "web".as_ref());
        assert_eq!(node.kind("/x", &bound), Ok(Kind::Live));
        // A hostPath has no directory below the pod's directory.
        let host = node.dir.path().join("host");
        fs::create_dir_all(host.join(&inner)).unwrap();
        let bound = node.part(&host, inner.as_ref(), "web".as_ref());
        assert_eq!(node.kind("/x", &bound), Ok(Kind::Live));
        // kubelet binds nothing from elsewhere below an emptyDir's name.
        let stray = node.dir.path().join("cache");
        fs::create_dir(&stray).unwrap();
        let bound = node.part(&stray, "".as_ref(), "web".as_ref());
        node.kind("/x", &bound).unwrap_err();
        node.kind("/x", &node.made("volume-subpaths/cache/web/99")).unwrap_err();
        // An emptyDir's part changes its name on the host only if somebody renames it there.
        let part = cache.join("moves");
        fs::create_dir(&part).unwrap();
        let bound = node.part(&cache, "moves".as_ref(), "web".as_ref());
        fs::remove_dir(&part).unwrap();
        symlink(node.dir.path(), &part).unwrap();
        node.kind("/x", &bound).unwrap_err();
    });
}

#[test]
fn a_kubelet_elsewhere_is_known_by_the_uid_if_its_directory_is_roots() {
    let node = Node::new();
    let volume = node.made(format!("{EMPTY_DIR}/v"));
    let elsewhere = Node { kubelet: Kubelet { root: "/var/lib/kubelet".into(), uid: UID.into() }, ..node };
    let empty = EmptyDir { root: volume.clone(), sub_path: PathBuf::new(), medium: Medium::Disk };
    assert_eq!(elsewhere.kind("/x", &volume), Ok(Kind::EmptyDir(empty)));
    let pod = volume.ancestors().nth(3).unwrap();
    std::os::unix::fs::chown(pod, Some(1000), Some(1000)).unwrap();
    let text = elsewhere.kind("/x", &volume).unwrap_err();
    assert!(text.contains("volumes.kubelet_root"), "{text}");
}

#[test]
fn options_of_the_mount_are_kept_and_propagation_is_the_hosts_affair() {
    let node = Node::new();
    let volume =
        |options: &[&str]| node.look("/x", node.dir.path(), options).map(|looked| looked.bound.volume);
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
fn mounts_of_the_host_below_a_volume_are_known() {
    let node = Node::new();
    let is_one =
        |source: &Path, options: &[&str]| node.look("/x", source, options).unwrap().bound.is_one_mount;
    let file = node.dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(is_one(node.dir.path(), &["rbind", "rprivate", "ro"]) && is_one(&file, &["rbind", "ro"]));
    assert!(!is_one(node.dir.path(), &["rbind", "rslave", "ro"]), "there may be some later");
    assert!(!is_one(Path::new("/"), &["rbind", "ro"]), "/proc");
}

#[test]
fn what_is_neither_file_nor_directory_is_refused_by_name() {
    let node = Node::new();
    let pipe = node.dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let text = node.kind("/run/pipe", &pipe).unwrap_err();
    assert!(text.contains("/run/pipe") && text.contains("socket or pipe"), "{text}");
    let text = node.kind("/dev/x", Path::new("/dev/null")).unwrap_err();
    assert!(text.contains("/dev/null") && text.contains("request it as a device"), "{text}");
    let text = node.kind("/y", &node.dir.path().join("missing")).unwrap_err();
    assert!(text.contains("/y") && text.contains("missing"), "{text}");
    for path in ["relative", "/srv/../etc"] {
        let text = node.kind("/z", Path::new(path)).unwrap_err();
        assert!(text.contains("/z") && text.contains(path), "{text}");
    }
}
