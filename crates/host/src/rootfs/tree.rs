//! Walks the source tree of an image.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use super::BuildError;

/// Most nested directories. The walk keeps one open for each, with a buffer of 32 KiB.
const MAX_DEPTH: usize = 256;
/// Most bytes of the paths of [ghosts](Tree::ghosts): each becomes an argument of mkfs.erofs, and the
/// kernel's limit for arguments is 2 MiB.
const MAX_GHOST_BYTES: usize = 1 << 20;

/// Properties of a tree, needed before an image is created.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// Bytes with data in regular files.
    pub data: u64,
    /// Bytes of holes in regular files.
    pub holes: u64,
    /// Whiteouts of files that no lower layer has: overlayfs lists them, but they cannot be opened.
    pub ghosts: Vec<PathBuf>,
}

impl Tree {
    /// Walks the tree below `root`. Its resources are limited by [`MAX_DEPTH`], not by the number of entries,
    /// which the author of the image has chosen.
    pub fn of(root: &Path) -> Result<Self, BuildError> {
        let mut tree = Self::default();
        let mut ghost_bytes = 0;
        let open = |path: &Path| fs::read_dir(path).map_err(|error| unreadable(path, error));
        let mut dir = root.to_owned();
        let mut walk = vec![open(root)?];
        while let Some(entries) = walk.last_mut() {
            let Some(entry) = entries.next() else {
                walk.pop();
                dir.pop();
                continue;
            };
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
                let file = entry.metadata().map_err(|error| unreadable(&dir, error))?;
                let data = file.len().min(file.blocks().saturating_mul(512));
                tree.data = tree.data.saturating_add(data);
                tree.holes = tree.holes.saturating_add(file.len() - data);
            }
        }
        Ok(tree)
    }
}

fn unreadable(path: &Path, source: io::Error) -> BuildError {
    BuildError::Path { action: "read", path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_tree_is_counted_in_all_its_directories() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["a/b/c/one", "a/two", "d/three", "four"] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, [7; 5000]).unwrap();
        }
        File::create(dir.path().join("a/hole")).unwrap().set_len(1 << 30).unwrap();
        let tree = Tree::of(dir.path()).unwrap();
        assert_eq!((tree.data, tree.holes), (4 * 5000, 1 << 30));
        assert!(tree.ghosts.is_empty());
    }

    #[test]
    fn directories_that_lie_too_deep_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let deepest = |depth: usize| dir.path().join(["d"; MAX_DEPTH + 1][..depth].join("/"));
        fs::create_dir_all(deepest(MAX_DEPTH - 1)).unwrap();
        assert!(Tree::of(dir.path()).is_ok());
        fs::create_dir_all(deepest(MAX_DEPTH)).unwrap();
        let text = Tree::of(dir.path()).unwrap_err().to_string();
        assert!(text.contains("/d/d/d") && text.contains("256"), "{text}");
    }
}
