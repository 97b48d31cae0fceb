//! Walks the source tree of an image.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{fs::lgetxattr, io::Errno};

use super::BuildError;

/// The most nested directories. The walk keeps each of them open, with a buffer of 32 KiB.
const MAX_DEPTH: usize = 256;
/// Most bytes of the paths of [ghosts](Tree::ghosts): each becomes an argument of mkfs.erofs, and the kernel limits
/// arguments to 2 MiB.
const MAX_GHOST_BYTES: usize = 1 << 20;
/// The most hard-linked files that are counted once, 16 bytes each. Beyond that, each name counts.
const MAX_LINKED: usize = 1 << 20;
/// Overlay's marks in a layer that change what is visible below it, and that an image without `trusted.*` attributes
/// loses.
const MARKS: [&str; 3] = ["trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.overlay.metacopy"];

/// Properties of a tree, needed before an image is created.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// Bytes with data in regular files.
    pub data: u64,
    /// Bytes of holes in regular files.
    pub holes: u64,
    /// Whiteouts without a lower file: overlayfs lists them, but they cannot be opened.
    pub ghosts: Vec<PathBuf>,
}

impl Tree {
    /// Walks the tree below `root`, within `limit`. Its resources are bounded by [`MAX_DEPTH`] and [`MAX_LINKED`], not
    /// by the number of entries, which the image's author chooses. If the tree `is_above` other layers, overlay's marks
    /// are refused.
    pub fn walk(root: &Path, is_above: bool, limit: Duration) -> Result<Self, BuildError> {
        let mut tree = Self::default();
        let mut ghost_bytes = 0;
        let mut linked = HashSet::new();
        let started = Instant::now();
        let open = |path: &Path| {
            if is_above {
                refuse_marks(path)?;
            }
            fs::read_dir(path).map_err(|error| unreadable(path, error))
        };
        let mut dir = root.to_owned();
        let mut walk = vec![open(root)?];
        while let Some(entries) = walk.last_mut() {
            let Some(entry) = entries.next() else {
                walk.pop();
                dir.pop();
                continue;
            };
            if started.elapsed() > limit {
                return Err(BuildError::TooMany { path: dir, limit });
            }
            let entry = entry.map_err(|error| unreadable(&dir, error))?;
            let kind = entry.file_type().map_err(|error| unreadable(&dir, error))?;
            if kind.is_dir() {
                dir.push(entry.file_name());
                if walk.len() >= MAX_DEPTH {
                    return Err(BuildError::TooDeep { path: dir, most: MAX_DEPTH });
                }
                walk.push(open(&dir)?);
            } else if kind.is_char_device() {
                let path = entry.path();
                if matches!(path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound) {
                    let ghost = path.strip_prefix(root).unwrap_or(&path);
                    ghost_bytes += ghost.as_os_str().len();
                    if ghost_bytes > MAX_GHOST_BYTES {
                        return Err(BuildError::TooManyGhosts { path, most: MAX_GHOST_BYTES });
                    }
                    tree.ghosts.push(ghost.to_owned());
                }
            } else if kind.is_file() {
                if is_above {
                    refuse_marks(&entry.path())?;
                }
                let file = entry.metadata().map_err(|error| unreadable(&dir, error))?;
                if file.nlink() > 1 {
                    let id = (file.dev(), file.ino());
                    if linked.contains(&id) {
                        continue;
                    }
                    if linked.len() < MAX_LINKED {
                        linked.insert(id);
                    }
                }
                let data = file.len().min(file.blocks().saturating_mul(512));
                tree.data = tree.data.saturating_add(data);
                tree.holes = tree.holes.saturating_add(file.len() - data);
            }
        }
        Ok(tree)
    }
}

/// Refuses a file with one of [`MARKS`].
fn refuse_marks(path: &Path) -> Result<(), BuildError> {
    for mark in MARKS {
        match lgetxattr(path, mark, &mut [0; 0]) {
            Err(Errno::NODATA | Errno::NOTSUP) => {}
            Err(error) => return Err(unreadable(path, error.into())),
            Ok(_) => return Err(BuildError::Marked { path: path.to_owned(), mark }),
        }
    }
    Ok(())
}

fn unreadable(path: &Path, source: io::Error) -> BuildError {
    BuildError::Path { action: "read", path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn walk(root: &Path) -> Result<Tree, BuildError> {
        Tree::walk(root, false, Duration::from_secs(60))
    }

    /// Git's image has about 140 names for one program.
    #[test]
    fn a_file_of_many_names_is_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("git"), [7; 5000]).unwrap();
        fs::write(dir.path().join("other"), [7; 5000]).unwrap();
        for name in 0..300 {
            fs::hard_link(dir.path().join("git"), dir.path().join(format!("git-{name}"))).unwrap();
        }
        assert_eq!(walk(dir.path()).unwrap().data, 2 * 5000);
    }

    #[test]
    fn a_walk_has_a_time_limit() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), "").unwrap();
        let text = Tree::walk(dir.path(), false, Duration::ZERO).unwrap_err().to_string();
        assert!(text.contains("0ns") && text.contains(dir.path().to_str().unwrap()), "{text}");
    }

    #[test]
    fn a_tree_is_counted_in_all_its_directories() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["a/b/c/one", "a/two", "d/three", "four"] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, [7; 5000]).unwrap();
        }
        File::create(dir.path().join("a/hole")).unwrap().set_len(1 << 30).unwrap();
        let tree = walk(dir.path()).unwrap();
        assert_eq!((tree.data, tree.holes), (4 * 5000, 1 << 30));
        assert!(tree.ghosts.is_empty());
    }

    #[test]
    fn directories_that_lie_too_deep_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let deepest = |depth: usize| dir.path().join(["d"; MAX_DEPTH + 1][..depth].join("/"));
        fs::create_dir_all(deepest(MAX_DEPTH - 1)).unwrap();
        assert!(walk(dir.path()).is_ok());
        fs::create_dir_all(deepest(MAX_DEPTH)).unwrap();
        let text = walk(dir.path()).unwrap_err().to_string();
        assert!(text.contains("/d/d/d") && text.contains("256"), "{text}");
    }
}
