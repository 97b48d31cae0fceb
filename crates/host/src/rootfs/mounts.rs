//! Reads the mounts of a snapshot: which disks they ask for. Touches no file.
//!
//! The last mount is the root file system; those before it are what its templates refer to
//! (`{{ mount 0 }}`, `{{ overlay 1 3 }}`), in the way containerd's mount manager has them.

use std::path::{Component, Path, PathBuf};

use super::{FsType, Mount};

/// Prefixes that containerd's mount manager takes off: fill templates in, make directories.
const TRANSFORMS: [&str; 2] = ["format/", "mkdir/"];
/// Options of an overlay without effect on what is read through it.
const WITHOUT_EFFECT: [&str; 12] = [
    "ro",
    "rw",
    "index",
    "volatile",
    "nfs_export",
    "uuid",
    "xino",
    "fsync",
    "noatime",
    "relatime",
    "nodiratime",
    "workdir",
];
/// Options of an overlay that say how its layers are to be read.
const OF_THE_VIEW: [&str; 2] = ["redirect_dir", "metacopy"];

/// Disks that a snapshot asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Read-only layers, uppermost first.
    pub lower: Vec<Lower>,
    /// Where what is written goes.
    pub writable: WantedWritable,
}

/// A read-only layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lower {
    /// A file system image or device, used as it is.
    Image {
        /// File or device.
        path: PathBuf,
        /// What is on it.
        fstype: FsType,
    },
    /// Committed layers, which no longer change: their merged view becomes one image, for all to share.
    Chain(Chain),
    /// A snapshot's own directory, above its parents, with overlay's whiteouts in it; mostly empty.
    Upper(PathBuf),
    /// A directory that is a whole root file system, for this container alone.
    Directory(PathBuf),
}

/// Layers that overlayfs merges.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Chain {
    /// Uppermost first; at least one.
    pub dirs: Vec<PathBuf>,
    /// Mount options that change what is seen.
    pub options: Vec<String>,
}

/// Where what is written goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WantedWritable {
    /// Into guest memory.
    Memory,
    /// Onto a file with an ext4 file system, to be made with so many bytes if it isn't there.
    Scratch {
        /// The file.
        path: PathBuf,
        /// Its size.
        size: u64,
    },
    /// Into the disk that is the whole root file system.
    Whole {
        /// File or device.
        path: PathBuf,
    },
}

/// A mount that can't become a disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("mount {index} of type {fstype:?} {reason}")]
pub struct Refusal {
    /// Which of the mounts, from 0.
    pub index: usize,
    /// Its type.
    pub fstype: String,
    /// Why, and what to do.
    pub reason: String,
}

/// What a template can refer to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Input {
    Image { path: PathBuf, fstype: FsType },
    Scratch { path: PathBuf, size: u64 },
}

/// Reads a snapshot's mounts.
pub fn read(mounts: &[Mount]) -> Result<Wanted, Refusal> {
    let Some((root, before)) = mounts.split_last() else {
        return Err(Refusal {
            index: 0,
            fstype: String::new(),
            reason: "is missing: containerd passed no mounts, so there is no snapshot to boot from".into(),
        });
    };
    let mut inputs = Inputs { all: Vec::new(), used: vec![false; before.len()] };
    for (index, mount) in before.iter().enumerate() {
        inputs.all.push(input(mount).map_err(|reason| refusal(index, mount, reason))?);
    }
    let wanted = read_root(root, &mut inputs).map_err(|reason| refusal(before.len(), root, reason))?;
    match inputs.used.iter().position(|used| !used) {
        Some(index) => Err(refusal(index, &before[index], "is referred to by no other mount".into())),
        None => Ok(wanted),
    }
}

fn refusal(index: usize, mount: &Mount, reason: String) -> Refusal {
    Refusal { index, fstype: mount.fstype.clone(), reason }
}

fn unsupported() -> String {
    "is not supported: use one of the snapshotters overlayfs, native, erofs, blockfile, devmapper (with ext4)"
        .into()
}

/// Returns a mount before the last.
fn input(mount: &Mount) -> Result<Input, String> {
    match mount.fstype.as_str() {
        "erofs" | "ext4" => image(mount).map(|(path, fstype)| Input::Image { path, fstype }),
        "mkfs/ext4" => scratch(mount),
        _ => Err(unsupported()),
    }
}

fn read_root(mount: &Mount, inputs: &mut Inputs) -> Result<Wanted, String> {
    let memory = WantedWritable::Memory;
    match plain_type(&mount.fstype) {
        "overlay" => overlay(mount, inputs),
        "bind" => {
            refuse_id_maps(mount)?;
            let lower = match inputs.images(&mount.source)? {
                Some(images) => images,
                None => vec![Lower::Directory(absolute(&mount.source)?)],
            };
            Ok(Wanted { lower, writable: memory })
        }
        "erofs" | "ext4" => {
            let (path, fstype) = image(mount)?;
            if fstype == FsType::Erofs || mount.options.iter().any(|option| option == "ro") {
                Ok(Wanted { lower: vec![Lower::Image { path, fstype }], writable: memory })
            } else {
                Ok(Wanted { lower: Vec::new(), writable: WantedWritable::Whole { path } })
            }
        }
        _ => Err(unsupported()),
    }
}

fn plain_type(mut fstype: &str) -> &str {
    while let Some(rest) = TRANSFORMS.iter().find_map(|prefix| fstype.strip_prefix(prefix)) {
        fstype = rest;
    }
    fstype
}

fn overlay(mount: &Mount, inputs: &mut Inputs) -> Result<Wanted, String> {
    refuse_id_maps(mount)?;
    let (mut lower, mut upper, mut writable) = (None, None, WantedWritable::Memory);
    let mut view = Vec::new();
    for option in &mount.options {
        let (key, value) = option.split_once('=').unwrap_or((option, ""));
        match key {
            "lowerdir" => lower = Some(value),
            "upperdir" => match inputs.scratch(value)? {
                Some(scratch) => writable = scratch,
                None => upper = Some(Lower::Upper(absolute(&unescaped(value))?)),
            },
            _ if OF_THE_VIEW.contains(&key) => view.push(option.clone()),
            _ if WITHOUT_EFFECT.contains(&key) || key.starts_with("X-containerd.mkdir.") => {}
            _ => return Err(format!("has option {option:?}, which is not supported: leave it out")),
        }
    }
    let lower = lower.ok_or("has no lowerdir: there is nothing to boot from")?;
    let mut layers = Vec::from_iter(upper);
    match inputs.images(lower)? {
        Some(images) => layers.extend(images),
        None => {
            let dirs = split_unescaped(lower).iter().map(|dir| absolute(dir)).collect::<Result<_, _>>()?;
            layers.push(Lower::Chain(Chain { dirs, options: view }));
        }
    }
    Ok(Wanted { lower: layers, writable })
}

fn refuse_id_maps(mount: &Mount) -> Result<(), String> {
    match mount.options.iter().any(|option| option.starts_with("uidmap=") || option.starts_with("gidmap=")) {
        true => {
            Err("has mapped user ids, which are not supported: give the pod the host's (hostUsers: true); \
                     its VM keeps it apart already"
                .into())
        }
        false => Ok(()),
    }
}

/// Returns an image and what is on it.
fn image(mount: &Mount) -> Result<(PathBuf, FsType), String> {
    for option in &mount.options {
        if option.starts_with("device=") {
            return Err("has its data in other files (device=…), which is not supported: turn off merged \
                        metadata in the erofs snapshotter (max_unmerged_layers = 0)"
                .into());
        }
        if option.starts_with("X-containerd.dmverity") {
            return Err(
                "asks for dm-verity, which is not supported: turn it off in the erofs snapshotter".into()
            );
        }
    }
    let fstype = if mount.fstype == "erofs" { FsType::Erofs } else { FsType::Ext4 };
    Ok((absolute(&mount.source)?, fstype))
}

/// Returns a writable file that is made at its first use.
fn scratch(mount: &Mount) -> Result<Input, String> {
    let mut size = None;
    for option in &mount.options {
        match option.strip_prefix("X-containerd.mkfs.").and_then(|option| option.split_once('=')) {
            Some(("size", value)) => {
                size = Some(bytes(value).ok_or_else(|| format!("has no usable size {value:?}"))?);
            }
            Some(("fs", "ext4")) | None => {}
            Some((key, value)) => return Err(format!("asks for {key}={value}, which is not supported")),
        }
    }
    let size = size.ok_or("has no X-containerd.mkfs.size")?;
    Ok(Input::Scratch { path: absolute(&mount.source)?, size })
}

/// Returns a size as in `64MiB`, `1g` or `1048576`; units are powers of 1024.
fn bytes(text: &str) -> Option<u64> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().trim_end_matches('b').trim_end_matches('i') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|&size| size > 0)
}

fn absolute(path: &str) -> Result<PathBuf, String> {
    let plain = Path::new(path);
    let climbs = plain.components().any(|part| part == Component::ParentDir);
    if plain.is_absolute() && !climbs && !path.contains("{{") {
        Ok(plain.to_owned())
    } else {
        Err(format!("names {path:?}, which is no absolute path"))
    }
}

/// Returns the parts between colons; overlayfs lets a backslash stand before a colon that belongs to a path.
fn split_unescaped(list: &str) -> Vec<String> {
    let (mut parts, mut part, mut chars) = (Vec::new(), String::new(), list.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => part.extend(chars.next()),
            ':' => parts.push(std::mem::take(&mut part)),
            _ => part.push(c),
        }
    }
    parts.push(part);
    parts
}

fn unescaped(path: &str) -> String {
    split_unescaped(path).join(":")
}

/// The mounts before the last, and which of them have been referred to.
#[derive(Debug)]
struct Inputs {
    all: Vec<Input>,
    used: Vec<bool>,
}

impl Inputs {
    /// Returns the layers that a list of templates names; none if it holds no template.
    fn images(&mut self, list: &str) -> Result<Option<Vec<Lower>>, String> {
        if !list.contains("{{") {
            return Ok(None);
        }
        let mut layers = Vec::new();
        for part in list.split(':') {
            let (indices, rest) = template(part)?;
            if !rest.is_empty() {
                return Err(format!("names {part:?}: a directory inside of another mount is not supported"));
            }
            for index in indices {
                match self.get(index)? {
                    Input::Image { path, fstype } => layers.push(Lower::Image { path, fstype }),
                    Input::Scratch { .. } => {
                        return Err(format!("has mount {index} as a layer, which is writable"));
                    }
                }
            }
        }
        Ok(Some(layers))
    }

    /// Returns the writable file that a template names; none if there is no template.
    fn scratch(&mut self, path: &str) -> Result<Option<WantedWritable>, String> {
        if !path.contains("{{") {
            return Ok(None);
        }
        let (indices, rest) = template(path)?;
        match (&indices[..], rest) {
            ([index], "/upper") => match self.get(*index)? {
                Input::Scratch { path, size } => Ok(Some(WantedWritable::Scratch { path, size })),
                Input::Image { .. } => Err(format!("would write to mount {index}, which is read-only")),
            },
            _ => Err(format!("has {path:?} as its upper directory, which is not supported")),
        }
    }

    fn get(&mut self, index: usize) -> Result<Input, String> {
        let input = self.all.get(index).cloned();
        let input = input.ok_or_else(|| format!("refers to mount {index}, of {}", self.all.len()))?;
        self.used[index] = true;
        Ok(input)
    }
}

/// Returns the mounts that `{{ mount 2 }}` or `{{ overlay 1 3 }}` names, and what follows it.
fn template(text: &str) -> Result<(Vec<usize>, &str), String> {
    let bad = || format!("has template {text:?}, which is not supported");
    let (inner, rest) = text.strip_prefix("{{").and_then(|text| text.split_once("}}")).ok_or_else(bad)?;
    let words: Vec<&str> = inner.split_ascii_whitespace().collect();
    let number = |word: &str| word.parse::<usize>().ok().filter(|&number| number < 1024).ok_or_else(bad);
    let indices = match words[..] {
        ["mount", index] => vec![number(index)?],
        ["overlay", first, last] => match (number(first)?, number(last)?) {
            (first, last) if first <= last => (first..=last).collect(),
            (first, last) => (last..=first).rev().collect(),
        },
        _ => return Err(bad()),
    };
    Ok((indices, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mount(fstype: &str, source: &str, options: &[&str]) -> Mount {
        Mount {
            fstype: fstype.into(),
            source: source.into(),
            options: options.iter().map(|&option| option.into()).collect(),
        }
    }

    fn erofs(path: &str) -> Lower {
        Lower::Image { path: path.into(), fstype: FsType::Erofs }
    }

    #[test]
    fn an_overlay_is_its_own_directory_over_a_chain() {
        let wanted = read(&[mount(
            "overlay",
            "overlay",
            &[
                "index=off",
                "workdir=/s/3/work",
                "upperdir=/s/3/fs",
                "lowerdir=/s/2/fs:/s/1/f\\:s",
                "redirect_dir=off",
            ],
        )]);
        let chain = Chain {
            dirs: vec!["/s/2/fs".into(), "/s/1/f:s".into()],
            options: vec!["redirect_dir=off".into()],
        };
        let lower = vec![Lower::Upper("/s/3/fs".into()), Lower::Chain(chain)];
        assert_eq!(wanted, Ok(Wanted { lower, writable: WantedWritable::Memory }));
    }

    #[test]
    fn erofs_layers_stay_files_with_scratch_above() {
        let wanted = read(&[
            mount(
                "mkfs/ext4",
                "/s/4/rwlayer.img",
                &["X-containerd.mkfs.fs=ext4", "X-containerd.mkfs.size=64MiB", "loop"],
            ),
            mount("erofs", "/s/3/layer.erofs", &["ro", "loop"]),
            mount("erofs", "/s/2/layer.erofs", &["ro", "loop"]),
            mount(
                "format/mkdir/overlay",
                "overlay",
                &[
                    "X-containerd.mkdir.path={{ mount 0 }}/upper:0755",
                    "workdir={{ mount 0 }}/work",
                    "upperdir={{ mount 0 }}/upper",
                    "lowerdir={{ overlay 1 2 }}",
                ],
            ),
        ]);
        let writable = WantedWritable::Scratch { path: "/s/4/rwlayer.img".into(), size: 64 << 20 };
        let lower = vec![erofs("/s/3/layer.erofs"), erofs("/s/2/layer.erofs")];
        assert_eq!(wanted, Ok(Wanted { lower, writable }));
    }

    #[test]
    fn one_image_needs_no_overlay() {
        let layer = mount("erofs", "/l.erofs", &["ro", "loop"]);
        let bound = mount("format/bind", "{{ mount 0 }}", &["ro", "rbind"]);
        let wanted = Wanted { lower: vec![erofs("/l.erofs")], writable: WantedWritable::Memory };
        assert_eq!(read(&[layer.clone(), bound]), Ok(wanted.clone()));
        assert_eq!(read(&[layer]), Ok(wanted));

        let whole =
            |path: &str| Wanted { lower: vec![], writable: WantedWritable::Whole { path: path.into() } };
        assert_eq!(read(&[mount("ext4", "/b/1", &["loop", "rw"])]), Ok(whole("/b/1")));
        assert_eq!(
            read(&[mount("ext4", "/dev/mapper/pool-snap-7", &[])]),
            Ok(whole("/dev/mapper/pool-snap-7"))
        );
        let read_only = read(&[mount("ext4", "/b/1", &["loop", "ro"])]).unwrap();
        assert_eq!(read_only.lower, [Lower::Image { path: "/b/1".into(), fstype: FsType::Ext4 }]);
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let layer = || mount("erofs", "/l", &[]);
        let over = |options: &[&str]| mount("format/overlay", "overlay", options);
        for (mounts, says) in [
            (vec![], "no mounts"),
            (vec![mount("9p", "tag", &[])], "mount 0 of type \"9p\" is not supported: use one of"),
            (vec![mount("xfs", "/dev/mapper/x", &[])], "\"xfs\" is not supported"),
            (vec![mount("bind", "relative", &["rbind"])], "no absolute path"),
            (vec![mount("bind", "/s/../etc", &["rbind"])], "no absolute path"),
            (vec![mount("bind", "/s", &["uidmap=0:1:2"])], "hostUsers"),
            (vec![over(&["lowerdir=/a::/b"])], "no absolute path"),
            (vec![over(&["upperdir=/a"])], "no lowerdir"),
            (vec![over(&["lowerdir=/a:/b", "userxattr"])], "\"userxattr\""),
            (vec![layer(), over(&["lowerdir={{ mount 1 }}"])], "mount 1, of 1"),
            (vec![layer(), over(&["lowerdir={{ target 0 }}"])], "template"),
            (vec![layer(), over(&["lowerdir={{ mount 0 }}/x"])], "inside of another mount"),
            (vec![layer(), over(&["lowerdir={{ mount 0 }}", "upperdir={{ mount 0 }}/upper"])], "read-only"),
            (
                vec![layer(), layer(), over(&["lowerdir={{ mount 0 }}"])],
                "mount 1 of type \"erofs\" is referred to by no",
            ),
            (vec![mount("erofs", "/l", &["ro", "device=/other"])], "max_unmerged_layers"),
            (vec![mount("erofs", "/l", &["X-containerd.dmverity=/m"])], "dm-verity"),
            (vec![mount("mkfs/ext4", "/s", &[]), over(&["lowerdir={{ mount 0 }}"])], "mkfs.size"),
        ] {
            let text = read(&mounts).unwrap_err().to_string();
            assert!(text.contains(says), "{text}");
        }
    }

    #[test]
    fn sizes_have_units_of_1024() {
        assert_eq!(bytes("1048576"), Some(1 << 20));
        assert_eq!(bytes("64MiB"), Some(64 << 20));
        assert_eq!(bytes("1g"), Some(1 << 30));
        assert_eq!(bytes("2 KB"), Some(2 << 10));
        for bad in ["", "0", "-1", "1.5g", "99999999999t", "1x"] {
            assert_eq!(bytes(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_mount_list_panics_or_leaves_its_paths(
            mounts in proptest::collection::vec(
                (
                    "(format/)?(mkdir/)?(overlay|bind|erofs|ext4)|mkfs/ext4|.{0,8}",
                    "(/[a-z.:{]{0,6}){0,3}|\\{\\{ mount [0-9]{1,3} \\}\\}",
                    proptest::collection::vec(
                        "(lowerdir|upperdir|X-containerd\\.mkfs\\.size)=(/[a-z.\\\\:]{0,6}|\\{\\{ (overlay|mount) [0-9] ?[0-9]? \\}\\}|[0-9]{1,4}){0,3}|.{0,12}",
                        0..4,
                    ),
                ),
                0..4,
            )
        ) {
            let mounts: Vec<_> = mounts
                .into_iter()
                .map(|(fstype, source, options)| Mount { fstype, source, options })
                .collect();
            if let Ok(wanted) = read(&mounts) {
                for layer in wanted.lower {
                    let paths = match layer {
                        Lower::Image { path, .. } | Lower::Upper(path) | Lower::Directory(path) => vec![path],
                        Lower::Chain(chain) => chain.dirs,
                    };
                    prop_assert!(!paths.is_empty());
                    prop_assert!(paths.iter().all(|path| path.is_absolute()));
                }
            }
        }
    }
}
