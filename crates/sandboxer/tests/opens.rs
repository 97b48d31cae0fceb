//! Nothing that a pod can write to is opened by its path: not by what looks at volumes, not by what serves them, not by the VMMs'
//! drivers. They go through `crates/host/src/beneath.rs`, or use a descriptor that they were given. This reads their source.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Files, and directories with all their files, below `crates`.
const GUARDED: [&str; 23] = [
    "host/src/volume",
    "host/src/helper/message.rs",
    "host/src/helper/work.rs",
    "host/src/rootfs/ext4.rs",
    "host/src/rootfs/superblock.rs",
    "sandboxer/src/pod/container/devices.rs",
    "sandboxer/src/pod/container/mounts.rs",
    "sandboxer/src/pod/resolve.rs",
    "sandboxer/src/pod/spare.rs",
    "sandboxer/src/pod/volumes.rs",
    "sandboxer/src/share",
    "share/src/attach.rs",
    "vmm/src/cloud_hypervisor",
    "vmm/src/cloud_hypervisor.rs",
    "vmm/src/firecracker",
    "vmm/src/firecracker.rs",
    "vmm/src/frozen.rs",
    "vmm/src/jailed",
    "vmm/src/jailed.rs",
    "vmm/src/mounted_disk.rs",
    "vmm/src/permit.rs",
    "vmm/src/qemu",
    "vmm/src/qemu.rs",
];

/// What takes a path and looks at, opens, makes or removes what is there.
const BY_PATH: [&str; 36] = [
    "File::create",
    "File::open",
    "File::options",
    "OpenOptions::",
    "fs::canonicalize(",
    "fs::chown(",
    "fs::copy(",
    "fs::create_dir",
    "fs::hard_link(",
    "fs::metadata(",
    "fs::open(",
    "fs::read",
    "fs::remove_",
    "fs::rename(",
    "fs::set_permissions(",
    "fs::stat(",
    "fs::symlink_metadata(",
    "fs::write(",
    ".exists()",
    ".is_dir()",
    ".is_file()",
    ".read_dir()",
    ".symlink_metadata()",
    ".try_exists()",
    "add_watch(",
    "getxattr(path",
    "linkat(",
    "mkfifo(",
    "move_mount(",
    "open_tree(",
    "openat(",
    "openat2(",
    "setxattr(path",
    "statfs(dir",
    "symlink(",
    "umount2(",
];

/// What is right all the same: the file, a part of the line, and why.
const RIGHT: [(&str, &str, &str); 46] = [
    ("host/src/helper/work.rs", "dir.read_dir()", "a snapshotter's layer, where no pod writes"),
    ("host/src/helper/work.rs", "add_watch(&instance, beneath::itself(dir)", "an open directory"),
    ("host/src/volume/host.rs", "/proc/thread-self/mountinfo", "the kernel's"),
    ("host/src/volume/mod.rs", "create_dir_all(dir)", "the daemon's own state"),
    ("sandboxer/src/pod/container/devices.rs", "fs::metadata(device.path())", "looked at below /dev only"),
    ("sandboxer/src/pod/container/devices.rs", "/sys/dev/block/", "the kernel's"),
    (
        "sandboxer/src/pod/container/devices.rs",
        "fs::metadata(&path)",
        "a name in /dev by the kernel, not opened",
    ),
    ("sandboxer/src/share/mod.rs", "run_dir.join(server::ROOT)", "the VM's own directory"),
    ("sandboxer/src/share/server.rs", "fs::create_dir(&root)", "the VM's own directory"),
    ("sandboxer/src/share/server.rs", "self.run_dir.join(RECORD)", "the VM's own directory"),
    ("sandboxer/src/share/server.rs", "run_dir.join(RECORD)", "the VM's own directory"),
    ("sandboxer/src/share/server.rs", "fs::write(&new", "the VM's own directory"),
    ("sandboxer/src/share/server.rs", "beside.filter", "the daemon's own program"),
    ("share/src/attach.rs", "kind.is_dir()", "of an open file"),
    ("share/src/attach.rs", "open_tree(found", "an open file"),
    ("share/src/attach.rs", "open_tree(rustix::fs::CWD, ROOT", "the server's own root"),
    ("share/src/attach.rs", "openat(&root, name", "the server's own root"),
    ("share/src/attach.rs", "move_mount(tree", "onto the server's own root"),
    (
        "vmm/src/cloud_hypervisor/checkpoint.rs",
        "O_DIRECTORY | libc::O_NOFOLLOW",
        "a checkpoint's own directory",
    ),
    ("vmm/src/cloud_hypervisor/checkpoint.rs", "create_new(true)", "a checkpoint's own file"),
    (
        "vmm/src/cloud_hypervisor/checkpoint.rs",
        "fs::remove_dir_all(written)",
        "a checkpoint's own directory, which is root's again",
    ),
    ("vmm/src/cloud_hypervisor/checkpoint.rs", "openat(dir, name", "in an open directory, through no link"),
    ("vmm/src/cloud_hypervisor/checkpoint.rs", "file.metadata()?.is_file()", "an open file"),
    ("vmm/src/cloud_hypervisor/events.rs", "run_dir.join(FILE)", "the VM's own directory"),
    ("vmm/src/cloud_hypervisor/opened.rs", "/proc/{pid}/fd", "the kernel's"),
    (
        "vmm/src/cloud_hypervisor/opened.rs",
        "fs::metadata(fd.path())",
        "an open file of the VMM's, not opened",
    ),
    (
        "vmm/src/cloud_hypervisor/opened.rs",
        "custom_flags(libc::O_NONBLOCK)",
        "an open file of the VMM's, if it is a regular one",
    ),
    ("vmm/src/cloud_hypervisor/opened.rs", "meta.is_file()", "an open file"),
    ("vmm/src/firecracker.rs", "let both =", "an open pipe"),
    ("vmm/src/firecracker/template.rs", "open(memory)", "a template's own file"),
    ("vmm/src/frozen.rs", "/proc/self/fd/", "an open file"),
    ("vmm/src/frozen.rs", "create_new(true)", "a template's own file"),
    ("vmm/src/jailed.rs", "File::open(TUN)", "a device of the host by a fixed name"),
    ("vmm/src/jailed.rs", "fs::metadata(run_dir)", "the VM's own directory"),
    ("vmm/src/jailed/vm.rs", "create_new(true)", "a template's own file"),
    ("vmm/src/permit.rs", "xattr(path, ATTRIBUTE", "in a jail, in a directory of root's"),
    ("vmm/src/qemu/vhost.rs", "Path::new(DEVICE)", "a device of the host by a fixed name"),
    ("vmm/src/qemu/vhost.rs", "/proc/{pid}/cmdline", "the kernel's"),
    (
        "vmm/src/qemu/vm.rs",
        "custom_flags(libc::O_NONBLOCK)",
        "an open file of the VMM's, if it is a regular one",
    ),
    ("vmm/src/qemu/vm.rs", "file.metadata()?.is_file()", "an open file"),
    ("vmm/src/qemu/vm.rs", "run_dir", "the VM's own directory"),
    ("vmm/src/qemu/vm.rs", "&memory", "a template's own file"),
    ("vmm/src/qemu/vm.rs", "create_new(true)", "a template's own file"),
    ("vmm/src/mounted_disk.rs", "open_tree(file", "an open file"),
    ("vmm/src/mounted_disk.rs", "path", "in a jail, in a directory of root's"),
    ("vmm/src/mounted_disk.rs", "fs::read_dir(dir)", "in a jail, a directory of root's"),
];

fn sources(at: &Path, found: &mut Vec<PathBuf>) {
    if at.is_file() {
        return found.push(at.to_owned());
    }
    for entry in fs::read_dir(at).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" || name.ends_with(".rs") && name != "tests.rs" {
            sources(&path, found);
        }
    }
}

/// Returns the lines of code before the tests that a file ends with.
fn code(text: &str) -> impl Iterator<Item = &str> {
    let tests = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    let lines = text[..tests].lines().map(str::trim);
    lines.filter(|line| !line.starts_with("//") && !line.starts_with("use "))
}

#[test]
fn what_a_pod_can_write_to_is_opened_in_one_module_only() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    GUARDED.iter().for_each(|guarded| sources(&crates.join(guarded), &mut files));
    let (mut wrong, mut used) = (Vec::new(), [false; RIGHT.len()]);
    for file in files {
        let name = file.strip_prefix(crates).unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&file).unwrap();
        for line in code(&text).filter(|line| BY_PATH.iter().any(|by_path| line.contains(by_path))) {
            match RIGHT.iter().position(|(path, part, _)| *path == name && line.contains(part)) {
                Some(at) => used[at] = true,
                None => wrong.push(format!("{name}: {line}")),
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "opened by path: use beneath.rs or a descriptor, or say in this test why it is right\n{}",
        wrong.join("\n")
    );
    let unused: Vec<_> = RIGHT.iter().zip(used).filter(|(_, used)| !used).map(|(right, _)| right).collect();
    assert!(unused.is_empty(), "not there any more: {unused:?}");
}

#[test]
fn a_disk_has_no_path_to_open() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let spec = fs::read_to_string(crates.join("vmm/src/spec.rs")).unwrap();
    let disk = spec.split("pub struct DiskSpec {").nth(1).unwrap().split('}').next().unwrap();
    assert!(!disk.contains("Path"), "{disk}");
}
