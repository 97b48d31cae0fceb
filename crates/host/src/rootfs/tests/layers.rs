//! Layers with files that are hard to preserve.

use std::{
    fs::{self, File, Permissions},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, PermissionsExt, chown, symlink},
    },
    path::PathBuf,
};

use nix::{
    sys::stat::{Mode, SFlag, makedev, mknod},
    unistd::mkfifo,
};

use super::{Fixture, seen::set_xattr};

/// Creates a base with files that are hard to preserve, and a layer that removes and replaces some of them.
pub fn awkward_layers(fixture: &Fixture) -> [PathBuf; 2] {
    let (base, top) = (fixture.layer("base", "base"), fixture.layer("top", "top"));
    let any = Mode::from_bits_truncate(0o644);
    fs::set_permissions(&base, Permissions::from_mode(0o751)).unwrap();

    for (name, content) in
        [("plain", "x"), ("line\nbreak", "y"), ("caf\u{e9} \\ \"", "z"), ("sub/gone", ""), ("old/a", "a")]
    {
        fs::create_dir_all(base.join(name).parent().unwrap()).unwrap();
        fs::write(base.join(name), content).unwrap();
    }
    fs::write(base.join(std::ffi::OsStr::from_bytes(b"not \xff utf-8")), "u").unwrap();
    let large: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    fs::write(base.join("large"), large).unwrap();
    File::create(base.join("holes")).unwrap().write_at(b"end", 9_000_000).unwrap();
    fs::hard_link(base.join("plain"), base.join("sub/second name")).unwrap();
    chown(base.join("plain"), Some(70_000), Some(4_000_000_000)).unwrap();
    fs::write(base.join("setuid"), "s").unwrap();
    fs::set_permissions(base.join("setuid"), Permissions::from_mode(0o6755)).unwrap();
    fs::set_permissions(base.join("sub"), Permissions::from_mode(0o1777)).unwrap();
    symlink("../\u{2192}", base.join("link")).unwrap();
    symlink("x".repeat(4000), base.join("long link")).unwrap();
    mkfifo(&base.join("fifo"), any).unwrap();
    mknod(&base.join("null"), SFlag::S_IFCHR, any, makedev(1, 3)).unwrap();
    mknod(&base.join("disk"), SFlag::S_IFBLK, any, makedev(259, 70_000)).unwrap();
    // CAP_NET_BIND_SERVICE, as set by `setcap`; an access list, as set by `setfacl -m u:1000:r`.
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    set_xattr(&base.join("large"), "security.capability", &capability);
    let entries: [(u16, u16, u32); 5] = [(1, 6, !0), (2, 4, 1000), (4, 4, !0), (16, 4, !0), (32, 4, !0)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        list.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        list.extend(id.to_le_bytes());
    }
    set_xattr(&base.join("holes"), "system.posix_acl_access", &list);
    for name in ["plain", "sub", "setuid", "large"] {
        set_xattr(&base.join(name), "user.shared", b"the same on many");
        set_xattr(&base.join(name), "user.own", name.as_bytes());
    }

    fs::create_dir(top.join("sub")).unwrap();
    mknod(&top.join("sub/gone"), SFlag::S_IFCHR, any, 0).unwrap();
    fs::create_dir(top.join("old")).unwrap();
    set_xattr(&top.join("old"), "trusted.overlay.opaque", b"y");
    fs::write(top.join("old/b"), "b").unwrap();
    [top, base]
}
