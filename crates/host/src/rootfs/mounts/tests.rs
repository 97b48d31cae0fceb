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
    let chain =
        Chain { dirs: vec!["/s/2/fs".into(), "/s/1/f:s".into()], options: vec!["redirect_dir=off".into()] };
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

    let whole = |path: &str| Wanted { lower: vec![], writable: WantedWritable::Whole { path: path.into() } };
    assert_eq!(read(&[mount("ext4", "/b/1", &["loop", "rw"])]), Ok(whole("/b/1")));
    assert_eq!(read(&[mount("ext4", "/dev/mapper/pool-snap-7", &[])]), Ok(whole("/dev/mapper/pool-snap-7")));
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
        (vec![mount("bind", "relative", &["rbind"])], "not an absolute path"),
        (vec![mount("bind", "/s/../etc", &["rbind"])], "not an absolute path"),
        (vec![mount("bind", "/s", &["uidmap=0:1:2"])], "hostUsers"),
        (vec![over(&["lowerdir=/a::/b"])], "not an absolute path"),
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
