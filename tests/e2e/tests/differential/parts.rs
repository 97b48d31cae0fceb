//! Random images and containers.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use sandboxer_e2e::image::{Entry, Kind, LOOK};

use crate::tree::{Found, Node, Tree};

/// Layers of the highest image.
const LAYERS: usize = 4;

/// Share of images that are hostile. Of what these ask, much is impossible: entries below what is no directory, names for files that
/// are not there, mounts and volumes on what cannot carry them, users that do not exist. The others ask for what a runtime can do: where
/// both refuse an image there is little to compare.
const HOSTILE: f64 = 0.2;

/// Attempts to find an entry, or a place, that is possible.
const TRIES: usize = 30;

/// A part of an image, or of a container of it.
#[derive(Debug, Clone)]
pub enum Part {
    /// An entry of this layer.
    Entry(usize, Entry),
    /// A volume in the image's configuration, like the two that follow.
    Volume(String),
    User(String),
    Directory(String),
    /// A directory of the host, or a file, at this path.
    Mount {
        path: String,
        file: bool,
        read_only: bool,
    },
    /// The container cannot write to its root.
    ReadOnly,
    /// The container's user.
    RunAs(i64),
}

/// An image, and what is asked of a container of it.
#[derive(Debug)]
pub struct Image {
    /// What it is made of.
    pub parts: Vec<Part>,
    /// Whether it may ask for what is impossible.
    pub is_hostile: bool,
}

const NAMES: [&str; 9] = ["a", "b", "c", "etc", "data", "with space", "ünïcode", "-dash", ".hidden"];
const USERS: [&str; 8] = ["0", "1000", "user", "user:extra", "1000:50001", "4000:4000", "65534", "user:user"];
const OWNERS: [u64; 6] = [0, 0, 1000, 65534, 100_000, 4_294_967_294];
const MODES: [u32; 9] = [0o644, 0o755, 0o600, 0o4755, 0o2755, 0o6711, 0o1777, 0o000, 0o111];
const SIZES: [usize; 7] = [0, 1, 4095, 4096, 4097, 70_000, 300_000];

/// Returns what every image has.
pub fn base() -> Vec<Entry> {
    let file = |path: &str, content: &[u8], mode| Entry::new(path, Kind::File(content.to_vec()), mode);
    let dir = |path: &str, mode| Entry::new(path, Kind::Dir, mode);
    vec![
        dir("proc", 0o555),
        dir("sys", 0o555),
        dir("dev", 0o755),
        dir("etc", 0o755),
        dir("tmp", 0o1777),
        file("look", LOOK, 0o755),
        file("etc/passwd", b"root:x:0:0::/root:/look\nuser:x:1000:1000::/tmp:/look\n", 0o644),
        file("etc/group", b"root:x:0:\nuser:x:1000:\nextra:x:50001:user\n", 0o644),
    ]
}

fn pick<T: Clone + Default>(rng: &mut StdRng, all: &[T]) -> T {
    all.choose(rng).cloned().unwrap_or_default()
}

/// Returns a random image and container.
pub fn random(rng: &mut StdRng) -> Image {
    let is_hostile = rng.random_bool(HOSTILE);
    let mut tree = Tree::default();
    base().iter().for_each(|entry| tree.put(entry));
    let mut paths = vec!["tmp".to_owned()];
    let mut parts = Vec::new();
    for layer in 0..rng.random_range(1..=LAYERS) {
        tree.begin_layer();
        for _ in 0..rng.random_range(1..12) {
            let found = (0..TRIES)
                .map(|_| entry(rng, &tree, &paths, is_hostile))
                .find(|entry| is_fit(&tree, entry) && (is_hostile || tree.takes(entry)));
            let Some(entry) = found else { break };
            tree.put(&entry);
            paths.push(entry.path.clone());
            parts.push(Part::Entry(layer, entry));
        }
    }
    container(rng, &tree, &paths, is_hostile, &mut parts);
    Image { parts, is_hostile }
}

/// Returns whether an entry leaves the test what it needs, and is the only one of its path in its layer.
fn is_fit(tree: &Tree, entry: &Entry) -> bool {
    entry.path != "etc" && entry.path.len() <= 80 && !tree.has_new(&entry.path)
}

/// Returns a random entry of the next layer.
fn entry(rng: &mut StdRng, tree: &Tree, paths: &[String], is_hostile: bool) -> Entry {
    let kernels = |dir: &String| matches!(dir.as_str(), "proc" | "sys" | "dev");
    let path = if rng.random_bool(0.25) {
        pick(rng, paths)
    } else {
        let name = NAMES.choose(rng).copied().unwrap_or("a");
        let mut dirs = tree.dirs();
        dirs.retain(|dir| !kernels(dir));
        match rng.random_bool(0.6) {
            true => format!("{}/{name}", pick(rng, &dirs)),
            false => name.to_owned(),
        }
    };
    let files = tree.new_files();
    let kind = match rng.random_range(0..20) {
        0..=4 => Kind::Dir,
        5..=9 => {
            let size = pick(rng, &SIZES);
            Kind::File(vec![if rng.random_bool(0.3) { 0 } else { b'x' }; size])
        }
        10..=13 => Kind::Symlink(target(rng, paths)),
        14 | 15 if is_hostile && rng.random_bool(0.2) => Kind::Link(pick(rng, paths)),
        14 | 15 if !files.is_empty() => Kind::Link(pick(rng, &files)),
        14..=16 => Kind::Fifo,
        17 => match rng.random_bool(0.5) {
            true => Kind::Char(1, 3),
            false => Kind::Block(7, 200),
        },
        18 => Kind::Whiteout,
        _ => Kind::Opaque,
    };
    let mut entry = Entry::new(&path, kind, pick(rng, &MODES));
    entry.owner = (pick(rng, &OWNERS), pick(rng, &OWNERS));
    let takes_attributes = matches!(entry.kind, Kind::File(_) | Kind::Dir);
    if takes_attributes && rng.random_bool(0.15) {
        // cap_net_bind_service, effective and permitted, as setcap(8) writes it.
        let value = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
        if matches!(entry.kind, Kind::File(_)) {
            entry.attributes.push(("security.capability", value));
        }
        entry.attributes.push(("user.note", b"of a user\0".to_vec()));
    }
    entry
}

/// Returns what a symbolic link says.
fn target(rng: &mut StdRng, paths: &[String]) -> String {
    let path = pick(rng, paths);
    match rng.random_range(0..8) {
        0 => format!("/{path}"),
        1 => path,
        2 => format!("../{path}"),
        3 => "../../../../../../etc".to_owned(),
        4 => "/not/there".to_owned(),
        5 => "not-there".to_owned(),
        6 => "/proc/self/root".to_owned(),
        _ => "a".to_owned(),
    }
}

/// What is put at a place.
#[derive(Clone, Copy, PartialEq)]
enum Use {
    Volume,
    Directory,
    Mount { file: bool, read_only: bool },
}

impl Use {
    /// Returns whether a runtime can put it where a path leads to.
    fn fits(self, found: &Found) -> bool {
        let is_dir = matches!(found.node, None | Some(Node::Dir { .. })) && !found.path.is_empty();
        let is_etc = found.path == "etc" || found.path.starts_with("etc/");
        match self {
            Self::Volume => is_dir,
            // Its user may be anyone.
            Self::Directory => is_dir && !found.closed,
            Self::Mount { file: true, .. } => !matches!(found.node, Some(Node::Dir { .. })),
            // The pod's own files are put into /etc.
            Self::Mount { read_only, .. } => is_dir && !(read_only && is_etc),
        }
    }
}

/// Adds what is asked of a container of the image.
fn container(rng: &mut StdRng, tree: &Tree, paths: &[String], is_hostile: bool, parts: &mut Vec<Part>) {
    let place = |rng: &mut StdRng, what: Use| {
        let is_possible = |path: &String| tree.resolve(path).is_some_and(|found| what.fits(&found));
        (0..TRIES)
            .map(|_| any_place(rng, tree, paths, what))
            .find(|path| is_hostile || is_possible(path))
            .unwrap_or_else(|| "/not/there/yet".to_owned())
    };
    if rng.random_bool(0.3) {
        parts.push(Part::Volume(place(rng, Use::Volume)));
    }
    if rng.random_bool(0.3) {
        parts.push(Part::Directory(place(rng, Use::Directory)));
    }
    if rng.random_bool(0.4) {
        let is_nobody = is_hostile && rng.random_bool(0.1);
        let user = if is_nobody { "nobody-here" } else { USERS.choose(rng).copied().unwrap_or("0") };
        parts.push(Part::User(user.to_owned()));
    }
    if rng.random_bool(0.1) {
        parts.push(Part::RunAs(pick(rng, &[0, 1000, 4242])));
    }
    if rng.random_bool(0.15) {
        parts.push(Part::ReadOnly);
    }
    if rng.random_bool(0.4) {
        let (file, read_only) = (rng.random_bool(0.4), rng.random_bool(0.4));
        parts.push(Part::Mount { path: place(rng, Use::Mount { file, read_only }), file, read_only });
    }
}

/// Returns a path at which something is put, possible or not.
fn any_place(rng: &mut StdRng, tree: &Tree, paths: &[String], what: Use) -> String {
    let is_file = matches!(what, Use::Mount { file: true, .. });
    let mut there = if is_file { tree.files() } else { tree.dirs() };
    // The program that looks.
    there.retain(|path| path != "look");
    match rng.random_range(0..20) {
        0..=5 => format!("/{}", pick(rng, &there)),
        6..=11 => format!("/{}/new", pick(rng, &tree.dirs())),
        12 | 13 => "/not/there/yet".to_owned(),
        // Also what a later layer has hidden or replaced, and what links lead to.
        14..=16 => format!("/{}", pick(rng, paths)),
        17 | 18 => format!("/{}/new", pick(rng, paths)),
        _ => format!("/{}", NAMES.choose(rng).copied().unwrap_or("a")),
    }
}

/// Returns a part as a line.
pub fn shown(part: &Part) -> String {
    match part {
        Part::Entry(layer, Entry { path, kind, mode, owner: (user, group), attributes }) => {
            let kind = match kind {
                Kind::File(content) => format!("File of {} bytes", content.len()),
                kind => format!("{kind:?}"),
            };
            let names = attributes.iter().map(|(name, _)| format!(" {name}")).collect::<String>();
            format!("layer {}: {path:?} {kind} {mode:o} {user}:{group}{names}", layer + 1)
        }
        other => format!("{other:?}"),
    }
}
