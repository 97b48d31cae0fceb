//! What the layers of an image come to, as far as is needed to say what can be put where.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use sandboxer_e2e::image::{Entry, Kind};

/// Links that are followed before they count as a loop.
const LINKS: usize = 40;

/// What is at a path of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A directory; not everybody may enter one that is `closed`.
    Dir {
        closed: bool,
    },
    File,
    /// A symbolic link, with its target.
    Link(String),
    /// A device or a FIFO.
    Other,
}

/// What a path leads to, through all links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Without a slash in front; empty for the root.
    pub path: String,
    /// What is there; `None` if nothing is.
    pub node: Option<Node>,
    /// Whether the way leads through a directory that not everybody may enter.
    pub closed: bool,
}

/// The files of an image.
#[derive(Debug, Default)]
pub struct Tree {
    nodes: BTreeMap<String, Node>,
    /// Paths of the layer that is being made.
    new: BTreeSet<String>,
}

fn is_below(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
}

impl Tree {
    /// Begins the next layer.
    pub fn begin_layer(&mut self) {
        self.new.clear();
    }

    /// Returns whether the layer that is being made has an entry of this path.
    pub fn has_new(&self, path: &str) -> bool {
        self.new.contains(path)
    }

    /// Returns the paths that are directories.
    pub fn dirs(&self) -> Vec<String> {
        self.those(|node| matches!(node, Node::Dir { .. }))
    }

    /// Returns the paths that are files.
    pub fn files(&self) -> Vec<String> {
        self.those(|node| *node == Node::File)
    }

    /// Returns the files of the layer that is being made: layers are unpacked apart, so only these can get another name.
    pub fn new_files(&self) -> Vec<String> {
        self.files().into_iter().filter(|path| self.has_new(path)).collect()
    }

    fn those(&self, is_one: impl Fn(&Node) -> bool) -> Vec<String> {
        self.nodes.iter().filter(|(_, node)| is_one(node)).map(|(path, _)| path.clone()).collect()
    }

    /// Returns whether an entry can be unpacked as the next one of its layer.
    pub fn takes(&self, entry: &Entry) -> bool {
        let path = &entry.path;
        let is_dir = |path: &str| matches!(self.nodes.get(path), Some(Node::Dir { .. }));
        let is_in_dirs = path.match_indices('/').all(|(at, _)| is_dir(path.get(..at).unwrap_or_default()));
        // What a layer replaces of itself, containerd cannot give times afterwards.
        let replaces_new = || self.new.iter().any(|new| is_below(new, path));
        is_in_dirs
            && match &entry.kind {
                Kind::Opaque => is_dir(path),
                Kind::Dir => true,
                Kind::Link(to) if !self.has_new(to) || self.nodes.get(to) != Some(&Node::File) => false,
                _ => !replaces_new(),
            }
    }

    /// Puts an entry on top.
    pub fn put(&mut self, entry: &Entry) {
        let path = &entry.path;
        let node = match &entry.kind {
            Kind::Dir => Some(Node::Dir { closed: entry.mode & 0o111 != 0o111 }),
            Kind::File(_) | Kind::Link(_) => Some(Node::File),
            Kind::Symlink(to) => Some(Node::Link(to.clone())),
            Kind::Fifo | Kind::Char(..) | Kind::Block(..) => Some(Node::Other),
            Kind::Whiteout => None,
            Kind::Opaque => {
                let new = &self.new;
                let stays = |known: &String| new.iter().any(|new| new == known || is_below(new, known));
                self.nodes.retain(|known, _| !is_below(known, path) || stays(known));
                self.new.insert(path.clone());
                return;
            }
        };
        if entry.kind != Kind::Dir || !matches!(self.nodes.get(path), Some(Node::Dir { .. })) {
            self.nodes.retain(|known, _| known != path && !is_below(known, path));
        }
        if let Some(node) = node {
            self.nodes.insert(path.clone(), node);
        }
        self.new.insert(path.clone());
    }

    /// Returns what a path of a container leads to; nothing if it leads through a file, in a circle, or to what the container has
    /// of the kernel.
    pub fn resolve(&self, path: &str) -> Option<Found> {
        let split = |path: &str| path.split('/').map(str::to_owned).collect::<VecDeque<_>>();
        let (mut ahead, mut at, mut followed) = (split(path), Vec::new(), 0);
        let mut closed = false;
        let mut node = Some(Node::Dir { closed: false });
        while let Some(name) = ahead.pop_front() {
            match name.as_str() {
                "" | "." => continue,
                ".." => {
                    at.pop();
                }
                _ => at.push(name),
            }
            if matches!(at.first().map(String::as_str), Some("proc" | "sys" | "dev")) {
                return None;
            }
            node = match at.is_empty() {
                true => Some(Node::Dir { closed: false }),
                false => self.nodes.get(&at.join("/")).cloned(),
            };
            match &node {
                Some(Node::Link(to)) => {
                    followed += 1;
                    if followed > LINKS {
                        return None;
                    }
                    at.pop();
                    if to.starts_with('/') {
                        at.clear();
                    }
                    let mut further = split(to);
                    further.append(&mut ahead);
                    ahead = further;
                    // Where the link leads is found in the next rounds; to its own directory if it says nothing more.
                    node = Some(Node::Dir { closed: false });
                }
                Some(Node::Dir { closed: is_closed }) => closed |= is_closed,
                Some(Node::File | Node::Other) if ahead.iter().any(|name| !name.is_empty()) => return None,
                _ => {}
            }
        }
        Some(Found { path: at.join("/"), node, closed })
    }
}
