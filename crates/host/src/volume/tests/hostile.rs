//! Whatever names a pod's author chooses, and whatever its processes do on the host: all that the daemon opens,
//! attaches, shares or copies is in the pod's own volumes.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Read,
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt, MetadataExt, chown, symlink},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use proptest::prelude::*;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::{EMPTY_DIR, Node, apart};
use crate::{
    beneath::{Dir, Found},
    rootfs::ext4::{Disk, Made, Use},
    volume::{DISK, Kind, Looked, make_disk, tree},
};

/// The content of each file of the host that is not the pod's.
const SECRET: &[u8] = b"a secret of the host";
/// The size of a disk, bytes.
const BYTES: u64 = 16 << 20;
/// How often each operation is tried while another thread exchanges names.
const ROUNDS: usize = 4;

/// Generates a plain name, mostly one with a meaning in kubelet's directory.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => prop::sample::select(vec![
            "pods", "0f6a", "u", "volumes", "volume-subpaths", "containers", "kubernetes.io~empty-dir",
            "kubernetes.io~secret", "kubernetes.io~csi", "v", "cache", "..data", "..1", "mount", DISK, "a b", "\\040", "t\tn\n",
            "etc-hosts", ".sandboxer.ext4.unfinished-1", "0 (deleted)", "x//deleted",
        ])
        .prop_map(|name| name.replace('/', "_")),
        1 => "[a-z]{1,3}",
    ]
}

fn path() -> impl Strategy<Value = PathBuf> {
    prop::collection::vec(name(), 0..6).prop_map(|names| names.iter().collect())
}

/// An action of a pod's process in a directory of a volume.
#[derive(Debug, Clone)]
enum Act {
    /// A symlink to a file of the host.
    Link(usize),
    /// A hard link to a file of the host: as root in the pod, on a volume of the same file system.
    HardLink,
    /// A file with a file system, of another user or of root.
    Disk(bool),
    /// A name that leads to the host's directory and back, again and again.
    Exchange,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0..5_usize).prop_map(Act::Link),
        1 => Just(Act::HardLink),
        2 => any::<bool>().prop_map(Act::Disk),
        3 => Just(Act::Exchange),
    ]
}

#[derive(Debug, Clone)]
struct Scene {
    volume: String,
    container: String,
    plugin: &'static str,
    sub_path: PathBuf,
    acts: Vec<(PathBuf, Act)>,
}

fn scene() -> impl Strategy<Value = Scene> {
    let plugin = prop::sample::select(vec!["empty-dir", "empty-dir", "secret", "csi"]);
    (name(), name(), plugin, path(), prop::collection::vec((path(), act()), 0..4)).prop_map(
        |(volume, container, plugin, sub_path, acts)| Scene { volume, container, plugin, sub_path, acts },
    )
}

/// Files of the host, none of which is the pod's.
struct Outside {
    things: [PathBuf; 5],
    disk: PathBuf,
    inodes: BTreeSet<(u64, u64)>,
}

impl Outside {
    fn new(root: &Path, empty: &File) -> Self {
        let dir = root.join("outside");
        // The directory has the layout of a pod's directory, so that a link to it leads further.
        let secret = dir.join("volumes/kubernetes.io~secret/v");
        fs::create_dir_all(&secret).unwrap();
        fs::write(secret.join("key"), SECRET).unwrap();
        fs::write(dir.join("key"), SECRET).unwrap();
        let disk = dir.join(DISK);
        let made = Disk { dir: &Dir::host(&dir).unwrap(), name: DISK.as_ref(), mark: None };
        made.ensure(&Made::Copied(empty)).unwrap().write_all_at(SECRET, BYTES / 2).unwrap();
        let things = [dir.clone(), dir.join("key"), disk.clone(), secret, "/dev/null".into()];
        let inodes = [&dir, &dir.join("key"), &disk, &dir.join("volumes/kubernetes.io~secret/v/key")];
        let inode = |path: &PathBuf| fs::metadata(path).map(|found| (found.dev(), found.ino())).unwrap();
        Self { inodes: inodes.into_iter().chain(&things).map(inode).collect(), things, disk }
    }

    fn state(&self) -> Vec<(PathBuf, u64, i64, i64)> {
        let state = |path: &PathBuf| {
            let found = fs::metadata(path).unwrap();
            (path.clone(), found.len(), found.mtime(), found.mtime_nsec())
        };
        self.things[..4].iter().map(state).collect()
    }

    fn allows(&self, what: &str, inode: (u64, u64)) {
        assert!(!self.inodes.contains(&inode), "{what}: a thing of the host");
    }

    fn allows_fd(&self, what: &str, fd: OwnedFd) {
        self.allows(what, Found::from_fd(fd).unwrap().inode());
    }

    fn allows_content(&self, what: &str, content: &[u8]) {
        assert!(!content.windows(SECRET.len()).any(|part| part == SECRET), "{what}: {content:?}");
    }
}

/// Performs a pod's action at `at`. Returns two names to exchange again and again, if the action needs that.
fn act_out(at: &Path, act: &Act, outside: &Outside, empty: &File) -> Option<(PathBuf, PathBuf)> {
    let parent = at.parent().unwrap();
    if fs::create_dir_all(parent).is_err() {
        return None;
    }
    // An existing file stays.
    match act {
        Act::Link(thing) => drop(symlink(&outside.things[*thing], at)),
        Act::HardLink => drop(fs::hard_link(&outside.disk, at)),
        Act::Disk(of_root) => {
            let Ok(dir) = Dir::host(parent) else { return None };
            let disk = Disk { dir: &dir, name: at.file_name().unwrap(), mark: None };
            if disk.ensure(&Made::Copied(empty)).is_ok() && !of_root {
                chown(at, Some(1000), Some(1000)).unwrap();
            }
        }
        Act::Exchange => {
            let other = at.with_file_name("exchanged");
            fs::create_dir_all(at).ok()?;
            symlink(&outside.things[0], &other).ok()?;
            return Some((at.to_owned(), other));
        }
    }
    None
}

/// Uses a mount as the daemon does.
fn use_it(node: &Node, source: &Path, outside: &Outside, empty: &File) {
    let Ok(Looked { bound, content, source: found }) = node.look("/x", source, &["rbind", "rw"]) else {
        return;
    };
    let what = format!("{source:?}, {:?}", bound.volume.kind);
    outside.allows(&what, bound.inode);
    outside.allows_content(&what, &content);
    match &bound.volume.kind {
        Kind::EmptyDir(dir) => {
            let Some(own) = node.kubelet.split(&dir.root) else { panic!("{what}: not the pod's") };
            assert!(dir.root.starts_with(node.pod("volumes")), "{what}");
            for made in [Some(empty), None] {
                if let Ok(disk) = make_disk(&own, BYTES, made) {
                    let found = disk.metadata().unwrap();
                    outside.allows(&what, (found.dev(), found.ino()));
                    let mut content = [0; SECRET.len()];
                    disk.read_exact_at(&mut content, BYTES / 2).unwrap();
                    outside.allows_content(&what, &content);
                }
            }
        }
        Kind::Projected | Kind::ProjectedPart => {
            let Some(own) = node.kubelet.split(source) else { panic!("{what}: not the pod's") };
            if let Ok(read) = own.open().map_err(drop).and_then(|dir| tree::read(&dir).map_err(drop)) {
                for entry in read.entries {
                    outside.allows_content(&what, entry.file());
                }
            }
        }
        Kind::Live => outside.allows_fd(&what, found.expect("a live share has its source")),
        Kind::File | Kind::TerminationMessage => {}
    }
}

fn play(scene: &Scene, empty: &File) {
    let node = Node::new();
    let outside = Outside::new(node.dir.path(), empty);
    let volume =
        node.made(Path::new("volumes").join(format!("kubernetes.io~{}", scene.plugin)).join(&scene.volume));
    // The pod has another emptyDir, and has mounted nothing of it live.
    node.made(format!("{EMPTY_DIR}/other"));
    let before = outside.state();
    let part = volume.join(&scene.sub_path);
    // kubelet creates the subPath before a container of the pod runs, or uses the existing one.
    let is_made = fs::create_dir_all(&part).is_ok();
    let mut exchanged = Vec::new();
    for (below, act) in &scene.acts {
        let at = volume.join(below).join(DISK);
        exchanged.extend(act_out(&at, act, &outside, empty));
        if !below.as_os_str().is_empty() {
            exchanged.extend(act_out(&volume.join(below), act, &outside, empty));
        }
    }
    let mut sources = vec![volume.clone(), part.clone()];
    if is_made && part.symlink_metadata().is_ok_and(|found| found.is_dir()) {
        sources.push(node.part(&volume, &scene.sub_path, scene.container.as_ref()));
    }
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for (one, other) in &exchanged {
                    let _ = renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE);
                }
                thread::yield_now();
            }
        });
        for _ in 0..ROUNDS {
            sources.iter().for_each(|source| use_it(&node, source, &outside, empty));
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(outside.state(), before, "the host's files were written to");
    let mut text = Vec::new();
    File::open(&outside.things[1]).unwrap().read_to_end(&mut text).unwrap();
    assert_eq!(text, SECRET);
    for (one, other) in exchanged {
        // Now the directory can be removed without the target of a link.
        let _ = fs::remove_file(&other).or_else(|_| fs::remove_file(&one));
    }
    node.unbind();
}

#[test]
fn all_that_is_opened_is_in_the_pods_own_volumes() {
    apart(|| {
        let dir = tempfile::tempdir().unwrap();
        let root = Dir::host(dir.path()).unwrap();
        let disk = Disk { dir: &root, name: "empty".as_ref(), mark: None };
        let empty = disk.ensure(&Made::New { bytes: BYTES, purpose: Use::Kept }).unwrap();
        let config = ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() };
        proptest!(config, |(scene in scene())| play(&scene, &empty));
    });
}
