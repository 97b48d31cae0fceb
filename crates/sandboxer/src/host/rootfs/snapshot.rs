//! What containerd's mounts come to: directories to make an image of, or images to plug in.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use sandboxer_protocol::id::ContainerId;

use super::{FsType, Mount, RootfsError};

/// A snapshot, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Snapshot {
    /// Directories, uppermost first.
    Directories {
        /// Their paths.
        dirs: Vec<PathBuf>,
        /// They belong to this container alone, so an image of them serves nobody else.
        private: bool,
    },
    /// EROFS images, uppermost first, and where writes go.
    Images {
        /// Their paths.
        layers: Vec<PathBuf>,
        /// An ext4 image for what is written; none: guest memory.
        upper: Option<PathBuf>,
    },
    /// One ext4 image or device that is everything.
    Whole(PathBuf),
}

/// Understands `mounts`; whatever can't be a disk is refused by name.
pub fn understand(container: &ContainerId, mounts: &[Mount]) -> Result<Snapshot, RootfsError> {
    let unsupported = |reason: String| RootfsError::Unsupported { container: container.clone(), reason };
    match mounts {
        [] => Err(unsupported("it has no root file system".to_owned())),
        [mount] => match mount.fstype.as_str() {
            "bind" => Ok(Snapshot::Directories { dirs: vec![mount.source.clone().into()], private: true }),
            "overlay" => overlay(mount).map_err(|error| unsupported(error.to_string())),
            "ext4" => Ok(Snapshot::Whole(mount.source.clone().into())),
            "erofs" => Ok(Snapshot::Images { layers: vec![mount.source.clone().into()], upper: None }),
            other => Err(unsupported(refusal(other))),
        },
        [layers @ .., top] if top.fstype.rsplit('/').next() == Some("overlay") => {
            stacked(container, layers, top)
        }
        [.., top] => Err(unsupported(refusal(&top.fstype))),
    }
}

fn refusal(fstype: &str) -> String {
    format!(
        "a root file system of type {fstype:?} can't become a disk: \
         use the overlayfs, native, erofs, blockfile or devmapper snapshotter"
    )
}

/// An overlay of directories. One that has been written to has its own upper directory on top.
fn overlay(mount: &Mount) -> io::Result<Snapshot> {
    let option = |name: &str| mount.options.iter().find_map(|option| option.strip_prefix(name));
    let lower = option("lowerdir=").ok_or_else(|| io::Error::other("an overlay without lowerdir"))?;
    let mut dirs: Vec<PathBuf> = split_escaped(lower).into_iter().map(PathBuf::from).collect();
    let mut private = false;
    if let Some(upper) = option("upperdir=")
        && fs::read_dir(upper).is_ok_and(|mut entries| entries.next().is_some())
    {
        dirs.insert(0, upper.into());
        private = true;
    }
    Ok(Snapshot::Directories { dirs, private })
}

/// Splits at colons that no backslash precedes.
fn split_escaped(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match (character, parts.last_mut()) {
            (':', _) => parts.push(String::new()),
            ('\\', Some(part)) => part.extend(characters.next()),
            (other, Some(part)) => part.push(other),
            (_, None) => {}
        }
    }
    parts
}

/// What the erofs snapshotter hands out: images, then an overlay that names them by position.
fn stacked(container: &ContainerId, layers: &[Mount], top: &Mount) -> Result<Snapshot, RootfsError> {
    let unsupported = |reason: String| RootfsError::Unsupported { container: container.clone(), reason };
    let option = |name: &str| top.options.iter().find_map(|option| option.strip_prefix(name));
    let lower = option("lowerdir=").ok_or_else(|| unsupported("an overlay without lowerdir".to_owned()))?;
    let mut order = Vec::new();
    for part in lower.split(':') {
        order.extend(positions(part).ok_or_else(|| {
            unsupported(format!(
                "its overlay's layer {part:?} is neither {{{{ mount N }}}} nor {{{{ overlay N M }}}}"
            ))
        })?);
    }
    let mut images = Vec::with_capacity(order.len());
    for position in order {
        match layers.get(position) {
            Some(mount) if mount.fstype == "erofs" => images.push(PathBuf::from(&mount.source)),
            Some(mount) => return Err(unsupported(refusal(&mount.fstype))),
            None => {
                return Err(unsupported(format!(
                    "its overlay names mount {position}, there are {}",
                    layers.len()
                )));
            }
        }
    }
    let upper = match option("upperdir=").and_then(|upper| positions(upper.split_inclusive("}}").next()?)) {
        Some(position) => match position.first().and_then(|&position| layers.get(position)) {
            Some(mount) if mount.fstype.rsplit('/').next() == Some("ext4") => {
                Some(writable(container, mount)?)
            }
            _ => return Err(unsupported("its overlay's upperdir is on no ext4 image".to_owned())),
        },
        None => None,
    };
    Ok(Snapshot::Images { layers: images, upper })
}

/// `{{ mount 2 }}` is 2; `{{ overlay 0 2 }}` is 0, 1, 2, or downwards.
fn positions(template: &str) -> Option<Vec<usize>> {
    let words: Vec<&str> =
        template.strip_prefix("{{")?.strip_suffix("}}")?.split_ascii_whitespace().collect();
    match words[..] {
        ["mount", position] => Some(vec![position.parse().ok()?]),
        ["overlay", from, to] => {
            let (from, to): (usize, usize) = (from.parse().ok()?, to.parse().ok()?);
            Some(if from <= to { (from..=to).collect() } else { (to..=from).rev().collect() })
        }
        _ => None,
    }
}

/// The image of a writable layer, which containerd has made already.
fn writable(container: &ContainerId, mount: &Mount) -> Result<PathBuf, RootfsError> {
    let path = PathBuf::from(&mount.source);
    if path.exists() {
        return Ok(path);
    }
    Err(RootfsError::Unsupported {
        container: container.clone(),
        reason: format!("its writable image {path:?} isn't there, and making one is not offered yet"),
    })
}

/// Refuses an image that is not what its mount says, before a guest stumbles over it.
pub fn check_image(container: &ContainerId, path: &Path, fstype: FsType) -> Result<(), RootfsError> {
    use std::os::unix::fs::FileExt;
    // Superblock magic: little-endian, at these offsets. EROFS: 1024. ext4: 1024 + 0x38.
    let (offset, magic): (u64, &[u8]) = match fstype {
        FsType::Erofs => (1024, &[0xe2, 0xe1, 0xf5, 0xe0]),
        FsType::Ext4 => (1080, &[0x53, 0xef]),
    };
    let mut found = vec![0; magic.len()];
    let file = fs::File::open(path).map_err(|source| RootfsError::Host {
        action: "open image",
        path: path.to_owned(),
        source,
    })?;
    let damaged = |reason: String| RootfsError::Damaged {
        container: container.clone(),
        path: path.to_owned(),
        fstype,
        reason,
    };
    file.read_exact_at(&mut found, offset).map_err(|error| damaged(error.to_string()))?;
    if found != magic {
        return Err(damaged("its superblock has another magic number".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(fstype: &str, source: &str, options: &[&str]) -> Mount {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        Mount { fstype: fstype.into(), source: source.into(), options }
    }

    fn understood(mounts: &[Mount]) -> Result<Snapshot, RootfsError> {
        understand(&"c1".parse().unwrap(), mounts)
    }

    #[test]
    fn every_snapshotters_mounts_are_understood() {
        let dir = tempfile::tempdir().unwrap();
        let upper = format!("upperdir={}", dir.path().display());
        let chain = understood(&[mount("overlay", "overlay", &["index=off", "lowerdir=/b\\:1:/a", &upper])]);
        let dirs = vec!["/b:1".into(), "/a".into()];
        assert_eq!(chain.unwrap(), Snapshot::Directories { dirs, private: false });
        fs::write(dir.path().join("written"), "").unwrap();
        let written = understood(&[mount("overlay", "overlay", &["lowerdir=/a", &upper])]).unwrap();
        let dirs = vec![dir.path().to_owned(), "/a".into()];
        assert_eq!(written, Snapshot::Directories { dirs, private: true });

        let layers = [
            mount("erofs", "/1/layer.erofs", &["ro", "loop"]),
            mount("erofs", "/0/layer.erofs", &["ro", "loop"]),
            mount("format/mkdir/overlay", "overlay", &["lowerdir={{ overlay 0 1 }}", "upperdir=/u"]),
        ];
        let images = vec!["/1/layer.erofs".into(), "/0/layer.erofs".into()];
        assert_eq!(understood(&layers).unwrap(), Snapshot::Images { layers: images, upper: None });
        let block = understood(&[mount("ext4", "/dev/mapper/x", &[])]).unwrap();
        assert_eq!(block, Snapshot::Whole("/dev/mapper/x".into()));
    }

    #[test]
    fn what_can_not_be_a_disk_is_refused_by_name() {
        for mounts in [
            vec![],
            vec![mount("9p", "share", &[])],
            vec![mount("erofs", "/e", &[]), mount("overlay", "overlay", &["lowerdir={{ mount 7 }}"])],
            vec![mount("xfs", "/e", &[]), mount("overlay", "overlay", &["lowerdir={{ mount 0 }}"])],
            vec![mount("erofs", "/e", &[]), mount("overlay", "overlay", &["lowerdir=/host/path"])],
        ] {
            let error = understood(&mounts).unwrap_err();
            assert!(error.to_string().contains("c1"), "{mounts:?}: {error}");
        }
        assert!(understood(&[mount("9p", "share", &[])]).unwrap_err().to_string().contains("9p"));
    }

    #[test]
    fn a_truncated_or_foreign_image_is_named_before_a_guest_sees_it() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("layer.erofs");
        for content in [vec![], vec![0; 1026], vec![7; 4096]] {
            fs::write(&image, content).unwrap();
            let error = check_image(&"c1".parse().unwrap(), &image, FsType::Erofs).unwrap_err();
            assert!(error.to_string().contains("layer.erofs"), "{error}");
        }
    }
}
