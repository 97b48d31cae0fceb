//! The files that the guest's kernel knows, by their node numbers.
//!
//! A node records where its file was last found: a name in a directory, which is a node as well. No descriptor is open
//! for a node. So the host can unmount, remove and free any file that no process of the pod has open, and the limit of
//! descriptors applies to open files, not to known ones.
//!
//! A few directories are the exception, always of the same mount: see [`Nodes::keep`].

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::{CStr, CString},
    os::fd::OwnedFd,
    sync::Arc,
};

use rustix::io::Errno;
use sandboxer_share::wire::Result;

use super::place::Identity;

/// The node of the directory of shares.
pub const ROOT: u64 = 1;

/// The most directories that are kept open.
pub const MAX_CACHED_DIRS: usize = 64;

/// The longest path in one system call, bytes; the system's limit is 4096.
const PATH: usize = 3840;
/// The most directories above a file. A host that moves directories around may seem to create a cycle.
const DEPTH: usize = 4096;

/// The table of nodes.
pub struct Nodes {
    by_number: BTreeMap<u64, Node>,
    by_identity: BTreeMap<Identity, u64>,
    next: u64,
    most: usize,
    /// The number from which the search for a node to forget continues.
    hand: u64,
    root: Arc<OwnedFd>,
    /// The directories that are kept open. The most recently used one is the last.
    cached_dirs: VecDeque<(u64, Arc<OwnedFd>)>,
}

struct Node {
    identity: Identity,
    parent: u64,
    name: Box<CStr>,
    /// The number of look-ups that the guest's kernel has not forgotten.
    lookups: u64,
    /// The number of nodes that were found in it.
    children: u32,
    /// Whether the node is on the mount that was attached as its share, not on one below.
    is_attached: bool,
    /// Whether the node was used since the hand passed it.
    used: bool,
}

/// The way to a file: paths, one after another, from an open directory.
#[derive(Debug)]
pub struct Way {
    pub from: Arc<OwnedFd>,
    pub paths: Vec<CString>,
    /// The identity that the file at the end must have.
    pub identity: Identity,
    /// Whether the file is on a mount that stays as long as the server.
    pub is_attached: bool,
}

impl Nodes {
    /// Creates a table of up to `most` files below the directory `root`.
    pub fn below(root: OwnedFd, most: usize) -> Self {
        Self {
            by_number: BTreeMap::new(),
            by_identity: BTreeMap::new(),
            next: ROOT + 1,
            most,
            hand: 0,
            root: Arc::new(root),
            cached_dirs: VecDeque::new(),
        }
    }

    /// Returns the open root.
    pub fn root(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.root)
    }

    /// Returns whether the file has a node.
    pub fn knows(&self, identity: Identity) -> bool {
        self.by_identity.contains_key(&identity)
    }

    /// Records that the guest's kernel is given the file that was found as `name` in `parent`; returns the file's
    /// number. `is_attached` counts for a share itself; below it, the mount decides. `is_open` returns whether a node
    /// is open, so that it must not be forgotten to make room.
    ///
    /// # Errors
    ///
    /// `ESTALE`: `parent` is unknown. `ENFILE`: there is no room.
    pub fn give(
        &mut self,
        parent: u64,
        name: &CStr,
        identity: Identity,
        is_attached: bool,
        is_open: impl Fn(u64) -> bool,
    ) -> Result<u64> {
        let above = self.by_number.get(&parent);
        if parent != ROOT && above.is_none() {
            return Err(Errno::STALE);
        }
        if let Some(&number) = self.by_identity.get(&identity) {
            self.place(number, parent, name);
            if let Some(node) = self.by_number.get_mut(&number) {
                node.lookups = node.lookups.saturating_add(1);
                node.used = true;
            }
            return Ok(number);
        }
        let is_attached = match above {
            None => is_attached,
            Some(above) => above.is_attached && above.identity.mount == identity.mount,
        };
        // The parent must not be forgotten to make room for its child.
        self.count_child(parent, 1);
        if self.by_number.len() >= self.most && !self.forget_one(is_open) {
            self.count_child(parent, -1);
            return Err(Errno::NFILE);
        }
        let number = self.next;
        self.next += 1;
        self.by_identity.insert(identity, number);
        let name = name.into();
        let node = Node { identity, parent, name, lookups: 1, children: 0, is_attached, used: true };
        self.by_number.insert(number, node);
        Ok(number)
    }

    /// Records the new place of a file, if it is known.
    pub fn moved(&mut self, identity: Identity, parent: u64, name: &CStr) {
        if let Some(&number) = self.by_identity.get(&identity) {
            self.place(number, parent, name);
        }
    }

    fn place(&mut self, number: u64, parent: u64, name: &CStr) {
        if number == parent || parent != ROOT && !self.by_number.contains_key(&parent) {
            return;
        }
        let Some(node) = self.by_number.get_mut(&number) else { return };
        if *node.name != *name {
            node.name = name.into();
        }
        let before = std::mem::replace(&mut node.parent, parent);
        if before != parent {
            self.count_child(parent, 1);
            self.count_child(before, -1);
        }
    }

    fn count_child(&mut self, number: u64, change: i32) {
        if let Some(node) = self.by_number.get_mut(&number) {
            node.children = node.children.saturating_add_signed(change);
            if node.children == 0 && node.lookups == 0 {
                self.remove(number);
            }
        }
    }

    /// Records that the guest's kernel has forgotten `count` look-ups of a file.
    pub fn forget(&mut self, number: u64, count: u64) {
        if let Some(node) = self.by_number.get_mut(&number) {
            node.lookups = node.lookups.saturating_sub(count);
            if node.lookups == 0 && node.children == 0 {
                self.remove(number);
            }
        }
    }

    /// Forgets all files.
    pub fn clear(&mut self) {
        self.by_number.clear();
        self.by_identity.clear();
        self.cached_dirs.clear();
    }

    /// Removes a node, and the directories above it that were needed only for it.
    fn remove(&mut self, number: u64) {
        let mut number = number;
        while let Some(node) = self.by_number.remove(&number) {
            self.by_identity.remove(&node.identity);
            self.cached_dirs.retain(|(cached, _)| *cached != number);
            number = node.parent;
            let Some(above) = self.by_number.get_mut(&number) else { return };
            above.children = above.children.saturating_sub(1);
            if above.children > 0 || above.lookups > 0 {
                return;
            }
        }
    }

    /// Forgets a file that was not used recently, although the guest's kernel has not forgotten it: the kernel gets the
    /// error that the file is stale, and looks it up again. Returns whether there was one.
    fn forget_one(&mut self, is_open: impl Fn(u64) -> bool) -> bool {
        for _ in 0..2 * self.by_number.len() {
            let next = self.by_number.range_mut(self.hand..).next();
            let Some((&number, node)) = next else {
                self.hand = 0;
                continue;
            };
            self.hand = number + 1;
            if !std::mem::take(&mut node.used) && node.children == 0 && !is_open(number) {
                self.remove(number);
                return true;
            }
        }
        false
    }

    /// Returns the way to a file.
    ///
    /// # Errors
    ///
    /// `ESTALE`: the guest's kernel was not given the file, or it was forgotten.
    pub fn way(&mut self, number: u64) -> Result<Way> {
        let node = self.by_number.get_mut(&number).filter(|node| node.lookups > 0).ok_or(Errno::STALE)?;
        node.used = true;
        let (identity, is_attached) = (node.identity, node.is_attached);
        let (mut names, mut at) = (Vec::new(), number);
        let cached = loop {
            if at == ROOT {
                break None;
            }
            // The most recent directories are the most likely.
            if let Some(place) = self.cached_dirs.iter().rposition(|(cached, _)| *cached == at) {
                break Some(place);
            }
            let node = self.by_number.get(&at).ok_or(Errno::STALE)?;
            names.push(&*node.name);
            if names.len() > DEPTH {
                return Err(Errno::STALE);
            }
            at = node.parent;
        };
        let (mut paths, mut path) = (Vec::new(), Vec::new());
        for name in names.iter().rev().map(|name| name.to_bytes()) {
            if path.len() + name.len() > PATH {
                paths.push(std::mem::take(&mut path));
            }
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(name);
        }
        paths.push(path);
        let paths = paths.into_iter().filter(|path| !path.is_empty());
        let paths = paths.map(|path| CString::new(path).map_err(|_| Errno::INVAL)).collect::<Result<_>>()?;
        let from = match cached.and_then(|place| self.cached_dirs.remove(place)) {
            Some(directory) => {
                self.cached_dirs.push_back(directory.clone());
                directory.1
            }
            None => self.root(),
        };
        Ok(Way { from, paths, identity, is_attached })
    }

    /// Keeps a used directory open, in place of the least recently used one: it is found again without a path, even if
    /// the host has renamed it meanwhile.
    ///
    /// Only directories on the mount that was attached as a share are kept, since that mount stays as long as the
    /// server. A mount below must not be in use, so that the host can unmount it. No regular file is kept, so that its
    /// space becomes free when the host removes it.
    pub fn keep(&mut self, number: u64, directory: &Arc<OwnedFd>) {
        let may_be = self.by_number.get(&number).is_some_and(|node| node.is_attached);
        if may_be && self.cached_dirs.iter().all(|(cached, _)| *cached != number) {
            if self.cached_dirs.len() >= MAX_CACHED_DIRS {
                self.cached_dirs.pop_front();
            }
            self.cached_dirs.push_back((number, Arc::clone(directory)));
        }
    }
}
